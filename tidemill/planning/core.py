"""SimCore: the engine's step loop, which also can make steps that only repeat the last one all at
once."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.config import EngineConfig
from tidemill.engine.core import EngineCore
from tidemill.engine.moments import EngineComponents, Step, Submission
from tidemill.engine.parts.structured import StructuredOutput
from tidemill.errors import InvalidRequest
from tidemill.kv.prefix import HashIndex
from tidemill.planning.runner import SimRunner
from tidemill.planning.steady import SteadyDecoding
from tidemill.sched.clock import VirtualClock
from tidemill.sched.plan import StepPlan
from tidemill.sched.progress import Progress
from tidemill.types.events import EventBuffer
from tidemill.types.wire import Abort, Delta, Submit


class SimCore(EngineCore):
    clock: VirtualClock

    def __init__(
        self,
        components: EngineComponents,
        config: EngineConfig,
        clock: VirtualClock,
        emit: EventBuffer,
        runner: SimRunner,
    ) -> None:
        super().__init__(components, config, clock, emit)
        self._simulated = runner
        self.produced: list[Progress] = []  # by the last step; to be cleared by who reads it
        if isinstance(index := self.scheduler.kv.index, HashIndex):
            index.chain = _quick_keys
        self.steady = runner.steady = SteadyDecoding(
            self.scheduler,
            clock,
            emit,
            steps_ahead=runner.steps_ahead,
            by_prefix=config.queue_order == "prefix",
            evict=config.evict,
        )
        self._drafts, has_tiers = bool(components.drafters), components.tiers is not None
        self._can_jump = (
            not self._drafts and not has_tiers and runner.steps_ahead <= 1 and runner.can_repeat
        )

    def submit_checked(self, request: Submit) -> None:
        """Queue a request whose tokens are known to be right: looking at each of a long prompt
        takes longer than all else."""
        if request.request_id in self.live:
            raise InvalidRequest(
                f"A request with the id {request.request_id!r} is already running.",
                param="request_id",
            )
        num, context = len(request.prompt_ids), self.config.max_context
        if not num or num + (request.params.max_tokens or 1) > context:
            what = f"Request {request.request_id} has {num} + {request.params.max_tokens} tokens, and the context is {context}."
            raise InvalidRequest(what, fix="Shorten it, or simulate with a larger context.")
        if request.prefix_leases:  # they look up what is cached
            self.steady.record_always()
        self._queue(Submission.of(request))

    def abort(self, message: Abort) -> None:
        if live := self.live.get(message.request_id):
            self.steady.settle(live.samples)
        super().abort(message)

    def _plan(self) -> StepPlan | None:
        return super()._plan() if self._drafts else self.steady.plan()

    def _outputs(self, step: Step) -> list[Delta]:
        """Nobody reads what tokens there are: `produced` tells of them."""
        self._produce(step.progress)
        return []

    def _produce(self, progress: list[Progress]) -> None:
        self.steady.take_first_tokens()
        self.produced = [item for item in progress if item.request.seq in self.live_of]
        for item in self.produced:
            if item.finish_reason:
                self.end(item.request.seq)

    def is_live(self, request_id: str) -> bool:
        return request_id in self.live

    def jump(self, until_s: float) -> list[float]:
        """Steps that only go on with what runs and are planned before `until_s`: as many as are
        alike. The result is as if each had been made. Returns when the tokens of each came;
        `produced` came with the first."""
        steady, runner = self.steady, self._simulated
        if (
            not self._can_jump
            or len(self.in_flight) != runner.steps_ahead
            or self.part(StructuredOutput)
        ):
            return []
        steady.join()
        if steady.has_new:
            return []
        most, before_s, prompt = steady.most()
        if most == 0:
            return []
        times_s, planned_s = runner.repeat(
            steady.num_steady, prompt is not None, most, min(until_s, before_s)
        )
        if not times_s:
            return []
        last, num = steady.last_plan, len(times_s)
        if self.in_flight and steady.has_results(prompt):
            done, last = last, steady.advance(1, prompt)
            self.clock.advance_to(times_s[0])
            if done.items:
                result = runner.results(done)
                self._produce(self.scheduler.commit(done, result.tokens))
            steady.take_first_tokens()
            num -= 1
        if num:
            last = steady.advance(num, prompt)
        self.clock.advance_to(times_s[-1])
        if self.in_flight:
            self.in_flight[0] = Step(
                last, planned_s, is_ahead=True, launched=(last, runner.device.free_s)
            )
        return times_s


_NUMBERS = [number.to_bytes(4, "big") for number in range(1024)]


def _quick_keys(parent: bytes, token_ids: Sequence[int], page_size: int) -> list[bytes]:
    """The keys of pages. 64 bits that are no secret are enough for one process of a simulation.
    Pages that repeat one token, as nearly all do, are numbered: their keys are the hash where that
    begins, the token, and a number."""
    keys, at, num_tokens = list[bytes](), 0, len(token_ids)
    while at < num_tokens:
        first, num = token_ids[at], 1
        may_be_last = first == token_ids[-1] and (at < 2 * page_size or token_ids[at - 1] != first)
        if may_be_last and token_ids.count(first) - token_ids[:at].count(first) == num_tokens - at:
            num = (num_tokens - at) // page_size
        page = token_ids[at : at + page_size]
        at += num * page_size
        if num == 1 and page.count(first) != page_size:
            parent = hash((parent, *page)).to_bytes(8, "big", signed=True)
            keys.append(parent)
            continue
        token = first.to_bytes(4, "big")
        if len(parent) == 16 and parent[8:12] == token:
            begin, number = parent[:12], int.from_bytes(parent[12:], "big") + 1
        else:
            begin, number = hash((parent, first)).to_bytes(8, "big", signed=True) + token, 0
        while number + num > len(_NUMBERS):
            _NUMBERS.append(len(_NUMBERS).to_bytes(4, "big"))
        keys += [begin + each for each in _NUMBERS[number : number + num]]
        parent = keys[-1]
    return keys
