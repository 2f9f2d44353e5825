"""Patterns that end an output: where Python's own search finds the first match in the text so far,
but in linear time."""

import random
import re
import sys

import pytest

from tidemill.errors import InvalidRequest
from tidemill.frontend.stop_regex import RegexFinder, StopRegex

PATTERNS = [
    r"and|or", r"[.!?]\s*$", r"a{2,3}b", r"^ab", r"(ab)+c", r"[^a]b?c", r"\d+x", r"(?i)Ab", r"a.c", r"(?s)a.c", r"a*?b",
    r"(a|b)*c$", r"x{3}", r"\w\W", r"(?P<n>a)b", r"[a-c\d]\D",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_first_match_ends_the_text(pattern):
    draw = random.Random(pattern)
    for _ in range(200):
        text = "".join(draw.choices("abcAB xX1.\n!é", k=draw.randint(1, 14)))
        ends = [end for end in range(1, len(text) + 1) if re.search(pattern, text[:end])]
        expected = (text[: ends[0]], pattern) if ends else (text, None)
        finder, made, found, at = RegexFinder([pattern]), "", None, 0
        while at < len(text) and found is None:
            num = draw.randint(1, 4)
            piece, found = finder.push(text[at : at + num])
            made, at = made + piece, at + num
        assert (made, found) == expected, text


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        r"(a)\1",
        "(?=a)b",
        "(?<!a)b",
        "a*",
        "$",
        "a{1,9999}",
        "(){4000000000}",
        "(a{200}){200}",
        "(?m)^a",
        r"\bword",
        "(?i:a)b",
    ],
)
def test_what_cannot_be_matched_in_linear_time_is_refused(pattern):
    with pytest.raises(InvalidRequest, match="stop_regex"):
        RegexFinder([pattern])


def test_a_pattern_that_makes_others_backtrack_ends():
    """With backtracking it would take longer than the universe has."""
    assert RegexFinder([r"(a|a)*b", r"([a-z]+)*1"]).push("a" * 50_000)[1] is None


def test_what_takes_no_character_is_not_repeated():
    """Else counts within counts would multiply."""
    assert RegexFinder(["a(?:(?:(?:(?:){256}){256}){256}){256}b"]).push("xab")[1] is not None


def test_a_pattern_with_many_sets_of_states_takes_few_steps_a_character():
    """Each character of a random text leads to other states. Counted in tests of characters and in
    followed states."""
    regex, draw, num_calls = StopRegex("[ab]*a[ab]{200}c"), random.Random(1), 0

    def count(frame, event, what):
        nonlocal num_calls
        num_calls += event == "call"

    states = regex.start
    sys.setprofile(count)
    try:
        for char in draw.choices("ab", k=3000):
            states, _ = regex.step(states, char)
    finally:
        sys.setprofile(None)
    assert num_calls < 10 * 3000
