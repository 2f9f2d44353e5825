"""Structured output by xgrammar. It has no limits of its own: a grammar is first compiled in a
bounded worker (sandbox.py), but a mask computed during decoding is not bounded."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import xgrammar

from tidemill.frontend.structured import Grammars, Matcher
from tidemill.frontend.tokenizer import Tokenizer


class XgrammarMatcher(Matcher):
    def __init__(self, inner: Any, allowed: np.ndarray, not_final: np.ndarray) -> None:
        """Masks of the tokens that are ever allowed, and of those that do not end the output."""
        self._inner, self._allowed, self._not_final = inner, allowed, not_final
        self._error = ""
        self._mask: np.ndarray | None = None

    def mask(self) -> np.ndarray:
        if self._mask is None:
            ended = self._inner.is_terminated()
            # left as it is where all tokens are allowed
            self._mask = np.full_like(self._allowed, 0 if ended else -1)
            if not ended:
                self._inner.fill_next_token_bitmask(self._mask[None])
            self._mask &= self._allowed
        return self._mask

    def take(self, token_ids: list[int]) -> None:
        for token in token_ids:
            if not self._error and not self._inner.accept_token(token):
                self._error = f"Token {token} does not match the grammar."
        self._mask = None

    @property
    def is_over(self) -> bool:
        """Only an end token may follow, or none."""
        return self._inner.is_terminated() or not (self.mask() & self._not_final).any()

    @property
    def error(self) -> str:
        if (
            not self._error
            and not self._inner.is_terminated()
            and not self._inner.is_completed()
            and not self.mask().any()
        ):
            return "No token is allowed next, and the output is incomplete."
        return self._error

    def forced(self) -> bytes:
        return (
            b""
            if self._inner.is_terminated()
            else str(self._inner.find_jump_forward_string()).encode()
        )

    def copy(self) -> XgrammarMatcher:
        return XgrammarMatcher(self._inner.fork(), self._allowed, self._not_final)


class Backend(Grammars):
    kept_below_s = 5.0

    def __init__(self, tokenizer: Tokenizer, num_tokens: int) -> None:
        super().__init__(tokenizer, num_tokens)
        tokens: list[Any] = [
            tokenizer.token_bytes(token)
            if token < tokenizer.vocab_size and token not in tokenizer.special_ids
            else b""
            for token in range(num_tokens)
        ]
        info = xgrammar.TokenizerInfo(
            tokens, xgrammar.VocabType.RAW, vocab_size=num_tokens, stop_token_ids=self._ends
        )
        # Grammars caches them
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._all, self._not_final = _bits(num_tokens, []), _bits(num_tokens, self._ends)
        # It lets control characters into JSON strings of a given length, where they are not
        # allowed.
        self._in_json = _bits(
            num_tokens, [i for i, token in enumerate(tokens) if token and min(token) < 0x20]
        )

    def _make(self, kind: str, text: str) -> Matcher:
        try:
            compiled = self._compile(kind, text)
        except RuntimeError as error:  # the base of its own exceptions
            raise ValueError(re.sub(r"^\[.*?\] \S+: ", "", str(error)).splitlines()[0]) from None
        allowed = self._in_json if kind == "json_schema" else self._all
        return XgrammarMatcher(xgrammar.GrammarMatcher(compiled), allowed, self._not_final)

    def _compile(self, kind: str, text: str) -> Any:
        if kind == "json_schema":
            return self._compiler.compile_json_schema(text, any_whitespace=False, strict_mode=False)
        if kind == "structural_tag":
            return self._compiler.compile_structural_tag(text)
        if kind == "regex":
            if re.search(r"\{[^}]*\d{7,}", text):  # it would count modulo 2**32
                raise ValueError("a repetition count is too large")
            return self._compiler.compile_regex(text)
        if kind == "choice":
            quoted = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
            return self._compiler.compile_grammar(f"root ::= {' | '.join(quoted)}")
        if "::=" in text:
            return self._compiler.compile_grammar(text)
        return self._compiler.compile_lark(text)


def _bits(num: int, without: list[int]) -> np.ndarray:
    """A mask of `num` set bits except `without`, in int32 words."""
    bits = np.zeros(-(-num // 32) * 32, np.uint8)
    bits[:num] = 1
    bits[without] = 0
    return np.packbits(bits, bitorder="little").view(np.int32)
