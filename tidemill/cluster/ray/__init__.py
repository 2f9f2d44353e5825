"""Tidemill on a Ray cluster: replicas and batch workers as actors, and a Ray Serve application
(`tidemill.cluster.ray:app`)."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """The application is made when it is asked for: it needs Ray Serve, the rest does not."""
    if name == "app":
        from tidemill.cluster.ray.deployment import app

        return app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
