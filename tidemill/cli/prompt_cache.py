"""`tidemill prompt-cache`: prefixes that stay in the KV cache of a running server, or in a folder,
under a name."""

from __future__ import annotations

import json
import sys
import time
import urllib.parse
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tidemill.cli import prompt_folder
from tidemill.cli.help import Command
from tidemill.client import Client
from tidemill.errors import ConfigError

app = typer.Typer(
    help="Keep prefixes of prompts on a server or in a folder.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Name = Annotated[str, typer.Argument(help="The prompt cache.")]
Url = Annotated[str, typer.Option(help="The server's address: http://HOST:PORT or unix:PATH.")]
ApiKey = Annotated[
    str, typer.Option(help="The server's key, if it has one. Default: TIDEMILL_API_KEY.")
]
Ttl = Annotated[int, typer.Option(min=1, help="Seconds for which it is kept.")]
Model = Annotated[str | None, typer.Option(help="The model, if the server has several.")]
Prompt = Annotated[
    str | None, typer.Option(help="The text that prompts begin with; - reads standard input.")
]
Messages = Annotated[
    Path | None,
    typer.Option(help="A JSON file: a list of messages, or an object with messages and tools."),
]
Folder = Annotated[
    Path | None,
    typer.Option(help="A folder instead of a server; --kv-disk of a server may be the same."),
]
DEFAULT_URL = "http://127.0.0.1:8000"


@app.command(cls=Command)
def save(
    name: Name,
    prompt: Prompt = None,
    messages: Messages = None,
    fork: Annotated[str | None, typer.Option(help="Go on with what this prompt cache has.")] = None,
    ttl: Ttl = 3600,
    model: Annotated[
        str | None,
        typer.Option(help="Of a server with several; with --folder, as `tidemill serve` takes it."),
    ] = None,
    folder: Folder = None,
    size: Annotated[str, typer.Option(help="Of the folder, at most.")] = "8G",
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
) -> None:
    """Compute a prefix of prompts and keep it: requests with prompt_cache = NAME continue it. With
    --folder it is computed in this process, and its KV pages are written into the folder."""
    if folder is not None:
        if fork is not None:
            raise ConfigError(
                "A prompt cache in a folder cannot be forked.",
                fix="Save the whole prompt.",
                param="fork",
            )
        saved, num_found = prompt_folder.save(folder, name, model, _content(prompt, messages), size)
        print(
            f"{name}: {len(saved.token_ids)} tokens, {num_found} of them were in {folder} before."
        )
        return
    body: dict[str, Any] = {"name": name, "ttl": ttl} | _content(prompt, messages)
    if fork is None:
        body |= {} if model is None else {"model": model}
        cache = _call(url, api_key, "POST", "", body)
    else:
        cache = _call(url, api_key, "POST", f"/{_quoted(fork)}/fork", body)
    print(
        f"{name}: {cache['pinned_tokens']} of {cache['tokens']} tokens are pinned for {cache['expires_in']} s."
    )


@app.command(cls=Command)
def load(
    name: Name,
    folder: Annotated[Path, typer.Option(help="Where it was saved.")],
    ttl: Ttl = 3600,
    model: Model = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
) -> None:
    """Give what was saved in a folder to a running server. If the folder is its --kv-disk, it reads
    the pages; else it computes them."""
    body = (
        {"name": name, "ttl": ttl}
        | prompt_folder.read(folder, name).body()
        | ({} if model is None else {"model": model})
    )
    cache = _call(url, api_key, "POST", "", body)
    num_found = cache["usage"]["prompt_tokens_details"]["cached_tokens"]
    print(
        f"{name}: {cache['pinned_tokens']} of {cache['tokens']} tokens are pinned; {num_found} were found and not computed."
    )


@app.command("list", cls=Command)
def list_(folder: Folder = None, url: Url = DEFAULT_URL, api_key: ApiKey = "") -> None:
    """Lists the prompt caches that a server or a folder keeps."""
    if folder is not None:
        table = Table("name", "model", "tokens", "saved")
        for saved in prompt_folder.all_in(folder):
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(saved.created_s))
            table.add_row(saved.name, saved.model, str(len(saved.token_ids)), when)
        Console().print(table)
        return
    table = Table("name", "model", "kind", "tokens", "pinned", "expires in", "uses")
    for cache in _call(url, api_key, "GET", "")["data"]:
        counts = (
            cache["tokens"],
            cache["pinned_tokens"],
            f"{cache['expires_in']} s",
            cache["uses"],
        )
        table.add_row(cache["name"], cache["model"], cache["kind"], *map(str, counts))
    Console().print(table)


@app.command(cls=Command)
def extend(name: Name, ttl: Ttl = 3600, url: Url = DEFAULT_URL, api_key: ApiKey = "") -> None:
    """Keep it for so many seconds from now on."""
    cache = _call(url, api_key, "POST", f"/{_quoted(name)}", {"ttl": ttl})
    print(f"{name} expires in {cache['expires_in']} s.")


@app.command(cls=Command)
def rm(
    names: Annotated[list[str], typer.Argument(help="The prompt caches.")],
    folder: Folder = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = "",
) -> None:
    """Let them go."""
    for name in names:
        if folder is not None:
            prompt_folder.remove(folder, name)
        else:
            _call(url, api_key, "DELETE", f"/{_quoted(name)}")
        print(f"{name} is deleted.")


def _content(prompt: str | None, messages: Path | None) -> dict[str, Any]:
    if (prompt is None) == (messages is None):
        raise ConfigError(
            "A prompt cache is made of a prompt or of messages.", fix="Give --prompt or --messages."
        )
    if prompt is not None:
        return {"prompt": sys.stdin.read() if prompt == "-" else prompt}
    assert messages is not None
    try:
        content = json.loads(messages.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{messages} cannot be read: {error}.", param="messages") from error
    if isinstance(content, list):
        return {"messages": content}
    if not isinstance(content, dict) or not content.keys() <= {"messages", "tools"}:
        fix = "Write a list of messages, or an object with messages and tools."
        raise ConfigError(f"{messages} holds something else.", fix=fix, param="messages")
    return content


def _quoted(name: str) -> str:
    return urllib.parse.quote(name, safe="")


def _call(
    url: str, api_key: str, method: str, path: str, body: dict[str, Any] | None = None
) -> Any:
    """The server's answer on /v1/prompt_caches."""
    with Client(url, api_key) as client:
        return client.json(method, f"/v1/prompt_caches{path}", body)
