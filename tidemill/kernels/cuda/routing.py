"""Scores of experts on a GPU: a program for each token, so that its bits depend on it alone."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tidemill.kernels.cuda.launch import HOW, begin, launch
from tidemill.types.model_config import MoESpec


@triton.jit
def _best(values, numbers, NUM: tl.constexpr):
    """The number of the largest value; of equal ones the lowest. NaN is taken as the largest."""
    values = tl.where(values == values, values, float("inf"))
    return tl.min(tl.where(values == tl.max(values, 0), numbers, NUM), 0)


@triton.jit
def _score_experts(
    logits_ptr, bias_ptr, out_ptr, num_experts, scale,
    TOP_K: tl.constexpr, IS_SOFTMAX: tl.constexpr, RENORMALISE: tl.constexpr, NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST_OF_GROUP: tl.constexpr, EXPERTS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SHARED: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Weights of the chosen experts, -inf for others. Reference: `routing.score_experts_reference`."""
    begin(AHEAD)
    token, experts = tl.program_id(0), tl.arange(0, EXPERTS)
    inside = experts < num_experts
    logits = tl.load(
        logits_ptr + token.to(tl.int64) * num_experts + experts, mask=inside, other=float("-inf")
    )
    if IS_SOFTMAX:
        scores = tl.exp(logits - tl.max(logits, 0))
        scores = scores / tl.sum(scores, 0)
    else:
        scores = 1 / (1 + tl.exp(-logits))
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias_ptr + experts, mask=inside, other=0.0)
    choice = tl.where(inside, choice, float("-inf"))
    if NUM_GROUPS > 1:
        size = num_experts // NUM_GROUPS
        groups = tl.arange(0, GROUPS)
        sums = tl.full((GROUPS,), float("-inf"), tl.float32)
        for g in range(NUM_GROUPS):
            left = tl.where(experts // size == g, choice, float("-inf"))
            total = 0.0
            for n in range(BEST_OF_GROUP):
                best = _best(left, experts, EXPERTS)
                score = tl.sum(tl.where(experts == best, choice, 0.0), 0)
                total += tl.where(n < size, score, 0.0)
                left = tl.where(experts == best, float("-inf"), left)
            sums = tl.where(groups == g, total, sums)
        kept = experts < 0
        for _ in range(TOP_GROUPS):
            best = _best(sums, groups, GROUPS)
            kept = kept | (experts // size == best)
            sums = tl.where(groups == best, float("-inf"), sums)
        choice = tl.where(kept & inside, choice, float("-inf"))
    chosen, total = experts < 0, 0.0
    for _ in range(TOP_K):
        best = _best(choice, experts, EXPERTS)
        here = experts == best
        total += tl.sum(tl.where(here, scores, 0.0), 0)
        chosen = chosen | here
        choice = tl.where(here, float("-inf"), choice)
    factor = scale
    if RENORMALISE:
        factor = scale / (total + 1e-20)
    out = out_ptr + token.to(tl.int64) * (num_experts + HAS_SHARED)
    tl.store(out + experts, tl.where(chosen, scores * factor, float("-inf")), mask=inside)
    if HAS_SHARED:
        tl.store(out + num_experts, 64.0)


def score_experts(
    logits_TE: torch.Tensor, spec: MoESpec, bias_E: torch.Tensor | None
) -> torch.Tensor:
    (num_tokens, num_experts), routing = logits_TE.shape, spec.routing
    assert routing is not None
    out = logits_TE.new_empty(num_tokens, num_experts + bool(spec.shared_size))
    launch(
        _score_experts, (num_tokens,),
        logits_TE, logits_TE if bias_E is None else bias_E, out, num_experts, routing.scale,
        TOP_K=spec.top_k, IS_SOFTMAX=routing.score == "softmax", RENORMALISE=spec.renormalise,
        NUM_GROUPS=routing.num_groups, GROUPS=triton.next_power_of_2(routing.num_groups),
        TOP_GROUPS=routing.top_groups, BEST_OF_GROUP=routing.best_of_group,
        EXPERTS=triton.next_power_of_2(num_experts), HAS_BIAS=bias_E is not None,
        HAS_SHARED=bool(spec.shared_size), num_warps=1, **HOW,
    )  # fmt: skip
    return out
