"""Structured output: text that matches a JSON schema, a regular expression, a grammar, a structural
tag or one of some choices.

A backend compiles the grammar and computes before each token a mask of those allowed next:
llguidance, whose work is bounded in time and memory, or xgrammar, for trusted clients. The most
recently used compiled grammars are cached and copied for each sample.
"""

from __future__ import annotations

import importlib
import json
import time
from abc import ABC, abstractmethod
from collections import OrderedDict

import numpy as np

from tidemill.errors import ConfigError, InvalidRequest
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.types.sampling import Grammar
from tidemill.weights.locate import depth_of

BACKENDS = ("llguidance", "xgrammar")
MAX_CHARS = 128 * 1024
MAX_DEPTH = 64
_NUM_KEPT = 32


def check_backend(name: str) -> None:
    """Raise unless the backend is known and can be imported. Imports it, which may take a while."""
    if name not in BACKENDS:
        raise ConfigError(
            f"There is no structured_backend {name!r}.", fix=f"Choose {' or '.join(BACKENDS)}."
        )
    try:
        importlib.import_module(f"tidemill.frontend.structured_{name}")
    except ImportError as error:
        raise ConfigError(
            f"{name} cannot be used: {error}.", fix=f"pip install 'tidemill[{name}]'."
        ) from error


class Matcher(ABC):
    """The state of one sample in its grammar."""

    compiled_s = 0.0
    is_done = False  # from here on any token may come

    @abstractmethod
    def mask(self) -> np.ndarray:
        """One bit per token of the vocabulary, set if it may come next, in int32 words."""

    @abstractmethod
    def take(self, token_ids: list[int]) -> None: ...

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """No token may follow."""

    @property
    @abstractmethod
    def error(self) -> str: ...

    @abstractmethod
    def copy(self) -> Matcher: ...

    @abstractmethod
    def forced(self) -> bytes:
        """Text that must come next, as far as there is no choice."""


class Grammars(ABC):
    """Compiles grammars for one tokenizer. `num_tokens`: of the model, which may have more than the
    tokenizer, or fewer."""

    kept_below_s: float  # grammars that take longer to compile are large, and are not cached

    def __init__(self, tokenizer: Tokenizer, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._ends = [token for token in tokenizer.eos_token_ids if token < num_tokens]
        self._kept: OrderedDict[Grammar, Matcher] = OrderedDict()

    @staticmethod
    def of(backend: str, tokenizer: Tokenizer, num_tokens: int) -> Grammars:
        grammars: Grammars = importlib.import_module(
            f"tidemill.frontend.structured_{backend}"
        ).Backend(tokenizer, num_tokens)
        return grammars

    @abstractmethod
    def _make(self, kind: str, text: str) -> Matcher:
        """A matcher at the start of the grammar; raises ValueError if it cannot be parsed."""

    def compile(self, grammar: Grammar) -> Matcher:
        """A matcher at the start of the grammar; raises InvalidRequest if it cannot be used. Safe
        to call from any thread."""
        began = time.monotonic()
        try:
            _check(grammar)
            matcher = self._make(grammar.kind, grammar.text)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(
                f"The {grammar.kind} cannot be read: {str(error)[:300]}.", param=grammar.kind
            ) from None
        matcher.compiled_s = time.monotonic() - began
        trial = matcher.copy()
        trial.mask()  # some grammars exceed a limit only here
        if trial.error:
            raise InvalidRequest(
                f"The {grammar.kind} cannot be used: {trial.error.splitlines()[0][:300]}",
                param=grammar.kind,
            )
        return matcher

    def __contains__(self, grammar: Grammar) -> bool:
        return grammar in self._kept

    def matcher(self, grammar: Grammar, compiled: Matcher | None = None) -> Matcher:
        """A fresh copy of the cached matcher. `compiled`: one that has just been compiled."""
        kept = self._kept.pop(grammar, None) or compiled or self.compile(grammar)
        if kept.compiled_s < self.kept_below_s:
            self._kept[grammar] = kept
        while len(self._kept) > _NUM_KEPT:
            self._kept.popitem(last=False)
        return kept.copy()


def _check(grammar: Grammar) -> None:
    """Limits that hold for every backend. Also raises ValueError, for text that is not JSON."""
    text = grammar.text
    if len(text) > MAX_CHARS:
        raise InvalidRequest(
            f"The {grammar.kind} has {len(text)} characters; at most {MAX_CHARS}.",
            param=grammar.kind,
        )
    if grammar.kind not in ("json_schema", "choice", "structural_tag"):
        return
    value = json.loads(text)
    if grammar.kind == "json_schema" and not isinstance(value, dict | bool):
        raise InvalidRequest("A JSON schema is an object.", param=grammar.kind)
    if grammar.kind != "choice" and depth_of(value) > MAX_DEPTH:
        raise InvalidRequest(
            f"The {grammar.kind.replace('json', 'JSON').replace('_', ' ')} is nested more than {MAX_DEPTH} deep.",
            param=grammar.kind,
        )
    if grammar.kind == "choice" and not (
        isinstance(value, list) and value and all(isinstance(item, str) and item for item in value)
    ):
        raise InvalidRequest(
            "The choice cannot be used: it must be a non-empty list of non-empty strings.",
            param=grammar.kind,
        )
