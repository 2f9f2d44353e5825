"""The costs of layouts of a model over ranks, by phase: the model of "Efficiently Scaling
Transformer Inference" (Pope et al. 2022).

T tokens go through a layer of hidden size E, whose blocks (attention, feed-forward) have an inner
size F, on n ranks:

- weight-stationary, 1D: a rank has F / n inner values. Activations of all tokens are summed over ranks: 2 T E values a block.
- weight-stationary, 2D: ranks are a grid X × Y, a rank has E / X by F / Y: 2 T (E / X + F / Y) values a block. Attention, and its
  keys and values, are divided by Y alone.
- weights gathered from N ranks before their use (N = n: activations stay where they are): W N / n weights, and of activations
  what 1D sends for T / N tokens. With N = n, attention is by heads, for which T / n tokens are exchanged.
- the same with N = n on one host, where a rank multiplies by all ranks' weights as they lie in shared memory: it reads W weights,
  and none are sent. The engine's layout phased has this and 1D, whichever is faster for a step.

A step takes the longer of computing and reading memory, and what it sends. Ints and floats only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tidemill.capabilities.features import grid_of
from tidemill.types.model_config import ModelConfig

_MOST_TOKENS = 2**16  # of a step


@dataclass(frozen=True, slots=True)
class Device:
    """The device of one rank: operations and bytes a second that are reached, and seconds until a
    collective begins to send."""

    flops: float
    memory: float
    link: float
    latency: float
    weight_bytes: float  # of a value
    activation_bytes: float
    shares_memory: bool = False  # ranks read each other's weights where they are


DEVICES = {
    "cpu": Device(100e9, 20e9, 8e9, 20e-6, 4, 4, shares_memory=True),
    "a100": Device(200e12, 1.6e12, 250e9, 8e-6, 2, 2),
    "h200": Device(600e12, 4.0e12, 380e9, 6e-6, 2, 2),
}


def rank_of_host(flops: float, memory: float, copies: float, num_ranks: int) -> Device:
    """One of so many ranks that share a host of these rates. What it sends is copied into shared
    memory and out of it."""
    return replace(
        DEVICES["cpu"],
        flops=flops / num_ranks,
        memory=memory / num_ranks,
        link=copies / 2 / num_ranks,
    )


@dataclass(frozen=True, slots=True)
class Layout:
    grid: int = 1  # X: parts of the hidden size
    gathered: int = 1  # N: ranks from which weights are gathered before their use
    in_place: bool = False  # they are in memory that all ranks read

    @property
    def name(self) -> str:
        if self.gathered > 1:
            return (
                "weights of all ranks in shared memory"
                if self.in_place
                else f"weights gathered from {self.gathered}"
            )
        return (
            "1D weight-stationary" if self.grid == 1 else f"2D weight-stationary, X = {self.grid}"
        )

    def name_of(self, size: int) -> str:
        """That --tensor-layout has for it; empty: the engine does not have it."""
        if self.gathered > 1:
            return "phased" if self.in_place else "gathered" if self.gathered == size else ""
        return "1d" if self.grid == 1 else "2d" if self.grid == grid_of(size) else ""

    def is_there(self, size: int) -> bool:
        """Tells if the engine has it."""
        return size == 1 or bool(self.name_of(size))


@dataclass(frozen=True, slots=True)
class Phase:
    """`num_tokens`: of a step. `context`: tokens whose keys and values each of `num_sequences`
    reads."""

    name: str
    num_tokens: int
    num_sequences: int
    context: int


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a step, in all layers."""

    layout: Layout
    compute_s: float
    memory_s: float
    sent_s: float
    sent_bytes: float  # by a rank

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.memory_s) + self.sent_s


def layouts(size: int, shares_memory: bool = True) -> list[Layout]:
    """Those of so many ranks."""
    divisors = [num for num in range(2, size + 1) if size % num == 0]
    stationary = [Layout(), *(Layout(grid=num) for num in divisors if num < size)]
    shared = [Layout(gathered=size, in_place=True)] if size > 1 and shares_memory else []
    return [*stationary, *(Layout(gathered=num) for num in divisors), *shared]


def cost(model: ModelConfig, layout: Layout, size: int, phase: Phase, device: Device) -> Cost:
    values = model.num_active_parameters
    read = values if phase.num_tokens < tokens_of_all_experts(model) else model.num_parameters
    weights = read * device.weight_bytes * layout.gathered / size
    kv = (
        phase.num_sequences
        * phase.context
        * model.kv_bytes_per_token("float32")
        * device.activation_bytes
        / 4
    )
    # all of them: rows become heads for attention
    by_rows = 1 if layout.gathered == size else layout.gathered
    by_heads = max(1, min(size // by_rows // layout.grid, model.num_kv_heads or size))
    kv /= by_heads * min(by_rows, phase.num_sequences)
    sent, num_collectives = _sent(model, layout, size, phase, device)
    return Cost(
        layout,
        2 * values * phase.num_tokens / (size * device.flops),
        (weights + kv) / device.memory,
        sent / device.link + num_collectives * device.latency,
        sent,
    )


def tokens_of_all_experts(model: ModelConfig) -> int:
    """Tokens of a step from which on every expert is read; 0: there are none."""
    return max((-(-spec.num_experts // spec.top_k) for spec in model.experts if spec), default=0)


def _sent(
    model: ModelConfig, layout: Layout, size: int, phase: Phase, device: Device
) -> tuple[float, int]:
    """Bytes that a rank sends, and collectives."""
    if size == 1:
        return 0.0, 0
    left, tokens, total, num = size // layout.gathered, phase.num_tokens / layout.gathered, 0.0, 0
    for layer in range(model.num_layers):
        for inner in _inner_sizes(model, layer):
            if left > 1 and layout.grid == 1:
                total += (
                    2 * tokens * model.hidden_size * device.activation_bytes * (left - 1) / left
                )
                num += 1
            elif left > 1:
                width = model.hidden_size / layout.grid + inner * layout.grid / left
                total += 2 * tokens * width * device.activation_bytes
                num += 4
            num += layout.gathered > 1
        if layout.gathered == size:  # rows for heads, and back
            total += tokens * model.layers[layer].num_exchanged * device.activation_bytes
    if layout.gathered > 1 and not layout.in_place:
        total += model.num_parameters * device.weight_bytes * (layout.gathered - 1) / size
    return total, num


def _inner_sizes(model: ModelConfig, layer: int) -> list[int]:
    """The inner sizes of a layer's blocks, between their two projections."""
    moe, own = model.moe(layer), [model.layers[layer].num_inner]
    fed = model.intermediate_size if moe is None else moe.top_k * moe.expert_size + moe.shared_size
    return [*own, fed] if fed else own


def rank_costs(model: ModelConfig, size: int, phase: Phase, device: Device) -> list[Cost]:
    """The costs of all layouts, the fastest first."""
    return sorted(
        (
            cost(model, layout, size, phase, device)
            for layout in layouts(size, device.shares_memory)
        ),
        key=lambda found: found.seconds,
    )


def engine_seconds(model: ModelConfig, size: int, phase: Phase, device: Device) -> dict[str, float]:
    """The time of a step in each layout that the engine has, by its name."""
    seconds = {
        layout.name_of(size): cost(model, layout, size, phase, device).seconds
        for layout in layouts(size, device.shares_memory)
    }
    seconds.pop("", None)
    if "phased" in seconds:
        seconds["phased"] = min(seconds["phased"], seconds["1d"])
    return seconds


def gather_from(model: ModelConfig, size: int, device: Device) -> int:
    """Tokens of a step from which on weights in shared memory are faster than 1D; 0: they never
    are. Bits do not depend on it."""

    def is_faster(num_tokens: int) -> bool:
        phase = Phase("", num_tokens, 1, 0)
        stationary, shared = Layout(), Layout(gathered=size, in_place=True)
        return (
            cost(model, shared, size, phase, device).seconds
            < cost(model, stationary, size, phase, device).seconds
        )

    few, many = size - 1, _MOST_TOKENS  # a rank has at least one row
    if not is_faster(many):
        return 0
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if is_faster(middle) else (middle, many)
    return many


def choose(costs: Sequence[Cost], size: int) -> Cost:
    """The fastest that the engine has."""
    return next(found for found in costs if found.layout.is_there(size))
