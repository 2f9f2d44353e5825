import pytest

from tidemill.kv.manager import KVManager

PROMPT = list(range(100, 140))  # 40 tokens: two full pages of 16 and 8 more


def admit(kv: KVManager, seq: int, tokens: list[int], salt: str = "", **more) -> int | None:
    return kv.admit(seq, len(tokens), kv.page_keys(tokens, salt), salt, **more)


def find(kv: KVManager, tokens: list[int]) -> list[int]:
    return kv.find(kv.page_keys(tokens))


def admitted(kv: KVManager, seq: int, tokens: list[int], salt: str = "") -> int:
    found = admit(kv, seq, tokens, salt)
    assert found is not None
    kv.record(seq, tokens, len(tokens))
    kv.check_integrity()
    return found


def test_a_prefix_is_found_by_whole_pages_and_shared():
    kv = KVManager(20, 16)
    assert admitted(kv, 1, PROMPT) == 0
    assert admitted(kv, 2, PROMPT) == 32
    assert list(kv.table(1))[:2] == list(kv.table(2))[:2]
    assert kv.table(1)[2] != kv.table(2)[2]


def test_at_least_one_token_is_left_to_compute():
    kv = KVManager(20, 16)
    admitted(kv, 1, PROMPT[:32])
    assert admitted(kv, 2, PROMPT[:32]) == 16


def test_a_page_depends_on_all_tokens_before_it():
    kv = KVManager(20, 16)
    admitted(kv, 1, PROMPT)
    assert admitted(kv, 2, [7] + PROMPT[1:]) == 0


def test_tenants_never_meet():
    kv = KVManager(20, 16)
    admitted(kv, 1, PROMPT, salt="a")
    assert admitted(kv, 2, PROMPT, salt="b") == 0
    assert admitted(kv, 3, PROMPT, salt="a") == 32


def test_found_after_release_and_evicted_from_the_tail():
    kv = KVManager(4, 16)  # three pages
    admitted(kv, 1, PROMPT[:33])
    kv.release(1)
    assert len(find(kv, PROMPT[:33])) == 2
    admit(kv, 2, [1, 2, 3])  # takes the empty page
    admit(kv, 3, [4, 5, 6])  # takes the second page of the prefix, not the first
    assert len(find(kv, PROMPT[:33])) == 1
    assert kv.num_evicted == 1
    kv.check_integrity()


def test_admission_that_does_not_fit_changes_nothing():
    kv = KVManager(4, 16)
    assert admit(kv, 1, PROMPT, reserve=1) is None
    assert not kv.holds(1)
    assert kv.num_free_pages == 3
    assert admit(kv, 1, PROMPT) == 0
    assert kv.extend(1, 48) == []
    assert kv.extend(1, 49) is None


def test_revived_pages_count_as_taken():
    """Pages found in the cache but free leave the free list too."""
    kv = KVManager(4, 16)
    admitted(kv, 1, PROMPT[:33])
    kv.release(1)
    assert admit(kv, 2, PROMPT[:17] + [5] * 32) is None  # one found but free, three new: four of three


def test_fork_copies_on_write():
    kv = KVManager(20, 16)
    admitted(kv, 1, PROMPT)
    assert kv.fork(1, 2, 40) == 3
    assert list(kv.table(1)) == list(kv.table(2))
    shared = kv.table(1)[2]
    assert kv.copies_to_write(2, 39, 40) == [(2, shared)]
    assert kv.table(2)[2] != shared
    assert kv.copies_to_write(1, 40, 41) == []  # its last owner may write
    kv.check_integrity()
    kv.release(1)
    kv.release(2)
    kv.check_integrity()
    assert kv.num_free_pages == kv.num_pages


def test_a_findable_page_is_never_written_in_place():
    kv = KVManager(20, 16)
    admitted(kv, 1, PROMPT[:32])
    kv.fork(1, 2, 32)
    kv.release(1)
    findable = kv.table(2)[1]
    assert kv.copies_to_write(2, 31, 32) == [(1, findable)]
    assert find(kv, PROMPT) == [kv.table(2)[0], findable]


def test_copy_without_a_free_page_changes_nothing():
    kv = KVManager(4, 16)
    admitted(kv, 1, PROMPT)
    kv.fork(1, 2, 40)
    before = list(kv.table(2))
    assert kv.copies_to_write(2, 39, 40) is None
    assert list(kv.table(2)) == before


def test_integrity_notices_a_leak():
    kv = KVManager(10, 16)
    admit(kv, 1, PROMPT)
    kv._pool.take()
    with pytest.raises(AssertionError, match="leaked"):
        kv.check_integrity()


def test_clearing_forgets_but_keeps_living_sequences():
    kv = KVManager(20, 16)
    admitted(kv, 1, PROMPT)
    assert kv.clear_prefixes() == 2
    assert find(kv, PROMPT) == []
    kv.record(1, PROMPT, 40)
    assert len(find(kv, PROMPT)) == 2
    kv.check_integrity()


@pytest.mark.parametrize("page_size", [1, 16, 32])
def test_waste_is_under_one_page(page_size):
    kv = KVManager(200, page_size)
    for num_tokens in (1, 15, 16, 17, 33):
        admit(kv, num_tokens, list(range(num_tokens)))
        assert 0 <= len(kv.table(num_tokens)) * page_size - num_tokens < page_size
