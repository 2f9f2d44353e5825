"""Runs arrivals through the engine's own step loop without a model: hours of traffic in
milliseconds, the same decisions."""

from __future__ import annotations

import copy
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import msgspec

from tidemill.config import EngineConfig
from tidemill.config.compute import decide_step_cost
from tidemill.engine.moments import EngineComponents
from tidemill.errors import TidemillError
from tidemill.kv.costs import Costs
from tidemill.kv.manager import KVManager
from tidemill.kv.tiers import Tiers
from tidemill.planning.core import SimCore
from tidemill.planning.cost import CostModel, LinearCost
from tidemill.planning.drafter import SimDrafter, Speculation
from tidemill.planning.moves import SimMover
from tidemill.planning.profile import EngineShape
from tidemill.planning.runner import SimDevice, SimRunner
from tidemill.sched.clock import VirtualClock
from tidemill.types.cache_layout import Group, one_group
from tidemill.types.events import Admitted, Event, EventBuffer, PagesEvicted, Preempted, StepPlanned
from tidemill.types.model_config import AttentionSpec, ModelConfig, alike
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Abort, Hold, Submit


@dataclass(frozen=True, slots=True)
class Arrival:
    request_id: str
    arrival_s: float
    num_prompt: int
    num_output: int
    priority: int = 0
    tenant: str = ""
    # given where prefixes matter; by default no two prompts share one
    prompt_ids: tuple[int, ...] = ()
    prefix_leases: tuple[Hold, ...] = ()
    n: int = 1  # samples; the times of their tokens are those of ID:0, ID:1 ...
    abort_s: float | None = None  # when its client goes away
    salt: str = ""  # of the prefix cache


@dataclass(frozen=True, slots=True)
class SimStep:
    step: int  # the number of the first
    start_s: float
    end_s: float
    tokens_of: dict[str, int]  # request to tokens computed, in each of them
    num_steps: int = 1  # that were alike, one after the other

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens_of.values())


@dataclass(slots=True)
class SimResult:
    steps: list[SimStep] = field(default_factory=list)
    # when each output token came
    token_times_s: dict[str, list[float]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def chart(self, request_ids: Sequence[str]) -> list[str]:
        """One line per request, one column per step: how many tokens it computed, '.' for none."""
        return [
            "".join(
                step.num_steps
                * (str(min(step.tokens_of[rid], 9)) if rid in step.tokens_of else ".")
                for step in self.steps
            )
            for rid in request_ids
        ]

    def timeline(self, request_ids: Sequence[str], column_s: float = 1.0) -> list[str]:
        """A timeline like `chart`, but a column for each so many seconds: also those in which no
        step was made."""
        num = math.ceil(self.steps[-1].end_s / column_s)
        steps = {
            math.floor(
                (step.start_s + i * (step.end_s - step.start_s) / step.num_steps) / column_s
            ): step.tokens_of
            for step in self.steps
            for i in range(step.num_steps)
        }
        columns = [steps.get(i, {}) for i in range(num)]
        return [
            "".join(str(min(column[rid], 9)) if rid in column else "." for column in columns)
            for rid in request_ids
        ]

    def longest_gap_s(self, request_id: str) -> float:
        """The longest time between two of its output tokens."""
        times = self.token_times_s[request_id]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


@dataclass(frozen=True, slots=True)
class SimTiers:
    """The tiers behind the KV cache: host memory and disk, and how fast they are (bytes a second)."""

    host_pages: int
    page_bytes: int
    disk_pages: int = 0
    host_rate: float = 50e9
    disk_rate: float = 3e9


@dataclass(frozen=True, slots=True)
class SimConfig:
    """An engine, as far as it matters here. `steps_ahead`: launched before the results of the first
    are known, as on a GPU."""

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
    steps_ahead: int = 0
    # of layers with windows, whose pages have sizes of their own; none: all see all tokens
    groups: tuple[Group, ...] = ()
    background_tokens: float = 1.0
    background_budget: int | None = None
    device: str = "cpu"
    speculation: Speculation | None = None
    tiers: SimTiers | None = None

    @staticmethod
    def of(config: EngineConfig, steps_ahead: int) -> SimConfig:
        """The configuration of a real engine."""
        return SimConfig(
            policy=config.policy,
            num_rows=config.max_requests,
            token_budget=config.token_budget,
            num_pages=config.num_pages,
            page_size=config.page_size,
            max_context=config.max_context,
            prefix_caching=config.prefix_caching,
            prefix_index=config.prefix_index,
            queue_order=config.queue_order,
            batch_window_s=config.batch_window_s,
            evict=config.evict,
            max_pinned=config.max_pinned,
            steps_ahead=steps_ahead,
            groups=config.layout.groups,
            background_tokens=config.background_tokens,
            background_budget=config.background_budget,
            device=config.device,
        )

    @staticmethod
    def measured(shape: EngineShape) -> SimConfig:
        """The configuration of the engine of a profile."""
        return SimConfig(
            num_rows=shape.max_requests,
            token_budget=shape.token_budget,
            num_pages=shape.num_pages,
            page_size=shape.page_size,
            max_context=shape.max_context,
            steps_ahead=shape.steps_ahead,
            groups=shape.groups,
            device=shape.device,
        )

    def engine(self) -> EngineConfig:
        return EngineConfig(
            device=self.device,
            dtype="float32",
            scheme="dense",
            kv_dtype="float32",
            page_size=self.page_size,
            layout=replace(
                one_group(1, self.page_size), groups=self.groups or (Group(self.page_size),)
            ),
            num_pages=self.num_pages,
            max_context=self.max_context,
            max_requests=self.num_rows,
            max_waiting=_ANY_NUMBER,
            token_budget=self.token_budget,
            background_tokens=self.background_tokens,
            background_budget=self.background_budget or self.token_budget,
            step_cost=decide_step_cost(self.device, any(group.is_state for group in self.groups))[
                0
            ],
            policy=self.policy,
            prefix_caching=self.prefix_caching,
            prefix_index=self.prefix_index,
            queue_order=self.queue_order,
            threads=1,
            fast_math=False,
            structured_backend="auto",
            weight_bytes=0,
            kv_bytes=0,
            activation_bytes=0,
            batch_window_s=self.batch_window_s,
            evict=self.evict,
            max_pinned=self.max_pinned,
            max_draws=self.token_budget,
            max_drafts=self.speculation.max_drafts if self.speculation else 0,
            adaptive_drafts=self.speculation is None or self.speculation.adaptive,
        )


@dataclass(slots=True)
class Tally:
    """Sums over a simulation."""

    num_output: int = 0  # tokens
    num_prompt: int = 0  # tokens, of requests that have started
    num_cached: int = 0  # of these, found in the prefix cache
    num_preempted: int = 0
    num_aborted: int = 0
    num_evicted: int = 0  # pages
    most_waiting: int = 0

    def add(self, happened: Sequence[Event]) -> None:
        for event in happened:
            if type(event) not in _COUNTED:
                continue
            if type(event) is StepPlanned:
                if event.num_waiting > self.most_waiting:
                    self.most_waiting = event.num_waiting
            elif type(event) is Admitted:
                self.num_prompt += event.num_tokens
                self.num_cached += event.num_cached
            elif type(event) is PagesEvicted:
                self.num_evicted += event.num_pages
            elif type(event) is Preempted:
                self.num_preempted += 1


class SimEngine:
    """An engine whose steps only cost time, on a clock of its own."""

    def __init__(
        self,
        config: SimConfig,
        cost: CostModel | None = None,
        *,
        jumps: bool = True,
        keeps_events: bool = True,
        shared: SimDevice | None = None,
    ) -> None:
        """`jumps`: steps that only repeat the one before are made at once, with the same result;
        their events are left out. `keeps_events`: False: of a long simulation; there is no `result`
        then, only `token_times_s`. `shared`: with others."""
        self.clock, buffer = VirtualClock(), EventBuffer(limit=10_000_000)
        self._runner = SimRunner(
            cost or LinearCost(fixed_s=1.0),
            self.clock,
            config.steps_ahead,
            config.page_size,
            shared,
        )
        parts = EngineComponents(self._runner, _MODEL)
        if config.speculation is not None:
            self._runner.acceptance = config.speculation.acceptance
            parts.drafters = [SimDrafter(config.speculation, self.clock)]
        if (behind := config.tiers) is not None:
            mover = SimMover(self.clock, behind.page_bytes, behind.host_rate, behind.disk_rate)
            self._runner.mover = mover  # type: ignore[assignment]
            costs = Costs(config.token_budget)
            parts.tiers = Tiers(behind.host_pages, behind.disk_pages, (), costs, behind.page_bytes)
        self._core = SimCore(parts, config.engine(), self.clock, buffer, self._runner)
        self._jumps, self._keeps_events = jumps, keeps_events
        self._submit_s: float = getattr(cost, "submit_s", 0.0)
        self._core.steady.names_all = keeps_events
        self._next_token = 0
        self._under_way: set[str] = set()
        self._aborts: list[tuple[float, str]] = []  # a heap
        self._result = SimResult()
        # of steps by their numbers, as `SteadyDecoding` counts them: when their tokens came
        self._times_s: list[float] = []
        self.tally = Tally()

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    def seqs_of(self, request_id: str) -> list[int]:
        """The numbers of its samples, just after it was submitted."""
        live = self._core.live.get(request_id)
        return [] if live is None else list(live.samples)

    @property
    def busy_s(self) -> float:
        """Time in which steps were computed."""
        return sum(end_s - begin_s for begin_s, end_s, _ in self._runner.times)

    @property
    def num_steps(self) -> int:
        return sum(num or 1 for _, _, num in self._runner.times)

    @property
    def token_times_s(self) -> dict[str, list[float]]:
        """The times of the tokens so far. A request that has ended may be taken out."""
        self._core.steady.catch_up()
        self._catch_up()
        return self._result.token_times_s

    @property
    def kv(self) -> KVManager:
        self._core.steady.record()
        return self._core.scheduler.kv

    def submit(self, arrival: Arrival) -> None:
        self._under_way.add(arrival.request_id)
        for name in (
            [f"{arrival.request_id}:{i}" for i in range(arrival.n)]
            if arrival.n > 1
            else [arrival.request_id]
        ):
            self._result.token_times_s[name] = []
        if arrival.abort_s is not None:
            heapq.heappush(self._aborts, (arrival.abort_s, arrival.request_id))
        if self._submit_s and not self._core.has_work:
            self.clock.advance(self._submit_s)
        self._next_token = _submit(self._core, arrival, self._next_token)

    def run_until(self, end_s: float) -> None:
        """Steps that begin before `end_s`; if there is nothing to do, the clock goes on to it."""
        times_s, steady = self._times_s, self._core.steady
        while (now := self.clock.now()) < end_s and (end_s < math.inf or self._core.has_work):
            until_s = end_s
            if self._aborts:
                self._abort_due(now)
                until_s = min(end_s, self._aborts[0][0]) if self._aborts else end_s
            if self._jumps and (jump := self._core.jump(until_s)):
                if steady.num_made > len(times_s):
                    times_s += jump
                    self.tally.num_output += steady.num_steady * len(jump)
                self._take_produced(jump[0])
                continue
            num_steps, was_in_flight = len(self._runner.times), self._core.is_in_flight
            output, failed = self._core.step()
            if failed:
                raise TidemillError(failed[0].message, fix=failed[0].fix)
            self.tally.add(output.events)
            if self._keeps_events:
                self._result.events += output.events
            now = self.clock.now()
            if steady.num_made > len(times_s):
                times_s.append(now)
                self.tally.num_output += steady.num_steady
            self._take_produced(now)
            if (
                len(self._runner.times) == num_steps
                and not was_in_flight
                and not self._core.has_moves
            ):
                self.clock.advance_to(
                    min(
                        max(now + (self._core.idle_s or math.inf), math.nextafter(now, math.inf)),
                        until_s,
                    )
                )

    def _take_produced(self, now: float) -> None:
        """Tokens that came at this time, and those of requests that were not looked at for a while."""
        if self._core.steady.caught_up:
            self._catch_up()
        if not self._core.produced:
            return
        produced, self._core.produced = self._core.produced, []
        for item in produced:
            request_id, num = item.request.request_id, len(item.token_ids)
            self._result.token_times_s[request_id] += [now] * num
            self.tally.num_output += num
            if item.finish_reason:
                self._end(request_id)

    def _catch_up(self) -> None:
        """Requests that were not looked at for some steps have got the tokens of these."""
        caught_up, self._core.steady.caught_up = self._core.steady.caught_up, []
        for request_id, begin, end in caught_up:
            self._result.token_times_s[request_id] += self._times_s[begin:end]

    def _end(self, name: str) -> None:
        """A sample has ended."""
        request_id = name.rpartition(":")[0] if name not in self._under_way else name
        if not self._core.is_live(request_id):
            self._under_way.discard(request_id)

    def _abort_due(self, now: float) -> None:
        while self._aborts and self._aborts[0][0] <= now:
            _, request_id = heapq.heappop(self._aborts)
            if request_id in self._under_way:
                self._under_way.discard(request_id)
                self._core.abort(Abort(request_id, reason="the client has gone"))
                self.tally.num_aborted += 1

    def result(self) -> SimResult:
        """When all has ended."""
        self._core.steady.settle()
        self._catch_up()
        self._core.scheduler.table.check_integrity()
        self._result.events += self._core.take_events()
        planned = (event for event in self._result.events if isinstance(event, StepPlanned))
        number, tokens_of = 0, dict[str, int]()
        for begin_s, end_s, num_repeats in self._runner.times:
            if not num_repeats:
                tokens_of = dict(next(planned).tokens_of)
            self._result.steps.append(SimStep(number, begin_s, end_s, tokens_of, num_repeats or 1))
            number += num_repeats or 1
        return self._result


def simulate(
    arrivals: Sequence[Arrival], config: SimConfig, cost: CostModel | None = None
) -> SimResult:
    """Every arrival to its end, in the engine's own step loop. Token values are arbitrary; only
    their number matters."""
    engine = SimEngine(config, cost)
    for arrival in sorted(arrivals, key=lambda arrival: arrival.arrival_s):
        engine.run_until(arrival.arrival_s)
        engine.submit(arrival)
    engine.run_until(math.inf)
    return engine.result()


def _submit(core: SimCore, arrival: Arrival, next_token: int) -> int:
    """Unless a prompt is given, its tokens are none that another has. What the next one's begin
    with."""
    prompt = list(arrival.prompt_ids) or [next_token] * arrival.num_prompt
    params, prefix_leases = _params(arrival.num_output, arrival.n), list(arrival.prefix_leases)
    core.submit_checked(
        Submit(
            arrival.request_id,
            prompt,
            params,
            priority=arrival.priority,
            salt=arrival.salt,
            tenant=arrival.tenant,
            prefix_leases=prefix_leases,
        )
    )
    return next_token + 1


@lru_cache(maxsize=1 << 16)
def _params(num_output: int, n: int) -> SamplingParams:
    params = copy.copy(_PARAMS)  # checking them takes longer than all else that submitting does
    msgspec.structs.force_setattr(params, "max_tokens", num_output)
    msgspec.structs.force_setattr(params, "n", n)
    return params


_COUNTED = {StepPlanned, Admitted, PagesEvicted, Preempted}
_PARAMS = SamplingParams(max_tokens=1, n=1, seed=0)
_ANY_NUMBER = 2**31 - 1
_SPEC = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=2, scale=1.0, rotation=None)
_MODEL = ModelConfig(
    architecture="simulated",
    vocab_size=_ANY_NUMBER,
    hidden_size=2,
    intermediate_size=2,
    layers=alike(1, _SPEC),
    max_context=_ANY_NUMBER,
    norm_eps=1e-5,
)
