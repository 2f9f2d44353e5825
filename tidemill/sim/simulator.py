"""Runs arrivals through the real scheduler without a model: hours of traffic in milliseconds, the same decisions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tidemill.events import Event, EventBuffer
from tidemill.kv.manager import KVManager
from tidemill.sampling import SamplingParams
from tidemill.sched.clock import VirtualClock
from tidemill.sched.policies import make_policy
from tidemill.sched.scheduler import Scheduler
from tidemill.sim.cost import CostModel, LinearCost
from tidemill.wire import Hold


@dataclass(frozen=True, slots=True)
class Arrival:
    request_id: str
    arrival_s: float
    num_prompt: int
    num_output: int
    priority: int = 0
    tenant: str = ""
    prompt_ids: tuple[int, ...] = ()  # given where prefixes matter; by default no two prompts share one
    holds: tuple[Hold, ...] = ()


@dataclass(frozen=True, slots=True)
class SimStep:
    step: int
    start_s: float
    end_s: float
    tokens_of: dict[str, int]  # request to tokens computed

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens_of.values())


@dataclass(slots=True)
class SimResult:
    steps: list[SimStep] = field(default_factory=list)
    token_times_s: dict[str, list[float]] = field(default_factory=dict)  # when each output token came
    events: list[Event] = field(default_factory=list)

    def chart(self, request_ids: Sequence[str]) -> list[str]:
        """One line per request, one column per step: how many tokens it computed, '.' for none."""
        return [
            "".join(str(min(step.tokens_of.get(rid, 0), 9)) if rid in step.tokens_of else "." for step in self.steps)
            for rid in request_ids
        ]

    def timeline(self, request_ids: Sequence[str], column_s: float = 1.0) -> list[str]:
        """As `chart`, but a column for each so many seconds: also those in which no step was made."""
        num = math.ceil(self.steps[-1].end_s / column_s)
        steps = {math.floor(step.start_s / column_s): step.tokens_of for step in self.steps}
        columns = [steps.get(i, {}) for i in range(num)]
        return ["".join(str(min(column[rid], 9)) if rid in column else "." for column in columns) for rid in request_ids]

    def longest_gap_s(self, request_id: str) -> float:
        """The longest time between two of its output tokens."""
        times = self.token_times_s[request_id]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


@dataclass(frozen=True, slots=True)
class SimConfig:
    policy: str = "continuous"
    num_rows: int = 64
    token_budget: int = 512
    num_pages: int = 4096
    page_size: int = 16
    max_context: int = 32_768
    prefix_caching: bool = True
    prefix_index: str = "hash"
    queue_order: str = "arrival"
    batch_window_s: float = 0.0
    evict: bool = True
    max_pinned: float = 0.5


def simulate(arrivals: Sequence[Arrival], config: SimConfig, cost: CostModel | None = None) -> SimResult:
    """Every arrival to its end. Token values are arbitrary; only their number matters."""
    cost = cost or LinearCost(fixed_s=1.0)
    clock = VirtualClock()
    buffer = EventBuffer(limit=10_000_000)
    scheduler = Scheduler(
        KVManager(
            config.num_pages + 1,
            config.page_size,
            config.prefix_caching,
            index=config.prefix_index,
            max_held=config.max_pinned,
        ),
        num_rows=config.num_rows,
        token_budget=config.token_budget,
        max_context=config.max_context,
        policy=make_policy(config.policy, config.batch_window_s),
        clock=clock,
        emit=buffer,
        order=config.queue_order,
        evict=config.evict,
    )
    pending = sorted(arrivals, key=lambda a: a.arrival_s)
    result = SimResult(token_times_s={arrival.request_id: [] for arrival in arrivals})
    names: dict[int, str] = {}
    next_token = 0
    while pending or scheduler.has_work:
        while pending and pending[0].arrival_s <= clock.now():
            arrival = pending.pop(0)
            prompt = arrival.prompt_ids or range(next_token, next_token + arrival.num_prompt)
            next_token += arrival.num_prompt
            params = SamplingParams(max_tokens=arrival.num_output, seed=0)
            (request,) = scheduler.add(
                arrival.request_id,
                list(prompt),
                params,
                priority=arrival.priority,
                arrival_s=arrival.arrival_s,
                tenant=arrival.tenant,
                holds=arrival.holds,
            )
            names[request.seq] = arrival.request_id
        plan = scheduler.plan()
        if plan is None:
            forms_s = clock.now() + (scheduler.idle_s or math.inf)  # a batch, at the latest
            clock.advance_to(min(forms_s, pending[0].arrival_s) if pending else forms_s)
            continue
        start_s = clock.now()
        clock.advance(cost.step_s(plan))
        tokens_of = {names[item.seq]: item.count for item in plan.items}
        result.steps.append(SimStep(plan.step, start_s, clock.now(), tokens_of))
        for progress in scheduler.commit(plan, {item.row: [0] for item in plan.items if item.samples}):
            result.token_times_s[progress.request.request_id].append(clock.now())
    scheduler.check_integrity()
    result.events = buffer.take()
    return result
