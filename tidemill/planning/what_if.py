"""The search for what would have kept the SLO: the smallest change of a recorded engine that does,
found by simulating one after the other.

Changes are tried in the order of what they cost: one option that only changes an order, one with
other sizes, one with more memory; then the best of these together with others; then more replicas.
A change keeps the SLO if its requests do even with the error that the simulation of the recorded
engine has, at the quantile that the SLO asks for, and with steps that take as long as they did in
the machine's slower times. Few requests say less than many: that, too, is part of the error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tidemill.config import fmt_bytes
from tidemill.planning.cost import CostModel
from tidemill.planning.fleet import Delays, FleetRun, run_rows
from tidemill.planning.records import Record, percentile
from tidemill.planning.simulator import SimConfig
from tidemill.planning.trace import Row

MOST_ROWS = 2000  # requests of a long recording with which changes are tried
_PERCENTILES = (50, 90, 99)
_MOST_SLOTS, _LEAST_BUDGET, _MOST_BUDGET = 1024, 16, 16_384
_MOST_TOGETHER = 3  # options that are changed
_Z = 1.645
_MOST_ERROR = 10.0  # times: more than that is no prediction
_FIELDS = {
    "token-budget": "token_budget", "max-requests": "num_rows", "policy": "policy", "queue-order": "queue_order",
    "prefix-caching": "prefix_caching", "prefix-index": "prefix_index",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Slo:
    ttft_s: float | None
    tpot_s: float | None
    attainment: float

    def is_kept(self, record: Record, ttft_scale: float = 1.0, tpot_scale: float = 1.0) -> bool:
        """By a request whose times are multiplied by these."""
        if record.error is not None or not record.token_times_s:
            return False
        if self.ttft_s is not None and record.ttft_s * ttft_scale > self.ttft_s:
            return False
        return self.tpot_s is None or (record.tpot_s or 0.0) * tpot_scale <= self.tpot_s

    def part(
        self, records: Sequence[Record], ttft_scale: float = 1.0, tpot_scale: float = 1.0
    ) -> float:
        """The part of the requests that keep it."""
        return sum(self.is_kept(each, ttft_scale, tpot_scale) for each in records) / max(
            len(records), 1
        )


@dataclass(frozen=True, slots=True)
class Case:
    """The question."""

    rows: Sequence[Row]
    config: SimConfig
    cost: CostModel
    slo: Slo
    delays: Delays | None = None
    num_engines: int = 1
    page_bytes: int = 0  # 0: no other size of the KV cache is tried
    free_bytes: int = 0  # of the machine's memory
    faster: CostModel | None = None  # of its good and its bad times
    slower: CostModel | None = None
    most_engines: int = 4
    time_scale: float = 1.0
    length_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Change:
    options: tuple[tuple[str, Any], ...] = ()  # by name, as `serve` takes them
    num_engines: int = 1
    weight: float = 0.0  # what it costs: the order in which changes are tried

    def with_(self, other: Change) -> Change | None:
        """Both. None: they are about the same option."""
        if {name for name, _ in self.options} & {name for name, _ in other.options}:
            return None
        return Change(
            (*self.options, *other.options),
            max(self.num_engines, other.num_engines),
            self.weight + other.weight,
        )

    def apply(self, config: SimConfig, page_bytes: int) -> SimConfig:
        fields = {_FIELDS[name]: value for name, value in self.options if name in _FIELDS}
        for name, value in self.options:
            if name == "kv-memory":
                fields["num_pages"] = value // page_bytes
        config = replace(config, **fields)
        if config.background_budget is not None and config.background_budget > config.token_budget:
            config = replace(config, background_budget=config.token_budget)
        return config

    def flags(self, was_engines: int = 1) -> str:
        texts = []
        for name, value in self.options:
            if isinstance(value, bool):
                texts.append(f"--{name}" if value else f"--no-{name}")
            else:
                texts.append(f"--{name} {value}")
        if self.num_engines != was_engines:
            texts.append(f"{self.num_engines} replicas instead of {was_engines}")
        return " ".join(texts) or "as recorded"


@dataclass(slots=True)
class Times:
    """The results of requests: how many keep the SLO, and percentiles."""

    attainment: float
    ttft_s: dict[str, float]
    tpot_s: dict[str, float]

    @staticmethod
    def of(records: Sequence[Record], slo: Slo) -> Times:
        good = [record for record in records if record.error is None and record.token_times_s]
        tpots = [tpot for record in good if (tpot := record.tpot_s) is not None]
        return Times(slo.part(records), _spread([record.ttft_s for record in good]), _spread(tpots))


@dataclass(slots=True)
class Tried:
    change: Change
    times: Times
    low: float  # the attainment with the error of the simulation
    high: float
    keeps: bool
    is_complete: bool = True  # False: it was given up, as too many requests had missed the SLO
    num_requests: int = 0
    beyond: str = ""  # in what it goes beyond what was measured


@dataclass(slots=True)
class Answer:
    recorded: Times | None
    simulated: Times
    ttft_error: float  # recorded times by simulated ones, at the quantile of the SLO
    tpot_error: float
    tried: list[Tried] = field(default_factory=list)
    found: Tried | None = None
    num_requests: int = 0  # with which changes were tried
    num_all: int = 0
    took_s: float = 0.0
    is_cut: bool = False  # the time was over


class Search:
    def __init__(
        self, case: Case, recorded: Callable[[Sequence[Row]], list[Record]], seconds: float = 120.0,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        """`recorded`: the records of rows as they were measured. `seconds`: after these no other
        change is tried."""
        self._case, self._recorded, self._seconds, self._progress = (
            case,
            recorded,
            seconds,
            progress,
        )
        self._begin_s = time.monotonic()
        self._rows = busiest(case.rows, recorded, case.slo)
        self._seen: set[tuple[frozenset[tuple[str, Any]], int]] = set()
        self._answer: Answer

    def run(self) -> Answer:
        case, slo = self._case, self._case.slo
        run = self._simulate(Change(num_engines=case.num_engines), self._rows, gives_up=False)
        measured = self._recorded(self._rows)
        simulated, recorded = (
            Times.of(run.records, slo),
            Times.of(measured, slo) if measured else None,
        )
        ratios = _error(measured, run.records, slo)
        self._answer = Answer(
            recorded, simulated, *ratios, num_requests=len(self._rows), num_all=len(case.rows)
        )
        base = self._tried(Change(num_engines=case.num_engines), run)
        self._answer.tried.append(base)
        base.keeps = recorded.attainment >= slo.attainment if recorded is not None else base.keeps
        if base.keeps:
            self._answer.found = base
        else:
            self._search(run)
        self._answer.took_s = time.monotonic() - self._begin_s
        return self._answer

    def _search(self, base: FleetRun) -> None:
        singles = sorted(self._singles(base), key=lambda change: change.weight)
        tried = [found for change in singles if (found := self._try(change)) is not None]
        best = Change(num_engines=self._case.num_engines)
        while not self._is_over() and tried:
            leading = max(tried, key=lambda one: (one.times.attainment, -one.change.weight))
            if leading.times.attainment <= self._attained_by(best):
                break
            best = leading.change
            if len(best.options) >= _MOST_TOGETHER:
                break
            together = sorted(
                filter(None, (best.with_(change) for change in singles)),
                key=lambda change: change.weight,
            )
            tried = [found for change in together if (found := self._try(change)) is not None]
        for num in range(self._case.num_engines + 1, self._case.most_engines + 1):
            for change in (Change(), best):
                self._try(replace(change, num_engines=num, weight=change.weight + 10.0 * num))

    def _attained_by(self, change: Change) -> float:
        return next(
            (one.times.attainment for one in self._answer.tried if one.change == change), 0.0
        )

    def _is_over(self) -> bool:
        if time.monotonic() - self._begin_s > self._seconds and not self._answer.found:
            self._answer.is_cut = True
        return self._answer.found is not None or self._answer.is_cut

    def _try(self, change: Change) -> Tried | None:
        key = frozenset(change.options), change.num_engines
        if self._is_over() or key in self._seen:
            return None
        self._seen.add(key)
        begin_s = time.monotonic()
        one = self._tried(change, self._simulate(change, self._rows))
        took_s = time.monotonic() - begin_s
        self._answer.tried.append(one)
        if one.keeps:
            self._widen(one, self._rows)
        self._progress(f"{change.flags(self._case.num_engines)}: {one.times.attainment:.1%}")
        rows = self._case.rows
        left_s = self._seconds - (time.monotonic() - self._begin_s)
        all_s = 3 * took_s * len(rows) / len(self._rows)  # also in good and in bad times
        if one.keeps and len(self._rows) < len(rows) and all_s < left_s:
            one = self._answer.tried[-1] = self._tried(change, self._simulate(change, rows))
            self._widen(one, rows)
        if one.keeps:
            self._answer.found = one
        return one

    def _widen(self, one: Tried, rows: Sequence[Row]) -> None:
        """The same in the machine's good and in its bad times: where requests queue, a little
        slower is a lot later."""
        for cost in filter(None, (self._case.faster, self._case.slower)):
            records = self._simulate(one.change, rows, gives_up=False, cost=cost).records
            low, high = likely(self._case.slo.part(records), len(records))
            one.low, one.high = min(one.low, low), max(one.high, high)
        one.keeps = one.low >= self._case.slo.attainment

    def _simulate(
        self,
        change: Change,
        rows: Sequence[Row],
        gives_up: bool = True,
        cost: CostModel | None = None,
    ) -> FleetRun:
        case = self._case
        allowed = 2 * (1 - case.slo.attainment) * len(rows) + 10

        def is_lost(records: list[Record]) -> bool:
            return (
                sum(bool(each.token_times_s) and not case.slo.is_kept(each) for each in records)
                > allowed
            )

        return run_rows(
            rows, change.apply(case.config, case.page_bytes), cost or case.cost, num_engines=change.num_engines,
            delays=case.delays, time_scale=case.time_scale, length_scale=case.length_scale,
            gives_up=is_lost if gives_up else None,
        )  # fmt: skip

    def _tried(self, change: Change, run: FleetRun) -> Tried:
        slo, answer = self._case.slo, self._answer
        errors = answer.ttft_error, answer.tpot_error
        num = len(run.records)
        low, _ = likely(slo.part(run.records, *(max(1.0, error) for error in errors)), num)
        _, high = likely(slo.part(run.records, *(min(1.0, error) for error in errors)), num)
        keeps = run.is_complete and low >= slo.attainment
        config = change.apply(self._case.config, self._case.page_bytes)
        return Tried(
            change,
            Times.of(run.records, slo),
            low,
            high,
            keeps,
            run.is_complete,
            len(run.records),
            self._beyond(config),
        )

    def _beyond(self, config: SimConfig) -> str:
        was = self._case.config
        parts = [
            f"more than {was.num_rows} sequences" if config.num_rows > was.num_rows else "",
            f"more than {was.token_budget} tokens a step"
            if config.token_budget > was.token_budget
            else "",
        ]
        return " and ".join(filter(None, parts))

    # ---- what is tried

    def _singles(self, base: FleetRun) -> Iterator[Change]:
        """Changes of one option."""
        case, config, num = self._case, self._case.config, self._case.num_engines
        tallies = [engine.tally for engine in base.engines]
        if not config.prefix_caching:
            yield Change((("prefix-caching", True),), num, 1.0)
        elif config.queue_order == "arrival":
            yield Change((("queue-order", "prefix"),), num, 1.1)
        for weight, policy in enumerate(("continuous", "splitfuse", "prefill-first")):
            if config.policy != policy:
                yield Change((("policy", policy),), num, 1.2 + weight / 10)
        for steps, times in (
            (1, 2.0),
            (1, 0.5),
            (2, 4.0),
            (2, 0.25),
            (3, 8.0),
            (3, 0.125),
            (4, 16.0),
        ):
            budget = int(config.token_budget * times)
            if _LEAST_BUDGET <= budget <= min(_MOST_BUDGET, config.max_context):
                yield Change((("token-budget", budget),), num, 1.5 + steps / 4)
            slots = int(config.num_rows * times)
            has_waited = any(tally.most_waiting for tally in tallies)
            if 1 <= slots <= _MOST_SLOTS and (times < 1 or has_waited):
                yield Change((("max-requests", slots),), num, 1.6 + steps / 4)
        if case.page_bytes and any(tally.num_preempted or tally.num_evicted for tally in tallies):
            for steps, times in ((1, 2), (2, 4), (3, 8)):
                more = (times - 1) * config.num_pages * case.page_bytes
                if more <= case.free_bytes:
                    yield Change(
                        (("kv-memory", times * config.num_pages * case.page_bytes),),
                        num,
                        3.0 + steps,
                    )


def busiest(
    rows: Sequence[Row], recorded: Callable[[Sequence[Row]], list[Record]], slo: Slo
) -> Sequence[Row]:
    """The stretch of a long recording in which most requests missed the SLO; the densest, where
    that is not known."""
    if len(rows) <= MOST_ROWS:
        return rows
    missed = [sum(not slo.is_kept(record) for record in recorded([row])) for row in rows]
    sums = [0]
    for num in missed:
        sums.append(sums[-1] + num)
    starts = range(0, len(rows) - MOST_ROWS + 1, max(1, MOST_ROWS // 20))

    def worth(start: int) -> tuple[int, float]:
        end = start + MOST_ROWS
        return sums[end] - sums[start], rows[start].at_s - rows[end - 1].at_s

    start = max(starts, key=worth)
    chosen = rows[start : start + MOST_ROWS]
    return [replace(row, at_s=row.at_s - chosen[0].at_s) for row in chosen]


def likely(part: float, num: int) -> tuple[float, float]:
    """In which range a part lies of which a sample of so many requests shows this (Wilson's
    interval, 90 %)."""
    scale, middle = 1 + _Z**2 / num, part + _Z**2 / (2 * num)
    margin = _Z * math.sqrt(part * (1 - part) / num + _Z**2 / (4 * num**2))
    return max((middle - margin) / scale, 0.0), min((middle + margin) / scale, 1.0)


def _error(
    recorded: Sequence[Record], simulated: Sequence[Record], slo: Slo
) -> tuple[float, float]:
    """Recorded times to the first token and per token, by simulated ones, at the quantile that the
    SLO asks for."""

    def ratio(of: Callable[[Record], float | None]) -> float:
        sides = [
            [
                value
                for record in records
                if record.token_times_s and (value := of(record)) is not None
            ]
            for records in (recorded, simulated)
        ]
        if not all(sides):
            return 1.0
        took, said = (percentile(side, 100 * slo.attainment) for side in sides)
        return min(max(took / said, 1 / _MOST_ERROR), _MOST_ERROR) if said > 0 and took > 0 else 1.0

    return ratio(lambda record: record.ttft_s), ratio(lambda record: record.tpot_s)


def _spread(values: Sequence[float]) -> dict[str, float]:
    return (
        {f"p{percent}": percentile(values, percent) for percent in _PERCENTILES} if values else {}
    )


def lines_of(answer: Answer, slo: Slo, was_engines: int) -> list[str]:
    """The answer in words."""
    found = answer.found
    lines = []
    if answer.num_requests < answer.num_all:
        lines.append(
            f"Tried with the {answer.num_requests:,} requests of {answer.num_all:,} among which most missed it."
        )
    if found is None:
        why = "the time was over" if answer.is_cut else "nothing that was tried does"
        lines.append(f"Nothing found that keeps the SLO for {slo.attainment:.0%}: {why}.")
        return lines
    if not found.change.options and found.change.num_engines == was_engines:
        lines.append("The SLO was kept as it is.")
        return lines
    error = f"{found.low:.1%} to {found.high:.1%} with the error of this simulation"
    lines.append(f"Keeps the SLO: {found.change.flags(was_engines)}")
    lines.append(f"  predicted: {found.times.attainment:.1%} of the requests within it, {error}")
    if found.beyond:
        lines.append(
            f"  beyond what was recorded ({found.beyond}): extrapolated from steps with prompts"
        )
    if found.num_requests < answer.num_all:
        lines.append(
            "  not simulated with the whole recording: it would have taken too long (--seconds)"
        )
    if found.change.num_engines > was_engines:
        lines.append(
            "  a replica is another machine like this one (`tidemill route`), or another device of it (--data-parallel)"
        )
    for name, value in found.change.options:
        if name == "kv-memory":
            lines.append(f"  --kv-memory {value} is {fmt_bytes(value)}")
    return lines
