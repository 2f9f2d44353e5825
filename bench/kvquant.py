"""What KVQuant costs in quality and speed beside other formats of the KV cache: bytes a token,
perplexity, KL divergence from a float32 cache, agreement of the likeliest token, and decode steps.

    python -m bench.kvquant --windows 8

It calibrates on text that the model writes (or on --data), and measures on bench/perplexity.py's.
"after rotation" is KVQuant with keys quantized after rotation, simulated in torch over a float32
cache. Speed: as in bench/kv_formats.py.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from bench.kv_formats import SLICE, WINDOW, Quality, measure_speed, prefill
from bench.perplexity import text_ids
from tidemill.compress.draft.states import batch_of, hidden_states
from tidemill.compress.draft.text import TextFile, read_text, write_text
from tidemill.compress.kvquant.collect import Collector, forward
from tidemill.compress.kvquant.fit import fit, sensitivity
from tidemill.config import EngineOptions, resolve
from tidemill.engine.llm import LLM
from tidemill.kernels.kv_cache import Angles
from tidemill.kernels.kvquant import (
    KVQuant,
    dequantize_keys,
    dequantize_values,
    quantize_keys,
    quantize_values,
)
from tidemill.kernels.machine import detect
from tidemill.kernels.rope import apply_rope
from tidemill.models.base import CausalLM
from tidemill.runner.cpu_runner import CpuRunner
from tidemill.runner.make_cpu import make_cpu_runner
from tidemill.weights.kv_calibration import save_calibration

PIECE, OUTLIERS = 512, 0.01
AFTER = " after rotation"
States = Callable[[list[int]], torch.Tensor]  # of tokens: hidden states [T, H]


class AfterRotation(Collector):
    """Samples of rotated keys."""

    def _see(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        angles = self._kv.angles[layer]
        assert angles is not None
        q, k = (rotated(each, angles) for each in (q, k))
        weights = sensitivity(q, k, v, self._kv.specs[layer], None)
        self._made[layer].append(
            tuple(each[1 :: self.stride].clone() for each in (k, weights[0], v, weights[1]))
        )


def rotated(x_TND: torch.Tensor, angles: Angles, back: bool = False) -> torch.Tensor:
    cos, sin = angles.cos[: x_TND.shape[0]], angles.sin[: x_TND.shape[0]]
    return apply_rope(x_TND, cos, -sin if back else sin)


def simulated(runner: CpuRunner, quant: KVQuant) -> States:
    """With keys and values that went through KVQuant, keys after rotation."""
    kv = runner.mixers.kv
    assert kv is not None

    def change(layer: int, heads: torch.Tensor) -> torch.Tensor:
        own, angles, positions = quant.layer(layer), kv.angles[layer], torch.arange(heads.shape[0])
        assert angles is not None
        q, k, v = heads.split([kv.num_heads, kv.num_kv_heads, kv.num_kv_heads], 1)
        codes, extra = quantize_keys(rotated(k, angles), positions, own)
        k = dequantize_keys(codes.transpose(0, 1), extra.transpose(0, 1), positions, own).transpose(
            0, 1
        )
        v = dequantize_values(*quantize_values(v, own), own)
        return torch.cat([q, rotated(k, angles, back=True), v], 1)

    return lambda ids: forward(runner, batch_of(runner, ids), lambda *_: None, change)


@torch.inference_mode()
def measure(model: CausalLM, states: dict[str, States], ids: list[int]) -> dict[str, Quality]:
    """The first is what others are compared with."""
    found = {name: Quality() for name in states}
    for first in range(0, len(ids), WINDOW):
        window = ids[first : first + WINDOW]
        hidden = {name: own(window) for name, own in states.items()}
        for at in range(0, len(window) - 1, SLICE):
            end = min(at + SLICE, len(window) - 1)
            logits = {name: model.logits(own[at:end]) for name, own in hidden.items()}
            truth = next(iter(logits.values()))
            for name, own in logits.items():
                found[name].add(own, truth, torch.tensor(window[at + 1 : end + 1]))
        print(
            f"{first + len(window):,} tokens: "
            + "; ".join(f"{name} {one}" for name, one in found.items()),
            flush=True,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--formats", default="float32,bfloat16,int8,int4,kvquant4,kvquant3")
    parser.add_argument(
        "--data", type=Path, help="text to calibrate on; default: the model writes its own"
    )
    parser.add_argument("--calibration-tokens", type=int, default=4096)
    parser.add_argument("--windows", type=int, default=8, help=f"of {WINDOW} tokens")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    folder, names = Path(tempfile.mkdtemp()), given.formats.split(",")
    llm = LLM(given.model, device="cpu", max_requests=32, max_context=WINDOW, progress=False)
    if given.data is not None:
        text = read_text(llm, given.data, given.calibration_tokens, PIECE)
    else:
        text = write_text(
            llm, TextFile(folder / "text.jsonl", ""), given.calibration_tokens, 0, lambda _: None
        )
    sequences, target = [one.ids[:PIECE] for one in text], llm.core.runner
    assert isinstance(target, CpuRunner)
    assert isinstance(target.model, CausalLM)
    model = target.model
    before, after = (
        kind(target, sequences).collect(lambda _: None) for kind in (Collector, AfterRotation)
    )
    runners: dict[str, CpuRunner] = {}
    states: dict[str, States] = {}
    for name in names:
        file = folder / f"{name}.safetensors"
        if name.startswith("kvquant"):
            save_calibration(file, fit(before, name, OUTLIERS), model.config, {})
            states[name + AFTER] = simulated(runners["float32"], fit(after, name, OUTLIERS))
        options = EngineOptions(
            model=given.model, device="cpu", kv_dtype=name, speculate="off", max_requests=given.requests,
            dtype=llm.core.config.dtype,
            kv_memory_bytes=(given.requests + 1) * max(given.context, WINDOW) * model.config.kv_bytes_per_token(name),
            kv_calibration=str(file) if file.exists() else None,
        )  # fmt: skip
        runners[name] = runner = make_cpu_runner(model, resolve(options, model.config, detect()))
        states[name] = lambda ids, runner=runner: hidden_states(
            runner, ids, model.config.num_layers
        )  # type: ignore[misc]
    ids = text_ids(given.model, max(given.windows * WINDOW, given.context))
    found = measure(model, states, ids[: given.windows * WINDOW])
    speeds: dict[str, str] = {}
    if given.rounds:
        with torch.inference_mode():
            batches = {
                name: prefill(runner, ids, given.requests, given.context)
                for name, runner in runners.items()
            }
            times = measure_speed(runners, batches, given.rounds)
        base = times["bfloat16"] if "bfloat16" in times else times[names[0]]
        for name, own in times.items():
            ratio, step = (
                statistics.median(b / o for b, o in zip(base, own, strict=True)),
                statistics.median(own),
            )
            speeds[name] = f"{given.requests / step:.0f} tok/s, {ratio:.2f}x"
    print("| format | bytes a token | PPL | mean KL | top-1 | decode |\n|---|---|---|---|---|---|")
    for name, one in found.items():
        size = model.config.kv_bytes_per_token(name.removesuffix(AFTER))
        quality = f"{math.exp(one.nll / one.count):.3f} | {one.kl / one.count:.4f} | {one.same / one.count:.1%}"
        print(f"| {name} | {size:,} | {quality} | {speeds.get(name, '')} |")


if __name__ == "__main__":
    main()
