"""Attention with KV policies against a cache that is a list of tokens for each KV head."""

import itertools
from functools import cache, cached_property

import numpy as np
import pytest
import torch

from tests.kernels.test_attention import BACKENDS, spec_of
from tidemill.kernels.kv_cache import Angles, PagedKV, new_cache
from tidemill.kernels.native_attention import NativeAttention
from tidemill.kernels.policies import Policies
from tidemill.kernels.policy_attention import plan_policies
from tidemill.kernels.rope import apply_rope, rope_frequencies, rope_tables
from tidemill.types.cache_layout import one_group
from tidemill.types.kv_policy import CachePolicy, read_policy, settle

HEADS, KV_HEADS, DIM, PAGE, PROMPT, NUM = 6, 2, 16, 4, 70, 90
GIVEN = {
    "window": {"kind": "window", "recent": 20},
    "streaming": {"kind": "streaming", "sinks": 3, "recent": 32},
    "h2o": {"kind": "h2o", "budget": 32},
    "snapkv": {"kind": "snapkv", "budget": 24, "observed": 5},
    "quest": {"kind": "quest", "budget": 0.3, "dense": 40, "dense_layers": 0},
    "double": {"kind": "double", "budget": 0.3, "channels": 5, "dense": 40, "dense_layers": 0},
}


def turned(x_ND: torch.Tensor, position: int, angles: Angles) -> torch.Tensor:
    return apply_rope(x_ND[None], angles.cos[position][None], angles.sin[position][None])[0]


class ByHand:
    """One KV head's cache: the tokens in it, in their order."""

    def __init__(self, policy: CachePolicy, qkv: torch.Tensor, head: int, angles: Angles) -> None:
        self.policy, self.angles, self.head, self.qkv = policy, angles, head, qkv
        self.tokens: list[int] = []
        self.scores: dict[int, float] = {}
        self.key = cache(self.key)

    def key(self, token: int, position: int) -> torch.Tensor:
        return turned(self.qkv[token, HEADS + self.head][None], position, self.angles)[0]

    def attend(self, token: int) -> torch.Tensor:
        """[heads of the group, D] of a token, which enters the cache."""
        self.tokens.append(token)
        self.scores[token] = 0.0
        group = HEADS // KV_HEADS
        queries = self.qkv[token, self.head * group : (self.head + 1) * group]
        seen = self.chosen(token, queries)
        if self.policy.kind == "streaming":  # positions are those within the cache
            queries = turned(queries, len(seen) - 1, self.angles)
            keys = torch.stack([self.key(one, i) for i, one in enumerate(seen)])
        else:
            queries = turned(queries, token, self.angles)
            keys = torch.stack([self.key(one, one) for one in seen])
        probs = (queries @ keys.T * DIM**-0.5).softmax(-1)
        if self.policy.kind == "h2o" or PROMPT - self.policy.observed <= token < PROMPT:
            for one, more in zip(seen, probs.sum(0).tolist(), strict=True):
                self.scores[one] += more
        self.give_up(token)
        return probs @ torch.stack([self.qkv[one, HEADS + KV_HEADS + self.head] for one in seen])

    def chosen(self, token: int, queries: torch.Tensor) -> list[int]:
        """Quest: its own page, the first, and those whose keys may score highest. Double Sparsity:
        its own token, and those whose keys score highest in the channels that move scores most: by
        the spread of the first keys, and the squares of the 32 queries before the first that is
        sparse."""
        if self.policy.kind not in ("quest", "double") or token < self.policy.dense:
            return list(self.tokens)
        if self.policy.kind == "double":
            keys, queries = (
                torch.stack([self.key(one, one) for one in range(token)]),
                turned(queries, token, self.angles),
            )
            channels = (keys[: self.policy.dense].var(0) * self.squares).argsort(descending=True)[
                :5
            ]
            scores = (queries[:, channels] @ keys[:, channels].T).amax(0)
            best = scores.argsort(descending=True)[: -(-3 * (token + 1) // 10) - 1]
            return [*sorted(best.tolist()), token]
        last, queries = token // PAGE, turned(queries, token, self.angles)
        bounds = []
        for page in range(1, last):
            keys = torch.stack(
                [self.key(one, one) for one in range(page * PAGE, (page + 1) * PAGE)]
            )
            bounds.append(
                (-float(torch.maximum(queries * keys.amin(0), queries * keys.amax(0)).sum()), page)
            )
        num = self.policy.num_pages_read(last + 1, PAGE)
        pages = {0, last, *(page for _, page in sorted(bounds)[: num - 2])}
        return [one for one in self.tokens if one // PAGE in pages]

    @cached_property
    def squares(self) -> torch.Tensor:
        """Of the observed queries, by channel."""
        group, dense = HEADS // KV_HEADS, self.policy.dense
        heads = self.qkv[:, self.head * group : (self.head + 1) * group]
        return sum(
            turned(heads[one], one, self.angles).square().sum(0) for one in range(dense - 32, dense)
        )

    def give_up(self, token: int) -> None:
        policy = self.policy
        if policy.kind == "snapkv" and token == PROMPT - 1:
            older, recent = self.tokens[: -policy.observed], self.tokens[-policy.observed :]
            pooled = [
                max(self.scores[older[j]] for j in range(max(i - 3, 0), min(i + 4, len(older))))
                for i in range(len(older))
            ]
            best = sorted(range(len(older)), key=lambda i: (-pooled[i], i))[: 24 - policy.observed]
            self.tokens = [older[i] for i in sorted(best)] + recent
        elif policy.kind in ("window", "streaming") and len(self.tokens) == policy.capacity:
            kept = policy.capacity - policy.capacity // 16
            self.tokens = self.tokens[: policy.sinks] + self.tokens[policy.sinks - kept :]
        elif policy.kind == "h2o" and len(self.tokens) == 32:
            older, recent = self.tokens[:-15], self.tokens[-15:]
            self.tokens = sorted(sorted(older, key=lambda one: -self.scores[one])[:15]) + recent


QKV = torch.randn(NUM, HEADS + 2 * KV_HEADS, DIM, generator=torch.Generator().manual_seed(1))
ANGLES = Angles(*rope_tables(*rope_frequencies(DIM, 10000.0, None), 128))


@cache
def by_hand(policy: CachePolicy) -> torch.Tensor:
    """The same for every backend."""
    heads = [ByHand(policy, QKV, head, ANGLES) for head in range(KV_HEADS)]
    return torch.stack(
        [torch.cat([one.attend(token) for one in heads]).flatten() for token in range(NUM)]
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", GIVEN)
def test_against_a_list_of_tokens(kind, backend):
    """A prompt in three pieces, then token by token, beside a row without a policy."""
    policy = settle(read_policy(GIVEN[kind]), PROMPT, NUM - PROMPT, 128)
    assert policy is not None
    cache = new_cache(80, 1, KV_HEADS, PAGE, DIM)
    tables = torch.zeros(2, 32, dtype=torch.int32)
    tables[0], tables[1] = torch.randperm(64)[:32] + 1, torch.randperm(15)[:1] + 65
    kv = PagedKV(
        cache, [tables], (spec_of(HEADS, KV_HEADS, DIM),), [ANGLES], one_group(1, PAGE).places
    )
    policies, made, plain = Policies(kv), [], NativeAttention(kv) if backend == "compiled" else None
    policies.take(0, policy)
    cuts = [0, 1, 33, PROMPT, *range(PROMPT + 1, NUM + 1)]
    for start, end in itertools.pairwise(cuts):
        rows, starts, counts = np.array([1, 0]), np.array([0, start]), np.array([2, end - start])
        rounds = policies.rounds(rows, starts, counts)
        places = policies.places(rounds, np.concatenate([np.arange(2), np.arange(start, end)]))
        row_of = np.array([1, 1] + [0] * (end - start))
        where = tables.numpy()[row_of, np.maximum(places, 0) // PAGE] * PAGE + places % PAGE
        slots = torch.from_numpy(np.where(places < 0, -1, where)[None].astype(np.int64))
        positions = torch.cat([torch.arange(2), torch.arange(start, end)])
        step = (
            plan_policies(kv, rounds, positions, slots)
            if plain is None
            else plain.plan_policies(rounds, positions, slots)
        )
        made.append(step.attend(0, torch.cat([QKV[:2], QKV[start:end]]).flatten(1).clone())[2:])
    assert torch.allclose(torch.cat(made), by_hand(policy), atol=2e-5)
