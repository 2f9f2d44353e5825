"""Rope: the tables of angles a model looks its positions up in."""

from __future__ import annotations

import torch

from tidemill.kernels.kv_cache import Angles
from tidemill.kernels.rope import rope_frequencies, rope_tables
from tidemill.layers.base import Layer
from tidemill.types.model_config import Rotation


class Rope(Layer):
    """`factors` is an optional stored tensor that divides the frequencies (how GGUF files carry
    Llama 3's scaling)."""

    def __init__(self, rotation: Rotation) -> None:
        super().__init__({"factors": (rotation.num_dims // 2,)}, optional=True)
        self.rotation = rotation
        self.factors: torch.Tensor | None = None

    def build(
        self, num_positions: int, device: torch.device | None = None, longest: int = 0
    ) -> Angles:
        """The tables, once the weights are there. `longest`: how many positions they have, if those
        are more."""
        rotation = self.rotation
        freqs, factor = rope_frequencies(
            rotation.num_dims, rotation.theta, rotation.scaling, num_positions
        )
        if self.factors is not None:
            freqs = freqs / self.factors.numpy()
        cos, sin = rope_tables(freqs, factor, max(num_positions, longest))
        return Angles(cos.to(device), sin.to(device))
