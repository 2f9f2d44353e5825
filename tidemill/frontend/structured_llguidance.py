"""Structured output by llguidance, with limits on all of its work."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import llguidance
import numpy as np

from tidemill.frontend.structural_tag import lark_of
from tidemill.frontend.structured import Grammars, Matcher
from tidemill.frontend.tokenizer import Tokenizer

_LIMITS: Any = {
    "initial_lexer_fuel": 2_000_000,  # some 40 ms
    "step_lexer_fuel": 200_000,  # some 15 ms
    "step_max_items": 50_000,
    "max_items_in_row": 2000,
    "max_lexer_states": 20_000,  # some 40 MB
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


class LlgMatcher(Matcher):
    def __init__(self, inner: llguidance.LLMatcher, num_tokens: int) -> None:
        self._inner, self._num_words = inner, -(-num_tokens // 32)

    def mask(self) -> np.ndarray:
        words = np.zeros(self._num_words, np.int32)
        self._inner.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return words

    def take(self, token_ids: list[int]) -> None:
        if not self.is_over:  # as of an empty pattern: the token that ends the output is too much
            self._inner.consume_tokens(token_ids)

    @property
    def is_over(self) -> bool:
        return bool(self._inner.is_stopped())

    @property
    def error(self) -> str:
        return str(self._inner.get_error()) if self._inner.is_error() else ""

    def forced(self) -> bytes:
        return bytes(self._inner.compute_ff_bytes())

    def copy(self) -> LlgMatcher:
        return LlgMatcher(self._inner.deep_copy(), 32 * self._num_words)


class Backend(Grammars):
    kept_below_s = 0.2

    def __init__(self, tokenizer: Tokenizer, num_tokens: int) -> None:
        super().__init__(tokenizer, num_tokens)
        vocabulary = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, num_tokens, self._ends))
        self._tokenizer = llguidance.LLTokenizer(
            vocabulary, n_vocab=num_tokens, eos_token=self._ends or None
        )
        self._begin = partial(
            llguidance.LLMatcher,
            self._tokenizer,
            log_level=0,
            limits=llguidance.LLParserLimits(**_LIMITS),
        )

    def _make(self, kind: Any, text: str) -> Matcher:
        if kind == "json_schema":
            rules = llguidance.LLMatcher.grammar_from_json_schema(
                text, defaults={"whitespace_flexible": False}
            )
        elif kind == "structural_tag":
            rules = llguidance.grammar_from("lark", lark_of(json.loads(text)))
        else:
            rules = llguidance.grammar_from(kind, text)
        return LlgMatcher(self._begin(rules), self._num_tokens)


class _Vocabulary:
    """A tokenizer with the attributes that llguidance reads."""

    def __init__(self, tokenizer: Tokenizer, num_tokens: int, ends: list[int]) -> None:
        self.eos_token_id = ends[0] if ends else 0
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.tokens = [
            tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b""
            for token in range(num_tokens)
        ]
        self._tokenizer = tokenizer

    def __call__(self, text: Any) -> list[int]:
        return self._tokenizer.spell(text.decode() if isinstance(text, bytes) else text)
