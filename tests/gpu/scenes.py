"""Paged caches with queries for each token, for tests and timings of attention on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

from tidemill.kernels.cuda import attention, attention_lists, flash, records
from tidemill.kernels.cuda.attention_lists import (
    BLOCK,
    SPLIT,
    Lists,
    num_prompt_programs,
    prompt_rows,
    shared_rows,
)
from tidemill.kernels.cuda.gemm import Tile
from tidemill.kernels.kv_cache import dequantize, quantize, views
from tidemill.kernels.masks import capped
from tidemill.runner.cuda_work import Work, make_work, padded
from tidemill.types.kv_format import FORMATS
from tidemill.types.model_config import AttentionSpec

# Tiles of the matmul by rows: (outs, ins, stages, warps), with ordinary loads and by bulk copies.
_PLAIN = {
    16: [
        (16, 512, 3, 2),
        (16, 512, 4, 2),
        (16, 1024, 3, 4),
        (32, 128, 8, 4),
        (32, 256, 3, 2),
        (64, 128, 5, 4),
        (64, 256, 3, 4),
    ],
    32: [(16, 512, 3, 2), (32, 128, 6, 4), (32, 512, 3, 4), (64, 256, 3, 4), (128, 64, 5, 4)],
}


_BULK = {
    64: [(32, 128, 5, 4), (64, 128, 4, 4), (128, 64, 5, 4), (256, 64, 4, 8)],
    128: [(32, 128, 5, 4), (64, 64, 6, 4), (128, 64, 4, 4), (256, 64, 4, 8)],
    256: [(64, 64, 4, 8), (128, 64, 4, 8)],
}


TILES = {
    rows: [Tile(rows, *rest) for rest in _PLAIN.get(rows, [])]
    + [Tile(rows, *rest, bulk=1) for rest in _BULK.get(rows, [])]
    for rows in (16, 32, 64, 128, 256)
}


class Scene:
    """Rows of a paged cache with so many tokens each, and a query for every token. Rows of the
    family have the same pages of the first `common` positions."""

    def __init__(
        self,
        lengths: list[int],
        heads: int,
        kv_heads: int,
        dim: int,
        family: tuple[int, ...] = (),
        common: int = 0,
        layers: int = 2,
        **more: Any,
    ) -> None:
        torch.manual_seed(0)
        given: dict[str, Any] = {"scale": dim**-0.5} | more
        self.spec = AttentionSpec(
            num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, rotation=None, **given
        )
        self.sinks = torch.randn(heads, device="cuda") if self.spec.has_sinks else None
        page = BLOCK
        self.lengths, self.heads, self.kv_heads, self.dim = lengths, heads, kv_heads, dim
        num_pages = sum(-(-length // page) for length in lengths) + 1
        self.cache = torch.randn(
            num_pages, layers, 2, kv_heads, page, dim, device="cuda", dtype=torch.bfloat16
        )
        order, used = np.random.default_rng(0).permutation(num_pages - 1) + 1, 0
        self.pages = np.zeros((len(lengths), -(-max(lengths) // page)), np.int32)
        for row, length in enumerate(lengths):
            num = -(-length // page)
            self.pages[row, :num] = order[used : used + num]
            used += num
        for row in family[1:]:
            self.pages[row, : common // page] = self.pages[family[0], : common // page]
        self.table = torch.from_numpy(self.pages).cuda()
        self.qkv = torch.randn(
            sum(lengths), (heads + 2 * kv_heads) * dim, device="cuda", dtype=torch.bfloat16
        )
        self.first = np.cumsum([0, *lengths])
        self.scales: torch.Tensor | None = None
        self.copies: torch.Tensor | None = None  # room for pages in bfloat16, if there are scales

    def expected(self, row: int, start: int, count: int) -> torch.Tensor:
        pages, positions = self.table[row].long(), torch.arange(start, start + count, device="cuda")
        k, v = (
            self.cache[pages, 1, i].transpose(1, 2).flatten(0, 1)[: start + count].float()
            for i in (0, 1)
        )
        first = self.first[row] + start
        q = self.qkv[first : first + count].view(count, -1, self.dim)[:, : self.heads].float()
        num_repeats = self.heads // self.kv_heads
        scores = (
            torch.einsum("tnd,lnd->ntl", q, k.repeat_interleave(num_repeats, 1)) * self.spec.scale
        )
        scores, keys = capped(scores, self.spec.softcap), torch.arange(k.shape[0], device="cuda")
        scores.masked_fill_(keys > positions[:, None], float("-inf"))
        if self.spec.window:
            scores.masked_fill_(keys <= positions[:, None] - self.spec.window, float("-inf"))
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks[:, None, None].expand(-1, count, 1)], dim=-1)
        weights = scores.softmax(-1)[..., : k.shape[0]]
        return torch.einsum("ntl,lnd->tnd", weights, v.repeat_interleave(num_repeats, 1)).flatten(1)

    def prepare(
        self, items: list[tuple[int, int, int]], extra: int = 0, by_flash: bool = False
    ) -> tuple[Work, Lists]:
        """A step of (row, start, count) items, each list with a program for every entry, or for one
        in `extra`."""
        group = self.heads // self.kv_heads
        roles = attention_lists.by_roles((self.spec,), self.scales is not None)
        tile, members = prompt_rows(group, roles) // group, shared_rows(group) // group
        tile = flash.WHOLE if by_flash else tile
        room = self.copies.shape[0] if self.copies is not None else 0
        work = make_work(
            np.array(items, np.int32),
            np.ones(len(items), bool),
            [self.pages],
            members,
            tile,
            room=room,
        )
        lens = (len(work.singles), len(work.shared), len(work.prompts))
        singles, shared, prompts = (-(-num // extra) if extra else num for num in lens)
        if by_flash:
            prompts = flash.MOST_PROMPTS
        elif not extra and len(work.prompts):
            prompts = num_prompt_programs(len(work.prompts), self.kv_heads, roles)
        programs = singles, shared, prompts
        words = np.zeros(2**22, np.int32)
        size = work.rows.size
        work.write(words, size, 0, programs)
        device = torch.from_numpy(words).cuda()
        num_parts = size * int(work.positions.max() // SPLIT + 1)
        partial = torch.full((num_parts, self.heads, self.dim + 2), float("nan"), device="cuda")
        done = torch.zeros(size, self.kv_heads, dtype=torch.int32, device="cuda")
        others = flash.Prompts.of(device, self.table) if by_flash else None
        return work, Lists(
            device,
            device[records.HEADER + 2 * padded(size) :],
            *programs,
            partial,
            done,
            others,
            roles,
            copies=self.copies,
        )

    def run(
        self,
        items: list[tuple[int, int, int]],
        extra: int = 0,
        by_flash: bool = False,
        alone: bool = False,
    ) -> torch.Tensor:
        work, lists = self.prepare(items, extra, by_flash)
        lists.alone = alone
        where = torch.from_numpy(self.first[work.rows] + work.positions).cuda()
        qkv = self.qkv[where]
        out = qkv.new_full((where.numel(), self.heads * self.dim), float("nan"))
        positions = torch.from_numpy(work.positions).cuda()
        attention.attend(
            qkv,
            self.cache,
            1,
            self.table,
            lists,
            out,
            self.spec,
            positions,
            self.sinks,
            scales=self.scales,
        )
        assert not lists.done.any()
        return out


def has_flash() -> bool:
    try:
        return flash.forward() is not None
    except ImportError as error:
        print(f"  flash-attn-4 is not there: {error}")
        return False


class ScaledScene(Scene):
    """The same cache in another format; `exact` is what its values stand for, rounded as the
    kernels round it."""

    def __init__(self, name: str, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.to_format(name)

    def to_format(self, name: str) -> None:
        num_pages, layers, _, kv_heads, page, dim = self.cache.shape
        kind = FORMATS[name]
        pool = torch.empty(
            num_pages,
            layers * 2 * kv_heads * page * kind.head_bytes(dim),
            dtype=torch.uint8,
            device="cuda",
        )
        values, scales = views(pool, layers, kv_heads, page, dim, name)
        assert scales is not None
        self.exact = torch.empty_like(self.cache)
        for first in range(0, num_pages, 512):  # float32 on the way
            some = slice(first, first + 512)
            values[some], scales[some] = quantize(self.cache[some], kind)
            self.exact[some] = dequantize(values[some], scales[some], kind)
        self.cache, self.scales = values, scales
        if has_roles() and name != "int4":
            self.copies = self.exact.new_empty(num_pages, 2, kv_heads, page, dim)

    def expected(self, row: int, start: int, count: int) -> torch.Tensor:
        with mock.patch.object(self, "cache", self.exact):
            return super().expected(row, start, count)


@contextmanager
def prompts_by(roles: bool) -> Iterator[None]:
    """By the kernel made for Hopper, or by the other one."""
    if roles:
        yield
    else:
        with mock.patch.object(attention_lists, "by_roles", return_value=False):
            yield


def has_roles() -> bool:
    return torch.cuda.get_device_capability()[0] == 9
