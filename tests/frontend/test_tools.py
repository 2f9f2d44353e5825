"""Output is parsed the same however it is cut into pieces; the grammar of forced tool calls keeps
to the tools' schemas."""

import json
import random
import re
import sys
from typing import Literal

import jsonschema
import pytest
from pydantic import BaseModel, ConfigDict, create_model
from tokenizers import Tokenizer as Backend

from tests.helpers import byte_tokenizer
from tidemill.errors import ConfigError, InvalidRequest
from tidemill.frontend.output import TextStream
from tidemill.frontend.parsers import (
    REASONING_PARSERS,
    CallArguments,
    CallStart,
    ModelFormat,
    ReasoningCounter,
    TextPiece,
    call_grammar,
)
from tidemill.frontend.parsers.families import HARMONY_MARKS
from tidemill.frontend.structured import Grammars
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.types.sampling import Grammar, SamplingParams, closed

A1 = '{"city": "Łódź", "deep": {"a": [1, {"b": "}"}], "q": "say \\"hi\\""}}'
SCHEMA = {
    "$defs": {"place": {"type": "object"}},
    "properties": {
        "n": {"type": "integer"},
        "s": {"type": "string"},
        "b": {"type": ["boolean", "null"]},
        "l": {"type": "array"},
        "p": {"$ref": "#/$defs/place"},
        "either": {"anyOf": [{"type": "number"}, {"type": "string"}]},
    },
}
FUNCTIONS = [{"name": "f", "parameters": SCHEMA}, {"name": "g"}]
XML = """<tool_call>
<function=f>
<parameter=n>
7
</parameter>
<parameter=s>
7 <b>
</parameter>
<parameter=b>True</parameter>
<parameter=p>
{"x": [1]}
</parameter>
<parameter=either>1.5</parameter>
<parameter=other>
true
</parameter>
</function>
</tool_call>"""
XML_ARGUMENTS = '{"n": 7, "s": "7 <b>", "b": true, "p": {"x": [1]}, "either": 1.5, "other": "true"}'
DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>\n"
    "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
ANALYSIS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
JSON_CASES = [  # of "json", the parser of templates that say nothing
    (
        "just words, with < and { and [ in them",
        [("words", "just words, with < and { and [ in them")],
    ),
    (f'<tool_call>\n{{"name": "f", "arguments": {A1}}}\n</tool_call>', [("f", A1)]),
    (
        f'Let me look.\n<tool_call>{{"arguments": {A1}, "name": "f"}}</tool_call>',
        [("words", "Let me look.\n"), ("f", A1)],
    ),
    (
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n<tool_call>{"name": "g", "arguments": {"x": 1}}</tool_call>',
        [("f", "{}"), ("g", '{"x": 1}')],
    ),
    (
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]',
        [("f", '{"x": 1}'), ("g", "{}")],
    ),
    ('<|python_tag|>{"name": "f", "parameters": {"x": [1, 2]}}', [("f", '{"x": [1, 2]}')]),
    (
        '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}',
        [("f", '{"x": 1}'), ("g", "{}")],
    ),
    ('  [{"name": "f", "arguments": {"x": 1}}]', [("f", '{"x": 1}')]),
    ('{"name": "Ada", "age": 36}', [("words", '{"name": "Ada", "age": 36}')]),
    (
        '{"name": "Alice", "parameters": {"x": 1}}',
        [("words", '{"name": "Alice", "parameters": {"x": 1}}')],
    ),
    (
        '{"parameters": {"x": 1}, "name": "Alice"} x',
        [("words", '{"parameters": {"x": 1}, "name": "Alice"} x')],
    ),
    ('{"type": "function", "name": "f", "arguments": "x"}', [("f", '"x"')]),
    ('{"name": "f"}', [("words", '{"name": "f"}')]),
    (
        '<tool_call>{"name": "Alice", "arguments": {}}</tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>',
        [("words", '<tool_call>{"name": "Alice", "arguments": {}}</tool_call>'), ("f", "{}")],
    ),
    (
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "Alice", "arguments": {}}</tool_call>',
        [("f", "{}"), ("words", '\n<tool_call>{"name": "Alice", "arguments": {}}</tool_call>')],
    ),
    (
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n\nDone.',
        [("f", "{}"), ("words", "Done.")],
    ),
    ("[1, 2] are numbers", [("words", "[1, 2] are numbers")]),
    (
        "<think>\nhm <tool_call>\n</think>\n\nso",
        [("thought", "\nhm <tool_call>\n"), ("words", "so")],
    ),
    ("<think>x</think><think>y</think>", [("thought", "x"), ("words", "<think>y</think>")]),
    (
        '<think>x</think><tool_call>{"name": "f", "arguments": {}}</tool_call>',
        [("thought", "x"), ("f", "{}")],
    ),
    ("<tool_call>\nno json", [("words", "<tool_call>\nno json")]),
    ("<tool_call><tool_call>", [("words", "<tool_call><tool_call>")]),
    ("<tool_ca", [("words", "<tool_ca")]),
    (" " * 5000 + "x", [("words", " " * 5000 + "x")]),
    ("", []),
]
CASES = [("json", text, expected) for text, expected in JSON_CASES] + [
    ("none", '{"name": "f", "arguments": {"x": 1}}', [("words", '{"name": "f", "arguments": {"x": 1}}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', [("f", '{"x": 1}')]),
    ("hermes", '[TOOL_CALLS]f[ARGS]{"x": 1}', [("words", '[TOOL_CALLS]f[ARGS]{"x": 1}')]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"x": "}"}[TOOL_CALLS]g[ARGS]{}', [("f", '{"x": "}"}'), ("g", "{}")]),
    ("mistral", 'So:[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"x": 1}', [("words", "So:"), ("f", '{"x": 1}')]),
    ("mistral", '[TOOL_CALLS]f{"x": 1}', [("f", '{"x": 1}')]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]', [("f", '{"x": 1}')]),
    ("mistral", '[TOOL_CALLS]Alice[ARGS]{"x": 1}', [("words", '[TOOL_CALLS]Alice[ARGS]{"x": 1}')]),
    ("mistral", "[TOOL_CALLS]f[WHAT]{}", [("words", "[TOOL_CALLS]f[WHAT]{}")]),
    ("granite", '<|tool_call|> [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]', [
        ("f", '{"x": 1}'), ("g", "{}"),
    ]),
    ("granite", "<|tool_call|>none", [("words", "<|tool_call|>none")]),
    ("internlm", 'So: <|action_start|><|plugin|>\n{"name": "f", "parameters": {"x": 1}}<|action_end|>', [
        ("words", "So: "), ("f", '{"x": 1}'),
    ]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', [("f", "{}")]),
    ("llama3_json", "<|python_tag|>print(1)", [("words", "<|python_tag|>print(1)")]),
    ("qwen3_coder", XML, [("f", XML_ARGUMENTS)]),
    ("qwen3_xml", f"Let me.\n{XML}\n{XML}", [("words", "Let me.\n"), ("f", XML_ARGUMENTS), ("f", XML_ARGUMENTS)]),
    ("qwen3_coder", "<function=g></function> so", [("g", "{}"), ("words", "so")]),
    ("qwen3_coder", "<function=f><parameter=n>many</function>", [("f", '{"n": "many"}')]),
    ("qwen3_coder", "<tool_call><function=Alice></function></tool_call>", [
        ("words", "<tool_call><function=Alice></function></tool_call>"),
    ]),
    ("qwen3_coder", "<tool_call><func<tool_call><function=g></function>", [("words", "<tool_call><func"), ("g", "{}")]),
    ("pythonic", """[f(s="a)'", l=[1, {'k': None}], b=false), g()]""", [
        ("f", """{"s": "a)'", "l": [1, {"k": null}], "b": false}"""), ("g", "{}"),
    ]),
    ("pythonic", "<|python_start|>[f(-3, 'x')]<|python_end|>", [("f", '{"n": -3, "s": "x"}')]),
    ("lfm2", "<|tool_call_start|>[f(n=-3)]<|tool_call_end|>So.", [("f", '{"n": -3}'), ("words", "So.")]),
    ("pythonic", "[f(n=1), Alice(n=2)]", [("f", '{"n": 1}'), ("words", "Alice(n=2)]")]),
    ("pythonic", "[f(n=__import__('os'))]", [("words", "[f(n=__import__('os'))]")]),
    ("pythonic", "[f(n=1, n=2)] [f(**{})]", [("words", "[f(n=1, n=2)] [f(**{})]")]),
    ("pythonic", "[f(" + "[" * 100 + "]" * 100 + ")]", [("words", "[f(" + "[" * 100 + "]" * 100 + ")]")]),
    ("pythonic", "[1, 2] are numbers", [("words", "[1, 2] are numbers")]),
    ("deepseek", DEEPSEEK.format('f<｜tool▁sep｜>{"x": 1}', "g<｜tool▁sep｜>{}"), [("f", '{"x": 1}'), ("g", "{}")]),
    (
        "deepseek",
        DEEPSEEK.format(*(f"function<｜tool▁sep｜>{name}\n```json\n{{}}\n```" for name in "fg")),
        [("f", "{}"), ("g", "{}")],
    ),
    ("deepseek", "<｜tool▁call▁begin｜>Alice<｜tool▁sep｜>{}", [("words", "<｜tool▁call▁begin｜>Alice<｜tool▁sep｜>{}")]),
    ("harmony", f"{ANALYSIS}<|channel|>final<|message|>so", [("thought", "hm"), ("words", "so")]),
    (
        "harmony",
        f'{ANALYSIS}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"x": 1}}<|call|>',
        [("thought", "hm"), ("f", '{"x": 1}')],
    ),
    (
        "harmony",
        "<|channel|>commentary<|message|>First.<|end|><|start|>assistant to=functions.g<|channel|>commentary json<|message|>{}",
        [("words", "First."), ("g", "{}")],
    ),
    ("harmony", "<|channel|>commentary to=functions.Alice<|message|>{}", [("words", "{}")]),
    ("harmony", "words <|and|> more", [("words", "words <|and|> more")]),
    ("harmony", "<|channel|>" + "x" * 2000 + "<|message|>y", [("words", "<|channel|>" + "x" * 2000 + "<|message|>y")]),
    ("harmony", "<|channel|>ana", []),
]  # fmt: skip


def parser(name, prompt_end="", reasoning="auto", **how):
    template = "<|channel|>analysis<|message|>" if name == "harmony" else ""
    return (
        ModelFormat.of(template, name, reasoning)
        .output_format(prompt_end, FUNCTIONS, **how)
        .parser()
    )


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


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_whole_and_in_any_pieces(name, text, expected):
    assert read(parser(name), [text]) == expected
    assert read(parser(name), list(text)) == expected
    for cut in range(len(text)) if len(text) < 1000 else ():
        assert read(parser(name), [text[:cut], text[cut:]]) == expected
    draw = random.Random(0)
    for _ in range(50):
        cuts = sorted(draw.randrange(len(text) + 1) for _ in range(draw.randrange(6)))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(parser(name), parts) == expected


@pytest.mark.parametrize(
    ("name", "text", "expected"), [case for case in CASES if case[2] and case[2][-1][0] == "f"]
)
def test_output_that_breaks_off(name, text, expected):
    """The same however it is cut, arguments are a prefix of the whole ones, and nothing is lost
    that is not part of a call."""
    for length in range(0, len(text), 1 if len(text) < 200 else 3):
        whole = read(parser(name), [text[:length]])
        assert read(parser(name), list(text[:length])) == whole
        calls = [said for said in whole if said[0] in "fg"]
        for (called, arguments), (wanted, all_arguments) in zip(
            calls, [one for one in expected if one[0] in "fg"], strict=False
        ):
            assert called == wanted
            assert all_arguments.startswith(arguments)
        if not calls and name != "harmony":
            assert "".join(part for kind, part in whole if kind == "words") in text


@pytest.mark.parametrize(
    "name", ["json", "hermes", "mistral", "qwen3_coder", "pythonic", "deepseek", "harmony", "none"]
)
def test_noise_never_breaks_it(name):
    draw = random.Random(1)
    bits = [*'{}":,[]\\ xf()=\'>', "name", "arguments", "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]",
            "[ARGS]", "<function=", "<parameter=", "</parameter>", "</function>", *DEEPSEEK.split("{}"), "<｜tool▁sep｜>",
            *HARMONY_MARKS, "analysis", "to=functions.f", '"name": "f", "arguments"']  # fmt: skip
    for _ in range(150):
        text = "".join(draw.choice(bits) for _ in range(draw.randrange(25)))
        assert read(parser(name), [text]) == read(parser(name), list(text)), text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("json", "<tool_call>" * 20_000),
        ("json", '{"name": "f", "arguments": "' + "x" * 400_000),
        ("json", '{"zzz": "' + "x" * 400_000),
        ("json", "{" * 200_000),
        ("qwen3_coder", "<tool_call><function=f>" + "<parameter=a>" * 50_000),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>" + "x" * 400_000),
        ("pythonic", "[f(s='" + "x" * 400_000),
        ("pythonic", "[f(n=" + "-" * 60_000 + "1)]"),
        ("harmony", "<|channel|>" * 30_000),
        ("deepseek", "<｜tool▁call▁begin｜>" * 20_000),
    ],
)
def test_huge_output_takes_linear_time(name, text):
    """Work is counted in lines of Python, not in seconds: twice the text, about twice the work."""

    def work(text):
        num = 0

        def count(frame, event, argument):
            nonlocal num
            num += event == "line"
            return count

        made = parser(name)
        sys.settrace(count)
        try:
            for i in range(0, len(text), 50):
                made.push(text[i : i + 50])
            made.finish()
        finally:
            sys.settrace(None)
        return num

    part = text[: len(text) // 20]
    assert work(part[: len(part) // 2]) * 3 + 5000 > work(part)
    made = parser(name)
    for i in range(0, len(text), 50):
        made.push(text[i : i + 50])
    assert len(made._held) < 1000
    made.finish()


# ---- which parser, and reasoning

TEMPLATES = [
    ('{"name": ..}</tool_call> <tool_call>', "hermes", None),
    ("<tool_call>\n<function=example>", "qwen3_coder", None),
    ("[TOOL_CALLS] + [ARGS] [THINK]", "mistral", "mistral"),
    ("<|tool_call|> <tool_call>", "granite", None),
    ("<|action_start|><|plugin|>", "internlm", None),
    ("<|python_tag|>", "llama3_json", None),
    ("<|python_start|> <|python_tag|>", "pythonic", None),
    ("<|tool_call_start|>", "pythonic", None),
    ("'<｜tool▁calls▁begin｜>' + '<think>\\n'", "deepseek", "think"),
    ("<|start|>assistant<|channel|>analysis<|message|>", "harmony", "harmony"),
    ("{{ content.split('</think>')[-1] }}", "json", "think"),
    ("plain", "json", None),
]


@pytest.mark.parametrize(("template", "tools", "reasoning"), TEMPLATES)
def test_parsers_are_chosen_from_the_template(template, tools, reasoning):
    made = ModelFormat.of(template)
    assert made.family.name == tools
    assert (made.markers.name if made.is_expected else None) == reasoning


def test_parsers_are_chosen_by_name():
    made = ModelFormat.of("<tool_call> <think>", "llama4_pythonic", "none")
    assert (made.family.name, made.markers) == ("pythonic", None)
    assert ModelFormat.of("", "none").family is None
    assert ModelFormat.of("", "auto", "deepseek_r1").markers.starts_open
    with pytest.raises(ConfigError, match="tool-parser 'other'") as caught:
        ModelFormat.of("", "other")
    assert "hermes" in caught.value.fix


@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
def test_reasoning_that_a_request_turns_off_is_not_waited_for(switch):
    asked = SamplingParams(grammar=Grammar(kind="json_schema", text="{}"))
    for name in ("qwen3", "deepseek_r1"):  # by name, with a template that knows no switch
        made = ModelFormat.of("plain", "auto", name)
        assert (
            made.output_format("assistant\n", variables={switch: True}).gated(asked).reasoning
            is not None
        )
        off = made.output_format("assistant\n", variables={switch: False})
        assert (off.gated(asked), off.is_open, off.takes_budget) == (asked, False, False)
        opened = made.output_format("<think>\n", variables={switch: False})  # the template opens it
        assert opened.gated(asked).reasoning is not None


@pytest.mark.parametrize(
    ("reasoning", "prompt_end", "how", "text", "expected"),
    [
        (
            "auto",
            "<|assistant|><think>\n",
            {},
            "hm</think>\n\nso",
            [("thought", "hm"), ("words", "so")],
        ),
        (
            "auto",
            "<|assistant|><think>\n",
            {},
            "<think>\nhm</think>so",
            [("thought", "\nhm"), ("words", "so")],
        ),
        ("auto", "<|assistant|><think>\n", {}, "never ends", [("thought", "never ends")]),
        ("auto", "<think>\n\n</think>\n\n", {}, "<think>so", [("words", "<think>so")]),
        (
            "auto",
            "",
            {"continued": "<think>I"},
            " see</think>so",
            [("thought", " see"), ("words", "so")],
        ),
        ("auto", "", {"continued": "Well,"}, "<think>", [("words", "<think>")]),
        ("none", "<think>", {}, "hm</think>so", [("words", "hm</think>so")]),
        ("deepseek_r1", "", {}, "hm</think>so", [("thought", "hm"), ("words", "so")]),
        ("qwen3", "", {}, "hm</think>so", [("words", "hm</think>so")]),
        ("mistral", "", {}, "[THINK]hm[/THINK]so", [("thought", "hm"), ("words", "so")]),
        (
            "granite",
            "",
            {},
            "Here is my thought process: hm Here is my response:so",
            [("thought", " hm "), ("words", "so")],
        ),
        (
            "auto",
            "<think>",
            {"only_calls": True},
            'hm</think>{"name": "f", "arguments": {}}',
            [("thought", "hm"), ("f", "{}")],
        ),
    ],
)
def test_reasoning_that_the_prompt_opens(reasoning, prompt_end, how, text, expected):
    for parts in ([text], list(text)):
        assert read(parser("pythonic", prompt_end, reasoning, **how), parts) == expected


def test_ids_are_of_the_length_that_templates_want():
    for name, pattern in (("mistral", "[A-Za-z0-9]{9}"), ("hermes", "call_[0-9a-f]{24}")):
        ids = {
            piece.call_id
            for _ in range(20)
            for piece in parser(name).push('[{"name": "g", "arguments": {}}]')[:1]
        }
        assert len(ids) == 20
        assert all(re.fullmatch(pattern, one) for one in ids)


@pytest.mark.parametrize(
    ("reasoning", "is_open", "tokens", "counted"),
    [
        ("think", False, ["<think>", "a", "b", "</think>", "so"], 2),
        ("think", False, ["\n", "<", "think>", "a", "b", "</", "thi", "nk", ">", "so"], 2),
        ("think", False, ["<think>a", "b</", "think>so", "x"], 2),
        ("think", True, ["a", "</thi", "s", "</think>", "so"], 3),
        ("think", True, ["</think>"], 0),
        ("think", True, ["a", "", "</think>"], 2),
        ("think", False, ["so", "<think>", "a"], 0),
        (
            "harmony",
            False,
            [
                "<|channel|>",
                "analysis",
                "<|message|>",
                "a",
                "b",
                "<|end|>",
                "<|start|>",
                "assistant",
            ]
            * 2,
            4,
        ),
    ],
)
def test_tokens_of_reasoning_are_counted(reasoning, is_open, tokens, counted):
    counter = ReasoningCounter(REASONING_PARSERS[reasoning], is_open)
    for token in tokens:
        counter.push(token.encode())
    assert counter.num_tokens == counted


def test_special_tokens_that_a_parser_needs_are_shown(tmp_path):
    """Mistral's marks are special tokens, which are skipped in text."""
    byte_tokenizer(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    ids = tokenizer.encode("[THINK]hm[/THINK][TOOL_CALLS]f[ARGS]{}<|end|>", add_special=False)
    output_format = ModelFormat.of("[TOOL_CALLS] [THINK]").output_format("", FUNCTIONS)
    stream, made = TextStream(tokenizer, SamplingParams(), output_format), output_format.parser()
    deltas = [stream.push([token], "length" if token is ids[-1] else None) for token in ids]
    assert read(made, [delta.text for delta in deltas]) == [("thought", "hm"), ("f", "{}")]
    assert sum(delta.num_reasoning for delta in deltas) == 2
    assert TextStream(tokenizer, SamplingParams()).push(ids, "length").text == "hmf{}"


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


# the same name, another definition
OtherPort = create_model("Port", __base__=Closed, depth=(Literal[3, 5], ...))
Sounding = create_model("Sounding", __base__=Closed, port=(OtherPort, ...))
DRAFT_7 = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "$id": "https://example.org/tide.json",
    "definitions": {
        "side": {"enum": ["ebb", "flood"]},
        "a/b": {"const": {"$ref": "#/definitions/side"}},
    },
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
# as litellm asks pydantic for it
ROOTED = Sounding.model_json_schema(ref_template="/$defs/{model}")
PORT_SCHEMAS = {
    "sail": Voyage.model_json_schema(),
    "sound": Sounding.model_json_schema(),
    "turn": DRAFT_7,
}


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
        allowed = [
            token for token in range(tokenizer.vocab_size) if words[token // 32] >> (token % 32) & 1
        ]
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


def test_references_without_a_number_sign(grammars):
    grammar = call_grammar([{"name": "sound", "parameters": ROOTED}], "sound", False)
    jsonschema.validate(
        json.loads(written(grammars, grammar, random.Random(5)))["arguments"], PORT_SCHEMAS["sound"]
    )


@pytest.mark.parametrize(
    ("tools", "name", "words"),
    [([], None, "no tools"), ([{"name": "a"}], "b", "'b'"), ([], "", "''")],
)
def test_a_call_that_cannot_be_forced(tools, name, words):
    with pytest.raises(InvalidRequest, match=words) as caught:
        call_grammar(tools, name, False)
    assert caught.value.param == "tool_choice"


# ---- objects of forced calls are closed

PLACE = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SHUT = PLACE | {"additionalProperties": False}
DAY = {"properties": {"day": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (PLACE, SHUT),
        ({"type": "object", "properties": {}}, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({"type": "object"}, {"type": "object"}),  # of names that are not known
        (PLACE | {"additionalProperties": True}, PLACE | {"additionalProperties": True}),
        ({"properties": {"at": {"type": "array", "items": PLACE}}},
         {"properties": {"at": {"type": "array", "items": SHUT}}, "additionalProperties": False}),
        ({"anyOf": [PLACE, {"type": "null"}]}, {"anyOf": [SHUT, {"type": "null"}]}),
        ({"allOf": [{"$ref": "#/$defs/P"}], "$defs": {"P": PLACE}}, {"allOf": [{"$ref": "#/$defs/P"}], "$defs": {"P": SHUT}}),
        *((same, same) for same in (  # closing one part would forbid what another has
            {"allOf": [PLACE, DAY]},
            {"allOf": [{"$ref": "#/$defs/P"}, DAY], "$defs": {"P": PLACE}},
            {"$ref": "#/$defs/P", "properties": {"day": {}}, "$defs": {"P": PLACE}},
            {"properties": {"day": {}}, "anyOf": [PLACE, {"required": ["day"]}]},
            {"allOf": [{"properties": {"at": PLACE}}, {"properties": {"at": DAY}}]},
            {"not": PLACE},
            {"anyOf": [{"allOf": [PLACE, DAY]}]},
        )),
    ],
)  # fmt: skip
def test_objects_are_closed_where_nothing_else_says_what_they_have(schema, expected):
    given = json.loads(json.dumps(schema))
    assert closed(given) == expected


def test_a_definition_that_is_used_in_two_ways_stays_open():
    given = {
        "properties": {"a": {"$ref": "#/$defs/P"}, "b": {"allOf": [{"$ref": "#/$defs/P"}, DAY]}},
        "$defs": {"P": PLACE},
    }
    assert closed(json.loads(json.dumps(given)))["$defs"]["P"] == PLACE


def test_a_definition_that_holds_itself_is_closed():
    tree = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#/$defs/T"}, {"type": "null"}]}},
    }
    made = closed({"$ref": "#/$defs/T", "$defs": {"T": tree}})
    assert made["$defs"]["T"]["additionalProperties"] is False


def test_forced_calls_invent_no_arguments(grammars):
    grammar = call_grammar([{"name": "weather", "parameters": PLACE}], "weather", False)
    draw = random.Random(7)
    for _ in range(6):
        assert json.loads(written(grammars, grammar, draw))["arguments"].keys() == {"city"}
    # what a client sent is shown to the model as it is
    assert PLACE.keys() == {"type", "properties", "required"}
