"""Adapters' kernels: the compiled one and the GPU's, interpreted, against the reference; bits of a row alone and among others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tidemill.kernels import native
from tidemill.kernels.cuda import launch
from tidemill.kernels.cuda import lora as cuda
from tidemill.kernels.cuda.gemm import Tile, choice_of, gemm
from tidemill.kernels.glu import glu_reference
from tidemill.kernels.lora import LoraStep, NativeLora, TorchLora, make_tiles
from tidemill.layers import cuda_lora
from tidemill.weights.lora import LoraPair

NUM_IN, OUTS = 150, {"q": 60, "k": 12, "v": 20}
# Of each slot: rank, parts, type. The last slot is empty.
ADAPTERS = [
    (5, "qkv", torch.float32),
    (16, "qv", torch.bfloat16),
    (64, "k", torch.float16),
    (1, "q", torch.float32),
    (33, "qkv", torch.float32),
    (1, "", torch.float32),
]
SLOTS = np.array([-1, 0, 0, 1, 4, 4, 4, 4, 4, 2, 3, -1, 0, 1, 1, 1, 2, 2, 2, 3, 4, 0, 5, *[1] * 17])


def pairs_of(slot: int, outs: dict[str, int], num_in: int = NUM_IN) -> dict[str, LoraPair]:
    rank, names, dtype = ADAPTERS[slot]
    made = {}
    for name in outs:
        if name in names or (names and name in ("gate", "up")):
            down, up = torch.randn(rank, num_in).to(dtype), torch.randn(outs[name], rank).to(dtype)
            made[name] = LoraPair(down, up, 0.3 + slot)
    return made


def expected(x, y, slots, adapters, outs):
    """In float64."""
    out = y.double()
    for row, slot in enumerate(slots):
        first = 0
        for name, size in outs.items():
            if slot >= 0 and name in adapters[slot]:
                pair = adapters[slot][name]
                out[row, first : first + size] += pair.scale * (pair.up_NR.double() @ (pair.down_RK.double() @ x[row].double()))
            first += size
    return out.float()


def test_tiles_are_of_one_slot_each():
    order, tiles = make_tiles(np.array([2, -1, 0, 2, 2, 0, 2]), 2)
    assert order.tolist() == [2, 5, 0, 3, 4, 6]
    assert tiles.tolist() == [[0, 0, 2], [2, 2, 2], [2, 4, 2]]
    order, tiles = make_tiles(np.array([-1, -1]), 4)
    assert order.size == tiles.size == 0


@pytest.mark.parametrize("kind", ["compiled", "torch"])
def test_adapters_on_a_cpu(kind, monkeypatch):
    torch.manual_seed(0)
    step = LoraStep()
    if kind == "torch":
        monkeypatch.setattr(native, "lib", None)
        made = TorchLora(OUTS, step)
    else:
        if native.lib is None:
            pytest.skip(native.why)
        made = NativeLora(NUM_IN, OUTS, step, len(ADAPTERS), 64)
    adapters = [pairs_of(slot, OUTS) for slot in range(len(ADAPTERS))]
    for slot, pairs in enumerate(adapters):
        made.put(slot, {"q": LoraPair(torch.ones(3, NUM_IN), torch.ones(60, 3), 9.0)})  # what was there before
        made.put(slot, pairs)
    x, y = torch.randn(SLOTS.size, NUM_IN), torch.randn(SLOTS.size, 92)
    step.set(SLOTS)
    together = y.clone()
    made.add(x, together)
    assert_close(together, expected(x, y, SLOTS, adapters, OUTS), atol=2e-3, rtol=1e-4)
    for row in range(SLOTS.size):
        step.set(SLOTS[row : row + 1])
        alone = y[row : row + 1].clone()
        made.add(x[row : row + 1].clone(), alone)
        assert torch.equal(alone[0], together[row])


class Lists:
    """As the runner's adapters have them, on this machine."""

    def __init__(self, slots: np.ndarray, size: int) -> None:
        self.made = object.__new__(cuda_lora.CudaLoras)
        self.made._num_slots, self.made._turn = len(ADAPTERS), 0
        tiles = cuda_lora._num_tiles(size, len(ADAPTERS))
        words = cuda_lora.padded(size) + 3 * tiles
        self.made._words = torch.full((words,), 77, dtype=torch.int32)
        self.made._staging = [torch.full((words,), 77, dtype=torch.int32)]
        self.made._done = torch.zeros(tiles, dtype=torch.int32)
        self.made.write(slots, size)

    def lists(self, num_tokens: int):
        return self.made.lists(num_tokens)


def make(outs: dict[str, int], num_in: int, size: int, monkeypatch) -> tuple[cuda.CudaLora, list[dict[str, LoraPair]]]:
    """Two stretches of K. What was in a slot before is another adapter."""
    monkeypatch.setattr(cuda, "_STRETCH", 128)
    torch.manual_seed(0)
    adapters = [pairs_of(slot, outs, num_in) for slot in range(len(ADAPTERS))]
    lists, is_gated = Lists(SLOTS, size), "gate" in outs
    made = cuda.CudaLora(num_in, outs, lists, len(ADAPTERS), 64, is_gated, torch.device("cpu"), torch.float32)
    for slot, pairs in enumerate(adapters):
        made.put(slot, {name: LoraPair(torch.ones(64, num_in), torch.ones(outs[name], 64), 9.0) for name in outs})
        made.put(slot, pairs)
    return made, adapters


@pytest.mark.parametrize("is_gated", [False, True])
def test_adapters_on_a_gpu(is_gated, monkeypatch):
    """Parts side by side, and in turn. Tokens beyond the step's are padding. Larger tiles give the same bits, and so does a row
    alone."""
    outs, size = {"gate": 40, "up": 40} if is_gated else OUTS, SLOTS.size + 3
    made, adapters = make(outs, NUM_IN, size, monkeypatch)
    x, y = torch.randn(size, NUM_IN), torch.randn(size, sum(outs.values()))
    stored = torch.stack(y.chunk(2, 1), 2).flatten(1) if is_gated else y.clone()
    before, slots = stored.clone(), [*SLOTS, -1, -1, -1]
    made.add(x, stored)
    right = expected(x, y, slots, adapters, outs)
    assert_close(torch.cat([stored[:, 0::2], stored[:, 1::2]], 1) if is_gated else stored, right, atol=2e-3, rtol=1e-4)
    assert torch.equal(stored[SLOTS.size :], before[SLOTS.size :])
    for row in (4, SLOTS.size - 1):
        made._lists = Lists(SLOTS[row : row + 1], 1)
        alone = before[row : row + 1].clone()
        made.add(x[row : row + 1].clone(), alone)
        assert torch.equal(alone[0], stored[row])
    monkeypatch.setattr(cuda, "_FEW", 1)
    made._lists = Lists(SLOTS, size)
    made.add(x, before)
    assert torch.equal(before, stored)


@pytest.mark.parametrize(("is_gated", "tile"), [(False, Tile(16, 32, 32, 2, 4)), (True, Tile(32, 16, 32, 2, 4, bulk=1))])
def test_a_matmul_on_a_gpu_adds_adapters(is_gated, tile, monkeypatch):
    """Before the activation. Rows without one are what they are without adapters; a row alone has the same bits."""
    outs, num_in = {"gate": 40, "up": 40} if is_gated else OUTS, 152
    size, act = SLOTS.size + 3, "silu" if is_gated else ""
    made, adapters = make(outs, num_in, size, monkeypatch)
    x, weight = torch.randn(size, num_in), torch.randn(sum(outs.values()), num_in) / num_in**0.5
    stored = torch.stack(weight.chunk(2), 1).flatten(0, 1) if is_gated else weight
    out = gemm(x, stored, tile, act=act, added_TN=made.product(x))
    right = expected(x, x @ weight.T, [*SLOTS, -1, -1, -1], adapters, outs)
    assert_close(out, glu_reference(right) if is_gated else right, atol=4e-3, rtol=5e-4)
    plain = np.flatnonzero(np.append(SLOTS, [-1, -1, -1]) < 0)
    assert torch.equal(out[plain], gemm(x, stored, tile, act=act)[plain])
    for row in (4, SLOTS.size - 1):
        made._lists = Lists(SLOTS[row : row + 1], 1)
        alone = x[row : row + 1].clone()
        assert torch.equal(gemm(alone, stored, tile, act=act, added_TN=made.product(alone))[0], out[row])


def test_kernels_with_adapters_change_only_where_the_choice_of_tiles_does():
    """Of each choice one number of tokens is compiled at start."""
    seen = {}
    for num in range(1, 5000):
        kind = cuda.rows_of_tile(num), num > launch.FEW
        assert seen.setdefault(choice_of(num), kind) == kind
