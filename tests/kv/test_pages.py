from tidemill.kv.pages import PagePool


def test_taken_in_least_recently_used_order():
    pool = PagePool(5)
    assert [pool.take() for _ in range(4)] == [1, 2, 3, 4]
    for page in (3, 1, 4, 2):
        pool.drop(page)
    assert list(pool.free_pages()) == [3, 1, 4, 2]
    pool.check_integrity()


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
