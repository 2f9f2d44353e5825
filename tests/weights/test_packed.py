"""Quantized Hugging Face folders: what is read is what was written, and broken ones are refused
with the fix."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers import greedy, load_model, make_core, make_llama, run
from tests.models.test_llama import prompt_logits
from tests.weights.packers import LAYOUTS, quantize_folder
from tidemill.errors import CheckpointError
from tidemill.kernels import native
from tidemill.kernels.low_rank import SideBySide
from tidemill.kernels.quantized_linear import QuantizedPanels, fit
from tidemill.layers.linear import Linear
from tidemill.quant import METHODS
from tidemill.quant.base import Gated
from tidemill.types.weight_types import HELD
from tidemill.weights.checkpoint import open_checkpoint

SIZES = {
    "intermediate_size": 192,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 96,
    "initializer_range": 0.08,
}
MODULE = "model.layers.0.mlp.down_proj"


def one_matrix(folder, layout, shape=(96, 128), seed=0):
    """A folder of one quantized matrix, and its values."""
    pack, settings = LAYOUTS[layout]
    tensors, values = pack(torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.2)
    save_file(
        {f"{MODULE}.{part}": tensor.contiguous() for part, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    config = {"architectures": ["LlamaForCausalLM"], "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    return values


def read(folder):
    (tensor,) = open_checkpoint(folder).tensors()
    values = torch.empty(tensor.shape)
    tensor.read_into(values)
    return tensor, values


def change(folder, **parts):
    """Replace parts; None removes one."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    for part, made in parts.items():
        name = f"{MODULE}.{part}"
        value = made(weights[name]) if callable(made) else made
        weights.pop(name, None)
        if value is not None:
            weights[name] = value.contiguous()
    save_file(weights, path)


def settings(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_those_that_were_written(layout, tmp_path):
    expected = one_matrix(tmp_path, layout)
    tensor, values = read(tmp_path)
    assert tensor.name == f"{MODULE}.weight"
    assert tuple(tensor.shape) == (96, 128)
    # which multiply by a rounded inverse, or add a difference
    exact = layout not in ("bnb int8", "bitnet", "gobo")
    torch.testing.assert_close(
        values, expected, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-7
    )


def test_parts_of_a_matrix_may_lie_in_different_files(tmp_path):
    expected = one_matrix(tmp_path, "gptq act-order")
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    for i, (name, tensor) in enumerate(weights.items()):
        save_file({name: tensor}, tmp_path / f"model-{i}.safetensors")
    assert torch.equal(read(tmp_path)[1], expected)


def test_modules_that_were_not_converted_are_plain(tmp_path):
    one_matrix(tmp_path, "fp8 deepseek")
    change(tmp_path, weight=torch.ones(3, 4), weight_scale_inv=None)
    tensor, values = read(tmp_path)
    assert tensor.type_name == "F32"
    assert torch.equal(values, torch.ones(3, 4))


BROKEN = {
    "truncated scales": ("gptq", {"scales": lambda t: t[:2]}, "2 groups of 32"),
    "missing scales": ("gptq", {"scales": None}, "scales is missing"),
    "scales that are not finite": ("awq", {"scales": lambda t: t * float("nan")}, "not finite"),
    "zero points of another shape": ("gptq", {"qzeros": lambda t: t[:, :3]}, "qzeros"),
    "codes of another type": ("awq", {"qweight": lambda t: t.float()}, "qweight is F32"),
    "groups that are not": ("gptq act-order", {"g_idx": lambda t: torch.full_like(t, 99)}, "does not share the columns"),
    "a shape that is not": ("int4", {"weight_shape": lambda t: torch.tensor([96, 2**40])}, "weight_shape says"),
    "a shape of other words": ("int4", {"weight_shape": lambda t: torch.tensor([96, 4096])}, "weight_packed"),
    "words of another number of codes": ("int3 with gaps", {"weight_packed": lambda t: t[:, :11]}, "11 words for 128 codes"),
    "scales of too many rows": ("w8a8", {"weight_scale": lambda t: torch.cat([t, t])}, "does not fit a matrix"),
    "scales of too many blocks": ("fp8 block", {"weight_scale": lambda t: t[:1]}, "does not fit a matrix"),
    "a state that is no JSON": (
        "nf4", {"weight.quant_state.bitsandbytes__nf4": lambda t: t[:20]}, "is no JSON",
    ),
    "too few codes": ("nf4", {"weight": lambda t: t[:100]}, "has 100 bytes"),
    "no largest values": ("nf4", {"weight.nested_absmax": None}, "nested_absmax is missing"),
    "codes that are not ternary": ("bitnet", {"weight": lambda t: t | 3}, "not ternary"),
    "rows without scales": ("bnb int8", {"SCB": None}, "SCB is missing"),
    "places outside the matrix": ("gobo", {"weight_places": lambda t: t + 96 * 128}, "outside the matrix"),
    "a scale of activations that is not above 0": ("w8a8 static", {"input_scale": lambda t: -t}, "must be above 0"),
    "a mask of too many": ("sparse 2:4", {"bitmask": lambda t: t | 255}, "half of each row"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_broken_parts_are_refused(what, tmp_path):
    layout, parts, message = BROKEN[what]
    one_matrix(tmp_path, layout)
    change(tmp_path, **parts)
    with pytest.raises(CheckpointError, match=message) as caught:
        read(tmp_path)
    assert caught.value.fix


LAYOUT = {
    "truncated scales": ("int4", {"weight_scale": lambda t: t[:90]}, "weight_scale has shape"),
    "codes without scales": ("w8a8", {"weight_scale": None}, "weight_scale is missing"),
    "floats without scales": ("fp8 block", {"weight_scale": None}, "weight_scale is missing"),
    "order of other columns": (
        "int4 act-order",
        {"weight_g_idx": lambda t: t[:7]},
        "weight_g_idx is I32",
    ),
    "zero points of other groups": (
        "int4 asymmetric",
        {"weight_zero_point": lambda t: t[:, :1]},
        "weight_zero_point is I32",
    ),
    "several scales of a ternary matrix": (
        "bitnet",
        {"weight_scale": lambda t: torch.cat([t, t])},
        "must be one number",
    ),
    "too few nested scales": ("nf4", {"weight.nested_absmax": lambda t: t[:0]}, "nested_absmax"),
    "outliers of another type": (
        "gobo",
        {"weight_places": lambda t: t.float()},
        "types that cannot be read",
    ),
}


@pytest.mark.parametrize("what", LAYOUT)
def test_a_wrong_layout_is_refused_before_values_are_read(what, tmp_path):
    layout, parts, message = LAYOUT[what]
    one_matrix(tmp_path, layout)
    change(tmp_path, **parts)
    with pytest.raises(CheckpointError, match=message):
        list(open_checkpoint(tmp_path).tensors())


@pytest.mark.parametrize("layout", ["gptq", "int4"])
def test_nothing_is_loaded_of_a_folder_that_lacks_a_matrix_or_has_one_of_another_shape(
    layout, tmp_path, monkeypatch
):
    make_llama(tmp_path, **SIZES)
    quantize_folder(tmp_path, layout)
    file, taken = tmp_path / "model.safetensors", []
    tensors = load_file(file)
    real = Linear.take
    monkeypatch.setattr(
        Linear, "take", lambda self, part, *rest: (taken.append(part), real(self, part, *rest))
    )
    norm = "model.layers.1.post_attention_layernorm.weight"
    module = "model.layers.1.mlp.down_proj."
    wrong = {
        f"tensor {module}weight is missing": {
            name: value for name, value in tensors.items() if not name.startswith(module)
        },
        f"Tensor {norm} has shape": tensors | {norm: tensors[norm][:-1].clone()},
        "has no place": tensors | {"model.layers.9.mlp.up_proj.weight": torch.ones(2, 2)},
    }
    for message, kept in wrong.items():
        save_file(kept, file)
        with pytest.raises(CheckpointError, match=message):
            load_model(tmp_path)
        assert not taken


@pytest.mark.parametrize(
    ("layout", "given", "message"),
    [
        ("gptq", {"quant_method": "hqq"}, "'hqq', which cannot be read"),
        ("gptq", {"bits": 5}, "5 bits cannot be read"),
        ("gptq", {"bits": "4"}, "must be a whole number"),
        ("gptq", {"group_size": 0}, "group_size is 0"),
        ("gptq", {"checkpoint_format": "marlin"}, "'marlin' of GPTQ"),
        ("awq", {"version": "gemv"}, "'gemv' cannot be read"),
        ("int4", {"format": "marlin-24"}, "'marlin-24' cannot be read"),
        (
            "int4",
            {"config_groups": {"a": {"weights": {"num_bits": 4}, "targets": ["re:(a+)+b"]}}},
            "too complex",
        ),
        (
            "int4",
            {"config_groups": {"a": {"weights": {"num_bits": 4}, "targets": ["re:.*q_proj"]}}},
            "no group",
        ),
        ("fp8 deepseek", {"weight_block_size": [0, 1]}, "two whole numbers"),
        (
            "bitnet",
            {"linear_class": "autobitlinear", "quantization_mode": "online"},
            "'online' cannot be read",
        ),
    ],
)
def test_unknown_settings_are_refused(layout, given, message, tmp_path):
    one_matrix(tmp_path, layout)
    settings(tmp_path, **given)
    with pytest.raises(CheckpointError, match=message) as caught:
        read(tmp_path)
    assert caught.value.fix


@pytest.mark.parametrize("layout", ["gptq act-order", "nf4"])
def test_a_folder_loads_in_float32(layout, tmp_path):
    reference = make_llama(tmp_path, **SIZES)
    quantize_folder(tmp_path, layout, reference)
    model = load_model(tmp_path)
    ids = list(range(2, 40))
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(prompt_logits(model, ids), expected, atol=1e-3, rtol=1e-4)


# ---- multiplied as they are stored

# Error of all logits as a part of them, against the same weights dequantized, in float32.
# Activations are rounded to 8 bits: with a scale for 32 of them, for all of a token (W8A8,
# ternary), or one for ever (static); 8-bit floats become bfloat16.
BOUNDS = {
    "gptq": 0.025, "gptq act-order": 0.025, "gptq v2 per channel": 0.025, "gptq 8 bits": 0.025, "gptq 3 bits": 0.025,
    "awq": 0.025, "int4": 0.025, "int4 asymmetric": 0.025, "int4 act-order": 0.025, "int8 groups": 0.025, "w8a16": 0.025,
    "bnb int8": 0.025, "nf4": 0.035, "nf4 plain": 0.035, "fp4": 0.03, "fp8 tensor": 0.01, "fp8 block": 0.01,
    "fp8 deepseek": 0.01, "w8a8": 0.035, "w8a8 static": 0.1, "bitnet": 0.025, "bitnet offline": 0.025, "gobo": 0.03,
}  # fmt: skip
OFTEN = ("gptq act-order", "nf4", "w8a8", "bitnet")


def often(layouts):
    return [
        name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in layouts
    ]


@pytest.mark.skipif(native.lib is None, reason=native.why)
@pytest.mark.parametrize("layout", often(BOUNDS))
def test_packed_logits_are_near_those_of_dequantized_weights(layout, tmp_path):
    reference = make_llama(tmp_path, **SIZES)
    quantize_folder(tmp_path, layout, reference)
    model = load_model(tmp_path, "quantized")
    ids = list(range(2, 40))
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    error = (prompt_logits(model, ids) - expected).norm() / expected.norm()
    assert error < BOUNDS[layout]


@pytest.mark.skipif(native.lib is None, reason=native.why)
def test_a_ternary_bitnet_is_near_its_dequantized_weights(tmp_path):
    from transformers import BitNetConfig, BitNetForCausalLM

    torch.manual_seed(0)
    sizes = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
    }
    reference = BitNetForCausalLM(BitNetConfig(**SIZES, **sizes)).eval().float()
    reference.save_pretrained(tmp_path)
    quantize_folder(tmp_path, "bitnet", reference)
    model = load_model(tmp_path, "quantized")
    ids = list(range(2, 40))
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    error = (prompt_logits(model, ids) - expected).norm() / expected.norm()
    assert error < 0.035
    assert isinstance(model.blocks[0].mlp.down.weight, QuantizedPanels)


@pytest.mark.skipif(native.lib is None, reason=native.why)
@pytest.mark.parametrize("layout", often([name for name in BOUNDS if "plain" not in name]))
def test_bytes_are_as_declared(layout, tmp_path):
    if layout.startswith(("fp8", "sparse")):
        pytest.skip("held dense")
    one_matrix(tmp_path, layout, (96, 256))
    (tensor,) = open_checkpoint(tmp_path).tensors()
    codes = fit(tensor.codes())
    held = QuantizedPanels(codes, None)
    declared = HELD["quantized", "cpu"].bytes_of(tensor.type_name, True) * 96 * 256
    # scales of rows
    rows = 8 * 96 if tensor.type_name.endswith("-C") or tensor.type_name == "TERNARY" else 0
    # table, scale of activations; order of columns
    head = 32 + (4 * 256 if "act-order" in layout else 0)
    if layout == "gobo":  # places and values of outliers
        rows, head = rows + 8 * 96, head + 4 * 13 + 8 * codes.outliers.places.numel()
    assert declared <= held.num_bytes <= declared + rows + head


@pytest.mark.skipif(native.lib is None, reason=native.why)
@pytest.mark.parametrize(
    "layout",
    often(
        [
            "gptq",
            "gptq act-order",
            "awq",
            "int8 groups",
            "w8a8",
            "w8a8 static",
            "nf4",
            "bitnet",
            "bnb int8",
            "gobo",
        ]
    ),
)
def test_a_sequence_does_not_depend_on_its_batch(layout, tmp_path):
    make_llama(tmp_path, **SIZES)
    quantize_folder(tmp_path, layout)
    model = load_model(tmp_path, "quantized")
    prompt = [5, 9, 30, 41, 7] * 4
    params = greedy(8, logprobs=2)
    alone = run(make_core(model), {"a": (prompt, params)})["a"]
    others = {f"b{i}": ([i + 3] * (5 + 3 * i), greedy(12)) for i in range(6)}
    assert run(make_core(model), {**others, "a": (prompt, params)})["a"] == alone
    assert (
        run(make_core(model, token_budget=7, max_requests=4), {"a": (prompt, params)})["a"] == alone
    )
    core = make_core(model)
    run(core, {"first": (prompt, params)})
    assert run(core, {"a": (prompt, params)})["a"] == alone


@pytest.mark.skipif(native.lib is None, reason=native.why)
def test_fused_matrices_with_tables_of_their_own_are_not_rounded_anew(tmp_path):
    """GOBO's q, k and v: side by side, with their centroids and outliers."""
    make_llama(tmp_path, **SIZES)
    quantize_folder(tmp_path, "gobo")
    block = load_model(tmp_path, "quantized").blocks[0]
    for linear, num in ((block.attn.qkv, 3), (block.mlp.gate_up, 2)):
        weight = linear.weight.ungated if isinstance(linear.weight, Gated) else linear.weight
        assert isinstance(weight, SideBySide)
        assert [part.held.kind & 255 for part in weight.parts] == [native.KINDS["GT4"]] * num


@pytest.mark.skipif(native.lib is None, reason=native.why)
def test_outliers_of_a_token_do_not_coarsen_its_other_activations(tmp_path):
    """LLM.int8(): with a threshold that is never reached, or none, the same folder is farther from
    its dequantized weights."""
    reference = make_llama(tmp_path, **SIZES)
    for layer in reference.model.layers:
        layer.input_layernorm.weight.data[7] *= 60
    reference.save_pretrained(tmp_path)
    quantize_folder(tmp_path, "bnb int8", reference)
    config, ids = json.loads((tmp_path / "config.json").read_text()), list(range(2, 40))
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0]
    errors = {}
    for threshold in (6.0, 0.0):
        settings = config["quantization_config"] | {"llm_int8_threshold": threshold}
        (tmp_path / "config.json").write_text(
            json.dumps(config | {"quantization_config": settings})
        )
        errors[threshold] = (
            prompt_logits(load_model(tmp_path, "quantized"), ids) - expected
        ).norm() / expected.norm()
    assert errors[6.0] < 0.5 * errors[0.0]
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": settings | {"llm_int8_threshold": "six"}})
    )
    with pytest.raises(CheckpointError, match="llm_int8_threshold is 'six'"):
        open_checkpoint(tmp_path)


def test_every_way_of_holding_weights_declares_its_bytes():
    assert set(HELD) >= set(METHODS)
    assert HELD["quantized", "cuda"].bytes_of("INT4-G128", True) == 0.5 + 4 / 128
    assert HELD["quantized", "cuda"].bytes_of("Q4_K", True) == 0.5 + 4 / 32


@pytest.mark.skipif(native.lib is None, reason=native.why)
@pytest.mark.parametrize("layout", [name if name == "awq" else pytest.param(name, marks=pytest.mark.slow) for name in
                                    ("awq", "gptq act-order", "int4", "fp8 deepseek", "w8a8", "bitnet")])  # fmt: skip
def test_quantized_experts_are_near_their_dequantized_weights(layout, tmp_path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {
        "num_experts": 4,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "num_attention_heads": 4,
        "head_dim": 32,
    }
    # all experts: none is near a tie
    sizes |= {"num_key_value_heads": 2, "norm_topk_prob": True, "max_position_embeddings": 256}
    quantized, plain = tmp_path / "quantized", tmp_path / "plain"
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | sizes)).float().save_pretrained(plain)
    shutil.copytree(plain, quantized)
    values = {}
    quantize_folder(quantized, layout, values=values)
    assert any(".experts.3.up_proj" in name for name in values)
    save_file(load_file(plain / "model.safetensors") | values, plain / "model.safetensors")
    ids = list(range(2, 40))
    expected = prompt_logits(load_model(plain), ids)
    torch.testing.assert_close(
        prompt_logits(load_model(quantized), ids), expected, atol=1e-3, rtol=1e-4
    )
    error = (
        prompt_logits(load_model(quantized, "quantized"), ids) - expected
    ).norm() / expected.norm()
    assert error < 0.04
