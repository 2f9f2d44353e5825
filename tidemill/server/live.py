"""The engine as it works, for whoever watches: what runs and waits, the latest steps and decisions, and who holds which page.

Requests and totals are those that `Explainer` and `Metrics` keep anyway; steps and decisions are collected from events, and the
pages asked for, only while somebody watches. A frame holds all there is to know, not what changed, so that a slow watcher misses
frames and nothing is kept for it. All watchers are sent the same bytes.
"""

from __future__ import annotations

import asyncio
import base64
import time
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Callable
from itertools import islice
from typing import Any

from tidemill import events
from tidemill.engine.client import EngineClient
from tidemill.errors import QueueFull
from tidemill.events import Event
from tidemill.server.explain import Explainer, Story
from tidemill.server.metrics import Metrics
from tidemill.server.sse import named_event
from tidemill.wire import Pages

MAX_WATCHERS = 32
_FRAME_EVERY_S = 0.15
_SIGN_EVERY_S = 2.0  # of life, when nothing happens
_PAGES_EVERY_S = 0.25
_PAGES_SHARE = 0.01  # of the engine's time that looking at its pages may take
_PAGES_LOST_S = 10.0  # after which they are asked for again: that engine is gone
_NUM_STEPS = 128
_NUM_DECISIONS = 40
_NUM_RUNNING, _NUM_WAITING = 256, 64  # told of one by one
_SETTINGS = ("num_pages", "page_size", "max_requests", "max_context", "token_budget", "policy", "prefix_caching", "device")


class Live:
    def __init__(self, client: EngineClient, metrics: Metrics, explainer: Explainer) -> None:
        self._client, self._metrics, self._explainer = client, metrics, explainer
        self._watchers: set[Watcher] = set()
        self._num_changes = 0
        self._forget()

    def _forget(self) -> None:
        self._planned: dict[int, events.StepPlanned] = {}
        self._steps: deque[tuple[int, float, float, int, int, int]] = deque(maxlen=_NUM_STEPS)
        self._decisions: deque[tuple[int, str, str, str]] = deque(maxlen=_NUM_DECISIONS)
        self._num_decisions = 0
        self._last_pages: Pages | None = None
        self.pages = b""  # the frame of them
        self._asked_at_change = -1
        self._ask_again_s = 0.0
        self._state, self._state_made_s = b"", 0.0
        self.told: object = None  # the moment of the latest state

    # ---- who watches

    def watch(self, until: Callable[[], bool]) -> Watcher:
        if len(self._watchers) >= MAX_WATCHERS:
            raise QueueFull(f"{MAX_WATCHERS} others are watching; that is as many as may.", fix="Try again later.")
        watcher = Watcher(self, until)
        self._watchers.add(watcher)
        return watcher

    def leave(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)
        if not self._watchers:
            self._forget()

    # ---- what the engine says

    def take(self, batch: list[Event]) -> None:
        if not self._watchers:
            return
        self._num_changes += 1
        for event in batch:
            match event:
                case events.StepPlanned():
                    self._planned[event.step] = event
                    self._planned.pop(event.step - _NUM_STEPS, None)  # a step that failed is never done
                case events.StepDone():
                    self._end_step(event)
                case events.EngineRestarted():
                    self._planned.clear()
                    self._ask_again_s = 0.0
            words = _words(event)
            if words is not None:
                self._num_decisions += 1
                self._decisions.append((self._num_decisions, type(event).__name__, getattr(event, "request_id", ""), words))

    def _end_step(self, event: events.StepDone) -> None:
        plan = self._planned.pop(event.step, None)
        if plan is not None:
            num_prefill = plan.num_tokens - plan.num_decoding
            size = len(plan.tokens_of)
            self._steps.append((event.step, event.time_s, event.duration_s, num_prefill, plan.num_decoding, size))

    def take_pages(self, pages: Pages) -> None:
        if not self._watchers:
            return
        self._ask_again_s = time.monotonic() + max(_PAGES_EVERY_S, pages.took_s / _PAGES_SHARE)
        last, self._last_pages = self._last_pages, pages
        if last is None or (last.owners, last.kinds) != (pages.owners, pages.kinds):
            packed = base64.b64encode(zlib.compress(pages.kinds, 1)).decode()
            self.pages = named_event({"type": "pages", "owners": pages.owners, "kinds": packed})

    def ask_pages(self) -> None:
        """Unless nothing has happened since, or they are on their way, or looking at them takes too much of the engine's time."""
        now = time.monotonic()
        if now >= self._ask_again_s and (self._asked_at_change != self._num_changes or self._last_pages is None):
            self._asked_at_change = self._num_changes
            self._ask_again_s = now + _PAGES_LOST_S
            self._client.ask_pages()

    # ---- what watchers are told

    @property
    def moment(self) -> object:
        """Another one if there is something new to tell."""
        return self._num_changes, self._client.working

    def opening(self) -> bytes:
        """What does not change."""
        ready = self._client.ready
        told = {} if ready is None else {name: getattr(ready.config, name) for name in _SETTINGS}
        return named_event({"type": "engine", **told})

    def state(self) -> bytes:
        """Made once for all who ask at about the same time; `told` says how new it is."""
        now = time.monotonic()
        if now - self._state_made_s > _FRAME_EVERY_S / 2:
            self._state, self._state_made_s, self.told = named_event(self._tell(now)), now, self.moment
        return self._state

    def _tell(self, now: float) -> dict[str, Any]:
        running: list[Story] = []
        waiting: list[Story] = []
        for story in self._explainer.under_way():
            (waiting if story.state in ("queued", "preempted") else running).append(story)
        some = [*islice(running, _NUM_RUNNING), *islice(waiting, _NUM_WAITING)]
        return {
            "type": "state",
            "time_s": round(now, 4),
            "engine": "working" if self._client.working else "starting again" if self._client.alive else "gone",
            "totals": self._metrics.totals(),
            "requests": [_request(story, now) for story in some],
            "num_untold": len(running) + len(waiting) - len(some),
            "steps": list(self._steps),
            "decisions": list(self._decisions),
        }


class Watcher:
    """One who watches, from `Live.watch` to `aclose`."""

    def __init__(self, live: Live, until: Callable[[], bool]) -> None:
        self._live, self._until = live, until

    async def aclose(self) -> None:
        self._live.leave(self)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """A frame is made when the one before it has left: whoever reads slowly gets fewer, and always the newest."""
        live, seen_pages, seen, sent_s = self._live, b"", None, 0.0
        yield live.opening()
        while not self._until():
            live.ask_pages()
            if live.moment != seen or time.monotonic() - sent_s > _SIGN_EVERY_S:
                frame = live.state()
                seen, sent_s = live.told, time.monotonic()
                yield frame
            if live.pages and live.pages is not seen_pages:
                seen_pages = live.pages
                yield seen_pages
            await asyncio.sleep(_FRAME_EVERY_S)


def _request(story: Story, now: float) -> dict[str, Any]:
    """Never its text: events do not have it."""
    waits = story.state in ("queued", "preempted")
    prefill, decode = story.spans.get("prefill"), story.spans.get("decode")
    has_begun = story.first_token_s is not None
    return {
        "id": story.request_id,
        "phase": story.state if waits else "decode" if has_begun else "prefill",
        "age_s": round(now - story.begun_s, 3),
        "prompt": story.num_prompt,
        "cached": story.num_cached,
        "prefilled": story.num_prompt if has_begun else story.num_cached + (prefill.num_tokens if prefill else 0),
        "output": has_begun + (decode.num_tokens if decode else 0),
    }


def _words(event: Event) -> str | None:
    """A decision as a person would put it. None: not worth a line; evictions are not, since a full cache has one a step."""
    match event:
        case events.Submitted():
            return f"{event.num_prompt} prompt tokens"
        case events.Admitted() | events.Deferred() | events.Preempted():
            return event.reason
        case events.Finished() | events.Aborted():
            return f"{event.reason} after {event.num_output} tokens"
        case events.EngineRestarted():
            return f"the engine was started again; {event.num_requests} requests go on"
    return None
