"""Sampling stages: the GPU's kernels, interpreted, against the CPU's sampler, for each stage alone
and for combinations."""

import math
import random

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tidemill.kernels.cuda import logprobs, sampling
from tidemill.models.base import CausalLM
from tidemill.runner import cuda_sampler
from tidemill.runner.cuda_sampler import CudaSampler
from tidemill.runner.sampler import STAGES, Sampler, score, stages_of
from tidemill.runner.state import RowState, _draw_words
from tidemill.types.sampling import SamplingParams

VOCAB = 300
NUM_PROMPT, POSITION = 3, 9
NAN, INF = math.nan, math.inf

SETTINGS = {  # what asks for a stage, besides a temperature
    "grammar": [{}],
    "allowed_tokens": [{"allowed_token_ids": (7, 11, 250, 7)}],
    "logit_bias": [{"logit_bias": {7: 4.0, 11: -100.0}}],
    "bad_words": [
        {"bad_word_ids": tuple((token,) for token in range(100)) + ((5, 150), (150, 5, 151))}
    ],
    "min_tokens": [{"min_tokens": 50, "stop_token_ids": (0, 5)}],
    "penalties": [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 1.5, "frequency_penalty": -0.5},
        # a token of the prompt, and the output
        {"repetition_penalty": 9.0, "frequency_penalty": 2.0, "penalty_window": 7},
    ],
    "temperature": [{"temperature": 0.3}, {"temperature": 1.8}],
    "top_k": [{"top_k": 1}, {"top_k": 20}, {"top_k": 5000}],
    "top_p": [{"top_p": 1e-9}, {"top_p": 0.5}, {"top_p": 0.95}],
    "min_p": [{"min_p": 0.02}, {"min_p": 1.0}],
    "typical_p": [{"typical_p": 0.2}, {"typical_p": 0.9}],
}


@pytest.fixture(autouse=True)
def small_stretches(monkeypatch):
    monkeypatch.setattr(sampling, "SEARCH_STRETCH", 128)
    monkeypatch.setattr(logprobs, "SEARCH_STRETCH", 128)
    monkeypatch.setattr(sampling, "PICK_STRETCH", 256)
    monkeypatch.setattr(sampling, "_TILE", 256)


def make_state(kinds, masks=None):
    """Sequence i has parameters i, a few tokens, and a mask where one is given."""
    state = RowState(len(kinds), 64, 16)
    state.tokens.random_(VOCAB, generator=torch.Generator().manual_seed(1))
    for row, params in enumerate(kinds):
        state.params[row], state.num_prompt[row], state.eos_token_ids[row] = (
            params,
            NUM_PROMPT,
            frozenset({3}),
        )
        state.draws[row] = torch.tensor(_draw_words(params), dtype=torch.int32)
    state.masks = {(row, POSITION): mask for row, mask in (masks or {}).items()}
    return state


def sample_on_cpu(state, logits, rows):
    return Sampler(state).sample(logits.clone(), rows, [POSITION] * len(rows)).token_ids.tolist()


def sample_on_gpu(state, logits, rows):
    """As the runner does: a first draw for all, another for those with more than a temperature."""
    num = len(rows)
    index, rows_t = torch.arange(num, dtype=torch.int32), torch.tensor(rows, dtype=torch.int32)
    before = logits.clone()
    tokens = sampling.pick_tokens(
        logits, index, rows_t, torch.full_like(rows_t, POSITION - 1), state.draws, state.tokens
    )
    again = [
        i
        for i, row in enumerate(rows)
        if (row, POSITION) in state.masks or not state.params[row].is_plain
    ]
    if again:
        CudaSampler(state, VOCAB).redraw(
            again, [rows[i] for i in again], [POSITION] * len(again), logits, tokens
        )
    # logprobs are of the logits as they are
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    for row, token in zip(rows, tokens.tolist(), strict=True):
        assert token < 0 or state.tokens[row, POSITION] == token
    return tokens.tolist()


def random_logits(num, seed=0):
    """Of several shapes, with equal values among them."""
    generator = torch.Generator().manual_seed(seed)
    logits = (
        torch.randn(num, VOCAB, generator=generator)
        * torch.tensor([1.0, 3.0, 8.0]).repeat(num)[:num, None]
    )
    logits[:, 50:60] = logits[:, 40:50]
    return logits


def random_mask(seed, share=0.3):
    bits = np.random.default_rng(seed).random(-(-VOCAB // 32) * 32) < share
    bits[7] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


def test_both_samplers_implement_every_stage_in_order():
    state = make_state([SamplingParams()])
    on_cpu, on_gpu = list(Sampler(state)._stages), list(CudaSampler(state, VOCAB)._adjustments)
    assert [*on_cpu, "draw"] == list(STAGES)
    assert on_gpu == list(STAGES)[: len(on_gpu)]
    assert on_gpu[-1] == "penalties"
    assert set(SETTINGS) == set(on_cpu)


@pytest.mark.parametrize("stage", SETTINGS)
def test_each_stage_alone(stage):
    """Greedy and drawn, in distributions of three shapes."""
    kinds = [
        SamplingParams(**{"temperature": temperature, "seed": seed} | settings)
        for settings in SETTINGS[stage]
        for temperature, seed in ((0.0, 0), (1.0, 1), (1.0, 2), (1.0, 3))
    ]
    rows = list(range(len(kinds)))
    masks = {row: random_mask(row) for row in rows} if stage == "grammar" else {}
    for params in kinds:
        assert stages_of(params, bool(masks)) - {"draw"} <= {stage, "temperature"}
    state, logits = make_state(kinds, masks), random_logits(len(kinds))
    expected = sample_on_cpu(state, logits, rows)
    assert sample_on_gpu(state, logits, rows) == expected
    assert min(expected) >= 0


def test_a_bad_word_is_held_back_where_the_output_ends_with_its_beginning():
    state = make_state([SamplingParams()] * 5)
    output = state.tokens[0, NUM_PROMPT:POSITION].tolist()
    state.tokens[:] = state.tokens[0]
    words = [
        ((*output[-2:], 9),),  # it would be completed
        ((output[-2], 9), (*output[-1:], 9)),  # the second would be
        ((*output[-2:-1], 9), (8, *output[-1:], 9)),  # another beginning
        ((state.tokens[0, NUM_PROMPT - 1].item(), *output, 9),),  # it would begin in the prompt
        ((*output, 9),),
    ]
    state.params[:] = [SamplingParams(temperature=0.0, bad_word_ids=word) for word in words]
    logits = random_logits(5)
    logits[:, 9] = 100.0
    for sample in (sample_on_cpu, sample_on_gpu):
        assert [token == 9 for token in sample(state, logits, list(range(5)))] == [
            False,
            False,
            True,
            True,
            False,
        ]


def test_combinations_of_stages_and_each_sequence_alone():
    """In a batch of all kinds, and alone: the same tokens, on both devices."""
    draw, kinds, masks = random.Random(0), [], {}
    for row in range(12):
        settings = {"temperature": draw.choice([0.0, 0.7, 1.0, 1.5]), "seed": row}
        for name in draw.sample(sorted(SETTINGS), draw.randrange(6)):
            settings |= draw.choice(SETTINGS[name])
            if name == "grammar":
                masks[row] = random_mask(row)
        kinds.append(SamplingParams(**settings))
    state, logits = make_state(kinds, masks), random_logits(12, seed=2)
    expected = sample_on_cpu(state, logits, list(range(12)))
    assert sample_on_gpu(state, logits, list(range(12))) == expected
    for row in range(0, 12, 5):
        alone = logits[row : row + 1]
        assert (
            sample_on_cpu(state, alone, [row])
            == sample_on_gpu(state, alone, [row])
            == [expected[row]]
        )
    assert len(set(expected)) > 5


def test_more_sequences_than_are_drawn_at_once(monkeypatch):
    state, logits = (
        make_state([SamplingParams(top_k=5, seed=seed) for seed in range(7)]),
        random_logits(7),
    )
    expected = sample_on_cpu(state, logits, list(range(7)))
    monkeypatch.setattr("tidemill.runner.cuda_sampler._AT_ONCE", 3)
    assert sample_on_gpu(state, logits, list(range(7))) == expected


def kept_on_gpu(logits, temperatures, **settings):
    """Which tokens the limits leave."""
    num = logits.shape[0]
    records, draws = np.zeros(num, sampling.RECORD), np.zeros((num, 3), np.int32)
    records["row"] = records["source"] = np.arange(num)
    for name, off in (("top_k", 0), ("top_p", 1.0), ("log_min_p", -INF), ("typical_p", 1.0)):
        records[name] = settings.get(name, off)
    draws[:, 0] = np.array(temperatures, np.float32).view(np.int32)
    work = sampling.Workspace.make(num, logits.shape[1], logits.device)
    words = torch.from_numpy(records.view(np.int32).reshape(num, -1))
    sampling.find_limits(logits, logits, words, torch.from_numpy(draws), work)
    return (logits >= work.limits[:, :1]) & (logits <= work.limits[:, 1:])


def kept_by_definition(logits_V, temperature, top_k=0, top_p=1.0, log_min_p=-INF, typical_p=1.0):
    """By sorting, in float64."""
    x = logits_V.double() / temperature
    left = torch.ones_like(x, dtype=torch.bool)
    if top_k:
        left &= x >= x.sort(descending=True).values[min(top_k, x.numel()) - 1]
    for p, is_typical in ((top_p, False), (typical_p, True)):
        if p < 1:
            probs = x.masked_fill(~left, -INF).softmax(0)
            entropy = -torch.where(probs > 0, probs * probs.log(), 0.0).sum()
            key = -(-probs.log() - entropy).abs() if is_typical else x
            order = key.masked_fill(~left, -INF).argsort(descending=True)
            before = probs[order].cumsum(0) - probs[order]
            left &= key >= key[order[before < p]].min()
        if not is_typical:
            left &= x >= x.max() + log_min_p
    return left


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 7}, {"top_k": 10**9}, {"top_p": 1e-9}, {"top_p": 0.9}, {"log_min_p": math.log(0.1)}, {"typical_p": 0.1},
        {"typical_p": 0.9},
        {"top_k": 40, "top_p": 0.8, "log_min_p": math.log(0.03)}, {"top_k": 100, "top_p": 0.95, "typical_p": 0.5},
        {"log_min_p": math.log(0.05), "typical_p": 0.7},
    ],
)  # fmt: skip
def test_restrictions_keep_what_sorting_keeps(settings):
    """Peaked and flat, with equal values at the limit, with most tokens excluded before; greedy
    sequences keep all."""
    logits = random_logits(9, seed=3)
    logits[3, 10:290], logits[4, 1:] = -INF, -INF
    logits[5], logits[6] = 0.5, torch.arange(VOCAB) // 4 * 1e-3
    logits[7] += 1e4  # an offset changes nothing but the digits that are left
    temperatures = [0.8, 1.0, 2.5, 0.8, 1.0, 1.0, 0.1, 1.0, 0.0]
    kept = kept_on_gpu(logits, temperatures, **settings)
    for row, temperature in enumerate(temperatures[:8]):
        expected = kept_by_definition(logits[row], temperature, **settings) & logits[row].isfinite()
        assert torch.equal(kept[row] & logits[row].isfinite(), expected), row
    assert kept[8].all()


BROKEN = {
    "nan": (NAN, 123),
    "plus infinity": (INF, 200),
    "minus infinity": (-INF, slice(None)),
    "all nan": (NAN, slice(None)),
}
ASKS = {
    "greedy": {"temperature": 0.0},
    "drawn": {},
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 3},
    "typical": {"typical_p": 0.5},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.5, "presence_penalty": 0.5},
    "bias": {"logit_bias": {123: -100.0, 200: -100.0}},
}


@pytest.mark.parametrize("broken", BROKEN)
def test_logits_that_are_not_numbers_fail_their_sequence_alone(broken, backend):
    value, where = BROKEN[broken]
    state = make_state(
        [SamplingParams(seed=5, **settings) for settings in ASKS.values() for _ in range(2)]
    )
    rows = list(range(len(state.params)))
    logits = random_logits(1).repeat(len(rows), 1)
    healthy = sample_on_cpu(state, logits, rows)
    logits[1::2, where] = value
    # the GPU's has no other backend
    samples = [sample_on_cpu] if backend == "torch" else [sample_on_cpu, sample_on_gpu]
    for sample in samples:
        tokens = sample(state, logits, rows)
        assert tokens[1::2] == [-1] * len(ASKS), sample
        assert tokens[::2] == healthy[::2], sample


def test_a_sequence_with_nothing_left_fails_alone():
    """A mask that forbids all, and one that leaves what the model forbids."""
    kinds = [
        SamplingParams(temperature=temperature, seed=1, top_p=0.9)
        for temperature in (0.0, 1.0)
        for _ in range(3)
    ]
    nothing, only = np.zeros(-(-VOCAB // 32), np.int32), np.zeros(-(-VOCAB // 32), np.int32)
    only[0] = 1 << 7
    state, logits = make_state(kinds, {1: nothing, 2: only, 4: nothing, 5: only}), random_logits(6)
    logits[:, 7] = -INF
    for sample in (sample_on_cpu, sample_on_gpu):
        tokens = sample(state, logits, list(range(6)))
        assert [token < 0 for token in tokens] == [False, True, True, False, True, True]


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_logprobs(num_top, monkeypatch):
    """Those of the CPU, equal values in order of token id, each the same in any batch; NaN where
    logits are not finite."""
    monkeypatch.setattr(logprobs, "_BLOCK", 32)
    logits, ids = random_logits(7), torch.tensor([5, 299, 0, 40, 50, 60, 70], dtype=torch.int32)
    logits[2, 3:] = -INF
    logits[4, 9], logits[5, 9], logits[6] = NAN, INF, -INF
    mine, theirs = cuda_sampler.score(logits, ids, num_top), score(logits, ids, num_top)
    assert (
        mine.chosen.isnan().tolist() == theirs.chosen.isnan().tolist() == [False] * 4 + [True] * 3
    )
    torch.testing.assert_close(mine.chosen[:4], theirs.chosen[:4])
    for one, other in zip(
        *(s.entries(ids.tolist(), [num_top] * 7)[:4] for s in (mine, theirs)), strict=True
    ):
        finite = [(token, value) for token, value in one.top if value > -INF]
        assert [token for token, _ in finite] == [
            token for token, value in other.top if value > -INF
        ]
        assert [value for _, value in finite] == pytest.approx(
            [value for _, value in other.top if value > -INF], abs=1e-5
        )
        assert len(one.top) == len(other.top) == num_top
    for i in (0, 3):
        alone = cuda_sampler.score(logits[i : i + 1], ids[i : i + 1], num_top)
        assert torch.equal(alone.chosen[0], mine.chosen[i])
        assert torch.equal(alone.values[0], mine.values[i])


class Model:
    def logits(self, hidden_TH, out):
        return out.copy_(hidden_TH @ torch.ones(4, VOCAB))

    pool = CausalLM.pool


def test_warming_up_leaves_nothing_behind():
    state = make_state([SamplingParams(top_k=3), SamplingParams()])
    state.num_prompt[0] = 9
    before = list(state.params), list(state.num_prompt), state.draws.clone()
    CudaSampler(state, VOCAB).warm_up(Model(), torch.zeros(8, 4), torch.zeros(2, VOCAB))
    assert (state.params, state.num_prompt) == before[:2]
    assert torch.equal(state.draws, before[2])
    assert not state.tokens.any()
    assert not state.masks
