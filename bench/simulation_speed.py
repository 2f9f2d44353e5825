"""How much faster than real time one engine is simulated: the shipped costs of an 8B on an H200, several loads, one core.

    python -m bench.simulation_speed [--traces FOLDER] [--profile h200-llama8b]

Times are CPU time of this process: on a machine that others use as well, it says more than the clock on the wall.
`--traces`: a folder with azure_conv_2023.csv and mooncake_conversation.jsonl.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path

from tidemill.sim.profile import Profile
from tidemill.sim.simulator import Arrival, SimConfig, SimEngine
from tidemill.sim.trace import arrivals, read_rows


def drawn(rate: float, num: int, prompt: int, output: int) -> list[Arrival]:
    draw, at, made = random.Random(1), 0.0, []
    for i in range(num):
        at += draw.expovariate(rate)
        lengths = (draw.randint(length // 2, length * 3 // 2) for length in (prompt, output))
        made.append(Arrival(f"r{i}", at, *lengths))
    return made


def run(load: Sequence[Arrival], config: SimConfig, profile: Profile, jumps: bool = True) -> tuple[float, SimEngine]:
    gc.collect()
    begin = time.process_time()
    engine = SimEngine(config, profile, jumps=jumps, keeps_events=False)
    for arrival in load:
        engine.run_until(arrival.arrival_s)
        engine.submit(arrival)
    engine.run_until(math.inf)
    return time.process_time() - begin, engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path)
    parser.add_argument("--profile", default="h200-llama8b")
    parser.add_argument("--requests", type=int, default=2000)
    given = parser.parse_args()
    profile = Profile.load(given.profile)
    own = profile.engine
    sizes = {"num_rows": own.max_requests, "token_budget": own.token_budget, "num_pages": own.num_pages}
    config = SimConfig(page_size=own.page_size, max_context=own.max_context, steps_ahead=own.steps_ahead, **sizes)
    loads = {
        "one sequence at a time": drawn(0.05, 20, 500, 2000),
        "reasoning: 1 request/s, 500 + 3,000 tokens": drawn(1.0, given.requests // 8, 500, 3000),
        "chat: 4 requests/s, 500 + 800 tokens": drawn(4.0, given.requests // 2, 500, 800),
    }
    if given.traces:
        context = {"max_context": config.max_context}
        loads["Azure conversation"] = arrivals(read_rows(given.traces / "azure_conv_2023.csv", given.requests), **context)
        rows = read_rows(given.traces / "mooncake_conversation.jsonl", given.requests)
        loads["Mooncake, half as fast"] = arrivals(rows, time_scale=2.0, **context)
    print(
        "| load | simulated s | steps | planned one by one | CPU s | times real time | without jumps |\n"
        "|---|---|---|---|---|---|---|"
    )
    for name, load in loads.items():
        took, engine = run(load, config, profile)
        plain, _ = run(load[: max(len(load) // 10, 2)], config, profile, jumps=False)
        end, num = engine.clock.now(), sum(1 for _, _, repeats in engine._runner.times if not repeats)
        plain *= len(load) / max(len(load) // 10, 2)
        print(
            f"| {name} | {end:,.0f} | {engine.num_steps:,} | {num:,} | {took:.2f} | **{end / took:,.0f}** | {end / plain:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
