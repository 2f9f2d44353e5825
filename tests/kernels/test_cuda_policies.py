"""Attention with KV policies on the GPU, interpreted, against a cache that is a list of tokens for
each KV head."""

import itertools

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from tests.kernels import test_policy_attention
from tests.kernels.test_attention import spec_of
from tests.kernels.test_cuda import small_blocks
from tests.kernels.test_policy_attention import DIM, HEADS, KV_HEADS, ByHand
from tidemill.kernels.kv_cache import Angles, PagedKV, new_cache
from tidemill.kernels.rope import rope_frequencies, rope_tables
from tidemill.runner.cuda_policies import CudaPolicies, Launches
from tidemill.types.cache_layout import one_group
from tidemill.types.kv_policy import read_policy, settle

__all__ = ["small_blocks"]
PAGE, PROMPT, NUM = 16, 38, 40
GIVEN = {
    "window": {"kind": "window", "recent": 32},
    "streaming": {"kind": "streaming", "sinks": 3, "recent": 32},
    "h2o": {"kind": "h2o", "budget": 32},
    "snapkv": {"kind": "snapkv", "budget": 24, "observed": 5},
    "quest": {"kind": "quest", "budget": 0.3, "dense": 33, "dense_layers": 0},
}


@pytest.mark.parametrize(
    "kind",
    [
        "streaming",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in GIVEN if kind != "streaming"),
    ],
)
def test_against_a_list_of_tokens(kind, small_blocks, monkeypatch):
    """A prompt in two pieces, then token by token, beside a row without a policy; then cut
    elsewhere: the same bits."""
    monkeypatch.setattr(test_policy_attention, "PAGE", PAGE)
    monkeypatch.setattr(test_policy_attention, "PROMPT", PROMPT)
    policy = settle(read_policy(GIVEN[kind]), PROMPT, NUM - PROMPT, 128)
    assert policy is not None
    qkv = torch.randn(NUM, HEADS + 2 * KV_HEADS, DIM, generator=torch.Generator().manual_seed(1))
    angles = Angles(*rope_tables(*rope_frequencies(DIM, 10000.0, None), 128))

    def computed(cuts: list[int]) -> torch.Tensor:
        cache = new_cache(20, 1, KV_HEADS, PAGE, DIM)
        table = torch.zeros(3, 8, dtype=torch.int32)
        table[0], table[1, 0] = torch.randperm(15)[:8] + 1, 17
        kv = PagedKV(
            cache, [table], (spec_of(HEADS, KV_HEADS, DIM),), [angles], one_group(1, PAGE).places
        )
        group = HEADS // KV_HEADS
        partial, done = (
            torch.empty(64, HEADS, DIM + 2),
            torch.zeros(96, KV_HEADS, dtype=torch.int32),
        )
        policies = CudaPolicies(
            kv,
            table.numpy(),
            Launches(partial, done, 16, 64 // group, 16 // group, False, 3, 2, 2, 4),
        )
        policies.rows.take(0, policy)
        made = []
        for start, end in itertools.pairwise(cuts):
            parts, size = (
                np.array([(1, 0, 2), (0, start, end - start)], np.int32),
                end - start + 2 + 3,
            )
            _, step = policies.plan(parts, np.array([True, True]), size)
            given = torch.cat([qkv[:2], qkv[start:end], torch.zeros(3, *qkv.shape[1:])]).flatten(1)
            made.append(step.attend(0, given.clone())[2 : 2 + end - start])
        return torch.cat(made)

    heads = [ByHand(policy, qkv, head, angles) for head in range(KV_HEADS)]
    expected = torch.stack(
        [torch.cat([one.attend(token) for one in heads]).flatten() for token in range(NUM)]
    )
    found = computed([0, 33, *range(PROMPT, NUM + 1)])
    assert torch.allclose(found, expected, atol=2e-5)
    assert torch.equal(computed([0, 36, NUM]), found)
