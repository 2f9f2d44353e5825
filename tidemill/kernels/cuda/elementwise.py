"""A step's tokens, norms with residual addition, activations, and what happens to q, k and v between projection and attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tidemill.kernels.cuda.launch import HOW, begin, how, is_compiling, launch
from tidemill.kernels.handover import CHUNKS, Handover, with_added
from tidemill.kernels.kv_cache import PLAIN, Angles, HeadWeights

LARGEST = {torch.float8_e4m3fn: 448, torch.int8: 127, torch.uint8: 7}  # of the values of types that have scales; the last: int4


@dataclass(frozen=True, slots=True)
class Scaled:
    """A matrix [N, K] of 8-bit values; columns are padded with zeros to a multiple of ALIGN."""

    values_NK: torch.Tensor  # float8_e4m3fn or int8
    scales: torch.Tensor  # float32: [N], or [K / 128, N]

    @property
    def has_blocks(self) -> bool:
        return self.scales.dim() == 2


@triton.jit(do_not_specialize=["num", "slots_width"])
def _look_up(
    rows_ptr, positions_ptr, tokens_ptr, pages_ptr, ids_ptr, slots_ptr, num, tokens_width, pages_width, group_width, slots_width,
    PAGE: tl.constexpr, HAS_PAGES: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    begin(AHEAD)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < num
    group = tl.program_id(1)
    row = tl.load(rows_ptr + i, mask=there, other=0).to(tl.int64)
    position = tl.load(positions_ptr + i, mask=there, other=0)
    token = tl.load(tokens_ptr + row * tokens_width + position, mask=there, other=0)
    tl.store(ids_ptr + i, token, mask=there)  # the same from every group
    if HAS_PAGES:
        page = tl.load(pages_ptr + row * pages_width + group * group_width + position // PAGE, mask=there, other=0)
        tl.store(slots_ptr + group * slots_width + i, page.to(tl.int64) * PAGE + position % PAGE, mask=there)


def look_up(
    rows_T: torch.Tensor, positions_T: torch.Tensor, tokens: torch.Tensor, tables: list[torch.Tensor], page_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens' ids (int32) and their slots in each group's pages. `tables`: parts of one row, side by side, of one width;
    none of a model without keys and values."""
    made = torch.zeros_like if is_compiling() else torch.empty_like  # embeddings are looked up by these ids then too
    num = rows_T.numel()
    ids, slots = made(rows_T), torch.empty(len(tables), -(-num // 4) * 4, dtype=torch.int64, device=rows_T.device)
    table = tables[0] if tables else tokens
    launch(
        _look_up, (triton.cdiv(num, 256), max(1, len(tables))),
        rows_T, positions_T, tokens, table, ids, slots, num, tokens.shape[1], table.stride(0), table.shape[1],
        slots.shape[1], PAGE=page_size, HAS_PAGES=len(tables) > 0, BLOCK=256, **HOW,
    )  # fmt: skip
    return ids, slots[:, :num]


@triton.jit
def _add_rms_norm(
    x_ptr, added_ptr, residual_ptr, weight_ptr, out_ptr, codes_ptr, scales_ptr, width, eps, factor,
    CHUNKS: tl.constexpr, ADDS: tl.constexpr, CODES: tl.constexpr, PLAIN: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """`CHUNKS`: of which x is the sum, [chunk, row, column]; 0: there is no x. `ADDS`: to that, what adapters add.
    `CODES`: the largest value of the 8-bit type in which the norm is written, with a scale for the row; 0: it is not. `PLAIN`: it
    is written as it is."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    begin(AHEAD)
    value = tl.load(residual_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    if CHUNKS:
        x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        for chunk in tl.static_range(1, CHUNKS):
            x += tl.load(x_ptr + (chunk * tl.num_programs(0) + row) * width + columns, mask=inside, other=0.0)
        if ADDS:
            x += tl.load(added_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        value += x.to(residual_ptr.dtype.element_ty).to(tl.float32) * factor
        rounded = value.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * width + columns, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / width + eps)
    value = (value * scale * weight).to(residual_ptr.dtype.element_ty)
    if PLAIN:
        tl.store(out_ptr + row * width + columns, value, mask=inside)
    if CODES:
        scale, codes = quantized(tl.where(inside, value.to(tl.float32), 0.0), 0, CODES, AHEAD)
        tl.store(codes_ptr + row * width + columns, codes, mask=inside)
        tl.store(scales_ptr + row, scale)


def _of_a_row(width: int) -> dict[str, int]:
    """A program has a whole row."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(8, max(1, block // 512))}


def add_rms_norm(
    x_TH: torch.Tensor | None,
    residual_TH: torch.Tensor,
    weight_H: torch.Tensor,
    eps: float,
    scale: float = 1.0,
    handover: Handover | None = None,
    alone: bool = False,
) -> torch.Tensor:
    """Adds x * scale, if there is an x, to the residual in place and returns the norm of the sum. `handover`: the result is put
    in there, too, in its type; `alone`: only there. What is returned has no memory then, so that nothing can read it."""
    alone = alone and handover is not None
    out = torch.empty_like(residual_TH, device="meta" if alone else None)
    num_rows, width = residual_TH.shape
    (x, added), made = with_added(residual_TH if x_TH is None else x_TH), None
    sums = CHUNKS.take(x)
    assert x.device.type != "meta" or sums is not None, "nobody has what should be added"
    if handover is not None:
        made = Scaled(torch.empty_like(residual_TH, dtype=handover.dtype), residual_TH.new_empty(num_rows, dtype=torch.float32))
    launch(
        _add_rms_norm, (num_rows,), x if sums is None else sums, residual_TH if added is None else added, residual_TH,
        weight_H, residual_TH if alone else out,
        out if made is None else made.values_NK.view(torch.int8), out if made is None else made.scales, width, eps, scale,
        CHUNKS=0 if x_TH is None else 1 if sums is None else sums.shape[0], ADDS=added is not None,
        CODES=0 if handover is None else LARGEST[handover.dtype], PLAIN=not alone, **_of_a_row(width), **how(num_rows),
    )  # fmt: skip
    if handover is not None and made is not None:
        handover.put(out, made)
    return out


@triton.jit
def _post_norm(x_ptr, residual_ptr, weight_ptr, out_ptr, width, eps, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    begin(AHEAD)
    x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(out_ptr + row * width + columns, (residual + x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


def post_norm(x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float) -> torch.Tensor:
    """The sum of the residual and the norm of x."""
    out = torch.empty_like(residual_TH)
    num_rows, width = residual_TH.shape
    launch(_post_norm, (num_rows,), x_TH, residual_TH, weight_H, out, width, eps, **_of_a_row(width), **how(num_rows))
    return out


@triton.jit
def _qk_norm(qkv_ptr, q_ptr, k_ptr, num_q, num_k, num_columns, eps, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    """The norm of a row's queries or its keys, in place."""
    is_k = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    width = tl.where(is_k == 1, num_k, num_q)
    inside = columns < width
    weight = tl.load(q_ptr + columns, mask=columns < num_q * (1 - is_k), other=0.0).to(tl.float32)
    weight += tl.load(k_ptr + columns, mask=columns < num_k * is_k, other=0.0).to(tl.float32)
    begin(AHEAD)
    base = qkv_ptr + tl.program_id(0).to(tl.int64) * num_columns + is_k * num_q
    x = tl.load(base + columns, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(base + columns, (x * scale * weight).to(qkv_ptr.dtype.element_ty), mask=inside)


def qk_norm(qkv_TC: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm of all query heads of a row together, and of all key heads, in place."""
    num_q, num_k = q_weight.numel(), k_weight.numel()
    launch(
        _qk_norm, (qkv_TC.shape[0], 2), qkv_TC, q_weight, k_weight, num_q, num_k, qkv_TC.shape[1], eps,
        **_of_a_row(max(num_q, num_k)), **how(qkv_TC.shape[0]),
    )  # fmt: skip
    return qkv_TC


@triton.jit
def _add_layer_norm(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, width, eps,
    HAS_X: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    begin(AHEAD)
    value = tl.load(residual_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_X:
        value += tl.load(x_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * width + columns, rounded, mask=inside)
        value = rounded.to(tl.float32)
    centred = tl.where(inside, value - tl.sum(value, 0) / width, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / width + eps)
    tl.store(out_ptr + row * width + columns, (centred * scale * weight + bias).to(out_ptr.dtype.element_ty), mask=inside)


def add_layer_norm(
    x_TH: torch.Tensor | None, residual_TH: torch.Tensor, weight_H: torch.Tensor, bias_H: torch.Tensor, eps: float
) -> torch.Tensor:
    """Adds x, if any, to the residual in place and returns the LayerNorm of the sum."""
    out = torch.empty_like(residual_TH)
    num_rows, width = residual_TH.shape
    x = residual_TH if x_TH is None else x_TH
    launch(
        _add_layer_norm, (num_rows,), x, residual_TH, weight_H, bias_H, out, width, eps, HAS_X=x_TH is not None,
        **_of_a_row(width), **how(num_rows),
    )  # fmt: skip
    return out


@triton.jit
def activated(x, ACT: tl.constexpr):
    """The activation function of kernels/glu.py."""
    if ACT == "relu":
        return tl.where(x < 0.0, 0.0, x)
    elif ACT == "relu2":
        positive = tl.where(x < 0.0, 0.0, x)
        return positive * positive
    elif ACT == "gelu":
        size = tl.abs(x) * 0.70710678118654752
        t = 1.0 / (1.0 + 0.3275911 * size)
        tail = (((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592
        return tl.where(x < 0.0, 0.0, x) - tail * t * tl.exp(-size * size) * size * 0.70710678118654752
    else:
        z = x
        if ACT == "gelu_tanh":
            z = x * tl.fma(x * x, x * 0.0 + 0.0713548162726, x * 0.0 + 1.5957691216)
        return x / (1.0 + tl.exp(-z))


@triton.jit
def gated(gate, up, ACT: tl.constexpr):
    """act(gate) * up. What is not a number stays so."""
    if ACT == "swiglu_clamped":
        gate, up = tl.where(gate > 7.0, 7.0, gate), tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        return gate / (1.0 + tl.exp(gate * -1.702)) * (up + 1.0)
    else:
        return activated(gate, ACT) * up


@triton.jit(do_not_specialize=["num"])
def _activate(x_ptr, out_ptr, num, ACT: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    begin(AHEAD)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < num, other=0.0).to(tl.float32)
    tl.store(out_ptr + i, activated(x, ACT).to(out_ptr.dtype.element_ty), mask=i < num)


def activate(x_TI: torch.Tensor, act: str) -> torch.Tensor:
    out, num = torch.empty_like(x_TI), x_TI.numel()
    launch(_activate, (triton.cdiv(num, 1024),), x_TI, out, num, ACT=act, BLOCK=1024, num_warps=4, **HOW)
    return out


@triton.jit
def _glu(gate_up_ptr, out_ptr, width, ACT: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    begin(AHEAD)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    both = tl.program_id(1) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    values = tl.load(gate_up_ptr + row * 2 * width + both, mask=both < 2 * width, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(values, (BLOCK, 2)))
    tl.store(out_ptr + row * width + columns, gated(gate, up, ACT).to(out_ptr.dtype.element_ty), mask=columns < width)


def glu(gate_up_TI2: torch.Tensor, act: str) -> torch.Tensor:
    """The gated activation of columns that hold gate and up in turn. (Our own matmul has it built in; this follows the
    library's.)"""
    num_rows, width = gate_up_TI2.shape[0], gate_up_TI2.shape[1] // 2
    out = gate_up_TI2.new_empty(num_rows, width)
    launch(_glu, (num_rows, triton.cdiv(width, 1024)), gate_up_TI2, out, width, ACT=act, BLOCK=1024, num_warps=4, **HOW)
    return out


@triton.jit
def _scale_of(x, y, LARGEST: tl.constexpr):
    """A scale for each row of both, as kv_cache.quantize has it: bfloat16, in fp8 a power of two, rounded up, in the upper half
    of its bits; and what values are multiplied by. In fp8, scales end at 2**7: the attention kernels have them times 2**120."""
    top = tl.maximum(tl.max(tl.abs(x), 1), tl.max(tl.abs(y), 1))
    top = tl.where(top < 1e-30, 0.0, top)
    bits = tl.div_rn(top, tl.zeros_like(top) + LARGEST).to(tl.int32, bitcast=True)
    if LARGEST == 448:
        bits = tl.minimum((bits + 0x7FFFFF) & -8388608, 0x43000000)
    else:
        bits = (bits + 0xFFFF) & -65536
    scale = bits.to(tl.float32, bitcast=True)
    factor = tl.where(top > 0.0, tl.div_rn(tl.zeros_like(scale) + 1.0, scale), 0.0)
    is_finite = tl.sum(x - x, 1) + tl.sum(y - y, 1) == 0.0
    return tl.where(is_finite, bits, 0x7FC00000), tl.where(is_finite, factor, 0.0)


@triton.jit
def _scale_and_offset(x, y):
    """The scales and offsets of each row of both, for int4, as kv_cache.quantize has them: the scale's bits, the offset, and what
    values less the offset are multiplied by."""
    high, low = tl.maximum(tl.max(x, 1), tl.max(y, 1)), tl.minimum(tl.min(x, 1), tl.min(y, 1))
    offset = low * 0.5 + high * 0.5 + (high - low) * 0.03333333333
    bits = offset.to(tl.int32, bitcast=True)
    offset = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    step = tl.maximum((high - offset) * 0.14285714285, (offset - low) * 0.125)
    step = tl.where(step < 1e-30, 0.0, step)
    bits = (step.to(tl.int32, bitcast=True) + 0xFFFF) & -65536
    scale = bits.to(tl.float32, bitcast=True)
    is_finite = (tl.sum(x - x, 1) + tl.sum(y - y, 1) == 0.0) & (step - step == 0.0)
    factor = tl.where(is_finite & (step > 0.0), tl.div_rn(tl.zeros_like(scale) + 1.0, scale), 0.0)
    return tl.where(is_finite, bits, 0x7FC00000), tl.where(is_finite, offset, 0.0), factor


@triton.jit
def _code_of(x, LARGEST: tl.constexpr):
    """The nearest int8, or e4m3: the upper bits of a float32 times 2**-120, rounded to even."""
    if LARGEST == 448:
        bits = (tl.abs(x) * 7.52316384526264e-37).to(tl.int32, bitcast=True)
        code = tl.minimum((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20, 0x7E)
        return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.int8)
    else:
        return ((x + 12582912.0) - 12582912.0).to(tl.int8)


@triton.jit
def rounded(x, LARGEST: tl.constexpr, AHEAD: tl.constexpr):
    """To bytes; the largest stand for what is beyond them."""
    if LARGEST == 448 and AHEAD:
        return x.to(tl.float8e4nv).to(tl.int8, bitcast=True)  # one instruction for two
    else:
        return _code_of(x if LARGEST == 448 else tl.clamp(x, -127.0, 127.0), LARGEST)


@triton.jit
def quantized(x, axis: tl.constexpr, LARGEST: tl.constexpr, AHEAD: tl.constexpr):
    """A scale for each row, which is NaN if a value is not finite, and the values over it."""
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis)  # as integers, what is not finite is the largest
    is_finite, top = bits < 0x7F800000, bits.to(tl.float32, bitcast=True)
    factor = tl.where(is_finite & (top > 1e-30), tl.div_rn(tl.zeros_like(top) + LARGEST, top), 0.0)
    scale = tl.where(is_finite, tl.div_rn(top, tl.zeros_like(top) + LARGEST), float("nan"))
    x = x * tl.expand_dims(factor, axis)
    return scale, rounded(tl.where(x == x, x, 0.0), LARGEST, AHEAD)


@triton.jit
def _enter_heads(
    qkv_ptr, added_ptr, cache_ptr, scales_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, layer_offset,
    page_stride, layer_scales, page_scales, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr, PAGE: tl.constexpr,
    ADDS: tl.constexpr, QK_NORM: tl.constexpr, LARGEST: tl.constexpr, HEADS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token: q is normed and rotated in place; k likewise into the cache; v into the cache. Where the slot is
    -1, k and v stay in place, too. Pairs are (i, i + DIM / 2) in what is loaded; (i, i + ROTATED / 2) in what is rotated.
    `LARGEST`: of a format with scales; 0: has none."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    turned: tl.constexpr = ROTATED // 2
    pair = tl.arange(0, DIM // 2)[None, :]
    low, high = pair, pair + DIM // 2
    if turned and turned < DIM // 2:
        low, high = tl.where(pair < turned, pair, pair + turned), tl.where(pair < turned, pair + turned, pair + DIM // 2)
    is_q, is_turned, there = head < NUM_HEADS, head < NUM_HEADS + NUM_KV_HEADS, head < NUM_HEADS + 2 * NUM_KV_HEADS
    position, slot = tl.load(positions_ptr + token), tl.load(slots_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * turned + pair, mask=pair < turned, other=1.0)
    sin = tl.load(sin_ptr + position * turned + pair, mask=pair < turned, other=0.0)
    begin(AHEAD)  # those were there before the kernel that this one waits for
    start = (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head)[:, None] * DIM
    base = qkv_ptr + start
    kind = qkv_ptr.dtype.element_ty
    first = tl.load(base + low, mask=there[:, None], other=0.0).to(tl.float32)
    second = tl.load(base + high, mask=there[:, None], other=0.0).to(tl.float32)
    if ADDS:
        first += tl.load(added_ptr + start + low, mask=there[:, None], other=0.0).to(tl.float32)
        second += tl.load(added_ptr + start + high, mask=there[:, None], other=0.0).to(tl.float32)
        first, second = first.to(kind).to(tl.float32), second.to(kind).to(tl.float32)
    x, y = first, second
    if QK_NORM:
        scale = 1.0 / tl.sqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / DIM + eps)
        weight = tl.where(is_q[:, None], tl.load(q_norm_ptr + low).to(tl.float32), tl.load(k_norm_ptr + low).to(tl.float32))
        x = (x * scale[:, None] * weight).to(kind).to(tl.float32)
        weight = tl.where(is_q[:, None], tl.load(q_norm_ptr + high).to(tl.float32), tl.load(k_norm_ptr + high).to(tl.float32))
        y = (y * scale[:, None] * weight).to(kind).to(tl.float32)
    first = tl.where(is_turned[:, None], x * cos - y * sin, first)
    second = tl.where(is_turned[:, None], y * cos + x * sin, second)
    has_slot = slot + tl.zeros_like(head) >= 0
    stays = is_q | (there & (slot + tl.zeros_like(head) < 0))
    tl.store(base + low, first.to(qkv_ptr.dtype.element_ty), mask=stays[:, None])
    tl.store(base + high, second.to(qkv_ptr.dtype.element_ty), mask=stays[:, None])
    if (tl.program_id(1) + 1) * HEADS <= NUM_HEADS:  # all of them are queries
        return
    number = head - NUM_HEADS  # keys, then values: so they lie in the cache, too
    in_layer = number * PAGE + slot % PAGE
    to = cache_ptr + slot // PAGE * page_stride + layer_offset + in_layer[:, None] * (DIM // 2 if LARGEST == 7 else DIM)
    enters = there & (head >= NUM_HEADS) & has_slot
    if LARGEST == 7:
        bits, offset, factor = _scale_and_offset(first, second)
        first, second = (
            _code_of((first - offset[:, None]) * factor[:, None], 127),
            _code_of((second - offset[:, None]) * factor[:, None], 127),
        )
        scale_to = scales_ptr + slot // PAGE * page_scales + layer_scales + 2 * in_layer
        tl.store(scale_to, (bits >> 16).to(tl.int16), mask=enters)
        tl.store(scale_to + 1, (offset.to(tl.int32, bitcast=True) >> 16).to(tl.int16), mask=enters)
        tl.store(to + pair, (first & 15) | (second << 4), mask=enters[:, None])
    else:
        if LARGEST:
            bits, factor = _scale_of(first, second, LARGEST)
            first, second = _code_of(first * factor[:, None], LARGEST), _code_of(second * factor[:, None], LARGEST)
            scale_to = scales_ptr + slot // PAGE * page_scales + layer_scales + in_layer
            tl.store(scale_to, (bits >> 16).to(tl.int16), mask=enters)
        tl.store(to + low, first.to(cache_ptr.dtype.element_ty), mask=enters[:, None])
        tl.store(to + high, second.to(cache_ptr.dtype.element_ty), mask=enters[:, None])


def enter_heads(
    qkv_TC: torch.Tensor,
    cache: torch.Tensor,
    layer: int,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    angles: Angles | None,
    num_heads: int,
    learned: HeadWeights = PLAIN,
    scales: torch.Tensor | None = None,
    added_TC: torch.Tensor | None = None,
) -> None:
    """Norm (if the model has one), rotation and entry into the cache. `cache`: [P, layers, 2, G, S, D]; `scales`: [P, layers, 2,
    G, S], if its format has them (int4: [.., S, 2], and rotation of whole heads or of none). `added_TC`: is added before."""
    _, _, _, num_kv_heads, page_size, dim = cache.shape
    largest = 0 if scales is None else LARGEST[cache.dtype]
    per_row = 2 if largest == 7 else 1  # of scales; and of values in a byte
    dim *= per_row
    codes, marks = (cache, positions_T) if scales is None else (cache.view(torch.int8), scales.view(torch.int16))
    cos, sin = (qkv_TC, qkv_TC) if angles is None else (angles.cos, angles.sin)  # not read if there are none
    has_norm = learned.q_norm is not None
    q_norm, k_norm = (learned.q_norm, learned.k_norm) if has_norm else (cos, cos)
    heads = 16
    launch(
        _enter_heads, (qkv_TC.shape[0], triton.cdiv(num_heads + 2 * num_kv_heads, heads)),
        qkv_TC, qkv_TC if added_TC is None else added_TC, codes, marks, positions_T, slots_T, cos, sin, q_norm, k_norm,
        layer * cache.stride(1), cache.stride(0), layer * 2 * num_kv_heads * page_size * per_row,
        0 if scales is None else scales.stride(0), learned.eps,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, DIM=dim, ROTATED=0 if angles is None else 2 * angles.cos.shape[1],
        PAGE=page_size, ADDS=added_TC is not None, QK_NORM=has_norm, LARGEST=largest, HEADS=heads, num_warps=4,
        **how(qkv_TC.shape[0]),
    )  # fmt: skip
