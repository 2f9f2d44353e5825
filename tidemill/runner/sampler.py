"""Logits to tokens on the CPU. Sequences are independent: the parameters of one never change
another's bits.

STAGES is the order of sampling for every device. Logprobs are of the logits as the model gave them.
A sequence whose logits have a maximum that is not finite (a NaN, +inf, or nothing but -inf), as the
model gave them or after the adjustments, fails alone: its token is -1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tidemill.kernels.argmax import argmax
from tidemill.kernels.noise import gumbel_argmax
from tidemill.runner.spec import acceptance
from tidemill.runner.state import RowState
from tidemill.types.sampling import MAX_LOGPROBS, SamplingParams
from tidemill.types.wire import TokenLogprobs

_NEVER = float("-inf")
_LIKELIEST = 512

# What is done to logits, in this order, and for which parameters. A grammar applies where the step
# has a mask for the sequence.
ADJUSTMENTS: dict[str, Callable[[SamplingParams], bool]] = {
    "grammar": lambda p: False,
    "allowed_tokens": lambda p: bool(p.allowed_token_ids),
    "logit_bias": lambda p: bool(p.logit_bias),
    "bad_words": lambda p: bool(p.bad_word_ids),
    "min_tokens": lambda p: p.min_tokens > 0,
    "penalties": lambda p: p.has_penalties,
}
RESTRICTIONS: dict[str, Callable[[SamplingParams], bool]] = {
    "temperature": lambda p: not p.greedy,
    "top_k": lambda p: not p.greedy and p.top_k > 0,
    "top_p": lambda p: not p.greedy and p.top_p < 1.0,
    "min_p": lambda p: not p.greedy and p.min_p > 0.0,
    "typical_p": lambda p: not p.greedy and p.typical_p < 1.0,
}
STAGES = {**ADJUSTMENTS, **RESTRICTIONS, "draw": lambda p: not p.greedy}


def stages_of(params: SamplingParams, has_mask: bool) -> frozenset[str]:
    names = frozenset(name for name, applies in STAGES.items() if applies(params))
    return names | {"grammar"} if has_mask else names


@dataclass(slots=True)
class Samples:
    """The tokens of a step that are drawn: row, parameters, and position. A row with drafts draws
    several, side by side."""

    rows: list[int]
    params: list[SamplingParams]
    positions: list[int]

    def only(self, which: list[int]) -> Samples:
        return Samples(
            [self.rows[i] for i in which],
            [self.params[i] for i in which],
            [self.positions[i] for i in which],
        )

    def window_start(self, i: int) -> int:
        """The first of the tokens of sequence i that penalties take notice of."""
        window = self.params[i].penalty_window
        return 0 if window < 0 else max(self.positions[i] - window, 0)

    def stages(self, state: RowState) -> list[frozenset[str]]:
        made = []
        for row, position, params in zip(self.rows, self.positions, self.params, strict=True):
            known = state.known_stages[row]
            if known is None or known[0] is not params:
                known = state.known_stages[row] = (params, stages_of(params, has_mask=False))
            made.append(known[1] | {"grammar"} if (row, position) in state.masks else known[1])
        return made

    def held_back(self, i: int, state: RowState) -> list[int]:
        """Tokens that would end sequence i before it has min_tokens. None where its grammar allows
        no others: then the output is complete, and nothing may follow."""
        row, p = self.rows[i], self.params[i]
        if self.positions[i] - state.num_prompt[row] >= p.min_tokens:
            return []
        held = [*p.stop_token_ids, *(() if p.ignore_eos else state.eos_token_ids[row])]
        mask = state.masks.get((row, self.positions[i]))
        return [] if mask is not None and not _has_others(mask, held) else held


def _has_others(mask: np.ndarray, tokens: list[int]) -> bool:
    """The mask allows some token besides these."""
    words = mask.view(np.uint32).copy()
    for token in tokens:
        if token < 32 * len(words):
            words[token // 32] &= ~np.uint32(1 << token % 32)
    return bool(words.any())


@dataclass(slots=True)
class Sampled:
    token_ids: torch.Tensor  # [S]; -1: the maximum of the logits is not finite
    # by number, of those that asked
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


class Sampler:
    def __init__(self, state: RowState, by_rejection: bool = False) -> None:
        """`by_rejection`: drafts of sampled requests are accepted as in spec/acceptance.py, not
        where they are what is drawn."""
        self._state, self._by_rejection = state, by_rejection
        self._stages = {
            "grammar": self._apply_grammar,
            "allowed_tokens": _keep_allowed,
            "logit_bias": self._add_bias,
            "bad_words": self._hold_back_words,
            "min_tokens": self._hold_back_stops,
            "penalties": self._penalize,
            "temperature": _divide,
            "top_k": lambda logits, which, samples: restrict_top_k(
                logits, _given(samples, which, "top_k", 0)
            ),
            "top_p": lambda logits, which, samples: restrict_top_p(
                logits, _given(samples, which, "top_p", 1.0)
            ),
            "min_p": lambda logits, which, samples: restrict_min_p(
                logits, _given(samples, which, "min_p", 0.0)
            ),
            "typical_p": lambda logits, which, samples: restrict_typical(
                logits, _given(samples, which, "typical_p", 1.0)
            ),
        }

    def sample(self, logits_SV: torch.Tensor, rows: list[int], positions: list[int]) -> Sampled:
        """`positions`: of the tokens to be drawn. The logits are consumed."""
        samples = Samples(rows, [self._params(row) for row in rows], positions)
        wanted = [i for i, p in enumerate(samples.params) if p.logprobs is not None]
        raw = logits_SV[wanted] if wanted else None
        tokens, stages = argmax(logits_SV), samples.stages(self._state)
        if any(stages):  # else these are the likeliest
            tokens = self._apply_stages(logits_SV, samples, stages, is_valid=tokens >= 0)
        if raw is None:
            return Sampled(tokens)
        for k, i in enumerate(wanted):
            if samples.params[i].post_sampling_logprobs:
                raw[k] = drawn_from(logits_SV[i], int(tokens[i]), samples.params[i])
        num_top, chosen = [samples.params[i].logprobs or 0 for i in wanted], tokens[wanted]
        # Of as many for every sequence: which of equal values are among the best may depend on how
        # many are asked for.
        entries = score(raw, chosen, MAX_LOGPROBS if any(num_top) else 0).entries(
            chosen.tolist(), num_top
        )
        for k, i in enumerate(wanted):
            if named := samples.params[i].logprob_token_ids:
                entries[k] = with_named(
                    entries[k], named, raw[k].log_softmax(-1)[list(named)].tolist()
                )
        return Sampled(
            tokens,
            {i: entry for i, entry in zip(wanted, entries, strict=True) if entry.token_id >= 0},
        )

    def _apply_stages(
        self,
        logits_SV: torch.Tensor,
        samples: Samples,
        stages: list[frozenset[str]],
        is_valid: torch.Tensor,
    ) -> torch.Tensor:
        for name, apply in self._stages.items():
            which = [i for i, names in enumerate(stages) if name in names]
            if which:
                apply(logits_SV, which, samples)
            if which and name in ADJUSTMENTS:
                is_valid[which] &= logits_SV[which].amax(-1).isfinite()  # amax of a NaN is NaN
        return torch.where(is_valid, self._draw(logits_SV, samples), -1)

    def _draw(self, logits_SV: torch.Tensor, samples: Samples) -> torch.Tensor:
        drawn = [i for i, p in enumerate(samples.params) if STAGES["draw"](p)]
        if not drawn:
            return argmax(logits_SV)
        if len(drawn) == len(samples.rows):
            return self._draw_sampled(logits_SV, samples)
        tokens = argmax(logits_SV)
        tokens[drawn] = self._draw_sampled(logits_SV[drawn], samples.only(drawn))
        return tokens

    def _draw_sampled(self, logits_SV: torch.Tensor, samples: Samples) -> torch.Tensor:
        noise = torch.tensor([[p.seed or 0 for p in samples.params], samples.positions])
        if self._by_rejection:
            return acceptance.draw(logits_SV, self._drafts(samples), *noise)
        return gumbel_argmax(logits_SV, *noise)

    def _drafts(self, samples: Samples) -> acceptance.Drafts:
        """A token is drawn in the place of a draft if the row's next one is drawn, too."""
        places = list(zip(samples.rows, samples.positions, strict=True))
        at = [
            i
            for i, (row, position) in enumerate(places[:-1])
            if places[i + 1] == (row, position + 1)
        ]
        drafted = [places[i] for i in at]
        given = self._state.draft_probs
        tokens = self._state.tokens[
            [row for row, _ in drafted], [position for _, position in drafted]
        ]
        return acceptance.Drafts(
            at,
            tokens.long(),
            {d: given[place] for d, place in enumerate(drafted) if place in given},
        )

    def _params(self, row: int) -> SamplingParams:
        params = self._state.params[row]
        assert params is not None
        return params

    def _apply_grammar(self, logits_SV: torch.Tensor, which: list[int], samples: Samples) -> None:
        for i in which:
            mask = self._state.masks[samples.rows[i], samples.positions[i]]
            fits = np.unpackbits(mask.view(np.uint8), count=logits_SV.shape[1], bitorder="little")
            logits_SV[i, torch.from_numpy(fits == 0)] = _NEVER

    def _add_bias(self, logits_SV: torch.Tensor, which: list[int], samples: Samples) -> None:
        for i in which:
            bias = samples.params[i].logit_bias
            logits_SV[i, list(bias)] += torch.tensor(list(bias.values()), dtype=torch.float32)

    def _hold_back_words(self, logits_SV: torch.Tensor, which: list[int], samples: Samples) -> None:
        for i in which:
            row = samples.rows[i]
            output = self._state.tokens[
                row, self._state.num_prompt[row] : samples.positions[i]
            ].tolist()
            words = samples.params[i].bad_word_ids
            logits_SV[
                i,
                [
                    word[-1]
                    for word in words
                    if output[len(output) - len(word) + 1 :] == list(word[:-1])
                ],
            ] = _NEVER

    def _hold_back_stops(self, logits_SV: torch.Tensor, which: list[int], samples: Samples) -> None:
        for i in which:
            logits_SV[i, samples.held_back(i, self._state)] = _NEVER

    def _penalize(self, logits_SV: torch.Tensor, which: list[int], samples: Samples) -> None:
        for i in which:
            row = samples.rows[i]
            tokens, num_prompt, begin = (
                self._state.tokens[row],
                self._state.num_prompt[row],
                samples.window_start(i),
            )
            output = tokens[max(begin, num_prompt) : samples.positions[i]]
            penalize(logits_SV[i], tokens[begin:num_prompt], output, samples.params[i])


def _keep_allowed(logits_SV: torch.Tensor, which: list[int], samples: Samples) -> None:
    for i in which:
        allowed = list(samples.params[i].allowed_token_ids)
        kept = logits_SV[i, allowed]
        logits_SV[i] = _NEVER
        logits_SV[i, allowed] = kept


def _divide(logits_SV: torch.Tensor, which: list[int], samples: Samples) -> None:
    for i in which:
        logits_SV[i] /= samples.params[i].temperature


def _given(samples: Samples, which: list[int], name: str, off: float) -> list[Any]:
    """That parameter of the sequences `which`; for the others, the value that restricts nothing."""
    values = [off] * len(samples.rows)
    for i in which:
        values[i] = getattr(samples.params[i], name)
    return values


def penalize(
    logits_V: torch.Tensor, prompt_ids: torch.Tensor, output_ids: torch.Tensor, p: SamplingParams
) -> None:
    """Repetition counts prompt and output; presence and frequency count the output alone."""
    if p.repetition_penalty != 1.0:
        seen = torch.cat([prompt_ids, output_ids]).unique()
        values = logits_V[seen]
        logits_V[seen] = torch.where(
            values > 0, values / p.repetition_penalty, values * p.repetition_penalty
        )
    if p.frequency_penalty or p.presence_penalty:
        ids, counts = output_ids.unique(return_counts=True)
        logits_V[ids] -= counts.to(torch.float32) * p.frequency_penalty + p.presence_penalty


def drawn_from(logits_V: torch.Tensor, token: int, p: SamplingParams) -> torch.Tensor:
    """The logits after all stages. The choice of the likeliest leaves no other."""
    if not p.greedy or token < 0:
        return logits_V
    made = torch.full_like(logits_V, _NEVER)
    made[token] = 0.0
    return made


def _floats(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device).unsqueeze(1)


def restrict_top_k(logits_SV: torch.Tensor, top_ks: list[int]) -> None:
    rows = [i for i, k in enumerate(top_ks) if 0 < k < logits_SV.shape[1]]
    if not rows:
        return
    largest = max(top_ks[i] for i in rows)
    values = logits_SV[rows].topk(largest, dim=-1).values
    kth = values.gather(1, torch.tensor([[top_ks[i] - 1] for i in rows], device=logits_SV.device))
    logits_SV[rows] = logits_SV[rows].masked_fill(logits_SV[rows] < kth, _NEVER)


def restrict_top_p(logits_SV: torch.Tensor, top_ps: list[float]) -> None:
    """Keeps the likeliest tokens up to and including the one that crosses p, so the likeliest
    always stays.

    Of equal ones, all stay. A few hundred tokens nearly always hold p, and finding them is ten
    times cheaper than sorting them all; a sequence that needs more is done again with more. What is
    kept is the same either way.
    """
    rows = [i for i, p in enumerate(top_ps) if p < 1.0]
    num_tokens = min(_LIKELIEST, logits_SV.shape[1])
    while rows:
        limits = _floats([top_ps[i] for i in rows], logits_SV)
        logprobs = logits_SV[rows].log_softmax(-1)
        values = logprobs.topk(num_tokens, dim=-1).values
        probs = values.exp()
        before = probs.cumsum(-1) - probs
        enough = (
            (before[:, -1:] >= limits).flatten().tolist()
            if num_tokens < logits_SV.shape[1]
            else [True] * len(rows)
        )
        lowest = values.masked_fill(before >= limits, math.inf).amin(-1, keepdim=True)
        done = [k for k, is_enough in enumerate(enough) if is_enough]
        if done:
            at = [rows[k] for k in done]
            logits_SV[at] = logits_SV[at].masked_fill(logprobs[done] < lowest[done], _NEVER)
        rows = [row for row, is_enough in zip(rows, enough, strict=True) if not is_enough]
        num_tokens = logits_SV.shape[1]


def restrict_min_p(logits_SV: torch.Tensor, min_ps: list[float]) -> None:
    """Keeps what is at least min_p times as likely as the likeliest."""
    rows = [i for i, p in enumerate(min_ps) if p > 0.0]
    if rows:
        limits = logits_SV[rows].amax(-1, keepdim=True) + _floats(
            [math.log(min_ps[i]) for i in rows], logits_SV
        )
        logits_SV[rows] = logits_SV[rows].masked_fill(logits_SV[rows] < limits, _NEVER)


def restrict_typical(logits_SV: torch.Tensor, typical_ps: list[float]) -> None:
    """Keeps the tokens whose surprise is nearest to the entropy, up to and including the one that
    crosses p. Of equal ones, all stay."""
    rows = [i for i, p in enumerate(typical_ps) if p < 1.0]
    if rows:
        logprobs = logits_SV[rows].log_softmax(-1)
        probs = logprobs.exp()
        expected = -torch.where(probs > 0, probs * logprobs, 0.0).sum(-1, keepdim=True)
        distance = torch.where(probs > 0, (-logprobs - expected).abs(), math.inf)
        ordered, order = distance.sort(dim=-1)
        sums = probs.gather(1, order)
        before = sums.cumsum(-1) - sums
        limits = _floats([typical_ps[i] for i in rows], logits_SV)
        farthest = ordered.masked_fill(before >= limits, 0.0).amax(-1, keepdim=True)
        logits_SV[rows] = logits_SV[rows].masked_fill(distance > farthest, _NEVER)


@dataclass(slots=True)
class Scores:
    """Logprobs of given tokens, and of the best in their places."""

    chosen: torch.Tensor  # [N]; NaN: the maximum of the logits is not finite
    values: torch.Tensor  # [N, k]
    ids: torch.Tensor

    def entries(self, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
        """The log-probabilities of these tokens, each with so many of the best; equal values in
        order of token id."""
        values, ids = self.values.numpy(), self.ids.numpy()
        order = np.lexsort((ids, -values))
        values, ids = np.take_along_axis(values, order, 1), np.take_along_axis(ids, order, 1)
        return [
            TokenLogprobs(token_id, chosen, list(zip(ids_k[:num], values_k[:num], strict=True)))
            for token_id, chosen, ids_k, values_k, num in zip(
                token_ids, self.chosen.tolist(), ids.tolist(), values.tolist(), num_top, strict=True
            )
        ]


def score(logits_NV: torch.Tensor, ids_N: torch.Tensor, num_top: int) -> Scores:
    logprobs = logits_NV.log_softmax(-1)
    values, ids = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
    return Scores(logprobs.gather(1, ids_N.long().clamp(min=0).unsqueeze(1)).flatten(), values, ids)


def with_named(
    entry: TokenLogprobs, ids: Sequence[int], logprobs: Sequence[float]
) -> TokenLogprobs:
    """The entry with these tokens and the chosen one instead of the likeliest."""
    named = dict(zip(ids, logprobs, strict=True)) | {entry.token_id: entry.logprob}
    return TokenLogprobs(
        entry.token_id, entry.logprob, sorted(named.items(), key=lambda pair: (-pair[1], pair[0]))
    )
