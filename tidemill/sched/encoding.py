"""EncoderOutputs: the rows of embeddings that the runner holds for segments of prompts, and who
needs them.

A segment's rows are made in the step that computes its first tokens, before them. They stay until
all of its tokens are computed, and after that until others need the room: the same picture in the
next request is not encoded again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from tidemill.sched.pages import Pages
from tidemill.sched.plan import Encode, RowInput
from tidemill.sched.request import Request
from tidemill.types.inputs import Segment, overlapping, uncut


@dataclass(slots=True)
class _Entry:
    rows: list[int]
    # by seq and where their segments start
    users: set[tuple[int, int]] = field(default_factory=set)


class EncoderOutputs:
    """Named by keys of segments. Rows are numbered from 1 on."""

    def __init__(self, num_rows: int, budget: int, pages: Pages) -> None:
        """`budget`: rows that are made in a step, or those of one segment that has more."""
        self._num_rows, self._budget, self._pages = num_rows, budget, pages
        self._free = list(range(num_rows, 0, -1))
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the least recently used first
        # by seq: keys of segments, and their starts
        self._used_by: dict[int, set[tuple[bytes, int]]] = {}
        self._passed: list[tuple[int, Segment]] = []  # whose last token is in the step before
        self._num_left = budget

    def begin_step(self) -> None:
        """Begins a step: what the last one read may be written over."""
        self._num_left = self._budget
        for seq, segment in self._passed:
            self._let_go(seq, segment.key, segment.start)
        self._passed.clear()

    def until(self, request: Request, count: int) -> int:
        """The number of its next tokens, of so many, that the step can compute: segments that must
        be are whole, and rows are there or are made in this step."""
        start, segments = request.num_computed, request.spec.segments
        end = uncut(segments, start + count)
        inside = [each for each in overlapping(segments, start, end) if each.has_rows]
        for segment in inside:
            if not self._take(request, segment):
                end = max(segment.start, start)
                break
        self._passed += [(request.seq, each) for each in inside if each.end <= end]
        return end - start

    def _take(self, request: Request, segment: Segment) -> bool:
        """Holds the segment's rows for the request; False: they cannot be made in this step."""
        entry = self._entries.get(segment.key)
        if entry is None:
            rows = self._new_rows(segment.length)
            if not rows:
                return False
            entry = self._entries[segment.key] = _Entry(rows)
            self._pages.pending.encodes.append(
                Encode(segment.kind, request.spec.contents[segment.key], rows)
            )
        self._entries.move_to_end(segment.key)
        user = request.seq, segment.start
        if user not in entry.users:
            entry.users.add(user)
            self._used_by.setdefault(request.seq, set()).add((segment.key, segment.start))
            inputs = self._pages.pending.row_inputs.setdefault(request.row, [])
            inputs.append(RowInput(request.row, segment.start, entry.rows))
        return True

    def _new_rows(self, num: int) -> list[int]:
        """None, if the step makes enough without them, or too many are in use."""
        if num > self._num_left and self._num_left < self._budget:
            return []
        while len(self._free) < num:
            unused = next((key for key, entry in self._entries.items() if not entry.users), None)
            if unused is None:
                return []
            self._free += self._entries.pop(unused).rows
        self._num_left -= num
        return [self._free.pop() for _ in range(num)]

    def release(self, seq: int) -> None:
        """The request has left its row."""
        for key, start in list(self._used_by.get(seq, ())):
            self._let_go(seq, key, start)

    def _let_go(self, seq: int, key: bytes, start: int) -> None:
        used = self._used_by.get(seq)
        if used is None or (key, start) not in used:
            return
        used.remove((key, start))
        if not used:
            del self._used_by[seq]
        self._entries[key].users.remove((seq, start))

    def clear(self) -> None:
        """Nothing that was made can be trusted, and no request is in a row."""
        self._free = list(range(self._num_rows, 0, -1))
        self._entries.clear()
        self._used_by.clear()
        self._passed.clear()
        self._pages.pending.encodes.clear()

    def check_integrity(self) -> None:
        rows = [row for entry in self._entries.values() for row in entry.rows]
        assert sorted(rows + self._free) == list(range(1, self._num_rows + 1)), (
            "a row is lost or taken twice"
        )
        users = {(seq, key, start) for seq, used in self._used_by.items() for key, start in used}
        assert users == {
            (seq, key, start) for key, entry in self._entries.items() for seq, start in entry.users
        }
