"""The options of an engine, and one resolve() that settles every value and records why."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

from tidemill.cache_layout import CacheLayout, StateLayout, lay_out, one_place
from tidemill.coverage import uncovered
from tidemill.errors import ConfigError
from tidemill.kv_format import FORMATS, ON_DEVICE, SHORT_NAMES
from tidemill.machine import Machine
from tidemill.model_config import ModelConfig, StateSpec

DTYPES = {"cpu": ("float32", "quantized"), "cuda": ("bfloat16",)}  # quantized: weights are multiplied in their 4 or 8 bits
GPU_PAGE = 64
_ROWS_OF_EXPERT, _MOST_TOKENS = 512, 8192  # of a step with experts on a GPU
STATE_INTERVAL = 256  # tokens between the states of a sequence that are kept; a multiple of every page size
_ENCODER_BUDGETS = {"cpu": 1024, "cuda": 8192}
_GPU_SPARE = 3 * 2**30  # CUDA graphs, the libraries' own memory, fragmentation
_MAX_COPY_ROWS = 2**31  # what the 32-bit coordinates of bulk copies into shared memory address
_MIN_LORAS = 8  # slots
MAX_LORA_RANK = 256
GIB = 2**30
MIB = 2**20
_DRAFT_TOKENS = {"cpu": 2**15, "cuda": 2**18}  # in the KV cache of a draft model, at most, or one whole context
SPECULATE: dict[str, tuple[str, ...]] = {  # drafters, by the option's value
    "auto": ("forced", "ngram"),
    "off": (),
    **{name: (name,) for name in ("forced", "ngram", "suffix", "medusa", "eagle", "exit")},
    "draft-model": ("forced", "draft-model"),
}
ACCEPTANCE = ("exact", "rejection")


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What a user may set. None means: derive it."""

    model: str = "smollm2"
    served_name: str | None = None
    load_format: str = "auto"  # dummy: random weights of the shape in config.json
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"  # a format of the KV cache, by its name or its short one
    page_size: int | None = None
    max_context: int | None = None
    max_requests: int | None = None
    max_waiting: int = 4096
    token_budget: int | None = None
    memory_bytes: int | None = None  # for weights, activations and KV cache together
    kv_memory_bytes: int | None = None
    policy: str = "continuous"
    prefix_caching: bool = True
    prefix_index: str = "hash"  # or radix
    queue_order: str = "arrival"  # or prefix
    threads: int | None = None
    fast_math: bool = False
    structured_backend: str = "llguidance"
    speculate: str = "auto"  # a drafter
    draft_model: str | None = None
    max_drafts: int | None = None  # tokens guessed for a request in a step
    draft_heads: str | None = None  # a folder that train-draft has written
    adaptive_drafts: bool = True
    acceptance: str = "exact"  # or rejection
    sampling_defaults: str = "model"  # or neutral
    default_max_tokens: int | None = None
    chat_template: str | None = None  # a file or the template itself, instead of the model's own
    loras: tuple[str, ...] = ()  # NAME=PATH of LoRA adapters
    max_loras: int | None = None
    max_lora_rank: int | None = None

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


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything settled. `reasons` maps a field to why it has its value."""

    device: str
    dtype: str
    kv_dtype: str
    page_size: int
    layout: CacheLayout  # how layers share pages
    num_pages: int  # that can hold tokens; the null page comes on top
    max_context: int
    max_requests: int
    max_waiting: int
    token_budget: int
    background_tokens: float  # a step, on average, for the background beside others
    background_budget: int  # a step, for the background alone
    policy: str
    prefix_caching: bool
    prefix_index: str
    queue_order: str
    threads: int
    fast_math: bool
    structured_backend: str
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int
    speculate: tuple[str, ...] = ()  # drafters, in the order in which they are asked
    max_drafts: int = 0
    adaptive_drafts: bool = True
    draft: EngineConfig | None = None  # of the draft model
    acceptance: str = "exact"
    draft_heads: str | None = None
    max_draws: int = 0  # tokens drawn in a step: one for each request, and one for each draft
    max_loras: int = 0  # slots for adapters; 0: none can be used
    max_lora_rank: int = 0
    lora_bytes: int = 0
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def memory_bytes(self) -> int:
        """All that the engine needs of its device."""
        spare = _GPU_SPARE if self.device == "cuda" else 0
        return self.weight_bytes + self.activation_bytes + self.kv_bytes + self.lora_bytes + self.draft_bytes + spare

    @property
    def draft_bytes(self) -> int:
        """Of the draft model: weights, activations and KV cache."""
        return _draft_bytes(self.draft)

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that fit, in requests that fill the whole context where layers have windows."""
        if not any(group.window for group in self.layout.groups):
            return self.num_pages // len(self.layout.groups) * self.page_size
        return self.num_pages * self.max_context // self.layout.num_pages_for(self.max_context, self.token_budget)

    @property
    def full_context_requests(self) -> float:
        """How many requests fit if each fills the whole context."""
        return self.num_kv_tokens / self.max_context


# ---- decisions: each returns a value and the reason for it, and refuses what cannot be

T = TypeVar("T")
Decision: TypeAlias = tuple[T, str]


def resolve(options: EngineOptions, model: ModelConfig, machine: Machine, draft_model: ModelConfig | None = None) -> EngineConfig:
    """Fill every "auto", check every given value, record why. `draft_model`: of `options.draft_model`."""
    reasons: dict[str, str] = {}

    def settle(name: str, decision: Decision[T]) -> T:
        value, reasons[name] = decision
        return value

    device = settle("device", decide_device(options, machine))
    dtype = settle("dtype", decide_dtype(options, device, model, machine))
    kv_dtype = settle("kv_dtype", decide_kv_dtype(options, dtype, device, model))
    page_size = settle("page_size", _page_size(options, device, model, kv_dtype))
    threads = settle("threads", _threads(options, machine))
    max_requests = settle("max_requests", _max_requests(options, device, model))
    context = settle("max_context", _wanted_context(options, model))
    token_budget = settle("token_budget", _token_budget(options, device, max_requests, context, model))
    speculate = settle("speculate", _speculate(options, model))
    max_drafts = settle("max_drafts", _max_drafts(options, speculate))
    acceptance = settle("acceptance", _acceptance(options, device, speculate))
    max_draws = max_requests if not speculate else min(token_budget, 2 * max_requests)
    background_tokens = settle("background_tokens", _background_tokens(device, token_budget, model))
    background_budget = settle("background_budget", _background_budget(device, token_budget, model))
    fast_math = settle("fast_math", _fast_math(options, device, model))
    max_loras = settle("max_loras", _max_loras(options, device, model))
    max_lora_rank = settle("max_lora_rank", _max_lora_rank(options, max_loras))
    lora_bytes = max_loras * max_lora_rank * model.lora_values_per_rank * (2 if device == "cuda" else 4)
    layout = settle("layout", _layout(model, kv_dtype, page_size, context))
    memory = _memory(options, device, dtype, kv_dtype, page_size, layout, context, max_draws, token_budget, model, machine)
    draft = _draft(options, speculate, draft_model, machine, device, context, max_requests, token_budget)
    memory = replace(memory, lora_bytes=lora_bytes, draft_bytes=_draft_bytes(draft))
    most_pages = max_requests * memory.num_pages_for(context)
    if model.pooler is not None:  # a step's, each sequence's last page partly filled and one kept back
        most_pages = min(most_pages, token_budget // page_size + 2 * max_requests)
    kv_bytes = settle("kv_bytes", _kv_bytes(options, memory, most_pages))
    context = settle("max_context", _possible_context(options, context, reasons["max_context"], kv_bytes, memory, model))
    num_pages = settle("num_pages", _num_pages(kv_bytes, memory, max_requests * memory.num_pages_for(context)))
    reasons["policy"] = "scheduling policy"
    prefix_caching = settle("prefix_caching", _prefix_caching(options, model))
    prefix_index = settle("prefix_index", _prefix_index(options, layout))
    queue_order = settle("queue_order", _queue_order(options, prefix_caching))
    return EngineConfig(
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=page_size,
        layout=layout,
        num_pages=num_pages,
        max_context=context,
        max_requests=max_requests,
        max_waiting=options.max_waiting,
        token_budget=token_budget,
        background_tokens=background_tokens,
        background_budget=background_budget,
        policy=options.policy,
        prefix_caching=prefix_caching,
        prefix_index=prefix_index,
        queue_order=queue_order,
        threads=threads,
        fast_math=fast_math,
        structured_backend=options.structured_backend,
        weight_bytes=memory.weight_bytes,
        kv_bytes=num_pages * memory.page_bytes,
        activation_bytes=memory.activation_bytes,
        speculate=speculate,
        max_drafts=max_drafts,
        adaptive_drafts=options.adaptive_drafts,
        draft=draft,
        acceptance=acceptance,
        draft_heads=options.draft_heads,
        max_draws=max_draws,
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        lora_bytes=lora_bytes,
        reasons=reasons,
    )


def decide_device(options: EngineOptions, machine: Machine) -> Decision[str]:
    asked = options.device
    if asked not in ("auto", *DTYPES):
        raise ConfigError(f"device {asked!r} is not available.", fix=f"Choose auto, {', '.join(DTYPES)}.", param="device")
    if asked == "cuda" and not machine.gpu:
        raise ConfigError(
            "device cuda was requested, but torch sees no GPU.",
            fix="Use --device cpu, or install torch for CUDA.",
            param="device",
        )
    if asked != "auto":
        return asked, "given"
    return ("cuda", machine.gpu) if machine.gpu else ("cpu", "no GPU")


def decide_dtype(options: EngineOptions, device: str, model: ModelConfig, machine: Machine) -> Decision[str]:
    asked, possible = options.dtype, DTYPES[device]
    if asked not in ("auto", *possible):
        fix = f"Choose auto, {', '.join(possible)}."
        raise ConfigError(f"dtype {asked!r} is not available on {device}.", fix=fix, param="dtype")
    if device == "cuda":
        return "bfloat16", "given" if asked != "auto" else "the format of the tensor cores"
    if asked == "quantized" and not machine.kernels:
        raise ConfigError(
            f"dtype quantized needs the compiled kernels: {machine.no_kernels}.",
            fix="Install with a C compiler, or use --dtype float32.",
            param="dtype",
        )
    if asked == "quantized" and not model.is_quantized:
        fix = "Use --dtype float32."
        raise ConfigError("dtype quantized is for quantized checkpoints, and this one is not.", fix=fix, param="dtype")
    if asked != "auto":
        return asked, "given"
    if not model.is_quantized:
        return "float32", "the checkpoint is not quantized; sums are exact float32"
    if machine.kernels:
        return "quantized", f"the checkpoint is quantized; {machine.kernels} kernels multiply 4- and 8-bit weights as they are"
    return "float32", f"no compiled kernels: {machine.no_kernels}"


def decide_kv_dtype(options: EngineOptions, dtype: str, device: str, model: ModelConfig) -> Decision[str]:
    if options.kv_dtype != "auto":
        return _given_kv_dtype(SHORT_NAMES.get(options.kv_dtype, options.kv_dtype), device, model), "given"
    if dtype == "float32":
        return "float32", "exact"
    return "bfloat16", "as the activations" if device == "cuda" else "half the memory, finer than the weights"


def _given_kv_dtype(name: str, device: str, model: ModelConfig) -> str:
    def refuse(why: str, fix: str) -> ConfigError:
        return ConfigError(f"kv_dtype {name}: {why}.", fix=fix, param="kv_dtype")

    if name not in FORMATS:
        raise refuse("there is no such format of the KV cache", f"Choose one of auto, {', '.join(FORMATS)}.")
    if name not in ON_DEVICE[device]:
        raise refuse(f"the kernels of {device} do not have it", f"Choose one of auto, {', '.join(ON_DEVICE[device])}.")
    if not model.attention_layers:
        raise refuse("this model has no keys and values", "Leave --kv-dtype out.")
    if model.pooler is not None and FORMATS[name].has_scales:
        raise refuse("an encoder keeps no keys and values from step to step", "Leave --kv-dtype out.")
    if FORMATS[name].bits < 8 and model.head_dim % 2:
        raise refuse(f"two values share a byte, and heads have {model.head_dim}", "Use --kv-dtype int8.")
    return name


def _page_size(options: EngineOptions, device: str, model: ModelConfig, kv_dtype: str) -> Decision[int]:
    if options.page_size is None and device == "cpu" and model.state_bytes > 64 * 16 * model.kv_bytes_per_token(kv_dtype) > 0:
        return 64, "tokens per KV page; with fewer, a state would take more than 64 pages, each with a page table"
    page_size = options.page_size or (GPU_PAGE if device == "cuda" else 16)
    if page_size not in (1, 2, 4, 8, 16, 32, 64):
        raise ConfigError(f"page_size is {page_size}.", fix="It must be a power of two from 1 to 64.", param="page_size")
    if device == "cuda" and page_size != GPU_PAGE:
        raise ConfigError(
            f"page_size is {page_size}; the GPU's kernels take pages of {GPU_PAGE}.",
            fix="Leave --page-size out.",
            param="page_size",
        )
    return page_size, "tokens per KV page" + (", the attention kernels' block" if device == "cuda" else "")


def _threads(options: EngineOptions, machine: Machine) -> Decision[int]:
    threads = options.threads or machine.num_cores
    if not 1 <= threads <= 256:
        raise ConfigError(f"threads is {options.threads}.", fix="It must be from 1 to 256.", param="threads")
    return threads, "given" if options.threads else "physical cores this process may use"


def _max_requests(options: EngineOptions, device: str, model: ModelConfig) -> Decision[int]:
    if options.max_requests is not None:
        return _at_least("max_requests", options.max_requests, 1), "given"
    if device == "cuda" and model.pooler is not None:
        return 512, "slots: inputs of two steps, one of which is computed while the next is gathered"
    if device == "cuda":
        return 256, "slots: the largest CUDA graph batch"
    return 64, "slots; more would only make each request slower on a CPU"


def _token_budget(options: EngineOptions, device: str, max_requests: int, context: int, model: ModelConfig) -> Decision[int]:
    if model.pooler is not None:
        return _encoder_budget(options, device, max_requests, context)
    if options.token_budget is None:
        default, why = 2048 if device == "cuda" else 256, "keeps a step short beside a long prompt"
        if device == "cuda" and (enough := _tokens_for_experts(model)) > default:
            default, why = enough, "a step reads every expert: enough for each, and still short beside a long prompt"
        return max(default, max_requests), f"tokens per step: {why}"
    if _at_least("token_budget", options.token_budget, 1) < max_requests:
        raise ConfigError(
            f"token_budget is {options.token_budget}, less than max_requests, {max_requests}: some requests would never decode.",
            fix="Raise --token-budget or lower --max-requests.",
            param="token_budget",
        )
    return options.token_budget, "given"


def _speculate(options: EngineOptions, model: ModelConfig) -> Decision[tuple[str, ...]]:
    if options.speculate not in SPECULATE:
        raise ConfigError(
            f"There is no drafter {options.speculate!r}.", fix=f"Choose one of {', '.join(SPECULATE)}.", param="speculate"
        )
    names = SPECULATE[options.speculate]
    why = "drafts are verified where that saves time" if options.speculate == "auto" else "given"
    if options.draft_model is not None and options.speculate == "auto":
        names, why = SPECULATE["draft-model"], "a draft model was given"
    if ("draft-model" in names) != (options.draft_model is not None):
        raise ConfigError(
            f"speculate is {options.speculate}, and a draft model was {'given' if options.draft_model else 'not given'}.",
            fix="Give --draft-model PATH together with --speculate draft-model.",
            param="draft_model",
        )
    if model.pooler is not None:
        return (), "the model generates nothing"
    if names and model.state_layers:
        if options.speculate != "auto" or options.draft_model is not None:
            raise ConfigError(
                "This model keeps states of constant size, which cannot be taken back where a draft was wrong.",
                fix="Use --speculate off.",
                param="speculate",
            )
        return (), "states of constant size cannot be taken back where a draft was wrong"
    return names, why


def _max_drafts(options: EngineOptions, speculate: tuple[str, ...]) -> Decision[int]:
    if not speculate:
        return 0, "no drafts"
    if options.max_drafts is None:
        return 8, "drafts for a request in a step, at most"
    if not 1 <= options.max_drafts <= 64:
        raise ConfigError(f"max_drafts is {options.max_drafts}.", fix="It must be from 1 to 64.", param="max_drafts")
    return options.max_drafts, "given"


def _draft(
    options: EngineOptions, speculate: tuple[str, ...], model: ModelConfig | None, machine: Machine,
    device: str, context: int, max_requests: int, token_budget: int,
) -> EngineConfig | None:  # fmt: skip
    """The draft model's own settings: as many rows and tokens a step as the target has, and a small KV cache."""
    if "draft-model" not in speculate or options.draft_model is None:
        return None
    if model is None:
        raise ConfigError("The draft model's shape is not known.", param="draft_model")
    name = options.draft_model
    if model.pooler is not None or model.state_layers:
        why = "generates nothing" if model.pooler is not None else "keeps states of constant size, which cannot be taken back"
        raise ConfigError(f"The draft model {name} {why}.", fix="Use a decoder with attention only.", param="draft_model")
    model = replace(model, max_context=min(model.max_context, context))
    given = replace(
        options, model=name, draft_model=None, speculate="off", dtype="auto", device=device, loras=(), max_loras=None,
        max_context=None, max_requests=max_requests, token_budget=token_budget, memory_bytes=None, prefix_index="hash",
        queue_order="arrival", acceptance="exact", draft_heads=None, kv_dtype="auto",
    )  # fmt: skip
    kv_dtype = decide_kv_dtype(given, decide_dtype(given, device, model, machine)[0], device, model)[0]
    num_tokens = max(model.max_context, min(max_requests * model.max_context, _DRAFT_TOKENS[device]))
    return resolve(replace(given, kv_memory_bytes=num_tokens * model.kv_bytes_per_token(kv_dtype)), model, machine)


def _draft_bytes(draft: EngineConfig | None) -> int:
    return 0 if draft is None else draft.weight_bytes + draft.activation_bytes + draft.kv_bytes


def _acceptance(options: EngineOptions, device: str, speculate: tuple[str, ...]) -> Decision[str]:
    asked = options.acceptance
    if asked not in ACCEPTANCE:
        fix = f"Choose one of {', '.join(ACCEPTANCE)}."
        raise ConfigError(f"acceptance {asked!r} is not known.", fix=fix, param="acceptance")
    if asked == "exact":
        return asked, "tokens are those without drafts"
    if device == "cuda":
        raise ConfigError("acceptance rejection is for the CPU only.", fix="Use --acceptance exact.", param="acceptance")
    if not speculate:
        raise ConfigError(
            "acceptance is rejection, but no tokens are guessed.",
            fix="Use --acceptance exact, or a model and --speculate with a drafter.",
            param="acceptance",
        )
    return asked, "sampled tokens are distributed as without drafts"


def _tokens_for_experts(model: ModelConfig) -> int:
    """So many that each expert multiplies _ROWS_OF_EXPERT on average: with fewer, its weights are read too often.

    On an H200, experts of Qwen3-30B-A3B's shape take 0.22 us a token and layer with 2,048 tokens a step, 0.18 with 4,096 and 0.16
    with 8,192; a step of 8,192 takes about 0.12 s, as long as one of 2,048 through a dense model of 18B."""
    wanted = max((_ROWS_OF_EXPERT * moe.num_experts // moe.top_k for moe in model.experts if moe), default=0)
    return min(wanted, _MOST_TOKENS)


def _encoder_budget(options: EngineOptions, device: str, max_requests: int, context: int) -> Decision[int]:
    least = max(context, max_requests)
    if options.token_budget is None:
        return max(_ENCODER_BUDGETS[device], least), "tokens per step: an encoder computes an input whole"
    if options.token_budget < least:
        raise ConfigError(
            f"token_budget is {options.token_budget}; an encoder computes an input whole, so it must hold {least} tokens.",
            fix=f"Raise --token-budget to {least}, or lower --max-context and --max-requests.",
            param="token_budget",
        )
    return options.token_budget, "given"


def _prefix_caching(options: EngineOptions, model: ModelConfig) -> Decision[bool]:
    if model.pooler is not None:
        return False, "no prefix caching: a token of an encoder sees those after it, too"
    return options.prefix_caching, "prefix caching: identical prefixes are computed once"


def _prefix_index(options: EngineOptions, layout: CacheLayout) -> Decision[str]:
    if options.prefix_index == "hash":
        return "hash", "prefixes are found by hashes of whole pages"
    if options.prefix_index != "radix":
        raise ConfigError(
            f"prefix_index {options.prefix_index!r} is not known.", fix="Choose hash or radix.", param="prefix_index"
        )
    if layout.states is not None:
        return "radix", "prefixes are found by their tokens; a hit ends where a state was kept"
    return "radix", "prefixes are found by their tokens, also within a page, of which a copy is made"


def _queue_order(options: EngineOptions, prefix_caching: bool) -> Decision[str]:
    if options.queue_order == "arrival":
        return "arrival", "queued requests start in the order in which they came"
    if options.queue_order != "prefix":
        raise ConfigError(
            f"queue_order {options.queue_order!r} is not known.", fix="Choose arrival or prefix.", param="queue_order"
        )
    if not prefix_caching:
        raise ConfigError(
            "queue_order is prefix, but there is no prefix caching.",
            fix="Use --queue-order arrival, or a model and options with prefix caching.",
            param="queue_order",
        )
    return "prefix", "queued requests with the longest cached prefix start first"


def _background_tokens(device: str, token_budget: int, model: ModelConfig) -> Decision[float]:
    rest = "background requests hardly slow down others, and never stop"
    if model.pooler is not None:
        return token_budget / 32, f"added up until an input fits: {rest}"
    if device == "cuda":
        return token_budget / 32, f"a step loads the weights anyway: {rest}"
    return 1 / 8, f"each token lengthens a step on a CPU: {rest}"


def _background_budget(device: str, token_budget: int, model: ModelConfig) -> Decision[int]:
    why = "a request that arrives meanwhile is queued for one step"
    if device == "cuda" or model.pooler is not None:
        return token_budget, why
    return min(token_budget, 64), f"{why}; longer ones are no faster on a CPU"


def _wanted_context(options: EngineOptions, model: ModelConfig) -> Decision[int]:
    if options.max_context is None:
        return _at_least("max_context", model.max_context, 2), "the model's own"
    if _at_least("max_context", options.max_context, 2) > model.max_context:
        raise ConfigError(
            f"max_context is {options.max_context}, but the model was made for {model.max_context}.",
            fix=f"Use --max-context {model.max_context} or less.",
            param="max_context",
        )
    return options.max_context, "given"


def _fast_math(options: EngineOptions, device: str, model: ModelConfig) -> Decision[bool]:
    if options.fast_math and device != "cuda" and not uncovered("C", model.attention_layers):
        raise ConfigError(
            "fast_math is for GPUs, and on a CPU for models whose attention the compiled kernels do not have.",
            fix="Leave --fast-math out.",
            param="fast_math",
        )
    return options.fast_math, "given: tokens may depend on the batch" if options.fast_math else "off: batch-invariant"


def _max_loras(options: EngineOptions, device: str, model: ModelConfig) -> Decision[int]:
    num = len(options.lora_paths)
    if device == "cuda" and model.pooler is not None and (num or options.max_loras):
        raise ConfigError("Adapters of encoders do not run on a GPU yet.", fix="Use --device cpu.", param="max_loras")
    if options.max_loras is not None:
        return _at_least("max_loras", options.max_loras, 1), "given"
    return (max(num, _MIN_LORAS), "the adapters given, and some more") if num else (0, "no adapters")


def _max_lora_rank(options: EngineOptions, max_loras: int) -> Decision[int]:
    rank = options.max_lora_rank or 64
    if not 1 <= rank <= MAX_LORA_RANK:
        raise ConfigError(f"max_lora_rank is {rank}.", fix=f"It must be 1 to {MAX_LORA_RANK}.", param="max_lora_rank")
    return rank if max_loras else 0, "given" if options.max_lora_rank else "enough for most adapters"


def _layout(model: ModelConfig, kv_dtype: str, page_size: int, context: int) -> Decision[CacheLayout]:
    if model.pooler is not None:
        return one_place(model.num_layers, page_size), "an encoder's layers use one place in turn"
    layout = lay_out([spec.window for spec in model.attention_layers], page_size, context)
    windowed = [group.window for group in layout.groups if group.window]
    if model.state_layers:
        page_bytes = _kv_page_bytes(model, kv_dtype, page_size, layout)
        states = _states(model, page_bytes)
        each = f"{fmt_bytes(states.block_bytes)} in {states.block_pages} pages"
        return layout.with_states(states, STATE_INTERVAL), f"a state has {each}, and is kept every {STATE_INTERVAL} tokens"
    if not windowed:
        return layout, "one page table for all layers"
    per_page = f"pages hold {layout.layers_per_page} layers"
    return layout, f"{per_page}; {len(windowed)} of {len(layout.groups)} page tables give back what their window has passed"


def _states(model: ModelConfig, page_bytes: int) -> StateLayout:
    """In pages as large as those of keys and values, if there are any."""
    sizes = [spec.piece_bytes if isinstance(spec, StateSpec) else [] for spec in model.layers]
    largest = max(size for layer in sizes for size in layer)
    if page_bytes and (page_bytes < largest + 63 or page_bytes % 64):
        raise ConfigError(
            f"A page of {page_bytes} bytes does not hold the largest piece of a layer's state, {largest} bytes.",
            fix="Use a larger --page-size.",
            param="page_size",
        )
    return StateLayout.pack(sizes, page_bytes)


def sequence_bytes(options: EngineOptions, model: ModelConfig, device: str, kv_dtype: str, num_tokens: int) -> Decision[int]:
    """KV memory that a sequence of so many tokens holds at most, and how it is laid out."""
    page_size, _ = _page_size(options, device, model, kv_dtype)
    layout, why = _layout(model, kv_dtype, page_size, num_tokens)
    token_budget, _ = _token_budget(options, device, _max_requests(options, device, model)[0], num_tokens, model)
    return layout.num_pages_for(num_tokens, token_budget) * _page_bytes(model, kv_dtype, page_size, layout), why


def _page_bytes(model: ModelConfig, kv_dtype: str, page_size: int, layout: CacheLayout) -> int:
    return layout.states.page_bytes if layout.states else _kv_page_bytes(model, kv_dtype, page_size, layout)


def _kv_page_bytes(model: ModelConfig, kv_dtype: str, page_size: int, layout: CacheLayout) -> int:
    num = model.num_kv_layers
    return model.kv_bytes_per_token(kv_dtype) // num * layout.layers_per_page * page_size if num else 0


@dataclass(frozen=True, kw_only=True)
class _Memory:
    """What the KV cache shares memory with, and the size of a page."""

    available_bytes: int
    weight_bytes: int
    activation_bytes: int
    page_bytes: int
    page_size: int
    layout: CacheLayout
    token_budget: int
    max_pages: int | None  # what the kernels can address, where there is a limit
    gpu: str  # its name and size for messages, or empty
    is_limited: bool  # a limit was given, below what is free
    lora_bytes: int = 0
    draft_bytes: int = 0

    def num_pages_for(self, num_tokens: int) -> int:
        """What a sequence of so many tokens holds at most."""
        return self.layout.num_pages_for(num_tokens, self.token_budget)

    @property
    def spare_bytes(self) -> int:
        return _GPU_SPARE if self.gpu else 0

    @property
    def left_bytes(self) -> int:
        return self.available_bytes - self.weight_bytes - self.activation_bytes - self.lora_bytes - self.draft_bytes

    @property
    def needs(self) -> str:
        adapters = f", {fmt_bytes(self.lora_bytes)} for adapters" if self.lora_bytes else ""
        draft = f", {fmt_bytes(self.draft_bytes)} for its draft model" if self.draft_bytes else ""
        return f"The model needs {fmt_bytes(self.weight_bytes)} for weights{adapters}{draft}"

    @property
    def free(self) -> str:
        if self.is_limited:
            return f"it may use {fmt_bytes(self.available_bytes)}."
        return f"{fmt_bytes(self.available_bytes)} are free" + (f" of the {self.gpu}." if self.gpu else ".")


def _memory(
    options: EngineOptions, device: str, dtype: str, kv_dtype: str, page_size: int, layout: CacheLayout, context: int,
    max_draws: int, token_budget: int, model: ModelConfig, machine: Machine,
) -> _Memory:  # fmt: skip
    on_gpu, max_pages = device == "cuda", None
    activations = model.activation_bytes(max(token_budget, 256), max_draws)
    if on_gpu and model.attention_layers:
        # Partial results of attention: one for every 512 tokens of context.
        activations += 4 * max_draws * -(-context // 512) * model.num_heads * (model.head_dim + 2)
        # A bulk copy addresses a row of head_dim values by a 32-bit signed number; the null page comes on top.
        max_pages = (_MAX_COPY_ROWS - 1) // (2 * layout.layers_per_page * model.num_kv_heads * page_size) - 1
    free = machine.gpu_free_bytes if on_gpu else machine.available_bytes
    limit = free if options.memory_bytes is None else options.memory_bytes
    return _Memory(
        available_bytes=min(free, limit),
        is_limited=limit < free,
        weight_bytes=model.weight_bytes(dtype, bool(machine.kernels)),
        activation_bytes=activations,
        page_bytes=_page_bytes(model, kv_dtype, page_size, layout),
        page_size=page_size,
        layout=layout,
        token_budget=token_budget,
        max_pages=max_pages,
        gpu=f"{fmt_bytes(machine.gpu_bytes)} of {machine.gpu}" if on_gpu else "",
    )


def _kv_bytes(options: EngineOptions, memory: _Memory, wanted_pages: int) -> Decision[int]:
    """Memory for the KV cache, before it is rounded to pages."""
    if options.kv_memory_bytes is not None:
        return options.kv_memory_bytes, "given"
    room = memory.left_bytes - memory.spare_bytes
    if room < memory.page_bytes:
        more = "raise the limit" if memory.is_limited else "free memory"
        raise ConfigError(
            f"{memory.needs} and {fmt_bytes(memory.activation_bytes)} for activations; {memory.free}",
            fix=f"Use a smaller model, lower --max-requests or --token-budget, or {more}.",
            param="memory_bytes" if memory.is_limited else None,
        )
    limits = [(wanted_pages * memory.page_bytes, "every slot at full context")]
    if memory.is_limited:
        limits.append((room, f"what weights and activations leave of {fmt_bytes(memory.available_bytes)}"))
    elif memory.gpu:
        limits.append((room, "what is left of the GPU's memory"))
    else:
        limits.append((min(room // 2, 4 * GIB), "half of what memory is left after weights and activations, at most 4 GiB"))
    if memory.max_pages is not None:
        limits.append((memory.max_pages * memory.page_bytes, "the most that the attention kernels' 32-bit coordinates address"))
    return min(limits, key=lambda limit: limit[0])


def _possible_context(
    options: EngineOptions, wanted: int, why: str, kv_bytes: int, memory: _Memory, model: ModelConfig
) -> Decision[int]:
    """The context, or less if the KV memory does not hold one request of it."""
    num_pages, page_size = kv_bytes // memory.page_bytes, memory.page_size
    min_pages = memory.num_pages_for(min(wanted, 2 * page_size))
    if num_pages < min_pages:
        raise ConfigError(
            f"{fmt_bytes(kv_bytes)} of KV memory hold {num_pages} pages of {fmt_bytes(memory.page_bytes)}.",
            fix=f"Give at least {fmt_bytes(min_pages * memory.page_bytes)} with --kv-memory.",
            param="kv_memory_bytes",
        )
    if memory.num_pages_for(wanted) <= num_pages:
        return wanted, why
    possible = bisect_right(range(page_size, wanted, page_size), num_pages, key=memory.num_pages_for) * page_size
    if options.max_context is not None:
        raise ConfigError(
            f"A context of {wanted} tokens needs {fmt_bytes(memory.num_pages_for(wanted) * memory.page_bytes)} of KV memory; "
            f"{fmt_bytes(kv_bytes)} are reserved.",
            fix=f"Use --max-context {possible} or raise --kv-memory.",
            param="max_context",
        )
    return possible, f"what {fmt_bytes(kv_bytes)} of KV memory can hold; the model's own is {model.max_context}"


def _num_pages(kv_bytes: int, memory: _Memory, most: int) -> Decision[int]:
    """Pages for the KV memory, but no more than all slots could fill."""
    num_pages = min(kv_bytes // memory.page_bytes, most)
    num_bytes = num_pages * memory.page_bytes
    if memory.max_pages is not None and num_pages > memory.max_pages:
        raise ConfigError(
            f"{fmt_bytes(num_bytes)} of KV memory are {num_pages:,} pages; the attention kernels' 32-bit coordinates address "
            f"{memory.max_pages:,}.",
            fix=f"Give at most {memory.max_pages * memory.page_bytes // MIB}M with --kv-memory, or leave it out.",
            param="kv_memory_bytes",
        )
    if (memory.gpu or memory.is_limited) and num_bytes > memory.left_bytes:
        raise ConfigError(
            f"{memory.needs}, {fmt_bytes(memory.activation_bytes)} for activations and {fmt_bytes(num_bytes)} of KV memory; "
            f"{memory.free}",
            fix="Give less with --kv-memory, use a smaller model, or "
            + ("raise the limit." if memory.is_limited else "stop what else uses the GPU."),
            param="kv_memory_bytes",
        )
    return num_pages, f"{fmt_bytes(kv_bytes)} / {fmt_bytes(memory.page_bytes)} a page"


def _at_least(name: str, value: int, low: int) -> int:
    if value < low:
        raise ConfigError(f"{name} is {value}.", fix=f"It must be at least {low}.", param=name)
    return value


def fmt_bytes(num_bytes: float) -> str:
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", 1024)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}" if unit == "GiB" else f"{num_bytes / size:.0f} {unit}"
    return f"{num_bytes:.0f} B"


def parse_bytes(text: str) -> int:
    """'512M', '4G', '1.5GiB', '1000000'."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)i?b?\s*", text.lower())
    if not match:
        raise ConfigError(f"{text!r} is not an amount of memory.", fix="Write it like 512M or 4G.")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2] or " "))
