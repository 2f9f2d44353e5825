"""How models share memory: arithmetic on shapes, nothing is loaded."""

import pytest

from tidemill.config import EngineOptions
from tidemill.engine.budget import share
from tidemill.errors import ConfigError
from tidemill.machine import Machine
from tidemill.types.model_config import AttentionSpec, ModelConfig, alike
from tidemill.types.wire import Inspected

MIB = 2**20
MACHINE = Machine(num_cores=2, memory_bytes=8 * 2**30, available_bytes=4 * 2**30)


def shape(num_layers: int = 4, max_context: int = 1024) -> Inspected:
    """Of 32 KiB of KV cache a layer and 16 tokens."""
    spec = AttentionSpec(num_heads=4, num_kv_heads=4, head_dim=64, scale=0.125, rotation=None)
    model = ModelConfig(
        architecture="llama", vocab_size=1000, hidden_size=256, intermediate_size=512, layers=alike(num_layers, spec),
        max_context=max_context, norm_eps=1e-5,
    )  # fmt: skip
    return Inspected(model, MACHINE)


def shared(*found: Inspected, options: EngineOptions | None = None, **how):
    names = "abcdef"[: len(found)]
    budget, configs = share(
        dict.fromkeys(names, options or EngineOptions()),
        dict(zip(names, found, strict=True)),
        **how,
    )
    return budget, [configs[name] for name in names]


def test_kv_caches_shrink_until_all_models_fit_together():
    budget, configs = shared(shape(), shape(2), budget_bytes=128 * MIB)
    assert sum(config.memory_bytes for config in configs) <= 128 * MIB
    assert budget.has_room(configs[:1], configs[1])
    assert [config.max_context for config in configs] == [1024, 1024]
    assert sum(config.memory_bytes for config in configs) > 120 * MIB  # what there is, is used
    _, (alone,) = shared(shape(), budget_bytes=128 * MIB)
    assert alone.kv_bytes > configs[0].kv_bytes


def test_a_context_does_not_shrink_for_other_models():
    """One request of full context takes 8 MiB of KV cache, so they are loaded one at a time."""
    budget, (first, second) = shared(shape(), shape(), budget_bytes=36 * MIB)
    assert first.max_context == second.max_context == 1024
    assert not budget.has_room([first], second)
    assert budget.has_room([], second)


def test_a_part_of_the_models_fits_together():
    budget, configs = shared(shape(), shape(), shape(), budget_bytes=64 * MIB, max_loaded=2)
    assert budget.has_room(configs[:1], configs[1])
    assert not budget.has_room(configs[:2], configs[2])


def test_what_was_given_is_kept():
    options = EngineOptions(kv_memory_bytes=16 * MIB)
    budget, configs = shared(shape(), shape(), options=options, budget_bytes=48 * MIB)
    assert [config.kv_bytes for config in configs] == [16 * MIB] * 2
    assert not budget.has_room(configs[:1], configs[1])


def test_a_model_that_can_never_fit_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"b: The model needs .* it may use 20 MiB"):
        shared(shape(1), shape(16), budget_bytes=20 * MIB)
    with pytest.raises(ConfigError, match=r"a: .* KV memory; it may use"):
        shared(shape(1), options=EngineOptions(kv_memory_bytes=100 * MIB), budget_bytes=50 * MIB)


def test_without_a_budget_there_is_what_is_free():
    budget, configs = shared(shape(), shape())
    assert budget.num_bytes == {"cpu": MACHINE.available_bytes}
    assert budget.has_room(configs[:1], configs[1])
