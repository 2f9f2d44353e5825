"""The steps of a recorded engine, by its events: their shapes and times, from which its own profile
is fitted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tidemill.planning.cost import StepShape
from tidemill.planning.fit import Sample
from tidemill.types import events
from tidemill.types.events import Event

_IDLE_S = 0.001  # the loop waited: the step does not follow the one before it


@dataclass(slots=True)
class _Sequence:
    num_computed: int
    num_known: int  # tokens when it was admitted: from there on it samples


@dataclass(slots=True)
class _Planned:
    shape: StepShape | None  # None: what it began with is not known
    planned_s: float
    follows: bool
    messages_s: float


@dataclass(slots=True)
class DraftCounts:
    """Drafts of a recorded engine."""

    num_steps: int = 0  # of a sequence, that decoded
    num_drafted: int = 0  # of these, with drafts
    num_drafts: int = 0
    num_right: int = 0


@dataclass(slots=True)
class RecordedSteps:
    samples: list[Sample] = field(default_factory=list)
    drafts: DraftCounts = field(default_factory=DraftCounts)
    steps_ahead: int = 0
    submitted_s: dict[str, float] = field(default_factory=dict)  # when an engine got a request
    first_s: dict[str, float] = field(default_factory=dict)  # when its first token was there
    # tokens found in the prefix cache, when it was first admitted
    cached: dict[str, int] = field(default_factory=dict)
    has_roles: bool = False


def steps_of(happened: Iterable[Event]) -> RecordedSteps:
    """`happened`: of all engines of a model, in their order."""
    found, engines = RecordedSteps(), dict[int, _Engine]()
    for event in happened:
        if event.replica not in engines or isinstance(
            event, events.EngineRestarted | events.EngineDown
        ):
            engines[event.replica] = _Engine(found)
        engines[event.replica].take(event)
    return found


class _Engine:
    def __init__(self, found: RecordedSteps) -> None:
        self._found = found
        self._sequences: dict[str, _Sequence] = {}
        self._beams: set[str] = set()
        self._num_new = 0  # tokens of requests that start in the next step
        self._planned: dict[int, _Planned] = {}
        self._ended_s: float | None = None  # of the last step
        self._loop = events.LoopTimed(0.0)

    def take(self, event: Event) -> None:
        match event:
            case events.Submitted():
                self._found.submitted_s.setdefault(event.request_id.partition(":")[0], event.time_s)
                if event.num_beams > 1:
                    self._beams.add(event.request_id)
            case events.Admitted():
                self._sequences[event.request_id] = _Sequence(event.num_cached, event.num_tokens)
                self._found.cached.setdefault(event.request_id, event.num_cached)
                is_fork = ":" in event.request_id and event.num_cached == event.num_tokens - 1
                self._num_new += 0 if is_fork else event.num_tokens
            case events.LoopTimed():
                self._loop = event
            case events.StepPlanned():
                self._plan(event)
            case events.DraftsVerified():
                self._verified(event)
            case events.StepDone():
                self._done(event)
            case events.FirstToken():
                self._found.first_s.setdefault(event.request_id.partition(":")[0], event.time_s)
            case events.Finished() | events.Aborted() | events.Preempted():
                self._sequences.pop(event.request_id, None)
            case events.Placed():
                self._found.has_roles |= event.part != "whole"

    def _plan(self, event: events.StepPlanned) -> None:
        is_ahead = bool(self._planned)
        self._found.steps_ahead |= is_ahead
        shape = self._shape(event)
        follows = is_ahead or (self._ended_s is not None and self._loop.idle_s < _IDLE_S)
        self._planned[event.step] = _Planned(shape, event.time_s, follows, self._loop.messages_s)
        self._num_new, self._loop = 0, events.LoopTimed(0.0)

    def _shape(self, event: events.StepPlanned) -> StepShape | None:
        drafts = dict(event.drafts_of)
        num_decoding = decode_context = longest = num_prompt = pairs = num_draws = (
            longest_prompt
        ) = prompt_context = 0
        is_known = True
        for name, count in event.tokens_of:
            sequence = self._sequences.get(name)
            if sequence is None or name in self._beams:
                is_known = False
                continue
            start, num_drafts = sequence.num_computed, drafts.get(name, 0)
            sequence.num_computed = end = start + count
            samples = end >= sequence.num_known
            num_draws += (num_drafts + 1) * samples
            if count == num_drafts + 1 and (samples or count == 1):
                num_decoding, decode_context, longest = (
                    num_decoding + count,
                    decode_context + count * end,
                    max(longest, end),
                )
                self._found.drafts.num_steps += samples
            else:
                num_prompt, pairs = num_prompt + count, pairs + count * (start + end + 1) // 2
                prompt_context, longest_prompt = prompt_context + end, max(longest_prompt, end)
        if not is_known:
            return None
        return StepShape(
            num_decoding,
            decode_context,
            longest,
            num_prompt,
            pairs,
            num_draws,
            self._num_new,
            0,
            longest_prompt,
            prompt_context,
        )

    def _verified(self, event: events.DraftsVerified) -> None:
        drafts = self._found.drafts
        for name, num, num_right in event.of:
            drafts.num_drafted += 1
            drafts.num_drafts += num
            drafts.num_right += num_right
            if name in self._sequences:
                self._sequences[name].num_computed -= num - num_right

    def _done(self, event: events.StepDone) -> None:
        step, before_s, self._ended_s = (
            self._planned.pop(event.step, None),
            self._ended_s,
            event.time_s,
        )
        for other in [number for number in self._planned if number < event.step]:
            del self._planned[other]  # a failed step has no end
        if step is None or step.shape is None:
            return
        begun_s = event.time_s - event.duration_s
        if step.follows and before_s is not None:
            seconds, submit_s = event.time_s - before_s, 0.0
        else:
            seconds, submit_s = event.duration_s, step.messages_s
        host_s = step.planned_s - begun_s + event.launch_s
        self._found.samples.append(
            Sample(step.shape, max(seconds, 1e-6), step.follows, host_s, submit_s)
        )


def delay_s(of: Iterable[float], part: float = 0.5) -> float:
    """This quantile of delays, which are never below 0."""
    ordered = sorted(max(value, 0.0) for value in of)
    return ordered[int(part * (len(ordered) - 1))] if ordered else 0.0
