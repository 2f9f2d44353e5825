"""The routing policy: few keys move, loads are bounded, conversations stay where their prefix is."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.sched.placement import MAX_BLOCKS, Placement, hash_of, prefix_keys

NAMES = st.lists(
    st.text("abcdef:/0123456789", min_size=1, max_size=20), min_size=2, max_size=12, unique=True
)


def idle(names: list[str]) -> dict[str, int]:
    return dict.fromkeys(names, 0)


@settings(max_examples=30, deadline=None)
@given(NAMES, st.integers(0, 2**32))
def test_only_keys_of_a_removed_replica_move(names, seed):
    anchors = [hash_of(b"%d" % (seed + i)) for i in range(300)]
    placement = Placement()
    before = {anchor: placement.choose([], idle(names), anchor).name for anchor in anchors}
    gone = names[0]
    for anchor, was in before.items():
        now = placement.choose([], idle(names[1:]), anchor).name
        assert now == was or was == gone
    counts = Counter(before.values())
    # no replica has much more than its share
    assert max(counts.values()) < 300 * 3 / len(names) + 30


@settings(max_examples=30, deadline=None)
@given(NAMES, st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=200))
def test_loads_are_bounded_whatever_comes(names, steps):
    """All requests may be for one hot prefix, and end in any order."""
    placement, loads, under_way = Placement(slack=2), idle(names), []
    for which, ends_one in steps:
        if ends_one and under_way:
            loads[under_way.pop(which % len(under_way))] -= 1
            continue
        keys = prefix_keys(b"", bytes([which]) * 1024, 256)
        limit, chosen = placement.limit(loads), placement.choose(keys, loads)
        placement.note(chosen.name, keys)
        loads[chosen.name] += 1
        under_way.append(chosen.name)
        assert loads[chosen.name] <= limit
        assert limit <= 1.25 * sum(loads.values()) / len(names) + 3


def test_turns_of_a_conversation_follow_their_prefix_also_after_a_spill():
    placement, names = Placement(), ["a", "b", "c"]
    text = b"system" * 400
    first = placement.choose(prefix_keys(b"", text, 256), idle(names), anchor=1).name
    busy = idle(names) | {first: 50}
    spilled = placement.choose(prefix_keys(b"", text, 256), busy, anchor=1)
    assert spilled.name != first
    assert "passed over" in spilled.reason
    placement.note(spilled.name, prefix_keys(b"", text, 256))
    following = placement.choose(prefix_keys(b"", text + b"more" * 300, 256), idle(names), anchor=1)
    assert (following.name, following.num_known) == (spilled.name, len(text) // 256)
    placement.forget(spilled.name)
    assert placement.choose(prefix_keys(b"", text, 256), idle(names), anchor=1).name == first


def test_short_common_prefix_does_not_gather_all_conversations():
    """A system prompt is a small part of each: computing it once on every replica costs less than a
    cache that is not used."""
    placement, names, chance = Placement(), ["a", "b", "c", "d"], random.Random(0)
    counts = Counter[str]()
    for _ in range(400):
        keys = prefix_keys(b"", b"s" * 256 + chance.randbytes(4096), 256)
        chosen = placement.choose(keys, idle(names)).name
        placement.note(chosen, keys)
        counts[chosen] += 1
    assert min(counts.values()) > 50


def test_new_prompts_fill_all_caches_alike():
    """Some are a hundred times as long as others: the cache of whoever gets those would forget the
    sooner."""
    placement, names, chance = Placement(), ["a", "b", "c", "d"], random.Random(3)
    got, shares = Counter(), []
    for number in range(1500):
        keys = prefix_keys(
            b"%d" % number, bytes(256 * int(chance.paretovariate(0.8)) % 100_000), 256
        )
        name = placement.choose(keys, idle(names)).name
        placement.note(name, keys)
        got[name] += len(keys)
        if number % 300 == 299:
            shares += [num * 4 / sum(got.values()) for num in got.values()]
            got.clear()
    assert max(shares) < 1.5, shares


def test_roots_blocks_and_memory_are_bounded_and_separate():
    text = random.Random(1).randbytes(MAX_BLOCKS * 64 + 640)
    keys = prefix_keys(b"model", text, 64)
    assert len(keys) == len(set(keys)) == MAX_BLOCKS
    assert not set(keys) & set(prefix_keys(b"other", text, 64))
    changed = prefix_keys(b"model", text[:100] + b"?" + text[101:], 64)
    assert changed[0] == keys[0]
    assert not set(changed[1:]) & set(keys)
    placement = Placement(max_keys=100)
    placement.note("a", keys)
    assert len(placement) == 100
    # the deepest are forgotten first
    assert placement.choose(keys[:10], {"a": 0, "b": 0}).num_known == 10
