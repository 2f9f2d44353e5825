"""Rope: the tables of angles a model looks its positions up in."""

from __future__ import annotations

import torch

from tidemill.config import RopeScaling
from tidemill.kernels.rope import rope_frequencies, rope_tables
from tidemill.layers.base import Layer


class Rope(Layer):
    """`factors` is an optional stored tensor that divides the frequencies (how GGUF files carry Llama 3's scaling)."""

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None) -> None:
        super().__init__({"factors": (head_dim // 2,)}, optional=True)
        self.head_dim, self.theta, self.scaling = head_dim, theta, scaling
        self.factors: torch.Tensor | None = None

    def build(self, num_positions: int, device: torch.device | None = None) -> None:
        """Make the tables once the weights are there."""
        freqs, factor = rope_frequencies(self.head_dim, self.theta, self.scaling)
        if self.factors is not None:
            freqs = freqs / self.factors.numpy()
        self.cos, self.sin = (table.to(device) for table in rope_tables(freqs, factor, num_positions))
