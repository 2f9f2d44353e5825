"""Control tokens in message content.

A chat template writes control tokens (`<|im_start|>`) around messages, and prompts are tokenized as one text. So a control token
typed in a message could end it and begin another one. To keep the two apart, a mark is put inside each control token in what
a client sent before it is rendered: `<` mark `|im_end|>`. The mark survives trimming, JSON and printing by a template. Then the
tokenizer finds only the template's own control tokens whole, and drops the marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from os.path import commonprefix
from typing import Any

from tidemill.errors import CheckpointError

# The last variation selector: no character has a variant of this number, and Python's repr() prints
# it as it is.
MARK = "\U000e01ef"


class ControlTokens:
    """The texts of a tokenizer's control tokens, found in linear time. A token of one character
    cannot be broken by a mark."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(sorted({text for text in texts if len(text) > 1}))
        rests: dict[str, list[str]] = {}
        for text in self.texts:
            rests.setdefault(text[0], []).append(text[1:])
        try:
            by_first = [(re.escape(first), _any_of(texts)) for first, texts in rests.items()]
            self._whole = re.compile(
                "|".join(f"{first}(?={rest})" for first, rest in by_first) or "(?!)"
            )
            self._marked = re.compile(
                "|".join(f"(?<={first}){MARK}(?={rest})" for first, rest in by_first) or "(?!)"
            )
        except RecursionError:
            raise CheckpointError(
                "The tokenizer's control tokens are too many prefixes of one another."
            ) from None

    def mark(self, value: Any) -> Any:
        """A JSON value with every control token in its strings and keys broken by a mark."""
        if isinstance(value, str):
            return self._whole.sub(rf"\g<0>{MARK}", value)
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        return [self.mark(item) for item in value] if isinstance(value, list | tuple) else value

    def is_marked(self, text: str) -> bool:
        return MARK in text and self._marked.search(text) is not None

    def unmark(self, text: str) -> str:
        """The text as it was. Where tokens overlap, the inner mark goes first."""
        while self.is_marked(text):
            text = self._marked.sub("", text)
        return text

    def count(self, text: str) -> int:
        """The number of whole control tokens."""
        return sum(1 for _ in self._whole.finditer(text))


def _any_of(texts: list[str]) -> str:
    """A pattern of what starts with one of the texts, without two alternatives that start alike."""
    shared = commonprefix(texts)  # noqa: RUF071 - of characters, not of paths
    if shared in texts:
        return re.escape(shared)
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[len(shared)], []).append(text[len(shared) :])
    return f"{re.escape(shared)}(?:{'|'.join(map(_any_of, rests.values()))})"
