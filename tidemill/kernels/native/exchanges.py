"""Rows of a step that are divided among ranks, and what they exchange so that each has all rows of some columns (group.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from tidemill.kernels.native.program import Recording

_LONG, _POINTER = ctypes.c_long, ctypes.c_void_p


class ExchangeSpec(ctypes.Structure):
    """tm_exchange of tidemill.h."""

    _fields_ = [
        ("group", _POINTER),
        *((name, _LONG) for name in ("width", "num_runs", "own_width")),
        *((name, _POINTER) for name in ("firsts", "lens", "widths")),
    ]


class Exchange:
    """An exchange of matrices [rows, width]: the columns of this rank, as runs (first, how many); or, back again, how many each
    rank has."""

    def __init__(self, group: int, rank: int, runs: Sequence[tuple[int, int]], widths: Sequence[int], width: int) -> None:
        """`group`: the address of a GroupSpec. `width`: of all columns."""
        self._kept = [(_LONG * len(numbers))(*numbers) for numbers in (*zip(*runs, strict=True), widths)]
        self.own_width, self.width = sum(num for _, num in runs), width
        self._spec = ExchangeSpec(group, width, len(runs), self.own_width, *map(ctypes.addressof, self._kept))
        self.address = ctypes.addressof(self._spec)


class ExchangeCalls:
    """Functions of the compiled library."""

    _recording: Recording | None

    def _bind_exchanges(self, lib: ctypes.CDLL) -> None:
        self._own_rows, self._to_columns, self._to_rows = lib.tm_own_rows, lib.tm_to_columns, lib.tm_to_rows
        self._own_rows.argtypes, self._own_rows.restype = [_POINTER, _LONG, _LONG, _LONG, _LONG, _POINTER], None
        self._to_columns.argtypes = self._to_rows.argtypes = [_POINTER, _POINTER, _POINTER, _LONG]
        self._columns = lib.tm_columns
        self._columns.argtypes, self._columns.restype = [_POINTER, _LONG, _LONG, _LONG, _LONG, _POINTER], None

    def columns(self, x_TN: torch.Tensor, first: int, num: int) -> torch.Tensor:
        """Neighbouring columns."""
        x_TN = x_TN.contiguous()
        out = x_TN.new_empty(x_TN.shape[0], num)
        self._columns(x_TN.data_ptr(), *x_TN.shape, first, num, out.data_ptr())
        if self._recording:
            self._recording.note("columns", out, x_TN, kind=first, width=x_TN.shape[1], num_out=num)
        return out

    def own_rows(self, x_TN: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """The rows of this rank, of all rows."""
        num, width = x_TN.shape
        out = x_TN.new_empty(num * (rank + 1) // size - num * rank // size, width)
        self._own_rows(x_TN.data_ptr(), num, width, rank, size, out.data_ptr())
        if self._recording:
            self._recording.note("own_rows", out, x_TN, kind=rank, width=width, num_out=size)
        return out

    def to_columns(self, exchange: Exchange, x_RN: torch.Tensor, num_rows: int) -> tuple[int, torch.Tensor]:
        """From some rows of all columns to all `num_rows` rows of some columns. Besides them, what `check_group` takes."""
        out = x_RN.new_empty(num_rows, exchange.own_width)
        failed = self._to_columns(exchange.address, x_RN.data_ptr(), out.data_ptr(), num_rows)
        if self._recording:
            self._recording.note("to_columns", out, x_RN, width=exchange.width, num_out=exchange.own_width, a=exchange.address)
        return failed, out

    def to_rows(self, exchange: Exchange, x_TN: torch.Tensor, rank: int, size: int) -> tuple[int, torch.Tensor]:
        """From all rows of some columns to some rows of all columns."""
        num = x_TN.shape[0]
        out = x_TN.new_empty(num * (rank + 1) // size - num * rank // size, exchange.width)
        failed = self._to_rows(exchange.address, x_TN.data_ptr(), out.data_ptr(), num)
        if self._recording:
            width = x_TN.shape[1]
            self._recording.note("to_rows", out, x_TN, kind=rank, width=width, num_out=size, a=exchange.address)
        return failed, out
