"""What pruning, low rank, distillation and fewer KV heads cost in quality.

    python -m bench.small small --steps 1000            a small model of bytes, trained here
    python -m bench.pruning --model small               all rows
    python -m bench.pruning --only sparsegpt            rows of the default model whose name contains this

Calibration and training text is the begin of Python's documentation as the standard library carries
it, held-out text its end. What is compared is written to folders, read back, and computed in
float32 as in bench.compression, many sequences at once (--device cuda: minutes). Drafts are
accepted by the engine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench import parts
from tidemill import LLM, SamplingParams
from tidemill.compress.calibration import Calibration
from tidemill.compress.decoder import Decoder
from tidemill.compress.distill import DistillOptions, distill
from tidemill.compress.evaluate import WINDOW, default_text
from tidemill.compress.gqa import ConvertOptions, convert
from tidemill.compress.prune import PruneOptions, prune
from tidemill.compress.quality import compare, hidden_states
from tidemill.compress.source import Source
from tidemill.compress.student import Learning
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.types.events import DraftsVerified

HELD_OUT_SHARE = 0.14  # of the text's characters, at its end
DRAFTS, PROMPTS, ANSWER = 4, 8, 48
HALF = {"sparsity": 0.5}
# (better, worse) in perplexity
EXPECTED = [
    ("sparsegpt 50 %", "wanda 50 %"), ("wanda 50 %", "magnitude 50 %"),
    ("sparsegpt 2:4", "wanda 2:4"), ("wanda 2:4", "magnitude 2:4"),
    ("sparsegpt 4x4 blocks 25 %", "magnitude 4x4 blocks 25 %"),
    ("sparsegpt neurons 25 %", "magnitude neurons 25 %"),
    ("asvd, 75 % of the bytes", "svd, 75 % of the bytes"),
    ("distilled, soft labels", "distilled, hard labels"), ("distilled, TED", "distilled, hard labels"),
    ("KV heads pooled and trained", "KV heads pooled"),
]  # fmt: skip


class Bench:
    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given, self.folder = given, folder
        self.text = folder / "text.txt"
        whole = default_text()
        self.text.write_text(whole[: int(len(whole) * (1 - HELD_OUT_SHARE))])
        self.decoder = Decoder(Source.open(given.model), given.device)
        ids = Tokenizer.load(self.decoder.source.path).encode(
            whole[int(len(whole) * (1 - HELD_OUT_SHARE)) :], add_special=False
        )
        num = min(given.tokens, len(ids)) // WINDOW * WINDOW
        self.ids_BL = torch.tensor(ids[len(ids) - num :]).view(-1, WINDOW)
        self.truth = hidden_states(self.decoder, self.ids_BL)
        self.config = self.decoder.source.model_config
        self.num_layers = self.config.num_layers

    def load(self, model: str, **more: Any) -> LLM:
        given: dict[str, Any] = {"max_context": min(1024, self.config.max_context)}
        # beside others
        given |= {"dtype": "float32"} if self.given.device == "cpu" else {"kv_memory_bytes": 2**30}
        return LLM(
            model,
            progress=False,
            threads=self.given.threads,
            device=self.given.device,
            max_requests=8,
            **given,
            **more,
        )

    def calibration(self, num_tokens: int, length: int) -> Calibration:
        return Calibration(data=self.text, num_tokens=num_tokens, length=length)

    def pruned(self, **how: Any) -> Callable[[Path], Any]:
        calibration, device = (
            self.calibration(self.given.calibration_tokens, self.given.length),
            self.given.device,
        )
        given = {"out_dtype": "float32", "calibration": calibration, "device": device} | how
        return lambda out: prune(PruneOptions(model=self.given.model, out=out, **given))

    def student(self, loss: str, steps: int) -> Callable[[Path], Any]:
        how = Learning(loss=loss, steps=steps, batch=self.given.batch, rate=self.given.rate)
        return lambda out: distill(
            DistillOptions(
                model=self.given.model, out=out, layers=max(1, self.num_layers // 3), learning=how, out_dtype="float32",
                calibration=self.calibration(self.given.training_tokens, self.given.length), device=self.given.device,
            )
        )  # fmt: skip

    def grouped(self, steps: int) -> Callable[[Path], Any]:
        how = Learning(steps=steps, batch=self.given.batch, rate=self.given.rate)
        return lambda out: convert(
            ConvertOptions(
                model=self.given.model, out=out, num_kv_heads=_fewer(self.config.num_kv_heads), learning=how,
                calibration=self.calibration(self.given.training_tokens, self.given.length), out_dtype="float32",
                device=self.given.device,
            )
        )  # fmt: skip

    def rows(self) -> dict[str, Callable[[Path], Any]]:
        steps = self.given.steps
        # Transformers wants a hidden size that they divide
        heads = 1 / 3 if self.config.num_kv_heads % 3 == 0 else 1 / 2
        made: dict[str, Callable[[Path], Any]] = {}
        for method in ("magnitude", "wanda", "sparsegpt"):
            made[f"{method} 50 %"] = self.pruned(method=method, **HALF)
            made[f"{method} 2:4"] = self.pruned(method=method, pattern="2:4", **HALF)
        return made | {
            "sparsegpt 2:4 + int8": self.pruned(pattern="2:4", bits=8, **HALF),
            "magnitude 4x4 blocks 25 %": self.pruned(
                method="magnitude", pattern="4x4", sparsity=0.25
            ),
            "sparsegpt 4x4 blocks 25 %": self.pruned(pattern="4x4", sparsity=0.25),
            "magnitude neurons 25 %": self.pruned(
                method="magnitude", structure="neurons", sparsity=0.25
            ),
            "sparsegpt neurons 25 %": self.pruned(structure="neurons", sparsity=0.25),
            f"sparsegpt heads {100 * heads:.0f} %": self.pruned(structure="heads", sparsity=heads),
            "layers 17 %": self.pruned(method="wanda", structure="layers", sparsity=1 / 6),
            "svd, 75 % of the bytes": self.pruned(method="svd", sparsity=0.25),
            "asvd, 75 % of the bytes": self.pruned(method="asvd", sparsity=0.25),
            "a third of the layers": self.student("hard", 0),
            "distilled, hard labels": self.student("hard", steps),
            "distilled, soft labels": self.student("soft", steps),
            "distilled, TED": self.student("ted", steps),
            "KV heads pooled": self.grouped(0),
            "KV heads pooled and trained": self.grouped(steps),
        }

    def quality(self, decoder: Decoder) -> dict[str, Any]:
        found = compare(
            decoder, self.ids_BL, hidden_states(decoder, self.ids_BL), self.truth, self.decoder
        )
        kv = decoder.source.model_config.kv_bytes_per_token("float32")
        return {
            "ppl": found.perplexity, "kl": found.mean_kl, "top1": found.top1, "tokens": found.count,
            "bytes": decoder.source.num_bytes, "kv": kv,
        }  # fmt: skip

    def measure(self, name: str, make: Callable[[Path], Any]) -> dict[str, Any]:
        out = self.folder / "out"
        begin = time.perf_counter()
        make(out)
        seconds = time.perf_counter() - begin
        found = self.quality(Decoder(Source.open(str(out)), self.given.device)) | {
            "seconds": seconds
        }
        if "distilled" in name or name == "a third of the layers":
            found["accepted"] = self.accepted(str(out))
        for file in out.iterdir():
            file.unlink()
        out.rmdir()
        return found

    def accepted(self, draft: str) -> float:
        """Of greedy drafts, the share that the original takes."""
        llm = self.load(
            self.given.model, draft_model=draft, adaptive_drafts=False, max_drafts=DRAFTS
        )
        prompts = self.ids_BL[:PROMPTS, : WINDOW // 2].tolist()
        llm.generate(
            prompts,
            SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True),
            progress=False,
        )
        counts = [
            one[1:] for event in llm.events if isinstance(event, DraftsVerified) for one in event.of
        ]
        return sum(right for _, right in counts) / max(1, sum(drafted for drafted, _ in counts))


def _fewer(num_kv_heads: int) -> int:
    """Half of them, or a third."""
    return max(num for num in range(1, num_kv_heads) if num_kv_heads % num == 0)


def table(found: parts.Found) -> str:
    lines = [
        "| | bytes | KV bytes a token | PPL | mean KL | top-1 | drafts accepted | s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, one in found.items():
        accepted = f"{one['accepted']:.1%}" if "accepted" in one else ""
        cells = [
            f"{one['bytes']:,}",
            f"{one['kv']:,}",
            f"{one['ppl']:.3f}",
            f"{one['kl']:.4f}",
            f"{one['top1']:.1%}",
            accepted,
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {one['seconds']:.0f} |")
    return "\n".join(lines)


def verdicts(found: parts.Found) -> list[str]:
    made = [
        f"{'yes' if found[better]['ppl'] < found[worse]['ppl'] else 'NO '}: {better} ({found[better]['ppl']:.3f}) "
        f"< {worse} ({found[worse]['ppl']:.3f})"
        for better, worse in EXPECTED
        if better in found and worse in found
    ]
    drafts = [
        found[name]["accepted"]
        for name in ("distilled, soft labels", "a third of the layers")
        if name in found
    ]
    if len(drafts) == 2:
        made.append(
            f"{'yes' if drafts[0] > drafts[1] else 'NO '}: of drafts, {drafts[0]:.1%} accepted > {drafts[1]:.1%} undistilled"
        )
    return made


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
    parser.add_argument("--training-tokens", type=int, default=65536)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, help="of the engine")
    parts.add_options(parser)
    given = parser.parse_args()
    if given.merge:
        report(
            parts.merged(
                given,
                sorted({name for path in given.merge for name in json.loads(path.read_text())}),
            )
        )
        return
    found = parts.read(given)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(given, Path(folder))
        if "original" not in found:
            found["original"] = bench.quality(bench.decoder) | {"seconds": 0.0}
        print(
            f"original: {found['original']['ppl']:.3f} on {found['original']['tokens']:,} tokens",
            flush=True,
        )
        rows = bench.rows()
        for name in parts.chosen(rows, given):
            if name in found:
                continue
            found[name] = bench.measure(name, rows[name])
            print(name, json.dumps(found[name]), flush=True)
            parts.keep(given, found)
    report(found)


if __name__ == "__main__":
    main()
