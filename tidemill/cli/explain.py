"""`tidemill explain`: where a request's time went, from a running server."""

from __future__ import annotations

import urllib.parse
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tidemill.client import Client

_TIMEOUT_S = 10


def explain(
    request_id: Annotated[str, typer.Argument(help="The id of the response, like chatcmpl-...")],
    url: Annotated[
        str, typer.Option(help="The server's address: http://HOST:PORT or unix:PATH.")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str, typer.Option(help="The server's key, if it has one. Default: TIDEMILL_API_KEY.")
    ] = "",
) -> None:
    """Show where the time went that a client waited for a request."""
    with Client(url, api_key, timeout_s=_TIMEOUT_S) as client:
        explained = client.json(
            "GET", f"/v1/requests/{urllib.parse.quote(request_id, safe='')}/explain"
        )
    for story in explained.get("data", ()):
        first = (
            ""
            if story["first_token_ms"] is None
            else f", first token after {story['first_token_ms']:.1f} ms"
        )
        title = f"{story['id']}: {story['status']}, {story['total_ms']:.1f} ms{first}\n{story['admission']}"
        where = [f"engine {story['replica']}, {line}" for line in story.get("placed", ())]
        title = "\n".join([title, *where, *story.get("held", ())])
        table = Table("span", "ms", "%", "because", title=title, title_justify="left")
        for span in story["spans"]:
            parts = span.get("parts", ())
            because = (
                span["because"]
                if not parts or span["span"] != "between steps"
                else "of the engine's loop:"
            )
            table.add_row(span["span"], f"{span['ms']:.1f}", f"{span['percent']:.1f}", because)
            for part in parts:
                table.add_row(f"  {part['part']}", f"{part['ms']:.1f}", style="dim")
        if beside := story.get("beside"):
            told = ", ".join(f"{name} {ms:.1f} ms" for name, ms in beside.items())
            table.caption = f"While the engine computed, the server was busy with it, too: {told}."
            table.caption_justify = "left"
        Console().print(table)
