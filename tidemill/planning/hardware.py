"""Devices, and what a step of a model costs on a group of them: estimated from the model's shape.

A step takes the longer of computing its tokens and reading the weights; then reading the KV cache
of sequences that decode and computing the attention of prompts; then what ranks send each other,
and a fixed part. `parallel/layouts.py` has weights, computing and sending. Layers with a window
read what they would read on average over the load (`Seen`). A pipeline works as
`runner/stage_runner.py` does: a step is cut into micro-batches that follow each other through the
stages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

from tidemill.config.cache import bytes_of_page, decide_layout
from tidemill.distributed import layouts
from tidemill.distributed.cuts import rank_config
from tidemill.distributed.layouts import Layout, Phase
from tidemill.distributed.shard import Shard
from tidemill.distributed.stages import computed_ends, counts_of, kv_layers, stages_of
from tidemill.errors import ConfigError
from tidemill.planning.cost import Shapes, StepShape
from tidemill.sched.plan import StepPlan
from tidemill.types.cache_layout import CacheLayout
from tidemill.types.model_config import ModelConfig

_SMALLEST_BATCH = 32  # tokens of a micro-batch
_BATCHES_A_STAGE = 2
_USABLE = 0.9  # of the memory: the rest is activations, graphs and the allocator's


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device, and how it is linked to others. `link`: bytes a second by which a KV cache travels,
    through host memory."""

    name: str
    device: layouts.Device
    memory_bytes: int
    on_host: int  # devices of a host
    on_engine: int  # devices that can compute one model together
    link: float
    fixed_s: float  # of a step: launching, sampling, and waiting for the host
    has_pipelines: bool  # whether the engine has them there


HARDWARE = {
    hardware.name: hardware
    for hardware in (
        Hardware(
            "H200",
            layouts.DEVICES["h200"],
            141_000_000_000,
            8,
            8,
            40e9,
            250e-6,
            has_pipelines=False,
        ),
        Hardware(
            "A100", layouts.DEVICES["a100"], 80_000_000_000, 8, 8, 20e9, 300e-6, has_pipelines=False
        ),
        Hardware(
            "CPU", layouts.DEVICES["cpu"], 16_000_000_000, 1, 16, 4e9, 1e-3, has_pipelines=True
        ),
    )
}


def parse_devices(text: str) -> tuple[int, Hardware]:
    """Like 8xH200."""
    match = re.fullmatch(r"(\d{1,6})\s*[x*]\s*(\w+)", text.strip())
    found = match and HARDWARE.get(match[2].upper())
    if not match or not found or int(match[1]) < 1:
        raise ConfigError(
            f"--devices {text!r} is not a number and a device.",
            fix=f"Known: 8x{', 8x'.join(HARDWARE)}.",
        )
    return int(match[1]), found


@dataclass(frozen=True, slots=True)
class Shape:
    """The cut of a model over the devices of one engine."""

    tensor: int = 1
    stages: int = 1

    @property
    def num_devices(self) -> int:
        return self.tensor * self.stages

    def __str__(self) -> str:
        return f"TP{self.tensor}" + (f"×PP{self.stages}" if self.stages > 1 else "")


ONE = Shape()


@dataclass(frozen=True, slots=True)
class Estimate:
    """A CostModel. All seconds are of one stage; `stages` follow each other."""

    fixed_s: float
    few_weights_s: float  # read for a few tokens: of experts the chosen ones
    weights_s: float
    num_few: int  # tokens from which on all weights are read
    token_s: float  # computing
    draw_s: float  # computing the logits of a token
    kv_token_s: float  # reading the keys and values of a token
    pair_s: float  # computing one query with one key
    sent_s: float  # collectives that begin
    sent_token_s: float
    stages: int = 1
    hop_s: float = 0.0  # to the next stage
    hop_token_s: float = 0.0
    state_s: float = 0.0  # reading and writing the state of a sequence

    def step_s(self, plan: StepPlan) -> float:
        return self.shape_s(Shapes(1).of(plan))

    def shape_s(self, shape: StepShape) -> float:
        return self.seconds(
            shape.num_decoding + shape.num_prompt,
            shape.num_draws,
            shape.decode_context,
            shape.pairs,
        )

    def decode_line(self, num_decoding: int) -> tuple[float, float, float]:
        fixed = self.seconds(num_decoding, num_decoding, 0, 0)
        num = self._num_batches(num_decoding)
        return fixed, self.kv_token_s * (self.stages + num - 1) / num, 0.0

    def _num_batches(self, num_tokens: int) -> int:
        return (
            1
            if self.stages == 1
            else max(1, min(num_tokens // _SMALLEST_BATCH, _BATCHES_A_STAGE * self.stages))
        )

    def seconds(self, num_tokens: int, num_draws: int, context: int, pairs: int) -> float:
        """`context`: tokens that sequences which decode see. `pairs`: of a prompt's token and one
        that it sees."""
        num = self._num_batches(num_tokens)
        stage_s = self._stage_s(num_tokens / num, num_draws / num, context / num, pairs / num)
        hop = self.hop_s + self.hop_token_s * num_tokens / num
        return self.fixed_s + (self.stages + num - 1) * (stage_s + hop)

    def _stage_s(self, num_tokens: float, num_draws: float, context: float, pairs: float) -> float:
        weights = self.weights_s if num_tokens >= self.num_few else self.few_weights_s
        linear = (
            max(self.token_s * num_tokens + self.draw_s * num_draws, weights)
            + self.state_s * num_draws
        )
        return (
            linear
            + self.kv_token_s * context
            + self.pair_s * pairs
            + self.sent_s
            + self.sent_token_s * num_tokens
        )

    def prefill_floor_s(self, start: int, end: int, budget: int) -> float:
        """No way of computing tokens start..end-1 in steps of at most `budget` takes less time,
        whoever else is in the steps."""
        num, num_steps = end - start, -(-(end - start) // budget)
        linear = max(self.token_s * num, num_steps * self.few_weights_s)
        attention = self.pair_s * (num * (start + end + 1) // 2)
        return num_steps * self.fixed_s + linear + attention + self.sent_token_s * num

    def decode_floor_s(self, context: int) -> float:
        """No step that decodes a sequence of so many tokens takes less time."""
        return (
            self.fixed_s
            + self.stages * (self.few_weights_s + self.sent_s + self.hop_s)
            + self.kv_token_s * context
        )


# of an engine; the bytes of a page on the device with the largest
Cache: TypeAlias = tuple[CacheLayout, int]


class Seen:
    """The part of the tokens before it that a token of a load sees in a layer with a window: on
    average, since a step's cost knows the sum of all contexts and not each. `lengths`: of each
    request, its prompt and its output."""

    def __init__(self, lengths: Iterable[tuple[int, int]] = ()) -> None:
        self._lengths = list(lengths)

    def by_prompts(self, window: int) -> float:
        return self._part(window, (range(1, prompt + 1) for prompt, _ in self._lengths))

    def by_outputs(self, window: int) -> float:
        return self._part(
            window, (range(prompt + 1, prompt + output + 1) for prompt, output in self._lengths)
        )

    def at_once(self, window: int) -> float:
        """The part of its prompt that is still seen when it ends."""
        return self._part(window, (range(prompt, prompt + 1) for prompt, _ in self._lengths))

    def _part(self, window: int, contexts: Iterable[range]) -> float:
        if not window:
            return 1.0
        total = seen = 0
        for context in contexts:
            total += _sum_to(context.stop - 1) - _sum_to(context.start - 1)
            seen += _sum_to(context.stop - 1, window) - _sum_to(context.start - 1, window)
        return seen / total if total else 1.0


def _sum_to(num: int, most: int = 0) -> int:
    """1 + 2 + ... + num, of which none counts for more than `most`."""
    rising = min(num, most) if most else num
    return rising * (rising + 1) // 2 + (num - rising) * most


def estimate(
    model: ModelConfig, hardware: Hardware, shape: Shape, seen: Seen | None = None
) -> Estimate:
    """The estimated cost of a model whose weights and KV cache are stored as the device's own.
    `seen`: None: no layer has a window."""
    device, stages, seen = hardware.device, shape.stages, seen or Seen()

    def cost(num_tokens: int, context: int = 0) -> layouts.Cost:
        return layouts.cost(
            model, Layout(), shape.tensor, Phase("step", num_tokens, 1, context), device
        )

    first, two, many = cost(1), cost(2), cost(2**20)
    # the part of computing that is the logits'
    head = model.vocab_size * model.hidden_size / model.num_active_parameters
    tables = head if model.tie_embeddings else 2 * head  # looking up an embedding computes nothing
    specs = model.token_layers
    by_prompts = of_windows(model, seen.by_prompts)
    width = sum(spec.num_heads * spec.head_dim * by_prompts[spec.window] for spec in specs)
    read = _mean_of_layers(model, seen.by_outputs)
    sent_token_s = two.sent_s - first.sent_s
    hops = stages > 1
    num_few = layouts.tokens_of_all_experts(model)
    return Estimate(
        fixed_s=hardware.fixed_s,
        few_weights_s=first.memory_s / stages,
        weights_s=many.memory_s / stages,
        num_few=num_few,
        token_s=first.compute_s * (1 - tables) / stages,
        draw_s=first.compute_s * head / stages,
        kv_token_s=(cost(1, 1).memory_s - first.memory_s) * read / stages,
        pair_s=4 * width / (shape.tensor * device.flops) / stages,
        sent_s=(first.sent_s - sent_token_s) / stages,
        sent_token_s=sent_token_s / stages,
        stages=stages,
        hop_s=device.latency if hops else 0.0,
        hop_token_s=model.hidden_size * device.activation_bytes / device.link if hops else 0.0,
        state_s=2 * model.state_bytes / (shape.tensor * device.memory) / stages,
    )


def kv_dtype(hardware: Hardware) -> str:
    return "bfloat16" if hardware.device.activation_bytes == 2 else "float32"


def of_windows(model: ModelConfig, part: Callable[[int], float]) -> dict[int, float]:
    return {window: part(window) for window in {spec.window for spec in model.layers}}


def _mean_of_layers(model: ModelConfig, part: Callable[[int], float]) -> float:
    """The mean over the layers with keys and values."""
    specs, parts = model.token_layers, of_windows(model, part)
    return sum(parts[spec.window] for spec in specs) / max(len(specs), 1)


def sent_bytes(model: ModelConfig, hardware: Hardware, seen: Seen) -> float:
    """The bytes sent for a prompt's token when a request moves to another engine: what its layers
    still see, on average."""
    return model.kv_bytes_per_token(kv_dtype(hardware)) * _mean_of_layers(model, seen.at_once)


def free_bytes(
    model: ModelConfig, hardware: Hardware, shape: Shape, taken_bytes: float = 0.0
) -> float:
    """The free bytes of each device, for a KV cache beside the weights; below 0: not even those
    fit. `taken_bytes`: of each device."""
    weights = model.num_parameters * hardware.device.weight_bytes / shape.num_devices
    return _USABLE * hardware.memory_bytes - taken_bytes - weights


def cache_of(
    model: ModelConfig, hardware: Hardware, shape: Shape, page_size: int, context: int
) -> Cache | None:
    """The cache in the layout of an engine of this shape. None: the model cannot be cut so."""
    if (model.num_heads or shape.tensor) % shape.tensor or model.num_layers < shape.stages:
        return None
    dtype = kv_dtype(hardware)
    try:
        parts = [rank_config(model, Shard(rank, shape.tensor)) for rank in range(shape.tensor)]
        part = max(parts, key=lambda part: part.num_kv_heads)
        layout, _ = decide_layout(part, dtype, page_size, context)
    except ConfigError:
        return None
    stages = stages_of(counts_of(computed_ends(model, shape.stages))) if shape.stages > 1 else []
    held = max(
        [layout.only(kv_layers(model, stage)) for stage in stages] or [layout],
        key=lambda part: part.layers_per_page,
    )
    return layout, bytes_of_page(part, dtype, page_size, held)


def with_link(hardware: Hardware, link: float | None) -> Hardware:
    if link is None:
        return hardware
    if not 1 <= link < 1e18:
        raise ConfigError(
            "--link must be above 0.", fix="Give the bytes a second, like 40G.", param="link"
        )
    return replace(hardware, link=link)
