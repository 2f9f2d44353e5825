"""Rotary position embedding: tables of angles, and their application to the query and key heads of a fused projection."""

from __future__ import annotations

import math

import torch

from tidemill.config import RopeScaling


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> tuple[torch.Tensor, float]:
    """Angle per position for each of the head_dim / 2 pairs, and the factor that cosines and sines are scaled by."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    freqs = 1.0 / (theta**exponents)
    if scaling is None:
        return freqs, 1.0
    if scaling.kind == "linear":
        return freqs / scaling.factor, 1.0
    if scaling.kind == "llama3":
        wavelengths = 2 * math.pi / freqs
        longest = scaling.original_context / scaling.low_freq_factor
        shortest = scaling.original_context / scaling.high_freq_factor
        smooth = (scaling.original_context / wavelengths - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        blended = (1 - smooth) * freqs / scaling.factor + smooth * freqs
        scaled = torch.where(wavelengths > longest, freqs / scaling.factor, freqs)
        return torch.where((wavelengths <= longest) & (wavelengths >= shortest), blended, scaled), 1.0
    assert scaling.kind == "yarn", scaling.kind

    def dim_of(num_rotations: float) -> float:
        return head_dim * math.log(scaling.original_context / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dim_of(scaling.beta_fast)), 0)
    high = min(math.ceil(dim_of(scaling.beta_slow)), head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    extrapolated = 1 - ramp.clamp(0, 1)
    freqs = freqs / scaling.factor * (1 - extrapolated) + freqs * extrapolated
    factor = scaling.attention_factor
    if factor is None:
        factor = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return freqs, factor


def rope_tables(freqs: torch.Tensor, factor: float, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, [positions, head_dim / 2]."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), freqs)
    return angles.cos() * factor, angles.sin() * factor


def apply_rope(x_TND: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (i, i + D/2) of every head. Only multiplications and additions, so every element rounds the same way."""
    half = x_TND.shape[-1] // 2
    first, second = x_TND[..., :half], x_TND[..., half:]
    cos, sin = cos_TD.unsqueeze(1), sin_TD.unsqueeze(1)
    out = torch.empty(x_TND.shape, dtype=x_TND.dtype, device=x_TND.device)
    torch.sub(first * cos, second * sin, out=out[..., :half])
    torch.add(second * cos, first * sin, out=out[..., half:])
    return out
