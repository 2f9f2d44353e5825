"""Explanations of each request's time: what its client waited, in spans that add up to the whole,
each with its reason (timeline.py).

The engine's spans are read from its events and from nothing else. Between two events a request is
in one state; when the state changes, the time since the last change is added to that state's span.
So the spans always add up.

Requests that decode together from step to step have the same spans, which are kept once for the
whole group: per request, a step of 256 would cost a tenth of the server's time. A request that
leaves the group is credited with what the group spent since it joined.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeAlias

from tidemill.sched.request import BACKGROUND
from tidemill.server.http.stopwatch import Stopwatch
from tidemill.server.observe.queueing import Line
from tidemill.server.observe.timeline import LoopTimes, Passage, RequestTimeline, Span
from tidemill.types import events
from tidemill.types.events import Event

_NUM_KEPT = 1000  # requests that have ended
_NUM_REASONS = 16
_OTHERS_STEP = "other requests"
_MAX_AHEAD = 8  # steps planned and not done; one that failed never is


def engine_id(tenant: str, request_id: str, part: int | None = None) -> str:
    """The engine's id of a part of a request, or the prefix of all its parts. Clients choose ids,
    so each tenant has its own."""
    return f"{tenant}/{request_id}/{'' if part is None else part}"


class _DecodeGroup:
    """Requests that take part in every step with one token each, and are in the same state."""

    def __init__(self, loop: LoopTimes) -> None:
        self._story = RequestTimeline("", "", 0, 0.0, 0.0, loop=loop)
        self.members: set[tuple[str, int]] = set()  # as a step has them: with one token
        self._joined: dict[str, tuple[Span, Span]] = {}  # the group's spans by then

    def _spans(self) -> tuple[Span, Span]:
        return self._story.spans.setdefault("decode", Span()), self._story.spans.setdefault(
            "between steps", Span()
        )

    def change(self, now: float, state: str) -> Span:
        return self._story.change(now, state)

    def go_on(self, now: float) -> None:
        """A step begins, unless the one before still runs."""
        if self._story.state != "decode":
            self._story.change(now, "decode")

    def take_in(self, story: RequestTimeline) -> None:
        """If it has been in the group's state since the same time."""
        if not self.members:
            self._story.state, self._story.since_s = story.state, story.since_s
            self._story.loop_then = story.loop_then
        if (story.state, story.since_s) == (self._story.state, self._story.since_s):
            self.members.add((story.request_id, 1))
            decode, between = self._spans()
            self._joined[story.request_id] = decode.copy(), between.copy()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._joined

    def let_go(self, story: RequestTimeline) -> None:
        self.members.discard((story.request_id, 1))
        for name, now, then in zip(
            ("decode", "between steps"),
            self._spans(),
            self._joined.pop(story.request_id),
            strict=True,
        ):
            if now != then:
                story.spans.setdefault(name, Span()).add(now, then)
        story.state, story.since_s = self._story.state, self._story.since_s
        story.loop_then = self._story.loop_then


class Explainer:
    def __init__(self, replica: int | None = None) -> None:
        """`replica`: the number of the engine, where there are several."""
        self._replica = replica
        self._live: dict[str, RequestTimeline] = {}
        self._ended: OrderedDict[str, RequestTimeline] = OrderedDict()
        self._placed: OrderedDict[str, list[str]] = (
            OrderedDict()
        )  # by request, until it is submitted
        self._steps: dict[int, tuple[tuple[str, int], ...]] = {}  # planned, not done
        self._loop = LoopTimes()
        self._group = _DecodeGroup(self._loop)
        foreground = Line()
        self._lines = foreground, Line(foreground)  # the background comes after the foreground
        self._background: set[str] = set()  # queued requests
        self._passages: dict[str, Passage] = {}  # of requests, through the server
        self._preparing: OrderedDict[str, tuple[float, str]] = OrderedDict()  # not queued yet
        self._last_spans: dict[int, list[Span]] = {}  # by step: of requests that ended in it

    def find(self, request_id: str, tenant: str | None) -> list[RequestTimeline]:
        """The parts of a request, by the id that its client knows. `tenant`: only of this one."""
        self._dissolve()
        every = (*self._ended.values(), *self._live.values())
        mine = (story for story in every if tenant is None or story.tenant == tenant)
        return [
            story
            for story in mine
            if story.request_id.startswith(engine_id(story.tenant, request_id))
        ]

    def under_way(self) -> Iterable[RequestTimeline]:
        """In order of arrival."""
        self._dissolve()
        return self._live.values()

    # ---- from the server

    def begin(self, request_id: str, num_samples: int, of_call: Stopwatch) -> None:
        """The server gives a request to the engine."""
        self.expect(request_id, Passage(of_call, num_samples))

    def expect(self, request_id: str, passage: Passage) -> None:
        self._passages[request_id] = passage

    def leave(self, request_id: str) -> None:
        """The server waits for nothing of it any more; the engine may not know that yet."""
        self._preparing.pop(request_id, None)
        passage = self._passages.pop(request_id, None)
        if passage is None:
            return
        for index in range(passage.num_samples):
            story = self._alone(passage.name_of(request_id, index))
            if story is not None:
                story.cut()

    def cut(self, request_id: str, index: int) -> None:
        """The server has ended a sample, whose text reached a stop string."""
        passage = self._passages.get(request_id)
        story = self._alone(passage.name_of(request_id, index)) if passage is not None else None
        if story is not None:
            story.cut()

    # ---- from the engine

    def take(self, batch: list[Event]) -> None:
        for event in batch:
            self._take(event)

    def _submit(self, event: events.Submitted) -> None:
        request_id, _, _ = event.request_id.partition(":")  # after it: the sample
        begun_s, why = self._preparing.get(request_id, (event.time_s, ""))
        timeline = RequestTimeline(
            event.request_id,
            event.tenant,
            event.num_prompt,
            begun_s,
            begun_s,
            loop=self._loop,
            num_beams=event.num_beams,
            replica=self._replica,
            passage=self._passages.get(request_id),
        )
        if why:
            timeline.why_waiting[why] = event.time_s - begun_s
        self._live[event.request_id] = timeline
        is_background = event.priority >= BACKGROUND
        timeline.place = self._lines[is_background].join(event.tenant, event.priority)
        if is_background:
            self._background.add(event.request_id)
        timeline.placed = self._placed.pop(request_id, timeline.placed)

    def _take(self, event: Event) -> None:
        now = event.time_s
        match event:
            case events.Submitted():
                self._submit(event)
            case events.Preparing():
                self._preparing[event.request_id] = now, event.reason
                while len(self._preparing) > _NUM_KEPT:
                    self._preparing.popitem(last=False)
            case events.Placed():  # before it is submitted
                self._placed[event.request_id] = [f"{event.part}: {event.reason}"]
                while len(self._placed) > _NUM_KEPT:
                    self._placed.popitem(last=False)
            case events.Resumed():
                if (story := self._live.get(event.request_id)) is not None:
                    story.is_resumed |= event.num_output > 0
                    story.was_elsewhere |= self._replica is not None and story.state == "queued"
                    story.stop_waiting(now)
            case events.TakenOver():
                if (story := self._live.get(event.request_id)) is not None:
                    tokens = (
                        f"{event.num_found} tokens were found here, {event.num_computed} "
                        "computed again"
                    )
                    story.placed.append(
                        f"from engine {event.source} after {1000 * event.waited_s:.1f} ms: {tokens}"
                    )
            case events.LoopTimed():
                self._loop.divide(
                    now, _parts_of_loop(event), _OTHERS_STEP if self._steps else "plan"
                )
            case events.StepPlanned():
                self._loop.change(now, _OTHERS_STEP)
                self._begin(event, now)
            case events.StepDone():
                self._end(event, now)
                self._loop.change(now, _OTHERS_STEP if self._steps else "loop")
            case events.EngineRestarted():
                self._steps.clear()
                self._dissolve()
                for live in self._live.values():
                    live.lose_engine()
            case (
                events.Deferred() | events.Admitted() | events.Preempted() | events.FirstToken()
                | events.BeamsReordered() | events.PagesLoading() | events.PagesLoaded()
            ):  # fmt: skip
                story = self._alone(event.request_id)
                if story is not None:
                    self._record(story, event, now)
            case (
                events.PrefixHeld()
                | events.PrefixNotHeld()
                | events.HoldRenewed()
                | events.HoldEnded()
            ):
                self._note_hold(event)
            case events.DraftsVerified():
                for request_id, num_drafts, num_right in event.of:
                    story = self._live.get(request_id) or self._ended.get(request_id)
                    if story is not None:
                        story.num_drafts += num_drafts
                        story.num_right += num_right
            case events.StepLost():
                if (story := self._live.get(event.request_id)) is not None:
                    story.num_lost += 1
            case events.TokensEvicted():
                story = self._live.get(event.request_id)
                if story is not None:
                    story.num_evicted += event.num_tokens
            case events.Finished() | events.Aborted():
                story = self._alone(event.request_id)
                if story is not None:
                    self._finish(story, event)

    def _finish(self, story: RequestTimeline, event: events.Finished | events.Aborted) -> None:
        del self._live[story.request_id]
        self._leave_queue(story, event.time_s)
        step, members = next(
            (
                (step, members)
                for step, members in self._steps.items()
                if any(name == story.request_id for name, _ in members)
            ),
            (-1, ()),
        )
        was_over = story.state == "over"
        span = story.change(event.time_s, "over")
        if members and isinstance(event, events.Finished) and not was_over:
            counts = dict(members)  # it comes before the step's end
            span.count(counts[story.request_id], len(members), sum(counts.values()))
            self._last_spans.setdefault(step, []).append(span)
        story.ended, story.num_output = event.reason, event.num_output
        story.take_end()
        self._ended[story.request_id] = story
        while len(self._ended) > _NUM_KEPT:
            self._ended.popitem(last=False)

    def _leave_queue(self, story: RequestTimeline, now: float) -> None:
        story.leave_queue(now)
        self._background.discard(story.request_id)
        for line in self._lines:
            line.leave(story.request_id)

    def _note_hold(
        self,
        event: events.PrefixHeld | events.PrefixNotHeld | events.HoldRenewed | events.HoldEnded,
    ) -> None:
        """A session's hold is changed when its request has ended, and has its name."""
        if isinstance(event, events.PrefixHeld | events.PrefixNotHeld):
            request_id = event.request_id
        else:
            request_id = event.name.removesuffix("/session")
        story = self._live.get(request_id) or self._ended.get(request_id)
        if story is None or len(story.held) >= _NUM_REASONS:
            return
        match event:
            case events.PrefixHeld():
                kind = "pinned" if event.is_pinned else "retained"
                story.held.append(
                    f"{event.num_tokens} tokens {kind} for {event.ttl_s:.0f} s: {event.reason}"
                )
            case events.PrefixNotHeld():
                story.held.append(
                    f"not {'pinned' if event.is_pinned else 'retained'}: {event.reason}"
                )
            case events.HoldRenewed():
                story.held.append(f"for {event.ttl_s:.0f} s from then on: {event.reason}")
            case events.HoldEnded():
                story.held.append(f"evictable again: {event.reason}")

    def _alone(self, request_id: str) -> RequestTimeline | None:
        """Its story, taken out of the group."""
        story = self._live.get(request_id)
        if story is not None and request_id in self._group:
            self._group.let_go(story)
        return story

    def _dissolve(self) -> None:
        for request_id, _ in [*self._group.members]:
            self._alone(request_id)

    def _record(self, story: RequestTimeline, event: Event, now: float) -> None:
        match event:
            case events.Deferred():
                story.wait_for(now, event.reason)
                for line in (
                    self._lines[1:] if event.request_id in self._background else self._lines
                ):
                    line.stop(event.request_id, event.reason)
            case events.Admitted():
                if (place := story.place) is not None:
                    place.line.start(place.tenant, place.priority)
                self._leave_queue(story, now)
                story.change(now, "between steps").num += 1
                if not story.admitted_because:
                    story.admitted_because, story.num_cached = event.reason, event.num_cached
                    story.num_host, story.num_disk, story.num_peer = (
                        event.num_host,
                        event.num_disk,
                        event.num_peer,
                    )
            case events.Preempted():
                story.change(now, "preempted")
                if len(story.preempted) < _NUM_REASONS:
                    story.preempted.append(
                        f"{event.reason}; {event.how_back}" if event.how_back else event.reason
                    )
            case events.PagesLoading():
                story.change(now, "loading").num += 1
            case events.PagesLoaded():
                story.change(now, "between steps")
            case events.FirstToken():
                story.first_token_s = now
            case events.BeamsReordered():
                story.num_reordered += 1
                story.num_forks += len(event.parents) - len(set(event.parents))

    def _begin(self, event: events.StepPlanned, now: float) -> None:
        drafts = dict(event.drafts_of)
        tokens_of = (
            tuple((name, count - drafts.get(name, 0)) for name, count in event.tokens_of)
            if drafts
            else event.tokens_of
        )
        self._steps[event.step] = tokens_of
        self._steps.pop(event.step - _MAX_AHEAD, None)
        here, group = set(tokens_of), self._group
        for request_id, _ in group.members - here:
            self._alone(request_id)
        if group.members:
            group.go_on(now)
        for request_id, count in here - group.members:
            story = self._live.get(request_id)
            if story is not None and story.state not in (
                "prefill",
                "decode",
                "over",
            ):  # or its step before is still running
                is_prompt = count > story.num_beams or (
                    story.first_token_s is None and not story.is_resumed
                )
                story.change(now, "prefill" if is_prompt else "decode")

    def _end(self, event: events.StepDone, now: float) -> None:
        tokens_of = self._steps.pop(event.step, ())
        for span in self._last_spans.pop(event.step, ()):
            _count_host(span, event, has_committed=False)
        ahead = {
            request_id: count for others in self._steps.values() for request_id, count in others
        }
        num_tokens = sum(count for _, count in tokens_of)
        here, group = set(tokens_of), self._group
        staying = group.members & here & ahead.items() if self._steps else group.members & here
        for request_id, _ in group.members - staying:
            self._alone(request_id)
        if group.members:
            span = group.change(now, "decode" if self._steps else "between steps")
            span.count(1, len(tokens_of), num_tokens)
            _count_host(span, event)
        for request_id, count in here - group.members:
            story = self._live.get(request_id)
            if story is None or story.state not in ("prefill", "decode"):
                continue
            following = ahead.get(request_id)
            was_decoding = story.state == "decode"
            state = (
                "between steps"
                if following is None
                else "prefill"
                if following > story.num_beams
                else "decode"
            )
            span = story.change(now, state)
            span.count(count, len(tokens_of), num_tokens)
            _count_host(span, event)
            if was_decoding and count == 1 and state != "prefill":
                group.take_in(story)


def _count_host(span: Span, step: events.StepDone, has_committed: bool = True) -> None:
    """The host's part of a step."""
    if step.launch_s:
        span.parts["launch"] = span.parts.get("launch", 0.0) + step.launch_s
    if step.commit_s and has_committed:
        span.parts["commit"] = span.parts.get("commit", 0.0) + step.commit_s


def _parts_of_loop(event: events.LoopTimed) -> dict[str, float]:
    return {
        "outputs": event.outputs_s,
        "messages": event.messages_s,
        "garbage collection": event.gc_s,
        "idle": event.idle_s,
    }


class ExplainerOfReplicas:
    """The same of several engines that serve one model: steps of one say nothing of requests in
    another. A request that went on in another replica has a part in each."""

    def __init__(self, num: int) -> None:
        self._each = [Explainer(number) for number in range(num)]

    def find(self, request_id: str, tenant: str | None) -> list[RequestTimeline]:
        return [story for explainer in self._each for story in explainer.find(request_id, tenant)]

    def begin(self, request_id: str, num_samples: int, of_call: Stopwatch) -> None:
        """Any of them may get it, and others when that one is lost."""
        passage = Passage(of_call, num_samples)
        for explainer in self._each:
            explainer.expect(request_id, passage)

    def leave(self, request_id: str) -> None:
        for explainer in self._each:
            explainer.leave(request_id)

    def cut(self, request_id: str, index: int) -> None:
        for explainer in self._each:
            explainer.cut(request_id, index)

    def under_way(self) -> Iterable[RequestTimeline]:
        return sorted(
            (story for explainer in self._each for story in explainer.under_way()),
            key=lambda story: story.begun_s,
        )

    def take(self, batch: list[Event]) -> None:
        for event in batch:
            self._each[event.replica].take([event])


AnyExplainer: TypeAlias = Explainer | ExplainerOfReplicas
