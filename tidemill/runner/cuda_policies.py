"""Steps of the GPU's runner in which rows have KV policies: their rounds as work lists, and what
rows keep on the device.

Such a step is launched kernel by kernel; all others replay their graphs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tidemill.kernels.cuda.attention_lists import Lists
from tidemill.kernels.cuda.policy_attention import (
    PAGES,
    CudaPolicyStep,
    Moved,
    RoundWork,
    Sparse,
    Watched,
)
from tidemill.kernels.cuda.records import HEADER, SINGLE_ROW
from tidemill.kernels.kv_cache import PagedKV
from tidemill.kernels.policies import Placed, Policies, Round, RowPolicy
from tidemill.runner.cuda_graphs import NO_LISTS, Grid
from tidemill.runner.cuda_slots import CudaBatch, CudaSlots, Sampled, with_inputs
from tidemill.runner.cuda_work import Work, padded, prompts, singles
from tidemill.runner.state import upload

_NONE = np.zeros((0, 4), np.int32)
_ALWAYS = 2**31 - 1
_WATCHED = ("h2o", "snapkv")


@dataclass(frozen=True, slots=True)
class Launches:
    """The launch settings of the runner's attention kernels."""

    partial: torch.Tensor
    done: torch.Tensor
    members_per_tile: int
    prompt_tile: int
    at_once: int
    warp_specialized: bool
    num_single: int  # grid sizes, at most
    num_shared: int
    num_prompts: int
    queries_at_once: int  # single queries of one launch, whatever their lengths


class CudaPolicies:
    """The KV policies of all rows that have one."""

    def __init__(
        self, kv: PagedKV, table: np.ndarray, launches: Launches, rows: Policies | None = None
    ) -> None:
        """`table`: the host's copy of the page tables. `rows`: the policies of all rows that have
        one."""
        self.rows = rows or Policies(kv, keeps_memory=False)
        self._kv, self._table, self._how = kv, table, launches
        # Quest's lowest and highest keys of every page
        shape = *kv.cache.shape[:2], 2, kv.num_kv_heads, kv.head_dim
        self._summary = torch.empty(shape, dtype=kv.cache.dtype, device=kv.cache.device)

    def plan(
        self, parts: np.ndarray, samples: np.ndarray, size: int
    ) -> tuple[Work, CudaPolicyStep]:
        """`parts`: [n, 3] row, start, count. The step's tokens without lists, and its attention;
        padded to `size` tokens."""
        rows, starts, counts = parts.T
        ends = np.cumsum(counts)
        row_of = np.repeat(rows, counts)
        positions = np.repeat(starts - (ends - counts), counts) + np.arange(ends[-1])
        rounds = self.rows.rounds(rows, starts, counts)
        places = self.rows.places(rounds, positions)
        slots = np.zeros(padded(size), np.int64)  # past the last token: of the null page
        slots[: places.size] = np.where(places < 0, -1, self._slots(row_of, places))
        on_device = upload(slots, self._device)[:size]
        positions_T = upload(
            np.pad(positions, (0, padded(size) - positions.size)).astype(np.int32), self._device
        )[:size]
        made = [self._round(rounds[0], slice(0, size), on_device)]
        made += [self._later_round(one) for one in rounds[1:]]
        sparse, full = self._sparse([one for one in rounds[0].segments if one.num_read])
        work = Work(
            row_of, positions, _NONE, _NONE, _NONE, _NONE, (ends - 1)[samples].astype(np.int32)
        )
        return work, CudaPolicyStep(self._kv, positions_T, made, sparse, full, self._summary)

    def warm_up(self) -> None:
        """Compiles, or loads, the kernels that only steps with policies have."""
        CudaPolicyStep(self._kv, self._kv.tables[0][:1, 0], [], [], None, self._summary).warm_up()

    @property
    def _device(self) -> torch.device:
        return self._kv.cache.device

    def _slots(self, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
        size = self._kv.page_size
        return self._table[rows, places // size].astype(np.int64) * size + places % size

    # ---- rounds

    def _later_round(self, one: Round) -> RoundWork:
        first, end = int(one.tokens.min()), int((one.tokens + one.counts).max())
        slots = np.full(end - first, -1, np.int64)
        for row, token, slot, count in zip(
            one.rows, one.tokens, one.slots, one.counts, strict=True
        ):
            slots[token - first : token - first + count] = self._slots(
                np.full(count, row), np.arange(slot, slot + count)
            )
        return self._round(one, slice(first, end), upload(slots, self._device))

    def _round(self, one: Round, tokens: slice, slots_T: torch.Tensor) -> RoundWork:
        lists = self._lists(one.rows, one.slots, one.counts, one.tokens) if one.rows.size else None
        evicting = [segment for segment in one.segments if segment.evicts]
        more = [segment for segment in evicting if segment.owner.policy.kind != "window"]
        for segment in one.segments:
            self._give_memory(segment.owner)
        return RoundWork(
            lists, tokens, slots_T, self._watched(one.segments), self._moved(evicting), more
        )

    def _lists(
        self, rows: np.ndarray, places: np.ndarray, counts: np.ndarray, tokens: np.ndarray
    ) -> Lists:
        how, is_one = self._how, counts == 1
        rows, places, counts, tokens = (a.astype(np.int32) for a in (rows, places, counts, tokens))
        of_singles = singles(
            rows[is_one], places[is_one], tokens[is_one], [self._table], how.members_per_tile, how.at_once
        )  # fmt: skip
        tiles = prompts(
            rows[~is_one], places[~is_one], counts[~is_one], tokens[~is_one], how.prompt_tile
        )
        return self._upload_lists(*of_singles, tiles)

    def _upload_lists(
        self, single: np.ndarray, shared: np.ndarray, members: np.ndarray, tiles: np.ndarray
    ) -> Lists:
        how = self._how
        num_single, num_shared, num_prompts = (
            most if one.size else 0
            for one, most in (
                (single, how.num_single),
                (shared, how.num_shared),
                (tiles, how.num_prompts),
            )
        )
        grid = Grid(num_single, num_shared, num_prompts, 0)
        num_words = (
            HEADER + sum(one.size for one in (single, shared, members, tiles)) + 16 * sum(grid) + 64
        )
        words, none = np.zeros(num_words, np.int32), _NONE[:0, 0]
        Work(none, none, single, shared, members, tiles, none).write(words, 0, 0, grid)
        on_device = upload(words, self._device)
        return Lists(
            on_device, on_device[HEADER:], num_single, num_shared, num_prompts, how.partial, how.done, None, how.warp_specialized
        )  # fmt: skip

    # ---- what rows keep

    def _give_memory(self, owner: RowPolicy) -> None:
        policy, kv = owner.policy, self._kv
        if owner.on_device is None and policy.kind in (*_WATCHED, "streaming"):
            shape: tuple[int, ...] = (RowPolicy.num_slots(policy),)
            if policy.kind == "streaming":
                shape = (policy.sinks, kv.head_dim)
            kind = torch.float32 if policy.kind == "streaming" else torch.int64
            owner.on_device = torch.zeros(
                len(kv.specs), kv.num_kv_heads, *shape, dtype=kind, device=self._device
            )

    def _watched(self, segments: Sequence[Placed]) -> Watched | None:
        """The part of each segment whose attention counts."""
        seen, sums = list[tuple[int, int, int, int]](), list[tuple[int, int]]()
        for one in segments:
            policy = one.owner.policy
            if policy.kind not in _WATCHED:
                continue
            first, end = one.position, one.position + one.count
            if policy.kind == "snapkv":
                first, end = (
                    max(first, policy.num_prompt - policy.observed),
                    min(end, policy.num_prompt),
                )
            if first < end and one.owner.on_device is not None:
                before = first - one.position
                seen.append((one.token + before, end - first, one.slot + before, one.row))
                sums.append((one.owner.on_device.data_ptr(), one.owner.on_device.shape[2]))
        if not seen:
            return None
        per_tile = self._how.at_once
        tiles = [
            (token + i, min(per_tile, count - i), slot + i, row)
            for token, count, slot, row in seen
            for i in range(0, count, per_tile)
        ]
        longest = max(slot + count for _, count, slot, _ in seen)
        of_tiles, of_segments = (
            upload(np.array(one, np.int32), self._device) for one in (tiles, seen)
        )
        where = upload(np.array(sums, np.int64), self._device)
        return Watched(of_tiles, of_segments, where, -(-longest // self._kv.page_size))

    def _moved(self, segments: Iterable[Placed]) -> Moved | None:
        """The moves of policies that keep the same slots in every layer and head: the first, and
        the latest."""
        found = list[tuple[np.ndarray, np.ndarray]]()
        for one in segments:
            policy = one.owner.policy
            if policy.kind in ("window", "streaming"):
                to = np.arange(policy.kept - policy.recent, policy.kept)
                come = to + one.slot + one.count - policy.kept
                found.append((self._rows_of(one.row, come), self._rows_of(one.row, to)))
        if not found:
            return None
        sources, targets = (
            upload(np.concatenate(side), self._device) for side in zip(*found, strict=True)
        )
        return Moved(sources, targets)

    def _rows_of(self, row: int, slots: np.ndarray) -> np.ndarray:
        """The places of the keys and values of all heads in the cache, counted in rows of one head,
        for the first layer of a page."""
        kv, size = self._kv, self._kv.page_size
        runs = 2 * kv.num_kv_heads
        pages = self._table[row, slots // size].astype(np.int64) * (kv.cache.shape[1] * runs)
        return ((pages[:, None] + np.arange(runs)) * size + (slots % size)[:, None]).reshape(-1)

    # ---- Quest

    def _sparse(self, segments: Sequence[Placed]) -> tuple[list[Sparse], torch.Tensor | None]:
        """By the layers that read everything; and the pages that are full now and were not before."""
        if not segments:
            return [], None
        size = self._kv.page_size
        full = [
            self._table[one.row, one.first_page : one.first_page + one.num_pages]
            for one in segments
            if one.num_pages
        ]
        pages = upload(np.concatenate(full).astype(np.int64), self._device) if full else None
        by_layers = dict[int, list[Placed]]()
        for one in segments:
            reads_all = one.num_read > one.position // size
            by_layers.setdefault(
                _ALWAYS if reads_all else one.owner.policy.dense_layers, []
            ).append(one)
        return [self._of_layers(number, some) for number, some in by_layers.items()], pages

    def _of_layers(self, dense_layers: int, segments: list[Placed]) -> Sparse:
        size = self._kv.page_size
        rows, tokens, positions, nums = np.array(
            [(s.row, s.token, s.position, s.num_read) for s in segments], np.int32
        ).T
        if dense_layers == _ALWAYS:
            return Sparse(dense_layers, self._batches(rows, positions, tokens, [self._table]))
        last, lines = positions // size, np.arange(rows.size, dtype=np.int32)
        num_pages = -(-int(last.max() + 1) // PAGES) * PAGES
        queries = upload(np.stack([tokens, rows, last, nums], 1), self._device)
        few = self._batches(lines, (nums - 1) * size + positions % size, tokens, None)
        for lists in few:
            lists.head_width = num_pages
        dense = self._batches(rows, positions, tokens, [self._table]) if dense_layers else []
        return Sparse(dense_layers, dense, queries, few, num_pages)

    def _batches(
        self,
        rows: np.ndarray,
        places: np.ndarray,
        tokens: np.ndarray,
        tables: list[np.ndarray] | None,
    ) -> list[Lists]:
        """The work lists of batches of queries, each with as many as there is room for partial
        results. Without tables nothing is shared."""
        made, at_once, columns = list[Lists](), self._how.queries_at_once, self._table.shape[1]
        for first in range(0, rows.size, at_once):
            some = slice(first, first + at_once)
            lines, known = rows[some], tables
            if known is None:
                lines = np.arange(lines.size, dtype=np.int32)
                known = [np.arange(1, lines.size * columns + 1).reshape(-1, columns)]
            single, shared, members = singles(
                lines, places[some], tokens[some], known, self._how.members_per_tile
            )
            if tables is None:
                single[:, SINGLE_ROW.value] += first
            made.append(self._upload_lists(single, shared, members, _NONE))
        return made


class PolicySteps:
    """A kind of step: rows in it have KV policies. It is launched kernel by kernel."""

    def __init__(self, slots: CudaSlots, policies: CudaPolicies) -> None:
        self._slots, self._policies = slots, policies

    def takes(self, batch: CudaBatch) -> bool:
        return not self._policies.rows.rows.isdisjoint(item.row for item in batch.items)

    def run(self, batch: CudaBatch) -> Sampled:
        slots, table = self._slots, batch.table
        size = slots.mixed_sizes[bisect_left(slots.mixed_sizes, batch.num_tokens)]
        work, step = self._policies.plan(table[:, :3], table[:, 3].astype(bool), size)
        if batch.has_lora:
            slots.adapters.write(work.rows, size)
        where = slots.buffers.write(work, size, NO_LISTS)
        rows, positions = slots.buffers.tokens_of(size)
        # Not by `look_up_in`: streams go on past the ends of their page tables.
        ids = slots.state.tokens[rows.long(), positions.long()]
        ids = with_inputs(slots.state, rows, positions, ids)
        forward = slots.all_layers
        compute = slots.adapters.forward(forward) if batch.has_lora else forward
        slots.buffers.hidden[:size].copy_(compute(slots.model, ids, positions, step))
        return slots.finish_prefill(batch, size, where)
