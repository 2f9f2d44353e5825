"""From token deltas to text: detokenize, hold back what a stop string may still remove, stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.frontend.tokenizer import StreamDecoder, Tokenizer
from tidemill.sampling import SamplingParams


class StopFinder:
    """Finds the first stop string in a stream of text. Text that may be the beginning of one is held until it is decided."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is safe to give out, and the stop string if one was completed."""
        if not self._stops:
            return text, None
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found, key=lambda pair: (pair[0], -len(pair[1])))
            self._held = ""
            return text[: at + len(stop)] if self._include else text[:at], stop
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None

    def finish(self) -> str:
        """No more text: what was held is given out after all."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, but not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0


@dataclass(frozen=True, slots=True)
class TextDelta:
    text: str
    num_tokens: int  # of the tokens pushed, how many count: those after a stop string do not
    finish_reason: str | None
    stop: str | int | None = None  # which stop string or token ended it


class TextStream:
    """One sample's text."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._decoder = StreamDecoder(tokenizer, params.skip_special_tokens)
        self._finder = StopFinder(params.stop, params.include_stop_str_in_output)
        self._min_tokens = params.min_tokens
        self._enders = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(tokenizer.eos_token_ids)
        )
        self._num_tokens = 0

    def push(self, token_ids: Sequence[int], finish_reason: str | None) -> TextDelta:
        """`finish_reason`: the engine's, on the last tokens."""
        pieces: list[str] = []
        for i, token_id in enumerate(token_ids):
            self._num_tokens += 1
            if finish_reason == "stop" and i == len(token_ids) - 1 and token_id in self._enders:
                pieces.append(self._finder.finish())
                return TextDelta("".join(pieces), len(token_ids), "stop", token_id)
            text = self._decoder.push(token_id)
            if self._num_tokens <= self._min_tokens:
                pieces.append(text)
                continue
            safe, stop = self._finder.push(text)
            pieces.append(safe)
            if stop is not None:
                return TextDelta("".join(pieces), i + 1, "stop", stop)
        if finish_reason is not None:
            safe, stop = self._finder.push(self._decoder.finish())
            pieces.append(safe)
            if stop is not None:
                return TextDelta("".join(pieces), len(token_ids), "stop", stop)
            pieces.append(self._finder.finish())
        return TextDelta("".join(pieces), len(token_ids), finish_reason)
