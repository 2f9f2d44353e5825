"""What each way of quantizing costs in quality: bits a weight, perplexity, KL divergence from the
original and agreement of the likeliest token, on held-out text.

    python -m bench.compression --tokens 20480

The default model's weights already lie on a grid of 4 bits and groups of 32, so methods are
compared on its dequantized weights, with groups and bits that do not coincide with it. Calibration
text and held-out text are different parts of Python's documentation as the standard library carries
it. Weights are dequantized to float32; activations are rounded as when served.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench import parts
from tidemill.compress.decoder import Decoder
from tidemill.compress.methods import method_class
from tidemill.compress.quality import compare, hidden_states, layer_of
from tidemill.compress.source import Source
from tidemill.compress.stored import from_state
from tidemill.compress.walk import walk
from tidemill.compress.work import Work
from tidemill.frontend.tokenizer import Tokenizer

LENGTH = 512
W8A8 = {"bits": 8, "weights": "channel"}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "RTN 4 bits, groups of 128": ("rtn", {"bits": 4, "group": 128, "symmetric": False}),
    "AWQ 4 bits, groups of 128": ("awq", {"bits": 4, "group": 128}),
    "GPTQ 4 bits, groups of 128": ("gptq", {"bits": 4, "group": 128, "symmetric": False}),
    "RTN 4 bits, groups of 64": ("rtn", {"bits": 4, "group": 64, "symmetric": False}),
    "AWQ 4 bits, groups of 64": ("awq", {"bits": 4, "group": 64}),
    "GPTQ 4 bits, groups of 64": ("gptq", {"bits": 4, "group": 64, "symmetric": False}),
    "NF4, blocks of 64": ("nf4", {}),
    "W8A8 per tensor": ("rtn", W8A8 | {"activations": "tensor", "static": True}),
    "W8A8 per token": ("rtn", W8A8 | {"activations": "token"}),
    "SmoothQuant W8A8 per tensor": ("smoothquant", {}),
    "LLM.int8()": ("llm-int8", {}),
    "fp8 per channel and token": ("fp8", {}),
    "RTN 3 bits per channel": ("rtn", {"bits": 3, "weights": "channel", "symmetric": False}),
    "RTN 3 bits, groups of 128": ("rtn", {"bits": 3, "group": 128, "symmetric": False}),
    "GOBO 3 bits": ("gobo", {"bits": 3}),
    "ZeroQuant W4A8 without distillation": ("zeroquant", {"steps": 0}),
    "ZeroQuant W4A8": ("zeroquant", {}),
    "Ternary, without training": ("ternary", {"weights": "channel"}),
    "Ternary, layers trained": ("ternary", {"weights": "channel", "steps": 64}),
}
# (better, worse) in perplexity
EXPECTED = [
    ("GPTQ 4 bits, groups of 128", "RTN 4 bits, groups of 128"),
    ("AWQ 4 bits, groups of 128", "RTN 4 bits, groups of 128"),
    ("GPTQ 4 bits, groups of 64", "RTN 4 bits, groups of 64"),
    ("AWQ 4 bits, groups of 64", "RTN 4 bits, groups of 64"),
    ("SmoothQuant W8A8 per tensor", "W8A8 per tensor"),
    ("LLM.int8()", "W8A8 per tensor"),
    ("W8A8 per token", "W8A8 per tensor"),
    ("fp8 per channel and token", "W8A8 per tensor"),
    ("GOBO 3 bits", "RTN 3 bits per channel"),
    ("GOBO 3 bits", "RTN 3 bits, groups of 128"),
    ("ZeroQuant W4A8", "ZeroQuant W4A8 without distillation"),
    ("Ternary, layers trained", "Ternary, without training"),
]


def texts(
    path: Path, num_calibration: int, num_held_out: int, length: int = LENGTH
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens from the begin of the text, and from its end, in sequences."""
    topics = pydoc_data.topics.topics
    ids = Tokenizer.load(path).encode("\n\n".join(topics[name] for name in sorted(topics)))
    num_calibration, num_held_out = (
        num_calibration // length * length,
        num_held_out // length * length,
    )
    if len(ids) < num_calibration + num_held_out:
        raise SystemExit(f"The text has {len(ids)} tokens.")
    return torch.tensor(ids[:num_calibration]).view(-1, length), torch.tensor(
        ids[-num_held_out:]
    ).view(-1, length)


def measure(
    decoder: Decoder,
    name: str,
    calibration: torch.Tensor,
    held_out: torch.Tensor,
    truth: torch.Tensor,
    folder: Path,
) -> dict[str, Any]:
    kind, options = RUNS[name]
    method = method_class(kind)(options)
    work = Work(folder / "out", {"name": name})
    begin = time.perf_counter()
    walk(
        decoder,
        work,
        method,
        calibration if method.needs_text else None,
        needs_truth=method.needs_truth,
    )
    seconds = time.perf_counter() - begin
    matrices = [
        one
        for number in range(decoder.num_layers)
        for one in from_state(work.tensors(number))[0].values()
    ]
    num_values = sum(one.dequantize().numel() for one in matrices)
    quality = compare(decoder, held_out, hidden_states(decoder, held_out, layer_of(work)), truth)
    shutil.rmtree(work.folder)
    return {
        "bits": 8 * sum(one.num_bytes for one in matrices) / num_values, "ppl": quality.perplexity, "kl": quality.mean_kl,
        "top1": quality.top1, "seconds": seconds, "tokens": quality.count,
    }  # fmt: skip


def table(found: parts.Found) -> str:
    lines = ["| | bits a weight | PPL | mean KL | top-1 | s |", "|---|---|---|---|---|---|"]
    for name, one in found.items():
        cells = f"{one['bits']:.2f} | {one['ppl']:.3f} | {one['kl']:.4f} | {one['top1']:.1%} | {one['seconds']:.0f}"
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def verdicts(found: parts.Found) -> list[str]:
    return [
        f"{'yes' if found[better]['ppl'] < found[worse]['ppl'] else 'NO '}: {better} ({found[better]['ppl']:.3f}) "
        f"< {worse} ({found[worse]['ppl']:.3f})"
        for better, worse in EXPECTED
        if better in found and worse in found
    ]


def report(found: parts.Found) -> None:
    print(table(found))
    print("\n".join(verdicts(found)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=20480, help="held out")
    parser.add_argument("--calibration-tokens", type=int, default=16384)
    parser.add_argument(
        "--length",
        type=int,
        default=LENGTH,
        help="of a sequence; bench.small has learned 128 tokens",
    )
    parser.add_argument("--device", default="cpu")
    parts.add_options(parser)
    given = parser.parse_args()
    if given.merge:
        report(parts.merged(given, RUNS))
        return
    torch.manual_seed(0)
    decoder = Decoder(Source.open(given.model), given.device)
    calibration, held_out = texts(
        decoder.source.path, given.calibration_tokens, given.tokens, given.length
    )
    found = parts.read(given)
    truth = hidden_states(decoder, held_out)
    if "original" not in found:
        quality = compare(decoder, held_out, truth)
        found["original"] = {
            "bits": 32.0, "ppl": quality.perplexity, "kl": 0.0, "top1": 1.0, "seconds": 0.0, "tokens": quality.count
        }  # fmt: skip
    print(f"original: {found['original']['ppl']:.3f}", flush=True)
    for name in parts.chosen(RUNS, given):
        if name in found:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found[name] = measure(decoder, name, calibration, held_out, truth, Path(folder))
        print(name, json.dumps(found[name]), flush=True)
        parts.keep(given, found)
    report(found)


if __name__ == "__main__":
    main()
