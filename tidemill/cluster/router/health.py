"""Checks of upstreams: /health every few seconds, and which models they serve."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from tidemill.cluster.router.fetch import fetch
from tidemill.cluster.router.upstream import Headers, Upstream

CHECK_EVERY_S, CHECK_WITHIN_S = 2.0, 5.0
FAILURES = 2  # in a row, after which a server that was healthy is not
_log = logging.getLogger("tidemill.cluster.router")


class _Model(msgspec.Struct):
    id: str | None = None
    name: str | None = None  # Ollama
    aliases: list[str] | None = None


class _Models(msgspec.Struct):
    data: list[msgspec.Raw] | None = None
    models: list[msgspec.Raw] | None = None  # Ollama


_decode_models, _decode_model = (
    msgspec.json.Decoder(_Models).decode,
    msgspec.json.Decoder(_Model).decode,
)


def models_of(body: bytes) -> dict[str, msgspec.Raw]:
    """A response of /v1/models, or of Ollama's lists: its entries by name."""
    try:
        listed = _decode_models(body)
        named = ((_decode_model(card), card) for card in listed.data or listed.models or ())
        return {of.id or of.name or "": card for of, card in named}
    except msgspec.DecodeError:
        return {}


def names_of(models: dict[str, msgspec.Raw]) -> frozenset[str]:
    """By which they may be asked for."""
    return frozenset(models).union(*(_decode_model(card).aliases or () for card in models.values()))


class Checks:
    """One task for each upstream, until it is stopped."""

    def __init__(
        self,
        every_s: float,
        headers: Headers,
        on_recovered: Callable[[Upstream], None],
        on_lost: Callable[[Upstream], None],
        within_s: float = CHECK_WITHIN_S,
    ) -> None:
        """`headers`: of the requests. `on_lost`: an upstream that was healthy is not any more."""
        self._every_s, self._within_s, self._headers = every_s, within_s, headers
        self._on_recovered, self._on_lost = on_recovered, on_lost
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def watch(self, upstream: Upstream, first_after_s: float = 0.0) -> None:
        self._tasks[upstream.url] = asyncio.get_running_loop().create_task(
            self._watch(upstream, first_after_s)
        )

    async def begin(self, upstream: Upstream) -> None:
        """The first check is done when it returns."""
        upstream.why = await self.check(upstream)
        upstream.is_healthy = not upstream.why
        self.watch(upstream, self._every_s)

    def stop(self, upstream: Upstream) -> None:
        task = self._tasks.pop(upstream.url, None)
        if task is not None:
            task.cancel()

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _watch(self, upstream: Upstream, first_after_s: float) -> None:
        num_failed = 0
        await asyncio.sleep(first_after_s)
        while True:
            try:
                why = await self.check(upstream)
            except Exception:
                _log.exception("a check failed")
                why = "the check failed"
            if not why:
                num_failed = 0
                upstream.succeeded()
                if not upstream.is_healthy:
                    upstream.is_healthy, upstream.why = True, ""
                    _log.warning("%s is healthy", upstream.url)
                    self._on_recovered(upstream)
            else:
                num_failed += 1
                upstream.why = why
                if upstream.is_healthy and num_failed >= FAILURES:
                    upstream.is_healthy = False
                    _log.warning("%s is not healthy: %s", upstream.url, why)
                    self._on_lost(upstream)
            await asyncio.sleep(self._every_s)

    async def check(self, upstream: Upstream) -> str:
        """Why it is not healthy; empty if it is."""
        try:
            async with asyncio.timeout(self._within_s):
                health = await fetch(upstream, b"GET", b"/health", self._headers)
                if health.status != 200:
                    return f"/health has status {health.status}"
                listed = await fetch(upstream, b"GET", b"/v1/models", self._headers)
        except TimeoutError:
            return f"no answer in {self._within_s:g} s"
        except OSError as error:
            return f"it cannot be reached: {error}"
        upstream.models = names_of(models_of(listed.body)) if listed.status == 200 else None
        return ""
