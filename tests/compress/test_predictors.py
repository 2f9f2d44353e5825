"""Predictors of neurons and heads: what they learn, what is computed when they are served, and
mistakes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.helpers import byte_tokenizer, greedy, make_llama, run
from tidemill.cli.main import app
from tidemill.compress.calibration import Calibration
from tidemill.compress.predictors import Observed, PredictorOptions, train, train_predictors
from tidemill.config import EngineOptions
from tidemill.engine.load import load_core
from tidemill.errors import CheckpointError, ConfigError
from tidemill.kernels import native
from tidemill.kernels.native_attention import NativeAttention
from tidemill.weights.predictors import SETTINGS, TENSORS, read_predictors

pytestmark = pytest.mark.skipif(native.lib is None, reason=native.why)
PROMPT = [(37 * i) % 250 for i in range(60)]


def options(folder, out, **more):
    calibration = Calibration(data=folder / "text.txt", num_tokens=1024, length=64)
    return PredictorOptions(model=str(folder), out=out, calibration=calibration, **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama with ReLUs of which most neurons are zero."""
    path = tmp_path_factory.mktemp("relu")
    reference = make_llama(
        vocab_size=320, num_hidden_layers=2, hidden_size=64, hidden_act="relu", mlp_bias=True
    )
    for layer in reference.model.layers:
        layer.mlp.gate_proj.bias.data -= 1.5
    reference.save_pretrained(path)
    byte_tokenizer(path)
    (path / "text.txt").write_text(
        " ".join(f"Line {i} has {i * i} letters, {chr(97 + i % 26) * (i % 7)}." for i in range(60))
    )
    return path


@pytest.fixture(scope="module")
def predictors(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("made") / "predictors"
    return out, train_predictors(options(folder, out, units="both", keep=0.9, rank=16, steps=30))


def core_of(folder, predictors=None, **more):
    sizes = {"max_requests": 16, "max_context": 128, "kv_memory_bytes": 2**22, "threads": 2} | more
    path = None if predictors is None else str(predictors)
    return load_core(
        EngineOptions(model=str(folder), dtype="float32", contextual_sparsity=path, **sizes)
    )


def test_what_is_needed_is_learned():
    """Which of two halves of the units matter depends on the sign of one input."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1024, 32, generator=generator)
    added = torch.rand(1024, 64, generator=generator) * 0.01
    added[:, :32] += torch.where(x[:, :1] > 0, 1.0, 0.0)
    added[:, 32:] += torch.where(x[:, :1] > 0, 0.0, 1.0)
    made, (share, kept) = train(
        Observed(x, added), PredictorOptions(model="", out="", keep=0.95, steps=40)
    )
    assert made.a_RH.shape == (8, 32)
    assert 0.45 < share < 0.6
    assert kept > 0.93
    with torch.no_grad():
        assert ((made.scores(x)[:, :32] > 0) == (x[:, :1] > 0)).float().mean() > 0.9


def test_few_neurons_are_computed_and_a_rows_choice_is_its_own(folder, predictors):
    """Alone, among others, in chunks and from the prefix cache: the same tokens and logprobs."""
    out, figures = predictors
    core = core_of(folder, out)
    assert core.runner.fallback == ""  # it is recorded
    exact = core_of(folder)
    alone = run(core, {"x": (PROMPT, greedy(8, logprobs=2))})["x"]
    assert alone != run(exact, {"x": (PROMPT, greedy(8, logprobs=2))})["x"]
    neurons = [block.mlp.neurons for block in core.runner.model.blocks]
    before = [int(one.num_chosen) for one in neurons]
    # the prompt comes from the cache
    assert run(core, {"x": (PROMPT, greedy(8, logprobs=2))})["x"] == alone
    num_tokens = len(PROMPT) % 16 + 7  # the rest of the prompt, and the answer
    for one, num in zip(neurons, before, strict=True):
        assert 0 < int(one.num_chosen) - num < 0.5 * num_tokens * 172
    crowd = {f"o{i}": ([(i * 31 + j) % 250 for j in range(5 + 9 * i)], greedy(6)) for i in range(6)}
    assert run(core_of(folder, out), crowd | {"x": (PROMPT, greedy(8, logprobs=2))})["x"] == alone
    assert (
        run(core_of(folder, out, token_budget=16), {"x": (PROMPT, greedy(8, logprobs=2))})["x"]
        == alone
    )
    assert all(share < 0.5 for share in figures["neurons"]["share"])
    assert all(kept > 0.8 for kinds in figures.values() for kept in kinds["kept"])


def test_predictors_that_choose_all_change_nothing_but_rounding(folder, predictors, tmp_path):
    out, _ = predictors
    tensors = load_file(out / TENSORS)
    everything = {
        name: torch.full_like(one, 1e9) if name.endswith("bias") else one
        for name, one in tensors.items()
    }
    save_file(everything, tmp_path / TENSORS)
    (tmp_path / SETTINGS).write_text((out / SETTINGS).read_text())
    answers = [
        run(core_of(folder, path), {"x": (PROMPT, greedy(8, logprobs=1))})["x"]
        for path in (tmp_path, None)
    ]
    assert answers[0].tokens == answers[1].tokens


def test_mistakes(folder, predictors, tmp_path):
    out, _ = predictors
    with pytest.raises(CheckpointError, match="cannot be read"):
        core_of(folder, tmp_path)
    (tmp_path / SETTINGS).write_text((out / SETTINGS).read_text())
    tensors = load_file(out / TENSORS)
    for broken, what in (
        ({"neurons.1.b": tensors["neurons.1.b"][1:].clone()}, r"neurons\.1\.b has shape"),
        ({"heads.0.bias": None}, r"heads\.0\.bias is missing"),
        (
            {"neurons.0.a": tensors["neurons.0.a"] * float("nan")},
            r"neurons\.0\.a holds values that are no finite",
        ),
    ):
        save_file(
            {name: one for name, one in (tensors | broken).items() if one is not None},
            tmp_path / TENSORS,
        )
        with pytest.raises(CheckpointError, match=what):
            read_predictors(tmp_path, 2, 64, {"neurons": 172, "heads": 2})
    save_file({f"neuron.{name}": one for name, one in tensors.items()}, tmp_path / TENSORS)
    with pytest.raises(CheckpointError, match="has no predictors"):
        read_predictors(tmp_path, 2, 64, {"neurons": 172, "heads": 2})
    for more, what in (
        ({"weight_memory_bytes": 10**6}, "--weight-memory"),
        ({"max_loras": 2}, "--lora"),
    ):
        with pytest.raises(
            ConfigError, match=f"--contextual-sparsity cannot be combined with {what}"
        ):
            core_of(folder, out, **more)
    for wrong, what in (
        (["--keep", "1.5"], "--keep is 1.5"),
        (["--units", "layers"], "--units layers is not known"),
        (["--steps", "0"], "--steps is 0"),
    ):
        result = CliRunner().invoke(
            app, ["train-predictors", str(folder), "-o", str(tmp_path / "new"), *wrong]
        )
        assert result.exit_code != 0
        assert what in str(result.exception)
    assert json.loads((out / SETTINGS).read_text())["num_layers"] == 2


def test_heads_that_are_not_chosen_give_zeros_in_c_and_in_torch(folder, predictors, monkeypatch):
    """The compiled attention, which leaves them out, and torch's, which computes them and sets them
    to zero."""
    out, figures = predictors
    assert any(share < 0.98 for share in figures["heads"]["share"])
    compiled = run(core_of(folder, out), {"x": (PROMPT, greedy(8, logprobs=1))})["x"]
    monkeypatch.setattr(NativeAttention, "can_run", staticmethod(lambda kv: False))
    by_torch = run(core_of(folder, out), {"x": (PROMPT, greedy(8, logprobs=1))})["x"]
    assert by_torch.tokens == compiled.tokens
    assert by_torch != run(core_of(folder), {"x": (PROMPT, greedy(8, logprobs=1))})["x"]
