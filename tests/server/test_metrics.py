"""The dashboard asks for metrics that there are, and for all of them."""

import json
import re
from pathlib import Path

from tidemill.server.metrics import Metrics

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"


def test_the_dashboard_and_the_metrics_agree():
    shown = set(re.findall(r"tidemill_\w+", DASHBOARD.read_text()))
    metrics = Metrics()
    metrics.finished.labels("stop").inc(0)
    there = set(re.findall(r"^(tidemill_\w+?)(?:\{| )", metrics.render().decode(), re.MULTILINE))
    assert shown <= there, shown - there
    plain = {re.sub(r"_(total|bucket|sum|count|created)$", "", name) for name in there}
    assert plain == {re.sub(r"_(total|bucket)$", "", name) for name in shown}
    assert len({panel["id"] for panel in json.loads(DASHBOARD.read_text())["panels"]}) == 13
