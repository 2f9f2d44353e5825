"""`--kv-layout virtual` on the GPU at hand: memory keeps what it holds, answers have the same bits
in any batch."""

from __future__ import annotations

import numpy as np
import torch

from bench.gpu_virtual import GRANULE, Line, engine, free, ids, memory_of, run, runner_of
from bench.gpu_workloads import MODELS
from tidemill.kernels.cuda.virtual_memory import CudaMemory
from tidemill.kernels.virtual import VirtualRows
from tidemill.types.sampling import SamplingParams


def test_driver() -> None:
    """Memory is mapped, shared, moved and taken away, and keeps what it holds."""
    memory = CudaMemory(GRANULE)
    rows = VirtualRows(memory, 4, 64, num_spare=4)
    rows.set(0, np.array([3, 1, *[0] * 62]))
    tokens = memory.view(rows.address, (8, 64, GRANULE // 4), torch.int32)
    tokens[0, 0], tokens[0, 1] = 7, 8
    rows.set(1, np.array([3, 2, *[0] * 62]))
    tokens[1, 1] = 9
    assert (tokens[1, 0] == 7).all(), "a page is the same at both addresses"
    torch.cuda.synchronize()
    rows.set(0, np.array([1, 2, *[0] * 62]))
    assert (tokens[0, 0] == 8).all()
    assert (tokens[0, 1] == 9).all()
    rows.renew(0)
    rows.set(0, np.array([2, 3, 1, *[0] * 61]))
    at = rows.first_page(0) // 64
    assert at != 0
    assert [int(tokens[at, i, -1]) for i in range(3)] == [9, 7, 8], "contents survive"
    memory.map_ahead(rows.address_of(0, 3))
    rows.set(0, np.array([2, 3, 1, 5, *[0] * 60]))
    tokens[at, 3] = 4
    assert memory.num_in_time == 1
    assert int(tokens[at, 3].sum()) == 4 * GRANULE // 4
    torch.cuda.synchronize()
    rows.drop([1, 2, 3, 5])
    memory.settle()
    assert memory.used_bytes == 0


def test_answers() -> None:
    """The same bits alone, cached, among others, in chunks and preempted; the tokens of paging."""
    shape = MODELS["llama8b"] | {"num_hidden_layers": 4, "vocab_size": 32000}
    asked = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True, logprobs=1)
    drawn = SamplingParams(max_tokens=48, temperature=0.9, seed=5, ignore_eos=True, logprobs=1)
    own = {
        "a": ([i % 31_000 for i in ids(700, 1)], asked),
        "b": ([i % 31_000 for i in ids(129, 2)], drawn),
    }
    others = {
        f"o{i}": ([token % 31_000 for token in ids(1 + 97 * i % 900, 10 + i)], asked)
        for i in range(30)
    }
    options: Line = {"kv_memory_bytes": 2**31, "max_requests": 32, "max_context": 2048}
    core = engine(shape, kv_layout="virtual", **options)
    alone = {name: run(core, {name: request})["answers"][name] for name, request in own.items()}
    core.scheduler.kv.clear_prefixes()
    again = {name: run(core, {name: request})["answers"][name] for name, request in own.items()}
    cached = {name: run(core, {name: request})["answers"][name] for name, request in own.items()}
    core.scheduler.kv.clear_prefixes()
    among = run(core, own | others)["answers"]
    for how, found in (("again", again), ("cached", cached), ("among 30 others", among)):
        assert {name: found[name] for name in own} == alone, how
    assert memory_of(runner_of(core)).num_ahead
    del core
    free()
    core = engine(
        shape,
        kv_layout="virtual",
        **options | {"token_budget": 64, "kv_memory_bytes": 32 * GRANULE},
    )
    longer = SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True, logprobs=1)
    made = run(core, own | {name: (prompt, longer) for name, (prompt, _) in others.items()})
    assert made["preempted"]
    assert {name: made["answers"][name] for name in own} == alone, (
        "in chunks of 64, in little memory"
    )
    del core
    free()
    core = engine(shape, **options)
    paged = {name: run(core, {name: request})["answers"][name] for name, request in own.items()}
    for name in own:
        assert abs(alone[name][0][1] - paged[name][0][1]) < 0.05, (
            "the first log probability beside paging's"
        )
