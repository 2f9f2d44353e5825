"""GGUF files of Hugging Face folders: the same model, vocabulary and template; what the format
cannot hold is refused."""

import json
from unittest.mock import Mock

import gguf
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.helpers import CHAT_TEMPLATE, load_model, make_llama
from tests.models.test_families import make
from tests.models.test_llama import prompt_logits
from tidemill.compress.gguf_vocab import vocabulary
from tidemill.compress.grid import quantize as round_to_nearest
from tidemill.compress.grid import rounded
from tidemill.compress.layouts import gguf as layouts
from tidemill.compress.layouts.gguf_blocks import TYPES, block_type, blocks
from tidemill.compress.methods.gptq import factor, gptq
from tidemill.compress.quantize import QuantizeOptions, quantize
from tidemill.errors import CheckpointError, ConfigError
from tidemill.frontend.gguf_tokenizer import build_tokenizer
from tidemill.frontend.tokenizer import Tokenizer as OurTokenizer
from tidemill.weights.checkpoint import open_checkpoint

TEXT = "It's 2026: they're 12 of the 345 tokens\n\n  they  said. <|user|>Größe"


def write_tokenizer(path, merges=("t h", "th e", "Ġ the", "1 2", "e r"), model=None):
    vocab = {char: i + 2 for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {
        "<s>": 0,
        "</s>": 1,
    }
    for merge in merges:
        vocab[merge.replace(" ", "")] = len(vocab)
    made = Tokenizer(model or models.BPE(vocab, [tuple(one.split(" ")) for one in merges]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [AddedToken(one, special=True, normalized=False) for one in ("<s>", "</s>", "<|user|>")]
    )
    made.save(str(path / "tokenizer.json"))
    settings = {"eos_token": "</s>", "bos_token": "<s>", "chat_template": CHAT_TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    make_llama(
        path, vocab_size=300, num_hidden_layers=2, hidden_size=64, intermediate_size=256, tie_word_embeddings=False,
        rope_scaling=scaling | {"original_max_position_embeddings": 64}, rope_theta=20000.0, num_key_value_heads=2,
    )  # fmt: skip
    write_tokenizer(path)
    return path


def wish(folder, out, **given):
    return QuantizeOptions(model=str(folder), out=out, method="rtn", dtype="float32", **given)


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_are_read_as_what_they_stand_for(kind):
    torch.manual_seed(0)
    matrix = 0.02 * torch.randn(6, 256) * torch.rand(6, 1)
    matrix[1], matrix[2] = 0, matrix[2].abs()
    moments = torch.randn(64, 256)
    made = round_to_nearest(matrix, TYPES[kind])
    assert torch.equal(rounded(matrix, TYPES[kind]), made.dequantize())
    fitted = gptq(matrix, *factor(moments.t() @ moments, True, 0.01), TYPES[kind], "static")
    for one in (made, fitted):
        assert block_type("x", one) == kind
        read = gguf.quants.dequantize(blocks(one), gguf.GGMLQuantizationType[kind])
        assert (torch.from_numpy(read) - one.dequantize()).abs().max() <= 1e-6 * matrix.abs().max()
    assert (made.dequantize() - matrix).norm() < 0.1 * matrix.norm()
    if TYPES[kind].steps:
        assert made.num_bytes == blocks(made).nbytes


def test_a_file_is_the_folders_model(folder, tmp_path):
    quantize(wish(folder, tmp_path / "q.gguf", kind="Q4_0"))
    quantize(
        wish(folder, tmp_path / "q", layout="compressed-tensors", options={"bits": 4, "group": 32})
    )
    prompt = list(range(2, 130))
    ours, expected = (
        prompt_logits(load_model(tmp_path / name), prompt) for name in ("q.gguf", "q")
    )
    assert (ours - expected).abs().max() < 1e-4
    made, own = OurTokenizer.load(tmp_path / "q.gguf"), OurTokenizer.load(folder)
    assert made.encode(TEXT) == own.encode(TEXT)
    assert made.eos_token_ids[0] == own.eos_token_ids[0]
    messages = [{"role": "user", "content": "Hi"}]
    assert made.render_chat(messages) == own.render_chat(messages)
    assert len(open_checkpoint(tmp_path / "q.gguf").metadata["tokenizer.ggml.tokens"]) == 300


def test_k_types_where_columns_allow_it(folder, tmp_path, monkeypatch):
    """And a run that is interrupted while it writes ends with the same bytes."""
    quantize(wish(folder, tmp_path / "q.gguf", kind="Q4_K"))
    with monkeypatch.context() as patch:
        patch.setattr(layouts, "blocks", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            quantize(wish(folder, tmp_path / "again.gguf", kind="Q4_K"))
    assert not (tmp_path / "again.gguf").exists()
    quantize(wish(folder, tmp_path / "again.gguf", kind="Q4_K"))
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "q.gguf").read_bytes()
    types = {
        tensor.name: tensor.type_name for tensor in open_checkpoint(tmp_path / "q.gguf").tensors()
    }
    assert (types["blk.0.ffn_down.weight"], types["blk.0.ffn_up.weight"]) == ("Q4_K", "Q5_0")
    assert types["output.weight"] == types["blk.1.attn_norm.weight"] == "F32"
    load_model(tmp_path / "q.gguf")


@pytest.mark.parametrize(
    "family",
    ["Gemma2", "GPT2", "Phi3 with longrope", "Granite", "Olmo3", "Qwen2", "Mistral", "SmolLM3"],
)
@pytest.mark.slow
def test_families(family, tmp_path):
    more = {"n_inner": 128} if family == "GPT2" else {"intermediate_size": 128}
    make(
        family, **more, **({"query_pre_attn_scalar": 16} if family == "Gemma2" else {})
    ).save_pretrained(tmp_path / "model")
    given = {"model": str(tmp_path / "model"), "method": "rtn", "dtype": "float32"}
    quantize(QuantizeOptions(**given, out=tmp_path / "q.gguf", kind="Q8_0"))
    quantize(QuantizeOptions(**given, out=tmp_path / "q", options={"bits": 8, "group": 32}))
    ours, expected = (
        prompt_logits(load_model(tmp_path / name), list(range(3, 73)), max_context=256)
        for name in ("q.gguf", "q")
    )
    assert (ours - expected).abs().max() < 1e-4


def test_what_gguf_cannot_hold(folder, tmp_path):
    make("Gemma2", intermediate_size=128, num_hidden_layers=2, layer_types=None).save_pretrained(
        tmp_path / "gemma"
    )
    with pytest.raises(CheckpointError, match=r"scale of layer 0: 0\.204.* would be read as 0\.25"):
        quantize(
            QuantizeOptions(
                model=str(tmp_path / "gemma"), out=tmp_path / "q.gguf", method="rtn", kind="Q8_0"
            )
        )
    for given, words in (
        ({"kind": "Q3_K"}, "--type Q3_K cannot be written.*Q4_K"),
        ({"kind": "Q4_0", "options": {"bits": 5}}, "--type Q4_0 decides --bits"),
        ({"kind": "Q4_0", "layout": "gptq"}, "--type is a type of GGUF files"),
        ({"options": {"bits": 3}}, "no type has 3 bits"),
    ):
        with pytest.raises(ConfigError, match=words):
            quantize(wish(folder, tmp_path / "q.gguf", **given))
    with pytest.raises(ConfigError, match=r"name ends in \.gguf"):
        quantize(wish(folder, tmp_path / "q", kind="Q4_0"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"model": models.Unigram([("a", 0.0), ("b", -1.0)], unk_id=0)},
            "no tokenizer of kind Unigram",
        ),
        ({"merges": ()}, "it has no merges"),
    ],
)
def test_tokenizers_that_gguf_cannot_hold(given, words, tmp_path):
    make_llama(tmp_path, vocab_size=300, num_hidden_layers=1, hidden_size=32, intermediate_size=32)
    write_tokenizer(tmp_path, **given)
    with pytest.raises(CheckpointError, match=words):
        quantize(
            QuantizeOptions(model=str(tmp_path), out=tmp_path / "q.gguf", method="rtn", kind="Q8_0")
        )


def test_a_sentencepiece_vocabulary(tmp_path):
    pieces = ["▁", "t", "h", "e", "▁t", "he", "▁the", "r", "er", "1", "s", "a"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    given = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)], "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))],
    }  # fmt: skip
    build_tokenizer(given, "x").backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    made = vocabulary(tmp_path, 300)
    assert made["tokenizer.ggml.token_type"] == [*given["tokenizer.ggml.token_type"], *[5] * 29]
    assert (made["tokenizer.ggml.add_space_prefix"], made["tokenizer.ggml.eos_token_id"]) == (
        True,
        2,
    )
    own, text = OurTokenizer.load(tmp_path), "the others at the 11 tester</s>"
    assert build_tokenizer(made, "x").backend.encode(
        text, add_special_tokens=False
    ).ids == own.encode(text, add_special=False)
