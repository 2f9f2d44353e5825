"""The options that a user may set."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from tidemill.errors import ConfigError

T = TypeVar("T")
Decision: TypeAlias = tuple[T, str]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options that a user may set. None means: derive it."""

    model: str = "smollm2"
    served_name: str | None = None
    load_format: str = "auto"  # dummy: random weights of the shape in config.json
    device: str = "auto"
    dtype: str = "auto"
    quantization: str = "auto"  # of weights on a GPU: as stored, none, or fp8, int8, int4 or sparse24, made as they are read
    kv_dtype: str = "auto"  # a format of the KV cache, by its name or its short one
    kv_calibration: str | None = None  # a file that calibrate-kv has written
    page_size: int | None = None
    max_context: int | None = None
    max_requests: int | None = None
    max_waiting: int = 4096
    token_budget: int | None = None
    memory_bytes: int | None = None  # for weights, activations and KV cache together
    gpu_memory_utilization: float | None = None  # on a GPU the same, as a part of its memory
    weight_memory_bytes: int | None = None  # for weights; what does not fit is streamed from disk
    weight_cache: str | None = None  # PATH:SIZE, for the files that weights are streamed from
    hot_neurons: str | None = None  # a folder that measure-neurons has written: the others are computed by the CPU
    contextual_sparsity: str | None = None  # a folder that train-predictors has written
    kv_memory_bytes: int | None = None
    kv_host_memory_bytes: int | None = None  # behind the KV cache
    kv_disk: str | None = None  # PATH:SIZE, behind host memory
    kv_export: str | None = None  # where other engines fetch the pages of this one
    kv_import: str | None = None  # engines whose pages this one fetches, with commas between them
    kv_key_file: str | None = None  # of these engines, where they are on several hosts
    policy: str = "continuous"
    kv_layout: str = "paged"  # or virtual
    kv_policy: str | None = None  # of requests that do not ask for one: a name, or JSON
    max_stream: int | None = None  # tokens of a request whose policy bounds its cache
    prefix_caching: bool = True
    prefix_index: str = "hash"  # or radix
    queue_order: str = "arrival"  # or prefix
    batch_window_ms: float | None = None  # of the policy dynamic
    evict: bool = True  # False: only what can run to its end is admitted, and none is preempted
    max_pinned: float = 0.5  # part of the KV cache that may be pinned or retained
    session_retention_s: float = 300.0  # for which a session is retained whose tool call is under way; 0: not at all
    threads: int | None = None
    tensor_parallel: int = 1  # ranks that share each layer
    tensor_layout: str = "1d"  # how they do: 1d, 2d, gathered, phased, or auto
    collectives: str = "auto"  # how GPUs that share layers exchange: auto, ipc, nccl
    pipeline_parallel: int = 1  # stages of layers
    pipeline_layers: str | None = None  # how many each has, or a file that measure-layers has written
    expert_parallel: bool = False  # ranks that share layers have some experts each, not some of each expert
    remote_workers: int = 0  # ranks of other hosts, which come to the address and know the key
    workers_address: str | None = None  # HOST:PORT
    workers_key_file: str | None = None
    data_parallel: int = 1  # engines that serve the model side by side
    prefill_engines: int = 0  # with decode_engines: engines that compute prompts, up to the first token
    decode_engines: int = 0  # those that go on from there
    kv_transfer_bytes: int | None = None  # of each prefill engine, for pages that decode engines fetch
    fast_math: bool = False
    nano_batching: str = "off"  # on a GPU: steps in two halves that overlap; auto: where a trial at start is faster, on, off
    structured_backend: str = "llguidance"
    speculate: str = "auto"  # a drafter
    draft_model: str | None = None
    max_drafts: int | None = None  # tokens guessed for a request in a step
    draft_heads: str | None = None  # a folder that train-draft has written
    adaptive_drafts: bool = True
    acceptance: str = "exact"  # or rejection
    sampling_defaults: str = "model"  # or neutral, or JSON
    default_max_tokens: int | None = None
    chat_template: str | None = None  # a file or the template itself, instead of the model's own
    chat_template_kwargs: str | None = None  # its variables, as JSON, where a request does not give them
    loras: tuple[str, ...] = ()  # NAME=PATH of LoRA adapters
    max_loras: int | None = None
    max_lora_rank: int | None = None

    @property
    def has_roles(self) -> bool:
        """Prompts are computed by other engines than what follows."""
        return bool(self.prefill_engines or self.decode_engines)

    @property
    def num_engines(self) -> int:
        return self.prefill_engines + self.decode_engines if self.has_roles else self.data_parallel

    @property
    def lora_paths(self) -> dict[str, str]:
        """The adapters by name."""
        found: dict[str, str] = {}
        for text in self.loras:
            name, _, path = text.partition("=")
            if not name or not path or name in found:
                raise ConfigError(f"An adapter is given as {text!r}.", fix="Write NAME=PATH, each name once.", param="loras")
            found[name] = path
        return found


def at_least(name: str, value: int, low: int) -> int:
    if value < low:
        raise ConfigError(f"{name} is {value}.", fix=f"It must be at least {low}.", param=name)
    return value


def one_of(name: str, value: str, choices: Iterable[str]) -> str:
    if value not in choices:
        raise ConfigError(f"{name} {value!r} is not known.", fix=f"Choose one of {', '.join(choices)}.", param=name)
    return value
