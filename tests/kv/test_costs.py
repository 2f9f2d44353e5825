"""Which of two ways back is faster, by what was measured."""

import random

from tidemill.kv.behind import Behind
from tidemill.kv.costs import Costs
from tidemill.kv.manager import KVManager
from tidemill.kv.tiers import Moved, Tier, Tiers
from tidemill.sched.clock import VirtualClock


class World:
    """A machine with costs of its own, which it shows only by what things take, give or take a
    fifth."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.clock = chance, VirtualClock()
        self.start_s, self.token_s = (
            10 ** chance.uniform(-4, -1.5),
            10 ** chance.uniform(-5.5, -2.5),
        )
        self.rate = 10 ** chance.uniform(7, 11)

    def timed(self, seconds: float) -> float:
        began = self.clock.now()
        self.clock.advance(seconds * self.chance.uniform(0.8, 1.2))
        return self.clock.now() - began

    def compute(self, num_tokens: int, at_once: int) -> float:
        return sum(
            self.timed(self.start_s + min(at_once, num_tokens - first) * self.token_s)
            for first in range(0, num_tokens, at_once)
        )

    def move(self, num_bytes: float) -> float:
        return self.timed(num_bytes / self.rate)


def test_the_chosen_way_is_the_faster_one():
    chance, num_right, num_swaps, num_cases = random.Random(0), 0, 0, 400
    for _ in range(num_cases):
        world, at_once, page_bytes = (
            World(chance),
            chance.choice([64, 256, 2048]),
            16 * 10 ** chance.randrange(3, 6),
        )
        costs = Costs(at_once)
        for _ in range(30):
            num = chance.choice([1, chance.randrange(1, 32), chance.randrange(1, at_once + 1)])
            costs.computed(num, world.compute(num, at_once))
            for is_load in (False, True):
                costs.moved(Tier.HOST, is_load, page_bytes, world.move(page_bytes))
        num_pages = chance.randrange(1, 80)
        kv = KVManager(
            num_pages + 2, 16, tiers=Tiers(4 * num_pages, costs=costs, page_bytes=page_bytes)
        )
        tokens = list(range(16 * num_pages + 1))
        kv.admit(0, len(tokens), kv.path(tokens))
        kv.record(0, tokens, len(tokens))
        leaving = kv.preempt(0)
        swap_s = world.move(num_pages * page_bytes) + world.move(num_pages * page_bytes)
        compute_s = world.compute(16 * num_pages, at_once)
        num_right += leaving.is_swap == (swap_s <= compute_s)
        num_swaps += leaving.is_swap
    assert num_right >= 0.9 * num_cases, num_right
    assert 0.1 * num_cases < num_swaps < 0.9 * num_cases


def manager(rate: float, token_s: float) -> KVManager:
    """Sequence 0 has filled the pool and is gone; all but one of its pages are in host memory."""
    costs = Costs(256)
    kv = KVManager(6, 4, tiers=Tiers(8, costs=costs, page_bytes=1000))
    kv.admit(0, 17, kv.path(range(17)))
    kv.record(0, range(17), 17)
    kv.release(0)
    kv.admit(1, 16, kv.path([99] * 17))
    for move in kv.offload.take_moves():
        kv.offload.moved([Moved(move.number, 1000, 1000 / rate)])
    kv.release(1)
    costs.computed(100, 100 * token_s)
    return kv


def test_what_is_faster_computed_is_not_loaded():
    fast = manager(rate=1e9, token_s=1e-3)
    assert fast.num_cached(fast.path(range(17))) == 16
    slow = manager(rate=1e3, token_s=1e-3)
    assert slow.num_cached(slow.path(range(17))) < 16


def test_what_is_faster_computed_is_not_stored():
    kv = manager(rate=1e3, token_s=1e-3)
    kv.admit(2, 8, kv.path([5] * 9))
    kv.record(2, [5] * 9, 8)
    assert not kv.preempt(2).is_swap
    assert kv.admit(3, 20, kv.path([6] * 21)) is not None
    assert not any(kv.offload.tiers.host.find(key) is not None for key in kv.path([5] * 9).keys)
    kv.check_integrity()


def test_a_swap_keeps_its_pages_in_host_memory():
    """Others that come and go do not push them out."""
    kv = KVManager(6, 4, tiers=Tiers(8, page_bytes=1000))
    kv.admit(0, 17, kv.path(range(17)))
    kv.record(0, range(17), 17)
    assert kv.preempt(0).is_swap
    for seq in range(1, 10):
        kv.admit(seq, 17, kv.path([seq] * 17))
        kv.record(seq, [seq] * 17, 17)
        kv.release(seq)
        kv.offload.moved([Moved(move.number, 1000, 0.1) for move in kv.offload.take_moves()])
        kv.check_integrity()
    assert kv.num_cached(kv.path(range(17))) == 16
    start = kv.admit(0, 17, kv.path(range(17)))
    assert start.num_host == 16
    assert kv.offload.is_loading(0)
    kv.offload.moved([Moved(move.number, 1000, 0.1) for move in kv.offload.take_moves()])
    assert not kv.offload.is_loading(0)
    assert isinstance(kv.behind, Behind)
    assert not kv.offload.tiers._kept
