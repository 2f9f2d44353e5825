"""GGUF's quantized blocks as codes, scales and offsets of 32 values, without going through floats.

The 4-bit types and those of 8 and 5 bits keep their codes, and IQ types with 32 values to a scale
become 8-bit codes without a loss. All others (values in groups of 16) are rounded anew to 8 bits,
which is finer than what they hold.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from tidemill.errors import CheckpointError
from tidemill.kernels.quantized_linear import GROUP, MX4_CODES, Activations, Codes
from tidemill.weights import gguf_iq

# One of them: blocks [n, bytes] to codes [n, values], scales and offsets [n, values / 32] (or
# None).
_Reader = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray | None]]


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)


def _nibbles(data: np.ndarray) -> np.ndarray:
    """The low halves of all bytes, then the high halves."""
    return np.concatenate([data & 15, data >> 4], axis=1)


def _fifth_bits(data: np.ndarray) -> np.ndarray:
    return np.unpackbits(data, axis=1, bitorder="little") << 4


def _q4_0(b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    return _nibbles(b[:, 2:]), _half(b, 0), _half(b, 0) * np.float16(-8)


def _q4_1(b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    return _nibbles(b[:, 4:]), _half(b, 0), _half(b, 2)


def _q5_0(b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    return (
        (_nibbles(b[:, 6:]) | _fifth_bits(b[:, 2:6])).view(np.int8) - np.int8(16),
        _half(b, 0),
        None,
    )


def _q5_1(b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    return _nibbles(b[:, 8:]) | _fifth_bits(b[:, 4:8]), _half(b, 0), _half(b, 2)


def _q8_0(b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    return b[:, 2:], _half(b, 0), None


def _k_scales(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and offsets of the eight groups of a 256-value block, 6 bits each in 12 bytes, times
    the block's own two."""
    low, mid, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1)
    offsets = np.concatenate([mid & 63, (high >> 4) | (mid >> 6 << 4)], axis=1)
    d, d_min = _half(b, 0).astype(np.float32), _half(b, 2).astype(np.float32)
    return (d * scales).astype(np.float16), (-d_min * offsets).astype(np.float16)


def _k_nibbles(data: np.ndarray) -> np.ndarray:
    """32 bytes at a time: 32 low halves, then 32 high halves."""
    parts = data.reshape(-1, 4, 1, 32)
    return np.concatenate([parts & 15, parts >> 4], axis=2).reshape(-1, 256)


def _q4_k(b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    return _k_nibbles(b[:, 16:]), *_k_scales(b)


def _q5_k(b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    # bit g of byte i: value i of group g
    fifth = (b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None]) & 1
    return _k_nibbles(b[:, 48:]) | (fifth << 4).reshape(-1, 256), *_k_scales(b)


def _mxfp4(b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    exponents = b[:, :1].astype(np.int32) - 128
    return (
        MX4_CODES[_nibbles(b[:, 1:])],
        np.ldexp(np.float32(1), exponents).astype(np.float16),
        None,
    )


_READERS: dict[str, tuple[int, int, _Reader]] = {  # type: bits, bytes a block, reader
    "Q4_0": (4, 18, _q4_0),
    "Q4_1": (4, 20, _q4_1),
    "Q4_K": (4, 144, _q4_k),
    "Q5_0": (8, 22, _q5_0),
    "Q5_1": (8, 24, _q5_1),
    "Q5_K": (8, 176, _q5_k),
    "Q8_0": (8, 34, _q8_0),
    "MXFP4": (4, 17, _mxfp4),
}


_TERNARY = {"TQ1_0": 54, "TQ2_0": 66}  # bytes of 256 values, of which the last two are a scale
_TRITS = 5  # of a byte of TQ1_0


def _trits(data: np.ndarray, num: int = _TRITS) -> np.ndarray:
    """The digits of bytes [blocks, n] in base 3, the first of all bytes, then the second..."""
    powers = np.array([3**i for i in range(num)], np.uint8)[None, :, None]
    shifted = data[:, None, :] * powers  # the digits before are beyond the byte
    return (shifted.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(data.shape[0], -1)


def _ternary(type_name: str, raw: np.ndarray) -> Codes:
    blocks = raw.reshape(-1, _TERNARY[type_name])
    if type_name == "TQ1_0":
        codes = np.concatenate(
            [_trits(blocks[:, :32]), _trits(blocks[:, 32:48]), _trits(blocks[:, 48:52], 4)], axis=1
        )
    else:
        halves = blocks[:, :64].reshape(-1, 2, 1, 32)
        codes = (halves >> np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None] & 3).reshape(
            -1, 256
        )
    if (codes > 2).any():
        raise CheckpointError(
            f"Codes of {type_name} that are not ternary.", fix="Download the file again."
        )
    scales = torch.from_numpy(
        _half(blocks, _TERNARY[type_name] - 2).astype(np.float32).reshape(raw.shape[0], -1)
    )
    signed = torch.from_numpy(codes.reshape(raw.shape[0], -1).view(np.int8) - np.int8(1))
    return Codes(2, signed, scales, None, group=256, activations=Activations())


def can_read(type_name: str) -> bool:
    return type_name in _READERS or type_name in _TERNARY or gguf_iq.has_32_to_a_scale(type_name)


def read_codes(type_name: str, raw: np.ndarray) -> Codes:
    """`raw`: uint8 [rows, bytes of a row]."""
    num_rows = raw.shape[0]
    if type_name in _TERNARY:
        return _ternary(type_name, raw)
    if type_name in _READERS:
        bits, block_bytes, reader = _READERS[type_name]
        codes, scales, offsets = reader(raw.reshape(-1, block_bytes))
    else:
        codes, scales = gguf_iq.codes_and_scales(type_name, raw)
        bits, scales, offsets = 8, scales.astype(np.float16), None

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values.reshape(num_rows, -1)))

    codes_NK = tensor(codes.view(np.int8) if codes.dtype == np.uint8 else codes)
    assert codes_NK.shape[1] == scales.size // num_rows * GROUP
    return Codes(bits, codes_NK, tensor(scales), None if offsets is None else tensor(offsets))
