"""`tidemill route`: several servers behind one address."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from tidemill.cli.serve import listen_of, run_loop
from tidemill.cli.settings import Settings, raise_on_interrupt, takes

if TYPE_CHECKING:
    from tidemill.cluster.router.router import Router

console = Console(stderr=True, highlight=False)


@takes(
    "host", "port", "unix-socket", "unix-socket-mode", "tls-cert", "tls-key", "tls-client-ca", "api-key", "api-key-file",
    "admin-key", "allowed-host", "allowed-origin", "drain-seconds", port=9000,
)  # fmt: skip
def route(
    settings: Settings,
    urls: Annotated[
        list[str],
        typer.Argument(metavar="URL...", help="Servers, like http://127.0.0.1:8000 or unix:PATH."),
    ],
    max_in_flight: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most requests that a key (or, without keys, an address) may have under way.",
        ),
    ] = None,
    requests_per_minute: Annotated[
        int | None,
        typer.Option(min=1, help="Most requests that a key (or an address) may send in a minute."),
    ] = None,
    health_seconds: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two health checks of a server.")
    ] = 2.0,
    upstream_key: Annotated[
        str,
        typer.Option(
            envvar="TIDEMILL_UPSTREAM_KEY",
            help="API key for the servers; without it, clients' keys are passed on.",
        ),
    ] = "",
    max_connections: Annotated[
        int, typer.Option(min=1, help="Most connections of clients at the same time.")
    ] = 8192,
    spread: Annotated[
        float,
        typer.Option(
            min=1.0,
            help="How many times the mean load a server may have before others take its requests.",
        ),
    ] = 1.25,
) -> None:
    """Put several servers behind one address. Requests that begin alike go to the same server,
    unless it is too busy."""
    from tidemill.cluster.router.limits import Limits
    from tidemill.cluster.router.router import Router
    from tidemill.cluster.router.run import route as run_router
    from tidemill.sched.placement import Placement
    from tidemill.server.http.access import SHORT_KEY, Access
    from tidemill.server.http.connections import max_connections as possible_connections

    access = Access.of(
        list(settings["api-key"]),
        settings["api-key-file"],
        list(settings["admin-key"]),
        list(settings["allowed-host"]),
        list(settings["allowed-origin"]),
    )
    listen = listen_of(settings)
    if listen.unix_socket is None:
        access.check_host_is_safe(listen.host)
    if access.has_short_key:
        console.print(SHORT_KEY, style="yellow")
    router = Router(
        urls,
        access,
        Limits(max_in_flight, requests_per_minute),
        health_seconds,
        upstream_key,
        # a connection to a client may have one to a server
        min(max_connections, possible_connections() // 2),
        Placement(spread=spread),
    )
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)

    def on_ready(router: Router, port: int) -> None:
        for upstream in router.upstreams.values():
            models = ", ".join(upstream.models or {}) or "models not known"
            console.print(
                f"  {upstream.url}: {models if upstream.is_healthy else upstream.why}", markup=False
            )
        where = (
            f"{listen.url(port)} through {listen.unix_socket}"
            if listen.unix_socket
            else listen.url(port)
        )
        console.print(
            f"Tidemill routes {where} to {len(router.upstreams)} servers   (Ctrl-C stops it)",
            style="bold",
        )

    raise_on_interrupt()
    with contextlib.suppress(asyncio.CancelledError, KeyboardInterrupt):
        run_loop(run_router(router, listen, on_ready, settings["drain-seconds"]))
