"""GGUF: every type the package dequantizes, and no crash on any broken file."""

import random

import gguf
import numpy as np
import pytest
import torch

from tests.helpers import greedy, load_model, make_core, make_llama, run
from tests.models.test_llama import prompt_logits
from tidemill.errors import CheckpointError
from tidemill.kernels import native
from tidemill.weights.checkpoint import open_checkpoint
from tidemill.weights.gguf import GGUFFile
from tidemill.weights.gguf_codes import read_codes

TYPES = sorted(gguf.quants._type_traits, key=lambda t: t.name)


ARCHITECTURES = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
PERMUTED = ("llama", "granite", "smollm3", "olmo", "arcee")  # rows of q and k
ONE_LESS = ("gemma", "gemma2", "gemma3", "nemotron")  # weights of norms


def arch_of(config):
    names = {"gemma3_text": "gemma3", "olmo3": "olmo2", "phi": "phi2", "cohere": "command-r"}
    return names.get(config.model_type, config.model_type)


def converted(arch, name, values, config):
    """A tensor as llama.cpp's converter stores it."""
    for part, heads in (
        ("q_proj", config.num_attention_heads),
        ("k_proj", getattr(config, "num_key_value_heads", None)),
    ):
        if part in name and arch in PERMUTED:
            values = (
                values.reshape(heads, 2, values.shape[0] // heads // 2, -1)
                .swapaxes(1, 2)
                .reshape(values.shape)
            )
    if arch == "gpt2" and values.ndim == 2 and ".h." in name:
        values = values.T.copy()
    return values + 1 if arch in ONE_LESS and name.endswith("norm.weight") else values


def write_gguf(
    path,
    reference,
    quantize=None,
    table=None,
    drop=(),
    extra=None,
    reshape=None,
    strings=None,
    **metadata,
):
    """A GGUF of a Transformers model as llama.cpp's converter lays it out, names translated by the
    package's tables. `strings`: further keys of any kind, instead of those of the same name."""
    c = reference.config
    arch = arch_of(c)
    writer = gguf.GGUFWriter(path, arch)
    head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    settings = {
        f"{arch}.block_count": c.num_hidden_layers, f"{arch}.context_length": c.max_position_embeddings,
        f"{arch}.embedding_length": c.hidden_size, f"{arch}.attention.head_count": c.num_attention_heads,
    }  # fmt: skip
    if arch == "gpt2":
        reals = {"gpt2.attention.layer_norm_epsilon": c.layer_norm_epsilon}
        settings |= {"gpt2.feed_forward_length": c.n_inner}
    else:
        rope = c.rope_parameters.get("full_attention", c.rope_parameters)
        names = ("layer_norm_eps", "norm_epsilon", "norm_eps", "rms_norm_eps")
        name, value = next((name, getattr(c, name)) for name in names if hasattr(c, name))
        eps = (
            "layer_norm_rms_epsilon"
            if name == "rms_norm_eps" and arch != "olmo"
            else "layer_norm_epsilon"
        )
        reals = {f"{arch}.attention.{eps}": value}
        reals[f"{arch}.rope.freq_base"] = float(rope["rope_theta"])
        settings |= {
            f"{arch}.feed_forward_length": c.intermediate_size, f"{arch}.attention.head_count_kv": c.num_key_value_heads,
            f"{arch}.rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        }  # fmt: skip
    for key, value in (settings | metadata).items():
        if value is not None and key not in (strings or {}):
            writer.add_uint32(key, value)
    for key, value in (reals | (strings or {})).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    names = gguf.get_tensor_name_map(ARCHITECTURES[arch], c.num_hidden_layers)
    for name, weight in reference.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        values = converted(arch, name, weight.numpy().astype(np.float32), c)
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if stored in drop:
            continue
        if reshape and stored in reshape:
            values = values.reshape(reshape[stored])
        kind = table if table is not None and stored == "token_embd.weight" else quantize
        if kind is not None and values.ndim == 2:
            writer.add_tensor(stored, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, values)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def reference():
    return make_llama(hidden_size=64, intermediate_size=128, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def good(reference, tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "good.gguf", reference)


def test_a_converted_llama_is_the_same_model(reference, good):
    prompt = list(range(2, 80))
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    assert (prompt_logits(load_model(good), prompt) - expected).abs().max() < 1e-3


def test_llama3_rope_factors_stored_as_a_tensor(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    reference = make_llama(rope_scaling=scaling)
    plain = 1.0 / (10000.0 ** (torch.arange(0, 16, 2).float() / 16))
    factors = (plain / reference.model.rotary_emb.inv_freq).numpy()
    path = write_gguf(
        tmp_path / "r.gguf", reference, extra={"rope_freqs.weight": factors.astype(np.float32)}
    )
    prompt = list(range(2, 200))
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    assert (prompt_logits(load_model(path), prompt) - expected).abs().max() < 1e-3


@pytest.mark.parametrize("qtype", TYPES, ids=lambda t: t.name)
def test_every_type_is_read_as_the_package_reads_it(qtype, tmp_path):
    block, size = gguf.GGML_QUANT_SIZES[qtype]
    rng = np.random.default_rng(qtype)
    raw = rng.integers(0, 256, (7, 2 * size), dtype=np.uint8)
    path = tmp_path / "t.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x", raw, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tensor,) = open_checkpoint(path).tensors()
    assert tensor.shape == (7, 2 * block)
    out = torch.empty(tensor.shape)
    with np.errstate(all="ignore"):
        tensor.read_into(out)
        expected = gguf.quants.dequantize(raw, qtype)
    assert np.array_equal(out.numpy().view(np.uint32), expected.astype(np.float32).view(np.uint32))


@pytest.mark.parametrize("name", ["IQ1_S", "IQ2_XXS", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"])
def test_iq_types_with_32_values_to_a_scale_keep_their_codes(name):
    """Only the scale is rounded, to 16 bits: nothing is rounded anew to 8 bits."""
    qtype = gguf.GGMLQuantizationType[name]
    raw = np.random.default_rng(3).integers(
        0, 256, (5, 2 * gguf.GGML_QUANT_SIZES[qtype][1]), dtype=np.uint8
    )
    raw.reshape(-1, gguf.GGML_QUANT_SIZES[qtype][1])[:, :2] = np.array([0.02], np.float16).view(
        np.uint8
    )
    expected = gguf.quants.dequantize(raw, qtype)
    assert (
        np.abs(read_codes(name, raw).dequantize().numpy() - expected).max()
        <= 2**-11 * np.abs(expected).max()
    )


@pytest.mark.parametrize("qtype", ["Q8_0", "Q4_0", "Q4_1", "BF16", "F16"])
def test_quantized_models_run(qtype, reference, tmp_path):
    kind = gguf.GGMLQuantizationType[qtype]
    path = write_gguf(tmp_path / "q.gguf", reference, quantize=kind)
    prompt = list(range(2, 80))
    exact = prompt_logits(load_model(path), prompt)
    assert len(run(make_core(load_model(path)), {"a": ([1, 2, 3], greedy(4))})["a"].tokens) == 4
    if native.lib:
        quantized = load_model(path, "quantized")
        # Activations are rounded to 8 bits, so logits of quantized matmuls differ a little, and
        # only of them.
        error = (prompt_logits(quantized, prompt, dtype="float32") - exact).std() / exact.std()
        assert error < (1e-5 if qtype in ("BF16", "F16") else 0.05), error


# ---- broken files


def errors_of(path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(path)
    return str(caught.value)


def test_missing_tensor_is_named(reference, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", reference, drop=["blk.1.ffn_up.weight"])
    assert "tensor blk.1.ffn_up.weight is missing" in errors_of(path)


def test_surplus_tensor_is_named(reference, tmp_path):
    path = write_gguf(
        tmp_path / "s.gguf", reference, extra={"blk.9.attn_q.weight": np.zeros((4, 4), np.float32)}
    )
    assert "blk.9.attn_q.weight has no place" in errors_of(path)


def test_mismatching_shape_is_named(reference, tmp_path):
    path = write_gguf(tmp_path / "x.gguf", reference, reshape={"blk.0.ffn_down.weight": (32, 256)})
    message = errors_of(path)
    assert "blk.0.ffn_down.weight has shape [32, 256]" in message
    assert "[64, 128]" in message


@pytest.mark.parametrize(
    "key", ["llama.block_count", "llama.embedding_length", "llama.attention.head_count"]
)
def test_missing_key_is_named(key, reference, tmp_path):
    assert f"key {key} is missing" in errors_of(
        write_gguf(tmp_path / "k.gguf", reference, **{key: None})
    )


def test_nonsense_key_is_refused(reference, tmp_path):
    from tidemill.errors import ConfigError

    with pytest.raises((CheckpointError, ConfigError), match=r"head_count|query heads|num_heads"):
        load_model(
            write_gguf(tmp_path / "n.gguf", reference, **{"llama.attention.head_count_kv": 3})
        )


def test_truncation_anywhere_is_an_error_of_its_own(good, tmp_path):
    data = good.read_bytes()
    rng = random.Random(0)
    for length in [
        0,
        3,
        4,
        8,
        23,
        24,
        100,
        len(data) - 1,
        *(rng.randrange(len(data)) for _ in range(60)),
    ]:
        path = tmp_path / "t.gguf"
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError) as caught:
            GGUFFile(path)
        assert (
            "trunc" in str(caught.value)
            or "cannot be read" in str(caught.value)
            or "not a GGUF" in str(caught.value)
        )


def test_a_truncated_tensor_is_named(good, tmp_path):
    path = tmp_path / "t.gguf"
    path.write_bytes(good.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"truncated: tensor \S+ ends at byte"):
        GGUFFile(path)


def test_flipped_header_bytes_never_do_worse_than_an_error(good, tmp_path):
    """Lengths become huge, types unknown, counts wrong: a typed error or a readable file, quickly,
    whatever the byte."""
    data = bytearray(good.read_bytes())
    rng = random.Random(1)
    path = tmp_path / "f.gguf"
    for _ in range(400):
        broken = bytearray(data)
        for _ in range(rng.choice([1, 1, 4])):
            broken[rng.randrange(4, 3000)] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
        path.write_bytes(broken)
        try:
            file = GGUFFile(path)
        except CheckpointError:
            continue
        assert len(file.tensors) <= 100


def test_not_a_gguf(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    assert "not a GGUF file" in errors_of(path)
