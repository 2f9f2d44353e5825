"""From a user's options to an engine: the checkpoint, the model, its runner, and what is around it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tidemill.capabilities import check_setup
from tidemill.config import EngineConfig, EngineOptions, resolve
from tidemill.config.choices import MAX_RANKS
from tidemill.config.resolve import set_up
from tidemill.config.streaming import streams_neurons
from tidemill.distributed.layouts import DEVICES, gather_from
from tidemill.distributed.stages import decide_stages, kv_layers, stages_of
from tidemill.engine.core import EngineCore
from tidemill.engine.group import start_group
from tidemill.engine.kv_tiers import open_tiers
from tidemill.engine.moments import EngineComponents
from tidemill.engine.parts.adapters import AdapterStore
from tidemill.engine.parts.structured import StructuredOutput
from tidemill.errors import ConfigError
from tidemill.frontend.structured import check_backend
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.kernels import machine, native
from tidemill.kernels.memory import PAGE
from tidemill.layers.contextual import ContextualSparsity
from tidemill.layers.host_streamed import HostStreaming
from tidemill.layers.split_neurons import NeuronSplit
from tidemill.layers.streamed import DiskStreaming, Streaming
from tidemill.machine import Machine
from tidemill.models.base import Model, ProgressFn
from tidemill.models.registry import model_class
from tidemill.quant import WeightPlan
from tidemill.quant.streamed import Store
from tidemill.runner.base import Runner
from tidemill.runner.make import make_runner
from tidemill.runner.rank import largest_part, settle_layout
from tidemill.runner.spec.registry import DrafterParts, make_drafters
from tidemill.runner.worker_group import WorkerGroup
from tidemill.sched.clock import Clock, MonotonicClock
from tidemill.sched.policies import make_policy
from tidemill.types import events
from tidemill.types.events import EventBuffer
from tidemill.types.model_config import ModelConfig
from tidemill.weights.checkpoint import Checkpoint, open_checkpoint
from tidemill.weights.digest import digest_of
from tidemill.weights.locate import locate
from tidemill.weights.neurons import read_hottest
from tidemill.weights.prepared import Folder, PreparedCorrupt, key_of

_TABLE_BYTES = 2**24  # of prepared weights: their table, and what rounding to pages adds


def inspect(model: str) -> tuple[Checkpoint, type[Model], ModelConfig]:
    """A checkpoint, without its weights."""
    checkpoint = open_checkpoint(locate(model))
    architecture = model_class(checkpoint)
    return checkpoint, architecture, architecture.read_config(checkpoint)


def weight_plan(config: EngineConfig, scheme: str) -> WeightPlan:
    return WeightPlan(scheme, config.device, config.fast_math)


def inspect_draft(name: str, target: Checkpoint) -> tuple[Checkpoint, type[Model], ModelConfig]:
    """A draft model, without its weights. Its tokens must be the target's."""
    checkpoint, architecture, config = inspect(name)
    if checkpoint.path != target.path:
        theirs, ours = (
            Tokenizer.load(checkpoint.path).vocabulary,
            Tokenizer.load(target.path).vocabulary,
        )
        if theirs != ours:
            num = len(theirs.items() ^ ours.items())
            raise ConfigError(
                f"The draft model {name} has another tokenizer than {target.path.name}: {num:,} tokens differ.",
                fix="Use a draft model with the same vocabulary, such as a smaller one of the same family.",
                param="draft_model",
            )
    return checkpoint, architecture, config


def share_of(machine: Machine, num_ranks: int) -> Machine:
    """The share of this machine that one of so many ranks may use."""
    per_gpu = -(-num_ranks // max(machine.num_gpus, 1))
    return replace(
        machine,
        available_bytes=machine.available_bytes // num_ranks,
        gpu_free_bytes=machine.gpu_free_bytes // per_gpu,
        gpu_bytes=machine.gpu_bytes // per_gpu,
    )


def core_of(
    model: Model,
    config: EngineConfig,
    clock: Clock | None = None,
    draft: Model | None = None,
    weights_digest: bytes = b"",
    group: WorkerGroup | None = None,
    whole: ModelConfig | None = None,
) -> EngineCore:
    """`draft`: the draft model, if the drafters need one. `weights_digest`: by which it knows its
    pages on disk. `group`: of ranks that compute the model, which is rank 0's part of `whole`."""
    clock, emit = clock or MonotonicClock(), EventBuffer()
    runner: Runner = make_runner(model, config) if group is None else group
    is_long = model.config.has_long_factors(config.max_context)
    no_disk = "" if group is None else group.no_disk
    tiers = open_tiers(runner, config, weights_digest + bytes([is_long]), emit, clock.now, no_disk)
    structured = StructuredOutput(config.structured_backend, model.config.vocab_size)
    drafters = make_drafters(
        DrafterParts(config, runner, model.config.vocab_size, structured.forced, draft)
    )
    if runner.fallback:
        config = replace(config, reasons={**config.reasons, "kernels": runner.fallback})
        emit(events.KernelsFellBack(clock.now(), runner.fallback))
    if config.pipeline_parallel > 1:
        emit(
            events.LayersDivided(
                clock.now(), config.pipeline_layers, config.reasons["pipeline_layers"]
            )
        )
    for trial in getattr(runner, "nano", ()):
        tried = trial.decodes, trial.size, trial.whole_ms, trial.halves_ms, trial.is_taken
        emit(events.NanoBatchingTried(clock.now(), *tried))
    components = EngineComponents(
        runner,
        whole or model.config,
        drafters,
        tiers,
        ranks=group,
        expert_counts=model.take_expert_counts,
        weight_reads=model.take_weight_reads,
        parts=[structured],
    )
    return EngineCore(components, config, clock, emit)


def load_core(
    options: EngineOptions, progress: ProgressFn | None = None, clock: Clock | None = None
) -> EngineCore:
    make_policy(options.policy)  # a wrong name is an error before gigabytes are read
    check_backend(options.structured_backend)
    checkpoint, architecture, model_config = inspect(options.model)
    draft = None if options.draft_model is None else inspect_draft(options.draft_model, checkpoint)
    shape, here, rank_options, why = model_config, machine.detect(), options, ""
    setup = set_up(options, model_config, here)
    check_setup(setup)
    layers, reason = decide_stages(options, model_config, here)
    # each rank has its share of the model, and of the memory
    if 1 < options.tensor_parallel <= MAX_RANKS:
        layout, why = settle_layout(setup)
        rank_options = replace(options, tensor_layout=layout)
        shape, here = largest_part(rank_options, shape), share_of(here, options.tensor_parallel)
    stages = (
        [kv_layers(model_config, stage) for stage in stages_of(layers)] if len(layers) > 1 else []
    )
    config = replace(
        resolve(rank_options, shape, here, None if draft is None else draft[2], stages),
        pipeline_layers=layers,
    )
    config.reasons["pipeline_layers"] = reason
    if config.tensor_layout == "phased":
        config = replace(
            config,
            gather_tokens=gather_from(model_config, config.tensor_parallel, DEVICES[config.device]),
        )
        config.reasons["gather_tokens"] = "estimated, as `tidemill plan-layout` does"
    config.reasons["tensor_layout"] = why or config.reasons["tensor_layout"]
    machine.set_threads(config.threads)
    if options.load_format not in ("auto", "dummy"):
        raise ConfigError(
            f"load_format {options.load_format!r} is not available.", fix="Choose auto or dummy."
        )
    random, group = options.load_format == "dummy", None
    # its pages with those of other engines
    compares = bool(config.kv_disk or config.kv_export or config.kv_import)
    weights = digest_of(checkpoint.path, config.threads) if compares and not random else b""
    if compares and config.contextual_sparsity is not None:
        weights += digest_of(Path(config.contextual_sparsity).expanduser(), config.threads)
    if compares and config.hot_neurons is not None:
        weights += (
            digest_of(Path(config.hot_neurons.folder).expanduser(), config.threads)
            + repr(config.hot_neurons[1:]).encode()
        )
    if config.num_ranks > 1:
        model, group = start_group(
            options, checkpoint, architecture, model_config, config, progress, weights
        )
    else:
        model = _load_alone(checkpoint, architecture, model_config, config, progress, random)
    try:
        return _core_with(
            options, config, model, checkpoint, model_config, group, draft, progress, weights, clock
        )
    except BaseException:
        if group is not None:
            group.close()
        raise


def _load_alone(
    checkpoint: Checkpoint,
    architecture: type[Model],
    shape: ModelConfig,
    config: EngineConfig,
    progress: ProgressFn | None,
    random: bool,
) -> Model:
    """On one rank, with all weights in memory, or streamed from host memory to a GPU, or from disk."""
    plan = weight_plan(config, config.scheme)
    if not config.weight_memory:
        folder = config.contextual_sparsity
        sparsity = None if folder is None else ContextualSparsity(Path(folder).expanduser(), shape)
        return architecture.load(checkpoint, shape, plan, progress, random, sparsity=sparsity)
    if config.device == "cuda":
        return architecture.load(
            checkpoint, shape, plan, progress, random, streaming=to_gpu(config, shape)
        )

    total = shape.weight_bytes(config.dtype, compiled=True)
    by_neuron = streams_neurons(shape, config.scheme, config.max_loras, total, config.weight_memory)

    def load_streamed() -> Model:
        store = open_store(checkpoint, shape, config, random, by_neuron)
        with store.writing():
            streaming = DiskStreaming(config.weight_memory, store, by_neuron)
            return architecture.load(checkpoint, shape, plan, progress, random, streaming=streaming)

    try:
        return load_streamed()
    except PreparedCorrupt:
        return load_streamed()  # which writes the file anew


def to_gpu(config: EngineConfig, shape: ModelConfig) -> Streaming:
    """The streaming of a model whose weights do not fit in a GPU's memory."""
    hot = config.hot_neurons
    if hot is None:
        return HostStreaming(config.weight_memory)
    often = read_hottest(
        Path(hot.folder).expanduser(), shape.num_layers, shape.intermediate_size, hot.num
    )
    return NeuronSplit(config.weight_memory, often, hot.gates_on_gpu)


def open_store(
    checkpoint: Checkpoint, shape: ModelConfig, config: EngineConfig, random: bool, by_neuron: bool
) -> Store:
    """Opens the store of the model's weights, in the form that the kernels of this machine take
    them."""
    about = f"{config.scheme} {by_neuron} {native.sources} {native.why} {random} {shape if random else shape.architecture}"
    folder = Folder(Path(config.weight_cache).expanduser(), config.weight_cache_bytes)
    num_bytes = shape.weight_bytes(config.dtype, compiled=True) + _TABLE_BYTES
    if by_neuron:
        num_bytes += PAGE * shape.intermediate_size * shape.num_layers
    return Store(folder, key_of(checkpoint.path, about), num_bytes)


def _core_with(
    options: EngineOptions,
    config: EngineConfig,
    model: Model,
    checkpoint: Checkpoint,
    whole: ModelConfig,
    group: WorkerGroup | None,
    draft: tuple[Checkpoint, type[Model], ModelConfig] | None,
    progress: ProgressFn | None,
    weights: bytes,
    clock: Clock | None,
) -> EngineCore:
    """The engine core around a model that is loaded."""
    random, draft_model = options.load_format == "dummy", None
    if draft is not None and config.draft is not None:
        plan = weight_plan(config, config.draft.scheme)
        draft_model = draft[1].load(draft[0], draft[2], plan, progress, random)
    core = core_of(
        model, config, clock, draft=draft_model, weights_digest=weights, group=group, whole=whole
    )
    core.part(StructuredOutput).tokenizer_path = checkpoint.path
    for number, (name, path) in enumerate(options.lora_paths.items(), 1):
        core.part(AdapterStore).load_now(number, name, path)
    return core
