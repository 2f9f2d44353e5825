"""The simulator against the engine: calibrate, run loads for real, simulate the same loads,
compare.

    python -m bench.simulation                                             smollm2 on this CPU
    python -m bench.simulation --shape smollm2 --layers 8                  random 4-bit weights of its shape, with fewer layers
    python -m bench.simulation --device cuda --shape llama8b               an 8B of random weights on a GPU
    python -m bench.simulation --profile FILE                              with a profile that is there, instead of a new one

No load is used in calibration, and those of HELD_OUT were not looked at either when the parts of
the cost model were chosen. A part of the calibration comes before each real run, since a machine
that others use is not always as fast; the fit sees all of them. Every round (--rounds) has requests
of its own, and the requests of all rounds count together. On a CPU, time is that which this process
computes (one thread), since others may use the machine as well. `--out` gets profile.json,
real.json, results.json, requests.json (of each real run every request: when it came, its first and
its last token) and steps.json, every measured step: its StepShape, seconds, whether it followed
another, and the host's seconds.
"""

from __future__ import annotations

import argparse
import gc
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
from tidemill.planning.calibration import Calibration, StepTimer, profile_of, timed
from tidemill.planning.fit import Sample
from tidemill.planning.profile import Profile
from tidemill.planning.simulator import Arrival, SimConfig, simulate
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

HELD_OUT = ("translation", "chat", "forms", "review")
TOLERANCE = {"throughput": 0.03, "TPOT p50": 0.05, "TPOT p99": 0.05, "TTFT p50": 0.08}


_PARTS = 3  # of a calibration, of which the first is enough to know how fast requests may come
_Load = tuple[list[Item], float, float]


def loads(given: argparse.Namespace, vocab: int, context: int, number: int) -> dict[str, _Load]:
    """By name: requests, how much of what the engine can do they ask for (0: all come at once), and
    their burstiness. `number`: of the round; each has requests of its own."""

    def drawn(
        num: int, prompt: int, output: int, spread: float = 0.5, shared: int = 0, seed: int = 0
    ) -> list[Item]:
        how: dict[str, Any] = {"spread": spread, "vocab": vocab, "seed": seed + 100 * number}
        how["shared_prefix"] = int(shared * given.lengths)
        num, output = max(8, int(num * given.requests)), max(4, int(output * given.outputs))
        items = synthetic(num, max(4, int(prompt * given.lengths)), output, **how)
        return [item for item in items if len(item.prompt_ids) + item.num_output <= context]

    mixture = [*drawn(100, 128, 256, seed=7), *drawn(60, 3000, 32, seed=8)]
    random.Random(5 + 100 * number).shuffle(mixture)
    return {
        "steady": (drawn(160, 512, 160, seed=1), 0.6, 1.0),
        "busy": (drawn(200, 768, 128, seed=2), 0.9, 1.0),
        "bursts": (drawn(160, 400, 200, seed=3), 0.6, 6.0),
        "at once": (drawn(200, 512, 256, 0.9, seed=4), 0.0, 1.0),
        "code": (drawn(120, 2500, 24, seed=5), 0.7, 1.0),
        "shared prefix": (drawn(160, 96, 128, shared=2048, seed=6), 0.7, 1.0),
        "mixture": (mixture, 0.7, 2.0),
        "long": (drawn(12, 12000, 128, 0.3, seed=9), 0.6, 1.0),
        "summaries": (drawn(40, 5000, 200, 0.7, seed=10), 0.7, 1.0),
        "short": (drawn(300, 64, 96, 0.8, seed=11), 0.8, 1.0),
        "agents": (drawn(120, 300, 64, 0.9, shared=6144, seed=12), 0.7, 4.0),
        "tools": (drawn(140, 200, 80, 0.7, shared=3000, seed=15), 0.65, 3.0),
        # The parts of the cost model were chosen without these.
        "translation": (drawn(160, 250, 250, 0.6, seed=13), 0.65, 1.0),
        "chat": (drawn(140, 900, 220, 0.8, seed=14), 0.7, 2.0),
        "forms": (drawn(200, 150, 60, 0.6, seed=16), 0.6, 5.0),
        "review": (drawn(120, 800, 120, 0.6, shared=1500, seed=17), 0.65, 2.5),
    }


def run_real(
    core: EngineCore, items: Sequence[Item], now: Callable[[], float]
) -> tuple[list[Record], list[Sample]]:
    """The engine in this process; where nothing is under way, time goes on to the next arrival at
    once. Also what its steps took, for a look at where a simulation is off."""
    with timed(core, now) as timer:
        return _run_real(core, timer, items, now), timer.samples


def _run_real(
    core: EngineCore, timer: StepTimer, items: Sequence[Item], now: Callable[[], float]
) -> list[Record]:
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


def figures(rounds: Sequence[Sequence[Record]]) -> dict[str, float]:
    """Of all requests of all rounds."""
    records = [record for own in rounds for record in own]
    ttfts = [record.token_times_s[0] - record.due_s for record in records]
    tpots = [tpot for record in records if (tpot := record.tpot_s) is not None]
    duration = sum(max(record.end_s for record in own) for own in rounds)
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
        records.append(
            Record(
                item.at_s, item.at_s, None, times, times[-1], len(item.prompt_ids), 0, len(times)
            )
        )
    return records


def _arrival(number: int, item: Item) -> Arrival:
    return Arrival(
        str(number),
        item.at_s,
        len(item.prompt_ids),
        item.num_output,
        prompt_ids=tuple(item.prompt_ids),
    )


def timed_loads(
    core: EngineCore, profile: Profile, given: argparse.Namespace, number: int
) -> dict[str, list[Item]]:
    """With arrival times: by how fast the profile says that the requests could be computed."""
    config, made = SimConfig.of(core.config, core.runner.steps_ahead), {}
    only = (given.only or "").replace("held-out", ",".join(HELD_OUT)).split(",")
    vocab = min(core.model_config.vocab_size, 30_000)
    for name, (items, use, burstiness) in loads(
        given, vocab, core.config.max_context, number
    ).items():
        if (given.only and name not in only) or not items:
            continue
        if use:
            capacity = len(items) / max(
                record.end_s for record in simulated(items, config, profile)
            )
            items = arriving(items, use * capacity, burstiness=burstiness, seed=3 + 100 * number)
        made[name] = items
    return made


def run(core: EngineCore, given: argparse.Namespace, name: str) -> None:
    """What was measured is written as it comes: a run that is cut short is not lost."""
    calibration = Calibration(core, given.seconds, now=given.now)
    profile = Profile.load(given.profile) if given.profile else None
    items_of: dict[str, list[list[Item]]] = {}  # by load: of each round
    real: dict[str, list[list[list[Record]]]] = {}  # of each repeat: of each round
    steps: dict[str, list[Sample]] = {}
    for number in range(given.rounds):
        if profile is None:  # arrivals depend on how fast the machine is, roughly
            calibration.run(0, _PARTS)
            profile = profile_of(core, calibration.samples, name, _machine())
        for part, (load, items) in enumerate(
            todo := list(timed_loads(core, profile, given, number).items())
        ):
            items_of.setdefault(load, []).append(items)
            if not given.profile:
                begin, now = time.perf_counter(), given.now()
                steps["calibration"] = calibration.run(
                    number * len(todo) + part, given.rounds * len(todo)
                )
                took = f"{given.now() - now:.1f} s, {time.perf_counter() - begin:.1f} s by the wall"
                print(
                    f"calibration {number}.{part}: {len(calibration.samples)} steps, {took}",
                    flush=True,
                )
            for own in real.setdefault(load, [[] for _ in range(given.repeats)]):
                core.scheduler.kv.clear_prefixes()
                gc.collect()
                # what this script keeps is not for the engine's collections to walk: one took 78 ms
                # of a step
                gc.freeze()
                records, taken = run_real(core, items, given.now)
                own.append(records)
                steps[load] = steps.get(load, []) + taken
            plain = {
                load: [[*one.shape, one.seconds, one.follows, one.host_s] for one in own]
                for load, own in steps.items()
            }
            (given.out / "steps.json").write_text(json.dumps(plain))
            told = {load: [figures(own) for own in runs] for load, runs in real.items()}
            (given.out / "real.json").write_text(json.dumps(told))
            (given.out / "requests.json").write_text(
                json.dumps({load: _times(runs) for load, runs in real.items()})
            )
            print(f"{load}: {figures(real[load][0])['throughput']:.1f} tokens/s", flush=True)
    if not given.profile:
        profile = profile_of(core, calibration.samples, name, _machine())
    assert profile is not None
    profile.save(given.out / "profile.json")
    errors = profile.errors
    print(
        f"fit: {errors.num_steps} steps, median error {errors.median:.1%}, p90 {errors.p90:.1%}, sum {errors.total:+.2%}; "
        f"host {profile.cost.host_s * 1e3:.2f} ms"
    )
    config = SimConfig.of(core.config, core.runner.steps_ahead)
    lines = []
    for load, rounds in items_of.items():
        said = figures([simulated(items, config, profile) for items in rounds])
        runs = [figures(own) for own in real[load]]
        measured = {key: statistics.median(one[key] for one in runs) for key in said}
        spread = {
            key: max(one[key] for one in runs) / min(one[key] for one in runs) - 1 for key in said
        }
        num = sum(len(items) for items in rounds)
        lines.append(
            {
                "load": load,
                "requests": num,
                "real": measured,
                "runs": runs,
                "spread": spread,
                "simulated": said,
            }
        )
    show(lines)
    (given.out / "results.json").write_text(json.dumps(lines, indent=1))


def _times(
    runs: Sequence[Sequence[Sequence[Record]]],
) -> list[list[list[tuple[float, float, float]]]]:
    return [
        [[(one.due_s, one.token_times_s[0], one.end_s) for one in records] for records in rounds]
        for rounds in runs
    ]


def show(lines: Sequence[dict[str, Any]]) -> None:
    names = list(TOLERANCE)
    print(f"| load | requests | {' | '.join(f'{name}: real, simulated' for name in names)} |")
    print(f"|---|---|{'---|' * len(names)}")
    for line in lines:
        cells = []
        for name in names:
            own, said = line["real"][name], line["simulated"][name]
            unit = (
                f"{own:,.0f}, {said:,.0f}"
                if name == "throughput"
                else f"{own * 1e3:.2f}, {said * 1e3:.2f} ms"
            )
            off = said / own - 1
            cells.append(f"{unit} ({off:+.1%}{'' if abs(off) <= TOLERANCE[name] else ' !'})")
        print(f"| {line['load']} | {line['requests']} | {' | '.join(cells)} |")
    for name, most in TOLERANCE.items():
        off = [abs(line["simulated"][name] / line["real"][name] - 1) for line in lines]
        num = sum(1 for each in off if each <= most)
        apart = max(line["spread"][name] for line in lines)
        print(
            f"{name}: within {most:.0%} on {num} of {len(off)} loads, worst {max(off):.1%}, mean {statistics.mean(off):.1%}; "
            f"real runs of the same load are up to {apart:.1%} apart"
        )
    kept = [
        line
        for line in lines
        if all(
            abs(line["simulated"][key] / line["real"][key] - 1) <= TOLERANCE[key] for key in names
        )
    ]
    print(f"all four: {len(kept)} of {len(lines)} loads")


def write_quantized(folder: Path, shape: dict[str, Any], group: int = 64) -> None:
    """A Llama of random 4-bit weights, as GPTQ stores them: dense ones would be computed in float32
    on a CPU."""
    import numpy as np
    import torch
    from safetensors.torch import save_file

    draw, hidden, inner = np.random.default_rng(0), shape["hidden_size"], shape["intermediate_size"]
    heads, kv_heads = (
        shape["num_attention_heads"] * shape["head_dim"],
        shape["num_key_value_heads"] * shape["head_dim"],
    )
    attention = {
        "q_proj": (heads, hidden),
        "k_proj": (kv_heads, hidden),
        "v_proj": (kv_heads, hidden),
        "o_proj": (hidden, heads),
    }
    linears = {f"self_attn.{name}": sizes for name, sizes in attention.items()}
    linears |= {
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    made = {"model.embed_tokens.weight": torch.randn(shape["vocab_size"], hidden).bfloat16()}
    made["model.norm.weight"] = torch.ones(hidden)
    for layer in range(shape["num_hidden_layers"]):
        for name, (num_out, width) in linears.items():
            begin = f"model.layers.{layer}.{name}"
            codes = draw.integers(-(2**31), 2**31, (width // 8, num_out), dtype=np.int32)
            made[f"{begin}.qweight"] = torch.from_numpy(codes)
            made[f"{begin}.qzeros"] = torch.full(
                (width // group, num_out // 8), 0x77777777, dtype=torch.int32
            )
            made[f"{begin}.scales"] = torch.full(
                (width // group, num_out), 0.005, dtype=torch.float16
            )
            made[f"{begin}.g_idx"] = torch.arange(width, dtype=torch.int32) // group
        for name in ("input_layernorm", "post_attention_layernorm"):
            made[f"model.layers.{layer}.{name}.weight"] = torch.ones(hidden)
    save_file(made, folder / "model.safetensors")
    settings = {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True}
    config = shape | {"quantization_config": settings, "eos_token_id": 1, "bos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))


def _machine() -> str:
    here = machine.detect()
    return here.gpu or f"{platform.machine()}, {here.num_cores} cores"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--shape", choices=tuple(MODELS), help="random weights of this shape, instead of a model"
    )
    parser.add_argument("--layers", type=int, help="of that shape, only so many")
    parser.add_argument("--profile", help="use this one")
    parser.add_argument("--seconds", type=float, help="for calibration")
    parser.add_argument(
        "--rounds", type=int, help="of calibration and real runs, each with requests of its own"
    )
    parser.add_argument(
        "--repeats", type=int, default=1, help="of each real run: how far are two of them apart?"
    )
    parser.add_argument("--lengths", type=float, help="multiplies the lengths of prompts")
    parser.add_argument("--outputs", type=float, help="multiplies the lengths of outputs")
    parser.add_argument("--requests", type=float, help="multiplies their numbers of requests")
    parser.add_argument("--max-context", type=int)
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="on a CPU: one is disturbed least by others on the machine",
    )
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        help="cpu: time that this process computes; others do not disturb it",
    )
    parser.add_argument("--only", help="loads, separated by commas; held-out: those of HELD_OUT")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT", ".")),
        help="folder of profile.json, results.json",
    )
    given = parser.parse_args()
    on_gpu = given.device == "cuda"
    given.now = (
        time.process_time
        if (given.clock or ("wall" if on_gpu else "cpu")) == "cpu"
        else time.perf_counter
    )
    given.seconds = given.seconds or (25.0 if on_gpu else 45.0)
    given.rounds = given.rounds or (1 if on_gpu else 2)
    given.lengths = given.lengths or (1.0 if on_gpu else 0.05)
    given.outputs = given.outputs or (1.0 if on_gpu else 0.3)
    given.requests = given.requests or (1.0 if on_gpu else 0.4)
    options: dict[str, Any] = {
        "device": given.device,
        "model": given.model,
        "speculate": "off",
        "max_waiting": 10**6,
    }
    options["max_context"] = given.max_context or (34816 if on_gpu else 2048)
    options["threads"] = None if on_gpu else given.threads
    if given.shape:
        folder = Path(tempfile.mkdtemp())
        shape = MODELS[given.shape] | ({"num_hidden_layers": given.layers} if given.layers else {})
        if on_gpu:
            (folder / "config.json").write_text(json.dumps(shape))
        else:
            write_quantized(folder, shape)
        options |= {"model": str(folder), "load_format": "dummy" if on_gpu else "auto"}
    begin = time.perf_counter()
    core = load_core(EngineOptions(**options))
    print(
        f"{_machine()}: ready in {time.perf_counter() - begin:.1f} s, {core.config.num_kv_tokens:,} KV tokens",
        flush=True,
    )
    given.out.mkdir(parents=True, exist_ok=True)
    run(core, given, given.shape or given.model)
    print(f"wrote {given.out}; all in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
