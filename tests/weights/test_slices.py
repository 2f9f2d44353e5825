"""Rows and columns of stored tensors: the values of the whole, and only their bytes."""

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tidemill.weights.checkpoint import GGUFCheckpoint, RandomTensor, SafetensorsCheckpoint
from tidemill.weights.slices import take_rows
from tidemill.weights.views import View

WIDTH, ROWS = 768, 12


def whole_of(tensor) -> torch.Tensor:
    values = torch.empty(tensor.shape)
    tensor.read_into(values)
    return values


def gguf_tensor(path, qtype: str):
    kind = gguf.GGMLQuantizationType[qtype]
    values = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.add_tensor("x.bias", values[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {tensor.name: tensor for tensor in GGUFCheckpoint(path).tensors()}


@pytest.fixture
def stored(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"architectures": ["X"], "quantization_config": {"quant_method": "mxfp4"}}'
    )
    tensors = {
        "x.weight": torch.randn(ROWS, WIDTH).bfloat16(),
        "stack": torch.randn(3, ROWS, WIDTH),
        "x.bias": torch.randn(64),
    }
    blocks = {"y_blocks": torch.randint(0, 256, (2, ROWS, WIDTH // 32, 16), dtype=torch.uint8)}
    scales = {"y_scales": torch.randint(120, 130, (2, ROWS, WIDTH // 32), dtype=torch.uint8)}
    save_file(tensors | blocks | scales, tmp_path / "model.safetensors")
    return SafetensorsCheckpoint(tmp_path)


def check(tensor, block=1):
    values = whole_of(tensor)
    for begin, end in ((0, 5), (5, 12), (3, 4)):
        part = tensor.rows(begin, end)
        assert torch.equal(whole_of(part), values[begin:end])
        assert part.num_bytes * ROWS == tensor.num_bytes * (end - begin)
        assert torch.equal(whole_of(part.columns(256, 512)), values[begin:end, 256:512])
    for begin, end in ((0, 256), (512, 768), (32, 96), (40, 71)):
        part = tensor.columns(begin, end)
        assert torch.equal(whole_of(part), values[:, begin:end])
        assert torch.equal(whole_of(part.rows(2, 7)), values[2:7, begin:end])
        covered = (-(-end // block) - begin // block) * block
        assert part.num_bytes * WIDTH == tensor.num_bytes * covered
        if tensor.codes() is not None:
            codes = part.codes()
            assert (codes is None) == (begin % 32 != 0 or end % 32 != 0)
            if codes is not None:
                assert torch.equal(codes.dequantize(), tensor.codes().dequantize()[:, begin:end])


@pytest.mark.parametrize(
    ("qtype", "block"), [("F16", 1), ("Q4_1", 32), ("Q8_0", 32), ("BF16", 1), ("Q5_K", 256)]
)
def test_gguf(qtype, block, tmp_path):
    if block == 256:  # the package only reads these: any bytes will do
        kind = gguf.GGMLQuantizationType[qtype]
        size = gguf.GGML_QUANT_SIZES[kind][1] * WIDTH // block
        raw = np.random.default_rng(0).integers(0, 56, (ROWS, size)).astype(np.uint8)
        writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
        writer.add_tensor("x.weight", raw, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        check(next(iter(GGUFCheckpoint(tmp_path / "x.gguf").tensors())), block)
        return
    tensors = gguf_tensor(tmp_path / "x.gguf", qtype)
    check(tensors["x.weight"], block)
    assert torch.equal(whole_of(tensors["x.bias"].rows(3, 9)), whole_of(tensors["x.bias"])[3:9])


def test_safetensors_and_mxfp4(stored):
    found = {}
    for tensor in stored.tensors():  # the file is open meanwhile
        found[tensor.name] = True
        if tensor.name == "x.bias":
            assert torch.equal(whole_of(tensor.rows(7, 9)), whole_of(tensor)[7:9])
        elif tensor.name == "x.weight":
            check(tensor)
        else:
            check(tensor.matrix(1), 32 if tensor.name == "y_blocks" else 1)
    assert found.keys() == {"x.weight", "stack", "x.bias", "y_blocks"}


def test_views_read_what_they_are_asked_for(stored):
    for tensor in stored.tensors():
        if tensor.name != "x.weight":
            continue
        values = whole_of(tensor)
        turned = View(tensor, "t", transposed=True)
        assert torch.equal(whole_of(turned.rows(3, 70)), values.t()[3:70])
        assert turned.rows(0, WIDTH // 2).num_bytes * 2 == tensor.num_bytes
        assert torch.equal(whole_of(turned.columns(3, 7)), values.t()[:, 3:7])
        order = torch.tensor([8, 2, 3, 11, 0])
        view = View(tensor, "v", rows=order)
        assert torch.equal(whole_of(view), values[order])
        assert torch.equal(whole_of(view.rows(1, 4).columns(2, 9)), values[order[1:4], 2:9])
        assert view.rows(1, 4).num_bytes * ROWS == 3 * tensor.num_bytes
        some, left = take_rows(tensor, order)
        assert torch.equal(whole_of(some)[left], values[order])


def test_random_weights_agree_between_ranks():
    tensor = RandomTensor("x.weight", (8, 16))
    assert torch.equal(whole_of(tensor.rows(2, 4)), whole_of(tensor.rows(2, 4)))
    assert not torch.equal(whole_of(tensor.rows(0, 2)), whole_of(tensor.rows(2, 4)))
    assert whole_of(RandomTensor("x.bias", (8,)).rows(0, 4)).abs().max() == 0
