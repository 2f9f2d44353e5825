"""The work of the attention kernels in a step: lists that the host makes, and the sizes of their
tiles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
import triton

from tidemill.kernels.cuda.launch import is_hopper
from tidemill.types.model_config import LayerSpec

SPLIT, BLOCK = 512, 64  # a block is a page
SINGLE_ROWS, SCALED_ROWS, SHARED_ROWS, PROMPT_ROWS = 16, 8, 64, 64


class PromptAttention(Protocol):
    """Somebody else's attention, for the prompts of a step."""

    def attend(
        self,
        qkv_TC: torch.Tensor,
        cache: torch.Tensor,
        layer: int,
        out_TC: torch.Tensor,
        num_heads: int,
    ) -> None: ...


@dataclass(slots=True)
class Lists:
    """A step's work on the device, and how many programs each kernel gets (0: it is not launched).
    Each list ends in as many entries of zeros as there are programs."""

    words: torch.Tensor  # int32: HEADER, and lists where it says
    singles: torch.Tensor  # int32
    num_single: int
    num_shared: int
    num_prompts: int
    partial: torch.Tensor  # float32 [slots, heads, D + 2]
    done: torch.Tensor  # int32 [tokens, KV heads], zeros
    prompts: PromptAttention | None = None  # None: ours
    by_roles: bool = False  # ours is the kernel made for this GPU
    # columns of the page table of one KV head, if each has its own (singles only)
    head_width: int = 0
    # int32, of each row of the page table: where its prompt ends, if layers are bidirectional
    ends: torch.Tensor | None = None
    # the step has one token: all that its attention reads, but this one's, was there before
    alone: bool = False
    # int32, of each token (runner/cuda_trees.py), if drafts are trees
    paths: torch.Tensor | None = None
    copies: torch.Tensor | None = None  # room for pages of prompts in bfloat16 (page_copies.py)


def at_once(lists: Lists, num_kv_heads: int, group: int, dim: int) -> bool:
    """Tells if a lone token goes through the kernel made for it on this GPU, which reads keys twice
    if heads have 128 dimensions: if there is room for eight splits of each head (measured on an
    H200; with more tokens, long contexts would lose)."""
    is_plain = lists.by_roles and lists.paths is None and group <= SINGLE_ROWS and dim in (64, 128)
    return lists.alone and is_plain and num_kv_heads * (dim // 64) <= 16


@cache
def by_roles(specs: tuple[LayerSpec, ...], has_scales: bool = False) -> bool:
    """Tells if prompts go through the kernel made for this GPU: if no layer has anything beyond
    causal attention."""
    smallest = 128 if has_scales else 64
    return is_hopper() and all(smallest <= s.head_dim <= 128 and not s.kinds for s in specs)


def num_prompt_programs(num_tiles: int, num_kv_heads: int, by_roles: bool) -> int:
    """The kernel by roles has one program a multiprocessor, for all heads; of the other, each head
    has one for every tile."""
    if not by_roles:
        return num_tiles + 16
    return min(num_tiles * num_kv_heads, torch.cuda.get_device_properties().multi_processor_count)


def single_rows(group: int, has_scales: bool = False) -> int:
    return max(SCALED_ROWS if has_scales else SINGLE_ROWS, triton.next_power_of_2(group))


def shared_rows(group: int) -> int:
    return max(SHARED_ROWS, triton.next_power_of_2(group))


def prompt_rows(group: int, by_roles: bool) -> int:
    return max(128 if by_roles else PROMPT_ROWS, triton.next_power_of_2(group))
