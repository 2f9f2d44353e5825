"""However an answer is cut into pieces, it is read the same."""

import json
import random

import pytest

from tidemill.frontend.tools import OutputParser, CallArguments, CallStart, TextPiece

A1 = '{"city": "Łódź", "deep": {"a": [1, {"b": "}"}], "q": "say \\"hi\\""}}'
CASES = [
    ("just words, with < and { and [ in them", True, [("words", "just words, with < and { and [ in them")]),
    (f'<tool_call>\n{{"name": "f", "arguments": {A1}}}\n</tool_call>', True, [("f", A1)]),
    (f'Let me look.\n<tool_call>{{"arguments": {A1}, "name": "f"}}</tool_call>', True, [("words", "Let me look.\n"), ("f", A1)]),
    (
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>{"name": "g", "arguments": {"x": 1}}</tool_call>',
        True,
        [("f", "{}"), ("g", '{"x": 1}')],
    ),
    (
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]',
        True,
        [("f", '{"x": 1}'), ("g", "{}")],
    ),
    ('<|python_tag|>{"name": "f", "parameters": {"x": [1, 2]}}', True, [("f", '{"x": [1, 2]}')]),
    ('{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}', True, [("f", '{"x": 1}'), ("g", "{}")]),
    ('  [{"name": "f", "arguments": {"x": 1}}]', True, [("f", '{"x": 1}')]),
    ('{"name": "Ada", "age": 36}', True, [("words", '{"name": "Ada", "age": 36}')]),
    ('{"name": "f", "arguments": {"x": 1}}', False, [("words", '{"name": "f", "arguments": {"x": 1}}')]),
    ("[1, 2] are numbers", True, [("words", "[1, 2] are numbers")]),
    ("<think>\nhm <tool_call>\n</think>\n\nso", True, [("thought", "\nhm <tool_call>\n"), ("words", "so")]),
    ('<think>x</think><tool_call>{"name": "f", "arguments": {}}</tool_call>', True, [("thought", "x"), ("f", "{}")]),
    ("<tool_call>\nno json", True, [("words", "<tool_call>\nno json")]),
    ("<tool_ca", True, [("words", "<tool_ca")]),
    ("", True, []),
]


def read(parser, parts):
    """What was said, in order; a call as its name and the arguments in one."""
    said = []
    for pieces in [*(parser.push(part) for part in parts), parser.finish()]:
        for piece in pieces:
            if isinstance(piece, CallStart):
                assert piece.index == sum(1 for kind, _ in said if kind not in ("words", "thought"))
                said.append((piece.name, ""))
            elif isinstance(piece, CallArguments):
                name, text = said.pop()
                said.append((name, text + piece.text))
            else:
                assert isinstance(piece, TextPiece)
                kind = "thought" if piece.is_reasoning else "words"
                if said and said[-1][0] == kind:
                    said[-1] = (kind, said[-1][1] + piece.text)
                else:
                    said.append((kind, piece.text))
    return said


@pytest.mark.parametrize(("text", "tools", "expected"), CASES)
def test_whole_and_in_any_pieces(text, tools, expected):
    assert read(OutputParser(tools), [text]) == expected
    assert read(OutputParser(tools), list(text)) == expected
    draw = random.Random(0)
    for _ in range(50):
        cuts = sorted(draw.randrange(len(text) + 1) for _ in range(draw.randrange(6)))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(OutputParser(tools), parts) == expected


@pytest.mark.parametrize("length", range(len(CASES[1][0])))
def test_an_answer_that_breaks_off(length):
    """The same however it is cut, and arguments are a beginning of the whole ones."""
    text = CASES[1][0][:length]
    whole = read(OutputParser(True), [text])
    assert read(OutputParser(True), list(text)) == whole
    if whole and whole[-1][0] == "f":
        assert A1.startswith(whole[-1][1])
    else:
        assert "".join(text for _, text in whole) == text


def test_noise_never_breaks_it():
    draw = random.Random(1)
    bits = [
        "<tool_call>",
        "</tool_call>",
        "{",
        "}",
        '"',
        "name",
        "arguments",
        ":",
        ",",
        "[",
        "]",
        "\\",
        " ",
        "<think>",
        "</think>",
        "x",
    ]
    for _ in range(2000):
        text = "".join(draw.choice(bits) for _ in range(draw.randrange(25)))
        assert read(OutputParser(True), [text]) == read(OutputParser(True), list(text)), text
    assert json.loads(A1)
