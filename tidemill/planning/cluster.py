"""Many simulated engines behind the real placement policy, in one order of time: replicas, prefill
and decode pools, models that share devices.

Each engine has a clock of its own and is only run as far as all of the cluster has come. Its
requests cannot end before a time that follows from their remaining tokens; until then nobody looks
at it. An engine without requests costs nothing, and one that never gets any is not even made.

A disaggregated request goes to a prefill engine for its first token. Its KV cache is sent
meanwhile, chunk by chunk, by the engine's link; what a decode engine has in its cache already is
not sent. Then it goes on in a decode engine.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tidemill.kv.manager import KVManager
from tidemill.planning.cost import CostModel
from tidemill.planning.runner import FIRST_TOKEN, SimDevice
from tidemill.planning.simulator import Arrival, SimConfig, SimEngine
from tidemill.planning.trace import MOONCAKE_BLOCK, prompt_of
from tidemill.sched.placement import Placement
from tidemill.sched.plan import StepItem, StepPlan

BOTH, PREFILL, DECODE = "both", "prefill", "decode"
BLOCK = MOONCAKE_BLOCK  # tokens of a prompt that have a number
_OWN = FIRST_TOKEN // 2  # the first token that is no block's


@dataclass(frozen=True, slots=True)
class Job:
    """A request. `blocks`: a number for each BLOCK tokens of its prompt; prompts that begin with
    the same numbers share that prefix. Tokens after them are none that another has."""

    number: int
    at_s: float
    num_prompt: int
    num_output: int
    blocks: tuple[int, ...] = ()
    model: str = ""

    def prompt_ids(self) -> tuple[int, ...]:
        return prompt_of(self.blocks, self.num_prompt, self.number)

    @property
    def keys(self) -> Sequence[int]:
        """The keys of its prefix, for the placement."""
        return self.blocks or (_OWN + self.number,)


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine. `devices`: the name of what it runs on; engines with the same one take turns,
    step by step."""

    config: SimConfig
    cost: CostModel
    role: str = BOTH
    model: str = ""
    devices: str = ""
    cell: int = 0  # requests stay within one: prefill and decode engines of a host
    kv_token_bytes: float = 0.0  # sent of each token
    state_bytes: float = 0.0  # sent of a request, at its end
    link: float = math.inf  # bytes a second
    link_latency_s: float = 0.0

    def line(self, num_decoding: int) -> tuple[float, float, float]:
        """The line of a step's time in which so many decode: its fixed part, and what a token of
        context adds."""
        found: Callable[[int], tuple[float, float, float]] | None = getattr(
            self.cost, "decode_line", None
        )
        return (0.0, 0.0, 0.0) if found is None else found(num_decoding)


@dataclass(frozen=True, slots=True)
class Served:
    """The outcome of a request."""

    job: Job
    first_s: float
    last_s: float
    gaps_s: list[float]  # between its tokens
    engine: int  # that made its first token
    num_sent: int = 0  # tokens whose keys and values were sent
    hidden: float = 1.0  # the part of sending that prefill covered

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.job.at_s

    @property
    def tpot_s(self) -> float:
        return (
            (self.last_s - self.first_s) / (self.job.num_output - 1)
            if self.job.num_output > 1
            else 0.0
        )


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The engine that made the first token of a request, and when."""

    engine: int
    first_s: float


@dataclass(frozen=True, slots=True)
class _Sent:
    """A request on its way from a prefill engine to a decode engine."""

    job: Job
    engine: int
    first_s: float
    num_tokens: int
    hidden: float


@dataclass(frozen=True, slots=True)
class _Live:
    """A request in an engine."""

    job: Job
    num_prompt: int
    num_output: int
    sent: _Sent | None = None


@dataclass(slots=True)
class _Node:
    """An engine, and what the cluster knows of it."""

    spec: EngineSpec
    name: str
    engine: SimEngine | None = None
    live: dict[str, _Live] = field(default_factory=dict)
    # that share its devices, itself among them
    neighbours: list[_Node] = field(default_factory=list)
    # of its pool: requests under way, as of the cluster's time
    loads: dict[str, int] = field(default_factory=dict)
    check_s: float = math.inf  # nothing ends before
    waiting: deque[_Sent] = field(default_factory=deque)  # that have no slot or no pages yet
    link_free_s: float = 0.0


@dataclass(slots=True)
class _Pool:
    """Engines of a model and role, one of which gets a request."""

    placement: Placement
    loads: dict[str, int] = field(default_factory=dict)


class Cluster:
    """`run` takes jobs to their end."""

    def __init__(
        self,
        specs: Sequence[EngineSpec],
        placement: Callable[[], Placement] = Placement,
        prefilled: Mapping[int, Prefilled] | None = None,
    ) -> None:
        """`prefilled`: what the prefill engines do, from an earlier run of the same jobs: it does
        not depend on the others."""
        self._prefilled = prefilled or {}
        self._nodes = [_Node(spec, str(number)) for number, spec in enumerate(specs)]
        names = [spec.devices for spec in specs if spec.devices]
        self._shared = {name: SimDevice() for name in names if names.count(name) > 1}
        self._events: list[tuple[float, int, int, Callable[[float], None]]] = []
        self._numbers = itertools.count()
        self._served: list[Served] = []
        self.num_checks = 0
        self._pools: dict[tuple[str, str, int], _Pool] = {}
        by_devices: dict[str, list[_Node]] = {}
        for node in self._nodes:
            cell = node.spec.cell if node.spec.role == DECODE else 0
            pool = self._pools.setdefault(
                (node.spec.model, node.spec.role, cell), _Pool(placement())
            )
            pool.loads[node.name], node.loads = 0, pool.loads
            node.neighbours = (
                by_devices.setdefault(node.spec.devices, [])
                if node.spec.devices in self._shared
                else []
            )
            node.neighbours.append(node)

    @property
    def num_used(self) -> int:
        """Engines that got a request."""
        return sum(node.engine is not None for node in self._nodes)

    def run(
        self, jobs: Iterable[Job], gives_up: Callable[[Served], bool] | None = None
    ) -> list[Served] | None:
        """`jobs` in the order of their arrival. `gives_up`: asked about each that ends; None is
        returned then."""
        coming = iter(jobs)
        job = next(coming, None)
        while job is not None or self._events:
            if job is not None and (not self._events or job.at_s <= self._events[0][0]):
                self._arrive(job)
                job = next(coming, None)
                continue
            at_s, _, _, happens = heapq.heappop(self._events)
            num_before = len(self._served)
            happens(at_s)
            if gives_up is not None and any(
                gives_up(served) for served in self._served[num_before:]
            ):
                return None
        return self._served

    # ---- placing

    def _arrive(self, job: Job) -> None:
        done = self._prefilled.get(job.number)
        if done is not None:
            self._push(
                done.first_s, _END, lambda at_s: self._send(self._nodes[done.engine], job, at_s)
            )
            return
        if (job.model, BOTH, 0) in self._pools:
            node, num_output = self._choose(job, BOTH), job.num_output
        else:
            node, num_output = self._choose(job, PREFILL), 1
            if self._is_short(job):
                node, num_output = self._choose(job, DECODE, node.spec.cell), job.num_output
        self._count(node, 1)
        self._submit(node, _Live(job, job.num_prompt, num_output), job.prompt_ids(), job.at_s)

    def _choose(self, job: Job, role: str, cell: int = 0) -> _Node:
        pool = self._pools[job.model, role, cell]
        if len(pool.loads) == 1:
            return self._nodes[int(next(iter(pool.loads)))]
        chosen = pool.placement.choose(job.keys, pool.loads)
        pool.placement.note(chosen.name, job.keys)
        return self._nodes[int(chosen.name)]

    def _is_short(self, job: Job) -> bool:
        """A prompt that delays others so little that a decode engine computes it."""
        pool = self._pools.get((job.model, DECODE, 0))
        if pool is None:
            return False
        first = self._nodes[int(next(iter(pool.loads)))]
        return job.num_prompt <= num_short(first.spec.config.token_budget)

    def _count(self, node: _Node, change: int) -> None:
        """Requests under way. Engines that share devices have the load of all of them."""
        for neighbour in node.neighbours:
            neighbour.loads[neighbour.name] += change

    def _submit(self, node: _Node, live: _Live, prompt_ids: tuple[int, ...], at_s: float) -> None:
        engine = self._at(node, at_s)
        request_id = str(live.job.number)
        node.live[request_id] = live
        engine.submit(
            Arrival(request_id, at_s, live.num_prompt, live.num_output, prompt_ids=prompt_ids)
        )
        self._look_again(node)

    def _at(self, node: _Node, at_s: float) -> SimEngine:
        """The engine, run to this time."""
        if node.engine is None:
            shared = self._shared.get(node.spec.devices)
            node.engine = SimEngine(
                node.spec.config, node.spec.cost, keeps_events=False, shared=shared
            )
        node.engine.run_until(at_s)
        return node.engine

    # ---- time

    def _push(self, at_s: float, kind: int, happens: Callable[[float], None]) -> None:
        """`kind`: the order of what happens at the same time: ends and arrivals before steps."""
        heapq.heappush(self._events, (at_s, kind, next(self._numbers), happens))

    def _look_again(self, node: _Node) -> None:
        """When its next request may end."""
        assert node.engine is not None
        now = node.engine.clock.now()
        node.check_s = now if node.spec.devices in self._shared else now + self._least_s(node)
        self._push(node.check_s, _STEP, lambda at_s: self._check(node, at_s))

    def _least_s(self, node: _Node) -> float:
        """No request of the engine ends in less: a step in which all that decode go on takes as
        long as it does now, or more."""
        assert node.engine is not None
        times, num_left, num_decoding, context = node.engine.token_times_s, _MANY, 0, 0
        for request_id, live in node.live.items():
            num = len(times[request_id])
            num_left = min(num_left, live.num_output - num)
            if num:
                num_decoding += 1
                context += live.num_prompt + num
        step_s: float | None = getattr(node.spec.cost, "least_s", None)
        if step_s is None:
            fixed_s, context_s, _ = node.spec.line(max(num_decoding, 1))
            step_s = fixed_s + context_s * context
        # the last one is run when those before it have ended
        return (num_left - 1) * step_s * _ROUNDING

    def _check(self, node: _Node, at_s: float) -> None:
        """Run the engine until here, a step at least, and see which requests have ended."""
        if at_s != node.check_s:
            return  # something came since
        assert node.engine is not None
        self.num_checks += 1
        node.engine.run_until(math.nextafter(max(at_s, node.engine.clock.now()), math.inf))
        times = node.engine.token_times_s
        for request_id, live in list(node.live.items()):
            if len(times[request_id]) >= live.num_output:
                del node.live[request_id]
                self._end(node, live, times.pop(request_id))
        node.check_s = math.inf
        if node.live:
            self._look_again(node)

    def _end(self, node: _Node, live: _Live, times: list[float]) -> None:
        job, sent = live.job, live.sent
        self._push(times[-1], _END, lambda at_s: self._leave(node, at_s))
        if sent is not None:
            self._served.append(_served(job, [sent.first_s, *times], sent.engine, sent))
        elif node.spec.role != PREFILL or not self._has_decode(node):
            self._served.append(_served(job, times, int(node.name)))
        else:
            self._push(times[-1], _END, lambda at_s: self._send(node, job, at_s))

    def _has_decode(self, node: _Node) -> bool:
        """False: only the prefill engines are simulated."""
        return (node.spec.model, DECODE, node.spec.cell) in self._pools

    def _leave(self, node: _Node, at_s: float) -> None:
        self._count(node, -1)
        while node.waiting and self._admit(node, node.waiting[0], at_s):
            node.waiting.popleft()

    # ---- from prefill to decode

    def _send(self, source: _Node, job: Job, at_s: float) -> None:
        """Its first token is there. What was computed before the last chunk is under way already."""
        if job.num_output == 1:
            self._served.append(_served(job, [at_s], int(source.name)))
            return
        target = self._choose(job, DECODE, source.spec.cell)
        self._count(target, 1)
        num_tokens = self._num_to_send(target, job)
        spec, budget = source.spec, source.spec.config.token_budget
        chunks = [
            range(begin, min(begin + budget, num_tokens)) for begin in range(0, num_tokens, budget)
        ]
        began_s = at_s - sum(spec.cost.step_s(_alone(chunk)) for chunk in chunks[1:])
        token_s, state_s = spec.kv_token_bytes / spec.link, spec.state_bytes / spec.link
        last_s = at_s + token_s * len(chunks[-1]) + state_s if chunks else at_s
        all_s = max(began_s, source.link_free_s) + token_s * num_tokens + state_s
        done_s = max(last_s, all_s) + spec.link_latency_s
        source.link_free_s = max(last_s, all_s)
        busy_s = token_s * num_tokens + state_s + spec.link_latency_s
        hidden = max(0.0, 1 - (done_s - at_s) / busy_s) if busy_s else 1.0
        self._push(
            done_s,
            _END,
            lambda now: self._deliver(
                target, _Sent(job, int(source.name), at_s, num_tokens, hidden), now
            ),
        )

    def _num_to_send(self, target: _Node, job: Job) -> int:
        """Whole pages, without those that the decode engine has."""
        size = target.spec.config.page_size
        num = job.num_prompt // size * size
        if target.engine is None or not job.blocks:
            return num
        kv = target.engine.kv
        return num - min(kv.num_cached(kv.path((*job.prompt_ids(), 0))) // size * size, num)

    def _deliver(self, target: _Node, sent: _Sent, at_s: float) -> None:
        if target.waiting or not self._admit(target, sent, at_s):
            target.waiting.append(sent)

    def _admit(self, node: _Node, sent: _Sent, at_s: float) -> bool:
        """Its pages become cached ones of the engine, where it finds them. False: there is no slot
        or not enough room."""
        if len(node.live) >= node.spec.config.num_rows:
            return False
        job, kv = sent.job, self._at(node, at_s).kv
        prompt_ids = (*job.prompt_ids(), 0)
        num = (len(prompt_ids) - 1) // kv.page_size * kv.page_size
        if num:
            if kv.admit(_IMPORT, num + 1, kv.path(prompt_ids), reserve=len(node.live) + 1) is None:
                if node.live:
                    return False
            else:
                _import(kv, prompt_ids, num, node.spec.config.token_budget)
        self._submit(node, _Live(job, len(prompt_ids), job.num_output - 1, sent), prompt_ids, at_s)
        return True


def _import(kv: KVManager, prompt_ids: tuple[int, ...], num: int, budget: int) -> None:
    """Imports pages as if a sequence had computed them, step by step: groups with a window keep no
    more than it sees."""
    for end in (*range(budget, num, budget), num):
        if kv.extend(_IMPORT, end) is None:
            break  # the rest is computed
        kv.record(_IMPORT, prompt_ids, end)
        kv.trim(_IMPORT, end)
        kv.begin_step()
    kv.release(_IMPORT)


def num_short(token_budget: int) -> int:
    """Tokens of a prompt that a decode engine computes, as `engine/roles.py` has it."""
    return token_budget // 16


def _alone(tokens: range) -> StepPlan:
    plan = StepPlan(0)
    plan.items.append(StepItem(0, 0, tokens.start, len(tokens), False, 0))
    return plan


def _served(job: Job, times: list[float], engine: int, sent: _Sent | None = None) -> Served:
    gaps = [later - before for before, later in itertools.pairwise(times)]
    served = Served(job, times[0], times[-1], gaps, engine)
    return served if sent is None else replace(served, num_sent=sent.num_tokens, hidden=sent.hidden)


_END, _STEP = 0, 1
_IMPORT = -1  # the sequence in whose name pages are imported
_MANY = 2**30
_ROUNDING = 1 - 1e-9
