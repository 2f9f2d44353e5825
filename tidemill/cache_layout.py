"""KV groups: how a model's layers share the pages of the KV cache. Ints only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace


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
        """The most pages that a sequence of so many tokens holds while it is computed, `most_at_once` tokens in a step."""
        num_pages = self.num_pages_for(num_tokens) + self.is_state  # a state that is kept is copied before the next token
        if not self.window:
            return num_pages
        return min(num_pages, self.num_pages_for(self.window - 1 + most_at_once) + 1)


def state_group(interval: int) -> Group:
    """States of constant size, kept at every `interval` tokens. What a token starts from is the state after the one before it,
    so the page of that one is all it needs: to the page tables, a window of two tokens."""
    return Group(interval, window=2, is_state=True)


_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The places of the pieces of all layers' states: in `block_pages` pages, each of a group of its own."""

    page_bytes: int
    block_pages: int
    pieces: tuple[
        tuple[tuple[int, int], ...], ...
    ]  # of each layer: page of the block, bytes from its start; none without a state

    @property
    def block_bytes(self) -> int:
        return self.page_bytes * self.block_pages

    @staticmethod
    def pack(sizes: Sequence[Sequence[int]], page_bytes: int = 0) -> StateLayout:
        """`sizes`: of each layer, the bytes of its pieces, of which none straddles a page. Largest first, each goes into the
        first page that has room. `page_bytes`: at least the largest piece; 0: a page holds all."""
        padded = [[-(-size // _ALIGNMENT) * _ALIGNMENT for size in layer] for layer in sizes]
        page_bytes = page_bytes or sum(map(sum, padded))
        assert page_bytes % _ALIGNMENT == 0
        assert all(size <= page_bytes for layer in padded for size in layer)
        pieces, used, page, size_before = [[(0, 0)] * len(layer) for layer in padded], list[int](), 0, 0
        every = [(size, i, j) for i, layer in enumerate(padded) for j, size in enumerate(layer)]
        for size, layer, number in sorted(every, key=lambda piece: -piece[0]):
            page = page if size == size_before else 0  # pages that had no room for one of this size have none
            while page < len(used) and used[page] + size > page_bytes:
                page += 1
            if page == len(used):
                used.append(0)
            pieces[layer][number] = page, used[page]
            used[page], size_before = used[page] + size, size
        return StateLayout(page_bytes, len(used), tuple(map(tuple, pieces)))


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a layer's keys and values: the group whose page table names its pages, and which layer of a page it is."""

    group: int
    index: int


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """A page holds `layers_per_page` layers of one group, so that pages of all groups have one size and come from one pool."""

    groups: tuple[Group, ...]  # of keys and values, then of states: one for each page of a state
    places: tuple[Place, ...]  # of each layer with keys and values
    layers_per_page: int
    states: StateLayout | None = None

    @property
    def num_kv_groups(self) -> int:
        return sum(1 for group in self.groups if not group.is_state)

    @property
    def interval(self) -> int:
        """Tokens between the states that are kept; 0: there are none."""
        return self.groups[-1].page_size if self.states else 0

    def with_states(self, states: StateLayout, interval: int) -> CacheLayout:
        return replace(self, groups=(*self.groups, *[state_group(interval)] * states.block_pages), states=states)

    def only(self, layers: Collection[int]) -> CacheLayout:
        """The layout with room for these layers alone, of the layers with keys and values. Groups and their page tables stay the
        same. Pages of states, which may lie anywhere, stay whole."""
        if self.states is not None:
            return self
        places, num_in = list[Place](), Counter[int]()
        for layer, place in enumerate(self.places):
            places.append(Place(place.group, num_in[place.group] if layer in layers else 0))
            num_in[place.group] += layer in layers
        return replace(self, places=tuple(places), layers_per_page=max([1, *num_in.values()]))

    def num_pages_for(self, num_tokens: int, most_at_once: int) -> int:
        """The most pages that a sequence of so many tokens holds, computed `most_at_once` tokens at a time."""
        return sum(group.most_pages(num_tokens, most_at_once) for group in self.groups)


def one_group(num_layers: int, page_size: int) -> CacheLayout:
    return CacheLayout((Group(page_size),), tuple(Place(0, i) for i in range(num_layers)), num_layers)


def one_place(num_layers: int, page_size: int) -> CacheLayout:
    """Layers that use the same memory in turn."""
    return CacheLayout((Group(page_size),), (Place(0, 0),) * num_layers, 1)


def lay_out(windows: Sequence[int], page_size: int, max_context: int) -> CacheLayout:
    """`windows`: of each layer; 0 sees all. A window as long as the context is none."""
    if not windows:
        return CacheLayout((), (), 0)
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
    """The layers of a page: so many that few places of the last page of each kind stay empty; of those, the most, for fewer page
    tables."""

    def num_empty(per_page: int) -> int:
        return sum(-count % per_page for count in counts)

    return max(range(1, min(counts) + 1), key=lambda n: (num_empty(n) * 10 <= sum(counts), n))
