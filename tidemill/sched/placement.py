"""Placement: which of several replicas gets a request. Ints and strings only; loads are passed in.

A request is known by the keys of its prefix: chained hashes of its leading blocks (`prefix_keys`).
It goes to the replica that has computed the longest prefix of it, if that is a large part of the
prompt. Otherwise consistent hashing says where it goes: every replica has a rank for every key, and
adding or removing a replica moves only the keys that rank it first. Either way a replica that has
more than its share of the requests under way is passed over: the next in rank takes the request. So
is, for prompts that none has, one that got more than its share of the latest blocks: its cache
would forget sooner than the others do.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple

MAX_BLOCKS = 512  # of a request; what comes after them does not matter
MAX_KEYS = 2**17  # remembered
_RECENT = 1000  # blocks, of all replicas, after which one counts half
_SPARE = 16  # blocks that a replica may have got beyond its share
_MAX_WEIGHT = 1e12
_MASK = 2**64 - 1


def hash_of(*parts: bytes) -> int:
    """64 bits, the same in every process."""
    return int.from_bytes(sha256(b"\0".join(parts)).digest()[:8], "little")


def prefix_keys(root: bytes, prompt: bytes, block_bytes: int, most: int = MAX_BLOCKS) -> list[int]:
    """A key for each whole block of a prompt: of the block and all before it; of the first `most`.
    `root`: what prompts must have in common to share a cache, such as the model and the tenant."""
    hashed, blocks, keys = sha256(b"%d\0" % len(root) + root), memoryview(prompt), []
    for start in range(0, min(len(prompt) // block_bytes, most) * block_bytes, block_bytes):
        hashed.update(blocks[start : start + block_bytes])
        keys.append(int.from_bytes(hashed.digest()[:8], "little"))
    return keys


class Choice(NamedTuple):
    name: str
    num_known: int  # leading blocks that the replica has computed
    reason: str


class Placement:
    """`choose`, then `note` where the request went."""

    def __init__(
        self, max_keys: int = MAX_KEYS, spread: float = 1.25, slack: int = 4, worth: float = 0.1
    ) -> None:
        """`spread`, `slack`: a replica may have so many times the mean load, and so many requests
        more. `worth`: the part of the prompt's blocks that a replica must have computed to be
        preferred for it."""
        self._max_keys, self._spread, self._slack, self._worth = max_keys, spread, slack, worth
        self._bits: dict[str, int] = {}
        self._num_bits = 0
        self._seeds: dict[str, int] = {}
        self._recent: dict[str, float] = {}  # blocks that a replica got of late, times `_weight`
        # of a block that comes now: it grows, so that what came before counts less
        self._weight = 1.0
        # a key: the bits of the replicas that have computed it
        self._holders: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        """Keys that are remembered."""
        return len(self._holders)

    def limit(self, loads: Mapping[str, int]) -> int:
        """The most requests that a replica may have under way after it gets the next one."""
        return math.ceil(self._spread * (sum(loads.values()) + 1) / len(loads)) + self._slack

    def choose(
        self, keys: Sequence[int], loads: Mapping[str, int], anchor: int | None = None
    ) -> Choice:
        """`loads`: the requests under way of each replica that may be chosen. `anchor`: what is
        hashed where no replica has computed enough of the prompt: the same for all requests of a
        conversation. None: the first block that none has computed."""
        assert loads
        limit = self.limit(loads)
        known, num_known = self._known(keys, loads)
        if num_known and num_known >= self._worth * len(keys):
            best = min(
                known, key=lambda name: (loads[name], -self._rank(name, keys[num_known - 1]))
            )
            if loads[best] < limit:
                return Choice(best, num_known, f"it has computed {num_known} of {len(keys)} blocks")
        if anchor is None:
            anchor = keys[min(num_known, len(keys) - 1)] if keys else None
        if anchor is None:
            return Choice(min(loads, key=lambda name: (loads[name], name)), 0, "least load")
        ranked = sorted(loads, key=lambda name: self._rank(name, anchor), reverse=True)
        most = (
            self._spread * sum(self._recent.get(name, 0.0) for name in loads) / len(loads)
            + _SPARE * self._weight
        )
        # the least loaded is below the mean
        free = [name for name in ranked if loads[name] < limit]
        chosen = next((name for name in free if self._recent.get(name, 0.0) <= most), free[0])
        passed = ranked.index(chosen)
        return Choice(
            chosen,
            num_known if chosen in known else 0,
            f"{passed} busier ones passed over" if passed else "hashed",
        )

    def ranked(self, anchor: int, names: Sequence[str]) -> list[str]:
        """In the order in which consistent hashing prefers them, whatever their load."""
        return sorted(names, key=lambda name: self._rank(name, anchor), reverse=True)

    def note(self, name: str, keys: Sequence[int]) -> None:
        """The replica computes these."""
        bit = self._bits.get(name)
        if bit is None:
            bit, self._num_bits = 1 << self._num_bits, self._num_bits + 1
            self._bits[name] = bit
        self._weight *= 2.0 ** (len(keys) / _RECENT)
        self._recent[name] = self._recent.get(name, 0.0) + len(keys) * self._weight
        if self._weight > _MAX_WEIGHT:
            self._recent = {other: num / self._weight for other, num in self._recent.items()}
            self._weight = 1.0
        for key in reversed(keys):  # the first block is forgotten last
            self._holders[key] = self._holders.pop(key, 0) | bit
        while len(self._holders) > self._max_keys:
            self._holders.popitem(last=False)

    def forget(self, name: str) -> None:
        """Its cache is empty, or it is gone."""
        self._bits.pop(name, None)
        self._seeds.pop(name, None)
        self._recent.pop(name, None)

    def _known(self, keys: Sequence[int], loads: Mapping[str, int]) -> tuple[list[str], int]:
        """The replicas that have computed the longest prefix, and how many blocks that is."""
        bits = {self._bits[name]: name for name in loads if name in self._bits}
        mask = sum(bits)
        for num in range(len(keys), 0, -1):
            if found := self._holders.get(keys[num - 1], 0) & mask:
                return [name for bit, name in bits.items() if bit & found], num
        return [], 0

    def _rank(self, name: str, key: int) -> int:
        """The rank of a key, by a random function of both."""
        seed = self._seeds.get(name)
        if seed is None:
            seed = self._seeds[name] = hash_of(name.encode())
        mixed = (key ^ seed) * 0xBF58476D1CE4E5B9 & _MASK
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
        return mixed ^ mixed >> 31
