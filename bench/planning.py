"""Clusters in the simulator: prefill and decode engines against colocated ones, 1,000 GPUs for an
hour of a trace, and a plan to 1,000 GPUs.

    python -m bench.planning mixed [--plot docs/images/disaggregation-simulated.svg] python -m
    bench.planning hour --trace mooncake_conversation.jsonl [--times 1] python -m bench.planning
    plan --trace mooncake_conversation.jsonl [--plot docs/images/plan-1000.svg]

All figures but the times are simulated, with costs of an H200 that are estimated from the model's
shape, or measured (`--profile`). Times are of the process (CPU seconds of one core), so that others
on the machine matter little.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tidemill.bench.plots import _pyplot, _save
from tidemill.planning.cluster import DECODE, PREFILL, Cluster, Job, Served
from tidemill.planning.costs import Costs
from tidemill.planning.hardware import HARDWARE
from tidemill.planning.load import Lengths, copies, in_order, poisson, read_trace
from tidemill.planning.plans import Case, Limits, Plan, Pool, Result, Slo, summarize
from tidemill.planning.profile import shipped_profiles
from tidemill.planning.report import why
from tidemill.planning.search import search
from tidemill.planning.shapes import SHAPES
from tidemill.planning.space import Space
from tidemill.planning.trace import MAX_REQUESTS

H200 = HARDWARE["H200"]
GPUS = 1000
_told: set[str] = set()
SMALL = Limits(token_budget=512)


def make_case(
    model: str, jobs: list[Job], slo: Slo, num: int, profile: str | None = None, page_size: int = 64
) -> Case:
    own = f"{H200.name}-{model}".lower()
    given = profile or (own if own in shipped_profiles() else "none")
    costs = Costs({"": SHAPES[model]}, H200, [given])
    if model not in _told:
        print(f"costs: {costs.source}")
        _told.add(model)
    return Case(costs.models, jobs, slo, H200, num, page_size=page_size, costs=costs)


def run(case: Case, plan: Plan) -> tuple[Result, list[Served], float]:
    began = time.process_time()
    served = Cluster(case.specs(plan)).run(case.jobs)
    assert served is not None
    return summarize(case, plan, served), served, time.process_time() - began


# ---- mixed


def mixed_jobs(rate: float, num: int) -> list[Job]:
    """Chat, and every fifth request a long document."""
    chat = poisson([("", 0.8 * rate)], num * 4 // 5, Lengths(100, 1000), Lengths(100, 400), seed=1)
    documents = poisson(
        [("", 0.2 * rate)], num // 5, Lengths(6000, 16_000), Lengths(100, 400), seed=2
    )
    return in_order([*chat, *documents])


def mixed(given: argparse.Namespace) -> None:
    heads = (
        "TTFT p50 / p99 ms | TPOT p50 / p99 ms | between tokens p50 / p99 ms | p99, times the first"
    )
    lines = [
        "|---" * 9 + "|",
        f"| GPUs | requests/s | plan | tokens a step | {heads} | sending hidden |",
    ]
    curves: dict[str, list[float]] = {}
    for num, num_prefill, rate in ((2, 1, 6.0), (4, 2, 12.0), (8, 3, 24.0)):
        case = make_case(
            given.model, mixed_jobs(rate, given.requests), Slo(1, 0.05), num, given.profile
        )
        while lines:
            print(lines.pop())
        divided = Plan((Pool(num_prefill, role=PREFILL), Pool(num - num_prefill, role=DECODE)))
        results = [
            run(case, plan)
            for plan in (divided, Plan((Pool(num),)), Plan((Pool(num, limits=SMALL),)))
        ]
        for result, served, _ in results:
            name, budget = result.plan.name, result.plan.pools[0].limits.token_budget
            times = (
                f"{1000 * a:.1f} / {1000 * b:.1f}"
                for a, b in (result.ttft_s, result.tpot_s, result.gap_s)
            )
            worse = result.gap_s[1] / results[0][0].gap_s[1]
            hidden = f"{result.hidden:.0%}" if result.plan.is_disaggregated else ""
            print(
                f"| {num} | {rate:.0f} | {name} | {budget} | {' | '.join(times)} | {worse:.1f} | {hidden} |",
                flush=True,
            )
            if num == 4:
                curves[f"{name}, {budget} tokens a step"] = sorted(
                    gap for one in served for gap in one.gaps_s
                )
    if given.plot:
        print(_save(_draw_gaps(curves), given.plot))


def _draw_gaps(curves: dict[str, list[float]]) -> Any:
    figure, axes = _pyplot().subplots(figsize=(6.4, 3.2))
    for (name, gaps), color in zip(curves.items(), ("#0e6468", "#e08a2e", "#8fa5ab"), strict=True):
        at = [min(1 - 10 ** (-i / 40), 1 - 1 / len(gaps)) for i in range(1, 161)]
        axes.plot(
            [1 / (1 - part) for part in at],
            [1000 * gaps[int(part * len(gaps))] for part in at],
            label=name,
            color=color,
        )
    axes.set(xscale="log", xlabel="one gap of so many is longer", ylabel="between two tokens (ms)")
    axes.set_title("4 × H200, Llama 8B, mixed load (simulated)", fontsize=9, loc="left")
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


# ---- an hour of a trace


def hour(given: argparse.Namespace) -> None:
    jobs = read_trace(given.trace, limit=given.limit)
    loaded = in_order(copies(jobs, given.times)) if given.times > 1 else jobs
    case = make_case(given.model, loaded, Slo(2, 0.05), GPUS, given.profile, page_size=512)
    result, _, seconds = run(case, Plan((Pool(GPUS),)))
    span, peak = loaded[-1].at_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{GPUS:,} GPUs, {span:,.0f} s of the trace × {given.times}: {len(loaded):,} requests, {len(loaded) / span:.1f} a second"
    )
    print(
        f"simulated in {seconds:.0f} s of one core, {GPUS * span / seconds:,.0f} GPU seconds a second, {peak:.1f} GiB"
    )
    (ttft, ttft_99), (tpot, tpot_99) = result.ttft_s, result.tpot_s
    print(
        f"TTFT p50/p99 {ttft:.3f}/{ttft_99:.3f} s, TPOT p50/p99 {1000 * tpot:.2f}/{1000 * tpot_99:.2f} ms"
    )


# ---- a plan to 1,000 GPUs


def plan(given: argparse.Namespace) -> None:
    """For one times the trace's load it is searched; for more, its engines are multiplied, and the
    whole is simulated."""
    slo = Slo(given.ttft, given.tpot)
    jobs = read_trace(given.trace, limit=given.limit)
    case = make_case(given.model, jobs, slo, given.devices, given.profile, page_size=512)
    began = time.process_time()
    found = search(
        case,
        Space(["continuous"], [2048, 8192], [256]),
        progress=lambda text: print(f"  {text}", flush=True),
    )
    seconds = time.process_time() - began
    print(
        f"searched in {seconds:.0f} s of one core, {found.num_simulated} simulations of {len(jobs):,} requests"
    )
    print("\n".join(why(case, found)))
    one = found.winner.plan
    most = GPUS // one.num_devices
    print(
        "| load × | requests/s | plan | GPUs | in SLO | TTFT p50 / p99 s | TPOT p50 / p99 ms | GPU h / M tokens | simulated in |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    rows = []
    for times in sorted({1, *(max(1, round(most * part)) for part in given.parts)}):
        loaded = (
            case if times == 1 else replace(case, jobs=in_order(copies(jobs[: given.part], times)))
        )
        wanted = Plan(
            tuple(
                replace(pool, num=pool.num * times, cells=pool.cells * times) for pool in one.pools
            )
        )
        result, _, seconds = run(loaded, wanted)
        rows.append((times, result))
        rate = len(loaded.jobs) / (loaded.jobs[-1].at_s - loaded.jobs[0].at_s)
        shown = f"{result.ttft_s[0]:.2f} / {result.ttft_s[1]:.2f} | {1000 * result.tpot_s[0]:.1f} / {1000 * result.tpot_s[1]:.1f}"
        print(
            f"| {times} | {rate:.1f} | {wanted.name} | {wanted.num_devices} | {result.attainment:.1%} | {shown} "
            f"| {result.gpu_hours:.2f} | {seconds:.0f} s |",
            flush=True,
        )
    if given.plot:
        print(_save(_draw_growth(rows, slo), given.plot))


def _draw_growth(rows: list[tuple[int, Result]], slo: Slo) -> Any:
    figure, (left, right) = _pyplot().subplots(1, 2, figsize=(9, 3.2))
    gpus = [result.plan.num_devices for _, result in rows]
    left.plot(gpus, [100 * result.attainment for _, result in rows], marker="o", color="#0e6468")
    left.axhline(100 * slo.attainment, color="#5a686a", linewidth=0.8, linestyle=":")
    left.set(xlabel="GPUs", ylabel="requests within the SLOs (%)", xscale="log", ylim=(80, 100.5))
    for i, (name, limit, values) in enumerate(
        (
            ("first token", slo.ttft_s, [r.ttft_s[1] for _, r in rows]),
            ("token after it", slo.tpot_s, [r.tpot_s[1] for _, r in rows]),
        )
    ):
        right.plot(
            gpus,
            [value / limit for value in values],
            marker="o",
            label=f"{name}, p99",
            color=("#e08a2e", "#3b76af")[i],
        )
    right.axhline(1, color="#5a686a", linewidth=0.8, linestyle=":")
    right.set(xlabel="GPUs", ylabel="of the limit", xscale="log", ylim=(0, None))
    right.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        "simulated: the load of a trace, times what the GPUs are", fontsize=9, x=0.01, ha="left"
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["mixed", "hour", "plan"])
    parser.add_argument("--model", choices=list(SHAPES))
    parser.add_argument("--profile", help="measured costs; none: estimates")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--times", type=int, default=1, help="hour: copies of the trace's load")
    parser.add_argument(
        "--limit", type=int, default=MAX_REQUESTS, help="requests of the trace that are read"
    )
    parser.add_argument("--requests", type=int, default=400, help="mixed: requests")
    parser.add_argument(
        "--devices", type=int, default=64, help="plan: most devices for the trace's own load"
    )
    parser.add_argument(
        "--part", type=int, default=1000, help="plan: requests of the trace that are multiplied"
    )
    parser.add_argument(
        "--parts", type=float, nargs="*", default=[0.1, 0.3, 1.0], help="plan: of the 1,000 GPUs"
    )
    parser.add_argument("--ttft", type=float, default=8.0)
    parser.add_argument("--tpot", type=float, default=0.05)
    parser.add_argument("--plot", type=Path)
    given = parser.parse_args()
    if given.what != "mixed" and given.trace is None:
        parser.error("--trace is needed")
    given.model = given.model or ("llama70b" if given.what == "plan" else "llama8b")
    {"mixed": mixed, "hour": hour, "plan": plan}[given.what](given)


if __name__ == "__main__":
    main()
