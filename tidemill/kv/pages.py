"""Physical KV pages: reference counts, and the free ones in least-recently-used order, those that
are kept last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

NULL_PAGE = 0  # never owned, never written; fills the unused tail of page tables


class PagePool:
    """Pages 1 to num_pages - 1, each either owned (references > 0) or on the free list.

    The free list is doubly linked through two int lists with a sentinel at index `num_pages`, so
    that any page can leave it in O(1): a prefix hit takes pages from the middle. Free pages that
    are kept are in a second list, with a sentinel after the first, from which pages are taken only
    when the first is empty.

        sentinel -> least recently used -> ... -> most recently used -> sentinel
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, "a pool needs the null page and one more"
        self.num_pages = num_pages
        self.num_free = num_pages - 1
        self._refs = [0] * num_pages
        self._refs[NULL_PAGE] = 1
        self.num_kept = 0
        self._times_taken = [0] * num_pages
        self._keepers = [0] * num_pages  # how many want a page to be kept
        self._next = [0, *range(2, num_pages + 1), 1, num_pages + 1]
        self._prev = [0, num_pages, *range(1, num_pages), num_pages + 1]

    def references(self, page: int) -> int:
        return self._refs[page]

    def times_taken(self, page: int) -> int:
        """The number of times that a page was taken: its content is the same while this is."""
        return self._times_taken[page]

    def take(self) -> int:
        """The least recently used free page, now owned once."""
        page = self._next[self.num_pages]
        if page == self.num_pages:
            page = self._next[self.num_pages + 1]
        assert page < self.num_pages, "no free page"
        self._unlink(page)
        self._refs[page] = 1
        self._times_taken[page] += 1
        if self._keepers[page]:
            self._keepers[page] = 0
            self.num_kept -= 1
        return page

    def take_all(self, num: int) -> list[int]:
        """Takes so many pages; the same as so many calls of `take`."""
        pages, following, refs, times = list[int](), self._next, self._refs, self._times_taken
        sentinel = self.num_pages
        page = following[sentinel]
        for _ in range(num):
            if page == sentinel:
                break
            pages.append(page)  # none of the first list is kept
            refs[page] = 1
            times[page] += 1
            page = following[page]
        following[sentinel], self._prev[page] = page, sentinel
        self.num_free -= len(pages)
        return (
            pages if len(pages) == num else pages + [self.take() for _ in range(num - len(pages))]
        )

    def drop_all(self, pages: Sequence[int]) -> None:
        """Drops these pages; the same as one call of `drop` for each."""
        refs, before, after = self._refs, self._prev, self._next
        if self.num_kept or set(map(refs.__getitem__, pages)) != {1}:
            for page in pages:
                self.drop(page)
            return
        sentinel = self.num_pages
        tail = before[sentinel]
        for page in pages:  # nearly always: each has one owner, and none is kept
            assert refs[page] == 1  # named once
            refs[page] = 0
            after[tail] = page
            before[page] = tail
            tail = page
        after[tail], before[sentinel] = sentinel, tail
        self.num_free += len(pages)

    def share(self, page: int) -> None:
        """One more owner; a free page leaves the free list."""
        assert page != NULL_PAGE
        if self._refs[page] == 0:
            self._unlink(page)
        self._refs[page] += 1

    def drop(self, page: int) -> bool:
        """One owner less. True if that was the last: the page is then the most recently used free
        one."""
        assert self._refs[page] > 0
        assert page != NULL_PAGE
        self._refs[page] -= 1
        if self._refs[page]:
            return False
        self._link(page)
        return True

    def keepers(self, page: int) -> int:
        return self._keepers[page]

    def keep(self, page: int) -> None:
        """One more wants the page to be kept: while it is free, all that are not kept are taken
        before it."""
        self._keepers[page] += 1
        if self._keepers[page] == 1:
            self.num_kept += 1
            self._relink(page)

    def let_go(self, page: int) -> None:
        """One less wants the page to be kept."""
        assert self._keepers[page] > 0
        self._keepers[page] -= 1
        if self._keepers[page] == 0:
            self.num_kept -= 1
            self._relink(page)

    def renew(self, page: int) -> None:
        """Makes a page's content worthless: nobody keeps it any more."""
        self._times_taken[page] += 1
        if self._keepers[page]:
            self._keepers[page] = 0
            self.num_kept -= 1
            self._relink(page)

    def free_pages(self) -> Iterator[int]:
        """Free pages in the order in which they would be taken."""
        for sentinel in (self.num_pages, self.num_pages + 1):
            page = self._next[sentinel]
            while page != sentinel:
                yield page
                page = self._next[page]

    def _relink(self, page: int) -> None:
        """It has become kept, or is not any more: it goes to the other list, if it is free."""
        if self._refs[page] == 0:
            self._unlink(page)
            self._link(page)

    def _link(self, page: int) -> None:
        sentinel = self.num_pages + (self._keepers[page] > 0)
        tail = self._prev[sentinel]
        self._next[tail] = self._prev[sentinel] = page
        self._prev[page], self._next[page] = tail, sentinel
        self.num_free += 1

    def _unlink(self, page: int) -> None:
        before, after = self._prev[page], self._next[page]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1

    def check_integrity(self) -> None:
        free = list(self.free_pages())
        assert len(free) == self.num_free == len(set(free)), "free list and its count disagree"
        assert all(self._refs[page] == 0 for page in free), "an owned page is on the free list"
        num_owned = sum(1 for refs in self._refs[1:] if refs > 0)
        assert self.num_free + num_owned == self.num_pages - 1, "a page is neither free nor owned"
        assert self._refs[NULL_PAGE] == 1
        kept = [page for page in range(1, self.num_pages) if self._keepers[page]]
        assert len(kept) == self.num_kept
        num_first = sum(1 for page in free if not self._keepers[page])
        assert all(self._keepers[page] > 0 for page in free[num_first:]), (
            "a kept page would be taken before another"
        )
