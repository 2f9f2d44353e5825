"""CudaLoras: adapters on a GPU. Which token has which is written before a step, into lists that
CUDA graphs read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
import torch

from tidemill.kernels.cuda.launch import IS_INTERPRETED
from tidemill.kernels.cuda.lora import CudaLora, rows_of_tile
from tidemill.kernels.lora import LinearLora, make_tiles
from tidemill.layers.linear import GatedLinear, Linear
from tidemill.layers.lora import LoraPlace, Loras

_WRITES_IN_FLIGHT = 2 * 3  # of three steps, whose lists may still be read


class CudaLoras(Loras):
    side: torch.cuda.Stream | None

    def __init__(
        self,
        places: Mapping[str, LoraPlace],
        num_slots: int,
        max_rank: int,
        most_tokens: int,
        device: torch.device,
    ) -> None:
        """`most_tokens`: of a step."""
        self._device = device
        num_tiles = max(_num_tiles(num, num_slots) for num in range(most_tokens + 1))
        num_words = padded(most_tokens) + 3 * num_tiles
        self._done = torch.zeros(num_tiles, dtype=torch.int32, device=device)
        self._words = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._staging = [
            torch.empty(num_words, dtype=torch.int32, pin_memory=True)
            for _ in range(_WRITES_IN_FLIGHT)
        ]
        self._turn = 0
        # what is here goes first
        self.side = None if IS_INTERPRETED else torch.cuda.Stream(device, priority=-1)
        super().__init__(places, num_slots, max_rank)
        for linear in self._linears:
            if (
                isinstance(linear, GatedLinear)
                and linear.read_by
                and isinstance(linear.lora, CudaLora)
            ):
                linear.lora.behind = cast("CudaLora | None", linear.read_by[0].lora)

    def _make_step(self) -> None:
        return

    def _make(self, linear: Linear) -> LinearLora:
        return CudaLora(
            linear.num_in,
            linear.outs,
            self,
            self._num_slots,
            self._max_rank,
            linear.act,
            self._device,
            torch.bfloat16,
        )

    def lists(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        begin, num_tiles = padded(num_tokens), _num_tiles(num_tokens, self._num_slots)
        return (
            self._words[:num_tokens],
            self._words[begin : begin + 3 * num_tiles],
            self._done[:num_tiles],
        )

    def write(self, slots_T: np.ndarray, size: int) -> None:
        """Writes the slots of a step of `size` tokens, of which the first have these slots and the
        others are padding."""
        rows = rows_of_tile(size)
        order, tiles = make_tiles(slots_T, rows)
        self._turn = (self._turn + 1) % len(self._staging)
        begin = padded(size)
        end = begin + 3 * _num_tiles(size, self._num_slots)
        words = self._staging[self._turn].numpy()[:end]
        words[:] = 0
        is_plain = np.ones(size, bool)
        is_plain[order] = False
        plain = np.flatnonzero(is_plain)
        words[: order.size], words[order.size : size] = order, plain
        firsts = np.arange(0, plain.size, rows)
        rest = np.stack(
            [np.full(firsts.size, -2), order.size + firsts, np.minimum(plain.size - firsts, rows)],
            1,
        )
        tiles = np.concatenate([tiles, rest])
        tiles[:, 0] += 1
        words[begin : begin + tiles.size] = tiles.reshape(-1)
        self._words[:end].copy_(self._staging[self._turn][:end], non_blocking=True)


def padded(num_tokens: int) -> int:
    """Rounds up, because the next data begins at a multiple of 16 bytes: kernels are compiled for
    that."""
    return -(-num_tokens // 4) * 4


def _num_tiles(num_tokens: int, num_slots: int) -> int:
    """The most there can be: the last tile of each slot, and of the tokens without, may be partly
    filled."""
    return min(num_tokens, num_tokens // rows_of_tile(num_tokens) + num_slots + 1)
