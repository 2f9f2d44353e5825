"""KV groups: how a model's layers share the pages of the KV cache. Ints only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Group:
    """Layers whose pages come and go together."""

    page_size: int  # tokens
    window: int = 0  # a query sees this many tokens, its own the last; 0: all before it
    is_state: bool = False  # a page is the state after its tokens: it goes forward only

    def first_needed(self, position: int) -> int:
        """The first page that a query at this position, or a later one, can see."""
        return max(0, position - self.window + 1) // self.page_size if self.window else 0

    def num_pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def most_pages(self, num_tokens: int, most_at_once: int) -> int:
        """What a sequence of so many tokens holds at most while it is computed, `most_at_once` tokens in a step."""
        num_pages = self.num_pages_for(num_tokens)
        if not self.window:
            return num_pages
        return min(num_pages, self.num_pages_for(self.window - 1 + most_at_once) + 1)


def state_group(interval: int) -> Group:
    """States of constant size, kept at every `interval` tokens. What a token starts from is the state after the one before it,
    so the page of that one is all it needs: to the page tables, a window of two tokens."""
    return Group(interval, window=2, is_state=True)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a layer's keys and values lie: the group whose page table names its pages, and which layer of a page it is."""

    group: int
    index: int


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """A page holds `layers_per_page` layers of one group, so that pages of all groups have one size and come from one pool."""

    groups: tuple[Group, ...]
    places: tuple[Place, ...]  # of each layer
    layers_per_page: int

    def num_pages_for(self, num_tokens: int, most_at_once: int) -> int:
        """What a sequence of so many tokens holds at most, computed `most_at_once` tokens at a time."""
        return sum(group.most_pages(num_tokens, most_at_once) for group in self.groups)


def one_group(num_layers: int, page_size: int) -> CacheLayout:
    return CacheLayout((Group(page_size),), tuple(Place(0, i) for i in range(num_layers)), num_layers)


def lay_out(windows: Sequence[int], page_size: int, max_context: int) -> CacheLayout:
    """`windows`: of each layer; 0 sees all. A window as long as the context is none."""
    kinds: dict[int, list[int]] = {}  # by window: its layers
    for layer, window in enumerate(windows):
        kinds.setdefault(window if window < max_context else 0, []).append(layer)
    per_page = _layers_per_page([len(layers) for layers in kinds.values()])
    groups, places = list[Group](), dict[int, Place]()
    for window, layers in sorted(kinds.items()):
        for first in range(0, len(layers), per_page):
            places |= {layer: Place(len(groups), i) for i, layer in enumerate(layers[first : first + per_page])}
            groups.append(Group(page_size, window))
    return CacheLayout(tuple(groups), tuple(places[layer] for layer in range(len(windows))), per_page)


def _layers_per_page(counts: list[int]) -> int:
    """So many that few places of the last page of each kind stay empty; of those, the most, for fewer page tables."""

    def num_empty(per_page: int) -> int:
        return sum(-count % per_page for count in counts)

    return max(range(1, min(counts) + 1), key=lambda n: (num_empty(n) * 10 <= sum(counts), n))
