"""CudaLoras: adapters on a GPU. Which token has which is written before a step, into lists that CUDA graphs read."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from tidemill.kernels.cuda.lora import NO_SLOT, RANKS, ROWS, CudaLora
from tidemill.kernels.lora import LinearLora, Pair, make_tiles
from tidemill.layers.linear import Linear
from tidemill.layers.lora import Loras

_WRITES_IN_FLIGHT = 2 * 3  # of three steps, whose lists may still be read


class CudaLoras(Loras):
    def __init__(
        self, places: Mapping[str, tuple[Linear, str]], num_slots: int, max_rank: int, most_tokens: int, device: torch.device
    ) -> None:
        """`most_tokens`: of a step."""
        self._device = device
        num_words = _end_of_tiles(most_tokens, num_slots) + padded(most_tokens) + 1 + num_slots
        self._words = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._staging = [torch.empty(num_words, dtype=torch.int32, pin_memory=True) for _ in range(_WRITES_IN_FLIGHT)]
        self._turn = 0
        self._num_blocks = np.zeros(num_slots, np.int32)  # of ranks, by slot
        super().__init__(places, num_slots, max_rank)

    def _make_step(self) -> None:
        return

    def _make(self, linear: Linear) -> LinearLora:
        return CudaLora(
            linear.num_in, linear.outs, self, self._num_slots, self._max_rank, linear.act, self._device, torch.bfloat16
        )

    def put(self, slot: int, pairs: Mapping[str, Pair]) -> None:
        super().put(slot, pairs)
        self.set_rank(slot, max((pair.down_RK.shape[0] for pair in pairs.values()), default=0))

    def set_rank(self, slot: int, rank: int) -> None:
        """The highest of the adapter that is there."""
        self._num_blocks[slot] = -(-rank // RANKS)

    def lists(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin = padded(num_tokens)
        return self._words[:num_tokens], self._words[begin : begin + 3 * _num_tiles(num_tokens, self._num_slots)]

    def places(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin = _end_of_tiles(num_tokens, self._num_slots)
        end = begin + padded(num_tokens)
        return self._words[begin : begin + num_tokens], self._words[end : end + 1 + self._num_slots]

    def write(self, slots_T: np.ndarray, size: int) -> None:
        """For a step of `size` tokens, of which the first have these slots and the others are padding."""
        order, tiles = make_tiles(slots_T, ROWS)
        self._turn = (self._turn + 1) % len(self._staging)
        begin, first_place = padded(size), _end_of_tiles(size, self._num_slots)
        first_slot = first_place + padded(size)
        end = first_slot + 1 + self._num_slots
        words = self._staging[self._turn].numpy()[:end]
        words[:] = 0
        is_plain = np.ones(size, bool)
        is_plain[order] = False
        plain = np.flatnonzero(is_plain)
        words[: order.size], words[order.size : size] = order, plain
        firsts = np.arange(0, plain.size, ROWS)
        rest = np.stack([np.full(firsts.size, -2), order.size + firsts, np.minimum(plain.size - firsts, ROWS)], 1)
        tiles = np.concatenate([tiles, rest])
        tiles[:, 0] += 1
        words[begin : begin + tiles.size] = tiles.reshape(-1)
        places, slots = _places(slots_T)
        words[first_place:first_slot] = NO_SLOT
        words[first_place : first_place + places.size] = places
        words[first_slot] = self._num_blocks[slots].max(initial=0)
        words[first_slot + 1 : first_slot + 1 + slots.size] = slots
        self._words[:end].copy_(self._staging[self._turn][:end], non_blocking=True)


def _places(slots_T: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The slots of a step in the order in which tokens come to them, so that neighbours are side by side; and of each token, the
    place of its slot."""
    slots, firsts, groups = np.unique(slots_T, return_index=True, return_inverse=True)
    order = np.argsort(np.where(slots < 0, slots_T.size, firsts))
    place_of = np.empty(slots.size, np.int64)
    place_of[order] = np.arange(slots.size)
    return np.where(slots_T < 0, NO_SLOT, place_of[groups]), slots[order][: np.count_nonzero(slots >= 0)]


def padded(num_tokens: int) -> int:
    """What follows begins at a multiple of 16 bytes: kernels are compiled for that."""
    return -(-num_tokens // 4) * 4


def _num_tiles(num_tokens: int, num_slots: int) -> int:
    """The most there can be: the last tile of each slot, and of the tokens without, may be partly filled."""
    return min(num_tokens, num_tokens // ROWS + num_slots + 1)


def _end_of_tiles(num_tokens: int, num_slots: int) -> int:
    return padded(padded(num_tokens) + 3 * _num_tiles(num_tokens, num_slots))
