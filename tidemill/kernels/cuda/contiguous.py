"""Attention over rows whose tokens follow each other in memory, by torch's own flash attention: no
page table, one call a layer.

The kernel takes sequences of any length side by side; where a sequence's keys begin is given with
it, so the rows may lie anywhere in one address range. It reads blocks of keys that begin at
multiples of their size, from the last to the first, and a query's result is computed by itself:
bits do not depend on the batch. Its splits do (their number is chosen from the batch), so it is
called in ways that have none: the query heads of a KV head are the tokens of a short sequence, or a
prompt is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tidemill.kernels.cuda.kv_write import enter_heads
from tidemill.kernels.kv_cache import PLAIN, HeadWeights, PagedKV


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of a step: where each one's queries begin, and the end of the last; where its
    keys begin, and a number more; its keys."""

    queries: torch.Tensor  # int32 [S + 1]
    keys: torch.Tensor  # int32 [S + 1]
    num_keys: torch.Tensor  # int32 [S]
    most_queries: int


def flash_reference(
    q_TND: torch.Tensor,
    k_LGD: torch.Tensor,
    v_LGD: torch.Tensor,
    sequences: Sequences,
    scale: float,
    causal: bool,
) -> torch.Tensor:
    """The reference of the kernel: the last query of a sequence sees all its keys."""
    out, num_repeats = torch.zeros_like(q_TND), q_TND.shape[1] // k_LGD.shape[1]
    firsts, keys, nums = (
        sequences.queries.tolist(),
        sequences.keys.tolist(),
        sequences.num_keys.tolist(),
    )
    for i, num in enumerate(nums):
        q = q_TND[firsts[i] : firsts[i + 1]].float()
        k, v = (
            x[keys[i] : keys[i] + num].float().repeat_interleave(num_repeats, 1)
            for x in (k_LGD, v_LGD)
        )
        scores = torch.einsum("tnd,lnd->ntl", q, k) * scale
        if causal:
            scores = scores.masked_fill(
                torch.ones(scores.shape[1:], device=q.device).tril(num - len(q)) == 0, float("-inf")
            )
        out[firsts[i] : firsts[i + 1]] = torch.einsum("ntl,lnd->tnd", scores.softmax(-1), v).to(
            out.dtype
        )
    return out


def flash(
    q_TND: torch.Tensor,
    k_LGD: torch.Tensor,
    v_LGD: torch.Tensor,
    sequences: Sequences,
    max_keys: int,
    scale: float,
    causal: bool,
) -> torch.Tensor:
    """`k_LGD`, `v_LGD`: all rows' tokens; of those that no sequence has, none is read."""
    if q_TND.device.type == "cpu":
        return flash_reference(q_TND, k_LGD, v_LGD, sequences, scale, causal)
    made: tuple[Any, ...] = torch.ops.aten._flash_attention_forward(
        q_TND, k_LGD, v_LGD, sequences.queries, sequences.keys, sequences.most_queries, max_keys, 0.0, causal, False,
        scale=scale, seqused_k=sequences.num_keys,
    )  # fmt: skip
    return made[0]


@dataclass(slots=True)
class ContiguousStep:
    """The data that a layer's attention needs. `sequences`: of prompts among others; None: each
    token is a sequence."""

    kv: PagedKV  # of pages of one token
    positions_T: torch.Tensor
    slots_T: torch.Tensor  # int32, where each token stands
    max_context: int
    sequences: Sequences | None = None
    singles: Sequences | None = None

    def attend(
        self, layer: int, qkv_TC: torch.Tensor, learned: HeadWeights = PLAIN
    ) -> torch.Tensor:
        kv, at, spec = self.kv, self.kv.places[layer], self.kv.specs[layer]
        enter_heads(
            qkv_TC,
            kv.cache,
            at.index,
            self.positions_T,
            self.slots_T,
            kv.angles[layer],
            kv.num_heads,
            learned,
        )
        num, dim = qkv_TC.shape[0], kv.head_dim
        q_TND = qkv_TC.view(num, -1, dim)[:, : kv.num_heads]
        keys, values = kv.cache[:, at.index, :, :, 0].unbind(1)
        if self.sequences is not None:
            return flash(
                q_TND, keys, values, self.sequences, self.max_context, spec.scale, True
            ).reshape(num, -1)
        if self.singles is None:
            self.singles = self._each_token()
        shape = num, kv.num_kv_heads, kv.num_heads // kv.num_kv_heads, dim
        q = q_TND.reshape(shape).transpose(1, 2).reshape(-1, kv.num_kv_heads, dim)
        out = flash(q, keys, values, self.singles, self.max_context, spec.scale, False)
        return out.view(num, shape[2], shape[1], dim).transpose(1, 2).reshape(num, -1)

    def _each_token(self) -> Sequences:
        num, heads = self.slots_T.shape[0], self.kv.num_heads // self.kv.num_kv_heads
        queries = torch.arange(
            0, (num + 1) * heads, heads, dtype=torch.int32, device=self.slots_T.device
        )
        firsts = self.slots_T - self.positions_T
        return Sequences(
            queries, torch.cat([firsts, firsts[-1:]]), (self.positions_T + 1).to(torch.int32), heads
        )

    def convolve(self, *given: Any) -> torch.Tensor:
        raise NotImplementedError("layers with states are refused with kv_layout virtual")

    scan = convolve
