"""The layers of each stage of a pipeline: as given, by measured times of layers, or by their
weights. Ints and floats only.

Rank 0 decides and tells the others. A file of times is used only for what it was measured with; the
same file gives the same division at every start, and so do engines that exchange KV pages or find
them on disk again.
"""

from __future__ import annotations

import hashlib
import platform
import re
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Annotated

import msgspec

from tidemill.config.compute import decide_device, decide_dtype, decide_scheme, decide_threads
from tidemill.config.options import Decision, EngineOptions
from tidemill.distributed.world import Stage, split_layers
from tidemill.errors import ConfigError
from tidemill.machine import Machine
from tidemill.types.model_config import ModelConfig

FORMAT = 1  # of the file; raised when its fields mean something else
OUTPUT_LEN = 256  # tokens that follow a prompt, in the load for which stages cost the same
_MAX_BYTES = 1 << 20
_MOST_HELD = 1.05  # times an even share
_Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e6)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]


class MeasuredWith(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The conditions that times of layers depend on."""

    model: str  # a digest of its shape
    machine: str
    device: str
    dtype: str
    scheme: str
    threads: int
    tensor_parallel: int
    expert_parallel: bool

    @staticmethod
    def of(options: EngineOptions, model: ModelConfig, machine: Machine) -> MeasuredWith:
        device = decide_device(options, machine)[0]
        dtype = decide_dtype(options, device, model, machine)[0]
        scheme, threads = (
            decide_scheme(options, device, dtype, model)[0],
            decide_threads(options, machine)[0],
        )
        shared = options.tensor_parallel, options.expert_parallel
        return MeasuredWith(
            _shape_of(model), _name_of(machine), device, dtype, scheme, threads, *shared
        )


class Times(msgspec.Struct, frozen=True):
    """Seconds that something takes: a whole prompt, and a step in which sequences decode."""

    prefill_s: _Seconds
    decode_s: _Seconds


class LayerTimes(msgspec.Struct, frozen=True):
    """The file that `tidemill measure-layers` writes."""

    format: int
    version: str  # of Tidemill
    date: str
    measured_with: MeasuredWith
    prompt_len: _Count  # tokens of the prompt
    batch: _Count  # sequences that decode
    embedding: Times
    layers: tuple[Times, ...]
    head: Times  # and drawing of tokens

    def cost(self, times: Times) -> int:
        """The cost of a prompt and its output, in nanoseconds."""
        return round(1e9 * (times.prefill_s + times.decode_s * OUTPUT_LEN / self.batch))

    def divide(self, num_stages: int) -> tuple[int, ...]:
        """Ends of stages such that the slowest is as fast as can be."""
        costs = [self.cost(layer) for layer in self.layers]
        ends = split_layers(
            costs, num_stages, self.cost(self.head), first=self.cost(self.embedding)
        )
        assert ends is not None
        return ends

    def save(self, path: Path) -> None:
        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")
        except OSError as error:
            what = f"The times of layers cannot be written to {path}: {error.strerror}."
            raise ConfigError(what, fix="Give another file with -o.", param="out") from error

    @staticmethod
    def load(path: Path) -> LayerTimes:
        try:
            with path.open("rb") as file:
                data = file.read(_MAX_BYTES + 1)
        except OSError as error:
            raise _unusable(f"{path} cannot be read: {error.strerror}.") from error
        try:
            head = msgspec.json.decode(data[:_MAX_BYTES], type=_Head)
            if head.format != FORMAT:
                raise _unusable(
                    f"{path} has format {head.format}, of Tidemill {head.version}; this version reads {FORMAT}."
                )
            return msgspec.json.decode(data, type=LayerTimes)
        except (msgspec.DecodeError, RecursionError) as error:
            raise _unusable(f"{path} has no times of layers: {error}.") from error


class _Head(msgspec.Struct, frozen=True):
    format: int
    version: str = "?"


def _unusable(what: str) -> ConfigError:
    fix = "Measure them: tidemill measure-layers MODEL -o FILE, with the options of serve; or give numbers of layers, like 12,18."
    return ConfigError(what, fix=fix, param="pipeline_layers")


def decide_stages(
    options: EngineOptions, model: ModelConfig, machine: Machine
) -> Decision[tuple[int, ...]]:
    """Decides how many layers each stage has."""
    num, layers = options.pipeline_parallel, options.pipeline_layers
    if not 1 < num <= model.num_layers:  # where it cannot be, that is said elsewhere
        return (model.num_layers,), "one stage"
    if layers is None:
        return counts_of(
            computed_ends(model, num)
        ), "computed: of the weights that a token is multiplied by, each has as many"
    if re.fullmatch(r"[\d,\s]+", layers):
        return _given(layers, num, model), "given, or as the first start had it"
    try:
        times = LayerTimes.load(Path(layers).expanduser())
    except RuntimeError as error:  # ~somebody
        raise _unusable(f"{layers} cannot be read: {error}") from error
    here = MeasuredWith.of(options, model, machine)
    differing = [
        f"{name}: {theirs}, here {ours}"
        for name, theirs in msgspec.structs.asdict(times.measured_with).items()
        if theirs != (ours := getattr(here, name))
    ]
    if differing or len(times.layers) != model.num_layers:
        raise _unusable(
            f"{layers} was measured with something else: {'; '.join(differing) or f'{len(times.layers)} layers'}."
        )
    load = (
        f"a prompt of {times.prompt_len} tokens and {OUTPUT_LEN} more in batches of {times.batch}"
    )
    ends = times.divide(num)
    spent = ", ".join(f"{ms:.0f}" for ms in stage_ms(times, ends))
    return counts_of(ends), f"measured ({layers}): {spent} ms for {load}"


def stage_ms(times: LayerTimes, ends: tuple[int, ...]) -> list[float]:
    """The time that each stage takes for a prompt and its output."""
    sums = [0, *accumulate(map(times.cost, times.layers))]
    costs = [sums[end] - sums[begin] for begin, end in zip((0, *ends), ends, strict=False)]
    costs[0] += times.cost(times.embedding)
    costs[-1] += times.cost(times.head)
    return [cost / 1e6 for cost in costs]


def _given(text: str, num_stages: int, model: ModelConfig) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    counts = tuple(int(part) if re.fullmatch(r"\d{1,6}", part) else 0 for part in parts)
    if len(counts) != num_stages or sum(counts) != model.num_layers or min(counts) < 1:
        raise ConfigError(
            f"pipeline_layers is {text!r}, for {num_stages} stages of a model with {model.num_layers} layers.",
            fix=f"Give {num_stages} numbers of at least 1 that are {model.num_layers} together.",
            param="pipeline_layers",
        )
    return counts


def counts_of(ends: tuple[int, ...]) -> tuple[int, ...]:
    """Layers of each stage."""
    return tuple(end - begin for begin, end in zip((0, *ends), ends, strict=False))


def stages_of(counts: tuple[int, ...]) -> list[Stage]:
    ends = [*accumulate(counts)]
    return [
        Stage(number, len(counts), end - counts[number], end) for number, end in enumerate(ends)
    ]


def kv_layers(model: ModelConfig, stage: Stage) -> list[int]:
    """The layers with keys and values of a stage."""
    with_kv = [layer for layer, spec in enumerate(model.layers) if spec.reads_tokens]
    return [number for number, layer in enumerate(with_kv) if layer in stage]


def computed_ends(model: ModelConfig, num_stages: int) -> tuple[int, ...]:
    """Stages cost about the same: what a token reads of their weights, and of the head. Where that
    is possible, none holds more than its share and a twentieth of all weights."""
    table = model.vocab_size * model.hidden_size
    sizes, costs = _layer_sizes(model, is_active=False), _layer_sizes(model, is_active=True)
    most = _MOST_HELD * (sum(sizes) + table * (1 if model.tie_embeddings else 2)) / num_stages

    def fits(begin: int, end: int) -> bool:
        return sum(sizes[begin:end]) + table * ((begin == 0) + (end == model.num_layers)) <= most

    ends = split_layers(costs, num_stages, table, fits) or split_layers(costs, num_stages, table)
    assert ends is not None
    return ends


def _layer_sizes(model: ModelConfig, is_active: bool) -> list[int]:
    """Weights of each layer. `is_active`: those that a token is multiplied by."""

    def size(model: ModelConfig) -> int:
        return model.num_active_parameters if is_active else model.num_parameters

    rest = replace(model, layers=model.layers[:1], experts=model.experts[:1], stored={})
    small = replace(rest, vocab_size=1, num_positions=0, num_token_types=0)
    embeddings = size(rest) - size(small) + model.hidden_size * (1 if model.tie_embeddings else 2)
    ones = [
        replace(rest, layers=(spec,), experts=model.experts[at : at + 1])
        for at, spec in enumerate(model.layers)
    ]
    return [size(model) - embeddings for model in ones]


def _shape_of(model: ModelConfig) -> str:
    """Not of its path or the numbers in it: another checkpoint of the same shape takes as long."""
    about = (
        model.architecture,
        model.hidden_size,
        model.intermediate_size,
        model.vocab_size,
        model.layers,
        model.experts,
    )
    return hashlib.sha256(repr((*about, sorted(model.stored.items()))).encode()).hexdigest()[:16]


def _name_of(machine: Machine) -> str:
    if machine.gpu:
        return machine.gpu
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:  # not Linux
        found = None
    return f"{found[1] if found else platform.machine()}, {machine.num_cores} cores, {machine.kernels or 'torch'}"
