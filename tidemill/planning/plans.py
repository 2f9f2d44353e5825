"""Plans: which engines, on how many devices, with which limits; and what the simulator says of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tidemill.config.cache import STATE_INTERVAL
from tidemill.errors import ConfigError
from tidemill.planning.cluster import (
    BOTH,
    PREFILL,
    Cluster,
    EngineSpec,
    Job,
    Prefilled,
    Served,
    num_short,
)
from tidemill.planning.cost import CostModel
from tidemill.planning.hardware import (
    ONE,
    Cache,
    Hardware,
    Seen,
    Shape,
    cache_of,
    estimate,
    free_bytes,
    sent_bytes,
)
from tidemill.planning.simulator import SimConfig
from tidemill.types.model_config import ModelConfig

_LINK_LATENCY_S = 1e-3


@dataclass(frozen=True, slots=True)
class Slo:
    """Seconds until the first token and per token after it, and the part of the requests that must
    get both."""

    ttft_s: float
    tpot_s: float
    attainment: float = 0.9

    def scale(self, served: Served) -> float:
        """By which factor the limits would have to be multiplied for this request to be within
        them."""
        return max(served.ttft_s / self.ttft_s, served.tpot_s / self.tpot_s)

    def num_needed(self, num: int) -> int:
        return max(1, math.ceil(self.attainment * num - 1e-9))


def parse_slo(text: str) -> Slo:
    """Like ttft=0.5,tpot=0.05,attainment=0.9."""
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            values[name.strip()] = float(value)
        except ValueError:
            values[name.strip()] = math.nan
    known = {"ttft", "tpot", "attainment"}
    fix = "Write ttft=0.5,tpot=0.05 in seconds, and ,attainment=0.9 if not 90 % of the requests must get both."
    if not {"ttft", "tpot"} <= values.keys() <= known:
        raise ConfigError(f"--slo {text!r} needs ttft and tpot, and may have attainment.", fix=fix)
    slo = Slo(values["ttft"], values["tpot"], values.get("attainment", 0.9))
    if not (0 < slo.ttft_s < math.inf and 0 < slo.tpot_s < math.inf and 0 < slo.attainment <= 1):
        raise ConfigError(f"--slo {text!r} has a value that is out of range.", fix=fix)
    return slo


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of an engine's steps."""

    policy: str = "continuous"
    token_budget: int = 2048
    max_requests: int = 256

    def __str__(self) -> str:
        return f"{self.policy}, {self.token_budget} tokens, {self.max_requests} requests"


@dataclass(frozen=True, slots=True)
class Pool:
    """Engines that are alike. Each has its own devices, which its models share."""

    num: int
    shape: Shape = ONE
    role: str = BOTH
    limits: Limits = Limits()
    models: tuple[str, ...] = ("",)
    cells: int = 1  # of a disaggregated plan: hosts, each with its part of both pools

    @property
    def num_devices(self) -> int:
        return self.num * self.shape.num_devices


@dataclass(frozen=True)
class Plan:
    pools: tuple[Pool, ...]

    @property
    def num_devices(self) -> int:
        return sum(pool.num_devices for pool in self.pools)

    @property
    def is_disaggregated(self) -> bool:
        return any(pool.role == PREFILL for pool in self.pools)

    @property
    def family(self) -> tuple[tuple[str, Shape, tuple[str, ...]], ...]:
        """The kind of plan, whatever its numbers and limits."""
        return tuple(sorted(((p.role, p.shape, p.models) for p in self.pools), key=repr))

    @cached_property
    def name(self) -> str:
        several = any(
            pool.models != self.pools[0].models or len(pool.models) > 1 for pool in self.pools
        )
        parts = []
        for pool in self.pools:
            role = "" if pool.role == BOTH else f" {pool.role}"
            parts.append(
                f"{pool.num} × {pool.shape}{role}"
                + (f" ({', '.join(pool.models)})" if several else "")
            )
        return " + ".join(parts)


@dataclass(frozen=True)
class Case:
    """The case that is planned for. `costs`: those of a model and shape, if not the estimate."""

    models: Mapping[str, ModelConfig]
    jobs: Sequence[Job]
    slo: Slo
    hardware: Hardware
    num_devices: int
    budget: float = math.inf  # GPU hours per million output tokens
    page_size: int = 64
    costs: Callable[[str, Shape], CostModel | None] = lambda name, shape: None
    _made: dict[tuple[str, Shape], CostModel] = field(default_factory=dict)
    _caches: dict[tuple[str, Shape], Cache | None] = field(default_factory=dict)

    def cost(self, name: str, shape: Shape) -> CostModel:
        found = self._made.get((name, shape))
        if found is None:
            found = self.costs(name, shape) or estimate(
                self.models[name], self.hardware, shape, self.seen[name]
            )
            self._made[name, shape] = found
        return found

    @cached_property
    def longest(self) -> dict[str, int]:
        """Tokens of the longest request of each model."""
        most = dict.fromkeys(self.models, 1)
        for job in self.jobs:
            most[job.model] = max(most[job.model], job.num_prompt + job.num_output + 1)
        return most

    @cached_property
    def seen(self) -> dict[str, Seen]:
        lengths: dict[str, list[tuple[int, int]]] = {name: [] for name in self.models}
        for job in self.jobs:
            lengths[job.model].append((job.num_prompt, job.num_output))
        return {name: Seen(own) for name, own in lengths.items()}

    @cached_property
    def sent_bytes(self) -> dict[str, float]:
        """The bytes of a token that moves to another engine."""
        return {
            name: sent_bytes(model, self.hardware, self.seen[name])
            for name, model in self.models.items()
        }

    def page_size_of(self, name: str) -> int:
        """The page size of a model. Where there are states, whole pages lie between those that are
        kept."""
        return (
            math.gcd(self.page_size, STATE_INTERVAL)
            if self.models[name].has_states
            else self.page_size
        )

    def cache(self, name: str, shape: Shape) -> Cache | None:
        """The cache of a model in this shape; same as `cache_of`."""
        if (name, shape) not in self._caches:
            page_size = self.page_size_of(name)
            cache = cache_of(self.models[name], self.hardware, shape, page_size, self.longest[name])
            self._caches[name, shape] = cache
        return self._caches[name, shape]

    def num_pages(self, name: str, shape: Shape, models: Sequence[str]) -> int:
        """In the KV cache of a model that shares devices with others; 0 or less: there is no room
        for one."""
        cache = self.cache(name, shape)
        if cache is None:
            return 0
        others = sum(self.models[other].num_parameters for other in models if other != name)
        taken = others * self.hardware.device.weight_bytes / shape.num_devices
        return int(
            free_bytes(self.models[name], self.hardware, shape, taken) // (cache[1] * len(models))
        )

    def fits(self, pool: Pool) -> bool:
        """Each model has room for its longest request."""
        return all(self._fits(name, pool) for name in pool.models)

    def _fits(self, name: str, pool: Pool) -> bool:
        cache, longest = self.cache(name, pool.shape), self.longest[name] + self.page_size_of(name)
        num_pages = self.num_pages(name, pool.shape, pool.models)
        return cache is not None and num_pages >= cache[0].num_pages_for(
            longest, pool.limits.token_budget
        )

    def specs(self, plan: Plan) -> list[EngineSpec]:
        specs = []
        for number, pool in enumerate(plan.pools):
            for i in range(pool.num):
                devices = f"{number}.{i}" if len(pool.models) > 1 else ""
                specs += [
                    self._spec(name, pool, devices, i * pool.cells // pool.num)
                    for name in pool.models
                ]
        return specs

    def _spec(self, name: str, pool: Pool, devices: str, cell: int) -> EngineSpec:
        limits, page_size, cache = (
            pool.limits,
            self.page_size_of(name),
            self.cache(name, pool.shape),
        )
        assert cache is not None
        config = SimConfig(
            policy=limits.policy,
            num_rows=limits.max_requests,
            token_budget=limits.token_budget,
            num_pages=self.num_pages(name, pool.shape, pool.models),
            page_size=page_size,
            max_context=self.longest[name] + page_size,
            steps_ahead=1,
            groups=cache[0].groups,
            device="cpu" if self.hardware.name == "CPU" else "cuda",
        )
        return EngineSpec(
            config,
            self.cost(name, pool.shape),
            pool.role,
            name,
            devices,
            cell,
            kv_token_bytes=self.sent_bytes[name],
            state_bytes=self.models[name].state_bytes,
            link=self.hardware.link * pool.shape.num_devices,
            link_latency_s=_LINK_LATENCY_S,
        )


@dataclass(frozen=True)
class Result:
    """The simulator's verdict on a plan. `strain`: the factor by which the limits, or the budget,
    would have to be larger for the plan to keep them: it does so up to 1."""

    plan: Plan
    strain: float
    scale: float  # of the limits alone
    parts: tuple[float, float]  # of the limit of the first token alone, and of that of the others
    attainment: float
    ttft_s: tuple[float, float]  # median, 99th percentile
    tpot_s: tuple[float, float]
    gap_s: tuple[float, float]  # between two tokens
    duration_s: float
    num_tokens: int  # of output
    goodput: float  # requests within the limits, a second and device
    gpu_hours: float  # per million output tokens
    hidden: float  # part of sending KV caches that prefill covered

    @property
    def attains(self) -> bool:
        return self.strain <= 1

    @property
    def throughput(self) -> float:
        """Output tokens a second and device."""
        return self.num_tokens / self.duration_s / self.plan.num_devices


class Race:
    """Ends a simulation as soon as it cannot be within `limit` times the SLO any more."""

    def __init__(self, slo: Slo, num: int, limit: float, ttft_only: bool = False) -> None:
        self._slo, self._limit, self._ttft_only = slo, limit, ttft_only
        self._num_left = num - slo.num_needed(num)

    def __call__(self, served: Served) -> bool:
        scale = served.ttft_s / self._slo.ttft_s if self._ttft_only else self._slo.scale(served)
        self._num_left -= scale > self._limit
        return self._num_left < 0


class Evaluator:
    """Simulates plans; prefill pools, which do not depend on decode pools, once each."""

    def __init__(self, case: Case) -> None:
        self.case, self.num_simulated = case, 0
        self._prefilled: dict[Pool, dict[int, Prefilled]] = {}
        # prefill pools that were given up: their scale is larger than this
        self._late: dict[Pool, float] = {}

    def evaluate(self, plan: Plan, limit: float = math.inf) -> Result | None:
        """None: its strain is larger than the limit."""
        case, prefilled = self.case, None
        if plan.is_disaggregated:
            prefilled = self._prefill(plan, limit)
            if prefilled is None:
                return None
        self.num_simulated += 1
        placed = {name for pool in plan.pools for name in pool.models}
        jobs = [job for job in case.jobs if job.model in placed]
        race = None if limit == math.inf else Race(case.slo, len(case.jobs), limit)
        served = Cluster(case.specs(plan), prefilled=prefilled).run(jobs, race)
        if served is None:
            return None
        result = summarize(case, plan, served)
        return result if result.strain <= limit else None

    def _prefill(self, plan: Plan, limit: float) -> dict[int, Prefilled] | None:
        pool = next(pool for pool in plan.pools if pool.role == PREFILL)
        if (done := self._prefilled.get(pool)) is not None:
            return done
        if limit <= self._late.get(pool, -1.0):
            return None
        self.num_simulated += 1
        race = (
            None
            if limit == math.inf
            else Race(self.case.slo, len(self.case.jobs), limit, ttft_only=True)
        )
        jobs = [
            job for job in self.case.jobs if job.num_prompt > num_short(pool.limits.token_budget)
        ]
        served = Cluster(self.case.specs(Plan((pool,)))).run(jobs, race)
        if served is None:
            self._late[pool] = limit
            return None
        done = self._prefilled[pool] = {
            request.job.number: Prefilled(request.engine, request.first_s) for request in served
        }
        return done


def summarize(case: Case, plan: Plan, served: Sequence[Served]) -> Result:
    """Requests of models that are nowhere never come."""
    num = len(case.jobs)
    scales = sorted(
        [case.slo.scale(request) for request in served] + [math.inf] * (num - len(served))
    )
    needed = case.slo.num_needed(num) - 1
    scale = scales[needed]
    num_good = sum(scale <= 1 for scale in scales)
    begin, end = case.jobs[0].at_s, max((request.last_s for request in served), default=math.inf)
    num_tokens = sum(request.job.num_output for request in served)
    gpu_s = plan.num_devices * (end - begin)
    gpu_hours = gpu_s / 3600 / (num_tokens / 1e6) if num_tokens else math.inf
    sent = sum(request.num_sent for request in served)
    return Result(
        plan,
        max(scale, gpu_hours / case.budget),
        scale,
        (
            _at([request.ttft_s / case.slo.ttft_s for request in served], needed),
            _at([request.tpot_s / case.slo.tpot_s for request in served], needed),
        ),
        num_good / num,
        quantiles([request.ttft_s for request in served]),
        quantiles([request.tpot_s for request in served if request.job.num_output > 1]),
        quantiles([gap for request in served for gap in request.gaps_s]),
        end - begin,
        num_tokens,
        num_good / gpu_s,
        gpu_hours,
        sum(request.hidden * request.num_sent for request in served) / sent if sent else 1.0,
    )


def _at(values: list[float], place: int) -> float:
    values.sort()
    return values[place] if place < len(values) else math.inf


def quantiles(values: list[float]) -> tuple[float, float]:
    """The median and the 99th percentile."""
    if not values:
        return 0.0, 0.0
    values.sort()
    return values[len(values) // 2], values[min(int(len(values) * 0.99), len(values) - 1)]
