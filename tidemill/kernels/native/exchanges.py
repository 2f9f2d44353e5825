"""Rows of a step that are divided among ranks, and what they exchange so that each has all rows of
some columns (group.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

_LONG, _POINTER = ctypes.c_long, ctypes.c_void_p


class ExchangeSpec(ctypes.Structure):
    """tm_exchange of tidemill.h."""

    _fields_ = [
        ("group", _POINTER),
        *((name, _LONG) for name in ("width", "num_runs", "own_width")),
        *((name, _POINTER) for name in ("firsts", "lens", "widths")),
    ]


class Exchange:
    """An exchange of matrices [rows, width]: the columns of this rank, as runs (first, how many);
    or, back again, how many each rank has."""

    def __init__(
        self,
        group: int,
        rank: int,
        runs: Sequence[tuple[int, int]],
        widths: Sequence[int],
        width: int,
    ) -> None:
        """`group`: the address of a GroupSpec. `width`: of all columns."""
        self._kept = [
            (_LONG * len(numbers))(*numbers) for numbers in (*zip(*runs, strict=True), widths)
        ]
        self.own_width, self.width = sum(num for _, num in runs), width
        self._spec = ExchangeSpec(
            group, width, len(runs), self.own_width, *map(ctypes.addressof, self._kept)
        )
        self.address = ctypes.addressof(self._spec)
