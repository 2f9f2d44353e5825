"""Fill in the middle: which tokens a tokenizer has for it, and the prompts they make."""

import pytest
from gguf import GGUFWriter
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tests.helpers import byte_tokenizer
from tidemill.errors import InvalidRequest
from tidemill.frontend.infill import infill_prompt, infill_tokens
from tidemill.frontend.tokenizer import Tokenizer


def tokenizer_with(path, *special):
    byte_tokenizer(path)
    backend = Backend.from_file(str(path / "tokenizer.json"))
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in special]
    )
    backend.save(str(path / "tokenizer.json"))
    return Tokenizer.load(path)


def text(tokenizer, ids):
    return tokenizer.decode(ids, skip_special=False)


@pytest.mark.parametrize(
    ("special", "prompt"),
    [
        (
            ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
            "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>c",
        ),
        (
            ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
            "<fim_prefix>a<fim_suffix>b<fim_middle>c",
        ),
        (
            ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
            "<｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>c",
        ),
        (["▁<PRE>", "▁<SUF>", "▁<MID>"], "▁<PRE>a▁<SUF>b▁<MID>c"),
        (["[PREFIX]", "[SUFFIX]"], "[SUFFIX]b[PREFIX]ac"),
    ],
)
def test_families(tmp_path, special, prompt):
    tokenizer = tokenizer_with(tmp_path, *special)
    assert text(tokenizer, infill_prompt(tokenizer, "a", "b", begun="c")) == prompt
    assert set(infill_tokens(tokenizer).ends) == {tokenizer.token_id(token) for token in special}


def test_other_files(tmp_path):
    names = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
    (tmp_path / "one").mkdir()
    plain = tokenizer_with(tmp_path / "one", *names)
    made = text(plain, infill_prompt(plain, "a", "b", files=[("x.py", "X")]))
    assert made == "\n\n--- x.py ---\n\nX<fim_prefix>a<fim_suffix>b<fim_middle>"
    knowing = tokenizer_with(tmp_path, *names, "<file_sep>")
    made = text(knowing, infill_prompt(knowing, "a", "b", files=[("x.py", "X")]))
    assert made == "<file_sep>x.py\nX\n<file_sep>filename\n<fim_prefix>a<fim_suffix>b<fim_middle>"


def test_a_tokenizer_without_them(tmp_path):
    tokenizer = tokenizer_with(tmp_path, "<fim_prefix>", "<fim_suffix>")  # no middle
    assert infill_tokens(tokenizer) is None
    with pytest.raises(InvalidRequest, match="no tokens for fill in the middle"):
        infill_prompt(tokenizer, "a", "b")


def test_a_gguf_file_names_them(tmp_path):
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab", "<BEFORE>", "<AFTER>", "<BETWEEN>", "<PAD>"])
    writer.add_token_types([1, 1, 1, 3, 3, 3, 3])
    writer.add_token_merges(["a b"])
    for key, token in (("fim_pre", 3), ("suffix", 4), ("fim_mid", 5), ("fim_pad", 6)):
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", token)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = Tokenizer.load(path)
    assert infill_prompt(tokenizer, "a", "b") == [3, 0, 4, 1, 5]
    assert infill_tokens(tokenizer).ends == (3, 4, 5, 6)
