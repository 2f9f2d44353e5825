"""EngineClient: requests to an engine process that it supervises. Loads no torch.

If the process dies, or makes no step though it has work, it is started again and every request
under way is submitted again: with its seed, and with the tokens that were already delivered as a
prefix of its output. Noise is a function of (seed, position) and sequences are independent of their
batch, so the continuation is the one that would have come.

A request that was admitted and had not got a token out of the engine that died may have caused it.
Such suspects are tried one at a time, beside those that are beyond doubt, so that the one that
kills engines is given up alone. The engine is given up only if it cannot be started several times
in a row; one of several is tried again for ever, as others serve meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable

from tidemill.config import EngineOptions, settled
from tidemill.engine import inbox
from tidemill.engine.adapter_names import AdapterNames
from tidemill.engine.inbox import Inbox
from tidemill.engine.link import START_S, EngineLink, Link, error_from
from tidemill.engine.pending import GOES_ON, EngineLost, Pending, names_of
from tidemill.engine.progress import Progress
from tidemill.errors import (
    ClientTooSlow,
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    TidemillError,
)
from tidemill.sched.queue import check_room
from tidemill.types import events
from tidemill.types.events import Event
from tidemill.types.wire import (
    Abort,
    AdapterReply,
    Delta,
    Expect,
    Finish,
    FromEngine,
    Gone,
    Loading,
    Pages,
    Ready,
    Refused,
    Renew,
    Resumed,
    ShowPages,
    StepOutput,
    Submit,
    ToEngine,
)

STALL_S = 60.0
MAX_DEATHS = 3  # of engines at a request, without a token from them, before it is given up
MAX_FAILED_STARTS = 3  # in a row, before the engine is given up
_FIRST_DELAY_S, _MAX_DELAY_S = 0.5, 10.0  # between two attempts to start
_MAX_GIVEN_UP_DELAY_S = 60.0  # the same, of one of several engines that was given up
PROBE = -(2**31)  # the priority of requests that only show that the engine works
WATCH_EVERY_S = 0.5
_STALL_STEPS = 20  # a stalled engine has taken as long as this many of the longest steps
_FORGET_LONGEST = 0.99  # per step
_log = logging.getLogger("tidemill.engine")


class EngineClient:
    """`submit` returns a stream of deltas; leaving the stream early aborts the request."""

    num_replicas = 1

    def __init__(
        self,
        on_events: Callable[[list[Event]], None] | None = None,
        stall_s: float = STALL_S,
        on_pages: Callable[[Pages], None] | None = None,
        start_s: float = START_S,
        new_link: Callable[[], Link] = EngineLink,
        hands_over: bool = False,
        gate: Callable[[Submit], str] | None = None,
    ) -> None:
        """`stall_s`: without a step although there is work, after which the engine is replaced;
        longer where steps take longer. `start_s`: without progress, after which a start has failed.
        `new_link`: to an engine that is to be started. `hands_over`: it is one of several. If it is
        lost, requests that cannot have caused it end with EngineLost at once; if it cannot be
        started, it is tried again for ever, and takes no requests until that succeeds. `gate`: why
        a request must wait until it is let in; empty: it need not."""
        self._on_events = on_events
        self._on_pages = on_pages
        self.stall_s, self._start_s = stall_s, start_s
        self._new_link, self._hands_over, self._gate = new_link, hands_over, gate
        self.pending: dict[str, Pending] = {}
        self._leaving: set[str] = set()  # aborted, and the engine has not confirmed it yet
        self.link: Link | None = None  # None: there is no engine at the moment
        self._supervisor: asyncio.Task[None] | None = None
        self._last_step_s = 0.0  # when it was reported
        self.longest_step_s = 0.0  # of late
        self.stalled_s = 0.0  # for how long the engine has had work and made no step
        self._progress = Progress()
        self._suspects: deque[str] = deque()
        self._on_trial: str | None = None
        self.adapters = AdapterNames(self._send, self._uses_adapter)
        # samples that were reported as submitted, and not as ended
        self._reported: set[str] = set()
        self._is_held = False  # the engine gets nothing new
        # called when a request must wait for an engine, and when one has ended
        self.on_change: Callable[[], None] | None = None
        self.used_s = time.monotonic()  # when a request last came or ended
        self.death = ""  # why there will be no engine any more
        self.gave_up = asyncio.Event()
        self.num_restarts = 0
        self.ready: Ready | None = None

    @property
    def alive(self) -> bool:
        """There is an engine, or one is or can be started."""
        return not self.death and self.ready is not None

    @property
    def working(self) -> bool:
        return self.alive and self.link is not None

    @property
    def last_step_s(self) -> float:
        """Seconds since a step was reported."""
        return time.monotonic() - self._last_step_s

    async def start(
        self,
        options: EngineOptions,
        on_loading: Callable[[Loading], None] | None = None,
        link: Link | None = None,
    ) -> Ready:
        """Raises what went wrong, if anything does. After `stop`, or after an engine was given up,
        another may be started: it gets what was submitted meanwhile. `link`: to a process that has
        inspected models so far."""
        link = link or self._new_link()
        try:
            ready = await link.start(self.adapters.options(options), on_loading, self._start_s)
        except BaseException as error:
            await link.close()
            if isinstance(error, OSError):
                raise EngineDead(f"The engine process cannot be started: {error}.") from error
            raise
        self.link = link
        self._set_ready(ready)
        self._last_step_s = self.used_s = time.monotonic()
        self.death = ""
        self.gave_up.clear()
        self._forget_engine()
        self.adapters.engine_started(ready.adapters)
        self._supervisor = asyncio.create_task(self._supervise(settled(options, ready.config)))
        self.release()
        return ready

    def _set_ready(self, ready: Ready) -> None:
        """Keeps the reasons of the first configuration. A later engine is given its values, so its
        own reasons are "given"."""
        if self.ready is not None:
            ready.config.reasons.update(self.ready.config.reasons)
        self.ready = ready

    @property
    def num_pending(self) -> int:
        return len(self.pending)

    @property
    def num_waiting(self) -> int:
        """Requests that no engine has."""
        return sum(
            not pending.is_submitted and not pending.is_over for pending in self.pending.values()
        )

    @property
    def is_idle(self) -> bool:
        """The engine has nothing to do, and has reported the end of all that it had."""
        if self._leaving or any(
            pending.is_submitted and not pending.is_over for pending in self.pending.values()
        ):
            return False
        return all(name.partition(":")[0] in self.pending for name in self._reported)

    def hold(self) -> None:
        """From now on requests wait; those that the engine has go on."""
        self._is_held = True

    def release(self) -> None:
        """The engine gets the requests that wait; those that may have killed one, one at a time."""
        self._is_held = False
        waiting = [
            pending
            for name, pending in self.pending.items()
            if not pending.is_submitted and not pending.is_over and name not in self._leaving
        ]
        for pending in waiting:
            if not pending.num_deaths:
                self._submit(pending)
        suspects = sorted(
            (pending for pending in waiting if pending.num_deaths),
            key=lambda pending: pending.trial_rank,
        )
        self._suspects = deque(pending.request.request_id for pending in suspects)
        if self._on_trial is None or self._on_trial in self._suspects:
            self._try_next()

    async def stop(self) -> None:
        """End the engine, if there is one; it should be idle. Requests wait until another is
        started, and continue there."""
        self.hold()
        await self._end_supervisor()
        link, self.link = self.link, None
        if link is not None:
            await link.close()
        self.death = ""
        self.gave_up.clear()
        self._forget_engine()

    def _forget_engine(self) -> None:
        """That it had requests: it is gone."""
        self._leaving.clear()
        self._on_trial = None
        for pending in self.pending.values():
            pending.is_submitted = pending.is_admitted = pending.has_token = False
        self._report_lost(list(self._reported))

    def fail_all(self, why: TidemillError) -> None:
        """Every request that is not computed in full raises `why`."""
        for pending in list(self.pending.values()):
            if not pending.is_over:
                self._end(pending, why)

    async def submit(
        self,
        request: Submit,
        timeout_s: float | None = None,
        tells_accepted: bool = False,
        tells_progress: bool = False,
    ) -> AsyncGenerator[Delta, None]:
        """Deltas of all samples, until each has finished. `timeout_s`: from now until the last.
        `tells_accepted`: the first delta is empty if it takes longer to compute a token than to
        accept the request. `tells_progress`: so are those that come after each step of its
        prompt."""
        if request.request_id in self.pending:
            raise TidemillError(f"Request id {request.request_id} is in use.")
        if self.death or self.ready is None:
            raise EngineDead(self.death or "The engine is not running.", fix="Restart the server.")
        pending = Pending(
            request, Inbox(), [[] for _ in range(request.params.n)], tells_accepted=tells_accepted
        )
        if tells_progress:
            self._progress.tell(pending)
        why = self._why_held if self._is_held else self._gate(request) if self._gate else ""
        if request.resumed is not None:
            self._take_up(pending, request.resumed, is_queued=bool(why))
        if why:
            self._queue(pending, why)
            pending.waits_because = "" if self._is_held else why
        self.pending[request.request_id] = pending
        self._note_use(request)
        num_left = len(pending.outputs) - len(pending.over)
        alarm = None
        if timeout_s is not None:
            too_late = DeadlineExceeded(f"The request's {timeout_s:g} s are over.")
            alarm = asyncio.get_running_loop().call_later(timeout_s, self._end, pending, too_late)
        try:
            if request.request_id not in self._leaving:
                self._submit(pending)
            if self._is_held and self.on_change:
                self.on_change()
            while num_left:
                delta = await pending.inbox.take()
                num_left -= delta.finish_reason is not None
                yield delta
        finally:
            if alarm is not None:
                alarm.cancel()
            self._end(pending)

    @property
    def _why_held(self) -> str:
        return (
            "the model is not loaded"
            if self.link is None
            else "the model will be unloaded for another"
        )

    def _take_up(self, pending: Pending, resumed: list[Resumed], is_queued: bool) -> None:
        """A request that another engine had begun."""
        request = pending.request
        pending.is_known = True
        pending.over.update(set(range(request.params.n)) - {sample.index for sample in resumed})
        pending.num_finished = len(pending.over)
        for sample in resumed:
            pending.outputs[sample.index] = list(sample.output_ids)
        for index, name in enumerate(names_of(request)):
            # or else it is reported where it is queued
            if index not in pending.over and not is_queued:
                submitted = len(request.prompt_ids), request.priority, request.tenant
                self._report([events.Submitted(time.monotonic(), name, *submitted)])

    def cancel(self, request_id: str, why: TidemillError) -> bool:
        """Abort a request; its stream raises `why`. False: there is none of that id."""
        pending = self.pending.get(request_id)
        if pending is not None:
            self._end(pending, why)
        return pending is not None

    def finish(self, request_id: str, index: int) -> None:
        """A sample's text reached a stop string."""
        if request_id in self.pending:
            self.pending[request_id].over.add(index)
        self._send(Finish(request_id, index))

    def renew(self, name: str, ttl_s: float, reason: str) -> None:
        """A hold ends so many seconds from now; 0: at once. An engine that is not there holds
        nothing."""
        self._send(Renew(name, ttl_s, reason))

    def expect(self, request: Submit | None) -> None:
        """Another engine computes its prompt, and it goes on in this one. None: prompts that go on
        in others are computed."""
        self._send(
            Expect([])
            if request is None
            else Expect(request.prompt_ids, request.salt, request.adapter, request.segments)
        )

    def ask_pages(self) -> None:
        """`on_pages` gets who holds which page: after the step under way, or never, if the engine
        is lost first."""
        self._send(ShowPages())

    @property
    def at_gate(self) -> list[Pending]:
        """Requests that wait to be let in."""
        return [
            pending
            for pending in self.pending.values()
            if pending.waits_because and not pending.is_over
        ]

    def let_in(self, pending: Pending) -> None:
        """The engine may have it."""
        pending.waits_because = ""
        if pending.request.request_id not in self._leaving:
            self._submit(pending)

    def _queue(self, pending: Pending, why: str) -> None:
        """No engine takes it yet, so it and the queue's bound are checked, and it is reported and
        accepted here."""
        assert self.ready is not None
        request = pending.request
        request.check(self.ready.model.vocab_size, self.ready.config.context_of(request.params))
        waiting = [
            other.request
            for other in self.pending.values()
            if not other.is_submitted and not other.is_over
        ]
        check_room(self.ready.config.max_waiting, request, waiting)
        pending.is_known = True
        if pending.tells_accepted:
            pending.inbox.put(Delta(request.request_id, 0, []))
        now = time.monotonic()
        for name in names_of(request):
            submitted = events.Submitted(
                now, name, len(request.prompt_ids), request.priority, request.tenant
            )
            self._report([submitted, events.Deferred(now, name, why)])

    def _submit(self, pending: Pending) -> None:
        """To the current engine. While there is none, nothing is lost: the next one gets what is
        pending."""
        if self.link is not None and not self._is_held and not pending.waits_because:
            pending.is_submitted = True
            try:
                self._send(pending.again())
            except OverflowError:  # of this request alone
                self._end(
                    pending,
                    InvalidRequest(
                        "A number in the request is too large.", fix="Give a smaller one."
                    ),
                )

    def _end(self, pending: Pending, why: TidemillError | None = None) -> None:
        """Take a request off the list, abort what the engine still computes of it, at once, and
        have its stream raise `why`. No effect on one that has ended."""
        request_id = pending.request.request_id
        if self.pending.get(request_id) is not pending:
            return
        del self.pending[request_id]
        self._progress.forget(request_id)
        self._note_use(pending.request)
        if pending.request.adapter:
            self.adapters.requests_ended()
        if why is not None:
            pending.inbox.fail(why)
        if pending.is_submitted and pending.num_finished < len(pending.outputs):
            self._leaving.add(request_id)
            self._send(Abort(request_id, "client left" if why is None else why.kind))
        if not pending.is_submitted:  # the current engine knows nothing of it
            self._report_lost(self._names_of(request_id))
            # nobody else tells how many are left
            if self._is_held and self.link is None and self.ready is not None:
                left = sum(
                    len(pending.outputs) - len(pending.over) for pending in self.pending.values()
                )
                self._report(
                    [events.RequestsLeft(time.monotonic(), 0, left, self.ready.config.num_pages)]
                )
        if self._on_trial == request_id:
            self._try_next()
        if self.on_change:
            self.on_change()

    def _uses_adapter(self, adapter_id: int) -> bool:
        return any(pending.request.adapter == adapter_id for pending in self.pending.values())

    def _note_use(self, request: Submit) -> None:
        if request.priority != PROBE:
            self.used_s = time.monotonic()

    def _names_of(self, request_id: str) -> list[str]:
        """Its samples that were reported as submitted, and not as ended."""
        return [name for name in self._reported if name.partition(":")[0] == request_id]

    def _send(self, message: ToEngine) -> None:
        if self.link is not None:
            with contextlib.suppress(EngineDead):  # the supervisor will notice, too
                self.link.send(message)

    async def close(self) -> None:
        """Safe to call twice."""
        await self._end_supervisor()
        self._give_up("The engine has been shut down.")
        link, self.link = self.link, None
        if link is not None:
            await link.close()

    # ---- supervision

    async def _end_supervisor(self) -> None:
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.cancel()
            await asyncio.wait([supervisor])

    async def _supervise(self, options: EngineOptions) -> None:
        try:
            while True:
                assert self.link is not None
                why = await self._until_it_ends(self.link)
                _log.error("the engine is gone: %s", why)
                link, self.link = self.link, None
                self._report([events.EngineDown(time.monotonic(), why)])
                if self._hands_over:
                    self._hand_over(link.is_blameless)
                await link.close()
                self._resume(await self._start_again(options), why)
        except TidemillError as error:
            self._give_up(error.message)
        except Exception as error:
            _log.exception("the supervisor failed")
            self._give_up(f"The engine cannot be supervised any more: {type(error).__name__}.")

    async def _start_again(self, options: EngineOptions) -> Link:
        """Raises if a sole engine fails to start several times in a row. What this process lacks
        may come back, so an OSError is retried for as long as it takes."""
        num_failed, delay_s = 0, _FIRST_DELAY_S
        while True:
            link = self._new_link()
            try:
                self._set_ready(
                    await link.start(self.adapters.options(options), within_s=self._start_s)
                )
                return link
            except (TidemillError, OSError) as error:
                _log.error("the engine could not be started again: %s", error)
                await link.close()
                num_failed += isinstance(error, TidemillError)
                why = str(error)
            except BaseException:
                await link.close()
                raise
            if num_failed >= MAX_FAILED_STARTS and not self.death:
                what = f"The engine could not be started {num_failed} times in a row: {why}"
                if not self._hands_over:
                    raise EngineDead(what)
                self._give_up(what)
            self._report(
                [events.EngineDown(time.monotonic(), why, num_failed, delay_s, bool(self.death))]
            )
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _MAX_GIVEN_UP_DELAY_S if self.death else _MAX_DELAY_S)

    async def _until_it_ends(self, link: Link) -> str:
        """Kills it if it stalls: its work brings no step. That is counted in looks at it, not by
        the clock: this process may have been the one that stood still."""
        reading = asyncio.create_task(link.read(self._take))
        self.stalled_s = 0.0
        try:
            while True:
                done, _ = await asyncio.wait([reading], timeout=WATCH_EVERY_S)
                if done:
                    if reading.exception() is not None:
                        return f"its messages cannot be read: {type(reading.exception()).__name__}"
                    return link.last_error
                has_work = any(
                    pending.is_submitted and not pending.is_over
                    for pending in self.pending.values()
                )
                self.stalled_s = self.stalled_s + WATCH_EVERY_S if has_work else 0.0
                if self.stalled_s > self.stall_limit_s:
                    link.kill()
                    return f"no step in {self.stall_limit_s:.0f} s though requests are under way"
        finally:
            reading.cancel()

    @property
    def stall_limit_s(self) -> float:
        """A step takes at most as long as its tokens one by one; those that were seen may have
        taken longer."""
        assert self.ready is not None
        longest_s = max(
            _STALL_STEPS * self.longest_step_s, self.ready.config.token_budget * self.ready.step_s
        )
        return max(self.stall_s, longest_s)

    def _resume(self, link: Link, why: str) -> None:
        """Continues the requests that were under way in the new engine."""
        self.link, self._last_step_s = link, time.monotonic()
        self.death = ""
        self.gave_up.clear()
        self.adapters.engine_started([])
        self.num_restarts += 1
        self._leaving.clear()
        self._suspects.clear()
        self._on_trial = None
        self._find_suspects()
        for pending in [pending for pending in self.pending.values() if not pending.is_over]:
            if pending.may_have_killed:
                pending.num_deaths += 1
            elif pending.has_token:
                pending.num_deaths = 0
            pending.is_submitted = pending.is_admitted = pending.has_token = False
            if pending.num_deaths >= MAX_DEATHS:
                what = f"The engine failed {MAX_DEATHS} times at this request."
                self._end(
                    pending, EngineDead(what, fix="Try again, perhaps with a smaller request.")
                )
        self._report_lost(list(self._reported))
        self._report([events.EngineRestarted(time.monotonic(), why, len(self.pending))])
        if not self._is_held:
            self.release()

    def _hand_over(self, is_blameless: bool) -> None:
        """Requests that the engine cannot have died of need not wait until it is started again.
        `is_blameless`: of none."""
        self._find_suspects()
        self._end_as_lost(
            [
                pending
                for pending in self.pending.values()
                if is_blameless or not pending.may_have_killed
            ]
        )

    def hand_over_waiting(self) -> None:
        """While there is no engine: requests that wait for it may go on in another that there is."""
        if self._hands_over and not self.working:
            self._end_as_lost(
                [pending for pending in self.pending.values() if not pending.is_submitted]
            )

    def _end_as_lost(self, some: Iterable[Pending]) -> None:
        """But for those that engines may have died of."""
        for pending in [
            pending
            for pending in some
            if not pending.is_over and not pending.num_deaths and pending.request.priority != PROBE
        ]:
            if pending.is_over:  # by what followed from the one before
                continue
            lost = EngineLost("The engine is restarting.", fix="Try again in a moment.")
            lost.is_known, lost.may_have_killed = pending.is_known, pending.may_have_killed
            self._end(pending, lost)
            self._report_lost(self._names_of(pending.request.request_id), GOES_ON)

    def _find_suspects(self) -> None:
        """If the engine died before it could say which requests it had begun with, those may be any
        that it had."""
        under_way = [pending for pending in self.pending.values() if not pending.is_over]
        if not any(pending.is_admitted or pending.has_token for pending in under_way):
            for pending in under_way:
                pending.is_admitted = pending.is_submitted

    def _report_lost(self, names: Iterable[str], why: str = "it ended without an engine") -> None:
        """Report samples as aborted that have ended, but not in an engine that lived to report it."""
        for name in names:
            request_id, _, index = name.partition(":")
            pending = self.pending.get(request_id)
            if pending is None or int(index or 0) in pending.over:
                num_output = 0 if pending is None else len(pending.outputs[int(index or 0)])
                self._report([events.Aborted(time.monotonic(), name, why, num_output)])

    def _try_next(self) -> None:
        self._on_trial = None
        while self._suspects and self._on_trial is None:
            request_id = self._suspects.popleft()
            pending = self.pending.get(request_id)
            if pending is not None and not pending.is_over:
                self._on_trial = request_id
                self._submit(pending)

    def _give_up(self, why: str) -> None:
        self.death = self.death or why
        self.adapters.engine_lost(EngineDead(self.death))
        self.hand_over_waiting()
        # what was computed in full may still be read
        self.fail_all(EngineDead(self.death, fix="Restart the server."))
        self.gave_up.set()
        if self.on_change:
            self.on_change()

    # ---- messages from the engine

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, StepOutput):
            if any(isinstance(event, events.StepDone) for event in message.events):
                self._last_step_s, self.stalled_s = time.monotonic(), 0.0
            self._progress.take(message.events)
            for delta in message.deltas:
                self._take_delta(delta)
            if message.events:
                self._report(message.events)
        elif isinstance(message, AdapterReply):
            self.adapters.take(message)
        elif isinstance(message, Pages) and self._on_pages:
            self._on_pages(message)
        elif isinstance(message, Gone):
            self._leaving.discard(message.request_id)
            pending = self.pending.get(message.request_id)
            if pending is not None and not pending.is_submitted:  # another took the id meanwhile
                self._submit(pending)
        elif isinstance(message, Refused) and message.request_id in self.pending:
            pending = self.pending[message.request_id]
            if pending.is_submitted:
                pending.num_finished = len(pending.outputs)
                self._end(pending, error_from(message))
                if not pending.is_admitted:  # reported here, not by the engine
                    self._report_lost(self._names_of(message.request_id))

    def _take_delta(self, delta: Delta) -> None:
        pending = self.pending.get(delta.request_id)
        if pending is None or not pending.is_submitted:  # it has ended, and another may have its id
            return
        pending.outputs[delta.index] += delta.token_ids
        pending.has_token = True
        self._progress.forget(delta.request_id)
        if self._on_trial == delta.request_id:
            self._try_next()
        if delta.finish_reason:
            pending.over.add(delta.index)
            pending.num_finished += 1
        pending.inbox.put(delta)
        if pending.inbox.num_cells > inbox.MAX_CELLS:
            what = "The client does not read: too much of the response waits for it."
            self._end(
                pending, ClientTooSlow(what, fix="Read faster, or ask for fewer log-probabilities.")
            )

    def _report(self, batch: list[Event]) -> None:
        for event in batch:
            if isinstance(event, events.StepDone):
                self.longest_step_s = max(event.duration_s, _FORGET_LONGEST * self.longest_step_s)
            elif isinstance(event, events.Finished | events.Aborted):
                self._reported.discard(event.request_id)
            elif isinstance(event, events.Submitted | events.Admitted):
                # after it: the sample
                pending = self.pending.get(event.request_id.partition(":")[0])
                if isinstance(event, events.Submitted):
                    self._reported.add(event.request_id)
                if pending is not None and pending.is_submitted:
                    if pending.tells_accepted and not pending.is_known and not pending.has_token:
                        pending.inbox.put(Delta(pending.request.request_id, 0, []))
                    pending.is_known = True
                    pending.is_admitted |= isinstance(event, events.Admitted)
        if self._on_events:
            try:
                self._on_events(batch)
            except Exception:
                _log.exception("a reader of events failed")
