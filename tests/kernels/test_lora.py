"""Adapters' kernels: the compiled one and the GPU's, interpreted, against the reference; bits of a
row alone and among others."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tidemill.kernels import native
from tidemill.kernels.cuda import launch, norm
from tidemill.kernels.cuda import lora as cuda
from tidemill.kernels.cuda.gemm import choice_of
from tidemill.kernels.cuda.glu import glu
from tidemill.kernels.glu import glu_reference
from tidemill.kernels.kv_cache import Angles
from tidemill.kernels.linear import Weight
from tidemill.kernels.lora import LoraStep, NativeLora, TorchLora, make_tiles
from tidemill.kernels.pending import PendingLora, with_added
from tidemill.kernels.rope import rope_frequencies, rope_tables
from tidemill.layers import cuda_lora
from tidemill.layers.attention import adds
from tidemill.runner.cuda_step import CudaStep
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
    """Those of gate, up and down are as those of q, k and v."""
    rank, names, dtype = ADAPTERS[slot]
    made = {}
    for name in outs:
        if {"gate": "q", "up": "k", "down": "v"}.get(name, name) in names:
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
                out[row, first : first + size] += pair.scale * (
                    pair.up_NR.double() @ (pair.down_RK.double() @ x[row].double())
                )
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
        # what was there before
        made.put(slot, {"q": LoraPair(torch.ones(3, NUM_IN), torch.ones(60, 3), 9.0)})
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

    side = None

    def lists(self, num_tokens: int):
        return self.made.lists(num_tokens)


def make(
    outs: dict[str, int], num_in: int, size: int, monkeypatch, max_rank: int = 64
) -> tuple[cuda.CudaLora, list[dict[str, LoraPair]]]:
    """Two stretches of K. What was in a slot before is another adapter."""
    monkeypatch.setattr(cuda, "_STRETCH", 128)
    torch.manual_seed(0)
    adapters = [pairs_of(slot, outs, num_in) for slot in range(len(ADAPTERS))]
    lists, act = Lists(SLOTS, size), "silu" if "gate" in outs else ""
    made = cuda.CudaLora(
        num_in, outs, lists, len(ADAPTERS), max_rank, act, torch.device("cpu"), torch.float32
    )
    for slot, pairs in enumerate(adapters):
        made.put(
            slot,
            {
                name: LoraPair(torch.ones(max_rank, num_in), torch.ones(outs[name], max_rank), 9.0)
                for name in outs
            },
        )
        made.put(slot, pairs)
    return made, adapters


class Given(Weight):
    """A matmul's result, of these rows."""

    def __init__(self, y_TN: torch.Tensor) -> None:
        self.y_TN = y_TN

    def __call__(self, x_TK):
        return self.y_TN.clone()

    def rows(self, ids_T):
        raise NotImplementedError


def add_left(y_TN: torch.Tensor) -> torch.Tensor:
    """As the kernel behind does."""
    y_TN, added = with_added(y_TN)
    return y_TN if added is None else y_TN + added


@pytest.mark.parametrize("is_gated", [False, True])
def test_adapters_on_a_gpu(is_gated, monkeypatch):
    """Parts side by side, and in turn, before the activation. Tokens beyond the step's are padding.
    What is left to the kernel behind has the same bits; so have larger tiles, and a row alone."""
    outs, size, act = (
        {"gate": 140, "up": 140} if is_gated else OUTS | {"q": 300},
        SLOTS.size + 3,
        "silu" if is_gated else "",
    )
    made, adapters = make(outs, NUM_IN, size, monkeypatch)
    x, y = torch.randn(size, NUM_IN), torch.randn(size, sum(outs.values()))
    stored = torch.stack(y.chunk(2, 1), 2).flatten(1) if is_gated else y
    out = made.adapted(x, Given(stored))
    right = expected(x, y, [*SLOTS, -1, -1, -1], adapters, outs)
    # of products of two such sums
    near = {"atol": 4e-2, "rtol": 5e-4} if is_gated else {"atol": 2e-3, "rtol": 1e-4}
    assert_close(out, glu_reference(right) if is_gated else right, **near)
    plain = np.flatnonzero(np.append(SLOTS, [-1, -1, -1]) < 0)
    assert torch.equal(out[plain], glu(stored, act)[plain] if is_gated else stored[plain])
    assert torch.equal(add_left(made.pending(x, Given(stored))), out)
    for row in (4, SLOTS.size - 1):
        made.lists = Lists(SLOTS[row : row + 1], 1)
        alone = x[row : row + 1].clone(), Given(stored[row : row + 1])
        assert torch.equal(made.adapted(*alone)[0], out[row])
        assert torch.equal(add_left(made.pending(*alone))[0], out[row])
    monkeypatch.setattr(cuda, "SMALL_TILES_UP_TO", 1)
    made.lists = Lists(SLOTS, size)
    assert torch.equal(made.adapted(x, Given(stored)), out)


@pytest.mark.parametrize("max_rank", [48, 128])
def test_the_kernel_behind_gate_and_up_multiplies_for_the_linear_behind_it(max_rank, monkeypatch):
    """Unless ranks may be too high. Larger tiles and a row alone have the same bits."""
    num, size = 140, SLOTS.size + 3
    monkeypatch.setattr(cuda, "_GATED_RUN", 32)
    monkeypatch.setattr(
        sys.modules[__name__],
        "ADAPTERS",
        [(min(rank, max_rank), *rest) for rank, *rest in ADAPTERS],
    )
    gate_up, _ = make({"gate": num, "up": num}, NUM_IN, size, monkeypatch, max_rank)
    down, adapters = make({"down": 70}, num, size, monkeypatch, max_rank)
    gate_up.behind = down
    x, y, z = torch.randn(size, NUM_IN), torch.randn(size, 2 * num), torch.randn(size, 70)
    shrunk = mock.Mock(wraps=down._shrink)
    monkeypatch.setattr(down, "_shrink", shrunk)

    def both(rows=slice(None), name="adapted"):
        made = gate_up.adapted(x[rows].clone(), Given(y[rows]))
        return made, add_left(getattr(down, name)(made, Given(z[rows])))

    made, out = both()
    assert shrunk.called == (max_rank > 64)
    assert_close(
        out, expected(made, z, [*SLOTS, -1, -1, -1], adapters, {"down": 70}), atol=2e-2, rtol=1e-3
    )
    gate_up.lists = down.lists = Lists(SLOTS[4:5], 1)
    assert torch.equal(both(slice(4, 5), "pending")[1][0], out[4])
    monkeypatch.setattr(cuda, "SMALL_TILES_UP_TO", 1)
    # GPUs add 16 products at a time, the interpreter all
    monkeypatch.setitem(cuda.GATED, 64, cuda.GATED[16])
    gate_up.lists = down.lists = Lists(SLOTS, size)
    assert torch.equal(both()[1], out)


def test_what_is_left_to_the_kernel_behind():
    """A norm, and the entry into the cache, have the bits that they have of the sum."""
    torch.manual_seed(0)
    y, added, residual = (torch.randn(5, 96) for _ in range(3))

    def left():
        return PendingLora(y.clone(), added, lambda: None)

    weight = torch.randn(96)
    both = [residual.clone(), residual.clone()]
    normed = [
        norm.add_rms_norm(x, one, weight, 1e-5)
        for x, one in zip((left(), y + added), both, strict=True)
    ]
    assert torch.equal(*normed)
    assert torch.equal(*both)
    angles = Angles(*rope_tables(*rope_frequencies(16, 1e4, None), 8))
    caches = [torch.zeros(2, 1, 2, 1, 16, 16) for _ in range(2)]
    how = {
        "places": [SimpleNamespace(group=0, index=0)],
        "angles": [angles],
        "num_heads": 4,
        "scales": None,
    }
    kvs = [SimpleNamespace(cache=cache, **how) for cache in caches]
    steps = [CudaStep(kv, [], None, torch.arange(5), torch.arange(5)[None]) for kv in kvs]
    assert adds(steps[0])
    steps[0].enter(0, left())
    steps[1].enter(0, y + added)
    assert torch.equal(*caches)
    assert caches[0].any()


def test_kernels_with_adapters_change_only_where_the_choice_of_tiles_does():
    """Of each choice one number of tokens is compiled at start."""
    seen = {}
    for num in range(1, 5000):
        kind = cuda.rows_of_tile(num), num > launch.FEW
        assert seen.setdefault(choice_of(num), kind) == kind
