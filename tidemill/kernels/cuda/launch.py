"""The launching of kernels, and their compilation before the first step.

Every kernel is launched as a programmatic dependent of its predecessor: its launch overlaps the
other's last programs, and it waits inside, before it reads anything the kernel before it wrote.
Every program of every kernel waits (of those with nothing to do, one is enough), so that what is
true of ordinary launches (all earlier kernels are done) holds from there on; and before that, all
earlier ones but the last are done.

In a step of a few tokens, a kernel triggers the next one's launch early, as soon as all of its own
programs have waited (`how`): they are few, so there is room for both. (With more tokens this made a
decode step slower: those that wait take room from those that work. So did an early trigger of a
packed matmul before another matmul: its programs all run at once, and those of the next one then
share a part of the multiprocessors. So a gated one, which a matmul follows, has none.)

Compilation: a step run inside `compile_only()` compiles its kernels for the arguments at hand and
runs none of them; with `compile_server.compile_elsewhere()` other processes do that, in parallel.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HOW = {"AHEAD": int(not IS_INTERPRETED), "launch_pdl": not IS_INTERPRETED}  # of every launch
EARLY = HOW if IS_INTERPRETED else HOW | {"AHEAD": 2}  # of one with an early trigger
# tokens of a step, up to which the latencies of small kernels count most; one of `gemm.CHOICES`
FEW = 16
_is_compiling = False


@triton.jit
def begin(AHEAD: tl.constexpr):
    """Go on when the kernel before is done. AHEAD 2: trigger the next one's launch."""
    if AHEAD:
        gdc_wait()
    if AHEAD == 2:
        gdc_launch_dependents()


def how(num_tokens: int, few: int = FEW) -> dict[str, Any]:
    """The options of the launches of a step's layers."""
    return HOW if num_tokens > few else EARLY


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    if not _is_compiling:
        kernel[grid](*arguments, **options)
    elif not IS_INTERPRETED:
        kernel.run(*arguments, grid=grid, warmup=True, **options)


@cache
def is_hopper() -> bool:
    """Tells if kernels written for these GPUs alone can run."""
    return not IS_INTERPRETED and torch.cuda.get_device_capability()[0] == 9


def is_compiling() -> bool:
    """Results are not computed: nothing may be concluded from them."""
    return _is_compiling


@contextlib.contextmanager
def compile_only() -> Iterator[None]:
    global _is_compiling
    _is_compiling = True
    try:
        yield
    finally:
        _is_compiling = False


@contextlib.contextmanager
def capturing(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Work inside is captured. The garbage collector waits: the graphs of an engine that is gone
    are destroyed by it, which CUDA does not allow while another one is captured, and which would
    make that capture fail."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool):
            yield
    finally:
        if was_enabled:
            gc.enable()
