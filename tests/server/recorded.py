"""Requests in the shapes of Claude Code and Codex: every field and header that these programs send,
with texts of our own."""

from __future__ import annotations

from typing import Any

SCHEMA = "https://json-schema.org/draft/2020-12/schema"
CACHED = {"type": "ephemeral"}
RULES = [
    "Read a file before you change it, and change no more than the task needs.",
    "Prefer the tools that are made for a purpose to shell commands that do the same.",
    "Paths are absolute. A path with spaces is quoted.",
    "Say what a command does before it runs if it changes anything outside the working folder.",
    "Independent calls are made in one message, so that they run at the same time.",
    "An output longer than 30000 characters is cut; ask for a part of it instead.",
    "Never commit, push or publish unless the user has asked for it.",
    "If a hook or a check refuses something, find the cause and do not go around it.",
    "Answers are short: the result first, then what is left to do, without a preamble.",
    "A task of three or more steps is kept in the list of tasks, one of them in progress at a time.",
]


def _object(required: list[str], **properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "$schema": SCHEMA,
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _text(what: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "description": what, **more}


def _described(what: str, num_rules: int) -> str:
    return f"{what}\n\nUsage:\n" + "\n".join(f"- {RULES[i % len(RULES)]}" for i in range(num_rules))


_TODO = {
    "type": "object",
    "properties": {
        "content": {"type": "string", "minLength": 1},
        "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
        "activeForm": {"type": "string", "minLength": 1},
    },
    "required": ["content", "status", "activeForm"],
    "additionalProperties": False,
}
_EDITS = {
    "file_path": _text("The file."),
    "old_string": _text("The text to replace."),
    "new_string": _text("The new text."),
}
CLAUDE_CODE_TOOLS = [
    ("Task", "Starts an agent for a task of several steps.", 14, _object(
        ["description", "prompt", "subagent_type"], description=_text("Three to five words."), prompt=_text("The task."),
        subagent_type=_text("Which agent."), model={"type": "string", "enum": ["sonnet", "opus", "haiku"]})),
    ("Bash", "Runs a command in a shell that stays open.", 30, _object(
        ["command"], command=_text("The command."), timeout={"type": "number", "description": "Milliseconds, at most 600000."},
        description=_text("What it does."), run_in_background={"type": "boolean"})),
    ("Glob", "Finds files by a pattern.", 4, _object(["pattern"], pattern=_text("Such as **/*.py."), path=_text("The folder."))),
    ("Grep", "Searches the content of files.", 8, _object(
        ["pattern"], pattern=_text("A regular expression."), path=_text("Where."), glob=_text("Which files."),
        output_mode={"type": "string", "enum": ["content", "files_with_matches", "count"]},
        **{"-A": {"type": "number"}, "-i": {"type": "boolean"}}, multiline={"type": "boolean"})),
    ("Read", "Reads a file.", 10, _object(
        ["file_path"], file_path=_text("The file."), offset={"type": "number"}, limit={"type": "number"})),
    ("Edit", "Replaces a text in a file.", 8, _object(
        list(_EDITS), **_EDITS, replace_all={"type": "boolean", "default": False})),
    ("Write", "Writes a file.", 6, _object(["file_path", "content"], file_path=_text("The file."), content=_text("All of it."))),
    ("NotebookEdit", "Replaces a cell of a notebook.", 5, _object(
        ["notebook_path", "new_source"], notebook_path=_text("The notebook."), cell_id=_text("The cell."),
        new_source=_text("Its source."), cell_type={"type": "string", "enum": ["code", "markdown"]})),
    ("WebFetch", "Fetches a page.", 8, _object(["url", "prompt"], url=_text("The page.", format="uri"), prompt=_text("Why."))),
    ("WebSearch", "Searches the web.", 6, _object(
        ["query"], query=_text("What for.", minLength=2),
        allowed_domains={"type": "array", "items": {"type": "string"}, "description": "Only these."})),
    ("TodoWrite", "Keeps the list of tasks.", 20, _object(["todos"], todos={"type": "array", "items": _TODO})),
    ("BashOutput", "Reads what a command in the background has written.", 4, _object(["bash_id"], bash_id=_text("Which."))),
    ("KillShell", "Ends a command in the background.", 3, _object(["shell_id"], shell_id=_text("Which."))),
    ("ExitPlanMode", "Shows the plan to the user.", 6, {
        "$schema": SCHEMA, "type": "object", "properties": {"plan": {"type": "string"}}, "additionalProperties": True}),
    ("mcp__tides__high_water", "When the water is high in a port.", 2, {
        "type": "object", "properties": {"port": {"type": "string", "title": "Port"}}, "required": ["port"], "title": "Args"}),
]  # fmt: skip
BETAS = "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,prompt-caching-scope-2026-01-05"
CLAUDE_CODE_HEADERS = {
    "accept": "application/json",
    "anthropic-beta": BETAS,
    "anthropic-dangerous-direct-browser-access": "true",
    "anthropic-version": "2023-06-01",
    "authorization": "Bearer none",
    "user-agent": "claude-cli/2.1.109 (external, cli)",
    "x-app": "cli",
    "x-claude-code-session-id": "5bb8b6f1-2f0c-4a55-9d5c-0f6c3b1f2a77",
    "x-stainless-arch": "arm64",
    "x-stainless-helper-method": "stream",
    "x-stainless-lang": "js",
    "x-stainless-os": "Linux",
    "x-stainless-package-version": "0.74.0",
    "x-stainless-retry-count": "0",
    "x-stainless-runtime": "node",
    "x-stainless-runtime-version": "v24.3.0",
    "x-stainless-timeout": "600",
}
CLAUDE_CODE_USER = "user_0b6f_account__session_5bb8b6f1-2f0c-4a55-9d5c-0f6c3b1f2a77"


def claude_code(messages: list[dict[str, Any]] | None = None, build: str = "1f0") -> dict[str, Any]:
    """A turn of the main loop. `build`: changes in the first system block from request to request."""
    reminder = (
        "<system-reminder>\nInstructions of the project:\n"
        + "\n".join(RULES)
        + "\n</system-reminder>\n"
    )
    first = [
        {"type": "text", "text": reminder},
        {"type": "text", "text": "fix the failing test", "cache_control": CACHED},
    ]
    tools = [
        {"name": name, "description": _described(what, num), "input_schema": schema}
        for name, what, num, schema in CLAUDE_CODE_TOOLS
    ]
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": first}, *(messages or [])],
        "system": [
            {
                "type": "text",
                "text": f"x-anthropic-billing-header: cc_version=2.1.109.{build}; cc_entrypoint=cli; cch={build};",
            },
            {
                "type": "text",
                "text": "You are a program that works on code in a terminal.",
                "cache_control": CACHED | {"ttl": "1h"},
            },
            {
                "type": "text",
                "text": _described("You help with software.", 90),
                "cache_control": CACHED | {"ttl": "1h"},
            },
        ],
        "tools": tools,
        "metadata": {"user_id": CLAUDE_CODE_USER},
        "max_tokens": 32000,
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "stream": True,
    }


def claude_code_second_turn() -> list[dict[str, Any]]:
    """What it sends after two calls: their results, one of them an error, and a reminder."""
    called = [
        {"type": "thinking", "thinking": "The test first.", "signature": "c2ln"},
        {"type": "text", "text": "I look at the test."},
        {
            "type": "tool_use",
            "id": "toolu_01A",
            "name": "Read",
            "input": {"file_path": "/w/test_tide.py"},
            "caller": {"type": "direct"},
        },
        {
            "type": "tool_use",
            "id": "toolu_01B",
            "name": "Bash",
            "input": {"command": "pytest -x", "description": "Run the tests"},
        },
    ]
    results = [
        {
            "type": "tool_result",
            "tool_use_id": "toolu_01A",
            "content": [{"type": "text", "text": "     1\tdef test_tide():"}],
        },
        {
            "type": "tool_result",
            "tool_use_id": "toolu_01B",
            "content": "Exit code 1",
            "is_error": True,
            "cache_control": CACHED,
        },
        {"type": "text", "text": "<system-reminder>The list of tasks is empty.</system-reminder>"},
    ]
    return [{"role": "assistant", "content": called}, {"role": "user", "content": results}]


def claude_code_title() -> dict[str, Any]:
    """Its request for the title of a session, to the small model."""
    shape = {
        "type": "object",
        "properties": {"title": {"enum": ["Fix a test"]}},
        "required": ["title"],
        "additionalProperties": False,
    }
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": "fix the failing test"}],
        "system": [
            {"type": "text", "text": "Write a title of three to seven words for this session."}
        ],
        "tools": [],
        "metadata": {"user_id": CLAUDE_CODE_USER},
        "max_tokens": 32000,
        "temperature": 1,
        "thinking": {"type": "disabled"},
        "output_config": {"format": {"type": "json_schema", "schema": shape}},
        "stream": True,
    }


# ---- Codex

CODEX_HEADERS = {
    "accept": "text/event-stream",
    "authorization": "Bearer none",
    "originator": "codex_cli_rs",
    "session_id": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "user-agent": "codex_cli_rs/0.98.0 (Debian 13.0.0; aarch64) xterm-256color",
    "version": "0.98.0",
    "x-codex-turn-metadata": "{}",
}
_LARK = (
    'start: "*** Begin Patch" LF hunk+ "*** End Patch" LF?\nhunk: /[^*].*/ LF\n%import common.LF\n'
)


def _function(
    name: str, what: str, required: list[str], **properties: dict[str, Any]
) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "name": name,
        "description": what,
        "strict": False,
        "parameters": schema,
    }


_STEP = {
    "type": "object",
    "properties": {
        "step": {"type": "string"},
        "status": {"type": "string", "description": "pending, in_progress or completed"},
    },
    "required": ["step", "status"],
    "additionalProperties": False,
}
CODEX_TOOLS = [
    _function(
        "exec_command", _described("Runs a command in a PTY.", 12), ["cmd"], cmd=_text("The command."), workdir=_text("Where."),
        yield_time_ms={"type": "number"}, max_output_tokens={"type": "number"}, login={"type": "boolean"},
        tty={"type": "boolean"},
    ),
    _function("write_stdin", "Writes to a running command.", ["session_id"], session_id={"type": "number"}, chars=_text("What.")),
    _function(
        "update_plan", _described("Keeps the plan.", 6), ["plan"], explanation={"type": "string"},
        plan={"type": "array", "items": _STEP, "description": "The steps."},
    ),
    _function("view_image", "Shows an image.", ["path"], path=_text("The file.")),
    {
        "type": "custom", "name": "apply_patch", "description": _described("Changes files. It is not JSON.", 4),
        "format": {"type": "grammar", "syntax": "lark", "definition": _LARK},
    },
    {"type": "local_shell"},
    {"type": "web_search", "external_web_access": False, "search_content_types": ["text"]},
    {
        "type": "namespace", "name": "mcp__tides__", "description": "Tides",
        "tools": [_function("high_water", "When it is high.", ["port"], port=_text("The port.")) | {"defer_loading": True}],
    },
]  # fmt: skip


def _said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def codex(more: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """A turn, as the program serializes it."""
    return {
        "model": "tiny",
        "instructions": _described("You are a program that works on code in a terminal.", 80),
        "input": [
            _said(
                "developer",
                "<permissions instructions>" + " ".join(RULES) + "</permissions instructions>",
            ),
            _said(
                "user",
                "<environment_context>\n  <cwd>/w</cwd>\n  <shell>bash</shell>\n</environment_context>",
            ),
            _said("user", "fix the failing test"),
            *(more or []),
        ],
        "tools": CODEX_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
        "text": {"verbosity": "low"},
        "client_metadata": {"x-codex-installation-id": "9d5cb9d3"},
    }


def codex_second_turn() -> list[dict[str, Any]]:
    """What it sends back after reasoning, a message and calls of each kind."""
    patch = "*** Begin Patch\n*** Update File: tide.py\n*** End Patch\n"
    return [
        {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "The test first."}],
            "encrypted_content": None,
        },
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I run it."}],
            "phase": "commentary",
        },
        {
            "type": "function_call",
            "name": "exec_command",
            "arguments": '{"cmd": "pytest -x"}',
            "call_id": "call_1",
        },
        {"type": "function_call_output", "call_id": "call_1", "output": "Exit code: 1"},
        {
            "type": "custom_tool_call",
            "status": "completed",
            "call_id": "call_2",
            "name": "apply_patch",
            "input": patch,
        },
        {
            "type": "custom_tool_call_output",
            "call_id": "call_2",
            "output": [{"type": "input_text", "text": "Done"}],
        },
        {
            "type": "function_call",
            "name": "high_water",
            "namespace": "mcp__tides__",
            "arguments": '{"port": "Hull"}',
            "call_id": "call_3",
        },
        {
            "type": "function_call_output",
            "call_id": "call_3",
            "output": [{"type": "input_text", "text": "at noon"}],
        },
    ]
