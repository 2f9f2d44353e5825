"""The masks, score changes and head sizes that the compiled attention kernels have built in. Others are computed by torch's
FlexAttention or by plain torch ops, from the same functions (`kernels/masks.py`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from tidemill.model_config import LayerSpec


@dataclass(frozen=True, slots=True)
class Coverage:
    """The features that a compiled kernel has built in."""

    kinds: Collection[str]
    head_dims: Callable[[int], bool]
    sizes: str  # the head sizes, in words


_KINDS = ("window", "softcap", "sinks", "bidirectional", "distance bias", "ALiBi")
COVERED = {
    "C": Coverage(_KINDS, lambda dim: dim % 8 == 0, "multiples of 8"),
    "Triton": Coverage(_KINDS, lambda dim: 16 <= dim <= 256 and dim & (dim - 1) == 0, "16, 32, 64, 128 and 256"),
}


def uncovered(kernel: str, specs: Iterable[LayerSpec]) -> str:
    """Why the attention kernels in this language cannot compute these layers, or empty."""
    covered = COVERED[kernel]
    for spec in specs:
        missing = [kind for kind in spec.kinds if kind not in covered.kinds]
        if missing:
            return f"the {kernel} attention kernels do not have {' or '.join(missing)}"
        if not covered.head_dims(spec.head_dim):
            return f"the {kernel} attention kernels take heads of {covered.sizes}, not of {spec.head_dim}"
    return ""
