"""Where the milliseconds of a decoding step go: layers, head, and everything else, for so many
requests at once.

python -m bench.step --requests 64 --temperature 0.8
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from tidemill.config import EngineOptions
from tidemill.engine.load import load_core
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

NUM_STEPS = 20


class Stopwatch:
    """Adds up the time spent in a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function, self.total_s = function, 0.0

    def __call__(self, *arguments: Any) -> Any:
        begin = time.perf_counter()
        try:
            return self._function(*arguments)
        finally:
            self.total_s += time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    given = parser.parse_args()
    core = load_core(
        EngineOptions(
            model=given.model, dtype=given.dtype, device="cpu", max_requests=given.requests
        )
    )
    params = SamplingParams(
        temperature=given.temperature, max_tokens=10 * NUM_STEPS, ignore_eos=True, seed=0
    )
    for i in range(given.requests):
        core.submit(
            Submit(
                str(i),
                [100 + (7919 * i + 31 * k) % 40_000 for k in range(given.prompt_len)],
                params,
            )
        )
    decoding: set[str] = set()
    while len(decoding) < given.requests:
        decoding |= {delta.request_id for delta in core.step()[0].deltas}
    runner: Any = core.runner
    layers, head = Stopwatch(runner.whole.forward), Stopwatch(runner.model.logits)
    runner.whole.forward, runner.model.logits = layers, head
    begin = time.perf_counter()
    for _ in range(NUM_STEPS):
        core.step()
    total = time.perf_counter() - begin
    rest = total - layers.total_s - head.total_s
    print(
        f"{given.requests} requests, {core.config.dtype}: {total / NUM_STEPS * 1000:.1f} ms a step"
    )
    for name, seconds in (
        ("layers", layers.total_s),
        ("head", head.total_s),
        ("outside the forward pass", rest),
    ):
        print(f"  {name:26} {seconds / NUM_STEPS * 1000:7.2f} ms  {100 * seconds / total:5.1f} %")


if __name__ == "__main__":
    main()
