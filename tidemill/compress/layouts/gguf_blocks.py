"""GGUF's types as grids, and matrices on such grids as blocks of bytes."""

from __future__ import annotations

import numpy as np
import torch

from tidemill.compress.grid import SUPER, Grid, half
from tidemill.compress.stored import IntWeight, Stored
from tidemill.errors import ConfigError

_BLOCK = 32  # values of a block of the simple types
TYPES = {
    "Q4_0": Grid(4, _BLOCK, symmetric=True),
    "Q4_1": Grid(4, _BLOCK, symmetric=False, offsets=True),
    "Q5_0": Grid(5, _BLOCK, symmetric=True),
    "Q5_1": Grid(5, _BLOCK, symmetric=False, offsets=True),
    "Q8_0": Grid(8, _BLOCK, symmetric=True),
    "Q4_K": Grid(4, 32, symmetric=False, offsets=True, steps=63),
    "Q5_K": Grid(5, 32, symmetric=False, offsets=True, steps=63),
    "Q6_K": Grid(6, 16, symmetric=True, steps=127),
}
# of matrices without whole blocks of 256, as llama.cpp does it
_INSTEAD = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_BY_GRID = {(grid.bits, grid.symmetric, bool(grid.steps)): name for name, grid in TYPES.items()}


def grid_of(kind: str, width: int) -> Grid:
    """The grid of a matrix of so many columns."""
    if kind not in TYPES:
        raise ConfigError(
            f"--type {kind} cannot be written.", fix=f"Choose {', '.join(TYPES)}.", param="type"
        )
    return TYPES[kind if width % SUPER == 0 else _INSTEAD.get(kind, kind)]


def block_type(name: str, stored: Stored) -> str:
    """The block type of a matrix; refuses what no type holds."""
    why = ""
    if not isinstance(stored, IntWeight):
        why = "it is not made of integers"
    elif (stored.bits, stored.zeros_NG is None, stored.steps is not None) not in _BY_GRID:
        why = f"no type has {stored.bits} bits {'without' if stored.zeros_NG is None else 'with'} an offset"
    elif stored.groups_K is not None or stored.act_per is not None:
        why = (
            "its columns are not in order"
            if stored.groups_K is not None
            else "its activations are quantized"
        )
    elif stored.codes_NK.shape[1] % _BLOCK or (
        stored.group % 16 and stored.group < stored.codes_NK.shape[1]
    ):
        why = f"its {stored.codes_NK.shape[1]} columns in groups of {stored.group} are no whole blocks of {_BLOCK}"
    elif stored.steps is None and stored.group % _BLOCK and stored.group < stored.codes_NK.shape[1]:
        why = f"its groups of {stored.group} are no whole blocks of {_BLOCK}"
    if why:
        fix = "Choose --bits 4, 5 or 8 (8: --symmetric) and a --group that is a multiple of 32, or another --format."
        raise ConfigError(f"{name} cannot be written as GGUF: {why}.", fix=fix, param="format")
    assert isinstance(stored, IntWeight)
    return _BY_GRID[stored.bits, stored.zeros_NG is None, stored.steps is not None]


def blocks(stored: IntWeight) -> np.ndarray:
    """uint8 [N, bytes of a row]."""
    if stored.steps is None:
        return _simple(stored)
    return _six_bits(stored) if stored.zeros_NG is None else _with_offsets(stored)


def _simple(stored: IntWeight) -> np.ndarray:
    """Scales of larger groups are repeated."""
    num_out, width = stored.codes_NK.shape
    index = torch.arange(0, width, _BLOCK) // stored.group
    scales = stored.scales_NG[:, index].to(torch.float16)
    pieces: list[np.ndarray] = [_bytes(scales)]
    codes = stored.codes_NK
    if stored.zeros_NG is not None:
        pieces.append(
            _bytes((-stored.zeros_NG[:, index].float() * scales.float()).to(torch.float16))
        )
    elif stored.bits < 8:
        codes = codes + 2 ** (stored.bits - 1)
    numbers = (
        codes.to(torch.int8 if stored.bits == 8 else torch.uint8)
        .numpy()
        .view(np.uint8)
        .reshape(num_out, -1, _BLOCK)
    )
    if stored.bits == 8:
        return np.concatenate([*pieces, numbers], axis=2).reshape(num_out, -1)
    if stored.bits == 5:
        pieces.append(np.packbits(numbers >> 4, axis=2, bitorder="little"))
    low = numbers & 15
    pieces.append(low[:, :, : _BLOCK // 2] | low[:, :, _BLOCK // 2 :] << 4)
    return np.concatenate(pieces, axis=2).reshape(num_out, -1)


def _with_offsets(stored: IntWeight) -> np.ndarray:
    """Q4_K and Q5_K: 8 groups of 32."""
    assert stored.zeros_NG is not None
    num_out = stored.codes_NK.shape[0]
    unit, scales = _counts(stored.scales_NG, stored)
    offset_unit, offsets = _counts(stored.scales_NG * stored.zeros_NG, stored)
    packed = [
        scales[:, :, :4] | scales[:, :, 4:] >> 4 << 6,
        offsets[:, :, :4] | offsets[:, :, 4:] >> 4 << 6,
        scales[:, :, 4:] & 15 | (offsets[:, :, 4:] & 15) << 4,
    ]
    codes = stored.codes_NK.to(torch.uint8).numpy().reshape(num_out, -1, 8, 32)
    pieces = [_bytes(unit), _bytes(offset_unit), *packed]
    if stored.bits == 5:
        pieces.append(np.packbits(codes >> 4, axis=2, bitorder="little")[:, :, 0])
    low = codes & 15
    pieces.append((low[:, :, 0::2] | low[:, :, 1::2] << 4).reshape(num_out, -1, 128))
    return np.concatenate(pieces, axis=2).reshape(num_out, -1)


def _six_bits(stored: IntWeight) -> np.ndarray:
    """Q6_K: 16 groups of 16. Of each half, a byte has the low bits of values that are 64 apart, and
    the high ones of four."""
    num_out = stored.codes_NK.shape[0]
    unit, scales = _counts(stored.scales_NG, stored)
    codes = (stored.codes_NK + 32).to(torch.uint8).numpy().reshape(num_out, -1, 2, 4, 32)
    low, high = codes & 15, codes >> 4
    pieces = [
        (low[:, :, :, :2] | low[:, :, :, 2:] << 4).reshape(num_out, -1, 128),
        (
            high[..., 0, :] | high[..., 1, :] << 2 | high[..., 2, :] << 4 | high[..., 3, :] << 6
        ).reshape(num_out, -1, 64),
        scales,
        _bytes(unit),
    ]
    return np.concatenate(pieces, axis=2).reshape(num_out, -1)


def _counts(values_NG: torch.Tensor, stored: IntWeight) -> tuple[torch.Tensor, np.ndarray]:
    """The unit of each 256 columns, float16 [N, S], and how often it is in each group's value,
    uint8 [N, S, groups]."""
    assert stored.steps is not None
    parts = values_NG.view(values_NG.shape[0], -1, SUPER // stored.group)
    units = half(parts.amax(2, keepdim=True) / stored.steps)
    return units[:, :, 0].to(torch.float16), torch.round(parts / units).to(torch.uint8).numpy()


def _bytes(values_NG: torch.Tensor) -> np.ndarray:
    """The bytes of float16 numbers, [N, G, 2]."""
    return values_NG.contiguous().numpy().view(np.uint8).reshape(*values_NG.shape, 2)
