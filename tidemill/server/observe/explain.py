"""Explanations of each request's time, from arrival to last token: spans that add up to the whole,
each with its reason.

Read from the engine's events and from nothing else. Between two events a request is in one state;
when the state changes, the time since the last change is added to that state's span. So the spans
always add up.

Requests that decode together from step to step have the same spans, which are kept once for the
whole group: per request, a step of 256 would cost a tenth of the server's time. A request that
leaves the group is credited with what the group spent since it joined.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from tidemill import events
from tidemill.events import Event
from tidemill.sched.request import BACKGROUND

_NUM_KEPT = 1000  # requests that have ended
_NUM_REASONS = 16
_MAX_AHEAD = 8  # steps planned and not done; one that failed never is


@dataclass(slots=True)
class _Span:
    seconds: float = 0.0
    num: int = 0  # times it was entered, or steps
    num_tokens: int = 0
    num_sharing: int = 0  # requests in its steps, itself included, summed
    num_beside: int = 0  # tokens of others in its steps, summed

    def add(self, now: _Span, then: _Span) -> None:
        """Add what another span gained between `then` and `now`."""
        self.seconds += now.seconds - then.seconds
        self.num += now.num - then.num
        self.num_tokens += now.num_tokens - then.num_tokens
        self.num_sharing += now.num_sharing - then.num_sharing
        self.num_beside += now.num_beside - then.num_beside


class _Line:
    """Why the head of the queue could not start: what those behind it wait for, too. The scheduler
    tells it of the head alone, so that a step costs the same however long the queue is."""

    def __init__(self) -> None:
        self._reasons: deque[tuple[int, str]] = deque(maxlen=_NUM_REASONS)  # numbered
        self._num = 0
        self._head = ""  # the request that cannot start at the moment

    def stop(self, request_id: str, reason: str) -> None:
        if not self._head or self._reasons[-1][1] != reason:
            self._num += 1
            self._reasons.append((self._num, reason))
        self._head = request_id

    def leave(self, request_id: str) -> None:
        if request_id == self._head:
            self._head = ""

    @property
    def position(self) -> int:
        """The first reason that counts for a request that comes now."""
        return self._num if self._head else self._num + 1

    def since(self, position: int) -> list[str]:
        return list(dict.fromkeys(reason for number, reason in self._reasons if number >= position))


@dataclass(slots=True)
class RequestTimeline:
    request_id: str
    tenant: str
    num_prompt: int
    begun_s: float
    since_s: float  # the last change
    state: str = "queued"
    spans: dict[str, _Span] = field(default_factory=dict)
    why_waiting: Counter[str] = field(default_factory=Counter)
    preempted: list[str] = field(default_factory=list)
    num_cached: int = 0
    num_host: int = 0  # of them, from host memory
    num_disk: int = 0
    num_peer: int = 0  # that other engines have computed
    admitted_because: str = ""
    first_token_s: float | None = None
    ended: str = ""
    num_output: int = 0
    num_beams: int = 1
    num_reordered: int = 0  # steps after which other beams went on than before
    num_forks: int = 0
    num_evicted: int = 0  # tokens that its KV policy gave up
    held: list[str] = field(default_factory=list)  # what of it is kept in the KV cache, and why
    num_drafts: int = 0
    num_right: int = 0
    num_lost: int = 0  # steps that followed wrong drafts
    replica: int | None = None
    is_resumed: bool = False  # its first token came from another engine
    placed: list[str] = field(
        default_factory=list
    )  # why this engine has it, where engines have roles
    line: _Line | None = None  # while it is queued
    position: int = 0
    behind: list[str] = field(default_factory=list)  # what those before it waited for

    def leave_queue(self) -> None:
        if self.line is not None:
            self.behind, self.line = self.line.since(self.position), None

    def change(self, now: float, state: str) -> _Span:
        """Time since the last change goes to the state it was in; returns that span."""
        span = self.spans.setdefault(self.state, _Span())
        span.seconds += max(now - self.since_s, 0.0)
        self.since_s, self.state = max(now, self.since_s), state
        return span

    def lose_engine(self) -> None:
        """The time since the last change counts as preempted."""
        if self.state != "queued":
            self.state = "preempted"
            self.preempted.append("the engine was restarted")

    def body(self) -> dict[str, Any]:
        total = max(self.since_s - self.begun_s, 1e-9)
        spans = []
        for name in ("queued", "preempted", "loading", "prefill", "decode", "between steps"):
            span = self.spans.get(name)
            if span is not None and (span.seconds or span.num):
                row = {
                    "span": name,
                    "ms": round(1000 * span.seconds, 3),
                    "percent": round(100 * span.seconds / total, 3),
                }
                spans.append(row | {"because": self._because(name, span)})
        beams = {
            "width": self.num_beams,
            "reorderings": self.num_reordered,
            "forks": self.num_forks,
        }
        return (
            {
                "id": self.request_id.partition("/")[2],  # without the tenant
                "object": "explanation",
                "status": self.ended or "under way",
                "total_ms": round(1000 * total, 3),
                "first_token_ms": None
                if self.first_token_s is None
                else round(1000 * (self.first_token_s - self.begun_s), 3),
                "prompt_tokens": self.num_prompt,
                "cached_tokens": self.num_cached,
                "host_tokens": self.num_host,
                "disk_tokens": self.num_disk,
                "peer_tokens": self.num_peer,
                "output_tokens": self.num_output,
                "evicted_tokens": self.num_evicted,
                "draft_tokens": self.num_drafts,
                "accepted_tokens": self.num_right,
                "admission": self.admitted_because,
                "spans": spans,
            }
            | ({"beams": beams} if self.num_beams > 1 else {})
            | ({"held": self.held} if self.held else {})
            | ({"replica": self.replica} if self.replica is not None else {})
            | ({"placed": self.placed} if self.placed else {})
        )

    def _because(self, name: str, span: _Span) -> str:
        if name == "queued":
            behind = self.behind if self.line is None else self.line.since(self.position)
            own = "; ".join(reason for reason, _ in self.why_waiting.most_common())
            return own or (
                f"behind others in the queue: {'; '.join(behind)}"
                if behind
                else "until the next step"
            )
        if name == "preempted":
            return "; ".join(self.preempted)
        if name == "loading":
            where = (
                f"{self.num_host} tokens from host memory, {self.num_disk} from disk, "
                f"{self.num_peer} from other engines"
            )
            return f"its pages came from a tier: {where} at first"
        if name == "between steps":
            return "planning, sampling and sending"
        others = span.num_sharing / max(span.num, 1) - 1
        beside = span.num_beside / max(span.num, 1)
        num_tokens = span.num_tokens + (self.num_right - self.num_lost if name == "decode" else 0)
        steps, tokens = (
            "step" if span.num == 1 else "steps",
            "token" if num_tokens == 1 else "tokens",
        )
        shared = (
            f"shared with {others:.1f} other requests, which computed {beside:.1f} tokens a step"
            if others
            else "alone"
        )
        drafts = (
            f"; {self.num_right} of {self.num_drafts} drafts were right"
            if name == "decode" and self.num_drafts
            else ""
        )
        lost = f"{self.num_lost} step{'' if self.num_lost == 1 else 's'}"
        drafts += f", and {lost} followed wrong ones" if name == "decode" and self.num_lost else ""
        return f"{span.num} {steps} for {num_tokens} {tokens}, {shared}{drafts}"


def engine_id(tenant: str, request_id: str, part: int | None = None) -> str:
    """The engine's id of a part of a request, or the prefix of all its parts. Clients choose ids,
    so each tenant has its own."""
    return f"{tenant}/{request_id}/{'' if part is None else part}"


class _DecodeGroup:
    """Requests that take part in every step with one token each, and are in the same state."""

    def __init__(self) -> None:
        self._story = RequestTimeline("", "", 0, 0.0, 0.0)
        self.members: set[tuple[str, int]] = set()  # as a step has them: with one token
        self._joined: dict[str, tuple[_Span, _Span]] = {}  # the group's spans by then

    def _spans(self) -> tuple[_Span, _Span]:
        return self._story.spans.setdefault("decode", _Span()), self._story.spans.setdefault(
            "between steps", _Span()
        )

    def change(self, now: float, state: str) -> _Span:
        return self._story.change(now, state)

    def go_on(self, now: float) -> None:
        """A step begins, unless the one before still runs."""
        if self._story.state != "decode":
            self._story.change(now, "decode")

    def take_in(self, story: RequestTimeline) -> None:
        """If it has been in the group's state since the same time."""
        if not self.members:
            self._story.state, self._story.since_s = story.state, story.since_s
        if (story.state, story.since_s) == (self._story.state, self._story.since_s):
            self.members.add((story.request_id, 1))
            decode, between = self._spans()
            self._joined[story.request_id] = replace(decode), replace(between)

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
                story.spans.setdefault(name, _Span()).add(now, then)
        story.state, story.since_s = self._story.state, self._story.since_s


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
        self._group = _DecodeGroup()
        self._lines = (
            _Line(),
            _Line(),
        )  # of the foreground and of the background, which comes after it
        self._background: set[str] = set()  # queued requests

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

    def take(self, batch: list[Event]) -> None:
        for event in batch:
            self._take(event)

    def _take(self, event: Event) -> None:
        now = event.time_s
        match event:
            case events.Submitted():
                timeline = RequestTimeline(
                    event.request_id,
                    event.tenant,
                    event.num_prompt,
                    now,
                    now,
                    num_beams=event.num_beams,
                    replica=self._replica,
                )
                self._live[event.request_id] = timeline
                is_background = event.priority >= BACKGROUND
                timeline.line = self._lines[is_background]
                timeline.position = timeline.line.position
                if is_background:
                    self._background.add(event.request_id)
                timeline.placed = self._placed.pop(
                    event.request_id.partition(":")[0], timeline.placed
                )
            case events.Placed():  # before it is submitted
                self._placed[event.request_id] = [f"{event.part}: {event.reason}"]
                while len(self._placed) > _NUM_KEPT:
                    self._placed.popitem(last=False)
            case events.Resumed() if event.num_output:
                if (story := self._live.get(event.request_id)) is not None:
                    story.is_resumed = True
            case events.TakenOver():
                if (story := self._live.get(event.request_id)) is not None:
                    tokens = (
                        f"{event.num_found} tokens were found here, {event.num_computed} "
                        "computed again"
                    )
                    story.placed.append(
                        f"from engine {event.source} after {1000 * event.waited_s:.1f} ms: {tokens}"
                    )
            case events.StepPlanned():
                self._begin(event, now)
            case events.StepDone():
                self._end(event.step, now)
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
                    del self._live[event.request_id]
                    self._leave_queue(story)
                    step = next(
                        (
                            members
                            for members in self._steps.values()
                            if any(name == event.request_id for name, _ in members)
                        ),
                        None,
                    )
                    span = story.change(now, "over")
                    if step is not None and isinstance(
                        event, events.Finished
                    ):  # it comes before the step's end
                        counts = dict(step)
                        _count(span, counts[event.request_id], len(step), sum(counts.values()))
                    story.ended, story.num_output = event.reason, event.num_output
                    self._ended[event.request_id] = story
                    while len(self._ended) > _NUM_KEPT:
                        self._ended.popitem(last=False)

    def _leave_queue(self, story: RequestTimeline) -> None:
        story.leave_queue()
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
                if len(story.why_waiting) < _NUM_REASONS:
                    story.why_waiting[event.reason] += 1
                for line in (
                    self._lines[1:] if event.request_id in self._background else self._lines
                ):
                    line.stop(event.request_id, event.reason)
            case events.Admitted():
                self._leave_queue(story)
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
            ):  # or its step before is still running
                is_prompt = count > story.num_beams or (
                    story.first_token_s is None and not story.is_resumed
                )
                story.change(now, "prefill" if is_prompt else "decode")

    def _end(self, step: int, now: float) -> None:
        tokens_of = self._steps.pop(step, ())
        ahead = {
            request_id: count for others in self._steps.values() for request_id, count in others
        }
        num_tokens = sum(count for _, count in tokens_of)
        here, group = set(tokens_of), self._group
        staying = group.members & here & ahead.items() if self._steps else group.members & here
        for request_id, _ in group.members - staying:
            self._alone(request_id)
        if group.members:
            _count(
                group.change(now, "decode" if self._steps else "between steps"),
                1,
                len(tokens_of),
                num_tokens,
            )
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
            _count(story.change(now, state), count, len(tokens_of), num_tokens)
            if was_decoding and count == 1 and state != "prefill":
                group.take_in(story)


def _count(span: _Span, mine: int, num_requests: int, num_tokens: int) -> None:
    """One more step, and what it was shared with."""
    span.num += 1
    span.num_tokens += mine
    span.num_sharing += num_requests
    span.num_beside += num_tokens - mine


class ExplainerOfReplicas:
    """The same of several engines that serve one model: steps of one say nothing of requests in
    another. A request that went on in another replica has a part in each."""

    def __init__(self, num: int) -> None:
        self._each = [Explainer(number) for number in range(num)]

    def find(self, request_id: str, tenant: str | None) -> list[RequestTimeline]:
        return [story for explainer in self._each for story in explainer.find(request_id, tenant)]

    def under_way(self) -> Iterable[RequestTimeline]:
        return sorted(
            (story for explainer in self._each for story in explainer.under_way()),
            key=lambda story: story.begun_s,
        )

    def take(self, batch: list[Event]) -> None:
        for event in batch:
            self._each[event.replica].take([event])


AnyExplainer: TypeAlias = Explainer | ExplainerOfReplicas
