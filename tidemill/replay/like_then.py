"""LikeThen: an engine gets what the recorded one got, between the same steps, by the recorded clock.

The engine's events say in which order requests came, were aborted, ended by their text and were computed. So the batches are the
same again, but for what waits for the machine: a grammar that is compiled, pages that are moved, an adapter that is read. Steps
whose batch is another are counted.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

from tidemill import events
from tidemill.events import Event
from tidemill.record.reader import RecordedRequest
from tidemill.replay.engine import ReplayEngine, Running
from tidemill.replay.outcome import Certificate, StepTimes
from tidemill.wire import Abort, Finish, Renew, Resumed

_MOST_TRIES = 1000  # steps without a plan, before one that was recorded counts as not made
_TRY_EVERY_S = 0.002


class RecordedClock:
    """The time of the recorded event that is repeated."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now(self) -> float:
        return self.now_s


class LikeThen:
    def __init__(self, engine: ReplayEngine, clock: RecordedClock, requests: Sequence[RecordedRequest], certificate: Certificate):
        """`engine`: its clock is this one."""
        self._engine, self._clock, self._certificate = engine, clock, certificate
        self._coming: dict[str, deque[RecordedRequest]] = defaultdict(deque)
        for request in requests:
            self._coming[request.request_id].append(request)
        self._planned: dict[int, tuple[str, float]] = {}  # by the recorded number: the kind of step, and its time now

    def run(self, recorded: Sequence[Event]) -> Iterator[Running]:
        """`recorded`: the events of one engine. Yields requests that have ended."""
        for at, event in enumerate(recorded):
            self._clock.now_s = event.time_s
            match event:
                case events.Submitted():
                    yield from self._submitted(event, recorded, at)
                case events.Aborted():
                    self._abort(event)
                case events.Finished() if event.reason == "stop":
                    self._finish(event)
                case events.HoldRenewed():
                    self._engine.core.renew(Renew(event.name, event.ttl_s, event.reason))
                case events.EngineRestarted():
                    self._engine.drop_all()
                case events.StepPlanned():
                    self._step(event)
                case events.StepDone():
                    self._done(event)
        while self._engine.core.has_work:
            self._engine.step()
        yield from self._engine.running.values()
        self._engine.running.clear()

    def _submitted(self, event: events.Submitted, recorded: Sequence[Event], at: int) -> Iterator[Running]:
        name, _, sample = event.request_id.partition(":")
        engine = self._engine
        is_again = self._is_resumed(event.request_id, recorded, at)
        if sample not in ("", "0") and not is_again:
            return  # with the first
        if engine.core.has(name):
            return  # with another sample that was resumed
        if is_again and name in engine.running:
            running = engine.running[name]
            engine.submit(running.request, name, resumed=self._resumed(name, running, recorded, at))
            return
        if not self._coming[name]:
            return  # it began before the oldest file, or is none of a client
        request = self._coming[name].popleft()
        if request.prompt is None:
            return
        if name in engine.running:  # an id that is used again
            yield engine.running.pop(name)
        engine.submit(request, name)

    @staticmethod
    def _is_resumed(name: str, recorded: Sequence[Event], at: int) -> bool:
        following = recorded[at + 1] if at + 1 < len(recorded) else None
        return isinstance(following, events.Resumed) and following.request_id == name

    def _resumed(self, name: str, running: Running, recorded: Sequence[Event], at: int) -> list[Resumed]:
        """The samples that go on after a restart, with the output that they had by then."""
        found: list[Resumed] = []
        for event in recorded[at:]:
            if isinstance(event, events.StepPlanned):
                break
            if isinstance(event, events.Resumed) and event.request_id.partition(":")[0] == name:
                index = int(event.request_id.partition(":")[2] or 0)
                sample = running.samples[index]
                sample.ids = [*sample.ids[: event.num_output], *sample.recorded[len(sample.ids) : event.num_output]]
                found.append(Resumed(index, list(sample.ids)))
        return found

    def _abort(self, event: events.Aborted) -> None:
        name, _, sample = event.request_id.partition(":")
        if self._engine.core.has(name):
            self._engine.core.abort(Abort(name, event.reason, int(sample) if sample else None))

    def _finish(self, event: events.Finished) -> None:
        """The engine ends by itself what no text ended."""
        name, _, sample = event.request_id.partition(":")
        running, index = self._engine.running.get(name), int(sample or 0)
        if running is not None and running.request.ended is not None and running.request.ended.outputs[index].by_text:
            self._engine.core.finish(Finish(name, index))

    def _step(self, event: events.StepPlanned) -> None:
        """Plans and launches the step; where the engine works ahead, the one before it ends with that."""
        began, planned = time.perf_counter(), None
        for _ in range(_MOST_TRIES):
            if not self._engine.core.has_work:
                break
            found = [each for each in self._engine.step(ends=False) if isinstance(each, events.StepPlanned)]
            if found:
                planned = found[0]
                break
            time.sleep(_TRY_EVERY_S)
        self._certificate.num_steps += 1
        self._certificate.num_equal_steps += planned is not None and sorted(planned.tokens_of) == sorted(event.tokens_of)
        if planned is not None:
            self._planned[event.step] = _kind(event), time.perf_counter() - began

    def _done(self, event: events.StepDone) -> None:
        kind, now_s = self._planned.pop(event.step, ("", 0.0))
        if kind:
            times = self._certificate.steps.setdefault(kind, StepTimes())
            times.num, times.then_s, times.now_s = times.num + 1, times.then_s + event.duration_s, times.now_s + now_s


def _kind(step: events.StepPlanned) -> str:
    if step.drafts_of:
        return "steps with drafts"
    return "steps with prompts" if step.num_prefilling else "steps of decoding only"
