"""Rows of a recording in one simulated engine or in several alike, with what the server adds to
their times."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tidemill.engine.routing import BLOCK_LEN
from tidemill.planning.cost import CostModel
from tidemill.planning.records import Record
from tidemill.planning.simulator import Arrival, SimConfig, SimEngine
from tidemill.planning.trace import Row, coming
from tidemill.planning.turns import Turns
from tidemill.sched.placement import Placement, prefix_keys

_LOOK_EVERY = 64  # requests


@dataclass(frozen=True, slots=True)
class Delays:
    """The time that the server adds to the engine's time of a request."""

    before_s: float = 0.0  # until the engine has it
    after_s: float = 0.0  # from when a token is there until the server has it


@dataclass(slots=True)
class FleetRun:
    engines: list[SimEngine]
    # one of each sample, in the order of arrival
    records: list[Record] = field(default_factory=list)
    is_complete: bool = True


class _Follower:
    """Takes the times of samples as they end, and the tokens of one that goes on."""

    def __init__(self, run: FleetRun, delays: Delays) -> None:
        self._run, self._delays = run, delays
        self._open: list[tuple[Arrival, str, SimEngine, Record]] = []

    def begin(self, arrival: Arrival, engine: SimEngine) -> None:
        """`arrival`: as the server got it."""
        for name in (
            [f"{arrival.request_id}:{i}" for i in range(arrival.n)]
            if arrival.n > 1
            else [arrival.request_id]
        ):
            record = Record(arrival.arrival_s, arrival.arrival_s, num_prompt=arrival.num_prompt)
            self._run.records.append(record)
            self._open.append((arrival, name, engine, record))

    def look(self, is_over: bool = False) -> None:
        """`is_over`: what has not ended was aborted."""
        times_of = {id(engine): engine.token_times_s for engine in self._run.engines}
        still_open = []
        for entry in self._open:
            arrival, name, engine, record = entry
            times = times_of[id(engine)][name]
            if len(times) < arrival.num_output and not is_over:
                still_open.append(entry)
                continue
            after_s = self._delays.after_s
            record.token_times_s = [time_s + after_s for time_s in times]
            record.num_output = len(times)
            record.end_s = record.token_times_s[-1] if times else arrival.arrival_s
            del times_of[id(engine)][name][:]
        self._open = still_open


def run_rows(
    rows: Sequence[Row],
    config: SimConfig,
    cost: CostModel,
    *,
    num_engines: int = 1,
    delays: Delays | None = None,
    time_scale: float = 1.0,
    length_scale: float = 1.0,
    gives_up: Callable[[list[Record]], bool] | None = None,
) -> FleetRun:
    """`gives_up`: asked now and then about the records so far, of which those that have not ended
    have no token; the rest is not simulated then."""
    delays = delays or Delays()
    engines = [SimEngine(config, cost, keeps_events=False) for _ in range(num_engines)]
    turns = [Turns(config.page_size) for _ in engines]
    placement, run = Placement(), FleetRun(engines)
    follower = _Follower(run, delays)
    arrivals = coming(
        rows, time_scale=time_scale, length_scale=length_scale, max_context=config.max_context
    )
    for number, (row, asked) in enumerate(zip(rows, arrivals, strict=True), 1):
        at_s = asked.arrival_s + delays.before_s
        for engine in engines:
            engine.run_until(at_s)
        which = _place(placement, asked, engines) if num_engines > 1 else 0
        engine, prompt_ids = engines[which], asked.prompt_ids
        if row.outputs and len(prompt_ids) == row.num_prompt:
            prompt_ids = turns[which].simulated(prompt_ids, row.salt)
        abort_s = None if asked.abort_s is None else asked.abort_s + delays.before_s
        engine.submit(replace(asked, arrival_s=at_s, prompt_ids=prompt_ids, abort_s=abort_s))
        if row.outputs and len(prompt_ids) == row.num_prompt:
            turns[which].add(
                asked.prompt_ids,
                prompt_ids,
                row.salt,
                row.outputs,
                engine.seqs_of(asked.request_id),
            )
        follower.begin(replace(asked, prompt_ids=()), engine)
        if number % _LOOK_EVERY == 0:
            follower.look()
            if gives_up is not None and gives_up(run.records):
                run.is_complete = False
                return run
    for engine in engines:
        engine.run_until(math.inf)
    follower.look(is_over=True)
    return run


def _place(placement: Placement, arrival: Arrival, engines: Sequence[SimEngine]) -> int:
    """Places requests as the server does in its engines."""
    prompt = array("Q", arrival.prompt_ids).tobytes()
    keys = prefix_keys(arrival.salt.encode(), prompt, BLOCK_LEN * 8)
    chosen = placement.choose(
        keys, {str(number): engine.num_under_way for number, engine in enumerate(engines)}
    )
    placement.note(chosen.name, keys)
    return int(chosen.name)
