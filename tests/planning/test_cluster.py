"""Clusters of simulated engines: the order of time, placement, prefill and decode engines, models
that share devices."""

import math
import random
from dataclasses import replace

import pytest

from tidemill.planning.cluster import BLOCK, DECODE, PREFILL, Cluster, EngineSpec, Job, Prefilled
from tidemill.planning.cost import LinearCost
from tidemill.planning.hardware import HARDWARE, Shape
from tidemill.planning.load import Lengths, poisson
from tidemill.planning.plans import Case, Limits, Plan, Pool, Slo, summarize
from tidemill.planning.shapes import SHAPES
from tidemill.planning.simulator import Arrival, SimConfig, SimEngine
from tidemill.sched.placement import Placement

CONFIG = SimConfig(num_rows=8, token_budget=64, num_pages=2000, page_size=16, max_context=8192)
COST = LinearCost(0.01, 0.001, 1e-6)
SECOND = LinearCost(fixed_s=1.0)  # every step takes one


def random_jobs(num, rate, seed=0):
    return poisson([("", rate)], num, Lengths(1, 300), Lengths(1, 40), seed)


def served(specs, jobs, **more):
    return {one.job.number: one for one in Cluster(specs, **more).run(jobs)}


def test_engines_run_lazily_get_the_requests_they_would_get_if_all_were_run_to_every_arrival():
    jobs = random_jobs(60, 6.0)
    engines, placement, where = {str(i): SimEngine(CONFIG, COST) for i in range(3)}, Placement(), {}
    for job in jobs:
        loads = dict.fromkeys(engines, 0)
        for name, engine in engines.items():
            engine.run_until(job.at_s)
            for other in jobs:
                if where.get(other.number) == name:
                    times = engine.token_times_s[str(other.number)]
                    loads[name] += len(times) < other.num_output or times[-1] > job.at_s
        name = where[job.number] = placement.choose(job.keys, loads).name
        placement.note(name, job.keys)
        engines[name].submit(
            Arrival(
                str(job.number),
                job.at_s,
                job.num_prompt,
                job.num_output,
                prompt_ids=tuple(job.prompt_ids()),
            )
        )
    for engine in engines.values():
        engine.run_until(math.inf)
    found = served([EngineSpec(CONFIG, COST)] * 3, jobs)
    assert len(set(where.values())) == 3
    for job in jobs:
        times = engines[where[job.number]].token_times_s[str(job.number)]
        assert (found[job.number].engine, found[job.number].first_s, found[job.number].last_s) == (
            int(where[job.number]), times[0], times[-1],
        )  # fmt: skip


def test_engines_that_get_nothing_are_not_made():
    cluster = Cluster([EngineSpec(CONFIG, COST)] * 1000)
    assert len(cluster.run([Job(0, 5.0, 100, 3)])) == 1
    assert cluster.num_used == 1


def pair(link=32.0, latency_s=0.0, cost=SECOND):
    prefill = EngineSpec(
        CONFIG, cost, PREFILL, kv_token_bytes=1.0, link=link, link_latency_s=latency_s
    )
    return [prefill, replace(prefill, role=DECODE)]


def test_a_kv_cache_is_sent_while_the_prompt_is_computed():
    # Two chunks of 64 tokens, a second each. 128 bytes take 4 s from the end of the first: until 5.
    # Then a token each second.
    one = served(pair(latency_s=0.25), [Job(0, 0.0, 128, 4)])[0]
    assert (one.first_s, one.gaps_s, one.num_sent) == (2.0, [4.25, 1.0, 1.0], 128)
    assert one.hidden == 1 - 3.25 / 4.25
    fast = served(pair(link=math.inf), [Job(0, 0.0, 128, 4)])[0]
    assert (fast.gaps_s, fast.hidden) == ([1.0, 1.0, 1.0], 1.0)


def test_a_link_sends_one_kv_cache_after_the_other():
    found = served(pair(link=16.0), [Job(i, 0.0, 64, 2) for i in range(2)])
    assert [found[i].first_s for i in range(2)] == [1.0, 2.0]
    assert [found[i].last_s for i in range(2)] == [6.0, 10.0]  # 4 s each


def test_pages_that_the_decode_engine_has_are_not_sent_and_its_prompts_are_not_computed():
    jobs = [Job(0, 0.0, BLOCK + 100, 2, blocks=(7,)), Job(1, 100.0, BLOCK + 200, 2, blocks=(7,))]
    found = served(pair(link=1e9), jobs)
    assert [found[i].num_sent for i in range(2)] == [608, 704 - BLOCK]
    # one step: of 12 chunks of prompt, none
    assert [round(found[i].gaps_s[0], 3) for i in range(2)] == [1.0, 1.0]


def test_short_prompts_are_computed_by_a_decode_engine():
    found = served(pair(), [Job(0, 0.0, 4, 3), Job(1, 0.0, 5, 3)])
    assert [found[i].engine for i in range(2)] == [1, 0]


def test_decode_engines_take_no_more_requests_than_they_have_room_for():
    few = [replace(spec, config=replace(CONFIG, num_pages=16)) for spec in pair(link=1e9)]
    found = served(few, [Job(i, 0.0, 100, 30) for i in range(6)])
    assert len(found) == 6
    assert all(len(one.gaps_s) == 29 for one in found.values())
    assert max(one.gaps_s[0] for one in found.values()) > 20  # had to wait for the pages of others


def test_prefill_engines_need_to_be_simulated_once_only():
    jobs = [job for job in random_jobs(40, 5.0) if job.num_prompt > 4]
    specs = [*[pair(cost=COST)[0]] * 2, *[pair(cost=COST)[1]] * 2]
    both = served(specs, jobs)
    alone = served(specs[:2], jobs)
    again = served(
        specs,
        jobs,
        prefilled={number: Prefilled(one.engine, one.first_s) for number, one in alone.items()},
    )
    assert again == both


def test_cells_keep_their_requests():
    specs = [replace(spec, cell=cell) for cell in range(2) for spec in pair(cost=COST)]
    cluster = Cluster(specs)
    assert len(cluster.run(random_jobs(30, 20.0))) == 30
    assert cluster.num_used == 4


def test_models_that_share_devices_take_turns():
    job = Job(0, 0.0, 10, 5, model="a")
    one = EngineSpec(CONFIG, SECOND, model="a", devices="gpu")
    alone = served([one], [job])[0]
    beside = served([one, replace(one, model="b")], [job, replace(job, number=1, model="b")])
    assert alone.last_s == 5.0
    assert sorted(beside[i].last_s for i in range(2)) == [9.0, 10.0]


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_beside_one_that_gets_nothing_an_engine_is_as_fast_as_alone(steps_ahead):
    config, cost = replace(CONFIG, steps_ahead=steps_ahead), replace(COST, host_s=0.004)
    one = EngineSpec(config, cost, model="", devices="gpu")
    jobs = random_jobs(40, 4.0)
    alone, beside = (served(specs, jobs) for specs in ([one], [one, replace(one, model="b")]))
    for number, job in alone.items():
        assert (beside[number].first_s, beside[number].last_s) == pytest.approx(
            (job.first_s, job.last_s)
        )


def test_under_a_mixed_load_prefill_and_decode_engines_halve_the_gaps_between_tokens():
    rng = random.Random(1)
    prompt = [rng.choice((100, 6000)) for _ in range(80)]
    jobs = [
        replace(job, num_prompt=num)
        for job, num in zip(
            poisson([("", 8.0)], 80, Lengths(1, 1), Lengths(60, 120)), prompt, strict=True
        )
    ]
    case = Case({"": SHAPES["llama8b"]}, jobs, Slo(1.0, 0.05), HARDWARE["H200"], 2)
    plans = Plan((Pool(2),)), Plan((Pool(1, role=PREFILL), Pool(1, role=DECODE)))
    colocated, divided = (
        summarize(case, plan, Cluster(case.specs(plan)).run(jobs)) for plan in plans
    )
    assert colocated.gap_s[1] >= 2 * divided.gap_s[1]
    assert colocated.num_tokens == divided.num_tokens == sum(job.num_output for job in jobs)


def test_the_pool_of_a_plan_has_its_shape_and_limits():
    case = Case({"": SHAPES["llama70b"]}, [Job(0, 0.0, 100, 10)], Slo(1, 1), HARDWARE["H200"], 8)
    (spec,) = case.specs(Plan((Pool(1, Shape(4), limits=Limits("splitfuse", 1024, 32)),)))
    assert (spec.config.policy, spec.config.token_budget, spec.config.num_rows) == (
        "splitfuse",
        1024,
        32,
    )
    assert not case.fits(Pool(1, Shape(1)))
    assert case.fits(Pool(1, Shape(2)))
