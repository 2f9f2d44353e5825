"""Layout: the tensors that a matrix is written as, and the `quantization_config` that says so."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch

from tidemill.compress.stored import IntWeight, Stored
from tidemill.errors import ConfigError


class Layout(ABC):
    """Sees all matrices one by one, then says what config.json must hold."""

    name: str

    def check(self, name: str, stored: IntWeight) -> None:
        """Refuses integers that the layout cannot hold, by all but their values: they may not be
        there yet."""
        return

    @abstractmethod
    def tensors(self, name: str, stored: Stored) -> dict[str, torch.Tensor]:
        """The tensors of the matrix `name`, by stored name; refuses what the layout cannot hold."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """quantization_config, after the last matrix."""

    def refuse(self, name: str, why: str, fix: str) -> ConfigError:
        return ConfigError(
            f"{name} cannot be written as {self.name}: {why}.", fix=fix, param="format"
        )

    def integers(self, name: str, stored: Stored) -> IntWeight:
        if not isinstance(stored, IntWeight):
            raise self.refuse(name, "it is not made of integers", "Choose another --format.")
        return stored


def pack(values_NK: torch.Tensor, bits: int) -> torch.Tensor:
    """Numbers from 0 on as a stream of bits for each row, the lowest first, in words of 32: int32
    [N, ceil(K * bits / 32)]."""
    numbers = values_NK.to(torch.uint8).numpy()
    stream = np.unpackbits(numbers[:, :, None], axis=2, count=bits, bitorder="little").reshape(
        numbers.shape[0], -1
    )
    short = -stream.shape[1] % 32
    packed = np.packbits(np.pad(stream, ((0, 0), (0, short))), axis=1, bitorder="little")
    return torch.from_numpy(packed.view("<i4").copy())


def unsigned(stored: IntWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and zero points [N, G], both from 0 on."""
    middle = 2 ** (stored.bits - 1)
    if stored.zeros_NG is None:
        zeros = torch.full(stored.scales_NG.shape, middle, dtype=torch.int16)
        return stored.codes_NK + middle, zeros
    return stored.codes_NK, stored.zeros_NG
