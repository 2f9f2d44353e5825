"""Tiles of a GEMM shared out evenly among programs, on Hopper GPUs: each has the same number of blocks of K (or one less), which may
begin in the middle of one tile and end in the middle of another. No multiprocessor waits for others in a last round of too few.

A program computes the begin of its last tile first and leaves the sums in memory; the one after it, whose first tile that is,
comes to it last and goes on from there. So every sum runs over K in order, and its bits are those of one pass. There must be as
many tiles as programs, or more: then two share a tile at most. A program waits for one with a smaller number, which the GPU has
started before it. Written in Gluon.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tidemill.kernels.cuda.hopper_attention import barrier


@gluon.jit
def share(num_tiles, num_blocks):
    """Of this program, among the blocks of all tiles."""
    place, num = gl.program_id(0), gl.num_programs(0)
    each, more = num_tiles * num_blocks // num, num_tiles * num_blocks % num
    first = place * each + gl.minimum(place, more)
    return first, first + each + gl.where(place < more, 1, 0)


@gluon.jit
def block_of(number, first, last, num_blocks):
    """The tile of a program's n-th block, and its number there: the begin of the last tile, whole ones, the end of the first."""
    begun, whole = last % num_blocks, gl.cdiv(first, num_blocks)
    after = number - begun
    in_whole = (last // num_blocks - whole) * num_blocks
    tile = gl.where(after < in_whole, whole + after // num_blocks, first // num_blocks)
    block = gl.where(after < in_whole, after % num_blocks, first % num_blocks + after - in_whole)
    return gl.where(after < 0, last // num_blocks, tile), gl.where(after < 0, number, block)


@gluon.jit
def end_of(tile, last, num_blocks):
    """Where a program's part of a tile ends."""
    return gl.where(tile == last // num_blocks, last % num_blocks, num_blocks)


@gluon.jit
def _fence():
    gl.inline_asm_elementwise("fence.acq_rel.gpu; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def numbers(height: gl.constexpr, width: gl.constexpr, layout: gl.constexpr):
    """Of a tile's elements."""
    rows = gl.arange(0, height, layout=gl.SliceLayout(1, layout))
    return rows[:, None] * width + gl.arange(0, width, layout=gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def leave_sums(partial_ptr, done_ptr, acc, own, PART: gl.constexpr, PARTS: gl.constexpr):
    """`own`: the numbers of its elements. `PART`: of the parts in which a program has its sums."""
    size: gl.constexpr = acc.type.shape[0] * acc.type.shape[1]
    place = gl.program_id(0) * PARTS + PART
    gl.store(partial_ptr + place.to(gl.int64) * size + own, acc)
    _fence()
    barrier()
    gl.store(done_ptr + place, 1)


@gluon.jit
def take_sums(partial_ptr, done_ptr, own, PART: gl.constexpr, PARTS: gl.constexpr):
    """Of the program before, when they are there."""
    size: gl.constexpr = own.type.shape[0] * own.type.shape[1]
    place = (gl.program_id(0) - 1) * PARTS + PART
    while gl.load(done_ptr + place, volatile=True) == 0:
        pass
    _fence()
    acc = gl.load(partial_ptr + place.to(gl.int64) * size + own, cache_modifier=".cg")
    barrier()
    gl.store(done_ptr + place, 0)  # for the next kernel
    return acc
