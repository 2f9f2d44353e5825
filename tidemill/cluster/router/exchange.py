"""Exchange: a client's request on its way to an upstream, and the response on its way back.

A request is sent again, to another upstream, only while no byte of a response has been passed on to
the client, and never more than one upstream is connected for it: so it is answered once. What
changes the state of a server is sent again only if it cannot have been taken.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from tidemill.cluster.router.client_connection import ClientConnection
from tidemill.cluster.router.keys import Prompt
from tidemill.cluster.router.request import Request
from tidemill.cluster.router.upstream import Connection, Headers, Upstream
from tidemill.errors import NoUpstream, TidemillError, UpstreamFailed
from tidemill.server.http.errors import error_body, format_error

if TYPE_CHECKING:
    from tidemill.cluster.router.router import Router

MAX_ATTEMPTS = 4
_BUSY = (429, 503)  # another server may take the request


class Exchange:
    """A `Job` of the client's connection and the `Sink` of the upstream's."""

    def __init__(
        self,
        router: Router,
        client: ClientConnection,
        request: Request,
        prompt: Prompt,
        tenant: str,
        repeats: bool,
        owner: Upstream | None,
    ) -> None:
        """`repeats`: it may be sent again though an upstream may have seen it. `owner`: the only
        upstream that can answer it."""
        self._router, self._client, self._request, self._prompt, self._tenant = (
            router,
            client,
            request,
            prompt,
            tenant,
        )
        self.repeats, self._owner = repeats, owner
        self._tried: list[Upstream] = []
        self._num_attempts = 0
        self.upstream: Upstream | None = None
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._has_begun = self._is_over = self._is_sent = self._is_stream = False
        self._out: list[bytes] = []
        self._begun_s = time.monotonic()

    # ---- to an upstream

    def start(self) -> None:
        """Raises what the client is to be told if there is nowhere to send it."""
        upstream = self._owner or self._router.choose(self._prompt, self._tried)
        if upstream is None or (self._owner is not None and not upstream.is_usable):
            raise self._nowhere()
        self._tried.append(upstream)
        self._num_attempts += 1
        self.upstream, self._is_sent = upstream, False
        upstream.load += 1
        upstream.num_requests += 1
        # one that is new cannot be closed before it is used
        connection = upstream.idle_connection() if self.repeats else None
        if connection is not None:
            self._send(connection)
        else:
            self._connecting = asyncio.get_running_loop().create_task(self._connect(upstream))

    def _nowhere(self) -> TidemillError:
        if self._owner is not None:
            what = f"The server that has what this request refers to is not available: {self._owner.why or 'it is not ready'}."
            return NoUpstream(what, fix="Try again in a moment.")
        return NoUpstream(
            "No server can take the request at the moment.", fix="Try again in a moment."
        )

    async def _connect(self, upstream: Upstream) -> None:
        try:
            connection = await upstream.connect()
        except OSError as error:
            if self._connecting is not asyncio.current_task():  # it is asked of another by now
                return
            self._connecting = None
            upstream.failed(f"it cannot be reached: {error}")
            self._again(NoUpstream("A server could not be reached.", fix="Try again in a moment."))
            return
        if self._connecting is not asyncio.current_task():
            connection.close()
            return
        self._connecting = None
        self._send(connection)

    def _send(self, connection: Connection) -> None:
        request, upstream = self._request, self.upstream
        assert upstream is not None
        self._connection, self._is_sent = connection, True
        head = request.head_for(upstream.host, self._router.upstream_key)
        connection.send(head, request.body, self, request.method == b"HEAD")

    def _again(self, why: TidemillError) -> None:
        """Nothing has been passed on so far: to another upstream, or else the client is told why
        not."""
        if self._has_begun:
            return
        self._leave_upstream()
        if self._is_over:
            return
        can_repeat = (
            self._owner is None
            and (self.repeats or not self._is_sent)
            and self._num_attempts < MAX_ATTEMPTS
        )
        if can_repeat and self._router.choose(self._prompt, self._tried) is not None:
            self._router.num_retries += 1
            self._out.clear()
            try:
                self.start()
            except TidemillError as error:
                self._fail(error)
        else:
            self._fail(why)

    def _fail(self, why: TidemillError) -> None:
        self._finish()
        self._router.num_failed += 1
        self._client.answer_error(why)

    def _leave_upstream(self) -> None:
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.load -= 1
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _finish(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._router.ended(self, self._tenant)

    def give_up_waiting(self) -> None:
        """The upstream does not answer any more: unless it has begun to, ask another."""
        if not self._has_begun and self.repeats:
            self._again(NoUpstream("A server does not answer.", fix="Try again in a moment."))

    # ---- Job: from the client's connection

    def client_left(self) -> None:
        self._leave_upstream()
        self._finish()

    def pause(self) -> None:
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        if self._connection is not None:
            self._connection.resume()

    # ---- Sink: from the upstream

    def head(self, status: int, headers: Headers, length: int | None) -> None:
        upstream = self.upstream
        assert upstream is not None
        if status in _BUSY:
            wait_s = next(
                (_seconds(value) for name, value in headers if name == b"retry-after"), None
            )
            if wait_s is not None:
                if status == 503:
                    upstream.failed("it is not ready", wait_s)
                can_repeat = self._owner is None and self._num_attempts < MAX_ATTEMPTS
                if can_repeat and self._router.choose(self._prompt, self._tried) is not None:
                    self._is_sent = False  # it was not taken
                    self._again(
                        NoUpstream(
                            "No server can take the request at the moment.",
                            fix="Try again in a moment.",
                        )
                    )
                    return
        else:
            upstream.succeeded()
        if self._prompt.keys and status < 400:
            self._router.placement.note(upstream.url, self._prompt.keys)
        self._has_begun = True
        self._is_stream = length is None and any(
            n == b"content-type" and b"event-stream" in value for n, value in headers
        )
        self._router.answered(status, time.monotonic() - self._begun_s)
        self._out = self._client.begin_response(status, headers, length)

    def body(self, data: bytes) -> None:
        self._out.append(self._client.framed(data))

    def flush(self) -> None:
        if self._out:
            out, self._out = self._out, []
            self._client.write(out)

    def ended(self) -> None:
        self._connection = None  # it is given back already
        self._leave_upstream()
        self._finish()
        self._client.end_response(self._out)

    def broken(self, why: str) -> None:
        upstream, connection, self._connection = self.upstream, self._connection, None
        assert upstream is not None
        if connection is not None and connection.is_reused and not self._has_begun:
            # it may have closed a connection that was idle for long, and is well
            self._tried.remove(upstream)
        else:
            upstream.failed(why)
        if not self._has_begun:
            self._again(UpstreamFailed(f"A server did not answer: {why}.", fix="Try again."))
            return
        self._leave_upstream()
        self._finish()
        self._router.num_failed += 1
        if not self._is_stream:
            self._client.break_off()
            return
        # Clients of an event stream read an error as its last event.
        error = UpstreamFailed("The server ended in the middle of the response.", fix="Try again.")
        event = (
            b"\n\ndata: "
            + msgspec.json.encode(format_error(self._request.path, error_body(error), error.status))
            + b"\n\n"
        )
        self._client.end_response([*self._out, self._client.framed(event)])


def _seconds(value: bytes) -> float:
    return min(float(value), 30.0) if value.isdigit() else 1.0
