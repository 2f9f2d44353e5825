"""A folder's tokenizer where there is no tokenizer.json: from tokenizer.model, tekken.json,
vocab.json with merges.txt, or vocab.txt, with the same ids as Transformers' conversions of these
files."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from tidemill.errors import CheckpointError
from tidemill.frontend import sentencepiece
from tidemill.frontend.gguf_tokenizer import BYTE_CHARS, GPT2, MAX_CHARS, QWEN2, bpe, cut_to_bytes
from tidemill.weights.locate import read_file, read_json

Settings = dict[str, Any]  # of tokenizer_config.json
_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "cls_token",
    "pad_token",
    "mask_token",
)
_MAX_GAP = 2**16  # ids between tokens that nobody names
_AROUND = {"Roberta": ("<s>", "</s>"), "Bert": ("[CLS]", "[SEP]"), "MPNet": ("<s>", "</s>")}


def build_from_files(folder: Path, settings: Settings) -> Tokenizer:
    for name, build in _BUILDERS.items():
        if (folder / name).is_file():
            backend, adds_bos = build(folder, settings)
            _add_tokens(backend, folder, settings)
            _write_around(backend, settings, adds_bos)
            return backend
    raise CheckpointError(
        f"{folder} holds no tokenizer.json.",
        fix=f"Copy the tokenizer there, too: tokenizer.json, or {', '.join(_BUILDERS)} (with merges.txt beside vocab.json).",
    )


def _sentencepiece(folder: Path, settings: Settings) -> tuple[Tokenizer, bool]:
    path = folder / "tokenizer.model"
    pieces = sentencepiece.read_pieces(read_file(path), str(path))
    names = _added(folder, settings)
    for number, token in names.items():  # reserved pieces that were given a name
        if number < len(pieces.texts) and token.content not in pieces.texts:
            pieces.texts[number] = token.content
    return sentencepiece.build(pieces, settings, str(path)), True


class _TekkenToken(msgspec.Struct):
    rank: int
    token_bytes: str | None = None
    token_str: str | None = None


class _TekkenConfig(msgspec.Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


class _Tekken(msgspec.Struct):
    config: _TekkenConfig
    vocab: list[_TekkenToken]
    special_tokens: list[_TekkenToken] | None = None


def _tekken(folder: Path, settings: Settings) -> tuple[Tokenizer, bool]:
    """Special tokens first, then byte strings by rank: of two neighbours, those with the lowest
    union are joined first."""
    path = folder / "tekken.json"
    file = msgspec.json.decode(read_file(path), type=_Tekken)
    num_special, size = file.config.default_num_special_tokens, file.config.default_vocab_size
    if file.special_tokens is None:
        raise CheckpointError(
            f"{path} does not name its special tokens.", fix="Use the repository's tokenizer.json."
        )
    if not 0 <= len(file.special_tokens) <= num_special <= size <= num_special + len(file.vocab):
        raise CheckpointError(
            f"{path}: its vocabulary has {len(file.vocab)} tokens, which are not as many as it says."
        )
    special = [f"<SPECIAL_{number}>" for number in range(num_special)]
    for token in file.special_tokens:
        if not 0 <= token.rank < num_special or not token.token_str:
            raise CheckpointError(
                f"{path}: the special token {token.token_str!r} has rank {token.rank}."
            )
        special[token.rank] = token.token_str
    values = [
        base64.b64decode(token.token_bytes or "") for token in file.vocab[: size - num_special]
    ]
    if max(map(len, values), default=0) > MAX_CHARS:
        raise CheckpointError(f"{path} has a token of more than {MAX_CHARS} bytes.")
    numbers = {value: number for number, value in enumerate(values)}
    merges = [
        (_written(value[:cut]), _written(value[cut:]))
        for value in values
        for cut in sorted(
            (
                cut
                for cut in range(1, len(value))
                if value[:cut] in numbers and value[cut:] in numbers
            ),
            key=lambda cut: (numbers[value[:cut]], numbers[value[cut:]]),
        )
    ]
    vocab = {token: number for number, token in enumerate(special)}
    vocab |= {_written(value): num_special + number for value, number in numbers.items()}
    backend = bpe(str(path), vocab, merges, ignore_merges=True)
    cut_to_bytes(backend, [file.config.pattern])
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    settings.setdefault("bos_token", "<s>")
    settings.setdefault("eos_token", "</s>")
    return backend, True


def _written(value: bytes) -> str:
    """Bytes as byte-level vocabularies write them."""
    return value.decode("latin-1").translate(BYTE_CHARS)


def _merged(folder: Path, settings: Settings) -> tuple[Tokenizer, bool]:
    """Byte-level, as GPT-2's. Other classes than these cut texts in other ways."""
    kind = (
        str(settings.get("tokenizer_class") or "GPT2Tokenizer")
        .removesuffix("Fast")
        .removesuffix("Tokenizer")
    )
    if kind not in ("GPT2", "Qwen2", "Roberta"):
        fix = "Save the fast tokenizer beside the weights: tokenizer.json."
        raise CheckpointError(
            f"{folder}: vocab.json of the class {kind}Tokenizer cannot be read.", fix=fix
        )
    merges = []
    for line in read_file(folder / "merges.txt").decode().split("\n"):
        left, space, right = line.rstrip("\r").partition(" ")
        if space and not line.startswith("#version"):
            merges.append((left, right))
    backend = bpe(
        str(folder / "vocab.json"),
        _numbered(read_json(folder / "vocab.json"), folder / "vocab.json"),
        merges,
    )
    if kind == "Qwen2":
        backend.normalizer = normalizers.NFC()
    cut_to_bytes(
        backend, [QWEN2 if kind == "Qwen2" else GPT2], bool(settings.get("add_prefix_space"))
    )
    return backend, False


def _numbered(vocab: dict[str, Any], path: Path) -> dict[str, int]:
    if not all(
        type(number) is int and 0 <= number < 2 * len(vocab) + _MAX_GAP for number in vocab.values()
    ):
        raise CheckpointError(f"{path} does not map tokens to ids.", fix="Download it again.")
    return vocab


def _word_pieces(folder: Path, settings: Settings) -> tuple[Tokenizer, bool]:
    path = folder / "vocab.txt"
    tokens = read_file(path).decode().rstrip("\n").split("\n")
    vocab = {token.rstrip("\r"): number for number, token in enumerate(tokens)}
    unknown = _text(settings.get("unk_token")) or "[UNK]"
    backend = Tokenizer(models.WordPiece(vocab, unk_token=unknown, max_input_chars_per_word=100))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.get("tokenize_chinese_chars") is not False,
        strip_accents=settings.get("strip_accents"),
        lowercase=settings.get("do_lower_case") is not False,
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece("##")
    for name in ("unk", "cls", "sep", "pad", "mask"):
        if (text := f"[{name.upper()}]") in vocab:
            settings.setdefault(f"{name}_token", text)
    return backend, False


_BUILDERS: dict[str, Callable[[Path, Settings], tuple[Tokenizer, bool]]] = {
    "tokenizer.model": _sentencepiece,
    "tekken.json": _tekken,
    "vocab.json": _merged,
    "vocab.txt": _word_pieces,
}


def _text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _added(folder: Path, settings: Settings) -> dict[int, AddedToken]:
    """Tokens beside the vocabulary, by their ids: of tokenizer_config.json, in older folders of
    added_tokens.json."""
    found: dict[int, AddedToken] = {}
    listed = settings.get("added_tokens_decoder")
    if isinstance(listed, dict):
        for number, about in listed.items():
            if _text(about) and number.isdecimal():
                flags = {
                    name: bool(about.get(name))
                    for name in ("lstrip", "rstrip", "single_word", "normalized", "special")
                }
                found[int(number)] = AddedToken(_text(about), **flags)
    elif (folder / "added_tokens.json").is_file():
        path = folder / "added_tokens.json"
        for text, number in read_json(path).items():
            if type(number) is int and text:
                found[number] = AddedToken(text, normalized=False)
    return dict(sorted(found.items()))


def _add_tokens(backend: Tokenizer, folder: Path, settings: Settings) -> None:
    named = [text for name in _NAMED if (text := _text(settings.get(name)))]
    more = settings.get("additional_special_tokens")
    named += [text for token in (more if isinstance(more, list) else ()) if (text := _text(token))]
    for number, token in _added(folder, settings).items():
        token.special = token.special or token.content in named
        size = backend.get_vocab_size(with_added_tokens=True)
        if backend.token_to_id(token.content) is None and size < number <= size + _MAX_GAP:
            backend.add_tokens(
                [AddedToken(f"<|unused {gap}|>", normalized=False) for gap in range(size, number)]
            )
        backend.add_tokens([token])
        if (actual := backend.token_to_id(token.content)) != number:
            what = f"the token {token.content[:100]!r} has the id {actual} in the vocabulary; its settings say {number}."
            raise CheckpointError(f"{folder}: {what}", fix="Use the repository's tokenizer.json.")
    there = [text for text in named if backend.token_to_id(text) is not None]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in there])


def _write_around(backend: Tokenizer, settings: Settings, adds_bos: bool) -> None:
    """The tokens before and after a text, and between two."""
    kind = str(settings.get("tokenizer_class", ""))
    around = next((pair for name, pair in _AROUND.items() if kind.startswith(name)), None)
    if around is None and isinstance(backend.model, models.WordPiece):
        around = _AROUND["Bert"]
    if around is not None:
        first, last = (
            _text(settings.get(name)) or text
            for name, text in zip(("cls_token", "sep_token"), around, strict=True)
        )
        single = f"{first}:0 $A:0 {last}:0"
        pair = (
            f"{single} $B:1 {last}:1"
            if around is _AROUND["Bert"]
            else f"{single} {last}:0 $B:0 {last}:0"
        )
        texts = [first, last]
    else:
        own = settings.get("add_bos_token")
        bos = (
            _text(settings.get("bos_token")) or "<s>"
            if (adds_bos if own is None else own)
            else None
        )
        eos = _text(settings.get("eos_token")) or "</s>" if settings.get("add_eos_token") else None
        texts = [text for text in (bos, eos) if text]
        single = f"{f'{bos}:0 ' if bos else ''}$A:0{f' {eos}:0' if eos else ''}"
        pair = f"{single} {single.replace('$A', '$B').replace(':0', ':1')}"
    numbers = [(text, backend.token_to_id(text)) for text in texts]
    if any(number is None for _, number in numbers):
        missing = next(text for text, number in numbers if number is None)
        raise CheckpointError(
            f"The token {missing[:100]!r} of tokenizer_config.json is not in the vocabulary."
        )
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=numbers
    )
