"""A radix tree over tokens: a prefix is found to its last common token, also within a page.

root ── "You are a helpful" ──┬── "assistant. What is" ── ...        an edge is a run of tokens, cut wherever two sequences part
                              └── "pirate. Tell me" ── ...           a page is with the node in which its last token is

A node's name in a path is itself and a number of tokens: where others part from it, the new node is
the one above, so that what names a place below it stays true, and climbing to the parent finds a
place above it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from tidemill.kv.pages import NULL_PAGE
from tidemill.kv.prefix import Found, Path, PrefixIndex
from tidemill.types.cache_layout import Group
from tidemill.types.inputs import Segment, overlapping

_WIDTH = 4  # bytes of a token
_FIRST_NUMBER, _MOST_NUMBERS = 2**31, 65_536
# pages that continue a prefix differently, of which one is looked for that can be copied
_NUM_TRIED = 4


class Node:
    """Tokens `start` .. `end` - 1 of all paths through it. The pages of a group are those whose
    last token is one of them."""

    __slots__ = ("children", "label", "num_cuts", "pages", "parent", "salt", "start")

    def __init__(
        self, parent: Node | None, start: int, label: bytes, pages: list[list[int]], salt: str = ""
    ) -> None:
        self.parent = parent
        self.start = start
        self.label = label
        self.pages = pages
        self.salt = salt  # of a root
        self.children: dict[bytes, Node] = {}  # by first token
        # how often its end was taken away: then names of places in it may not hold any more
        self.num_cuts = 0

    @property
    def end(self) -> int:
        return self.start + len(self.label) // _WIDTH

    def tail(self, position: int) -> bytes:
        """Tokens from this position on."""
        return self.label[(position - self.start) * _WIDTH :]


@dataclass(slots=True)
class RadixPath(Path):
    salt: str
    indexed: bytes  # tokens of which pages may be found
    # tokens from one position to another, as the tree has them
    pack: Callable[[Sequence[int], int, int], bytes]
    segments: Sequence[Segment] = ()
    # the place up to which its pages were put last: tokens before `end`, which is in this node
    node: Node | None = None
    end: int = 0
    num_cuts: int = 0  # of the node

    def until(self, num_tokens: int) -> RadixPath:
        indexed, end = (
            (self.indexed[: num_tokens * _WIDTH], num_tokens)
            if num_tokens < self.end
            else (self.indexed, self.end)
        )
        return RadixPath(
            self.salt, indexed, self.pack, self.segments, self.node, end, self.num_cuts
        )

    def through(self, token_ids: Sequence[int], num_tokens: int) -> RadixPath:
        return RadixPath(self.salt, self.pack(token_ids, 0, num_tokens), self.pack, self.segments)


class RadixIndex(PrefixIndex[RadixPath]):
    """One tree for each salt, so that no tenant can find another's pages. Tokens are compared, so
    there are no collisions."""

    def __init__(self, page_size: int, groups: Sequence[Group]) -> None:
        super().__init__(page_size, groups)
        self._roots: dict[str, Node] = {}
        # of a token in a segment: what the tree has in its place
        self._numbers: dict[tuple[str, bytes, int], int] = {}
        self._next_number = _FIRST_NUMBER
        # of a page: a node that its last token is in or was, its end, its group
        self._at: dict[int, tuple[Node, int, int]] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._at

    def pages(self) -> Iterable[int]:
        return self._at

    def path(
        self,
        token_ids: Sequence[int],
        salt: str,
        num_indexed: int,
        segments: Sequence[Segment] = (),
    ) -> RadixPath:
        pack = partial(self._packed_with, segments) if segments else _packed
        return RadixPath(salt, pack(token_ids, 0, num_indexed), pack, segments)

    def _packed_with(
        self, segments: Sequence[Segment], token_ids: Sequence[int], start: int, end: int
    ) -> bytes:
        """Tokens in segments are numbers that no token has, one for each key and id."""
        ids = array("I", token_ids[start:end])
        for segment in overlapping(segments, start, end):
            for at in range(max(segment.start - start, 0), min(segment.end - start, len(ids))):
                named = segment.kind, segment.key, ids[at]
                if (number := self._numbers.get(named)) is None:
                    # what has a number in the tree is not found any more
                    if len(self._numbers) >= _MOST_NUMBERS:
                        self._numbers.clear()
                    number = self._numbers[named] = self._next_number
                    self._next_number += 1
                ids[at] = number
        return ids.tobytes()

    # ---- finding

    def find(self, path: RadixPath) -> Found:
        tokens, pages, end = path.indexed, [list[int]() for _ in self._sizes], 0
        node = self._roots.get(path.salt)
        if node is None:
            return Found(0, pages)
        while (
            end == node.end
            and (child := node.children.get(tokens[end * _WIDTH : (end + 1) * _WIDTH])) is not None
        ):
            node, end = child, end + _num_equal(child.label, tokens, end)
            for found, own, size in zip(pages, node.pages, self._sizes, strict=True):
                found += own if end == node.end else own[: end // size - node.start // size]
        return Found(end, pages, self._partly(node, end))

    def _partly(self, node: Node, end: int) -> list[list[int]]:
        """Pages of each group that begin with the last tokens before `end`, which is within them."""
        size = self._page_size
        found, nodes, page_end = list[list[int]](), [node], (end // size + 1) * size
        if end % size == 0 or any(group.page_size != size for group in self._groups):
            return found
        while nodes and len(found) < _NUM_TRIED:
            node = nodes.pop()
            if node.end >= page_end:
                found.append(
                    [pages[page_end // size - 1 - node.start // size] for pages in node.pages]
                )
            else:
                nodes += islice(reversed(node.children.values()), _NUM_TRIED)
        return found

    # ---- changing

    def put(
        self,
        path: RadixPath,
        token_ids: Sequence[int],
        group: int,
        first: int,
        pages: Sequence[int],
    ) -> list[int]:
        size, entered = self._sizes[group], list[int]()
        end = (first + len(pages)) * size
        node = self._reach(path, token_ids, end)
        path.node, path.end, path.num_cuts = node, end, node.num_cuts
        for page in reversed(pages):
            if page not in self._at:
                entered.append(page)
                node = _above(node, end)
                self._at[page] = node, end, group
                own, at = node.pages[group], end // size - 1 - node.start // size
                if own[at]:
                    self._copies.add(own[at], page)
                else:
                    own[at] = page
            end -= size
        return entered

    def _reach(self, path: RadixPath, token_ids: Sequence[int], end: int) -> Node:
        """The node in which this path's token `end` - 1 is, made where there is none."""
        node, at = path.node, path.end
        if node is None or node.num_cuts != path.num_cuts:
            node, at = self._roots.get(path.salt), 0
            if node is None:
                node = self._roots[path.salt] = Node(None, 0, b"", self._no_pages(0, 0), path.salt)
        if at >= end:
            return _above(node, end)
        node = _above(node, at)
        tokens, first = path.pack(token_ids, at, end), at
        while at < end:
            rest = tokens[(at - first) * _WIDTH :]
            if at < node.end:
                at += _num_equal(node.tail(at), rest, 0)
                if at < min(end, node.end):
                    node = self._split(node, at)
            elif (child := node.children.get(rest[:_WIDTH])) is not None:
                node = child
            else:
                node, at = self._append(node, rest), end
        return node

    def _append(self, node: Node, tokens: bytes) -> Node:
        """More tokens after the last of this node. Returns the node that has them."""
        start, end = node.end, node.end + len(tokens) // _WIDTH
        new = self._no_pages(start, end)
        if node.children or node.parent is None:
            child = node.children[tokens[:_WIDTH]] = Node(node, start, tokens, new)
            return child
        node.label += tokens
        for pages, more in zip(node.pages, new, strict=True):
            pages += more
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Others part from this node's tokens at this position. Returns the new node that ends
        there."""
        assert node.parent is not None
        upper = Node(node.parent, node.start, node.label[: (at - node.start) * _WIDTH], [])
        upper.children[node.tail(at)[:_WIDTH]] = node
        for i, size in enumerate(self._sizes):
            num = at // size - node.start // size
            upper.pages.append(node.pages[i][:num])
            node.pages[i] = node.pages[i][num:]
        node.parent.children[node.label[:_WIDTH]] = upper
        node.parent, node.label, node.start = upper, node.tail(at), at
        return upper

    def forget(self, page: int) -> bool:
        return self.forget_all((page,)) == 1

    def forget_all(self, pages: Iterable[int]) -> int:
        """Each leaf is cut once, at the end: pages go from the last on, and each cut copies the
        tokens that stay."""
        num, ended = 0, dict[Node, None]()
        for page in pages:
            place = self._at.pop(page, None)
            if place is None:
                continue
            node, end, group = place
            node, size = _above(node, end), self._sizes[group]
            own, at = node.pages[group], end // size - 1 - node.start // size
            own[at] = NULL_PAGE if self._copies.is_empty else self._copies.remove(own[at], page)
            if own[at] == NULL_PAGE and not node.children:
                ended[node] = None
            num += 1
        for node in ended:
            # else it is cut already
            if node.parent is not None and node.parent.children.get(node.label[:_WIDTH]) is node:
                self._cut(node)
        return num

    def _cut(self, node: Node) -> None:
        """Take tokens after the last page away from a leaf, and leaves that have no page."""
        while not node.children:
            if node.parent is None:
                del self._roots[node.salt]
                node.num_cuts += 1
                return
            end = self._end_of_pages(node)
            if end == node.end:
                return
            node.num_cuts += 1
            if end:
                node.label = node.label[: (end - node.start) * _WIDTH]
                for pages, size in zip(node.pages, self._sizes, strict=True):
                    del pages[end // size - node.start // size :]
                return
            del node.parent.children[node.label[:_WIDTH]]
            node = node.parent

    def _end_of_pages(self, node: Node) -> int:
        """The end of the node's last page; 0 if it has none."""
        ends = [0]
        for pages, size in zip(node.pages, self._sizes, strict=True):
            num = len(pages)
            if num and pages[-1] and node.end % size == 0:
                return node.end
            while num and not pages[num - 1]:
                num -= 1
            ends.append((node.start // size + num) * size if num else 0)
        return max(ends)

    def clear(self) -> int:
        num_forgotten = len(self._at)
        for node in self._nodes():
            node.num_cuts += 1  # paths of living sequences begin anew
        self._roots.clear()
        self._at.clear()
        self._copies.clear()
        return num_forgotten

    # ---- inside

    def _no_pages(self, start: int, end: int) -> list[list[int]]:
        return [[NULL_PAGE] * (end // size - start // size) for size in self._sizes]

    def _nodes(self) -> Iterator[Node]:
        nodes = list(self._roots.values())
        while nodes:
            node = nodes.pop()
            yield node
            nodes += node.children.values()

    def check_integrity(self) -> None:
        standing = dict[int, tuple[Node, int, int]]()
        for node in self._nodes():
            assert (node.parent is None) == (node.start == node.end), "an edge has no tokens"
            assert node.children or any(map(any, node.pages)), "a leaf without pages"
            assert node.children or self._end_of_pages(node) == node.end, (
                "a leaf is longer than its pages"
            )
            for first, child in node.children.items():
                assert child.parent is node
                assert child.start == node.end
                assert child.label[:_WIDTH] == first
            for group, (pages, size) in enumerate(zip(node.pages, self._sizes, strict=True)):
                assert len(pages) == node.end // size - node.start // size
                for i, page in enumerate(pages, node.start // size):
                    if page:
                        assert page not in standing, "a page is in two places"
                        standing[page] = node, (i + 1) * size, group
        assert len(standing) + len(self._copies) == len(self._at)
        for page, (node, end, group) in self._at.items():
            node = _above(node, end)
            main = node.pages[group][
                end // self._sizes[group] - 1 - node.start // self._sizes[group]
            ]
            assert standing[main] == (node, end, group)
            assert page == main or page in self._copies.of(main)


def _packed(token_ids: Sequence[int], start: int, end: int) -> bytes:
    return array("I", token_ids[start:end]).tobytes()


def _num_equal(label: bytes, tokens: bytes, at: int) -> int:
    """The number of a label's tokens that are equal to those at this position."""
    if tokens.startswith(label, at * _WIDTH):
        return len(label) // _WIDTH
    # so many are equal; so many are not
    low, high = 0, min(len(label) // _WIDTH, len(tokens) // _WIDTH - at) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if tokens.startswith(label[low * _WIDTH : middle * _WIDTH], (at + low) * _WIDTH):
            low = middle
        else:
            high = middle
    return low


def _above(node: Node, end: int) -> Node:
    """The node on the way to this one in which the token before `end` is."""
    while end <= node.start and node.parent is not None:
        node = node.parent
    return node
