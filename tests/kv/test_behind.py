"""What the KV manager keeps of contents in other engines."""

from tidemill.kv.behind import Behind
from tidemill.kv.pages import PagePool
from tidemill.kv.prefix import HashIndex
from tidemill.kv.tiers import Tiers


def test_what_is_erased_is_not_announced_any_more():
    behind = Behind(Tiers(0, 0, [], page_bytes=100), HashIndex(16, []), PagePool(4))
    for i in range(10):
        key = bytes([i]) * 32
        behind.learn([(5, key)])
        behind.drop_content(key)
    behind.learn([(5, b"k" * 32)])
    assert list(behind._announced) == [b"k" * 32]
    behind.check_integrity()
