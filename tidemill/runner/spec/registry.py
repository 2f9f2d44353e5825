"""Which drafters there are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tidemill.config import EngineConfig
from tidemill.runner.base import Runner
from tidemill.runner.spec import Drafter
from tidemill.runner.spec.forced import ForcedDrafter
from tidemill.runner.spec.ngram import NgramDrafter

Forced = Callable[[int], Sequence[int]]  # see ForcedDrafter

DRAFTERS: dict[str, Callable[[Runner, Forced], Drafter]] = {
    "forced": lambda runner, forced: ForcedDrafter(forced),
    "ngram": lambda runner, forced: NgramDrafter(),
}
# What a further token adds to the time of a step of one, before it is measured.
SLOPES = {"cpu": 0.35, "cuda": 0.005}


def make_drafters(config: EngineConfig, runner: Runner, forced: Forced) -> list[Drafter]:
    return [DRAFTERS[name](runner, forced) for name in config.speculate]
