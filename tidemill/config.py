"""What is asked for, what the model is, what the machine has, and one resolve() that settles the rest and says why."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.errors import ConfigError

DTYPES = {"cpu": ("float32", "quantized"), "cuda": ("bfloat16",)}  # quantized: weights are multiplied in their 4 or 8 bits
KV_BYTES = {"float32": 4, "bfloat16": 2}
PLAIN_TYPES = {"F64": 4, "F32": 4, "F16": 2, "BF16": 2}  # stored types that are numbers, and their resident bytes
# Bytes a value of stored types that stay quantized: codes, and two or four bytes of scale and offset for 32 of them.
QUANTIZED_TYPES = {
    "Q4_0": 20 / 32, "Q4_1": 20 / 32, "Q4_K": 20 / 32, "Q8_0": 34 / 32, "Q5_0": 34 / 32, "Q5_1": 36 / 32, "Q5_K": 36 / 32,
}  # fmt: skip
_OTHER_QUANTIZED = 34 / 32  # rounded anew to 8 bits
GPU_PAGE = 64
_GPU_SPARE = 3 * 2**30  # recorded graphs, the libraries' own memory, fragmentation
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
class ModelConfig:
    """The shape of a decoder, whatever file it came from."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    attention_bias: bool = False  # of q, k and v
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # of each query and key head, before rotation
    stored: dict[str, int] = field(default_factory=dict)  # values in the checkpoint by stored type
    notes: tuple[str, ...] = ()  # what a user should know about how this file was read

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 < value <= 2**31:
                raise ConfigError(f"The model's configuration has {name} = {value!r}.", fix="It must be a positive integer.")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"The model's configuration has {self.num_heads} query heads over {self.num_kv_heads} KV heads.",
                fix="The first must be a multiple of the second.",
            )

    @property
    def num_parameters(self) -> int:
        """Stored values: a tied embedding counts once."""
        h, d = self.hidden_size, self.head_dim
        attention = h * d * (self.num_heads + 2 * self.num_kv_heads) + h * d * self.num_heads
        layer = attention + 3 * h * self.intermediate_size + 2 * h
        embeddings = self.vocab_size * h * (1 if self.tie_embeddings else 2)
        return self.num_layers * layer + embeddings + h

    @property
    def is_quantized(self) -> bool:
        return any(kind not in PLAIN_TYPES for kind in self.stored)

    def weight_bytes(self, dtype: str, compiled: bool) -> int:
        """Resident bytes. `compiled`: with the compiled kernels, which take 16-bit weights as they are."""
        total = 0.0
        for kind, num_values in (self.stored or {"F32": self.num_parameters}).items():
            if kind in PLAIN_TYPES:
                total += num_values * (PLAIN_TYPES[kind] if compiled else 4)
            else:
                total += num_values * (QUANTIZED_TYPES.get(kind, _OTHER_QUANTIZED) if dtype == "quantized" else 4)
        return int(total)

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Of one sequence. From the KV heads, not from hidden_size, which would ignore grouping."""
        return 2 * self.num_kv_heads * self.head_dim * self.num_layers * KV_BYTES[kv_dtype]

    def activation_bytes(self, num_tokens: int, num_samples: int) -> int:
        """Peak of one step: the widest layer's intermediates, and the logits with one working copy."""
        width = 4 * self.hidden_size + 3 * self.intermediate_size + 3 * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return 4 * (num_tokens * width + 2 * num_samples * self.vocab_size)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the process may use."""

    num_cores: int
    memory_bytes: int
    available_bytes: int
    kernels: str = ""  # the compiled CPU kernels: for which instructions, or empty
    no_kernels: str = ""  # and then, why
    gpu: str = ""  # its name, or empty
    gpu_bytes: int = 0
    gpu_free_bytes: int = 0

    @staticmethod
    def detect() -> Machine:
        total, available = _memory()
        return Machine(num_cores=_physical_cores(), memory_bytes=total, available_bytes=available)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What a user may set. None means: derive it."""

    model: str = "smollm2"
    served_name: str | None = None
    load_format: str = "auto"  # dummy: random weights of the shape that config.json tells
    device: str = "auto"
    dtype: str = "auto"
    page_size: int | None = None
    max_context: int | None = None
    max_requests: int | None = None
    max_waiting: int = 4096
    token_budget: int | None = None
    kv_memory_bytes: int | None = None
    policy: str = "continuous"
    prefix_caching: bool = True
    threads: int | None = None
    fast_math: bool = False
    structured_backend: str = "llguidance"


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
    def num_kv_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def full_context_requests(self) -> float:
        """How many requests fit if each fills the whole context."""
        return self.num_kv_tokens / self.max_context


def resolve(options: EngineOptions, model: ModelConfig, machine: Machine) -> EngineConfig:
    """Fill every "auto", check every given value, record why."""
    why: dict[str, str] = {}
    device = _resolve_device(options.device, machine, why)
    on_gpu = device == "cuda"
    dtype = _resolve_dtype(options.dtype, device, model, machine, why)
    kv_dtype = "float32" if dtype == "float32" else "bfloat16"
    why["kv_dtype"] = (
        "exact" if dtype == "float32" else "as the activations" if on_gpu else "half the memory, finer than the weights"
    )

    page_size = options.page_size or (GPU_PAGE if on_gpu else 16)
    if page_size not in (1, 2, 4, 8, 16, 32, 64):
        raise ConfigError(f"page_size is {page_size}.", fix="It must be a power of two from 1 to 64.")
    if on_gpu and page_size != GPU_PAGE:
        raise ConfigError(f"page_size is {page_size}; the GPU's kernels take pages of {GPU_PAGE}.", fix="Leave --page-size out.")
    why["page_size"] = "tokens per KV page" + (", the attention kernels' block" if on_gpu else "")

    threads = options.threads or machine.num_cores
    if not 1 <= threads <= 256:
        raise ConfigError(f"threads is {options.threads}.", fix="It must be from 1 to 256.")
    why["threads"] = "given" if options.threads else "physical cores this process may use"

    max_requests = options.max_requests if options.max_requests is not None else 256 if on_gpu else 64
    _at_least("max_requests", max_requests, 1)
    slower = "the largest recorded batch" if on_gpu else "rows; more would only make each request slower on a CPU"
    why["max_requests"] = "given" if options.max_requests else slower

    token_budget = options.token_budget if options.token_budget is not None else max(2048 if on_gpu else 256, max_requests)
    _at_least("token_budget", token_budget, 1)
    if token_budget < max_requests:
        raise ConfigError(
            f"token_budget is {token_budget}, less than max_requests, {max_requests}: some requests would never decode.",
            fix="Raise --token-budget or lower --max-requests.",
        )
    why["token_budget"] = "given" if options.token_budget else "tokens per step: keeps a step short beside a long prompt"

    background_tokens = token_budget / 32 if on_gpu else 1 / 8
    cheap = "rows that read the weights anyway" if on_gpu else "each row lengthens a step on a CPU"
    background_budget = token_budget if on_gpu else min(token_budget, 64)
    longer = "" if on_gpu else "; longer ones are no faster on a CPU"
    why["background_budget"] = f"who comes meanwhile waits for one step{longer}"
    why["background_tokens"] = f"{cheap}: batches hardly slow down others, and never stand still"

    context = options.max_context if options.max_context is not None else model.max_context
    _at_least("max_context", context, 2)
    if context > model.max_context:
        raise ConfigError(
            f"max_context is {context}, but the model was made for {model.max_context}.",
            fix=f"Use --max-context {model.max_context} or less.",
        )
    why["max_context"] = "given" if options.max_context else "the model's own"

    available = machine.gpu_free_bytes if on_gpu else machine.available_bytes
    weights = 2 * model.num_parameters if on_gpu else model.weight_bytes(dtype, bool(machine.kernels))
    activations = model.activation_bytes(max(token_budget, 256), max_requests)
    if on_gpu:  # partial results of attention: one for every 512 tokens of context
        activations += 4 * max_requests * -(-context // 512) * model.num_heads * (model.head_dim + 2)
    if options.fast_math and not on_gpu:
        raise ConfigError("fast_math is for GPUs.", fix="Leave --fast-math out.")
    per_page = model.kv_bytes_per_token(kv_dtype) * page_size
    kv_bytes = options.kv_memory_bytes
    if kv_bytes is None:
        room = available - weights - activations - (_GPU_SPARE if on_gpu else 0)
        wanted = max_requests * context * model.kv_bytes_per_token(kv_dtype)
        kv_bytes = min(wanted, room) if on_gpu else min(wanted, room // 2, 4 * GIB)
        limited = (
            "what is left of the GPU's memory"
            if on_gpu
            else "half of what memory is left after weights and activations, at most 4 GiB"
        )
        why["kv_bytes"] = "all rows at full context" if kv_bytes == wanted else limited
        if room < per_page:
            raise ConfigError(
                f"The model needs {fmt_bytes(weights)} for weights and {fmt_bytes(activations)} for activations; "
                f"{fmt_bytes(available)} are free"
                + (f" of the {fmt_bytes(machine.gpu_bytes)} of {machine.gpu}." if on_gpu else "."),
                fix="Use a smaller model, lower --max-requests or --token-budget, or free memory.",
            )
    else:
        why["kv_bytes"] = "given"
    num_pages = kv_bytes // per_page
    min_pages = -(-min(context, 2 * page_size) // page_size)
    if num_pages < min_pages:
        raise ConfigError(
            f"{fmt_bytes(kv_bytes)} of KV memory hold {num_pages} pages of {fmt_bytes(per_page)}.",
            fix=f"Give at least {fmt_bytes(min_pages * per_page)} with --kv-memory.",
        )
    if num_pages * page_size < context:
        if options.max_context is not None:
            raise ConfigError(
                f"A context of {context} tokens needs {fmt_bytes(context * per_page // page_size)} of KV memory; "
                f"{fmt_bytes(kv_bytes)} are set aside.",
                fix=f"Use --max-context {num_pages * page_size} or raise --kv-memory.",
            )
        context = num_pages * page_size
        why["max_context"] = f"what {fmt_bytes(kv_bytes)} of KV memory can hold; the model's own is {model.max_context}"
    num_pages = min(num_pages, max_requests * -(-context // page_size))
    if on_gpu and num_pages * per_page > available - weights - activations:
        raise ConfigError(
            f"The model needs {fmt_bytes(weights)} for weights, {fmt_bytes(activations)} for activations and "
            f"{fmt_bytes(num_pages * per_page)} of KV memory; {fmt_bytes(available)} are free of the "
            f"{fmt_bytes(machine.gpu_bytes)} of {machine.gpu}.",
            fix="Give less with --kv-memory, use a smaller model, or stop what else uses the GPU.",
        )
    why["num_pages"] = f"{fmt_bytes(kv_bytes)} / {fmt_bytes(per_page)} a page"
    why["policy"] = "scheduling policy"
    why["prefix_caching"] = "equal beginnings are computed once"
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
        prefix_caching=options.prefix_caching,
        threads=threads,
        fast_math=options.fast_math,
        structured_backend=options.structured_backend,
        weight_bytes=weights,
        kv_bytes=num_pages * per_page,
        activation_bytes=activations,
        reasons=why,
    )


def _resolve_device(asked: str, machine: Machine, why: dict[str, str]) -> str:
    if asked not in ("auto", *DTYPES):
        raise ConfigError(f"device {asked!r} is not available.", fix=f"Choose auto, {', '.join(DTYPES)}.")
    if asked == "cuda" and not machine.gpu:
        raise ConfigError("device cuda was asked for, but torch sees no GPU.", fix="Use --device cpu, or install torch for CUDA.")
    why["device"] = "given" if asked != "auto" else machine.gpu or "no GPU"
    return asked if asked != "auto" else "cuda" if machine.gpu else "cpu"


def _resolve_dtype(asked: str, device: str, model: ModelConfig, machine: Machine, why: dict[str, str]) -> str:
    if asked not in ("auto", *DTYPES[device]):
        raise ConfigError(f"dtype {asked!r} is not available on {device}.", fix=f"Choose auto, {', '.join(DTYPES[device])}.")
    if device == "cuda":
        why["dtype"] = "given" if asked != "auto" else "what the matrix units are made for"
        return "bfloat16"
    if asked == "quantized":
        if not machine.kernels:
            raise ConfigError(
                f"dtype quantized needs the compiled kernels: {machine.no_kernels}.",
                fix="Install with a C compiler, or use float32.",
            )
        if not model.is_quantized:
            raise ConfigError("dtype quantized is for quantized checkpoints, and this one is not.", fix="Use --dtype float32.")
    if asked != "auto":
        why["dtype"] = "given"
        return asked
    if not model.is_quantized:
        why["dtype"] = "the checkpoint is not quantized; sums are exact float32"
    elif machine.kernels:
        why["dtype"] = f"the checkpoint is quantized, and there are {machine.kernels} kernels that multiply it as it is"
        return "quantized"
    else:
        why["dtype"] = f"no compiled kernels: {machine.no_kernels}"
    return "float32"


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


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{name} is {value}.", fix=f"It must be at least {low}.")


def _physical_cores() -> int:
    """Distinct physical cores among the CPUs this process may run on."""
    if not hasattr(os, "sched_getaffinity"):  # not Linux
        return os.cpu_count() or 1
    cpus = os.sched_getaffinity(0)
    cores = set()
    for cpu in cpus:
        try:
            cores.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip())
        except OSError:
            cores.add(str(cpu))
    quota = _read_cgroup("cpu.max").split()
    limit = int(quota[0]) / int(quota[1]) if len(quota) == 2 and quota[0].isdigit() else len(cores)
    return max(1, min(len(cores), int(limit)))


def _memory() -> tuple[int, int]:
    """Total and available bytes, whichever is tighter: the machine or the control group."""
    try:
        info = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.M))
        total, available = int(info["MemTotal"]) * 1024, int(info["MemAvailable"]) * 1024
    except (OSError, KeyError):  # not Linux
        total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, used = _read_cgroup("memory.max"), _read_cgroup("memory.current")
    if limit.isdigit() and used.isdigit():
        cached = re.search(r"^inactive_file (\d+)$", _read_cgroup("memory.stat"), re.M)  # given back when asked for
        free = int(limit) - int(used) + (int(cached[1]) if cached else 0)
        total, available = min(total, int(limit)), min(available, max(0, free))
    return total, available


def _read_cgroup(name: str) -> str:
    try:
        return Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return ""
