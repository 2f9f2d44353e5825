"""Tables of docs/reference/metrics.md and docs/reference/events.md: python -m
tidemill.cli.observability_doc DOCS"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import get_args

from tidemill.engine.metrics import Metrics
from tidemill.types.events import Event

BEGIN, END = (
    "<!-- Made by `python -m tidemill.cli.observability_doc docs`. -->",
    "<!-- End of the table. -->",
)
_FIELD = re.compile(
    r"^((?:    # .*\n)*)    (\w+): (?:[^=#\n]+?)(?: = (?:[^#\n]+?))?(?:  # (.*))?$", re.MULTILINE
)


def metrics_table() -> str:
    rows = ["| metric | kind | meaning |", "|---|---|---|"]
    for metric in vars(Metrics()).values():
        for family in metric.describe() if hasattr(metric, "describe") else ():
            name = family.name + "_total" * (family.type == "counter")
            labels = ",".join(
                metric._labelnames if hasattr(metric, "_labelnames") else family._labelnames
            )
            rows.append(
                f"| `{name}{f'{{{labels}}}' if labels else ''}` | {family.type} | {family.documentation} |"
            )
    return _marked(rows)


def events_table() -> str:
    """The fields of each event, from the source: a comment behind or above a field says what it is."""
    rows = ["| event | fields |", "|---|---|"]
    for event in sorted(get_args(Event), key=lambda event: event.__name__):
        fields = [
            f"`{name}`" + (f" ({comment})" if comment else "")
            for name, comment in map(_field, _FIELD.findall(inspect.getsource(event)))
        ]
        rows.append(f"| `{event.__name__}` | {', '.join(fields)} |")
    return _marked(rows)


def _field(found: tuple[str, str, str]) -> tuple[str, str]:
    """Name and comment."""
    above, name, behind = found
    return name, behind or " ".join(line.strip(" #") for line in above.splitlines())


def put(page: str, table: str) -> str:
    before, _, rest = page.partition(BEGIN)
    return before + table + rest.partition(END)[2]


def _marked(rows: list[str]) -> str:
    return "\n".join([BEGIN, "", *rows, "", END])


if __name__ == "__main__":
    for name, table in (("metrics", metrics_table()), ("events", events_table())):
        file = Path(sys.argv[1]) / "reference" / f"{name}.md"
        file.write_text(put(file.read_text(), table))
