"""The workloads of bench/gpu.py, simulated with a profile, beside a real run: does the profile fit the engine as it is now?

    python -m bench.gpu --speculate off --json gpu.json        # on the GPU
    python -m bench.simulated_workloads gpu.json [--model llama8b] [--profile h200-llama8b]

All requests come at once, and no two share a prefix, so `shared_prefix` is left out.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from bench.gpu_workloads import MODELS, Request, workloads
from tidemill.sim.profile import Profile
from tidemill.sim.simulator import Arrival, SimConfig, SimEngine


def simulated_s(requests: list[Request], profile: Profile) -> float:
    engine = SimEngine(SimConfig.measured(profile.engine), profile, keeps_events=False)
    for i, (prompt, num_output) in enumerate(requests):
        engine.submit(Arrival(str(i), 0.0, len(prompt), num_output))
    engine.run_until(math.inf)
    return engine.clock.now()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("real", type=Path, help="what bench.gpu --json wrote")
    parser.add_argument("--model", default="llama8b", choices=MODELS)
    parser.add_argument("--profile", default="h200-llama8b")
    given = parser.parse_args()
    profile, made = Profile.load(given.profile), workloads(120_000)  # which ids they are makes no difference
    print("| workload | real s | simulated s | |\n|---|---|---|---|")
    for line in json.loads(given.real.read_text())["workloads"]:
        name = line["workload"]
        if line["model"] == given.model and name in made and name != "shared_prefix":
            took = simulated_s(made[name], profile)
            print(f"| {name} | {line['s']:.2f} | {took:.2f} | {took / line['s'] - 1:+.1%} |", flush=True)


if __name__ == "__main__":
    main()
