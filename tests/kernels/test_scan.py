"""Recurrences over states in pages: every backend against the torch reference, and against itself
however a step is cut."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tidemill.errors import ConfigError
from tidemill.kernels import native
from tidemill.kernels.gate import gate_reference, gated
from tidemill.kernels.native_state import NativeStates
from tidemill.kernels.state import PagedStates, ScanInputs, StateWeights, TorchStates, cut
from tidemill.types.cache_layout import StateLayout
from tidemill.types.model_config import StateSpec

SPECS = {
    "mamba": StateSpec(kind="mamba", num_heads=2, head_dim=16, state_size=12, rank=3),
    "mamba2": StateSpec(
        kind="mamba2", num_heads=4, head_dim=40, state_size=12, num_groups=2, norm_size=80, kernel=3
    ),
    "delta": StateSpec(
        kind="delta", num_heads=4, head_dim=16, state_size=24, num_groups=2, norm_size=16
    ),
}
INTERVAL, NUM_ROWS, NUM_BLOCKS = 8, 3, 6


def weights(spec: StateSpec) -> StateWeights:
    is_mamba, inner = spec.kind == "mamba", spec.num_inner
    return StateWeights(
        conv_KC=torch.randn(spec.kernel, spec.num_channels),
        conv_bias_C=None if spec.kind == "delta" else torch.randn(spec.num_channels),
        decay=-torch.rand(spec.num_heads, spec.state_size, spec.head_dim)
        if is_mamba
        else -torch.rand(spec.num_heads),
        skip_I=None if spec.kind == "delta" else torch.randn(inner),
        step_bias=None if is_mamba else torch.randn(spec.num_heads),
        norm_I=torch.randn(inner) if spec.norm_size else None,
        eps=1e-5,
    )


def paged(spec: StateSpec) -> PagedStates:
    """Pages in no order, with what others left in them."""
    size = -(-max(spec.piece_bytes) // 64) * 64
    layout = StateLayout.pack([[], spec.piece_bytes], 2 * size)
    assert layout.block_pages > 1
    num = NUM_ROWS * NUM_BLOCKS * layout.block_pages
    pool = torch.randint(0, 255, (1 + num, layout.page_bytes), dtype=torch.uint8)
    table = 1 + torch.randperm(num, dtype=torch.int32).view(NUM_ROWS, -1)
    return PagedStates(pool, list(table.split(NUM_BLOCKS, dim=1)), layout, (spec, spec), INTERVAL)


class Given:
    """Random inputs of one sequence for each row, and a backend to put parts of them through."""

    def __init__(self, spec: StateSpec, num_tokens: int = 30) -> None:
        torch.manual_seed(1)
        self.spec, self.learned = spec, weights(spec)
        self.projected = torch.randn(NUM_ROWS, num_tokens, spec.num_projected)
        self.steps = (
            torch.randn(NUM_ROWS, num_tokens, spec.num_inner) if spec.kind == "mamba" else None
        )
        self.bc = (
            torch.randn(NUM_ROWS, num_tokens, 2 * spec.state_size) if spec.kind == "mamba" else None
        )

    def run(self, plan, *items: tuple[int, int, int]) -> list[torch.Tensor]:
        """Items (row, start, count) in one step."""
        rows, starts, counts = np.array(items).T

        def part(values):
            return (
                None
                if values is None
                else torch.cat([values[row, start : start + num] for row, start, num in items])
            )

        step, projected = plan(rows, starts, counts), part(self.projected)
        mixed = step.convolve(1, projected, self.learned)
        out = step.scan(
            1, ScanInputs(mixed, projected, part(self.steps), part(self.bc)), self.learned
        )
        return list(out.split(counts.tolist()))


def torch_plan(spec):
    return TorchStates(paged(spec)).plan


def native_plan(spec):
    if native.lib is None:
        pytest.skip(native.why)
    states = paged(spec)
    assert NativeStates.can_run(states)
    return NativeStates(states).plan


def triton_plan(spec):
    scan = pytest.importorskip("tidemill.kernels.cuda.scan")
    from tidemill.kernels.cuda.records import HEADER
    from tidemill.runner import cuda_work

    states = paged(spec)
    made = scan.CudaStates(states)

    def plan(rows, starts, counts):
        items, num, room = np.stack([rows, starts, counts], axis=1), int(counts.sum()), 2
        work = cuda_work.make_work(items.astype(np.int32), np.ones(rows.size, bool), [], 1, 1)
        work.state_sequences, words = cuda_work.state_sequences(items), np.full(200, 7, np.int32)
        work.write(words, num + 1, NUM_ROWS - 1, (0, 0, 0, room))
        at = [HEADER + i * cuda_work.padded(num + 1) for i in range(2)]
        return made.step(
            scan.StateLists(
                *(torch.from_numpy(words[i : i + num]) for i in at), torch.from_numpy(words), room
            )
        )

    return plan


INTERPRETED = pytest.param(triton_plan, marks=pytest.mark.slow)  # tens of seconds


@pytest.mark.parametrize("make", [native_plan, triton_plan])
@pytest.mark.parametrize("kind", SPECS)
def test_a_backend_computes_what_the_reference_does(kind, make):
    spec = SPECS[kind]
    given = Given(spec)
    steps = [[(0, 0, 7), (2, 0, 1)], [(2, 1, 1), (0, 7, 2), (1, 0, 2)]]
    expected, plan = torch_plan(spec), make(spec)
    for items in steps:
        for mine, other in zip(given.run(plan, *items), given.run(expected, *items), strict=True):
            assert_close(mine, other, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("make", [torch_plan, native_plan, INTERPRETED])
@pytest.mark.parametrize("kind", SPECS)
def test_bits_do_not_depend_on_how_a_sequence_is_cut(kind, make):
    spec, num = SPECS[kind], 18
    given = Given(spec)
    (whole,) = given.run(make(spec), (1, 0, num))
    for ends in (range(num + 1), (0, 7, 8, 10, 18), (0, 1, 17, 18)):
        plan = make(spec)
        given.run(plan, (0, 0, 5))
        parts = [
            given.run(plan, (1, start, end - start), (0, 5 + i, 1))[0]
            for i, (start, end) in enumerate(pairwise(ends))
        ]
        assert torch.equal(torch.cat(parts), whole)


def test_segments_end_where_states_are_kept():
    made = cut(np.array([4, 2]), np.array([6, 0]), np.array([12, 3]), 8)
    assert made.records.tolist() == [
        [4, 0, 2, 0, 0],
        [4, 2, 8, 0, 1],
        [4, 10, 2, 1, 2],
        [2, 12, 3, -1, 0],
    ]
    assert made.chains.tolist() == [0, 3, 4]


def test_pieces_lie_side_by_side_in_pages():
    layout = StateLayout.pack([[100, 700, 700], [], [300]], 1024)
    assert layout.block_pages == 2
    assert layout.pieces == (((1, 704), (0, 0), (1, 0)), (), ((0, 704),))
    assert StateLayout.pack([[100, 700]]).pieces == (((0, 704), (0, 0)),)


def test_a_state_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="divide"):
        StateSpec(kind="mamba2", num_heads=4, head_dim=8, state_size=8, num_groups=3)
    with pytest.raises(ConfigError, match="kind"):
        StateSpec(kind="rwkv", num_heads=4, head_dim=8, state_size=8)


def test_a_gate():
    x, gate = torch.randn(3, 32), torch.randn(3, 32)
    assert_close(gate_reference(x, gate), x * torch.sigmoid(gate))
    assert_close(gated(x, gate), gate_reference(x, gate))
    scan = pytest.importorskip("tidemill.kernels.cuda.scan")
    assert_close(scan.gate(x, gate), gate_reference(x, gate))
