"""Rotary position embedding: tables of angles, and their application to the query and key heads of
a fused projection.

The tables are made with numpy. torch's cos and sin are not safe for it on x86: see
`settle_vector_math` in machine.py.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from tidemill.types.model_config import RopeScaling

_POSITIONS_AT_ONCE = 4096  # bounds the float64 intermediates


def rope_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, num_positions: int = 0
) -> tuple[np.ndarray, float]:
    """Angle per position for each of the head_dim / 2 pairs (float32), and the factor that cosines
    and sines are scaled by. `num_positions`: the longest a sequence may become, which decides
    between longrope's factors."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = np.power(theta, exponents.astype(np.float64)).astype(np.float32)
    freqs = np.float32(1.0) / powers
    if scaling is None:
        return freqs, 1.0
    factor = np.float32(scaling.factor)
    if scaling.kind == "linear":
        return freqs / factor, 1.0
    if scaling.kind == "llama3":
        wavelengths = np.float32(2 * math.pi) / freqs
        longest = scaling.original_context / scaling.low_freq_factor
        shortest = scaling.original_context / scaling.high_freq_factor
        smooth = (
            np.float32(scaling.original_context) / wavelengths - np.float32(scaling.low_freq_factor)
        ) / np.float32(scaling.high_freq_factor - scaling.low_freq_factor)
        blended = (1 - smooth) * freqs / factor + smooth * freqs
        scaled = np.where(wavelengths > longest, freqs / factor, freqs)
        return np.where((wavelengths <= longest) & (wavelengths >= shortest), blended, scaled), 1.0
    if scaling.kind == "longrope":
        factors = (
            scaling.long_factors
            if num_positions > scaling.original_context
            else scaling.short_factors
        )
        stretch = (
            math.log(scaling.factor) / math.log(scaling.original_context)
            if scaling.factor > 1
            else 0.0
        )
        strength = (
            math.sqrt(1 + stretch) if scaling.attention_factor is None else scaling.attention_factor
        )
        return np.float32(1.0) / (np.array(factors, np.float32) * powers), strength
    assert scaling.kind == "yarn", scaling.kind

    def dim_of(num_rotations: float) -> float:
        return (
            head_dim
            * math.log(scaling.original_context / (num_rotations * 2 * math.pi))
            / (2 * math.log(theta))
        )

    low, high = dim_of(scaling.beta_fast), dim_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(
        (high - low) or 0.001
    )
    extrapolated = 1 - ramp.clip(0, 1)
    freqs = freqs / factor * (1 - extrapolated) + freqs * extrapolated
    attention_factor = scaling.attention_factor
    if attention_factor is None:
        attention_factor = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return freqs, attention_factor


def rope_tables(
    freqs: np.ndarray, factor: float, num_positions: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, [positions, head_dim / 2], float32. Angles are rounded to float32, as
    models are trained with; their cosine is taken in float64 and rounded once, so that the tables
    have the same bits on every platform."""
    cos, sin = (np.empty((num_positions, freqs.size), np.float32) for _ in range(2))
    for begin in range(0, num_positions, _POSITIONS_AT_ONCE):
        some = slice(begin, begin + _POSITIONS_AT_ONCE)
        positions = np.arange(num_positions, dtype=np.float32)[some]
        angles = np.outer(positions, freqs.astype(np.float32)).astype(np.float64)
        cos[some], sin[some] = np.cos(angles), np.sin(angles)
    cos *= np.float32(factor)
    sin *= np.float32(factor)
    return torch.from_numpy(cos), torch.from_numpy(sin)


def apply_rope(x_TND: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (i, i + R/2) of the first R dimensions of every head, for which there are
    angles. Only multiplications and additions, so every element rounds the same way."""
    half = cos_TD.shape[-1]
    first, second = x_TND[..., :half], x_TND[..., half : 2 * half]
    cos, sin = cos_TD.unsqueeze(1), sin_TD.unsqueeze(1)
    out = torch.empty(x_TND.shape, dtype=x_TND.dtype, device=x_TND.device)
    torch.sub(first * cos, second * sin, out=out[..., :half])
    torch.add(second * cos, first * sin, out=out[..., half : 2 * half])
    out[..., 2 * half :] = x_TND[..., 2 * half :]
    return out
