"""How long a server's event loop is kept from its other tasks: CPU seconds of the whole process
between two turns. Time in which other processes have the cores does not count, so it is much the
same on a busy machine; time in which a thread holds the interpreter's lock does."""

from __future__ import annotations

import httpx

PATH = "/lag-of-tests"
# Python that is run in the server first. The answer: the longest gap since it was last asked, and
# the routes.
PATCH = f"""
import asyncio, json, time
from tidemill.server import run

def flat(routes):
    for one in routes:
        inner = getattr(one, "original_router", None)
        yield from flat(inner.routes) if inner is not None else [[method, one.path] for method in one.methods]

def create_app(*given, made=run.create_app, **more):
    app, lag, tasks = made(*given, **more), [0.0], []

    async def tick():
        while True:
            begun = time.process_time()
            await asyncio.sleep(0.001)
            await asyncio.sleep(0)  # a token takes two turns from the engine to the client
            lag[0] = max(lag[0], time.process_time() - begun)

    async def probed(scope, receive, send):
        if scope.get("path") != "{PATH}":
            return await app(scope, receive, send)
        if scope["query_string"] == b"stop":
            while tasks:
                tasks.pop().cancel()
        elif not tasks:
            tasks.append(asyncio.create_task(tick()))
        told, lag[0] = json.dumps(dict(lag_s=lag[0], routes=list(flat(app._app._app.routes)))).encode(), 0.0
        await send(dict(type="http.response.start", status=200, headers=[(b"content-type", b"application/json")]))
        await send(dict(type="http.response.body", body=told))

    return probed

run.create_app = create_app
"""


def take_lag_s(url: str) -> float:
    """The longest since it was last taken."""
    return float(httpx.get(f"{url}{PATH}").json()["lag_s"])


def stop_ticking(url: str) -> None:
    """Until it is asked again."""
    httpx.get(f"{url}{PATH}?stop").raise_for_status()


def routes_of(url: str) -> set[tuple[str, str]]:
    return {
        (method, path)
        for method, path in httpx.get(f"{url}{PATH}").json()["routes"]
        if method not in ("HEAD", "OPTIONS")
    }
