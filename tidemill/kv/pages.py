"""Physical KV pages: who owns them, and the free ones in least-recently-used order, those that are kept last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain

NULL_PAGE = 0  # never owned, never written; fills the unused tail of page tables


class PagePool:
    """Pages 1 to num_pages - 1, each either owned or in one of two lists of free ones, the least recently used first. Of the
    second, pages that are kept, one is taken only when the first is empty. Any page can leave a list at once: a prefix hit takes
    pages from the middle. All that is noted of a page is what is not so for most, so that many are taken or dropped together."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, "a pool needs the null page and one more"
        self.num_pages = num_pages
        self.num_free = num_pages - 1
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_pages))
        self._free_kept: OrderedDict[int, None] = OrderedDict()
        self._more_owners: dict[int, int] = {}  # of a page that has several: how many besides one
        self._keepers: dict[int, int] = {}  # how many want a page to be kept
        self._num_takes = 0
        self._taken: dict[int, int] = {}  # the number of the take that a page was last part of

    @property
    def num_kept(self) -> int:
        return len(self._keepers)

    def references(self, page: int) -> int:
        return 0 if page in self._free or page in self._free_kept else 1 + self._more_owners.get(page, 0)

    def taken(self, page: int) -> int:
        """What a page holds is the same while this is."""
        return self._taken.get(page, 0)

    def take(self) -> int:
        """The least recently used free page, now owned once."""
        assert self.num_free, "no free page"
        page, _ = (self._free or self._free_kept).popitem(last=False)
        self.num_free -= 1
        self.renew(page)
        return page

    def take_all(self, num: int) -> list[int]:
        """As many calls of `take`."""
        if num > len(self._free):
            return [self.take() for _ in range(num)]
        next_of = self._free.popitem
        pages = [next_of(last=False)[0] for _ in range(num)]  # none of the first list is kept
        self.num_free -= num
        self._num_takes += 1
        self._taken.update(dict.fromkeys(pages, self._num_takes))
        return pages

    def share(self, page: int) -> None:
        """One more owner; a free page leaves the free list."""
        assert page != NULL_PAGE
        free = self._free if page in self._free else self._free_kept
        if page in free:
            del free[page]
            self.num_free -= 1
        else:
            self._more_owners[page] = self._more_owners.get(page, 0) + 1

    def drop(self, page: int) -> bool:
        """One owner less. True if that was the last: the page is then the most recently used free one."""
        assert self.references(page) > 0
        assert page != NULL_PAGE
        num = self._more_owners.pop(page, 0)
        if num > 1:
            self._more_owners[page] = num - 1
        if num:
            return False
        (self._free_kept if page in self._keepers else self._free)[page] = None
        self.num_free += 1
        return True

    def drop_all(self, pages: Sequence[int]) -> None:
        """As many calls of `drop`."""
        if self._more_owners.keys().isdisjoint(pages) and self._keepers.keys().isdisjoint(pages):
            assert self._free.keys().isdisjoint(pages)
            self._free.update(dict.fromkeys(pages))
            self.num_free += len(pages)
        else:
            for page in pages:
                self.drop(page)

    def keepers(self, page: int) -> int:
        return self._keepers.get(page, 0)

    def keep(self, page: int) -> None:
        """One more wants the page to be kept: while it is free, all that are not kept are taken before it."""
        self._keepers[page] = self.keepers(page) + 1
        if page in self._free:
            del self._free[page]
            self._free_kept[page] = None

    def let_go(self, page: int) -> None:
        """One less wants the page to be kept."""
        num = self._keepers.pop(page)
        if num > 1:
            self._keepers[page] = num - 1
        elif page in self._free_kept:
            del self._free_kept[page]
            self._free[page] = None

    def renew(self, page: int) -> None:
        """What a page holds has become worthless: nobody keeps it any more."""
        self._num_takes += 1
        self._taken[page] = self._num_takes
        if page in self._keepers:
            self._keepers[page] = 1
            self.let_go(page)

    def free_pages(self) -> Iterator[int]:
        """Free pages in the order in which they would be taken."""
        return chain(self._free, self._free_kept)

    def check_integrity(self) -> None:
        assert self.num_free == len(self._free) + len(self._free_kept), "free pages and their count disagree"
        assert self._free.keys().isdisjoint(self._keepers), "a kept page would be taken before another"
        assert self._free_kept.keys() <= self._keepers.keys()
        free = set(self.free_pages())
        assert len(free) == self.num_free, "a page is free twice"
        assert NULL_PAGE not in free
        assert free.isdisjoint(self._more_owners), "an owned page is free"
