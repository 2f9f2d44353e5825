"""resolve(): every value of an engine's configuration, settled, and why."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from tidemill.capabilities import Setup, check_setup, in_use, why_not
from tidemill.config.cache import (
    bytes_of_page,
    decide_kv_dtype,
    decide_layout,
    decide_max_pinned,
    decide_page_size,
    decide_prefix_caching,
    decide_prefix_index,
    decide_queue_order,
    decide_session_retention,
)
from tidemill.config.compute import (
    decide_background_budget,
    decide_background_tokens,
    decide_batch_window,
    decide_context,
    decide_device,
    decide_dtype,
    decide_fast_math,
    decide_max_lora_rank,
    decide_max_loras,
    decide_max_requests,
    decide_nano_batching,
    decide_scheme,
    decide_step_cost,
    decide_threads,
    decide_token_budget,
)
from tidemill.config.drafts import decide_acceptance, decide_max_drafts, decide_speculate
from tidemill.config.memory import (
    GPU_SPARE,
    decide_kv_bytes,
    decide_num_pages,
    decide_possible_context,
    measure,
    memory_notes,
)
from tidemill.config.neurons import HotNeurons, decide_hot_neurons
from tidemill.config.options import Decision, EngineOptions, T
from tidemill.config.parallel import decide_collectives, decide_ranks, decide_tensor_layout
from tidemill.config.policies import (
    beside_a_page,
    decide_kv_policies,
    decide_kv_policy,
    decide_max_stream,
    decide_policy_bytes,
)
from tidemill.config.sparsity import decide_contextual_sparsity
from tidemill.config.streaming import decide_weight_cache, decide_weight_memory
from tidemill.config.tiers import decide_disk, decide_host_slots
from tidemill.config.transfer import decide_export, decide_import
from tidemill.config.virtual import decide_kv_layout, decide_virtual
from tidemill.errors import ConfigError
from tidemill.machine import Machine
from tidemill.types.cache_layout import CacheLayout
from tidemill.types.kv_policy import UNBOUNDED, KVPolicy
from tidemill.types.model_config import ModelConfig
from tidemill.types.sampling import SamplingParams

# in the KV cache of a draft model, at most, or one whole context
_DRAFT_TOKENS = {"cpu": 2**15, "cuda": 2**18}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything settled. `reasons` maps a field to why it has its value."""

    device: str
    dtype: str
    scheme: str  # of weights
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
    batch_window_s: float = 0.0  # of the policy dynamic
    step_cost: int = 0  # of a step with hardly any tokens, as so many tokens of a full one
    evict: bool = True
    max_pinned: float = 0.0
    session_retention_s: float = 0.0
    draft: EngineConfig | None = None  # of the draft model
    acceptance: str = "exact"
    draft_heads: str | None = None
    kv_policies: tuple[str, ...] = ()  # kinds that requests may ask for
    kv_policy: KVPolicy | None = None  # of those that do not ask; None: all tokens stay
    max_stream: int = 0  # tokens of a request whose policy bounds its cache
    # what KV policies of all requests may keep beside their pages; 0: not limited
    policy_bytes: int = 0
    summary_bytes: int = 0  # of the lowest and highest keys of pages, on a GPU
    max_draws: int = 0  # tokens drawn in a step: one for each request, and one for each draft
    max_loras: int = 0  # slots for adapters; 0: none can be used
    max_lora_rank: int = 0
    lora_bytes: int = 0
    kv_calibration: str | None = None
    host_slots: int = 0  # pages of host memory behind the KV cache; 0: no tiers
    kv_disk: str = ""  # a folder behind it, or empty
    kv_disk_bytes: int = 0
    kv_export: str = ""  # the address at which other engines find pages, or empty
    export_slots: int = 0
    kv_import: tuple[str, ...] = ()  # addresses of other engines
    kv_key_file: str | None = None
    kv_layout: str = "paged"
    weight_memory: int = 0  # bytes of weights in memory, if not all are there
    weight_cache: str = ""  # the folder of the files that the others are streamed from
    weight_cache_bytes: int = 0
    hot_neurons: HotNeurons | None = None  # where some of each layer are in host memory
    contextual_sparsity: str | None = None
    tensor_parallel: int = 1
    tensor_layout: str = "1d"
    collectives: str = "auto"
    # of a step, from which on the layout phased computes it by rows; 0: never
    gather_tokens: int = 0
    pipeline_parallel: int = 1
    pipeline_layers: tuple[int, ...] = ()  # of each stage
    expert_parallel: bool = False
    nano_batching: str = "off"
    features: tuple[str, ...] = ()  # of the capability table, that are in use
    reasons: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # for whoever starts it

    def policy_of(self, params: SamplingParams) -> KVPolicy | None:
        """The request's KV policy, or the engine's where it has none."""
        if params.kv_policy is not None:
            return params.kv_policy
        return None if params.pooling is not None or params.beams is not None else self.kv_policy

    def context_of(self, params: SamplingParams) -> int:
        """Prompt and output of such a request, at most."""
        policy = self.policy_of(params)
        return (
            self.max_stream if policy is not None and policy.kind in UNBOUNDED else self.max_context
        )

    def step_layout(self, num_tokens: int) -> str:
        """The layout of a step of so many tokens, where that is not the same for all."""
        if self.tensor_layout != "phased":
            return ""
        return "gathered" if 0 < self.gather_tokens <= num_tokens else "1d"

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def memory_bytes(self) -> int:
        """All that the engine needs of its device."""
        spare = GPU_SPARE if self.device == "cuda" else 0
        host = (
            (self.host_slots + self.export_slots) * self.page_bytes if self.device == "cpu" else 0
        )
        cache = self.kv_bytes + self.policy_bytes + self.summary_bytes
        return (
            self.weight_bytes
            + self.activation_bytes
            + cache
            + self.lora_bytes
            + self.draft_bytes
            + host
            + spare
        )

    @property
    def has_tiers(self) -> bool:
        """There is something behind the KV cache: host memory, or other engines."""
        return bool(self.host_slots or self.export_slots or self.kv_import)

    @property
    def page_bytes(self) -> int:
        return self.kv_bytes // self.num_pages

    @property
    def draft_bytes(self) -> int:
        """The bytes of the draft model: weights, activations and KV cache."""
        return _draft_bytes(self.draft)

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that fit, in requests that fill the whole context where layers have windows."""
        if not any(group.window for group in self.layout.groups):
            return self.num_pages // len(self.layout.groups) * self.page_size
        return (
            self.num_pages
            * self.max_context
            // self.layout.num_pages_for(self.max_context, self.token_budget)
        )

    @property
    def full_context_requests(self) -> float:
        """The number of requests that fit if each fills the whole context."""
        return self.num_kv_tokens / self.max_context


def resolve(
    options: EngineOptions,
    model: ModelConfig,
    machine: Machine,
    draft_model: ModelConfig | None = None,
    stages: Sequence[Collection[int]] = (),
) -> EngineConfig:
    """Fill every "auto", check every given value, record why. `draft_model`: of
    `options.draft_model`. `stages`: of a pipeline, the layers with keys and values that each
    has."""
    reasons: dict[str, str] = {}

    def settle(name: str, decision: Decision[T]) -> T:
        value, reasons[name] = decision
        return value

    setup = set_up(options, model, machine, reasons)
    device, dtype, scheme, kv_dtype = setup.device, setup.dtype, setup.scheme, setup.kv_dtype
    features = check_setup(setup)
    kv_layout = settle("kv_layout", decide_kv_layout(options))
    tensor_parallel, pipeline_parallel = settle(
        "ranks", decide_ranks(options, device, model, machine)
    )
    tensor_layout = settle("tensor_layout", decide_tensor_layout(options))
    collectives = settle("collectives", decide_collectives(options, device))
    threads = settle("threads", decide_threads(options, machine))
    max_requests = settle("max_requests", decide_max_requests(options, device, model))
    context = settle("max_context", decide_context(options, model))
    token_budget = settle(
        "token_budget", decide_token_budget(options, device, max_requests, context, model)
    )
    speculate = settle("speculate", decide_speculate(options, features))
    max_drafts = settle("max_drafts", decide_max_drafts(options, device, speculate))
    acceptance = settle("acceptance", decide_acceptance(options))
    max_draws = max_requests if not speculate else min(token_budget, 2 * max_requests)
    background_tokens = settle(
        "background_tokens", decide_background_tokens(device, token_budget, model)
    )
    background_budget = settle(
        "background_budget", decide_background_budget(device, token_budget, model)
    )
    step_cost = settle("step_cost", decide_step_cost(device, bool(model.has_states)))
    fast_math = settle("fast_math", decide_fast_math(options))
    max_loras = settle("max_loras", decide_max_loras(options))
    max_lora_rank = settle("max_lora_rank", decide_max_lora_rank(options, max_loras))
    lora_bytes = (
        max_loras * max_lora_rank * model.lora_values_per_rank * (2 if device == "cuda" else 4)
    )
    if kv_layout == "virtual":
        of_page, of_layout = decide_virtual(
            options, device, model, kv_dtype, max_requests * context
        )
        page_size, layout = settle("page_size", of_page), settle("layout", of_layout)
    else:
        page_size = settle("page_size", decide_page_size(options, device, model, kv_dtype))
        layout = settle("layout", decide_layout(model, kv_dtype, page_size, context))
    memory = measure(
        options,
        device,
        dtype,
        scheme,
        kv_dtype,
        page_size,
        layout,
        context,
        max_draws,
        token_budget,
        model,
        machine,
    )
    num_ranks, all_bytes = tensor_parallel * pipeline_parallel, memory.weight_bytes
    weight_memory = settle(
        "weight_memory", decide_weight_memory(options, device, all_bytes, model, machine)
    )
    hot_neurons = settle(
        "hot_neurons", decide_hot_neurons(options, all_bytes, weight_memory, model)
    )
    weight_cache, weight_cache_bytes = settle("weight_cache", decide_weight_cache(options))
    contextual_sparsity = settle("contextual_sparsity", decide_contextual_sparsity(options))
    if weight_memory:
        memory = replace(memory, weight_bytes=weight_memory)
    else:
        features -= {"weight-memory"}
    draft = _draft(
        options, speculate, draft_model, machine, device, context, max_requests, token_budget
    )
    kv_policies = settle("kv_policies", decide_kv_policies(features))
    of_pages, of_rows = beside_a_page(kv_policies, device, page_size, layout.layers_per_page, model)
    memory = replace(
        memory, lora_bytes=lora_bytes, draft_bytes=_draft_bytes(draft), beside_page_bytes=of_pages + of_rows
    )  # fmt: skip
    held = max(
        [layout.only(layers) for layers in stages] or [layout],
        key=lambda part: part.layers_per_page,
    )
    of_rank = replace(memory, page_bytes=bytes_of_page(model, kv_dtype, page_size, held))
    # of each rank; what is left of a machine, its stages share
    if options.kv_memory_bytes is not None:
        memory = of_rank
    most_pages = max_requests * memory.num_pages_for(context)
    # a step's, each sequence's last page partly filled and one kept back
    if model.pooler is not None:
        most_pages = min(most_pages, token_budget // page_size + 2 * max_requests)
    kv_bytes = settle("kv_bytes", decide_kv_bytes(options, memory, most_pages))
    context = settle(
        "max_context",
        decide_possible_context(options, context, reasons["max_context"], kv_bytes, memory, model),
    )
    num_pages = settle(
        "num_pages",
        decide_num_pages(kv_bytes, memory, max_requests * memory.num_pages_for(context)),
    )
    reasons["policy"] = "scheduling policy"
    batch_window_s = settle("batch_window_s", decide_batch_window(options))
    reasons["evict"] = (
        "running requests may be preempted"
        if options.evict
        else "only what can run to its end is admitted"
    )
    prefix_caching = settle("prefix_caching", decide_prefix_caching(options, features))
    prefix_index = settle("prefix_index", decide_prefix_index(options, layout))
    queue_order = settle("queue_order", decide_queue_order(options))
    max_pinned = settle("max_pinned", decide_max_pinned(options, prefix_caching))
    session_retention_s = settle(
        "session_retention_s", decide_session_retention(options, max_pinned)
    )
    kv_disk, kv_disk_bytes = settle("kv_disk", decide_disk(options))
    host_slots = export_slots = 0
    kv_export, kv_import = "", tuple[str, ...]()
    if refusal := why_not("kv-host-memory", features) or why_not("kv-export", features):
        reasons["host_slots"] = f"no tiers behind the KV cache: {refusal.why}"
    else:
        used = num_pages * of_rank.page_bytes
        host_slots = settle("host_slots", decide_host_slots(options, of_rank, used, machine))
        taken = host_slots * of_rank.page_bytes + (
            0 if of_rank.gpu else of_rank.weight_bytes + of_rank.activation_bytes + used
        )
        kv_export, export_slots = settle(
            "kv_export", decide_export(options, of_rank, taken, machine, num_ranks)
        )
        kv_import = settle("kv_import", decide_import(options, num_ranks))
    kv_policy = settle("kv_policy", decide_kv_policy(options, features, context))
    max_stream = settle("max_stream", decide_max_stream(options, kv_policies, context))
    return EngineConfig(
        device=device,
        dtype=dtype,
        scheme=scheme,
        kv_dtype=kv_dtype,
        page_size=page_size,
        layout=held,
        num_pages=num_pages,
        max_context=context,
        max_requests=max_requests,
        max_waiting=options.max_waiting,
        token_budget=token_budget,
        background_tokens=background_tokens,
        background_budget=background_budget,
        step_cost=step_cost,
        policy=options.policy,
        prefix_caching=prefix_caching,
        prefix_index=prefix_index,
        queue_order=queue_order,
        threads=threads,
        fast_math=fast_math,
        structured_backend=options.structured_backend,
        weight_bytes=memory.weight_bytes,
        kv_bytes=num_pages * of_rank.page_bytes,
        activation_bytes=memory.activation_bytes,
        speculate=speculate,
        max_drafts=max_drafts,
        adaptive_drafts=options.adaptive_drafts,
        batch_window_s=batch_window_s,
        evict=options.evict,
        max_pinned=max_pinned,
        session_retention_s=session_retention_s,
        draft=draft,
        acceptance=acceptance,
        draft_heads=options.draft_heads,
        kv_policies=kv_policies,
        kv_policy=kv_policy,
        max_stream=max_stream,
        policy_bytes=settle(
            "policy_bytes", decide_policy_bytes(kv_policies, device, num_pages * of_rows)
        ),
        summary_bytes=num_pages * of_pages,
        max_draws=max_draws,
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        lora_bytes=lora_bytes,
        kv_calibration=options.kv_calibration,
        host_slots=host_slots,
        kv_disk=kv_disk,
        kv_disk_bytes=kv_disk_bytes,
        kv_export=kv_export,
        export_slots=export_slots,
        kv_import=kv_import,
        kv_key_file=options.kv_key_file,
        kv_layout=kv_layout,
        weight_memory=weight_memory,
        weight_cache=weight_cache,
        weight_cache_bytes=weight_cache_bytes,
        hot_neurons=hot_neurons,
        contextual_sparsity=contextual_sparsity,
        nano_batching=settle("nano_batching", decide_nano_batching(options, features)),
        tensor_parallel=tensor_parallel,
        tensor_layout=tensor_layout,
        collectives=collectives,
        pipeline_parallel=pipeline_parallel,
        expert_parallel=options.expert_parallel,
        features=tuple(sorted(features)),
        reasons=reasons,
        notes=memory_notes(options, device, memory, num_pages * of_rank.page_bytes),
    )


def set_up(
    options: EngineOptions,
    model: ModelConfig,
    machine: Machine,
    reasons: dict[str, str] | None = None,
) -> Setup:
    """Decides the device and formats, which the capability table asks for."""
    device, why_device = decide_device(options, machine)
    dtype, why_dtype = decide_dtype(options, device, model, machine)
    scheme, why_scheme = decide_scheme(options, device, dtype, model)
    kv_dtype, why_kv_dtype = decide_kv_dtype(options, dtype, device, model)
    if reasons is not None:
        reasons.update(device=why_device, dtype=why_dtype, scheme=why_scheme, kv_dtype=why_kv_dtype)
    return Setup(
        options=options,
        model=model,
        machine=machine,
        device=device,
        dtype=dtype,
        scheme=scheme,
        kv_dtype=kv_dtype,
    )


def _draft(
    options: EngineOptions, speculate: tuple[str, ...], model: ModelConfig | None, machine: Machine,
    device: str, context: int, max_requests: int, token_budget: int,
) -> EngineConfig | None:  # fmt: skip
    """The draft model's own settings: as many rows and tokens a step as the target has, and a small
    KV cache."""
    if "draft-model" not in speculate or options.draft_model is None:
        return None
    if model is None:
        raise ConfigError("The draft model's shape is not known.", param="draft_model")
    name = options.draft_model
    if refusal := why_not(
        "speculation", in_use(set_up(EngineOptions(device=device), model, machine))
    ):
        what = f"{name} cannot be a draft model: {refusal.why}."
        raise ConfigError(what, fix="Use a decoder with attention only.", param="draft_model")
    model = replace(model, max_context=min(model.max_context, context))
    draft_options = replace(
        options, model=name, draft_model=None, speculate="off", dtype="auto", quantization="auto", device=device, loras=(),
        max_loras=None, max_context=None, max_requests=max_requests, token_budget=token_budget, memory_bytes=None,
        gpu_memory_utilization=None,
        weight_memory_bytes=None, hot_neurons=None, contextual_sparsity=None, prefix_index="hash", queue_order="arrival",
        acceptance="exact", draft_heads=None,
        kv_dtype="auto", kv_host_memory_bytes=None, kv_disk=None, kv_export=None, kv_import=None, policy="continuous",
        batch_window_ms=None, kv_layout="paged",
        kv_calibration=None, kv_policy=None, max_stream=None, tensor_parallel=1, pipeline_parallel=1, expert_parallel=False,
        tensor_layout="1d", pipeline_layers=None, remote_workers=0, collectives="auto",
    )  # fmt: skip
    kv_dtype = decide_kv_dtype(
        draft_options, decide_dtype(draft_options, device, model, machine)[0], device, model
    )[0]
    num_tokens = max(
        model.max_context, min(max_requests * model.max_context, _DRAFT_TOKENS[device])
    )
    return resolve(
        replace(draft_options, kv_memory_bytes=num_tokens * model.kv_bytes_per_token(kv_dtype)),
        model,
        machine,
    )


def _draft_bytes(draft: EngineConfig | None) -> int:
    return 0 if draft is None else draft.weight_bytes + draft.activation_bytes + draft.kv_bytes


def settled(options: EngineOptions, config: EngineConfig) -> EngineOptions:
    """The options that the first start resolved, for the next ones: memory that is taken for a
    moment must not make them smaller."""
    return replace(
        options,
        device=config.device,
        dtype=config.dtype,
        page_size=config.page_size,
        max_context=config.max_context,
        max_requests=config.max_requests,
        token_budget=config.token_budget,
        kv_memory_bytes=config.kv_bytes,
        threads=config.threads,
        pipeline_layers=",".join(map(str, config.pipeline_layers))
        if config.pipeline_parallel > 1
        else None,
        max_loras=config.max_loras or None,
        max_lora_rank=config.max_lora_rank or None,
    )
