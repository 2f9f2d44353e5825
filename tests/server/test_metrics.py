"""The dashboard asks for metrics that there are, and for all of them."""

import json
import re
from pathlib import Path

from tidemill.engine.metrics import Metrics
from tidemill.types.events import (
    Admitted,
    DraftsVerified,
    ExpertsUsed,
    MovesFailed,
    PagesMoved,
    Placed,
    Preempted,
    StepLost,
    TakenOver,
    WeightsStreamed,
)

FROM_TIERS = Admitted(0.0, "x", 0, 96, 100, 0.0, "prefix hit", num_host=64, num_disk=16)
DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"


def test_the_dashboard_and_the_metrics_agree():
    shown = set(re.findall(r"tidemill_\w+", DASHBOARD.read_text()))
    metrics = Metrics()
    metrics.finished.labels("stop").inc(0)
    metrics.take(
        [
            ExpertsUsed(0.0, 64, ((3, (1, 5)), (4, (2, 4)))),
            DraftsVerified(0.0, 7, "ngram", (("x", 4, 3),)),
        ]
    )
    metrics.take(
        [
            PagesMoved(0.0, "host", True, 2, 100, 0.1),
            MovesFailed(0.0, "disk", False, 1, "full"),
            FROM_TIERS,
        ]
    )
    metrics.take([Placed(0.0, "x", "prefill", "first"), TakenOver(0.0, "x", 0, 64, 7, 0.01)])
    metrics.take([WeightsStreamed(0.0, 100, 0.1, 3, 2)])
    metrics.ledger.account("").joules = 1.0
    there = set(re.findall(r"^(tidemill_\w+?)(?:\{| )", metrics.render().decode(), re.MULTILINE))
    assert shown <= there, shown - there
    plain = {re.sub(r"_(total|bucket|sum|count|created)$", "", name) for name in there}
    assert plain == {re.sub(r"_(total|bucket)$", "", name) for name in shown}
    numbers = [panel["id"] for panel in json.loads(DASHBOARD.read_text())["panels"]]
    assert len(numbers) == len(set(numbers)) >= 18


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
    metrics.take(
        [
            DraftsVerified(0.0, 7, "ngram", (("x", 4, 3), ("y", 2, 0))),
            DraftsVerified(0.0, 8, "eagle", (("x", 1, 1),)),
        ]
    )
    assert 'tidemill_draft_tokens_total{drafter="ngram"} 6.0' in metrics.render().decode()
    metrics.take([StepLost(0.0, "x", 5, "it followed drafts that were wrong")])
    assert "tidemill_lost_tokens_total 5.0" in metrics.render().decode()
    assert (metrics.totals()["draft_tokens"], metrics.totals()["accepted_tokens"]) == (7, 4)


def test_hits_are_counted_by_tier():
    metrics = Metrics()
    metrics.take(
        [
            FROM_TIERS,
            FROM_TIERS,
            Preempted(0.0, "x", 5, "no page"),
            Preempted(0.0, "x", 5, "no page", "swap", True),
        ]
    )
    metrics.take(
        [PagesMoved(0.0, "host", True, 2, 100, 0.1), PagesMoved(0.0, "disk", False, 2, 70, 0.1)]
    )
    text = metrics.render().decode()
    for line in (
        'tier_cached_tokens_total{tier="host"} 128.0',
        'tier_cached_tokens_total{tier="disk"} 32.0',
        'kv_moved_bytes_total{direction="load",tier="host"} 100.0',
        'kv_moved_bytes_total{direction="store",tier="disk"} 70.0',
        "swaps_total 1.0",
        "preemptions_total 2.0",
    ):
        assert f"tidemill_{line}" in text


def test_vllms_metrics_are_mapped_to_some_that_are_exported():
    page = (DASHBOARD.parents[1] / "docs" / "reference" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(vllm:[\w{}]+)` \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) >= 15
    exported = {metric.name for metric in Metrics().read()}
    # with labels
    exported |= {
        family.name + "_total"
        for family in Metrics().registry.collect()
        if family.type == "counter"
    }
    for theirs, ours in rows:
        names = re.findall(r"`(tidemill_\w+)", ours)
        assert names, theirs
        assert exported.issuperset(names), theirs
