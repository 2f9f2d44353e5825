"""Attention on GPUs by torch's FlexAttention, for layers that no kernel of ours covers: `masks.py`
composed into one kernel.

Every token is a sequence of its own to it, its query heads of a KV head the rows; keys stay in
their pages. A token's block list is its own pages, in order and all marked as partly seen:
FlexAttention takes blocks that it knows to be fully seen after all others, so a list of both kinds
would be summed in an order that depends on what else is in the tile. The kernel without splits is
asked for, because the splits of the other are counted from the size of the batch. What a token is
given, and so its bits, depends on its position and its pages alone.

The cache is [P, layers, 2, G, S, D]: a head's keys are a view in which each page begins a fixed
number of blocks after the one before it, and its values are the same view G blocks further on.
Blocks between them belong to others and are in no list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from tidemill.errors import ConfigError
from tidemill.kernels import masks
from tidemill.kernels.attention import enter_heads
from tidemill.kernels.kv_cache import PLAIN, HeadWeights, PagedKV
from tidemill.types.model_config import AttentionSpec

_ROWS = 16  # of a tile: the fewest that the matrix units take
_OPTIONS = {"FORCE_USE_FLEX_ATTENTION": True, "BLOCK_M": _ROWS}


@cache
def _kernel(is_compiled: bool) -> Callable[..., Any]:
    # slow to import, and rarely needed
    from torch.nn.attention.flex_attention import flex_attention

    kernel: Callable[..., Any] = flex_attention
    return torch.compile(kernel) if is_compiled else kernel


@contextmanager
def refused_if_not_compiled() -> Iterator[None]:
    """Around the first steps of a model: what torch cannot compile is the user's to know, not a
    traceback."""
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as error:
        what = f"No attention kernel covers this model, and FlexAttention does not compile for it: {str(error)[:500]}"
        raise ConfigError(what, fix="Use --device cpu.") from error


def _mark_dynamic(*tensors: torch.Tensor) -> None:
    """One compiled kernel serves all numbers of tokens, the first dimension."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)


@dataclass(slots=True)
class _Blocks:
    """The blocks of layers with one page table and one mask: which blocks of the cache each token
    visits."""

    table: torch.Tensor  # [rows, pages]
    counts: torch.Tensor  # [T]
    indices: torch.Tensor  # [T, pages]: of the blocks, those of a token first
    # [P]: pages before it in its sequence; sequences that share a page have it at one place
    place_of_page: torch.Tensor


class FlexAttention:
    """A backend with the interface of `TorchAttention`. `is_compiled`: False runs the same
    functions as plain torch ops over the whole cache, to test them."""

    def __init__(self, kv: PagedKV, is_compiled: bool = True) -> None:
        self.kv, self._is_compiled = kv, is_compiled
        layers = zip(kv.specs, kv.biases, strict=True)
        self._changes = [masks.change_of(spec, bias, kv.cache.device) for spec, bias in layers]

    def plan(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        positions_T: torch.Tensor,
        slots_GT: torch.Tensor,
    ) -> FlexStep:
        row_of, end_of = (
            torch.from_numpy(np.repeat(values, counts)) for values in (rows, starts + counts)
        )
        return self.step(row_of, positions_T, slots_GT, end_of)

    def step(
        self,
        rows_T: torch.Tensor,
        positions_T: torch.Tensor,
        slots_GT: torch.Tensor,
        ends_T: torch.Tensor | None = None,
    ) -> FlexStep:
        """From what is on the device already. `ends_T`: where each token's sequence ends; None: all
        layers are causal."""
        positions = positions_T.long()
        queries = _Queries(rows_T.long(), positions, positions + 1 if ends_T is None else ends_T)
        if rows_T.shape[0] == 1:  # a batch of one would be compiled anew
            queries = _Queries(
                *(values.repeat(2) for values in (queries.rows, queries.positions, queries.ends))
            )
        return FlexStep(
            self.kv, positions, slots_GT, queries, self._changes, {}, _kernel(self._is_compiled)
        )


@dataclass(slots=True)
class _Queries:
    """The queries of each token: its row of the page tables, its position, and where its sequence
    ends."""

    rows: torch.Tensor
    positions: torch.Tensor
    ends: torch.Tensor


@dataclass(slots=True)
class FlexStep:
    kv: PagedKV
    positions_T: torch.Tensor
    slots_GT: torch.Tensor
    queries: _Queries
    changes: list[masks.ScoreChange | None]  # of each layer
    # by group, window and whether bidirectional; made when first needed
    blocks: dict[tuple[int, int, bool], _Blocks]
    kernel: Callable[..., Any]

    def attend(
        self, layer: int, qkv_TC: torch.Tensor, learned: HeadWeights = PLAIN
    ) -> torch.Tensor:
        from torch.nn.attention.flex_attention import AuxRequest, BlockMask

        kv, spec, num_tokens = self.kv, self.kv.specs[layer], qkv_TC.shape[0]
        num_repeats = kv.num_heads // kv.num_kv_heads
        q_TND = enter_heads(kv, layer, qkv_TC, self.positions_T, self.slots_GT, learned).to(
            kv.cache.dtype
        )
        q = q_TND.reshape(num_tokens, kv.num_kv_heads, num_repeats, kv.head_dim).expand(
            self.queries.rows.shape[0], -1, -1, -1
        )
        blocks = self._blocks_of(layer, spec)
        keys, values = _views(kv, kv.places[layer].index)
        mask = BlockMask.from_kv_blocks(
            blocks.counts[:, None, None], blocks.indices[:, None, None], BLOCK_SIZE=(_tile(num_repeats), kv.page_size),
            mask_mod=_mask_mod(kv, spec, self.queries, blocks), seq_lengths=(num_repeats, keys.shape[2]), compute_q_blocks=False,
        )  # fmt: skip
        q = q.contiguous()
        _mark_dynamic(
            q,
            mask.kv_num_blocks,
            mask.kv_indices,
            self.queries.rows,
            self.queries.positions,
            self.queries.ends,
        )
        out, aux = self.kernel(
            q, keys, values, score_mod=_score_mod(kv, self.changes[layer], self.queries, blocks), block_mask=mask,
            scale=spec.scale, kernel_options=_OPTIONS | {"BLOCK_N": kv.page_size},
            return_aux=AuxRequest(lse=learned.sinks is not None),
        )  # fmt: skip
        if learned.sinks is not None:
            out = out * torch.sigmoid(
                aux.lse - learned.sinks.view(kv.num_kv_heads, num_repeats)
            ).unsqueeze(-1)
        return out[:num_tokens].reshape(num_tokens, -1).to(qkv_TC.dtype)

    def _blocks_of(self, layer: int, spec: AttentionSpec) -> _Blocks:
        kind = (self.kv.places[layer].group, spec.window, spec.is_bidirectional)
        if kind not in self.blocks:
            self.blocks[kind] = _find_blocks(self.kv, self.kv.tables[kind[0]], self.queries, spec)
        return self.blocks[kind]


def _find_blocks(
    kv: PagedKV, table: torch.Tensor, queries: _Queries, spec: AttentionSpec
) -> _Blocks:
    size, width = kv.page_size, table.shape[1]
    last = (queries.ends - 1 if spec.is_bidirectional else queries.positions) // size
    first = masks.first_seen(spec, queries.positions).clamp(min=0) // size
    # of a token's pages, [T, pages]
    places = first[:, None] + torch.arange(width, device=table.device)
    pages = (
        table[queries.rows[:, None], places.clamp(max=width - 1)]
        .masked_fill(places > last[:, None], 0)
        .long()
    )
    place_of_page = torch.zeros(kv.cache.shape[0], dtype=torch.long, device=table.device)
    place_of_page[pages] = places.masked_fill(pages == 0, 0)
    return _Blocks(
        table,
        (last - first + 1).to(torch.int32),
        (pages * _runs_per_page(kv)).to(torch.int32),
        place_of_page,
    )


# What FlexAttention traces: functions of tensors and ints that they hold, nothing else.


def _mask_mod(
    kv: PagedKV, spec: AttentionSpec, queries: _Queries, blocks: _Blocks
) -> Callable[..., Any]:
    size, runs, table, place_of_page = (
        kv.page_size,
        _runs_per_page(kv),
        blocks.table,
        blocks.place_of_page,
    )
    rows, positions, ends = queries.rows, queries.positions, queries.ends

    def seen(token: Any, head: Any, row: Any, index: Any) -> Any:
        block = index // size
        place = place_of_page[block // runs]
        # its page, and where the layer's keys begin in it
        own = masks.document(table[rows[token], place] * runs, block)
        mask = masks.every([own, masks.mask_of(spec, ends[token])])
        return mask(positions[token], place * size + index % size)

    return seen


def _score_mod(
    kv: PagedKV, change: masks.ScoreChange | None, queries: _Queries, blocks: _Blocks
) -> Callable[..., Any] | None:
    if change is None:
        return None
    size, runs, place_of_page = kv.page_size, _runs_per_page(kv), blocks.place_of_page
    positions, num_repeats = queries.positions, kv.num_heads // kv.num_kv_heads

    def changed(score: Any, token: Any, head: Any, row: Any, index: Any) -> Any:
        key = place_of_page[index // size // runs] * size + index % size
        return change(score, head * num_repeats + row, positions[token], key)

    return changed


def _tile(num_rows: int) -> int:
    return -(-num_rows // _ROWS) * _ROWS


def _runs_per_page(kv: PagedKV) -> int:
    """Runs of one head's keys or values, which are blocks to FlexAttention."""
    return kv.cache.shape[1] * 2 * kv.num_kv_heads


def _views(kv: PagedKV, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer as [1, G, keys, D]. The memory of heads overlaps."""
    size, dim, heads = kv.page_size, kv.head_dim, kv.num_kv_heads
    num_keys = ((kv.cache.shape[0] - 1) * _runs_per_page(kv) + 1) * size
    shape, strides = (1, heads, num_keys, dim), (0, size * dim, dim, 1)
    keys, values = (
        kv.cache.as_strided(shape, strides, kv.cache[0, index, i].storage_offset()) for i in (0, 1)
    )
    return keys, values
