"""Values of a KV cache with scales, read: words of 16 bits as they are stored, two values of 8 bits
or four of 4 bits in each, become bfloat16 in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Two words in $2, two scales in $3; $0: their low bytes as bfloat16, $1: their high bytes.  The
# bits of an e4m3 number, moved to where bfloat16 has them, are that number times 2**-120, also of
# the smallest ones: the scales come times 2**120.
FP8_PAIRS = tl.constexpr("""{
.reg .b32 a, b, none; mov.b32 none, 0x80008000;
shl.b32 a, $2, 4; and.b32 a, a, 0x07f007f0; shl.b32 b, $2, 8; lop3.b32 a, b, 0x80008000, a, 0xEA;
fma.rn.bf16x2 $0, a, $3, none;
shr.u32 a, $2, 4; and.b32 a, a, 0x07f007f0; lop3.b32 a, $2, 0x80008000, a, 0xEA;
fma.rn.bf16x2 $1, a, $3, none;
}""")
# The same without scales.
FP8_PLAIN = tl.constexpr("""{
.reg .b32 a, b;
shl.b32 a, $2, 4; and.b32 a, a, 0x07f007f0; shl.b32 b, $2, 8; lop3.b32 $0, b, 0x80008000, a, 0xEA;
shr.u32 a, $2, 4; and.b32 a, a, 0x07f007f0; lop3.b32 $1, $2, 0x80008000, a, 0xEA;
}""")
# As float16, which there is an instruction for.
FP8_HALVES = tl.constexpr("""{
.reg .b16 low, high; .reg .b32 a; prmt.b32 a, $2, 0, 0x3120; mov.b32 {low, high}, a;
cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high;
}""")
# The lower seven bits of an int8 added to 128 are the bits of a bfloat16; the upper one makes a
# -128 of it or a -256.
INT8_PAIRS = tl.constexpr("""{
.reg .b32 a, b, c, one, none; mov.b32 one, 0x3f803f80; mov.b32 none, 0x80008000;
lop3.b32 a, $2, 0x007f007f, 0x43004300, 0xEA; lop3.b32 b, $2, 0x00800080, 0xc300c300, 0xEA;
fma.rn.bf16x2 a, a, one, b; fma.rn.bf16x2 $0, a, $3, none; shr.u32 c, $2, 8;
lop3.b32 a, c, 0x007f007f, 0x43004300, 0xEA; lop3.b32 b, c, 0x00800080, 0xc300c300, 0xEA;
fma.rn.bf16x2 a, a, one, b; fma.rn.bf16x2 $1, a, $3, none;
}""")
# Four bits (two's complement), the highest turned over, added to 128 are the bits of a bfloat16;
# less 136, the code. $4: two words, $5: scales, $6: offsets; $0 to $3: bits 0, 8, 4 and 12 on of
# each word.
INT4_PAIRS = tl.constexpr("""{
.reg .b32 a, b, one, less; mov.b32 one, 0x3f803f80; mov.b32 less, 0xc308c308;
lop3.b32 a, $4, 0x000f000f, 0x43084308, 0x6A; fma.rn.bf16x2 a, a, one, less; fma.rn.bf16x2 $0, a, $5, $6; shr.u32 b, $4, 8;
lop3.b32 a, b, 0x000f000f, 0x43084308, 0x6A; fma.rn.bf16x2 a, a, one, less; fma.rn.bf16x2 $1, a, $5, $6; shr.u32 b, $4, 4;
lop3.b32 a, b, 0x000f000f, 0x43084308, 0x6A; fma.rn.bf16x2 a, a, one, less; fma.rn.bf16x2 $2, a, $5, $6; shr.u32 b, $4, 12;
lop3.b32 a, b, 0x000f000f, 0x43084308, 0x6A; fma.rn.bf16x2 a, a, one, less; fma.rn.bf16x2 $3, a, $5, $6;
}""")
# `KIND` of the kernels: int8, fp8, int4
KINDS = {torch.int8: 0, torch.float8_e4m3fn: 1, torch.uint8: 2}


@triton.jit
def _number(byte, FP8: tl.constexpr):
    """The number of a byte in an int32; e4m3 times 2**-120."""
    if FP8:
        return (((byte & 0x80) << 24) | ((byte & 0x7F) << 20)).to(tl.float32, bitcast=True)
    else:
        return ((byte ^ 0x80) - 0x80).to(tl.float32)


@triton.jit
def unpack(words, scales, FP8: tl.constexpr, AHEAD: tl.constexpr):
    """The values in words' low bytes and those in their high bytes, times `scales`, which have the
    words' shape."""
    if AHEAD:
        asm: tl.constexpr = FP8_PAIRS if FP8 else INT8_PAIRS
        given = [words, scales.to(tl.bfloat16)]
        return tl.inline_asm_elementwise(
            asm, "=r,=r,r,r", given, dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:  # interpreted
        wide = words.to(tl.int32)
        return _number(wide & 0xFF, FP8) * scales, _number((wide >> 8) & 0xFF, FP8) * scales


@triton.jit
def _scales(scales_ptr, there, FP8: tl.constexpr, BLOCK: tl.constexpr):
    """The scales of a page's keys or values; what is not there becomes zero, whatever its bytes
    are. Two are read as one word, since that is the least an asynchronous copy takes."""
    place = tl.arange(0, BLOCK)
    words = tl.load(scales_ptr + place // 2)
    scales = tl.where(place % 2 == 0, words << 16, words & -65536).to(tl.float32, bitcast=True)
    if FP8:
        scales = scales * 1.329227995784916e36  # 2**120
    return tl.where(there, scales, 0.0)


@triton.jit
def _nibble(words, shift: tl.constexpr):
    return ((((words.to(tl.int32) >> shift) & 15) ^ 8) - 8).to(tl.float32)


@triton.jit
def unpack_four(words, scales, offsets, AHEAD: tl.constexpr):
    """The four values of int4: the values in words' low bytes' lower halves, those in high bytes'
    lower halves, then those in upper halves; times scales, plus offsets."""
    if AHEAD:
        return tl.inline_asm_elementwise(
            INT4_PAIRS, "=r,=r,=r,=r,r,r,r", [words, scales.to(tl.bfloat16), offsets.to(tl.bfloat16)],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    else:  # interpreted
        first, second = _nibble(words, 0) * scales + offsets, _nibble(words, 8) * scales + offsets
        return (
            first,
            second,
            _nibble(words, 4) * scales + offsets,
            _nibble(words, 12) * scales + offsets,
        )


@triton.jit
def _both(scales_ptr, there, BLOCK: tl.constexpr):
    """Scales and offsets of a page's keys or values in int4, a word of 32 bits each."""
    words = tl.load(scales_ptr + tl.arange(0, BLOCK))
    scales, offsets = (
        (words << 16).to(tl.float32, bitcast=True),
        (words & -65536).to(tl.float32, bitcast=True),
    )
    return tl.where(there, scales, 0.0), tl.where(there, offsets, 0.0)


@triton.jit
def _places(KEYS_FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr):
    """The places of the words of a page's keys or values of a head, [keys, width] or [width, keys]."""
    width: tl.constexpr = DIM // 4 if KIND == 2 else DIM // 2
    keys, words = tl.arange(0, BLOCK), tl.arange(0, width)
    if KEYS_FIRST:
        return keys[:, None] * width + words[None, :]
    else:
        return keys[None, :] * width + words[:, None]


@triton.jit
def _plain(words, KEYS: tl.constexpr, AHEAD: tl.constexpr):
    """The plain values of fp8, without scales. Keys become float16, values bfloat16, which have
    them times 2**-120."""
    if not AHEAD:  # interpreted
        wide, factor = words.to(tl.int32), 1.329227995784916e36 if KEYS else 1.0  # 2**120
        return _number(wide & 0xFF, True) * factor, _number((wide >> 8) & 0xFF, True) * factor
    elif KEYS:
        return tl.inline_asm_elementwise(
            FP8_HALVES, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            FP8_PLAIN, "=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )


@triton.jit
def _parts(values_ptr, scales_ptr, there, KEYS_FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
           AHEAD: tl.constexpr):  # fmt: skip
    """The parts of a page's keys or values of a head."""
    at = _places(KEYS_FIRST, DIM, BLOCK, KIND)
    if KIND == 2:
        scales, offsets = _both(scales_ptr, there, BLOCK)
        return unpack_four(
            tl.load(values_ptr + at),
            _wide(scales, at, KEYS_FIRST),
            _wide(offsets, at, KEYS_FIRST),
            AHEAD,
        )
    else:
        scales = _scales(scales_ptr, there, KIND == 1, BLOCK)
        return unpack(tl.load(values_ptr + at), _wide(scales, at, KEYS_FIRST), KIND == 1, AHEAD)


@triton.jit
def _wide(scales, like, KEYS_FIRST: tl.constexpr):
    if KEYS_FIRST:
        return tl.broadcast_to(scales[:, None], like.shape)
    else:
        return tl.broadcast_to(scales[None, :], like.shape)


def places(
    cache: torch.Tensor, scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    """Values as words of 16 bits and scales as words of 32, and how many of each a page is further
    on."""
    words, pairs = cache.view(torch.int16), scales.view(torch.int32)
    return words, pairs, words.stride(0), pairs.stride(0)
