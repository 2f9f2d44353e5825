"""The source of the lines of `tidemill chat`: an editor with history on a terminal, else plain
lines of standard input."""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

_CONTINUES = "\\"  # at the end of a line


class Input(Protocol):
    def read(self) -> str:
        """The next message or command. EOFError at the end, KeyboardInterrupt on Ctrl-C."""
        ...


def make_input(commands: list[str]) -> Input:
    return Editor(commands) if sys.stdin.isatty() and sys.stdout.isatty() else Lines()


class Lines:
    """Standard input that is not a terminal: a message a line, or several lines that end with a
    backslash."""

    def read(self) -> str:
        lines = [self._line()]
        while lines[-1].endswith(_CONTINUES):
            lines[-1] = lines[-1].removesuffix(_CONTINUES)
            lines.append(self._line())
        return "\n".join(lines)

    def _line(self) -> str:
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")


class Editor:
    """Enter sends; Alt-Enter, a backslash before Enter and a pasted text make further lines."""

    def __init__(self, commands: list[str]) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import FileHistory, InMemoryHistory

        path = _history_file()
        self._session: Any = PromptSession(
            history=FileHistory(str(path)) if path else InMemoryHistory(),
            key_bindings=_keys(),
            multiline=True,
            prompt_continuation=". ",
            completer=WordCompleter(commands, sentence=True),
            complete_while_typing=False,
        )

    def read(self) -> str:
        return str(self._session.prompt("> "))


def _keys() -> Any:
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _(event: Any) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith(_CONTINUES):
            buffer.delete_before_cursor(1)
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history_file() -> Path | None:
    """Readable by its owner alone; None if it cannot be written."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "tidemill"
    path = folder / "chat-history"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        with path.open("a"):
            return path
    except OSError:
        return None


@contextmanager
def no_echo() -> Iterator[None]:
    """Hides the keys typed while an answer is written: the next prompt has it."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    quiet = termios.tcgetattr(sys.stdin)
    quiet[0] &= ~termios.ICRNL
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
