"""Tiers: what of the prefix cache lies in host memory, on disk and in other engines, behind the
pages of the device. Keys and ints only.

device page --store--> slot of host memory --store--> record on disk
  |  ^------load-------------'                            |
  |  ^------load------------------------------------------'
  |  ^------load------ slot of another engine
  '---------store----> slot that other engines read

A content has at most one slot and one record. What is loaded stays where it was, too: it need not
be stored again. The runner moves the bytes, while steps are computed, and reports each move when it
is done; until then no slot, record or page of it is used for anything else.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Sequence
from enum import IntEnum
from itertools import takewhile

import msgspec

from tidemill.kv.costs import Costs

MISSING = 0  # no tier has it
NOWHERE = -1  # as the source of a store: what is there is erased
# to disk, under way: each keeps a slot of host memory from being used for other content
_MOST_WRITES = 16


class Tier(IntEnum):
    HOST = 1
    DISK = 2
    PEER = 3  # other engines: only loads
    EXPORT = 4  # for other engines: only stores


class PageMove(msgspec.Struct, frozen=True, gc=False):
    """A load is from a slot or a record into a page, a store from a page into a slot, or from a
    slot into a record. Of what other engines hold, a slot is known by its place."""

    number: int
    tier: Tier
    is_load: bool
    source: int
    target: int
    key: bytes  # of the content


class Moved(msgspec.Struct, frozen=True, gc=False):
    """A move is over."""

    number: int
    num_bytes: int = 0
    seconds: float = 0.0  # that the bytes took, without the time in line
    error: str = ""


class Slots:
    """Places for so many contents. The least recently used gives way to a new one."""

    def __init__(self, num: int, contents: Iterable[tuple[bytes, int]] = ()) -> None:
        """`contents`: what is there already, the least recently used first."""
        self.num = num
        self._at: OrderedDict[bytes, int] = OrderedDict(contents)
        self._content = {at: key for key, at in self._at.items()}
        self._held: Counter[int] = Counter()  # by moves under way
        self._free = [at for at in range(num - 1, -1, -1) if at not in self._content]

    def __len__(self) -> int:
        return len(self._at)

    def __contains__(self, key: bytes) -> bool:
        return key in self._at

    def find(self, key: bytes) -> int | None:
        return self._at.get(key)

    def content(self, at: int) -> bytes:
        return self._content[at]

    def put(self, key: bytes, kept: Container[bytes] = ()) -> int | None:
        """A place for new content, held. None: all are in use, or for what must be `kept`."""
        assert key not in self._at
        if not self._free:
            oldest = next(
                (
                    other
                    for other, at in self._at.items()
                    if at not in self._held and other not in kept
                ),
                None,
            )
            if oldest is None:
                return None
            for passed in list(takewhile(lambda other: other != oldest, self._at)):
                self.touch(passed)  # so that they are not looked at again soon
            self.drop(oldest)
        at = self._at[key] = self._free.pop()
        self._content[at] = key
        self._held[at] += 1
        return at

    def get(self, key: bytes) -> int:
        """The place of a content, which is then the most recently used and stays until `let_go`."""
        self.touch(key)
        self._held[self._at[key]] += 1
        return self._at[key]

    def touch(self, key: bytes) -> None:
        self._at.move_to_end(key)

    def drop(self, key: bytes, held: bool = False) -> int | None:
        """Returns where it was. `held`: it is not used for another content until `let_go`."""
        at = self._at.pop(key, None)
        if at is not None:
            del self._content[at]
            if held:
                self._held[at] += 1
            elif at not in self._held:
                self._free.append(at)
        return at

    def let_go(self, at: int) -> None:
        """A move is over."""
        self._held[at] -= 1
        if not self._held[at]:
            del self._held[at]
            if at not in self._content:  # dropped meanwhile
                self._free.append(at)

    def check_integrity(self) -> None:
        used, free = set(self._at.values()), set(self._free)
        assert self._content == {at: key for key, at in self._at.items()}
        assert len(used) == len(self._at), "two contents in one slot"
        assert len(free) == len(self._free), "a slot is free twice"
        assert not free & (used | set(self._held)), "a slot in use is free"
        assert used | free | set(self._held) == set(range(self.num)), "a slot is lost"
        assert all(num > 0 for num in self._held.values())


class Peers:
    """The pages that other engines have announced. A page may be gone when it is asked for."""

    def __init__(self) -> None:
        self._at: dict[bytes, int] = {}
        self._content: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._at)

    def find(self, key: bytes) -> int | None:
        return self._at.get(key)

    def content(self, at: int) -> bytes:
        return self._content[at]

    def get(self, key: bytes) -> int:
        return self._at[key]

    def learn(self, at: int, key: bytes) -> bytes:
        """A place holds this content now; empty: nothing. Of several with one content, the latest
        is asked. Returns what was there before."""
        before = self._content.pop(at, b"")
        if self._at.get(before) == at:
            del self._at[before]
        if key:
            self._content[at] = key
            self._at[key] = at
        return before

    def drop(self, key: bytes) -> None:
        at = self._at.pop(key, None)
        if at is not None:
            del self._content[at]

    def let_go(self, at: int) -> None:
        """A load is over."""

    def check_integrity(self) -> None:
        assert all(self._content[at] == key for key, at in self._at.items())


class Tiers:
    """Host memory and, behind it, disk and other engines. A place is a negative int: slots first,
    then records, then theirs."""

    num_skipped = 1000  # contents that are not written after one could not be

    def __init__(
        self,
        num_slots: int,
        num_records: int = 0,
        on_disk: Iterable[tuple[bytes, int]] = (),
        costs: Costs | None = None,
        page_bytes: int = 0,
        num_exports: int = 0,
    ) -> None:
        """`on_disk`: contents and their records, the oldest first. `num_exports`: slots that other
        engines read."""
        self.host = Slots(num_slots)
        self.disk = Slots(num_records, on_disk)
        self.peers = Peers()
        self.exports = Slots(num_exports)
        self.costs = costs or Costs()
        self.page_bytes = page_bytes
        self.num_lost = 0  # contents that found no slot
        self._unsent: list[PageMove] = []
        self._under_way: dict[int, PageMove] = {}
        # of slots, not trusted yet: move, and step before which it was computed
        self._stored: dict[bytes, tuple[int, int]] = {}
        # in a slot, trusted, and not on disk
        self._unwritten: OrderedDict[bytes, None] = OrderedDict()
        # content of sequences that were preempted and will come back
        self._kept: Counter[bytes] = Counter()
        self._num_writes = 0
        self._num_to_skip = 0  # contents, since the disk takes none now
        self._next_number = 0
        self.num_trusted = 0  # steps
        self.num_exporting = 0  # stores under way

    # ---- the interface: find, put, get, drop

    def find(self, key: bytes) -> int:
        """Its place, or MISSING."""
        at = self.host.find(key)
        if at is not None:
            return -1 - at
        at = self.disk.find(key)
        if at is not None:
            return -1 - self.host.num - at
        at = self.peers.find(key)
        return MISSING if at is None else -1 - self.host.num - self.disk.num - at

    def key_at(self, place: int) -> bytes:
        at = -1 - place
        if at < self.host.num:
            return self.host.content(at)
        at -= self.host.num
        return (
            self.disk.content(at) if at < self.disk.num else self.peers.content(at - self.disk.num)
        )

    def tier_of(self, place: int) -> Tier:
        if -place <= self.host.num:
            return Tier.HOST
        return Tier.DISK if -place <= self.host.num + self.disk.num else Tier.PEER

    def put(self, key: bytes, page: int, step: int) -> bool:
        """A page is about to be overwritten: store it. `step`: before which it was computed. False:
        no slot is free."""
        if key in self.host:
            self.host.touch(key)
            return True
        slot = self.host.put(key, self._kept)
        if slot is None:
            self.num_lost += 1
            return False
        self._unwritten.pop(key, None)
        self._stored[key] = self._move(Tier.HOST, False, page, slot, key), step
        return True

    def get(self, key: bytes) -> Tier:
        """Its content is to be loaded: until then it stays where it is."""
        tier = self.tier_of(self.find(key))
        self._tier(tier).get(key)
        return tier

    def load(self, key: bytes, tier: Tier, page: int) -> None:
        """Into a page, after `get`."""
        at = self._tier(tier).find(key)
        assert at is not None
        self._move(tier, True, at, page, key)

    def drop(self, key: bytes) -> None:
        """The content is worthless: also what is on disk is erased."""
        self.host.drop(key)
        self._stored.pop(key, None)
        self._unwritten.pop(key, None)
        record = self.disk.drop(key, held=True)
        if record is not None:
            self._move(Tier.DISK, False, NOWHERE, record, key)
        self.peers.drop(key)
        slot = self.exports.drop(key, held=True)
        if slot is not None:
            self._move(Tier.EXPORT, False, NOWHERE, slot, key)

    # ---- other engines

    def export(self, key: bytes, page: int) -> None:
        """A page that is computed goes where other engines find it, unless it is there."""
        slot = None if key in self.exports else self.exports.put(key)
        if slot is not None:
            self.num_exporting += 1
            self._move(Tier.EXPORT, False, page, slot, key)

    @property
    def exporting(self) -> set[bytes]:
        """Contents with such a move under way."""
        if not self.num_exporting:
            return set()
        return {
            move.key
            for move in self._under_way.values()
            if move.tier is Tier.EXPORT and move.source != NOWHERE
        }

    # ---- sequences that were preempted

    def keep(self, keys: Sequence[bytes]) -> bool:
        """Content that a preempted sequence will need. False: more than half of the slots would be
        kept."""
        if len(self._kept) + len(keys) > self.host.num // 2:
            return False
        self._kept.update(keys)
        return True

    def keep_no_longer(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._kept[key] -= 1
            if not self._kept[key]:
                del self._kept[key]

    # ---- moves

    @property
    def num_moves(self) -> int:
        """Under way or to come."""
        return len(self._under_way) + len(self._unwritten)

    @property
    def is_busy(self) -> bool:
        """Moves are under way or to come."""
        return self.num_moves > 0

    def take_moves(self) -> list[PageMove]:
        """The moves that the runner is to make now."""
        self._write_some()
        taken, self._unsent = self._unsent, []
        return taken

    def moved(self, done: Moved) -> PageMove:
        """The runner has made a move, or has failed to."""
        move = self._under_way.pop(done.number)
        tier, at = self._tier(move.tier), move.source if move.is_load else move.target
        if done.error:
            if tier.find(move.key) == at:
                tier.drop(move.key)
            if self._stored.get(move.key, (-1, 0))[0] == move.number:
                del self._stored[move.key]
            if move.tier is Tier.DISK and not move.is_load:
                self._num_to_skip = self.num_skipped
                self._unwritten.clear()
        elif move.source != NOWHERE:
            self.costs.moved(move.tier, move.is_load, done.num_bytes, done.seconds)
        tier.let_go(at)
        if move.tier is Tier.EXPORT and move.source != NOWHERE:
            self.num_exporting -= 1
        if move.tier is Tier.HOST:
            self._may_write(move.key)
        elif move.tier is Tier.DISK and not move.is_load and move.source != NOWHERE:
            self._num_writes -= 1
            self.host.let_go(move.source)
        return move

    def trust(self, num_steps: int) -> None:
        """Trusts the first `num_steps` steps, which were computed without a failure."""
        self.num_trusted = num_steps
        for key in list(self._stored):
            self._may_write(key)

    def fail(self) -> None:
        """A step has failed: what it computed is worthless, and a move that was not reported never
        began."""
        for key in [key for key, (_, step) in self._stored.items() if step > self.num_trusted]:
            self.drop(key)
        self._unsent = [move for move in self._under_way.values() if move.source == NOWHERE]
        for move in list(self._under_way.values()):
            if move.source != NOWHERE:
                self.moved(Moved(move.number, error="a step failed"))

    # ---- inside

    def _tier(self, tier: Tier) -> Slots | Peers:
        return (self.host, self.disk, self.peers, self.exports)[tier - 1]

    def _move(self, tier: Tier, is_load: bool, source: int, target: int, key: bytes) -> int:
        move = self._under_way[self._next_number] = PageMove(
            self._next_number, tier, is_load, source, target, key
        )
        self._unsent.append(move)
        self._next_number += 1
        return move.number

    def _may_write(self, key: bytes) -> None:
        """To disk, if it is trusted and in its slot by now."""
        number, step = self._stored.get(key, (0, self.num_trusted + 1))
        if step <= self.num_trusted and number not in self._under_way:
            del self._stored[key]
            if self._num_to_skip:
                self._num_to_skip -= 1
            elif self.disk.num and key in self.host and key not in self.disk:
                self._unwritten[key] = None

    def _write_some(self) -> None:
        """Few at a time: each keeps its slot in use."""
        while self._unwritten and self._num_writes < min(_MOST_WRITES, max(1, self.host.num // 4)):
            key, _ = self._unwritten.popitem(last=False)
            record = self.disk.put(key) if key in self.host and key not in self.disk else None
            if record is not None:
                self._num_writes += 1
                self._move(Tier.DISK, False, self.host.get(key), record, key)

    def check_integrity(self) -> None:
        self.host.check_integrity()
        self.disk.check_integrity()
        self.peers.check_integrity()
        self.exports.check_integrity()
        assert {move.number for move in self._unsent} <= self._under_way.keys()
        assert not self._unwritten.keys() & self._stored.keys()
