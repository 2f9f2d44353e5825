"""`tidemill completion`: commands, options and models by the Tab key."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated

import typer
from typer.completion import completion_init, get_completion_script  # type: ignore[attr-defined]

_VARIABLE = "_TIDEMILL_COMPLETE"  # set by the script when it asks for completions


class Shell(StrEnum):
    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def completion(shell: Annotated[Shell, typer.Argument(help="The shell to print a script for.")]) -> None:
    """Print a script for completion by Tab. For bash, add to ~/.bashrc: eval "$(tidemill completion bash)"."""
    print(get_completion_script(prog_name="tidemill", complete_var=_VARIABLE, shell=shell.value))


def answer_shell() -> None:
    """Let the command line answer a completion script, if one asks."""
    if _VARIABLE in os.environ:
        completion_init()
