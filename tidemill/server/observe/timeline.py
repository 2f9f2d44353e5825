"""The timeline of a request: spans that add up to what its client waited, each with its reason.

It begins when the server could read the first byte of the request, and ends when the socket had the
last byte of the response. Before the engine has the request, and after its last token, the spans
are the server's. In between they are the engine's, whatever the server does meanwhile with tokens
that came before.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from tidemill.server.http import stopwatch
from tidemill.server.http.stopwatch import Stopwatch
from tidemill.server.observe.queueing import Place

_NUM_REASONS = 16
_BEFORE = (
    stopwatch.READING,
    stopwatch.PARSING,
    stopwatch.TEMPLATE,
    stopwatch.TOKENIZING,
    stopwatch.GRAMMAR,
)
_ENGINE = ("queued", "preempted", "loading", "prefill", "decode", "between steps")
_AFTER = (stopwatch.FORMATTING, stopwatch.WRITING)
_TO, _FROM, _OTHERS = "to the engine", "from the engine", "other parts"
_ORDER = (*_BEFORE, _TO, *_ENGINE, _FROM, *_AFTER, _OTHERS, stopwatch.LOOP)
_REASONS = {
    stopwatch.READING: "until the headers and the body had arrived",
    stopwatch.PARSING: "the JSON of the body, and what its API makes of it",
    stopwatch.TEMPLATE: "the chat template made a prompt of the messages",
    stopwatch.TOKENIZING: "tokens were made of the prompt",
    stopwatch.GRAMMAR: "its grammar was checked",
    _TO: "from the server's process to the engine's",
    _FROM: "from the engine's last token to the server's process",
    stopwatch.FORMATTING: "text was made of the last tokens, and the response of that",
    stopwatch.WRITING: "until the socket had the last byte",
    _OTHERS: "other prompts and samples of the request, or another engine that had it",
    stopwatch.LOOP: "a turn of the server's event loop or a thread, and small work between",
}


@dataclass(slots=True)
class Span:
    seconds: float = 0.0
    num: int = 0  # times it was entered, or steps
    num_tokens: int = 0
    num_sharing: int = 0  # requests in its steps, itself included, summed
    num_beside: int = 0  # tokens of others in its steps, summed
    parts: dict[str, float] = field(default_factory=dict)  # seconds of it that are known better

    def copy(self) -> Span:
        counts = self.num, self.num_tokens, self.num_sharing, self.num_beside
        return Span(self.seconds, *counts, dict(self.parts))

    def add(self, now: Span, then: Span) -> None:
        """Add what another span gained between `then` and `now`."""
        self.seconds += now.seconds - then.seconds
        self.num += now.num - then.num
        self.num_tokens += now.num_tokens - then.num_tokens
        self.num_sharing += now.num_sharing - then.num_sharing
        self.num_beside += now.num_beside - then.num_beside
        self.add_parts(now.parts, then.parts)

    def add_parts(self, now: dict[str, float], then: dict[str, float]) -> None:
        parts = self.parts
        for part, seconds in now.items():
            if gained := seconds - then.get(part, 0.0):
                parts[part] = parts.get(part, 0.0) + gained

    def count(self, mine: int, num_requests: int, num_tokens: int) -> None:
        """One more step, and what it was shared with."""
        self.num += 1
        self.num_tokens += mine
        self.num_sharing += num_requests
        self.num_beside += num_tokens - mine


class LoopTimes:
    """The work of the engine's loop, in seconds by part: that is what requests wait for between
    their steps."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._part, self._since_s = "loop", 0.0
        self._at_s, self._at = -1.0, self._sums  # the latest answer: many requests ask at once

    def change(self, now: float, part: str) -> None:
        """Another part begins."""
        self._add(self._part, now - self._since_s)
        self._part, self._since_s = part, max(now, self._since_s)

    def divide(self, now: float, parts: dict[str, float], part: str) -> None:
        """The same, of a part of which it is known better what it was."""
        left = max(now - self._since_s, 0.0)
        for name, seconds in parts.items():
            self._add(name, min(seconds, left))
            left -= min(seconds, left)
        self._since_s = max(self._since_s, now - left)
        self.change(now, part)

    def at(self, now: float) -> dict[str, float]:
        """The sums by then; not to be changed."""
        if now != self._at_s:
            sums = self._at = dict(self._sums)
            sums[self._part] = sums.get(self._part, 0.0) + max(now - self._since_s, 0.0)
            self._at_s = now
        return self._at

    def _add(self, part: str, seconds: float) -> None:
        self._at_s = -1.0
        if seconds > 0:
            self._sums[part] = self._sums.get(part, 0.0) + seconds


@dataclass(slots=True)
class Passage:
    """The way of a request of the engine through the server."""

    stopwatch: Stopwatch
    num_samples: int
    submitted_s: float = field(default_factory=time.monotonic)
    before: dict[str, float] = field(default_factory=dict)  # the server's spans by then
    num_left: int = 0  # samples that have not ended in the engine

    def __post_init__(self) -> None:
        self.before, self.num_left = self.stopwatch.snapshot(), self.num_samples
        self.stopwatch.num_computed += self.num_samples

    def name_of(self, request_id: str, index: int) -> str:
        """The name that the engine has for a sample."""
        return f"{request_id}:{index}" if self.num_samples > 1 else request_id

    def sample_ended(self) -> None:
        num = min(self.num_left, 1)  # none, if it ends in one engine and then in another
        self.num_left -= num
        self.stopwatch.engine_ended(num)


@dataclass(slots=True)
class RequestTimeline:
    request_id: str
    tenant: str
    num_prompt: int
    begun_s: float
    since_s: float  # the last change
    state: str = "queued"
    loop: LoopTimes = field(default_factory=LoopTimes)
    spans: dict[str, Span] = field(default_factory=dict)
    why_waiting: dict[str, float] = field(default_factory=dict)  # as the first, or before the queue
    why_now: tuple[str, float] | None = None  # why it waits, and since when
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
    was_elsewhere: bool = False  # in another engine before
    placed: list[str] = field(
        default_factory=list
    )  # why this engine has it, where engines have roles
    place: Place | None = None  # while it is queued
    behind: str = ""  # why it had to wait for others
    loop_then: dict[str, float] = field(default_factory=dict)  # at the last change
    passage: Passage | None = None  # None: nobody knows the server's part
    cut_s: float | None = None  # when the engine's last token came that the client got
    taken_s: float = 0.0  # when the server had that
    at_taken: dict[str, float] = field(default_factory=dict)  # the server's spans by then

    def wait_for(self, now: float, reason: str) -> None:
        """It could start, but for this."""
        self.stop_waiting(now)
        if reason in self.why_waiting or len(self.why_waiting) < _NUM_REASONS:
            self.why_waiting.setdefault(reason, 0.0)
            self.why_now = reason, now

    def stop_waiting(self, now: float) -> None:
        if self.why_now is not None:
            reason, since_s = self.why_now
            self.why_waiting[reason] += max(now - since_s, 0.0)
            self.why_now = None

    def leave_queue(self, now: float) -> None:
        self.stop_waiting(now)
        if self.place is not None:
            self.behind = self.place.why()
            self.place.line.forget()
            self.place = None

    def change(self, now: float, state: str) -> Span:
        """Time since the last change goes to the state it was in; returns that span."""
        span = self.spans.setdefault(self.state, Span())
        span.seconds += max(now - self.since_s, 0.0)
        if self.state == "between steps":
            span.add_parts(self.loop.at(now), self.loop_then)
        if state == "between steps":
            self.loop_then = self.loop.at(now)
        self.since_s, self.state = max(now, self.since_s), state
        return span

    def lose_engine(self) -> None:
        """The time since the last change counts as preempted."""
        if self.state not in ("queued", "over"):
            self.state = "preempted"
            self.preempted.append("the engine was restarted")

    def take_end(self) -> None:
        """The server has got its last token."""
        if self.passage is not None and not self.taken_s:
            self.passage.sample_ended()
            self.taken_s, self.at_taken = time.monotonic(), self.passage.stopwatch.snapshot()

    def cut(self) -> None:
        """The client waits for no more of it, whatever the engine still does."""
        if not self.taken_s:
            if self.state in ("queued", "preempted", "loading"):
                self.change(time.monotonic(), self.state)
            self.cut_s = self.since_s
            self.take_end()
            self.state = "over"

    # ---- for who asks

    def body(self) -> dict[str, Any]:
        end_s = self.since_s if self.cut_s is None else self.cut_s
        engine_s = max(end_s - self.begun_s, 0.0)
        seconds = {name: self.spans[name].seconds for name in _ENGINE if name in self.spans}
        seconds = {name: spent for name, spent in seconds.items() if spent or self.spans[name].num}
        beside: dict[str, float] = {}
        begun_s = self.begun_s
        if self.passage is not None:
            of_server, beside = self._of_server(engine_s)
            seconds |= {name: spent for name, spent in of_server.items() if spent > 0}
            begun_s = self.passage.stopwatch.begun_s
        total = max(sum(seconds.values()), 1e-9)
        first_s = self.first_token_s
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
                "total_ms": _ms(total),
                "engine_ms": _ms(engine_s),
                "first_token_ms": None if first_s is None else _ms(first_s - begun_s),
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
                "spans": [
                    self._row(name, seconds[name], total) for name in _ORDER if name in seconds
                ],
            }
            | ({"beside": {name: _ms(spent) for name, spent in beside.items()}} if beside else {})
            | ({"beams": beams} if self.num_beams > 1 else {})
            | ({"held": self.held} if self.held else {})
            | ({"replica": self.replica} if self.replica is not None else {})
            | ({"placed": self.placed} if self.placed else {})
        )

    def _row(self, name: str, seconds: float, total: float) -> dict[str, Any]:
        row = {"span": name, "ms": _ms(seconds), "percent": round(100 * seconds / total, 3)}
        if name not in _ENGINE:
            return row | {"because": _REASONS[name]}
        span = self.spans[name]
        row["because"] = self._because(name, span)
        if parts := _parts_of(name, span):
            row["parts"] = [{"part": part, "ms": _ms(spent)} for part, spent in parts]
        return row

    def _of_server(self, engine_s: float) -> tuple[dict[str, float], dict[str, float]]:
        """The server's spans before and after the engine's, and beside them."""
        assert self.passage is not None
        passage, now = self.passage, self.passage.stopwatch.snapshot()
        spans = dict(passage.before)
        if not self.taken_s:  # under way: up to the engine's last news
            spans[_TO] = max(self.begun_s - passage.submitted_s, 0.0)
            spans[_OTHERS] = spans.pop(stopwatch.ENGINE, 0.0)
            return spans, {}
        # Clocks of engines on other machines are others: then only the sum is known.
        between_s = max(self.taken_s - passage.submitted_s - engine_s, 0.0)
        spans[_TO] = min(max(self.begun_s - passage.submitted_s, 0.0), between_s)
        spans[_FROM] = between_s - spans[_TO]
        if self.was_elsewhere:
            spans[_TO], spans[stopwatch.ENGINE] = 0.0, spans.get(stopwatch.ENGINE, 0.0) + spans[_TO]
        for name, seconds in now.items():
            spans[name] = spans.get(name, 0.0) + seconds - self.at_taken.get(name, 0.0)
        spans[_OTHERS] = spans.pop(stopwatch.ENGINE, 0.0)
        beside = {
            name: self.at_taken.get(name, 0.0) - passage.before.get(name, 0.0) for name in _AFTER
        }
        return spans, {name: spent for name, spent in beside.items() if spent > 0}

    def _because(self, name: str, span: Span | None) -> str:
        if name == "queued":
            return self._why_queued()
        if name == "preempted":
            return "; ".join(self.preempted)
        if name == "loading":
            where = (
                f"{self.num_host} tokens from host memory, {self.num_disk} from disk, "
                f"{self.num_peer} from other engines"
            )
            return f"its pages came from a tier: {where} at first"
        assert span is not None
        if name == "between steps":
            parts = [f"{part} {_ms(spent):g} ms" for part, spent in _parts_of(name, span)]
            return ", ".join(parts) or "planning, sampling and sending"
        return self._why_steps(name, span)

    def _why_queued(self) -> str:
        behind = self.behind if self.place is None else self.place.why()
        waiting = dict(self.why_waiting)
        if self.why_now is not None:
            waiting[self.why_now[0]] += max(time.monotonic() - self.why_now[1], 0.0)
        own = sorted(waiting, key=lambda reason: -waiting[reason])
        why = [behind] * bool(behind) + [reason for reason in own if reason not in behind]
        return "; ".join(why) or "until the next step"

    def _why_steps(self, name: str, span: Span) -> str:
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


def _parts_of(name: str, span: Span) -> list[tuple[str, float]]:
    """The parts of a span, the longest first. Of a step, what is left is the computation."""
    parts = {part: spent for part, spent in span.parts.items() if spent > 0}
    if name in ("prefill", "decode") and parts:
        parts["compute"] = max(span.seconds - sum(parts.values()), 0.0)
    return sorted(parts.items(), key=lambda part: -part[1])


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
