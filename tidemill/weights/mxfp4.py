"""Weights in mxfp4, as gpt-oss's safetensors hold them: 32 values of four bits (E2M1) share a power
of two (E8M0).

Two stored tensors, `X_blocks` [..., groups, 16] and `X_scales` [..., groups], are read as one,
`X_blocks` [..., groups * 32].
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tidemill.errors import CheckpointError
from tidemill.kernels.quantized_linear import GROUP, MX4_CODES, Codes
from tidemill.weights.packed.base import Scheme, Stored
from tidemill.weights.slices import Inner

if TYPE_CHECKING:
    from tidemill.weights.checkpoint import WeightTensor

_BIAS = 127  # of a scale's exponent
_HIGHEST = 15  # power of two in 16 bits
_POWERS = np.ldexp(np.float32(1), np.arange(256) - _BIAS - 1)  # half of what a scale means
BLOCKS, SCALES = "_blocks", "_scales"


class Mxfp4(Scheme):
    """gpt-oss's folders."""

    parts = (BLOCKS, SCALES)

    def split(self, name: str) -> tuple[str, str] | None:
        stem = name.removesuffix(BLOCKS).removesuffix(SCALES)
        return None if stem == name else (stem, name[len(stem) :])

    def tensor(self, module: str, parts: dict[str, Stored]) -> Mxfp4Tensor:
        if len(parts) < 2:
            raise CheckpointError(
                f"{self.path.parent}: of tensor {module} in mxfp4, blocks or scales are missing."
            )
        return Mxfp4Tensor(module + BLOCKS, parts[BLOCKS].view(), parts[SCALES].view())


class Mxfp4Tensor:
    """`blocks`, `scales`: views of safetensors, which read what they are indexed by. `at`: which
    matrix of a stack, which rows and which groups of columns; empty: all."""

    type_name = "MXFP4"
    reads_rows = False

    def __init__(
        self, name: str, blocks: Any, scales: Any, at: tuple[int | slice, ...] = ()
    ) -> None:
        self.name, self._blocks, self._scales, self._at = name, blocks, scales, at
        stored, scale_shape = tuple(blocks.get_shape()), tuple(scales.get_shape())
        types = str(blocks.get_dtype()), str(scales.get_dtype())
        if (
            stored[-1:] != (GROUP // 2,)
            or stored[:-1] != scale_shape
            or len(stored) < 3
            or types != ("U8", "U8")
        ):
            raise CheckpointError(
                f"Tensor {name} ({types[0]}) has shape {list(stored)} and its scales ({types[1]}) {list(scale_shape)}.",
                fix="mxfp4 has 16 bytes to a scale.",
            )
        places = zip(at + (slice(None),) * (len(scale_shape) - len(at)), scale_shape, strict=True)
        *shape, num_groups = [
            len(range(num)[place]) for place, num in places if isinstance(place, slice)
        ]
        self.shape: tuple[int, ...] = (*shape, num_groups * GROUP)
        self.num_bytes = math.prod(self.shape) // GROUP * (GROUP // 2 + 1)

    def matrix(self, number: int) -> Mxfp4Tensor:
        return Mxfp4Tensor(self.name, self._blocks, self._scales, (number,))

    def rows(self, begin: int, end: int) -> Mxfp4Tensor:
        return self._narrowed(0, begin, end)

    def columns(self, begin: int, end: int) -> WeightTensor:
        first, last = begin // GROUP, -(-end // GROUP)
        whole = self._narrowed(1, first, last)
        is_all = (first * GROUP, last * GROUP) == (begin, end)
        return whole if is_all else Inner(whole, 1, begin - first * GROUP, end - first * GROUP)

    def _narrowed(self, dim: int, begin: int, end: int) -> Mxfp4Tensor:
        """A part of one matrix."""
        number, *rest = self._at or (slice(None),)
        both = [*rest, slice(None), slice(None)][:2]
        before = both[dim]
        assert isinstance(before, slice)
        both[dim] = slice((before.start or 0) + begin, (before.start or 0) + end)
        return Mxfp4Tensor(self.name, self._blocks, self._scales, (number, *both))

    def _read(self) -> tuple[np.ndarray, np.ndarray]:
        """Twice the values, and half their scales: codes int8 [rows, width], exponents [rows,
        groups]."""
        at = self._at or (slice(None),)
        raw, exponents = self._blocks[at].numpy(), self._scales[at].numpy()
        pairs = np.stack([raw & 15, raw >> 4], axis=-1)  # the low half is the first value
        codes = MX4_CODES[pairs].reshape(-1, self.shape[-1])
        return codes, exponents.reshape(codes.shape[0], -1).astype(np.int32) - _BIAS - 1

    def read_into(self, out: torch.Tensor) -> None:
        """On the device of `out`: only what is stored is copied there."""
        at = self._at or (slice(None),)
        raw, scales = self._blocks[at].to(out.device), self._scales[at].to(out.device)
        pairs = torch.stack([raw & 15, raw >> 4], -1).flatten(-2)
        values = torch.from_numpy(MX4_CODES).to(out.device, torch.float32)[pairs.int()]
        out.copy_(
            (values * torch.from_numpy(_POWERS).to(out.device)[scales.int()][..., None]).reshape(
                out.shape
            )
        )

    def codes(self) -> Codes:
        codes, exponents = self._read()
        if exponents.max() > _HIGHEST:
            raise CheckpointError(
                f"Tensor {self.name} holds scales that are too large for 16 bits.",
                fix="Use --dtype float32.",
            )
        # below 2^-24, where all values are below 1e-6, they are 0
        scales = np.ldexp(np.float32(1), exponents).astype(np.float16)
        return Codes(4, torch.from_numpy(codes), torch.from_numpy(scales), None)
