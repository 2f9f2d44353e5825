"""Output is parsed the same however it is cut into pieces; the grammar of forced tool calls keeps to the tools' schemas."""

import json
import random
from typing import Literal

import jsonschema
import pytest
from pydantic import BaseModel, ConfigDict, create_model

from tests.helpers import byte_tokenizer
from tidemill.errors import InvalidRequest
from tidemill.frontend.structured import Grammars
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.frontend.tools import CallArguments, CallStart, OutputParser, TextPiece, call_grammar

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
def test_output_that_breaks_off(length):
    """The same however it is cut, and arguments are a prefix of the whole ones."""
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
    for _ in range(500):
        text = "".join(draw.choice(bits) for _ in range(draw.randrange(25)))
        assert read(OutputParser(True), [text]) == read(OutputParser(True), list(text)), text
    assert json.loads(A1)


# ---- forced calls


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Port(Closed):
    name: Literal["Brest", "Hull"]


class Voyage(Closed):
    """Nested, a list of nested, and recursive."""

    origin: Port
    stops: list[Port]
    after: "Voyage | None"


OtherPort = create_model("Port", __base__=Closed, depth=(Literal[3, 5], ...))  # the same name, another definition
Sounding = create_model("Sounding", __base__=Closed, port=(OtherPort, ...))
DRAFT_7 = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "$id": "https://example.org/tide.json",
    "definitions": {"side": {"enum": ["ebb", "flood"]}, "a/b": {"const": {"$ref": "#/definitions/side"}}},
    "type": "object",
    "properties": {
        "const": {"$ref": "#/definitions/side"},
        "own": {"$ref": "https://example.org/tide.json#/definitions/side"},
        "again": {"$ref": "#/properties/const"},
        "escaped": {"$ref": "#/definitions/a~1b"},
    },
    "required": ["const", "own", "again", "escaped"],
    "additionalProperties": False,
}
PORT_SCHEMAS = {"sail": Voyage.model_json_schema(), "sound": Sounding.model_json_schema(), "turn": DRAFT_7}


@pytest.fixture(scope="module")
def grammars(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer(folder)
    tokenizer = Tokenizer.load(folder)
    return Grammars.of("llguidance", tokenizer, tokenizer.vocab_size), tokenizer


def written(grammars, grammar, draw):
    """A random output that keeps to the grammar."""
    (kinds, tokenizer), tokens = grammars, []
    matcher = kinds.matcher(grammar)
    while not matcher.is_over and len(tokens) < 3000:
        words = matcher.mask()
        allowed = [token for token in range(tokenizer.vocab_size) if words[token // 32] >> (token % 32) & 1]
        tokens.append(draw.choice(allowed))
        matcher.take(tokens[-1:])
    assert not matcher.error
    return tokenizer.decode(tokens)


@pytest.mark.parametrize("name", [None, *PORT_SCHEMAS])
@pytest.mark.parametrize("several", [False, True])
def test_forced_calls_keep_to_schemas_with_references(grammars, name, several):
    tools = [{"name": tool, "parameters": schema} for tool, schema in PORT_SCHEMAS.items()]
    before = json.dumps(tools)
    grammar = call_grammar(tools, name, several)
    assert json.dumps(tools) == before  # what a client sent is shown to the model as it is
    draw, seen = random.Random(5), set()
    for _ in range(12):
        calls = json.loads(written(grammars, grammar, draw))
        for call in calls if several else [calls]:
            seen.add(call["name"])
            jsonschema.validate(call["arguments"], PORT_SCHEMAS[call["name"]])
    assert seen == ({name} if name else set(PORT_SCHEMAS))


@pytest.mark.parametrize(("tools", "name", "words"), [([], None, "no tools"), ([{"name": "a"}], "b", "'b'"), ([], "", "''")])
def test_a_call_that_cannot_be_forced(tools, name, words):
    with pytest.raises(InvalidRequest, match=words) as caught:
        call_grammar(tools, name, False)
    assert caught.value.param == "tool_choice"
