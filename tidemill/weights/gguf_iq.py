"""GGUF's IQ types by look-up: whole rows of a block's grid come from one table of small integers,
signs included.

Each of these types is an integer code times a scale that 32 or 16 values share. The grids
themselves are the `gguf` package's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

# Blocks [n, bytes] to codes int8 [n, values] and scales float32 [n, values / 32 or / 16].
_Reader = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
_QUARTER, _HALF = np.float32(0.25), np.float32(0.5)


def _grid(type_name: str, times: int = 1) -> np.ndarray:
    """The package's grid as integers: [entries, values of an entry]."""
    import gguf

    quants = getattr(gguf.quants, type_name)
    quants.init_grid()
    return (quants.grid[0, 0] * times).astype(np.int8)


def _signs(codes: np.ndarray, width: int) -> np.ndarray:
    """Bits to -1 (set) and 1, the lowest bit first."""
    return (1 - 2 * ((codes[:, None] >> np.arange(width)) & 1)).astype(np.int8)


@cache
def _parity_signs() -> np.ndarray:
    """Seven bits of sign, and an eighth that makes their number even."""
    import gguf

    return _signs(np.frombuffer(gguf.quants.IQ2_XXS.ksigns, np.uint8).astype(np.int64), 8)


@cache
def _eights(type_name: str) -> np.ndarray:
    """uint64 [entries * signs]: eight codes of a grid entry with their signs. In IQ2_XS, the entry
    is the low part."""
    grid = _grid(type_name)
    signs = _signs(np.arange(256), 8) if type_name == "IQ2_S" else _parity_signs()
    order = (
        (signs[:, None] * grid[None]) if type_name == "IQ2_XS" else (grid[:, None] * signs[None])
    )
    return np.ascontiguousarray(order.reshape(-1, 8)).view(np.uint64).ravel()


@cache
def _fours(type_name: str) -> np.ndarray:
    """uint32 [entries * 16]: four codes of a grid entry with their signs."""
    grid = _grid(type_name)
    fours = grid[:, None] * _signs(np.arange(16), 4)[None]
    return np.ascontiguousarray(fours.reshape(-1, 4)).view(np.uint32).ravel()


@cache
def _shifted() -> np.ndarray:
    """uint64 [2048 * 2]: eight times a grid entry of IQ1 plus or minus one eighth."""
    grid = _grid("IQ1_S", times=8)
    shifted = np.stack([grid + np.int8(1), grid - np.int8(1)], axis=1)
    return np.ascontiguousarray(shifted.reshape(-1, 8)).view(np.uint64).ravel()


@cache
def _pairs() -> np.ndarray:
    """int8 [16]: the values of four bits in the IQ4 types."""
    import gguf

    return np.array(gguf.quants.IQ4_NL.kvalues, np.int8)


def _part(blocks: np.ndarray, start: int, stop: int, dtype: type = np.uint8) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, start:stop]).view(dtype)


def _scale(blocks: np.ndarray) -> np.ndarray:
    return _part(blocks, 0, 2, np.float16).astype(np.float32)


def _halves(data: np.ndarray) -> np.ndarray:
    """The two nibbles of each byte, the low one first."""
    return np.stack([data & 15, data >> 4], axis=2).reshape(data.shape[0], -1)


def _codes(found: np.ndarray, num_blocks: int) -> np.ndarray:
    return found.view(np.int8).reshape(num_blocks, -1)


def _seven_bits(words: np.ndarray) -> np.ndarray:
    """The four sign indices in 28 bits of each word."""
    return (words[:, :, None] >> np.array([0, 7, 14, 21], np.uint32)) & np.uint32(127)


def _iq2_xxs(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    words = _part(b, 2, 66, np.uint32).reshape(len(b), 8, 2)
    entries = np.ascontiguousarray(words[..., 0]).view(np.uint8).reshape(len(b), 8, 4)
    scales = _scale(b) * (_HALF + (words[..., 1] >> 28).astype(np.float32)) * _QUARTER
    index = (entries.astype(np.uint32) << 7) | _seven_bits(words[..., 1])
    return _codes(_eights("IQ2_XXS").take(index), len(b)), scales


def _iq2_xs(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scales = _scale(b) * (_HALF + _halves(b[:, 66:74])) * _QUARTER
    return _codes(_eights("IQ2_XS").take(_part(b, 2, 66, np.uint16)), len(b)), scales


def _iq2_s(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    high = (b[:, 66:74, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
    entries = b[:, 2:34].astype(np.uint32) | (high.astype(np.uint32) << 8).reshape(len(b), 32)
    scales = _scale(b) * (_HALF + _halves(b[:, 74:82])) * _QUARTER
    return _codes(_eights("IQ2_S").take((entries << 8) | b[:, 34:66]), len(b)), scales


def _iq3_xxs(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    words = _part(b, 66, 98, np.uint32)
    signs = _sign_bytes().take(_seven_bits(words)).reshape(len(b), 32)
    scales = _scale(b) * (_HALF + (words >> 28).astype(np.float32)) * _HALF
    index = (b[:, 2:66].astype(np.uint32) << 4) | _halves(signs)
    return _codes(_fours("IQ3_XXS").take(index), len(b)), scales


@cache
def _sign_bytes() -> np.ndarray:
    import gguf

    return np.frombuffer(gguf.quants.IQ2_XXS.ksigns, np.uint8)


def _iq3_s(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    high = np.unpackbits(b[:, 66:74], axis=1, bitorder="little")
    entries = b[:, 2:66].astype(np.uint32) | (high.astype(np.uint32) << 8)
    scales = _scale(b) * (1 + 2 * _halves(b[:, 106:110]))
    return _codes(_fours("IQ3_S").take((entries << 4) | _halves(b[:, 74:106])), len(b)), scales


_EIGHTH = np.float32(0.125)


def _iq1_s(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    high = _part(b, 34, 50, np.uint16)
    parts = (high[:, :, None] >> np.array([0, 3, 6, 9], np.uint16)) & 7
    entries = b[:, 2:34].reshape(len(b), 8, 4).astype(np.uint32) | (parts.astype(np.uint32) << 8)
    scales = _scale(b) * (2 * ((high >> 12) & 7) + 1) * _EIGHTH
    return _codes(_shifted().take((entries << 1) | (high >> 15)[:, :, None]), len(b)), scales


def _iq1_m(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    packed = _part(b, 48, 56, np.uint16)
    bits = (packed & np.uint16(0xF000)) >> np.array([12, 8, 4, 0], np.uint16)
    d = np.bitwise_or.reduce(bits, axis=1, keepdims=True).view(np.float16).astype(np.float32)
    parts = ((packed[:, :, None] >> np.array([0, 3, 6, 9], np.uint16)) & 7).reshape(len(b), 16)
    high = _halves(b[:, 32:48])
    entries = b[:, :32].astype(np.uint32) | ((high & 7).astype(np.uint32) << 8)
    return _codes(_shifted().take((entries << 1) | (high >> 3)), len(b)), d * (
        2 * parts + 1
    ) * _EIGHTH


def _iq4_nl(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _pairs().take(np.concatenate([b[:, 2:] & 15, b[:, 2:] >> 4], axis=1)), _scale(b)


def _iq4_xs(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    high = (_part(b, 2, 4, np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)) & 3
    scales = (_halves(b[:, 4:8]) | (high.astype(np.uint8) << 4)).astype(np.int8) - np.int8(32)
    data = b[:, 8:].reshape(len(b), 8, 16)
    return _pairs().take(np.concatenate([data & 15, data >> 4], axis=2)).reshape(
        len(b), 256
    ), _scale(b) * scales.astype(np.float32)


_READERS: dict[str, tuple[int, int, _Reader]] = {  # type: bytes a block, values of a scale, reader
    "IQ1_S": (50, 32, _iq1_s),
    "IQ1_M": (56, 16, _iq1_m),
    "IQ2_XXS": (66, 32, _iq2_xxs),
    "IQ2_XS": (74, 16, _iq2_xs),
    "IQ2_S": (82, 16, _iq2_s),
    "IQ3_XXS": (98, 32, _iq3_xxs),
    "IQ3_S": (110, 32, _iq3_s),
    "IQ4_NL": (18, 32, _iq4_nl),
    "IQ4_XS": (136, 32, _iq4_xs),
}


def can_read(type_name: str) -> bool:
    return type_name in _READERS


def has_32_to_a_scale(type_name: str) -> bool:
    return type_name in _READERS and _READERS[type_name][1] == 32


def codes_and_scales(type_name: str, raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes int8 [blocks, values] and scales float32 [blocks, scales] of the blocks in `raw`."""
    block_bytes, _, reader = _READERS[type_name]
    return reader(raw.reshape(-1, block_bytes))


def dequantize(type_name: str, raw: np.ndarray, out: np.ndarray) -> None:
    """Write the values of rows of blocks into `out`, float32 [rows, values], to the bit as the
    `gguf` package has them."""
    codes, scales = codes_and_scales(type_name, raw)
    width = _READERS[type_name][1]
    np.multiply(codes.reshape(-1, width), scales.reshape(-1, 1), out=out.reshape(-1, width))
