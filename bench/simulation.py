"""The simulator against the engine: calibrate, run loads for real, simulate the same loads, compare.

    python -m bench.simulation                                             smollm2 on this CPU
    python -m bench.simulation --shape smollm2 --layers 8                  random weights of its shape, with fewer layers
    python -m bench.simulation --device cuda --shape llama8b               an 8B of random weights on a GPU
    python -m bench.simulation --profile FILE                              with a profile that is there, instead of a new one

No load is used in calibration, and those of HELD_OUT were not looked at either when the parts of the cost model were chosen.
Calibration and real runs alternate (--rounds); the fit sees the steps of all rounds, and of each load the median of its runs
counts. On a CPU, time is that which this process computes (one thread), since others may use the machine as well. `--out` gets
profile.json, real.json, results.json and steps.json, every measured step: its StepShape, seconds, whether it followed another,
and the host's seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.gpu_workloads import MODELS
from tidemill.bench.record import Record, percentile
from tidemill.bench.workload import Item, arriving, synthetic
from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.kernels import machine
from tidemill.sampling import SamplingParams
from tidemill.sim.calibration import Calibration, StepTimer, profile_of, timed
from tidemill.sim.fit import Sample
from tidemill.sim.profile import Profile
from tidemill.sim.simulator import Arrival, SimConfig, simulate
from tidemill.wire import Submit

HELD_OUT = ("summaries", "short", "agents")
TOLERANCE = {"throughput": 0.03, "TPOT p50": 0.05, "TPOT p99": 0.05, "TTFT p50": 0.08}


def loads(length_scale: float, number_scale: float, vocab: int, context: int) -> dict[str, tuple[list[Item], float, float]]:
    """By name: requests, how much of what the engine can do they ask for (0: all come at once), and their burstiness."""

    def drawn(num: int, prompt: int, output: int, spread: float = 0.5, shared: int = 0, seed: int = 0) -> list[Item]:
        how: dict[str, Any] = {"spread": spread, "vocab": vocab, "seed": seed, "shared_prefix": int(shared * length_scale)}
        num, output = max(8, int(num * number_scale)), max(4, int(output * length_scale))
        items = synthetic(num, max(4, int(prompt * length_scale)), output, **how)
        return [item for item in items if len(item.prompt_ids) + item.num_output <= context]

    mixture = [*drawn(100, 128, 256, seed=7), *drawn(60, 3000, 32, seed=8)]
    random.Random(5).shuffle(mixture)
    return {
        "steady": (drawn(160, 512, 160, seed=1), 0.6, 1.0),
        "busy": (drawn(200, 768, 128, seed=2), 0.9, 1.0),
        "bursts": (drawn(160, 400, 200, seed=3), 0.6, 6.0),
        "at once": (drawn(200, 512, 256, 0.9, seed=4), 0.0, 1.0),
        "code": (drawn(120, 2500, 24, seed=5), 0.7, 1.0),
        "shared prefix": (drawn(160, 96, 128, shared=2048, seed=6), 0.7, 1.0),
        "mixture": (mixture, 0.7, 2.0),
        "long": (drawn(12, 12000, 128, 0.3, seed=9), 0.6, 1.0),
        # The parts of the cost model were chosen without these.
        "summaries": (drawn(40, 5000, 200, 0.7, seed=10), 0.7, 1.0),
        "short": (drawn(300, 64, 96, 0.8, seed=11), 0.8, 1.0),
        "agents": (drawn(120, 300, 64, 0.9, shared=6144, seed=12), 0.7, 4.0),
    }


def run_real(core: EngineCore, items: Sequence[Item], now: Callable[[], float]) -> tuple[list[Record], list[Sample]]:
    """The engine in this process; where nothing is under way, time goes on to the next arrival at once. Also what its steps took,
    for a look at where a simulation is off."""
    with timed(core, now) as timer:
        return _run_real(core, timer, items, now), timer.samples


def _run_real(core: EngineCore, timer: StepTimer, items: Sequence[Item], now: Callable[[], float]) -> list[Record]:
    records = [Record(item.at_s, item.at_s, num_prompt=len(item.prompt_ids)) for item in items]
    offset, num_sent, num_done = -now(), 0, 0
    while num_done < len(items):
        is_idle = not core.has_work
        if is_idle:
            offset += max(0.0, items[num_sent].at_s - (now() + offset))
        while num_sent < len(items) and items[num_sent].at_s <= now() + offset:
            item = items[num_sent]
            params = SamplingParams(temperature=0.0, max_tokens=item.num_output, ignore_eos=True)
            core.submit(Submit(str(num_sent), item.prompt_ids, params))
            num_sent += 1
        timer.begin_step(is_idle)
        output, failed = core.step()
        assert not failed
        at_s = now() + offset
        for delta in output.deltas:
            record = records[int(delta.request_id)]
            record.token_times_s += [at_s] * len(delta.token_ids)
            record.num_output, record.end_s = record.num_output + len(delta.token_ids), at_s
            num_done += delta.finish_reason is not None
    return records


def figures(records: Sequence[Record]) -> dict[str, float]:
    ttfts = [record.token_times_s[0] - record.due_s for record in records]
    tpots = [tpot for record in records if (tpot := record.tpot_s) is not None]
    duration = max(record.end_s for record in records)
    return {
        "throughput": sum(record.num_output for record in records) / duration,
        "TPOT p50": percentile(tpots, 50),
        "TPOT p99": percentile(tpots, 99),
        "TTFT p50": percentile(ttfts, 50),
        "TTFT p99": percentile(ttfts, 99),
    }


def simulated(items: Sequence[Item], config: SimConfig, profile: Profile) -> list[Record]:
    result = simulate([_arrival(i, item) for i, item in enumerate(items)], config, profile)
    records = []
    for i, item in enumerate(items):
        times = result.token_times_s[str(i)]
        records.append(Record(item.at_s, item.at_s, None, times, times[-1], len(item.prompt_ids), 0, len(times)))
    return records


def _arrival(number: int, item: Item) -> Arrival:
    return Arrival(str(number), item.at_s, len(item.prompt_ids), item.num_output, prompt_ids=tuple(item.prompt_ids))


def timed_loads(core: EngineCore, profile: Profile, given: argparse.Namespace) -> dict[str, list[Item]]:
    """With arrival times: by how fast the profile says that the requests could be computed."""
    config, made = SimConfig.of(core.config, core.runner.steps_ahead), {}
    only = HELD_OUT if given.only == "held-out" else (given.only or "").split(",")
    vocab = min(core.model_config.vocab_size, 30_000)
    for name, (items, use, burstiness) in loads(given.lengths, given.requests, vocab, core.config.max_context).items():
        if (given.only and name not in only) or not items:
            continue
        if use:
            capacity = len(items) / max(record.end_s for record in simulated(items, config, profile))
            items = arriving(items, use * capacity, burstiness=burstiness, seed=3)
        made[name] = items
    return made


def run(core: EngineCore, given: argparse.Namespace, name: str) -> None:
    """What was measured is written as it comes: a run that is cut short is not lost."""
    calibration = Calibration(core, given.seconds / given.rounds, now=given.now)
    profile = Profile.load(given.profile) if given.profile else None
    items_of: dict[str, list[Item]] = {}
    real: dict[str, list[dict[str, float]]] = {}
    steps: dict[str, list[Sample]] = {}  # of the last run
    for number in range(given.rounds):
        if not given.profile:
            begin = time.perf_counter()
            steps["calibration"] = calibration.run()
            print(f"calibration {number}: {len(calibration.samples)} steps, {time.perf_counter() - begin:.1f} s", flush=True)
        made = profile or profile_of(core, calibration.samples, name, _machine())
        made.save(given.out / "profile.json")
        items_of = items_of or timed_loads(core, made, given)
        for load, items in items_of.items():
            core.scheduler.kv.clear_prefixes()
            records, steps[load] = run_real(core, items, given.now)
            real.setdefault(load, []).append(figures(records))
            plain = {load: [[*one.shape, one.seconds, one.follows, one.host_s] for one in own] for load, own in steps.items()}
            (given.out / "steps.json").write_text(json.dumps(plain))
            (given.out / "real.json").write_text(json.dumps(real, indent=1))
            print(f"{load}: {real[load][-1]['throughput']:.1f} tokens/s", flush=True)
    profile = profile or profile_of(core, calibration.samples, name, _machine())
    profile.save(given.out / "profile.json")
    errors = profile.errors
    print(
        f"fit: {errors.num_steps} steps, median error {errors.median:.1%}, p90 {errors.p90:.1%}, sum {errors.total:+.2%}; "
        f"host {profile.cost.host_s * 1e3:.2f} ms"
    )
    config = SimConfig.of(core.config, core.runner.steps_ahead)
    lines = []
    for load, items in items_of.items():
        said = figures(simulated(items, config, profile))
        measured = {key: statistics.median(one[key] for one in real[load]) for key in said}
        runs = {key: [one[key] for one in real[load]] for key in said}
        lines.append({"load": load, "requests": len(items), "real": measured, "runs": runs, "simulated": said})
    show(lines)
    (given.out / "results.json").write_text(json.dumps(lines, indent=1))


def show(lines: Sequence[dict[str, Any]]) -> None:
    names = list(TOLERANCE)
    print(f"| load | requests | {' | '.join(f'{name}: real, simulated' for name in names)} |")
    print(f"|---|---|{'---|' * len(names)}")
    for line in lines:
        cells = []
        for name in names:
            own, said = line["real"][name], line["simulated"][name]
            unit = f"{own:,.0f}, {said:,.0f}" if name == "throughput" else f"{own * 1e3:.2f}, {said * 1e3:.2f} ms"
            off = said / own - 1
            cells.append(f"{unit} ({off:+.1%}{'' if abs(off) <= TOLERANCE[name] else ' !'})")
        print(f"| {line['load']} | {line['requests']} | {' | '.join(cells)} |")
    for name, most in TOLERANCE.items():
        off = [abs(line["simulated"][name] / line["real"][name] - 1) for line in lines]
        num = sum(1 for each in off if each <= most)
        print(f"{name}: within {most:.0%} on {num} of {len(off)} loads, worst {max(off):.1%}, mean {statistics.mean(off):.1%}")


def _machine() -> str:
    here = machine.detect()
    return here.gpu or f"{platform.machine()}, {here.num_cores} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--shape", choices=tuple(MODELS), help="random weights of this shape, instead of a model")
    parser.add_argument("--layers", type=int, help="of that shape, only so many")
    parser.add_argument("--profile", help="use this one")
    parser.add_argument("--seconds", type=float, help="for calibration")
    parser.add_argument("--rounds", type=int, help="of calibration and real runs")
    parser.add_argument("--lengths", type=float, help="multiplies the lengths of the loads")
    parser.add_argument("--requests", type=float, help="multiplies their numbers of requests")
    parser.add_argument("--max-context", type=int)
    parser.add_argument("--threads", type=int, default=1, help="on a CPU: one is disturbed least by others on the machine")
    parser.add_argument("--clock", choices=("wall", "cpu"), help="cpu: time that this process computes; others do not disturb it")
    parser.add_argument("--only", help="loads, separated by commas; held-out: the three of HELD_OUT")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="folder of profile.json, results.json")
    given = parser.parse_args()
    on_gpu = given.device == "cuda"
    given.now = time.process_time if (given.clock or ("wall" if on_gpu else "cpu")) == "cpu" else time.perf_counter
    given.seconds = given.seconds or (25.0 if on_gpu else 90.0)
    given.rounds = given.rounds or (1 if on_gpu else 3)
    given.lengths = given.lengths or (1.0 if on_gpu else 0.1)
    given.requests = given.requests or (1.0 if on_gpu else 0.2)
    options: dict[str, Any] = {"device": given.device, "model": given.model, "speculate": "off", "max_waiting": 10**6}
    options["max_context"] = given.max_context or (34816 if on_gpu else 2048)
    options["threads"] = None if on_gpu else given.threads
    if given.shape:
        folder = Path(tempfile.mkdtemp())
        shape = MODELS[given.shape]
        (folder / "config.json").write_text(json.dumps(shape | ({"num_hidden_layers": given.layers} if given.layers else {})))
        options |= {"model": str(folder), "load_format": "dummy"}
    begin = time.perf_counter()
    core = load_core(EngineOptions(**options))
    print(f"{_machine()}: ready in {time.perf_counter() - begin:.1f} s, {core.config.num_kv_tokens:,} KV tokens", flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    run(core, given, given.shape or given.model)
    print(f"wrote {given.out}; all in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
