"""EngineClient: requests to an engine process that is watched over. Loads no torch.

If the process dies, or makes no progress though it has work, it is started anew and every request under way is submitted
again: with its seed, and with the tokens that were already delivered as the beginning of its answer. Noise is a function of
(seed, position) and rows are independent of their batch, so the continuation is the one that would have come.

A request that had not got a token out of the engine that died may be what killed it. Such suspects are tried one at a time,
beside those that are beyond doubt, so that the guilty one is given up alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from tidemill import events
from tidemill.config import EngineOptions
from tidemill.engine.inbox import Inbox
from tidemill.engine.link import EngineLink, error_from
from tidemill.errors import DeadlineExceeded, EngineDead, TidemillError
from tidemill.events import Event
from tidemill.sched.request import BACKGROUND
from tidemill.wire import (
    Abort,
    Delta,
    Finish,
    FromEngine,
    Loading,
    Pages,
    Ready,
    Refused,
    Resumed,
    ShowPages,
    StepOutput,
    Submit,
    ToEngine,
)

MAX_DEATHS = 3  # of engines under a request without a token from it, before it is given up
_MAX_RESTARTS = 3  # in a row that do not get to work
_WATCH_EVERY_S = 0.5
_log = logging.getLogger("tidemill.engine")


@dataclass(slots=True)
class _Pending:
    """A request under way: what it would take to ask for the rest of it."""

    request: Submit
    inbox: Inbox
    outputs: list[list[int]]  # delivered, by sample
    over: set[int] = field(default_factory=set)  # samples that have ended
    is_submitted: bool = True  # to the engine there is now
    has_told: bool = False  # it got a token out of it
    num_deaths: int = 0  # of engines that did not give it a token
    is_known: bool = False  # an engine has told of it

    @property
    def is_over(self) -> bool:
        """The engine is done with it, if not its reader."""
        return len(self.over) == len(self.outputs)

    @property
    def trial_rank(self) -> tuple[bool, int, int]:
        """Suspects are tried in this order: batches after people, and who has seen fewer deaths first."""
        priority = self.request.priority
        return priority >= BACKGROUND, self.num_deaths, priority

    def again(self) -> Submit:
        if not self.is_known:
            return self.request
        left = [Resumed(i, tokens) for i, tokens in enumerate(self.outputs) if i not in self.over]
        return msgspec.structs.replace(self.request, resumed=left)


class EngineClient:
    """`submit` returns a stream of deltas; leaving the stream early aborts the request."""

    def __init__(
        self,
        on_events: Callable[[list[Event]], None] | None = None,
        stall_s: float = 60.0,
        on_pages: Callable[[Pages], None] | None = None,
    ) -> None:
        self._on_events = on_events
        self._on_pages = on_pages
        self._stall_s = stall_s
        self._pending: dict[str, _Pending] = {}
        self._link: EngineLink | None = None  # None: there is none at the moment
        self._supervisor: asyncio.Task[None] | None = None
        self._death = ""  # why there will be none any more
        self._last_sign_s = 0.0  # of progress
        self._suspects: deque[str] = deque()
        self._on_trial: str | None = None
        self._told: set[str] = set()  # samples that an engine has told the beginning of, and none the end
        self.num_restarts = 0
        self.ready: Ready | None = None

    @property
    def alive(self) -> bool:
        """An engine is there, or on its way back."""
        return not self._death and self.ready is not None

    @property
    def working(self) -> bool:
        return self.alive and self._link is not None

    @property
    def last_step_s(self) -> float:
        """Since when no step has been heard of, in seconds."""
        return time.monotonic() - self._last_sign_s

    async def start(self, options: EngineOptions, on_loading: Callable[[Loading], None] | None = None) -> Ready:
        """Raises what went wrong, if anything does."""
        link = EngineLink()
        try:
            self.ready = await link.start(options, on_loading)
        except BaseException:
            await link.close()
            raise
        self._link = link
        self._last_sign_s = time.monotonic()
        self._supervisor = asyncio.create_task(self._supervise(options))
        return self.ready

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    async def submit(self, request: Submit, timeout_s: float | None = None) -> AsyncGenerator[Delta, None]:
        """Deltas of all samples, until each has finished. `timeout_s`: from now until the last."""
        if request.request_id in self._pending:
            raise TidemillError(f"Request id {request.request_id} is in use.")
        if self._death or self.ready is None:
            raise EngineDead(self._death or "The engine is not running.", fix="Restart the server.")
        request = msgspec.structs.replace(request, params=request.params.seeded())  # a second engine draws the same
        pending = _Pending(request, Inbox(), [[] for _ in range(request.params.n)])
        pending.is_submitted = self._link is not None  # what comes while there is none cannot have harmed one
        if not self._pending:
            self._last_sign_s = time.monotonic()  # it had nothing to do until now
        self._pending[request.request_id] = pending
        num_left = request.params.n
        too_late = DeadlineExceeded(f"The request's {timeout_s:g} s are over.") if timeout_s is not None else None
        loop = asyncio.get_running_loop()
        alarm = None if too_late is None else loop.call_later(timeout_s or 0, pending.inbox.put, too_late)
        try:
            self._send(request)
            while num_left:
                item = await pending.inbox.take()
                if isinstance(item, TidemillError):
                    num_left = 0
                    raise item
                num_left -= item.finish_reason is not None
                yield item
        except TidemillError as error:
            if request.request_id in self._pending:
                self._send(Abort(request.request_id, error.kind))
            raise
        finally:
            if alarm is not None:
                alarm.cancel()
            self._pending.pop(request.request_id, None)
            if num_left:
                self._send(Abort(request.request_id, "client left"))
            if not pending.is_submitted:  # the engine there is now knows nothing of it
                self._tell_lost(name for name in list(self._told) if name.partition(":")[0] == request.request_id)
            if self._on_trial == request.request_id:
                self._try_next()

    def cancel(self, request_id: str, why: TidemillError) -> bool:
        """End a request; its stream raises `why`. False: there is none of that name."""
        pending = self._pending.get(request_id)
        if pending is not None:
            pending.inbox.put(why)
        return pending is not None

    def finish(self, request_id: str, index: int) -> None:
        """A sample's text reached a stop string."""
        if request_id in self._pending:
            self._pending[request_id].over.add(index)
        self._send(Finish(request_id, index))

    def ask_pages(self) -> None:
        """`on_pages` is told who holds which page: after the step under way, or never, if the engine is lost first."""
        self._send(ShowPages())

    def _send(self, message: ToEngine) -> None:
        """While there is no engine, nothing is lost: the next one is told what is pending."""
        if self._link is not None:
            with contextlib.suppress(EngineDead):  # the supervisor will notice, too
                self._link.send(message)

    async def close(self) -> None:
        """Safe to call twice."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
            self._supervisor = None
        self._give_up("The engine has been shut down.")
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    # ---- watching over it

    async def _supervise(self, options: EngineOptions) -> None:
        num_failed = 0
        try:
            while num_failed < _MAX_RESTARTS:
                if self._link is not None:
                    began = time.monotonic()
                    why = await self._until_it_ends(self._link)
                    num_failed = num_failed + 1 if self._last_sign_s <= began else 0
                    _log.error("the engine is gone: %s", why)
                    link, self._link = self._link, None
                    await link.close()
                link = EngineLink()
                try:
                    self.ready = await link.start(options)
                except TidemillError as error:
                    num_failed, why = num_failed + 1, str(error)
                    _log.error("the engine could not be started again: %s", why)
                    await link.close()
                    await asyncio.sleep(num_failed)
                    continue
                except BaseException:
                    await link.close()
                    raise
                self._resume(link, why)
            self._give_up(f"The engine failed {num_failed} times in a row: {why}")
        except Exception as error:
            _log.exception("the supervisor failed")
            self._give_up(f"The engine cannot be watched any more: {type(error).__name__}.")

    async def _until_it_ends(self, link: EngineLink) -> str:
        reading = asyncio.create_task(link.read(self._take))
        try:
            while True:
                done, _ = await asyncio.wait([reading], timeout=_WATCH_EVERY_S)
                if done:
                    if reading.exception() is not None:
                        return f"its messages cannot be read: {type(reading.exception()).__name__}"
                    return link.last_words
                has_work = any(not pending.is_over for pending in self._pending.values())
                if self.last_step_s > self._stall_s and has_work:
                    link.kill()
                    return f"no step in {self._stall_s:.0f} s though requests are under way"
        finally:
            reading.cancel()

    def _resume(self, link: EngineLink, why: str) -> None:
        """What was under way goes on in the new engine."""
        self._link, self._last_sign_s = link, time.monotonic()
        self.num_restarts += 1
        self._suspects.clear()
        for request_id, pending in list(self._pending.items()):
            if pending.is_over:
                continue
            if pending.is_submitted:
                pending.num_deaths = 0 if pending.has_told else pending.num_deaths + 1
            pending.is_submitted = pending.has_told = False
            if pending.num_deaths >= MAX_DEATHS:
                what = f"The engine failed {MAX_DEATHS} times at this request."
                pending.inbox.put(EngineDead(what, fix="Try again, perhaps with a smaller request."))
                del self._pending[request_id]
            elif pending.num_deaths:
                self._suspects.append(request_id)
            else:
                self._submit_again(pending)
        self._tell_lost(list(self._told))
        self._suspects = deque(sorted(self._suspects, key=lambda name: self._pending[name].trial_rank))
        self._tell([events.EngineRestarted(time.monotonic(), why, len(self._pending))])
        self._try_next()

    def _tell_lost(self, names: Iterable[str]) -> None:
        """Of samples that have ended, but not in an engine that lived to tell."""
        for name in names:
            request_id, _, index = name.partition(":")
            pending = self._pending.get(request_id)
            if pending is None or int(index or 0) in pending.over:
                num_output = 0 if pending is None else len(pending.outputs[int(index or 0)])
                self._tell([events.Aborted(time.monotonic(), name, "it ended without an engine", num_output)])

    def _try_next(self) -> None:
        self._on_trial = None
        while self._suspects and self._on_trial is None:
            request_id = self._suspects.popleft()
            pending = self._pending.get(request_id)
            if pending is not None and not pending.is_over:
                self._on_trial = request_id
                self._submit_again(pending)

    def _submit_again(self, pending: _Pending) -> None:
        pending.is_submitted = True
        self._send(pending.again())

    def _give_up(self, why: str) -> None:
        self._death = self._death or why
        for pending in self._pending.values():
            pending.inbox.put(EngineDead(self._death, fix="Restart the server."))

    # ---- what it says

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, StepOutput):
            self._last_sign_s = time.monotonic()
            for delta in message.deltas:
                pending = self._pending.get(delta.request_id)
                if pending is not None:
                    pending.outputs[delta.index] += delta.token_ids
                    pending.has_told = True
                    if self._on_trial == delta.request_id:
                        self._try_next()
                    if delta.finish_reason:
                        pending.over.add(delta.index)
                    pending.inbox.put(delta)
            if message.events:
                self._tell(message.events)
        elif isinstance(message, Pages) and self._on_pages:
            self._on_pages(message)
        elif isinstance(message, Refused) and message.request_id in self._pending:
            self._pending[message.request_id].inbox.put(error_from(message))

    def _tell(self, batch: list[Event]) -> None:
        for event in batch:
            if isinstance(event, events.Finished | events.Aborted):
                self._told.discard(event.request_id)
            elif isinstance(event, events.Submitted):
                self._told.add(event.request_id)
                pending = self._pending.get(event.request_id.partition(":")[0])  # after it: the sample
                if pending is not None:
                    pending.is_known = True
        if self._on_events:
            try:
                self._on_events(batch)
            except Exception:
                _log.exception("a reader of events failed")
