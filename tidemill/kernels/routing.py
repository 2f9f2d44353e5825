"""Scores of experts: which ones a token goes through, and by what weights, where that is no plain
softmax.

Experts are chosen by their scores plus a bias, among the groups whose best scores have the largest
sums. A weight is the score without the bias. The result stands in the place of logits
(`MoESpec.scoring`).
"""

from __future__ import annotations

import ctypes

import torch

from tidemill.kernels import native
from tidemill.kernels.native import structs
from tidemill.types.model_config import MoESpec

_OF_SHARED = 64.0  # the sigmoid of which is 1
_LEAST_SUM = 1e-20


def score_experts_reference(
    logits_TE: torch.Tensor, spec: MoESpec, bias_E: torch.Tensor | None = None
) -> torch.Tensor:
    """[T, E], or one more for a shared expert: the weights of the chosen experts, -inf for others."""
    routing, logits = spec.routing, logits_TE.float()
    assert routing is not None
    scores = logits.softmax(-1) if routing.score == "softmax" else 1 / (1 + torch.exp(-logits))
    choice = scores if bias_E is None else scores + bias_E
    if routing.num_groups > 1:
        groups_TGN = choice.unflatten(-1, (routing.num_groups, -1))
        best = groups_TGN.sort(dim=-1, descending=True, stable=True).values[
            ..., : routing.best_of_group
        ]
        order = best.sum(-1).sort(dim=-1, descending=True, stable=True).indices
        is_left = torch.ones_like(groups_TGN[..., 0], dtype=torch.bool)
        is_left.scatter_(-1, order[:, : routing.top_groups], value=False)
        choice = groups_TGN.masked_fill(is_left[..., None], float("-inf")).flatten(1)
    chosen = choice.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_k]
    weights = scores.gather(1, chosen)
    if spec.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + _LEAST_SUM)
    out = torch.full_like(scores, float("-inf")).scatter_(1, chosen, weights * routing.scale)
    if not spec.shared_size:
        return out
    return torch.cat([out, out.new_full((out.shape[0], 1), _OF_SHARED)], 1)


class ExpertScores:
    """The scores of a layer's experts by a kernel."""

    def __init__(self, spec: MoESpec, bias_E: torch.Tensor | None) -> None:
        assert spec.routing is not None
        self._spec, self._bias, routing = spec, bias_E, spec.routing
        self._num_out = spec.num_experts + bool(spec.shared_size)
        self._struct = structs.Routing(
            num_experts=spec.num_experts,
            top_k=spec.top_k,
            is_softmax=routing.score == "softmax",
            renormalise=spec.renormalise,
            num_groups=routing.num_groups,
            top_groups=routing.top_groups,
            best_of_group=routing.best_of_group,
            has_shared=bool(spec.shared_size),
            scale=routing.scale,
            bias=None if bias_E is None else bias_E.data_ptr(),
        )

    def __call__(self, logits_TE: torch.Tensor) -> torch.Tensor:
        if logits_TE.is_cuda:
            from tidemill.kernels.cuda import routing

            return routing.score_experts(logits_TE, self._spec, self._bias)
        if native.lib:
            address = ctypes.addressof(self._struct)
            return native.lib.score_experts(address, logits_TE, self._num_out)
        return score_experts_reference(logits_TE, self._spec, self._bias)
