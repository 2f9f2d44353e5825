"""Decisions about weights that do not all fit in memory."""

from __future__ import annotations

import os
from pathlib import Path

from tidemill.config.options import Decision, EngineOptions
from tidemill.config.sizes import GIB, MIB, fmt_bytes, parse_bytes
from tidemill.errors import ConfigError
from tidemill.machine import Machine
from tidemill.types.model_config import ModelConfig

_QUOTA = 100 * GIB
_PAGE = 4096  # of a disk: a neuron takes whole ones
_SURELY = 0.75  # of the least that is estimated: below it, nothing is read before it is refused


def decide_weight_memory(
    options: EngineOptions, device: str, total: int, model: ModelConfig, machine: Machine
) -> Decision[int]:
    """Bytes of weights in memory while the others are streamed; 0: all are in memory. `total`:
    bytes of all."""
    budget = options.weight_memory_bytes
    if budget is None:
        return 0, "all weights are in memory"
    if budget >= total:
        return (
            0,
            f"all weights are in memory: {fmt_bytes(total)} fit in the {fmt_bytes(budget)} of --weight-memory",
        )
    least = least_weight_memory(model, total)
    if model.stored and budget < _SURELY * least and options.hot_neurons is None:
        raise ConfigError(
            f"{fmt_bytes(budget)} of memory for weights are too few: tables and two layers, or a layer's experts, must be there.",
            fix=f"Give at least about {-(-least // MIB)}M with --weight-memory.",
            param="weight_memory_bytes",
        )
    if device == "cpu":
        return budget, f"of {fmt_bytes(total)}; what does not fit is read from disk as it is needed"
    there = total if options.hot_neurons is None else total - budget
    needed = options.data_parallel * (there + (options.kv_host_memory_bytes or 0))
    if needed > machine.available_bytes:
        beside = " beside the KV cache's" if options.kv_host_memory_bytes else ""
        raise ConfigError(
            f"Weights that are not on the GPU are in host memory: they need {fmt_bytes(there)} there for each engine{beside}, "
            f"and {fmt_bytes(machine.available_bytes)} are free.",
            fix="Use a smaller or quantized model, free host memory, or use --device cpu, which streams from disk.",
            param="weight_memory_bytes",
        )
    if options.hot_neurons is not None:
        return budget, f"of {fmt_bytes(total)}; neurons that do not fit are in host memory"
    return (
        budget,
        f"of {fmt_bytes(total)}; what does not fit is copied from host memory as it is needed",
    )


def least_weight_memory(model: ModelConfig, total: int) -> int:
    """The least weight memory, estimated: tables, and two layers or all but the other layers'
    experts."""
    each = total / max(1, model.num_parameters)
    tables = model.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    experts = [
        3 * model.hidden_size * moe.expert_size * moe.num_experts for moe in model.experts if moe
    ]
    if experts:
        return int(each * (model.num_parameters - sum(experts) + max(experts)))
    return int(each * (tables + 2 * (model.num_parameters - tables) / model.num_layers))


def streams_neurons(
    model: ModelConfig, scheme: str, max_loras: int, total: int, budget: int
) -> bool:
    """Tells if feed-forwards are streamed by the neurons that are not zero: their gates are ReLUs,
    and all else fits."""
    if (
        model.act != "relu"
        or not model.is_gated
        or any(model.experts)
        or scheme != "dense"
        or max_loras
    ):
        return False
    each, neurons = (
        total / max(1, model.num_parameters),
        2 * model.hidden_size * model.intermediate_size,
    )
    page = -(-2 * int(each) * model.hidden_size // _PAGE) * _PAGE
    return budget >= total - each * neurons * model.num_layers + page * model.intermediate_size


def decide_weight_cache(options: EngineOptions) -> Decision[tuple[str, int]]:
    """The folder of prepared weights, and its quota."""
    if options.weight_cache is None:
        root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        return (str(root / "tidemill" / "weights"), _QUOTA), "the user's cache folder"
    path, separator, size = options.weight_cache.rpartition(":")
    if not separator:
        return (options.weight_cache, _QUOTA), f"given, with {fmt_bytes(_QUOTA)} at most"
    try:
        return (path, parse_bytes(size)), "given"
    except ConfigError as error:
        raise ConfigError(
            f"weight_cache is {options.weight_cache!r}.",
            fix="Write PATH:SIZE, such as /var/cache/tidemill/weights:200G.",
            param="weight_cache",
        ) from error
