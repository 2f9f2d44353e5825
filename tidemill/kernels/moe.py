"""A mixture of experts: each token goes through the `top_k` experts that its router logits choose, and their outputs are added by
weight.

A token's sum runs over its experts in the order of their rank, so its bits never depend on the other tokens of a step. No expert
has a capacity: whatever the number of tokens that choose it, all are computed. Dropping what overflows, as Switch Transformers do
in training, would make a token depend on those around it.

Shape letters: E experts, K = top_k, I size of an expert, L router logits (E, or E + 1 with a shared expert).
"""

from __future__ import annotations

import torch

from tidemill.kernels.glu import glu_reference


def route_reference(
    logits_TE: torch.Tensor, top_k: int, renormalise: bool, scoring: str = "softmax_then_topk"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (float32) and numbers of the chosen experts, [T, K], the highest logit first; of equal ones, the lowest number."""
    logits = logits_TE.float()
    best, chosen = logits.sort(-1, descending=True, stable=True)
    best, chosen = best[:, :top_k], chosen[:, :top_k]
    if scoring == "topk_then_softmax":
        return best.softmax(-1), chosen
    assert scoring == "softmax_then_topk", scoring
    weights = logits.softmax(-1).gather(1, chosen)
    return weights / weights.sum(-1, keepdim=True) if renormalise else weights, chosen


def moe_reference(
    x_TH: torch.Tensor,
    router_logits_TE: torch.Tensor,
    gate_up_E2IH: torch.Tensor,
    down_EHI: torch.Tensor,
    top_k: int,
    renormalise: bool,
    act: str,
    gate_up_bias_E2I: torch.Tensor | None = None,
    down_bias_EH: torch.Tensor | None = None,
    scoring: str = "softmax_then_topk",
) -> torch.Tensor:
    """What every implementation computes. Rows of gate first, then of up; in float32, whatever the types."""
    x = x_TH.float()
    weights, chosen = route_reference(router_logits_TE, top_k, renormalise, scoring)
    out_TKH = x.new_zeros(*chosen.shape, x.shape[1])
    for expert in chosen.unique().tolist():
        token, rank = (chosen == expert).nonzero(as_tuple=True)
        gate_up = x[token] @ gate_up_E2IH[expert].float().t()
        if gate_up_bias_E2I is not None:
            gate_up += gate_up_bias_E2I[expert].float()
        out = glu_reference(gate_up, act) @ down_EHI[expert].float().t()
        if down_bias_EH is not None:
            out += down_bias_EH[expert].float()
        out_TKH[token, rank] = out
    return combine(out_TKH, weights).to(x_TH.dtype)


def combine(out_TKH: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """The experts' outputs, added in the order of their rank."""
    total = out_TKH[:, 0] * weights_TK[:, :1]
    for rank in range(1, weights_TK.shape[1]):
        total += out_TKH[:, rank] * weights_TK[:, rank : rank + 1]
    return total
