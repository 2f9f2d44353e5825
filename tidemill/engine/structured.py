"""Structured output of live requests: the grammar state of each sample, and from it which tokens may come next.

A grammar library is foreign code that works on what clients send. Whatever it raises, a Rust panic included, becomes an
InvalidRequest of the one request whose grammar it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from enum import Enum, auto
from pathlib import Path

import numpy as np

from tidemill.errors import InvalidRequest, TidemillError
from tidemill.frontend.structured import Grammars, Matcher
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.sampling import Grammar, Reasoning
from tidemill.sched.plan import StepPlan


class StructuredOutput:
    def __init__(self, backend: str, num_tokens: int) -> None:
        self.tokenizer_path: Path | None = None  # loaded for the first grammar
        self._backend, self._num_tokens = backend, num_tokens
        self._grammars: Grammars | None = None
        self._matchers: dict[int, Matcher | AfterReasoning] = {}  # by seq
        self._tokenizer: Tokenizer | None = None

    def __len__(self) -> int:
        """Samples with a grammar."""
        return len(self._matchers)

    def __contains__(self, seq: int) -> bool:
        return seq in self._matchers

    def is_compiled(self, grammar: Grammar) -> bool:
        return self._grammars is not None and grammar in self._grammars

    def compile(self, grammar: Grammar) -> Matcher:
        """May take a while; may be called from another thread."""
        with _contained():
            if self._grammars is None:
                if self.tokenizer_path is None:
                    raise InvalidRequest("Structured output needs a tokenizer, and this engine has none.", param="grammar")
                self._tokenizer = Tokenizer.load(self.tokenizer_path)
                self._grammars = Grammars.of(self._backend, self._tokenizer, self._num_tokens)
            return self._grammars.compile(grammar)

    def matchers(
        self,
        grammar: Grammar,
        compiled: Matcher | None,
        outputs: Sequence[Sequence[int]],
        reasoning: Reasoning | None = None,
    ) -> list[Matcher | AfterReasoning]:
        """One for each sample, after the output that it has. `compiled`: of this grammar, if it was compiled just now."""
        with _contained():
            if self._grammars is None:
                compiled = self.compile(grammar)
            assert self._grammars is not None
            first = self._grammars.matcher(grammar, compiled)
            assert self._tokenizer is not None
            made: list[Matcher | AfterReasoning] = [
                first.copy() if reasoning is None else AfterReasoning(first.copy(), reasoning, self._tokenizer, self._num_tokens)
                for _ in outputs
            ]
            for matcher, output_ids in zip(made, outputs, strict=True):
                matcher.take(list(output_ids))
            return made

    def start(self, seq: int, matcher: Matcher | AfterReasoning) -> None:
        self._matchers[seq] = matcher

    def stop(self, seq: int) -> None:
        self._matchers.pop(seq, None)

    def masks(self, plan: StepPlan) -> tuple[dict[tuple[int, int], bytes], dict[int, InvalidRequest]]:
        """By row and position, which tokens may come; by seq, what went wrong instead."""
        masks: dict[tuple[int, int], bytes] = {}
        broken: dict[int, InvalidRequest] = {}
        for item in plan.items:
            matcher = self._matchers.get(item.seq) if item.samples else None
            if matcher is not None:
                position = item.start + item.count - item.num_drafts
                try:
                    with _contained():
                        for i, mask in enumerate(_masks_along(matcher, plan.drafts.get(item.row, ()))):
                            masks[item.row, position + i] = mask.tobytes()
                        _check(matcher)
                except InvalidRequest as error:
                    broken[item.seq] = error
        return masks, broken

    def cut(self, plan: StepPlan, tokens: dict[int, list[int]]) -> None:
        """Where drafts were right up to the end of the output and beyond: `tokens`, by row, without what came after the end."""
        for item in plan.items if plan.drafts and self._matchers else ():
            if item.seq in self._matchers and len(tokens.get(item.row, ())) > 1:
                with suppress(InvalidRequest), _contained():  # it is raised again when they are taken
                    matcher = self._matchers[item.seq].copy()
                    num = next((num for num, token in enumerate(tokens[item.row], 1) if _is_last(matcher, token)), None)
                    del tokens[item.row][num:]

    def take(self, seq: int, token_ids: Sequence[int]) -> bool:
        """Tokens were sampled. True: the output is complete, nothing more may come. Raises where the grammar cannot be followed
        further: the output would end as if it were complete."""
        matcher = self._matchers[seq]
        with _contained():
            matcher.take(list(token_ids))
            _check(matcher)
            return matcher.is_over


def _is_last(matcher: Matcher | AfterReasoning, token: int) -> bool:
    matcher.take([token])
    return matcher.is_over


def _masks_along(matcher: Matcher | AfterReasoning, drafts: Sequence[int]) -> Iterator[np.ndarray]:
    """Of the next token, and of those that would follow the drafts. A draft that the grammar excludes will not be drawn, so
    what comes after it does not matter."""
    mask = matcher.mask()
    yield mask
    if drafts:
        matcher = matcher.copy()
    for token in drafts:
        if not matcher.error and not matcher.is_over and mask[token // 32] >> (token % 32) & 1:
            matcher.take([token])
            if not matcher.is_over:
                mask = matcher.mask()
        yield mask


class _Phase(Enum):
    BEFORE = auto()  # the output may open the reasoning, or begin with what the grammar allows
    REASONING = auto()
    ANSWER = auto()


class AfterReasoning:
    """A matcher that begins where the reasoning ends. Marks are compared as bytes: they may be cut into tokens in many ways."""

    def __init__(self, matcher: Matcher, reasoning: Reasoning, tokenizer: Tokenizer, num_tokens: int) -> None:
        self._tokenizer, self._num_tokens = tokenizer, num_tokens
        self._opening, self._ending = reasoning.opening.encode(), reasoning.ending.encode()
        self._phase = _Phase.REASONING if reasoning.is_open else _Phase.BEFORE
        self._matcher = matcher
        self._fresh = matcher.copy()
        self._is_followed = True  # before the reasoning: the output so far may be the grammar's as well
        self._seen = b""  # of the opening, or the last bytes of the reasoning
        ends = [token for token in tokenizer.eos_token_ids if (tokenizer.token_bytes(token) or b"\0") not in self._ending]
        self._unended = _all_but(ends, num_tokens)

    def mask(self) -> np.ndarray:
        """While it reasons, any token may come but one that ends the output: the answer would be missing."""
        if self._phase is _Phase.REASONING:
            return self._unended
        words = self._matcher.mask()
        if self._phase is _Phase.BEFORE:
            words = words.copy() if self._is_followed else np.zeros_like(words)
            for token in self._tokenizer.prefix_tokens(self._opening[len(self._seen) :]):
                if token < self._num_tokens:
                    words.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        return words

    def take(self, token_ids: list[int]) -> None:
        for token in token_ids:
            if self._phase is _Phase.ANSWER:
                self._matcher.take([token])
            elif self._phase is _Phase.REASONING:
                self._take_reasoning(token)
            else:
                self._take_before(token)

    def _take_before(self, token: int) -> None:
        text = self._tokenizer.token_bytes(token)
        if not text or not self._opening.startswith(self._seen + text):
            self._phase = _Phase.ANSWER
            self._matcher.take([token])
            return
        self._seen += text
        if self._seen == self._opening:
            self._phase, self._seen, self._matcher, self._is_followed = _Phase.REASONING, b"", self._fresh, True
            return
        self._is_followed = self._is_followed and bool(self._matcher.mask()[token // 32] >> (token % 32) & 1)
        if self._is_followed:
            self._matcher.take([token])

    def _take_reasoning(self, token: int) -> None:
        self._seen += self._tokenizer.token_bytes(token)
        _, found, rest = self._seen.partition(self._ending)
        if not found:
            self._seen = self._seen[-(len(self._ending) - 1) :]
            return
        self._phase = _Phase.ANSWER
        if rest := rest.strip():  # the token that ends the reasoning has begun the answer
            self._matcher.take(self._tokenizer.encode(rest.decode(errors="replace"), add_special=False))

    def copy(self) -> AfterReasoning:
        made = copy(self)
        made._matcher, made._fresh = self._matcher.copy(), self._fresh.copy()
        return made

    @property
    def is_over(self) -> bool:
        return self._phase is not _Phase.REASONING and self._is_followed and self._matcher.is_over

    @property
    def error(self) -> str:
        return "" if self._phase is _Phase.REASONING else self._matcher.error


def _all_but(tokens: Sequence[int], num_tokens: int) -> np.ndarray:
    """A mask without these tokens."""
    words = np.full(-(-num_tokens // 32), -1, np.int32)
    for token in tokens:
        if token < num_tokens:
            words.view(np.uint32)[token // 32] &= ~np.uint32(1 << token % 32)
    return words


def _check(matcher: Matcher | AfterReasoning) -> None:
    if matcher.error:
        raise InvalidRequest(f"The grammar cannot be followed further: {_line(matcher.error)}", param="grammar")


@contextmanager
def _contained() -> Iterator[None]:
    try:
        yield
    except (TidemillError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a Rust panic is not an Exception
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise InvalidRequest(
            f"The grammar library failed on this request's grammar: {_line(what)}", fix="Use a simpler grammar.", param="grammar"
        ) from error


def _line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]
