"""SimCore: the engine's step loop, which also can make steps that only repeat the last one all at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.config import EngineConfig
from tidemill.engine.core import EngineCore, InFlight, Parts
from tidemill.events import EventBuffer
from tidemill.sched.clock import VirtualClock
from tidemill.sched.repeats import Repeats
from tidemill.sim.runner import SimRunner, token_of


@dataclass(frozen=True, slots=True)
class Jump:
    """Steps that were made at once. `times_s`: when the tokens of each came."""

    request_ids: list[str]
    times_s: list[float]


class SimCore(EngineCore):
    def __init__(self, parts: Parts, config: EngineConfig, clock: VirtualClock, emit: EventBuffer, runner: SimRunner) -> None:
        super().__init__(parts, config, clock, emit)
        self._simulated, self._virtual = runner, clock
        self.scheduler.kv.use_keys(_quick_key)
        self._repeats = Repeats(self.scheduler)
        self._can_jump = self.drafting is None and parts.tiers is None and runner.steps_ahead <= 1

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
        items = self._repeats.advance(last, len(times_s), token_of)
        repeated = self._simulated.repeated(last, items, len(times_s))
        if self._in_flight:
            self._in_flight[0] = InFlight(repeated, (repeated, self._simulated.free_s), planned_s, is_ahead=True)
        requests = self.scheduler._requests
        return Jump([requests[item.seq].request_id for item in items if item.samples], times_s)


def _quick_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Of a page. 64 bits that are no secret are enough for one process of a simulation."""
    return hash((parent, *token_ids)).to_bytes(8, "big", signed=True)
