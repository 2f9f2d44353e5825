"""The registry of drafters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tidemill.config import HEADS, EngineConfig, extensions
from tidemill.models.base import Model
from tidemill.runner.base import Runner
from tidemill.runner.spec import Drafter
from tidemill.runner.spec.draft_model import DraftModelDrafter
from tidemill.runner.spec.drafters import HeadsDrafter
from tidemill.runner.spec.forced import ForcedDrafter
from tidemill.runner.spec.ngram import NgramDrafter
from tidemill.runner.spec.suffix import SuffixDrafter


@dataclass(frozen=True, slots=True)
class DrafterParts:
    """The materials that drafters are made of."""

    config: EngineConfig
    runner: Runner
    vocab_size: int
    forced: Callable[[int], Sequence[int]]  # see ForcedDrafter
    draft_model: Model | None = None


def _draft_model(parts: DrafterParts) -> Drafter:
    assert parts.draft_model is not None
    assert parts.config.draft is not None
    return DraftModelDrafter(parts.draft_model, parts.config.draft, parts.vocab_size)


def _heads(name: str, parts: DrafterParts) -> Drafter:
    return HeadsDrafter(name, parts.config, parts.runner)


DRAFTERS: dict[str, Callable[[DrafterParts], Drafter]] = {
    "forced": lambda parts: ForcedDrafter(parts.forced),
    "ngram": lambda parts: NgramDrafter(),
    "suffix": lambda parts: SuffixDrafter(),
    "draft-model": _draft_model,
    **{name: partial(_heads, name) for name in HEADS},
}


def make_drafters(parts: DrafterParts) -> list[Drafter]:
    return [_factory(name)(parts) for name in parts.config.speculate]


def _factory(name: str) -> Callable[[DrafterParts], Drafter]:
    """One of ours, or of another package."""
    return DRAFTERS[name] if name in DRAFTERS else extensions.load(extensions.DRAFTERS, name)
