"""A tokenizer from a SentencePiece model (tokenizer.model): its protobuf is read here, without the
package."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tidemill.errors import CheckpointError
from tidemill.frontend.gguf_tokenizer import CONTROL, MAX_CHARS, USER_DEFINED, sentencepiece_bpe

_NORMAL, _UNKNOWN = 1, 2
_KINDS = {1: "unigram", 2: "BPE", 3: "word", 4: "char"}
# Numbers of fields, in the messages of sentencepiece_model.proto.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _BYTE_FALLBACK = 3, 35
_CHARSMAP, _DUMMY_PREFIX = 2, 3


@dataclass(frozen=True, slots=True)
class Pieces:
    """The contents of a SentencePiece file. Types are numbered as in GGUF files, which took them
    from here."""

    texts: list[str]
    scores: list[float]
    types: list[int]
    kind: str
    byte_fallback: bool
    charsmap: bytes
    dummy_prefix: bool  # a space before every text


def read_pieces(data: bytes, source: str) -> Pieces:
    texts, scores, types = list[str](), list[float](), list[int]()
    settings = {_MODEL_TYPE: 1, _BYTE_FALLBACK: 0}
    charsmap, dummy_prefix = b"", True
    try:
        for number, value in _fields(data):
            if number == _PIECES:
                piece: dict[int, Any] = {_TEXT: b"", _SCORE: 0.0, _TYPE: _NORMAL} | dict(
                    _fields(value)
                )
                texts.append(piece[_TEXT].decode())
                scores.append(float(piece[_SCORE]))
                types.append(int(piece[_TYPE]))
            elif number == _TRAINER:
                settings |= {key: field for key, field in _fields(value) if key in settings}
            elif number == _NORMALIZER:
                normalizer = dict(_fields(value))
                charsmap, dummy_prefix = (
                    normalizer.get(_CHARSMAP, b""),
                    bool(normalizer.get(_DUMMY_PREFIX, True)),
                )
    except (ValueError, TypeError, AttributeError, IndexError, struct.error) as error:
        raise CheckpointError(
            f"{source} is no SentencePiece model: {error}.", fix="Download it again."
        ) from error
    if not texts or max(map(len, texts)) > MAX_CHARS or len(set(texts)) != len(texts):
        what = f"pieces twice, none, or of more than {MAX_CHARS} characters"
        raise CheckpointError(
            f"{source} is no SentencePiece model: it has {what}.", fix="Download it again."
        )
    kind = _KINDS.get(settings[_MODEL_TYPE], "unknown")
    return Pieces(
        texts, scores, types, kind, bool(settings[_BYTE_FALLBACK]), charsmap, dummy_prefix
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Fields of a protobuf message: numbers, each with an integer, a float or bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of wire type {kind}")
        if at + size > len(data):
            raise ValueError("it ends within a field")
        raw, at = data[at : at + size], at + size
        yield number, raw if kind == 2 else struct.unpack("<d" if kind == 1 else "<f", raw)[0]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        value, at = value | (byte & 127) << shift, at + 1
        if byte < 128:
            return value, at
    raise ValueError("a number of more than 64 bits")


def build(pieces: Pieces, settings: dict[str, Any], source: str) -> Tokenizer:
    """Builds the tokenizer that Transformers would build. `settings`: those of
    tokenizer_config.json."""
    if pieces.kind not in ("unigram", "BPE"):
        what = f"{source}: SentencePiece models of type {pieces.kind} are not supported."
        raise CheckpointError(what, fix="unigram and BPE are.")
    is_gemma = str(settings.get("tokenizer_class", "")).startswith("Gemma")
    adds_prefix = settings.get("add_prefix_space")
    prefix = (pieces.dummy_prefix if adds_prefix is None else bool(adds_prefix)) and not is_gemma
    scheme = "never" if not prefix else "always" if settings.get("legacy") else "first"
    if pieces.kind == "BPE":
        backend = sentencepiece_bpe(pieces.texts, pieces.types, pieces.scores, source)
    else:
        backend = _unigram(pieces, source)
    before = [normalizers.Precompiled(pieces.charsmap)] if pieces.charsmap else []
    if is_gemma:
        backend.normalizer = normalizers.Sequence([*before, normalizers.Replace(" ", "▁")])
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    elif pieces.kind == "BPE":
        backend.normalizer = normalizers.Sequence(before) if before else None
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", scheme, split=False)
    else:
        spaces = [
            normalizers.Strip(left=False, right=True),
            normalizers.Replace(Regex(" {2,}"), "▁"),
        ]
        backend.normalizer = normalizers.Sequence([*before, *spaces])
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            "▁", scheme if scheme == "never" else "always"
        )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    control = [
        text
        for text, kind in zip(pieces.texts, pieces.types, strict=True)
        if kind in (CONTROL, _UNKNOWN)
    ]
    defined = [
        text for text, kind in zip(pieces.texts, pieces.types, strict=True) if kind == USER_DEFINED
    ]
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in control]
    )
    backend.add_tokens([AddedToken(text, normalized=False) for text in defined])
    return backend


def _unigram(pieces: Pieces, source: str) -> Tokenizer:
    if _UNKNOWN not in pieces.types:
        raise CheckpointError(
            f"{source} has no piece for what is unknown.", fix="Download it again."
        )
    vocab = list(zip(pieces.texts, pieces.scores, strict=True))
    return Tokenizer(models.Unigram(vocab, pieces.types.index(_UNKNOWN), pieces.byte_fallback))
