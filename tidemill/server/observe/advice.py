"""Advisor: whether prefill and decode engines would serve the measured load better, read from
events and from nothing else."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tidemill.config import EngineConfig, EngineOptions
from tidemill.sched.layouts import Advice, Engines, Load, StepCosts, compare
from tidemill.sched.request import HANDED_OVER
from tidemill.types import events
from tidemill.types.events import Event, LayoutAdvised

_EVERY_S = 60.0
_LEAST = 30  # requests that have ended, before anything is said
_MAX_STEPS = 64  # planned and not done, of all engines; one that failed never is
_log = logging.getLogger("tidemill.server")


class Advisor:
    """`begin`, then `take` events. Half of what was seen is forgotten with each advice."""

    def __init__(self, options: EngineOptions) -> None:
        self._num, self._has_roles = options.num_engines, options.has_roles
        self._config: EngineConfig | None = None
        self._costs = StepCosts()
        self._planned: dict[tuple[int, int], events.StepPlanned] = {}
        self._done_s: dict[int, float] = {}  # the last step of each engine
        self._since_s = self._again_s = 0.0
        self._num_ended = self._num_output = self._num_begun = self._num_prompt = 0.0
        self._num_found = self._num_again = 0.0  # tokens of requests that were taken over
        self._taken: set[tuple[int, str]] = (
            set()
        )  # requests that another engine began, until they start
        self._said: bool | None = None

    def begin(self, config: EngineConfig, now: float) -> LayoutAdvised:
        self._config, self._since_s, self._again_s = config, now, now + _EVERY_S
        have = "as was asked for" if self._has_roles else "engines do both"
        return LayoutAdvised(now, self._has_roles, 0.0, f"no load is measured yet: {have}")

    def take(self, batch: Iterable[Event]) -> list[LayoutAdvised]:
        now = 0.0
        for event in batch:
            self._take(event)
            now = max(now, event.time_s)
        if self._config is None or now < self._again_s:
            return []
        self._again_s = now + _EVERY_S
        advised = self._advise(now)
        return [] if advised is None else [advised]

    def _take(self, event: Event) -> None:
        match event:
            case events.StepPlanned():
                self._planned[event.replica, event.step] = event
                while len(self._planned) > _MAX_STEPS:
                    del self._planned[next(iter(self._planned))]
            case events.StepDone():
                self._end_step(event)
            case events.Resumed():
                self._taken.add((event.replica, event.request_id))
            case events.Admitted() if (event.replica, event.request_id) in self._taken:
                self._taken.discard((event.replica, event.request_id))
            case events.Admitted():
                self._num_begun += 1
                self._num_prompt += event.num_tokens - event.num_cached
            case events.TakenOver():
                self._num_found += event.num_found
                self._num_again += event.num_computed
            case events.Finished() if event.reason != HANDED_OVER:
                self._num_ended += 1
                self._num_output += event.num_output
            case events.Aborted() | events.EngineRestarted():
                self._taken = {entry for entry in self._taken if entry[0] != event.replica}

    def _end_step(self, event: events.StepDone) -> None:
        plan = self._planned.pop((event.replica, event.step), None)
        last_s = self._done_s.get(event.replica, 0.0)
        self._done_s[event.replica] = event.time_s
        if plan is not None:
            took_s = min(
                event.duration_s, event.time_s - last_s
            )  # it may have been launched before the one before it ended
            self._costs.observe(
                max(plan.num_tokens - plan.num_decoding - plan.num_drafts, 0),
                plan.num_decoding,
                took_s,
            )

    def _advise(self, now: float) -> LayoutAdvised | None:
        assert self._config is not None
        cost = self._costs.cost
        if cost is None or self._num_ended < _LEAST or not self._num_begun:
            return None
        seconds = max(now - self._since_s, 1e-3)
        load = Load(
            self._num_ended / seconds,
            self._num_prompt / self._num_begun,
            self._num_output / self._num_ended,
        )
        limits = self._config.token_budget, self._config.max_requests
        num, slower = (
            (max(self._num, 2), 1.0) if self._num > 1 or self._config.device == "cuda" else (2, 2.0)
        )
        alike = Engines(1 if slower > 1 else num, cost, *limits)
        advice = compare(load, alike, Engines(num, cost.times(slower), *limits), self._found(load))
        costs = (
            f"{1000 * cost.fixed_s:.2f} ms a step, {1e6 * cost.prompt_token_s:.1f} µs a "
            "prompt token, "
        )
        costs += f"{1e6 * cost.sequence_s:.1f} µs a sequence"
        said = LayoutAdvised(
            now,
            advice.disaggregate,
            advice.gain,
            advice.reason,
            f"{load}; {costs}; {_both(advice)}",
        )
        if advice.disaggregate is not self._said:
            _log.warning("%s", in_words(said))
        self._said = advice.disaggregate
        self._fade(now)
        return said

    def _found(self, load: Load) -> float:
        """The part of a prompt that a decode engine has not to compute again: as measured, or all
        but the last page."""
        if self._num_found + self._num_again:
            return self._num_found / (self._num_found + self._num_again)
        assert self._config is not None
        return max(1 - self._config.page_size / max(load.num_prompt, 1.0), 0.0)

    def _fade(self, now: float) -> None:
        self._since_s = now - (now - self._since_s) / 2
        for name in (
            "_num_ended",
            "_num_output",
            "_num_begun",
            "_num_prompt",
            "_num_found",
            "_num_again",
        ):
            setattr(self, name, getattr(self, name) / 2)


def _both(advice: Advice) -> str:
    return f"{advice.alike}; {advice.split}"


def in_words(said: LayoutAdvised) -> str:
    if not said.figures:
        return said.reason
    better = "prefill and decode engines" if said.disaggregate else "engines that do both"
    return f"{better} are expected to be better: {said.reason} ({said.figures})"
