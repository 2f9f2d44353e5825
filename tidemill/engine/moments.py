"""The moments of the engine's loop, in their order, and parts: features that take part in some of
them.

a request comes      submit, delay, queued
between steps        message, replies, check, has_work
a step begins        before_plan, waits, propose
it is planned        fill_plan, before_launch
its results are here results, (commit), progress, done
they are told        deltas
nothing can be done  idle
a request leaves     cut_short, end
a step fails         step_failed
the engine ends      close

The core calls a moment of all parts that have it, in the order of the parts' list. It knows no part
by name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

from tidemill.config import EngineConfig
from tidemill.engine.outputs import LiveRequest
from tidemill.errors import TidemillError
from tidemill.frontend.structured import Matcher
from tidemill.kv.tiers import Tiers
from tidemill.runner.base import Ranks, Runner, StepResult
from tidemill.runner.spec import Drafter
from tidemill.sched.clock import Clock
from tidemill.sched.plan import StepPlan
from tidemill.sched.progress import Progress
from tidemill.sched.request import Request
from tidemill.sched.scheduler import Scheduler
from tidemill.types.events import EventBuffer
from tidemill.types.kv_policy import CachePolicy
from tidemill.types.model_config import ModelConfig
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Delta, FromEngine, Resumed, Submit, ToEngine

P = ParamSpec("P")
R = TypeVar("R")
KindOfPart = TypeVar("KindOfPart", bound="Part")


@dataclass(slots=True, eq=False)
class Submission:
    """A request on its way into the queue, which parts complete."""

    request: Submit
    compiled: Matcher | None  # its grammar, if it was compiled just now
    params: SamplingParams
    resumed: list[Resumed] | None
    salt: str  # of the prefix cache: what the content of pages depends on besides tokens
    kv_policy: CachePolicy | None = None  # by which some of its tokens stay in its pages; None: all
    lora_slot: int = -1
    matchers: Sequence[Any] = ()  # of its samples, if they have a grammar

    @staticmethod
    def of(request: Submit, compiled: Matcher | None = None) -> Submission:
        salt = f"\n{request.salt}" if request.salt else ""
        return Submission(request, compiled, request.params, request.resumed, salt)

    @property
    def begun(self) -> dict[int, list[int]]:
        """The output that each sample has, by index."""
        if self.resumed is None:
            return {index: [] for index in range(self.params.n)}
        return {sample.index: sample.output_ids for sample in self.resumed}


@dataclass(slots=True, eq=False)
class Step:
    """A step, from its plan until its deltas are told."""

    plan: StepPlan
    started_s: float
    is_ahead: bool  # it was launched before the one before it was collected
    launched: Any = None  # the runner's
    launch_s: float = 0.0  # on the host
    result: StepResult = field(default_factory=StepResult)
    broken: set[int] = field(default_factory=set)  # rows with logits that are not numbers
    progress: list[Progress] = field(default_factory=list)
    num_withheld: int = 0  # tokens that parts took out of the progress
    done_s: float = 0.0
    deltas: list[Delta] = field(default_factory=list)


class Engine(Protocol):
    """The engine as its parts see it."""

    config: EngineConfig
    model_config: ModelConfig
    clock: Clock
    emit: EventBuffer
    runner: Runner
    scheduler: Scheduler
    in_flight: deque[Step]  # launched and not collected
    delayed: dict[str, Submission]  # by request id, in their order
    live: dict[str, LiveRequest]  # by request id
    live_of: dict[int, LiveRequest]  # by seq

    @property
    def has_work(self) -> bool: ...

    def part(self, kind: type[KindOfPart]) -> KindOfPart: ...

    def check(self) -> None: ...

    def adopt(self, live: LiveRequest, request: Request) -> None:
        """A sequence joins a request."""
        ...

    def end(self, seq: int) -> None:
        """A sequence has left the scheduler."""
        ...

    def fail(self, seq: int, error: TidemillError, reason: str) -> None:
        """Ends all samples of a sequence's request with an error."""
        ...


class Part:
    """A feature of the engine. A moment that it does not implement does not reach it."""

    engine: Engine  # set when it joins one

    @classmethod
    def of(cls, engine: Engine, components: EngineComponents) -> Self | None:
        """The part for this engine; None if the engine does without."""
        return None

    # ---- a request comes

    def submit(self, submission: Submission) -> None:
        """A request was submitted: completes it, or raises what is wrong with it."""

    def delay(self, submission: Submission) -> str:
        """The reason why it cannot be queued yet, or empty. It is asked again before each step."""
        return ""

    def queued(self, submission: Submission, live: LiveRequest) -> None:
        """Its samples are known to the scheduler."""

    # ---- between steps

    def message(self, message: ToEngine) -> None:
        """A message from the client that the core itself has no use for."""

    def replies(self) -> Sequence[FromEngine]:
        """Answers to messages."""
        return ()

    def check(self) -> None:
        """Raises why the engine cannot go on."""

    def alarms(self) -> Sequence[int]:
        """File descriptors that are readable when the loop is to look after this part."""
        return ()

    def has_work(self) -> bool:
        """The engine has something to do, though the scheduler has not."""
        return False

    # ---- a step

    def before_plan(self) -> Sequence[Delta]:
        """Deltas that are told at once, without a step."""
        return ()

    def waits(self) -> bool:
        """A step is in flight, and the next is planned when its results are known."""
        return False

    def propose(self) -> None:
        """The plan is about to be made: sets on requests what it reads."""

    def fill_plan(self, step: Step) -> None:
        """Adds to a plan what the runner needs besides."""

    def before_launch(self, step: Step) -> None:
        """The plan is complete."""

    def results(self, step: Step) -> None:
        """Results are here, before they are committed."""

    def progress(self, step: Step) -> None:
        """They are committed."""

    def done(self, step: Step) -> None:
        """All is known of the step, its time too."""

    def deltas(self, step: Step) -> None:
        """Its deltas are about to be told."""

    def idle(self) -> None:
        """Nothing could be computed now: the time to wait for something, for a moment."""

    # ---- ends

    def cut_short(self, request_id: str, index: int | None, is_broken: bool) -> None:
        """A request, or the sample with this index, ends early. `is_broken`: its pages hold NaN."""

    def end(self, live: LiveRequest, request: Request) -> None:
        """A sequence has ended; `live.requests` has those that are left."""

    def step_failed(self) -> None:
        """A step raised, and nothing is in flight any more."""

    def close(self) -> None:
        """The engine ends."""


class Moments:
    """By moment, those parts that have it: what nobody takes part in costs nothing."""

    def __init__(self, parts: Sequence[Part]) -> None:
        def bound(moment: Callable[Concatenate[Part, P], R]) -> tuple[Callable[P, R], ...]:
            name = moment.__name__
            return tuple(
                getattr(part, name) for part in parts if getattr(type(part), name) is not moment
            )

        self.submit, self.delay, self.queued = (
            bound(Part.submit),
            bound(Part.delay),
            bound(Part.queued),
        )
        self.message, self.replies = bound(Part.message), bound(Part.replies)
        self.check, self.alarms, self.has_work = (
            bound(Part.check),
            bound(Part.alarms),
            bound(Part.has_work),
        )
        self.before_plan, self.waits = bound(Part.before_plan), bound(Part.waits)
        self.propose, self.fill_plan = bound(Part.propose), bound(Part.fill_plan)
        self.before_launch = bound(Part.before_launch)
        self.results, self.progress, self.done = (
            bound(Part.results),
            bound(Part.progress),
            bound(Part.done),
        )
        self.deltas, self.idle = bound(Part.deltas), bound(Part.idle)
        self.cut_short, self.end = bound(Part.cut_short), bound(Part.end)
        self.step_failed, self.close = bound(Part.step_failed), bound(Part.close)


@dataclass(slots=True)
class EngineComponents:
    """The components of an engine, besides the scheduler. `engine/load.py` makes them of a model, a
    simulation of a cost model."""

    runner: Runner
    model_config: ModelConfig
    drafters: Sequence[Drafter] = ()
    tiers: Tiers | None = None
    ranks: Ranks | None = None  # if the runner is of several processes
    # by layer: tokens that each expert got
    expert_counts: Callable[[], Mapping[int, list[int]]] = dict
    # as events.WeightsStreamed
    weight_reads: Callable[[], tuple[int, float, int, int, int] | None] = lambda: None
    parts: Sequence[Part] = ()  # that are there already, instead of those that would be made
