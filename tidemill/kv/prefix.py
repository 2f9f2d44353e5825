"""The index of the pages by their content. There are two with one interface: chained hashes of full
pages here, a radix tree in radix.py.

A page in an index is full and its content final; it may be owned or free (evictable). Both know
every page of a content, so that whoever holds a page of a prefix also holds one of each page before
it that the index knows. A sequence gives back its last page first: free pages of a prefix are
therefore taken from its tail, and none before it while one after it is in use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import repeat, takewhile
from typing import Any, Generic, TypeAlias, TypeVar, overload

import msgspec

from tidemill.kv.pages import NULL_PAGE
from tidemill.types.cache_layout import Group
from tidemill.types.inputs import Segment, name_of, overlapping


class Path(ABC):
    """A sequence's tokens as an index knows them."""

    # of its prompt, whose keys tell its tokens from others with the same ids
    segments: Sequence[Segment]

    @abstractmethod
    def until(self, num_tokens: int) -> Path:
        """The path of a sequence that has the first `num_tokens` tokens in common."""

    @abstractmethod
    def through(self, token_ids: Sequence[int], num_tokens: int) -> Path:
        """The path of the first `num_tokens` of these tokens, which the sequence has: all of them
        may be found."""


P = TypeVar("P", bound=Path)


class Found(msgspec.Struct):
    """The longest prefix of a path that an index knows."""

    num_tokens: int
    # of each group: those full of its tokens, in order; the null page: one is missing
    pages: Sequence[Sequence[int]]
    partly: list[list[int]] = []  # next pages, one of each group, that begin with its other tokens


class PrefixIndex(ABC, Generic[P]):
    """Content to page and back. States can be kept after any multiple of `page_size` tokens: to an
    index, the pages of such a group have that size, and most of them are missing."""

    def __init__(self, page_size: int, groups: Sequence[Group]) -> None:
        """`page_size`: tokens; the groups' are multiples of it."""
        self._page_size = page_size
        self._groups = groups
        self._sizes = [page_size if group.is_state else group.page_size for group in groups]
        self._copies = Copies()

    @abstractmethod
    def path(
        self,
        token_ids: Sequence[int],
        salt: str,
        num_indexed: int,
        segments: Sequence[Segment] = (),
    ) -> P:
        """`num_indexed`: tokens of which `find` may find pages."""

    @abstractmethod
    def find(self, path: P) -> Found: ...

    def knows_begin(self, path: P) -> bool:
        """False: `find` finds nothing."""
        return True

    @abstractmethod
    def put(
        self, path: P, token_ids: Sequence[int], group: int, first: int, pages: Sequence[int]
    ) -> list[int]:
        """The group's pages number `first` and following of a sequence with this path and these
        tokens are full. Returns those that were not in the index."""

    @abstractmethod
    def forget(self, page: int) -> bool:
        """The page's content is about to be overwritten. True if it was cached."""

    def forget_all(self, pages: Iterable[int]) -> int:
        """Forgets these pages; returns how many of them were cached."""
        return sum(map(self.forget, pages))

    @abstractmethod
    def clear(self) -> int:
        """Forget all. Returns how many pages that were."""

    @abstractmethod
    def pages(self) -> Iterable[int]:
        """All cached pages, in no order."""

    @abstractmethod
    def __contains__(self, page: int) -> bool: ...

    @abstractmethod
    def check_integrity(self) -> None: ...


class Copies:
    """Pages with the same content as another one, which stands for them."""

    def __init__(self) -> None:
        self._of: dict[int, list[int]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._of

    def add(self, standing: int, page: int) -> None:
        self._of.setdefault(standing, []).append(page)

    def remove(self, standing: int, page: int) -> int:
        """`page` is gone. Returns which stands for the content now: the null page, if none is left."""
        copies = self._of.pop(standing, [])
        if page != standing:
            copies.remove(page)
        elif copies:
            standing = copies.pop(0)
        else:
            return NULL_PAGE
        if copies:
            self._of[standing] = copies
        return standing

    def of(self, standing: int) -> list[int]:
        return self._of.get(standing, [])

    def clear(self) -> None:
        self._of.clear()

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))


# ---- chained hashes

_MOST_SEEN = 65_536  # keys
_MOST_ROOTS = 1024


def root_key(salt: str, page_size: int) -> bytes:
    """The key at which a tenant's chains start. Chains of different salts never meet, so no tenant
    can find another's pages."""
    return sha256(b"tidemill-prefix\0%d\0" % page_size + salt.encode()).digest()


def chain_keys(parent: bytes, token_ids: Sequence[int], page_size: int) -> list[bytes]:
    """Keys of full pages: of each its tokens and, through the key before it, all tokens before it."""
    keys, data = list[bytes](), array("I", token_ids)
    data_bytes, num_bytes = data.tobytes(), page_size * data.itemsize
    for at in range(0, len(data_bytes), num_bytes):
        parent = sha256(parent + data_bytes[at : at + num_bytes]).digest()
        keys.append(parent)
    return keys


Chain: TypeAlias = Callable[[bytes, Sequence[int], int], list[bytes]]


def group_key(group: int, key: bytes) -> bytes:
    """Key of a group's page that ends where `key` does."""
    return key + group.to_bytes(2, "big") if group else key


@dataclass(slots=True)
class HashPath(Path):
    page_size: int
    root: bytes
    # of the leading full pages, as far as they are known
    keys: list[bytes] = field(default_factory=list)
    num_seen: int = 0  # of them, how many are noted as seen
    chain: Chain = chain_keys
    segments: Sequence[Segment] = ()

    def until(self, num_tokens: int) -> HashPath:
        keys = self.keys[: num_tokens // self.page_size]
        return HashPath(self.page_size, self.root, keys, chain=self.chain, segments=self.segments)

    def through(self, token_ids: Sequence[int], num_tokens: int) -> HashPath:
        path = self.until(num_tokens)
        path.extend(token_ids, num_tokens)
        return path

    def extend(self, token_ids: Sequence[int], end: int) -> None:
        size = self.page_size
        start, end = len(self.keys) * size, end // size * size
        while start < end:
            parent, until = self.keys[-1] if self.keys else self.root, end
            if inside := overlapping(self.segments, start, end):
                until = inside[0].start // size * size
                if until <= start:  # a page of its own: its key has those of what is in it
                    until = start + size
                    parent = sha256(
                        parent + b"".join(map(name_of, overlapping(inside, start, until)))
                    ).digest()
            self.keys += self.chain(parent, token_ids[start:until], size)
            start = until


class _States(Sequence[int]):
    """A group's states after each page of a path, looked up when they are asked for: mostly, one
    is."""

    def __init__(
        self, page_of: Callable[[bytes], int | None], group: int, keys: Sequence[bytes]
    ) -> None:
        self._page_of, self._group, self._keys = page_of, group, keys

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> list[int]: ...

    def __getitem__(self, at: int | slice) -> int | list[int]:
        if isinstance(at, slice):
            return [self[i] for i in range(len(self))[at]]
        return self._page_of(group_key(self._group, self._keys[at])) or NULL_PAGE


class HashIndex(PrefixIndex[HashPath]):
    """Chained SHA-256 keys of full pages, salted per tenant."""

    def __init__(self, page_size: int, groups: Sequence[Group]) -> None:
        super().__init__(page_size, groups)
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._has_states = any(group.is_state for group in groups)
        self._is_plain = (
            len(groups) == 1
            and not self._has_states
            and not groups[0].window
            and self._sizes[0] == page_size
        )
        self._place_of: Callable[[bytes], int | None] = self._page_of.get
        # how keys are made; a simulation, in which nobody can be misled, takes a faster one
        self.chain: Chain = chain_keys
        self._root_of: dict[str, bytes] = {}  # of the salts used last
        # if there are states: keys of what was computed, the latest last
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, page: int) -> bool:
        return page in self._key_of

    def pages(self) -> Iterable[int]:
        return self._key_of

    def path(
        self,
        token_ids: Sequence[int],
        salt: str,
        num_indexed: int,
        segments: Sequence[Segment] = (),
    ) -> HashPath:
        root = self._root_of.get(salt)
        if root is None:
            if len(self._root_of) >= _MOST_ROOTS:
                self._root_of.clear()
            root = self._root_of[salt] = root_key(salt, self._page_size)
        path = HashPath(self._page_size, root, chain=self.chain, segments=segments)
        path.extend(token_ids, num_indexed)
        return path

    def look_elsewhere(self, place_of: Callable[[bytes], int]) -> None:
        """Makes the index look elsewhere for content that no page has: `find` gives its place, a
        negative number, or 0 if it has none."""
        self._place_of = lambda key: self._page_of.get(key) or place_of(key)

    def key_of(self, page: int) -> bytes | None:
        return self._key_of.get(page)

    def page_of(self, key: bytes) -> int:
        """The null page, if none has this content."""
        return self._page_of.get(key, NULL_PAGE)

    def has_copy(self, page: int) -> bool:
        """Tells if another page has the same content as this page, which is in the index."""
        standing = self._page_of[self._key_of[page]]
        return standing != page or bool(self._copies.of(page))

    def keys_of(self, path: HashPath) -> list[bytes]:
        """The keys of all pages of all groups that may hold these tokens."""
        return [group_key(g, key) for g in range(len(self._groups)) for key in path.keys]

    def enter(self, key: bytes, page: int) -> None:
        """The page will hold this content."""
        self._key_of[page] = key
        self._page_of[key] = page

    def knows_begin(self, path: HashPath) -> bool:
        return not self._is_plain or (bool(path.keys) and bool(self._place_of(path.keys[0])))

    def find(self, path: HashPath, elsewhere: bool = True) -> Found:
        num, pages, place_of = (
            len(path.keys),
            list[Sequence[int]](),
            self._place_of if elsewhere else self._page_of.get,
        )
        if self._is_plain and not (num and place_of(path.keys[0])):
            return Found(0, [[]])
        num_seen = self._num_seen(path, place_of)
        for g, (group, size) in enumerate(zip(self._groups, self._sizes, strict=True)):
            if group.is_state:
                pages.append(_States(place_of, g, path.keys))
                continue
            per_page = size // self._page_size
            each = (
                place_of(group_key(g, key)) or NULL_PAGE
                for key in path.keys[per_page - 1 : num : per_page]
            )
            # without a window, the first that is missing ends it
            found = list(each if group.window else takewhile(bool, each))
            while found and not found[-1]:
                found.pop()
            num = min(num, len(found) * per_page + per_page - 1)
            pages.append(found + [NULL_PAGE] * (num_seen // per_page - len(found)))
        return Found((num_seen if self._has_states else num) * self._page_size, pages)

    def _num_seen(self, path: HashPath, place_of: Callable[[bytes], int | None]) -> int:
        """The number of the path's keys that were computed before, in a model with states: those
        noted, and those before a state that is there, as one that was loaded is."""
        num = sum(1 for _ in takewhile(self._seen.__contains__, path.keys))
        if self._has_states and place_of != self._page_of.get:
            states = _States(place_of, len(self._groups) - 1, path.keys)
            return next((i for i in range(len(path.keys), num, -1) if states[i - 1]), num)
        return num

    def put(
        self, path: HashPath, token_ids: Sequence[int], group: int, first: int, pages: Sequence[int]
    ) -> list[int]:
        size, entered = self._sizes[group], list[int]()
        end = (first + len(pages)) * size
        path.extend(token_ids, end)
        if self._has_states:
            self._see(path, end // self._page_size)
        per_page, key_of, page_of = size // self._page_size, self._key_of, self._page_of
        keys = path.keys[(first + 1) * per_page - 1 : (first + len(pages)) * per_page : per_page]
        keys = [group_key(group, key) for key in keys] if group else keys
        if key_of.keys().isdisjoint(pages) and page_of.keys().isdisjoint(keys):  # nearly always
            key_of.update(zip(pages, keys, strict=True))
            page_of.update(zip(keys, pages, strict=True))
            return list(pages)
        for page, key in zip(pages, keys, strict=True):
            if page not in key_of:
                entered.append(page)
                key_of[page] = key
                standing = page_of.setdefault(key, page)
                if standing != page:
                    self._copies.add(standing, page)
        return entered

    def _see(self, path: HashPath, num: int) -> None:
        """Notes the first `num` keys of a path as seen. With states, most pages of a prefix may be
        missing: that it was there is known by its keys."""
        if path.num_seen < num:
            for key in path.keys[path.num_seen : num]:
                self._seen[key] = None
                self._seen.move_to_end(key)
            path.num_seen = num
            while len(self._seen) > _MOST_SEEN:
                self._seen.popitem(last=False)

    def forget(self, page: int) -> bool:
        key = self._key_of.pop(page, None)
        if key is None:
            return False
        if self._copies.is_empty:
            del self._page_of[key]
            return True
        standing = self._copies.remove(self._page_of[key], page)
        if standing:
            self._page_of[key] = standing
        else:
            del self._page_of[key]
        return True

    def forget_all(self, pages: Iterable[int]) -> int:
        if not self._copies.is_empty:
            return super().forget_all(pages)
        num, key_of, page_of = 0, self._key_of, self._page_of
        for key in map(key_of.pop, pages, repeat(None)):
            if key is not None:
                del page_of[key]
                num += 1
        return num

    def clear(self) -> int:
        num_forgotten = len(self._key_of)
        self._page_of.clear()
        self._key_of.clear()
        self._seen.clear()
        self._copies.clear()
        return num_forgotten

    def check_integrity(self) -> None:
        assert len(self._page_of) + len(self._copies) == len(self._key_of)
        for page, key in self._key_of.items():
            standing = self._page_of[key]
            assert page == standing or page in self._copies.of(standing)


AnyIndex = PrefixIndex[Any]
