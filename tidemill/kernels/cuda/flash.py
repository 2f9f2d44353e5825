"""flash-attn-4, where it is installed, for the prompts of a step.

Its order of summation is its own, so only `--fast-math` may use it, and the runner tries it against
our kernels first: it must agree with them and be faster. It takes whole requests, where our kernels
take tiles of them; requests with one token stay ours (it has no splits on Hopper). Each of its
programs looks for its tile among all requests, so a step may have only a few.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tidemill.kernels.cuda.records import (
    PROMPT_POSITION,
    PROMPT_ROW,
    PROMPT_TOKEN,
    PROMPT_TOKENS,
    PROMPT_WIDTH,
    PROMPTS,
)
from tidemill.types.model_config import LayerSpec

MOST_PROMPTS = 4
WHOLE = 2**30  # the tile of a request that is not cut
_ROWS = 128  # of a tile of queries, by heads that share their keys


def covers(specs: Iterable[LayerSpec]) -> bool:
    return all(s.scale == s.head_dim**-0.5 and not s.kinds for s in specs)


@cache
def forward() -> Callable[..., Any]:
    """Raises what is wrong with the installation."""
    return importlib.import_module("flash_attn.cute.interface")._flash_attn_fwd


@dataclass(slots=True)
class Prompts:
    """A step's requests with more than one token, as flash-attn-4 wants them; those that are not
    there have no tokens."""

    first: torch.Tensor  # token in the step, and one more that nobody reads
    num_new: torch.Tensor
    num_keys: torch.Tensor
    pages: torch.Tensor  # [requests, pages]

    @classmethod
    def of(cls, words: torch.Tensor, table: torch.Tensor) -> Prompts:
        """From a step's words, on the device: the same for every layer, so it is done once."""
        width = PROMPT_WIDTH.value
        columns = (
            words[words[PROMPTS] + torch.arange(MOST_PROMPTS * width, device=words.device)]
            .view(-1, width)
            .t()
            .contiguous()
        )
        first, num_new, start, row = (
            columns[at.value] for at in (PROMPT_TOKEN, PROMPT_TOKENS, PROMPT_POSITION, PROMPT_ROW)
        )
        return cls(torch.cat([first, first[-1:]]), num_new, start + num_new, table[row])

    def attend(
        self,
        qkv_TC: torch.Tensor,
        cache: torch.Tensor,
        layer: int,
        out_TC: torch.Tensor,
        num_heads: int,
    ) -> None:
        """`cache`: [P, layers, 2, G, S, D]; a page is one tile of keys, which then comes by a bulk
        copy."""
        page_size, dim = cache.shape[-2:]
        keys, values = cache[:, layer].transpose(2, 3).unbind(1)
        forward()(
            qkv_TC.view(qkv_TC.shape[0], -1, dim)[:, :num_heads], keys, values, cu_seqlens_q=self.first, seqused_q=self.num_new,
            seqused_k=self.num_keys, max_seqlen_q=qkv_TC.shape[0], page_table=self.pages, causal=True,
            tile_mn=(_ROWS, page_size), out=out_TC.view(out_TC.shape[0], num_heads, dim),
        )  # fmt: skip
