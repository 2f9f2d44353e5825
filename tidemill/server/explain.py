"""Where each request's time went, from arrival to last token: spans that add up to the whole, each with its reason.

Read from the engine's events and from nothing else. Between two events a request is in one state; when the state changes, the
time since the last change is added to that state's span. So the spans add up, whatever happens.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tidemill import events
from tidemill.events import Event

_NUM_KEPT = 1000  # requests that have ended
_NUM_REASONS = 16


@dataclass(slots=True)
class _Span:
    seconds: float = 0.0
    num: int = 0  # times it was entered, or steps
    num_tokens: int = 0
    num_sharing: int = 0  # requests in its steps, itself included, summed
    num_beside: int = 0  # tokens of others in its steps, summed


@dataclass(slots=True)
class Story:
    request_id: str
    owner: str
    num_prompt: int
    begun_s: float
    since_s: float  # the last change
    state: str = "queued"
    spans: dict[str, _Span] = field(default_factory=dict)
    why_waiting: Counter[str] = field(default_factory=Counter)
    preempted: list[str] = field(default_factory=list)
    num_cached: int = 0
    admitted_because: str = ""
    first_token_s: float | None = None
    ended: str = ""
    num_output: int = 0

    def change(self, now: float, state: str) -> _Span:
        """Time since the last change goes to the state it was in; returns that span."""
        span = self.spans.setdefault(self.state, _Span())
        span.seconds += max(now - self.since_s, 0.0)
        self.since_s, self.state = max(now, self.since_s), state
        return span

    def lose_engine(self) -> None:
        """All time since the last change was lost with it."""
        if self.state != "queued":
            self.state = "preempted"
            self.preempted.append("the engine was started again")

    def body(self) -> dict[str, Any]:
        total = max(self.since_s - self.begun_s, 1e-9)
        spans = []
        for name in ("queued", "preempted", "prefill", "decode", "between steps"):
            span = self.spans.get(name)
            if span is not None and (span.seconds or span.num):
                told = {"span": name, "ms": round(1000 * span.seconds, 3), "percent": round(100 * span.seconds / total, 3)}
                spans.append(told | {"because": self._because(name, span)})
        return {
            "id": self.request_id.partition("/")[2],  # without the owner
            "object": "explanation",
            "status": self.ended or "under way",
            "total_ms": round(1000 * total, 3),
            "first_token_ms": None if self.first_token_s is None else round(1000 * (self.first_token_s - self.begun_s), 3),
            "prompt_tokens": self.num_prompt,
            "cached_tokens": self.num_cached,
            "output_tokens": self.num_output,
            "admission": self.admitted_because,
            "spans": spans,
        }

    def _because(self, name: str, span: _Span) -> str:
        if name == "queued":
            return "; ".join(reason for reason, _ in self.why_waiting.most_common()) or "until the next step began"
        if name == "preempted":
            return "; ".join(self.preempted)
        if name == "between steps":
            return "the engine planned, sampled and sent"
        others = span.num_sharing / max(span.num, 1) - 1
        beside = span.num_beside / max(span.num, 1)
        steps, tokens = "step" if span.num == 1 else "steps", "token" if span.num_tokens == 1 else "tokens"
        company = f"shared with {others:.1f} others who computed {beside:.1f} tokens" if others else "alone"
        return f"{span.num} {steps} for {span.num_tokens} {tokens}, {company}"


def engine_id(owner: str, request_id: str, part: int | None = None) -> str:
    """What the engine calls a part of a request; or how all of them begin. Ids are clients' to give: each owner has their own."""
    return f"{owner}/{request_id}/{'' if part is None else part}"


class Explainer:
    def __init__(self) -> None:
        self._live: dict[str, Story] = {}
        self._ended: OrderedDict[str, Story] = OrderedDict()
        self._steps: dict[int, tuple[tuple[str, int], ...]] = {}  # planned, not done

    def find(self, request_id: str, owner: str | None) -> list[Story]:
        """The parts of a request, by the id its client knows. `owner`: only if they are theirs."""
        every = (*self._ended.values(), *self._live.values())
        mine = (story for story in every if owner is None or story.owner == owner)
        return [story for story in mine if story.request_id.startswith(engine_id(story.owner, request_id))]

    def under_way(self) -> Iterable[Story]:
        """In the order in which they came."""
        return self._live.values()

    def take(self, batch: list[Event]) -> None:
        for event in batch:
            self._take(event)

    def _take(self, event: Event) -> None:
        now = event.time_s
        match event:
            case events.Submitted():
                self._live[event.request_id] = Story(event.request_id, event.owner, event.num_prompt, now, now)
            case events.StepPlanned():
                self._begin(event, now)
            case events.StepDone():
                self._end(event.step, now)
            case events.EngineRestarted():
                self._steps.clear()
                for one in self._live.values():
                    one.lose_engine()
            case events.Deferred() | events.Admitted() | events.Preempted() | events.FirstToken():
                story = self._live.get(event.request_id)
                if story is not None:
                    self._tell(story, event, now)
            case events.Finished() | events.Aborted():
                story = self._live.pop(event.request_id, None)
                if story is not None:
                    step = next((one for one in self._steps.values() if any(name == event.request_id for name, _ in one)), None)
                    span = story.change(now, "over")
                    if step is not None and isinstance(event, events.Finished):  # it is told before the step's end
                        counts = dict(step)
                        _count(span, counts[event.request_id], len(step), sum(counts.values()))
                    story.ended, story.num_output = event.reason, event.num_output
                    self._ended[event.request_id] = story
                    while len(self._ended) > _NUM_KEPT:
                        self._ended.popitem(last=False)

    def _tell(self, story: Story, event: Event, now: float) -> None:
        match event:
            case events.Deferred():
                if len(story.why_waiting) < _NUM_REASONS:
                    story.why_waiting[event.reason] += 1
            case events.Admitted():
                story.change(now, "between steps").num += 1
                if not story.admitted_because:
                    story.admitted_because, story.num_cached = event.reason, event.num_cached
            case events.Preempted():
                story.change(now, "preempted")
                if len(story.preempted) < _NUM_REASONS:
                    story.preempted.append(event.reason)
            case events.FirstToken():
                story.first_token_s = now

    def _begin(self, event: events.StepPlanned, now: float) -> None:
        self._steps[event.step] = event.tokens_of
        for request_id, count in event.tokens_of:
            story = self._live.get(request_id)
            if story is not None and story.state not in ("prefill", "decode"):  # or its step before is still running
                story.change(now, "prefill" if count > 1 or story.first_token_s is None else "decode")

    def _end(self, step: int, now: float) -> None:
        tokens_of = self._steps.pop(step, ())
        ahead = {request_id: count for others in self._steps.values() for request_id, count in others}
        num_tokens = sum(count for _, count in tokens_of)
        for request_id, count in tokens_of:
            story = self._live.get(request_id)
            if story is None or story.state not in ("prefill", "decode"):
                continue
            following = ahead.get(request_id)
            state = "between steps" if following is None else "prefill" if following > 1 else "decode"
            _count(story.change(now, state), count, len(tokens_of), num_tokens)


def _count(span: _Span, mine: int, num_requests: int, num_tokens: int) -> None:
    """One more step, and who was in it."""
    span.num += 1
    span.num_tokens += mine
    span.num_sharing += num_requests
    span.num_beside += num_tokens - mine
