"""The places of many units of weights, such as experts, in few slots of memory.

Units that are used often stay. The others share a few transient slots, as many as were needed at
once: so units that are used equally often, each in its turn, do not push each other out before
their turn comes again. One in a transient slot that is used clearly more often than one that stays
changes places with it. As in kernels/native/stream.c, which reads from disk.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# uses of a unit, on average, after which all counts are halved: what was hot long ago may cool down
_HALVE_AFTER = 64
_FEW_CANDIDATES = 4
# after so many guesses, less than half of them right, there are none for so many requests
_GUESSES, _PAUSE = 128, 1024


class Places:
    def __init__(self, num_units: int, num_slots: int) -> None:
        self.where = np.full(num_units, -1, np.int32)  # of each unit: its slot; -1: in none
        self.in_slot = np.full(num_slots, -1, np.int32)  # the unit that is there, or on its way
        self._uses, self._used_at = np.zeros(num_units, np.int64), np.full(num_units, -1, np.int64)
        self._most_missed = 0  # by one request
        # since guesses were last judged
        self._num_guessed = self._num_right = self._pause_until = 0
        self._foreseen: set[int] = set()  # brought ahead of use, and not used since
        self._transients: list[int] = []
        self._number_of: dict[int, int] = {}  # of a transient slot, among them
        self._next = self._hand = self._num_filled = self._num_requests = self._num_uses = 0
        # units that were used, and those of them that were in no slot
        self.num_asked = self.num_missed = 0
        # that were brought, and those of them that were brought ahead, and used
        self.num_read = self.num_foreseen = 0

    def need(self, units: Sequence[int]) -> list[int]:
        """These units are used now, all at once. Returns those that must be brought to where they
        are from now on. There must be a slot for each."""
        self._num_requests += 1
        self.num_asked += len(units)
        self._used_at[units] = self._num_requests
        self._count(units)
        right = self._foreseen.intersection(units)
        self.num_foreseen += len(right)
        self._num_right += len(right)
        self._foreseen -= right
        missing = []
        for unit in units:
            if self.where[unit] >= 0:
                self._promote(unit)
                continue
            slot = self._find_slot(len(self.in_slot))
            assert slot is not None, "more units are needed at once than there are slots"
            self._fill(slot, unit)
            missing.append(unit)
        self.num_missed += len(missing)
        self._most_missed = max(self._most_missed, len(missing))
        return missing

    def ahead(self, units: Sequence[int]) -> list[int]:
        """These units may be used next. Returns those that are to be brought, as far as there are
        slots that are not in use: for guesses, there may be twice as many transient slots as were
        needed, but no more than half of all."""
        if not self._guesses_well():
            return []
        self._used_at[units] = self._num_requests
        missing = []
        for unit in units:
            if self.where[unit] >= 0:
                continue
            slot = self._find_slot(min(2 * self._most_missed, len(self.in_slot) // 2))
            if slot is None:
                break
            self._fill(slot, unit)
            self._foreseen.add(unit)
            missing.append(unit)
        self._num_guessed += len(missing)
        return missing

    def _guesses_well(self) -> bool:
        """Bringing what nobody needs takes the way from what is needed."""
        if self._num_guessed >= _GUESSES:
            if 2 * self._num_right < self._num_guessed:
                self._pause_until = self._num_requests + _PAUSE
            self._num_guessed = self._num_right = 0
        return self._num_requests >= self._pause_until

    def _count(self, units: Sequence[int]) -> None:
        self._uses[units] += 1
        self._num_uses += len(units)
        if self._num_uses >= _HALVE_AFTER * len(self._uses):
            self._num_uses = 0
            self._uses //= 2

    def _fill(self, slot: int, unit: int) -> None:
        if self.in_slot[slot] >= 0:
            self.where[self.in_slot[slot]] = -1
            self._foreseen.discard(int(self.in_slot[slot]))
        self.in_slot[slot], self.where[unit] = unit, slot
        self.num_read += 1

    def _is_free(self, slot: int) -> bool:
        return bool(self._used_at[self.in_slot[slot]] != self._num_requests)

    def _find_slot(self, most_transients: int) -> int | None:
        """Finds a slot for a unit that is in none; None: all are in use, or stay. One that stays
        makes room while there are fewer transient slots than so many."""
        if self._num_filled < len(self.in_slot):
            self._num_filled += 1
            return self._num_filled - 1
        for _ in self._transients:
            self._next = (self._next + 1) % len(self._transients)
            if self._is_free(self._transients[self._next]):
                return self._transients[self._next]
        slot = self._coldest() if len(self._transients) < most_transients else None
        if slot is not None:
            self._number_of[slot] = len(self._transients)
            self._transients.append(slot)
        return slot

    def _coldest(self) -> int | None:
        """The slot that stays whose unit was used least often."""
        uses = self._uses[self.in_slot]
        uses[self._used_at[self.in_slot] == self._num_requests] = np.iinfo(np.int64).max
        uses[self._transients] = np.iinfo(np.int64).max
        slot = int(uses.argmin())
        return slot if uses[slot] < np.iinfo(np.int64).max else None

    def _promote(self, unit: int) -> None:
        slot = int(self.where[unit])
        number = self._number_of.get(slot)
        if number is None:
            return
        for _ in range(_FEW_CANDIDATES):  # of those that stay, some in turn
            self._hand = other = (self._hand + 1) % len(self.in_slot)
            is_stable = other not in self._number_of and self._is_free(other)
            if is_stable and self._uses[unit] > self._uses[self.in_slot[other]] * 5 // 4 + 2:
                self._number_of[other] = self._number_of.pop(slot)
                self._transients[number] = other
                return
