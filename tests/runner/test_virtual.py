"""`--kv-layout virtual`: rows in address ranges of their own give the answers of paging, in no more
memory than they need."""

import numpy as np
import pytest
import torch

from tests.helpers import engine_config, greedy, load_model, make_core, make_llama, run
from tidemill.errors import ConfigError
from tidemill.kernels import native
from tidemill.kernels.virtual import HostMemory, VirtualRows
from tidemill.runner.virtual import VirtualLayout
from tidemill.types.sampling import SamplingParams


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_llama(folder, seed=3)
    return load_model(folder)


def prompt(num, seed):
    return torch.randint(2, 256, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


def crowd():
    """Of many lengths, two with a common prefix, and three samples of one prompt."""
    requests = {f"r{i}": (prompt(5 + 37 * i % 120, i), greedy(18, logprobs=2)) for i in range(7)}
    requests["again"] = (requests["r3"][0] + [7, 8, 9], greedy(18, logprobs=2))
    return requests | {
        "f": (
            prompt(50, 99),
            SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=12, logprobs=1),
        )
    }


@pytest.fixture(scope="module")
def paged(model):
    return run(make_core(model), crowd())


OPTIONS = {
    "whole": {},
    "chunked, in few rows": {"token_budget": 7, "max_requests": 4},
    "preempted": {"kv_memory_bytes": 2**18},
    "not cached": {"prefix_caching": False},
    "part of a page cached": {"prefix_index": "radix"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_answers_are_those_of_paging_bit_for_bit(model, paged, options):
    core = make_core(model, kv_layout="virtual", **options)
    assert isinstance(core.runner.kv_layout, VirtualLayout)
    assert run(core, crowd()) == paged
    # in ranges that held other sequences, and from the prefix cache
    assert run(core, crowd()) == paged


def test_also_without_the_compiled_kernels(model, monkeypatch):
    monkeypatch.setattr(native, "lib", None)
    requests = dict(list(crowd().items())[:3])
    assert run(make_core(model, kv_layout="virtual"), requests) == run(make_core(model), requests)


def test_physical_memory_is_within_a_page_of_a_requests_tokens(model):
    core = make_core(model, kv_layout="virtual", prefix_caching=False)
    runner, seen = core.runner, []
    memory = runner.kv_layout.memory
    page_bytes, page_size = memory.page_bytes, core.config.page_size

    def measure(plan, hidden, result):
        running = core.scheduler.running
        live = sum(request.num_computed for request in running) * page_bytes // page_size
        seen.append((memory.physical_bytes - live, len(running) * page_bytes))

    runner.read_states(measure)
    run(core, {name: (tokens, greedy(40)) for name, (tokens, _) in crowd().items()})
    assert len(seen) > 40
    assert all(more <= most for more, most in seen)
    run(core, {"last": ([5], greedy(1))})  # its step gives back what the others held
    assert memory.physical_bytes <= page_bytes


def test_a_shared_page_is_in_memory_once(model):
    core = make_core(model, kv_layout="virtual", speculate="off")
    sample = SamplingParams(n=8, temperature=0.9, seed=5, max_tokens=3)
    run(core, {"f": (prompt(160, 1), sample)})
    rows, memory = core.runner.kv_layout.rows, core.runner.kv_layout.memory
    assert rows.num_mapped >= 8 * 10
    assert memory.physical_bytes <= (9 + 8 * 2) * memory.page_bytes  # not 8 * 11


def test_what_a_page_holds_is_at_all_its_addresses_and_survives_being_mapped_elsewhere():
    memory = HostMemory(4, 8192)
    rows = VirtualRows(memory, 2, 3)
    tokens = memory.view(rows.address, (2, 3, 2048), torch.float32)
    assert not tokens.any()
    rows.set(0, np.array([3, 1, 0]))
    rows.set(1, np.array([3, 0, 0]))
    tokens[0, 0], tokens[0, 1] = 7.0, 8.0
    assert (tokens[1, 0] == 7).all()
    assert memory.pool((4, 2048), torch.float32)[[3, 1], 0].tolist() == [7, 8]
    rows.set(0, np.array([1, 0, 0]))
    assert (tokens[0, 0] == 8).all()
    assert not tokens[0, 1:].any()
    assert memory.physical_bytes == 2 * 8192
    rows.drop([3])
    assert memory.physical_bytes == 8192
    assert not tokens[1, 0].any()


@pytest.mark.parametrize(
    ("options", "config", "message"),
    [
        ({"kv_layout": "flat"}, {}, "kv_layout 'flat' is not known"),
        ({"kv_layout": "virtual", "speculate": "exit"}, {}, "first layers"),
        ({"kv_layout": "virtual", "speculate": "exit-bandit"}, {}, "first layers"),
        (
            {"kv_layout": "virtual", "kv_host_memory_bytes": 2**20},
            {},
            "--kv-host-memory: what is behind the cache takes pages",
        ),
        (
            {"kv_layout": "virtual", "kv_dtype": "int8"},
            {},
            "int8: such keys and values have their scales",
        ),
        (
            {"kv_layout": "virtual", "page_size": 1},
            {},
            "1 tokens of 768 bytes do not fill whole granules",
        ),
        ({"kv_layout": "virtual"}, {"sliding_window": 32}, "layers with windows"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path, model, options, config, message):
    if config:
        from transformers import MistralConfig, MistralForCausalLM

        shape = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "vocab_size": 64,
        }
        MistralForCausalLM(
            MistralConfig(num_key_value_heads=2, max_position_embeddings=128, **shape, **config)
        ).save_pretrained(tmp_path)
        model = load_model(tmp_path)
    with pytest.raises(ConfigError) as caught:
        engine_config(model, **options)
    assert message in caught.value.message
    assert caught.value.param in ("kv_layout", "page_size")
