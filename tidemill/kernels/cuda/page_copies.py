"""Copies in bfloat16 of the 8-bit pages that a step's prompts read, made once for each layer.

A tile of a prompt has 32 tokens or so and reads all keys before them: converted where they are
read, they are converted again for every tile. So each layer's pages of a step's prompts are
converted before its attention, into a buffer that the next layer uses again: at most
`kv_format.MOST_COPIED_BYTES`, whatever the cache holds. What has no room there is converted where
it is read.

A head's key or value has its even dimensions before its odd ones, as in all kernels of these
formats (scaled_attention.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tidemill.kernels.cuda.launch import HOW, begin, launch
from tidemill.kernels.cuda.records import COPIES, COPY_BLOCK, COPY_ROW, COPY_TO, COPY_WIDTH
from tidemill.kernels.cuda.scaled_values import KINDS, _parts, places

PROGRAMS = 64  # for each head's keys and values


@triton.jit(do_not_specialize=["layer_run"])
def _copy_pages(
    values_ptr, scales_ptr, table_ptr, lists_ptr, out_ptr, layer_run, page_words, page_scales, table_width,
    WORD: tl.constexpr, KIND: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Copies the pages of a layer; a program has the keys or the values of one head.
    Reference: `kv_cache.dequantize`."""
    run, keys = tl.program_id(0), tl.arange(0, BLOCK)
    begin(AHEAD)
    copy = lists_ptr + tl.load(lists_ptr + WORD) + tl.program_id(1) * COPY_WIDTH
    to = tl.load(copy + COPY_TO)
    while to > 0:
        row, block = tl.load(copy + COPY_ROW).to(tl.int64), tl.load(copy + COPY_BLOCK)
        page = tl.load(table_ptr + row * table_width + block).to(tl.int64)
        words = values_ptr + page * page_words + (layer_run + run) * (BLOCK * DIM // 2)
        scales_at = scales_ptr + page * page_scales + (layer_run + run) * (BLOCK // 2)
        parts = _parts(words, scales_at, keys >= 0, True, DIM, BLOCK, KIND, AHEAD)
        at = (
            out_ptr
            + ((to - 1).to(tl.int64) * tl.num_programs(0) + run) * (BLOCK * DIM)
            + keys * DIM
        )
        for i in tl.static_range(2):
            columns = i * (DIM // 2) + tl.arange(0, DIM // 2)
            tl.store(at[:, None] + columns[None, :], parts[i].to(out_ptr.dtype.element_ty))
        copy += tl.num_programs(1) * COPY_WIDTH
        to = tl.load(copy + COPY_TO)


def copy_pages(
    cache: torch.Tensor,
    scales: torch.Tensor,
    layer: int,
    table: torch.Tensor,
    words: torch.Tensor,
    copies: torch.Tensor,
) -> None:
    """Those in the list of the step's `words`."""
    values, pairs, page_words, page_scales = places(cache, scales)
    num_runs = 2 * cache.shape[3]
    launch(
        _copy_pages, (num_runs, PROGRAMS),
        values, pairs, table, words, copies, layer * num_runs, page_words, page_scales, table.stride(0), WORD=COPIES,
        KIND=KINDS[cache.dtype], DIM=cache.shape[5], BLOCK=cache.shape[4], num_warps=4, **HOW,
    )  # fmt: skip
