"""Weights in mxfp4, as gpt-oss's safetensors hold them: 32 values of four bits (E2M1) share a power of two (E8M0).

Two stored tensors, `X_blocks` [..., groups, 16] and `X_scales` [..., groups], are read as one, `X_blocks` [..., groups * 32].
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from tidemill.errors import CheckpointError
from tidemill.kernels.quantized_linear import GROUP, Codes

_BIAS = 127  # of a scale's exponent
# Twice the sixteen values, so that all are integers.
_DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
BLOCKS, SCALES = "_blocks", "_scales"


class Mxfp4Tensor:
    """`blocks`, `scales`: views of safetensors, which read what they are indexed by. `number`: of one of a stack of matrices."""

    type_name = "MXFP4"

    def __init__(self, name: str, blocks: Any, scales: Any, number: int | None = None) -> None:
        self.name, self._blocks, self._scales, self._number = name, blocks, scales, number
        stored, scale_shape = tuple(blocks.get_shape()), tuple(scales.get_shape())
        types = str(blocks.get_dtype()), str(scales.get_dtype())
        if stored[-1:] != (GROUP // 2,) or stored[:-1] != scale_shape or len(stored) < 3 or types != ("U8", "U8"):
            raise CheckpointError(
                f"Tensor {name} ({types[0]}) has shape {list(stored)} and its scales ({types[1]}) {list(scale_shape)}.",
                fix="mxfp4 has 16 bytes to a scale.",
            )
        shape = (*stored[:-2], stored[-2] * GROUP)
        self.shape = shape if number is None else shape[1:]
        self.num_bytes = math.prod(self.shape) // GROUP * (GROUP // 2 + 1)

    def matrix(self, number: int) -> Mxfp4Tensor:
        return Mxfp4Tensor(self.name, self._blocks, self._scales, number)

    def _read(self) -> tuple[np.ndarray, np.ndarray]:
        """Twice the values, and half their scales: codes int8 [rows, width], exponents [rows, groups]."""
        at = slice(None) if self._number is None else self._number
        raw, exponents = self._blocks[at].numpy(), self._scales[at].numpy()
        pairs = np.stack([raw & 15, raw >> 4], axis=-1)  # the low half is the first value
        codes = _DOUBLED[pairs].reshape(-1, self.shape[-1])
        return codes, exponents.reshape(codes.shape[0], -1).astype(np.int32) - _BIAS - 1

    def read_into(self, out: torch.Tensor) -> None:
        codes, exponents = self._read()
        values = np.ldexp(codes.reshape(*exponents.shape, GROUP).astype(np.float32), exponents[..., None])
        out.copy_(torch.from_numpy(values.astype(np.float32)).reshape(out.shape))

    def codes(self) -> Codes:
        codes, exponents = self._read()
        scales = np.ldexp(np.float32(1), exponents).astype(np.float16)
        if not np.array_equal(scales.astype(np.float64), np.ldexp(1.0, exponents)):
            raise CheckpointError(f"Tensor {self.name} holds scales that 16 bits cannot represent.", fix="Use --dtype float32.")
        return Codes(8, torch.from_numpy(codes), torch.from_numpy(scales), None)
