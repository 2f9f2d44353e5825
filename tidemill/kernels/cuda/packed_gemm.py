"""y = x Wᵀ + b with W in 2, 4 or 8 bits and activations in bfloat16: codes become bfloat16 in
registers, just before they are multiplied.

A row is cut into blocks, a block into planes of 32 or 64 neighbouring values. Word j of a block, 16
bits, holds value j of each plane: plane i is taken out of all words by one shift and one mask, two
words at a time, and is the next operand of a matmul in the order of K. So the sums are those of the
dequantized weight in bfloat16.

Few rows by a long K would be one chain of dependent instructions, which takes longer than the
weight takes to arrive. So K is cut into chunks, whose sums are added in order: by the shape of the
weight alone, so that a row's bits are the same at every number of rows. With few rows each chunk is
a program's, and the last one to finish adds them up. With many rows the weight is dequantized into
a buffer and multiplied as bfloat16 weights are, in the same chunks.

Weights are the first operand, which may come from registers; rows of activations are the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tidemill.kernels.cuda.gemm import _finish, _place
from tidemill.kernels.cuda.lanes import lane
from tidemill.kernels.cuda.launch import HOW, begin, how, launch

WORD = 16  # bits
# a code's bits in the upper mantissa of a bfloat16 without exponent are that code over this number
SMALL = 2.0**130
MANY_OUTS = 8192  # from there on a weight is multiplied in one chunk


@dataclass(frozen=True, slots=True)
class PackedTile:
    rows: int
    outs: int
    stages: int
    warps: int
    bulk: int = 0  # rows of x come by the bulk copy engine
    split: int = 0  # a program has one chunk
    second: int = 0  # the weight is the second operand, in shared memory


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix [N, K]. `kind`: what a code and the two halves of its group's word of scales mean.

    zeros: (code - zero) * scale, the zero stored as 128 + zero; offsets: code * scale + offset;
    small: the same with the scale times 2**130; e2m1 and nf4: numbers of values; table: of 16
    values in bfloat16 behind the scales, of which a row has one. Codes of 8 bits are signed; of
    zeros they have none.
    """

    bits: int
    kind: str
    plane: int
    group: int
    num_in: int
    chunk: int  # values of a row that are summed by themselves; all of them, if there are no more
    words_NW: torch.Tensor  # int16
    # int32: scale in the low half, zero or offset in the high one, both bfloat16
    scales_GN: torch.Tensor

    @property
    def num_out(self) -> int:
        return self.words_NW.shape[0]

    @property
    def block(self) -> int:
        return self.plane * WORD // self.bits

    @property
    def num_chunks(self) -> int:
        return triton.cdiv(self.num_in, self.chunk)

    @property
    def num_bytes(self) -> int:
        return self.words_NW.nbytes + self.scales_GN.nbytes


def chunk_of(num_out: int, num_in: int, block: int) -> int:
    """Four, where a weight has too few rows to occupy the GPU with few tokens; what many rows lose
    by it is little then."""
    wanted = 4 if num_in >= 2048 and num_out <= MANY_OUTS else 1
    return triton.cdiv(triton.cdiv(num_in, wanted), block) * block


NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


# ---- layout


def pack(
    codes_NK: torch.Tensor,
    bits: int,
    kind: str,
    scales_NG: torch.Tensor,
    others_NG: torch.Tensor | None,
    plane: int = 0,
    chunk: int = 0,
    table: torch.Tensor | None = None,
) -> Packed:
    """Packs codes in int8 or uint8. `others_NG`: zeros or offsets; None: there are none. `table`:
    of the kind of that name. `plane`: if the groups are not smaller; 0: as the shape is best.
    `chunk`: 0: as `chunk_of` has it."""
    num_in = codes_NK.shape[1]
    group = num_in // scales_NG.shape[1]
    assert group * scales_NG.shape[1] == num_in
    assert group % 32 == 0 or scales_NG.shape[1] == 1
    if scales_NG.shape[1] == 1:
        group = 1 << 30
    plane = plane or 64  # memory reads 128 bytes of a row at a time faster than 64
    plane = plane if group % plane == 0 and bits > 2 else 32
    planes = WORD // bits
    block = plane * planes
    missing = -num_in % block
    codes = codes_NK.view(torch.uint8).to(torch.int32)
    if missing:  # beyond the end activations are zeros
        codes = torch.nn.functional.pad(codes, (0, missing))
    codes = (codes & ((1 << bits) - 1)).unflatten(1, (-1, planes, plane))
    shifts = torch.arange(planes, device=codes.device, dtype=torch.int32) * bits
    words = (codes << shifts[:, None]).sum(2, dtype=torch.int32).to(torch.int16).flatten(1)
    kind, scales_NG, others_NG = _cheapest(bits, kind, scales_NG, others_NG)
    halves = _bfloat16_bits(scales_NG) | (_bfloat16_bits(others_NG) << 16)
    halves = torch.nn.functional.pad(
        halves, (0, triton.cdiv(num_in + missing, group) - halves.shape[1])
    )
    chunk = chunk or chunk_of(codes_NK.shape[0], num_in, block)
    scales_GN = halves.t().contiguous()
    if table is not None:
        assert scales_GN.shape[0] == 1, "of a table, a row has one scale"
        behind = (
            torch.tensor(_bytes_of(table), dtype=torch.int64).to(torch.int32).to(scales_GN.device)
        )
        behind = torch.nn.functional.pad(behind, (0, -len(behind) % scales_GN.shape[1]))
        scales_GN = torch.cat([scales_GN, behind.view(-1, scales_GN.shape[1])])
    return Packed(bits, kind, plane, group, num_in, chunk, words.contiguous(), scales_GN)


def _cheapest(
    bits: int, kind: str, scales_NG: torch.Tensor, others_NG: torch.Tensor | None
) -> tuple[str, torch.Tensor, torch.Tensor]:
    """The kind, scales and others to store: the same weights in the form that takes the fewest
    instructions."""
    scales = _rounded(scales_NG)
    others = torch.zeros_like(scales) if others_NG is None else others_NG.float()
    if bits == 8 or kind not in ("zeros", "offsets"):
        return kind, scales, others + 128 if kind == "zeros" else others
    if kind == "zeros":
        offsets = -others * scales
        # a zero in the middle is a power of two, whose products are exact
        if not torch.equal(_rounded(offsets), offsets):
            return kind, scales, others + 128
        others = offsets
    large = (scales.double() * SMALL).float()
    return ("small", large, others) if bool(large.isfinite().all()) else ("offsets", scales, others)


def _rounded(values: torch.Tensor) -> torch.Tensor:
    return (_bfloat16_bits(values) << 16).view(torch.float32)


def _bfloat16_bits(values: torch.Tensor) -> torch.Tensor:
    """Rounded to even, in the lower half of int32."""
    bits = values.float().view(torch.int32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


def unpack_reference(weight: Packed) -> torch.Tensor:
    """In float32, without rounding."""
    planes = WORD // weight.bits
    shifts = torch.arange(planes, device=weight.words_NW.device, dtype=torch.int32) * weight.bits
    words = weight.words_NW.to(torch.int32).unflatten(1, (-1, 1, weight.plane))
    codes = ((words >> shifts[:, None]) & ((1 << weight.bits) - 1)).flatten(1)[:, : weight.num_in]
    if weight.kind == "table":
        behind = (
            weight.scales_GN.flatten()[weight.num_out : weight.num_out + 8]
            .view(torch.uint8)
            .to(torch.int32)
            .view(2, 16)
        )
        table = (behind[0] << 24 | behind[1] << 16).view(torch.float32)
        return table[codes] * (weight.scales_GN[0] << 16).view(torch.float32)[:, None]
    halves = weight.scales_GN.t().repeat_interleave(min(weight.group, weight.num_in), 1)[
        :, : weight.num_in
    ]
    scale, other = (halves << 16).view(torch.float32), (halves & -65536).view(torch.float32)
    if weight.bits == 8:
        codes = (codes ^ 128) - 128
    if weight.kind in ("nf4", "e2m1"):
        return (
            torch.tensor(NF4 if weight.kind == "nf4" else E2M1, device=codes.device)[codes] * scale
        )
    if weight.kind == "zeros":
        return (codes - (other - 128)) * scale
    if weight.kind == "small":
        scale = (scale.double() / SMALL).float()
    return codes * scale + other


# ---- from words to bfloat16: two words in $1, a scale in both halves of $2 (and $3), zeros or offsets likewise in $4 (and $5)

_ZEROS = """{{.reg .b32 a; shr.u32 a, $1, {shift}; lop3.b32 a, a, {mask}, 0x43004300, 0xEA;
sub.rn.bf16x2 a, a, $4; mul.rn.bf16x2 $0, a, $2;}}"""
_OFFSETS = """{{.reg .b32 a, c; mov.b32 c, 0x43004300; shr.u32 a, $1, {shift}; lop3.b32 a, a, {mask}, 0x43004300, 0xEA;
sub.rn.bf16x2 a, a, c; fma.rn.bf16x2 $0, a, $2, $4;}}"""
# Bits of a code without an exponent are a subnormal number; its scale brings it back.
_SMALL = """{{.reg .b32 a; {shift_up} a, $1, {by}; and.b32 a, a, {mask_up}; fma.rn.bf16x2 $0, a, $2, $4;}}"""
# The lower seven bits of an int8 added to 128 are the bits of a bfloat16; the upper one makes a
# -128 of it or a -256.
_BYTES = """{{.reg .b32 a, b; shr.u32 a, $1, {shift}; lop3.b32 b, a, 0x00800080, 0x43004300, 0xEA;
lop3.b32 a, a, 0x007f007f, 0x43004300, 0xEA; sub.rn.bf16x2 a, a, b; """
_BYTES_PLAIN = _BYTES + "mul.rn.bf16x2 $0, a, $2;}}"
_BYTES_OFFSETS = _BYTES + "fma.rn.bf16x2 $0, a, $2, $4;}}"
# The bits of e2m1, moved to where bfloat16 has them, are that number times 2**-126.
_E2M1 = """{{.reg .b32 a, b, c; mov.b32 c, 0x7e807e80; shr.u32 a, $1, {shift}; and.b32 b, a, 0x00070007; shl.b32 b, b, 6;
shl.b32 a, a, 12; lop3.b32 a, a, 0x80008000, b, 0xEA; mul.rn.bf16x2 a, a, c; mul.rn.bf16x2 $0, a, $2;}}"""


def _bytes_of(table: Any) -> list[int]:
    """The bytes of 16 numbers in bfloat16: four words of their upper bytes, four of the lower ones."""
    bits = _bfloat16_bits(torch.as_tensor(table, dtype=torch.float32)).tolist()
    halves = [[(one >> shift) & 255 for one in bits] for shift in (8, 0)]
    return [
        sum(byte << (8 * j) for j, byte in enumerate(half[i : i + 4]))
        for half in halves
        for i in range(0, 16, 4)
    ]


def _look_up(words: list[str]) -> str:
    """In a table of 16 numbers, in the words of `_bytes_of`: a permutation looks up four bytes in
    two of them."""
    h0, h1, h2, h3, l0, l1, l2, l3 = words
    return f"""{{{{.reg .b32 a, s, m, p, q, r, t, u, v; shr.u32 a, $1, {{shift}}; and.b32 a, a, 0x000f000f;
shr.u32 s, a, 12; or.b32 s, s, a; and.b32 s, s, 0x77; shl.b32 m, a, 4; prmt.b32 m, m, 0, 0xAA88;
mov.b32 p, {h0}; mov.b32 q, {h1}; prmt.b32 t, p, q, s; mov.b32 p, {h2}; mov.b32 q, {h3}; prmt.b32 u, p, q, s;
mov.b32 p, {l0}; mov.b32 q, {l1}; prmt.b32 v, p, q, s; mov.b32 p, {l2}; mov.b32 q, {l3}; prmt.b32 r, p, q, s;
prmt.b32 t, v, t, 0x5140; prmt.b32 u, r, u, 0x5140; lop3.b32 a, t, u, m, 0xD8; mul.rn.bf16x2 $0, a, $2;}}}}"""


_TEXTS = {
    (4, "zeros"): _ZEROS,
    (2, "zeros"): _ZEROS,
    (4, "offsets"): _OFFSETS,
    (2, "offsets"): _OFFSETS,
    (4, "small"): _SMALL,
    (2, "small"): _SMALL,
    (8, "zeros"): _BYTES_PLAIN,
    (8, "offsets"): _BYTES_OFFSETS,
    (4, "e2m1"): _E2M1,
    (4, "nf4"): _look_up([f"0x{word:08x}" for word in _bytes_of(NF4)]),
    (4, "table"): _look_up([f"${4 + 2 * i}" for i in range(8)]),  # each in two operands
}


@triton.constexpr_function
def _assembly(bits: int, kind: str, plane: int) -> str:
    mask, up = (1 << bits) - 1, 3 - bits * plane
    return _TEXTS[bits, kind].format(
        shift=bits * plane, mask=f"0x{mask << 16 | mask:08x}",
        shift_up="shl.b32" if up > 0 else "shr.u32", by=abs(up), mask_up=f"0x{(mask << 16 | mask) << 3:08x}",
    )  # fmt: skip


@triton.jit
def _table(scales_ptr, num_out, KIND: tl.constexpr):
    """The words of the table behind the scales."""
    if KIND == "table":
        at = scales_ptr + num_out
        high = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
        return high + (tl.load(at + 4), tl.load(at + 5), tl.load(at + 6), tl.load(at + 7))
    else:
        return ()


@triton.jit
def _unpack(
    words,
    scales,
    table,
    PLANE: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """A plane of words [OUTS, values], with the scales [OUTS] of its group. `table`: as `_table`
    has it."""
    if KIND == "table" and AHEAD:
        twice = tl.broadcast_to(((scales & 0xFFFF) | (scales << 16))[:, None], words.shape)
        look_up: tl.constexpr = _assembly(BITS, KIND, PLANE)
        return tl.inline_asm_elementwise(
            look_up, "=r,r,r,r" + ",r,r" * 8,
            [words, twice, table[0], table[1], table[2], table[3], table[4], table[5], table[6], table[7]],
            dtype=tl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    elif AHEAD:
        twice = tl.broadcast_to(((scales & 0xFFFF) | (scales << 16))[:, None], words.shape)
        other = tl.broadcast_to(
            ((scales & -65536) | ((scales >> 16) & 0xFFFF))[:, None], words.shape
        )
        asm: tl.constexpr = _assembly(BITS, KIND, PLANE)
        return tl.inline_asm_elementwise(
            asm, "=r,r,r,r,r,r", [words, twice, other], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:  # interpreted
        code = (words.to(tl.int32) >> (BITS * PLANE)) & ((1 << BITS) - 1)
        scale = (scales << 16).to(tl.float32, bitcast=True)[:, None]
        other = (scales & -65536).to(tl.float32, bitcast=True)[:, None]
        if BITS == 8:
            code = (code ^ 128) - 128
        if KIND == "e2m1":
            exponent, mantissa = (code >> 1) & 3, (code & 1).to(tl.float32)
            size = tl.where(
                exponent == 0,
                mantissa * 0.5,
                (1.0 + mantissa * 0.5) * (1 << exponent).to(tl.float32) * 0.5,
            )
            return tl.where(code >= 8, -size, size) * scale
        elif KIND == "nf4":
            value = scale * 0.0
            for i in tl.static_range(16):
                value = tl.where(code == i, _NF4[i], value)
            return value * scale
        elif KIND == "table":
            value = scale * 0.0
            for i in tl.static_range(16):
                high, low = (
                    (table[i // 4] >> (i % 4 * 8)) & 255,
                    (table[4 + i // 4] >> (i % 4 * 8)) & 255,
                )
                value = tl.where(
                    code == i, (high << 24 | low << 16).to(tl.float32, bitcast=True), value
                )
            return value * scale
        elif KIND == "offsets":
            return code.to(tl.float32) * scale + other
        elif KIND == "small":
            return code.to(tl.float32) * (scale * _TO_SCALE) + other
        else:
            return (code.to(tl.float32) - (other - 128.0) * (BITS < 8)) * scale


_NF4 = tl.constexpr(NF4)
_TO_SCALE = tl.constexpr(1 / SMALL)


# ---- the matmul


@triton.jit
def _sum_chunk(
    x_desc, x_ptr, words_ptr, scales_ptr, first, last, m, outs, num_rows, num_out, num_in, num_words,
    ROWS: tl.constexpr, OUTS: tl.constexpr, PLANE: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr,
    BULK: tl.constexpr, EVEN: tl.constexpr, SECOND: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Blocks from `first` to `last`; [ROWS, OUTS]."""
    rows, ins = m * ROWS + tl.arange(0, ROWS), tl.arange(0, PLANE)
    planes: tl.constexpr = 16 // BITS
    there = tl.minimum(outs, num_out - 1)
    w = words_ptr + there[:, None].to(tl.int64) * num_words + first * PLANE + ins[None, :]
    x = x_ptr + rows[None, :].to(tl.int64) * num_in + ins[:, None]
    acc = tl.zeros((ROWS, OUTS) if SECOND else (OUTS, ROWS), tl.float32)
    table = _table(scales_ptr, num_out, KIND)
    for step in range(first, last):
        words = tl.load(w)
        k = step * (PLANE * planes)
        for i in tl.static_range(planes):
            at = k + i * PLANE
            if i == 0 or (i * PLANE) % SIZE == 0:
                scales = tl.load(scales_ptr + (at // SIZE).to(tl.int64) * num_out + there)
            weights = _unpack(words, scales, table, i, BITS, KIND, AHEAD)
            if BULK:
                part = x_desc.load([m * ROWS, at]).T
            elif EVEN:
                part = tl.load(x + at, mask=rows[None, :] < num_rows, other=0.0)
            else:
                part = tl.load(
                    x + at,
                    mask=(rows[None, :] < num_rows) & (at + ins[:, None] < num_in),
                    other=0.0,
                )
            acc = tl.dot(part.T, weights.T, acc) if SECOND else tl.dot(weights, part, acc)
        w += PLANE
    return acc if SECOND else acc.T


@triton.jit
def _store(
    acc, bias_ptr, out_ptr, m, n, num_rows, num_out,
    ROWS: tl.constexpr, OUTS: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    rows, outs = m * ROWS + tl.arange(0, ROWS), n * OUTS + tl.arange(0, OUTS)
    acc = _finish(acc, bias_ptr, outs, num_out, HAS_BIAS, ACT, ROWS, OUTS, out_ptr.dtype.element_ty)
    width: tl.constexpr = OUTS // 2 if ACT != "" else OUTS
    num_out = num_out // 2 if ACT != "" else num_out
    outs = n * width + tl.arange(0, width)
    where = out_ptr + rows[:, None].to(tl.int64) * num_out + outs[None, :]
    tl.store(
        where,
        acc.to(out_ptr.dtype.element_ty),
        mask=(rows[:, None] < num_rows) & (outs[None, :] < num_out),
    )


@triton.jit(do_not_specialize=["num_rows"])
def _gemm_packed(
    x_desc, x_ptr, words_ptr, scales_ptr, bias_ptr, out_ptr, partial_ptr, done_ptr, num_rows, num_out, num_in, num_words,
    ROWS: tl.constexpr, OUTS: tl.constexpr, PLANE: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCKS: tl.constexpr, SPLIT: tl.constexpr, SECOND: tl.constexpr, BULK: tl.constexpr, EVEN: tl.constexpr,
    GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """`BLOCKS`: of a chunk. `SPLIT`: a program has one chunk, else all. `SECOND`: the weight is the
    second operand. Reference: `quantized_linear.quantized_linear_reference`."""
    begin(AHEAD)
    m, n = _place(num_rows, num_out, ROWS, OUTS, GROUP)
    outs, num_blocks = n * OUTS + tl.arange(0, OUTS), num_words // PLANE
    if SPLIT:
        chunk, tile = tl.program_id(1), tl.program_id(0)
        acc = _sum_chunk(
            x_desc, x_ptr, words_ptr, scales_ptr, chunk * BLOCKS, tl.minimum(num_blocks, chunk * BLOCKS + BLOCKS), m, outs,
            num_rows, num_out, num_in, num_words, ROWS, OUTS, PLANE, BITS, KIND, SIZE, BULK, EVEN, SECOND, AHEAD,
        )  # fmt: skip
        place = tl.arange(0, ROWS)[:, None] * OUTS + tl.arange(0, OUTS)[None, :]
        parts = partial_ptr + tile.to(tl.int64) * (CHUNKS * OUTS * ROWS) + place
        tl.store(parts + chunk * (OUTS * ROWS), acc)
        tl.debug_barrier()
        # the last one adds them up
        if tl.atomic_add(done_ptr + tile, 1, sem="acq_rel", scope="gpu") == CHUNKS - 1:
            tl.store(done_ptr + tile, 0)
            total = tl.zeros((ROWS, OUTS), tl.float32)
            for i in tl.static_range(CHUNKS):
                total += tl.load(parts + i * (OUTS * ROWS), cache_modifier=".cg")
            _store(total, bias_ptr, out_ptr, m, n, num_rows, num_out, ROWS, OUTS, HAS_BIAS, ACT)
    elif CHUNKS > 1:
        total = tl.zeros((ROWS, OUTS), tl.float32)
        for chunk in range(CHUNKS):
            total += _sum_chunk(
                x_desc, x_ptr, words_ptr, scales_ptr, chunk * BLOCKS, tl.minimum(num_blocks, chunk * BLOCKS + BLOCKS), m, outs,
                num_rows, num_out, num_in, num_words, ROWS, OUTS, PLANE, BITS, KIND, SIZE, BULK, EVEN, SECOND, AHEAD,
            )  # fmt: skip
        _store(total, bias_ptr, out_ptr, m, n, num_rows, num_out, ROWS, OUTS, HAS_BIAS, ACT)
    else:
        acc = _sum_chunk(
            x_desc, x_ptr, words_ptr, scales_ptr, 0, num_blocks, m, outs,
            num_rows, num_out, num_in, num_words, ROWS, OUTS, PLANE, BITS, KIND, SIZE, BULK, EVEN, SECOND, AHEAD,
        )  # fmt: skip
        _store(acc, bias_ptr, out_ptr, m, n, num_rows, num_out, ROWS, OUTS, HAS_BIAS, ACT)


@triton.jit(do_not_specialize=["num_rows"])
def _gemm_chunked(
    x_desc, w_desc, bias_ptr, out_ptr, num_rows, num_out, num_in,
    ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACT: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The product of bfloat16 matrices, in chunks. Reference: `linear.linear_reference`."""
    begin(AHEAD)
    m, n = _place(num_rows, num_out, ROWS, OUTS, GROUP)
    total = tl.zeros((ROWS, OUTS), tl.float32)
    for chunk in range(CHUNKS):
        acc = tl.zeros((ROWS, OUTS), tl.float32)
        for k in range(chunk * CHUNK, tl.minimum(num_in, chunk * CHUNK + CHUNK), INS):
            acc = tl.dot(x_desc.load([m * ROWS, k]), w_desc.load([n * OUTS, k]).T, acc)
        total += acc
    _store(total, bias_ptr, out_ptr, m, n, num_rows, num_out, ROWS, OUTS, HAS_BIAS, ACT)


@triton.jit
def _dequantize(
    ids_ptr, words_ptr, scales_ptr, out_ptr, num_rows, num_out, num_in, num_words,
    HAS_IDS: tl.constexpr, OUTS: tl.constexpr, PLANE: tl.constexpr, BITS: tl.constexpr, KIND: tl.constexpr, SIZE: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """All rows, or those of some ids. Reference: `cuda.packed_gemm.unpack_reference`."""
    begin(AHEAD)
    rows, ins = tl.program_id(0) * OUTS + tl.arange(0, OUTS), tl.arange(0, PLANE)
    outs = rows
    if HAS_IDS:
        outs = tl.load(ids_ptr + rows, mask=rows < num_rows, other=0)
    there = tl.minimum(outs, num_out - 1).to(tl.int64)
    planes: tl.constexpr = 16 // BITS
    step, table = tl.program_id(1), _table(scales_ptr, num_out, KIND)
    words = tl.load(words_ptr + there[:, None] * num_words + step * PLANE + ins[None, :])
    for i in tl.static_range(planes):
        at = step * (PLANE * planes) + i * PLANE
        if i == 0 or (i * PLANE) % SIZE == 0:
            scales = tl.load(scales_ptr + (at // SIZE).to(tl.int64) * num_out + there)
        values = _unpack(words, scales, table, i, BITS, KIND, AHEAD)
        where = out_ptr + rows[:, None].to(tl.int64) * num_in + at + ins[None, :]
        tl.store(
            where,
            values.to(out_ptr.dtype.element_ty),
            mask=(rows[:, None] < num_rows) & (at + ins[None, :] < num_in),
        )


def _what(weight: Packed) -> dict[str, Any]:
    return {"PLANE": weight.plane, "BITS": weight.bits, "KIND": weight.kind, "SIZE": weight.group}


def dequantize(
    weight: Packed,
    ids_T: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The whole matrix, or some rows; into `out`, if given."""
    num_rows = weight.num_out if ids_T is None else ids_T.shape[0]
    if out is None:
        out = torch.empty(num_rows, weight.num_in, dtype=dtype, device=weight.words_NW.device)
    num_words = weight.words_NW.shape[1]
    launch(
        _dequantize, (triton.cdiv(num_rows, 32), num_words // weight.plane),
        weight.scales_GN if ids_T is None else ids_T, weight.words_NW, weight.scales_GN, out, num_rows, weight.num_out,
        weight.num_in, num_words, HAS_IDS=ids_T is not None, OUTS=32, num_warps=4, **_what(weight), **HOW,
    )  # fmt: skip
    return out


def own_tile(num_rows: int, num_out: int, num_in: int, bits: int, plane: int) -> PackedTile:
    """The tile that was best on an H200 (bench/gpu_quant.py). It changes at numbers of
    `gemm.CHOICES` only."""
    if num_out > MANY_OUTS:
        if num_rows <= 16:
            return PackedTile(8 if num_rows <= 4 else 16, 64, 4, 2)
        if num_rows <= 32 and plane > 32:
            return PackedTile(32, 64, 3, 4)
        if num_rows <= 64:
            return PackedTile(64, 128 if plane == 32 else 64, 3, 4)
        return (
            PackedTile(256, 128, 3, 8, 1)
            if bits > 2 and plane == 32
            else PackedTile(128, 128, 2, 8, 1)
        )
    if num_rows <= 4:
        return PackedTile(8, 64, 3, 4, 0, 1)
    if num_rows <= 32:
        return PackedTile(16 if num_rows <= 16 else 32, 64, 3, 4, 0, 1)
    if num_rows <= 64:
        return PackedTile(64, 64, 3, 4, 0, 1)
    return PackedTile(128, 128, 2, 8, 1, 1) if num_in > 8192 else PackedTile(128, 64, 3, 4, 1)


@cache
def choose_tile(num_rows: int, num_out: int, num_in: int, bits: int, plane: int) -> PackedTile:
    return own_tile(num_rows, num_out, num_in, bits, plane)


# By device and lane: sums of chunks, and how many of a tile are there.
_workspaces: dict[tuple[torch.device, int], tuple[torch.Tensor, torch.Tensor]] = {}


def _workspace(
    device: torch.device, num_sums: int, num_tiles: int
) -> tuple[torch.Tensor, torch.Tensor]:
    where = device, lane()
    sums, done = _workspaces.get(where, (None, None))
    if sums is None or done is None or sums.numel() < num_sums or done.numel() < num_tiles:
        sums = torch.empty(max(2**22, num_sums), dtype=torch.float32, device=device)
        done = torch.zeros(max(2**14, num_tiles), dtype=torch.int32, device=device)
        _workspaces[where] = sums, done
    return sums, done


def gemm_chunked(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor,
    chunk: int,
    *,
    bias_N: torch.Tensor | None = None,
    act: str = "",
    tile: tuple[int, int, int, int, int] = (256, 128, 64, 3, 16),
) -> torch.Tensor:
    """A dequantized weight's, in chunks of K. `tile`: rows, outs, ins, stages, warps."""
    num_rows, num_in = x_TK.shape
    num_out = weight_NK.shape[0]
    out = x_TK.new_empty(num_rows, num_out // 2 if act else num_out)
    rows, outs, ins, stages, warps = tile
    launch(
        _gemm_chunked, (triton.cdiv(num_rows, rows) * triton.cdiv(num_out, outs),),
        TensorDescriptor.from_tensor(x_TK, [rows, ins]), TensorDescriptor.from_tensor(weight_NK, [outs, ins]),
        weight_NK if bias_N is None else bias_N, out, num_rows, num_out, num_in, ROWS=rows, OUTS=outs, INS=ins,
        CHUNKS=triton.cdiv(num_in, chunk), CHUNK=chunk, GROUP=8, HAS_BIAS=bias_N is not None, ACT=act, num_stages=stages,
        num_warps=warps, **HOW,
    )  # fmt: skip
    return out


def gemm_packed(
    x_TK: torch.Tensor,
    weight: Packed,
    tile: PackedTile | None = None,
    *,
    bias_N: torch.Tensor | None = None,
    act: str = "",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`act`, `out`: as `gemm` has them."""
    num_rows, num_in = x_TK.shape
    num_out = weight.num_out
    tile = tile or choose_tile(num_rows, num_out, num_in, weight.bits, weight.plane)
    if out is None:
        out = x_TK.new_empty(num_rows, num_out // 2 if act else num_out)
    num_tiles, chunks = (
        triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_out, tile.outs),
        weight.num_chunks,
    )
    split = bool(tile.split) and chunks > 1
    grid = (num_tiles, chunks) if split else (num_tiles,)
    partial, done = _workspace(
        x_TK.device, *((num_tiles * chunks * tile.rows * tile.outs, num_tiles) if split else (1, 1))
    )
    launch(
        _gemm_packed, grid,
        TensorDescriptor.from_tensor(x_TK, [tile.rows, weight.plane]) if tile.bulk and num_in % 8 == 0 else x_TK,
        x_TK, weight.words_NW, weight.scales_GN, weight.scales_GN if bias_N is None else bias_N, out, partial, done, num_rows,
        num_out, num_in, weight.words_NW.shape[1], CHUNKS=chunks, BLOCKS=weight.chunk // weight.block, SPLIT=split,
        SECOND=tile.second, ROWS=tile.rows, OUTS=tile.outs, BULK=bool(tile.bulk) and num_in % 8 == 0,
        EVEN=num_in % weight.block == 0, GROUP=8, HAS_BIAS=bias_N is not None, ACT=act, num_stages=tile.stages,
        num_warps=tile.warps, **_what(weight), **(HOW if act else how(num_rows)),
    )  # fmt: skip
    return out
