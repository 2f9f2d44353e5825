"""The table of attention kernels: which masks, score changes, head sizes and formats of the cache
each has. The first of a device that has all that a model's layers need computes them; what none has
is refused by its name. The functions behind the names are in `kernels/mixers.py` and `runner/`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from tidemill.types.kv_format import FORMATS
from tidemill.types.model_config import LayerSpec

_MASKS = ("window", "softcap", "sinks", "bidirectional", "distance bias", "ALiBi")
# Kinds of caches whose pages have no dimensions in common.
UNEQUAL = ("keys and values of different sizes", "layers of different sizes", "values in keys")
SHARED = "a cache of another layer"


@dataclass(frozen=True, slots=True)
class Coverage:
    """The features that a kernel has built in."""

    kinds: Collection[str]  # in any format
    head_dims: Callable[[int], bool]
    sizes: str  # the head sizes, in words
    plain_kinds: Collection[str] = ()  # only where values have no scales


COVERED = {
    "C": Coverage(_MASKS, lambda dim: dim % 8 == 0, "multiples of 8", (*UNEQUAL, SHARED)),
    "Triton": Coverage(
        _MASKS, lambda dim: 16 <= dim <= 256 and dim & (dim - 1) == 0, "16, 32, 64, 128 and 256"
    ),
    "FlexAttention": Coverage(_MASKS, lambda dim: True, "any size"),
    "torch": Coverage((*_MASKS, SHARED), lambda dim: True, "any size", UNEQUAL),
}


def uncovered(
    kernel: str, specs: Iterable[LayerSpec], kinds: Iterable[str] = (), kv_dtype: str = ""
) -> str:
    """Why this kernel cannot compute these layers in a format of the cache, or empty. `kinds`: what
    they need besides, together."""
    covered, specs = COVERED[kernel], list(specs)
    has_scales = bool(kv_dtype) and FORMATS[kv_dtype].has_scales
    needed = dict.fromkeys([*(kind for spec in specs for kind in spec.kinds), *kinds])
    missing = [kind for kind in needed if kind not in covered.kinds]
    if not has_scales:
        missing = [kind for kind in missing if kind not in covered.plain_kinds]
    if missing:
        where = f" in {kv_dtype}" if any(kind in covered.plain_kinds for kind in missing) else ""
        return f"the {kernel} attention kernels do not have {' or '.join(missing)}{where}"
    for spec in specs:
        for dim in (part.dim for part in spec.parts):
            if not covered.head_dims(dim):
                return f"the {kernel} attention kernels take heads of {covered.sizes}, not of {dim}"
    return ""
