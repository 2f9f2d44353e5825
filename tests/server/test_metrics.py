"""The dashboard asks for metrics that there are, and for all of them."""

import json
import re
from pathlib import Path

from tidemill.events import DraftsVerified, ExpertsUsed
from tidemill.server.metrics import Metrics

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"


def test_the_dashboard_and_the_metrics_agree():
    shown = set(re.findall(r"tidemill_\w+", DASHBOARD.read_text()))
    metrics = Metrics()
    metrics.finished.labels("stop").inc(0)
    metrics.take([ExpertsUsed(0.0, 64, ((3, (1, 5)), (4, (2, 4)))), DraftsVerified(0.0, 7, "ngram", (("x", 4, 3),))])
    there = set(re.findall(r"^(tidemill_\w+?)(?:\{| )", metrics.render().decode(), re.MULTILINE))
    assert shown <= there, shown - there
    plain = {re.sub(r"_(total|bucket|sum|count|created)$", "", name) for name in there}
    assert plain == {re.sub(r"_(total|bucket)$", "", name) for name in shown}
    assert len({panel["id"] for panel in json.loads(DASHBOARD.read_text())["panels"]}) == 15


def test_experts_are_counted_by_number_and_compared_by_layer():
    metrics = Metrics()
    metrics.take([ExpertsUsed(0.0, 64, ((3, (1, 5)), (4, (2, 4, 6))))] * 2)
    text = metrics.render().decode()
    for line in (
        'expert_tokens_total{expert="0"} 6.0',
        'expert_tokens_total{expert="1"} 18.0',
        'expert_tokens_total{expert="2"} 12.0',
    ):
        assert f"tidemill_{line}" in text
    assert f'tidemill_expert_imbalance{{layer="3"}} {5 / 3}' in text
    assert 'tidemill_expert_imbalance{layer="4"} 1.5' in text


def test_drafts_are_counted_by_drafter_and_in_all():
    metrics = Metrics()
    metrics.take([DraftsVerified(0.0, 7, "ngram", (("x", 4, 3), ("y", 2, 0))), DraftsVerified(0.0, 8, "eagle", (("x", 1, 1),))])
    assert 'tidemill_draft_tokens_total{drafter="ngram"} 6.0' in metrics.render().decode()
    assert (metrics.totals()["draft_tokens"], metrics.totals()["accepted_tokens"]) == (7, 4)
