"""StepPlan: what the runner computes next. New sequences in full once, afterwards only what
changed. Ints, no tensors."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tidemill.kv.groups import PageChange
from tidemill.kv.tiers import PageMove
from tidemill.sched.request import Request, RowSpec


class NewRow(msgspec.Struct, frozen=True):
    """A request takes a row: everything the runner must know about it."""

    row: int
    token_ids: list[int]
    page_ids: list[list[int]]  # of each KV group
    spec: RowSpec


class Encode(msgspec.Struct, frozen=True):
    """A segment of which rows of embeddings are made before anything is computed."""

    kind: str
    content: bytes
    rows: list[int]  # where they go


class RowInput(msgspec.Struct, frozen=True):
    """Rows of embeddings stand in the place of a row's tokens from one on."""

    row: int
    start: int
    rows: list[int]


class RowPages(msgspec.Struct, frozen=True):
    """Entries of a row's page table that changed."""

    row: int
    group: int
    first_index: int
    page_ids: list[int]


class RowCopy(msgspec.Struct, frozen=True):
    """A fork takes a row: a copy of its source's, of its first tokens and its page tables, as they
    are before this plan."""

    source: int
    target: int
    num_tokens: int
    spec: RowSpec


class TokenWrite(msgspec.Struct, frozen=True):
    """A token of a row that is another than the runner has there."""

    row: int
    position: int
    token_id: int


class StepItem(msgspec.Struct, frozen=True, gc=False):
    """One request's part of the step: tokens start .. start + count - 1 of its row, the last
    `num_drafts` of them guesses."""

    seq: int
    row: int
    start: int
    count: int
    # the last of these tokens yields logits for a new one, and so does each before a draft
    samples: bool
    epoch: int
    num_drafts: int = 0

    @property
    def num_draws(self) -> int:
        """Tokens that are drawn: one, and one in the place of each draft."""
        return self.num_drafts + 1 if self.samples else 0


class StepPlan(msgspec.Struct, eq=False):
    """In this order: stores read their pages, zeroes and copies are written, loads begin, the items
    are computed. Moves may go on meanwhile; only a page that is written waits for its store.
    Without items, nothing is computed and no row changes."""

    step: int
    items: list[StepItem] = []
    new_rows: list[NewRow] = []
    left_rows: list[int] = []  # whose request had a KV policy and is gone; before any other change
    row_copies: list[RowCopy] = []  # read all, write all, before any other change of rows
    token_writes: list[TokenWrite] = []  # never of a row in `new_rows`
    page_updates: list[RowPages] = []  # never of a row in `new_rows`, which has all its pages
    encodes: list[Encode] = []  # in this order: a later one may have rows of one before
    row_inputs: list[RowInput] = []
    page_copies: list[tuple[int, int]] = []  # (source, target): read all, write all, then compute
    page_zeroes: list[int] = []  # pages that held NaN, cleared before another sequence reads them
    page_moves: list[PageMove] = []  # between the device, host memory and disk
    empty_pages: list[int] = []  # that hold nothing any more, once the copies are made
    drafts: dict[int, list[int]] = {}  # by row: tokens guessed to follow the known ones
    trees: dict[int, list[int]] = {}  # by row: of drafts that are no chain, the parents (see Tree)
    # by row and position: a bit per token that may come there
    masks: dict[tuple[int, int], bytes] = {}
    draft_probs: dict[tuple[int, int], bytes] = {}  # of drafts that were drawn: a float32 per token

    @property
    def num_tokens(self) -> int:
        return sum([item.count for item in self.items])

    @property
    def is_empty(self) -> bool:
        """Nothing is computed."""
        return not self.items


class PendingUpdates(msgspec.Struct):
    """Changes of rows and pages that no plan has sent to the runner. They go with the next plan
    that computes something."""

    left_rows: list[int] = []
    rows: dict[int, Request] = {}  # taken by new requests
    row_copies: dict[int, RowCopy] = {}  # by the row taken
    token_writes: dict[int, TokenWrite] = {}  # by row
    page_updates: dict[int, list[RowPages]] = {}  # by row, as are the copies
    page_copies: dict[int, list[tuple[int, int]]] = {}
    page_zeroes: list[int] = []
    encodes: list[Encode] = []
    row_inputs: dict[int, list[RowInput]] = {}  # by row

    def update_pages(self, row: int, changes: list[PageChange]) -> None:
        if changes:
            updates = self.page_updates.setdefault(row, [])
            updates += [
                RowPages(row, change.group, change.first_index, change.page_ids)
                for change in changes
            ]

    def copy_page(self, row: int, source: int, target: int) -> None:
        self.page_copies.setdefault(row, []).append((source, target))

    def rows_that_copy(self, pages: list[int]) -> list[int]:
        """New rows whose copies would read one of these pages."""
        return [
            row
            for row in self.rows
            if any(source in pages for source, _ in self.page_copies.get(row, ()))
        ]

    def fork(self, request: Request, source: int, spare: list[PageChange]) -> None:
        """The request takes a row as a copy of its source's, or in full if the runner does not know
        all of that one yet. `spare`: entries of the source's page tables that the fork does not
        have."""
        if any(
            source in changes
            for changes in (self.rows, self.row_copies, self.token_writes, self.page_updates)
        ):
            self.rows[request.row] = request
            return
        self.row_copies[request.row] = RowCopy(
            source, request.row, len(request.tokens), request.row_spec
        )
        self.update_pages(request.row, spare)

    def forget(self, row: int) -> None:
        """The row's request has left it. What is copied from it is still there when the next plan
        is carried out."""
        for changes in (
            self.rows,
            self.row_copies,
            self.token_writes,
            self.page_updates,
            self.page_copies,
            self.row_inputs,
        ):
            changes.pop(row, None)

    @property
    def is_empty(self) -> bool:
        if (
            self.rows
            or self.page_updates
            or self.page_copies
            or self.page_zeroes
            or self.encodes
            or self.row_inputs
        ):
            return False
        return not (self.left_rows or self.row_copies or self.token_writes)

    def check_integrity(self, rows: list[int]) -> None:
        """`rows`: those in use."""
        assert all(request.row == row for row, request in self.rows.items())
        changed = (self.row_copies, self.token_writes, self.page_updates, self.page_copies)
        assert {row for changes in changed for row in changes} <= set(rows)

    def send_with(self, plan: StepPlan, tables: Callable[[int], list[list[int]]]) -> None:
        """`tables`: a sequence's pages in each group. A new row's are complete by now, whatever
        changed since it was taken."""
        plan.new_rows = [
            NewRow(row, list(new.tokens), [list(pages) for pages in tables(new.seq)], new.row_spec)
            for row, new in self.rows.items()
        ]
        plan.left_rows, self.left_rows = self.left_rows, []
        plan.row_copies = list(self.row_copies.values())
        plan.token_writes = [
            write for row, write in self.token_writes.items() if row not in self.rows
        ]
        plan.page_updates = [
            each
            for row, of_row in self.page_updates.items()
            if row not in self.rows
            for each in (of_row if len(of_row) == 1 else _merged(row, of_row))
        ]
        plan.encodes = self.encodes
        plan.row_inputs = [each for of_row in self.row_inputs.values() for each in of_row]
        self.send_pages_with(plan)

    def send_pages_with(self, plan: StepPlan) -> None:
        """Sends the changes of pages with a plan, without the rows."""
        plan.page_copies = [each for of_row in self.page_copies.values() for each in of_row]
        plan.page_zeroes = self.page_zeroes
        self.page_copies, self.page_zeroes = {}, []


def _merged(row: int, updates: list[RowPages]) -> list[RowPages]:
    """Each entry once, as it was changed last: a device writes them all at once, in no order."""
    pages = {
        (update.group, update.first_index + i): page
        for update in updates
        for i, page in enumerate(update.page_ids)
    }
    merged: list[RowPages] = []
    for (group, index), page in sorted(pages.items()):
        if (
            merged
            and merged[-1].group == group
            and merged[-1].first_index + len(merged[-1].page_ids) == index
        ):
            merged[-1].page_ids.append(page)
        else:
            merged.append(RowPages(row, group, index, [page]))
    return merged
