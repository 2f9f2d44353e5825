"""Decisions about the KV cache: its format, pages and prefixes."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from tidemill.capabilities import why_not
from tidemill.config.compute import decide_max_requests, decide_token_budget
from tidemill.config.options import Decision, EngineOptions, one_of
from tidemill.config.sizes import fmt_bytes
from tidemill.errors import ConfigError
from tidemill.types.cache_layout import CacheLayout, StateLayout, lay_out, one_place
from tidemill.types.coverage import SHARED, UNEQUAL
from tidemill.types.kv_format import FORMATS, SHORT_NAMES
from tidemill.types.model_config import ModelConfig

GPU_PAGE = 64
_LEAST_ON_GPU = 32  # dimensions of a head in a format with scales
# tokens between the states of a sequence that are kept; a multiple of every page size
STATE_INTERVAL = 256


def decide_kv_dtype(
    options: EngineOptions, dtype: str, device: str, model: ModelConfig
) -> Decision[str]:
    if options.kv_dtype != "auto":
        return one_of(
            "kv_dtype", SHORT_NAMES.get(options.kv_dtype, options.kv_dtype), FORMATS
        ), "given"
    if dtype == "float32":
        return "float32", "exact"
    may_have_scales = model.pooler is None and not {*UNEQUAL, SHARED} & {*model.kinds}
    if (
        model.kv_bits == 8
        and may_have_scales
        and (device == "cpu" or model.head_dim >= _LEAST_ON_GPU)
    ):
        return (
            "fp8" if device == "cuda" else "int8",
            "the checkpoint asks for 8 bits (kv_cache_scheme)",
        )
    return (
        "bfloat16",
        "as the activations" if device == "cuda" else "half the memory, finer than the weights",
    )


def decide_page_size(
    options: EngineOptions, device: str, model: ModelConfig, kv_dtype: str
) -> Decision[int]:
    if (
        options.page_size is None
        and device == "cpu"
        and model.state_bytes > 64 * 16 * model.kv_bytes_per_token(kv_dtype) > 0
    ):
        return (
            64,
            "tokens per KV page; with fewer, a state would take more than 64 pages, each with a page table",
        )
    page_size = options.page_size or (GPU_PAGE if device == "cuda" else 16)
    if page_size not in (1, 2, 4, 8, 16, 32, 64):
        raise ConfigError(
            f"page_size is {page_size}.",
            fix="It must be a power of two from 1 to 64.",
            param="page_size",
        )
    if device == "cuda" and page_size != GPU_PAGE:
        raise ConfigError(
            f"page_size is {page_size}; the GPU's kernels take pages of {GPU_PAGE}.",
            fix="Leave --page-size out.",
            param="page_size",
        )
    return page_size, "tokens per KV page" + (
        ", the attention kernels' block" if device == "cuda" else ""
    )


def decide_prefix_caching(options: EngineOptions, features: Collection[str]) -> Decision[bool]:
    if refusal := why_not("prefix-caching", features):
        return False, f"no prefix caching: {refusal.why}"
    return options.prefix_caching, "prefix caching: identical prefixes are computed once"


def decide_prefix_index(options: EngineOptions, layout: CacheLayout) -> Decision[str]:
    if one_of("prefix_index", options.prefix_index, ("hash", "radix")) == "hash":
        return "hash", "prefixes are found by hashes of whole pages"
    if layout.states is not None:
        return "radix", "prefixes are found by their tokens; a hit ends where a state was kept"
    return (
        "radix",
        "prefixes are found by their tokens, also within a page, of which a copy is made",
    )


def decide_queue_order(options: EngineOptions) -> Decision[str]:
    if one_of("queue_order", options.queue_order, ("arrival", "prefix")) == "arrival":
        return "arrival", "queued requests start in the order in which they came"
    return "prefix", "queued requests with the longest cached prefix start first"


def decide_max_pinned(options: EngineOptions, prefix_caching: bool) -> Decision[float]:
    if not 0 <= options.max_pinned <= 0.9:
        raise ConfigError(
            f"max_pinned is {options.max_pinned:g}.",
            fix="It must be from 0 to 0.9.",
            param="max_pinned",
        )
    if not prefix_caching:
        return 0.0, "nothing can be pinned without prefix caching"
    return options.max_pinned, "part of the pages that prompt caches and retained prefixes may hold"


def decide_session_retention(options: EngineOptions, max_pinned: float) -> Decision[float]:
    seconds = options.session_retention_s
    if not 0 <= seconds <= 86400:
        what = f"session_retention_s is {seconds:g}."
        raise ConfigError(what, fix="It must be from 0 to 86400.", param="session_retention_s")
    if not max_pinned:
        return 0.0, "nothing can be retained"
    return seconds, "for which a session is retained while its tool call is under way"


def decide_layout(
    model: ModelConfig, kv_dtype: str, page_size: int, context: int
) -> Decision[CacheLayout]:
    if model.pooler is not None:
        return one_place(model.num_layers, page_size), "an encoder's layers use one place in turn"
    layout = _kv_layout(model, kv_dtype, page_size, context)
    windowed = [group.window for group in layout.groups if group.window]
    if model.has_states:
        page_bytes = _kv_page_bytes(model, kv_dtype, page_size, layout)
        states = _states(model, page_bytes)
        each = f"{fmt_bytes(states.block_bytes)} in {states.block_pages} pages"
        return layout.with_states(
            states, STATE_INTERVAL
        ), f"a state has {each}, and is kept every {STATE_INTERVAL} tokens"
    per_page = f"pages hold {layout.layers_per_page} layers"
    if layout.token_bytes:
        taken = len(layout.groups) * layout.page_bytes(page_size, 0)
        empty = 1 - model.kv_bytes_per_token(kv_dtype) * page_size / taken
        per_page = f"layers differ in size: {100 * empty:.0f} % of a page stay empty"
    if not windowed:
        return (
            layout,
            f"{per_page}; {len(layout.groups)} page tables"
            if layout.token_bytes
            else "one page table for all layers",
        )
    return (
        layout,
        f"{per_page}; {len(windowed)} of {len(layout.groups)} page tables give back what their window has passed",
    )


def _kv_layout(model: ModelConfig, kv_dtype: str, page_size: int, context: int) -> CacheLayout:
    """A layer that reads another's cache has its place. Pages of different layers are a multiple of
    all their rows, so that kernels can number rows from the first page to the last."""
    storing = [layer for layer, spec in enumerate(model.layers) if spec.stored]
    specs, row = [model.layers[layer] for layer in storing], FORMATS[kv_dtype].row_bytes
    rows = math.lcm(*(row(part.dim) for spec in specs for part in spec.stored))
    sizes = [] if model.has_equal_parts else [spec.token_bytes(kv_dtype) for spec in specs]
    layout = lay_out([spec.window for spec in specs], page_size, context, sizes, rows * page_size)
    readers = [
        layer if spec.reads is None else spec.reads
        for layer, spec in enumerate(model.layers)
        if spec.parts
    ]
    return replace(layout, places=tuple(layout.places[storing.index(layer)] for layer in readers))


def _states(model: ModelConfig, page_bytes: int) -> StateLayout:
    """In pages as large as those of keys and values, if there are any."""
    sizes = [spec.piece_bytes for spec in model.layers]
    largest = max(size for layer in sizes for size in layer)
    if page_bytes and (page_bytes < largest + 63 or page_bytes % 64):
        raise ConfigError(
            f"A page of {page_bytes} bytes does not hold the largest piece of a layer's state, {largest} bytes.",
            fix="Use a larger --page-size.",
            param="page_size",
        )
    return StateLayout.pack(sizes, page_bytes)


def sequence_bytes(
    options: EngineOptions, model: ModelConfig, device: str, kv_dtype: str, num_tokens: int
) -> Decision[int]:
    """KV memory that a sequence of so many tokens holds at most, and how it is laid out."""
    page_size, _ = decide_page_size(options, device, model, kv_dtype)
    layout, why = decide_layout(model, kv_dtype, page_size, num_tokens)
    token_budget, _ = decide_token_budget(
        options, device, decide_max_requests(options, device, model)[0], num_tokens, model
    )
    return layout.num_pages_for(num_tokens, token_budget) * bytes_of_page(
        model, kv_dtype, page_size, layout
    ), why


def bytes_of_page(model: ModelConfig, kv_dtype: str, page_size: int, layout: CacheLayout) -> int:
    return (
        layout.states.page_bytes
        if layout.states
        else _kv_page_bytes(model, kv_dtype, page_size, layout)
    )


def _kv_page_bytes(model: ModelConfig, kv_dtype: str, page_size: int, layout: CacheLayout) -> int:
    return layout.page_bytes(page_size, max(spec.token_bytes(kv_dtype) for spec in model.layers))
