from functools import partial

import pytest

from tidemill.kv.manager import INDEXES, KVManager
from tidemill.types.cache_layout import Group, state_group

PROMPT = list(range(100, 140))  # 40 tokens: two full pages of 16 and 8 more


@pytest.fixture(params=INDEXES)
def manager(request):
    """Managers with either index."""
    return partial(KVManager, index=request.param)


def admit(kv: KVManager, seq: int, tokens: list[int], salt: str = "", **more) -> int | None:
    """Tokens found, rounded down to pages: where the indexes do not differ."""
    start = kv.admit(seq, len(tokens), kv.path(tokens, salt), **more)
    return start.num_cached // kv.page_size * kv.page_size if start else None


def cached(kv: KVManager, tokens: list[int]) -> int:
    """Tokens found, rounded down to pages: where the indexes do not differ."""
    return kv.num_cached(kv.path(tokens)) // kv.page_size * kv.page_size


def num_found(kv: KVManager, tokens: list[int]) -> int:
    """Pages."""
    return kv.num_cached(kv.path(tokens)) // kv.page_size


def admitted(kv: KVManager, seq: int, tokens: list[int], salt: str = "") -> int:
    found = admit(kv, seq, tokens, salt)
    assert found is not None
    kv.record(seq, tokens, len(tokens))
    kv.check_integrity()
    return found


def test_a_prefix_is_found_by_whole_pages_and_shared(manager):
    kv = manager(20, 16)
    assert admitted(kv, 1, PROMPT) == 0
    assert admitted(kv, 2, PROMPT) == 32
    assert list(kv.tables(1)[0])[:2] == list(kv.tables(2)[0])[:2]
    assert kv.tables(1)[0][2] != kv.tables(2)[0][2]


def test_at_least_one_token_is_left_to_compute(manager):
    kv = manager(20, 16)
    admitted(kv, 1, PROMPT[:32])
    assert admitted(kv, 2, PROMPT[:32]) == 16


def test_a_page_depends_on_all_tokens_before_it(manager):
    kv = manager(20, 16)
    admitted(kv, 1, PROMPT)
    assert admitted(kv, 2, [7] + PROMPT[1:]) == 0


def test_tenants_never_meet(manager):
    kv = manager(20, 16)
    admitted(kv, 1, PROMPT, salt="a")
    assert admitted(kv, 2, PROMPT, salt="b") == 0
    assert admitted(kv, 3, PROMPT, salt="a") == 32


def test_found_after_release_and_evicted_from_the_tail(manager):
    kv = manager(4, 16)  # three pages
    admitted(kv, 1, PROMPT[:33])
    kv.release(1)
    assert num_found(kv, PROMPT[:33]) == 2
    admit(kv, 2, [1, 2, 3])  # takes the empty page
    admit(kv, 3, [4, 5, 6])  # takes the second page of the prefix, not the first
    assert num_found(kv, PROMPT[:33]) == 1
    assert kv.num_evicted == 1
    kv.check_integrity()


def test_admission_that_does_not_fit_changes_nothing(manager):
    kv = manager(4, 16)
    assert admit(kv, 1, PROMPT, reserve=1) is None
    assert not kv.holds(1)
    assert kv.num_free_pages == 3
    assert admit(kv, 1, PROMPT) == 0
    assert kv.extend(1, 48) == []
    assert kv.extend(1, 49) is None


def test_revived_pages_count_as_taken(manager):
    """Pages found in the cache but free leave the free list too."""
    kv = manager(4, 16)
    admitted(kv, 1, PROMPT[:33])
    kv.release(1)
    # one found but free, three new: four of three
    assert admit(kv, 2, PROMPT[:17] + [5] * 32) is None


def test_fork_copies_on_write(manager):
    kv = manager(20, 16)
    admitted(kv, 1, PROMPT)
    assert kv.fork(1, 2, 40) == 3
    assert list(kv.tables(1)[0]) == list(kv.tables(2)[0])
    shared = kv.tables(1)[0][2]
    assert kv.copies_to_write(2, 39, 40) == [(0, 2, shared)]
    assert kv.tables(2)[0][2] != shared
    assert kv.copies_to_write(1, 40, 41) == []  # its last owner may write
    kv.check_integrity()
    kv.release(1)
    kv.release(2)
    kv.check_integrity()
    assert kv.num_free_pages == kv.num_pages


def test_a_findable_page_is_never_written_in_place(manager):
    kv = manager(20, 16)
    admitted(kv, 1, PROMPT[:32])
    kv.fork(1, 2, 32)
    kv.release(1)
    findable = kv.tables(2)[0][1]
    assert kv.copies_to_write(2, 31, 32) == [(0, 1, findable)]
    assert kv.index.find(kv.path(PROMPT)).pages[0] == [kv.tables(2)[0][0], findable]


def test_copy_without_a_free_page_changes_nothing(manager):
    kv = manager(4, 16)
    admitted(kv, 1, PROMPT)
    kv.fork(1, 2, 40)
    before = list(kv.tables(2)[0])
    assert kv.copies_to_write(2, 39, 40) is None
    assert list(kv.tables(2)[0]) == before


def test_integrity_notices_a_leak(manager):
    kv = manager(10, 16)
    admit(kv, 1, PROMPT)
    kv.pool.take()
    with pytest.raises(AssertionError, match="leaked"):
        kv.check_integrity()


def test_clearing_forgets_but_keeps_living_sequences(manager):
    kv = manager(20, 16)
    admitted(kv, 1, PROMPT)
    assert kv.clear_prefixes() == 2
    assert num_found(kv, PROMPT) == 0
    kv.record(1, PROMPT, 40)
    assert num_found(kv, PROMPT) == 2
    kv.check_integrity()


@pytest.mark.parametrize("page_size", [1, 16, 32])
def test_waste_is_under_one_page(manager, page_size):
    kv = manager(200, page_size)
    for num_tokens in (1, 15, 16, 17, 33):
        admit(kv, num_tokens, list(range(num_tokens)))
        assert 0 <= len(kv.tables(num_tokens)[0]) * page_size - num_tokens < page_size


def windowed(manager, num_pages=40, most_at_once=16):
    return manager(
        num_pages + 1, 4, groups=(Group(4), Group(4, window=10)), most_at_once=most_at_once
    )


def compute(kv, seq, tokens, start, end):
    """A step of this sequence's tokens start .. end - 1."""
    kv.trim(seq, start)
    assert kv.extend(seq, end) is not None
    assert kv.copies_to_write(seq, start, end) is not None
    kv.record(seq, tokens, end)
    kv.begin_step()
    kv.check_integrity()


def test_a_window_gives_back_what_no_query_sees(manager):
    kv, tokens = windowed(manager), list(range(64))
    assert admit(kv, 1, tokens) == 0
    for start in range(0, 64, 16):
        compute(kv, 1, tokens, start, start + 16)
        every, recent = kv.tables(1)
        assert all(every)
        assert len(every) == 16
        assert [page > 0 for page in recent] == [4 * i + 3 > start - 10 for i in range(len(recent))]
        assert sum(page > 0 for page in recent) <= kv.groups[1].most_pages(64, 16)
    kv.release(1)
    assert kv.num_free_pages == kv.num_pages


def test_a_prefix_needs_only_what_its_window_still_sees(manager):
    kv, tokens = windowed(manager), list(range(64))
    admit(kv, 1, tokens)
    for start in range(0, 64, 16):
        compute(kv, 1, tokens, start, start + 16)
    # all the window's pages that are left cover tokens 36 .. 63
    for page in [page for page in kv.tables(1)[1] if page]:
        assert page in kv.index
    kv.release(1)
    # evicts what the window gave back first
    taken = [kv._take() for _ in range(kv.pool.num_free - 16 - 7)]
    # the last page's tokens are not all cached: the last one must be computed
    assert cached(kv, tokens) == 60
    assert cached(kv, tokens[:50]) == 48
    assert cached(kv, tokens[:40]) == 0  # its window would see tokens 27 .. 35
    assert admit(kv, 2, tokens[:62]) == 60
    every, recent = kv.tables(2)
    assert all(every)
    seen = {
        "hash": [12, 13, 14],
        "radix": [13, 14, 15],
    }  # token 60, which sees 51 on, is the next; or 61, of a page that was copied
    assert [i for i, page in enumerate(recent) if page] == seen[manager.keywords["index"]]
    for page in taken:
        kv.pool.drop(page)
    kv.release(2)
    kv.check_integrity()


def test_a_state_is_a_page_of_many_tokens_of_which_the_last_is_seen(manager):
    kv, tokens = manager(31, 4, groups=(Group(4), state_group(16)), most_at_once=8), list(range(70))
    admit(kv, 1, tokens)
    for start in range(0, 70, 8):
        compute(kv, 1, tokens, start, min(start + 8, 70))
        assert sum(page > 0 for page in kv.tables(1)[1]) <= 2
    kv.release(1)
    assert cached(kv, tokens[:57]) == 48  # where a state was kept, whatever comes after it
    assert cached(kv, [*tokens[:40], 99, *tokens[40:]]) == 32
    assert admit(kv, 2, tokens[:57]) == 48
    assert [page > 0 for page in kv.tables(2)[1]] == [False, False, True]


def test_a_fork_shares_what_its_parent_holds(manager):
    kv, tokens = windowed(manager), list(range(30))
    admit(kv, 1, tokens)
    for start in (0, 16, 29):
        compute(kv, 1, tokens, start, min(start + 16, 30))
    assert kv.fork(1, 2, 30) == 8 + 3
    assert kv.tables(1) == kv.tables(2)
    copies = kv.copies_to_write(2, 29, 30)
    assert [(group, index) for group, index, _ in copies] == [(0, 7), (1, 7)]
    kv.check_integrity()
    kv.release(1)
    kv.release(2)
    kv.check_integrity()
    assert kv.num_free_pages == kv.num_pages


def test_a_state_is_found_once_the_step_that_writes_it_is_planned(manager):
    """Keys and values can be shared in that step; a state is read by what runs beside the one that
    writes it."""
    kv, tokens = (
        manager(31, 4, groups=(Group(4), state_group(16)), most_at_once=40),
        list(range(40)),
    )
    admit(kv, 1, tokens)
    kv.extend(1, 40)
    kv.record(1, tokens, 40)
    assert cached(kv, tokens) == 0
    kv.begin_step()
    assert cached(kv, tokens) == 32
    kv.release(1)
    kv.check_integrity()


def test_a_state_whose_page_was_taken_again_is_not_found(manager):
    kv, tokens = manager(9, 4, groups=(state_group(4),), most_at_once=16), list(range(16))
    admit(kv, 1, tokens)
    kv.extend(1, 16)
    kv.record(1, tokens, 16)
    kv.release(1)
    taken = [kv._take() for _ in range(kv.num_free_pages)]
    kv.begin_step()
    assert cached(kv, tokens) == 0
    for page in taken:
        kv.pool.drop(page)
    kv.check_integrity()


@pytest.mark.parametrize(
    "kinds",
    [
        (Group(4), state_group(64)),
        (state_group(64), state_group(64)),
        (Group(4, 9), state_group(64)),
    ],
)
def test_a_state_is_kept_where_a_prompt_ends_and_where_the_common_part_of_two_does(manager, kinds):
    kv = manager(99, 4, groups=kinds, most_at_once=40)
    first, second, third = ([*range(22), *[number] * 15] for number in (90, 91, 92))

    def compute_to_stops(seq: int, tokens: list[int]) -> list[int]:
        start, ends = admit(kv, seq, tokens), []
        while start < len(tokens):
            kv.begin_step()
            count = kv.until_stop(seq, start, len(tokens) - start)
            compute(kv, seq, tokens, start, start + count)
            start += count
            ends.append(start)
        kv.begin_step()
        kv.check_integrity()
        kv.release(seq)
        return ends

    assert compute_to_stops(1, first) == [36, 37]
    assert cached(kv, second) == 0
    assert compute_to_stops(2, second) == [20, 36, 37]
    assert cached(kv, third) == 20
    assert cached(kv, [*first, 1, 2, 3]) == 36
    assert compute_to_stops(3, third) == [36, 37]
    assert kv.num_free_pages == kv.num_pages


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_pages_that_a_window_gave_back_are_cleared_with_a_request_of_nan(manager, prefix_caching):
    kv = manager(31, 4, prefix_caching, groups=(Group(4), Group(4, window=8)), most_at_once=8)
    tokens, written = list(range(40)), set[int]()
    admit(kv, 1, tokens)
    for start in range(0, 40, 8):
        compute(kv, 1, tokens, start, start + 8)
        written.update(page for table in kv.tables(1) for page in table if page)
    given_back = written - {page for table in kv.tables(1) for page in table}
    assert len(given_back) > 4
    taken = {kv._take() for _ in range(kv.num_free_pages - 3)}  # some are another's by now
    assert taken & given_back
    assert given_back - taken
    assert set(kv.discard(1)) == written - taken
    assert cached(kv, tokens[:12]) == 0
    for page in taken:
        kv.pool.drop(page)
    kv.check_integrity()


def test_a_kept_state_gives_way_where_no_page_is_left_for_a_copy(manager):
    """A step from the middle of a page into the next one, with all pages that such a sequence is
    said to hold at most."""
    group, first, second = state_group(16), [*range(12), 90, 91], [*range(12), *range(92, 98)]
    kv = manager(1 + group.most_pages(len(second), 6), 4, groups=(group,), most_at_once=6)
    admit(kv, 1, first)
    compute(kv, 1, first, 0, 6)
    compute(kv, 1, first, 6, 12)
    kv.release(1)
    assert admit(kv, 2, second) == 12
    (state,) = kv.tables(2)[0]
    compute(kv, 2, second, 12, 18)
    assert kv.tables(2)[0][0] == state
    assert cached(kv, first) == 0
    kv.release(2)
    kv.check_integrity()


def test_a_state_that_its_sequence_went_on_from_is_cleared_with_a_request_of_nan(manager):
    kv, tokens = manager(20, 4, groups=(state_group(64),), most_at_once=40), list(range(9))
    admit(kv, 1, tokens)
    compute(kv, 1, tokens, 0, 8)
    kept = kv.tables(1)[0][0]
    compute(kv, 1, tokens, 8, 9)
    assert sorted([kept, *kv.tables(1)[0]]) == kv.discard(1)
    assert cached(kv, tokens) == 0
    kv.check_integrity()
