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
        """The most pages that a sequence of so many tokens holds while it is computed,
        `most_at_once` tokens in a step."""
        # a state that is kept is copied before the next token
        num_pages = self.num_pages_for(num_tokens) + self.is_state
        if not self.window:
            return num_pages
        return min(num_pages, self.num_pages_for(self.window - 1 + most_at_once) + 1)


def state_group(interval: int) -> Group:
    """States of constant size, kept at every `interval` tokens. What a token starts from is the
    state after the one before it, so the page of that one is all it needs: to the page tables, a
    window of two tokens."""
    return Group(interval, window=2, is_state=True)


_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The places of the pieces of all layers' states: in `block_pages` pages, each of a group of
    its own."""

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
        """`sizes`: of each layer, the bytes of its pieces, of which none straddles a page. Largest
        first, each goes into the first page that has room. `page_bytes`: at least the largest
        piece; 0: a page holds all."""
        padded = [[-(-size // _ALIGNMENT) * _ALIGNMENT for size in layer] for layer in sizes]
        page_bytes = page_bytes or sum(map(sum, padded))
        assert page_bytes % _ALIGNMENT == 0
        assert all(size <= page_bytes for layer in padded for size in layer)
        pieces, used, page, size_before = (
            [[(0, 0)] * len(layer) for layer in padded],
            list[int](),
            0,
            0,
        )
        every = [(size, i, j) for i, layer in enumerate(padded) for j, size in enumerate(layer)]
        for size, layer, number in sorted(every, key=lambda piece: -piece[0]):
            # pages that had no room for one of this size have none
            page = page if size == size_before else 0
            while page < len(used) and used[page] + size > page_bytes:
                page += 1
            if page == len(used):
                used.append(0)
            pieces[layer][number] = page, used[page]
            used[page], size_before = used[page] + size, size
        return StateLayout(page_bytes, len(used), tuple(map(tuple, pieces)))


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a layer's keys and values: the group whose page table names its pages, and which
    layer of a page it is."""

    group: int
    index: int
    # bytes of a token that lie before the layer's in a page, where layers differ in size
    start: int = 0


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """A page holds `layers_per_page` layers of one group, so that pages of all groups have one size
    and come from one pool."""

    groups: tuple[Group, ...]  # of keys and values, then of states: one for each page of a state
    places: tuple[Place, ...]  # of each layer with keys and values
    layers_per_page: int  # at most
    states: StateLayout | None = None
    token_bytes: int = 0  # of a page, where layers differ in size; 0: all are alike
    row_bytes: int = 1  # a page is a multiple of it, where layers differ in size

    def page_bytes(self, page_size: int, layer_bytes: int) -> int:
        """`layer_bytes`: of a token in each layer, where all are alike."""
        if not self.token_bytes:
            return self.layers_per_page * layer_bytes * page_size
        return -(-self.token_bytes * page_size // self.row_bytes) * self.row_bytes

    @property
    def num_kv_groups(self) -> int:
        return sum(1 for group in self.groups if not group.is_state)

    @property
    def interval(self) -> int:
        """Tokens between the states that are kept; 0: there are none."""
        return self.groups[-1].page_size if self.states else 0

    def with_states(self, states: StateLayout, interval: int) -> CacheLayout:
        return replace(
            self,
            groups=(*self.groups, *[state_group(interval)] * states.block_pages),
            states=states,
        )

    def only(self, layers: Collection[int]) -> CacheLayout:
        """The layout with room for these layers alone, of the layers with keys and values. Groups
        and their page tables stay the same. Pages of states, which may lie anywhere, and of layers
        of different sizes stay whole."""
        if self.states is not None or self.token_bytes:
            return self
        own, num_in = dict[Place, Place](), Counter[int]()
        for place in dict.fromkeys(self.places[layer] for layer in sorted(layers)):
            own[place] = Place(place.group, num_in[place.group])
            num_in[place.group] += 1
        places = tuple(own.get(place, Place(place.group, 0)) for place in self.places)
        return replace(self, places=places, layers_per_page=max([1, *num_in.values()]))

    def num_pages_for(self, num_tokens: int, most_at_once: int) -> int:
        """The most pages that a sequence of so many tokens holds, computed `most_at_once` tokens at
        a time."""
        return sum(group.most_pages(num_tokens, most_at_once) for group in self.groups)


def one_group(num_layers: int, page_size: int) -> CacheLayout:
    return CacheLayout(
        (Group(page_size),), tuple(Place(0, i) for i in range(num_layers)), num_layers
    )


def one_place(num_layers: int, page_size: int) -> CacheLayout:
    """Layers that use the same memory in turn."""
    return CacheLayout((Group(page_size),), (Place(0, 0),) * num_layers, 1)


def lay_out(
    windows: Sequence[int],
    page_size: int,
    max_context: int,
    sizes: Sequence[int] = (),
    row_bytes: int = 1,
) -> CacheLayout:
    """`windows`: of each layer; 0 sees all. A window as long as the context is none. `sizes`: bytes
    of a token in each layer; none: they are alike. `row_bytes`: pages of layers of different sizes
    are a multiple of it."""
    if not windows:
        return CacheLayout((), (), 0)
    units = list(sizes) or [1] * len(windows)
    kinds: dict[int, list[int]] = {}  # by window: its layers
    for layer, window in enumerate(windows):
        kinds.setdefault(window if window < max_context else 0, []).append(layer)
    of_kinds = [[units[layer] for layer in layers] for layers in kinds.values()]
    capacity = _capacity(of_kinds)
    groups, places, most = list[Group](), dict[int, Place](), 0
    for window, layers in sorted(kinds.items()):
        first = 0
        for num in _pages([units[layer] for layer in layers], capacity):
            start = 0
            for index, layer in enumerate(layers[first : first + num]):
                places[layer] = Place(len(groups), index, start if sizes else 0)
                start += units[layer]
            groups.append(Group(page_size, window))
            first, most = first + num, max(most, num)
    layout = CacheLayout(tuple(groups), tuple(places[layer] for layer in range(len(windows))), most)
    if not sizes:
        return replace(layout, layers_per_page=capacity)
    return replace(layout, token_bytes=capacity, row_bytes=row_bytes)


def _pages(sizes: Sequence[int], capacity: int) -> list[int]:
    """The numbers of layers in pages of this capacity, which are filled in order."""
    pages, room = list[int](), 0
    for size in sizes:
        if size > room:
            pages.append(0)
            room = capacity
        pages[-1] += 1
        room -= size
    return pages


def _capacity(kinds: list[list[int]]) -> int:
    """The size of a page: so large that few bytes of the last page of each kind of layers stay
    empty; of those, the largest, for fewer page tables."""
    largest, least = max(map(max, kinds)), min(map(sum, kinds))
    sums = {sum(sizes[:num]) for sizes in kinds for num in range(1, len(sizes) + 1)}

    def empty(capacity: int) -> int:
        return sum(capacity * len(_pages(sizes, capacity)) - sum(sizes) for sizes in kinds)

    def is_full(capacity: int) -> bool:
        return empty(capacity) * 10 <= sum(map(sum, kinds))

    choices = {largest, *(size for size in sums if largest <= size <= least)}
    return max(choices, key=lambda size: (is_full(size), size if is_full(size) else -empty(size)))
