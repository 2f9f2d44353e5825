"""Decisions about `--kv-layout`: pages that a page table names, or each row in an address range of
its own."""

from __future__ import annotations

import mmap

from tidemill.config.choices import LAYOUTS
from tidemill.config.options import Decision, EngineOptions, one_of
from tidemill.config.sizes import fmt_bytes
from tidemill.errors import ConfigError
from tidemill.types.cache_layout import CacheLayout, Group, Place
from tidemill.types.model_config import ModelConfig

# the allocation granularity of NVIDIA GPUs; the runner compares it with the driver's
GPU_GRANULE = 2 * 2**20
_LEAST_TOKENS = {"cpu": 16, "cuda": 1}
_MOST_TOKENS = 4096
_MOST_MAPPINGS = 30_000  # Linux allows a process 65,530
_EMPTY_LAYERS = 1 / 16  # at most, so that tokens fill granules


def decide_kv_layout(options: EngineOptions) -> Decision[str]:
    if one_of("kv_layout", options.kv_layout, LAYOUTS) == "paged":
        return "paged", "keys and values lie in pages that a page table names"
    return (
        "virtual",
        "given: each row has an address range of its own, in which memory is mapped as tokens come",
    )


def decide_virtual(
    options: EngineOptions, device: str, model: ModelConfig, kv_dtype: str, most_tokens: int
) -> tuple[Decision[int], Decision[CacheLayout]]:
    """The tokens of a page, and how its layers lie. A page is one piece of physical memory: the
    smallest whole number of granules that a whole number of tokens fills. `most_tokens`: in all
    rows together."""
    granule, num_layers = GPU_GRANULE if device == "cuda" else mmap.PAGESIZE, model.num_kv_layers
    layer_bytes = model.kv_bytes_per_token(kv_dtype) // num_layers
    least = _LEAST_TOKENS[device]
    while device == "cpu" and most_tokens // least > _MOST_MAPPINGS and least < _MOST_TOKENS:
        least *= 2
    sizes = (
        [2**i for i in range(_MOST_TOKENS.bit_length()) if 2**i >= least]
        if options.page_size is None
        else [options.page_size]
    )
    pages = [
        (size * num * layer_bytes, num, size)
        for num in range(num_layers, num_layers + int(num_layers * _EMPTY_LAYERS) + 1)
        for size in sizes
        if size > 0 and size & (size - 1) == 0 and size * num * layer_bytes % granule == 0
    ]
    if not pages:
        page_size = f"{_MOST_TOKENS}" if options.page_size is None else f"{options.page_size}"
        raise ConfigError(
            f"{page_size} tokens of {num_layers * layer_bytes} bytes do not fill whole granules of {fmt_bytes(granule)}.",
            fix="Use --kv-layout paged."
            if options.page_size is None
            else "Leave --page-size out, or give another power of two.",
            param="kv_layout" if options.page_size is None else "page_size",
        )
    page_bytes, num, size = min(pages)
    layout = CacheLayout((Group(size),), tuple(Place(0, i) for i in range(num_layers)), num)
    empty = f"; {num - num_layers} of {num} layers of it stay empty" if num > num_layers else ""
    why = f"tokens that fill {page_bytes // granule} granules of {fmt_bytes(granule)}{empty}"
    return (size, why), (layout, "one address range for all layers of a row")
