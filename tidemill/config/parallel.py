"""Decisions about several ranks that compute one model together."""

from __future__ import annotations

from tidemill.config.choices import COLLECTIVES, MAX_RANKS, TENSOR_LAYOUTS
from tidemill.config.options import Decision, EngineOptions, one_of
from tidemill.errors import ConfigError
from tidemill.machine import Machine
from tidemill.types.model_config import ModelConfig


def decide_ranks(
    options: EngineOptions, device: str, model: ModelConfig, machine: Machine
) -> Decision[tuple[int, int]]:
    """Ranks that share a layer, and stages of layers. Refuses what several ranks cannot do."""
    tensor, stages = options.tensor_parallel, options.pipeline_parallel
    for name, value in (("tensor_parallel", tensor), ("pipeline_parallel", stages)):
        if not 1 <= value <= MAX_RANKS:
            raise ConfigError(
                f"{name} is {value}.", fix=f"It must be from 1 to {MAX_RANKS}.", param=name
            )
    num = tensor * stages
    if num > MAX_RANKS:
        fix = f"At most {MAX_RANKS} ranks can work together."
        raise ConfigError(
            f"tensor_parallel {tensor} and pipeline_parallel {stages} are {num} ranks.", fix=fix
        )
    if not 0 <= options.remote_workers < max(num, 2):
        raise ConfigError(
            f"remote_workers is {options.remote_workers}, and there are {num} ranks.",
            fix="At least rank 0 is on this host: give fewer, or raise --tensor-parallel or --pipeline-parallel.",
            param="remote_workers",
        )
    if num == 1:
        return (1, 1), "one process"
    if stages > model.num_layers:
        fix = f"Use --pipeline-parallel {model.num_layers} or less."
        raise ConfigError(
            f"{stages} stages, but the model has {model.num_layers} layers.",
            fix=fix,
            param="pipeline_parallel",
        )
    workers_address(options)
    if device == "cuda" and num > machine.num_gpus:
        return (
            (tensor, stages),
            f"given; they share {machine.num_gpus} GPU, which is slower than one rank: a trial, not a layout",
        )
    return (tensor, stages), "given"


def decide_tensor_layout(options: EngineOptions) -> Decision[str]:
    """`auto` is settled where the cost of layouts is known (runner/rank.py)."""
    layout = one_of("tensor_layout", options.tensor_layout, TENSOR_LAYOUTS)
    if layout not in ("1d", "auto"):
        return layout, "given"
    is_divided = options.tensor_parallel > 1
    return (
        "1d",
        "heads and columns of every layer are divided"
        if is_divided
        else "one rank has all of every layer",
    )


def decide_collectives(options: EngineOptions, device: str) -> Decision[str]:
    """`auto` is settled where ranks know which hosts they are on (parallel/peers.py)."""
    if one_of("collectives", options.collectives, COLLECTIVES) != "auto":
        return options.collectives, "given"
    is_used = device == "cuda" and options.tensor_parallel > 1
    return (
        "auto",
        "CUDA IPC on one host, NCCL between hosts" if is_used else "no GPUs that share layers",
    )


def workers_address(options: EngineOptions) -> tuple[str, int] | None:
    """The address where workers of other hosts connect."""
    address = options.workers_address
    if not options.remote_workers or address is None:
        return None
    host, _, port = address.rpartition(":")
    if not host or host == "0.0.0.0" or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"workers_address is {address!r}.",
            fix="Give HOST:PORT, by which other hosts reach this one, like 10.0.0.1:29500.",
            param="workers_address",
        )
    return host, int(port)
