"""Spellings of an admin's routes: with the key of a user none reaches one, at a server and through
the router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tests.server.conftest import behind_our_protocol
from tidemill.cluster.router.router import Router
from tidemill.errors import ConfigError, InvalidRequest
from tidemill.server.http.access import ADMIN_PATHS, Access, Guard, is_admin_path
from tidemill.server.http.context import RequestMiddleware
from tidemill.server.http.listen import Listen, RootPathMiddleware
from tidemill.server.http.target import path_of

USER, ADMIN = "key-of-the-first-user", "key-of-the-admin-only"
ACCESS = Access.of([USER], None, [ADMIN], [], [])
ROOT = "/llm"
BEFORE = (
    "", "/", "//", "/.", "/x/..", "/%2e", "/x/%2E%2e", "/%2f", "%2f", "/%252e%252e", ROOT, f"{ROOT}/", f"{ROOT}/.",
    f"{ROOT}{ROOT}", f"{ROOT}/x/..", "/%6clm", "/ll%6D", f"{ROOT}%2f..", f"{ROOT};x", f"{ROOT}#", "/v1",
    "/v1/models/x%2f..%2f..", "/v1/models/..%2f..", "/v1/models/../..", "/v1/models/%2f",
    "http://localhost", "http://localhost:80", "http://user@localhost", "//localhost",
    "http://localhost/x/..", "\\", "/\\", "/%5c", "/;", "/x;/..", "?", "/health?", "/health#", "/health%3f", "/health%23", "\xe9",
)  # fmt: skip
AFTER = (
    "", "#", "#x", "?#", "?x=1", "?x#y", "/", "//", "/.", "/..", "/x/..", "/%2e", "%2f", "/%2f", ";", ";x=1", ";/..", "%3b",
    "%00", "%0a", "%20", "%23", "%3f", "%3F#", "%2523", "%252f", "%", "%z", "%e9", "%ef%bf%bd",
    "\xe9", "\x01", "\\", "%5c", "|", "*", "&", ":80", "@x",
)  # fmt: skip


def spellings(path: str) -> list[str]:
    inner = [
        path.upper(), path.replace("/", "%2f"), path.replace("/", "//"), path.replace("/", "/./"), path.replace("/", "\\"),
        path[:-1] + f"%{ord(path[-1]):02x}", path[:-1] + f"%25{ord(path[-1]):02X}", path[0] + f"%{ord(path[1]):02X}" + path[2:],
    ]  # fmt: skip
    ends = [before + path + after for before in BEFORE for after in ("", "#", "/", ";x")]
    return [
        *ends,
        *(
            root + one
            for root in ("", ROOT)
            for one in (*(path + after for after in AFTER), *inner)
        ),
    ]


@asynccontextmanager
async def served(root_path: str, is_routed: bool) -> AsyncIterator[tuple[int, list[str]]]:
    """A port, and the paths that reach the routes behind it. The router has an admin's key for its
    server."""
    reached: list[str] = []

    async def app(scope, receive, send):
        reached.append(scope["path"])
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
        )
        await send({"type": "http.response.body"})

    called = RequestMiddleware(Guard(app, ACCESS), None)
    async with AsyncExitStack() as stack:
        inner = RootPathMiddleware(called, root_path) if root_path else called
        port = await stack.enter_async_context(behind_our_protocol(inner))
        if is_routed:
            router = Router(
                [f"http://127.0.0.1:{port}"], ACCESS, upstream_key=ADMIN, check_every_s=60
            )
            await router.start()
            server = await asyncio.get_running_loop().create_server(
                router.clients.make, "127.0.0.1", 0
            )
            stack.callback(router.close)
            stack.callback(server.close)
            port = server.sockets[0].getsockname()[1]
        reached.clear()
        yield port, reached


async def status_of(port: int, method: str, target: str, key: str) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"{method} {target} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\nconnection: close\r\n\r\n"
    writer.write(head.encode("latin-1"))
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1])


@pytest.mark.parametrize("is_routed", [False, True], ids=["server", "router"])
@pytest.mark.parametrize("root_path", ["", ROOT])
async def test_no_spelling_of_an_admins_route_serves_a_user(root_path, is_routed):
    async with served(root_path, is_routed) as (port, reached):
        own = {"/load", "/metrics"} if is_routed else set()  # the router answers these itself
        for path in sorted(ADMIN_PATHS):
            assert await status_of(port, "GET", root_path + path, ADMIN) == 200
            assert reached == ([] if not root_path and path in own else [path])
            assert await status_of(port, "GET", root_path + path, USER) == 403
            reached.clear()
            for target in spellings(path):
                assert await status_of(port, "POST", target, USER) in (200, 308, 400, 403), target
            assert not [one for one in reached if one.rstrip("/") in ADMIN_PATHS], path
            reached.clear()


def test_one_way_to_read_a_target():
    for target, path in {
        b"/": "/", b"/v1/models?x=/../%2f;": "/v1/models", b"/v1/models/a%2Fb": "/v1/models/a/b",
        b"/v1/models/a:7b@x": "/v1/models/a:7b@x", b"/v1/prompt_caches/%C3%A9%20x": "/v1/prompt_caches/é x",
        b"/v1/%6dodels": "/v1/models", b"/.well-known/x..y": "/.well-known/x..y",
        b"/llm/v1/models/a%2fb": "/llm/v1/models/a/b",
    }.items():  # fmt: skip
        assert path_of(target) == path
    for target in (
        b"",
        b"*",
        b"x",
        b"?",
        b"/a b",
        b"/a#",
        b"/a?#",
        b"/a?\xe9",
        b"/a%2fb",
        b"/v1/models/%2e%2e/x",
        b"/%25",
    ):
        with pytest.raises(InvalidRequest):
            path_of(target)


def test_names_of_things_are_no_admins_routes():
    assert is_admin_path("/a/b/metrics/")
    assert not is_admin_path("/v1/models/org/load")
    assert not is_admin_path("/v1/prompt_caches/metrics")
    assert not is_admin_path("/download")
    for root_path in ("/v1", "/v1/models", "/..", "/a/.", "//"):
        with pytest.raises(ConfigError, match="root path"):
            Listen(root_path=root_path)
    assert Listen(root_path="/api/..x/v1").root_path
