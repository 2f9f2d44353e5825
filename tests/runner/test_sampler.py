"""Sampling against exact probabilities (chi-square), and each restriction by itself."""

import math

import pytest
import torch

from tidemill.errors import InvalidRequest
from tidemill.kernels.noise import exponential_noise, noise_keys
from tidemill.runner.sampler import (
    Sampler,
    penalize,
    restrict_top_k,
    restrict_top_p,
    restrict_typical,
)
from tidemill.runner.state import RowState
from tidemill.types.sampling import SamplingParams, sample_seed

LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.0, -0.5, -1.0, 0.7, -3.0])
NUM_DRAWS = 10_000


def draws(**settings) -> torch.Tensor:
    """Many draws at consecutive positions of one seed, as one request would make them."""
    sampler = make_sampler(SamplingParams(seed=42, **settings))
    return sampler.sample(
        LOGITS.repeat(NUM_DRAWS, 1), [1] * NUM_DRAWS, list(range(NUM_DRAWS))
    ).token_ids


def exact(temperature=1.0, keep=None) -> torch.Tensor:
    probs = (LOGITS.double() / temperature).softmax(0)
    if keep is not None:
        mask = torch.zeros_like(probs)
        mask[keep] = 1
        probs = probs * mask
    return probs / probs.sum()


def check(tokens: torch.Tensor, probs: torch.Tensor) -> None:
    """Chi-square with a limit that a right sampler passes 999,999 times in a million."""
    counts = torch.bincount(tokens, minlength=probs.numel()).double()
    assert counts[probs == 0].sum() == 0, "an excluded token was drawn"
    live = probs > 0
    expected = probs[live] * tokens.numel()
    statistic = ((counts[live] - expected) ** 2 / expected).sum().item()
    freedom = int(live.sum()) - 1
    limit = freedom + 4.9 * math.sqrt(2 * freedom) + 16
    assert statistic < limit, (statistic, counts.tolist())


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 2.0])
def test_temperature(temperature):
    check(draws(temperature=temperature), exact(temperature))


def test_top_k():
    check(draws(top_k=3), exact(keep=[0, 1, 2]))


@pytest.mark.parametrize(
    ("top_p", "keep"),
    [
        (0.05, [0]),  # below the best token's probability: that token alone
        (0.39, [0]),  # the best has 0.397: it crosses p by itself
        (0.40, [0, 1]),
        (0.50, [0, 1]),  # the token that crosses p is kept
        (0.70, [0, 1, 2]),
        (1.00, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_top_p(top_p, keep):
    check(draws(top_p=top_p), exact(keep=keep))


def test_min_p():
    threshold = 0.3 * float(exact()[0])
    keep = [i for i, p in enumerate(exact().tolist()) if p >= threshold]
    check(draws(min_p=0.3), exact(keep=keep))


@pytest.mark.parametrize(
    ("typical_p", "keep"),
    [
        # surprises are 0.92, 1.42, 1.92, 2.92 ..., their mean is 1.6: the second likeliest token
        # comes first
        (0.2, [1]),
        (0.45, [1, 2, 6]),
        (0.5, [0, 1, 2, 6]),  # the three have 0.49: the token that crosses p is kept
        (0.9, [0, 1, 2, 3, 6]),
    ],
)
def test_typical_p(typical_p, keep):
    check(draws(typical_p=typical_p), exact(keep=keep))


def test_logit_bias():
    bias = {7: 4.0, 0: -1.5, 3: 0.5}
    biased = LOGITS.clone()
    for token, value in bias.items():
        biased[token] += value
    check(draws(logit_bias=bias), biased.double().softmax(0))


def test_penalties_change_what_is_drawn():
    """Tokens 0 and 5 are the prompt; 0, three times, 2 and 3 the output so far. Draws are those of
    as many seeds."""
    num = NUM_DRAWS // 2
    state = RowState(num, 16, 16)
    for row in range(num):
        params = SamplingParams(
            seed=row, repetition_penalty=1.5, presence_penalty=0.25, frequency_penalty=0.5
        )
        state.params[row], state.num_prompt[row], state.eos_token_ids[row] = params, 2, frozenset()
    state.tokens[:, :7] = torch.tensor([0, 5, 0, 0, 2, 3, 0])
    penalized = LOGITS.double()
    for token, count in {0: 3, 2: 1, 3: 1, 5: 0}.items():
        penalized[token] *= 1.5 if penalized[token] <= 0 else 1 / 1.5
        penalized[token] -= 0.25 * (count > 0) + 0.5 * count
    drawn = Sampler(state).sample(LOGITS.repeat(num, 1), list(range(num)), [7] * num).token_ids
    check(drawn, penalized.softmax(0))


def test_all_restrictions_together():
    """Temperature first, then k, then p of what is left, then min-p."""
    check(draws(temperature=1.5, top_k=5, top_p=0.9, min_p=0.2), exact(1.5, keep=[0, 1, 2, 6]))


def test_the_crossing_token_is_kept_even_for_the_smallest_p():
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    restrict_top_p(logits, [1e-9])
    assert torch.isfinite(logits).tolist() == [[True, False, False]]


def test_top_p_beyond_the_likeliest_is_the_same_as_sorting_all():
    """Flat distributions need more tokens than are looked at first."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 5000, generator=generator) * torch.tensor([[0.1], [1.0], [5.0]])
    ordered, order = logits.log_softmax(-1).sort(dim=-1, descending=True)
    probs = ordered.exp()
    leaves = torch.zeros_like(logits, dtype=torch.bool).scatter_(
        1, order, probs.cumsum(-1) - probs >= 0.9
    )
    expected = logits.masked_fill(leaves, float("-inf"))
    restrict_top_p(logits, [0.9, 0.9, 0.9])
    assert torch.equal(logits, expected)
    assert torch.isfinite(logits).sum(-1)[0] > 512


def test_top_k_keeps_ties():
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    restrict_top_k(logits, [1])
    assert torch.isfinite(logits).tolist() == [[False, True, True, False]]


def test_top_p_and_typical_p_keep_ties():
    """All of those that are as likely as the one that crosses p: which of them come first is
    nobody's choice."""
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, -3.0]] * 2)
    restrict_top_p(logits[:1], [0.55])
    restrict_typical(logits[1:], [0.2])
    assert torch.isfinite(logits[0]).tolist() == [True, True, True, True, False]
    assert torch.isfinite(logits[1]).tolist() in (
        [True, False, True, True, False],
        [False, True, False, False, False],
    )


def test_noise_depends_on_seed_position_and_token_alone():
    one = exponential_noise(noise_keys(torch.tensor([5]), torch.tensor([9])), 1000)
    many = exponential_noise(noise_keys(torch.tensor([1, 5, 7]), torch.tensor([9, 9, 9])), 1000)
    assert torch.equal(one[0], many[1])
    longer = exponential_noise(noise_keys(torch.tensor([5]), torch.tensor([9])), 1203)
    assert torch.equal(one[0], longer[0, :1000])
    for other in (
        exponential_noise(noise_keys(torch.tensor([6]), torch.tensor([9])), 1000),
        exponential_noise(noise_keys(torch.tensor([5]), torch.tensor([8])), 1000),
    ):
        assert (one == other).float().mean() < 0.01


def test_noise_is_exponential_and_uncorrelated():
    noise = exponential_noise(noise_keys(torch.arange(100), torch.arange(100)), 5000)
    assert noise.mean().item() == pytest.approx(1.0, abs=0.01)
    assert noise.var().item() == pytest.approx(1.0, abs=0.03)
    assert abs(torch.corrcoef(noise[:, :500])[0, 1:]).max() < 0.2
    assert (noise > 0).all()


def test_penalties():
    logits = torch.tensor([1.0, -1.0, 2.0, 3.0])
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    penalize(logits, torch.tensor([0, 1]), torch.tensor([3, 3]), params)
    assert logits.tolist() == [0.5, -2.0, 2.0, 1.5 - 0.5 - 0.5]


def make_sampler(params: SamplingParams, num_prompt: int = 2, eos=frozenset({3})) -> Sampler:
    state = RowState(2, 64, 16)
    state.params[1], state.num_prompt[1], state.eos_token_ids[1] = params, num_prompt, eos
    return Sampler(state)


@pytest.mark.parametrize(("window", "expected"), [(-1, 4), (3, 4), (2, 1), (0, 0)])
def test_penalties_of_the_latest_tokens(window, expected):
    """Tokens 0 and 1 are the prompt, 2 and 0 the output: those in the window are out of question."""
    sampler = make_sampler(
        SamplingParams(temperature=0.0, repetition_penalty=100.0, penalty_window=window)
    )
    sampler._state.tokens[1, :4] = torch.tensor([0, 1, 2, 0])
    logits = torch.tensor([[5.0, 4.0, 3.0, 1.0, 2.0, 0.1]])
    assert sampler.sample(logits, [1], [4]).token_ids.tolist() == [expected]


def test_logprobs_of_what_a_token_is_drawn_from():
    params = SamplingParams(
        temperature=0.5, top_k=3, seed=1, logprobs=5, post_sampling_logprobs=True
    )
    sampled = make_sampler(params).sample(LOGITS.clone()[None], [1], [2])
    expected = (LOGITS / 0.5).topk(3).values.log_softmax(-1)
    entry = sampled.logprobs[0]
    assert [value for _, value in entry.top[:3]] == pytest.approx(expected.tolist(), abs=1e-5)
    assert [value for _, value in entry.top[3:]] == [-math.inf] * 2
    assert entry.logprob == dict(entry.top)[entry.token_id]
    certain = SamplingParams(temperature=0.0, logprobs=1, post_sampling_logprobs=True)
    entry = make_sampler(certain).sample(LOGITS.clone()[None], [1], [2]).logprobs[0]
    assert (entry.logprob, entry.top) == (0.0, [(entry.token_id, 0.0)])


def test_logit_bias_and_untouched_logprobs():
    params = SamplingParams(temperature=0.0, logit_bias={7: 100.0}, logprobs=2)
    sampled = make_sampler(params).sample(LOGITS.clone()[None], [1], [2])
    assert sampled.token_ids.tolist() == [7]
    entry = sampled.logprobs[0]
    assert entry.logprob == pytest.approx(math.log(exact()[7].item()), abs=1e-5)
    assert [token for token, _ in entry.top] == [0, 1]


def test_logprobs_of_named_tokens():
    params = SamplingParams(temperature=0.0, logprobs=0, logprob_token_ids=(7, 2))
    entry = make_sampler(params).sample(LOGITS.clone()[None], [1], [2]).logprobs[0]
    assert entry.token_id == 0
    assert sorted(token for token, _ in entry.top) == [0, 2, 7]
    for token, value in entry.top:
        assert value == pytest.approx(math.log(exact()[token].item()), abs=1e-5)


def test_min_tokens_holds_back_every_ender():
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(0,))
    sampler = make_sampler(params, eos=frozenset({1}))
    assert sampler.sample(LOGITS.clone()[None], [1], [2]).token_ids.tolist() == [2]
    assert sampler.sample(LOGITS.clone()[None], [1], [3]).token_ids.tolist() == [2]
    assert sampler.sample(LOGITS.clone()[None], [1], [4]).token_ids.tolist() == [0]


def test_a_row_is_the_same_in_any_batch():
    state = RowState(8, 64, 16)
    kinds = [
        SamplingParams(seed=1, temperature=0.9, top_p=0.8), SamplingParams(temperature=0.0, logprobs=1),
        SamplingParams(seed=3, top_k=2), SamplingParams(seed=4, min_p=0.1, repetition_penalty=1.5, logit_bias={2: 3.0}),
    ]  # fmt: skip
    for row, params in enumerate(kinds):
        state.params[row] = params
    sampler = Sampler(state)
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(0)) * 3
    together = sampler.sample(logits.clone(), [0, 1, 2, 3], [5, 6, 7, 8])
    for row in range(4):
        alone = sampler.sample(logits[row : row + 1].clone(), [row], [5 + row])
        assert alone.token_ids[0] == together.token_ids[row]
        assert alone.logprobs.get(0) == together.logprobs.get(row)


def test_the_first_of_n_keeps_the_seed():
    assert sample_seed(77, 0) == 77
    assert len({sample_seed(77, i) for i in range(100)}) == 100
    assert all(-(2**63) <= sample_seed(2**63 - 1, i) < 2**63 for i in range(100))


NAN = float("nan")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", v) for v in (-0.1, NAN, math.inf, 1e300, "1", True)],
        *[("top_p", v) for v in (0, -1, 1.01, NAN)],
        *[("top_k", v) for v in (-2, 1.5, 2**31, "5")],
        *[("min_p", v) for v in (-0.1, 1.1, NAN)],
        *[("n", v) for v in (0, -1, 129, 1.0, True)],
        *[("max_tokens", v) for v in (0, -5, 2**31, 1.5)],
        *[("min_tokens", v) for v in (-1, 2**63)],
        *[("repetition_penalty", v) for v in (0, -1, NAN)],
        *[("presence_penalty", v) for v in (-2.1, 3, NAN)],
        *[("frequency_penalty", v) for v in (-2.1, 3)],
        *[("logprobs", v) for v in (-1, 21, 1.5)],
        *[("seed", v) for v in (2**63, -(2**63) - 1, 1.0)],
        *[("stop", v) for v in ("", ["a", ""], [1], ["x"] * 17, ["y" * 2000])],
        *[("stop_token_ids", v) for v in ([-1], ["a"], [2**31])],
        *[("ignore_eos", v) for v in ("no", 1)],
        *[("allowed_token_ids", v) for v in ([-1], ["x"], list(range(2000)))],
        *[("bad_word_ids", v) for v in ([[]], [3], [[-1]], [[1]] * 200, [[1] * 33])],
        *[
            ("logit_bias", v)
            for v in ([1], {1: 101.0}, {1: NAN}, {-1: 0.0}, dict.fromkeys(range(2000), 0.0))
        ],
    ],
)
def test_impossible_values_are_refused_by_name(field, value):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_common_spellings_are_accepted():
    assert SamplingParams(stop="x").stop == ("x",)
    assert SamplingParams(stop=["x", "y"]).stop == ("x", "y")
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None) == SamplingParams()


def test_typical_keeps_what_is_least_surprising():
    """By hand: sorted by distance of -log p from the entropy, until p is crossed."""
    torch.manual_seed(0)
    logits = torch.randn(3, 50) * 2
    kept = logits.clone()
    restrict_typical(kept, [0.5, 1.0, 0.9])
    assert torch.equal(kept[1], logits[1])
    for row, p in ((0, 0.5), (2, 0.9)):
        logprobs = logits[row].log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum()
        mass, expected = 0.0, set()
        for token in sorted(range(50), key=lambda token: abs(-logprobs[token] - entropy)):
            if mass >= p:
                break
            expected.add(token)
            mass += float(logprobs[token].exp())
        assert set(kept[row].isfinite().nonzero().flatten().tolist()) == expected
