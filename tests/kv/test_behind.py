"""What the KV manager keeps of contents in other engines."""

from tidemill.kv.behind import Behind
from tidemill.kv.holds import Held
from tidemill.kv.manager import KVManager
from tidemill.kv.pages import PagePool
from tidemill.kv.prefix import HashIndex
from tidemill.kv.tiers import Moved, Tiers


def test_what_is_erased_is_not_announced_any_more():
    behind = Behind(Tiers(0, 0, [], page_bytes=100), HashIndex(16, []), PagePool(4))
    for i in range(10):
        key = bytes([i]) * 32
        behind.learn([(5, key)])
        behind.drop_content(key)
    behind.learn([(5, b"k" * 32)])
    assert list(behind.announced) == [b"k" * 32]
    behind.check_integrity()


def test_a_pin_takes_the_page_that_was_computed_and_not_one_that_is_still_loading():
    tokens = list(range(16))
    kv = KVManager(20, 16, tiers=Tiers(0, 0, [], page_bytes=100))
    (key,) = kv.behind.contents(kv.path([*tokens, 0]))
    kv.offload.learn([(5, key)])
    kv.offload.fetch_announced()
    assert kv.offload.num_loading == 1
    # the last token must be computed, so its page is not looked for
    start = kv.admit(1, len(tokens), kv.path(tokens))
    assert start.num_cached == 0
    kv.record(1, tokens, len(tokens))
    assert kv.hold(1, tokens, Held("a", "", len(tokens), (), 1.0, is_pinned=True)) == ("", [])
    assert [*kv.held.get("a").pages] == [*kv.tables(1)[0]]
    (move,) = kv.offload.take_moves()
    kv.offload.moved([Moved(move.number, 100, 0.1, "the other engine is gone")])
    kv.check_integrity()
    assert kv.num_cached(kv.path([*tokens, 0])) == 16
