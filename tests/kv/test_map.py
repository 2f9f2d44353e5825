"""What a map of all pages shows."""

from tidemill.kv.manager import CACHED, FIRST_OWNER, FREE, SHARED, KVManager


def test_every_page_is_what_it_is():
    kv = KVManager(num_pages=17, page_size=4)
    prompt = list(range(12))
    for seq, tokens in ((7, prompt), (8, prompt + [1, 2, 3, 4, 5]), (9, [99] * 6)):
        kv.admit(seq, len(tokens), kv.path(tokens))
        kv.record(seq, tokens, len(tokens))
    kinds = kv.map([7, 8, 9])
    assert len(kinds) == kv.num_pages == 16
    for owner, seq in enumerate((7, 8, 9), FIRST_OWNER):
        for page in kv.tables(seq)[0]:
            holders = [other for other in (7, 8, 9) if page in kv.tables(other)[0]]
            assert kinds[page - 1] == (owner if len(holders) == 1 else SHARED)
    assert kinds.count(SHARED) == 3  # the whole of the first prompt
    assert kinds.count(FREE) == kv.num_free_pages
    last = kv.tables(9)[0]
    kv.release(9)
    kinds = kv.map([7, 8])
    # its full page can be found, the other holds nothing
    assert [kinds[page - 1] for page in last] == [CACHED, FREE]
    assert kinds.count(FREE) + kinds.count(CACHED) == kv.num_free_pages
