import pytest

from tidemill.kv.pages import PagePool


def test_taken_in_least_recently_used_order():
    pool = PagePool(5)
    assert [pool.take() for _ in range(4)] == [1, 2, 3, 4]
    for page in (3, 1, 4, 2):
        pool.drop(page)
    assert list(pool.free_pages()) == [3, 1, 4, 2]
    pool.check_integrity()


@pytest.mark.parametrize(("shared", "kept"), [([], []), ([2, 4], []), ([], [4, 8])])
def test_pages_are_taken_and_dropped_together_as_one_by_one(shared, kept):
    together, singly = pools = PagePool(9), PagePool(9)
    assert together.take_all(6) == [singly.take() for _ in range(6)]
    for pool in pools:
        for page in shared:
            pool.share(page)
        for page in kept:
            pool.keep(page)
    together.drop_all([4, 2, 1])
    for page in (4, 2, 1):
        singly.drop(page)
    assert list(together.free_pages()) == list(singly.free_pages())
    assert [together.references(page) for page in range(9)] == [
        singly.references(page) for page in range(9)
    ]
    assert together.take_all(3) == [singly.take() for _ in range(3)]
    together.check_integrity()


def test_a_page_leaves_the_middle_of_the_free_list():
    pool = PagePool(6)
    pool.share(3)
    assert list(pool.free_pages()) == [1, 2, 4, 5]
    pool.share(3)
    assert pool.references(3) == 2
    assert not pool.drop(3)
    assert pool.drop(3)
    assert list(pool.free_pages()) == [1, 2, 4, 5, 3]
    pool.check_integrity()
