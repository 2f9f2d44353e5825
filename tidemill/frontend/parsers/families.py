"""The ways in which models write tool calls: a line in a table each, and how to tell from a chat
template which it is."""

from __future__ import annotations

import secrets
import string
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from tidemill.frontend.parsers.json_calls import DeepSeekReader, MistralReader, ObjectReader
from tidemill.frontend.parsers.pieces import CallReader, Functions
from tidemill.frontend.parsers.pythonic import PythonReader
from tidemill.frontend.parsers.xml_calls import BEGIN as FUNCTION
from tidemill.frontend.parsers.xml_calls import XMLReader

_ALPHANUMERIC = string.ascii_letters + string.digits
_MISTRAL_ID_CHARS = 9  # its templates refuse ids of other lengths

Begin = Callable[[str, Functions], CallReader | None]


@dataclass(frozen=True, slots=True)
class Family:
    """`begin` makes the reader of a call from its first character, or None if no call begins with
    it."""

    name: str
    begin: Begin
    openings: tuple[str, ...] = ()  # before one or more calls
    starts: tuple[str, ...] = ()  # of a call itself, which may come without an opening
    closings: tuple[str, ...] = ()  # after a call or calls
    bare: str = ""  # characters that open a list or a call as the first of an output
    hints: tuple[str, ...] = ()  # in the chat template, one of them
    aliases: tuple[str, ...] = ()  # other engines' names
    more_marks: tuple[str, ...] = ()  # within calls

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that the parser must see, even if they are special tokens."""
        return (*self.openings, *self.starts, *self.closings, *self.more_marks)

    def new_id(self) -> str:
        if self.name == "mistral":
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(_MISTRAL_ID_CHARS))
        return f"call_{uuid.uuid4().hex[:24]}"


def _object(first: str, functions: Functions) -> CallReader | None:
    return ObjectReader(functions) if first == "{" else None


def _object_or_xml(first: str, functions: Functions) -> CallReader | None:
    return XMLReader(functions) if first == FUNCTION[0] else _object(first, functions)


def _object_or_name(first: str, functions: Functions) -> CallReader | None:
    return (
        MistralReader(functions) if first.isalnum() or first == "_" else _object(first, functions)
    )


def _deepseek(first: str, functions: Functions) -> CallReader | None:
    return DeepSeekReader(functions) if first == DeepSeekReader.BEGIN[0] else None


def _python(first: str, functions: Functions) -> CallReader | None:
    return PythonReader(functions) if first.isalpha() or first == "_" else None


_TOOL_CALL, _TOOL_CALLS, _PYTHON_TAG = "<tool_call>", "[TOOL_CALLS]", "<|python_tag|>"
HARMONY_MARKS = (
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|return|>",
    "<|call|>",
)

JSON = Family(
    "json",
    _object,
    (_TOOL_CALL, _TOOL_CALLS, _PYTHON_TAG),
    closings=("</tool_call>", "<|eom_id|>"),
    bare="{[",
    aliases=("plain",),
)
HARMONY = Family(
    "harmony",
    _object,
    bare="{[",
    hints=("<|channel|>",),
    aliases=("openai", "gpt_oss", "gpt-oss"),
    more_marks=HARMONY_MARKS,
)
FAMILIES = (  # in the order in which templates are tried
    HARMONY,
    Family(
        "qwen3_coder",
        _object_or_xml,
        (_TOOL_CALL,),
        (FUNCTION,),
        ("</tool_call>",),
        "{[",
        (FUNCTION,),
        ("qwen3_xml", "qwen_coder"),
    ),
    Family(
        "deepseek",
        _deepseek,
        ("<｜tool▁calls▁begin｜>",),
        (DeepSeekReader.BEGIN,),
        ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "```"),
        hints=("<｜tool▁calls▁begin｜>", DeepSeekReader.BEGIN),
        aliases=("deepseek_v3", "deepseek_v31", "deepseekv3", "deepseekv31"),
        more_marks=(DeepSeekReader.SEPARATOR,),
    ),
    Family(
        "mistral",
        _object_or_name,
        (_TOOL_CALLS,),
        bare="{[",
        hints=(_TOOL_CALLS,),
        more_marks=("[ARGS]", "[CALL_ID]"),
    ),
    Family("granite", _object, ("<|tool_call|>", _TOOL_CALL), bare="{[", hints=("<|tool_call|>",)),
    Family(
        "internlm",
        _object,
        ("<|action_start|>", "<|plugin|>"),
        closings=("<|action_end|>",),
        hints=("<|action_start|>",),
        aliases=("internlm2",),
    ),
    Family(
        "hermes",
        _object,
        (_TOOL_CALL,),
        closings=("</tool_call>",),
        bare="{[",
        hints=(_TOOL_CALL,),
        aliases=("qwen", "qwen25"),
    ),
    Family(
        "pythonic",
        _python,
        ("<|python_start|>", "<|tool_call_start|>", _PYTHON_TAG),
        closings=("<|python_end|>", "<|tool_call_end|>"),
        bare="[",
        hints=("<|python_start|>", "<|tool_call_start|>", "[func_name1("),
        aliases=("llama4_pythonic", "lfm2"),
    ),
    Family(
        "llama3_json",
        _object,
        (_PYTHON_TAG,),
        closings=("<|eom_id|>",),
        bare="{[",
        hints=(_PYTHON_TAG,),
        aliases=("llama3", "llama4_json"),
    ),
    JSON,
)
TOOL_PARSERS = {name: family for family in FAMILIES for name in (family.name, *family.aliases)}


def family_of(template: str) -> Family:
    """By the marks in a chat template; JSON in any dress if there is none."""
    return next(
        (family for family in FAMILIES if any(hint in template for hint in family.hints)), JSON
    )
