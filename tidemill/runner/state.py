"""RowState: one permanent row per live request, on the device. A step stages small writes and
applies them in one go."""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence

import numpy as np
import torch

from tidemill.kernels.attention import block_bounds
from tidemill.sched.plan import RowCopy, StepItem, StepPlan
from tidemill.sched.request import RowSpec
from tidemill.types.cache_layout import Group
from tidemill.types.inputs import Segment
from tidemill.types.sampling import SamplingParams


def upload(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """To the device without waiting for it: from pinned memory."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class StagedWrites:
    """Runs of values for a flat tensor, gathered on the host and scattered at once."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target
        self._starts: list[int] = []
        self._runs: list[list[int]] = []

    def add(self, start: int, values: list[int]) -> None:
        if values:
            self._starts.append(start)
            self._runs.append(values)

    def clear(self) -> None:
        self._starts.clear()
        self._runs.clear()

    def apply(self) -> None:
        if not self._runs:
            return
        lens = np.array([len(run) for run in self._runs])
        ends = np.cumsum(lens)
        index = np.repeat(np.array(self._starts) - (ends - lens), lens) + np.arange(ends[-1])
        values = np.concatenate([np.array(run, dtype=np.int64) for run in self._runs])
        where, what = upload(np.stack([index, values]), self._target.device)
        self._target.index_put_((where,), what.to(self._target.dtype))
        self.clear()


class RowState:
    """Tokens, page table and sampling words of every row on the device; sampling parameters beside
    them on the host."""

    def __init__(
        self,
        num_rows: int,
        max_context: int,
        page_size: int,
        device: torch.device | None = None,
        groups: Sequence[Group] = (),
        max_tokens: int = 0,
        has_inputs: bool = False,
    ) -> None:
        """`groups`: the KV groups, whose page tables lie side by side in a row; one that sees all,
        if not given. `max_tokens`: of a row, if that may be more than the context, which is what
        its pages hold. `has_inputs`: tokens may be rows of embeddings."""
        self.page_size = page_size
        longest = block_bounds(max_context)[-1][1]  # attention reads whole blocks
        groups = tuple(groups) or (Group(page_size),)
        nums = [_aligned(group.num_pages_for(longest)) for group in groups]
        # where each group's begin, and where the last ends
        self.columns = np.cumsum([0, *nums]).tolist()
        most = max(max_context, max_tokens) + 1
        widths = (most, self.columns[-1], 3, *[most] * has_inputs)
        *self._offsets, num_words = np.cumsum(
            [0, *(_aligned(num_rows * width) for width in widths)]
        ).tolist()
        flat = torch.zeros(num_words, dtype=torch.int32, device=device)
        parts = zip(self._offsets, widths, strict=True)
        self.tokens, self.pages, self.draws, *inputs = (  # a draw: temperature's bits, seed
            flat[start : start + num_rows * width].view(num_rows, width) for start, width in parts
        )
        # by position: the number of its row of embeddings; 0: it has none
        self.inputs = inputs[0] if inputs else None
        self._inputs_end = [0] * num_rows
        self._widths = widths
        self._writes = StagedWrites(flat)
        self.params: list[SamplingParams | None] = [None] * num_rows
        # of sampling, by params
        self.known_stages: list[tuple[SamplingParams, frozenset[str]] | None] = [None] * num_rows
        self.eos_token_ids: list[frozenset[int]] = [frozenset()] * num_rows
        # by row and position: a bit per token that may be drawn there
        self.masks: dict[tuple[int, int], np.ndarray] = {}
        # by row and position: see StepPlan
        self.draft_probs: dict[tuple[int, int], np.ndarray] = {}
        self.num_prompt = [0] * num_rows
        self.segments: list[Sequence[Segment]] = [()] * num_rows
        # positions before this one are asked about: of prompts alone
        self._asked_until = [0] * num_rows
        self.adapters = np.full(num_rows, -1, np.int64)  # slots
        # each group's part
        self.tables = [self.pages[:, start:end] for start, end in itertools.pairwise(self.columns)]
        self.kv_tables = [
            table for table, group in zip(self.tables, groups, strict=True) if not group.is_state
        ]
        if flat.device.type == "cpu":  # the same memory, for numpy
            self.tokens_cpu, self.kv_tables_cpu = (
                self.tokens.numpy(),
                [table.numpy() for table in self.kv_tables],
            )
        self._num_pages = [[0] * len(nums) for _ in range(num_rows)]
        self._copies: list[RowCopy] = []

    def stage(self, plan: StepPlan) -> None:
        self._writes.clear()  # of a step that failed before it applied them
        self._stage_copies(plan.row_copies)
        if self.inputs is not None:
            self._stage_inputs(plan)
        for new in plan.new_rows:
            self._keep(new.row, new.spec)
            self._add(0, new.row, 0, new.token_ids)
            for group, page_ids in enumerate(new.page_ids):
                # past the end: null
                padding = [0] * (self._num_pages[new.row][group] - len(page_ids))
                self._add(1, new.row, self.columns[group], page_ids + padding)
                self._num_pages[new.row][group] = len(page_ids)
        for write in plan.token_writes:
            self._add(0, write.row, write.position, [write.token_id])
        for update in plan.page_updates:
            self._add(
                1, update.row, self.columns[update.group] + update.first_index, update.page_ids
            )
            end, nums = update.first_index + len(update.page_ids), self._num_pages[update.row]
            nums[update.group] = max(nums[update.group], end)
        self.stage_drafts(plan)
        self.masks = {place: np.frombuffer(words, np.int32) for place, words in plan.masks.items()}
        self.draft_probs = {
            place: np.frombuffer(probs, np.float32) for place, probs in plan.draft_probs.items()
        }

    def stage_drafts(self, plan: StepPlan, only: Container[int] | None = None) -> None:
        """Stages the drafts after the known tokens. `only`: of these rows."""
        for item in plan.items if plan.drafts else ():
            if item.num_drafts and (only is None or item.row in only):
                self._add(
                    0, item.row, item.start + item.count - item.num_drafts, plan.drafts[item.row]
                )

    def _stage_copies(self, copies: list[RowCopy]) -> None:
        self._copies = copies
        sources = [copy.source for copy in copies]
        for copy, num_pages in zip(
            copies, [list(self._num_pages[row]) for row in sources], strict=True
        ):
            self._num_pages[copy.target] = num_pages
            self._keep(copy.target, copy.spec)

    def _stage_inputs(self, plan: StepPlan) -> None:
        """A row that is taken has no inputs but its own."""
        taken = [new.row for new in plan.new_rows] + [copy.target for copy in plan.row_copies]
        lines = {row: [0] * self._inputs_end[row] for row in taken}
        for row in taken:
            self._inputs_end[row] = 0
        for each in plan.row_inputs:
            end = each.start + len(each.rows)
            self._inputs_end[each.row] = max(self._inputs_end[each.row], end)
            if (line := lines.get(each.row)) is None:
                self._add(3, each.row, each.start, each.rows)
            else:
                line += [0] * (end - len(line))
                line[each.start : end] = each.rows
        for row, line in lines.items():
            self._add(3, row, 0, line)

    def _keep(self, row: int, spec: RowSpec) -> None:
        """The row is of this request from now on."""
        self.params[row], self.eos_token_ids[row], self.num_prompt[row] = (
            spec.params,
            spec.eos_token_ids,
            spec.num_prompt,
        )
        self.adapters[row], self.segments[row] = spec.adapter, spec.segments
        self._asked_until[row] = _asked_until(spec.params, spec.num_prompt)
        self._add(2, row, 0, _draw_words(spec.params))

    def _copy_rows(self) -> None:
        """On the device; the sources are read before a target is written."""
        if self._copies:
            rows = np.array(
                [(copy.source, copy.target) for copy in self._copies], np.int64
            ).T.copy()
            longest, on_cpu = (
                max(copy.num_tokens for copy in self._copies),
                self.tokens.device.type == "cpu",
            )
            source, target = rows if on_cpu else upload(rows, self.tokens.device)
            for whole in (self.tokens[:, :longest], self.pages):
                # torch starts threads for it, which takes longer than the copy
                part = whole.numpy() if on_cpu else whole
                part[target] = part[source]
            self._copies = []

    def asks_prompt(self, item: StepItem) -> bool:
        """Tells if something is asked about these tokens of its prompt, which needs the hidden
        states of all of them."""
        return item.start < self._asked_until[item.row]

    def is_pooled(self, row: int) -> bool:
        """Its request asks for the pooled states of its prompt, not for tokens."""
        params = self.params[row]
        return params is not None and params.pooling is not None

    def _add(self, part: int, row: int, column: int, values: list[int]) -> None:
        self._writes.add(self._offsets[part] + row * self._widths[part] + column, values)

    def apply(self) -> None:
        self._copy_rows()
        self._writes.apply()

    def append(
        self, rows_S: torch.Tensor, positions_S: torch.Tensor, tokens_S: torch.Tensor
    ) -> None:
        """Sampled tokens go into their rows, where the next step reads them."""
        self.tokens[rows_S, positions_S] = tokens_S.to(self.tokens).clamp(min=0)


def _aligned(num_words: int) -> int:
    """A group's table begins at a multiple of 16 bytes, which the kernels are compiled for, as do
    other tables that they read."""
    return -(-num_words // 4) * 4


def _asked_until(params: SamplingParams, num_prompt: int) -> int:
    if params.pooling is not None:
        return num_prompt
    # the last token predicts none of them
    return 0 if params.prompt_logprobs is None else num_prompt - 1


def _draw_words(params: SamplingParams) -> list[int]:
    """The bits of the temperature (0 for greedy) and of the seed, as int32."""
    temperature = np.float32(0.0 if params.greedy else params.temperature)
    return [
        int(temperature.view(np.int32)),
        *np.array([params.seed or 0], np.int64).view(np.int32).tolist(),
    ]
