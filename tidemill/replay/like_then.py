"""LikeThen: an engine gets what the recorded one got, between the same steps, by the recorded
clock.

The engine's events say in which order requests came, were aborted, ended by their text and were
computed. So the batches are the same again, but for what waits for the machine: a grammar that is
compiled, pages that are moved, an adapter that is read. Steps whose batch is another are counted.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import takewhile

from tidemill.engine.pending import GOES_ON
from tidemill.record.reader import RecordedRequest
from tidemill.replay.engine import ReplayEngine
from tidemill.replay.outcome import Certificate, Running, StepTimes
from tidemill.sched.request import HANDED_OVER
from tidemill.types import events
from tidemill.types.events import Event
from tidemill.types.wire import Abort, Finish, Renew, Resumed

_MOST_TRIES = 1000  # steps without a plan, before one that was recorded counts as not made
_TRY_EVERY_S = 0.002
_STEP_S = 0.001  # that a step takes which was not recorded


class RecordedClock:
    """The time of the recorded event that is repeated."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s


class LikeThen:
    def __init__(
        self,
        engine: ReplayEngine,
        clock: RecordedClock,
        requests: Sequence[RecordedRequest],
        certificate: Certificate,
    ):
        """`engine`: its clock is this one."""
        self._engine, self._clock, self._certificate = engine, clock, certificate
        self._coming: dict[str, deque[RecordedRequest]] = defaultdict(deque)
        for request in requests:
            self._coming[request.request_id].append(request)
        # by the recorded number: the kind of step, and its time now
        self._planned: dict[int, tuple[str, float]] = {}
        # when recorded steps ended, by the place of their plan
        self._ended_s: dict[int, float] = {}
        self._in_flight: deque[int] = deque()  # recorded steps whose results are not taken
        engine.tell_collected(self._collected)

    def run(self, recorded: Sequence[Event]) -> Iterator[Running]:
        """`recorded`: the events of one engine. Yields requests that have ended."""
        self._ended_s = _ends(recorded)
        for at, event in enumerate(recorded):
            self._clock.now_s = event.time_s
            match event:
                case events.Submitted():
                    yield from self._submitted(event)
                case events.Resumed():
                    self._resume(event, recorded, at)
                case events.Aborted():
                    self._abort(event)
                case events.Finished() if event.reason == HANDED_OVER:
                    self._abort(
                        events.Aborted(event.time_s, event.request_id, GOES_ON, event.num_output)
                    )
                case events.Finished() if event.reason == "stop":
                    self._finish(event)
                case events.HoldRenewed():
                    self._engine.core.renew(Renew(event.name, event.ttl_s, event.reason))
                case events.EngineRestarted():
                    self._restart(recorded, at)
                case events.StepPlanned():
                    self._step(event, at)
                case events.StepDone():
                    self._done(event)
        yield from self._finish_all()
        self._engine.drop_all()

    def rest(self) -> Iterator[Running]:
        """When all engines had their turn: what went on in one that had its turn before."""
        for name, running in self._engine.running.items():
            if not running.is_complete and not running.request.begun.request.params.beams:
                open_samples = [
                    (index, sample)
                    for index, sample in enumerate(running.samples)
                    if not sample.is_complete
                ]
                resumed = [
                    Resumed(index, sample.resume(len(sample.ids))) for index, sample in open_samples
                ]
                self._engine.submit(running.request, name, resumed=resumed)
            running.is_elsewhere = False
        yield from self._finish_all()

    def _finish_all(self) -> Iterator[Running]:
        while self._engine.core.has_work:
            self._engine.step()
        ended = [name for name, running in self._engine.running.items() if not running.is_elsewhere]
        for name in ended:
            yield self._engine.running.pop(name)

    def _submitted(self, event: events.Submitted) -> Iterator[Running]:
        name, _, sample = event.request_id.partition(":")
        engine = self._engine
        if name in engine.running and engine.running[name].is_elsewhere:
            return  # it is resumed
        if sample not in ("", "0") or engine.core.has(name) or not self._coming[name]:
            return  # with the first; or it began before the oldest file, or is none of a client
        request = self._coming[name].popleft()
        if request.prompt is None:
            return
        if name in engine.running:  # an id that is used again
            yield engine.running.pop(name)
        engine.submit(request, name)

    def _resume(self, event: events.Resumed, recorded: Sequence[Event], at: int) -> None:
        """After a restart of the engine its requests go on, each with all its samples that had not
        ended."""
        name = event.request_id.partition(":")[0]
        running = self._engine.running.get(name)
        if running is None or self._engine.core.has(name):
            return
        found: list[Resumed] = []
        for other in recorded[at:]:
            if isinstance(other, events.StepPlanned):
                break
            if isinstance(other, events.Resumed) and other.request_id.partition(":")[0] == name:
                index = int(other.request_id.partition(":")[2] or 0)
                found.append(Resumed(index, running.samples[index].resume(other.num_output)))
        # they start over, as one sequence
        if running.request.begun.request.params.beams is not None:
            found = [
                Resumed(index, sample.resume(0)) for index, sample in enumerate(running.samples)
            ]
        running.is_elsewhere = False
        self._engine.submit(running.request, name, resumed=found)

    def _restart(self, recorded: Sequence[Event], at: int) -> None:
        """The engine was started again. What had ended by then may be a little behind here, and
        ends first."""
        following = takewhile(
            lambda event: not isinstance(event, events.StepPlanned), recorded[at:]
        )
        goes_on = {
            event.request_id.partition(":")[0]
            for event in following
            if isinstance(event, events.Resumed)
        }
        for name in goes_on:
            self._engine.core.abort(Abort(name, "the engine was restarted"))
        while self._engine.core.has_work:
            self._engine.step()
        self._engine.drop_all()

    def _abort(self, event: events.Aborted) -> None:
        name, _, sample = event.request_id.partition(":")
        running = self._engine.running.get(name)
        if running is None or not self._engine.core.has(name):
            return
        running.is_elsewhere |= event.reason == GOES_ON
        if not running.is_elsewhere and not running.is_complete:
            running.is_leaving = True  # when it has what its client got: here it is a little behind
            return
        self._engine.core.abort(Abort(name, event.reason, int(sample) if sample else None))

    def _finish(self, event: events.Finished) -> None:
        """The engine ends by itself what no text ended."""
        name, _, sample = event.request_id.partition(":")
        running, index = self._engine.running.get(name), int(sample or 0)
        if (
            running is None
            or running.request.ended is None
            or not running.request.ended.outputs[index].by_text
        ):
            return
        if running.samples[index].is_complete:
            self._engine.core.finish(Finish(name, index))
        else:
            running.is_leaving = True

    def _step(self, event: events.StepPlanned, at: int) -> None:
        """Plans and launches the step; where the engine works ahead, the one before it ends with
        that."""
        began, planned = time.perf_counter(), None
        self._in_flight.append(at)
        for _ in range(_MOST_TRIES):
            if not self._engine.core.has_work:
                break
            found = [
                each
                for each in self._engine.step(ends=False)
                if isinstance(each, events.StepPlanned)
            ]
            if found:
                planned = found[0]
                break
            time.sleep(_TRY_EVERY_S)
        if planned is None:
            self._in_flight.pop()
        self._certificate.num_steps += 1
        self._certificate.num_equal_steps += planned is not None and sorted(
            planned.tokens_of
        ) == sorted(event.tokens_of)
        if planned is not None:
            self._planned[event.step] = _kind(event), time.perf_counter() - began

    def _collected(self) -> None:
        """Time passes in a step as it did then."""
        if self._in_flight:
            self._clock.now_s = max(
                self._clock.now_s, self._ended_s.get(self._in_flight.popleft(), 0.0)
            )
        else:
            self._clock.now_s += _STEP_S

    def _done(self, event: events.StepDone) -> None:
        kind, now_s = self._planned.pop(event.step, ("", 0.0))
        if kind:
            times = self._certificate.steps.setdefault(kind, StepTimes())
            times.num, times.then_s, times.now_s = (
                times.num + 1,
                times.then_s + event.duration_s,
                times.now_s + now_s,
            )


def _kind(step: events.StepPlanned) -> str:
    if step.drafts_of:
        return "steps with drafts"
    return "steps with prompts" if step.num_prefilling else "steps of decoding only"


def _ends(recorded: Sequence[Event]) -> dict[int, float]:
    """When each step ended, by the place of its plan. Steps are numbered anew when an engine is
    started again."""
    planned: dict[int, int] = {}
    ends: dict[int, float] = {}
    for at, event in enumerate(recorded):
        if isinstance(event, events.StepPlanned):
            planned[event.step] = at
        elif isinstance(event, events.StepDone) and event.step in planned:
            ends[planned[event.step]] = event.time_s
    return ends
