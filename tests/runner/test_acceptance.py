"""Acceptance of drafts: rejection gives the target's distribution (chi-square); draws with shared
noise agree often."""

import numpy as np
import pytest
import torch

from tests.runner.test_sampler import LOGITS, check, exact
from tidemill.kernels.noise import gumbel_argmax
from tidemill.runner.sampler import Sampler
from tidemill.runner.spec import acceptance
from tidemill.runner.spec.acceptance import Drafts
from tidemill.runner.state import RowState
from tidemill.types.sampling import SamplingParams

NUM_DRAWS, NUM_FEWER = 50_000, 8_000
SEEDS, POSITIONS = torch.full((NUM_DRAWS,), 42), torch.arange(NUM_DRAWS)
Q_LOGITS = torch.tensor([0.5, 1.5, -1.0, 1.0, 2.0, -1.0, 0.0, -torch.inf])


def draw(
    drafts_D: torch.Tensor, at: torch.Tensor = POSITIONS, q: torch.Tensor | None = None
) -> torch.Tensor:
    """Many draws from LOGITS at consecutive positions; `at`: those that have a draft."""
    probs = {} if q is None else dict.fromkeys(range(len(at)), q.numpy())
    return acceptance.draw(
        LOGITS.repeat(NUM_DRAWS, 1), Drafts(at.tolist(), drafts_D, probs), SEEDS, POSITIONS
    )


def check_rate(measured: torch.Tensor, rate: float) -> None:
    """Of that many trials; a limit that a right one passes 999,999 times in a million."""
    assert (
        abs(measured.double().mean().item() - rate)
        < 4.9 * (rate * (1 - rate) / measured.numel()) ** 0.5
    )


@pytest.mark.parametrize("draft", [0, 2, 7])
def test_a_guess(draft):
    """Right with the probability that the target gives it, and the token has the target's
    distribution."""
    tokens = draw(torch.full((NUM_DRAWS,), draft))
    check(tokens, exact())
    check_rate(tokens == draft, float(exact()[draft]))


def test_drawn_drafts():
    """They are right in 1 - TV(p, q) of places. The drafter's noise is that of exact acceptance."""
    q = Q_LOGITS.softmax(0)
    drafts = gumbel_argmax(Q_LOGITS.repeat(NUM_DRAWS, 1), SEEDS, POSITIONS).long()
    check(drafts, q.double())
    tokens = draw(drafts, q=q)
    check(tokens, exact())
    check_rate(tokens == drafts, float(torch.minimum(exact(), q.double()).sum()))


def test_drawn_drafts_of_which_nothing_else_is_known():
    """They count as guesses: right in as many places as two independent draws are equal."""
    drafts = gumbel_argmax(Q_LOGITS.repeat(NUM_DRAWS, 1), SEEDS, POSITIONS).long()
    tokens = draw(drafts)
    check(tokens, exact())
    check_rate(tokens == drafts, float((exact() * Q_LOGITS.double().softmax(0)).sum()))


def test_drafts_kept_back_because_of_what_they_are():
    """A drafter that is not sure of a token offers none: the draw in its place must not follow the
    drafter's noise."""
    drafts = gumbel_argmax(Q_LOGITS.repeat(NUM_DRAWS, 1), SEEDS, POSITIONS).long()
    at = (drafts == 4).nonzero().flatten()
    check(draw(drafts[at], at), exact())


def test_a_drafter_equal_to_the_target_is_always_right():
    drafts = gumbel_argmax(LOGITS.repeat(NUM_DRAWS, 1), SEEDS, POSITIONS).long()
    assert torch.equal(draw(drafts, q=LOGITS.softmax(0)), drafts)


def sampler_of(drafts: list[int], params: SamplingParams, by_rejection: bool = True) -> Sampler:
    """Of one row, whose drafts begin at position 1."""
    state = RowState(2, len(drafts) + 2, page_size=4)
    state.params[1], state.num_prompt[1] = params, 1
    state.tokens[1, 1 : len(drafts) + 1] = torch.tensor(drafts)
    return Sampler(state, by_rejection)


def sample(sampler: Sampler, num: int):
    return sampler.sample(LOGITS.repeat(num, 1), [1] * num, list(range(1, 1 + num)))


@pytest.mark.parametrize(
    ("settings", "temperature", "keep"),
    [
        ({"temperature": 0.6}, 0.6, None),
        ({"temperature": 1.5, "top_k": 5, "top_p": 0.9, "min_p": 0.2}, 1.5, [0, 1, 2, 6]),
        ({"allowed_token_ids": (1, 3, 5)}, 1.0, [1, 3, 5]),
    ],
)
def test_the_distribution_is_what_the_parameters_make_of_it(settings, temperature, keep):
    """The same with and without drafts. A draft that they exclude is never right."""
    drafts, params = [1, 7] * (NUM_FEWER // 2), SamplingParams(seed=3, **settings)
    tokens = sample(sampler_of(drafts, params), NUM_FEWER).token_ids
    probs = exact(temperature, keep)
    check(tokens[::2], probs)
    check(tokens[1::2], probs)
    check(sample(sampler_of(drafts, params, by_rejection=False), NUM_FEWER).token_ids, probs)


def test_grammar_masks_and_given_probabilities_reach_the_draw():
    places = [(1, 1 + i) for i in range(NUM_FEWER)]
    drafts = gumbel_argmax(
        Q_LOGITS.repeat(NUM_FEWER, 1), SEEDS[:NUM_FEWER], torch.arange(NUM_FEWER) + 1
    ).tolist()
    sampler = sampler_of(drafts, SamplingParams(seed=42))
    sampler._state.masks = dict.fromkeys(places, np.array([0b01010111], np.int32))
    sampler._state.draft_probs = dict.fromkeys(places, Q_LOGITS.softmax(0).numpy())
    tokens, probs = sample(sampler, NUM_FEWER).token_ids, exact(keep=[0, 1, 2, 4, 6])
    check(tokens, probs)
    rate = float(torch.minimum(probs, Q_LOGITS.double().softmax(0)).sum())
    check_rate(tokens[:-1] == torch.tensor(drafts[:-1]), rate)


def test_a_token_depends_on_its_own_request_alone():
    """The same drafts give the same tokens and logprobs, alone and among others, and the logprobs
    are of the raw logits."""
    params = [
        SamplingParams(seed=9, temperature=0.7, top_k=5, logprobs=2),
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1),
    ]
    state = RowState(3, 80, page_size=4)
    state.params[:], state.num_prompt[:] = params, [1] * 3
    torch.manual_seed(0)
    state.tokens[:, 1:41] = torch.randint(0, 8, (3, 40))
    logits = torch.randn(3, 41, 8)
    sampler, places = Sampler(state, by_rejection=True), list(range(1, 42))
    alone = [sampler.sample(logits[row].clone(), [row] * 41, places) for row in range(3)]
    order = [2, 0, 1]
    both = sampler.sample(
        logits[order].flatten(0, 1), [row for row in order for _ in places], places * 3
    )
    assert both.token_ids.tolist() == [
        token for row in order for token in alone[row].token_ids.tolist()
    ]
    assert [both.logprobs[41 + i] for i in range(41)] == [alone[0].logprobs[i] for i in range(41)]
    assert torch.equal(alone[1].token_ids, logits[1].argmax(-1))  # greedy requests stay exact
    chosen = alone[0].token_ids
    expected = logits[0].log_softmax(-1).gather(1, chosen[:, None].long()).flatten()
    assert [alone[0].logprobs[i].logprob for i in range(41)] == expected.tolist()


def test_broken_logits_fail_alone_where_a_draft_stands():
    sampler = sampler_of([1, 1, 1], SamplingParams(seed=3))
    logits = LOGITS.repeat(4, 1)
    logits[1] = torch.nan
    tokens = sampler.sample(logits, [1] * 4, [1, 2, 3, 4]).token_ids.tolist()
    assert tokens[1] == -1
    assert all(token >= 0 for token in tokens[:1] + tokens[2:])


def test_shared_noise_agrees_as_often_as_promised():
    """Two draws with the same noise, one from p and one from q, are equal with probability sum_i 1
    / sum_j max(p_j/p_i, q_j/q_i), which is at least (1 - TV) / (1 + TV)."""
    torch.manual_seed(0)
    num, num_pairs = 10_000, 60
    seeds, positions = torch.full((num,), 7), torch.arange(num)
    for pair in range(num_pairs):
        base = torch.randn(12) * 2
        p_logits, q_logits = base + torch.randn(12) * 2.0 ** -(pair % 6), base
        p, q = p_logits.double().softmax(0), q_logits.double().softmax(0)
        same = gumbel_argmax(p_logits.repeat(num, 1), seeds, positions) == gumbel_argmax(
            q_logits.repeat(num, 1), seeds, positions
        )
        rate = (1 / torch.maximum(p / p[:, None], q / q[:, None]).sum(1)).sum().item()
        tv = (p - q).abs().sum().item() / 2
        check_rate(same, rate)
        assert rate >= (1 - tv) / (1 + tv)
        sigma = (rate * (1 - rate) / num) ** 0.5
        assert same.double().mean().item() >= (1 - tv) / (1 + tv) - 4.9 * sigma
