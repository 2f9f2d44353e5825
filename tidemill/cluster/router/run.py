"""The router's life: listening socket, signals, and a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import ssl
from collections.abc import Callable

from tidemill.cluster.router.router import Router
from tidemill.server.http.aside import switch_often
from tidemill.server.http.listen import Listen

TLS_WITHIN_S = 10.0  # a handshake, and a goodbye


async def route(
    router: Router,
    listen: Listen,
    on_ready: Callable[[Router, int], None] | None = None,
    drain_s: float = 30.0,
) -> None:
    """Runs until SIGINT or SIGTERM: then nothing new is taken, and what is under way has `drain_s`
    to end. A second signal does not wait."""
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()
    me = asyncio.current_task()
    assert me is not None
    listen.tls()  # tells what is wrong with the files
    listening = listen.open()

    def stop() -> None:
        if stopping.is_set():
            me.cancel()
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        await router.start()
        server = await _serve(router, listen, listening)
        gc.collect()
        gc.freeze()
        switch_often()
        if on_ready:
            on_ready(router, 0 if listen.unix_socket else listening.getsockname()[1])
        await stopping.wait()
        server.close()
        with contextlib.suppress(asyncio.CancelledError):
            await router.drain(drain_s)
    finally:
        router.close()
        listen.close(listening)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _serve(router: Router, listen: Listen, listening: socket.socket) -> asyncio.Server:
    context = None
    if listen.tls_cert is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(listen.tls_cert, listen.tls_key, password="")
        if listen.tls_client_ca is not None:
            context.load_verify_locations(listen.tls_client_ca)
            context.verify_mode = ssl.CERT_REQUIRED
    within_s = TLS_WITHIN_S if context is not None else None
    return await asyncio.get_running_loop().create_server(
        router.clients.make,
        sock=listening,
        ssl=context,
        backlog=2048,
        ssl_handshake_timeout=within_s,
        ssl_shutdown_timeout=within_s,
    )
