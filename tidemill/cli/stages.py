"""The progress of commands that run for minutes: a bar for each stage."""

from __future__ import annotations

import signal
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Stages:
    """A bar for each stage on a terminal, a line elsewhere. In training, Ctrl-C takes effect after
    the step at hand."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._console = console
        self._progress = Progress(
            *columns,
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._is_stopped, self._previous = False, signal.getsignal(signal.SIGINT)

    def __enter__(self) -> Stages:
        self._progress.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        signal.signal(signal.SIGINT, self._previous)
        self._progress.__exit__(*error)

    def is_stopped(self) -> bool:
        return self._is_stopped

    def stage(self, name: str, total: int) -> None:
        self._task = self._progress.add_task(name, total=total, note="")
        if not self._console.is_terminal:
            self._console.print(f"{name}: {total:,}")
        is_training = name.startswith("Training")
        signal.signal(signal.SIGINT, self._stop if is_training else self._previous)

    def at(self, done: int, note: str = "") -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=done, note=note)

    def _stop(self, *_: object) -> None:
        self._is_stopped = True
