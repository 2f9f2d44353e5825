"""Parsers of a model's output: tool calls and reasoning, out of text while it streams.

A family of models is a line in a table (families.py, reasoning.py) and, where it writes calls its
own way, a reader of one. One parser serves streamed and whole responses, so the streamed pieces add
up to the whole response.
"""

from tidemill.frontend.parsers.families import TOOL_PARSERS
from tidemill.frontend.parsers.forced import call_grammar
from tidemill.frontend.parsers.model_format import ModelFormat, OutputFormat
from tidemill.frontend.parsers.pieces import (
    CallArguments,
    CallStart,
    OutputParser,
    Piece,
    TextPiece,
)
from tidemill.frontend.parsers.reasoning import REASONING_PARSERS, ReasoningCounter

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "CallArguments",
    "CallStart",
    "ModelFormat",
    "OutputFormat",
    "OutputParser",
    "Piece",
    "ReasoningCounter",
    "TextPiece",
    "call_grammar",
]
