"""Matrices stored as two factors: served as such, with the bytes that were declared, near to the
product, invariant."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers import greedy, load_model, make_core, make_llama, run
from tidemill.errors import CheckpointError
from tidemill.kernels import native
from tidemill.kernels.low_rank import Product, SideBySide
from tidemill.layers.streamed import tensors_of
from tidemill.types.weight_types import HELD
from tidemill.weights.checkpoint import open_checkpoint
from tidemill.weights.packed.lowrank import LowRankTensor

PROMPT = [(37 * i) % 250 for i in range(50)]
RANKS = {
    "q_proj": 12,
    "k_proj": 0,
    "v_proj": 9,
    "o_proj": 16,
    "gate_proj": 20,
    "up_proj": 11,
    "down_proj": 17,
}


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16])
def folder(request, tmp_path_factory):
    """Every matrix of the layers but k's in factors of a rank of its own."""
    path = tmp_path_factory.mktemp("low")
    make_llama(path, num_hidden_layers=2, attention_bias=True)
    tensors = load_file(path / "model.safetensors")
    made: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        rank = RANKS.get(name.split(".")[-2], 0) if tensor.dim() == 2 else 0
        if not rank:
            made[name] = tensor.to(request.param)
            continue
        u, sigma, v = torch.linalg.svd(tensor, full_matrices=False)
        module = name.removesuffix(".weight")
        made |= {
            f"{module}.low_rank_b": (u * sigma)[:, :rank].to(request.param).contiguous(),
            f"{module}.low_rank_a": v[:rank].to(request.param).contiguous(),
        }
    save_file(made, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "low_rank"}})
    )
    return path


@pytest.fixture(scope="module")
def served(folder):
    if native.lib is None:
        pytest.skip(native.why)
    return load_model(folder, "quantized")


def test_linears_are_two_factors_of_the_declared_bytes(folder, served):
    block = served.blocks[0]
    qkv = block.attn.qkv.weight
    assert isinstance(qkv, SideBySide)
    assert [isinstance(part, Product) for part in qkv.parts] == [True, False, True]
    assert isinstance(block.mlp.down.weight, Product)
    matrices = [
        linear.weight
        for block in served.blocks
        for linear in (block.attn.qkv, block.attn.out, block.mlp.gate_up)
    ]
    matrices += [block.mlp.down.weight for block in served.blocks]
    held = sum(one.nbytes for one in tensors_of(matrices) if one.dim() > 1)  # biases do not count
    declared = sum(
        HELD["quantized", "cpu"].bytes_of(tensor.type_name, True)
        * tensor.shape[0]
        * tensor.shape[1]
        for tensor in open_checkpoint(folder).tensors()
        if "layers" in tensor.name and len(tensor.shape) == 2
    )
    of_rounding = 8 * 4 * sum(RANKS.values()) * 8  # rows are padded to eight
    assert declared <= held < declared + of_rounding


def test_logits_are_those_of_the_product(folder, served):
    whole = load_model(folder, "float32")
    cores = [make_core(model, kv_dtype="float32") for model in (served, whole)]
    answers = [run(core, {"x": (PROMPT, greedy(10, logprobs=2))})["x"] for core in cores]
    assert cores[0].runner.fallback == ""  # it is recorded
    assert answers[0].tokens == answers[1].tokens
    for mine, theirs in zip(answers[0].logprobs, answers[1].logprobs, strict=True):
        assert [value for _, value in mine.top] == pytest.approx(
            [value for _, value in theirs.top], abs=1e-4
        )


def test_alone_among_others_and_in_chunks(served):
    alone = run(make_core(served), {"x": (PROMPT, greedy(10, logprobs=2))})["x"]
    crowd = {f"o{i}": ([(i * 31 + j) % 250 for j in range(5 + 9 * i)], greedy(6)) for i in range(5)}
    core = make_core(served, token_budget=16, max_requests=8)
    assert run(core, crowd | {"x": (PROMPT, greedy(10, logprobs=2))})["x"] == alone
    assert run(core, {"x": (PROMPT, greedy(10, logprobs=2))})["x"] == alone  # from the prefix cache


def test_rows_and_columns_are_factors_again(folder):
    tensor = next(
        one
        for one in open_checkpoint(folder).tensors()
        if one.name.endswith("0.mlp.down_proj.weight")
    )
    whole = tensor.factors().product()
    part = tensor.rows(8, 40).columns(3, 99).rows(2, 30)
    assert isinstance(part, LowRankTensor)
    assert part.shape == (28, 96)
    torch.testing.assert_close(part.factors().product(), whole[10:38, 3:99])
    values = torch.empty(28, 96)
    part.read_into(values)
    assert torch.equal(values, part.factors().product())
    assert not tensor.rows(0, 8).is_smaller  # of few rows, the product is smaller
    assert tensor.rows(0, 8).type_name in ("F32", "BF16")


def test_factors_that_are_no_numbers(folder, tmp_path):
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.low_rank_a"
    tensors[name][0, 0] = float("inf")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match=f"{name} holds values that are no finite numbers"):
        load_model(tmp_path, "float32")
