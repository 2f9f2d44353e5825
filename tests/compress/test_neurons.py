"""How often neurons are used: what is measured, what is read of it, and mistakes."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.compress.test_predictors import folder  # noqa: F401
from tests.helpers import byte_tokenizer, make_llama
from tidemill.cli.main import app
from tidemill.errors import CheckpointError
from tidemill.weights.neurons import TENSORS, read_hottest


def measure(path, out):
    text = ["--calibration", str(path / "text.txt"), "--samples", "8", "--seq-len", "64"]
    return CliRunner().invoke(app, ["measure-neurons", str(path), "-o", str(out), *text])


def test_frequencies_are_those_of_gates_above_zero(folder, tmp_path):  # noqa: F811
    result = measure(folder, tmp_path / "often")
    assert result.exit_code == 0, result.exception
    assert "--hot-neurons" in result.output
    often = load_file(tmp_path / "often" / TENSORS)
    assert sorted(often) == ["frequency.0", "frequency.1"]
    for one in often.values():
        assert one.shape == (172,)
        assert 0.0 <= one.min() < one.mean() < 0.5
        assert torch.equal(one * 8 * 64, (one * 8 * 64).round())  # counts of tokens
    hot = read_hottest(tmp_path / "often", 2, 172, 64)
    for layer, own in enumerate(hot):
        one, is_hot = often[f"frequency.{layer}"], torch.zeros(172, dtype=torch.bool)
        is_hot[own] = True
        assert torch.equal(own, own.sort().values)
        assert int(is_hot.sum()) == 64
        assert one[is_hot].min() >= one[~is_hot].max()


def test_mistakes(folder, tmp_path):  # noqa: F811
    make_llama(tmp_path / "silu", vocab_size=320, num_hidden_layers=2)
    byte_tokenizer(tmp_path / "silu")
    (tmp_path / "silu" / "text.txt").write_text((folder / "text.txt").read_text())
    result = measure(tmp_path / "silu", tmp_path / "often")
    assert "its activation is no ReLU" in str(result.exception)
    assert not (tmp_path / "often.partial").exists()
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_hottest(tmp_path, 2, 172, 64)
    save_file({"frequency.0": torch.rand(172)}, tmp_path / TENSORS)
    with pytest.raises(CheckpointError, match=r"frequency\.1"):
        read_hottest(tmp_path, 2, 172, 64)
    for wrong in (torch.rand(100), torch.full((172,), torch.nan)):
        save_file({"frequency.0": wrong}, tmp_path / TENSORS)
        with pytest.raises(CheckpointError, match="172 neurons") as error:
            read_hottest(tmp_path, 1, 172, 64)
        assert "measure-neurons" in error.value.fix
