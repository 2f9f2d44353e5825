"""Recording a model's forward pass once, to replay it without Python between its ops: what a CUDA
graph is to a GPU.

While a `Recording` is open, the library notes each op it runs. `compile` names buffers by columns
instead of addresses, reusing what is no longer read; the result serves any number of rows. A model
with an op in between that the library does not know cannot be recorded and runs op by op.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

_INPUTS = ("in_", "in_out", "in_2", "in_3")
_LONG, _POINTER = ctypes.c_long, ctypes.c_void_p


class Op(ctypes.Structure):
    """tm_op of tidemill.h."""

    _fields_ = [
        *(
            (name, _LONG)
            for name in ("op", "in_", "in_out", "out", "in_2", "in_3", "kind", "width", "num_out")
        ),
        *((name, _POINTER) for name in ("a", "b", "c", "d", "e", "f")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    ]


@dataclass(slots=True)
class _Noted:
    fields: dict[str, int | float | None]
    reads: list[torch.Tensor]
    out: torch.Tensor | None  # None: it only changes in_out


@dataclass(slots=True)
class Recording:
    """Keeps every tensor it saw, so that an address means one tensor."""

    numbers: dict[str, int]  # of ops, by name
    ops: list[_Noted] = field(default_factory=list)

    def note(
        self,
        op: str,
        out: torch.Tensor | None,
        in_: torch.Tensor | None,
        in_out: torch.Tensor | None = None,
        in_2: torch.Tensor | None = None,
        in_3: torch.Tensor | None = None,
        **fields: int | float | None,
    ) -> None:
        named = {"in_": in_, "in_out": in_out, "in_2": in_2, "in_3": in_3}
        places = {
            name: None if tensor is None else tensor.data_ptr() for name, tensor in named.items()
        }
        self.ops.append(
            _Noted(
                {"op": self.numbers[op], **places, **fields},
                [t for t in named.values() if t is not None],
                out,
            )
        )

    def compile(self, given: torch.Tensor, result: torch.Tensor) -> Program | None:
        """From the tensor the forward pass starts with to its result; None if there are ops in
        between that were not noted."""
        last_read = {
            tensor.data_ptr(): i for i, noted in enumerate(self.ops) for tensor in noted.reads
        }
        last_read[result.data_ptr()] = len(self.ops)
        columns, free, end = {given.data_ptr(): 0}, list[tuple[int, int]](), given.shape[1]
        widths = {given.data_ptr(): given.shape[1]}
        ops = (Op * len(self.ops))()
        for i, noted in enumerate(self.ops):
            if any(tensor.data_ptr() not in columns for tensor in noted.reads):
                return None
            ops[i].out = -1
            if noted.out is not None:
                address, width = noted.out.data_ptr(), noted.out.shape[1]
                reused = next((hole for hole in free if hole[1] == width), None)
                if reused:
                    free.remove(reused)
                columns[address], widths[address] = reused[0] if reused else end, width
                end += 0 if reused else width
                ops[i].out = columns[address]
            for name, value in noted.fields.items():
                if name in _INPUTS:
                    value = -1 if value is None else columns[int(value)]
                setattr(ops[i], name, value)
            free += [
                (columns[t.data_ptr()], widths[t.data_ptr()])
                for t in noted.reads
                if last_read[t.data_ptr()] == i
            ]
        if result.data_ptr() not in columns:
            return None
        return Program(ops, end, given.shape[1], columns[result.data_ptr()], result.shape[1])


class Buffers(NamedTuple):
    ops: int  # addresses
    arena: int
    given: torch.Tensor  # where the given rows go
    result: torch.Tensor  # where the result's come out


@dataclass(slots=True)
class Program:
    ops: ctypes.Array[Op]
    num_columns: int
    num_given: int
    result_column: int
    num_result: int
    _arena: torch.Tensor = field(
        default_factory=lambda: torch.empty(0, dtype=torch.float32, device="cpu")
    )
    # for so many rows: the last, since steps are often alike
    _made: tuple[int, Buffers] | None = None

    def buffers(self, num_rows: int) -> Buffers:
        if self._made is None or self._made[0] != num_rows:
            if self._arena.numel() < self.num_columns * num_rows:
                self._arena = torch.empty(
                    self.num_columns * num_rows, dtype=torch.float32, device="cpu"
                )
            first = self.result_column * num_rows
            given = self._arena[: self.num_given * num_rows].view(num_rows, -1)
            result = self._arena[first : first + self.num_result * num_rows].view(num_rows, -1)
            self._made = (
                num_rows,
                Buffers(ctypes.addressof(self.ops), self._arena.data_ptr(), given, result),
            )
        return self._made[1]
