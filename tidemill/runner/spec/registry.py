"""Which drafters there are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tidemill.config import EngineConfig
from tidemill.runner.base import Runner
from tidemill.runner.spec import Drafter
from tidemill.runner.spec.drafters import HeadsDrafter
from tidemill.runner.spec.ngram import NgramDrafter

DRAFTERS: dict[str, Callable[[EngineConfig, Runner], Drafter]] = {
    "ngram": lambda config, runner: NgramDrafter(),
    "medusa": partial(HeadsDrafter, "medusa"),
    "eagle": partial(HeadsDrafter, "eagle"),
    "exit": partial(HeadsDrafter, "exit"),
}
# What a further token adds to the time of a step of one, before it is measured.
SLOPES = {"cpu": 0.35, "cuda": 0.01}


def make_drafters(config: EngineConfig, runner: Runner) -> list[Drafter]:
    return [DRAFTERS[name](config, runner) for name in config.speculate]
