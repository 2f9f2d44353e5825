"""Lines of a batch, executed by a server with the OpenAI API."""

from __future__ import annotations

import asyncio
import time

import msgspec

from tidemill.batch.lines import Request
from tidemill.client import AsyncClient, Unreachable
from tidemill.errors import EngineDead
from tidemill.server.store import batch_lines

AT_ONCE = 64
_RETRIED = frozenset({429, 502, 503, 504})
_FIRST_DELAY_S, _MAX_DELAY_S = 0.5, 30.0
_GIVE_UP_S = 600.0  # of failures, without an answer to any line between them
_ERROR_CHARS = 500


class Remote:
    """A server that is overloaded, restarts or cannot be reached is tried again, until it has
    answered nothing for long."""

    def __init__(
        self, url: str, key: str = "", num_at_once: int = AT_ONCE, give_up_s: float = _GIVE_UP_S
    ) -> None:
        self.num_at_once, self._give_up_s = num_at_once, give_up_s
        # a line may wait as long as the server's queue is
        self._client = AsyncClient(url, key, timeout_s=None)
        # since when no line was answered, of those that came back
        self._failing_s: float | None = None

    async def respond(self, request: Request) -> tuple[int, bytes]:
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                reply = await self._client.send("POST", request.url, request.body)
                if (
                    reply.status_code not in _RETRIED
                    or reply.headers.get("x-should-retry") == "false"
                ):
                    self._failing_s = None
                    return reply.status_code, _on_one_line(reply.content)
                why = f"status {reply.status_code}."
                wanted = reply.headers.get("retry-after", "")
                delay_s = max(delay_s, float(wanted)) if wanted.isdecimal() else delay_s
            except Unreachable as error:
                why = error.message
            now = time.monotonic()
            self._failing_s = now if self._failing_s is None else self._failing_s
            if now - self._failing_s >= self._give_up_s:
                fix = "Check --url and the server. What is written is kept: run the same command again."
                raise EngineDead(
                    f"{self._client.url} has answered no line for {self._give_up_s:.0f} s: {why}",
                    fix=fix,
                )
            await asyncio.sleep(min(delay_s, _MAX_DELAY_S))
            delay_s *= 2

    async def close(self) -> None:
        await self._client.close()


def _on_one_line(body: bytes) -> bytes:
    """The body on one line. A body that is not JSON becomes the message of an error."""
    try:
        return batch_lines.encode(msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = body[:_ERROR_CHARS].decode(errors="replace")
        return batch_lines.encode(
            {"error": {"message": text, "type": "invalid_response", "param": None, "code": None}}
        )
