"""Both prefix indexes against plain models of a cache, and what only the tree does."""

import random

import pytest

from tidemill.kv.manager import INDEXES, KVManager
from tidemill.kv.radix import RadixIndex
from tidemill.types.cache_layout import Group, state_group


def some_tokens(chance, num):
    """Few kinds of tokens, so that beginnings are often equal."""
    return chance.choices(range(3), weights=[20, 1, 1], k=num)


def compute(kv, seq, tokens, start=0, end=None):
    end = len(tokens) if end is None else end
    kv.extend(seq, end)
    kv.record(seq, tokens, end)
    kv.begin_step()


def run_whole(kv, seq, tokens, salt=""):
    """Admit, compute and release a sequence. Returns how many of its tokens were cached."""
    start = kv.admit(seq, len(tokens), kv.path(tokens, salt))
    compute(kv, seq, tokens)
    kv.release(seq)
    return start.num_cached


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_hits_are_those_of_a_dict_of_all_prefixes(page_size):
    chance, known = random.Random(page_size), {}
    by_hash, by_tokens = (KVManager(4600, page_size, index=index) for index in ("hash", "radix"))
    num_within_pages = 0
    for seq in range(120):
        tokens, salt = some_tokens(chance, chance.randrange(1, 70)), chance.choice("ab")
        longest = max((n for n in range(1, len(tokens)) if (salt, *tokens[:n]) in known), default=0)
        assert run_whole(by_tokens, seq, tokens, salt) == longest
        assert run_whole(by_hash, seq, tokens, salt) == longest // page_size * page_size
        known |= {
            (salt, *tokens[:n]): True for n in range(1, len(tokens) // page_size * page_size + 1)
        }
        num_within_pages += longest % page_size > 0
    by_hash.check_integrity()
    by_tokens.check_integrity()
    assert num_within_pages > 20 or page_size == 1


class PlainCache:
    """Pages named by all tokens up to their end; the free ones in the order in which they are
    taken."""

    def __init__(self, num_pages, page_size):
        self.page_size, self.free, self.held = (
            page_size,
            [("empty", i) for i in range(num_pages)],
            {},
        )

    def longest(self, tokens):
        names = {*self.free, *(name for held in self.held.values() for name in held)}
        ends = range(self.page_size, len(tokens), self.page_size)
        missing = next((end for end in ends if tuple(tokens[:end]) not in names), None)
        return max([0, *ends]) if missing is None else missing - self.page_size

    def start(self, seq, tokens):
        num, size = self.longest(tokens), self.page_size
        self.held[seq] = [tuple(tokens[:end]) for end in range(size, num + 1, size)]
        self.free = [name for name in self.free if name not in self.held[seq]]
        for end in range(num + size, len(tokens) + size, size):
            del self.free[0]
            self.held[seq].append(
                tuple(tokens[:end]) if end <= len(tokens) else ("partly filled", seq)
            )
        return num

    def end(self, seq):
        held = self.held.pop(seq)
        others = {name for names in self.held.values() for name in names}
        self.free += [name for name in reversed(held) if name not in others]


@pytest.mark.parametrize("index", INDEXES)
def test_evictions_are_those_of_a_list_of_pages(index):
    """Many sequences at once in few pages: what is overwritten, and what can therefore be found, is
    the same after each step."""
    chance, kv, plain = random.Random(5), KVManager(41, 4, index=index), PlainCache(40, 4)
    live, num_hits = [], 0
    for seq in range(600):
        tokens = some_tokens(chance, 4 * chance.randrange(8) + chance.randrange(1, 4))
        while live and (len(live) == 4 or chance.random() < 0.3):
            done = live.pop(chance.randrange(len(live)))
            kv.release(done)
            plain.end(done)
        start = kv.admit(seq, len(tokens), kv.path(tokens))
        compute(kv, seq, tokens)
        kv.check_integrity()
        num = plain.start(seq, tokens)
        assert start.num_cached // 4 * 4 == num
        live.append(seq)
        num_hits += num > 8
    assert num_hits > 60
    assert kv.num_evicted > 300


@pytest.mark.parametrize("index", INDEXES)
def test_no_page_outlives_one_before_it(index):
    """Sequences that compute the same tokens at the same time, each in pages of its own, and end in
    any order."""
    chance, kv = random.Random(11), KVManager(33, 2, index=index)
    live, num_copies = {}, 0
    for seq in range(1500):
        tokens = some_tokens(chance, chance.randrange(2, 20))
        if len(live) < 5 and kv.admit(seq, len(tokens), kv.path(tokens), reserve=len(live)):
            live[seq] = tokens, 0
        for other, (known, num) in list(live.items()):
            if num == len(known) or (kv.extend(other, len(known) + 1) is None):
                kv.release(other)
                del live[other]
            elif chance.random() < 0.5:
                more = chance.randrange(num, len(known)) + 1
                kv.record(other, known, more)
                kv.begin_step()
                live[other] = (known, more)
        kv.check_integrity()
        num_copies += len(kv.index._copies)
        if isinstance(kv.index, RadixIndex):
            assert all(all(pages) for node in kv.index._nodes() for pages in node.pages)
        else:
            keys = kv.path([*tokens, 0]).keys
            found = [key in kv.index._page_of for key in keys]
            assert found == sorted(found, reverse=True), (
                "a page can be found, but not the one before it"
            )
    assert num_copies > 500
    assert kv.num_evicted > 1000


def test_tokens_within_a_page_come_by_copy():
    kv = KVManager(20, 16, index="radix")
    first = list(range(40))
    run_whole(kv, 1, [*first, *range(90, 99)])
    start = kv.admit(2, 60, kv.path([*first, *range(20)]))
    (source,) = kv.index.find(kv.path([*first, *range(90, 99)])).pages[0][2:]
    assert (start.num_cached, start.num_matching) == (40, 40)
    assert start.copies == [(0, 2, source)]
    assert kv.tables(2)[0][2] != source
    assert source in kv.index


def test_a_page_that_the_same_step_writes_is_not_copied():
    kv, tokens = KVManager(20, 4, index="radix"), list(range(12))
    kv.admit(1, 12, kv.path(tokens))
    kv.record(1, tokens, 12)
    assert kv.num_cached(kv.path([*tokens[:10], 99])) == 8
    kv.begin_step()
    assert kv.num_cached(kv.path([*tokens[:10], 99])) == 10


def test_the_last_free_page_is_both_source_and_target():
    """All pages are needed, also the one that begins with the right tokens: it need not be copied
    onto itself."""
    kv = KVManager(4, 4, index="radix")
    run_whole(kv, 1, list(range(12)))
    start = kv.admit(2, 12, kv.path([*range(10), 98, 99]))
    assert start.num_cached == 10
    assert start.copies == []
    assert kv.index.find(kv.path(list(range(20)))).num_tokens == 8
    kv.check_integrity()


def test_a_state_is_not_copied_in_part():
    kv = KVManager(40, 4, groups=(Group(4), state_group(8)), most_at_once=20, index="radix")
    run_whole(kv, 1, list(range(20)))
    start = kv.admit(2, 20, kv.path([*range(15), 97, 98, 99, 100, 101]))
    assert (start.num_cached, start.num_matching, start.copies) == (8, 15, [])


def test_the_tree_shrinks_to_nothing():
    kv, chance = KVManager(30, 4, index="radix"), random.Random(3)
    for seq in range(50):
        run_whole(kv, seq, some_tokens(chance, 30), salt=str(seq % 7))
    taken = [kv._take() for _ in range(kv.num_free_pages)]
    assert kv.index._roots == {}
    for page in taken:
        kv.pool.drop(page)
    kv.check_integrity()


def test_a_living_sequence_goes_on_where_its_tokens_were_forgotten():
    """Its place in the tree was cut away, and others have grown there since: its pages are found by
    its own tokens only."""
    kv = KVManager(40, 4, groups=(Group(4, window=4),), most_at_once=8, index="radix")
    tokens = list(range(40))
    kv.admit(1, 40, kv.path(tokens))
    for start in range(0, 24, 8):
        kv.trim(1, start)
        compute(kv, 1, tokens, start, start + 8)
    for page in list(kv.index.pages()):
        kv.index.forget(page)
    run_whole(kv, 2, [*range(20), *range(200, 212)])
    kv.trim(1, 24)
    compute(kv, 1, tokens, 24, 32)
    kv.check_integrity()
    assert kv.index.find(kv.path(tokens)).num_tokens == 32
    assert kv.num_cached(kv.path(tokens)) == 32
    assert kv.index.find(kv.path([*range(20), *range(200, 230)])).num_tokens == 32


def test_discarded_pages_are_not_found_but_those_of_others_are():
    kv, tokens = KVManager(20, 4, index="radix"), list(range(17))
    kv.admit(1, 17, kv.path(tokens))
    kv.record(1, tokens, 8)
    kv.begin_step()
    kv.admit(2, 17, kv.path(tokens))
    kv.record(2, tokens, 16)
    kv.record(1, tokens, 16)
    kv.begin_step()
    assert len(kv.discard(1)) == 3
    kv.check_integrity()
    assert kv.num_cached(kv.path(tokens)) == 16
    kv.discard(2)
    assert kv.num_cached(kv.path(tokens)) == 0
    kv.check_integrity()
