"""Budgets: what resolve() derives, refuses and explains; and the estimate against real allocations."""

import pytest

from tests.helpers import load_model
from tidemill.config import EngineOptions, Machine, ModelConfig, fmt_bytes, parse_bytes, resolve
from tidemill.errors import ConfigError
from tidemill.runner.model_runner import ModelRunner

SMOLLM2 = ModelConfig(
    architecture="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3,
    head_dim=64, max_context=8192, norm_eps=1e-5, rope_theta=1e5, tie_embeddings=True,
)  # fmt: skip
LARGE = Machine(num_cores=8, memory_bytes=64 * 2**30, available_bytes=60 * 2**30)


def test_kv_bytes_come_from_kv_heads():
    assert SMOLLM2.kv_bytes_per_token("float32") == 2 * 3 * 64 * 30 * 4
    assert SMOLLM2.num_parameters == 134_515_008


def test_everything_is_settled_and_explained():
    config = resolve(EngineOptions(), SMOLLM2, LARGE)
    assert config.threads == 8
    assert config.max_context == 8192
    assert config.kv_bytes <= 4 * 2**30
    assert config.kv_bytes == config.num_pages * 16 * SMOLLM2.kv_bytes_per_token("float32")
    for field in ("dtype", "threads", "max_requests", "token_budget", "max_context", "kv_bytes", "num_pages"):
        assert config.reasons[field]


def test_a_small_machine_gets_a_shorter_context():
    small = Machine(num_cores=1, memory_bytes=2**30, available_bytes=900 * 2**20)
    config = resolve(EngineOptions(), SMOLLM2, small)
    assert config.max_context < 8192
    assert "KV memory can hold" in config.reasons["max_context"]
    assert config.full_context_requests >= 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int3"}, "int3"),
        ({"page_size": 24}, "power of two"),
        ({"max_context": 9000}, "8192"),
        ({"max_context": 1}, "at least 2"),
        ({"max_requests": 0}, "at least 1"),
        ({"token_budget": 10, "max_requests": 20}, "never decode"),
        ({"kv_memory_bytes": 1000}, "--kv-memory"),
        ({"kv_memory_bytes": 40 * 2**20, "max_context": 8192}, "--max-context"),
        ({"threads": -1}, "threads"),
    ],
)
def test_impossible_options_name_the_fix(options, words):
    with pytest.raises(ConfigError) as caught:
        resolve(EngineOptions(**options), SMOLLM2, LARGE)
    assert words in str(caught.value)


def test_a_model_that_does_not_fit_says_what_is_needed():
    tiny = Machine(num_cores=1, memory_bytes=2**29, available_bytes=2**29)
    with pytest.raises(ConfigError, match="621 MiB for weights"):
        resolve(EngineOptions(), SMOLLM2, tiny)


def test_estimated_kv_is_what_is_allocated(tiny_folder):
    from tests.helpers import engine_config

    model = load_model(tiny_folder)
    config = engine_config(model)
    runner = ModelRunner(model, config)
    null_page = config.page_size * model.config.kv_bytes_per_token("float32")
    assert runner.cache.numel() * runner.cache.element_size() == config.kv_bytes + null_page


def test_amounts_of_memory():
    assert parse_bytes("512M") == 512 * 2**20
    assert parse_bytes("1.5GiB") == 3 * 2**29
    assert parse_bytes("1000") == 1000
    assert fmt_bytes(3 * 2**29) == "1.50 GiB"
    for wrong in ("", "lots", "-1G", "1X"):
        with pytest.raises(ConfigError):
            parse_bytes(wrong)
