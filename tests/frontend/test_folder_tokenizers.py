"""Tokenizers of folders without tokenizer.json: the ids of Transformers, which gets the same
vocabulary and merges."""

from __future__ import annotations

import base64
import json
import random
import struct
from pathlib import Path

import pytest
from tokenizers import Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from tidemill.errors import CheckpointError
from tidemill.frontend.tokenizer import Tokenizer

CORPUS = [
    "def main(args):\n    return [x ** 2 for x in args if x > 10]\n",
    "the quick brown fox jumps over the lazy dog, again and again",
    "東京は日本の首都です。東京都庁は新宿にあります",
    "naïve café über Ärger",
    "🦆👩‍🚀 and 🎉🎉",
    "1234567 89 3.1415",
    "\tif (a && b) {\r\n\t\tb++;\r\n\t}",
]
TEXTS = [
    *CORPUS, "", " ", "  leading", "trailing  ", " both  of   them ", "a\n\n\tb\r\nc", "\x00\x01\x7f\u200b\ufeff",
    "it's WE'RE I'll", "aaaa aaaaaaa", "never seen: ⵣ 𝒳 ﬁ Å", "<s>in</s> <mark> text<end>after <extra>", "<0x0A> ▁ ▁▁x",
]  # fmt: skip


def texts() -> list[str]:
    rng = random.Random(0)
    alphabet = "ab the12 \n\té東🦆.<s>▁'"
    return TEXTS + ["".join(rng.choices(alphabet, k=rng.randrange(1, 40))) for _ in range(150)]


def same(tokenizer: Tokenizer, reference) -> None:
    for text in texts():
        ids = tokenizer.encode(text, add_special=False)
        assert ids == reference.encode(text, add_special_tokens=False), text
    for text in ("plain text", " 東京 🦆\n"):
        assert tokenizer.decode(tokenizer.encode(text)).lstrip() == text.lstrip()


def varint(number: int) -> bytes:
    made = b""
    while number > 127:
        made, number = made + bytes([number & 127 | 128]), number >> 7
    return made + bytes([number])


def field(number: int, value: object) -> bytes:
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3) + varint(value)


def write_model(
    folder: Path, pieces: list[tuple[str, float, int]], kind: int, **normalizer: object
) -> None:
    """Writes a model in the layout of sentencepiece_model.proto."""
    data = b"".join(
        field(1, field(1, text.encode()) + field(2, score) + field(3, type_))
        for text, score, type_ in pieces
    )
    data += field(2, field(3, kind) + field(35, 1) + field(40, 0)) + field(
        3, field(3, int(normalizer.get("prefix", True)))
    )
    (folder / "tokenizer.model").write_bytes(data)


SPECIAL = [
    ("<unk>", 0.0, 2),
    ("<s>", 0.0, 3),
    ("</s>", 0.0, 3),
    *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
]


def trained(model, trainer) -> dict:
    """By the library: of text as SentencePiece has it."""
    backend = Backend(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.train_from_iterator(CORPUS * 3, trainer)
    return json.loads(backend.to_str())["model"]


def bpe_pieces() -> list[tuple[str, float, int]]:
    vocab = trained(models.BPE(), trainers.BpeTrainer(vocab_size=400, show_progress=False))["vocab"]
    order = sorted(vocab, key=lambda text: (len(text) == 1, vocab[text]))  # single characters last
    more = [("aa", -0.5, 1), ("aaa", -0.7, 1)]
    ranked = [
        (text, -float(number), 1)
        for number, text in enumerate(order, 1)
        if text not in ("aa", "aaa")
    ]
    return [*SPECIAL, ("<mark>", 0.0, 4), *more, *ranked]


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_bpe_as_llama(tmp_path, legacy, prefix):
    from transformers import LlamaTokenizer
    from transformers.tokenization_utils_base import AddedToken, generate_merges

    pieces = bpe_pieces()
    write_model(tmp_path, pieces, 2)
    num = len(pieces)
    added = {
        str(num): {"content": "<end>", "special": True},
        str(num + 1): {"content": "<extra>", "rstrip": True},
    }
    settings = {
        "legacy": legacy,
        "add_prefix_space": prefix,
        "added_tokens_decoder": added,
        "tokenizer_class": "LlamaTokenizer",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    vocab = {text: number for number, (text, _, _) in enumerate(pieces)}
    reference = LlamaTokenizer(
        vocab=vocab, merges=generate_merges(vocab), legacy=legacy, add_prefix_space=prefix
    )
    reference.add_tokens(
        [
            AddedToken("<mark>", normalized=False),
            AddedToken("<end>", special=True, normalized=False),
        ]
    )
    reference.add_tokens([AddedToken("<extra>", rstrip=True, normalized=False)])
    tokenizer = Tokenizer.load(tmp_path)
    same(tokenizer, reference)
    assert tokenizer.encode("x")[0] == 1  # a text begins with <s>
    assert {1, 2, len(pieces)} <= tokenizer.special_ids
    assert len(pieces) + 1 not in tokenizer.special_ids


def test_sentencepiece_bpe_as_gemma(tmp_path):
    from transformers import GemmaTokenizer
    from transformers.tokenization_utils_base import generate_merges

    pieces = [
        ("<pad>", 0.0, 3),
        ("<eos>", 0.0, 3),
        ("<bos>", 0.0, 3),
        ("<unk>", 0.0, 2),
        *bpe_pieces()[3:],
    ]
    write_model(tmp_path, pieces, 2, prefix=False)
    settings = {
        "tokenizer_class": "GemmaTokenizer",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "add_bos_token": True,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    vocab = {text: number for number, (text, _, _) in enumerate(pieces)}
    reference = GemmaTokenizer(vocab=vocab, merges=generate_merges(vocab))
    reference.add_tokens(["<mark>"])
    tokenizer = Tokenizer.load(tmp_path)
    same(tokenizer, reference)
    assert tokenizer.encode("x")[0] == 2


def test_sentencepiece_unigram(tmp_path):
    """Builds what Transformers' converter does: spaces at the end are dropped, several become one."""
    model = trained(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=300, show_progress=False, unk_token="<unk>"),
    )
    pieces = [*SPECIAL, *((text, score, 1) for text, score in model["vocab"] if text != "<unk>")]
    write_model(tmp_path, pieces, 1)
    reference = Backend(models.Unigram([(text, score) for text, score, _ in pieces], 0, True))
    reference.normalizer = normalizers.Sequence(
        [normalizers.Strip(left=False), normalizers.Replace(Regex(" {2,}"), "▁")]
    )
    reference.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    reference.add_special_tokens(["<s>", "</s>", "<unk>"])
    tokenizer = Tokenizer.load(tmp_path)
    for text in texts():
        assert (
            tokenizer.encode(text, add_special=False)
            == reference.encode(text, add_special_tokens=False).ids
        ), text


def byte_level_model() -> tuple[dict[str, int], list[list[str]]]:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS * 3,
        trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False),
    )
    made = json.loads(backend.to_str())["model"]
    return made["vocab"], made["merges"]


@pytest.mark.parametrize("kind", ["GPT2Tokenizer", "Qwen2Tokenizer", "Qwen2TokenizerFast"])
def test_vocab_and_merges(tmp_path, kind):
    import transformers

    vocab, merges = byte_level_model()
    vocab["<|endoftext|>"] = len(vocab)
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(" ".join(pair) for pair in merges) + "\n"
    )
    added = {
        str(len(vocab)): {"content": "<end>", "special": True},
        str(len(vocab) + 2): {"content": "<extra>"},
    }
    settings = {
        "tokenizer_class": kind,
        "eos_token": "<|endoftext|>",
        "added_tokens_decoder": added,
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    reference = getattr(transformers, kind.removesuffix("Fast"))(
        vocab=vocab, merges=[tuple(pair) for pair in merges]
    )
    reference.add_tokens(["<end>", "<gap>", "<extra>"])
    tokenizer = Tokenizer.load(tmp_path)
    same(tokenizer, reference)
    assert tokenizer.eos_token_ids == (vocab["<|endoftext|>"],)
    assert tokenizer.encode("x") == tokenizer.encode("x", add_special=False)


def test_tekken(tmp_path):
    from transformers.integrations.mistral.tokenizer import MistralConverter

    vocab, _ = byte_level_model()
    to_byte = written()
    tokens = [
        bytes(to_byte[char] for char in text) for text in sorted(vocab, key=vocab.__getitem__)
    ]
    pattern = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lo}\p{M}]*[\p{Ll}\p{Lo}\p{M}]+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+(?!\S)|\s+"
    file = {
        "config": {
            "pattern": pattern,
            "default_vocab_size": len(tokens) + 10,
            "default_num_special_tokens": 20,
            "version": "v7",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": True}
            for rank, text in enumerate(("<unk>", "<s>", "</s>", "[INST]"))
        ],
    }
    (tmp_path / "tekken.json").write_text(json.dumps(file))
    tokenizer = Tokenizer.load(tmp_path)
    reference = MistralConverter(str(tmp_path / "tekken.json")).converted()
    for text in [*texts(), "[INST] hi <SPECIAL_17>"]:
        assert (
            tokenizer.encode(text, add_special=False)
            == reference.encode(text, add_special_tokens=False).ids
        ), text
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == f"<s>{text}"
    assert tokenizer.vocab_size == len(tokens) + 10


def written() -> dict[str, int]:
    from tidemill.frontend.gguf_tokenizer import BYTE_CHARS

    return {char: byte for byte, char in BYTE_CHARS.items()}


@pytest.mark.parametrize("lower", [True, False])
def test_word_pieces(tmp_path, lower):
    from transformers import BertTokenizer

    words = [
        "the",
        "quick",
        "##s",
        "##ing",
        "jump",
        "a",
        "##a",
        "東",
        "京",
        "cafe",
        "café",
        "The",
        ".",
        ",",
        "1",
        "##2",
        "##3",
    ]
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    (tmp_path / "vocab.txt").write_text("\n".join(vocab) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": lower})
    )
    reference = BertTokenizer(
        vocab={text: number for number, text in enumerate(vocab)}, do_lower_case=lower
    )
    tokenizer = Tokenizer.load(tmp_path)
    for text in [*texts(), "The quicks jumping, 東京 café 123.", "[MASK] the"]:
        assert tokenizer.encode(text) == reference.encode(text), text
    assert tokenizer.encode_pair("the", "quick", max_tokens=99)[0] == reference.encode(
        "the", "quick"
    )


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x0fx", b"{}", field(1, field(1, b"\xff"))]
)
def test_what_is_no_model_is_named(tmp_path, data):
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"tokenizer\.model is no SentencePiece model"):
        Tokenizer.load(tmp_path)


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.model, tekken\.json, vocab\.json"):
        Tokenizer.load(tmp_path)
    write_model(tmp_path, SPECIAL, 3)
    with pytest.raises(CheckpointError, match="type word"):
        Tokenizer.load(tmp_path)
    write_model(tmp_path, SPECIAL, 2)
    added = {"5": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    with pytest.raises(
        CheckpointError, match=r"'<s>' has the id 1 in the vocabulary; its settings say 5"
    ):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CLIPTokenizer"}')
    with pytest.raises(CheckpointError, match="CLIPTokenizer"):
        Tokenizer.load(tmp_path)
