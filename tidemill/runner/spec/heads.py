"""Draft heads: small modules that guess the tokens after the next one from the target model's
hidden states.

B: sequences, T: tokens, H: hidden size, N: attention heads, D: tokens of the draft vocabulary, W:
window.

A hidden state at position t is the target's state after its last norm, from which its head makes
the logits of token t + 1. All heads end in states of the same kind, and the target's own head, cut
to the draft vocabulary, makes logits of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from tidemill.errors import ConfigError
from tidemill.layers.embedding import Head, TiedHead
from tidemill.models.base import CausalLM

EPS = 1e-6  # of norms
_THETA = 10_000.0  # of the EAGLE layer's rope, whose positions are within a window


class Target:
    """The parts of the target model that heads share: its embedding, and the rows of its head that
    are the draft vocabulary."""

    def __init__(self, model: CausalLM, ids_D: torch.Tensor) -> None:
        head = getattr(model, "head", None)
        if not isinstance(head, Head | TiedHead):
            raise ConfigError(
                f"Draft heads need the output head of {model.config.architecture}, which has none of its own."
            )
        self.model, self.device = model, torch.device(model.weight_plan.device)
        self.ids_D = ids_D.to(self.device)
        with torch.inference_mode():
            made = head.weight.rows(self.ids_D)
        self.table_DH = made.clone() * model.config.logits_scale
        self.softcap = model.config.logits_softcap

    @property
    def hidden_size(self) -> int:
        return self.table_DH.shape[1]

    def own(self, values: torch.Tensor) -> torch.Tensor:
        """A head's weights as they run beside this model: on its device, in the type of its states."""
        return values.detach().to(self.device, self.table_DH.dtype)

    def zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.table_DH.dtype, device=self.device)

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """[..., H]; positions that some models add are not among it."""
        with torch.inference_mode():
            made = self.model.embed_tokens(ids_T.flatten(), torch.zeros_like(ids_T).flatten())
        return made.clone().unflatten(0, ids_T.shape)

    def logits(self, states_TH: torch.Tensor) -> torch.Tensor:
        """The logits of the draft vocabulary, [..., D]."""
        made = states_TH @ self.table_DH.t()
        return made if not self.softcap else torch.tanh(made / self.softcap) * self.softcap


class DraftHead(nn.Module):
    kind: ClassVar[str]

    @property
    def settings(self) -> dict[str, int]:
        """The arguments of its constructor."""
        raise NotImplementedError


class MedusaHeads(DraftHead):
    """Head k: a residual block over the hidden state, that guesses the token k + 1 places after it."""

    kind = "medusa"

    def __init__(self, hidden_size: int, num_heads: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_heads))
        for block in self.blocks:
            nn.init.zeros_(block.weight)  # type: ignore[arg-type]
            nn.init.zeros_(block.bias)  # type: ignore[arg-type]

    @property
    def settings(self) -> dict[str, int]:
        return {"num_heads": len(self.blocks)}

    def forward(self, states_TH: torch.Tensor) -> list[torch.Tensor]:
        return [states_TH + F.silu(block(states_TH)) for block in self.blocks]


class ExitHead(DraftHead):
    """A low-rank residual block over the normed state after the first layers: what the other layers
    would have made of it."""

    kind = "exit"

    def __init__(self, hidden_size: int, layer: int = 1, rank: int = 128) -> None:
        super().__init__()
        self.layer = layer
        self.scale = nn.Parameter(torch.ones(hidden_size))
        self.down = nn.Linear(hidden_size, rank, bias=False)
        self.up = nn.Linear(rank, hidden_size, bias=False)
        nn.init.zeros_(self.up.weight)

    @property
    def settings(self) -> dict[str, int]:
        return {"layer": self.layer, "rank": self.down.out_features}

    def forward(self, states_TH: torch.Tensor) -> torch.Tensor:
        return states_TH * self.scale + self.up(F.silu(self.down(states_TH)))


class Cache:
    """Keys and values of true states, rotated, and of the states that were guessed after each of
    them."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []


class EagleHead(DraftHead):
    """One transformer layer over (embedding of a token, hidden state before it), which makes the
    hidden state of that token.

    It attends to the last `window` tokens only: of a prompt that comes from the prefix cache there
    are no states.
    """

    kind = "eagle"
    inverse: torch.Tensor

    def __init__(
        self, hidden_size: int, num_heads: int = 0, intermediate_size: int = 0, window: int = 64
    ) -> None:
        super().__init__()
        self.num_heads = num_heads or max(1, hidden_size // 64)
        self.head_dim = hidden_size // self.num_heads // 2 * 2
        self.window = window
        inner = self.num_heads * self.head_dim
        intermediate_size = intermediate_size or 2 * hidden_size
        self.fuse = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.norm = nn.Parameter(torch.ones(hidden_size))
        self.qkv = nn.Linear(hidden_size, 3 * inner, bias=False)
        self.out = nn.Linear(inner, hidden_size, bias=False)
        self.mlp_norm = nn.Parameter(torch.ones(hidden_size))
        self.gate_up = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.last_norm = nn.Parameter(torch.ones(hidden_size))
        # torch.eye on that device imports half of torch's compiler
        if not self.fuse.weight.is_meta:
            self._start()
        inverse = _THETA ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        self.register_buffer("inverse", inverse, persistent=False)

    @torch.no_grad()
    def _start(self) -> None:
        """At first, it repeats the state."""
        hidden_size = self.fuse.out_features
        self.fuse.weight[:, :hidden_size] = 0
        self.fuse.weight[:, hidden_size:] = torch.eye(hidden_size)
        self.out.weight.zero_()
        self.down.weight.zero_()

    @property
    def settings(self) -> dict[str, int]:
        return {
            "num_heads": self.num_heads,
            "intermediate_size": self.down.in_features,
            "window": self.window,
        }

    def forward(
        self, embedded_BTH: torch.Tensor, states_BTH: torch.Tensor, cache: Cache
    ) -> torch.Tensor:
        """The first call takes true states, each later one what the call before it returned, and
        the tokens after those. Column t is the chain that starts at token t: it sees the true
        states up to t, and its own guesses."""
        x = self.fuse(torch.cat([normed(embedded_BTH), normed(states_BTH)], -1))
        x = x + self._attend(normed(x) * self.norm, cache)
        gate, up = self.gate_up(normed(x) * self.mlp_norm).chunk(2, -1)
        x = x + self.down(F.silu(gate) * up)
        return normed(x) * self.last_norm

    def _attend(self, x_BTH: torch.Tensor, cache: Cache) -> torch.Tensor:
        step, num = len(cache.keys), x_BTH.shape[1]
        q, k, v = self.qkv(x_BTH).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(2)
        positions = torch.arange(num, device=x_BTH.device) + step
        q, k = rotated(q, positions, self.inverse), rotated(k, positions, self.inverse)
        cache.keys.append(k)
        cache.values.append(v)
        # how far back each true state is
        before = positions[:, None] - torch.arange(num, device=x_BTH.device)[None]
        is_seen = (before >= step) & (before < self.window)
        scores = torch.einsum("btnd,bsnd->bnts", q, cache.keys[0]).masked_fill(~is_seen, -torch.inf)
        own = [torch.einsum("btnd,btnd->bnt", q, one).unsqueeze(-1) for one in cache.keys[1:]]
        weights = (torch.cat([scores, *own], -1) * self.head_dim**-0.5).softmax(-1)
        mixed = torch.einsum("bnts,bsnd->btnd", weights[..., :num], cache.values[0])
        for i, one in enumerate(cache.values[1:]):
            mixed = mixed + weights[..., num + i].transpose(1, 2).unsqueeze(-1) * one
        return self.out(mixed.flatten(2))


def rotated(x_BTND: torch.Tensor, positions_T: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    angles = positions_T[:, None, None] * inverse
    cos, sin = angles.cos(), angles.sin()
    a, b = x_BTND.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def normed(x: torch.Tensor, weight_H: torch.Tensor | None = None) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight_H, EPS)


KINDS: dict[str, type[DraftHead]] = {cls.kind: cls for cls in (MedusaHeads, EagleHead, ExitHead)}


def new_head(kind: str, hidden_size: int, settings: dict[str, int] | None = None) -> DraftHead:
    return KINDS[kind](hidden_size, **(settings or {}))  # type: ignore[arg-type]


def draft_vocabulary(counts_V: torch.Tensor, size: int, always: Sequence[int]) -> torch.Tensor:
    """The `size` tokens that are the most frequent in a text, and those that end one. In ascending
    order."""
    chosen = counts_V.clone()
    chosen[list(always)] = counts_V.max() + 1
    best = chosen.argsort(descending=True, stable=True)[: min(size, len(counts_V))]
    return best.sort().values
