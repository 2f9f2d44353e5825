"""A tokenizer from a GGUF file's metadata: byte-level BPE ("gpt2") and SentencePiece BPE ("llama")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from tidemill.errors import CheckpointError

MAX_CHARS = 2**12  # of a token or a pair of them
# Token types of the format.
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6

# How texts are cut before byte pairs are merged, by the file's `tokenizer.ggml.pre`.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CUTS = {
    "default": [GPT2],
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "starcoder": [r"\p{N}", GPT2],
    "refact": [r"\p{N}", GPT2],
    "command-r": [r"\p{N}", GPT2],
    "llama-bpe": [_LLAMA3],
    "llama3": [_LLAMA3],
    "llama-v3": [_LLAMA3],
    "smaug-bpe": [_LLAMA3],
    "qwen2": [QWEN2],
    "tekken": [_TEKKEN],
}
# The printable characters that byte-level vocabularies write bytes as.
_PLAIN = [
    *range(ord("!"), ord("~") + 1),
    *range(ord("¡"), ord("¬") + 1),
    *range(ord("®"), ord("ÿ") + 1),
]
_OTHERS = [byte for byte in range(256) if byte not in _PLAIN]
BYTE_CHARS = {byte: chr(byte) for byte in _PLAIN} | {
    byte: chr(256 + number) for number, byte in enumerate(_OTHERS)
}
# a word that is a token is not merged piece by piece
_WHOLE_WORDS_FIRST = {"llama-bpe", "llama3", "llama-v3", "tekken"}
_BOS_BY_DEFAULT = {"llama-bpe", "llama3", "llama-v3", "tekken"}


# Many files name only the token that ends a text, not the one that ends a turn of a conversation.
_ENDERS = {
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<|return|>",
}


@dataclass(frozen=True)
class BuiltTokenizer:
    backend: Tokenizer
    bos_token_id: int | None
    add_bos: bool
    add_eos: bool
    # the file's own first, then control tokens that are known to end a turn
    eos_token_ids: tuple[int, ...]


def build_tokenizer(metadata: dict[str, Any], source: str) -> BuiltTokenizer:
    kind = metadata.get("tokenizer.ggml.model")
    tokens = _strings(metadata, "tokenizer.ggml.tokens", source)
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise CheckpointError(
            f"{source}: key tokenizer.ggml.token_type must have one entry for each of {len(tokens)} tokens."
        )
    if kind == "gpt2":
        backend = _byte_level(metadata, tokens, source)
        # a string: else it was refused
        bos_default = metadata.get("tokenizer.ggml.pre") in _BOS_BY_DEFAULT
    elif kind == "llama":
        backend = _sentencepiece(metadata, tokens, types, source)
        bos_default = True
    else:
        raise CheckpointError(
            f"{source}: the tokenizer kind {kind!r} is not supported.",
            fix="gpt2 (byte-level BPE) and llama (SentencePiece) are.",
        )
    control = [
        token for token, token_type in zip(tokens, types, strict=True) if token_type == CONTROL
    ]
    defined = [
        token for token, token_type in zip(tokens, types, strict=True) if token_type == USER_DEFINED
    ]
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in control]
    )
    backend.add_tokens([AddedToken(token, normalized=False) for token in defined])

    def token_id(name: str) -> int | None:
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if type(value) is int and 0 <= value < len(tokens) else None

    enders = [token_id(name) for name in ("eos", "eot", "eom")] + [
        tokens.index(token) for token in control if token in _ENDERS
    ]
    return BuiltTokenizer(
        backend,
        bos_token_id=token_id("bos"),
        add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", bos_default)),
        add_eos=bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        eos_token_ids=tuple(dict.fromkeys(token for token in enders if token is not None)),
    )


def _byte_level(metadata: dict[str, Any], tokens: list[str], source: str) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in _CUTS:
        raise CheckpointError(
            f"{source}: the pre-tokenizer {pre!r} is not supported.",
            fix=f"Known: {', '.join(_CUTS)}.",
        )
    merges = []
    for merge in _strings(metadata, "tokenizer.ggml.merges", source):
        left, space, right = merge.partition(" ")
        if not space:
            raise CheckpointError(
                f"{source}: key tokenizer.ggml.merges has the entry {merge!r}, not a pair."
            )
        merges.append((left, right))
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = bpe(source, vocab, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST)
    cut_to_bytes(backend, _CUTS[pre])
    return backend


def cut_to_bytes(backend: Tokenizer, patterns: list[str], add_prefix_space: bool = False) -> None:
    """Byte-level: texts are cut by the patterns, one after the other; then bytes are written as
    characters."""
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()


def _sentencepiece(
    metadata: dict[str, Any], tokens: list[str], types: list[int], source: str
) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if (
        not isinstance(scores, list)
        or len(scores) != len(tokens)
        or not isinstance(scores[0], float)
    ):
        raise CheckpointError(
            f"{source}: key tokenizer.ggml.scores must have one number per token."
        )
    backend = sentencepiece_bpe(tokens, types, scores, source)
    prefix = (
        [normalizers.Prepend("▁")] if metadata.get("tokenizer.ggml.add_space_prefix", True) else []
    )
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def sentencepiece_bpe(
    tokens: list[str], types: list[int], scores: list[float], source: str
) -> Tokenizer:
    """SentencePiece joins the neighbours whose union scores best; as merges, that is every way to
    split a piece, best piece first, and of a piece those with the shortest left part first."""
    vocab = {token: i for i, token in enumerate(tokens)}
    ranked = list[tuple[float, int, int]]()
    for number, (token, token_type, score) in enumerate(zip(tokens, types, scores, strict=True)):
        if token_type in (UNKNOWN, CONTROL, BYTE):
            continue
        cuts = (
            cut for cut in range(1, len(token)) if token[:cut] in vocab and token[cut:] in vocab
        )
        ranked.extend((-score, number, cut) for cut in cuts)
    ranked.sort()
    merges = [(tokens[number][:cut], tokens[number][cut:]) for _, number, cut in ranked]
    unknown = next(
        (token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None
    )
    return bpe(source, vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)


def bpe(
    source: str, vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any
) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(vocab, merges, **options))
    # the library raises bare Exception, for example for a merge of unknown tokens
    except Exception as error:
        raise CheckpointError(
            f"{source}: the tokenizer's vocabulary and merges do not fit: {error}."
        ) from error


def _strings(metadata: dict[str, Any], key: str, source: str) -> list[str]:
    value = metadata.get(key)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise CheckpointError(f"{source}: key {key} must be a list of strings.")
    if max(map(len, value)) > MAX_CHARS:
        raise CheckpointError(
            f"{source}: key {key} has an entry of more than {MAX_CHARS} characters."
        )
    return value
