"""The options of an engine, each declared once.

A field of EngineOptions makes the flag, the key of the config file, the variable TIDEMILL_*, the
help and the line in docs/reference/options.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from tidemill.config.choices import (
    ACCEPTANCE,
    COLLECTIVES,
    DTYPES,
    INDEXES,
    LAYOUTS,
    MAX_LORA_RANK,
    MAX_RANKS,
    ORDERS,
    POLICIES,
    QUANTIZATIONS,
    SPECULATE,
    TENSOR_LAYOUTS,
)
from tidemill.errors import ConfigError
from tidemill.types.kv_format import FORMATS, SHORT_NAMES
from tidemill.types.kv_policy import KINDS

T = TypeVar("T")
Decision: TypeAlias = tuple[T, str]
ENGINE, ADAPTERS, SERVING = "Engine", "Adapters", "Serving"  # sections of the help


def option(default: Any = None, **declared: Any) -> Any:
    """The declaration of an option. `name`: of the flag, where it is not the field's. `section`: in
    the help. `low`, `high`, `choices`, `spellings` (other words for a choice): what it may be.
    `automatic`: in words, what None stands for. `short`: of a basic option, its help in one
    line."""
    return field(default=default, metadata=declared)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options that a user may set. None means: derive it."""

    model: str = option(
        "smollm2",
        short="A .gguf, a folder or org/name.",
        help="smollm2, a .gguf file, a folder with config.json and safetensors, or a model of the "
        "Hugging Face hub: org/name, or "
        "org/name:Q4_K_M for one quantization of a GGUF repository.",
    )
    device: str = option(
        "auto",
        choices=("auto", *DTYPES),
        short="Where to compute: cpu or cuda.",
        help="Where to compute: auto, cpu or cuda.",
    )
    dtype: str = option(
        "auto",
        choices=("auto", *DTYPES["cpu"], *DTYPES["cuda"]),
        spellings=(("float", "float32"), ("f32", "float32"), ("bf16", "bfloat16")),
        help="Weights and matmuls: quantized (a quantized checkpoint keeps its 4 or 8 bits; CPU), "
        "float32 (CPU), bfloat16 (GPU), "
        "or auto.",
    )
    quantization: str = option(
        "auto",
        choices=("auto", "none", *QUANTIZATIONS),
        short="Weights on a GPU: fp8, int8, int4.",
        help="Weights on a GPU: auto (a quantized checkpoint stays as it is stored), none "
        "(bfloat16), or of a plain checkpoint "
        "fp8 (weights and activations), int8 (both) or int4 (weights), rounded as they are read; "
        "sparse24: matrices with two "
        "zeros among four values on sparse tensor cores.",
    )
    kv_dtype: str = option(
        "auto",
        choices=("auto", *FORMATS),
        spellings=tuple(SHORT_NAMES.items()),
        help="Format of the KV cache: bfloat16; int8, int4 and, on a GPU, fp8 (e4m3), with a "
        "scale for each token and head; on a "
        "CPU also float32, float16, and kvquant4 or kvquant3, which --kv-calibration fits to the "
        "model; or auto.",
    )
    kv_calibration: str | None = option(
        automatic="none",
        help="For --kv-dtype kvquant4 or kvquant3: a file that calibrate-kv has written.",
    )
    load_format: str = option(
        "auto",
        choices=("auto", "dummy"),
        help="auto, or dummy: random weights of the shape in config.json, for benchmarks.",
    )
    max_context: int | None = option(
        low=1,
        automatic="the model's own, or what the KV memory holds",
        short="Longest prompt plus output, in tokens.",
        help="Longest prompt plus output, in tokens.",
    )
    max_requests: int | None = option(
        low=1,
        automatic="64; 256 on a GPU",
        short="Sequences computed at the same time.",
        help="Slots: sequences computed at the same time; further ones are queued.",
    )
    token_budget: int | None = option(
        low=1,
        automatic="256; on a GPU 2048, 4096 for a model of up to 4 billion parameters, up to 8192 "
        "for one with experts",
        help="Most tokens computed in one step; longer prompts are prefilled in chunks.",
    )
    memory_bytes: int | None = option(
        name="memory",
        automatic="what is free",
        short="Most memory for a model, like 16G.",
        help="Most memory for weights, activations and KV cache of a model, like 16G. With "
        "--tensor-parallel: of each rank.",
    )
    gpu_memory_utilization: float | None = option(
        low=0,
        high=1,
        automatic="what is free",
        help="The same as a part of a GPU's memory, like 0.5. On a CPU it has no effect: give "
        "--memory.",
    )
    weight_memory_bytes: int | None = option(
        name="weight-memory",
        automatic="all of them",
        help="Memory for weights, like 8G, of a model that is larger: what does not fit is read "
        "from disk as it is "
        "needed, on a GPU from host memory.",
    )
    weight_cache: str | None = option(
        automatic="~/.cache/tidemill/weights:100G",
        help="With --weight-memory on a CPU: folder and quota, as PATH:SIZE, of the files from "
        "which weights are read. On the "
        "fastest disk.",
    )
    hot_neurons: str | None = option(
        automatic="none",
        help="With --weight-memory on a GPU, of a model with ReLUs: a folder that measure-neurons "
        "has written. Neurons that "
        "are used most often are on the GPU, the CPU computes the others from host memory.",
    )
    contextual_sparsity: str | None = option(
        automatic="none",
        help="On a CPU: a folder that train-predictors has written, whose predictors say which "
        "neurons and heads are computed "
        "for a token. Faster, and not exact.",
    )
    kv_memory_bytes: int | None = option(
        name="kv-memory",
        automatic="half of the free memory, at most 4 GiB; all free memory of a GPU",
        help="Memory for the KV cache, like 512M or 4G. With --tensor-parallel: of each process.",
    )
    kv_host_memory_bytes: int | None = option(
        name="kv-host-memory",
        automatic="none",
        help="Host memory behind the KV cache, like 8G: cached pages that must make room go there "
        "and come back on a hit.",
    )
    kv_disk: str | None = option(
        automatic="none",
        help="A folder and its quota behind that, as PATH:SIZE, like /var/cache/tidemill:20G. "
        "Cached pages stay there, also "
        "over a restart.",
    )
    kv_export: str | None = option(
        automatic="none",
        help="Where other engines fetch KV pages that this one has computed, and how much memory "
        "these take: shm:NAME:SIZE on "
        "one host, tcp:HOST:PORT:SIZE or nixl:HOST:PORT:SIZE between hosts.",
    )
    kv_import: str | None = option(
        automatic="none",
        help="Engines whose KV pages are fetched instead of computed, where that is faster: "
        "shm:NAME, tcp:HOST:PORT or "
        "nixl:HOST:PORT, with commas between them.",
    )
    kv_key_file: str | None = option(
        automatic="none",
        help="For tcp: and nixl: of --kv-export and --kv-import: a file with the key that these "
        "engines share.",
    )
    page_size: int | None = option(
        low=1,
        high=64,
        automatic="16; 64 on a GPU, or if states are large",
        help="Tokens per page of the KV cache: a power of two up to 64.",
    )
    speculate: str = option(
        "auto",
        choices=tuple(SPECULATE),
        short="How tokens are guessed ahead.",
        help="How tokens are guessed ahead, to be verified several at a time; the output is the "
        "same with any. "
        "auto: what a grammar forces (forced), else what followed the last tokens before in the "
        "request (ngram), where that "
        "saves time. suffix: in other outputs as well. draft-model: by the model that "
        "`--draft-model` names.",
    )
    draft_model: str | None = option(
        automatic="none",
        help="A smaller model with the same tokenizer, as `--model` names one, that guesses "
        "tokens ahead.",
    )
    draft_heads: str | None = option(
        automatic="none",
        help="For --speculate medusa, eagle, eagle-tree, exit or exit-bandit: a folder that "
        "train-draft has written.",
    )
    max_drafts: int | None = option(
        low=1,
        high=64,
        automatic="8, or 16 on a GPU",
        help="Tokens guessed for a request in a step, at most. 8 also on a GPU with a draft model "
        "or heads.",
    )
    adaptive_drafts: bool = option(
        True,
        help="Verify as many of the guessed tokens as measurements say are worth it; off: all of "
        "them.",
    )
    acceptance: str = option(
        "exact",
        choices=ACCEPTANCE,
        help="When a guessed token is taken. exact: if it is the one that is drawn, so the output "
        "is the same as without. "
        "rejection (CPU): as in speculative sampling; sampled output is only distributed alike.",
    )
    policy: str = option(
        "continuous",
        choices=tuple(POLICIES),
        help="How requests share steps: continuous is for serving, the others are for comparison "
        f"({', '.join(name for name in POLICIES if name != 'continuous')}).",
    )
    kv_layout: str = option(
        "paged",
        choices=LAYOUTS,
        help="Where keys and values lie. paged: in pages that a page table names. virtual: each "
        "slot has an address range of "
        "its own, in which memory is mapped as tokens come.",
    )
    kv_policy: str | None = option(
        automatic="full",
        help="Which tokens of a request stay in the KV cache, if it does not ask for another "
        "policy (`kv_policy`): "
        f"{', '.join(KINDS)}, or JSON with its fields, such as "
        '{"kind": "streaming", "sinks": 4, "recent": 1020}.',
    )
    max_stream: int | None = option(
        low=1,
        high=2**20,
        automatic="8 times the context, at most 131072",
        help="Tokens of a request whose KV policy is window or streaming: it may go on beyond the "
        "context.",
    )
    prefix_caching: bool = option(
        True,
        help="Keep the KV cache of prompts, so that a prefix that was computed before is not "
        "computed again.",
    )
    prefix_index: str = option(
        "hash",
        choices=tuple(INDEXES),
        help="How a computed prefix is found: hash, by whole pages, or radix, by tokens, also "
        "within a page.",
    )
    queue_order: str = option(
        "arrival",
        choices=ORDERS,
        help="Which queued request of a tenant starts next: the first that came, or the one with "
        "the longest cached prefix.",
    )
    batch_window_ms: float | None = option(
        name="batch-window",
        low=0,
        high=10_000,
        automatic="50 with the policy dynamic",
        help="Milliseconds for which the policy dynamic lets a batch form that is not full.",
    )
    evict: bool = option(
        True,
        help="Running requests may be preempted. Off (--no-evict): a request starts only if there "
        "are KV pages for its prompt "
        "and max_tokens, and runs to its end.",
    )
    max_pinned: float = option(
        0.5,
        low=0,
        high=0.9,
        help="Part of the KV cache that prompt caches and retained prefixes may hold.",
    )
    session_retention_s: float = option(
        300.0,
        name="session-retention",
        low=0,
        high=86_400,
        help="Seconds for which the KV cache of a conversation is kept over others while its tool "
        "call is under way; 0: it is "
        "not.",
    )
    threads: int | None = option(
        low=1,
        high=256,
        automatic="the physical cores this process may use",
        short="CPU threads for computing.",
        help="CPU threads for computing, of each process.",
    )
    tensor_parallel: int = option(
        1,
        low=1,
        high=MAX_RANKS,
        short="Ranks (GPUs) that share each layer.",
        help="Processes that share every layer of the model: each has some heads and columns, and "
        "on a GPU machine a GPU.",
    )
    tensor_layout: str = option(
        "1d",
        choices=TENSOR_LAYOUTS,
        help="How these processes share a layer. 1d: each has some heads and columns. 2d: parts "
        "of the hidden size as well. "
        "gathered: each computes some of a step's tokens with weights that it gathers from all. "
        "phased: 1d for steps of few "
        "tokens, and like gathered for others, with the bits of 1d. auto: as `plan-layout` says.",
    )
    collectives: str = option(
        "auto",
        choices=COLLECTIVES,
        help="How GPUs that share layers exchange: ipc, through each other's memory, on one host; "
        "nccl, also between hosts. "
        "The bits are the same. auto: ipc if all are on one host.",
    )
    pipeline_parallel: int = option(
        1,
        low=1,
        high=MAX_RANKS,
        help="Stages of layers, each in processes of its own. Multiplies with --tensor-parallel.",
    )
    pipeline_layers: str | None = option(
        automatic="by the weights that a token is multiplied by",
        help="How many layers each stage has, like 12,18; or a file that measure-layers has "
        "written, by whose times stages "
        "take equally long.",
    )
    expert_parallel: bool = option(
        False,
        help="With --tensor-parallel: each process has some of the experts, instead of a part of "
        "each.",
    )
    remote_workers: int = option(
        0,
        low=0,
        high=MAX_RANKS - 1,
        help="So many of these processes come from other hosts: start each with `tidemill worker "
        "--join`.",
    )
    workers_address: str | None = option(
        automatic="none",
        help="HOST:PORT where they come to, by which other hosts reach this one.",
    )
    workers_key_file: str | None = option(
        automatic="none",
        help="A file with a key of 16 or more characters, the same on all hosts.",
    )
    data_parallel: int = option(
        1,
        section=SERVING,
        low=1,
        high=64,
        short="Engines side by side.",
        help="Engines that serve the model side by side, each with its weights and its KV cache, "
        "and with its share of the "
        "cores, or a GPU of its own. A request goes to the one that has its prefix, unless that "
        "one is too busy.",
    )
    prefill_engines: int = option(
        0,
        name="prefill",
        section=SERVING,
        low=0,
        high=64,
        help="Engines that compute prompts up to the first token, beside --decode engines that go "
        "on from there: long prompts "
        "do not hold up the tokens of others.",
    )
    decode_engines: int = option(
        0,
        name="decode",
        section=SERVING,
        low=0,
        high=64,
        help="Engines that go on with requests whose prompts --prefill engines have computed.",
    )
    kv_transfer_bytes: int | None = option(
        name="kv-transfer-memory",
        section=SERVING,
        automatic="256 MiB",
        help="Shared memory of each --prefill engine, for KV pages on their way to decode "
        "engines: at least a prompt's.",
    )
    chat_template: str | None = option(
        automatic="the model's own",
        help="A file with a Jinja chat template, the template itself, or a name that llama.cpp "
        "knows (chatml, llama3 …).",
    )
    chat_template_kwargs: str | None = option(
        help="Variables of the chat template as JSON, if a request does not give them, like "
        "'{\"enable_thinking\": false}'.",
    )
    fast_math: bool = option(
        False,
        help="On a GPU: use cuBLAS matmuls and flash-attn-4 where they are faster. Not "
        "batch-invariant. Refused on "
        "a CPU.",
    )
    nano_batching: str = option(
        "off",
        choices=("auto", "on", "off"),
        help="On a GPU: steps in two halves, so that one half's attention runs beside the other's "
        "matmuls. auto: at the sizes "
        "where a trial at start is at least 2 % faster. Tokens are the same.",
    )
    sampling_defaults: str = option(
        "model",
        help="Sampling parameters of requests that do not give them: the model's own, neutral "
        "(temperature 1), or JSON for "
        "some of them, like '{\"temperature\": 0.7}'; the others are then the model's.",
    )
    default_max_tokens: int | None = option(
        low=0,
        automatic="the model's max_new_tokens; 1024 below a billion parameters, else 16384",
        help="Most tokens of an answer to a request without max_tokens; 0: up to the end of the "
        "context.",
    )
    loras: tuple[str, ...] = option(
        (),
        name="lora",
        section=ADAPTERS,
        short="A LoRA adapter, as NAME=PATH.",
        help="A LoRA adapter, as NAME=PATH of a folder that PEFT has saved. Requests for the "
        "model NAME use it.",
    )
    max_loras: int | None = option(
        section=ADAPTERS,
        low=1,
        automatic="those given, at least 8; none without any",
        help="Adapters in memory at the same time. Further ones are read when they are asked for, "
        "in the place of the least "
        "recently used.",
    )
    max_lora_rank: int | None = option(
        section=ADAPTERS,
        low=1,
        high=MAX_LORA_RANK,
        automatic="64",
        help="Highest rank of an adapter; a GPU reserves memory for it.",
    )
    served_name: str | None = option(
        section=SERVING,
        automatic="the model as given",
        short="The model's name in the API.",
        help="The model's name in the API: what clients send as model. More names may follow, "
        "with commas between them.",
    )
    structured_backend: str = option(
        "llguidance",
        section=SERVING,
        choices=("llguidance", "xgrammar"),
        help="Library for structured output: llguidance, or xgrammar (slower, and only for "
        "trusted clients).",
    )
    max_waiting: int = option(
        4096,
        name="max-queued",
        section=SERVING,
        low=1,
        help="Most queued requests; further ones are refused with status 429.",
    )

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
                raise ConfigError(
                    f"An adapter is given as {text!r}.",
                    fix="Write NAME=PATH, each name once.",
                    param="loras",
                )
            found[name] = path
        return found


def at_least(name: str, value: int, low: int) -> int:
    if value < low:
        raise ConfigError(f"{name} is {value}.", fix=f"It must be at least {low}.", param=name)
    return value


def one_of(name: str, value: str, choices: Iterable[str]) -> str:
    if value not in choices:
        raise ConfigError(
            f"{name} {value!r} is not known.",
            fix=f"Choose one of {', '.join(choices)}.",
            param=name,
        )
    return value
