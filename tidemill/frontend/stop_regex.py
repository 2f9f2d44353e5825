"""Regular expressions that end an output: matched in time that grows with the text alone, whatever
the pattern.

A pattern of a client becomes a finite automaton of bounded size; there is no backtracking. What an
automaton cannot do (references to groups, lookaround) is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser as sre_parser  # type: ignore[attr-defined]
from typing import Any

from tidemill.errors import InvalidRequest

_MAX_STATES = 256
_MAX_KNOWN = 256  # steps that are remembered
_FLAGS = re.UNICODE | re.IGNORECASE | re.DOTALL
_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    sre.CATEGORY_DIGIT: str.isdigit,
    sre.CATEGORY_SPACE: str.isspace,
    sre.CATEGORY_WORD: lambda char: char.isalnum() or char == "_",
}
_CATEGORIES |= {
    sre.CATEGORY_NOT_DIGIT: lambda char: not char.isdigit(),
    sre.CATEGORY_NOT_SPACE: lambda char: not char.isspace(),
    sre.CATEGORY_NOT_WORD: lambda char: not _CATEGORIES[sre.CATEGORY_WORD](char),
}
Test = Callable[[str], bool]
States = int  # a bit for each


@dataclass(slots=True)
class _State:
    """Takes a character that passes the test to the next state; without a test, leads to other
    states at once."""

    test: Test | None = None
    nexts: list[int] = field(default_factory=list)
    at: str = ""  # start or end: only there


class StopRegex:
    """An automaton for one pattern, shared by all outputs that use it."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        try:
            parsed = sre_parser.parse(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise _refused(pattern, f"is not valid: {error}") from None
        flags = parsed.state.flags
        if flags & ~_FLAGS:
            raise _refused(pattern, "has flags that are not supported")
        self._ignores_case, self._dot_is_all = bool(flags & re.IGNORECASE), bool(flags & re.DOTALL)
        self._states: list[_State] = []
        end = self._add()
        self._goal = end
        self._first = self._sequence(parsed, end)
        self._again = self._reached([self._first], {""})
        self._known: dict[tuple[States, str], tuple[States, bool]] = {}
        self._taking: dict[str, States] = {}  # by character: the states that it leads on from
        # by four states at once: where they lead, as hex digits
        self._led_to: dict[tuple[int, str], tuple[States, bool]] = {}
        if self._reached([self._first], {"", "start", "end"}) >> self._goal & 1:
            raise _refused(pattern, "matches the empty text")

    @property
    def start(self) -> States:
        return self._reached([self._first], {"", "start"})

    def step(self, states: States, char: str) -> tuple[States, bool]:
        """The states after another character, and whether a match ends with it."""
        found = self._known.get((states, char))
        if found is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            found = self._known[states, char] = self._stepped(states, char)
        return found

    def _stepped(self, states: States, char: str) -> tuple[States, bool]:
        taking = self._taking.get(char)
        if taking is None:
            if len(self._taking) >= _MAX_KNOWN:
                self._taking.clear()
            tests = ((number, state.test) for number, state in enumerate(self._states))
            taking = self._taking[char] = sum(
                1 << number for number, test in tests if test is not None and test(char)
            )
        after, is_matched = self._again, False
        for at, digit in enumerate(reversed(f"{states & taking:x}")):
            if digit != "0":
                led_to = self._led_to.get((at, digit)) or self._lead(at, digit)
                after |= led_to[0]
                is_matched |= led_to[1]
        return after, is_matched

    def _lead(self, at: int, digit: str) -> tuple[States, bool]:
        """From the states of a hex digit, after a character that they take."""
        taken = [4 * at + bit for bit in range(4) if int(digit, 16) >> bit & 1]
        moved = [then for number in taken for then in self._states[number].nexts]
        is_matched = bool(self._reached(moved, {"", "end"}) >> self._goal & 1)
        lead = self._led_to[at, digit] = self._reached(moved, {""}), is_matched
        return lead

    def _reached(self, begun: Iterable[int], allowed: set[str]) -> States:
        """All states that these lead to without a character."""
        seen, left = set(), list(begun)
        while left:
            number = left.pop()
            state = self._states[number]
            if number in seen or state.at not in allowed:
                continue
            seen.add(number)
            left += state.nexts if state.test is None else []
        return sum(1 << number for number in seen)

    # ---- from the parsed pattern to states, from its end to its start

    def _add(self, test: Test | None = None, nexts: Iterable[int] = (), at: str = "") -> int:
        if len(self._states) == _MAX_STATES:
            raise _refused(self.pattern, "is too long, or repeats too much")
        self._states.append(_State(test, list(nexts), at))
        return len(self._states) - 1

    def _sequence(self, parts: Any, then: int) -> int:
        for kind, argument in reversed(list(parts)):
            then = self._part(kind, argument, then)
        return then

    def _part(self, kind: Any, argument: Any, then: int) -> int:
        if kind is sre.BRANCH:
            return self._add(nexts=[self._sequence(branch, then) for branch in argument[1]])
        if kind is sre.SUBPATTERN and not argument[1] and not argument[2]:
            return self._sequence(argument[3], then)
        if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            least, most, part = argument
            return self._repeated(least, most, part, then)
        if kind is sre.AT and argument in (sre.AT_BEGINNING, sre.AT_BEGINNING_STRING):
            return self._add(nexts=[then], at="start")
        if kind is sre.AT and argument in (sre.AT_END, sre.AT_END_STRING):
            return self._add(nexts=[then], at="end")
        if kind in (sre.LITERAL, sre.NOT_LITERAL, sre.ANY, sre.IN):
            return self._add(self._folded(self._test(kind, argument)), [then])
        raise _refused(self.pattern, f"uses {str(kind).lower()}, which is not supported")

    def _repeated(self, least: int, most: Any, part: Any, then: int) -> int:
        if max(least, 0 if most is sre.MAXREPEAT else most) > _MAX_STATES:
            raise _refused(self.pattern, "repeats too much")
        if most is sre.MAXREPEAT:
            loop = self._add(nexts=[then])
            self._states[loop].nexts.append(self._sequence(part, loop))
            then = loop
        else:
            end = then
            for _ in range(most - least):  # each adds a state, of which there are few
                then = self._add(nexts=[end, self._sequence(part, then)])
        for _ in range(least):
            before, then = then, self._sequence(part, then)
            if then == before:
                break  # it takes no character: once is as often as any
        return then

    def _test(self, kind: Any, argument: Any) -> Test:
        if kind is sre.LITERAL:
            return lambda char: ord(char) == argument
        if kind is sre.NOT_LITERAL:
            return lambda char: ord(char) != argument
        if kind is sre.ANY:
            return lambda char: self._dot_is_all or char != "\n"
        if kind is sre.RANGE:
            return lambda char: argument[0] <= ord(char) <= argument[1]
        if kind is sre.CATEGORY:
            return _CATEGORIES[argument]
        is_negated = argument[0][0] is sre.NEGATE
        tests = [self._test(*item) for item in argument[is_negated:]]
        return lambda char: any(test(char) for test in tests) != is_negated

    def _folded(self, test: Test) -> Test:
        return (
            (lambda char: test(char.lower()) or test(char.upper())) if self._ignores_case else test
        )


def _refused(pattern: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"The stop_regex {pattern[:100]!r} {why}.", param="stop_regex")


@lru_cache(maxsize=256)
def compiled(pattern: str) -> StopRegex:
    return StopRegex(pattern)


class RegexFinder:
    """Finds where the first match of one of some patterns ends, in a stream of text."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._regexes = [compiled(pattern) for pattern in patterns]
        self._states = [regex.start for regex in self._regexes]

    def push(self, text: str) -> tuple[str, str | None]:
        """The text up to the end of the match, and the pattern, if one was completed."""
        for at, char in enumerate(text if self._regexes else ""):
            for number, regex in enumerate(self._regexes):
                self._states[number], is_matched = regex.step(self._states[number], char)
                if is_matched:
                    return text[: at + 1], regex.pattern
        return text, None
