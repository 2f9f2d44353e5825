"""`tidemill completion`: commands, options and models by the Tab key."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from typer.completion import completion_init, get_completion_script  # type: ignore[attr-defined]

from tidemill.cli.main import VARIABLE


class Shell(StrEnum):
    bash = "bash"
    zsh = "zsh"
    fish = "fish"


def completion(
    shell: Annotated[Shell, typer.Argument(help="The shell to print a script for.")],
) -> None:
    """Print a script for completion by Tab. For bash, add to ~/.bashrc: eval "$(tidemill completion
    bash)"."""
    print(get_completion_script(prog_name="tidemill", complete_var=VARIABLE, shell=shell.value))


def answer_shell() -> None:
    """Let the command line answer a completion script."""
    completion_init()
