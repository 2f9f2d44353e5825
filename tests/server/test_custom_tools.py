"""The input of custom tools, out of what a model wrote."""

import json

import pytest

from tidemill.server.generation.custom_tools import custom_function, custom_input

INPUT = 'Rome "\\ \n é🦆 /\t'


@pytest.mark.parametrize("ascii_only", [True, False])
def test_an_input_that_is_cut_off_anywhere(ascii_only):
    """Each prefix of a call gives a prefix of its input, which only grows, and never a part of the
    wrapper."""
    whole = json.dumps({"input": INPUT}, ensure_ascii=ascii_only)
    made = [custom_input(whole[:num]) for num in range(len(whole) + 1)]
    assert all(INPUT.startswith(text) for text in made)
    assert made == sorted(made, key=len)
    assert made[-1] == INPUT


@pytest.mark.parametrize(
    "text", ["rm -rf x", '["a"]', '{"command": "ls"}', '{"command": "l', '{"input": 5}', "3"]
)
def test_something_else_is_passed_on(text):
    assert custom_input(text) == text


def test_half_a_character_is_replaced():
    assert custom_input('{"input": "a\\ud83eb"}') == "a\ufffdb"


def test_a_regular_expression_is_part_of_the_schema():
    made = custom_function("f", "does it", "regex", "a|b")
    assert made["parameters"]["properties"]["input"]["pattern"] == "^(?:a|b)$"
    assert made["description"] == "does it\nThe input must match this regex grammar:\na|b"
    assert (
        "pattern"
        not in custom_function("f", None, "lark", "start: A")["parameters"]["properties"]["input"]
    )
    assert "description" not in custom_function("f", None)
