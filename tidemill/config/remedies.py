"""The remedies for a model that does not fit in memory, with the figures of this model on this
machine."""

from __future__ import annotations

from tidemill.config.gpu_weights import gpu_weight_bytes
from tidemill.config.options import EngineOptions
from tidemill.config.sizes import MIB, fmt_bytes
from tidemill.config.streaming import least_weight_memory
from tidemill.machine import Machine
from tidemill.types.model_config import ModelConfig

_BITS_Q4_K_M = 4.85  # of a weight, on average
_WORTH = 1.5  # as much memory as a quantized checkpoint, from where one is advised
# of a GPU's memory for weights, where they are shared out: the rest is for the cache and
# activations
_IN_USE = 0.9


def remedies(
    options: EngineOptions, device: str, scheme: str, model: ModelConfig, machine: Machine,
    weights: int, activations: int, left: int,
) -> list[str]:  # fmt: skip
    """Each with an option and a figure, those that lose nothing first. `weights`, `activations`:
    bytes that they take; `left`: what the latter leave."""
    found = []
    most = int(_IN_USE * left) // MIB
    can_stream = model.pooler is None and options.tensor_parallel * options.pipeline_parallel == 1
    if can_stream and least_weight_memory(model, weights) <= most * MIB < weights:
        where = "host memory" if device == "cuda" else "disk"
        found.append(
            f"--weight-memory {most}M keeps as much of the weights there and reads the others from {where}, slower"
        )
    if device == "cuda":
        if scheme == "dense":
            sizes = (
                f"{kind} ({fmt_bytes(gpu_weight_bytes(model, kind))})" for kind in ("fp8", "int4")
            )
            found.append(f"--quantization {' or '.join(sizes)}")
        num = -(-weights // max(1, int(_IN_USE * left))) if left > 0 else 0
        if options.tensor_parallel < num <= 64:
            num = 1 << (num - 1).bit_length()
            here = (
                f"this machine has {machine.num_gpus}"
                if machine.num_gpus < num
                else f"{fmt_bytes(weights // num)} on each"
            )
            found.append(
                f"--tensor-parallel {num} shares it among {num} GPUs like this one ({here})"
            )
    elif weights > _WORTH * model.num_parameters * _BITS_Q4_K_M / 8:
        size = fmt_bytes(model.num_parameters * _BITS_Q4_K_M / 8)
        found.append(
            f"a quantized checkpoint, such as org/name:Q4_K_M of a GGUF repository, takes about {size} for weights"
        )
    found.append(
        f"--max-requests and --token-budget, if lower, take less than {fmt_bytes(activations)} for activations"
    )
    return found
