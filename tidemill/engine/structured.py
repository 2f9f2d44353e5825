"""Structured output of live requests: the grammar state of each sample, and from it which tokens may come next.

A grammar library is foreign code that works on what clients send. Whatever it raises, a Rust panic included, becomes an
InvalidRequest of the one request whose grammar it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tidemill.errors import InvalidRequest, TidemillError
from tidemill.frontend.structured import Grammars, Matcher
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.sampling import Grammar
from tidemill.sched.plan import StepItem


class StructuredOutput:
    def __init__(self, backend: str, num_tokens: int) -> None:
        self.tokenizer_path: Path | None = None  # loaded for the first grammar
        self._backend, self._num_tokens = backend, num_tokens
        self._grammars: Grammars | None = None
        self._matchers: dict[int, Matcher] = {}  # by seq

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
                self._grammars = Grammars.of(self._backend, Tokenizer.load(self.tokenizer_path), self._num_tokens)
            return self._grammars.compile(grammar)

    def matchers(self, grammar: Grammar, compiled: Matcher | None, outputs: Sequence[Sequence[int]]) -> list[Matcher]:
        """One for each sample, after the output that it has. `compiled`: of this grammar, if it was compiled just now."""
        with _contained():
            if self._grammars is None:
                compiled = self.compile(grammar)
            assert self._grammars is not None
            first = self._grammars.matcher(grammar, compiled)
            made = [first.copy() for _ in outputs]
            for matcher, output_ids in zip(made, outputs, strict=True):
                matcher.take(list(output_ids))
            return made

    def start(self, seq: int, matcher: Matcher) -> None:
        self._matchers[seq] = matcher

    def stop(self, seq: int) -> None:
        self._matchers.pop(seq, None)

    def masks(self, items: Sequence[StepItem]) -> tuple[dict[int, bytes], dict[int, InvalidRequest]]:
        """By row, which tokens may come next; by seq, what went wrong instead."""
        masks: dict[int, bytes] = {}
        broken: dict[int, InvalidRequest] = {}
        for item in items:
            matcher = self._matchers.get(item.seq) if item.samples else None
            if matcher is not None:
                try:
                    with _contained():
                        mask = matcher.mask().tobytes()
                        _check(matcher)
                    masks[item.row] = mask
                except InvalidRequest as error:
                    broken[item.seq] = error
        return masks, broken

    def take(self, seq: int, token_id: int) -> bool:
        """A token was sampled. True: the output is complete, nothing more may come. Raises where the grammar cannot be followed
        further: the output would end as if it were complete."""
        matcher = self._matchers[seq]
        with _contained():
            matcher.take([token_id])
            _check(matcher)
            return matcher.is_over


def _check(matcher: Matcher) -> None:
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
