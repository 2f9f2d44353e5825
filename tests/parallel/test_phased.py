"""The layout phased: steps of many tokens by rows, with the weights of all ranks; others as 1D. The
bits are those of 1D."""

import gguf
import pytest

from tests.helpers import make_llama, run
from tests.models import test_families, test_moe
from tests.parallel.near_ties import excused
from tests.parallel.test_tensor_layouts import alone, core_of, requests
from tests.parallel.test_workers import as_threads, start_threads  # noqa: F401
from tests.weights.test_gguf import write_gguf
from tidemill.engine import load
from tidemill.errors import ConfigError
from tidemill.kernels import native
from tidemill.layers import phased as layers_phased
from tidemill.runner.cpu_kinds import ManyTokens
from tidemill.types import events

pytestmark = pytest.mark.skipif(native.lib is None, reason="the layout needs the compiled kernels")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With 3 KV heads, which two ranks do not share evenly, and four have more than once."""
    path = tmp_path_factory.mktemp("model")
    sizes = {
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "intermediate_size": 256,
    }
    make_llama(path, **sizes, num_hidden_layers=3, attention_bias=True, mlp_bias=True)
    return path


@pytest.fixture(scope="module")
def expected(folder):
    """Of two ranks with the layout 1D."""
    with pytest.MonkeyPatch.context() as patch:
        start_threads(patch)
        return answers_of(core_of(folder, tensor_parallel=2))[0]


def phased(folder, monkeypatch, num_tokens, **options):
    """`num_tokens`: from which on a step is computed by rows."""
    monkeypatch.setattr(load, "gather_from", lambda model, size, device: num_tokens)
    return core_of(folder, **{"tensor_parallel": 2, "tensor_layout": "phased"} | options)


def answers_of(core):
    try:
        return run(core, requests()), alone(core)
    finally:
        core.close()


@pytest.mark.usefixtures("as_threads")
@pytest.mark.parametrize("size", [2, 4])
def test_no_threshold_changes_a_bit(folder, expected, monkeypatch, size):
    """All steps as 1D; all by rows; prefill by rows and decode not; chunks of a prompt now so and
    now so; alone, among others."""
    if size != 2:
        expected, _ = answers_of(core_of(folder, tensor_parallel=size))
    assert excused(expected, run(core_of(folder), requests())) == 0
    for num_tokens, budget in ((0, 0), (size, 0), (size, 32), (20, 48), (45, 48)):
        chunked = {"token_budget": budget, "max_requests": 4} if budget else {}
        among, by_itself = answers_of(
            phased(folder, monkeypatch, num_tokens, tensor_parallel=size, **chunked)
        )
        assert among == expected
        assert by_itself == expected


@pytest.mark.usefixtures("as_threads")
def test_events_say_which_layout_a_step_had(folder, monkeypatch):
    core = phased(folder, monkeypatch, 20)
    seen = []
    take = core.step
    core.step = lambda: (result := take(), seen.extend(result[0].events))[0]
    answers_of(core)
    planned = {
        event.step: event.num_tokens for event in seen if isinstance(event, events.StepPlanned)
    }
    layouts = {event.step: event.layout for event in seen if isinstance(event, events.StepDone)}
    assert {*layouts.values()} == {"1d", "gathered"}
    assert all((planned[step] >= 20) == (layout == "gathered") for step, layout in layouts.items())


def test_processes_record_both_ways(folder, expected, monkeypatch):
    core = phased(folder, monkeypatch, 20)
    runner, model = core.runner.own, core.runner.own.model
    assert not core.runner.fallback
    assert isinstance(runner.kinds[0], ManyTokens)
    assert runner.kinds[0].passes.plain.program is not None
    assert (
        model.streaming.held_bytes <= 1.05 * model.whole.weight_bytes("float32", compiled=True) / 2
    )
    among, by_itself = answers_of(core)
    assert among == by_itself == expected


@pytest.mark.usefixtures("as_threads")
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_quantized_weights(tmp_path, monkeypatch, kind):
    reference = make_llama(
        tmp_path,
        hidden_size=128,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    path = write_gguf(tmp_path / "m.gguf", reference, quantize=gguf.GGMLQuantizationType[kind])
    expected, _ = answers_of(core_of(path, tensor_parallel=2, dtype="quantized"))
    among, by_itself = answers_of(phased(path, monkeypatch, 20, dtype="quantized"))
    assert among == by_itself == expected


@pytest.mark.usefixtures("as_threads")
@pytest.mark.parametrize("name", ["Qwen2", "Qwen3", "Gemma2", "Gemma3", "Phi3", "GPT2", "Granite"])
def test_models_of_families(tmp_path, monkeypatch, name):
    test_families.make(name).save_pretrained(tmp_path)
    expected, _ = answers_of(core_of(tmp_path, tensor_parallel=2))
    among, by_itself = answers_of(phased(tmp_path, monkeypatch, 20))
    assert among == by_itself == expected


@pytest.mark.usefixtures("as_threads")
def test_a_layer_whose_bits_would_differ_is_found_at_the_start(folder, monkeypatch):
    add = layers_phased.add
    monkeypatch.setattr(
        layers_phased, "add", lambda part, total: (add(part, total), add(part, total))
    )
    with pytest.raises(ConfigError, match="phased"):
        phased(folder, monkeypatch, 20)


@pytest.mark.usefixtures("as_threads")
@pytest.mark.parametrize("name", ["Olmo2", "BitNet"])
def test_norms_over_all_heads_are_refused(tmp_path, monkeypatch, name):
    test_families.make(name).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="exchanges something of its own"):
        phased(tmp_path, monkeypatch, 20)
    core_of(tmp_path, tensor_parallel=2, tensor_layout="auto").close()


def test_what_it_is_not_for(tmp_path, folder):
    test_moe.make("Qwen2Moe").save_pretrained(tmp_path)
    for model, options, what in [
        (tmp_path, {}, "experts"),
        (folder, {"pipeline_parallel": 2}, "--pipeline-parallel"),
        (folder, {"max_loras": 1}, "--lora"),
        (folder, {"tensor_parallel": 1}, "needs --tensor-parallel"),
    ]:
        with pytest.raises(ConfigError, match=what):
            core_of(model, **{"tensor_parallel": 2, "tensor_layout": "phased"} | options)
