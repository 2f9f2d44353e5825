"""From token deltas to text, in bounded pieces. Text that a stop string may still remove is held
back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from tidemill.frontend.parsers import OutputFormat
from tidemill.frontend.stop_regex import RegexFinder
from tidemill.frontend.stop_strings import compiled_stops
from tidemill.frontend.tokenizer import StreamDecoder, Tokenizer
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Delta

# Tokens and log-probabilities that are made text of between two turns of the event loop: some 5 ms.
CELLS_PER_TURN = 1024
_CELLS_PER_PATTERN = 16


def cells_per_token(params: SamplingParams) -> int:
    """The cost of making text of a token: a pattern that may end the output takes some 100 us,
    whatever it is."""
    return 1 + _CELLS_PER_PATTERN * len(params.stop_regex)


def num_cells(delta: Delta, per_token: int = 1) -> int:
    """The cost of formatting a delta: `per_token` cells for each token, and one for each
    log-probability reported beside it."""
    return len(delta.token_ids) * per_token + sum(len(entry.top) for entry in delta.logprobs or ())


def in_pieces(delta: Delta, one_by_one: bool = False, per_token: int = 1) -> Iterator[Delta]:
    """A delta as deltas of at most about CELLS_PER_TURN, or of one token each. A reader who fell
    behind gets a backlog of any size at once."""
    cells, num = num_cells(delta, per_token), len(delta.token_ids)
    if cells <= CELLS_PER_TURN and (not one_by_one or num <= 1):
        yield delta
        return
    step = 1 if one_by_one else max(CELLS_PER_TURN * num // cells, 1)
    for begin in range(0, num, step):
        yield msgspec.structs.replace(
            delta,
            token_ids=delta.token_ids[begin : begin + step],
            logprobs=delta.logprobs and delta.logprobs[begin : begin + step],
            prompt_pieces=delta.prompt_pieces if begin == 0 else None,
            finish_reason=delta.finish_reason if begin + step >= num else None,
        )


class StopFinder:
    """Finds the first stop string in a stream of text. Text that may be the start of one is held
    until that is decided."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._strings = compiled_stops(tuple(stops)) if stops else None
        self._include = include
        self._state = 0  # of the automaton
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is safe to emit, and the stop string if one was completed."""
        if self._strings is None:
            return text, None
        strings, state = self._strings, self._state
        if state == 0 and strings.first_chars.isdisjoint(text):
            return text, None
        num_before, text = len(self._held), self._held + text
        first, last = len(text), 0  # of the best one that was found
        for end in range(num_before + 1, len(text) + 1):
            state = strings.step(state, text[end - 1])
            if (num := strings.ended[state]) and (
                end - num < first or (end - num == first and end > last)
            ):
                first, last = end - num, end
            if last and end - strings.depth[state] > first:
                break  # what ends later begins later
        if last:
            self._held, self._state = "", 0
            return text[: last if self._include else first], text[first:last]
        num_safe = len(text) - strings.depth[state]
        self._held, self._state = text[num_safe:], state
        return text[:num_safe], None

    def finish(self) -> str:
        """End of the text: what was held is emitted."""
        held, self._held, self._state = self._held, "", 0
        return held


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str
    num_tokens: int  # of the tokens pushed, those up to the stop string
    finish_reason: str | None
    stop: str | int | None = None  # which stop string or token ended it
    # of these tokens; less than none if earlier ones turned out to be the mark that ends the
    # reasoning
    num_reasoning: int = 0


class TextStream:
    """One sample's text. `output_format`: special tokens that its parser needs are not skipped, and
    tokens of reasoning are counted."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        output_format: OutputFormat | None = None,
    ) -> None:
        marks = output_format.marks if output_format is not None else frozenset()
        self._decoder = StreamDecoder(tokenizer, params.skip_special_tokens, marks)
        self._counter = output_format.counter() if output_format is not None else None
        self._token_bytes = tokenizer.token_bytes
        self._finder = StopFinder(params.stop, params.include_stop_str_in_output)
        self._regexes = RegexFinder(params.stop_regex)
        self._min_tokens = params.min_tokens
        self._enders = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(tokenizer.eos_token_ids)
        )
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int], finish_reason: str | None) -> TextDelta:
        """`finish_reason`: from the engine, with the last tokens."""
        delta = self._push(token_ids, finish_reason)
        if self._counter is None:
            return delta
        before = self._counter.num_tokens
        for token_id in token_ids[: delta.num_tokens]:
            if token_id != delta.stop:
                self._counter.push(self._token_bytes(token_id))
        return replace(delta, num_reasoning=self._counter.num_tokens - before)

    def _push(self, token_ids: Sequence[int], finish_reason: str | None) -> TextDelta:
        pieces: list[str] = []
        for i, token_id in enumerate(token_ids):
            self._num_tokens += 1
            if finish_reason == "stop" and i == len(token_ids) - 1 and token_id in self._enders:
                safe, pattern = self._searched(self._finder.finish(), None)
                num, ender = (len(token_ids), token_id) if pattern is None else (i, pattern)
                return TextDelta("".join([*pieces, safe]), num, "stop", ender)
            text = self._decoder.push(token_id)
            if self._num_tokens <= self._min_tokens:
                pieces.append(text)
                continue
            safe, stop = self._searched(*self._finder.push(text))
            pieces.append(safe)
            if stop is not None:
                return TextDelta("".join(pieces), i + 1, "stop", stop)
        if finish_reason is not None:
            safe, stop = self._finder.push(self._decoder.finish())
            safe, stop = self._searched(
                safe if stop is not None else safe + self._finder.finish(), stop
            )
            pieces.append(safe)
            if stop is not None:
                return TextDelta("".join(pieces), len(token_ids), "stop", stop)
        return TextDelta("".join(pieces), len(token_ids), finish_reason)

    def _searched(self, text: str, stop: str | None) -> tuple[str, str | None]:
        """A pattern that matches before the stop string ends the text there."""
        safe, pattern = self._regexes.push(text)
        return safe, stop if pattern is None else pattern
