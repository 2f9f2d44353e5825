"""Decisions about memory: what weights and activations leave for the KV cache, and how many tokens
it holds."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from tidemill.config.cache import bytes_of_page
from tidemill.config.gpu_weights import gpu_weight_bytes
from tidemill.config.options import Decision, EngineOptions
from tidemill.config.remedies import remedies
from tidemill.config.sizes import GIB, MIB, fmt_bytes
from tidemill.errors import ConfigError
from tidemill.machine import Machine
from tidemill.types.cache_layout import CacheLayout
from tidemill.types.kv_format import FORMATS, num_copied_pages
from tidemill.types.model_config import ModelConfig

GPU_SPARE = 3 * 2**30  # CUDA graphs, the libraries' own memory, fragmentation
# tokens that the KV memory must hold, unless --max-context says that fewer will do
LEAST_CONTEXT = 128
_MAX_COPY_ROWS = 2**31  # what the 32-bit coordinates of bulk copies into shared memory address


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory that the KV cache shares, and the size of a page."""

    available_bytes: int
    total_bytes: int  # of the machine, or of the GPU
    weight_bytes: int
    activation_bytes: int
    page_bytes: int
    page_size: int
    layout: CacheLayout
    token_budget: int
    max_pages: int | None  # what the kernels can address, where there is a limit
    gpu: str  # its name and size for messages, or empty
    is_limited: bool  # a limit was given, below what is free
    remedies: list[str]  # if it is too little
    lora_bytes: int = 0
    draft_bytes: int = 0
    beside_page_bytes: int = 0  # what KV policies may keep for each page

    def num_pages_for(self, num_tokens: int) -> int:
        """The most pages that a sequence of so many tokens holds."""
        return self.layout.num_pages_for(num_tokens, self.token_budget)

    @property
    def spare_bytes(self) -> int:
        return GPU_SPARE if self.gpu else 0

    @property
    def left_bytes(self) -> int:
        return (
            self.available_bytes
            - self.weight_bytes
            - self.activation_bytes
            - self.lora_bytes
            - self.draft_bytes
        )

    @property
    def needs(self) -> str:
        adapters = f", {fmt_bytes(self.lora_bytes)} for adapters" if self.lora_bytes else ""
        draft = f", {fmt_bytes(self.draft_bytes)} for its draft model" if self.draft_bytes else ""
        return f"The model needs {fmt_bytes(self.weight_bytes)} for weights{adapters}{draft}"

    @property
    def free(self) -> str:
        if self.is_limited:
            return f"it may use {fmt_bytes(self.available_bytes)}."
        return f"{fmt_bytes(self.available_bytes)} are free" + (
            f" of the {self.gpu}." if self.gpu else "."
        )


def measure(
    options: EngineOptions, device: str, dtype: str, scheme: str, kv_dtype: str, page_size: int, layout: CacheLayout,
    context: int, max_draws: int, token_budget: int, model: ModelConfig, machine: Machine,
) -> Memory:  # fmt: skip
    on_gpu, max_pages = device == "cuda", None
    activations = model.activation_bytes(max(token_budget, 256), max_draws)
    if on_gpu and model.token_layers:
        # Partial results of attention: one for every 512 tokens of context.
        activations += (
            4 * (max_draws + 1) * -(-context // 512) * model.num_heads * (model.head_dim + 2)
        )
        copied = num_copied_pages(kv_dtype, context, model.num_kv_heads, page_size, model.head_dim)
        activations += copied * 2 * model.num_kv_heads * page_size * model.head_dim * 2
        # A bulk copy addresses a row of head_dim values by a 32-bit signed number; the null page
        # comes on top. Scales lie between the values of two pages, as so many rows.
        kind, num_rows = (
            FORMATS[kv_dtype],
            2 * layout.layers_per_page * model.num_kv_heads * page_size,
        )
        num_rows += -(-num_rows * kind.scale_bytes // kind.row_bytes(model.head_dim))
        max_pages = (_MAX_COPY_ROWS - 1) // num_rows - 1
    free = (machine.gpu_free_bytes if on_gpu else machine.available_bytes) // options.data_parallel
    limit = free if options.memory_bytes is None else options.memory_bytes
    if options.gpu_memory_utilization is not None:
        limit = min(limit, _gpu_share(options, machine)) if on_gpu else limit
    weights = (
        gpu_weight_bytes(model, scheme)
        if on_gpu
        else model.weight_bytes(dtype, bool(machine.kernels))
    )
    spare = GPU_SPARE if on_gpu else 0
    return Memory(
        available_bytes=min(free, limit),
        total_bytes=machine.gpu_bytes if on_gpu else machine.memory_bytes,
        is_limited=limit < free,
        remedies=remedies(
            options,
            device,
            scheme,
            model,
            machine,
            weights,
            activations,
            min(free, limit) - activations - spare,
        ),
        weight_bytes=weights,
        activation_bytes=activations,
        page_bytes=bytes_of_page(model, kv_dtype, page_size, layout),
        page_size=page_size,
        layout=layout,
        token_budget=token_budget,
        max_pages=max_pages,
        gpu=f"{fmt_bytes(machine.gpu_bytes)} of {machine.gpu}" if on_gpu else "",
    )


def _gpu_share(options: EngineOptions, machine: Machine) -> int:
    share = options.gpu_memory_utilization
    if share is None or not 0 < share <= 1:
        fix = "It is a number above 0, up to 1."
        raise ConfigError(
            f"gpu_memory_utilization is {share}.", fix=fix, param="gpu_memory_utilization"
        )
    return int(share * machine.gpu_bytes) // options.data_parallel


def memory_notes(
    options: EngineOptions, device: str, memory: Memory, kv_bytes: int
) -> tuple[str, ...]:
    """The notes on memory options that have no effect here, or may not go well."""
    notes = []
    if options.gpu_memory_utilization is not None and device == "cpu":
        notes.append(
            "gpu_memory_utilization has no effect on a CPU; --memory and --kv-memory limit what is taken"
        )
    if options.kv_memory_bytes is not None and not memory.gpu and kv_bytes > memory.left_bytes:
        needed = memory.available_bytes - memory.left_bytes + kv_bytes
        notes.append(
            f"with the KV memory that was given, {fmt_bytes(needed)} are needed and {memory.free[:-1]}"
        )
    return tuple(notes)


def decide_kv_bytes(options: EngineOptions, memory: Memory, wanted_pages: int) -> Decision[int]:
    """Memory for the KV cache, before it is rounded to pages."""
    num_bytes, most = options.kv_memory_bytes, wanted_pages * memory.page_bytes
    if num_bytes is not None and num_bytes > most:
        return (
            most,
            f"of the {fmt_bytes(num_bytes)} that were given: every slot at full context, which is all that can be used",
        )
    if num_bytes is not None:
        return num_bytes, "given"
    room = memory.left_bytes - memory.spare_bytes
    room = room * memory.page_bytes // (memory.page_bytes + memory.beside_page_bytes)
    if room < memory.page_bytes:
        more = (
            f"raise the limit of {fmt_bytes(memory.available_bytes)}"
            if memory.is_limited
            else "free memory"
        )
        spare = (
            f", {fmt_bytes(memory.spare_bytes)} for CUDA graphs and libraries"
            if memory.spare_bytes
            else ""
        )
        param = "gpu_memory_utilization" if options.memory_bytes is None else "memory_bytes"
        raise ConfigError(
            f"{memory.needs}{spare} and {fmt_bytes(memory.activation_bytes)} for activations; {memory.free}",
            fix="\n".join(
                [
                    "What helps:",
                    *(f"  {remedy};" for remedy in memory.remedies),
                    f"  a smaller model, or {more}.",
                ]
            ),
            param=param if memory.is_limited else None,
        )
    limits = [(most, "every slot at full context")]
    if memory.is_limited:
        limits.append(
            (room, f"what weights and activations leave of {fmt_bytes(memory.available_bytes)}")
        )
    elif memory.gpu:
        limits.append((room, "what is left of the GPU's memory"))
    else:
        limits.append(
            (
                min(room // 2, 4 * GIB),
                "half of what memory is left after weights and activations, at most 4 GiB",
            )
        )
    if memory.max_pages is not None:
        limits.append(
            (
                memory.max_pages * memory.page_bytes,
                "the most that the attention kernels' 32-bit coordinates address",
            )
        )
    return min(limits, key=lambda limit: limit[0])


def decide_possible_context(
    options: EngineOptions, wanted: int, why: str, kv_bytes: int, memory: Memory, model: ModelConfig
) -> Decision[int]:
    """The context, or less if the KV memory does not hold one request of it."""
    num_pages, page_size = kv_bytes // memory.page_bytes, memory.page_size
    least = min(wanted, max(LEAST_CONTEXT, 2 * page_size))
    min_pages = memory.num_pages_for(least)
    if num_pages < min_pages:
        held = (
            sum(
                memory.num_pages_for(tokens) <= num_pages
                for tokens in range(page_size, least + 1, page_size)
            )
            * page_size
        )
        shorter = f", or accept a short context with --max-context {held}" if held >= 2 else ""
        enough = -(-min_pages * memory.page_bytes // MIB)
        raise ConfigError(
            f"{fmt_bytes(kv_bytes)} of KV memory hold {held} tokens: {num_pages} pages of {fmt_bytes(memory.page_bytes)}.",
            fix=f"Give at least {enough}M with --kv-memory, which hold {least} tokens{shorter}.",
            param="kv_memory_bytes",
        )
    if memory.num_pages_for(wanted) <= num_pages:
        return wanted, why
    possible = (
        bisect_right(range(page_size, wanted, page_size), num_pages, key=memory.num_pages_for)
        * page_size
    )
    if options.max_context is not None:
        raise ConfigError(
            f"A context of {wanted} tokens needs {fmt_bytes(memory.num_pages_for(wanted) * memory.page_bytes)} of KV memory; "
            f"{fmt_bytes(kv_bytes)} are reserved.",
            fix=f"Use --max-context {possible} or raise --kv-memory.",
            param="max_context",
        )
    return (
        possible,
        f"what {fmt_bytes(kv_bytes)} of KV memory can hold; the model's own is {model.max_context}",
    )


def decide_num_pages(kv_bytes: int, memory: Memory, most: int) -> Decision[int]:
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
    if (
        not memory.gpu
        and memory.weight_bytes + memory.activation_bytes + num_bytes > memory.total_bytes
    ):
        raise ConfigError(
            f"{memory.needs}, {fmt_bytes(memory.activation_bytes)} for activations and {fmt_bytes(num_bytes)} of KV memory; the "
            f"machine has {fmt_bytes(memory.total_bytes)}.",
            fix="Give less with --kv-memory, or leave it out.",
            param="kv_memory_bytes",
        )
    beside = num_pages * memory.beside_page_bytes
    if (memory.gpu or memory.is_limited) and num_bytes + beside > memory.left_bytes:
        policies = f" with {fmt_bytes(beside)} for KV policies" if beside else ""
        raise ConfigError(
            f"{memory.needs}, {fmt_bytes(memory.activation_bytes)} for activations and {fmt_bytes(num_bytes)} of KV memory"
            f"{policies}; {memory.free}",
            fix="Give less with --kv-memory, use a smaller model, or "
            + ("raise the limit." if memory.is_limited else "stop what else uses the GPU."),
            param="kv_memory_bytes",
        )
    return num_pages, f"{fmt_bytes(kv_bytes)} / {fmt_bytes(memory.page_bytes)} a page"
