"""The pytest plugin under which a file of a foreign suite runs: installs the project's adapter,
leaves out what is not applicable, and writes one line for each test."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest

from bench.foreign.tally import Outcome, append, reason_for

ADAPTER = importlib.import_module(f"bench.foreign.{os.environ['TIDEMILL_FOREIGN_ADAPTER']}")
RESULTS = Path(os.environ["TIDEMILL_FOREIGN_RESULTS"])
ADAPTER.install()  # before the suite's own conftest.py is read
_worst: dict[str, tuple[str, str]] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        ADAPTER.prepare(item)
        reason = reason_for(item.nodeid, ADAPTER.NOT_APPLICABLE)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason), append=False)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        append(RESULTS, Outcome(report.nodeid, "failed", f"not collected: {_message(report)}"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    rank = {"passed": 0, "skipped": 1, "failed": 2}
    worst = _worst.get(report.nodeid, ("passed", ""))
    if rank[report.outcome] > rank[worst[0]]:
        _worst[report.nodeid] = (report.outcome, _message(report))


def pytest_runtest_logfinish(nodeid: str) -> None:
    append(RESULTS, Outcome(nodeid, *_worst.pop(nodeid, ("passed", ""))))


def pytest_sessionfinish() -> None:
    ADAPTER.finish()


def _message(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        return f"line {crash.lineno}: {crash.message}"[:1500]
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return str(report.longrepr)[-1500:]
