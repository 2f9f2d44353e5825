"""Speculative decoding never changes a token or a logprob, whoever guesses and however well."""

import pytest

from tests.helpers import (
    Answer,
    Guesser,
    greedy,
    guess_with,
    load_model,
    make_core,
    make_llama,
    run,
    structured_core,
    take,
)
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.sched.drafts import StepTimes, allot
from tidemill.types import events
from tidemill.types.sampling import Grammar, SamplingParams
from tidemill.types.wire import Finish, Submit

PARAMS = {
    "greedy": greedy(24, logprobs=3),
    "seeded": SamplingParams(temperature=0.9, top_p=0.95, top_k=50, max_tokens=24, seed=1234, logprobs=3),
    "adjusted": SamplingParams(
        temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.5, max_tokens=24, seed=-7, logprobs=2, min_tokens=9,
        stop_token_ids=tuple(range(0, 250, 3)), logit_bias={5: 2.0}, bad_word_ids=((7, 9), (11,)),
    ),
}  # fmt: skip
PROMPT = [(i * i) % 97 + 3 for i in range(40)] * 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("spec")
    make_llama(path, seed=5, vocab_size=250, initializer_range=0.15)
    return path


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


@pytest.fixture(scope="module")
def plain(model) -> dict[str, Answer]:
    return {
        name: run(make_core(model, speculate="off"), {"x": (PROMPT, params)})["x"]
        for name, params in PARAMS.items()
    }


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("chance", [0.0, 0.7, 1.0])
def test_tokens_and_logprobs_are_those_without_drafts(model, plain, kind, chance):
    drafter = Guesser({tuple(PROMPT): plain[kind].tokens}, chance)
    core = guess_with(make_core(model), drafter)
    assert run(core, {"x": (PROMPT, PARAMS[kind])})["x"] == plain[kind]
    assert drafter.num_asked > 0


@pytest.mark.parametrize("kind", PARAMS)
def test_right_drafts_save_steps(model, plain, kind):
    core = guess_with(make_core(model), Guesser({tuple(PROMPT): plain[kind].tokens}, 1.0))
    core.submit(Submit("x", PROMPT, PARAMS[kind]))
    answers, num_steps, verified = {"x": Answer()}, 0, []
    while core.has_work:
        output, _ = core.step()
        num_steps += 1
        for delta in output.deltas:
            answers["x"].tokens += delta.token_ids
        verified += [event for event in output.events if isinstance(event, events.DraftsVerified)]
    assert answers["x"].tokens == plain[kind].tokens
    assert num_steps <= 1 + -(-len(plain[kind].tokens) // 6)
    assert all(num_right == num for event in verified[:-1] for _, num, num_right in event.of)


@pytest.mark.parametrize(
    "options",
    [{"token_budget": 7, "max_requests": 3}, {"page_size": 1}, {"kv_memory_bytes": 2**17}],
)
def test_among_others_in_chunks_and_small_memory(model, plain, options):
    drafter = Guesser({tuple(PROMPT): plain["seeded"].tokens}, 0.7)
    requests = {
        "x": (PROMPT, PARAMS["seeded"]),
        "n": (PROMPT[:30], SamplingParams(n=4, seed=3, max_tokens=12)),
    }
    requests |= {f"o{i}": (PROMPT[i : i + 9], list(PARAMS.values())[i % 3]) for i in range(5)}
    expected = run(make_core(model, speculate="off", **options), requests)
    assert run(guess_with(make_core(model, **options), drafter), requests) == expected


def test_preempted_while_drafts_are_verified(model, plain):
    core = guess_with(
        make_core(model, token_budget=64), Guesser({tuple(PROMPT): plain["seeded"].tokens}, 0.7)
    )
    core.submit(Submit("x", PROMPT, PARAMS["seeded"]))
    answers, num_steps = {"x": Answer()}, 0
    while core.has_work:
        take(core, answers)
        num_steps += 1
        if num_steps in (3, 5) and core.scheduler.running:
            core.scheduler.table.preempt(core.scheduler.running[0], "test")
        core.scheduler.table.check_integrity()
    assert answers["x"] == plain["seeded"]


def test_a_stop_string_found_by_the_frontend_ends_it(model, plain):
    core = guess_with(make_core(model), Guesser({tuple(PROMPT): plain["greedy"].tokens}, 1.0))
    core.submit(Submit("x", PROMPT, PARAMS["greedy"]))
    core.step()
    core.step()
    assert core.finish(Finish("x", 0)) is not None
    assert not core.has_work
    core.scheduler.table.check_integrity()


def test_what_repeats_is_guessed_from_the_prompt(model):
    """Greedy decoding of a small model falls into a loop, which prompt lookup sees."""
    requests = {"x": (PROMPT, greedy(60))}
    core = make_core(model, speculate="ngram", adaptive_drafts=False)
    assert run(core, requests) == run(make_core(model, speculate="off"), requests)


def test_drafts_that_are_never_right_are_given_up(model):
    """A drafter that is always wrong is compared, not verified, and only every fourth step asks it."""
    core = make_core(model, speculate="ngram")
    drafter = Guesser({}, 0.0)
    guess_with(core, drafter, adaptive=True)
    core.submit(Submit("x", PROMPT, greedy(170)))
    drafted = []
    while core.has_work:
        drafted += [
            event.num_drafts
            for event in core.step()[0].events
            if isinstance(event, events.StepPlanned)
        ]
    assert 170 // 5 < drafter.num_asked < 170 // 3
    assert sum(drafted[20:]) == 0


def test_a_right_guess_ends_the_rest_of_a_drafter(model):
    """From then on it is asked for every token that no step has verified as a draft."""
    answer = run(make_core(model, speculate="off"), {"x": (PROMPT, greedy(60))})["x"]
    core = make_core(model, speculate="ngram")
    drafter = Guesser({}, 0.0)
    guess_with(core, drafter, most=1, slope=10.0, adaptive=True)  # no draft is worth its step
    core.submit(Submit("x", PROMPT, greedy(60)))
    asked = []
    for number in range(60):
        if number == 30:  # wrong so far, right from now on
            drafter.answers, drafter.chance = {tuple(PROMPT): answer.tokens}, 1.0
        before = drafter.num_asked
        core.step()
        asked.append(drafter.num_asked - before)
    assert asked[:2] == [0, 1]  # the prompt, then the first step that decodes
    assert sum(asked[:30]) < 12
    assert asked[35:59] == [1] * 24


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("chance", [0.3, 1.0])
def test_grammars_follow_the_drafts(tiny_folder, backend, chance):
    """Also where a draft goes on after the end of the document."""
    model, eos = load_model(tiny_folder), Tokenizer.load(tiny_folder).eos_token_ids
    grammar = Grammar(
        "json_schema",
        '{"type":"object","properties":{"a":{"type":"boolean"},"b":{"enum":["left","right"]}}}',
    )
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=60, grammar=grammar, logprobs=1)
    expected = run(
        structured_core(model, tiny_folder, backend, speculate="off"), {"x": (PROMPT, params)}, eos
    )["x"]
    core = guess_with(
        structured_core(model, tiny_folder, backend),
        Guesser({tuple(PROMPT): expected.tokens}, chance),
    )
    assert run(core, {"x": (PROMPT, params)}, eos)["x"] == expected
    assert expected.finish_reason == "stop"


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
def test_what_a_grammar_forces_is_guessed(tiny_folder, backend):
    model, tokenizer = load_model(tiny_folder), Tokenizer.load(tiny_folder)
    grammar = Grammar(
        "regex", "the (tide|mill) turns the great old wheel of the mill again and again"
    )
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=80, grammar=grammar)
    options = {"adaptive_drafts": False, "max_drafts": 4}
    expected = run(
        structured_core(model, tiny_folder, backend, speculate="off"),
        {"x": (PROMPT, params)},
        tokenizer.eos_token_ids,
    )
    core = structured_core(model, tiny_folder, backend, speculate="forced", **options)
    core.submit(Submit("x", PROMPT, params, list(tokenizer.eos_token_ids)))
    answers, verified = {"x": Answer()}, []
    while core.has_work:
        output, _ = core.step()
        for delta in output.deltas:
            answers["x"].tokens += delta.token_ids
        verified += [
            event.of[0] for event in output.events if isinstance(event, events.DraftsVerified)
        ]
    assert answers["x"].tokens == expected["x"].tokens
    assert verified
    assert {len(one) for one in verified} == {3}


def test_a_drafter_that_fails_hurts_nobody(model, plain, capfd):
    """It is asked three times."""

    class Broken(Guesser):
        def propose(self, asks):
            super().propose(asks)
            raise MemoryError

    drafter = Broken()
    assert (
        run(guess_with(make_core(model), drafter), {"x": (PROMPT, PARAMS["greedy"])})["x"]
        == plain["greedy"]
    )
    assert drafter.num_asked == 3
    assert "MemoryError" in capfd.readouterr().err


def test_as_requests_end_each_number_of_them_need_not_be_measured():
    """A step of nearly as many tokens tells what one takes; one of half as many does not."""
    times = StepTimes(0.005)
    for _ in range(4):
        times.add(64, False, 5e-3)
        times.add(128, True, 6e-3)
    most = dict.fromkeys(range(64), 4)
    given, _ = allot(dict.fromkeys(range(52), 0.4), most, 52, 400, times)
    assert given
    few = dict.fromkeys(range(32), 0.4)
    assert allot(few, most, 32, 400, times) == ({}, 0.0)
    times.add(32, False, 4.5e-3)
    assert allot(few, most, 32, 400, times)[0]


def test_drafts_that_beat_the_fastest_step_there_can_be_need_no_measurement():
    """Half as many requests take at least half as long without drafts, and as long as fewer of
    them."""
    times = StepTimes(0.005)
    assert times.least(32) == 0.0
    for _ in range(4):
        times.add(64, False, 5e-3)
        times.add(128, True, 6e-3)
    assert times.least(32) == pytest.approx(2.5e-3)
    assert times.least(128) == pytest.approx(5e-3)
    assert allot(dict.fromkeys(range(32), 0.9), dict.fromkeys(range(32), 4), 32, 400, times)[0]
    times.add(8, False, 4e-3)
    assert times.least(32) == pytest.approx(4e-3)


@pytest.mark.parametrize("rate", [0.4, 0.8, 0.97])
def test_all_numbers_of_drafts_are_compared(rate):
    """Those that count as one number of tokens by the largest of them: the best is as good as by
    looking at each."""
    times = StepTimes(0.005)
    for num in (8, 16, 32, 64, 128, 256, 512):
        for _ in range(4):
            times.add(num, False, (4 + max(num - 100, 0) / 40) * 1e-3)
            times.add(num, True, (4.5 + max(num - 100, 0) / 40) * 1e-3)
    for num in (8, 20, 64):
        most = dict.fromkeys(range(num), 8)
        given, right = allot(dict.fromkeys(most, rate), most, num, 440, times)
        chances = sorted(
            (rate ** (i + 1) for i in range(8) for _ in range(num) if rate ** (i + 1) > 0.02),
            reverse=True,
        )[:440]
        speeds = [
            (num + sum(chances[:k])) / times.of(num + k, True) for k in range(1, len(chances) + 1)
        ]
        assert (num + right) / times.of(num + sum(given.values()), True) >= 0.97 * max(speeds)
