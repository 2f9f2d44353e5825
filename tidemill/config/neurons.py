"""The decision which neurons of a model with ReLUs are on a GPU, and which in host memory."""

from __future__ import annotations

from typing import NamedTuple

from tidemill.config.options import Decision, EngineOptions
from tidemill.config.sizes import MIB, fmt_bytes
from tidemill.errors import ConfigError
from tidemill.types.model_config import ModelConfig

_UNIT = 64  # neurons: tiles of the kernels are whole


class HotNeurons(NamedTuple):
    """`folder`: says how often neurons are used. `num`: of each layer, those on the GPU.
    `gates_on_gpu`: so are the gates of the others."""

    folder: str
    num: int
    gates_on_gpu: bool


def decide_hot_neurons(
    options: EngineOptions, total: int, weight_memory: int, model: ModelConfig
) -> Decision[HotNeurons | None]:
    """`total`: bytes of all weights; `weight_memory`: of those on the GPU, 0: all."""
    folder = options.hot_neurons
    if folder is None:
        return None, "neurons are not divided between GPU and CPU"
    if not weight_memory:
        return None, "all neurons are on the GPU: they fit"
    each = 2 * model.hidden_size * model.num_layers  # bytes of a row of one matrix, in all layers
    matrix = each * model.intermediate_size
    room = weight_memory - (total - 3 * matrix)
    num, gates_on_gpu = (room - matrix) // (2 * each) // _UNIT * _UNIT, True
    if num < _UNIT:
        num, gates_on_gpu = room // (3 * each) // _UNIT * _UNIT, False
    if num < _UNIT:
        least = total - 3 * matrix + _UNIT * 3 * each
        raise ConfigError(
            f"{fmt_bytes(weight_memory)} of GPU memory for weights are too few: {fmt_bytes(total - 3 * matrix)} of attention and "
            f"tables, and {_UNIT} neurons of each layer must be there.",
            fix=f"Give at least {-(-least // MIB)}M with --weight-memory.",
            param="weight_memory_bytes",
        )
    num = min(num, model.intermediate_size // _UNIT * _UNIT)
    gates = "their gates are on the GPU" if gates_on_gpu else "their gates, too"
    where = f"{num:,} of the {model.intermediate_size:,} neurons of each layer on the GPU, the most frequent; the others are "
    return HotNeurons(
        folder, num, gates_on_gpu
    ), where + f"computed by the CPU from host memory, if not zero ({gates})"
