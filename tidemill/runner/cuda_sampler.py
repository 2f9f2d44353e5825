"""Sampling stages beyond a temperature, on the GPU. Only the sequences that need them are touched;
nothing waits for the device.

Stages and their order are sampler.STAGES. Adjustments change a copy of a sequence's logits;
restrictions become an interval of logits (kernels/cuda/sampling.py). Logprobs are of the logits as
the model gave them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tidemill.kernels.cuda import logprobs
from tidemill.kernels.cuda.sampling import RECORD, Workspace, find_limits, redraw
from tidemill.models.base import CausalLM
from tidemill.runner.base import StepResult
from tidemill.runner.reports import Report, look_at_prompt, scores_to_host, to_host
from tidemill.runner.sampler import ADJUSTMENTS, Samples, Scores, with_named
from tidemill.runner.state import RowState, upload
from tidemill.sched.plan import StepItem
from tidemill.types.sampling import MAX_LOGPROBS, SamplingParams

_NEVER = float("-inf")
_AT_ONCE = 64  # sequences drawn again together: bounds the workspace and the copies of logits


@dataclass(slots=True)
class LogprobsReport:
    """Logprobs of a step's tokens, for the rows that ask for them."""

    rows: list[int]
    num_top: list[int]
    scores: Scores
    named: list[tuple[int, ...]]  # by row: tokens that are reported instead of the likeliest
    # their logits less that of the chosen token, one row after another
    above: torch.Tensor | None = None

    def to_host(self) -> LogprobsReport:
        above = None if self.above is None else to_host(self.above)
        return LogprobsReport(
            self.rows, self.num_top, scores_to_host(self.scores), self.named, above
        )

    def read(self, result: StepResult) -> None:
        number = Counter[int]()  # of its draws, by row
        tokens = []
        for row in self.rows:
            tokens.append(result.token_of(row, number[row]))
            number[row] += 1
        entries = self.scores.entries(tokens, self.num_top)
        above = [] if self.above is None else self.above.tolist()
        for k, ids in enumerate(self.named):
            if ids:
                entries[k] = with_named(
                    entries[k], ids, [entries[k].logprob + more for more in above[: len(ids)]]
                )
                del above[: len(ids)]
        result.take_logprobs(self.rows, dict(enumerate(entries)))


def score(logits_NV: torch.Tensor, ids_N: torch.Tensor, num_top: int) -> Scores:
    return Scores(*logprobs.score(logits_NV, ids_N, num_top))


class CudaSampler:
    def __init__(self, state: RowState, vocab_size: int) -> None:
        self._state, self._device = state, state.tokens.device
        self._at_once = min(_AT_ONCE, state.tokens.shape[0])
        self._work = Workspace.make(self._at_once, vocab_size, self._device)
        self._never = torch.full((), _NEVER, device=self._device)
        self._bits = torch.arange(32, dtype=torch.int32, device=self._device)
        self._columns = torch.arange(state.tokens.shape[1], device=self._device)
        self._adjustments = {
            "grammar": self._apply_grammar,
            "allowed_tokens": self._keep_allowed,
            "logit_bias": self._add_bias,
            "bad_words": self._hold_back_words,
            "min_tokens": self._hold_back_stops,
            "penalties": self._penalize,
        }

    def redraw(
        self,
        entries: list[int],
        rows: list[int],
        positions: list[int],
        logits_SV: torch.Tensor,
        tokens_S: torch.Tensor,
    ) -> None:
        """Draw again for those entries of a step, whose rows and positions of the token to be drawn
        are given: into their rows and `tokens_S`, where a failed draw (-1) stays one."""
        for first in range(0, len(rows), self._at_once):
            part = slice(first, first + self._at_once)
            params = [self._params(row) for row in rows[part]]
            self._redraw(
                np.array(entries[part]),
                Samples(rows[part], params, positions[part]),
                logits_SV,
                tokens_S,
            )

    def _redraw(
        self, entries: np.ndarray, samples: Samples, logits_SV: torch.Tensor, tokens_S: torch.Tensor
    ) -> None:
        state = self._state
        stages = samples.stages(state)
        changed = [i for i, names in enumerate(stages) if not names.isdisjoint(ADJUSTMENTS)]
        source = entries.copy()
        source[changed] = [~number for number in range(len(changed))]
        adjusted = logits_SV
        if changed:
            adjusted = logits_SV.index_select(0, self._ints(entries[changed]))
            for name in ADJUSTMENTS:
                which = [number for number, i in enumerate(changed) if name in stages[i]]
                if which:
                    self._adjustments[name](adjusted, which, samples.only(changed))
        records = np.zeros(len(samples.rows), RECORD)
        for field, values in (
            ("entry", entries),
            ("row", samples.rows),
            ("position", samples.positions),
            ("source", source),
        ):
            records[field] = values
        records["position"] -= 1
        records["top_k"] = [p.top_k for p in samples.params]
        records["top_p"] = [p.top_p for p in samples.params]
        records["log_min_p"] = [
            math.log(p.min_p) if p.min_p > 0 else _NEVER for p in samples.params
        ]
        records["typical_p"] = [p.typical_p for p in samples.params]
        words = upload(records.view(np.int32).reshape(len(records), -1), self._device)
        every = frozenset().union(*stages)
        limited = not every.isdisjoint(("top_k", "top_p", "min_p", "typical_p"))
        if limited:
            thresholds = not every.isdisjoint(("top_k", "top_p"))
            find_limits(
                logits_SV,
                adjusted,
                words,
                state.draws,
                self._work,
                thresholds,
                thresholds or "typical_p" in every,
            )
        redraw(logits_SV, adjusted, words, state.draws, state.tokens, tokens_S, self._work, limited)

    def warm_up(self, model: CausalLM, hidden_TH: torch.Tensor, logits_NV: torch.Tensor) -> None:
        """Run every stage once, for few sequences and for many, so that nothing is compiled or
        loaded later. Hidden states and logits: the room for those of a step. All rows must be
        unused."""
        state, num_tokens = self._state, logits_NV.shape[1]
        logits_NV.zero_()
        hidden_TH.zero_()
        everything = SamplingParams(
            top_k=5, top_p=0.9, min_p=0.01, typical_p=0.9, repetition_penalty=1.5, logit_bias={0: 1.0}, min_tokens=2,
            stop_token_ids=(0,), allowed_token_ids=(0, 1), bad_word_ids=((0,), (0, 1)), logprobs=MAX_LOGPROBS,
            logprob_token_ids=(0, 1), prompt_logprobs=MAX_LOGPROBS, pooling="mean",
        )  # fmt: skip
        before = state.masks, list(state.params), list(state.num_prompt)
        for num in sorted(
            {
                min(num, logits_NV.shape[0])
                for num in (1, 2, 8, 32, self._at_once, logits_NV.shape[0])
            }
        ):
            # one with drafts draws several times
            rows = [i % len(state.params) for i in range(num)]
            entries, logits, reports = list(range(num)), logits_NV[:num], list[Report]()
            tokens = torch.zeros(num, dtype=torch.int32, device=self._device)
            for params in (
                SamplingParams(temperature=0.0, logit_bias={0: 1.0}),
                SamplingParams(typical_p=0.9),
                everything,
            ):
                state.masks = {
                    (row, 1): np.zeros(-(-num_tokens // 32), np.int32)
                    for row in rows
                    if params is everything
                }
                state.params[:] = [params] * len(state.params)
                self.redraw(entries, rows, [1] * num, logits, tokens)
            reports.append(self.logprobs(entries, rows, logits, tokens))
            # a token more: in two parts
            count = min(hidden_TH.shape[0], state.tokens.shape[1] - 1, num + 1)
            state.num_prompt[0] = count + 1
            item = StepItem(seq=0, row=0, start=0, count=count, samples=False, epoch=0)
            reports.append(look_at_prompt(model, state, item, hidden_TH[:count], score, logits))
            for made in reports if self._device.type == "cuda" else ():
                made.to_host()
        state.masks, state.params[:], state.num_prompt[:] = before
        state.tokens.zero_()

    def logprobs(
        self, entries: list[int], rows: list[int], logits_SV: torch.Tensor, tokens_S: torch.Tensor
    ) -> LogprobsReport:
        which, num_top = self._ints(entries), [self._params(row).logprobs or 0 for row in rows]
        # as many for all: which of equal values are the best may depend on it
        most = MAX_LOGPROBS if any(num_top) else 0
        named = [self._params(row).logprob_token_ids for row in rows]
        scores = score(logits_SV.index_select(0, which), tokens_S[which], most)
        return LogprobsReport(
            rows, num_top, scores, named, self._above(entries, named, logits_SV, tokens_S)
        )

    def _above(
        self,
        entries: list[int],
        named: list[tuple[int, ...]],
        logits_SV: torch.Tensor,
        tokens_S: torch.Tensor,
    ) -> torch.Tensor | None:
        pairs = [(i, token) for i, ids in zip(entries, named, strict=True) for token in ids]
        if not pairs:
            return None
        where = self._ints([i for i, _ in pairs])
        return (
            logits_SV[where, self._ints([token for _, token in pairs])]
            - logits_SV[where, tokens_S[where].long().clamp(min=0)]
        )

    def _params(self, row: int) -> SamplingParams:
        params = self._state.params[row]
        assert params is not None
        return params

    def _ints(self, values: Sequence[int] | np.ndarray) -> torch.Tensor:
        return upload(np.array(values, np.int64), self._device)

    def _floats(self, values: Sequence[float]) -> torch.Tensor:
        return upload(np.array(values, np.float32), self._device)

    # ---- adjustments: of the sequences `which`

    def _apply_grammar(self, logits: torch.Tensor, which: list[int], samples: Samples) -> None:
        masks = [self._state.masks[samples.rows[i], samples.positions[i]] for i in which]
        words = upload(np.stack(masks), self._device)
        bits = (words.unsqueeze(-1) >> self._bits) & 1
        fits = bits.flatten(1)[:, : logits.shape[1]] == 1
        at = self._ints(which)
        logits[at] = logits[at].masked_fill(~fits, _NEVER)

    def _add_bias(self, logits: torch.Tensor, which: list[int], samples: Samples) -> None:
        biases = [
            (i, token, bias) for i in which for token, bias in samples.params[i].logit_bias.items()
        ]
        where, tokens, values = zip(*biases, strict=True)
        place = (self._ints(where), self._ints(tokens))
        logits.index_put_(place, logits[place] + self._floats(values))

    def _keep_allowed(self, logits: torch.Tensor, which: list[int], samples: Samples) -> None:
        where, tokens = zip(
            *((i, token) for i in which for token in samples.params[i].allowed_token_ids),
            strict=True,
        )
        place = (self._ints(where), self._ints(tokens))
        kept = logits[place]
        logits[self._ints(which)] = self._never
        logits.index_put_(place, kept)

    def _hold_back_words(self, logits: torch.Tensor, which: list[int], samples: Samples) -> None:
        """The last token of a word may not follow the others. What the output ends with is known on
        the device alone."""
        words = [(i, word) for i in which for word in samples.params[i].bad_word_ids]
        longest = max(max(len(word) for _, word in words) - 1, 1)
        # -1: any token; words are aligned at their end
        begun = np.full((len(words), longest), -1, np.int64)
        for number, (_, word) in enumerate(words):
            begun[number, longest - len(word) + 1 :] = word[:-1]
        positions = np.array([samples.positions[i] for i, _ in words])[:, None] - np.arange(
            longest, 0, -1
        )
        outside = (
            positions
            < np.array([self._state.num_prompt[samples.rows[i]] for i, _ in words])[:, None]
        )
        begun[outside & (begun >= 0)] = -2  # no token
        ends = self._state.tokens[
            self._ints([samples.rows[i] for i, _ in words])[:, None], self._ints(positions.clip(0))
        ]
        wanted = self._ints(begun)
        follows = ((ends == wanted) | (wanted == -1)).all(1)
        place = (self._ints([i for i, _ in words]), self._ints([word[-1] for _, word in words]))
        # two words may end alike
        logits.index_put_(place, torch.where(follows, self._never, 0.0), accumulate=True)

    def _hold_back_stops(self, logits: torch.Tensor, which: list[int], samples: Samples) -> None:
        stops = [(i, token) for i in which for token in samples.held_back(i, self._state)]
        if stops:
            where, tokens = zip(*stops, strict=True)
            logits.index_put_((self._ints(where), self._ints(tokens)), self._never)

    def _penalize(self, logits: torch.Tensor, which: list[int], samples: Samples) -> None:
        """Repetition counts prompt and output; presence and frequency count the output alone."""
        state, params = self._state, [samples.params[i] for i in which]
        rows, positions = [samples.rows[i] for i in which], [samples.positions[i] for i in which]
        at = self._ints(which)
        ids = state.tokens[self._ints(rows), : max(positions)].long()
        column = self._columns[: ids.shape[1]]
        begins = self._ints([samples.window_start(i) for i in which]).unsqueeze(1)
        known = (column < self._ints(positions).unsqueeze(1)) & (column >= begins)
        output = known & (
            column >= self._ints([state.num_prompt[row] for row in rows]).unsqueeze(1)
        )
        values = logits[at]
        # sums of ones: exact in any order
        seen = torch.zeros_like(values).scatter_add_(1, ids, known.float()) > 0
        counts = torch.zeros_like(values).scatter_add_(1, ids, output.float())
        repetition = self._floats([p.repetition_penalty for p in params]).unsqueeze(1)
        frequency = self._floats([p.frequency_penalty for p in params]).unsqueeze(1)
        presence = self._floats([p.presence_penalty for p in params]).unsqueeze(1)
        repeated = torch.where(values > 0, values / repetition, values * repetition)
        logits[at] = torch.where(seen, repeated, values) - (
            counts * frequency + (counts > 0) * presence
        )
