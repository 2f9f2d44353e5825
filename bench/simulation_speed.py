"""How much faster than real time one engine is simulated: the shipped costs of an 8B on an H200,
several loads, one core.

    python -m bench.simulation_speed [--traces FOLDER] [--profile h200-llama8b]
    python -m bench.simulation_speed --rows 256        # instead: what the host does for a step in which so many decode

Times are CPU time of this process: on a machine that others use as well, it says more than the
clock on the wall. `--traces`: a folder with azure_conv_2023.csv and mooncake_conversation.jsonl.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from tidemill.engine.core import EngineCore
from tidemill.engine.moments import EngineComponents
from tidemill.planning.cost import LinearCost
from tidemill.planning.profile import Profile
from tidemill.planning.runner import SimRunner
from tidemill.planning.simulator import _MODEL, Arrival, SimConfig, SimEngine
from tidemill.planning.trace import arrivals, read_rows
from tidemill.sched.clock import VirtualClock
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit


def drawn(rate: float, num: int, prompt: int, output: int) -> list[Arrival]:
    draw, at, made = random.Random(1), 0.0, []
    for i in range(num):
        at += draw.expovariate(rate)
        num_prompt, num_output = (
            draw.randint(length // 2, length * 3 // 2) for length in (prompt, output)
        )
        made.append(Arrival(f"r{i}", at, num_prompt, num_output))
    return made


def run(
    load: Sequence[Arrival], config: SimConfig, profile: Profile, jumps: bool = True
) -> tuple[float, SimEngine]:
    gc.collect()
    begin = time.process_time()
    engine = SimEngine(config, profile, jumps=jumps, keeps_events=False)
    for arrival in load:
        engine.run_until(arrival.arrival_s)
        engine.submit(arrival)
    engine.run_until(math.inf)
    return time.process_time() - begin, engine


def host_us(num_rows: int, rounds: int = 5, steps: int = 100) -> float:
    """Of a step in which so many sequences decode: planning, committing, outputs and events, as in
    a real engine. The runner does nothing."""
    clock = VirtualClock()
    runner = SimRunner(LinearCost(fixed_s=0.01), clock, steps_ahead=1, page_size=64)
    config = SimConfig(
        "continuous", num_rows, 8192, num_pages=20 * num_rows, page_size=64, steps_ahead=1
    ).engine()
    core = EngineCore(EngineComponents(runner, _MODEL), config, clock)
    params = SamplingParams(max_tokens=rounds * steps + 100, temperature=0.0, ignore_eos=True)
    for row in range(num_rows):
        # pages end in different steps
        core.submit(Submit(str(row), [row + 2] * (30 + row % 64), params))
    for _ in range(50):
        core.step()
    took = []
    for _ in range(rounds):
        gc.collect()
        begin = time.process_time()
        for _ in range(steps):
            core.step()
        took.append((time.process_time() - begin) / steps * 1e6)
    return statistics.median(took)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--profile", default="h200-llama8b")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rows", type=int)
    given = parser.parse_args()
    if given.rows:
        print(f"{given.rows} sequences: {host_us(given.rows):,.0f} us of the host a step")
        return
    profile = Profile.load(given.profile)
    config = SimConfig.measured(profile.engine)
    loads = {
        "one sequence at a time": drawn(0.05, 20, 500, 2000),
        "reasoning: 1 request/s, 500 + 3,000 tokens": drawn(1.0, given.requests // 8, 500, 3000),
        "chat: 4 requests/s, 500 + 800 tokens": drawn(4.0, given.requests // 2, 500, 800),
    }
    if given.traces:
        context = {"max_context": config.max_context}
        loads["Azure conversation"] = arrivals(
            read_rows(given.traces / "azure_conv_2023.csv", given.requests), **context
        )
        rows = read_rows(given.traces / "mooncake_conversation.jsonl", given.requests)
        loads["Mooncake, half as fast"] = arrivals(rows, time_scale=2.0, **context)
    print(
        "| load | simulated s | steps | planned one by one | CPU s | times real time | without jumps |\n"
        "|---|---|---|---|---|---|---|"
    )
    for name, load in loads.items():
        took, engine = run(load, config, profile)
        plain, _ = run(load[: max(len(load) // 10, 2)], config, profile, jumps=False)
        end, num = (
            engine.clock.now(),
            sum(1 for _, _, repeats in engine._runner.times if not repeats),
        )
        plain *= len(load) / max(len(load) // 10, 2)
        print(
            f"| {name} | {end:,.0f} | {engine.num_steps:,} | {num:,} | {took:.2f} | **{end / took:,.0f}** | {end / plain:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
