"""The parts of attention besides products: masks and score changes, small functions that are
composed from a layer's spec.

A mask says which keys a query sees, from their positions; a score change says what becomes of a
score. Both are written with operators alone, so that they take numpy's arrays, torch's tensors and
what FlexAttention traces alike. The torch backend and FlexAttention compute with them; the compiled
kernels have them built in by kind (`coverage.py`).

A sink is neither: it joins the softmax as a score without a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch

from tidemill.types.model_config import AttentionSpec

# Positions, heads and scores are ints, arrays or tensors that broadcast.
Mask = Callable[[Any, Any], Any]  # (query position, key position) -> seen
# (score, head, query position, key position) -> score
ScoreChange = Callable[[Any, Any, Any, Any], Any]

# ---- masks


def causal(query: Any, key: Any) -> Any:
    return key <= query


def prefix(length: Any) -> Mask:
    """Prefix-LM: causal, but the first `length` tokens are seen by all. With the whole sequence's
    length, bidirectional."""
    return lambda query, key: (key <= query) | (key < length)


def window(size: int) -> Mask:
    return lambda query, key: key > query - size


def document(of_query: Any, of_key: Any) -> Mask:
    """Queries see keys of their own document, if several lie in one sequence or one cache."""
    return lambda query, key: of_query == of_key


def every(masks: Iterable[Mask]) -> Mask:
    """Seen by all of them."""
    first, *others = masks

    def composed(query: Any, key: Any) -> Any:
        seen = first(query, key)
        for mask in others:
            seen = seen & mask(query, key)
        return seen

    return composed


# ---- score changes


def softcap(cap: float) -> ScoreChange:
    return lambda score, head, query, key: torch.tanh(score / cap) * cap


def capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """The same of logits, in place."""
    return logits.div_(cap).tanh_().mul_(cap) if cap else logits


def alibi(slopes_N: torch.Tensor) -> ScoreChange:
    """Attention with linear biases: the further a key, the lower its score."""
    return lambda score, head, query, key: score + slopes_N[head] * (key - query)


def distance_bias(bias_NW: torch.Tensor) -> ScoreChange:
    """Learned, by distance, that of 0 in the middle. Of distances that no key within the context
    has, some other."""
    middle = bias_NW.shape[1] // 2
    return lambda score, head, query, key: (
        score + bias_NW[head, torch.clamp(key - query, -middle, middle) + middle]
    )


def in_turn(changes: Iterable[ScoreChange]) -> ScoreChange:
    changes = tuple(changes)

    def composed(score: Any, head: Any, query: Any, key: Any) -> Any:
        for change in changes:
            score = change(score, head, query, key)
        return score

    return composed


@cache
def alibi_slopes(num_heads: int) -> torch.Tensor:
    """A geometric sequence that ends at 2^-8. Of a number of heads that is no power of two, the
    sequence of the power below, then every other member of the next power's."""

    def powers(count: int, step: int, of: int) -> list[float]:
        return [2.0 ** (-8.0 / of * (1 + i * step)) for i in range(count)]

    below = 2 ** int(math.log2(num_heads))
    return torch.tensor(powers(below, 1, below) + powers(num_heads - below, 2, 2 * below))


# ---- composed from a spec


def _slopes(spec: AttentionSpec) -> torch.Tensor:
    return alibi_slopes(spec.all_heads or spec.num_heads)[spec.first_head :][: spec.num_heads]


def mask_of(spec: AttentionSpec, end: Any) -> Mask:
    """`end`: after the last key that the step has of the query's sequence; used where a layer is
    bidirectional."""
    masks = [prefix(end) if spec.is_bidirectional else causal]
    return every([*masks, window(spec.window)] if spec.window else masks)


def first_seen(spec: AttentionSpec, query: Any) -> Any:
    """The position before which the query sees no key; may be negative."""
    return query - spec.window + 1 if spec.window else query * 0


def change_of(
    spec: AttentionSpec, bias_NW: torch.Tensor | None = None, device: torch.device | None = None
) -> ScoreChange | None:
    """The change of scores that are already scaled; None: they stay. `bias_NW`: of a layer that has
    learned a distance bias."""
    changes = [softcap(spec.softcap)] if spec.softcap else []
    if spec.has_alibi:
        changes.append(alibi(_slopes(spec).to(device)))
    if bias_NW is not None:
        changes.append(distance_bias(bias_NW))
    return in_turn(changes) if changes else None


def by_distance(
    spec: AttentionSpec, bias_NW: torch.Tensor | None, num_positions: int
) -> torch.Tensor | None:
    """The values that are added to scores as a table [N, 2 * num_positions - 1], by the key's
    position less the query's, for kernels that read one; None: nothing. `bias_NW`: a learned one,
    which brings its own number of positions."""
    if not spec.has_alibi:
        return bias_NW
    last = num_positions - 1 if bias_NW is None else bias_NW.shape[1] // 2
    heads, distances = torch.arange(spec.num_heads)[:, None], torch.arange(-last, last + 1)
    table = alibi(_slopes(spec))(0.0, heads, 0, distances)
    return table if bias_NW is None else table.to(bias_NW.device) + bias_NW
