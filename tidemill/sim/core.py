"""SimCore: the engine's step loop, which also can make steps that only repeat the last one all at once."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.config import EngineConfig
from tidemill.engine.core import EngineCore, InFlight, Parts
from tidemill.errors import InvalidRequest
from tidemill.events import EventBuffer
from tidemill.runner.base import StepResult
from tidemill.sched.clock import VirtualClock
from tidemill.sched.plan import StepPlan
from tidemill.sched.progress import Progress
from tidemill.sched.steady import SteadyScheduler
from tidemill.sim.runner import FIRST_TOKEN, SimRunner
from tidemill.wire import Delta, Submit


class SimCore(EngineCore):
    _scheduler_type = SteadyScheduler

    _clock: VirtualClock

    def __init__(self, parts: Parts, config: EngineConfig, clock: VirtualClock, emit: EventBuffer, runner: SimRunner) -> None:
        super().__init__(parts, config, clock, emit)
        self._simulated = runner
        self.produced: list[Progress] = []  # by the last step; to be cleared by who reads it
        self.scheduler.kv.use_keys(_quick_keys)
        assert isinstance(self.scheduler, SteadyScheduler)
        self.steady = runner.steady = self.scheduler
        self.steady.steps_ahead, self.steady.first_token = runner.steps_ahead, FIRST_TOKEN
        self._can_jump = self.drafting is None and parts.tiers is None and runner.steps_ahead <= 1 and runner.can_repeat

    def submit_checked(self, request: Submit) -> None:
        """Queue a request whose tokens are known to be right: looking at each of a long prompt takes longer than all else."""
        if request.request_id in self.live:
            raise InvalidRequest(f"A request with the id {request.request_id!r} is already running.", param="request_id")
        num, context = len(request.prompt_ids), self.config.max_context
        if not num or num + (request.params.max_tokens or 1) > context:
            what = f"Request {request.request_id} has {num} + {request.params.max_tokens} tokens, and the context is {context}."
            raise InvalidRequest(what, fix="Shorten it, or simulate with a larger context.")
        self._submit(request, None, None)

    def _outputs(self, done: StepPlan, result: StepResult, progress: list[Progress], of_beams: list[Delta]) -> list[Delta]:
        """Nobody reads what tokens there are: `produced` tells of them."""
        self.produced = [item for item in progress if item.request.seq in self._live_of]
        for item in self.produced:
            if item.finish_reason:
                self._forget(item.request.seq)
        return []

    def is_live(self, request_id: str) -> bool:
        return request_id in self.live

    def jump(self, until_s: float) -> list[float]:
        """Steps that only go on with what runs and are planned before `until_s`: as many as are alike. The result is as if each
        had been made. Returns when the tokens of each came; `produced` came with the first."""
        scheduler, runner = self.steady, self._simulated
        if not self._can_jump or len(self.in_flight) != runner.steps_ahead or self.structured:
            return []
        scheduler.join()
        if scheduler.has_new:
            return []
        most, before_s, prompt = scheduler.most()
        if most == 0:
            return []
        is_named = not scheduler.is_like_last(prompt)
        times_s, planned_s = runner.repeat(scheduler.num_steady, prompt is not None, most, min(until_s, before_s), is_named)
        if not times_s:
            return []
        last, num = scheduler.last_plan, len(times_s)
        if self.in_flight and scheduler.has_results(prompt):
            done, last = last, scheduler.advance(1, prompt)
            self._clock.advance_to(times_s[0])
            if done.items:
                result = runner.results(done)
                self._outputs(done, result, scheduler.commit(done, result.tokens), [])
            else:
                scheduler.take_first_tokens(times_s[0])
            num -= 1
        if num:
            last = scheduler.advance(num, prompt)
        self._clock.advance_to(times_s[-1])
        if self.in_flight:
            self.in_flight[0] = InFlight(last, (last, runner.device.free_s), planned_s, is_ahead=True)
        return times_s


_NUMBERS = [number.to_bytes(4, "big") for number in range(1024)]


def _quick_keys(parent: bytes, token_ids: Sequence[int], page_size: int) -> list[bytes]:
    """The keys of pages. 64 bits that are no secret are enough for one process of a simulation. Pages that repeat one token, as
    nearly all do, are numbered: their keys are the hash where that begins, the token, and a number."""
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
