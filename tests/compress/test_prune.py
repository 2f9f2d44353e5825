"""Pruning: each method on matrices, then whole models that serve; runs that were interrupted,
mistakes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.helpers import byte_tokenizer, make_llama
from tidemill import LLM, SamplingParams
from tidemill.cli.main import app
from tidemill.compress import prune as pruning
from tidemill.compress.calibration import Calibration
from tidemill.compress.decoder import Decoder
from tidemill.compress.evaluate import measure_quality
from tidemill.compress.grid import Grid, quantize
from tidemill.compress.lowrank import choose_ranks
from tidemill.compress.prune import PruneOptions, prune
from tidemill.compress.prune_methods import (
    Pattern,
    inverse_factor,
    magnitude,
    sparse_integers,
    sparsegpt,
    wanda,
)
from tidemill.compress.source import Source
from tidemill.errors import CalibrationError, CheckpointError, ConfigError

TEXT = " ".join(
    f"Line {i} of the text has {i * i} letters, and the word {chr(97 + i % 26) * (i % 7)}."
    for i in range(40)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_llama(
        path, vocab_size=320, num_hidden_layers=4, intermediate_size=128, num_key_value_heads=2
    )
    byte_tokenizer(path)
    (path / "text.txt").write_text(TEXT)
    return path


def options(folder, out, **more):
    calibration = Calibration(data=folder / "text.txt", num_tokens=1024, length=64)
    return PruneOptions(model=str(folder), out=out, calibration=calibration, **more)


def layer_inputs(seed=0):
    """Correlated, of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(800, 64, generator=generator) @ torch.randn(64, 64, generator=generator)
    return torch.randn(32, 64, generator=generator), x * torch.rand(64, generator=generator) * 2


@pytest.mark.parametrize("text", ["unstructured", "2:4", "4x4", "4:8"])
def test_who_looks_at_inputs_loses_less(text):
    weight, x = layer_inputs()
    moment, pattern = x.t() @ x, Pattern.read(text)
    inverse = inverse_factor(moment, 0.01)
    made = [magnitude(weight, pattern, 0.5), wanda(weight, moment.diagonal(), pattern, 0.5)]
    made.append(sparsegpt(weight, inverse, pattern, 0.5))
    errors = [(x @ (weight - one).t()).square().mean().item() for one in made]
    assert errors[2] < errors[1] < errors[0]
    for one in made:
        assert (one == 0).sum() == one.numel() // 2
        if pattern.kept:
            assert ((one.view(-1, pattern.columns) != 0).sum(1) == pattern.kept).all()
        if text == "4x4":
            blocks = (one.view(8, 4, 16, 4) == 0).sum((1, 3))
            assert set(blocks.unique().tolist()) == {0, 16}


def test_the_columns_after_what_goes_make_up_for_it():
    """As well as least squares can."""
    weight, x = layer_inputs(1)
    made = sparsegpt(weight, inverse_factor(x.t() @ x, 1e-9), Pattern(columns=64, kept=63), 0.0)
    for row in range(4):
        (gone,) = (made[row] == 0).nonzero().flatten().tolist()
        torch.testing.assert_close(made[row, :gone], weight[row, :gone])
        wanted = (
            x.double() @ weight[row].double() - x[:, :gone].double() @ weight[row, :gone].double()
        )
        best = torch.linalg.lstsq(x[:, gone + 1 :].double(), wanted).solution
        torch.testing.assert_close(made[row, gone + 1 :].double(), best, rtol=1e-2, atol=1e-2)


def test_inputs_that_say_nothing():
    weight, x = layer_inputs()
    x[:, 3] = 0
    made = sparsegpt(weight, inverse_factor(x.t() @ x, 0.01), Pattern(), 0.5)
    assert (made[:, 3] == 0).all()
    assert made.isfinite().all()
    with pytest.raises(CalibrationError, match="no Cholesky factor"):
        inverse_factor(torch.full((4, 4), float("nan")), 0.01)


CASES = [
    pytest.param("magnitude", "weights", "unstructured", marks=pytest.mark.slow),
    pytest.param("wanda", "weights", "4x4", marks=pytest.mark.slow),
    ("sparsegpt", "weights", "2:4"),
    pytest.param("magnitude", "neurons", "unstructured", marks=pytest.mark.slow),
    ("sparsegpt", "neurons", "unstructured"),
    ("sparsegpt", "heads", "unstructured"),
    ("wanda", "layers", "unstructured"),
]


@pytest.mark.parametrize(("method", "structure", "pattern"), CASES)
def test_what_is_left_serves(folder, tmp_path, method, structure, pattern):
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    made = prune(options(folder, out, method=method, structure=structure, pattern=pattern))
    assert not (tmp_path / "out.partial").exists()
    config = json.loads((out / "config.json").read_text())
    expected = {
        "neurons": ("intermediate_size", 64),
        "heads": ("num_key_value_heads", 1),
        "layers": ("num_hidden_layers", 2),
    }
    if structure in expected:
        assert config[expected[structure][0]] == expected[structure][1]
    else:
        assert made["zeros"] * 2 == made["values"]
    tensors = load_file(out / "model.safetensors")
    if pattern == "2:4":
        for name, tensor in tensors.items():
            if "proj" in name:
                assert ((tensor.view(-1, 4) != 0).sum(1) == 2).all(), name
    ids = list(range(5, 45))
    llm = LLM(str(out), progress=False, threads=1, max_requests=2, dtype="float32")
    (output,) = llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=4), progress=False)
    with torch.inference_mode():
        reference = AutoModelForCausalLM.from_pretrained(out)
        assert (
            output.outputs[0].token_ids
            == reference.generate(torch.tensor([ids]), max_new_tokens=4, do_sample=False)[
                0, 40:
            ].tolist()
        )


@pytest.mark.slow
def test_neurons_that_are_fitted_lose_less(folder, tmp_path):
    ids = [LLM(str(folder), progress=False, threads=1, max_requests=2).tokenizer.encode(TEXT)[:200]]
    original = LLM(str(folder), progress=False, threads=1, max_requests=2, dtype="float32")
    distances = []
    for method in ("magnitude", "sparsegpt"):
        prune(options(folder, tmp_path / method, method=method, structure="neurons", sparsity=0.25))
        llm = LLM(
            str(tmp_path / method), progress=False, threads=1, max_requests=2, dtype="float32"
        )
        distances.append(measure_quality(llm, original, ids, lambda _: None).kl)
    assert distances[1] < distances[0]


def test_sparse_and_quantized_jointly(folder, tmp_path):
    """Sparse before and after rounding; nearer than rounding what SparseGPT left; it serves from
    the packed layout."""
    weight, x = layer_inputs()
    inverse, pattern = inverse_factor(x.t() @ x, 0.01), Pattern.read("2:4")
    stored = sparse_integers(weight, inverse, pattern, 0.5, 4)
    one_after_the_other = quantize(sparsegpt(weight, inverse, pattern, 0.5), Grid(4, 0, True))
    errors = [
        (x @ (weight - one.dequantize()).t()).square().mean().item()
        for one in (stored, one_after_the_other)
    ]
    assert errors[0] < errors[1]
    assert ((stored.codes_NK.view(-1, 4) != 0).sum(1) <= 2).all()
    made = prune(options(folder, tmp_path / "out", pattern="2:4", bits=8))
    assert made["zeros"] >= made["values"] // 2
    assert made["bytes"] < 0.5 * Source(folder).num_bytes
    name = "model.layers.1.mlp.up_proj.weight"
    read = Source(tmp_path / "out").read({name})[name]
    assert ((read.view(-1, 4) != 0).sum(1) <= 2).all()
    prune(options(folder, tmp_path / "sparse", pattern="2:4"))
    original, served, sparse = (
        LLM(str(one), progress=False, threads=1, max_requests=2, dtype="float32")
        for one in (folder, tmp_path / "out", tmp_path / "sparse")
    )
    ids = [original.tokenizer.encode(TEXT)[300:500]]
    distances = [measure_quality(one, original, ids, lambda _: None).kl for one in (served, sparse)]
    assert distances[0] < 1.1 * distances[1]


def test_factors_of_lower_rank(folder, tmp_path):
    """Those that are best on the inputs lose less than those of the matrix; the merged matrices are
    the same model."""
    load = {"progress": False, "threads": 1, "max_requests": 2, "dtype": "float32"}
    original = LLM(str(folder), **load)
    ids = [original.tokenizer.encode(TEXT)[300:500]]
    sizes, distances = [], []
    for method, merged in (("svd", False), ("asvd", False), ("asvd", True)):
        out = tmp_path / f"{method}{merged}"
        prune(options(folder, out, method=method, sparsity=0.25, merged=merged))
        llm = LLM(str(out), **load)
        distances.append(measure_quality(llm, original, ids, lambda _: None).kl)
        sizes.append(
            sum(
                one.numel()
                for name, one in load_file(out / "model.safetensors").items()
                if "layers" in name
            )
        )
    whole = sum(
        one.numel()
        for name, one in load_file(folder / "model.safetensors").items()
        if "layers" in name
    )
    assert 0.74 * whole < min(sizes[:2]) <= max(sizes[:2]) < 0.77 * whole
    assert sizes[2] == whole
    assert distances[1] < distances[0]
    assert distances[2] == pytest.approx(distances[1], rel=1e-3)


def test_factors_that_do_not_fit(folder, tmp_path):
    prune(options(folder, tmp_path / "out", method="svd", sparsity=0.5))
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.low_rank_a"
    for broken, what in (
        ({name: tensors[name][1:].clone()}, "cannot be multiplied"),
        ({name: None}, "is missing"),
    ):
        save_file(
            {key: value for key, value in (tensors | broken).items() if value is not None}, file
        )
        with pytest.raises(CheckpointError, match=what):
            LLM(str(tmp_path / "out"), progress=False)


def test_ranks_go_where_they_save_most():
    energies = {"a": torch.tensor([8.0, 1.0, 0.5, 0.5]), "b": torch.tensor([3.0, 3.0, 3.0, 3.0])}
    assert choose_ranks(energies, dict.fromkeys(energies, (16, 16)), 0.26) == {"a": 1, "b": 3}
    with pytest.raises(ConfigError, match="rank 1"):
        choose_ranks(energies, dict.fromkeys(energies, (16, 16)), 0.1)


class Interrupted(Exception):
    pass


def test_a_run_that_was_interrupted_ends_with_the_same_bytes(folder, tmp_path, monkeypatch):
    prune(options(folder, tmp_path / "whole"))
    real, calls = pruning.collect, []

    def stops(job, **how):
        calls.append(job.number)
        if len(calls) == 3:
            raise Interrupted
        return real(job, **how)

    monkeypatch.setattr(pruning, "collect", stops)
    with pytest.raises(Interrupted):
        prune(options(folder, tmp_path / "parts"))
    with pytest.raises(ConfigError, match="other settings"):
        prune(options(folder, tmp_path / "parts", sparsity=0.6))
    prune(options(folder, tmp_path / "parts"))
    assert calls == [0, 1, 2, 2, 3]
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "parts" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.slow
def test_several_files(folder, tmp_path):
    from tidemill.compress.folder import FolderWriter, names_outside

    source = Source(folder)
    decoder = Decoder(source)
    writer = FolderWriter(tmp_path / "out", "float32", shard_bytes=100_000)
    names = names_outside(decoder) + [
        name for i in range(decoder.num_layers) for name in decoder.tensor_names(i)
    ]
    for name in names:
        writer.add(name, source.read({name})[name])
    writer.close(source, source.config)
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    ids = list(range(5, 30))
    first, second = (
        LLM(str(one), progress=False, threads=1, max_requests=2, dtype="float32").generate(
            [ids], SamplingParams(temperature=0.0)
        )
        for one in (folder, tmp_path / "out")
    )
    assert first[0].outputs[0].token_ids == second[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (["--method", "best"], "--method best is not known"),
        (["--pattern", "5:4"], "--pattern 5:4 is not known"),
        (["--pattern", "7x7"], "no multiple of the pattern"),
        (["--sparsity", "1.5"], "--sparsity is 1.5"),
        (["--structure", "heads", "--pattern", "2:4"], "is of weights"),
        (["--samples", "1562"], "tokens; 99968 were asked for"),
        (["--samples", "0"], "--samples is 0"),
        (["--out-dtype", "int3"], "--out-dtype int3"),
        (["--bits", "3"], "--bits is 3"),
        (["--bits", "8", "--method", "wanda"], "of sparsegpt's weights"),
        (["--merged"], "--merged is of svd"),
        (["--method", "asvd", "--pattern", "2:4"], "no --pattern"),
    ],
)
def test_mistakes(folder, tmp_path, more, what):
    command = [
        "prune",
        str(folder),
        "-o",
        str(tmp_path / "out"),
        "--calibration",
        str(folder / "text.txt"),
        "--samples",
        "8",
    ]
    result = CliRunner().invoke(app, [*command, "--seq-len", "64", *more])
    assert isinstance(result.exception, ConfigError), result.output
    assert what in str(result.exception)
    assert not (tmp_path / "out").exists()
