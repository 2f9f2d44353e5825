"""The rows of the capability table: what can be asked of an engine, and what it may be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from tidemill.types.coverage import SHARED, UNEQUAL, uncovered
from tidemill.types.kv_format import FORMATS, SHORT_NAMES
from tidemill.types.kv_policy import KINDS

if TYPE_CHECKING:
    from tidemill.config.options import EngineOptions
    from tidemill.machine import Machine
    from tidemill.types.model_config import ModelConfig
    from tidemill.types.sampling import SamplingParams

DEVICE, MODEL, WEIGHTS, CACHE = "Device", "Model", "Weights", "KV cache"
STEPS, DRAFTS, RANKS = "Steps", "Speculation", "Parallelism"
ENGINES, REQUEST = "Engines of a server", "Request"
HEADS = ("medusa", "eagle", "eagle-tree", "exit", "exit-bandit")  # drafters of trained heads
SCALED = tuple(name for name, kind in FORMATS.items() if kind.has_scales)
KINDS_OF_LAYERS = (
    "softcap",
    "sinks",
    "bidirectional",
    "distance bias",
    "ALiBi",
    *UNEQUAL,
    SHARED,
)
POLICIES = (*KINDS[1:], "random")  # KV policies but full
CALIBRATED = tuple(name for name, kind in FORMATS.items() if kind.is_calibrated)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """An engine whose device and formats are decided."""

    options: EngineOptions
    model: ModelConfig
    machine: Machine
    device: str
    dtype: str
    scheme: str
    kv_dtype: str

    @property
    def notes(self) -> dict[str, str]:
        """Notes on some features, for messages."""
        missing = uncovered("Triton", self.model.token_layers) if self.device == "cuda" else ""
        return {"no kernels": self.machine.no_kernels, "FlexAttention": missing}

    @cached_property
    def kinds(self) -> list[str]:
        return self.model.kinds

    @property
    def num_kept(self) -> int:
        """The number of different windows that are shorter than the context, or none."""
        context = self.options.max_context or self.model.max_context
        windows = (spec.window for spec in self.model.token_layers)
        return len({window if window < context else 0 for window in windows})

    @property
    def is_rotated_in_part(self) -> bool:
        rotations = (spec.rotation for spec in self.model.token_layers)
        return any(rotation and rotation.num_dims != self.model.head_dim for rotation in rotations)


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A row. Any of the three tests tells that it is in use; without one, whoever uses it says so."""

    name: str
    group: str
    words: str  # in messages
    param: str = ""  # the option, or the field of a request, that asks for it
    asked: Callable[[EngineOptions], bool] | None = None
    holds: Callable[[Setup], bool] | None = None
    requested: Callable[[SamplingParams], bool] | None = None


def _option(
    name: str, group: str, param: str, values: tuple[Any, ...] = (), words: str = ""
) -> Feature:
    """`values`: of the option; none: any that is not its neutral one."""

    def asked(options: EngineOptions) -> bool:
        value = getattr(options, param)
        return value in values if values else value not in (None, False, 0, ())

    return Feature(name=name, group=group, words=words or f"--{name}", param=param, asked=asked)


def _fact(
    name: str, group: str, words: str, holds: Callable[[Setup], bool], param: str = ""
) -> Feature:
    return Feature(name=name, group=group, words=words, holds=holds, param=param)


def _kind(kind: str) -> Callable[[Setup], bool]:
    return lambda s: kind in s.kinds


def _has_policy(kind: str) -> Callable[[SamplingParams], bool]:
    return lambda p: p.kv_policy is not None and p.kv_policy.kind == kind


def _format(kind: str) -> Feature:
    """A format of the KV cache is known when options ask for it, before it is decided."""
    return Feature(
        name=f"kv-dtype {kind}",
        group=CACHE,
        words=f"--kv-dtype {kind}",
        param="kv_dtype",
        asked=lambda o: SHORT_NAMES.get(o.kv_dtype, o.kv_dtype) == kind,
        holds=lambda s: s.kv_dtype == kind,
    )


def _by_nixl(options: EngineOptions) -> bool:
    return any("nixl:" in (text or "") for text in (options.kv_export, options.kv_import))


_MODEL = (
    _fact("encoder", MODEL, "an encoder", lambda s: s.model.pooler is not None),
    _fact(
        "no KV cache",
        MODEL,
        "a model without keys and values",
        lambda s: not s.model.token_layers,
    ),
    _fact("states", MODEL, "states of constant size", lambda s: s.model.has_states),
    _fact("experts", MODEL, "experts", lambda s: any(s.model.experts)),
    _fact("no experts", MODEL, "a model without experts", lambda s: not any(s.model.experts)),
    _fact("window", MODEL, "layers with windows", _kind("window")),
    _fact("mixed windows", MODEL, "layers that keep different tokens", lambda s: s.num_kept > 1),
    *(_fact(kind, MODEL, f"layers with {kind}", _kind(kind)) for kind in KINDS_OF_LAYERS),
    _fact(
        "FlexAttention",
        MODEL,
        "attention that the Triton kernels do not compute",
        lambda s: s.device == "cuda" and bool(uncovered("Triton", s.model.token_layers)),
    ),
    _fact(
        "learned positions",
        MODEL,
        "learned positions",
        lambda s: not any(spec.rotation for spec in s.model.token_layers),
    ),
    _fact(
        "heads below 32",
        MODEL,
        "heads of fewer than 32 dimensions",
        lambda s: 0 < s.model.head_dim < 32,
    ),
    _fact(
        "heads below 64",
        MODEL,
        "heads of fewer than 64 dimensions",
        lambda s: 0 < s.model.head_dim < 64,
    ),
    _fact(
        "odd heads",
        MODEL,
        "heads of an odd number of dimensions",
        lambda s: s.model.head_dim % 2 == 1,
    ),
    _fact(
        "heads of no eighths",
        MODEL,
        "heads that are no multiple of 8",
        lambda s: s.model.head_dim % 8 != 0,
    ),
    _fact(
        "heads of no power",
        MODEL,
        "heads that are not of 16, 32, 64, 128 or 256 dimensions",
        lambda s: s.model.head_dim not in (16, 32, 64, 128, 256),
    ),
    _fact(
        "partial rotation", MODEL, "rotation of a part of each head", lambda s: s.is_rotated_in_part
    ),
    _fact("no gate", MODEL, "a feed-forward without a gate", lambda s: not s.model.is_gated),
    _fact(
        "no ReLU",
        MODEL,
        "an activation other than ReLU",
        lambda s: s.model.act not in ("relu", "relu2"),
    ),
    _fact(
        "plain checkpoint",
        MODEL,
        "a checkpoint that is not quantized",
        lambda s: not s.model.is_quantized,
    ),
    _fact("quantized checkpoint", MODEL, "a quantized checkpoint", lambda s: s.model.is_quantized),
    _fact(
        "shared KV heads",
        MODEL,
        "more ranks than KV heads",
        lambda s: any(spec.kv_is_shared for spec in s.model.token_layers),
    ),
)

_DEVICE = (
    _fact("CPU", DEVICE, "a CPU", lambda s: s.device == "cpu", "device"),
    _fact("GPU", DEVICE, "a GPU", lambda s: s.device == "cuda", "device"),
    _fact(
        "no kernels",
        DEVICE,
        "torch instead of the compiled kernels",
        lambda s: not s.machine.kernels,
    ),
    _fact("not Linux", DEVICE, "a system other than Linux", lambda s: sys.platform != "linux"),
)

_WEIGHTS = (
    *(
        _option(f"dtype {kind}", WEIGHTS, "dtype", (kind,))
        for kind in ("float32", "bfloat16", "quantized")
    ),
    *(
        _option(f"quantization {kind}", WEIGHTS, "quantization", (kind,))
        for kind in ("fp8", "int8", "int4", "sparse24")
    ),
    _fact("quantized weights", WEIGHTS, "quantized weights", lambda s: s.scheme != "dense"),
    _option("weight-memory", WEIGHTS, "weight_memory_bytes"),
    _option("hot-neurons", WEIGHTS, "hot_neurons"),
    _option("contextual-sparsity", WEIGHTS, "contextual_sparsity"),
    Feature(
        name="lora",
        group=WEIGHTS,
        words="--lora and --max-loras",
        param="max_loras",
        asked=lambda o: bool(o.loras or o.max_loras),
    ),
)

_CACHE = (
    *map(_format, FORMATS),
    Feature(
        name="kv-dtype",
        group=CACHE,
        words="--kv-dtype",
        param="kv_dtype",
        asked=lambda o: o.kv_dtype != "auto",
    ),
    _option("kv-calibration", CACHE, "kv_calibration"),
    _option("kv-layout virtual", CACHE, "kv_layout", ("virtual",)),
    *(
        Feature(
            name=f"kv-policy {kind}",
            group=CACHE,
            words=f"the KV policy {kind}",
            param="kv_policy",
            requested=_has_policy(kind),
        )
        for kind in POLICIES
    ),
    _option("no kv-policy", CACHE, "kv_policy", (None,), "a server without --kv-policy"),
    Feature(name="prefix-caching", group=CACHE, words="prefix caching", param="prefix_caching"),
    _option("no-prefix-caching", CACHE, "prefix_caching", (False,)),
    _option("prefix-index radix", CACHE, "prefix_index", ("radix",)),
    _option("queue-order prefix", CACHE, "queue_order", ("prefix",)),
    _option("kv-host-memory", CACHE, "kv_host_memory_bytes"),
    _option("kv-disk", CACHE, "kv_disk"),
    _option("kv-export", CACHE, "kv_export"),
    _option("kv-import", CACHE, "kv_import"),
    Feature(
        name="NIXL",
        group=CACHE,
        words="--kv-export or --kv-import by nixl",
        param="kv_export",
        asked=_by_nixl,
    ),
    Feature(name="prompt caches", group=CACHE, words="a prompt cache", param="name"),
    _option("no-pinned", CACHE, "max_pinned", (0.0,), "--max-pinned 0"),
)

_STEPS = (
    _option("fast-math", STEPS, "fast_math"),
    Feature(name="flash-attn-4", group=STEPS, words="flash-attn-4"),
    _option("nano-batching", STEPS, "nano_batching", ("on",)),
    _option("no-evict", STEPS, "evict", (False,)),
    _option("policy dynamic", STEPS, "policy", ("dynamic",)),
    _option("batch-window", STEPS, "batch_window_ms"),
)

_DRAFTS = (
    Feature(name="speculation", group=DRAFTS, words="speculation", param="speculate"),
    *(
        _option(f"speculate {kind}", DRAFTS, "speculate", (kind,))
        for kind in ("forced", "ngram", "suffix", *HEADS)
    ),
    Feature(
        name="speculate draft-model",
        group=DRAFTS,
        words="--speculate draft-model",
        param="speculate",
        asked=lambda o: (
            o.speculate == "draft-model" or (o.speculate == "auto" and o.draft_model is not None)
        ),
    ),
    _option("speculate off", DRAFTS, "speculate", ("off",)),
    _option("draft-model", DRAFTS, "draft_model"),
    _option("draft-heads", DRAFTS, "draft_heads"),
    Feature(name="draft trees", group=DRAFTS, words="trees of drafts"),
    _option("acceptance rejection", DRAFTS, "acceptance", ("rejection",)),
)

_RANKS = (
    Feature(
        name="ranks",
        group=RANKS,
        words="several ranks (--tensor-parallel, --pipeline-parallel)",
        param="tensor_parallel",
        asked=lambda o: o.tensor_parallel * o.pipeline_parallel > 1,
    ),
    Feature(
        name="tensor-parallel",
        group=RANKS,
        words="--tensor-parallel",
        param="tensor_parallel",
        asked=lambda o: o.tensor_parallel > 1,
    ),
    Feature(
        name="pipeline-parallel",
        group=RANKS,
        words="--pipeline-parallel",
        param="pipeline_parallel",
        asked=lambda o: o.pipeline_parallel > 1,
    ),
    *(
        _option(f"tensor-layout {kind}", RANKS, "tensor_layout", (kind,))
        for kind in ("2d", "gathered", "phased")
    ),
    Feature(
        name="no grid",
        group=RANKS,
        words="a number of ranks that makes no grid",
        param="tensor_parallel",
        asked=lambda o: grid_of(o.tensor_parallel) == 1,
    ),
    _option("pipeline-layers", RANKS, "pipeline_layers"),
    _option("expert-parallel", RANKS, "expert_parallel"),
    _option("remote-workers", RANKS, "remote_workers"),
    _option("workers-address", RANKS, "workers_address"),
    _option("workers-key-file", RANKS, "workers_key_file"),
    *(_option(f"collectives {kind}", RANKS, "collectives", (kind,)) for kind in ("ipc", "nccl")),
)

_ENGINES = (
    Feature(
        name="data-parallel",
        group=ENGINES,
        words="--data-parallel",
        param="data_parallel",
        asked=lambda o: o.data_parallel > 1,
    ),
    _option("prefill", ENGINES, "prefill_engines"),
    _option("decode", ENGINES, "decode_engines"),
    _option("kv-transfer-memory", ENGINES, "kv_transfer_bytes"),
    Feature(name="several models", group=ENGINES, words="several models", param="model"),
    Feature(
        name="unloading",
        group=ENGINES,
        words="models that may be unloaded (--idle-unload, --max-loaded, --memory-budget)",
        param="idle_unload",
    ),
    Feature(name="ray", group=ENGINES, words="--ray", param="ray"),
    Feature(name="replicas", group=ENGINES, words="--replicas and --autoscale", param="replicas"),
    Feature(name="autoscale", group=ENGINES, words="--autoscale", param="autoscale"),
    Feature(name="LLM", group=ENGINES, words="LLM, which is one engine in this process"),
)

_FIELDS: Mapping[str, str] = {  # of a request: the name in messages
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "allowed_token_ids": "allowed_token_ids",
    "bad_word_ids": "bad_words",
    "grammar": "structured output",
    "reasoning": "a budget of reasoning",
    "stop": "stop",
    "stop_regex": "stop_regex",
    "logprob_token_ids": "logprob_token_ids",
    "prompt_logprobs": "prompt_logprobs",
    "pooling": "pooling",
}


def _differs(field: str) -> Callable[[SamplingParams], bool]:
    return lambda params: bool(getattr(params, field) != _neutral(type(params))[field])


@cache
def _neutral(kind: type[msgspec.Struct]) -> dict[str, Any]:
    fields = msgspec.structs.fields(kind)
    return {
        field.name: field.default
        if field.default_factory is msgspec.NODEFAULT
        else field.default_factory()
        for field in fields
    }


_REQUEST = (
    Feature(
        name="beams",
        group=REQUEST,
        words="beam search",
        param="use_beam_search",
        requested=lambda p: p.beams is not None,
    ),
    *(
        Feature(name=field, group=REQUEST, words=words, param=field, requested=_differs(field))
        for field, words in _FIELDS.items()
    ),
    Feature(
        name="post_sampling_probs",
        group=REQUEST,
        words="post_sampling_probs",
        param="post_sampling_probs",
        requested=lambda p: p.post_sampling_logprobs,
    ),
    Feature(name="stream", group=REQUEST, words="stream", param="stream"),
    Feature(name="best_of", group=REQUEST, words="best_of", param="best_of"),
    Feature(
        name="loading adapters",
        group=REQUEST,
        words="loading an adapter while the server runs",
        param="lora_name",
    ),
)

FEATURES = {
    feature.name: feature
    for feature in (
        *_DEVICE,
        *_MODEL,
        *_WEIGHTS,
        *_CACHE,
        *_STEPS,
        *_DRAFTS,
        *_RANKS,
        *_ENGINES,
        *_REQUEST,
    )
}


def grid_of(size: int) -> int:
    """The rows of a grid of so many ranks, as near to a square as can be; 1: there is none."""
    return max((num for num in range(1, size) if size % num == 0 and num * num <= size), default=1)
