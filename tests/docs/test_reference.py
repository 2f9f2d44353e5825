"""Reference pages that are made from the code are current."""

from pathlib import Path
from typing import get_args

import pytest

from tidemill.cli import observability_doc
from tidemill.events import Event

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.parametrize(
    ("page", "table"), [("metrics", observability_doc.metrics_table), ("events", observability_doc.events_table)]
)
def test_tables_of_metrics_and_events(page, table):
    assert table() in (REFERENCE / f"{page}.md").read_text(), "run python -m tidemill.cli.observability_doc docs"


def test_every_event_has_an_occasion():
    before, _, _ = (REFERENCE / "events.md").read_text().partition("## Fields")
    assert [event.__name__ for event in get_args(Event) if f"`{event.__name__}`" not in before] == []
