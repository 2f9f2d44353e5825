"""What the formats of the KV cache cost and save: quality on the same text, memory, and the speed
of decoding, on a CPU.

    python -m bench.kv_formats --windows 20
    python -m bench.kv_formats --only speed

Quality: perplexity, mean KL divergence from the first format's next-token distributions, how often
both choose the same token. Text: bench/perplexity.py's. Speed: steps of `--requests` sequences of
`--context` tokens in pages of their own, formats in turn.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch

from bench.perplexity import text_ids
from tidemill.compress.draft.states import hidden_states
from tidemill.config import EngineOptions, resolve
from tidemill.engine.load import inspect, weight_plan
from tidemill.kernels import machine
from tidemill.kernels.kv_cache import copy_pages
from tidemill.models.base import CausalLM
from tidemill.runner.batch import Batch, gather_batch
from tidemill.runner.cpu_runner import CpuRunner
from tidemill.runner.make_cpu import make_cpu_runner
from tidemill.sched.plan import StepItem
from tidemill.types.kv_format import SHORT_NAMES

WINDOW, SLICE, CHUNK = 1024, 64, 256


@dataclass
class Quality:
    nll: float = 0.0
    kl: float = 0.0
    same: int = 0
    count: int = 0

    def add(self, logits_TV: torch.Tensor, truth_TV: torch.Tensor, next_T: torch.Tensor) -> None:
        ours, theirs = logits_TV.log_softmax(-1), truth_TV.log_softmax(-1)
        self.nll -= float(ours.gather(1, next_T[:, None]).double().sum())
        self.kl += float((theirs.exp() * (theirs - ours)).sum(-1).double().sum())
        self.same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        self.count += next_T.numel()

    def __str__(self) -> str:
        ppl = math.exp(self.nll / self.count)
        return f"perplexity {ppl:.4f}  KL {self.kl / self.count:.2e}  same token {self.same / self.count:.2%}"


def measure_quality(
    runners: dict[str, CpuRunner], ids: list[int], num_windows: int
) -> dict[str, Quality]:
    found = {name: Quality() for name in runners}
    for first in range(0, num_windows * WINDOW, WINDOW):
        window = ids[first : first + WINDOW]
        states = {
            name: hidden_states(runner, window, runner.model.config.num_layers)
            for name, runner in runners.items()
        }
        head = next(iter(runners.values())).model
        assert isinstance(head, CausalLM)
        for at in range(0, WINDOW - 1, SLICE):
            end = min(at + SLICE, WINDOW - 1)
            logits = {name: head.logits(states_TH[at:end]) for name, states_TH in states.items()}
            truth = next(iter(logits.values()))
            for name, values in logits.items():
                found[name].add(values, truth, torch.tensor(window[at + 1 : end + 1]))
        best = next(iter(found.values()))
        print(
            f"{best.count:7,} tokens: " + "; ".join(f"{name} {one}" for name, one in found.items()),
            flush=True,
        )
    return found


def prefill(runner: CpuRunner, ids: list[int], num_requests: int, context: int) -> Batch:
    """Row 0 is computed, and the others get copies of its pages. Returns a step of one token of
    each."""
    state, num_pages = runner.state, -(-context // runner.state.page_size)
    state.tokens[:num_requests, :context] = torch.tensor(ids[:context])
    pages = torch.randperm(num_requests * num_pages) + 1
    state.kv_tables[0][:num_requests, :num_pages] = pages.view(num_requests, num_pages).to(
        torch.int32
    )
    for start in range(0, context - 1, CHUNK):
        count = min(CHUNK, context - 1 - start)
        runner.forward(gather_batch([StepItem(0, 0, start, count, False, 0)], state))
    own = pages.view(num_requests, num_pages)
    for row in range(1, num_requests):
        copy_pages(runner.cache, own[0], own[row])
    return gather_batch(
        [StepItem(row, row, context - 1, 1, True, 0) for row in range(num_requests)], state
    )


def step_s(runner: CpuRunner, batch: Batch) -> float:
    assert isinstance(runner.model, CausalLM)
    begin = time.perf_counter()
    runner.model.logits(runner.forward(batch)[batch.last_token]).argmax(-1)
    return time.perf_counter() - begin


def measure_speed(
    runners: dict[str, CpuRunner], batches: dict[str, Batch], rounds: int
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(rounds + 1):
        for name, runner in runners.items():
            seconds = step_s(runner, batches[name])
            if number:
                times[name].append(seconds)
    return times


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--formats", default="bf16,int8,int4", help="the first is what others are compared with"
    )
    parser.add_argument("--windows", type=int, default=20, help=f"of {WINDOW} tokens")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", choices=("quality", "speed"))
    given = parser.parse_args()
    checkpoint, architecture, shape = inspect(given.model)
    names = [SHORT_NAMES.get(name, name) for name in given.formats.split(",")]
    num_tokens = max(
        (given.requests + 1) * given.context if given.only != "quality" else 0, 2 * WINDOW
    )
    configs = {
        name: resolve(
            EngineOptions(
                model=given.model, device="cpu", kv_dtype=name, speculate="off", max_requests=given.requests,
                kv_memory_bytes=num_tokens * shape.kv_bytes_per_token(name),
            ),
            shape, machine.detect(),
        )
        for name in names
    }  # fmt: skip
    first = configs[names[0]]
    machine.set_threads(first.threads)
    model = architecture.load(checkpoint, shape, weight_plan(first, first.scheme))
    runners = {name: make_cpu_runner(model, config) for name, config in configs.items()}
    ids = text_ids(given.model, max(given.windows * WINDOW, given.context))
    print(f"{given.model}, {first.dtype}, {first.threads} threads")
    for name in names:
        size, ratio = (
            shape.kv_bytes_per_token(name),
            shape.kv_bytes_per_token(names[0]) / shape.kv_bytes_per_token(name),
        )
        print(f"{name:9} {size:7,} bytes a token: {ratio:.2f} times the tokens in the same memory")
    if given.only != "speed":
        found = measure_quality(runners, ids, given.windows)
        base = found[names[0]]
        for name, one in found.items():
            print(
                f"{name:9} {one}  perplexity {math.exp(one.nll / one.count - base.nll / base.count) - 1:+.3%}"
            )
    if given.only != "quality":
        batches = {
            name: prefill(runner, ids, given.requests, given.context)
            for name, runner in runners.items()
        }
        times = measure_speed(runners, batches, given.rounds)
        for name, seconds in times.items():
            ratios = [base / own for base, own in zip(times[names[0]], seconds, strict=True)]
            mean, best = statistics.median(seconds), min(seconds)
            print(
                f"{name:9} {given.requests} × {given.context} tokens: {mean * 1000:.1f} ms a step (best {best * 1000:.1f}); "
                f"{statistics.median(ratios):.2f} times the speed of {names[0]}, by the best {min(times[names[0]]) / best:.2f}; "
                f"{given.requests * np.reciprocal(mean):.0f} tokens/s"
            )


if __name__ == "__main__":
    main()
