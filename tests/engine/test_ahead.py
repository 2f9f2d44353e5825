"""A runner may work one step ahead of the host: the next step is planned and launched before the
last one's tokens are known.

The GPU runner does; here the CPU runner is made to, since it too reads the next input token from
the row and not from the plan.
"""

import random

import pytest

from tests.helpers import (
    Grower,
    Guesser,
    greedy,
    guess_with,
    load_model,
    make_core,
    make_llama,
    model_with_cache,
    run,
    structured_core,
    watch,
)
from tidemill.engine.parts.drafting import Drafting
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.types import events
from tidemill.types.sampling import Grammar, SamplingParams
from tidemill.types.wire import Abort, Submit


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


@pytest.mark.parametrize(
    "options",
    [{}, {"token_budget": 16, "max_requests": 8}, {"kv_memory_bytes": 100_000}, {"page_size": 1}],
)
def test_the_same_answers(model, options):
    """Chunked, preempted, with penalties that read what was sampled, and ending at token ids that
    only the device knows yet."""
    kinds = [
        greedy(20, logprobs=1),
        SamplingParams(temperature=0.9, seed=7, max_tokens=25, n=2),
        SamplingParams(
            temperature=1.0, seed=8, repetition_penalty=1.3, frequency_penalty=0.3, max_tokens=15
        ),
        greedy(30, stop_token_ids=tuple(range(0, 256, 5))),
        greedy(1),
    ]
    asked = {f"r{i}": (prompt, kinds[i % len(kinds)]) for i, prompt in enumerate(prompts(25))}
    expected = run(make_core(model), asked, eos=(1, 2, 3))
    assert {answer.finish_reason for answer in expected.values()} == {"stop", "length"}
    core = ahead(model, **options)
    assert run(core, asked, eos=(1, 2, 3)) == expected
    assert not core.in_flight


def test_nothing_is_planned_past_the_last_token(model):
    """max_tokens is known beforehand: no step is wasted on a token past it."""
    core = ahead(model)
    steps = []
    launch = core.runner.launch
    core.runner.launch = lambda plan: (steps.append(plan.num_tokens), launch(plan))[1]
    run(core, {"a": ([1, 2, 3], greedy(5))})
    assert steps == [3, 1, 1, 1, 1]


def test_arrivals_and_aborts_while_steps_are_in_flight(model):
    core, draw, live, made = (
        ahead(model, kv_memory_bytes=150_000, max_requests=8, token_budget=40),
        random.Random(1),
        set(),
        0,
    )
    asked = prompts(200, 60)
    for _ in range(400):
        if draw.random() < 0.4 and made < len(asked):
            params = SamplingParams(
                temperature=float(made % 2),
                seed=made,
                max_tokens=draw.randrange(1, 30),
                n=1 + made % 3 // 2,
            )
            core.submit(Submit(str(made), asked[made], params))
            live.add(str(made))
            made += 1
        if live and draw.random() < 0.15:
            name = draw.choice(sorted(live))
            core.abort(Abort(name, "left"))
            live.discard(name)
        core.step()
        live &= set(core.live)
        core.scheduler.table.check_integrity()
    while core.has_work:
        core.step()
        core.scheduler.table.check_integrity()
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
    assert not core.in_flight
    assert not core.has_work
    core.scheduler.table.check_integrity()
    alone = run(make_core(model), {"x": ([5, 6, 7], greedy(6))})
    assert run(core, {"x": ([5, 6, 7], greedy(6))}) == alone


KINDS = [
    greedy(40, logprobs=1),
    SamplingParams(temperature=0.9, seed=7, max_tokens=35, n=2),
    SamplingParams(
        temperature=1.0,
        seed=8,
        repetition_penalty=1.3,
        frequency_penalty=0.3,
        max_tokens=25,
        logprobs=2,
    ),
    greedy(50, stop_token_ids=tuple(range(0, 256, 5))),
]


@pytest.fixture
def follow_all(monkeypatch):
    """Steps follow drafts however likely it is for nothing."""
    monkeypatch.setattr(Drafting, "sure", 1e-30)


def guessed(model, asked, chance, eos=(), **options):
    """What comes, and a core that works ahead with a drafter that is right about it now and then."""
    expected = run(make_core(model, speculate="off"), asked, eos)
    answers = {tuple(prompt): expected[name].tokens for name, (prompt, _) in asked.items()}
    return expected, guess_with(ahead(model, **options), Guesser(answers, chance))


@pytest.mark.usefixtures("follow_all")
@pytest.mark.parametrize(
    ("chance", "options"),
    [
        *((chance, {}) for chance in (0.0, 0.6, 0.95, 1.0)),
        (0.6, {"token_budget": 16, "max_requests": 8}),
        (0.95, {"kv_memory_bytes": 130_000}),
        (0.6, {"page_size": 1}),
    ],
)
def test_steps_may_follow_drafts_that_are_being_verified(model, chance, options):
    """Always, however often that is for nothing: the same tokens and logprobs."""
    asked = {f"r{i}": (prompt, KINDS[i % len(KINDS)]) for i, prompt in enumerate(prompts(16))}
    expected, core = guessed(model, asked, chance, (1, 2, 3), **options)
    seen = watch(core)
    assert run(core, asked, eos=(1, 2, 3)) == expected
    assert core.scheduler.kv.num_free_pages == core.scheduler.kv.num_pages
    if chance < 1.0:
        assert any(isinstance(event, events.StepLost) for event in seen)


@pytest.mark.usefixtures("follow_all")
@pytest.mark.parametrize("kind", ["llama", "windows"])
def test_windows_keep_what_is_seen_if_drafts_are_wrong(kind, tmp_path):
    other = model_with_cache(kind, tmp_path)
    asked = {f"r{i}": (prompt, greedy(60)) for i, prompt in enumerate(prompts(6))}
    expected, core = guessed(other, asked, 0.8, page_size=2)
    assert run(core, asked) == expected


def test_drafts_that_are_nearly_sure_are_followed(model):
    """So that no step waits for another, and as many tokens come as if each had."""
    asked = {f"r{i}": (prompt, greedy(80, ignore_eos=True)) for i, prompt in enumerate(prompts(4))}
    expected, core = guessed(model, asked, 1.0)
    ahead_of, drafts, lost = [], 0, 0
    launch = core.runner.launch
    core.runner.launch = lambda plan: (
        ahead_of.append(bool(plan.drafts) and core.is_in_flight),
        launch(plan),
    )[1]
    for name, (prompt, params) in asked.items():
        core.submit(Submit(name, prompt, params))
    made = {name: [] for name in asked}
    while core.has_work:
        output, _ = core.step()
        for delta in output.deltas:
            made[delta.request_id] += delta.token_ids
        drafts += sum(
            num
            for one in output.events
            if isinstance(one, events.DraftsVerified)
            for _, num, _ in one.of
        )
        lost += sum(isinstance(one, events.StepLost) for one in output.events)
    assert made == {name: expected[name].tokens for name in asked}
    assert sum(ahead_of) > len(ahead_of) / 2
    assert len(ahead_of) <= 1 + -(-79 // 6) + 4
    assert drafts > 4 * 50
    assert not lost


@pytest.mark.parametrize("chance", [0.0, 0.5])
def test_others_are_waited_for(model, chance):
    asked = {"x": (prompts(1)[0], greedy(60, ignore_eos=True))}
    expected, core = guessed(model, asked, chance)
    launch = core.runner.launch

    def launched(plan):
        assert not any(item.num_drafts for step in core.in_flight for item in step.plan.items)
        return launch(plan)

    core.runner.launch = launched
    assert run(core, asked) == expected


@pytest.mark.usefixtures("follow_all")
def test_trees_and_grammars_are_waited_for(model, tiny_folder):
    """What follows a tree, or a token that a grammar has not seen, is not planned ahead."""
    asked = {f"r{i}": (prompt, greedy(30)) for i, prompt in enumerate(prompts(4))}
    expected = run(make_core(model, speculate="off"), asked)
    answers = {tuple(prompt): expected[name].tokens for name, (prompt, _) in asked.items()}
    assert run(guess_with(ahead(model), Grower(answers, 0.8)), asked) == expected
    small, eos = load_model(tiny_folder), Tokenizer.load(tiny_folder).eos_token_ids
    grammar = Grammar("json_schema", '{"type":"object","properties":{"a":{"type":"boolean"}}}')
    params = SamplingParams(max_tokens=60, grammar=grammar, seed=3)
    asked = {"g": ([5, 6, 7], params), "p": ([5, 6, 8], greedy(30))}
    expected = run(structured_core(small, tiny_folder, "llguidance", speculate="off"), asked, eos)
    core = structured_core(small, tiny_folder, "llguidance")
    core.runner.steps_ahead = 1
    answers = {tuple(prompt): expected[name].tokens for name, (prompt, _) in asked.items()}
    assert run(guess_with(core, Guesser(answers, 0.8)), asked, eos) == expected


@pytest.mark.usefixtures("follow_all")
def test_aborts_and_preemption_while_drafts_are_followed(model):
    asked = {
        str(i): (prompt, greedy(30, ignore_eos=True)) for i, prompt in enumerate(prompts(40, 60))
    }
    expected, core = guessed(
        model, asked, 0.85, kv_memory_bytes=150_000, max_requests=8, token_budget=40
    )
    draw, made, gone = random.Random(1), {name: [] for name in asked}, set()
    for name, (prompt, params) in asked.items():
        core.submit(Submit(name, prompt, params))
    while core.has_work:
        if draw.random() < 0.05 and core.live:
            gone.add(name := draw.choice(sorted(core.live)))
            core.abort(Abort(name, "left"))
        if draw.random() < 0.1 and core.scheduler.running:
            core.scheduler.table.preempt(draw.choice(core.scheduler.running), "test")
        for delta in core.step()[0].deltas:
            made[delta.request_id] += delta.token_ids
        core.scheduler.table.check_integrity()
    assert all(tokens == expected[name].tokens[: len(tokens)] for name, tokens in made.items())
    assert all(made[name] == expected[name].tokens for name in asked if name not in gone)
    assert len(gone) < 30


class Short(Guesser):
    """Has no guess where so many tokens are asked for: those after drafts in flight."""

    def propose(self, asks):
        return [
            made if ask.most <= 5 else []
            for ask, made in zip(asks, super().propose(asks), strict=True)
        ]


class Same(Guesser):
    """The same token for ever."""

    def propose(self, asks):
        return [[251] * ask.most for ask in asks]


@pytest.mark.usefixtures("follow_all")
def test_each_step_names_the_drafter_of_its_own_drafts(model):
    """The next one's may be another's, and are planned before they are known to be right."""
    asked = {f"r{i}": (prompt, greedy(40, ignore_eos=True)) for i, prompt in enumerate(prompts(3))}
    expected, core = guessed(model, asked, 1.0)
    assert all(251 not in answer.tokens for answer in expected.values())
    answers = {tuple(prompt): expected[name].tokens for name, (prompt, _) in asked.items()}
    drafters = [Short(answers, 1.0, name="short"), Same(name="same")]
    guess_with(core, *drafters)
    made_by, launch = {}, core.runner.launch

    def launched(plan):
        for item in plan.items:
            if item.num_drafts:
                name = core.scheduler.requests[item.seq].request_id
                made_by[plan.step, name] = "same" if 251 in plan.drafts[item.row] else "short"
        return launch(plan)

    core.runner.launch = launched
    for name, (prompt, params) in asked.items():
        core.submit(Submit(name, prompt, params))
    named = {}
    while core.has_work:
        for event in core.step()[0].events:
            if isinstance(event, events.DraftsVerified):
                named |= {(event.step, name): event.drafter for name, _, _ in event.of}
    assert set(named.values()) == {"short", "same"}
    assert all(made_by[which] == drafter for which, drafter in named.items())


def test_drafters_of_one_step_are_named_apart(model):
    """Each with its own requests."""
    asked = {f"r{i}": (prompt, greedy(20, ignore_eos=True)) for i, prompt in enumerate(prompts(2))}
    expected = run(make_core(model, speculate="off"), asked)
    drafters = [Known(expected, asked, "r0"), Known(expected, asked, "r1")]
    core = make_core(model)
    guess_with(core, *drafters)
    for name, (prompt, params) in asked.items():
        core.submit(Submit(name, prompt, params))
    named = set()
    while core.has_work:
        for event in core.step()[0].events:
            if isinstance(event, events.DraftsVerified):
                named |= {(event.drafter, request_id) for request_id, _, _ in event.of}
    assert named == {("r0", "r0"), ("r1", "r1")}


class Known(Guesser):
    """Guesses for one request only, and has its name."""

    def __init__(self, expected, asked, name):
        super().__init__({tuple(asked[name][0]): expected[name].tokens}, 1.0, name)

    def propose(self, asks):
        own = [tuple(ask.tokens[: ask.num_prompt]) in self.answers for ask in asks]
        return [
            made if is_own else [] for made, is_own in zip(super().propose(asks), own, strict=True)
        ]


@pytest.mark.usefixtures("follow_all")
def test_nothing_is_kept_of_steps_that_failed(model):
    """Neither of their drafts nor of their requests; what was learned of drafters stays."""
    asked = {f"r{i}": (prompt, greedy(40, ignore_eos=True)) for i, prompt in enumerate(prompts(4))}
    expected, core = guessed(model, asked, 0.9)
    collect, num_failed = core.runner.collect, 0

    def broken(launched):
        raise RuntimeError("boom")

    for _ in range(3):
        for name, (prompt, params) in asked.items():
            core.submit(Submit(name, prompt, params))
        while len(core.in_flight) < 1 or not core.in_flight[0].plan.drafts:
            core.step()
        core.runner.collect = broken
        num_failed += len(core.step()[1])
        core.runner.collect = collect
    assert num_failed == 12
    drafting = core.part(Drafting)
    assert not drafting._guesses
    assert not any(acceptance._of for acceptance in drafting._acceptance.values())
    assert run(core, asked) == expected
    assert not drafting._guesses
    assert not core.in_flight
