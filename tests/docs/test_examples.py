"""The examples of the manual: commands are parsed, Python and curl are run against a server,
configurations are read.

`<!-- not run: REASON -->` on the line before a block leaves it out.
"""

import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from functools import cache
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.docs.pages import DOCS, ROOT, Block, blocks, manual, name, without_blocks
from tidemill.cli.foreign_flags import FOREIGN
from tidemill.cli.main import app
from tidemill.models.registry import ARCHITECTURES
from tidemill.sched.policies import POLICIES

URL = "http://127.0.0.1:8000"
SHELLS = ("sh", "bash", "shell", "console", "")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *manual()]
BLOCKS = [block for page in PAGES for block in blocks(page) if not block.is_excused]
_FLAG = re.compile(r"(?<![\w-])(--[a-z][a-z0-9-]*[a-z0-9])(?![\w*-])")
_OF_OTHERS = re.compile(
    r"reference/(api/|foreign-flags|options)"
)  # pages with flags of other engines
_OTHER_PROGRAMS = {"--force-reinstall", "--gpus", "--ipc", "--no-deps"}
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=\S*$")


def commands(text: str) -> list[list[str]]:
    """The commands of a shell block, as words. Words of substitutions and loops are left as they
    are."""
    found: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line.strip().removeprefix("$ "), posix=True, punctuation_chars="|&;<>")
        words.whitespace_split = True
        command: list[str] = []
        is_redirected = False
        for word in [*_words(words, line), ";"]:
            if set(word) <= set("|&;"):
                if command:
                    found.append(command)
                command, is_redirected = [], False
            elif set(word) <= set("<>&"):
                is_redirected = True
            elif not is_redirected and (command or not _VARIABLE.match(word)):
                command.append(word)
    return found


def _words(words: shlex.shlex, line: str) -> list[str]:
    try:
        return list(words)
    except ValueError:  # a quotation over several lines
        return line.split()


def tidemill_command(words: list[str]) -> list[str] | None:
    """The arguments of a `tidemill` command; None: it is another program's."""
    if words[0].rpartition("/")[2] == "tidemill":
        return words[1:]
    return words[3:] if words[1:3] == ["-m", "tidemill"] else None


@cache
def whole_command() -> Any:
    """The command line's commands and options, which take 0.15 s to make."""
    return typer.main.get_command(app)


def parse(arguments: list[str]) -> None:
    """Reads arguments as the command line does, and runs nothing. `serve` also looks at the values."""
    if arguments[:1] == ["serve"]:
        done = CliRunner().invoke(app, [*arguments, "--show-config"])
        assert done.exit_code == 0, done.output + str(done.exception or "")
        return
    command = whole_command()
    context = command.make_context("tidemill", [], resilient_parsing=True)
    while hasattr(command, "commands") and arguments:
        _, command, arguments = command.resolve_command(context, arguments)
    with contextlib.suppress(typer.Exit):  # --help
        if not hasattr(command, "commands"):
            command.make_context(command.name, list(arguments), parent=context)


def faults(block: Block) -> list[str]:
    """Commands of a block that the command line refuses."""
    found = []
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for words in commands(block.text):
        arguments = tidemill_command(words)
        if arguments is not None:
            try:
                parse(arguments)
            except Exception as error:
                found.append(f"{shlex.join(words)}: {error}")
        elif words[0] == "make":
            found += [
                f"make {word}"
                for word in words[1:]
                if not word.startswith("-") and "=" not in word and word not in targets
            ]
        elif (
            words[0].startswith("python")
            and words[1:2] == ["-m"]
            and words[2].startswith(("bench.", "tests.", "tidemill."))
        ):
            found += [] if importlib.util.find_spec(words[2]) else [f"python -m {words[2]}"]
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a configuration file, and no variables of ours."""
    for variable in [each for each in os.environ if each.startswith("TIDEMILL_")]:
        monkeypatch.delenv(variable)
    (tmp_path / "tidemill.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language in SHELLS], ids=str)
def test_commands_are_understood(block, folder):
    assert not faults(block)


def test_wrong_commands_are_noticed(folder):
    def wrong(text: str) -> int:
        return len(faults(Block("page", 1, "sh", text, False)))

    assert wrong("tidemill serve --no-such-option 1") == 1
    assert wrong("KEY=1 tidemill serve smollm2 --max-context many | tee log") == 1
    assert (
        wrong("tidemill bench no-such-command\nmake no-such-target\npython -m bench.no_such_module")
        == 3
    )
    assert not wrong(
        "$ tidemill serve smollm2 \\\n  --max-context 4096 > log 2>&1 &  # --no-such-option\nls --no-such-option"
    )


@cache
def options() -> set[str]:
    """Every flag of every command, and those of other engines that are understood."""
    found = {"--help", "--help-all", *(flag for foreign in FOREIGN for flag in foreign.flags)}
    left = [whole_command()]
    while left:
        command = left.pop()
        left += getattr(command, "commands", {}).values()
        found.update(
            flag for param in command.params for flag in (*param.opts, *param.secondary_opts)
        )
    return found


@pytest.mark.parametrize(
    "page", [page for page in PAGES if not _OF_OTHERS.search(name(page))], ids=name
)
def test_flags_in_the_text_exist(page):
    codes = re.findall(r"`([^`]+)`", without_blocks(page.read_text()))
    flags = {flag for code in codes for flag in _FLAG.findall(code)}
    assert not flags - options() - _OTHER_PROGRAMS


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "toml"], ids=str)
def test_configurations_are_read(block, folder):
    (folder / "tidemill.toml").write_text(block.text)
    parse(["serve", "--config", "tidemill.toml"])


@pytest.fixture
def registries():
    """Tables that examples add to: they are as before afterwards."""
    tables = (ARCHITECTURES, POLICIES)
    copies = [dict(table) for table in tables]
    yield
    for table, copy in zip(tables, copies, strict=True):
        table.clear()
        table.update(copy)


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "python"], ids=str
)
def test_python_is_run(block, folder, registries, request):
    text = block.text
    if URL in text:
        text = text.replace(URL, request.getfixturevalue("roomy").url).replace("smollm2", "tiny")
    else:
        text = text.replace("smollm2", str(request.getfixturevalue("roomy_folder")))
    try:
        exec(compile(text, str(block), "exec"), {"__name__": "__main__"})
    except ImportError as error:  # a client library, which `make test-clients` has
        if str(error.name).startswith("tidemill"):
            raise
        pytest.skip(str(error))


@pytest.mark.skipif(not shutil.which("curl"), reason="there is no curl")
@pytest.mark.parametrize(
    "block",
    [block for block in BLOCKS if block.language in SHELLS and f"curl {URL}" in block.text],
    ids=str,
)
def test_curl_is_run(block, folder, roomy):
    for command in re.findall(
        rf"^curl {re.escape(URL)}.*$", block.text.replace("\\\n", " "), re.MULTILINE
    ):
        command = command.replace(URL, roomy.url).replace("smollm2", "tiny")
        done = subprocess.run(
            ["bash", "-c", command.replace("curl", "curl -sS --fail-with-body", 1)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, command + done.stdout + done.stderr


def test_the_table_of_fields_without_effect():
    from tidemill.cli import fields_doc

    pages = [page for page in DOCS.rglob("*.md") if fields_doc.BEGIN in page.read_text()]
    assert [name(page) for page in pages if fields_doc.table() in page.read_text()], (
        "python -m tidemill.cli.fields_doc"
    )
