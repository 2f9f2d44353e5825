"""A sequence's page table in one KV group, and what a new one begins with. Ints only."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tidemill.kv.pages import NULL_PAGE


class PageChange(NamedTuple):
    """Entries of a sequence's page table in one group, from `first_index` on."""

    group: int
    first_index: int
    page_ids: list[int]


class GroupTable(msgspec.Struct):
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
        given_back = self.pages[self.num_trimmed : end]
        self.pages[self.num_trimmed : end] = [NULL_PAGE] * len(given_back)
        self.num_trimmed = end
        return given_back


class Start(msgspec.Struct, frozen=True):
    """The state that a new sequence begins with."""

    num_cached: int  # tokens
    num_matching: int  # tokens that the prefix index knows, though pages may be missing
    copies: list[tuple[int, int, int]]  # as of `copies_to_write`: a page of which part is shared
    num_host: int = 0  # of the cached tokens: they are loaded from host memory
    num_disk: int = 0
    num_peer: int = 0  # other engines have computed them


class Match(msgspec.Struct, frozen=True):
    """The cached part of a prompt."""

    num_tokens: int
    num_matching: int
    # of a sequence that starts with it, without; negative: to be loaded from this place in a tier
    tables: list[GroupTable]
    partly: list[int]  # the pages, one of each group or none, whose first tokens are its last
