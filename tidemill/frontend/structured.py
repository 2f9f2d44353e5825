"""Answers of a given form: a JSON schema, a regular expression, a grammar, one of several texts.

llguidance compiles the form and says before each token which ones may come next. Compiling and every mask are bounded in time and
memory; compiled forms are kept, the most recent ones, and copied for each sample.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from functools import partial
from typing import Any

import llguidance
import numpy as np

from tidemill.errors import InvalidRequest
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.sampling import Grammar

MAX_CHARS = 128 * 1024
MAX_DEPTH = 64
_NUM_KEPT = 32
_KEPT_BELOW_S = 0.2  # what took longer is large
_LIMITS: Any = {
    "initial_lexer_fuel": 2_000_000,  # some 40 ms
    "step_lexer_fuel": 200_000,  # some 15 ms
    "step_max_items": 50_000,
    "max_items_in_row": 2000,
    "max_lexer_states": 20_000,  # some 40 MB
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


class Matcher:
    """Where one sample stands in its form."""

    compiled_s = 0.0

    def __init__(self, inner: llguidance.LLMatcher, num_tokens: int) -> None:
        self._inner, self._num_words = inner, -(-num_tokens // 32)

    def mask(self) -> np.ndarray:
        """A bit for each token that may come next, in int32 words."""
        words = np.zeros(self._num_words, np.int32)
        self._inner.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return words

    def take(self, token_ids: list[int]) -> None:
        self._inner.consume_tokens(token_ids)

    @property
    def is_over(self) -> bool:
        """Nothing more can come."""
        return bool(self._inner.is_stopped())

    @property
    def error(self) -> str:
        return str(self._inner.get_error()) if self._inner.is_error() else ""

    def copy(self) -> Matcher:
        return Matcher(self._inner.deep_copy(), 32 * self._num_words)


class Grammars:
    """Compiles forms for one tokenizer. `num_tokens`: of the model, which may have more than the tokenizer."""

    def __init__(self, tokenizer: Tokenizer, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._kept: OrderedDict[Grammar, Matcher] = OrderedDict()
        words = llguidance.TokenizerWrapper(_Words(tokenizer, num_tokens))
        self._tokenizer = llguidance.LLTokenizer(words, n_vocab=num_tokens, eos_token=list(tokenizer.eos_token_ids) or None)
        self._make = partial(llguidance.LLMatcher, self._tokenizer, log_level=0, limits=llguidance.LLParserLimits(**_LIMITS))

    def compile(self, grammar: Grammar) -> Matcher:
        """At the beginning; raises what is wrong with the form. Safe to call from any thread."""
        began = time.monotonic()
        made = Matcher(self._make(_compiled(grammar)), self._num_tokens)
        made.compiled_s = time.monotonic() - began
        trial = made.copy()
        trial.mask()  # some forms are too much only now
        if trial.error:
            raise InvalidRequest(f"The {grammar.kind} cannot be used: {trial.error.splitlines()[0][:300]}", param=grammar.kind)
        return made

    def __contains__(self, grammar: Grammar) -> bool:
        return grammar in self._kept

    def matcher(self, grammar: Grammar, made: Matcher | None = None) -> Matcher:
        """`made`: it has just been compiled."""
        kept = self._kept.pop(grammar, None) or made or self.compile(grammar)
        if kept.compiled_s < _KEPT_BELOW_S:
            self._kept[grammar] = kept
        while len(self._kept) > _NUM_KEPT:
            self._kept.popitem(last=False)
        return kept.copy()


class _Words:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, num_tokens: int) -> None:
        self.eos_token_id = tokenizer.eos_token_ids[0] if tokenizer.eos_token_ids else 0
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.tokens = [tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b"" for token in range(num_tokens)]
        self._tokenizer = tokenizer

    def __call__(self, text: Any) -> list[int]:
        return self._tokenizer.encode(text.decode() if isinstance(text, bytes) else text, add_special=False)


def _compiled(grammar: Grammar) -> str:
    text = grammar.text
    if len(text) > MAX_CHARS:
        raise InvalidRequest(f"The {grammar.kind} has {len(text)} characters; at most {MAX_CHARS}.", param=grammar.kind)
    try:
        if grammar.kind == "json_schema":
            schema = json.loads(text)
            if not isinstance(schema, dict | bool):
                raise InvalidRequest("A JSON schema is an object.", param=grammar.kind)
            if _depth(schema) > MAX_DEPTH:
                raise InvalidRequest(f"The JSON schema is nested more than {MAX_DEPTH} deep.", param=grammar.kind)
            return llguidance.LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": False})
        if grammar.kind == "choice":
            choices = json.loads(text)
            if not isinstance(choices, list) or not choices or not all(isinstance(one, str) and one for one in choices):
                raise InvalidRequest("A choice cannot be made but from a list of texts that are not empty.", param=grammar.kind)
        kind: Any = grammar.kind
        return llguidance.grammar_from(kind, text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"The {grammar.kind} cannot be read: {str(error)[:300]}.", param=grammar.kind) from None


def _depth(value: Any) -> int:
    """By levels, so that depth costs no stack."""
    level, depth = [value], 0
    while level:
        depth += 1
        below: list[Any] = []
        for one in level:
            below += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        level = [one for one in below if isinstance(one, dict | list)]
    return depth
