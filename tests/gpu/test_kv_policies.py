"""KV policies on the GPU at hand: attention against the torch reference, and the same bits in any
batch."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.engines import ask, nothing_compiles, random_llama
from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.kernels.cuda import attention_lists
from tidemill.kernels.kv_cache import Angles, PagedKV
from tidemill.kernels.policies import Policies
from tidemill.kernels.policy_attention import plan_policies
from tidemill.kernels.rope import rope_frequencies, rope_tables
from tidemill.runner.cuda_policies import CudaPolicies, Launches
from tidemill.types.cache_layout import one_group
from tidemill.types.kv_policy import read_policy, settle
from tidemill.types.model_config import AttentionSpec
from tidemill.types.sampling import SamplingParams

GIVEN: dict[str, dict[str, Any]] = {
    "window": {"kind": "window", "recent": 300},
    "streaming": {"kind": "streaming", "sinks": 4, "recent": 300},
    "h2o": {"kind": "h2o", "budget": 300},
    "snapkv": {"kind": "snapkv", "budget": 200, "observed": 32},
    "quest": {"kind": "quest", "budget": 0.3, "dense": 500, "dense_layers": 1},
}
HEADS, KV_HEADS, DIM, PAGE, PROMPT, NUM = 8, 2, 128, 64, 700, 712


def attended(kind: str, cuts: list[int], qkv: torch.Tensor, device: str) -> torch.Tensor:
    """A row with the policy beside one without, two layers; the first layer's results and the
    second's."""
    policy = settle(read_policy(GIVEN[kind]), PROMPT, NUM - PROMPT, 1024)
    angles = Angles(
        *(one.to(device) for one in rope_tables(*rope_frequencies(DIM, 1e4, None), 1024))
    )
    spec = AttentionSpec(
        num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, rotation=None, scale=DIM**-0.5
    )
    cache = torch.zeros(24, 2, 2, KV_HEADS, PAGE, DIM, dtype=torch.bfloat16, device=device)
    table = torch.zeros(3, 16, dtype=torch.int32)
    table[0], table[1, 0] = torch.from_numpy(np.random.default_rng(0).permutation(20)[:16] + 1), 22
    kv = PagedKV(
        cache, [table.to(device)], (spec, spec), [angles, angles], one_group(2, PAGE).places
    )
    group, made = HEADS // KV_HEADS, []
    roles = device == "cuda" and attention_lists.by_roles((spec,))
    partial = torch.empty(2**12, HEADS, DIM + 2, device=device)
    done = torch.zeros(1024, KV_HEADS, dtype=torch.int32, device=device)
    how = Launches(
        partial, done, attention_lists.shared_rows(group) // group, attention_lists.prompt_rows(group, roles) // group,
        attention_lists.single_rows(group) // group, roles, 64, 16, 32, 16,
    )  # fmt: skip
    rows = CudaPolicies(kv, table.numpy(), how) if device == "cuda" else None
    plain = Policies(kv)
    (plain if rows is None else rows.rows).take(0, policy)
    for start, end in itertools.pairwise(cuts):
        parts = np.array([(1, 0, 2), (0, start, end - start)], np.int32)
        given = torch.cat([qkv[:2], qkv[start:end]]).to(device)
        if rows is not None:
            _, step = rows.plan(parts, np.array([True, True]), len(given))
        else:
            rounds = plain.rounds(*parts.T)
            positions = np.concatenate([np.arange(2), np.arange(start, end)])
            places, row_of = plain.places(rounds, positions), np.array([1, 1] + [0] * (end - start))
            where = table.numpy()[row_of, np.maximum(places, 0) // PAGE] * PAGE + places % PAGE
            slots = torch.from_numpy(np.where(places < 0, -1, where)[None].astype(np.int64))
            step = plan_policies(kv, rounds, torch.from_numpy(positions), slots)  # type: ignore[assignment]
            given = given.float()
        made.append(
            torch.cat([step.attend(layer, given.clone())[2:].float().cpu() for layer in (0, 1)], 1)
        )
    return torch.cat(made)


@pytest.mark.parametrize("kind", GIVEN)
def test_kernels(kind: str) -> None:
    """Near the torch reference on the CPU; the same bits token by token and in chunks."""
    torch.manual_seed(0)
    qkv = (torch.randn(NUM, (HEADS + 2 * KV_HEADS) * DIM) * 1.5).bfloat16()
    whole, pieces = (
        [0, 301, PROMPT, *range(PROMPT + 1, NUM + 1)],
        [0, 64, 65, 333, 690, NUM - 5, NUM],
    )
    found = attended(kind, whole, qkv, "cuda")
    assert torch.equal(attended(kind, pieces, qkv, "cuda"), found), "other cuts, other bits"
    expected = attended(kind, [0, NUM] if kind != "snapkv" else [0, PROMPT, NUM], qkv, "cpu")
    off = (found - expected).abs().amax(1)
    assert float((off < 0.03).float().mean()) > 0.98, f"largest difference {float(off.max()):.4f}"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, EngineCore]:
    folder = tmp_path_factory.mktemp("policies")
    random_llama(folder)

    def core(**options: Any) -> EngineCore:
        given: dict[str, Any] = {
            "kv_memory_bytes": 2**27,
            "max_requests": 64,
            "speculate": "off",
            "max_context": 2048,
        } | options
        return load_core(EngineOptions(model=str(folder), kv_policy="full", **given))

    return {
        "": core(),
        "in chunks of 64": core(token_budget=64),
        "preempted": core(kv_memory_bytes=2**22, max_context=1024),
    }


@pytest.mark.parametrize("kind", GIVEN)
def test_engine(kind: str, engines: dict[str, EngineCore]) -> None:
    """The same bits in any batch, and nobody else's change."""
    draw = random.Random(0)

    def ids(num: int) -> list[int]:
        return [draw.randrange(2000) for _ in range(num)]

    prompt, plain = (
        ids(PROMPT),
        SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=1),
    )
    others = {f"o{i}": (ids(1 + (i * 37) % 900), plain) for i in range(40)}
    engine = engines[""]
    alone = {
        name: ask(engine, {name: one})[name] for name, one in itertools.islice(others.items(), 8)
    }
    without = ask(engine, {"x": (prompt, plain)})["x"]
    params = SamplingParams(
        temperature=0.0,
        max_tokens=80,
        ignore_eos=True,
        logprobs=1,
        kv_policy=read_policy(GIVEN[kind]),
    )
    x = {"x": (prompt, params)}
    with nothing_compiles():
        lone = ask(engine, x)["x"]
    assert (lone[0][:30], lone[1][:30]) != without, "as without the policy"
    assert ask(engine, x)["x"] == lone, "again"
    together = ask(engine, others | x)
    assert together["x"] == lone, "among 40 others"
    assert {name: together[name] for name in alone} == alone, "beside it"
    assert ask(engines["in chunks of 64"], x)["x"] == lone, "in chunks of 64"
    few = dict(itertools.islice(others.items(), 20))
    assert ask(engines["preempted"], few | x)["x"] == lone, "preempted"
    assert ask(engine, {"x": (prompt, plain)})["x"] == without, "without it, afterwards"
