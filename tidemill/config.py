"""The options of an engine, the shape of a model, and one resolve() that settles every value and records why."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from tidemill.errors import ConfigError, InvalidRequest
from tidemill.machine import Machine

DTYPES = {"cpu": ("float32", "quantized"), "cuda": ("bfloat16",)}  # quantized: weights are multiplied in their 4 or 8 bits
KV_BYTES = {"float32": 4, "bfloat16": 2}
PLAIN_TYPES = {"F64": 4, "F32": 4, "F16": 2, "BF16": 2}  # stored types that are numbers, and their resident bytes
# Bytes a value of stored types that stay quantized: codes, and two or four bytes of scale and offset for 32 of them.
QUANTIZED_TYPES = {
    "Q4_0": 20 / 32, "Q4_1": 20 / 32, "Q4_K": 20 / 32, "Q8_0": 34 / 32, "Q5_0": 34 / 32, "Q5_1": 36 / 32, "Q5_K": 36 / 32,
}  # fmt: skip
_OTHER_QUANTIZED = 34 / 32  # rounded anew to 8 bits
GPU_PAGE = 64
_ENCODER_BUDGET = 1024
_GPU_SPARE = 3 * 2**30  # CUDA graphs, the libraries' own memory, fragmentation
_MAX_LAYERS = 2**14
_MAX_COPY_ROWS = 2**31  # what the 32-bit coordinates of bulk copies into shared memory address
GIB = 2**30
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How positions beyond the original context are squeezed. Field names follow the published configurations."""

    kind: str  # linear, llama3, yarn
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclass(frozen=True, kw_only=True)
class Rotation:
    """A rotary position embedding of the first `num_dims` dimensions of a head."""

    num_dims: int
    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What the attention of a layer computes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of the scores
    rotation: Rotation | None  # None: queries and keys are not rotated
    window: int = 0  # a query sees this many keys, its own the last; 0: all before it
    softcap: float = 0.0  # a score s becomes softcap * tanh(s / softcap); 0: it stays
    has_sinks: bool = False  # a learned score for each head joins the softmax, without a value
    is_bidirectional: bool = False  # a query sees all keys that its step has of the sequence, not only those before it
    has_distance_bias: bool = False  # a learned number for each head and distance between query and key is added to the score

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            _check_size(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"The model's configuration has {self.num_heads} query heads over {self.num_kv_heads} KV heads.",
                fix="The first must be a multiple of the second.",
            )
        assert not (self.is_bidirectional and self.window), "no kernel has both"


def _check_size(name: str, value: object, most: int = 2**31) -> None:
    if not isinstance(value, int) or not 0 < value <= most:
        raise ConfigError(f"The model's configuration has {name} = {value!r}.", fix=f"It must be an integer from 1 to {most}.")


def alike(num_layers: int, spec: AttentionSpec) -> tuple[AttentionSpec, ...]:
    """The layers of a model whose layers do not differ."""
    _check_size("num_layers", num_layers, _MAX_LAYERS)
    return (spec,) * num_layers


@dataclass(frozen=True, kw_only=True)
class Pooler:
    """What an encoder makes of its hidden states: an embedding, or the scores of a cross-encoder."""

    how: str  # mean, cls (the first token's) or score
    is_normalized: bool = True  # embeddings have length 1
    num_labels: int = 0  # of a cross-encoder
    activation: str = "identity"  # of its scores: identity or sigmoid


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a model, whatever file it came from."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[AttentionSpec, ...]  # one for each layer; KV heads and their size are the same in all
    max_context: int
    norm_eps: float
    tie_embeddings: bool = False
    attention_bias: bool = False  # of q, k and v
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # of each query and key head, before rotation
    act: str = "silu"  # of the gate, a name in kernels/glu.py
    logits_softcap: float = 0.0  # a logit l becomes softcap * tanh(l / softcap); 0: it stays
    is_gated: bool = True  # the feed-forward block
    num_positions: int = 0  # learned; 0: none
    num_token_types: int = 0  # learned, of the texts of a pair
    pooler: Pooler | None = None  # an encoder has one; None: the model generates text
    stored: dict[str, int] = field(default_factory=dict)  # values in the checkpoint by stored type
    notes: tuple[str, ...] = ()  # what a user should know about how this file was read

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers"):
            _check_size(name, getattr(self, name))
        if len({(spec.num_heads, spec.num_kv_heads, spec.head_dim) for spec in self.layers}) > 1:
            raise ConfigError("The model's layers have different numbers or sizes of heads, which is not supported.")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        return self.layers[0].num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.layers[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.layers[0].head_dim

    @property
    def num_kv_layers(self) -> int:
        """Layers whose keys and values are kept. An encoder computes a sequence in one step: its layers use the same memory."""
        return self.num_layers if self.pooler is None else 1

    @property
    def own_pooling(self) -> str | None:
        """What it does with a prompt: pool its hidden states, or (None) generate."""
        return None if self.pooler is None else self.pooler.how

    def check_pooling(self, pooling: str | None) -> None:
        """Raises unless the model can do it. None: generate."""
        own = self.own_pooling
        if pooling is None and own is not None:
            does = "scores pairs of texts" if own == "score" else "makes embeddings"
            fix = "Use /v1/score or /v1/rerank." if own == "score" else "Use /v1/embeddings, /v1/score or /v1/rerank."
            raise InvalidRequest(f"This model is an encoder: it {does} and generates no text.", fix=fix, param="model")
        if pooling == "score" and own != "score":
            raise InvalidRequest("This model is not a cross-encoder: it has no scores.", fix="Use embeddings.", param="pooling")
        if pooling not in (None, "score") and own == "score":
            fix = "Use /v1/score or /v1/rerank, or serve an embedding model."
            raise InvalidRequest("This model is a cross-encoder: it has scores of pairs, no embeddings.", fix=fix, param="model")
        if pooling == "cls" and own is None:
            fix = "Use mean or last."
            raise InvalidRequest("The first token of a causal model knows nothing of the others.", fix=fix, param="pooling")

    @property
    def num_parameters(self) -> int:
        """Stored values: a tied embedding counts once."""
        h, d = self.hidden_size, self.head_dim
        attention = h * d * (self.num_heads + 2 * self.num_kv_heads) + h * d * self.num_heads
        layer = attention + (3 if self.is_gated else 2) * h * self.intermediate_size + 2 * h
        embeddings = (self.vocab_size * (1 if self.tie_embeddings else 2) + self.num_positions + self.num_token_types) * h
        return self.num_layers * layer + embeddings + h

    @property
    def is_quantized(self) -> bool:
        return any(kind not in PLAIN_TYPES for kind in self.stored)

    def weight_bytes(self, dtype: str, compiled: bool) -> int:
        """Resident bytes. `compiled`: with the compiled kernels, which take 16-bit weights as they are."""
        if dtype == "bfloat16":
            return 2 * self.num_parameters
        total = 0.0
        for kind, num_values in (self.stored or {"F32": self.num_parameters}).items():
            if kind in PLAIN_TYPES:
                total += num_values * (PLAIN_TYPES[kind] if compiled else 4)
            else:
                total += num_values * (QUANTIZED_TYPES.get(kind, _OTHER_QUANTIZED) if dtype == "quantized" else 4)
        return int(total)

    def unpacked_types(self, dtype: str) -> list[str]:
        """Stored types that take more memory than their files do: no kernel multiplies them as they are."""
        other = [kind for kind in self.stored if kind not in PLAIN_TYPES and kind not in QUANTIZED_TYPES]
        return sorted(other) if dtype == "quantized" else []

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Of one sequence. From the KV heads, not from hidden_size, which would ignore grouping."""
        return 2 * self.num_kv_heads * self.head_dim * self.num_kv_layers * KV_BYTES[kv_dtype]

    def activation_bytes(self, num_tokens: int, num_samples: int) -> int:
        """Peak of one step: the widest layer's intermediates, and the logits with one working copy."""
        width = 4 * self.hidden_size + 3 * self.intermediate_size + 3 * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return 4 * (num_tokens * width + 2 * num_samples * self.vocab_size)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What a user may set. None means: derive it."""

    model: str = "smollm2"
    served_name: str | None = None
    load_format: str = "auto"  # dummy: random weights of the shape in config.json
    device: str = "auto"
    dtype: str = "auto"
    page_size: int | None = None
    max_context: int | None = None
    max_requests: int | None = None
    max_waiting: int = 4096
    token_budget: int | None = None
    memory_bytes: int | None = None  # for weights, activations and KV cache together
    kv_memory_bytes: int | None = None
    policy: str = "continuous"
    prefix_caching: bool = True
    threads: int | None = None
    fast_math: bool = False
    structured_backend: str = "llguidance"
    sampling_defaults: str = "model"  # or neutral
    default_max_tokens: int | None = None
    chat_template: str | None = None  # a file or the template itself, instead of the model's own


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything settled. `reasons` maps a field to why it has its value."""

    device: str
    dtype: str
    kv_dtype: str
    page_size: int
    num_pages: int  # that can hold tokens; the null page comes on top
    max_context: int
    max_requests: int
    max_waiting: int
    token_budget: int
    background_tokens: float  # a step, on average, for the background beside others
    background_budget: int  # a step, for the background alone
    policy: str
    prefix_caching: bool
    threads: int
    fast_math: bool
    structured_backend: str
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def memory_bytes(self) -> int:
        """All that the engine needs of its device."""
        spare = _GPU_SPARE if self.device == "cuda" else 0
        return self.weight_bytes + self.activation_bytes + self.kv_bytes + spare

    @property
    def num_kv_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def full_context_requests(self) -> float:
        """How many requests fit if each fills the whole context."""
        return self.num_kv_tokens / self.max_context


# ---- decisions: each returns a value and the reason for it, and refuses what cannot be

T = TypeVar("T")
Decision: TypeAlias = tuple[T, str]


def resolve(options: EngineOptions, model: ModelConfig, machine: Machine) -> EngineConfig:
    """Fill every "auto", check every given value, record why."""
    reasons: dict[str, str] = {}

    def settle(name: str, decision: Decision[T]) -> T:
        value, reasons[name] = decision
        return value

    device = settle("device", decide_device(options, machine, model))
    dtype = settle("dtype", decide_dtype(options, device, model, machine))
    kv_dtype = settle("kv_dtype", decide_kv_dtype(dtype, device))
    page_size = settle("page_size", _page_size(options, device))
    threads = settle("threads", _threads(options, machine))
    max_requests = settle("max_requests", _max_requests(options, device))
    context = settle("max_context", _wanted_context(options, model))
    token_budget = settle("token_budget", _token_budget(options, device, max_requests, context, model))
    background_tokens = settle("background_tokens", _background_tokens(device, token_budget, model))
    background_budget = settle("background_budget", _background_budget(device, token_budget, model))
    fast_math = settle("fast_math", _fast_math(options, device))
    memory = _memory(options, device, dtype, kv_dtype, page_size, context, max_requests, token_budget, model, machine)
    num_tokens, num_pages_of_each = max_requests * context, -(-context // page_size)
    if model.pooler is not None:  # a step's, each sequence's last page partly filled and one kept back
        num_tokens = min(num_tokens, token_budget + 2 * max_requests * page_size)
    kv_bytes = settle("kv_bytes", _kv_bytes(options, memory, num_tokens))
    context = settle("max_context", _possible_context(options, context, reasons["max_context"], kv_bytes, memory, model))
    num_pages = settle("num_pages", _num_pages(kv_bytes, memory, max_requests * num_pages_of_each))
    reasons["policy"] = "scheduling policy"
    prefix_caching = settle("prefix_caching", _prefix_caching(options, model))
    return EngineConfig(
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        page_size=page_size,
        num_pages=num_pages,
        max_context=context,
        max_requests=max_requests,
        max_waiting=options.max_waiting,
        token_budget=token_budget,
        background_tokens=background_tokens,
        background_budget=background_budget,
        policy=options.policy,
        prefix_caching=prefix_caching,
        threads=threads,
        fast_math=fast_math,
        structured_backend=options.structured_backend,
        weight_bytes=memory.weight_bytes,
        kv_bytes=num_pages * memory.page_bytes,
        activation_bytes=memory.activation_bytes,
        reasons=reasons,
    )


def decide_device(options: EngineOptions, machine: Machine, model: ModelConfig | None = None) -> Decision[str]:
    asked, is_encoder = options.device, model is not None and model.pooler is not None
    if asked not in ("auto", *DTYPES):
        raise ConfigError(f"device {asked!r} is not available.", fix=f"Choose auto, {', '.join(DTYPES)}.", param="device")
    if asked == "cuda" and not machine.gpu:
        raise ConfigError(
            "device cuda was requested, but torch sees no GPU.",
            fix="Use --device cpu, or install torch for CUDA.",
            param="device",
        )
    if asked == "cuda" and is_encoder:
        raise ConfigError("Encoders are not supported on a GPU yet.", fix="Use --device cpu.", param="device")
    if asked != "auto":
        return asked, "given"
    if is_encoder:
        return "cpu", "encoders are not supported on a GPU yet"
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


def decide_kv_dtype(dtype: str, device: str) -> Decision[str]:
    if dtype == "float32":
        return "float32", "exact"
    return "bfloat16", "as the activations" if device == "cuda" else "half the memory, finer than the weights"


def _page_size(options: EngineOptions, device: str) -> Decision[int]:
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


def _max_requests(options: EngineOptions, device: str) -> Decision[int]:
    if options.max_requests is not None:
        return _at_least("max_requests", options.max_requests, 1), "given"
    if device == "cuda":
        return 256, "slots: the largest CUDA graph batch"
    return 64, "slots; more would only make each request slower on a CPU"


def _token_budget(options: EngineOptions, device: str, max_requests: int, context: int, model: ModelConfig) -> Decision[int]:
    if model.pooler is not None:
        return _encoder_budget(options, max_requests, context)
    if options.token_budget is None:
        default = 2048 if device == "cuda" else 256
        return max(default, max_requests), "tokens per step: keeps a step short beside a long prompt"
    if _at_least("token_budget", options.token_budget, 1) < max_requests:
        raise ConfigError(
            f"token_budget is {options.token_budget}, less than max_requests, {max_requests}: some requests would never decode.",
            fix="Raise --token-budget or lower --max-requests.",
            param="token_budget",
        )
    return options.token_budget, "given"


def _encoder_budget(options: EngineOptions, max_requests: int, context: int) -> Decision[int]:
    least = max(context, max_requests)
    if options.token_budget is None:
        return max(_ENCODER_BUDGET, least), "tokens per step: an encoder computes an input whole"
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


def _fast_math(options: EngineOptions, device: str) -> Decision[bool]:
    if options.fast_math and device != "cuda":
        raise ConfigError("fast_math is for GPUs.", fix="Leave --fast-math out.", param="fast_math")
    return options.fast_math, "given: tokens may depend on the batch" if options.fast_math else "off: batch-invariant"


@dataclass(frozen=True, kw_only=True)
class _Memory:
    """What the KV cache shares memory with, and the size of a page."""

    available_bytes: int
    weight_bytes: int
    activation_bytes: int
    page_bytes: int
    page_size: int
    max_pages: int | None  # what the kernels can address, where there is a limit
    gpu: str  # its name and size for messages, or empty
    is_limited: bool  # a limit was given, below what is free

    @property
    def spare_bytes(self) -> int:
        return _GPU_SPARE if self.gpu else 0

    @property
    def left_bytes(self) -> int:
        return self.available_bytes - self.weight_bytes - self.activation_bytes

    @property
    def needs(self) -> str:
        return f"The model needs {fmt_bytes(self.weight_bytes)} for weights"

    @property
    def free(self) -> str:
        if self.is_limited:
            return f"it may use {fmt_bytes(self.available_bytes)}."
        return f"{fmt_bytes(self.available_bytes)} are free" + (f" of the {self.gpu}." if self.gpu else ".")


def _memory(
    options: EngineOptions, device: str, dtype: str, kv_dtype: str, page_size: int, context: int, max_requests: int,
    token_budget: int, model: ModelConfig, machine: Machine,
) -> _Memory:  # fmt: skip
    on_gpu, max_pages = device == "cuda", None
    activations = model.activation_bytes(max(token_budget, 256), max_requests)
    if on_gpu:
        # Partial results of attention: one for every 512 tokens of context.
        activations += 4 * max_requests * -(-context // 512) * model.num_heads * (model.head_dim + 2)
        # A bulk copy addresses a row of head_dim values by a 32-bit signed number; the null page comes on top.
        max_pages = (_MAX_COPY_ROWS - 1) // (2 * model.num_layers * model.num_kv_heads * page_size) - 1
    free = machine.gpu_free_bytes if on_gpu else machine.available_bytes
    limit = free if options.memory_bytes is None else options.memory_bytes
    return _Memory(
        available_bytes=min(free, limit),
        is_limited=limit < free,
        weight_bytes=model.weight_bytes(dtype, bool(machine.kernels)),
        activation_bytes=activations,
        page_bytes=model.kv_bytes_per_token(kv_dtype) * page_size,
        page_size=page_size,
        max_pages=max_pages,
        gpu=f"{fmt_bytes(machine.gpu_bytes)} of {machine.gpu}" if on_gpu else "",
    )


def _kv_bytes(options: EngineOptions, memory: _Memory, wanted_tokens: int) -> Decision[int]:
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
    limits = [(wanted_tokens * memory.page_bytes // memory.page_size, "every slot at full context")]
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
    min_pages = -(-min(wanted, 2 * page_size) // page_size)
    if num_pages < min_pages:
        raise ConfigError(
            f"{fmt_bytes(kv_bytes)} of KV memory hold {num_pages} pages of {fmt_bytes(memory.page_bytes)}.",
            fix=f"Give at least {fmt_bytes(min_pages * memory.page_bytes)} with --kv-memory.",
            param="kv_memory_bytes",
        )
    if num_pages * page_size >= wanted:
        return wanted, why
    if options.max_context is not None:
        raise ConfigError(
            f"A context of {wanted} tokens needs {fmt_bytes(wanted * memory.page_bytes // page_size)} of KV memory; "
            f"{fmt_bytes(kv_bytes)} are reserved.",
            fix=f"Use --max-context {num_pages * page_size} or raise --kv-memory.",
            param="max_context",
        )
    return num_pages * page_size, f"what {fmt_bytes(kv_bytes)} of KV memory can hold; the model's own is {model.max_context}"


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
