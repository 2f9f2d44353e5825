"""A sequence's page table in one KV group. Ints only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tidemill.kv.pages import NULL_PAGE


class PageChange(NamedTuple):
    """Entries of a sequence's page table in one group, from `first_index` on."""

    group: int
    first_index: int
    page_ids: list[int]


@dataclass(slots=True)
class GroupTable:
    """A sequence's pages in one group, in token order: entries before `num_trimmed` are given back."""

    pages: list[int]
    num_trimmed: int = 0

    @property
    def held(self) -> list[int]:
        """Without what is given back."""
        return self.pages[self.num_trimmed :]

    def trim(self, first_needed: int) -> list[int]:
        """Give back the entries before `first_needed`. Returns their pages."""
        end = min(first_needed, len(self.pages))
        if end <= self.num_trimmed:
            return []
        given = self.pages[self.num_trimmed : end]
        self.pages[self.num_trimmed : end] = [NULL_PAGE] * len(given)
        self.num_trimmed = end
        return given
