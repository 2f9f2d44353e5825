"""Which drafters there are."""

from __future__ import annotations

from collections.abc import Callable

from tidemill.config import EngineConfig
from tidemill.runner.base import Runner
from tidemill.runner.spec import Drafter
from tidemill.runner.spec.ngram import NgramDrafter

DRAFTERS: dict[str, Callable[[Runner], Drafter]] = {
    "ngram": lambda runner: NgramDrafter(),
}
# What a further token adds to the time of a step of one, before it is measured.
SLOPES = {"cpu": 0.35, "cuda": 0.01}


def make_drafters(config: EngineConfig, runner: Runner) -> list[Drafter]:
    return [DRAFTERS[name](runner) for name in config.speculate]
