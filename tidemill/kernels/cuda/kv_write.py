"""Queries, keys and values after their projection: norm, rotation, and writing keys and values to
the KV cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tidemill.kernels.cuda.launch import begin, how, launch
from tidemill.kernels.cuda.rounding import LARGEST, code_of
from tidemill.kernels.kv_cache import PLAIN, Angles, HeadWeights


@triton.jit
def _scale_of(x, y, LARGEST: tl.constexpr):
    """A scale for each row of both, as kv_cache.quantize has it: bfloat16, in fp8 a power of two,
    rounded up, in the upper half of its bits; and what values are multiplied by. In fp8, scales
    end at 2**7: the attention kernels have them times 2**120."""
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
    """The scales and offsets of each row of both, for int4, as kv_cache.quantize has them: the
    scale's bits, the offset, and what values less the offset are multiplied by."""
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
def _enter_heads(
    qkv_ptr, added_ptr, cache_ptr, scales_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr,
    q_norm_ptr, k_norm_ptr, layer_offset,
    page_stride, layer_scales, page_scales, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr,
    PAGE: tl.constexpr,
    ADDS: tl.constexpr, QK_NORM: tl.constexpr, LARGEST: tl.constexpr, HEADS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token: q is normed and rotated in place; k likewise into the cache; v into
    the cache. Where the slot is -1, k and v stay in place, too. Pairs are (i, i + DIM / 2) in
    what is loaded; (i, i + ROTATED / 2) in what is rotated. `LARGEST`: of a format with scales;
    0: has none. Reference: `attention.enter_heads`."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    turned: tl.constexpr = ROTATED // 2
    pair = tl.arange(0, DIM // 2)[None, :]
    low, high = pair, pair + DIM // 2
    if turned and turned < DIM // 2:
        low, high = (
            tl.where(pair < turned, pair, pair + turned),
            tl.where(pair < turned, pair + turned, pair + DIM // 2),
        )
    is_q, is_turned, there = (
        head < NUM_HEADS,
        head < NUM_HEADS + NUM_KV_HEADS,
        head < NUM_HEADS + 2 * NUM_KV_HEADS,
    )
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
        weight = tl.where(
            is_q[:, None],
            tl.load(q_norm_ptr + low).to(tl.float32),
            tl.load(k_norm_ptr + low).to(tl.float32),
        )
        x = (x * scale[:, None] * weight).to(kind).to(tl.float32)
        weight = tl.where(
            is_q[:, None],
            tl.load(q_norm_ptr + high).to(tl.float32),
            tl.load(k_norm_ptr + high).to(tl.float32),
        )
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
    to = (
        cache_ptr
        + slot // PAGE * page_stride
        + layer_offset
        + in_layer[:, None] * (DIM // 2 if LARGEST == 7 else DIM)
    )
    enters = there & (head >= NUM_HEADS) & has_slot
    if LARGEST == 7:
        bits, offset, factor = _scale_and_offset(first, second)
        first, second = (
            code_of((first - offset[:, None]) * factor[:, None], 127),
            code_of((second - offset[:, None]) * factor[:, None], 127),
        )
        scale_to = scales_ptr + slot // PAGE * page_scales + layer_scales + 2 * in_layer
        tl.store(scale_to, (bits >> 16).to(tl.int16), mask=enters)
        tl.store(scale_to + 1, (offset.to(tl.int32, bitcast=True) >> 16).to(tl.int16), mask=enters)
        tl.store(to + pair, (first & 15) | (second << 4), mask=enters[:, None])
    else:
        if LARGEST:
            bits, factor = _scale_of(first, second, LARGEST)
            first, second = (
                code_of(first * factor[:, None], LARGEST),
                code_of(second * factor[:, None], LARGEST),
            )
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
    """Norm (if the model has one), rotation and entry into the cache. `cache`: [P, layers, 2, G, S,
    D]; `scales`: [P, layers, 2, G, S], if its format has them (int4: [.., S, 2], and rotation of
    whole heads or of none). `added_TC`: is added before."""
    _, _, _, num_kv_heads, page_size, dim = cache.shape
    largest = 0 if scales is None else LARGEST[cache.dtype]
    per_row = 2 if largest == 7 else 1  # of scales; and of values in a byte
    dim *= per_row
    codes, marks = (
        (cache, positions_T)
        if scales is None
        else (cache.view(torch.int8), scales.view(torch.int16))
    )
    cos, sin = (
        (qkv_TC, qkv_TC) if angles is None else (angles.cos, angles.sin)
    )  # not read if there are none
    has_norm = learned.q_norm is not None
    q_norm, k_norm = (learned.q_norm, learned.k_norm) if has_norm else (cos, cos)
    heads = 16
    launch(
        _enter_heads, (qkv_TC.shape[0], triton.cdiv(num_heads + 2 * num_kv_heads, heads)),
        qkv_TC, qkv_TC if added_TC is None else added_TC, codes, marks, positions_T, slots_T, cos,
        sin, q_norm, k_norm,
        layer * cache.stride(1), cache.stride(0), layer * 2 * num_kv_heads * page_size * per_row,
        0 if scales is None else scales.stride(0), learned.eps,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, DIM=dim,
        ROTATED=0 if angles is None else 2 * angles.cos.shape[1],
        PAGE=page_size, ADDS=added_TC is not None, QK_NORM=has_norm, LARGEST=largest, HEADS=heads,
        num_warps=4,
        **how(qkv_TC.shape[0]),
    )  # fmt: skip
