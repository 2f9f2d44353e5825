"""StepPlan: what the scheduler tells the runner. New rows in full once, afterwards only what changed. Ints, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from tidemill.sampling import SamplingParams


class NewRow(msgspec.Struct, frozen=True):
    """A request takes a row: everything the runner must know about it."""

    row: int
    token_ids: list[int]
    num_prompt: int
    page_ids: list[int]
    params: SamplingParams
    eos_token_ids: frozenset[int]


class RowPages(msgspec.Struct, frozen=True):
    """Entries of a row's page table that changed."""

    row: int
    first_index: int
    page_ids: list[int]


class StepItem(msgspec.Struct, frozen=True, gc=False):
    """One request's share of the step: tokens start .. start + count - 1 of its row."""

    seq: int
    row: int
    start: int
    count: int
    samples: bool  # the last of these tokens yields logits for a new one
    epoch: int


@dataclass(slots=True)
class StepPlan:
    step: int
    items: list[StepItem] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    page_updates: list[RowPages] = field(default_factory=list)
    page_copies: list[tuple[int, int]] = field(
        default_factory=list
    )  # (source, target): all read, then all written, then the step

    page_zeroes: list[int] = field(default_factory=list)  # whose content must not reach the next owner, even masked

    @property
    def num_tokens(self) -> int:
        return sum(item.count for item in self.items)
