"""Hot neurons on one device, cold ones on another, both of which are the CPU: sums, invariance, and
what is refused."""

import ctypes
from dataclasses import replace

import pytest
import torch

from tests.helpers import greedy, make_core, make_llama, run
from tests.runner.test_cuda_streaming import loaded
from tidemill.capabilities import Setup, check_setup
from tidemill.config import EngineOptions
from tidemill.config.neurons import decide_hot_neurons
from tidemill.config.streaming import decide_weight_memory
from tidemill.errors import ConfigError
from tidemill.kernels import machine, native
from tidemill.kernels.neurons import GivenNeurons
from tidemill.layers.split_neurons import NeuronSplit
from tidemill.models.registry import model_class
from tidemill.types.events import WeightsStreamed
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit
from tidemill.weights.checkpoint import open_checkpoint

pytestmark = pytest.mark.skipif(native.lib is None, reason=native.why)
NUM = 172
PROMPT = [(37 * i) % 120 for i in range(50)]


@pytest.fixture(scope="module", params=["relu", "relu2"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    reference = make_llama(
        vocab_size=128,
        num_hidden_layers=3,
        hidden_size=64,
        hidden_act=request.param,
        mlp_bias=True,
        intermediate_size=NUM,
    )
    for layer in reference.model.layers:
        layer.mlp.gate_proj.bias.data -= torch.linspace(0.0, 2.0, NUM)
    reference.save_pretrained(path)
    return path


def split_core(folder, num_hot=64, gates_on_gpu=True, **options):
    hot = [torch.randperm(NUM)[:num_hot].sort().values for _ in range(3)]
    streaming = NeuronSplit(10**6, hot, gates_on_gpu)
    return make_core(loaded(folder, streaming), **options), streaming


@pytest.mark.parametrize("gates_on_gpu", [True, False])
def test_both_parts_are_the_whole_up_to_rounding_and_a_row_does_not_depend_on_others(
    folder, gates_on_gpu
):
    torch.manual_seed(0)
    core, streaming = split_core(folder, gates_on_gpu=gates_on_gpu)
    assert core.runner.fallback == ""  # it is recorded
    asked = {"x": (PROMPT, greedy(8, logprobs=2))}
    alone, whole = run(core, asked)["x"], run(make_core(loaded(folder)), asked)["x"]
    assert alone.tokens == whole.tokens
    mine, theirs = ([one.logprob for one in answer.logprobs] for answer in (alone, whole))
    assert mine == pytest.approx(theirs, abs=1e-4)
    assert mine != theirs  # another order of sums: it was divided
    crowd = {f"o{i}": ([(i * 31 + j) % 120 for j in range(5 + 9 * i)], greedy(6)) for i in range(6)}
    torch.manual_seed(0)
    again, _ = split_core(folder, gates_on_gpu=gates_on_gpu, max_requests=8, token_budget=16)
    assert run(again, crowd | asked)["x"] == alone
    assert sum(int(one.cold.num_read) for one in streaming.layers) > 0


def test_only_neurons_that_are_not_zero_are_read_and_an_event_says_so(folder):
    core, streaming = split_core(folder)
    core.submit(Submit("a", [3], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)))
    said = []
    while core.has_work:
        said += [event for event in core.step()[0].events if isinstance(event, WeightsStreamed)]
    (event,) = said
    assert 0 < event.num_asked < 0.6 * 4 * 3 * (NUM - 64)
    assert event.num_bytes == event.num_asked * streaming.layers[0].cold.memory.shape[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gate_is_given", [True, False])
def test_what_a_stream_of_a_gpu_calls_gives_the_same_bits(dtype, gate_is_given):
    torch.manual_seed(1)
    up, gate, down = (torch.randn(shape).to(dtype) for shape in ((51, 37), (51, 37), (45, 51)))
    biases = torch.randn(51), torch.randn(51) - 4
    neurons = GivenNeurons(
        up, down, "relu", biases[0], None if gate_is_given else (gate, biases[1])
    )
    x = torch.randn(9, 37)
    gates = (x @ gate.float().t() + biases[1]) if gate_is_given else neurons.gate(x)
    expected = neurons(x, gates)
    reference = (gates.clamp(min=0) * (x @ up.float().t() + biases[0])) @ down.float().t()
    torch.testing.assert_close(expected, reference, rtol=1e-4, atol=1e-4)
    for row in range(9):
        assert torch.equal(neurons(x[row : row + 1], gates[row : row + 1])[0], expected[row])
    num_ns = torch.zeros(1, dtype=torch.int64)
    for rows, num_live in ((range(9), 9), (range(9), 4), (range(4, 9), 7), (range(9, 12), 9)):
        mine = x[rows.start : rows.stop].contiguous()
        num = len(rows)
        given, room, out = (
            torch.zeros(num * (37 + 51) + 1),
            torch.zeros(num, 51),
            torch.full((num, 45), 7.0),
        )
        parts = [
            torch.cat([part, part.new_zeros(num - len(part), part.shape[1])]).flatten()
            for part in (mine,)
        ]
        if gate_is_given:
            own = gates[rows.start : rows.stop]
            parts.append(torch.cat([own, own.new_zeros(num - len(own), 51)]).flatten())
        parts.append(torch.tensor([float(num_live)]))
        made = torch.cat(parts)
        given[: made.numel()] = made
        call = neurons.host_call(given, room, out, rows, num_ns)
        native.lib.run_host_neurons(ctypes.addressof(call))
        num_done = max(0, min(num, num_live - rows.start))
        assert torch.equal(out[:num_done], expected[rows.start : rows.start + num_done])
        assert (out[num_done:] == 7.0).all()  # rows that only fill up
    assert int(num_ns) > 0


def decide(path, num_kept, machine_kernels="some", device="cuda", scheme="dense", **given):
    """With room for so many of the values of feed-forwards, beside all others."""
    checkpoint = open_checkpoint(path)
    shape = model_class(checkpoint).read_config(checkpoint)
    here = replace(machine.detect(), available_bytes=2**36, kernels=machine_kernels)
    total, matrices = (
        shape.weight_bytes("bfloat16", True),
        2 * 3 * shape.hidden_size * shape.intermediate_size * shape.num_layers,
    )
    budget = total - matrices + 2 * num_kept
    options = EngineOptions(
        **{"device": device, "weight_memory_bytes": budget, "hot_neurons": "often"} | given
    )
    setup = {
        "options": options,
        "model": shape,
        "machine": here,
        "device": device,
        "scheme": scheme,
    }
    check_setup(Setup(**setup, dtype="", kv_dtype="bfloat16"))
    held, why = decide_weight_memory(options, "cuda", total, shape, here)
    hot, why_hot = decide_hot_neurons(options, total, held, shape)
    return hot, f"{why}; {why_hot}"


def test_memory_says_how_many_neurons_are_on_the_gpu(folder):
    row = 64 * 3  # values of a row of one matrix, in all layers
    hot, why = decide(folder, NUM * row + 2 * 100 * row)
    assert hot == ("often", 64, True)
    assert "64 of the 172 neurons of each layer on the GPU" in why
    assert "gates are on the GPU" in why
    hot, why = decide(folder, 3 * 64 * row)
    assert hot == ("often", 64, False)
    assert "their gates, too" in why
    hot, why = decide(folder, 3 * NUM * row)
    assert hot is None
    assert "all neurons are on the GPU" in why
    with pytest.raises(ConfigError, match="64 neurons of each layer") as error:
        decide(folder, 3 * 64 * row - 1)
    assert "--weight-memory" in error.value.fix
    assert decide(folder, 3 * 64 * row, hot_neurons=None)[0] is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"device": "cpu"}, "a CPU"),
        ({"scheme": "fp8"}, "quantized weights"),
        ({"max_loras": 2}, "--lora"),
        ({"weight_memory_bytes": None}, "needs --weight-memory"),
        ({"machine_kernels": ""}, "instead of the compiled kernels"),
    ],
)
def test_what_cannot_be_is_refused(folder, given, says):
    with pytest.raises(ConfigError, match=says) as error:
        decide(folder, 10**5, **given)
    assert error.value.param == "hot_neurons"
    assert error.value.fix


def test_models_without_relus_are_refused(tmp_path):
    make_llama(tmp_path)
    with pytest.raises(ConfigError, match="an activation other than ReLU") as error:
        decide(tmp_path, 10**5)
    assert "streams whole layers" in error.value.fix
