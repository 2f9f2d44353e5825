"""Progress bars of `LLM` and `tidemill serve`."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text


class _Bytes(DownloadColumn):
    """Bytes, where it is known of how many."""

    def render(self, task: Task) -> Text:
        return Text("") if task.total is None else super().render(task)


class LoadingBar:
    """A progress bar of an engine until it is ready: its process starts, weights are read, and what
    is left has no figures."""

    def __init__(self, *, enabled: bool = True, console: Console | None = None) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), _Bytes(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, disable=not enabled, transient=True)
        self._stages: dict[str, TaskID] = {}

    def __enter__(self) -> LoadingBar:
        self._progress.start()
        self._enter("Starting the engine")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        self._progress.stop()

    def show(self, done: int, total: int, model: str = "weights") -> None:
        """Bytes of weights that are read."""
        is_reading = done < total
        task = self._enter(f"Loading {model}" if is_reading else "Preparing the engine")
        if is_reading:
            self._progress.update(task, completed=done, total=total)

    def _enter(self, stage: str) -> TaskID:
        """A line for a stage; only the latest is shown."""
        if stage not in self._stages:
            self._stages[stage] = self._progress.add_task(stage, total=None)
        for name, task in self._stages.items():
            self._progress.update(task, visible=name == stage)
        return self._stages[stage]


class _Bar:
    """A progress bar that may be switched off."""

    def __init__(self, progress: Progress, total: float | None, label: str) -> None:
        self._progress, self._total, self._label = progress, total, label

    def __enter__(self) -> tuple[Progress, TaskID]:
        self._progress.__enter__()
        return self._progress, self._progress.add_task(self._label, total=self._total)

    def __exit__(self, *error: Any) -> None:
        self._progress.__exit__(*error)


def request_bar(enabled: bool, total: int) -> _Bar:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return _Bar(Progress(*columns, disable=not enabled, transient=True), total, "Requests")
