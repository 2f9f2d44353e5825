"""Checkpoints as Transformers' modules layer by layer: every family, from folders and from GGUF;
runs that are interrupted."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, MambaConfig, MambaForCausalLM

from tests.helpers import byte_tokenizer, make_llama
from tests.models.test_families import ALL, save
from tests.weights.test_safetensors import edit_weights
from tidemill.compress.calibration import Calibration, calibration_ids
from tidemill.compress.decoder import (
    Decoder,
    compute_device,
    matrix_of,
    set_matrix,
    without_weights,
)
from tidemill.compress.methods.inputs import collect
from tidemill.compress.source import Source
from tidemill.compress.walk import LayerJob, walk
from tidemill.compress.work import Work
from tidemill.errors import CalibrationError, CheckpointError, ConfigError

OFTEN = {("Gemma3", "gguf"), ("SmolLM3", "gguf"), ("GPT2", "safetensors")}
CASES = [
    pytest.param(*one, marks=() if one in OFTEN else pytest.mark.slow, id="-".join(one))
    for one in ALL
]


@torch.no_grad()
def logits(decoder, ids):
    hidden = decoder.embed(ids)
    for number in range(decoder.num_layers):
        with decoder.layer(number):
            hidden = decoder.run(number, hidden)
    return decoder.logits(hidden)


@pytest.mark.parametrize(("family", "how"), CASES)
def test_layer_by_layer_is_the_same_model(family, how, tmp_path):
    reference, path = save(family, how, tmp_path)
    ids = torch.randint(0, 256, (2, 60))
    decoder = Decoder(Source(path))
    with torch.no_grad():
        assert (logits(decoder, ids) - reference(ids).logits).abs().max() < 1e-3
    assert all(weight.is_meta for layer in decoder.layers for weight in layer.parameters())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_llama(path, vocab_size=300, num_hidden_layers=4)
    byte_tokenizer(path)
    (path / "text.txt").write_text("The quick brown fox jumps over the lazy dog, and so on. " * 20)
    return path


def ids_of(folder, **asked):
    return calibration_ids(
        folder,
        300,
        Calibration(**{"data": folder / "text.txt", "num_tokens": 512, "length": 64} | asked),
        folder,
    )


def test_a_linear_that_is_never_called_is_named(tmp_path):
    """Mamba multiplies by the weight of one without calling it."""
    sizes = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
    MambaForCausalLM(MambaConfig(**sizes)).save_pretrained(tmp_path)
    decoder = Decoder(Source(tmp_path))
    with (
        decoder.layer(0) as layer,
        pytest.raises(CalibrationError, match=r"layers\.0\.mixer\.dt_proj"),
    ):
        collect(LayerJob(decoder, 0, layer, decoder.embed(torch.zeros(1, 8, dtype=torch.long))))


def test_inputs_at_the_same_address_one_after_the_other_are_not_taken_for_the_same():
    """The output of a norm often lies where an earlier linear's inputs were. Two that get one
    tensor share its figures."""

    def observe(see):
        for number in range(64):
            x = torch.full((8, 16), float(number))
            see(f"{number}.a", x)
            see(f"{number}.b", x)
            del x

    names = [f"{number}.{part}" for number in range(64) for part in "ab"]
    found = collect(
        SimpleNamespace(observe=observe, linears=dict.fromkeys(names)), moments=True, num_samples=8
    )
    for number in range(64):
        assert found[f"{number}.a"] is found[f"{number}.b"]
        assert found[f"{number}.a"].largest == number
        assert found[f"{number}.a"].num_tokens == 8


def noisy(job):
    """A change that depends on the inputs and on random numbers."""
    kept = {}

    def see(name, x):
        kept[name + ".sum"] = kept.get(name + ".sum", 0) + x.sum(0)

    job.observe(see)
    for name, module in job.linears.items():
        set_matrix(module, matrix_of(module) + 0.01 * torch.randn(matrix_of(module).shape))
        kept[name + ".weight"] = matrix_of(module).clone()
    return kept


class Interrupted(Exception):
    pass


def test_an_interrupted_run_ends_with_the_same_bytes(folder, tmp_path):
    decoder, ids = Decoder(Source(folder)), ids_of(folder)

    def stops_at_2(job):
        if job.number == 2:
            raise Interrupted
        return noisy(job)

    whole, parts = Work(tmp_path / "whole", {"a": 1}), Work(tmp_path / "parts", {"a": 1})
    walk(decoder, whole, noisy, ids, needs_truth=True)
    with pytest.raises(Interrupted):
        walk(decoder, parts, stops_at_2, ids, needs_truth=True)
    parts = Work(tmp_path / "parts", {"a": 1})
    assert parts.num_finished == 2
    walk(Decoder(Source(folder)), parts, noisy, ids, needs_truth=True)
    files = [file.name for file in whole.folder.iterdir()]
    assert "own-00004.npy" in files
    assert "own-00003.npy" not in files
    for name in files:
        assert (parts.folder / name).read_bytes() == (whole.folder / name).read_bytes()
    with pytest.raises(ConfigError, match="other settings"):
        Work(tmp_path / "parts", {"a": 2})
    with pytest.raises(ConfigError, match="--out is"):
        Work(Path("."), {"a": 1})


def test_activations_that_are_no_numbers(folder, tmp_path):
    decoder = Decoder(Source(folder))

    def broken(job):
        next(iter(job.linears.values())).weight.data[0, 0] = float("nan")
        return {}

    with pytest.raises(CalibrationError, match="layer 0 are not finite"):
        walk(decoder, Work(tmp_path / "out", {}), broken, ids_of(folder))


def test_weights_that_are_no_numbers(tmp_path):
    make_llama(tmp_path / "model", num_hidden_layers=1, hidden_size=32, intermediate_size=32)
    edit_weights(
        tmp_path / "model",
        lambda weights: weights["model.layers.0.mlp.up_proj.weight"][0, 0].fill_(float("nan")),
    )
    with pytest.raises(CheckpointError, match=r"up_proj\.weight holds values that are not finite"):
        walk(Decoder(Source(tmp_path / "model")), Work(tmp_path / "out", {}), lambda job: {})


def test_a_line_that_is_no_text(folder, tmp_path):
    (tmp_path / "text.jsonl").write_text('{"text": "a\\ud800b"}\n')
    with pytest.raises(ConfigError, match=r"line 1 of .* lone surrogate"):
        calibration_ids(
            folder,
            300,
            Calibration(data=tmp_path / "text.jsonl", num_tokens=64, length=64),
            tmp_path,
        )


def test_too_little_text(folder):
    with pytest.raises(
        ConfigError, match=r"has 1[0-9]{3} tokens; 4096 were asked for.*--samples 1[0-9]"
    ):
        ids_of(folder, num_tokens=4096)
    with pytest.raises(ConfigError, match="are 32 tokens"):
        ids_of(folder, num_tokens=32)
    assert ids_of(folder).shape == (8, 64)


def test_an_output_that_is_there_is_kept(folder):
    with pytest.raises(ConfigError, match="is there already"):
        Work(folder, {})


def test_bloom_is_walked_with_text(tmp_path):
    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
    reference = BloomForCausalLM(config).eval()
    reference.save_pretrained(tmp_path / "model")
    ids = torch.randint(0, 64, (3, 16))
    work = Work(tmp_path / "out", {})
    walk(Decoder(Source(tmp_path / "model")), work, lambda job: {}, ids)
    with torch.no_grad():
        expected = reference.transformer.ln_f(work.states("own", 2))
        assert (reference.transformer(ids).last_hidden_state - expected).abs().max() < 1e-4


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_experts_are_refused(key):
    with pytest.raises(ConfigError, match="experts"):
        Decoder(SimpleNamespace(config={key: 8}))


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "cpu:", "mps"])
def test_devices_that_are_not_there(device):
    with pytest.raises(ConfigError, match=device):
        compute_device(device)


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(
        ConfigError,
        match=r"-m pip install 'tidemill\[compress\]'\. `make serve` does not install it",
    ):
        without_weights({"model_type": "llama"})
