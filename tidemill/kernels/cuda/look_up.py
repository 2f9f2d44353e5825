"""The tokens of a step: their ids, and their slots in the KV cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tidemill.kernels.cuda.launch import HOW, begin, is_compiling, launch


@triton.jit(do_not_specialize=["num", "slots_width"])
def _look_up(
    rows_ptr, positions_ptr, tokens_ptr, pages_ptr, ids_ptr, slots_ptr, num, tokens_width,
    pages_width, group_width, slots_width,
    PAGE: tl.constexpr, HAS_PAGES: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Token ids and slots. Reference: `torch.gather`."""
    begin(AHEAD)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < num
    group = tl.program_id(1)
    row = tl.load(rows_ptr + i, mask=there, other=0).to(tl.int64)
    position = tl.load(positions_ptr + i, mask=there, other=0)
    token = tl.load(tokens_ptr + row * tokens_width + position, mask=there, other=0)
    tl.store(ids_ptr + i, token, mask=there)  # the same from every group
    if HAS_PAGES:
        page = tl.load(
            pages_ptr + row * pages_width + group * group_width + position // PAGE,
            mask=there,
            other=0,
        )
        tl.store(
            slots_ptr + group * slots_width + i,
            page.to(tl.int64) * PAGE + position % PAGE,
            mask=there,
        )


def look_up(
    rows_T: torch.Tensor,
    positions_T: torch.Tensor,
    tokens: torch.Tensor,
    tables: list[torch.Tensor],
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens' ids (int32) and their slots in each group's pages. `tables`: parts of one row,
    side by side, of one width; none of a model without keys and values."""
    made = (
        torch.zeros_like if is_compiling() else torch.empty_like
    )  # embeddings are looked up by these ids then too
    num = rows_T.numel()
    ids, slots = (
        made(rows_T),
        torch.empty(len(tables), -(-num // 4) * 4, dtype=torch.int64, device=rows_T.device),
    )
    table = tables[0] if tables else tokens
    launch(
        _look_up, (triton.cdiv(num, 256), max(1, len(tables))),
        rows_T, positions_T, tokens, table, ids, slots, num, tokens.shape[1], table.stride(0),
        table.shape[1],
        slots.shape[1], PAGE=page_size, HAS_PAGES=len(tables) > 0, BLOCK=256, **HOW,
    )  # fmt: skip
    return ids, slots[:, :num]
