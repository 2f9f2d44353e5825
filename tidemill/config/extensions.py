"""Model families, scheduling policies and drafters of other packages, which declare them as entry
points."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from tidemill.errors import ConfigError

MODELS, POLICIES, DRAFTERS = "tidemill.models", "tidemill.policies", "tidemill.drafters"


@cache
def _declared(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}


def names_of(group: str) -> tuple[str, ...]:
    """The names that installed packages declare."""
    return tuple(sorted(_declared(group)))


def load(group: str, name: str) -> Any:
    """The object that a package declares under this name; None if none does."""
    point = _declared(group).get(name)
    if point is None:
        return None
    try:
        return point.load()
    except Exception as error:
        package = point.dist.name if point.dist is not None else "a package"
        raise ConfigError(
            f"{name} of {package} cannot be loaded: {type(error).__name__}: {error}.",
            fix=f"Mend or uninstall {package}: it declares {point.value} in {group}.",
        ) from error
