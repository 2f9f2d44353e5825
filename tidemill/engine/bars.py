"""Progress bars of `LLM`."""

from __future__ import annotations

from typing import Any

from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class _Bar:
    """A progress bar that may be switched off."""

    def __init__(self, progress: Progress, total: float | None, label: str) -> None:
        self._progress, self._total, self._label = progress, total, label

    def __enter__(self) -> tuple[Progress, TaskID]:
        self._progress.__enter__()
        return self._progress, self._progress.add_task(self._label, total=self._total)

    def __exit__(self, *error: Any) -> None:
        self._progress.__exit__(*error)


def loading_bar(enabled: bool) -> _Bar:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    return _Bar(Progress(*columns, disable=not enabled, transient=True), None, "Loading weights")


def request_bar(enabled: bool, total: int) -> _Bar:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return _Bar(Progress(*columns, disable=not enabled, transient=True), total, "Requests")
