"""Stop strings: no text is emitted that a stop string later removes, and none is lost. Decoding: in
pieces as at once."""

import random
import sys

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.helpers import byte_tokenizer
from tidemill.frontend.output import StopFinder, TextStream
from tidemill.frontend.tokenizer import StreamDecoder, Tokenizer
from tidemill.types.sampling import SamplingParams

letters = st.text(alphabet="abc", max_size=12)


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(letters, max_size=8),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_any_cutting_gives_the_text_up_to_the_first_stop(pieces, stops):
    text = "".join(pieces)
    ends = [(text.find(stop), stop) for stop in stops if stop in text]
    finder, emitted, found = StopFinder(stops), "", None
    for piece in pieces:
        safe, found = finder.push(piece)
        emitted += safe
        if found:
            break
        assert text.startswith(emitted)
    if ends:
        # The stop that is complete first; among those, the one that starts first.
        complete = min(text.find(stop) + len(stop) for _, stop in ends)
        assert found is not None
        assert emitted in {text[:at] for at, _ in ends}
        assert len(emitted) <= complete
        assert not any(stop in emitted for stop in stops)
    else:
        assert found is None
        assert emitted + finder.finish() == text


def first_stop(held, text, stops):
    """By looking for each string in all of the text: what is emitted, what is held, and the stop."""
    text = held + text
    if found := [(text.find(stop), -len(stop), stop) for stop in stops if stop in text]:
        at, _, stop = min(found)
        return text[:at], "", stop
    num_held = max(num for stop in stops for num in range(len(stop)) if text.endswith(stop[:num]))
    return text[: len(text) - num_held], text[len(text) - num_held :], None


@settings(max_examples=400, deadline=None)
@given(
    pieces=st.lists(letters, max_size=8),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=5),
)
def test_many_stops_at_once_are_found_as_one_by_one(pieces, stops):
    finder, held = StopFinder(stops), ""
    for piece in pieces:
        safe, held, stop = first_stop(held, piece, stops)
        assert finder.push(piece) == (safe, stop)
    assert finder.finish() == held


def test_a_token_costs_as_much_with_many_long_stops_as_with_one():
    """Counted in calls of functions, not in seconds."""
    num_calls = 0

    def count(frame, event, what):
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    finder = StopFinder(["a" * 1000 + char * 24 for char in "bcdefghijklmnopq"])
    sys.setprofile(count)
    try:
        for _ in range(2000):
            finder.push("aaaa")
    finally:
        sys.setprofile(None)
    assert num_calls < 10 * 4 * 2000


def test_text_that_may_become_a_stop_is_held():
    finder = StopFinder(["END"])
    assert finder.push("xE") == ("x", None)
    assert finder.push("N") == ("", None)
    assert finder.push("d") == ("ENd", None)
    assert finder.push("EN") == ("", None)
    assert finder.push("D tail") == ("", "END")


def stream(tmp_path, text, **params):
    byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    return TextStream(tokenizer, SamplingParams(**params)), tokenizer.encode(text)


def test_tokens_after_a_stop_do_not_count(tmp_path):
    out, tokens = stream(tmp_path, "one. two", stop=".")
    delta = out.push(tokens, None)
    assert (delta.text, delta.num_tokens, delta.finish_reason, delta.stop) == (
        "one",
        4,
        "stop",
        ".",
    )


def test_the_stop_may_be_kept(tmp_path):
    out, tokens = stream(tmp_path, "one. two", stop=".", include_stop_str_in_output=True)
    assert out.push(tokens, None).text == "one."


def test_stops_wait_for_min_tokens(tmp_path):
    out, tokens = stream(tmp_path, "a.b.c", stop=".", min_tokens=3)
    assert out.push(tokens, None).text == "a.b"


def test_an_ending_token_gives_no_text_and_releases_what_was_held(tmp_path):
    out, tokens = stream(tmp_path, "abE", stop="END")
    assert out.push(tokens, None).text == "ab"
    delta = out.push([1], "stop")
    assert (delta.text, delta.finish_reason, delta.stop) == ("E", "stop", 1)


def test_what_was_held_for_a_stop_string_is_searched_for_patterns(tmp_path):
    out, tokens = stream(tmp_path, "xab", stop="abc", stop_regex="a")
    delta = out.push([*tokens, 1], "stop")
    assert (delta.text, delta.num_tokens, delta.finish_reason, delta.stop) == ("xa", 3, "stop", "a")


def test_length_releases_what_was_held(tmp_path):
    out, tokens = stream(tmp_path, "abEN", stop="END")
    assert out.push(tokens[:2], None).text == "ab"
    assert out.push(tokens[2:], "length").text == "EN"


@pytest.mark.parametrize("skip_special", [False, True])
def test_decoding_at_once_equals_decoding_token_by_token(tmp_path, skip_special):
    byte_tokenizer(tmp_path)
    tokenizer, draw = Tokenizer.load(tmp_path), random.Random(3)
    for _ in range(200):
        ids = [
            draw.randrange(tokenizer.vocab_size) for _ in range(draw.randrange(40))
        ]  # bytes at random: mostly broken characters
        ids += tokenizer.encode("Flüt 潮 🌊"[: draw.randrange(9)])
        decoder = StreamDecoder(tokenizer, skip_special)
        assert (
            tokenizer.decode(ids, skip_special=skip_special)
            == "".join(map(decoder.push, ids)) + decoder.finish()
        )
