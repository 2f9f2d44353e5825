"""Sums of hidden states over the tokens of each text, in float64: by a fixed tree within a tile of
tokens, tile after tile."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tidemill.kernels.cuda.launch import HOW, begin, launch

_TOKENS, _COLUMNS = 16, 64  # of a tile


@triton.jit(do_not_specialize=["width"])
def _pool(
    hidden_ptr, spans_ptr, out_ptr, width, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr
):  # fmt: skip
    """Pooling. Reference: `cuda.pooling.pool_reference`."""
    begin(AHEAD)
    text = tl.program_id(0)
    first, num = tl.load(spans_ptr + 2 * text).to(tl.int64), tl.load(spans_ptr + 2 * text + 1)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    total = tl.zeros((COLUMNS,), tl.float64)
    for begins in range(0, num, TOKENS):
        tokens = begins + tl.arange(0, TOKENS)
        at = (first + tokens)[:, None] * width + columns[None, :]
        there = (tokens < num)[:, None] & inside[None, :]
        total += tl.sum(tl.load(hidden_ptr + at, mask=there, other=0.0).to(tl.float64), 0)
    tl.store(out_ptr + text.to(tl.int64) * width + columns, total, mask=inside)


def pool_reference(hidden_TH: torch.Tensor, spans_S2: torch.Tensor) -> torch.Tensor:
    return torch.stack(
        [hidden_TH[first : first + num].double().sum(0) for first, num in spans_S2.tolist()]
    )


def pool(hidden_TH: torch.Tensor, spans_S2: torch.Tensor) -> torch.Tensor:
    """`spans_S2`: int32, the first token and the number of tokens of each text. Returns [S, H]."""
    num, width = spans_S2.shape[0], hidden_TH.shape[1]
    out = torch.empty(num, width, dtype=torch.float64, device=hidden_TH.device)
    how = {"TOKENS": _TOKENS, "COLUMNS": _COLUMNS, "num_warps": 2, **HOW}
    launch(_pool, (num, triton.cdiv(width, _COLUMNS)), hidden_TH, spans_S2, out, width, **how)
    return out
