"""y = x Wᵀ + b, summed in float32, with the same bits for a row at every number of rows.

A BLAS picks another routine, and so another order of summation, by the number of rows; a token's
result would then depend on its batch. The compiled kernel sums every output in one order. Without
it, the first of these that proves row-invariant on this machine for this shape is taken:

- blas: the transposed weight and at least two rows (one row would take the matrix-vector routine).
- tiles: always 32 rows at a time, so that every call has the same shape.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
import torch.nn.functional as F

from tidemill.kernels import native
from tidemill.kernels.handover import Handover
from tidemill.kernels.memory import zeros
from tidemill.kernels.pending import SplitK

_TILE = 32
_MAX_ROWS = 512  # of one matmul; more are done in turns, so that no number of rows goes unprobed
_PROBE_ROWS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 33, 64, 128, 256, _MAX_ROWS)
# output features used for the probe: their number does not change how one of them is summed
_PROBE_WIDTH = 512
_LANES = 8  # output features side by side in the compiled kernel's layout
KIND_OF: Final = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class Weight(ABC):
    """A matrix [out, in] laid out as its kernel reads it, to multiply by and to look rows up in."""

    handover: Handover | None = None  # by which it would rather have its input, in an 8-bit type

    @abstractmethod
    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor: ...

    def matmul(self, x_TK: torch.Tensor) -> torch.Tensor:
        """Without an activation, where the weight has one: what `activate` takes."""
        return self(x_TK)

    def split_k(self, x_TK: torch.Tensor) -> torch.Tensor | SplitK:
        """The product, perhaps as split-K partials, which `add_rms_norm` adds up."""
        return self(x_TK)

    def activate(self, y_TN: torch.Tensor) -> torch.Tensor:
        return y_TN

    def logits(self, x_TK: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The matmul in float32, whatever the type of activations; into `out`, if given."""
        return self(x_TK) if out is None else out.copy_(self(x_TK))

    def compile(self, nums_rows: Collection[int]) -> None:
        """Start compiling what `prepare` runs, where kernels are compiled at start."""
        return

    def prepare(self, nums_rows: Collection[int]) -> None:
        """Find out how to multiply by so many rows, where that is not known: later it would keep a
        request waiting."""
        return

    @abstractmethod
    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Rows of the matrix: an embedding is a lookup in the same table that a tied head
        multiplies by."""


def linear_reference(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None
) -> torch.Tensor:
    return F.linear(x_TK, weight_NK.float(), bias_N)


def pack_linear(weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> Weight:
    """Take over a weight of 32 or 16 bits; the caller may free its own copy."""
    if native.lib:
        return Panels(weight_NK, bias_N)
    return BACKENDS[
        choose_backend(
            min(weight_NK.shape[0], _PROBE_WIDTH), weight_NK.shape[1], torch.get_num_threads()
        )
    ](weight_NK.float(), bias_N)


def empty_panels(num_out: int, num_in: int, dtype: torch.dtype) -> torch.Tensor:
    """The compiled kernel's layout of a matrix, for `put_rows`. Rows at the end that no matrix has
    are zeros."""
    return zeros((-(-num_out // _LANES), num_in, _LANES), dtype)


def put_rows(panels: torch.Tensor, begin: int, rows_NK: torch.Tensor) -> None:
    """Neighbouring rows of a matrix, the first of which is row `begin`. By numpy, on one core: a
    copy by torch of so few bytes keeps its other threads spinning."""
    integer = {2: torch.int16, 4: torch.int32}[panels.dtype.itemsize]
    places, rows = panels.view(integer).numpy(), rows_NK.to(panels.dtype).view(integer).numpy()
    for lane in range(_LANES):
        own = rows[(lane - begin) % _LANES :: _LANES]
        first = -(-(begin - lane) // _LANES)
        places[first : first + len(own), :, lane] = own


def to_panels(rows: torch.Tensor) -> torch.Tensor:
    """[N, ...] to [N / 8, ..., 8], with rows of zeros at the end if 8 does not divide N."""
    padded = (
        rows
        if rows.shape[0] % _LANES == 0
        else torch.cat([rows, rows.new_zeros(-rows.shape[0] % _LANES, *rows.shape[1:])])
    )
    return padded.unflatten(0, (-1, _LANES)).movedim(1, -1).contiguous()


class Panels(Weight):
    """The compiled kernel's layout. 16-bit weights stay so: widened as they are used, they give the
    bits of float32."""

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        self._hold(to_panels(weight_NK), weight_NK.shape[0], bias_N)

    @classmethod
    def of(cls, panels: torch.Tensor, num_out: int, bias_N: torch.Tensor | None) -> Panels:
        """A weight whose values are in the layout already."""
        made = cls.__new__(cls)
        made._hold(panels, num_out, bias_N)
        return made

    def _hold(self, panels: torch.Tensor, num_out: int, bias_N: torch.Tensor | None) -> None:
        assert native.lib is not None
        self._lib, self._kind = native.lib, native.KINDS[KIND_OF[panels.dtype]]
        self._num_out, self._bias, self._panels = num_out, bias_N, panels
        self._addresses = (
            self._panels.data_ptr(),
            None,
            None if bias_N is None else bias_N.data_ptr(),
        )

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self.logits(x_TK)

    def logits(self, x_TK: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._lib.linear(self._kind, x_TK, *self._addresses, self._num_out, out)

    @property
    def held(self) -> Held:
        return Held(self._kind, self._panels.shape[1], self._num_out, self._panels, None)

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        return self._panels[ids_T // _LANES, :, ids_T % _LANES].float()


@dataclass(frozen=True, slots=True)
class Held:
    """A matrix as linear.c takes it."""

    kind: int
    num_in: int
    num_out: int
    codes: torch.Tensor
    scales: torch.Tensor | None


class PlacedMatrix(Weight):
    """The compiled kernel's layout in memory that another owns. `place` says where, before the
    first use."""

    def __init__(self, kind: int, num_in: int, num_out: int, bias_N: torch.Tensor | None) -> None:
        assert native.lib is not None
        self._lib, self.kind, self.num_in, self.num_out, self._bias = (
            native.lib,
            kind,
            num_in,
            num_out,
            bias_N,
        )
        self._addresses: tuple[int, int | None, int | None] = (0, None, None)

    def place(self, codes: int, scales: int | None, bias: int | None = None) -> None:
        """Addresses. `bias`: where it is in such memory as well."""
        self._addresses = (codes, scales, bias if self._bias is None else self._bias.data_ptr())

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        assert x_TK.shape[1] == self.num_in
        return self._lib.linear(self.kind, x_TK, *self._addresses, self.num_out)

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        raise AssertionError("not a table")


class _Blas(Weight):
    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        self._weight_KN, self._bias = weight_NK.t().contiguous(), bias_N

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        return torch.cat([self._matmul(part) for part in x_TK.split(_MAX_ROWS)])

    def _matmul(self, x_TK: torch.Tensor) -> torch.Tensor:
        rows = x_TK if x_TK.shape[0] > 1 else x_TK.expand(2, -1)
        out = torch.mm(rows, self._weight_KN)[: x_TK.shape[0]]
        return out if self._bias is None else out + self._bias

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        return self._weight_KN[:, ids_T].t().contiguous()


class _Tiles(_Blas):
    def _matmul(self, x_TK: torch.Tensor) -> torch.Tensor:
        padded = F.pad(x_TK, (0, 0, 0, -x_TK.shape[0] % _TILE))
        return torch.cat([super(_Tiles, self)._matmul(tile) for tile in padded.split(_TILE)])[
            : x_TK.shape[0]
        ]


BACKENDS: dict[str, type[_Blas]] = {"blas": _Blas, "tiles": _Tiles}


@cache
def choose_backend(num_out: int, num_in: int, num_threads: int) -> str:
    """The first backend whose rows keep their bits for this shape on this machine."""
    generator = torch.Generator().manual_seed(num_out * 7919 + num_in)
    weight = torch.randn(num_out, num_in, generator=generator)
    x = torch.randn(max(_PROBE_ROWS), num_in, generator=generator)
    return next(
        (name for name, make in BACKENDS.items() if is_row_invariant(make(weight, None), x)),
        "tiles",
    )


def is_row_invariant(linear: Weight, x_TK: torch.Tensor) -> bool:
    whole = linear(x_TK)
    return all(
        torch.equal(linear(x_TK[start : start + num_rows].clone()), whole[start : start + num_rows])
        for num_rows in _PROBE_ROWS
        for start in {0, x_TK.shape[0] - num_rows}
    )
