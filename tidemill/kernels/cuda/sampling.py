"""From logits to tokens: the likeliest token, or a draw by noise that is a function of (seed,
position, token).

`pick_tokens` is part of every CUDA graph of a decode step: one program looks at a stretch of one
sequence's logits, a second kernel takes the best of all stretches and writes the token where the
next step reads it. A sequence whose logits hold a NaN or +inf, or nothing above -inf, gets token
-1.

`redraw` draws again for sequences with more than a temperature. Restrictions (top-k, top-p, min-p,
typical-p) become one interval of logits per sequence, which `_pick` applies while it reads; logits
are never written. The interval is found in four kernels:

  _survey   maximum and sum of exponentials of each stretch
  _narrow   how many tokens (top-k) or how much probability (top-p) lie above 16 thresholds; twice, within a bracket a
            sixteenth as wide
  _collect  copies the logits that can decide: those in the bracket, with top-k or typical-p also those above
  _finish   exact search in that copy: 8 thresholds a pass, 11 passes for all 32 bits of a float

At 64 sequences x 151,936 tokens on an H200 the logits are 38.9 MB, 9 us a pass at 4.25 TB/s.
Measured in microseconds, top-k 50 with top-p 0.9: _survey 11, _narrow 69 (16 compare-and-add for
each value), _collect 23, _finish 24, then _pick 51. Top-p alone on a flat distribution takes 94 in
_finish (one program a sequence). Typical-p alone looks at every token there: 1,550.

All sums run in an order that depends on the vocabulary alone, so a sequence's tokens do not depend
on the batch. Of equal logits all stay or all go. Arguments that vary after start are not
specialized (integers that are multiples of 16, pointers into the middle of a buffer), so nothing is
compiled again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from tidemill.kernels.cuda.launch import HOW, begin, launch

PICK_STRETCH = 4096
SEARCH_STRETCH = 8192
_TILE = 2048  # candidates a program of _finish looks at together
_NEVER = tl.constexpr(float("-inf"))
_LOWEST = tl.constexpr(-2139095041)  # place of -inf in the order of floats
_THRESHOLDS = tl.constexpr(16)
_ROUNDS = 2
_LANES = 1024  # of a stretch at a time

# A sequence to be drawn again, as int32 words (floats by their bits).
RECORD = np.dtype(
    [
        ("entry", np.int32),  # of the step's sampled tokens
        ("row", np.int32),
        ("position", np.int32),  # of the token before the one to be drawn
        ("source", np.int32),  # number among the step's logits, or ~number among the adjusted ones
        ("top_k", np.int32),  # 0: all
        ("top_p", np.float32),
        ("log_min_p", np.float32),  # -inf: none
        ("typical_p", np.float32),
    ]
)
_WORDS = tl.constexpr(RECORD.itemsize // 4)
_ROW, _POSITION, _SOURCE, _TOP_K, _TOP_P, _LOG_MIN_P, _TYPICAL_P = (
    tl.constexpr(i) for i in range(1, 8)
)


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
    # where the winners are, 1 - u would lose its digits
    few = u + u * u * (0.5 + u * (0.3333333333 + u * 0.25))
    exponential = tl.where(u < 0.0078125, few, -tl.log(tl.maximum(1.0 - u, 1e-28)))
    return -tl.log(tl.maximum(exponential, 1e-30))


@triton.jit
def _float(ptr):
    return tl.load(ptr).to(tl.float32, bitcast=True)


@triton.jit
def _logits_of(logits_ptr, adjusted_ptr, record_ptr, num_tokens):
    """The place of a sequence's logits: among the step's, or among the adjusted copies."""
    source = tl.load(record_ptr + _SOURCE).to(tl.int64)
    ptr = logits_ptr + source * num_tokens
    if source < 0:
        ptr = adjusted_ptr + (-1 - source) * num_tokens
    return ptr


@triton.jit(
    do_not_specialize_on_alignment=[
        "index_ptr", "rows_ptr", "positions_ptr", "draws_ptr", "best_ptr", "best_at_ptr", "records_ptr", "limits_ptr",
    ]
)  # fmt: skip
def _pick(
    logits_ptr, index_ptr, rows_ptr, positions_ptr, draws_ptr, best_ptr, best_at_ptr, num_tokens, num_stretches,
    adjusted_ptr, records_ptr, limits_ptr,
    STRETCH: tl.constexpr, AGAIN: tl.constexpr, LIMITED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Sampling. Reference: `noise.gumbel_argmax_reference`."""
    begin(AHEAD)
    s, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if AGAIN:
        record_ptr = records_ptr + s * _WORDS
        row, position = tl.load(record_ptr + _ROW), tl.load(record_ptr + _POSITION)
        value_ptr = _logits_of(logits_ptr, adjusted_ptr, record_ptr, num_tokens)
    else:
        i = tl.load(index_ptr + s)
        row, position = tl.load(rows_ptr + i), tl.load(positions_ptr + i)
        value_ptr = logits_ptr + s * num_tokens
    token = stretch * STRETCH + tl.arange(0, STRETCH)
    value = tl.load(value_ptr + token, mask=token < num_tokens, other=_NEVER)
    is_wrong = (value != value) | (value == -_NEVER)
    has_failed = tl.max(is_wrong.to(tl.int32), 0) > 0
    value = tl.where(is_wrong, _NEVER, value)
    if LIMITED:
        low, high = tl.load(limits_ptr + s * 2), tl.load(limits_ptr + s * 2 + 1)
        value = tl.where((value >= low) & (value <= high), value, _NEVER)
    temperature = _float(draws_ptr + row * 3)
    if temperature > 0:
        low_word, high_word = tl.load(draws_ptr + row * 3 + 1), tl.load(draws_ptr + row * 3 + 2)
        seed = low_word.to(tl.uint32, bitcast=True).to(tl.uint64) | (
            high_word.to(tl.uint32, bitcast=True).to(tl.uint64) << 32
        )
        # the token drawn comes after the last one
        key = _mix(seed ^ _mix((position + 2).to(tl.uint64)))
        value = value / temperature + tl.where(token < num_tokens, _gumbel(key, token), 0.0)
    best, at = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_ptr + s * num_stretches + stretch, best)
    tl.store(
        best_at_ptr + s * num_stretches + stretch, tl.where(has_failed, -1, stretch * STRETCH + at)
    )


@triton.jit(
    do_not_specialize_on_alignment=[
        "best_ptr", "best_at_ptr", "index_ptr", "rows_ptr", "positions_ptr", "tokens_ptr", "out_ptr", "records_ptr",
    ]
)  # fmt: skip
def _settle(
    best_ptr, best_at_ptr, index_ptr, rows_ptr, positions_ptr, tokens_ptr, out_ptr, width, num_stretches, records_ptr,
    BLOCK: tl.constexpr, AGAIN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Sampling. Reference: `noise.gumbel_argmax_reference`."""
    begin(AHEAD)
    s = tl.program_id(0)
    stretch = tl.arange(0, BLOCK)
    there = stretch < num_stretches
    best = tl.load(best_ptr + s * num_stretches + stretch, mask=there, other=_NEVER)
    has_failed = (
        tl.min(tl.load(best_at_ptr + s * num_stretches + stretch, mask=there, other=0), 0) < 0
    )
    top, at = tl.max(best, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.maximum(tl.load(best_at_ptr + s * num_stretches + at), 0)
    has_failed |= top == _NEVER
    if AGAIN:
        record_ptr = records_ptr + s * _WORDS
        row, position = tl.load(record_ptr + _ROW), tl.load(record_ptr + _POSITION)
        out_ptr += tl.load(record_ptr)
        has_failed |= tl.load(out_ptr) < 0  # the first draw saw the logits as the model gave them
    else:
        i = tl.load(index_ptr + s)
        row, position = tl.load(rows_ptr + i), tl.load(positions_ptr + i)
        out_ptr += s
    tl.store(tokens_ptr + row.to(tl.int64) * width + position + 1, token)
    tl.store(out_ptr, tl.where(has_failed, -1, token))


def pick_tokens(
    logits_SV: torch.Tensor,
    index_S: torch.Tensor,
    rows_T: torch.Tensor,
    positions_T: torch.Tensor,
    draws: torch.Tensor,
    tokens: torch.Tensor,
) -> torch.Tensor:
    """One token for each row of logits, int32 (-1: their maximum is not finite); also entered into
    `tokens` after the last one. Row s of the logits belongs to token index_S[s] of the step, whose
    row and position are given."""
    num, num_tokens = logits_SV.shape
    num_stretches = triton.cdiv(num_tokens, PICK_STRETCH)
    best = logits_SV.new_empty(num, num_stretches)
    best_at, out = (
        best.new_empty(best.shape, dtype=torch.int32),
        best.new_empty(num, dtype=torch.int32),
    )
    launch(
        _pick, (num, num_stretches),
        logits_SV, index_S, rows_T, positions_T, draws, best, best_at, num_tokens, num_stretches, logits_SV, index_S, best,
        STRETCH=PICK_STRETCH, AGAIN=False, LIMITED=False, **HOW,
    )  # fmt: skip
    launch(
        _settle, (num,),
        best, best_at, index_S, rows_T, positions_T, tokens, out, tokens.shape[1], num_stretches, index_S,
        BLOCK=triton.next_power_of_2(num_stretches), AGAIN=False, num_warps=1, **HOW,
    )  # fmt: skip
    return out


# ---- restrictions


@triton.jit
def _order(x):
    """Integers in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _in_order(place):
    """The float at that place of the order."""
    place = place.to(tl.int32)
    return tl.where(place < 0, place ^ 0x7FFFFFFF, place).to(tl.float32, bitcast=True)


@triton.jit
def _threshold(number, low, high, highest, unit, ROUND: tl.constexpr):
    """Sixteen of them, falling. First 0.75, 1.75, 3, 4.5 ... 37.5, 42 units below the maximum; then
    evenly within the bracket, down to its lower end."""
    n = (number + 1).to(tl.float32)
    if ROUND == 0:
        return highest - n * (n + 5.0) * 0.125 * unit
    upper = tl.minimum(high, highest)
    return tl.where(n < 16, upper - (upper - low) * (n * 0.0625), low)


@triton.jit
def _needed(record_ptr, stats_ptr, s, num_stretches, highest, temperature, STRETCHES: tl.constexpr):
    """The number of tokens that are needed (top-k), else how much of the mass relative to the
    maximum (top-p)."""
    top_k = tl.load(record_ptr + _TOP_K)
    needed = top_k.to(tl.float32)
    if top_k <= 0:
        needed = total_of(stats_ptr, s, num_stretches, highest, temperature, STRETCHES) * _float(
            record_ptr + _TOP_P
        )
    return needed


@triton.jit
def _bracket(
    above_ptr,
    bracket_ptr,
    s,
    num_stretches,
    highest,
    unit,
    needed,
    ROUND: tl.constexpr,
    STRETCHES: tl.constexpr,
):
    """After so many rounds: the limit is at least `low` and below `high`; and what lies at or above
    `high`."""
    low, high, above = (
        tl.full((), _NEVER, tl.float32),
        tl.full((), -_NEVER, tl.float32),
        tl.full((), 0.0, tl.float32),
    )
    if ROUND > 0:
        if ROUND > 1:
            low, high, above = (
                tl.load(bracket_ptr),
                tl.load(bracket_ptr + 1),
                tl.load(bracket_ptr + 2),
            )
        # else it is lower than 42 units below the maximum, and stays unknown
        if (ROUND == 1) | (low > _NEVER):
            stretch, number = tl.arange(0, STRETCHES), tl.arange(0, _THRESHOLDS)
            place = (s * num_stretches + stretch)[:, None] * _THRESHOLDS + number[None, :]
            each = above + tl.sum(
                tl.load(above_ptr + place, mask=(stretch < num_stretches)[:, None], other=0.0), 0
            )
            reached = tl.sum((each < needed).to(tl.int32), 0)  # the first threshold that reaches it
            before = tl.sum(tl.where(number == reached - 1, each, 0.0), 0)
            new_low = tl.where(
                reached < _THRESHOLDS, _threshold(reached, low, high, highest, unit, ROUND - 1), low
            )
            high = tl.where(
                reached > 0, _threshold(reached - 1, low, high, highest, unit, ROUND - 1), high
            )
            above = tl.where(reached > 0, before, above)
            low = new_low
    return low, high, above


@triton.jit(do_not_specialize_on_alignment=["draws_ptr", "records_ptr", "stats_ptr"])
def _survey(
    logits_ptr, adjusted_ptr, records_ptr, draws_ptr, stats_ptr, num_tokens, num_stretches,
    STRETCH: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The survey of each stretch: the maximum, and the sum of exponentials relative to it.
    Reference: `torch.sort`."""
    begin(AHEAD)
    s, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    record_ptr = records_ptr + s * _WORDS
    temperature = _float(draws_ptr + tl.load(record_ptr + _ROW) * 3)
    if temperature > 0:
        token = stretch * STRETCH + tl.arange(0, STRETCH)
        value_ptr = _logits_of(logits_ptr, adjusted_ptr, record_ptr, num_tokens)
        value = tl.load(value_ptr + token, mask=token < num_tokens, other=_NEVER)
        top = tl.max(value, 0)
        mass = tl.sum(tl.where(value > _NEVER, tl.exp((value - top) / temperature), 0.0), 0)
        tl.store(stats_ptr + (s * num_stretches + stretch) * 2, top)
        tl.store(stats_ptr + (s * num_stretches + stretch) * 2 + 1, mass)


@triton.jit
def highest_of(stats_ptr, s, num_stretches, STRETCHES: tl.constexpr):
    number = tl.arange(0, STRETCHES)
    there = number < num_stretches
    return tl.max(
        tl.load(stats_ptr + (s * num_stretches + number) * 2, mask=there, other=_NEVER), 0
    )


@triton.jit
def total_of(stats_ptr, s, num_stretches, highest, temperature, STRETCHES: tl.constexpr):
    """Sum of exponentials of all of a sequence's logits, relative to the maximum."""
    number = tl.arange(0, STRETCHES)
    there = number < num_stretches
    top = tl.load(stats_ptr + (s * num_stretches + number) * 2, mask=there, other=_NEVER)
    mass = tl.load(stats_ptr + (s * num_stretches + number) * 2 + 1, mask=there, other=0.0)
    return tl.sum(tl.where(top != _NEVER, mass * tl.exp((top - highest) / temperature), 0.0), 0)


@triton.jit(
    do_not_specialize_on_alignment=[
        "draws_ptr",
        "records_ptr",
        "stats_ptr",
        "above_ptr",
        "brackets_ptr",
    ]
)
def _narrow(
    logits_ptr, adjusted_ptr, records_ptr, draws_ptr, stats_ptr, above_ptr, brackets_ptr, num_tokens, num_stretches, part,
    ROUND: tl.constexpr, STRETCH: tl.constexpr, STRETCHES: tl.constexpr, LANES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The results of each stretch: number (top-k) or probability mass (top-p) of the tokens between
    each threshold and the upper end of the bracket. `part`: words of the results of one round.
    Reference: `torch.sort`."""
    begin(AHEAD)
    s, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    record_ptr, bracket_ptr = records_ptr + s * _WORDS, brackets_ptr + s * 3
    temperature, top_k = (
        _float(draws_ptr + tl.load(record_ptr + _ROW) * 3),
        tl.load(record_ptr + _TOP_K),
    )
    if (temperature > 0) & ((top_k > 0) | (_float(record_ptr + _TOP_P) < 1)):
        highest, unit = (
            highest_of(stats_ptr, s, num_stretches, STRETCHES),
            tl.where(top_k > 0, 1.0, temperature),
        )
        low, high = tl.full((), _NEVER, tl.float32), tl.full((), -_NEVER, tl.float32)
        if ROUND > 0:
            needed = _needed(
                record_ptr, stats_ptr, s, num_stretches, highest, temperature, STRETCHES
            )
            before_ptr = above_ptr + (ROUND - 1) * part
            low, high, above = _bracket(
                before_ptr, bracket_ptr, s, num_stretches, highest, unit, needed, ROUND, STRETCHES
            )
            if stretch == 0:
                tl.store(bracket_ptr, low)
                tl.store(bracket_ptr + 1, high)
                tl.store(bracket_ptr + 2, above)
        if (ROUND == 0) | (low > _NEVER):
            number = tl.arange(0, _THRESHOLDS)
            threshold = _threshold(number, low, high, highest, unit, ROUND)
            value_ptr = _logits_of(logits_ptr, adjusted_ptr, record_ptr, num_tokens)
            sums = tl.zeros((_THRESHOLDS, LANES), tl.float32)
            for first in range(0, STRETCH, LANES):
                token = stretch * STRETCH + first + tl.arange(0, LANES)
                value = tl.load(value_ptr + token, mask=token < num_tokens, other=_NEVER)
                weight = tl.full((LANES,), 1.0, tl.float32)
                if top_k <= 0:
                    weight = tl.exp((value - highest) / temperature)
                weight = tl.where((value > _NEVER) & (value < high), weight, 0.0)
                sums += tl.where(value[None, :] >= threshold[:, None], weight[None, :], 0.0)
            tl.store(
                above_ptr + ROUND * part + (s * num_stretches + stretch) * _THRESHOLDS + number,
                tl.sum(sums, 1),
            )


@triton.jit(
    do_not_specialize_on_alignment=[
        "draws_ptr", "records_ptr", "stats_ptr", "above_ptr", "brackets_ptr", "sizes_ptr", "limits_ptr"
    ]
)  # fmt: skip
def _collect(
    logits_ptr, adjusted_ptr, records_ptr, draws_ptr, stats_ptr, above_ptr, brackets_ptr, kept_ptr, sizes_ptr, limits_ptr,
    num_tokens, num_stretches, part,
    ROUND: tl.constexpr, STRETCH: tl.constexpr, STRETCHES: tl.constexpr, LANES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Copies the logits that decide the restrictions: of top-p alone those within the bracket, else
    all above its lower end. Also writes that end and the mass of what lies above the bracket and
    was not copied. Reference: `torch.sort`."""
    begin(AHEAD)
    s, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    record_ptr = records_ptr + s * _WORDS
    temperature, top_k = (
        _float(draws_ptr + tl.load(record_ptr + _ROW) * 3),
        tl.load(record_ptr + _TOP_K),
    )
    top_p, typical_p = _float(record_ptr + _TOP_P), _float(record_ptr + _TYPICAL_P)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (typical_p < 1)):
        highest, unit = (
            highest_of(stats_ptr, s, num_stretches, STRETCHES),
            tl.where(top_k > 0, 1.0, temperature),
        )
        low, high, above = (
            tl.full((), _NEVER, tl.float32),
            tl.full((), -_NEVER, tl.float32),
            tl.full((), 0.0, tl.float32),
        )
        if (top_k > 0) | (top_p < 1):
            needed = _needed(
                record_ptr, stats_ptr, s, num_stretches, highest, temperature, STRETCHES
            )
            low, high, above = _bracket(
                above_ptr + (ROUND - 1) * part,
                brackets_ptr + s * 3,
                s,
                num_stretches,
                highest,
                unit,
                needed,
                ROUND,
                STRETCHES,
            )
        else:
            low = highest + temperature * _float(record_ptr + _LOG_MIN_P)
        if (top_k > 0) | (typical_p < 1):  # what follows looks at all that is left
            high, above = -_NEVER, 0.0
        value_ptr = _logits_of(logits_ptr, adjusted_ptr, record_ptr, num_tokens)
        target_ptr = kept_ptr + (s * num_stretches + stretch) * STRETCH
        size = tl.full((), 0, tl.int32)
        for first in range(0, STRETCH, LANES):
            token = stretch * STRETCH + first + tl.arange(0, LANES)
            value = tl.load(value_ptr + token, mask=token < num_tokens, other=_NEVER)
            stays = (value >= low) & (value < high) & (value > _NEVER)
            num = tl.sum(stays.to(tl.int32), 0)
            if num > 0:
                tl.store(
                    target_ptr + size + tl.cumsum(stays.to(tl.int32), 0) - 1, value, mask=stays
                )
                size += num
        tl.store(sizes_ptr + s * num_stretches + stretch, size)
        if stretch == 0:
            tl.store(limits_ptr + s * 2, low)
            tl.store(limits_ptr + s * 2 + 1, above)


@triton.jit
def _search(
    kept_ptr, size, most, highest, temperature, low, high, needed, floor, mean,
    COUNTS: tl.constexpr, TYPICAL: tl.constexpr, STRETCH: tl.constexpr, STRETCHES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The highest place in the order of floats, from `low` to `high`, such that the tokens at or
    above it number `needed` or have that mass. `low` is taken to fulfil it. TYPICAL orders tokens
    of at least `floor` by how near to `mean` they are."""
    depth: tl.constexpr = TILE // STRETCHES
    element, lane = tl.arange(0, TILE), tl.arange(0, 8)
    stretch, inside = element // depth, element % depth
    while low < high:
        step = (high - low + 8) // 8
        place = low + lane.to(tl.int64) * step
        above = tl.zeros((TILE, 8), tl.float32)
        for first in range(0, most, depth):
            there = first + inside < size
            value = tl.load(
                kept_ptr + stretch.to(tl.int64) * STRETCH + first + inside, mask=there, other=_NEVER
            )
            weight = there.to(tl.float32)
            if not COUNTS:
                weight = tl.where(
                    there & (value >= floor), tl.exp((value - highest) / temperature), 0.0
                )
            key = -tl.abs((value - highest) / temperature - mean) if TYPICAL else value
            above += tl.where(
                _order(key)[:, None] >= place.to(tl.int32)[None, :], weight[:, None], 0.0
            )
        reached = (lane == 0) | ((tl.sum(above, 0) >= needed) & (place <= high))
        low += (tl.sum(reached.to(tl.int64), 0) - 1) * step
        high = tl.minimum(high, low + step - 1)
    return low


@triton.jit
def _moments(
    kept_ptr,
    size,
    most,
    highest,
    temperature,
    floor,
    STRETCH: tl.constexpr,
    STRETCHES: tl.constexpr,
    TILE: tl.constexpr,
):
    """The moments of the kept logits of at least `floor`: sum of exponentials, and the mean
    log-probability relative to the maximum."""
    depth: tl.constexpr = TILE // STRETCHES
    element = tl.arange(0, TILE)
    stretch, inside = element // depth, element % depth
    mass, moment = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
    for first in range(0, most, depth):
        there = first + inside < size
        value = tl.load(
            kept_ptr + stretch.to(tl.int64) * STRETCH + first + inside, mask=there, other=_NEVER
        )
        below = (value - highest) / temperature
        weight = tl.where(there & (value >= floor), tl.exp(below), 0.0)
        mass += weight
        moment += tl.where(weight > 0, weight * below, 0.0)
    total = tl.sum(mass, 0)
    return total, tl.sum(moment, 0) / total


@triton.jit
def _typical(
    kept_ptr, size, most, highest, temperature, floor, typical_p,
    STRETCH: tl.constexpr, STRETCHES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Lowest and highest of the logits whose surprise is nearest to the entropy. With x = (v - max) / T the surprise is log Z - x
    and the entropy log Z - mean(x), so the distance is |x - mean(x)|."""
    total, mean = _moments(
        kept_ptr, size, most, highest, temperature, floor, STRETCH, STRETCHES, TILE
    )
    low, high = tl.full((), _LOWEST, tl.int64), tl.full((), -1, tl.int64)  # -1: place of -0.0
    nearest = _search(
        kept_ptr, size, most, highest, temperature, low, high, total * typical_p, floor, mean,
        False, True, STRETCH, STRETCHES, TILE,
    )  # fmt: skip
    depth: tl.constexpr = TILE // STRETCHES
    element = tl.arange(0, TILE)
    stretch, inside = element // depth, element % depth
    bottom, top = tl.full((TILE,), -_NEVER, tl.float32), tl.full((TILE,), _NEVER, tl.float32)
    for first in range(0, most, depth):
        there = first + inside < size
        value = tl.load(
            kept_ptr + stretch.to(tl.int64) * STRETCH + first + inside, mask=there, other=_NEVER
        )
        key = -tl.abs((value - highest) / temperature - mean)
        stays = there & (value >= floor) & (_order(key) >= nearest.to(tl.int32))
        bottom, top = (
            tl.minimum(bottom, tl.where(stays, value, -_NEVER)),
            tl.maximum(top, tl.where(stays, value, _NEVER)),
        )
    return tl.min(bottom, 0), tl.max(top, 0)


@triton.jit(
    do_not_specialize_on_alignment=[
        "draws_ptr",
        "records_ptr",
        "stats_ptr",
        "sizes_ptr",
        "limits_ptr",
    ]
)
def _finish(
    records_ptr, draws_ptr, stats_ptr, kept_ptr, sizes_ptr, limits_ptr, num_stretches,
    STRETCH: tl.constexpr, STRETCHES: tl.constexpr, TILE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The interval of logits that top-k, top-p, min-p and typical-p leave, in that order.
    Reference: `torch.sort`."""
    begin(AHEAD)
    s = tl.program_id(0).to(tl.int64)
    record_ptr, limits_ptr = records_ptr + s * _WORDS, limits_ptr + s * 2
    temperature, top_k = (
        _float(draws_ptr + tl.load(record_ptr + _ROW) * 3),
        tl.load(record_ptr + _TOP_K),
    )
    top_p, typical_p = _float(record_ptr + _TOP_P), _float(record_ptr + _TYPICAL_P)
    low, high = tl.full((), _NEVER, tl.float32), tl.full((), -_NEVER, tl.float32)
    if temperature > 0:
        highest = highest_of(stats_ptr, s, num_stretches, STRETCHES)
        stretch = tl.arange(0, TILE) // (TILE // STRETCHES)
        size = tl.zeros((TILE,), tl.int32)
        if (top_k > 0) | (top_p < 1) | (typical_p < 1):
            size = tl.load(
                sizes_ptr + s * num_stretches + stretch, mask=stretch < num_stretches, other=0
            )
        most, kept_ptr = tl.max(size, 0), kept_ptr + s * num_stretches * STRETCH
        last, base = _order(highest).to(tl.int64), tl.full((), _LOWEST, tl.int64)
        if (top_k > 0) | (top_p < 1):
            base = _order(tl.load(limits_ptr)).to(tl.int64)
        if top_k > 0:
            base = _search(
                kept_ptr, size, most, highest, temperature, base, last, top_k.to(tl.float32), _NEVER, 0.0,
                True, False, STRETCH, STRETCHES, TILE,
            )  # fmt: skip
        if top_p < 1:
            total = tl.full((), 0.0, tl.float32)
            if top_k > 0:
                total, _ = _moments(
                    kept_ptr,
                    size,
                    most,
                    highest,
                    temperature,
                    _in_order(base),
                    STRETCH,
                    STRETCHES,
                    TILE,
                )
            else:
                total = total_of(stats_ptr, s, num_stretches, highest, temperature, STRETCHES)
            needed = total * top_p - tl.load(limits_ptr + 1)
            base = _search(
                kept_ptr, size, most, highest, temperature, base, last, needed, _NEVER, 0.0,
                False, False, STRETCH, STRETCHES, TILE,
            )  # fmt: skip
        low = tl.maximum(_in_order(base), highest + temperature * _float(record_ptr + _LOG_MIN_P))
        if typical_p < 1:
            low, high = _typical(
                kept_ptr, size, most, highest, temperature, low, typical_p, STRETCH, STRETCHES, TILE
            )
    tl.store(limits_ptr, low)
    tl.store(limits_ptr + 1, high)


@dataclass(slots=True)
class Workspace:
    """The memory that `redraw` writes in between, for up to so many sequences at a time."""

    best: torch.Tensor
    best_at: torch.Tensor
    stats: torch.Tensor  # of a stretch: maximum, sum of exponentials
    # of a round and a stretch: number or mass between each threshold and the bracket's upper end
    above: torch.Tensor
    brackets: torch.Tensor  # within which a limit lies, and what lies above
    kept: torch.Tensor  # of a stretch: the logits that decide
    sizes: torch.Tensor  # and how many they are
    limits: torch.Tensor  # the lowest and the highest logit that stays

    @classmethod
    def make(cls, num_rows: int, num_tokens: int, device: torch.device) -> Workspace:
        num_stretches = triton.cdiv(num_tokens, SEARCH_STRETCH)

        def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(num_rows, *shape, dtype=dtype, device=device)

        num_picks = triton.cdiv(num_tokens, PICK_STRETCH)
        return cls(
            make(num_picks), make(num_picks, dtype=torch.int32), make(num_stretches, 2),
            make(_ROUNDS * num_stretches, _THRESHOLDS.value), make(3),
            make(num_stretches, SEARCH_STRETCH), make(num_stretches, dtype=torch.int32), make(2),
        )  # fmt: skip


def find_limits(
    logits_NV: torch.Tensor,
    adjusted_AV: torch.Tensor,
    records: torch.Tensor,
    draws: torch.Tensor,
    work: Workspace,
    thresholds: bool = True,
    search: bool = True,
) -> None:
    """Into work.limits: the interval of logits that each sequence's restrictions leave.
    `thresholds`: some sequence has top-k or top-p; `search`: or typical-p."""
    num, num_tokens = records.shape[0], logits_NV.shape[1]
    num_stretches = triton.cdiv(num_tokens, SEARCH_STRETCH)
    stretches, part = triton.next_power_of_2(num_stretches), work.above.numel() // _ROUNDS
    grid, how = (num, num_stretches), {"STRETCH": SEARCH_STRETCH, **HOW}
    launch(
        _survey,
        grid,
        logits_NV,
        adjusted_AV,
        records,
        draws,
        work.stats,
        num_tokens,
        num_stretches,
        num_warps=8,
        **how,
    )
    how["STRETCHES"] = stretches
    if thresholds:
        for number in range(_ROUNDS):
            launch(
                _narrow, grid,
                logits_NV, adjusted_AV, records, draws, work.stats, work.above, work.brackets, num_tokens, num_stretches, part,
                ROUND=number, LANES=min(_LANES, SEARCH_STRETCH), num_warps=8, **how,
            )  # fmt: skip
    if search:
        launch(
            _collect, grid,
            logits_NV, adjusted_AV, records, draws, work.stats, work.above, work.brackets, work.kept, work.sizes, work.limits,
            num_tokens, num_stretches, part, ROUND=_ROUNDS, LANES=min(_LANES, SEARCH_STRETCH), num_warps=8, **how,
        )  # fmt: skip
    launch(
        _finish, (num,),
        records, draws, work.stats, work.kept, work.sizes, work.limits, num_stretches,
        TILE=max(_TILE, stretches), num_warps=16, **how,
    )  # fmt: skip


def redraw(
    logits_NV: torch.Tensor,
    adjusted_AV: torch.Tensor,
    records: torch.Tensor,
    draws: torch.Tensor,
    tokens: torch.Tensor,
    out_N: torch.Tensor,
    work: Workspace,
    limited: bool,
) -> None:
    """Draw again for the sequences of `records` (RECORD as int32 words): into `tokens` and into
    `out_N`, where -1 stays -1. `limited`: within the limits found for them."""
    num, num_tokens = records.shape[0], logits_NV.shape[1]
    num_stretches = triton.cdiv(num_tokens, PICK_STRETCH)
    launch(
        _pick, (num, num_stretches),
        logits_NV, records, records, records, draws, work.best, work.best_at, num_tokens, num_stretches, adjusted_AV, records,
        work.limits, STRETCH=PICK_STRETCH, AGAIN=True, LIMITED=limited, **HOW,
    )  # fmt: skip
    launch(
        _settle, (num,),
        work.best, work.best_at, records, records, records, tokens, out_N, tokens.shape[1], num_stretches, records,
        BLOCK=triton.next_power_of_2(num_stretches), AGAIN=True, num_warps=1, **HOW,
    )  # fmt: skip
