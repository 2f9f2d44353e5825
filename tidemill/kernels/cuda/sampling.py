"""From logits to tokens in their rows: the likeliest, or a draw by noise that is a function of (seed, position, token).

One program looks at a stretch of one row's logits; a second kernel takes the best of all stretches and writes the token where
the next step reads it. What only some requests ask for (top-k, top-p, min-p) restricts the logits of those rows beforehand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tidemill.kernels.cuda.launch import HOW, begin

_STRETCH = 4096
_NEVER = tl.constexpr(float("-inf"))
_BELOW_ALL = tl.constexpr(-2139095041)  # its place in the order of floats


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _gumbel(key, token):
    """Minus the logarithm of Exp(1) noise, which is minus the logarithm of 1 - u."""
    bits = _mix(key + (token + 1).to(tl.uint64) * 0x9E3779B97F4A7C15) >> 1
    u = bits.to(tl.int64).to(tl.float32) * 1.0842021724855044e-19  # 2 ** -63
    few = u + u * u * (0.5 + u * (0.3333333333 + u * 0.25))  # where the winners are, 1 - u would lose its digits
    exponential = tl.where(u < 0.0078125, few, -tl.log(tl.maximum(1.0 - u, 1e-28)))
    return -tl.log(tl.maximum(exponential, 1e-30))


@triton.jit
def _pick(
    logits_ptr, index_ptr, rows_ptr, positions_ptr, draws_ptr, best_ptr, best_at_ptr, num_tokens, num_stretches,
    STRETCH: tl.constexpr, SCALED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    begin(AHEAD)
    s, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.load(index_ptr + s)
    row = tl.load(rows_ptr + i)
    token = stretch * STRETCH + tl.arange(0, STRETCH)
    value = tl.load(logits_ptr + s * num_tokens + token, mask=token < num_tokens, other=_NEVER)
    temperature = tl.load(draws_ptr + row * 3).to(tl.float32, bitcast=True)
    if temperature > 0:
        low, high = tl.load(draws_ptr + row * 3 + 1), tl.load(draws_ptr + row * 3 + 2)
        seed = low.to(tl.uint32, bitcast=True).to(tl.uint64) | (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32)
        key = _mix(seed ^ _mix((tl.load(positions_ptr + i) + 2).to(tl.uint64)))  # the token drawn comes after the last one
        if not SCALED:
            value = value / temperature
        value += tl.where(token < num_tokens, _gumbel(key, token), 0.0)
    value = tl.where(value == value, value, _NEVER)  # what is not a number is never the best
    best, at = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_ptr + s * num_stretches + stretch, best)
    tl.store(best_at_ptr + s * num_stretches + stretch, stretch * STRETCH + at)


@triton.jit
def _settle(
    best_ptr, best_at_ptr, index_ptr, rows_ptr, positions_ptr, tokens_ptr, out_ptr, width, num_stretches,
    BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    begin(AHEAD)
    s = tl.program_id(0)
    stretch = tl.arange(0, BLOCK)
    best = tl.load(best_ptr + s * num_stretches + stretch, mask=stretch < num_stretches, other=_NEVER)
    top, at = tl.max(best, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(best_at_ptr + s * num_stretches + at)
    is_number = (top > _NEVER) & (top < -_NEVER)
    i = tl.load(index_ptr + s)
    row, position = tl.load(rows_ptr + i).to(tl.int64), tl.load(positions_ptr + i)
    tl.store(tokens_ptr + row * width + position + 1, token)
    tl.store(out_ptr + s, tl.where(is_number, token, -1))


def pick_tokens(
    logits_SV: torch.Tensor,
    index_S: torch.Tensor,
    rows_T: torch.Tensor,
    positions_T: torch.Tensor,
    draws: torch.Tensor,
    tokens: torch.Tensor,
    scaled: bool = False,
) -> torch.Tensor:
    """One token for each row of logits, int32 (-1: none of them is a number); also entered into `tokens` after the last one.
    Row s of the logits belongs to token index_S[s] of the step, whose row and position are given. `scaled`: logits are divided by
    the temperature already."""
    num, num_tokens = logits_SV.shape
    num_stretches = triton.cdiv(num_tokens, _STRETCH)
    best = logits_SV.new_empty(num, num_stretches)
    best_at, out = best.new_empty(best.shape, dtype=torch.int32), best.new_empty(num, dtype=torch.int32)
    _pick[(num, num_stretches)](
        logits_SV, index_S, rows_T, positions_T, draws, best, best_at, num_tokens, num_stretches,
        STRETCH=_STRETCH, SCALED=scaled, **HOW,
    )  # fmt: skip
    _settle[(num,)](
        best, best_at, index_S, rows_T, positions_T, tokens, out, tokens.shape[1], num_stretches,
        BLOCK=triton.next_power_of_2(num_stretches), num_warps=1, **HOW,
    )  # fmt: skip
    return out


@triton.jit
def _order(x):
    """Integers in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _restrict(logits_ptr, settings_ptr, num_tokens, BLOCK: tl.constexpr, AHEAD: tl.constexpr):
    """Of one row: divide by the temperature, then leave out what top-k, top-p and min-p leave out. Thresholds are found by
    bisection over the values themselves: of equal ones, all stay or all go."""
    begin(AHEAD)
    row_ptr = logits_ptr + tl.program_id(0).to(tl.int64) * num_tokens
    settings_ptr += tl.program_id(0) * 4
    temperature, top_k = tl.load(settings_ptr), tl.load(settings_ptr + 1)
    top_p, min_p = tl.load(settings_ptr + 2), tl.load(settings_ptr + 3)
    if temperature > 0:
        columns = tl.arange(0, BLOCK)
        top = tl.full((BLOCK,), _NEVER, tl.float32)
        for first in range(0, num_tokens, BLOCK):
            there = first + columns < num_tokens
            value = tl.load(row_ptr + first + columns, mask=there, other=_NEVER) / temperature
            tl.store(row_ptr + first + columns, value, mask=there)
            top = tl.maximum(top, value)
        highest = tl.max(top, 0)
        tl.debug_barrier()  # what is read from here on, another thread may have written
        # Each keeps a beginning of the same order, so the strictest decides; top-p counts what top-k leaves.
        base = tl.full((), _BELOW_ALL, tl.int64)
        if top_k > 0:
            high = _order(highest).to(tl.int64)
            while base < high:  # the highest threshold that k values reach
                middle = (base + high + 1) >> 1
                count = tl.zeros((BLOCK,), tl.int32)
                for first in range(0, num_tokens, BLOCK):
                    value = tl.load(row_ptr + first + columns, mask=first + columns < num_tokens, other=_NEVER)
                    count += (_order(value) >= middle.to(tl.int32)).to(tl.int32)
                if tl.sum(count, 0) >= top_k.to(tl.int32):
                    base = middle
                else:
                    high = middle - 1
        keep = base
        if top_p < 1:
            mass = tl.zeros((BLOCK,), tl.float32)
            for first in range(0, num_tokens, BLOCK):
                value = tl.load(row_ptr + first + columns, mask=first + columns < num_tokens, other=_NEVER)
                mass += tl.where(_order(value) >= base.to(tl.int32), tl.exp(value - highest), 0.0)
            wanted = tl.sum(mass, 0) * top_p
            high = _order(highest).to(tl.int64)
            while keep < high:  # the lowest threshold above which there is less than p
                middle = (keep + high) >> 1
                mass = tl.zeros((BLOCK,), tl.float32)
                for first in range(0, num_tokens, BLOCK):
                    value = tl.load(row_ptr + first + columns, mask=first + columns < num_tokens, other=_NEVER)
                    mass += tl.where(_order(value) > middle.to(tl.int32), tl.exp(value - highest), 0.0)
                if tl.sum(mass, 0) < wanted:
                    high = middle
                else:
                    keep = middle + 1
        lowest = keep.to(tl.int32)
        if min_p > 0:
            lowest = tl.maximum(lowest, _order(highest + tl.log(min_p)))
        for first in range(0, num_tokens, BLOCK):
            there = first + columns < num_tokens
            value = tl.load(row_ptr + first + columns, mask=there, other=_NEVER)
            tl.store(row_ptr + first + columns, tl.where(_order(value) >= lowest, value, _NEVER), mask=there)


def restrict(logits_SV: torch.Tensor, settings_S4: torch.Tensor) -> None:
    """In place. `settings_S4`: temperature (0: greedy, left as it is), top-k (0: all), top-p, min-p (0: none)."""
    num, num_tokens = logits_SV.shape
    block = min(8192, triton.next_power_of_2(num_tokens))
    _restrict[(num,)](logits_SV, settings_S4, num_tokens, BLOCK=block, num_warps=8, **HOW)
