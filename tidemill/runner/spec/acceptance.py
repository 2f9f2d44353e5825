"""Rejection acceptance (speculative sampling): tokens are distributed as without drafts, but are
not the same tokens.

A draft x drawn from q is right with probability min(1, p(x) / q(x)); else the token is drawn from
what p has more than q, max(p - q, 0) scaled to 1. A draft whose q is not given counts as the only
token that could have come: q(x) = 1, so it is right with probability p(x), else the token is drawn
from p without x. Either way the token's distribution is p.

The noise is a function of (seed, position), in streams of its own: a drafter may draw with the
noise of exact acceptance, and what it draws, or keeps back, tells nothing about the draws here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from tidemill.kernels.noise import exponential_noise, gumbel_argmax, noise_keys

# A seed is changed by these for a stream of its own: whether a draft is right, and which token is
# drawn.
_ACCEPT, _DRAW = 0x5851F42D4C957F2D, 0x14057B7EF767814F


@dataclass(slots=True)
class Drafts:
    """The draws of a step that are in the place of a draft."""

    at: list[int]  # numbers of the draws
    tokens_D: torch.Tensor
    # by number of the draft, where the drafter gives them: q, float32 [V]
    probs: Mapping[int, np.ndarray]

    def probs_DV(self, vocab_size: int) -> torch.Tensor:
        probs_DV = torch.zeros(len(self.at), vocab_size)
        probs_DV[range(len(self.at)), self.tokens_D] = 1.0
        if self.probs:
            probs_DV[list(self.probs)] = torch.from_numpy(np.stack(list(self.probs.values())))
        return probs_DV


def draw(
    logits_SV: torch.Tensor, drafts: Drafts, seeds_S: torch.Tensor, positions_S: torch.Tensor
) -> torch.Tensor:
    """Tokens from softmax(logits): the draft where it is right, and never the draft where it is
    wrong. The logits are consumed."""
    if not drafts.at:
        return gumbel_argmax(logits_SV, seeds_S ^ _DRAW, positions_S)
    at = torch.tensor(drafts.at)
    probs_DV, drafted_DV = logits_SV[at].softmax(-1), drafts.probs_DV(logits_SV.shape[1])
    chosen = drafts.tokens_D.unsqueeze(1)
    ratio_D = (probs_DV.gather(1, chosen) / drafted_DV.gather(1, chosen)).flatten().clamp(max=1.0)
    noise_D = exponential_noise(noise_keys(seeds_S[at] ^ _ACCEPT, positions_S[at]), 1).flatten()
    # Exp(1) noise is below -log(1 - r) with probability r
    is_right_D = noise_D < -torch.log1p(-ratio_D)
    left_DV = (probs_DV - drafted_DV).clamp_(min=0.0)
    # nothing is left where p and q are equal up to rounding: draw from p
    is_wrong_D = ~is_right_D & left_DV.any(-1)
    logits_SV[at[is_wrong_D]] = left_DV[is_wrong_D].log_()
    tokens_S = gumbel_argmax(logits_SV, seeds_S ^ _DRAW, positions_S)
    tokens_S[at[is_right_D]] = drafts.tokens_D[is_right_D].to(tokens_S.dtype)
    return tokens_S
