"""Structured output of live requests: the grammar state of each sample, and from it which tokens
may come next.

A grammar library is foreign code that works on what clients send. Whatever it raises, a Rust panic
included, becomes an InvalidRequest of the one request whose grammar it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from enum import Enum, auto
from pathlib import Path

import msgspec
import numpy as np

from tidemill.engine.moments import Engine, EngineComponents, Part, Step, Submission
from tidemill.engine.outputs import LiveRequest
from tidemill.errors import InvalidRequest, TidemillError
from tidemill.frontend.structured import Grammars, Matcher
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.sched.plan import StepPlan
from tidemill.sched.request import HANDED_OVER, Request
from tidemill.types import events
from tidemill.types.sampling import Grammar, Reasoning, SamplingParams


class StructuredOutput(Part):
    def __init__(self, backend: str, num_tokens: int) -> None:
        self.tokenizer_path: Path | None = None  # loaded for the first grammar
        self._backend, self._num_tokens = backend, num_tokens
        self._grammars: Grammars | None = None
        self._matchers: dict[int, Matcher | AfterReasoning] = {}  # by seq
        self._tokenizer: Tokenizer | None = None

    @classmethod
    def of(cls, engine: Engine, components: EngineComponents) -> StructuredOutput:
        return cls(engine.config.structured_backend, engine.model_config.vocab_size)

    def __len__(self) -> int:
        """Samples with a grammar, or with reasoning that has a budget."""
        return len(self._matchers)

    # ---- moments

    def submit(self, submission: Submission) -> None:
        params = submission.params
        if params.has_masks:
            begun = list(submission.begun.values())
            matchers = self.matchers(params.grammar, submission.compiled, begun, params.reasoning)
            submission.matchers = matchers

    def queued(self, submission: Submission, live: LiveRequest) -> None:
        for seq, matcher in zip(live.samples, submission.matchers, strict=False):
            self.start(seq, matcher)

    def end(self, live: LiveRequest, request: Request) -> None:
        self._matchers.pop(request.seq, None)

    def fill_plan(self, step: Step) -> None:
        """The masks of the tokens that may come. A request whose grammar fails is aborted; its part
        of the step is wasted."""
        if not self._matchers:
            return
        began = self.engine.clock.now()
        step.plan.masks, broken = self.masks(step.plan)
        if step.plan.masks:
            now = self.engine.clock.now()
            self.engine.emit(events.MasksMade(now, len(step.plan.masks), now - began))
        for seq, error in broken.items():
            if seq in self.engine.live_of:
                self.engine.fail(seq, error, "grammar failed")

    def results(self, step: Step) -> None:
        if self._matchers and step.plan.drafts:
            self.cut(step.plan, step.result.tokens)

    def progress(self, step: Step) -> None:
        """Sampled tokens go to the grammars; an output whose grammar allows nothing more is
        complete."""
        if not self._matchers:
            return
        for i, item in enumerate(step.progress):
            seq = item.request.seq
            if seq not in self._matchers or item.finish_reason not in (None, HANDED_OVER):
                continue
            try:
                if self.take(seq, item.token_ids):
                    if not item.finish_reason:
                        self.engine.scheduler.table.finish(item.request, "stop")
                    step.progress[i] = msgspec.structs.replace(item, finish_reason="stop")
            except InvalidRequest as error:
                self.engine.fail(seq, error, "grammar failed")
        step.progress = [item for item in step.progress if item.request.seq in self.engine.live_of]

    # ---- grammars

    def is_ready(self, params: SamplingParams) -> bool:
        """A request can be submitted without `compile`."""
        return not params.has_masks or self.is_compiled(params.grammar)

    def is_compiled(self, grammar: Grammar | None) -> bool:
        if grammar is None:
            return self._tokenizer is not None
        return self._grammars is not None and grammar in self._grammars

    def compile(self, grammar: Grammar | None) -> Matcher | None:
        """May take a while; may be called from another thread. None: reasoning with a budget needs
        the tokenizer alone."""
        with _contained():
            if self._tokenizer is None:
                if self.tokenizer_path is None:
                    raise InvalidRequest(
                        "Structured output needs a tokenizer, and this engine has none.",
                        param="grammar",
                    )
                self._tokenizer = Tokenizer.load(self.tokenizer_path)
            if grammar is None:
                return None
            if self._grammars is None:
                self._grammars = Grammars.of(self._backend, self._tokenizer, self._num_tokens)
            return self._grammars.compile(grammar)

    def matchers(
        self,
        grammar: Grammar | None,
        compiled: Matcher | None,
        outputs: Sequence[Sequence[int]],
        reasoning: Reasoning | None = None,
    ) -> list[Matcher | AfterReasoning]:
        """One for each sample, after the output that it has. `compiled`: of this grammar, if it was
        compiled just now."""
        with _contained():
            if self._tokenizer is None or (grammar is not None and self._grammars is None):
                compiled = self.compile(grammar)
            assert self._tokenizer is not None
            first = None
            if grammar is not None:
                assert self._grammars is not None
                first = self._grammars.matcher(grammar, compiled)
            matchers = [self._matcher(first, reasoning) for _ in outputs]
            for matcher, output_ids in zip(matchers, outputs, strict=True):
                matcher.take(list(output_ids))
            return matchers

    def _matcher(
        self, first: Matcher | None, reasoning: Reasoning | None
    ) -> Matcher | AfterReasoning:
        assert self._tokenizer is not None
        own = None if first is None else first.copy()
        if reasoning is not None:
            return AfterReasoning(own, reasoning, self._tokenizer, self._num_tokens)
        assert own is not None
        return own

    def start(self, seq: int, matcher: Matcher | AfterReasoning) -> None:
        if not matcher.is_done:
            self._matchers[seq] = matcher

    def masks(
        self, plan: StepPlan
    ) -> tuple[dict[tuple[int, int], bytes], dict[int, InvalidRequest]]:
        """By row and position, which tokens may come; by seq, what went wrong instead."""
        masks: dict[tuple[int, int], bytes] = {}
        broken: dict[int, InvalidRequest] = {}
        for item in plan.items:
            matcher = self._matchers.get(item.seq) if item.samples else None
            if matcher is not None:
                position = item.start + item.count - item.num_drafts
                try:
                    with _contained():
                        for i, mask in enumerate(
                            _masks_along(matcher, plan.drafts.get(item.row, ()))
                        ):
                            masks[item.row, position + i] = mask.tobytes()
                        _check(matcher)
                except InvalidRequest as error:
                    broken[item.seq] = error
        return masks, broken

    def forced(self, seq: int) -> list[int]:
        """Tokens of the text that must come next in this sample, if there is such. A guess: it can
        be cut into others."""
        matcher = self._matchers.get(seq)
        if matcher is None or self._tokenizer is None:
            return []
        with suppress(InvalidRequest), _contained():
            text = matcher.forced().decode(errors="ignore")
            return self._tokenizer.spell(text) if text else []
        return []

    def cut(self, plan: StepPlan, tokens: dict[int, list[int]]) -> None:
        """Cuts the tokens of rows whose drafts were right up to the end of the output and beyond.
        `tokens`, by row, loses the tokens after the end. The lists stay as they are: ranks compare
        what they have drawn."""
        for item in plan.items:
            own = tokens.get(item.row, ())
            if item.seq in self._matchers and len(own) > 1 and own[-1] >= 0:
                # it is raised again when they are taken
                with suppress(InvalidRequest), _contained():
                    matcher = self._matchers[item.seq].copy()
                    num = next(
                        (num for num, token in enumerate(own, 1) if _is_last(matcher, token)),
                        len(own),
                    )
                    tokens[item.row] = list(own[:num])

    def take(self, seq: int, token_ids: Sequence[int]) -> bool:
        """Tokens were sampled. True: the output is complete, nothing more may come. Raises where
        the grammar cannot be followed further: the output would end as if it were complete."""
        matcher = self._matchers[seq]
        with _contained():
            matcher.take(list(token_ids))
            _check(matcher)
            if matcher.is_done:
                del self._matchers[seq]
            return matcher.is_over


def _is_last(matcher: Matcher | AfterReasoning, token: int) -> bool:
    matcher.take([token])
    return matcher.is_over


def _masks_along(matcher: Matcher | AfterReasoning, drafts: Sequence[int]) -> Iterator[np.ndarray]:
    """The masks of the next token, and of those that would follow the drafts. A draft that the
    grammar excludes will not be drawn, so what comes after it does not matter."""
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
    """A matcher that begins where the reasoning ends; without one, all that follows is free. Marks
    are compared as bytes: they may be cut into tokens in many ways."""

    def __init__(
        self, matcher: Matcher | None, reasoning: Reasoning, tokenizer: Tokenizer, num_tokens: int
    ) -> None:
        self._tokenizer, self._num_tokens = tokenizer, num_tokens
        self._opening, self._ending = reasoning.opening.encode(), reasoning.ending.encode()
        self._phase = _Phase.REASONING if reasoning.is_open else _Phase.BEFORE
        self._matcher = matcher
        self._fresh = None if matcher is None else matcher.copy()
        self._budget, self._num_taken = reasoning.budget, 0
        # before the reasoning: the output so far may be the grammar's as well
        self._is_followed = True
        self._seen = b""  # of the opening, or the last bytes of the reasoning
        self._all = _all_but((), num_tokens)
        ends = [
            token
            for token in tokenizer.eos_token_ids
            if (tokenizer.token_bytes(token) or b"\0") not in self._ending
        ]
        self._unended = self._all if matcher is None else _all_but(ends, num_tokens)

    def mask(self) -> np.ndarray:
        """While it reasons, any token may come. Before a grammar, none that ends the output: the
        answer would be missing."""
        if self._phase is _Phase.REASONING:
            return self._ending_mask() if self._is_spent else self._unended
        if self._matcher is None:
            return self._all
        words = self._matcher.mask()
        if self._phase is _Phase.BEFORE:
            words = words.copy() if self._is_followed else np.zeros_like(words)
            _allow(
                words,
                self._tokenizer.prefix_tokens(self._opening[len(self._seen) :]),
                self._num_tokens,
            )
        return words

    @property
    def _is_spent(self) -> bool:
        return self._budget is not None and self._num_taken >= self._budget

    def _rest_of_ending(self) -> bytes:
        """The missing rest of the ending, the first part of which may have been written."""
        num = next(
            num
            for num in range(len(self._ending), -1, -1)
            if self._seen.endswith(self._ending[:num])
        )
        return self._ending[num:]

    def _ending_mask(self) -> np.ndarray:
        """The next token of the ending, as the tokenizer writes it; a model may know no other way."""
        rest = self._rest_of_ending()
        tokens = self._tokenizer.encode(rest.decode(errors="ignore"), add_special=False)[:1]
        if (
            not tokens
            or tokens[0] >= self._num_tokens
            or not rest.startswith(self._tokenizer.token_bytes(tokens[0]) or b"\0")
        ):
            tokens = self._tokenizer.prefix_tokens(rest)
        words = np.zeros_like(self._all)
        _allow(words, tokens, self._num_tokens)
        return words

    def take(self, token_ids: list[int]) -> None:
        for token in token_ids:
            if self._phase is _Phase.REASONING:
                self._take_reasoning(token)
            elif self._phase is _Phase.BEFORE:
                self._take_before(token)
            elif self._matcher is not None:
                self._matcher.take([token])

    def _take_before(self, token: int) -> None:
        text = self._tokenizer.token_bytes(token)
        if not text or not self._opening.startswith(self._seen + text):
            self._phase = _Phase.ANSWER
            if self._matcher is not None:
                self._matcher.take([token])
            return
        self._seen += text
        if self._seen == self._opening:
            self._phase, self._seen, self._matcher, self._is_followed = (
                _Phase.REASONING,
                b"",
                self._fresh,
                True,
            )
            return
        if self._matcher is not None:
            self._is_followed = self._is_followed and bool(
                self._matcher.mask()[token // 32] >> (token % 32) & 1
            )
            if self._is_followed:
                self._matcher.take([token])

    def _take_reasoning(self, token: int) -> None:
        self._num_taken += 1
        self._seen += self._tokenizer.token_bytes(token)
        _, found, rest = self._seen.partition(self._ending)
        if not found:
            self._seen = self._seen[-(len(self._ending) - 1) :]
            return
        self._phase = _Phase.ANSWER
        # the token that ends the reasoning has begun the answer
        if self._matcher is not None and (rest := rest.strip()):
            self._matcher.take(self._tokenizer.spell(rest.decode(errors="replace")))

    def copy(self) -> AfterReasoning:
        copied = copy(self)
        if self._matcher is not None and self._fresh is not None:
            copied._matcher, copied._fresh = self._matcher.copy(), self._fresh.copy()
        return copied

    def forced(self) -> bytes:
        if self._phase is _Phase.REASONING and self._is_spent:
            return self._rest_of_ending()
        return (
            self._matcher.forced()
            if self._matcher is not None and self._phase is _Phase.ANSWER
            else b""
        )

    @property
    def is_over(self) -> bool:
        return (
            self._matcher is not None
            and self._phase is not _Phase.REASONING
            and self._is_followed
            and self._matcher.is_over
        )

    @property
    def is_done(self) -> bool:
        """From here on any token may come."""
        return self._matcher is None and self._phase is _Phase.ANSWER

    @property
    def error(self) -> str:
        return (
            "" if self._matcher is None or self._phase is _Phase.REASONING else self._matcher.error
        )


def _allow(words: np.ndarray, tokens: Sequence[int], num_tokens: int) -> None:
    for token in tokens:
        if token < num_tokens:
            words.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)


def _all_but(tokens: Sequence[int], num_tokens: int) -> np.ndarray:
    """A mask without these tokens."""
    words = np.full(-(-num_tokens // 32), -1, np.int32)
    for token in tokens:
        if token < num_tokens:
            words.view(np.uint32)[token // 32] &= ~np.uint32(1 << token % 32)
    return words


def _check(matcher: Matcher | AfterReasoning) -> None:
    if matcher.error:
        raise InvalidRequest(
            f"The grammar cannot be followed further: {_line(matcher.error)}", param="grammar"
        )


@contextmanager
def _contained() -> Iterator[None]:
    try:
        yield
    except (TidemillError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a Rust panic is not an Exception
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise InvalidRequest(
            f"The grammar library failed on this request's grammar: {_line(what)}",
            fix="Use a simpler grammar.",
            param="grammar",
        ) from error


def _line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]
