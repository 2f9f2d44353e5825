"""The decision which neurons of a model with ReLUs are on a GPU, and which in host memory."""

from __future__ import annotations

from typing import NamedTuple

from tidemill.config.options import Decision, EngineOptions
from tidemill.config.sizes import MIB, fmt_bytes
from tidemill.errors import ConfigError
from tidemill.machine import Machine
from tidemill.model_config import ModelConfig

RELUS = ("relu", "relu2")
_UNIT = 64  # neurons: tiles of the kernels are whole


class HotNeurons(NamedTuple):
    """`folder`: says how often neurons are used. `num`: of each layer, those on the GPU. `gates_on_gpu`: so are the gates of the
    others."""

    folder: str
    num: int
    gates_on_gpu: bool


def decide_hot_neurons(
    options: EngineOptions, device: str, scheme: str, max_loras: int, total: int, weight_memory: int, model: ModelConfig,
    machine: Machine,
) -> Decision[HotNeurons | None]:  # fmt: skip
    """`total`: bytes of all weights; `weight_memory`: of those on the GPU, 0: all."""
    folder = options.hot_neurons
    if folder is None:
        return None, "neurons are not divided between GPU and CPU"
    wrong = {
        f"the activation {model.act}, which is hardly ever zero": model.act not in RELUS,
        "a feed-forward without a gate": not model.is_gated,
        "experts": any(model.experts),
        "a CPU": device != "cuda",
        "quantized weights": scheme != "dense",
        "adapters": max_loras > 0,
    }
    fixes = {
        "a CPU": "Leave --hot-neurons out: --weight-memory alone reads the neurons that are not zero from disk.",
        "quantized weights": "Leave --quantization out, or use the checkpoint it was made of.",
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            fix = fixes.get(what, "Leave --hot-neurons out: --weight-memory alone streams whole layers.")
            raise ConfigError(f"hot_neurons cannot be combined with {what}.", fix=fix, param="hot_neurons")
    if options.weight_memory_bytes is None:
        fix = "Say how much of the GPU's memory weights may take with --weight-memory."
        raise ConfigError("hot_neurons needs weight_memory.", fix=fix, param="hot_neurons")
    if not machine.kernels:
        fix = "Install again with a C compiler, or leave --hot-neurons out."
        raise ConfigError("hot_neurons needs the compiled kernels, which are not there.", fix=fix, param="hot_neurons")
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
    return HotNeurons(folder, num, gates_on_gpu), where + f"computed by the CPU from host memory, if not zero ({gates})"
