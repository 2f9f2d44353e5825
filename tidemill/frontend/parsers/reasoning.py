"""Reasoning: a table of the marks around it, and how many tokens it takes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto


@dataclass(frozen=True, slots=True)
class Markers:
    """The markers around a model's reasoning."""

    name: str
    opening: str
    ending: str
    answer: str = ""  # what the answer begins with, if it is not the ending
    starts_open: bool = False  # the output begins with it, whether the prompt says so or not
    is_repeated: bool = False  # it may come anywhere, several times
    aliases: tuple[str, ...] = ()


_HARMONY = Markers(
    "harmony",
    "<|channel|>analysis<|message|>",
    "<|end|>",
    "<|channel|>final<|message|>",
    is_repeated=True,
    aliases=("openai_gptoss", "gpt_oss"),
)
THINK = Markers("think", "<think>", "</think>", aliases=("qwen3", "deepseek_v3", "glm45", "holo2"))
MARKERS = (  # in the order in which templates are tried
    _HARMONY,
    Markers("mistral", "[THINK]", "[/THINK]"),
    Markers("seed_oss", "<seed:think>", "</seed:think>"),
    Markers("reasoning", "<reasoning>", "</reasoning>"),
    Markers("granite", "Here is my thought process:", "Here is my response:"),
    THINK,
    # by name only: templates find the line before
    Markers("deepseek_r1", "<think>", "</think>", starts_open=True),
)
REASONING_PARSERS = {
    name: markers for markers in MARKERS for name in (markers.name, *markers.aliases)
}


def markers_of(template: str) -> Markers | None:
    """By the marks in a chat template."""
    return next(
        (
            m
            for m in MARKERS
            if m.opening in template or (m.ending in template and not m.is_repeated)
        ),
        None,
    )


class _State(Enum):
    BEFORE = auto()
    INSIDE = auto()
    OVER = auto()


class ReasoningCounter:
    """Counts the tokens that hold some of the reasoning's text; those of the marks alone do not."""

    def __init__(self, markers: Markers, is_open: bool) -> None:
        self._opening, self._ending = markers.opening.encode(), markers.ending.encode()
        self._is_repeated = markers.is_repeated
        self._state = _State.INSIDE if is_open else _State.BEFORE
        self._tail = b""  # bytes that may belong to a mark
        self._position = 0  # bytes so far
        self._starts: deque[int] = deque()  # of the last tokens that were counted
        self.num_tokens = 0

    def push(self, token: bytes) -> None:
        if self._state is _State.OVER:
            return
        start, self._position = self._position, self._position + len(token)
        self._tail += token
        was_inside = self._state is _State.INSIDE
        if self._state is _State.BEFORE and not self._find_opening():
            return
        if was_inside or self._tail:
            self.num_tokens += 1
            if token:  # some have no text
                self._starts.append(start)
        at = self._tail.find(self._ending)
        if at < 0:
            self._tail = self._tail[-(len(self._ending) - 1) :]
            while self._starts and self._starts[0] < self._position - len(self._ending):
                self._starts.popleft()
            return
        ended = self._position - len(self._tail) + at
        self.num_tokens -= sum(1 for start in self._starts if start >= ended)
        self._starts.clear()
        self._tail = self._tail[at + len(self._ending) :]
        self._state = _State.BEFORE if self._is_repeated else _State.OVER

    def _find_opening(self) -> bool:
        """Tells if the opening is there; then the tail is what follows it."""
        opening = self._opening
        if self._is_repeated:
            at = self._tail.find(opening)
            if at < 0:
                self._tail = self._tail[-(len(opening) - 1) :]
                return False
            self._tail = self._tail[at + len(opening) :]
        else:
            self._tail = self._tail.lstrip()
            if not self._tail.startswith(opening):
                if not opening.startswith(self._tail):
                    self._state = _State.OVER
                return False
            self._tail = self._tail[len(opening) :]
        self._state = _State.INSIDE
        return True
