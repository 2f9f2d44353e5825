"""`tidemill replay`: computes what a server recorded again, and compares every token."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tidemill.cli.options import BY_NAME
from tidemill.cli.settings import raise_on_interrupt
from tidemill.errors import ConfigError

console = Console(stderr=True, highlight=False)


def replay(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="What `tidemill serve --record DIR` has recorded.")
    ],
    requests: Annotated[str, typer.Option(help="Only these: numbers or ids, with commas.")] = "",
    alone: Annotated[
        bool, typer.Option("--alone", help="Each by itself: shows that company did not matter.")
    ] = False,
    like_then: Annotated[
        bool,
        typer.Option(
            "--like-then", help="In the recorded order and batches: an incident with its company."
        ),
    ] = False,
    build: Annotated[
        str,
        typer.Option(
            help="Another build: a checkout of Tidemill, or the Python of its environment."
        ),
    ] = "",
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="An engine option other than recorded: kv-dtype=fp8."
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="Where a recorded model or adapter is now."),
    ] = None,
    tokens_only: Annotated[
        bool, typer.Option("--tokens-only", help="Do not compare log-probabilities and embeddings.")
    ] = False,
    server: Annotated[
        int,
        typer.Option(
            help="Which server's life, where there are several: 1 is the first, -1 the last."
        ),
    ] = 0,
    key: Annotated[
        Path | None, typer.Option(help="The owner's key, of a recording that is sealed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the certificate as JSON.")] = False,
) -> None:
    """Compute a recording again and compare every token.

    Ends with 0 if all requests are equal, with 1 if one differs or nothing could be compared.
    """
    if alone and like_then:
        raise ConfigError("--alone and --like-then are two ways to replay.", fix="Choose one.")
    if build:
        raise typer.Exit(_with_build(_python_of(build)))
    raise_on_interrupt()
    from tidemill.record.reader import Recording
    from tidemill.record.writer import read_key
    from tidemill.replay.replay import LIKE_THEN, ReplayOptions
    from tidemill.replay.replay import replay as run

    recording = Recording(folder.expanduser(), read_key(key.expanduser()) if key else _own_key())
    servers = recording.servers
    if server:
        if not 0 < abs(server) <= len(servers):
            raise ConfigError(
                f"The recording has {len(servers)} servers' lives.",
                fix="Give --server 1 to that.",
                param="server",
            )
        servers = [servers[server - 1 if server > 0 else server]]
    changed, shown = _changed(option or [])
    options = ReplayOptions(
        mode="alone" if alone else LIKE_THEN if like_then else "together",
        requests=frozenset(name.strip() for name in requests.split(",") if name.strip()),
        tokens_only=tokens_only,
        changed=changed,
        shown=shown,
        paths=dict(_pair(text, "--model") for text in model or ()),
        on_progress=_show_progress if console.is_terminal else None,
    )
    certificates = run(recording, servers, options)
    if as_json:
        print(json.dumps([certificate.body() for certificate in certificates], indent=1))
    else:
        for certificate in certificates:
            for line in certificate.lines():
                print(line)
    if not certificates or not all(certificate.is_equal for certificate in certificates):
        raise typer.Exit(1)


def _own_key() -> bytes | None:
    """The key of this user's servers, if there is one."""
    from tidemill.cli.serve import data_key
    from tidemill.record.writer import read_key

    return read_key(data_key()) if data_key().exists() else None


def _pair(text: str, flag: str) -> tuple[str, str]:
    name, is_pair, value = text.partition("=")
    if not is_pair or not name:
        raise ConfigError(f"{flag} is {text!r}.", fix=f"Write {flag} NAME=VALUE.")
    return name, value


def _changed(texts: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    changed: dict[str, Any] = {}
    shown: dict[str, str] = {}
    for text in texts:
        name, value = _pair(text, "--option")
        option = BY_NAME.get(name.removeprefix("--").replace("_", "-"))
        if option is None or not option.field:
            raise ConfigError(
                f"There is no engine option {name!r}.",
                fix="`tidemill serve --help-all` lists them.",
                param="option",
            )
        changed[option.field], shown[option.name] = option.read(value, f"--option {name}"), value
    return changed, shown


def _python_of(build: str) -> tuple[list[str], dict[str, str]]:
    """The Python of another build, and its environment."""
    path = Path(build).expanduser()
    if path.is_dir() and (path / "tidemill").is_dir():
        python = path / ".venv" / "bin" / "python"
        return [str(python) if python.exists() else sys.executable], os.environ | {
            "PYTHONPATH": str(path.absolute())
        }
    if path.is_file() and os.access(path, os.X_OK):
        return [str(path)], {
            name: value for name, value in os.environ.items() if name != "PYTHONPATH"
        }
    raise ConfigError(
        f"{build} is no build.",
        fix="Name a checkout of Tidemill, or a Python that has it.",
        param="build",
    )


def _with_build(python: tuple[list[str], dict[str, str]]) -> int:
    """Runs the same command in another build."""
    args = sys.argv[1:]
    at = next(i for i, text in enumerate(args) if text.startswith("--build"))
    del args[at : at + (1 if "=" in args[at] else 2)]
    return subprocess.run(
        [*python[0], "-P", "-m", "tidemill", *args], env=python[1], check=False
    ).returncode


def _show_progress(model: str, num: int, most: int) -> None:
    console.print(f"\r{model}: {num:,} of {most:,}", end="\n" if num >= most else "", markup=False)
