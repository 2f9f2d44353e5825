"""Which drafters there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from tidemill.config import EngineConfig
from tidemill.runner.base import Runner
from tidemill.runner.spec import Drafter
from tidemill.runner.spec.drafters import HeadsDrafter
from tidemill.runner.spec.forced import ForcedDrafter
from tidemill.runner.spec.ngram import NgramDrafter

Forced = Callable[[int], Sequence[int]]  # see ForcedDrafter


def _heads(name: str, config: EngineConfig, runner: Runner, forced: Forced) -> Drafter:
    return HeadsDrafter(name, config, runner)


DRAFTERS: dict[str, Callable[[EngineConfig, Runner, Forced], Drafter]] = {
    "forced": lambda config, runner, forced: ForcedDrafter(forced),
    "ngram": lambda config, runner, forced: NgramDrafter(),
    **{name: partial(_heads, name) for name in ("medusa", "eagle", "exit")},
}
# What a further token adds to the time of a step of one, before it is measured.
SLOPES = {"cpu": 0.35, "cuda": 0.005}


def make_drafters(config: EngineConfig, runner: Runner, forced: Forced) -> list[Drafter]:
    return [DRAFTERS[name](config, runner, forced) for name in config.speculate]
