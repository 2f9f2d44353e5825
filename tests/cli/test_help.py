"""Help: commands by groups; of many options the basic ones, by sections, and all of them with
--help-all."""

import pytest
from typer.testing import CliRunner

from tidemill.cli.help import GROUPS
from tidemill.cli.main import app
from tidemill.cli.options import OPTIONS

WIDTHS = [80, 120]


def shown(*arguments: str, columns: int = 80) -> str:
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": str(columns)}, terminal_width=columns)
    assert done.exit_code == 0, done.output
    return done.output


def flags(text: str) -> set[str]:
    """The first name of each option that a help lists."""
    words = (line.split() for line in text.splitlines() if line.startswith("  -"))
    return {next(word for word in line if word.startswith("--")) for line in words}


@pytest.mark.parametrize("columns", WIDTHS)
def test_commands_are_listed_by_groups_each_in_a_line(columns):
    text = shown("--help", columns=columns)
    assert "..." not in text.split("Run models:")[1]
    assert all(len(line) <= columns for line in text.splitlines())
    listed = [
        line.split()[0]
        for line in text.splitlines()
        if line.startswith("  ") and line[2:3].islower()
    ]
    assert listed == [name for names in GROUPS.values() for name in names]
    assert listed[:4] == ["serve", "chat", "generate", "models"]


@pytest.mark.parametrize("columns", WIDTHS)
def test_the_help_of_serve_is_one_screen(columns):
    lines = shown("serve", "--help", columns=columns).splitlines()
    assert len(lines) <= 40
    assert all(len(line) <= columns for line in lines)
    headings = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Arguments:", "Options:", "Engine:", "Serving:", "Adapters:", "Access:"]


def test_basic_options_are_shown_first_and_all_with_help_all():
    basic, whole = flags(shown("serve", "--help")), flags(shown("serve", "--help-all"))
    of_table = {f"--{option.name}": option.short for option in OPTIONS}
    assert basic & set(of_table) == {flag for flag, short in of_table.items() if short}
    assert basic < whole
    assert set(of_table) <= whole


def test_a_commands_own_options_and_defaults_are_basic():
    text = shown("route", "--help")
    assert "Port to listen on. Default: 9000." in text
    assert {"--max-in-flight", "--spread"} <= flags(text)
    assert "--drain-seconds" not in flags(text)
    assert "--drain-seconds" in flags(shown("route", "--help-all"))


def test_a_command_with_few_options_shows_all_at_once():
    text = shown("memory", "--help")
    assert {"--kv-disk", "--hot-neurons"} <= flags(text)
    assert "--help-all" not in text
