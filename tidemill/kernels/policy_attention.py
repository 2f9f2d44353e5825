"""Attention of sequences with a KV policy, in torch: what native/policy_attention.c computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tidemill.kernels.attention import AttentionPlan, paged_attention, plan_attention, rotate_heads
from tidemill.kernels.kv_cache import PLAIN, Angles, HeadWeights, PagedKV, write_kv
from tidemill.kernels.policies import Placed, Round, num_channels
from tidemill.kernels.trees import Paths

_POOLED = 3  # SnapKV: slots before and after, whose attention counts for a slot, too


@dataclass(slots=True)
class _Planned:
    round: Round
    tokens: torch.Tensor  # of the step, those of all rows of the round one after the other
    plan: AttentionPlan | None
    written: torch.Tensor  # tokens of the step that it writes, and their slots of the cache
    slots: torch.Tensor


@dataclass(slots=True)
class PolicyStep:
    """A step in which some rows have a policy. All layers share one page table."""

    kv: PagedKV
    rounds: list[_Planned]
    positions_T: torch.Tensor

    def attend(
        self, layer: int, qkv_TC: torch.Tensor, learned: HeadWeights = PLAIN
    ) -> torch.Tensor:
        kv, spec = self.kv, self.kv.specs[layer]
        queries, keys, values = rotate_heads(kv, layer, qkv_TC, self.positions_T, learned)
        out = torch.empty_like(queries)
        for one in self.rounds:
            write_kv(kv, layer, one.slots, keys[one.written], values[one.written])
            if one.plan is not None:
                out[one.tokens] = paged_attention(
                    queries[one.tokens], kv, layer, one.plan, spec, learned.sinks, kv.biases[layer]
                )
            for segment in one.round.segments:
                _Segment(kv, layer, segment).run(queries, out, learned)
        return learned.only_chosen(out).flatten(1)


def plan_policies(
    kv: PagedKV,
    rounds: Sequence[Round],
    positions_T: torch.Tensor,
    slots_GT: torch.Tensor,
    paths: Paths | None = None,
) -> PolicyStep:
    table, planned = kv.tables[0].numpy(), list[_Planned]()
    for one in rounds:
        tokens = np.concatenate(
            [np.arange(t, t + n) for t, n in zip(one.tokens, one.counts, strict=True)]
            or [np.empty(0, np.int64)]
        )
        plan = (
            plan_attention(
                one.slots, one.counts, table[one.rows], kv, kv.specs[0], one.paths(paths)
            )
            if one.rows.size
            else None
        )
        planned.append(
            _Planned(
                one,
                torch.from_numpy(tokens),
                plan,
                *_written(kv, one, slots_GT[0], is_first=not planned),
            )
        )
    return PolicyStep(kv, planned, positions_T)


def _written(
    kv: PagedKV, one: Round, slots_T: torch.Tensor, is_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of the step that a round writes, and where in the cache."""
    if is_first:
        tokens = (slots_T >= 0).nonzero()[:, 0]
        return tokens, slots_T[tokens]
    of_rows = zip(one.rows, one.tokens, one.slots, one.counts, strict=True)
    row, token, slot = np.array(
        [(r, t + i, s + i) for r, t, s, num in of_rows for i in range(num)], np.int64
    ).T
    where = (
        kv.tables[0].numpy()[row, slot // kv.page_size].astype(np.int64) * kv.page_size
        + slot % kv.page_size
    )
    return torch.from_numpy(token), torch.from_numpy(where)


class _Segment:
    """One segment in one layer."""

    def __init__(self, kv: PagedKV, layer: int, segment: Placed) -> None:
        self.kv, self.layer, self.segment = kv, layer, segment
        self.policy = segment.owner.policy
        self.memory = torch.from_numpy(segment.owner.memory_LGX[layer])  # [G, X]
        self.pages = kv.tables[0][segment.row]

    def run(self, queries: torch.Tensor, out: torch.Tensor, learned: HeadWeights) -> None:
        if self.policy.kind == "quest":
            self._attend_sparse(queries, out, learned)
            return
        if self.policy.kind == "double":
            self._attend_tokens(queries, out, learned)
            return
        if self.policy.kind in ("h2o", "snapkv"):
            self._accumulate(queries)
        if self.segment.evicts:
            self._evict()

    def _where(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pages[slots // self.kv.page_size].long(), slots % self.kv.page_size

    def _rows(self, which: int, slots: torch.Tensor) -> torch.Tensor:
        """[n, G, D] keys (0) or values (1)."""
        pages, offsets = self._where(slots)
        return self.kv.cache[pages, self.kv.places[self.layer].index, which, :, offsets]

    def _probs(self, query_ND: torch.Tensor, num: int) -> torch.Tensor:
        """[G, heads of a group, num] of one token over the first slots."""
        kv = self.kv
        keys = self._rows(0, torch.arange(num)).float()
        q = query_ND.view(kv.num_kv_heads, -1, kv.head_dim)
        return torch.einsum("ghd,kgd->ghk", q * kv.specs[self.layer].scale, keys).softmax(-1)

    def _accumulate(self, queries: torch.Tensor) -> None:
        part, policy = self.segment, self.policy
        first = policy.first_observed if policy.kind == "snapkv" else part.position
        last = policy.num_prompt if policy.kind == "snapkv" else part.position + part.count
        if policy.kind == "h2o":
            self.memory[:, part.slot : part.slot + part.count] = 0
        elif part.position <= first < part.position + part.count:
            self.memory.zero_()
        for i in range(part.count):
            if first <= part.position + i < last:
                for probs in self._probs(queries[part.token + i], part.slot + i + 1).unbind(1):
                    self.memory[:, : probs.shape[-1]] += probs

    def _evict(self) -> None:
        kv, policy, at = self.kv, self.policy, self.kv.places[self.layer].index
        num = self.segment.slot + self.segment.count
        stay = torch.stack([self._stay(head, num) for head in range(kv.num_kv_heads)])  # [G, kept]
        pages, offsets = self._where(torch.arange(policy.kept))
        for head in range(kv.num_kv_heads):
            for which in (0, 1):
                kv.cache[pages, at, which, head, offsets] = self._rows(which, stay[head])[:, head]
            if policy.kind == "h2o":
                self.memory[head, : policy.kept] = self.memory[head, stay[head]]
        if policy.kind == "streaming":
            self._move_sinks()

    def _stay(self, head: int, num: int) -> torch.Tensor:
        """Slots of one KV head, in their order."""
        policy, older = self.policy, num - self.policy.recent
        recent, num_best = torch.arange(older, num), policy.kept - policy.recent
        if policy.kind in ("window", "streaming"):
            return torch.cat([torch.arange(num_best), recent])
        if policy.kind == "random":
            scores = random_scores(
                self.layer * self.kv.num_kv_heads + head,
                self.segment.position + self.segment.count,
                older,
            )
        else:
            scores = self.memory[head, :older]
        if policy.kind == "snapkv":
            scores = pooled(scores[None])[0]
        best = torch.sort(scores, descending=True, stable=True).indices[:num_best]
        return torch.cat([best.sort().values, recent])

    def _move_sinks(self) -> None:
        """The first keys, as far before the next as they were in the beginning: turned from where
        they were then."""
        policy, angles, slots = (
            self.policy,
            self.kv.angles[self.layer],
            torch.arange(self.policy.sinks),
        )
        if angles is None or not policy.sinks:
            return
        end, dim = self.segment.position + self.segment.count, self.kv.head_dim
        first = self.memory[:, : policy.sinks * dim].view(-1, policy.sinks, dim)
        if end == policy.capacity:
            first.copy_(self._rows(0, slots).transpose(0, 1).float())
        turned = turn_on(first, angles, end - policy.kept)
        pages, offsets = self._where(slots)
        cache = self.kv.cache
        cache[pages, self.kv.places[self.layer].index, 0, :, offsets] = turned.transpose(0, 1).to(
            cache.dtype
        )

    # ---- Quest

    def _attend_sparse(
        self, queries: torch.Tensor, out: torch.Tensor, learned: HeadWeights
    ) -> None:
        part, size, dim = self.segment, self.kv.page_size, self.kv.head_dim
        summed = self.memory.view(self.kv.num_kv_heads, -1, 2, dim)
        if part.num_pages:
            slots = torch.arange(part.first_page * size, (part.first_page + part.num_pages) * size)
            keys = self._rows(0, slots).float().view(part.num_pages, size, -1, dim)
            summed[:, part.first_page : part.first_page + part.num_pages] = torch.stack(
                [keys.amin(1), keys.amax(1)], 2
            ).transpose(0, 1)
        last = part.position // size
        query = queries[part.token].view(self.kv.num_kv_heads, -1, dim)
        for head in range(self.kv.num_kv_heads):
            read = torch.arange(last + 1)
            if self.layer >= self.policy.dense_layers and part.num_read <= last:
                low, high = summed[head, 1:last, None, 0], summed[head, 1:last, None, 1]
                bounds = torch.maximum(query[head] * low, query[head] * high).sum((1, 2))
                best = (
                    1
                    + torch.sort(bounds, descending=True, stable=True).indices[: part.num_read - 2]
                )
                read = torch.cat([torch.tensor([0]), best.sort().values, torch.tensor([last])])
            slots = (read[:, None] * size + torch.arange(size)).flatten()
            slots = slots[slots <= part.position]
            probs, values = (
                self._scores(query[head], head, slots, learned),
                self._rows(1, slots)[:, head].float(),
            )
            out[part.token].view(self.kv.num_kv_heads, -1, dim)[head] = probs @ values

    # ---- Double Sparsity

    def _attend_tokens(
        self, queries: torch.Tensor, out: torch.Tensor, learned: HeadWeights
    ) -> None:
        part, dim = self.segment, self.kv.head_dim
        width = num_channels(self.policy, dim)
        squares = self.memory[:, -dim:]  # of the observed queries, by channel
        # which channels, then those of each token
        memory = self.memory[:, :-dim].view(self.kv.num_kv_heads, -1, width)
        if not part.num_read:
            for i in range(part.count):
                if part.position + i == self.policy.first_observed:
                    squares.zero_()
                squares += (
                    queries[part.token + i].view(self.kv.num_kv_heads, -1, dim).square().sum(1)
                )
            return
        if part.num_pages:
            if not part.first_page:
                before = self._rows(0, torch.arange(part.position)).float()
                spread = (before - before.mean(0)).square().sum(0)
                order = torch.sort(spread * squares, dim=-1, descending=True, stable=True).indices
                memory[:, 0] = order[:, :width].sort(dim=-1).values.float()
            new = self._rows(
                0, torch.arange(part.first_page, part.first_page + part.num_pages)
            ).float()
            channels = memory[:, 0].long().expand(len(new), -1, -1)
            memory[:, part.first_page + 1 : part.first_page + part.num_pages + 1] = new.gather(
                2, channels
            ).transpose(0, 1)
        query = queries[part.token].view(self.kv.num_kv_heads, -1, dim)
        for head in range(self.kv.num_kv_heads):
            slots = torch.arange(part.position + 1)
            if self.layer >= self.policy.dense_layers and part.num_read <= part.position:
                scores = (
                    query[head][:, memory[head, 0].long()] @ memory[head, 1 : part.position + 1].T
                ).amax(0)
                best = torch.sort(scores, descending=True, stable=True).indices[: part.num_read - 1]
                slots = torch.cat([best.sort().values, slots[-1:]])
            probs, values = (
                self._scores(query[head], head, slots, learned),
                self._rows(1, slots)[:, head].float(),
            )
            out[part.token].view(self.kv.num_kv_heads, -1, dim)[head] = probs @ values

    def _scores(
        self, query_HD: torch.Tensor, head: int, slots: torch.Tensor, learned: HeadWeights
    ) -> torch.Tensor:
        scores = (
            query_HD * self.kv.specs[self.layer].scale @ self._rows(0, slots)[:, head].float().T
        )
        if learned.sinks is None:
            return scores.softmax(-1)
        sinks = learned.sinks.view(self.kv.num_kv_heads, -1, 1)[head]
        return torch.cat([scores, sinks], -1).softmax(-1)[:, :-1]


def pooled(scores_GK: torch.Tensor) -> torch.Tensor:
    """SnapKV: a slot counts as the best of its neighbours."""
    return torch.nn.functional.max_pool1d(scores_GK[None], 2 * _POOLED + 1, 1, _POOLED)[0]


def turn_on(first: torch.Tensor, angles: Angles, by: int) -> torch.Tensor:
    """Keys of sinks [.., D] as they were in the beginning, turned so many positions on."""
    half = angles.cos.shape[1]
    # tables may be scaled
    cos, sin = (table[by] / angles.cos[0] for table in (angles.cos, angles.sin))
    a, b = first[..., :half], first[..., half : 2 * half]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, first[..., 2 * half :]], dim=-1)


def random_scores(place: int, position: int, num: int) -> torch.Tensor:
    """Random scores, the same as in C."""

    def mixed(x: np.ndarray) -> np.ndarray:
        x = ((x ^ x >> 16) * 0x7FEB352D) & 0xFFFFFFFF
        x = ((x ^ x >> 15) * 0x846CA68B) & 0xFFFFFFFF
        return x ^ x >> 16

    slots = np.arange(num, dtype=np.uint64)
    seed = np.uint64(position * 0x9E3779B9 & 0xFFFFFFFF)
    return torch.from_numpy(
        (mixed(seed ^ mixed(np.uint64(place << 20 & 0xFFFFFFFF) ^ slots)) >> np.uint64(8)).astype(
            np.float32
        )
    )
