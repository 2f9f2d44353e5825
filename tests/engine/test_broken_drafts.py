"""Drafts whose keys and values are NaN: neither their own request nor one that gets their pages
later may notice."""

import pytest
import torch

from tests.helpers import Guesser, greedy, guess_with, load_model, make_core, make_llama, run
from tidemill import SamplingParams
from tidemill.engine.parts.drafting import Drafting
from tidemill.types import events
from tidemill.types.wire import Abort, Submit

BROKEN = 7  # its embedding is NaN
PROMPT = [(i * i) % 97 + 30 for i in range(21)]
REQUESTS = {
    "greedy": (PROMPT, greedy(12, logprobs=1)),
    "seeded": (PROMPT[2:], SamplingParams(temperature=0.8, seed=3, max_tokens=12)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("broken")
    model = make_llama(
        path, seed=3, tie_word_embeddings=False, vocab_size=250, initializer_range=0.15
    )
    with torch.no_grad():
        model.model.embed_tokens.weight[BROKEN] = torch.nan
    model.save_pretrained(path)
    return path


@pytest.fixture
def model(folder, backend):
    return load_model(folder)


class Poison(Guesser):
    """The right token, or the broken one; some drafts come after it."""

    def propose(self, asks):
        made = super().propose(asks)
        nums = [len(ask.tokens) for ask in asks]
        return [
            [*right[: num % 3], BROKEN, *right] if num % 4 else right
            for num, right in zip(nums, made, strict=True)
        ]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_a_draft_that_is_nan_changes_nothing(model, page_size, steps_ahead):
    """Nor where steps follow it before that is known."""
    plain = make_core(model, speculate="off", page_size=page_size, max_requests=2)
    expected = run(plain, REQUESTS)
    assert all(BROKEN not in answer.tokens for answer in expected.values())
    known = {tuple(prompt): expected[name].tokens for name, (prompt, _) in REQUESTS.items()}
    core = guess_with(
        make_core(model, page_size=page_size, max_requests=2, kv_memory_bytes=2**17),
        Poison(known, 1.0),
    )
    core.runner.steps_ahead, core.part(Drafting).sure = steps_ahead, 1e-30
    for _ in range(2):  # the second time, pages of the first are taken
        assert run(core, REQUESTS) == expected


def test_a_request_that_is_broken_itself_still_fails(model):
    core = guess_with(make_core(model), Poison({}, 1.0))
    # they share a page in the same step
    core.submit(Submit("bad", [*PROMPT[:17], BROKEN, 40], greedy(8)))
    core.submit(Submit("good", PROMPT, greedy(8)))
    failures, tokens = [], []
    while core.has_work:
        output, failed = core.step()
        failures += failed
        tokens += [token for delta in output.deltas for token in delta.token_ids]
    assert [failure.request_id for failure in failures] == ["bad"]
    assert (
        tokens
        == run(make_core(model, speculate="off"), {"good": (PROMPT, greedy(8))})["good"].tokens
    )


def test_it_goes_on_without_drafts_and_says_why(model):
    core = guess_with(make_core(model), Poison({}, 1.0))
    core.submit(Submit("x", PROMPT, greedy(8)))
    reasons, num_drafted = [], 0
    while core.has_work:
        output, _ = core.step()
        reasons += [event.reason for event in output.events if isinstance(event, events.Preempted)]
        num_drafted += sum(
            isinstance(event, events.StepPlanned) and bool(event.drafts_of)
            for event in output.events
        )
    assert reasons == ["a draft's logits are not numbers: computed again without drafts"]
    assert num_drafted == 1


class Always(Poison):
    """The right token, then the broken one."""

    def propose(self, asks):
        return [[*right[:1], BROKEN] for right in Guesser.propose(self, asks)]


@pytest.mark.parametrize("page_size", [1, pytest.param(4, marks=pytest.mark.slow), 16])
@pytest.mark.parametrize("ends", ["at a stop token", "aborted", "preempted"])
def test_pages_given_up_while_a_step_writes_such_drafts_are_cleared(model, ends, page_size):
    """The request is gone when that step's logits are seen: no NaN may stay in a page that another
    sequence gets."""
    plain = run(make_core(model, speculate="off"), {"x": (PROMPT, greedy(12))})["x"].tokens
    core = guess_with(make_core(model, page_size=page_size), Always({tuple(PROMPT): plain}, 1.0))
    core.runner.steps_ahead, core.part(Drafting).sure = 1, 1e-30
    stops = (plain[1],) if ends == "at a stop token" else ()
    core.submit(Submit("x", PROMPT, greedy(12, stop_token_ids=stops, ignore_eos=True)))
    while not any(step.plan.drafts for step in core.in_flight):
        core.step()
    request = core.scheduler.running[0]
    assert core.is_in_flight
    if ends == "aborted":
        core.abort(Abort("x", "left"))
    elif ends == "preempted":
        core.scheduler.table.preempt(request, "for a test")
        core.use(*core.parts_but(Drafting))
    while core.has_work:
        core.step()
        core.scheduler.table.check_integrity()
    alone = run(core, {"y": (PROMPT[::-1], greedy(12))})  # the next step clears them
    assert not core.runner.cache.isnan().any()
    assert alone == run(make_core(model, speculate="off"), {"y": (PROMPT[::-1], greedy(12))})
    again = {"z": ([*PROMPT, *plain], greedy(4))}  # nor does the prefix cache have such a page
    assert run(core, again) == run(make_core(model, speculate="off"), again)
