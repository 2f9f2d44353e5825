"""Host memory, disk and another engine behind the KV cache of the GPU at hand: the same bits as
without them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.engines import ask, random_llama
from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.kv.tiers import Tier
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Abort, Submit


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiers")
    random_llama(made)
    return made


def loads_of(core: EngineCore, tier: Tier) -> bool:
    tiers = core.scheduler.kv.offload.tiers
    assert tiers is not None
    return (tier, True) in tiers.costs._moves


def test_host_memory_and_disk(folder: Path, tmp_path: Path) -> None:
    """The same bits from host memory, from disk and after a restart."""
    draw = random.Random(0)

    def core(**options: Any) -> EngineCore:
        return load_core(
            EngineOptions(
                model=str(folder), **({"kv_memory_bytes": 2**28, "max_requests": 64} | options)
            )
        )

    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=2)
    asked = {
        f"x{i}": ([draw.randrange(2000) for _ in range(300 + 37 * i)], greedy) for i in range(16)
    }
    lone = ask(core(prefix_caching=False), asked)
    tight = {"kv_memory_bytes": 2**23, "max_context": 1024, "max_requests": 32}
    host = core(**tight, kv_host_memory_bytes=2**27)
    for turn in range(3):
        assert ask(host, asked) == lone, f"host memory, turn {turn}"
    assert loads_of(host, Tier.HOST)
    host.close()
    disk = f"{tmp_path}:{2**28}"
    first = core(**tight, kv_host_memory_bytes=2**23, kv_disk=disk)
    for turn in range(3):
        assert ask(first, asked) == lone, f"disk, turn {turn}"
    first.close()
    again = core(**tight, kv_host_memory_bytes=2**23, kv_disk=disk)
    assert ask(again, asked) == lone, "after a restart"
    assert loads_of(again, Tier.DISK)
    again.close()


def test_transfer(folder: Path) -> None:
    """Two engines on the GPU: what the first has computed, the second fetches."""
    draw = random.Random(1)

    def core(**options: Any) -> EngineCore:
        return load_core(
            EngineOptions(
                model=str(folder),
                kv_memory_bytes=2**27,
                max_requests=32,
                token_budget=256,
                **options,
            )
        )

    asked = {f"z{i}": ([draw.randrange(2000) for _ in range(300 + 37 * i)], i) for i in range(16)}
    drawn = {
        name: (ids, SamplingParams(max_tokens=30, seed=i, ignore_eos=True, logprobs=2))
        for name, (ids, i) in asked.items()
    }
    lone = ask(core(prefix_caching=False), drawn)
    first, second = core(kv_export="shm:gpu-check:256M"), core(kv_import="shm:gpu-check")
    ask(
        first,
        {name: (ids, SamplingParams(max_tokens=1, seed=i)) for name, (ids, i) in asked.items()},
    )
    assert ask(second, drawn) == lone, "pages of another engine"
    assert loads_of(second, Tier.PEER)
    for one in (first, second):
        one.scheduler.table.check_integrity()
        one.close()


def test_arrivals_and_aborts(folder: Path) -> None:
    """Arrivals and aborts while moves are under way. What was asked at the end is answered as by an
    engine without tiers."""
    draw, num_steps = random.Random(2), 2000
    common = [[draw.randrange(2000) for _ in range(400)] for _ in range(12)]
    options = EngineOptions(
        model=str(folder),
        kv_memory_bytes=2**23,
        max_requests=32,
        max_context=1024,
        token_budget=256,
    )
    core = load_core(EngineOptions(**(vars(options) | {"kv_host_memory_bytes": 2**26})))
    live: list[str] = []
    for step in range(num_steps):
        if len(live) < 48 and draw.random() < 0.4:
            prompt = draw.choice(common)[: draw.randrange(1, 400)] + [draw.randrange(2000)]
            core.submit(
                Submit(
                    f"s{step}", prompt, SamplingParams(max_tokens=draw.randrange(1, 60), seed=step)
                )
            )
            live.append(f"s{step}")
        if live and draw.random() < 0.1:
            core.abort(Abort(live.pop(draw.randrange(len(live))), "stress"))
        output, failed = core.step()
        assert not failed
        for delta in output.deltas:
            if delta.finish_reason and delta.request_id in live:
                live.remove(delta.request_id)
        core.scheduler.table.check_integrity()
    while core.has_work:
        core.step()
    asked = {
        f"y{i}": (prompt, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
        for i, prompt in enumerate(common)
    }
    assert ask(core, asked) == ask(load_core(options), asked)
    assert loads_of(core, Tier.HOST)
    core.close()
