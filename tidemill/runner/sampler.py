"""Logits to tokens. Rows are independent: what one request asks never changes another's bits.

Order: the form's mask, logit bias and min_tokens mask, penalties, temperature, top-k, top-p, min-p, typical-p,
draw. Logprobs are of the untouched logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch

from tidemill.kernels.argmax import argmax
from tidemill.kernels.noise import gumbel_argmax
from tidemill.runner.state import RowState
from tidemill.sampling import SamplingParams
from tidemill.wire import TokenLogprobs

_NEVER = float("-inf")
_LIKELIEST = 512


@dataclass(slots=True)
class Sampled:
    token_ids: torch.Tensor  # [S]; -1: not even the best of the logits is a number
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by row


class Sampler:
    def __init__(self, state: RowState) -> None:
        self._state = state

    def sample(self, logits_SV: torch.Tensor, rows: list[int], positions: list[int]) -> Sampled:
        """`positions`: of the tokens to be drawn. The logits are consumed."""
        params = [self._params(row) for row in rows]
        wanted = [i for i, p in enumerate(params) if p.logprobs is not None]
        raw = logits_SV[wanted].log_softmax(-1) if wanted else None
        for i, (row, p, position) in enumerate(zip(rows, params, positions, strict=True)):
            if p.logit_bias or p.min_tokens or p.has_penalties or row in self._state.masks:
                self._adjust(logits_SV[i], row, p, position)
        drawn = [i for i, p in enumerate(params) if not p.greedy]
        tokens = torch.empty(len(rows), dtype=torch.int64, device=logits_SV.device)
        if len(drawn) < len(rows):
            tokens = argmax(logits_SV)
        if drawn:
            seeds = [p.seed or 0 for p in params]
            tokens[drawn] = draw(
                logits_SV if len(drawn) == len(rows) else logits_SV[drawn],
                [params[i] for i in drawn],
                [seeds[i] for i in drawn],
                [positions[i] for i in drawn],
            )
        chosen = logits_SV.gather(1, tokens.unsqueeze(1)).flatten()
        out = Sampled(torch.where(chosen.isfinite(), tokens, -1))
        if raw is not None:
            for k, i in enumerate(wanted):
                if out.token_ids[i] >= 0:
                    out.logprobs[rows[i]] = token_logprobs(raw[k], int(tokens[i]), params[i].logprobs or 0)
        return out

    def _params(self, row: int) -> SamplingParams:
        params = self._state.params[row]
        assert params is not None
        return params

    def _adjust(self, logits_V: torch.Tensor, row: int, p: SamplingParams, position: int) -> None:
        """What needs this request's own history or lists."""
        num_output = position - self._state.num_prompt[row]
        mask = self._state.masks.get(row)
        if mask is not None:
            fits = np.unpackbits(mask.view(np.uint8), count=logits_V.numel(), bitorder="little")
            logits_V[torch.from_numpy(fits == 0).to(logits_V.device)] = _NEVER
        if p.logit_bias:
            ids = torch.tensor(list(p.logit_bias), dtype=torch.int64, device=logits_V.device)
            logits_V[ids] += torch.tensor(list(p.logit_bias.values()), dtype=torch.float32, device=logits_V.device)
        if num_output < p.min_tokens:
            enders = [*p.stop_token_ids, *(() if p.ignore_eos else self._state.eos_token_ids[row])]
            logits_V[enders] = _NEVER
        if p.has_penalties:
            tokens = self._state.tokens[row]
            penalize(logits_V, tokens[: self._state.num_prompt[row]], tokens[self._state.num_prompt[row] : position], p)


def penalize(logits_V: torch.Tensor, prompt_ids: torch.Tensor, output_ids: torch.Tensor, p: SamplingParams) -> None:
    """Repetition counts prompt and output; presence and frequency count the output alone."""
    if p.repetition_penalty != 1.0:
        seen = torch.cat([prompt_ids, output_ids]).unique()
        values = logits_V[seen]
        logits_V[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if p.frequency_penalty or p.presence_penalty:
        ids, counts = output_ids.unique(return_counts=True)
        logits_V[ids] -= counts.to(torch.float32) * p.frequency_penalty + p.presence_penalty


def draw(logits_SV: torch.Tensor, params: list[SamplingParams], seeds: list[int], positions: list[int]) -> torch.Tensor:
    """One token per row from the restricted distribution: those left out get a logit of minus infinity."""
    logits_SV = logits_SV / _floats([p.temperature for p in params], logits_SV)
    restrict_top_k(logits_SV, [p.top_k for p in params])
    restrict_top_p(logits_SV, [p.top_p for p in params])
    restrict_min_p(logits_SV, [p.min_p for p in params])
    restrict_typical(logits_SV, [p.typical_p for p in params])
    return gumbel_argmax(logits_SV, *torch.tensor([seeds, positions], dtype=torch.int64, device=logits_SV.device))


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
    """Keeps the likeliest tokens up to and including the one that crosses p, so the likeliest always stays.

    A few hundred tokens nearly always hold p, and finding them is ten times cheaper than sorting them all; a row that needs
    more is done again with more. What is kept is the same either way.
    """
    rows = [i for i, p in enumerate(top_ps) if p < 1.0]
    num_tokens = min(_LIKELIEST, logits_SV.shape[1])
    while rows:
        limits = _floats([top_ps[i] for i in rows], logits_SV)
        values, ids = logits_SV[rows].log_softmax(-1).topk(num_tokens, dim=-1)
        probs = values.exp()
        before = probs.cumsum(-1) - probs
        enough = (before[:, -1:] >= limits).flatten().tolist() if num_tokens < logits_SV.shape[1] else [True] * len(rows)
        values[before >= limits] = _NEVER
        done = [k for k, is_enough in enumerate(enough) if is_enough]
        if done:
            kept = torch.full_like(logits_SV[: len(done)], _NEVER)
            logits_SV[[rows[k] for k in done]] = kept.scatter_(1, ids[done], values[done])
        rows = [row for row, is_enough in zip(rows, enough, strict=True) if not is_enough]
        num_tokens = logits_SV.shape[1]


def restrict_min_p(logits_SV: torch.Tensor, min_ps: list[float]) -> None:
    """Keeps what is at least min_p times as likely as the likeliest."""
    rows = [i for i, p in enumerate(min_ps) if p > 0.0]
    if rows:
        limits = logits_SV[rows].amax(-1, keepdim=True) + _floats([math.log(min_ps[i]) for i in rows], logits_SV)
        logits_SV[rows] = logits_SV[rows].masked_fill(logits_SV[rows] < limits, _NEVER)


def restrict_typical(logits_SV: torch.Tensor, typical_ps: list[float]) -> None:
    """Keeps the tokens whose surprise is nearest to what is to be expected, up to and including the one that crosses p."""
    rows = [i for i, p in enumerate(typical_ps) if p < 1.0]
    if rows:
        logprobs = logits_SV[rows].log_softmax(-1)
        probs = logprobs.exp()
        expected = -torch.where(probs > 0, probs * logprobs, 0.0).sum(-1, keepdim=True)
        order = torch.where(probs > 0, (-logprobs - expected).abs(), float("inf")).sort(dim=-1, stable=True).indices
        before = probs.gather(1, order).cumsum(-1) - probs.gather(1, order)
        leaves = torch.zeros_like(probs, dtype=torch.bool).scatter_(
            1, order, before >= _floats([typical_ps[i] for i in rows], logits_SV)
        )
        logits_SV[rows] = logits_SV[rows].masked_fill(leaves, _NEVER)


def token_logprobs(logprobs_V: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """The chosen token's and the `num_top` best; equal values in order of token id."""
    top: list[tuple[int, float]] = []
    if num_top:
        values, ids = logprobs_V.topk(min(num_top, logprobs_V.numel()))
        top = sorted(zip(ids.tolist(), values.tolist(), strict=True), key=lambda pair: (-pair[1], pair[0]))
    return TokenLogprobs(token_id, float(logprobs_V[token_id]), top)
