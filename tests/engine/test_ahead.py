"""A runner may work one step ahead of the host: the next step is planned and launched before the last one's tokens are known.

The GPU runner does; here the CPU runner is made to, since it too reads the next input token from the row and not from the plan.
"""

import random

import pytest

from tests.helpers import greedy, load_model, make_core, make_llama, run
from tidemill.sampling import SamplingParams
from tidemill.wire import Abort, Submit


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("ahead")
    make_llama(path, seed=5)
    return load_model(path)


def ahead(model, **options):
    core = make_core(model, **options)
    core.runner.steps_ahead = 1
    return core


def prompts(num: int, longest: int = 90) -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(256) for _ in range(draw.randrange(1, longest))] for _ in range(num)]


@pytest.mark.parametrize("options", [{}, {"token_budget": 16, "max_requests": 8}, {"kv_memory_bytes": 100_000}, {"page_size": 1}])
def test_the_same_answers(model, options):
    """Chunked, preempted, with penalties that read what was sampled, and ending at token ids that only the device knows yet."""
    kinds = [
        greedy(20, logprobs=1),
        SamplingParams(temperature=0.9, seed=7, max_tokens=25, n=2),
        SamplingParams(temperature=1.0, seed=8, repetition_penalty=1.3, frequency_penalty=0.3, max_tokens=15),
        greedy(30, stop_token_ids=tuple(range(0, 256, 5))),
        greedy(1),
    ]
    asked = {f"r{i}": (prompt, kinds[i % len(kinds)]) for i, prompt in enumerate(prompts(25))}
    expected = run(make_core(model), asked, eos=(1, 2, 3))
    assert {answer.finish_reason for answer in expected.values()} == {"stop", "length"}
    core = ahead(model, **options)
    assert run(core, asked, eos=(1, 2, 3)) == expected
    assert not core._in_flight


def test_nothing_is_planned_past_the_last_token(model):
    """max_tokens is known beforehand: no step is wasted on a token past it."""
    core = ahead(model)
    steps = []
    launch = core.runner.launch
    core.runner.launch = lambda plan: (steps.append(plan.num_tokens), launch(plan))[1]
    run(core, {"a": ([1, 2, 3], greedy(5))})
    assert steps == [3, 1, 1, 1, 1]


def test_arrivals_and_aborts_while_steps_are_in_flight(model):
    core, draw, live, made = ahead(model, kv_memory_bytes=150_000, max_requests=8, token_budget=40), random.Random(1), set(), 0
    asked = prompts(200, 60)
    for _ in range(400):
        if draw.random() < 0.4 and made < len(asked):
            params = SamplingParams(temperature=float(made % 2), seed=made, max_tokens=draw.randrange(1, 30), n=1 + made % 3 // 2)
            core.submit(Submit(str(made), asked[made], params))
            live.add(str(made))
            made += 1
        if live and draw.random() < 0.15:
            name = draw.choice(sorted(live))
            core.abort(Abort(name, "left"))
            live.discard(name)
        core.step()
        live &= set(core._live)
        core.scheduler.check_integrity()
    while core.has_work:
        core.step()
        core.scheduler.check_integrity()
    assert made > 100


def test_a_failing_step_fails_those_in_flight_and_no_others(model):
    core = ahead(model)
    for i, prompt in enumerate(prompts(4)):
        core.submit(Submit(str(i), prompt, greedy(30)))
    for _ in range(3):
        core.step()
    collect = core.runner.collect

    def broken(launched):
        raise RuntimeError("boom")

    core.runner.collect = broken
    _, failed = core.step()
    assert {refused.request_id for refused in failed} == {"0", "1", "2", "3"}
    core.runner.collect = collect
    assert not core._in_flight
    assert not core.has_work
    core.scheduler.check_integrity()
    alone = run(make_core(model), {"x": ([5, 6, 7], greedy(6))})
    assert run(core, {"x": ([5, 6, 7], greedy(6))}) == alone
