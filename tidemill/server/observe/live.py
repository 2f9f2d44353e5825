"""The live view of the engine, as server-sent events: requests, the latest steps and decisions, the
KV page map, experts' tokens.

Requests and totals come from `Explainer` and `Metrics`. Steps and decisions are collected from
events, and the page map is requested from the engine, only while there is a watcher. A frame holds
the whole state, not a difference, so a slow watcher skips frames and needs no queue. A frame is
encoded once for all watchers that may see the same request ids.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import secrets
import time
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Callable
from itertools import islice
from typing import Any

from tidemill.engine.metrics import AnyMetrics
from tidemill.engine.replicas import Client, Replicas
from tidemill.errors import QueueFull
from tidemill.server.http.responses import named_event
from tidemill.server.observe.advice import in_words
from tidemill.server.observe.explain import AnyExplainer, engine_id
from tidemill.server.observe.timeline import RequestTimeline
from tidemill.server.observe.usage import usage_rows
from tidemill.types import events
from tidemill.types.events import Event
from tidemill.types.wire import Pages

MAX_WATCHERS = 32
_FRAME_EVERY_S = 0.15
_HEARTBEAT_S = 2.0
_PAGES_EVERY_S = 0.25
_PAGES_SHARE = 0.01  # of the engine's time that making the page map may take
_PAGES_LOST_S = 10.0  # without a page map, after which it is requested again: that engine is gone
_NUM_STEPS = 128
_NUM_DECISIONS = 40
_NUM_TENANTS = 16  # whose time is listed, the longest first; nobody's comes before
_NUM_RUNNING, _NUM_QUEUED = 256, 64  # listed one by one
_SETTINGS = (
    "num_pages",
    "page_size",
    "max_requests",
    "max_context",
    "token_budget",
    "policy",
    "prefix_caching",
    "device",
)


class _Frame:
    """A message to watchers. Watchers of one tenant see other tenants' requests under aliases."""

    def __init__(self, body: dict[str, Any], secret: bytes) -> None:
        self._body, self._secret = body, secret
        self._encoded: dict[str | None, bytes] = {}

    def encoded(self, tenant: str | None) -> bytes:
        """`tenant`: whose request ids are shown; None: all."""
        frame = self._encoded.get(tenant)
        if frame is None:
            frame = self._encoded[tenant] = named_event(
                self._body if tenant is None else self._hidden(tenant)
            )
        return frame

    def _hidden(self, tenant: str) -> dict[str, Any]:
        body = self._body
        if body["type"] == "experts":
            return body
        if body["type"] == "pages":
            return body | {
                "requests": [(self._alias(name, tenant), num) for name, num in body["requests"]]
            }
        requests = [
            request | {"id": self._alias(request["id"], tenant)} for request in body["requests"]
        ]
        return body | {
            "requests": requests,
            "usage": [row for row in body["usage"] if row[0] in (None, tenant)],
            "decisions": [
                (number, kind, self._alias(name, tenant), words)
                for number, kind, name, words in body["decisions"]
            ],
        }

    def _alias(self, request_id: str, tenant: str) -> str:
        """The same in every frame, so that a request keeps its colour. It cannot be traced back to
        the id."""
        if not request_id or request_id.startswith(f"{tenant}/"):
            return request_id
        digest = hashlib.blake2b(request_id.encode(), key=self._secret, digest_size=4).hexdigest()
        return engine_id("", f"other-{digest}", 0)


class Live:
    def __init__(self, client: Client, metrics: AnyMetrics, explainer: AnyExplainer) -> None:
        self._client, self._metrics, self._explainer = client, metrics, explainer
        self._watchers: set[Watcher] = set()
        self._secret = secrets.token_bytes(16)  # of the aliases
        self._num_changes = 0
        self.states: Callable[[], dict[str, str]] = dict  # of the server's models, by name
        self.model = ""  # its name
        self._forget()

    def _forget(self) -> None:
        self._planned: dict[tuple[int, int], events.StepPlanned] = {}  # by replica and step
        self._steps: deque[tuple[int, float, float, int, int, int]] = deque(maxlen=_NUM_STEPS)
        self._decisions: deque[tuple[int, str, str, str]] = deque(maxlen=_NUM_DECISIONS)
        self._num_decisions = 0
        self._last_pages: Pages | None = None
        self.pages: _Frame | None = None
        self.experts: _Frame | None = None
        self._asked_at_change = -1
        self._ask_again_s = 0.0
        self._state: _Frame | None = None
        self._state_made_s = 0.0
        self.state_moment: object = None  # of the latest state

    # ---- watchers

    def watch(self, until: Callable[[], bool], tenant: str | None = None) -> Watcher:
        """`tenant`: whose request ids the watcher may see; None: all."""
        if len(self._watchers) >= MAX_WATCHERS:
            raise QueueFull(
                f"The live view has {MAX_WATCHERS} watchers, which is the limit.",
                fix="Try again later.",
            )
        watcher = Watcher(self, until, tenant)
        self._watchers.add(watcher)
        return watcher

    def leave(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)
        if not self._watchers:
            self._forget()

    # ---- from the engine

    def take(self, batch: list[Event]) -> None:
        if not self._watchers:
            return
        self._num_changes += 1
        for event in batch:
            match event:
                case events.StepPlanned():
                    self._planned[event.replica, event.step] = event
                    self._planned.pop(
                        (event.replica, event.step - _NUM_STEPS), None
                    )  # a failed step has no StepDone
                case events.StepDone():
                    self._end_step(event)
                case events.ExpertsUsed():
                    layers, tokens = zip(*event.tokens_of, strict=True)
                    self.experts = _Frame(
                        {"type": "experts", "layers": layers, "tokens": tokens}, self._secret
                    )
                case events.EngineRestarted() | events.ModelLoaded():
                    self._planned.clear()
                    self._ask_again_s = 0.0
            words = _words(event)
            if words is not None and self._client.num_replicas > 1:
                words = f"replica {event.replica}: {words}"
            if words is not None:
                self._num_decisions += 1
                self._decisions.append(
                    (
                        self._num_decisions,
                        type(event).__name__,
                        getattr(event, "request_id", ""),
                        words,
                    )
                )

    def _end_step(self, event: events.StepDone) -> None:
        plan = self._planned.pop((event.replica, event.step), None)
        if plan is not None:
            num_decode = plan.num_decoding + plan.num_drafts
            size, num_prefill = len(plan.tokens_of), plan.num_tokens - num_decode
            self._steps.append(
                (event.step, event.time_s, event.duration_s, num_prefill, num_decode, size)
            )

    def take_pages(self, pages: Pages) -> None:
        if not self._watchers:
            return
        self._ask_again_s = time.monotonic() + max(_PAGES_EVERY_S, pages.took_s / _PAGES_SHARE)
        last, self._last_pages = self._last_pages, pages
        if last is None or (last.owners, last.kinds, last.tiers) != (
            pages.owners,
            pages.kinds,
            pages.tiers,
        ):
            kinds = base64.b64encode(zlib.compress(pages.kinds, 1)).decode()
            self.pages = _Frame(
                {"type": "pages", "requests": pages.owners, "kinds": kinds, "tiers": pages.tiers},
                self._secret,
            )

    def ask_pages(self) -> None:
        """Unless nothing has changed, a request for them is under way, or making them takes too
        much of the engine's time."""
        now = time.monotonic()
        if now >= self._ask_again_s and (
            self._asked_at_change != self._num_changes or self._last_pages is None
        ):
            self._asked_at_change = self._num_changes
            self._ask_again_s = now + _PAGES_LOST_S
            self._client.ask_pages()

    # ---- to watchers

    @property
    def moment(self) -> object:
        """Differs when the state does."""
        return self._num_changes, self._client.working, self.states()

    def opening(self) -> bytes:
        """The first frame: settings, which do not change."""
        ready = self._client.ready
        settings = (
            {} if ready is None else {name: getattr(ready.config, name) for name in _SETTINGS}
        )
        for name in ("num_pages", "max_requests") if settings else ():
            settings[name] *= self._client.num_replicas
        return named_event({"type": "engine", "model": self.model, **settings})

    def state(self) -> _Frame:
        """Made once for all watchers within half a frame's time; `state_moment` says how new it
        is."""
        now = time.monotonic()
        if self._state is None or now - self._state_made_s > _FRAME_EVERY_S / 2:
            self._state, self._state_made_s, self.state_moment = (
                _Frame(self._body(now), self._secret),
                now,
                self.moment,
            )
        return self._state

    def _engine(self) -> str:
        state = self.states().get(self.model, "")
        if state in ("unloaded", "loading", "unloading"):
            return state
        return "running" if self._client.working else "restarting" if self._client.alive else "down"

    def _body(self, now: float) -> dict[str, Any]:
        running: list[RequestTimeline] = []
        queued: list[RequestTimeline] = []
        for story in self._explainer.under_way():
            (queued if story.state in ("queued", "preempted") else running).append(story)
        usage = usage_rows(self._metrics.ledgers, now)
        listed = [*islice(running, _NUM_RUNNING), *islice(queued, _NUM_QUEUED)]
        return {
            "type": "state",
            "time_s": round(now, 4),
            "engine": self._engine(),
            "models": self.states(),
            "totals": self._metrics.totals(),
            "usage": usage[:_NUM_TENANTS],
            "usage_s": round(sum(device_s + host_s for _, _, device_s, host_s, *_ in usage), 3),
            "requests": [_request(story, now) for story in listed],
            "num_unlisted": len(running) + len(queued) - len(listed),
            "steps": list(self._steps),
            "decisions": list(self._decisions),
        } | ({"replicas": self._client.described()} if isinstance(self._client, Replicas) else {})


class Watcher:
    """A client of the live view, from `Live.watch` to `aclose`."""

    def __init__(self, live: Live, until: Callable[[], bool], tenant: str | None) -> None:
        self._live, self._until, self._tenant = live, until, tenant

    async def aclose(self) -> None:
        self._live.leave(self)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """A frame is made when the one before it was sent: a slow reader gets fewer, and always the
        newest."""
        live, seen, sent_s = self._live, None, 0.0
        seen_pages: _Frame | None = None
        seen_experts: _Frame | None = None
        yield live.opening()
        while not self._until():
            live.ask_pages()
            if live.moment != seen or time.monotonic() - sent_s > _HEARTBEAT_S:
                frame = live.state()
                seen, sent_s = live.state_moment, time.monotonic()
                yield frame.encoded(self._tenant)
            if live.pages is not None and live.pages is not seen_pages:
                seen_pages = live.pages
                yield seen_pages.encoded(self._tenant)
            if live.experts is not None and live.experts is not seen_experts:
                seen_experts = live.experts
                yield seen_experts.encoded(self._tenant)
            await asyncio.sleep(_FRAME_EVERY_S)


def _request(story: RequestTimeline, now: float) -> dict[str, Any]:
    """Without its text, which events do not have."""
    is_queued = story.state in ("queued", "preempted")
    prefill, decode = story.spans.get("prefill"), story.spans.get("decode")
    has_begun = story.first_token_s is not None or story.is_resumed
    return {
        "id": story.request_id,
        "phase": story.state if is_queued else "decode" if has_begun else "prefill",
        "age_s": round(now - story.begun_s, 3),
        "prompt": story.num_prompt,
        "cached": story.num_cached,
        "prefilled": story.num_prompt
        if has_begun
        else story.num_cached + (prefill.num_tokens if prefill else 0),
        "output": has_begun + (decode.num_tokens if decode else 0),
    } | ({} if story.replica is None else {"replica": story.replica})


def _words(event: Event) -> str | None:
    """A decision in words. None: not listed; evictions are not, since a full cache has one a
    step."""
    match event:
        case events.Submitted():
            return f"{event.num_prompt} prompt tokens"
        case events.Preempted():
            return f"{event.reason}; {event.how_back}" if event.how_back else event.reason
        case events.Admitted() | events.Deferred():
            return event.reason
        case events.LayoutAdvised():
            return in_words(event)
        case events.RecordingStopped():
            return (
                f"the load is not recorded any more, after {event.num_requests} requests: "
                f"{event.reason}"
            )
        case events.Placed():
            return f"{event.part}: {event.reason}"
        case events.TakenOver():
            return (
                f"from replica {event.source}: {event.num_found} tokens found, "
                f"{event.num_computed} computed again"
            )
        case events.TierNotUsed():
            return f"{event.tier} is not used: {event.reason}"
        case events.MovesFailed():
            direction = "loaded from" if event.is_load else "stored in"
            return f"{event.num_pages} pages could not be {direction} {event.tier}: {event.reason}"
        case events.Finished() | events.Aborted():
            return f"{event.reason} after {event.num_output} tokens"
        case events.PrefixHeld():
            return (
                f"{event.num_tokens} tokens {'pinned' if event.is_pinned else 'retained'}: "
                f"{event.reason}"
            )
        case events.PrefixNotHeld():
            return f"not held: {event.reason}"
        case events.EngineDown():
            restart = f"; started again in {event.retry_s:.1f} s" if event.num_failed else ""
            return f"{'given up' if event.is_given_up else 'engine down'}: {event.reason}{restart}"
        case events.EngineRestarted():
            return f"engine restarted; {event.num_requests} requests continue"
        case events.ModelLoading():
            return f"loading {event.model}: {event.reason}"
        case events.ModelLoaded():
            return f"loaded {event.model} in {event.duration_s:.1f} s"
        case events.ModelHeld():
            return f"{event.model} takes no new requests: {event.reason}"
        case events.ModelUnloaded():
            return f"unloaded {event.model}: {event.reason}"
    return None
