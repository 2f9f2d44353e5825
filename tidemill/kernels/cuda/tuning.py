"""The fastest tiles of the matmul for a shape or GPU that tiles.json does not know: found at start,
in seconds, and kept.

Any tile gives the same bits, so a choice needs no proof, only a clock; and it does no harm if it is
not the very best.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from tidemill.kernels.cuda.gemm import (
    LIBRARY,
    MANY,
    WARP_SPECIALIZED,
    Tile,
    choose_tile,
    gemm,
    know,
    knows,
    library_agrees,
    matmul,
    own_tile,
)
from tidemill.kernels.cuda.launch import capturing

# By rows: few enough that compiling them takes seconds; the library joins in where it has our bits.
_CANDIDATES = {
    1: (Tile(16, 16, 512, 3, 2), Tile(16, 32, 256, 3, 2), Tile(16, 64, 256, 3, 4)),
    16: (Tile(16, 16, 512, 3, 2), Tile(16, 64, 256, 3, 4)),
    32: (Tile(32, 64, 128, 5, 4),),
    64: (Tile(64, 32, 128, 5, 4, 1), Tile(64, 256, 64, 4, 8, 1)),
    128: (Tile(128, 64, 64, 6, 4, 1), Tile(128, 256, 64, 4, 8, 1)),
    256: (Tile(128, 64, 64, 6, 4, 1), MANY),
    1536: (MANY,),
    2048: (MANY, WARP_SPECIALIZED),
}
_UNCACHED = 2**28  # bytes of weight in turn: more than a GPU's cache holds


def time_us(calls: Sequence[Callable[[], Any]], repeats: int = 20) -> float:
    """The time of one call, from a graph of all of them: they should touch different memory, more
    of it than the cache holds."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        for call in calls:
            call()
    best = math.inf
    for _ in range(3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        graph.replay()
        begin.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) * 1000 / repeats / len(calls))
    return best


def compile_tiles(
    weight_NK: torch.Tensor, bias_N: torch.Tensor | None, act: str, nums_rows: Iterable[int]
) -> None:
    """Inside `compile_only`: what a search or a trial of the library will run, and what steps of so
    many rows do."""
    num_out, num_in = weight_NK.shape
    tiles = {own_tile(rows, num_out) for rows in nums_rows} | {
        choose_tile(rows, num_out, num_in) for rows in nums_rows
    }
    if not knows(num_out, num_in):
        tiles |= {tile for tiles in _CANDIDATES.values() for tile in tiles}
    x = torch.empty(1, num_in, device=weight_NK.device, dtype=weight_NK.dtype)
    for tile in tiles - {LIBRARY}:
        with contextlib.suppress(triton.runtime.errors.OutOfResources):
            gemm(x, weight_NK, tile, bias_N=bias_N, act=act)
            if act and bias_N is None:
                gemm(x, weight_NK, tile)  # the library is held against the plain matmul


def find_tiles(weight_NK: torch.Tensor, act: str, library: bool) -> None:
    """Unless they are known from the table or an earlier start. `library`: it may be taken where it
    has our bits."""
    num_out, num_in = weight_NK.shape
    if knows(num_out, num_in):
        return
    device = torch.cuda.get_device_name()
    kept = _kept().get(device, {}).get(f"{num_out}x{num_in}")
    if kept is None:
        found = _search(weight_NK, act, library)
        kept = {
            str(rows): list(astuple(tile)) if tile is not LIBRARY else []
            for rows, tile in found.items()
        }
        _keep(device, f"{num_out}x{num_in}", kept)
    know(num_out, num_in, kept)


def _search(weight_NK: torch.Tensor, act: str, library: bool) -> dict[int, Tile]:
    num_out, num_in = weight_NK.shape
    weights = [weight_NK] + [
        weight_NK.clone() for _ in range(min(15, _UNCACHED // (num_out * num_in * 2)))
    ]
    found = {}
    for rows, tiles in _CANDIDATES.items():
        x = torch.randn(rows, num_in, device=weight_NK.device, dtype=weight_NK.dtype)
        seen = {}
        for tile in tiles:
            try:
                seen[tile] = time_us(
                    [partial(gemm, x, weight, tile, act=act) for weight in weights], 3
                )
            except triton.runtime.errors.OutOfResources:  # this GPU has less shared memory
                continue
        if library and rows > 16 and library_agrees(rows, num_out, num_in, weight_NK.device):
            seen[LIBRARY] = time_us(
                [partial(matmul, x, weight, None, act, tile=LIBRARY) for weight in weights], 3
            )
        if seen:
            found[rows] = min(seen, key=lambda tile: seen[tile])
    return found


def _path() -> Path:
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tidemill" / "tiles.json"
    )


def _kept() -> dict[str, dict[str, dict[str, list[int]]]]:
    try:
        return json.loads(_path().read_text())
    except (OSError, ValueError, RecursionError):
        return {}


def _keep(device: str, shape: str, tiles: dict[str, list[int]]) -> None:
    """Keeps the tiles for the next start; where nothing can be kept, that searches again."""
    try:
        _path().parent.mkdir(parents=True, exist_ok=True)
        known = _kept()
        known.setdefault(device, {})[shape] = tiles
        with tempfile.NamedTemporaryFile("w", dir=_path().parent, delete=False) as file:
            json.dump(known, file)
        os.replace(file.name, _path())
    except OSError:
        return
