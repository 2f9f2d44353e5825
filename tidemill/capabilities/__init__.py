"""The capability table: which features can be used together, and why others cannot.

A feature is a row of `FEATURES`: its name, its words in messages, and a test that tells if it is in
use. Whatever cannot be used with it is an entry of `REFUSALS`, with a reason and a fix. Options,
admin routes and requests are checked by it, and nothing else refuses a pair of features.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from tidemill.capabilities.features import (
    DEVICE,
    ENGINES,
    FEATURES,
    HEADS,
    POLICIES,
    Feature,
    Setup,
)
from tidemill.capabilities.refusals import REFUSALS, Refusal
from tidemill.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from tidemill.config.options import EngineOptions
    from tidemill.types.sampling import SamplingParams

__all__ = [
    "DEVICE",
    "FEATURES",
    "HEADS",
    "POLICIES",
    "REFUSALS",
    "Feature",
    "Refusal",
    "Setup",
    "asked",
    "check",
    "check_request",
    "check_setup",
    "in_use",
    "requested",
    "require",
    "why_not",
]


def asked(options: EngineOptions) -> frozenset[str]:
    """The features that options ask for."""
    return frozenset(
        name
        for name, feature in FEATURES.items()
        if feature.asked is not None and feature.asked(options)
    )


def in_use(setup: Setup) -> frozenset[str]:
    """The features of one engine. How many engines there are is the server's."""
    own = (name for name in asked(setup.options) if FEATURES[name].group != ENGINES)
    return frozenset(own) | {
        name
        for name, feature in FEATURES.items()
        if feature.holds is not None and feature.holds(setup)
    }


def requested(params: SamplingParams) -> frozenset[str]:
    """The features that a request asks for."""
    return frozenset(
        name
        for name, feature in FEATURES.items()
        if feature.requested is not None and feature.requested(params)
    )


def why_not(feature: str, names: Collection[str]) -> Refusal | None:
    """The reason why the feature cannot be used with these or needs others; None: it can be."""
    names = frozenset(names)
    return next(
        (refusal for refusal in REFUSALS if refusal.feature == feature and refusal.holds(names)),
        None,
    )


def require(feature: str, names: Collection[str]) -> None:
    """Raises for a request if the feature cannot be used with these."""
    if refusal := why_not(feature, names):
        raise refusal.error(InvalidRequest)


def check(names: Collection[str], notes: Mapping[str, str] | None = None) -> None:
    """Raises if two of the features that options ask for cannot be used together. `notes`: on some
    of them, for messages."""
    _check(frozenset(names), frozenset(names), ConfigError, notes or {})


def check_setup(setup: Setup) -> frozenset[str]:
    """Returns the features of one engine. Raises if two of them cannot be used together."""
    names = in_use(setup)
    check(names, setup.notes)
    return names


def check_request(params: SamplingParams, names: Collection[str] = ()) -> None:
    """Raises if two of the request's features cannot be used together, or one with the engine's."""
    if own := requested(params):
        _check(own, own.union(names), InvalidRequest, {})


def _check(
    own: frozenset[str],
    names: frozenset[str],
    error: type[ConfigError | InvalidRequest],
    notes: Mapping[str, str],
) -> None:
    for refusal in REFUSALS:
        if refusal.feature in own and not refusal.is_left_out and refusal.holds(names):
            raise refusal.error(error, notes)
