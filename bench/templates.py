"""Compares prompts with those of Transformers: `python -m bench.templates FOLDER`, which has
*.jinja files or folders of tokenizers.

Each template renders a fixed set of conversations, as an OpenAI client sends them, without and with
the beginning of an answer. Transformers gets the arguments of calls as objects, as its
documentation asks for. Where a template fails on a form or writes it as Python does, Transformers
gets another: arguments as text, an empty text for null, parts joined to one text.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from tidemill.errors import InvalidRequest
from tidemill.frontend.chat import ChatTemplate
from tidemill.frontend.tokenizer import folder_template

TOKENS = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city, <b>now</b>.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Zürich, for example"},
                    "days": {"type": "integer"},
                },
                "required": ["city"],
            },
        },
    }
]
_PYTHON = ("{'", "None", '"type": "text"')  # of a value that was not expected
USER = {"role": "user", "content": "What's the weather in Zürich?"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "Sunny."}
RESULT = {
    "role": "tool",
    "tool_call_id": "call00001",
    "name": "weather",
    "content": '{"sky": "clear"}',
}
MORE = {"role": "user", "content": "Thanks.\n  And tomorrow?"}


def _call(content: str | None, **more: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": '{"city": "Zürich", "days": 2}'}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "call00001", "type": "function", "function": function}],
    } | more


def _parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one turn": ([USER], None),
    "system": ([SYSTEM, USER], None),
    "turns": ([SYSTEM, USER, ANSWER, MORE], None),
    "tools": ([USER], TOOLS),
    "tools, system": ([SYSTEM, USER], TOOLS),
    "call, result": ([USER, _call(None), RESULT], TOOLS),
    "call, result, turns": ([SYSTEM, USER, _call(None), RESULT, ANSWER, MORE], TOOLS),
    "text and call": ([USER, _call("Let me see."), RESULT], TOOLS),
    "history of calls": ([USER, _call(None), RESULT, ANSWER, MORE], None),
    "reasoning": ([USER, {**ANSWER, "reasoning_content": "Clouds?"}, MORE], None),
    "reasoning, call": ([USER, _call(None, reasoning_content="Ask."), RESULT], TOOLS),
    "parts": ([{"role": "user", "content": _parts("What's", " this?")}], None),
    "parts of a system": ([{"role": "system", "content": _parts("Be", " brief.")}, USER], None),
}


def _forms(messages: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The conversation in the forms that Transformers may get; the documented one first."""
    for joined, empty, as_text in product((False, True), repeat=3):
        made = json.loads(json.dumps(messages))
        for message in made:
            if joined and isinstance(message["content"], list):
                message["content"] = "".join(part["text"] for part in message["content"])
            if empty and message["content"] is None:
                message["content"] = ""
            for call in message.get("tool_calls") or [] if not as_text else []:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        names = [
            name
            for name, used in (
                ("parts joined", joined),
                ("null empty", empty),
                ("arguments as text", as_text),
            )
            if used
        ]
        yield ", ".join(names), made


def _ours(
    template: ChatTemplate, messages: list[dict[str, Any]], tools: Any, goes_on: bool
) -> str | None:
    """None: refused."""
    try:
        return template.render(messages, tools, TOKENS | {"add_generation_prompt": goes_on})
    except InvalidRequest:
        return None


def _theirs(source: str, messages: list[dict[str, Any]], tools: Any, goes_on: bool) -> str | None:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered, _ = render_jinja_template(
            [messages], tools, chat_template=source, add_generation_prompt=goes_on, **TOKENS
        )
    except Exception:  # of the template
        return None
    return str(rendered[0])


def compare(
    source: str, messages: list[dict[str, Any]], tools: Any, goes_on: bool
) -> tuple[str, str | None, str | None]:
    """Returns the kind of difference, and both prompts."""
    ours = _ours(ChatTemplate(source), messages, tools, goes_on)
    first, *others = (
        (form, _theirs(source, made, tools, goes_on)) for form, made in _forms(messages)
    )
    theirs = first[1]
    if ours == theirs:
        return ("same" if ours is not None else "both refuse"), ours, theirs
    if theirs is None or any(python in theirs for python in _PYTHON):
        for form, text in others:
            if ours is not None and text == ours:
                return f"same, {form}", ours, text
        theirs = next((text for _, text in others if text is not None), None)
    return (
        (
            "only ours renders"
            if theirs is None
            else "only theirs renders"
            if ours is None
            else "differs"
        ),
        ours,
        theirs,
    )


def sources(folder: Path) -> dict[str, str]:
    """Templates by name."""
    made = {file.stem: file.read_text() for file in sorted(folder.glob("*.jinja"))}
    for settings in sorted(folder.glob("**/tokenizer_config.json")):
        text = folder_template(settings.parent, json.loads(settings.read_text()))
        if text is not None:
            made[str(settings.parent.relative_to(folder))] = text
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--show", action="store_true", help="print both prompts where they differ")
    given = parser.parse_args()
    counts: Counter[str] = Counter()
    for name, source in sources(given.folder).items():
        found: dict[str, list[str]] = {}
        for title, (messages, tools) in CONVERSATIONS.items():
            for goes_on in (False, True):
                kind, ours, theirs = compare(source, messages, tools, goes_on)
                counts[kind] += 1
                if not kind.startswith(("same", "both")):
                    found.setdefault(kind, []).append(title + (" +" if goes_on else ""))
                    if given.show:
                        print(f"--- {name}: {title}: {kind}\n{ours!r}\n{theirs!r}")
        for kind, titles in found.items():
            print(f"{name}: {kind}: {', '.join(titles)}")
    print(", ".join(f"{kind}: {num}" for kind, num in counts.most_common()))


if __name__ == "__main__":
    main()
