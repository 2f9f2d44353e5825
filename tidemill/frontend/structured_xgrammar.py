"""Structured output by xgrammar. It has no limits of its own: a grammar is first compiled in a bounded worker process (apart.py),
but a mask computed during decoding is not bounded."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import xgrammar

from tidemill.frontend.structured import Grammars, Matcher
from tidemill.frontend.tokenizer import Tokenizer


class XgrammarMatcher(Matcher):
    def __init__(self, inner: Any, words: np.ndarray, goes_on: np.ndarray) -> None:
        """A bit for each token that may come at all, and for each that does not end an answer."""
        self._inner, self._words, self._goes_on = inner, words, goes_on
        self._error = ""
        self._mask: np.ndarray | None = None

    def mask(self) -> np.ndarray:
        if self._mask is None:
            ended = self._inner.is_terminated()
            self._mask = np.full_like(self._words, 0 if ended else -1)  # it says nothing where all may come
            if not ended:
                self._inner.fill_next_token_bitmask(self._mask[None])
            self._mask &= self._words
        return self._mask

    def take(self, token_ids: list[int]) -> None:
        for token in token_ids:
            if not self._error and not self._inner.accept_token(token):
                self._error = f"Token {token} does not belong to the form."
        self._mask = None

    @property
    def is_over(self) -> bool:
        """Only an end may come, or nothing."""
        return self._inner.is_terminated() or not (self.mask() & self._goes_on).any()

    @property
    def error(self) -> str:
        if not self._error and not self._inner.is_terminated() and not self._inner.is_completed() and not self.mask().any():
            return "Nothing can come next, and it is not complete."
        return self._error

    def copy(self) -> XgrammarMatcher:
        return XgrammarMatcher(self._inner.fork(), self._words, self._goes_on)


class Backend(Grammars):
    kept_below_s = 5.0

    def __init__(self, tokenizer: Tokenizer, num_tokens: int) -> None:
        super().__init__(tokenizer, num_tokens)
        words: list[Any] = [
            tokenizer.token_bytes(token) if token < tokenizer.vocab_size and token not in tokenizer.special_ids else b""
            for token in range(num_tokens)
        ]
        info = xgrammar.TokenizerInfo(words, xgrammar.VocabType.RAW, vocab_size=num_tokens, stop_token_ids=self._ends)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)  # we keep them ourselves
        self._all, self._goes_on = _bits(num_tokens, []), _bits(num_tokens, self._ends)
        # Strings of a given length may hold control characters, it thinks; in JSON they may not.
        self._in_json = _bits(num_tokens, [token for token, word in enumerate(words) if word and min(word) < 0x20])

    def _make(self, kind: str, text: str) -> Matcher:
        try:
            compiled = self._compile(kind, text)
        except RuntimeError as error:  # what its own exceptions are, too
            raise ValueError(re.sub(r"^\[.*?\] \S+: ", "", str(error)).splitlines()[0]) from None
        words = self._in_json if kind == "json_schema" else self._all
        return XgrammarMatcher(xgrammar.GrammarMatcher(compiled), words, self._goes_on)

    def _compile(self, kind: str, text: str) -> Any:
        if kind == "json_schema":
            return self._compiler.compile_json_schema(text, any_whitespace=False, strict_mode=False)
        if kind == "regex":
            if re.search(r"\{[^}]*\d{7,}", text):  # it would count modulo 2**32
                raise ValueError("nothing can be repeated so often")
            return self._compiler.compile_regex(text)
        if kind == "choice":
            quoted = (json.dumps(one, ensure_ascii=False) for one in json.loads(text))
            return self._compiler.compile_grammar(f"root ::= {' | '.join(quoted)}")
        if "::=" in text:
            return self._compiler.compile_grammar(text)
        return self._compiler.compile_lark(text)


def _bits(num: int, without: list[int]) -> np.ndarray:
    """So many are set, but for these; in int32 words."""
    bits = np.zeros(-(-num // 32) * 32, np.uint8)
    bits[:num] = 1
    bits[without] = 0
    return np.packbits(bits, bitorder="little").view(np.int32)
