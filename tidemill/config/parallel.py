"""Decisions about several ranks that compute one model together."""

from __future__ import annotations

from tidemill.config.drafts import HEADS
from tidemill.config.options import Decision, EngineOptions
from tidemill.errors import ConfigError
from tidemill.machine import Machine
from tidemill.model_config import ModelConfig

MAX_RANKS = 64
TENSOR_LAYOUTS = ("1d", "2d", "gathered", "phased", "auto")
COLLECTIVES = ("auto", "ipc", "nccl")


def decide_ranks(options: EngineOptions, device: str, model: ModelConfig, machine: Machine) -> Decision[tuple[int, int]]:
    """Ranks that share a layer, and stages of layers. Refuses what several ranks cannot do."""
    tensor, stages = options.tensor_parallel, options.pipeline_parallel
    for name, value in (("tensor_parallel", tensor), ("pipeline_parallel", stages)):
        if not 1 <= value <= MAX_RANKS:
            raise ConfigError(f"{name} is {value}.", fix=f"It must be from 1 to {MAX_RANKS}.", param=name)
    num = tensor * stages
    if num > MAX_RANKS:
        fix = f"At most {MAX_RANKS} ranks can work together."
        raise ConfigError(f"tensor_parallel {tensor} and pipeline_parallel {stages} are {num} ranks.", fix=fix)
    if not 0 <= options.remote_workers < max(num, 1) or (options.remote_workers and num == 1):
        raise ConfigError(
            f"remote_workers is {options.remote_workers}, and there are {num} ranks.",
            fix="At least rank 0 is on this host: give fewer, or raise --tensor-parallel or --pipeline-parallel.",
            param="remote_workers",
        )
    if num == 1:
        if options.expert_parallel:
            fix = "Give --tensor-parallel as well."
            raise ConfigError("expert_parallel needs several ranks.", fix=fix, param="expert_parallel")
        return (1, 1), "one process"
    if stages > model.num_layers:
        fix = f"Use --pipeline-parallel {model.num_layers} or less."
        raise ConfigError(f"{stages} stages, but the model has {model.num_layers} layers.", fix=fix, param="pipeline_parallel")
    if options.expert_parallel and not any(model.experts):
        raise ConfigError("expert_parallel: the model has no experts.", fix="Leave it out.", param="expert_parallel")
    _check_combinations(options, device, model, num)
    _check_remote(options)
    if device == "cuda" and num > machine.num_gpus:
        return (tensor, stages), f"given; they share {machine.num_gpus} GPU, which is slower than one rank: a trial, not a layout"
    return (tensor, stages), "given"


def _check_combinations(options: EngineOptions, device: str, model: ModelConfig, num: int) -> None:
    stages = device == "cuda" and options.pipeline_parallel > 1
    is_there = {
        "device cuda and --quantization sparse24": device == "cuda" and options.quantization == "sparse24",
        "device cuda, --pipeline-parallel and --nano-batching": stages and options.nano_batching == "on",
        "device cuda, --pipeline-parallel and states": stages and bool(model.has_states),
        "an encoder": model.pooler is not None,
        "--kv-layout virtual": options.kv_layout != "paged",
        "device cuda and --kv-host-memory": device == "cuda" and options.kv_host_memory_bytes is not None,
        "device cuda and --kv-disk": device == "cuda" and options.kv_disk is not None,
        "--kv-export or --kv-import by nixl": any("nixl:" in (text or "") for text in (options.kv_export, options.kv_import)),
        "device cuda and KV pages of other engines": device == "cuda" and bool(options.kv_export or options.kv_import),
        "--kv-calibration": options.kv_calibration is not None,
        "device cuda and --lora": device == "cuda" and (bool(options.loras) or options.max_loras is not None),
        f"--speculate {options.speculate}": options.speculate in HEADS,
        "--fast-math": options.fast_math,
    }
    for what, is_asked in is_there.items():
        if is_asked:
            fix = "Leave one of them out."
            raise ConfigError(f"{num} ranks cannot be combined with {what} yet.", fix=fix, param="tensor_parallel")


def grid_of(size: int) -> int:
    """X of the 2D layout of so many ranks: as near to a square as can be; 1: there is none."""
    return max(num for num in range(1, size) if size % num == 0 and num * num <= size) if size > 1 else 1


def decide_tensor_layout(options: EngineOptions, device: str, model: ModelConfig, machine: Machine) -> Decision[str]:
    """`auto` is settled where the cost of layouts is known (runner/rank.py)."""
    layout, size = options.tensor_layout, options.tensor_parallel
    if layout not in TENSOR_LAYOUTS:
        fix = f"Choose one of {', '.join(TENSOR_LAYOUTS)}."
        raise ConfigError(f"tensor_layout is {layout!r}.", fix=fix, param="tensor_layout")
    if layout in ("1d", "auto"):
        return "1d", "heads and columns of every layer are divided" if size > 1 else "one rank has all of every layer"
    if size == 1:
        raise ConfigError("tensor_layout needs several ranks.", fix="Give --tensor-parallel as well.", param="tensor_layout")
    for what in unfit(layout, options, device, model, machine):
        fix = "Leave one of them out."
        raise ConfigError(f"tensor_layout {layout} cannot be combined with {what}.", fix=fix, param="tensor_layout")
    return layout, "given"


def unfit(layout: str, options: EngineOptions, device: str, model: ModelConfig, machine: Machine) -> list[str]:
    """The features that a layout cannot be combined with."""
    if layout == "1d":
        return []
    is_wrong = {
        "device cuda": device == "cuda",
        "--pipeline-parallel": options.pipeline_parallel > 1,
        "--expert-parallel": options.expert_parallel,
        "--lora": bool(options.loras) or options.max_loras is not None,
    }
    if layout == "2d":
        is_wrong |= {"experts": any(model.experts), "states": bool(model.has_states)}
        is_wrong |= {f"{options.tensor_parallel} ranks, which make no grid": grid_of(options.tensor_parallel) == 1}
    else:
        is_wrong |= {"torch instead of the compiled kernels": not machine.kernels}
    if layout == "phased":
        is_wrong |= {"experts": any(model.experts), "states": bool(model.has_states)}
        is_wrong |= {"workers of other hosts": options.remote_workers > 0}
    return [what for what, is_asked in is_wrong.items() if is_asked]


def decide_collectives(options: EngineOptions, device: str) -> Decision[str]:
    """`auto` is settled where ranks know which hosts they are on (parallel/peers.py)."""
    collectives = options.collectives
    if collectives not in COLLECTIVES:
        raise ConfigError(f"collectives is {collectives!r}.", fix=f"Choose one of {', '.join(COLLECTIVES)}.", param="collectives")
    if collectives == "auto":
        is_used = device == "cuda" and options.tensor_parallel > 1
        return collectives, "CUDA IPC on one host, NCCL between hosts" if is_used else "no GPUs that share layers"
    if device != "cuda" or options.tensor_parallel == 1:
        fix = "Leave it out, or give --device cuda and --tensor-parallel."
        raise ConfigError(f"collectives {collectives} is for GPUs that share layers.", fix=fix, param="collectives")
    return collectives, "given"


def _check_remote(options: EngineOptions) -> None:
    if not options.remote_workers:
        return
    if options.kv_export or options.kv_import:
        raise ConfigError(
            "KV pages of other engines are in this host's memory, and remote_workers are on others.",
            fix="Leave --kv-export and --kv-import out.",
            param="remote_workers",
        )
    for name in ("workers_address", "workers_key_file"):
        if getattr(options, name) is None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"remote_workers needs {flag}.", fix=f"Give {flag}.", param=name)
    workers_address(options)


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
