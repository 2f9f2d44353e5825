"""Weights that are streamed to a GPU, without a GPU: host memory and the device's are both the
CPU's."""

import contextlib
import random
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from tests.engine.test_streamed_weights import SHAPE, answers
from tests.helpers import greedy, make_core, make_llama, run
from tests.models.test_moe import make as make_experts
from tests.runner import test_cuda_runner
from tests.runner.test_cuda_runner import folder, on_gpu  # noqa: F401
from tidemill.capabilities import Setup, check_setup
from tidemill.config import EngineOptions
from tidemill.config.streaming import decide_weight_memory
from tidemill.engine import load
from tidemill.errors import ConfigError
from tidemill.kernels import machine, native
from tidemill.kernels.cuda import host_neurons
from tidemill.kernels.linear import pack_linear
from tidemill.kernels.neurons import GivenNeurons
from tidemill.layers import host_streamed
from tidemill.layers.host_streamed import HostStreaming
from tidemill.layers.streamed import resident_bytes
from tidemill.models.registry import model_class
from tidemill.quant import PLAIN
from tidemill.runner import cuda_graphs
from tidemill.types.events import KernelsFellBack, WeightsStreamed
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit
from tidemill.weights.checkpoint import open_checkpoint
from tidemill.weights.neurons import TENSORS

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_hidden_layers": 6,
}  # fmt: skip


def ids(num, seed):
    draw = random.Random(seed)
    return [draw.randrange(2, 64) for _ in range(num)]


REQUESTS = {
    "greedy": (ids(5, 1), greedy(3, logprobs=2)),
    "prompt of two steps": (ids(40, 2), SamplingParams(temperature=0.9, seed=4, max_tokens=2)),
}


@pytest.fixture(autouse=True)
def _small_tensors_move(monkeypatch):
    monkeypatch.setattr(host_streamed, "_SMALL", 2**10)


def loaded(path, streaming=None):
    checkpoint = open_checkpoint(path)
    cls = model_class(checkpoint)
    return cls.load(checkpoint, cls.read_config(checkpoint), PLAIN, streaming=streaming)


def test_layers_from_host_memory_give_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "lib", None)  # weights as plain tensors, like a GPU's
    make_llama(tmp_path, **SHAPE)
    whole, streaming = loaded(tmp_path), HostStreaming(450_000)
    half = loaded(tmp_path, streaming)
    assert streaming.fixed_bytes < streaming.held_bytes <= 450_000 < resident_bytes(whole)
    expected = answers(make_core(whole))
    core, before = make_core(half), streaming.num_bytes
    assert answers(core) == expected
    assert streaming.num_bytes > before
    assert (streaming.num_bytes - before) % streaming.streamed_bytes == 0  # each layer once a step
    for layers in ([6, 0, 2],):  # in any order
        assert answers(make_core(half.only(layers))) == answers(make_core(whole.only(layers)))
    streaming.take_reads()
    core.submit(Submit("a", [3, 4], SamplingParams(max_tokens=2)))
    said = []
    while core.has_work:
        said += [event for event in core.step()[0].events if isinstance(event, WeightsStreamed)]
    (event,) = said
    assert event.num_bytes >= 2 * streaming.streamed_bytes
    assert event.num_read >= event.num_asked > 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"kv_layout": "virtual"}, "--kv-layout virtual"),
        ({"weight_memory_bytes": 10_000}, "too few"),
        ({"speculate": "eagle", "draft_heads": "x"}, "a GPU and --speculate eagle"),
        ({"available_bytes": 200_000}, "host memory"),
        ({"available_bytes": 400_000, "data_parallel": 2}, "host memory"),
        ({"available_bytes": 400_000, "kv_host_memory_bytes": 200_000}, "beside the KV cache's"),
        ({"tensor_parallel": 2}, "several ranks"),
    ],
)
def test_what_cannot_be_is_refused(folder, given, says):  # noqa: F811
    checkpoint = open_checkpoint(folder)
    shape = model_class(checkpoint).read_config(checkpoint)
    here = replace(
        machine.detect(), available_bytes=given.pop("available_bytes", 2**36), kernels=""
    )
    options = EngineOptions(**{"device": "cuda", "weight_memory_bytes": 250_000} | given)
    setup = {"options": options, "model": shape, "machine": here, "device": "cuda"}

    def decide():
        check_setup(Setup(**setup, dtype="bfloat16", scheme="dense", kv_dtype="bfloat16"))
        decide_weight_memory(options, "cuda", 2**18, shape, here)

    with pytest.raises(ConfigError, match=says) as error:
        decide()
    assert error.value.fix
    assert error.value.param == "weight_memory_bytes"


@pytest.mark.slow  # kernels are interpreted
def test_steps_run_without_graphs_and_say_so(on_gpu, tmp_path, monkeypatch):  # noqa: F811
    make_llama(tmp_path, **SMALL)
    given = {"path": tmp_path, "speculate": "off", "max_requests": 2, "token_budget": 16}
    expected = run(on_gpu(**given), REQUESTS)
    monkeypatch.setattr(cuda_graphs, "capture", None)  # nothing is captured
    # two layers of six, in the float32 that stands for bfloat16
    core = on_gpu(**given, weight_memory_bytes=100_000)
    streaming = core.runner.model.streaming
    assert streaming.fixed_bytes < streaming.held_bytes <= 100_000 < streaming.streamed_bytes
    (event,) = (event for event in core.take_events() if isinstance(event, KernelsFellBack))
    assert "without CUDA graphs" in event.reason
    assert run(core, REQUESTS) == expected
    with pytest.raises(ConfigError, match="weights are streamed"):
        on_gpu(**given, weight_memory_bytes=100_000, nano_batching="on")


@pytest.mark.slow  # kernels are interpreted
def test_neurons_are_divided_and_steps_are_captured(on_gpu, tmp_path):  # noqa: F811
    """With the gates of cold neurons on the GPU, and in host memory."""
    make_llama(
        tmp_path,
        **SMALL
        | {
            "num_hidden_layers": 2,
            "intermediate_size": 192,
            "hidden_act": "relu",
            "mlp_bias": True,
        },
    )
    (tmp_path / "often").mkdir()
    save_file(
        {f"frequency.{layer}": torch.rand(192) for layer in range(2)}, tmp_path / "often" / TENSORS
    )
    given = {"path": tmp_path, "speculate": "off", "max_requests": 2, "token_budget": 16}
    whole = on_gpu(**given)
    expected, row = run(whole, REQUESTS), 2 * 2 * 32  # bytes of a row of one matrix, in both layers
    for num_left_out, where in (
        (2 * 100, "their gates are on the GPU"),
        (3 * 120, "their gates, too"),
    ):
        budget = whole.config.weight_bytes - num_left_out * row
        core = on_gpu(**given, weight_memory_bytes=budget, hot_neurons=str(tmp_path / "often"))
        assert (
            "64 of the 192 neurons of each layer on the GPU" in core.config.reasons["hot_neurons"]
        )
        assert where in core.config.reasons["hot_neurons"]
        assert "CUDA graphs" not in core.runner.fallback
        found = run(core, REQUESTS)
        for name, answer in expected.items():
            assert found[name].tokens == answer.tokens
        assert sum(int(one.cold.num_read) for one in core.runner.model.streaming.layers) > 0


@pytest.mark.slow  # kernels are interpreted
@pytest.mark.parametrize("family", ["Qwen3Moe", "Qwen2Moe", "GptOss"])
def test_experts_give_the_same_bits(on_gpu, tmp_path, monkeypatch, family):  # noqa: F811
    """A shared one, and biases, too."""
    every = {"decoder_sparse_step": 1} if family == "Qwen3Moe" else {}
    make_experts(
        family, **SMALL | {"num_hidden_layers": 3, "intermediate_size": 32} | every
    ).save_pretrained(tmp_path)
    given = {"path": tmp_path, "speculate": "off", "max_requests": 2, "token_budget": 16}
    whole, requests = on_gpu(**given), {"greedy": REQUESTS["greedy"]}
    expected, total = run(whole, requests), resident_bytes(whole.runner.model)
    # float32 stands for bfloat16
    monkeypatch.setattr(load, "HostStreaming", lambda budget: HostStreaming(2 * budget))
    core = on_gpu(**given, weight_memory_bytes=int(0.8 * whole.config.weight_bytes))
    streaming = core.runner.model.streaming
    (size,) = {layer.stacks.expert_bytes for layer in streaming.experts._layers}
    assert streaming.held_bytes + streaming.streamed_bytes == pytest.approx(total, rel=0.02)
    assert run(core, requests) == expected
    places = streaming.experts.places
    assert places.num_read > len(places.in_slot) < len(places.where)
    assert streaming.experts.num_bytes % size == 0


@pytest.mark.skipif(native.lib is None, reason=native.why)
@pytest.mark.parametrize("gate_is_on_gpu", [True, False])
def test_the_exchange_with_the_host_gives_the_hosts_sums(monkeypatch, gate_is_on_gpu):
    """More rows than go at once, of which the last only fill up. Streams do at once what they are
    given."""

    class Driver:
        def __init__(self, device):
            pass

        def call_host(self, function, argument, stream):
            native.lib.run_host_neurons(argument)

    class Stream(test_cuda_runner.Stream):
        cuda_stream = 0

    for name, value in {
        "Stream": Stream,
        "current_stream": Stream,
        "current_device": lambda: 0,
        "stream": lambda stream: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(host_neurons, "Driver", Driver)
    torch.manual_seed(2)
    gate, up, down, bias = (
        torch.randn(72, 40),
        torch.randn(72, 40),
        torch.randn(40, 72),
        torch.randn(72) - 14,
    )
    cold = GivenNeurons(up, down, "relu2", None, None if gate_is_on_gpu else (gate, bias))
    own = pack_linear(gate, bias) if gate_is_on_gpu else None
    with test_cuda_runner.OnCpu():
        exchange = host_neurons.HostExchange(40, 72)
    x = torch.randn(300, 40)
    expected = cold(x, (own or cold.gate)(x))
    assert 0 < (expected == 0).all(1).sum() < 300  # some rows use no neuron
    for num_rows, num_live in ((300, 290), (7, 7), (300, 300)):
        exchange.live = torch.tensor([num_live], dtype=torch.int32)
        made = exchange.begin(x[:num_rows], cold, own)
        exchange.end()
        assert torch.equal(made[:num_live], expected[:num_live])
    assert int(exchange.num_ns) > 0
