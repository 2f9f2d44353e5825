"""Fill in the middle: prompts from which code models write what belongs between a prefix and a
suffix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from tidemill.errors import InvalidRequest
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.weights.gguf import GGUFFile

# How families name the tokens for prefix, suffix, middle, repository and file. "" where they have
# none.
_FAMILIES = (
    # Qwen, CodeGemma
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "", "<|file_separator|>"),
    # StarCoder, Granite
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>", "", ""),  # SantaCoder
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>", "", ""),  # GLM
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", "", ""),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>", "", ""),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>", "", ""),
    ("[PREFIX]", "[SUFFIX]", "", "", ""),  # Codestral
)
# some models write one at the end
_PADDING = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "▁<EOT>", "<EOT>")
_GGUF_KEYS = (  # of one of the tokens: the present name, and an older one
    ("fim_pre", "prefix"),
    ("fim_suf", "suffix"),
    ("fim_mid", "middle"),
    ("fim_rep", ""),
    ("fim_sep", ""),
)
MAX_FILES = 256  # of a repository, beside the one that is filled in


@dataclass(frozen=True, slots=True)
class InfillTokens:
    prefix: int
    suffix: int
    middle: int | None  # None: the suffix comes first, and the model goes on after the prefix
    repository: int | None = None
    file: int | None = None
    padding: tuple[int, ...] = ()

    @property
    def ends(self) -> tuple[int, ...]:
        """Tokens that end the output, besides the tokenizer's own."""
        tokens = (self.prefix, self.suffix, self.middle, self.repository, self.file, *self.padding)
        return tuple(sorted({token for token in tokens if token is not None}))


_known: WeakKeyDictionary[Tokenizer, InfillTokens | None] = WeakKeyDictionary()


def infill_tokens(tokenizer: Tokenizer) -> InfillTokens | None:
    """None: the model has no such tokens. Reads a GGUF file's metadata if their names are not
    known, so it may take a while the first time."""
    if tokenizer not in _known:
        _known[tokenizer] = _by_name(tokenizer) or _by_key(tokenizer)
    return _known[tokenizer]


def _by_name(tokenizer: Tokenizer) -> InfillTokens | None:
    padding = tuple(token for text in _PADDING if (token := tokenizer.token_id(text)) is not None)
    for family in _FAMILIES:
        prefix, suffix, middle, repository, file = (
            tokenizer.token_id(text) if text else None for text in family
        )
        if prefix is not None and suffix is not None and (middle is not None or not family[2]):
            return InfillTokens(prefix, suffix, middle, repository, file, padding)
    return None


def _by_key(tokenizer: Tokenizer) -> InfillTokens | None:
    if tokenizer.path is None or not tokenizer.path.is_file():
        return None
    metadata = GGUFFile(tokenizer.path).metadata

    def token(*names: str) -> int | None:
        ids: list[Any] = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names if name]
        return next(
            (
                token_id
                for token_id in ids
                if type(token_id) is int and 0 <= token_id < tokenizer.vocab_size
            ),
            None,
        )

    prefix, suffix, middle, repository, file = (token(*names) for names in _GGUF_KEYS)
    if prefix is None or suffix is None or middle is None:
        return None
    padding = token("fim_pad")
    return InfillTokens(
        prefix, suffix, middle, repository, file, () if padding is None else (padding,)
    )


def infill_prompt(
    tokenizer: Tokenizer,
    prefix: str,
    suffix: str,
    *,
    begun: str = "",
    files: Sequence[tuple[str, str]] = (),
    max_tokens: int | None = None,
) -> list[int]:
    """Token ids. `begun`: how the middle starts. `files`: names and texts of other files, where the
    model knows files."""
    tokens = infill_tokens(tokenizer)
    if tokens is None:
        raise InvalidRequest(
            "suffix is not supported by this model: its tokenizer has no tokens for fill in the middle.",
            fix="Serve a code model that has them (Qwen2.5-Coder, StarCoder2, DeepSeek-Coder, Code Llama), or leave suffix out.",
            param="suffix",
        )

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False, max_tokens=max_tokens) if text else []

    begin = [tokenizer.bos_token_id] if tokenizer.bos_token_id in tokenizer.encode("")[:1] else []
    prompt = [token for token in begin if token is not None]
    if files:
        prompt += _files(tokens, files, ids)
    if tokens.middle is None:
        return [*prompt, tokens.suffix, *ids(suffix), tokens.prefix, *ids(prefix), *ids(begun)]
    return [
        *prompt,
        tokens.prefix,
        *ids(prefix),
        tokens.suffix,
        *ids(suffix),
        tokens.middle,
        *ids(begun),
    ]


def _files(
    tokens: InfillTokens, files: Sequence[tuple[str, str]], ids: Callable[[str], list[int]]
) -> list[int]:
    """Before the file that is filled in. Without a token for files, they are set apart by a line."""
    if tokens.file is None:
        return [token for name, text in files for token in ids(f"\n\n--- {name} ---\n\n{text}")]
    prompt = [] if tokens.repository is None else [tokens.repository, *ids("repository\n")]
    for name, text in files:
        prompt += [tokens.file, *ids(f"{name}\n{text}\n")]
    return [*prompt, tokens.file, *ids("filename\n")]
