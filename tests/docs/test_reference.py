"""Reference pages that are made from the code are current."""

import re
from pathlib import Path
from typing import get_args

import httpx
import pytest

from tidemill.cli import observability_doc
from tidemill.engine import adapter_names, inbox, ledger
from tidemill.frontend import structured
from tidemill.server.api.openai import types
from tidemill.server.generation import logprobs, prompts, service
from tidemill.server.http import context, limits
from tidemill.server.observe import live
from tidemill.server.store import batch_lines
from tidemill.types.events import Event

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
LIMITS = (REFERENCE / "limits.md").read_text()


@pytest.mark.parametrize(
    ("page", "table"),
    [("metrics", observability_doc.metrics_table), ("events", observability_doc.events_table)],
)
def test_tables_of_metrics_and_events(page, table):
    assert table() in (REFERENCE / f"{page}.md").read_text(), (
        "run python -m tidemill.cli.observability_doc docs"
    )


def test_every_event_has_an_occasion():
    before, _, _ = (REFERENCE / "events.md").read_text().partition("## Fields")
    assert [
        event.__name__ for event in get_args(Event) if f"`{event.__name__}`" not in before
    ] == []


@pytest.mark.parametrize(
    ("row", "limit"),
    [
        ("body", f"{limits.MAX_BODY_BYTES >> 20} MiB"),
        ("file", f"{limits.MAX_UPLOAD_BYTES >> 20} MiB"),
        ("objects, lists and members of a body", f"{limits.MAX_PARTS:,}"),
        ("items of a body, such as token ids", f"{limits.MAX_ITEMS:,}"),
        ("messages", f"{limits.MAX_MESSAGES:,}"),
        ("prompts times samples", f"{prompts.MAX_CHOICES}"),
        ("texts of one embedding, rerank or score request", f"{prompts.MAX_INPUTS:,}"),
        ("log-probabilities of one response", f"{logprobs.MAX_LOGPROB_CELLS:,}"),
        ("`/detokenize`", f"{service.MAX_DETOKENIZED:,}"),
        ("backlog of a stream that is not read", f"{inbox.MAX_CELLS:,}"),
        ("request id", f"{context.MAX_ID_CHARS}"),
        ("grammar", f"{structured.MAX_CHARS:,}"),
        ("JSON schema", f"{structured.MAX_DEPTH}"),
        ("batch", f"{batch_lines.MAX_LINES:,} lines of {batch_lines.MAX_LINE_BYTES >> 20} MiB"),
        ("adapters", f"{adapter_names.MAX_ADAPTERS:,}"),
        (
            "tenants with a row of their own in the [ledger](../howto/read-the-ledger.md)",
            f"{ledger.MAX_TENANTS:,}",
        ),
        ("live views", f"{live.MAX_WATCHERS}"),
        ("connections", f"{limits.MAX_CONNECTIONS:,}"),
        ("idle connections of one address", f"{limits.MAX_IDLE_PER_ADDRESS:,}"),
        ("headers", f"{limits.MAX_HEADER_BYTES >> 10} KiB"),
    ],
)
def test_limits_are_those_of_the_code(row, limit):
    (line,) = re.findall(rf"^\| {re.escape(row)} \|.*$", LIMITS, re.MULTILINE)
    assert limit in line


def test_every_route_is_on_a_page(roomy):
    def bare(path: str) -> str:
        return re.sub(r"\{\w+\}", "{}", path)

    pages = bare("".join(page.read_text() for page in REFERENCE.rglob("*.md")))
    routes = httpx.get(f"{roomy.url}/openapi.json").json()["paths"]
    assert [
        path for path in routes if not re.search(rf"[` ]{re.escape(bare(path))}[`?]", pages)
    ] == []


@pytest.mark.parametrize("request_type", [types.ChatRequest, types.CompletionRequest])
def test_every_parameter_is_on_the_page_of_the_api(request_type):
    pages = [REFERENCE / name for name in ("api/openai.md", "structured-output.md", "tools.md")]
    text = "".join(page.read_text() for page in pages)
    names = [field.alias or name for name, field in request_type.model_fields.items()]
    assert [name for name in names if f"`{name}`" not in text and f"`{name}." not in text] == []
