"""SimCore: the engine's step loop, which also can make steps that only repeat the last one all at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.config import EngineConfig
from tidemill.engine.core import EngineCore, InFlight, Parts
from tidemill.errors import InvalidRequest
from tidemill.events import EventBuffer
from tidemill.runner.base import StepResult
from tidemill.sched.clock import VirtualClock
from tidemill.sched.plan import StepPlan
from tidemill.sched.progress import Progress
from tidemill.sched.repeats import Repeats
from tidemill.sim.runner import FIRST_TOKEN, SimRunner
from tidemill.wire import Delta, Submit


@dataclass(frozen=True, slots=True)
class Jump:
    """Steps that were made at once. `times_s`: when the tokens of each came."""

    request_ids: list[str]
    times_s: list[float]


class SimCore(EngineCore):
    def __init__(self, parts: Parts, config: EngineConfig, clock: VirtualClock, emit: EventBuffer, runner: SimRunner) -> None:
        super().__init__(parts, config, clock, emit)
        self._simulated = runner
        self.produced: list[Progress] = []  # by the last step; to be cleared by who reads it
        self.scheduler.kv.use_keys(_quick_key)
        self._repeats = Repeats(self.scheduler)
        self._can_jump = self.drafting is None and parts.tiers is None and runner.steps_ahead <= 1

    def submit_checked(self, request: Submit) -> None:
        """Queue a request whose tokens are known to be right: looking at each of a long prompt takes longer than all else."""
        if request.request_id in self._live:
            raise InvalidRequest(f"A request with the id {request.request_id!r} is already running.", param="request_id")
        num, context = len(request.prompt_ids), self.config.max_context
        if not num or num + (request.params.max_tokens or 1) > context:
            what = f"Request {request.request_id} has {num} + {request.params.max_tokens} tokens, and the context is {context}."
            raise InvalidRequest(what, fix="Shorten it, or simulate with a larger context.")
        self._submit(request, None)

    def _outputs(self, done: StepPlan, result: StepResult, progress: list[Progress], of_beams: list[Delta]) -> list[Delta]:
        """Nobody reads what tokens there are: `produced` tells of them."""
        self.produced = [one for one in progress if one.request.seq in self._live_of]
        for one in self.produced:
            if one.finish_reason:
                self._forget(one.request.seq)
        return []

    def is_live(self, request_id: str) -> bool:
        return request_id in self._live

    def jump(self, until_s: float) -> Jump | None:
        """After a step: all that follow like it and are planned before `until_s`. The result is as if each had been made."""
        last = self._simulated.last_plan
        if not self._can_jump or last is None or len(self._in_flight) != self.runner.steps_ahead or self.structured:
            return None
        most, before_s = self._repeats.most(last)
        if most == 0 or not self._simulated.can_repeat(last):
            return None
        times_s, planned_s = self._simulated.repeat(last, most, min(until_s, before_s))
        if not times_s:
            return None
        items = self._repeats.advance(last, len(times_s), FIRST_TOKEN)
        repeated = self._simulated.repeated(last, items, len(times_s))
        if self._in_flight:
            self._in_flight[0] = InFlight(repeated, (repeated, self._simulated.free_s), planned_s, is_ahead=True)
        requests = self.scheduler._requests
        return Jump([requests[item.seq].request_id for item in items if item.samples], times_s)


def _quick_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Of a page. 64 bits that are no secret are enough for one process of a simulation."""
    return hash((parent, *token_ids)).to_bytes(8, "big", signed=True)
