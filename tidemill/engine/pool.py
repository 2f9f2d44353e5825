"""EnginePool: engines of several models within a memory budget. Loads no torch.

A request for a model that is not loaded waits in its client. The models that requests wait for are
loaded in the order in which they were first wanted. Room is made by unloading others, least
recently used first: idle ones at once. A busy one may take new requests for as long as loading it
took; then it is held: its new requests wait, those under way end, and it is unloaded. So no request
is lost, no model waits for ever, and at least half of the time is spent on computing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from tidemill.config import EngineConfig, EngineOptions
from tidemill.engine.budget import Budget
from tidemill.engine.client import EngineClient
from tidemill.engine.link import EngineLink
from tidemill.errors import EngineDead, TidemillError
from tidemill.types import events
from tidemill.types.events import Event
from tidemill.types.wire import Loading

_LOOK_EVERY_S = 0.1  # for a busy engine to become idle
_MIN_TURN_S = 1.0
_RETRY_S = 10.0  # after a failure, before a model is loaded again
_log = logging.getLogger("tidemill.engine")


@dataclass(eq=False)
class Pooled:
    """A model of the pool. Its client is `ready` from the start: its configuration is known before
    it is loaded."""

    name: str
    options: EngineOptions
    client: EngineClient
    config: EngineConfig
    on_events: Callable[[list[Event]], None]
    state: str = "unloaded"  # loading, loaded, held, unloading, failed
    why: str = ""  # it failed
    failed_s: float = 0.0
    wanted_s: float | None = None  # since when requests wait for it to be loaded
    loaded_s: float = 0.0
    # for which it may take new requests though another waits
    turn_s: float = field(default=_MIN_TURN_S)

    @property
    def is_loaded(self) -> bool:
        return self.state in ("loaded", "held")

    def report(self, event: Event) -> None:
        try:
            self.on_events([event])
        except Exception:
            _log.exception("a reader of events failed")


class EnginePool:
    def __init__(
        self, models: Sequence[Pooled], budget: Budget, idle_s: float | None = None
    ) -> None:
        """`idle_s`: without a request, after which a model is unloaded."""
        self._models, self._budget, self._idle_s = list(models), budget, idle_s
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        for model in models:
            model.client.hold()
            model.client.on_change = self._changed.set

    async def start(
        self,
        on_loading: Callable[[str, Loading], None] | None = None,
        link: EngineLink | None = None,
    ) -> None:
        """Load as many as fit, in their order. Raises what went wrong, if anything does. `link`:
        for the first engine."""
        for model in self._models:
            if self._has_room(model):
                await self._load(
                    model,
                    "the server starts",
                    partial(on_loading, model.name) if on_loading else None,
                    link,
                )
                link = None
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await asyncio.gather(*(model.client.close() for model in self._models))

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            try:
                await self._step()
            except Exception:
                _log.exception("the pool of models failed to do a step")
                await asyncio.sleep(_LOOK_EVERY_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), self._next_look_s())

    async def _step(self) -> None:
        """Bring the next wanted model closer to being loaded, or unload what has been idle for
        long."""
        now = time.monotonic()
        for model in self._models:
            await self._notice(model, now)
        wanted = min(
            (model for model in self._models if model.wanted_s is not None),
            key=lambda model: model.wanted_s or 0,
            default=None,
        )
        leaving = [] if wanted is None else self._victims(wanted)
        for model in self._models:
            if model.state == "held" and model not in leaving:
                model.state = "loaded"
                model.client.release()
        if wanted is None:
            await self._unload_idle(now)
            return
        for model in leaving:
            if (
                model.state == "loaded"
                and not model.client.is_idle
                and now - model.loaded_s >= model.turn_s
            ):
                model.state = "held"
                model.client.hold()
                model.report(
                    events.ModelHeld(now, model.name, f"{wanted.name} waits for its memory")
                )
        if all(model.client.is_idle for model in leaving):
            for model in leaving:
                await self._unload(model, f"to make room for {wanted.name}")
            await self._load_for_requests(wanted)

    async def _notice(self, model: Pooled, now: float) -> None:
        """Brings the state of a model up to date with its engine's."""
        # its requests have failed; a later one tries again
        if model.is_loaded and model.client.death:
            why = model.client.death
            await model.client.stop()
            self._fail(model, why)
        # others are not unloaded for it all the time
        if model.state == "failed" and now - model.failed_s < _RETRY_S:
            self._refuse_waiting(model)
        if model.is_loaded or not model.client.num_waiting:
            model.wanted_s = None
        elif model.wanted_s is None:
            model.wanted_s = now

    def _has_room(self, model: Pooled, without: Sequence[Pooled] = ()) -> bool:
        others = [
            other.config for other in self._models if other.is_loaded and other not in without
        ]
        return self._budget.has_room(others, model.config)

    def _victims(self, wanted: Pooled) -> list[Pooled]:
        """Those to be unloaded so that it fits: idle ones, then those that are held already, then
        the least recently used."""
        chosen: list[Pooled] = []
        for model in sorted((model for model in self._models if model.is_loaded), key=_rank):
            if self._has_room(wanted, chosen):
                break
            if self._helps(model, wanted, chosen):
                chosen.append(model)
        return chosen

    def _helps(self, model: Pooled, wanted: Pooled, chosen: Sequence[Pooled]) -> bool:
        """Tells if unloading it makes room: on the same device, or as one less of the number that
        may be loaded."""
        num_loaded = sum(other.is_loaded and other not in chosen for other in self._models)
        return model.config.device == wanted.config.device or num_loaded >= self._budget.max_loaded

    async def _unload_idle(self, now: float) -> None:
        for model in self._models:
            if (
                self._idle_s is not None
                and model.state == "loaded"
                and self._idle_since(model, now) >= self._idle_s
            ):
                await self._unload(model, f"no request in {self._idle_s:g} s")

    def _idle_since(self, model: Pooled, now: float) -> float:
        return (
            now - model.client.used_s
            if model.client.is_idle and not model.client.num_pending
            else 0.0
        )

    def _next_look_s(self) -> float | None:
        """None: when something changes."""
        if any(model.wanted_s is not None or model.state == "held" for model in self._models):
            return _LOOK_EVERY_S
        if self._idle_s is None:
            return None
        now = time.monotonic()
        left = [
            self._idle_s - self._idle_since(model, now) for model in self._models if model.is_loaded
        ]
        return max(_LOOK_EVERY_S, min(left, default=self._idle_s))

    # ---- loading

    async def _load_for_requests(self, model: Pooled) -> None:
        try:
            await self._load(model, f"requests that wait for it: {model.client.num_waiting}")
        except TidemillError as error:
            self._fail(model, error.message)
            self._refuse_waiting(model)

    def _fail(self, model: Pooled, why: str) -> None:
        model.state, model.why, model.failed_s = "failed", why, time.monotonic()
        _log.error("the model %s has failed: %s", model.name, why)
        model.report(
            events.ModelUnloaded(model.failed_s, model.name, model.config.memory_bytes, why)
        )

    def _refuse_waiting(self, model: Pooled) -> None:
        model.client.fail_all(
            EngineDead(
                f"The model {model.name!r} cannot be loaded: {model.why}", fix="Try again later."
            )
        )

    async def _load(
        self,
        model: Pooled,
        reason: str,
        on_loading: Callable[[Loading], None] | None = None,
        link: EngineLink | None = None,
    ) -> None:
        assert self._has_room(model)
        began, num_bytes = time.monotonic(), model.config.memory_bytes
        model.state = "loading"
        model.report(events.ModelLoading(began, model.name, num_bytes, reason))
        await model.client.start(model.options, on_loading, link)
        now = time.monotonic()
        model.state, model.why, model.wanted_s, model.loaded_s, model.turn_s = (
            "loaded",
            "",
            None,
            now,
            max(now - began, _MIN_TURN_S),
        )
        model.report(events.ModelLoaded(now, model.name, num_bytes, now - began))

    async def _unload(self, model: Pooled, reason: str) -> None:
        model.state = "unloading"
        await model.client.stop()
        model.state = "unloaded"
        model.report(
            events.ModelUnloaded(time.monotonic(), model.name, model.config.memory_bytes, reason)
        )


def _rank(model: Pooled) -> tuple[bool, bool, float]:
    """In which order models are unloaded for others."""
    return not model.client.is_idle, model.state != "held", model.client.used_s
