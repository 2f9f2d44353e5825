"""Announcer: tells of admitted requests before the step that computes them for the first time."""

from __future__ import annotations

from collections.abc import Callable

from tidemill.engine.moments import Part, Step
from tidemill.types.events import Event


class Announcer(Part):
    """If that step ends the process, its parent knows which requests were in it."""

    def __init__(self, tell: Callable[[list[Event]], None]) -> None:
        """`tell`: gets the events so far."""
        self._tell = tell

    def fill_plan(self, step: Step) -> None:
        """Before other parts add to it: a grammar's masks can end the process, too."""
        if step.plan.new_rows:
            self._tell(self.engine.emit.take())
