"""`tidemill`: the commands, and errors as one or two lines."""

from __future__ import annotations

import errno
import os
import re
import sys
import warnings
from functools import cache
from importlib import import_module
from typing import Any, NoReturn

import typer
from rich.console import Console

from tidemill.cli.help import GROUPS, MAX_WIDTH, Command, Commands
from tidemill.cli.settings import EPILOG
from tidemill.errors import TidemillError
from tidemill.version import __version__

# Only what is asked for is imported: all of them would be a tenth of a server's start.
_COMMANDS = tuple(name for names in GROUPS.values() for name in names)
_ELSEWHERE = {"pull": "ollama"}  # the module, where it has another name
_WITH_COMMANDS = frozenset({"bench", "prompt-cache"})
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_ACCESS = frozenset(
    {errno.EROFS, errno.EACCES, errno.EPERM, errno.EEXIST, errno.ENOTDIR, errno.EISDIR}
)
VARIABLE = "_TIDEMILL_COMPLETE"  # set by a completion script when it asks
# of other programs' users
_OTHER_NAMES = {"run": "chat", "list": "models", "ls": "models", "show": "models"}
_WITH_FILE = frozenset({
    "serve", "route", "chat", "run", "generate", "batch", "memory", "calibrate", "simulate", "calibrate-kv", "quantize",
    "train-draft", "evaluate", "train-predictors", "measure-neurons", "measure-layers",
})  # fmt: skip


def root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        print(f"tidemill {__version__}")
        raise typer.Exit


def make_app(only: str = "") -> typer.Typer:
    """`only`: of all commands, the one to run."""
    app = typer.Typer(
        name="tidemill",
        help="Run and serve language models on this machine. Start with: tidemill serve",
        no_args_is_help=True,
        cls=Commands,
        # commands inherit it
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": MAX_WIDTH},
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_show_locals=False,  # API keys are among them
    )
    app.callback(invoke_without_command=True)(root)
    for name in [only] if only else [*_COMMANDS, *_OTHER_NAMES]:
        known = _OTHER_NAMES.get(name, name)
        function = known.replace("-", "_")
        module = import_module(f"tidemill.cli.{_ELSEWHERE.get(known, function)}")
        if name in _WITH_COMMANDS:
            app.add_typer(module.app, name=name)
        else:
            epilog = EPILOG if name in _WITH_FILE else None
            app.command(name, hidden=name in _OTHER_NAMES, epilog=epilog, cls=Command)(
                getattr(module, function)
            )
    if not only:
        import_module("tidemill.cli.ollama").add_hints(app)
    return app


@cache
def __getattr__(name: str) -> Any:
    """`app`: with all commands."""
    if name != "app":
        raise AttributeError(name)
    return make_app()


def main() -> None:
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if VARIABLE in os.environ:  # a shell asks for completions
        command = ""
        import_module("tidemill.cli.completion").answer_shell()
    warnings.showwarning = _warn
    try:
        make_app(command if command in _COMMANDS or command in _OTHER_NAMES else "")(
            standalone_mode=True
        )
    except KeyboardInterrupt:
        sys.exit(130)
    except TidemillError as error:
        _fail(error.message, error.fix)
    except Exception as error:
        number, where = _os_error(error), getattr(error, "filename", None)
        if number not in _NO_ROOM | _NO_ACCESS:
            raise
        fix = "Choose another place, or " + (
            "make room there." if number in _NO_ROOM else "allow access to this one."
        )
        _fail(f"{os.strerror(number)}{f': {where}' if where else ''}.", fix)


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    """A warning as one line, without the place in our code that it is from."""
    print(f"warning: {message}", file=sys.stderr)


def _fail(message: str, fix: str) -> NoReturn:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print("error:", style="bold red", end=" ")
    console.print(message, markup=False)
    if fix:
        console.print(fix, markup=False)
    sys.exit(1)


def _os_error(error: Exception) -> int:
    """The operating system's number of it, or 0. Libraries in Rust (safetensors) have it in their
    text."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return (error.errno if isinstance(error, OSError) else int(found[1]) if found else 0) or 0


if __name__ == "__main__":
    main()
