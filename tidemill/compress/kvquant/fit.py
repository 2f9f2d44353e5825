"""Ranges of channels and non-uniform levels, fitted to the keys and values of a text.

An error counts by what it does to the layer's attention output: with probabilities a, queries q,
values v and outputs o, a change of key j moves the output of query i by a_ij (v_j - o_i) (q_i .
change), one of value j by a_ij. Squared and summed over queries, that is the weight of a number in
the k-means that makes levels. Shape letters of kernels/__init__.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tidemill.kernels import masks
from tidemill.kernels.kv_cache import Angles
from tidemill.kernels.kvquant import KEY_OUTLIERS, KVQuant, value_ranges
from tidemill.kernels.rope import apply_rope
from tidemill.types.kv_format import FORMATS
from tidemill.types.model_config import AttentionSpec

_ITERATIONS = 40
_LEAST_SCALE = 1e-6  # of a channel that is constant


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of a layer: keys before rotation and values of some tokens, none at position 0, and
    what errors of theirs count."""

    keys: torch.Tensor  # [n, G, D]
    key_weights: torch.Tensor
    values: torch.Tensor
    value_weights: torch.Tensor  # [n, G]
    first_keys: torch.Tensor  # [m, G, D], of tokens at position 0


def sensitivity(
    q_TND: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    spec: AttentionSpec,
    angles: Angles | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight of errors in a sequence's keys [T, G, D] and values [T, G]. Queries and keys are
    not rotated."""
    num_tokens, num_repeats = q_TND.shape[0], q_TND.shape[1] // k_TGD.shape[1]
    cos, sin = _of_all_dims(angles, num_tokens, k_TGD.shape[-1])
    q, k = (
        each
        if angles is None
        else apply_rope(each, angles.cos[:num_tokens], angles.sin[:num_tokens])
        for each in (q_TND, k_TGD)
    )
    positions = np.arange(num_tokens)
    hidden = torch.from_numpy(
        ~np.asarray(masks.mask_of(spec, num_tokens)(positions[:, None], positions))
    )
    key_weights, value_weights = torch.zeros_like(k_TGD), torch.zeros(k_TGD.shape[:2])
    for head in range(q.shape[1]):
        own, queries = head // num_repeats, q[:, head]
        probs = (
            (queries @ k[:, own].T).mul_(spec.scale).masked_fill_(hidden, float("-inf")).softmax(-1)
        )
        values = v_TGD[:, own]
        out = probs @ values
        moved = (
            out.square().sum(-1, keepdim=True) - 2 * out @ values.T + values.square().sum(-1)
        ).clamp_(min=0)
        squared = probs.square_()
        value_weights[:, own] += squared.sum(0)
        across = squared.mul_(moved).T
        # The square of a query that is rotated back to the key's position: of pairs (x, y), (cos x
        # + sin y)^2 and (cos y - sin x)^2.
        other = _partners(queries, angles)
        key_weights[:, own] += (
            cos.square() * (across @ queries.square())
            + sin.square() * (across @ other.square())
            + 2 * cos * sin * (across @ (queries * other))
        )
    return key_weights * spec.scale**2, value_weights


def _of_all_dims(
    angles: Angles | None, num_tokens: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, D], 1 and 0 where nothing is rotated."""
    cos, sin = torch.ones(num_tokens, dim), torch.zeros(num_tokens, dim)
    if angles is not None:
        half = angles.cos.shape[1]
        cos[:, : 2 * half], sin[:, : 2 * half] = (
            angles.cos[:num_tokens].repeat(1, 2),
            angles.sin[:num_tokens].repeat(1, 2),
        )
    return cos, sin


def _partners(x_TD: torch.Tensor, angles: Angles | None) -> torch.Tensor:
    """The partner of each pair (x, y): (y, -x)."""
    if angles is None:
        return torch.zeros_like(x_TD)
    half = angles.cos.shape[1]
    return torch.cat(
        [x_TD[:, half : 2 * half], -x_TD[:, :half], torch.zeros_like(x_TD[:, 2 * half :])], -1
    )


def fit_channels(keys: torch.Tensor, outliers: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and offset [G, D] of a range that holds all but this share of each channel's values."""
    flat = keys.flatten(1).double()
    bounds = np.quantile(flat.numpy(), [outliers / 2, 1 - outliers / 2], axis=0)
    low, high = torch.from_numpy(bounds).float().view(2, *keys.shape[1:])
    return ((high - low) / 2).clamp(min=_LEAST_SCALE), (high + low) / 2


def fit_levels(z: torch.Tensor, weights: torch.Tensor, num: int) -> torch.Tensor:
    """Weighted k-means of numbers, from evenly spaced levels on; exact in bfloat16."""
    order = z.argsort()
    z, weights = z[order].double(), weights[order].double()
    start = torch.zeros(1, dtype=torch.float64)
    sums, moments = (
        torch.cat([start, weights.cumsum(0)]),
        torch.cat([start, (weights * z).cumsum(0)]),
    )
    levels = torch.linspace(-1, 1, num, dtype=torch.float64)
    for _ in range(_ITERATIONS):
        ends = torch.searchsorted(z, (levels[1:] + levels[:-1]) / 2)
        ends = torch.cat([torch.tensor([0]), ends, torch.tensor([len(z)])])
        total, moment = sums[ends].diff(), moments[ends].diff()
        levels = torch.where(total > 0, moment / total.clamp(min=1e-300), levels)
    return levels.bfloat16().float()


def fit(samples: list[Samples], name: str, outliers: float) -> KVQuant:
    """`samples`: of each layer."""
    num_levels = 2 ** FORMATS[name].bits
    parts = [_fit_layer(sample, num_levels, outliers) for sample in samples]
    scales, offsets, key_levels, value_levels = (
        torch.stack(each) for each in zip(*parts, strict=True)
    )
    return KVQuant(name, FORMATS[name].bits, scales, offsets, key_levels, value_levels)


def _fit_layer(own: Samples, num_levels: int, outliers: float) -> tuple[torch.Tensor, ...]:
    scale, offset = fit_channels(own.keys, outliers)
    first_scale, first_offset = fit_channels(own.first_keys, 0.0)
    z = (own.keys - offset) / scale
    is_kept = torch.ones_like(z, dtype=torch.bool).scatter_(
        -1, z.abs().topk(KEY_OUTLIERS, -1).indices, False
    )
    key_levels = fit_levels(z[is_kept], (own.key_weights * scale.square())[is_kept], num_levels)
    low, high, place = value_ranges(own.values)
    value_scale, value_offset = ((high - low) / 2).clamp(min=_LEAST_SCALE), (high + low) / 2
    z = (own.values - value_offset) / value_scale
    is_kept = torch.ones_like(z, dtype=torch.bool).scatter_(-1, place, False)
    weights = (own.value_weights[..., None] * value_scale.square()).expand_as(z)
    value_levels = fit_levels(z[is_kept], weights[is_kept], num_levels)
    return (
        torch.stack([first_scale, scale]),
        torch.stack([first_offset, offset]),
        key_levels,
        value_levels,
    )
