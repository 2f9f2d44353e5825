"""What some requests ask of a draw beyond a temperature, on the GPU. Only their rows are touched; nothing waits for the device.

Order as in sampler.py: logit bias and min_tokens mask, penalties, temperature, top-k, top-p, min-p, draw; logprobs are of the
untouched logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tidemill.kernels.cuda.sampling import pick_tokens, restrict
from tidemill.runner.sampler import restrict_typical
from tidemill.runner.state import RowState, upload
from tidemill.sampling import SamplingParams
from tidemill.wire import TokenLogprobs

_NEVER = float("-inf")


@dataclass(slots=True)
class AskedLogprobs:
    """Of rows that want them: the chosen tokens', and the best. On the device, later on the host."""

    rows: list[int]
    num_top: list[int]
    chosen: torch.Tensor
    values: torch.Tensor
    ids: torch.Tensor

    def to_host(self) -> AskedLogprobs:
        """Copies under way; valid once the stream has got there."""
        copies = (_to_host(tensor) for tensor in (self.chosen, self.values, self.ids))
        return AskedLogprobs(self.rows, self.num_top, *copies)

    def read(self, tokens: dict[int, int]) -> dict[int, TokenLogprobs]:
        """Equal values in order of token id."""
        told = {}
        for row, num, chosen, values, ids in zip(
            self.rows, self.num_top, self.chosen.tolist(), self.values.tolist(), self.ids.tolist(), strict=True
        ):
            best = sorted(zip(ids[:num], values[:num], strict=True), key=lambda pair: (-pair[1], pair[0]))
            told[row] = TokenLogprobs(tokens[row], chosen, best)
        return told


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    tensor.record_stream(torch.cuda.current_stream())
    return target.copy_(tensor, non_blocking=True)


class CudaSampler:
    def __init__(self, state: RowState) -> None:
        self._state, self._device = state, state.tokens.device

    def redraw(
        self, entries: list[int], rows: list[int], positions: list[int], logits_SV: torch.Tensor, tokens_S: torch.Tensor
    ) -> None:
        """Draw again for those entries of a step, whose rows and positions of the token to be drawn are given: into their rows
        and `tokens_S`."""
        params = [self._params(row) for row in rows]
        place = upload(np.array([entries, range(len(rows)), rows, np.array(positions) - 1], np.int32), self._device)
        logits = logits_SV[place[0]]
        self._adjust(logits, rows, params, positions)
        settings = [(0.0 if p.greedy else p.temperature, p.top_k, p.top_p, p.min_p) for p in params]
        restrict(logits, upload(np.array(settings, np.float32), self._device))
        restrict_typical(logits, [1.0 if p.greedy else p.typical_p for p in params])
        state = self._state
        tokens_S[place[0]] = pick_tokens(logits, place[1], place[2], place[3], state.draws, state.tokens, scaled=True)

    def logprobs(self, entries: list[int], rows: list[int], logits_SV: torch.Tensor, tokens_S: torch.Tensor) -> AskedLogprobs:
        which = self._ints(entries)
        logprobs = logits_SV[which].log_softmax(-1)
        num_top = [self._params(row).logprobs or 0 for row in rows]
        values, ids = logprobs.topk(min(max(num_top), logprobs.shape[1]), dim=-1)
        chosen = logprobs.gather(1, tokens_S[which].long().clamp(min=0).unsqueeze(1)).flatten()  # -1: not a number
        return AskedLogprobs(rows, num_top, chosen, values, ids)

    def _params(self, row: int) -> SamplingParams:
        params = self._state.params[row]
        assert params is not None
        return params

    def _ints(self, values: Sequence[int] | np.ndarray) -> torch.Tensor:
        return upload(np.array(values, np.int64), self._device)

    def _floats(self, values: list[float]) -> torch.Tensor:
        return upload(np.array(values, np.float32), self._device)

    def _adjust(self, logits: torch.Tensor, rows: list[int], params: list[SamplingParams], positions: list[int]) -> None:
        """What needs a request's own history or lists."""
        formed = [(i, self._state.masks[row]) for i, row in enumerate(rows) if row in self._state.masks]
        if formed:
            words = upload(np.stack([mask for _, mask in formed]), self._device)
            bits = (words.unsqueeze(-1) >> torch.arange(32, device=self._device)) & 1
            fits = bits.flatten(1)[:, : logits.shape[1]] == 1
            at = self._ints([i for i, _ in formed])
            logits[at] = logits[at].masked_fill(~fits, _NEVER)
        biases = [(i, token, bias) for i, p in enumerate(params) for token, bias in p.logit_bias.items()]
        if biases:
            where, tokens, values = zip(*biases, strict=True)
            logits.index_put_((self._ints(where), self._ints(tokens)), self._floats(list(values)), accumulate=True)
        enders = [
            (i, token)
            for i, (row, p, position) in enumerate(zip(rows, params, positions, strict=True))
            if position - self._state.num_prompt[row] < p.min_tokens
            for token in (*p.stop_token_ids, *(() if p.ignore_eos else self._state.eos_token_ids[row]))
        ]
        if enders:
            where, tokens = zip(*enders, strict=True)
            logits[self._ints(where), self._ints(tokens)] = _NEVER
        punished = [i for i, p in enumerate(params) if p.has_penalties]
        if punished:
            self._penalize(logits, punished, rows, params, positions)

    def _penalize(
        self, logits: torch.Tensor, which: list[int], rows: list[int], params: list[SamplingParams], positions: list[int]
    ) -> None:
        """Repetition counts prompt and output; presence and frequency count the output alone."""
        state = self._state
        at = self._ints(which)
        ids = state.tokens[self._ints([rows[i] for i in which]), : max(positions[i] for i in which)].long()
        column = torch.arange(ids.shape[1], device=self._device)
        known = column < self._ints([positions[i] for i in which]).unsqueeze(1)
        output = known & (column >= self._ints([state.num_prompt[rows[i]] for i in which]).unsqueeze(1))
        values = logits[at]
        seen = torch.zeros_like(values).scatter_add_(1, ids, known.float()) > 0  # sums of ones: exact in any order
        counts = torch.zeros_like(values).scatter_add_(1, ids, output.float())
        repetition = self._floats([params[i].repetition_penalty for i in which]).unsqueeze(1)
        frequency = self._floats([params[i].frequency_penalty for i in which]).unsqueeze(1)
        presence = self._floats([params[i].presence_penalty for i in which]).unsqueeze(1)
        repeated = torch.where(values > 0, values / repetition, values * repetition)
        logits[at] = torch.where(seen, repeated, values) - (counts * frequency + (counts > 0) * presence)
