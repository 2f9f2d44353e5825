"""`--kv-layout virtual` beside paging on a CPU: the same tokens, CPU time of prompts and decoding,
physical memory.

    python -m bench.kv_virtual [--model smollm2] [--batches 1,16] [--out 64] [--turns 3]

Both engines are in one process and take turns; the ratio is of the least CPU times.
"""

from __future__ import annotations

import argparse
import json
import random
import time

from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.runner.cpu_runner import CpuRunner
from tidemill.runner.virtual import VirtualLayout
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit


def run(core: EngineCore, batch: int, num_out: int) -> tuple[list[float], dict[str, list[int]]]:
    """CPU seconds of prompts and of decoding, and the tokens."""
    answers: dict[str, list[int]] = {str(i): [] for i in range(batch)}
    params = SamplingParams(max_tokens=num_out, temperature=0.0, ignore_eos=True)
    for i in range(batch):
        draw = random.Random(i)
        core.submit(
            Submit(str(i), [draw.randrange(100, 40_000) for _ in range(200 + 29 * i % 200)], params)
        )
    begin, first = time.process_time(), 0.0
    while core.has_work:
        output, failed = core.step()
        assert not failed, failed
        for delta in output.deltas:
            answers[delta.request_id] += delta.token_ids
        if not first and all(answers.values()):
            first = time.process_time()
    return [first - begin, time.process_time() - first], answers


def watch(core: EngineCore, found: list[float]) -> None:
    """After each step, before what ended in it is gone: physical pages less those that live tokens
    fill, for each request."""
    runner = core.runner
    assert isinstance(runner, CpuRunner)
    assert isinstance(runner.kv_layout, VirtualLayout)
    memory = runner.kv_layout.memory

    def measure(*_: object) -> None:
        running = core.scheduler.running
        live = sum(request.num_computed for request in running) / core.config.page_size
        found.append((memory.physical_bytes / memory.page_bytes - live) / len(running))

    runner.read_states(measure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--out", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    cores = {
        layout: load_core(
            EngineOptions(
                model=given.model,
                kv_layout=layout,
                speculate="off",
                prefix_caching=False,
                max_context=2048,
            )
        )
        for layout in ("paged", "virtual")
    }
    for layout, core in cores.items():
        print(
            f"{layout}: pages of {core.config.page_size}, {core.config.reasons['page_size']}",
            flush=True,
        )
    over = list[float]()
    watch(cores["virtual"], over)
    for batch in map(int, given.batches.split(",")):
        made = {
            layout: [run(core, batch, given.out) for _ in range(1)]
            for layout, core in cores.items()
        }
        for _ in range(given.turns - 1):
            for layout, core in cores.items():
                made[layout].append(run(core, batch, given.out))
        assert made["paged"][0][1] == made["virtual"][0][1], "other tokens"
        least = {
            layout: [min(turn[0][i] for turn in turns) for i in (0, 1)]
            for layout, turns in made.items()
        }
        line = {
            "batch": batch,
            "prompts_ratio": round(least["paged"][0] / least["virtual"][0], 3),
            "decode_ratio": round(least["paged"][1] / least["virtual"][1], 3),
            "decode_cpu_s": {layout: round(times[1], 3) for layout, times in least.items()},
            "most_pages_over_live": round(max(over), 2),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
