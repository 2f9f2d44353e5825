"""A draft model: a smaller model with the same tokenizer goes ahead, in a runner and a KV pool of
its own.

Its rows have the requests' sampling parameters, so that it draws with the noise of the same seed
and position: where both models give about the same probabilities, they draw the same token.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tidemill.config import EngineConfig
from tidemill.kv.groups import PageChange
from tidemill.kv.manager import KVManager
from tidemill.models.base import Model
from tidemill.runner.make import make_runner
from tidemill.runner.spec import Ask
from tidemill.sched.plan import NewRow, RowPages, StepItem, StepPlan, TokenWrite
from tidemill.sched.request import RowSpec
from tidemill.types.sampling import SamplingParams


@dataclass(slots=True)
class _Row:
    """A request in the draft model's runner."""

    row: int
    is_new: bool = True  # the runner does not know it yet
    num_known: int = 0  # tokens of the request that are in the row
    num_done: int = 0  # of these, how many have their keys and values
    # drawn after those; all but the last have theirs, too
    drafts: list[int] = field(default_factory=list)

    def take(self, tokens: Sequence[int]) -> int:
        """Takes the tokens that the request has by now. Drafts that were right need not be computed
        again. Returns from where on the row does not have these tokens."""
        first = self.num_known
        if self.drafts:
            known, drafts = self.num_known, self.drafts
            pairs = enumerate(zip(drafts, tokens[known:], strict=False))
            num_right = next(
                (i for i, (draft, token) in pairs if draft != token),
                min(len(drafts), len(tokens) - known),
            )
            self.num_done = known + min(num_right, len(drafts) - 1)
            first, self.drafts = known + num_right, []
        self.num_known = len(tokens)
        # the last must be computed for its logits
        self.num_done = min(self.num_done, len(tokens) - 1)
        return first


class DraftModelDrafter:
    name = "draft-model"
    is_free = False

    def __init__(self, model: Model, config: EngineConfig, vocab_size: int) -> None:
        """`config`: of the draft model. `vocab_size`: of the target."""
        self._runner, self._config = make_runner(model, config), config
        self._num_ids = min(vocab_size, model.config.vocab_size)
        self._num_steps = 0
        self._reset()

    def _reset(self) -> None:
        how = self._config
        self._kv = KVManager(
            how.num_pages + 1, how.page_size, True, how.layout.groups, how.token_budget
        )
        # by seq, the one asked for last at the end
        self._rows: OrderedDict[int, _Row] = OrderedDict()
        self._free = list(range(how.max_requests))
        self._zeroes: list[int] = []  # pages that held NaN

    def propose(self, asks: Sequence[Ask]) -> list[Sequence[int]]:
        try:
            made = self._propose(asks)
        except BaseException:
            self._reset()  # pages may be announced that were never computed
            raise
        return [made.get(ask.seq, ()) for ask in asks]

    def forget(self, seq: int, tokens: Sequence[int], salt: str) -> None:
        self._drop(seq)

    def _propose(self, asks: Sequence[Ask]) -> dict[int, list[int]]:
        plan, nums = self._catch_up(asks)
        launched: deque[Any] = deque()
        drawn: dict[int, list[int]] = {self._rows[seq].row: [] for seq in nums}
        for i in range(max(nums.values(), default=0) or bool(plan.items)):
            if i:
                plan = self._next(i, nums)
            launched.append(self._runner.launch(plan))
            if len(launched) > self._runner.steps_ahead:
                self._collect(launched.popleft(), drawn)
        while launched:
            self._collect(launched.popleft(), drawn)
        return {seq: self._made(seq, drawn[self._rows[seq].row]) for seq in nums}

    def _collect(self, launched: Any, drawn: dict[int, list[int]]) -> None:
        for row, tokens in self._runner.collect(launched).tokens.items():
            drawn[row] += tokens

    def _made(self, seq: int, drafts: list[int]) -> list[int]:
        """Up to one that is not a token of the target."""
        if min(drafts) < 0:  # its logits are not numbers
            self._drop(seq, broken=True)
        else:
            self._rows[seq].drafts = drafts
        num_usable = next(
            (i for i, token in enumerate(drafts) if not 0 <= token < self._num_ids), len(drafts)
        )
        return drafts[:num_usable]

    def _catch_up(self, asks: Sequence[Ask]) -> tuple[StepPlan, dict[int, int]]:
        """A step over the tokens that the draft model does not know yet, as many as a step may
        have; first those who have few. Whoever it brings up to date gets drafts: how many, by
        seq."""
        plan, nums, room = self._plan(), dict[int, int](), self._config.token_budget
        asked = {ask.seq for ask in asks}
        for ask in sorted(asks, key=self._num_missing):
            row = self._row_of(ask, asked) if room else None
            if row is None:
                continue
            first = row.take(ask.tokens)
            count = min(len(ask.tokens) - row.num_done, room)
            end = row.num_done + count
            num = min(ask.most, self._config.max_context - end) if end == len(ask.tokens) else 0
            changes = self._make_room(ask.seq, row.num_done, end + max(num - 1, 0), asked)
            if changes is None:
                continue
            room -= count
            self._kv.record(ask.seq, ask.tokens, end)
            self._enter(plan, ask, row, first, changes)
            plan.items.append(StepItem(ask.seq, row.row, row.num_done, count, num > 0, 0))
            row.num_done = end
            if num > 0:
                nums[ask.seq] = num
        return plan, nums

    def _enter(
        self, plan: StepPlan, ask: Ask, row: _Row, first: int, changes: list[PageChange]
    ) -> None:
        """Puts into a plan what is new about a row. `first`: of its tokens."""
        if not row.is_new:
            plan.page_updates += [
                RowPages(row.row, one.group, one.first_index, one.page_ids) for one in changes
            ]
            plan.token_writes += [
                TokenWrite(row.row, at, token) for at, token in enumerate(ask.tokens[first:], first)
            ]
            return
        pages = [list(pages) for pages in self._kv.tables(ask.seq)]
        spec = RowSpec(_own_params(ask.params, self._num_ids), ask.num_prompt)
        plan.new_rows.append(NewRow(row.row, list(ask.tokens), pages, spec))
        row.is_new = False

    def _next(self, number: int, nums: dict[int, int]) -> StepPlan:
        """A step that draws draft `number` of those that get more, from the one before it."""
        plan = self._plan()
        for seq, num in nums.items():
            row = self._rows[seq]
            if num > number:
                plan.items.append(StepItem(seq, row.row, row.num_known + number - 1, 1, True, 0))
        return plan

    def _plan(self) -> StepPlan:
        self._num_steps += 1
        self._kv.begin_step()
        plan = StepPlan(self._num_steps)
        plan.page_zeroes, self._zeroes = self._zeroes, []
        return plan

    # ---- rows and pages

    def _num_missing(self, ask: Ask) -> int:
        return len(ask.tokens) - (self._rows[ask.seq].num_done if ask.seq in self._rows else 0)

    def _row_of(self, ask: Ask, asked: Collection[int]) -> _Row | None:
        """None: it cannot have drafts now."""
        row = self._rows.get(ask.seq)
        if (
            len(ask.tokens) >= self._config.max_context
            or max(ask.tokens[row.num_done if row else 0 :]) >= self._num_ids
        ):
            self._drop(ask.seq)
            return None
        if row is not None:
            self._rows.move_to_end(ask.seq)
            return row
        if not self._free and not self._drop_idle(asked):
            return None
        path = self._kv.path(ask.tokens, ask.salt)
        while (start := self._kv.admit(ask.seq, len(ask.tokens), path)) is None:
            if not self._drop_idle(asked):
                return None
        row = self._rows[ask.seq] = _Row(self._free.pop(), num_done=start.num_cached)
        return row

    def _make_room(
        self, seq: int, start: int, end: int, asked: Collection[int]
    ) -> list[PageChange] | None:
        """Pages for tokens up to `end`, without those that none from `start` on sees. None: there
        are not enough."""
        changes = self._kv.trim(seq, start)
        while (added := self._kv.extend(seq, end)) is None:
            if not self._drop_idle(asked):
                self._drop(seq)
                return None
        return changes + added

    def _drop_idle(self, asked: Collection[int]) -> bool:
        """Give up the row that was not asked for the longest."""
        seq = next((seq for seq in self._rows if seq not in asked), None)
        if seq is not None:
            self._drop(seq)
        return seq is not None

    def _drop(self, seq: int, broken: bool = False) -> None:
        row = self._rows.pop(seq, None)
        if row is not None:
            self._free.append(row.row)
            if broken:
                self._zeroes += self._kv.discard(seq)
            else:
                self._kv.release(seq)


def _own_params(params: SamplingParams, num_ids: int) -> SamplingParams:
    """The sampling parameters of the request for the draft model, limited to tokens that both
    models have."""
    return msgspec.structs.replace(
        params,
        n=1,
        logit_bias={token: bias for token, bias in params.logit_bias.items() if token < num_ids},
        allowed_token_ids=tuple(token for token in params.allowed_token_ids if token < num_ids),
        bad_word_ids=tuple(word for word in params.bad_word_ids if max(word) < num_ids),
        stop_token_ids=tuple(token for token in params.stop_token_ids if token < num_ids),
        stop=(),
        logprobs=None,
        logprob_token_ids=(),
        prompt_logprobs=None,
        grammar=None,
        reasoning=None,
    )
