"""Memory of several models: how much each may have, so that as many as possible are loaded
together. Arithmetic only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tidemill.config import EngineConfig, EngineOptions, fmt_bytes, resolve
from tidemill.errors import ConfigError
from tidemill.types.wire import Inspected


@dataclass(frozen=True)
class Budget:
    """The limits of the engines together: bytes by device, and the number of engines."""

    num_bytes: Mapping[str, int]
    max_loaded: int

    def has_room(self, loaded: list[EngineConfig], another: EngineConfig) -> bool:
        used = sum(config.memory_bytes for config in loaded if config.device == another.device)
        return (
            len(loaded) < self.max_loaded
            and used + another.memory_bytes <= self.num_bytes[another.device]
        )


def share(
    options: Mapping[str, EngineOptions],
    inspected: Mapping[str, Inspected],
    budget_bytes: int | None = None,
    max_loaded: int | None = None,
) -> tuple[Budget, dict[str, EngineConfig]]:
    """A budget and the configuration of each model, by name.

    The KV caches are made small enough for all models to be loaded together, or else for as many as
    possible, but not so small that a model's context shrinks. `budget_bytes`: of each device;
    without it, what is free.
    """
    most = min(max_loaded or len(options), len(options))
    alone = {
        name: _resolve(name, model_options, inspected[name], budget_bytes)
        for name, model_options in options.items()
    }
    budget: dict[str, int] = {}
    for name, config in alone.items():
        machine = inspected[name].machine
        free = machine.gpu_free_bytes if config.device == "cuda" else machine.available_bytes
        budget.setdefault(config.device, free if budget_bytes is None else budget_bytes)
        if config.memory_bytes > budget[config.device]:
            raise ConfigError(
                f"{name} needs {fmt_bytes(config.memory_bytes)}: {_parts(config)}. The memory budget is "
                f"{fmt_bytes(budget[config.device])}.",
                fix="Raise --memory-budget, give the model less KV cache (kv-memory) or a shorter context (max-context).",
                param="memory_budget",
            )
    settled = dict(alone)
    for device, num_bytes in budget.items():
        here = {name: config for name, config in alone.items() if config.device == device}
        for at_once in range(min(most, len(here)), 1, -1):
            smaller = _shared(here, options, inspected, num_bytes, at_once)
            if smaller is not None:
                settled |= smaller
                break
    return Budget(budget, most), settled


def _shared(
    alone: Mapping[str, EngineConfig],
    options: Mapping[str, EngineOptions],
    inspected: Mapping[str, Inspected],
    num_bytes: int,
    at_once: int,
) -> dict[str, EngineConfig] | None:
    """Configurations of which any `at_once` fit together; None if that would cost one of them some
    of its context."""
    fixed = {
        name: config.memory_bytes
        - (config.kv_bytes if options[name].kv_memory_bytes is None else 0)
        for name, config in alone.items()
    }
    left = num_bytes - sum(sorted(fixed.values(), reverse=True)[:at_once])
    configs: dict[str, EngineConfig] = {}
    for name, config in alone.items():
        limit = fixed[name] + left // at_once
        if config.memory_bytes > limit:
            try:
                config = _resolve(name, options[name], inspected[name], limit)
            except ConfigError:
                return None
        if config.max_context < alone[name].max_context or config.memory_bytes > limit:
            return None
        configs[name] = config
    return configs


def _resolve(
    name: str, options: EngineOptions, found: Inspected, limit: int | None
) -> EngineConfig:
    limits = [num_bytes for num_bytes in (options.memory_bytes, limit) if num_bytes is not None]
    try:
        return resolve(
            replace(options, memory_bytes=min(limits, default=None)),
            found.model,
            found.machine,
            found.draft_model,
        )
    except ConfigError as error:
        raise ConfigError(f"{name}: {error.message}", fix=error.fix, param=error.param) from error


def _parts(config: EngineConfig) -> str:
    weights, activations, kv = map(
        fmt_bytes, (config.weight_bytes, config.activation_bytes, config.kv_bytes)
    )
    draft = f", {fmt_bytes(config.draft_bytes)} for the draft model" if config.draft else ""
    beside = config.policy_bytes + config.summary_bytes
    policies = f", {fmt_bytes(beside)} for KV policies" if beside else ""
    return f"{weights} for weights, {activations} for activations, {kv} for the KV cache{policies}{draft}"
