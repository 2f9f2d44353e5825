"""`tidemill explain`: where a request's time went, from a running server."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tidemill.cli.settings import Settings
from tidemill.errors import TidemillError


def explain(
    request_id: Annotated[str, typer.Argument(help="The id of the response, like chatcmpl-...")],
    url: Annotated[str, typer.Option(help="The server's address.")] = "http://127.0.0.1:8000",
    api_key: Annotated[str, typer.Option(help="The server's key, if it has one. Default: TIDEMILL_API_KEY.")] = "",
) -> None:
    """Show where a request's time went, from arrival to last token."""
    path = f"{url.rstrip('/')}/v1/requests/{urllib.parse.quote(request_id, safe='')}/explain"
    key = api_key or next(iter(Settings.read(["api-key"])["api-key"]), "")
    request = urllib.request.Request(path, headers={"authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            stories = json.load(reply)["data"]
    except urllib.error.HTTPError as error:
        raise TidemillError(json.load(error)["error"]["message"]) from None
    except (urllib.error.URLError, ValueError) as error:
        raise TidemillError(f"{url} does not respond: {error}.", fix="Give the server's address with --url.") from None
    for story in stories:
        first = "" if story["first_token_ms"] is None else f", first token after {story['first_token_ms']:.1f} ms"
        title = f"{story['id']}: {story['status']}, {story['total_ms']:.1f} ms{first}\n{story['admission']}"
        where = [f"engine {story['replica']}, {line}" for line in story.get("placed", ())]
        title = "\n".join([title, *where, *story.get("held", ())])
        table = Table("span", "ms", "%", "because", title=title, title_justify="left")
        for span in story["spans"]:
            table.add_row(span["span"], f"{span['ms']:.1f}", f"{span['percent']:.1f}", span["because"])
        Console().print(table)
