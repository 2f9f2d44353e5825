"""What KVQuant costs in quality and speed beside other formats of the KV cache: bytes a token, perplexity, KL divergence from a float32
cache, agreement of the likeliest token, decode steps.

    .venv/bin/python -m bench.kvquant --tokens 8192

It calibrates on text that the model writes, and measures on Python's own documentation (pydoc_data). "after rotation" is KVQuant with
keys quantized after rotation, simulated in torch over a float32 cache. Times are of decode steps taken in turn, as ratios to bfloat16.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from bench.perplexity import text_ids
from tidemill.config import EngineOptions, resolve
from tidemill.draft.states import batch_of
from tidemill.draft.text import TextFile, write_text
from tidemill.engine.llm import LLM
from tidemill.kernels.kv_cache import Angles
from tidemill.kernels.kvquant import KVQuant, dequantize_keys, dequantize_values, quantize_keys, quantize_values
from tidemill.kernels.machine import detect
from tidemill.kernels.rope import apply_rope
from tidemill.kvquant.collect import Collector, forward
from tidemill.kvquant.fit import fit, sensitivity
from tidemill.runner.batch import Batch
from tidemill.runner.cpu_runner import CpuRunner
from tidemill.weights.kv_calibration import save_calibration

WINDOW = 1024
FORMATS = ("float32", "bfloat16", "int8", "int4", "kvquant4", "kvquant3")
AFTER = {"kvquant4, after rotation": "kvquant4", "kvquant3, after rotation": "kvquant3"}


class AfterRotation(Collector):
    """Samples of rotated keys."""

    def _see(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        angles = self._kv.angles[layer]
        assert angles is not None
        q, k = (rotated(each, angles) for each in (q, k))
        weights = sensitivity(q, k, v, self._kv.specs[layer], None)
        self._made[layer].append(tuple(each[1 :: self.stride].clone() for each in (k, weights[0], v, weights[1])))


def rotated(x_TND: torch.Tensor, angles: Angles, back: bool = False) -> torch.Tensor:
    cos, sin = angles.cos[: x_TND.shape[0]], angles.sin[: x_TND.shape[0]]
    return apply_rope(x_TND, cos, -sin if back else sin)


def simulated(runner: CpuRunner, quant: KVQuant, ids: list[int]) -> torch.Tensor:
    """Hidden states with keys and values that went through KVQuant, keys after rotation."""
    kv = runner.mixers.kv
    assert kv is not None
    positions = torch.arange(len(ids))

    def change(layer: int, heads: torch.Tensor) -> torch.Tensor:
        own, angles = quant.layer(layer), kv.angles[layer]
        assert angles is not None
        q, k, v = heads.split([kv.num_heads, kv.num_kv_heads, kv.num_kv_heads], 1)
        codes, extra = quantize_keys(rotated(k, angles), positions, own)
        k = dequantize_keys(codes.transpose(0, 1), extra.transpose(0, 1), positions, own).transpose(0, 1)
        v = dequantize_values(*quantize_values(v, own), own)
        return torch.cat([q, rotated(k, angles, back=True), v], 1)

    return forward(runner, batch_of(runner, ids), lambda *_: None, change)


@torch.inference_mode()
def logprobs(runner: CpuRunner, hidden_TH: torch.Tensor) -> torch.Tensor:
    return runner.model.logits(hidden_TH).log_softmax(-1)  # type: ignore[operator]


class Score:
    def __init__(self) -> None:
        self.loss = self.divergence = self.same = 0.0
        self.num = 0

    def add(self, ids: list[int], exact_TV: torch.Tensor, found_TV: torch.Tensor) -> None:
        self.loss -= found_TV[:-1].gather(1, torch.tensor(ids[1:])[:, None]).double().sum().item()
        self.divergence += (exact_TV.exp() * (exact_TV - found_TV)).sum(-1)[:-1].double().sum().item()
        self.same += (exact_TV.argmax(-1) == found_TV.argmax(-1))[:-1].sum().item()
        self.num += len(ids) - 1

    def line(self) -> str:
        return f"{math.exp(self.loss / self.num):10.4f} {self.divergence / self.num:10.5f} {self.same / self.num:8.2%}"


def decode_batch(num_rows: int, context: int, runner: CpuRunner) -> Batch:
    """A token of each of so many sequences, at the end of a context; their pages hold whatever they hold."""
    (table, size), *_ = runner.mixers.tables
    pages = -(-context // size)
    table[:num_rows, :pages] = 1 + torch.arange(num_rows * pages).view(num_rows, pages)
    ones, last = np.ones(num_rows, np.int64), torch.full((num_rows,), context - 1)
    slots = table[:num_rows, (context - 1) // size].long() * size + (context - 1) % size
    return Batch(np.arange(num_rows), ones * (context - 1), ones, np.arange(num_rows), torch.full((num_rows,), 5), last, slots[None])


@torch.inference_mode()
def decode_seconds(runners: dict[str, CpuRunner], num_rows: int, context: int, rounds: int) -> dict[str, float]:
    batches = {name: decode_batch(num_rows, context, runner) for name, runner in runners.items()}
    times: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(rounds):
        for name, runner in runners.items():
            start = time.perf_counter()
            runner.forward(batches[name])
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(own[1:]) for name, own in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=8 * WINDOW, help="that quality is measured on")
    parser.add_argument("--calibration-tokens", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=8, help="sequences of a decode step")
    parser.add_argument("--context", type=int, default=2048, help="of a decode step")
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    llm = LLM(arguments.model, device="cpu", max_requests=32, max_context=WINDOW, progress=False)
    text = write_text(llm, TextFile(folder / "text.jsonl", ""), arguments.calibration_tokens, 0, lambda _: None)
    sequences, target = [one.ids[:512] for one in text], llm.core.runner
    assert isinstance(target, CpuRunner)
    model = target.model
    before, after = (kind(target, sequences).collect(lambda _: None) for kind in (Collector, AfterRotation))
    runners: dict[str, CpuRunner] = {}
    for name in FORMATS:
        file = folder / f"{name}.safetensors"
        if name.startswith("kvquant"):
            save_calibration(file, fit(before, name, 0.01), model.config, {})
        options = EngineOptions(
            model=arguments.model, device="cpu", kv_dtype=name, max_requests=arguments.rows, max_context=arguments.context,
            kv_calibration=str(file) if file.exists() else None, dtype=model.dtype,
        )  # fmt: skip
        runners[name] = CpuRunner(model, resolve(options, model.config, detect()))
    quants = {name: fit(after, kind, 0.01) for name, kind in AFTER.items()}
    scores = {name: Score() for name in (*FORMATS, *AFTER)}
    ids = text_ids(arguments.model, arguments.tokens)
    for start in range(0, len(ids), WINDOW):
        window = ids[start : start + WINDOW]
        exact = logprobs(target, runners["float32"].forward(batch_of(runners["float32"], window)))
        for name, runner in runners.items():
            scores[name].add(window, exact, logprobs(runner, runner.forward(batch_of(runner, window))))
        for name, quant in quants.items():
            scores[name].add(window, exact, logprobs(target, simulated(runners["float32"], quant, window)))
    seconds = decode_seconds(runners, arguments.rows, arguments.context, arguments.rounds)
    print(f"{'format':26} {'bytes/token':>11} {'PPL':>10} {'mean KL':>10} {'top-1':>8} {'decode':>8}  on {len(ids):,} tokens")
    for name, score in scores.items():
        speed = f"{seconds['bfloat16'] / seconds[name]:7.2f}x" if name in seconds else f"{'':8}"
        print(f"{name:26} {model.config.kv_bytes_per_token(AFTER.get(name, name)):11,} {score.line()} {speed}")


if __name__ == "__main__":
    main()
