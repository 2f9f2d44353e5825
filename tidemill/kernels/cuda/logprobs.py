"""Logprobs of tokens, and of the likeliest ones, without a sort of the vocabulary."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tidemill.kernels.cuda.launch import HOW, begin, launch
from tidemill.kernels.cuda.sampling import SEARCH_STRETCH, highest_of, total_of

_BLOCK = 128  # tokens whose maximum decides whether they are looked at
_NEVER = tl.constexpr(float("-inf"))


@triton.jit(do_not_specialize_on_alignment=["stats_ptr", "tops_ptr"])
def _summarize(
    logits_ptr,
    stats_ptr,
    tops_ptr,
    num_tokens,
    num_stretches,
    STRETCH: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """The summary of each stretch: the maximum, the sum of exponentials relative to it, and the
    maxima of its blocks. NaNs propagate. Reference: `torch.log_softmax`."""
    begin(AHEAD)
    s, stretch = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = stretch * STRETCH + tl.arange(0, STRETCH)
    value = tl.load(logits_ptr + s * num_tokens + token, mask=token < num_tokens, other=_NEVER)
    top, place = tl.max(value, 0), s * num_stretches + stretch
    tl.store(stats_ptr + place * 2, top)
    tl.store(
        stats_ptr + place * 2 + 1, tl.sum(tl.where(value != _NEVER, tl.exp(value - top), 0.0), 0)
    )
    blocks: tl.constexpr = STRETCH // BLOCK
    tl.store(
        tops_ptr + place * blocks + tl.arange(0, blocks),
        tl.max(tl.reshape(value, (blocks, BLOCK)), 1),
    )


@triton.jit(do_not_specialize_on_alignment=["stats_ptr", "ids_ptr", "chosen_ptr", "norms_ptr"])
def _normalize(
    logits_ptr, stats_ptr, ids_ptr, chosen_ptr, norms_ptr, num_tokens, num_stretches,
    STRETCHES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Log-probabilities. Reference: `torch.log_softmax`."""
    begin(AHEAD)
    s = tl.program_id(0).to(tl.int64)
    highest = highest_of(stats_ptr, s, num_stretches, STRETCHES)
    norm = highest + tl.log(total_of(stats_ptr, s, num_stretches, highest, 1.0, STRETCHES))
    token = tl.maximum(tl.load(ids_ptr + s), 0)  # -1: a draw that failed
    tl.store(norms_ptr + s, norm)
    tl.store(chosen_ptr + s, tl.load(logits_ptr + s * num_tokens + token) - norm)


def score(
    logits_NV: torch.Tensor, ids_N: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logprobs of the given tokens (NaN where the maximum of the logits is not finite), and the
    best logprobs with their tokens. The n best are in the n blocks with the highest maxima: two
    small selections instead of one over all tokens."""
    num, num_tokens = logits_NV.shape
    num_stretches, per_stretch = triton.cdiv(num_tokens, SEARCH_STRETCH), SEARCH_STRETCH // _BLOCK
    stats, tops = (
        logits_NV.new_empty(num, num_stretches, 2),
        logits_NV.new_empty(num, num_stretches * per_stretch),
    )
    chosen, norms = logits_NV.new_empty(num), logits_NV.new_empty(num, 1)
    launch(
        _summarize, (num, num_stretches),
        logits_NV, stats, tops, num_tokens, num_stretches, STRETCH=SEARCH_STRETCH, BLOCK=_BLOCK, num_warps=8, **HOW,
    )  # fmt: skip
    launch(
        _normalize, (num,),
        logits_NV, stats, ids_N, chosen, norms, num_tokens, num_stretches,
        STRETCHES=triton.next_power_of_2(num_stretches), num_warps=1, **HOW,
    )  # fmt: skip
    num_top, num_blocks = min(num_top, num_tokens), triton.cdiv(num_tokens, _BLOCK)
    if not num_top:
        return chosen, norms[:, :0], norms[:, :0].long()
    blocks = tops[:, :num_blocks].topk(min(num_top, num_blocks), dim=-1, sorted=False).indices
    inside = torch.arange(_BLOCK, device=logits_NV.device)
    tokens = (blocks.unsqueeze(-1) * _BLOCK + inside).flatten(1)
    there = tokens < num_tokens
    tokens = tokens.clamp_(max=num_tokens - 1)
    values, at = (
        logits_NV.gather(1, tokens).masked_fill_(~there, float("-inf")).topk(num_top, dim=-1)
    )
    return chosen, values - norms, tokens.gather(1, at)
