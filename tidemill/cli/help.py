"""Help of the command line: commands by groups, options by sections, and of many options first
those that most people need."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from tidemill.cli.foreign import translate

# All commands, in the order of the help.
GROUPS = {
    "Run models": ("serve", "chat", "generate", "models", "pull", "batch", "prompt-cache"),
    "Several servers and hosts": ("route", "worker"),
    "Choose hardware and settings": ("memory", "plan", "plan-layout", "simulate", "calibrate", "capabilities"),
    "Measure": ("bench", "explain", "replay", "evaluate", "measure-layers", "measure-neurons"),
    "Compress and train": (
        "quantize", "calibrate-kv", "prune", "distill", "convert", "train-draft", "train-predictors",
    ),
    "Shell": ("completion",),
}  # fmt: skip
SHORT_ENOUGH = 18  # parameters of a command whose help shows all of them
MAX_WIDTH = 120  # of a terminal that is wider, no more columns are used
_NAME_WIDTH = 30  # longer names have a line of their own
_ALL = "tidemill.help_all"
# as options of the table have them
_TYPES = {"str": "TEXT", "int": "INTEGER", "float": "FLOAT", "path": "PATH"}


@dataclass(frozen=True)
class HelpRow:
    """The place of an option in the help of a command, and its text in the short form; without a
    text it is only in --help-all."""

    section: str
    short: str


class Commands(TyperGroup):
    """The list of commands, by groups."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(len(name) for names in GROUPS.values() for name in names)
        for heading, names in GROUPS.items():
            commands = [(name, self.commands[name]) for name in names if name in self.commands]
            with formatter.section(heading):
                room = formatter.width - width - 4
                formatter.write_dl(
                    [
                        (name.ljust(width), command.get_short_help_str(room))
                        for name, command in commands
                    ]
                )


class Command(TyperCommand):
    """A command that understands the flags of other programs. If it has many options, --help shows
    the basic ones, by section."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:  # for completion
            args = translate(args, self.params)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        rows: dict[str, HelpRow] = getattr(self.callback, "help_rows", {})
        sections: defaultdict[str, list[tuple[str, str]]] = defaultdict(
            list, {"Arguments": [], "Options": []}
        )
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            row = rows.get(param.name)
            if record is None or (row and not row.short and not ctx.meta.get(_ALL)):
                continue
            name, words = record
            if row and not ctx.meta.get(_ALL):
                words = row.short
            is_argument = param.param_type_name == "argument"
            section = "Arguments" if is_argument else row.section if row else "Options"
            sections[section].append(
                (name.partition(" <")[0] if is_argument else _with_type(name), words)
            )
        width = min(
            _NAME_WIDTH,
            max((len(name) for lines in sections.values() for name, _ in lines), default=0),
        )
        for heading, lines in sections.items():
            if lines:
                with formatter.section(heading):
                    formatter.write_dl([(name.ljust(width), words) for name, words in lines])


def _with_type(name: str) -> str:
    """An option with the type of its value in capitals: `--port INTEGER` for `--port <int range>`."""
    return re.sub(
        r"<(?:list\[)?(\w+)(?: range)?\]?>$", lambda found: _TYPES.get(found[1], found[0]), name
    )


def _show_all(ctx: typer.Context, is_given: bool) -> None:
    if is_given:
        ctx.meta[_ALL] = True
        print(ctx.get_help())
        raise typer.Exit


def help_all(num_options: int) -> inspect.Parameter:
    """The switch --help-all, as a parameter of a command's function."""
    info = typer.Option(
        "--help-all",
        help=f"Show all {num_options} options and exit.",
        is_eager=True,
        callback=_show_all,
    )
    return inspect.Parameter(
        "help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, info]
    )
