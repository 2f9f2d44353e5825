"""The dialect of docs/extending/dialect.md answers."""

import pytest
from starlette.testclient import TestClient

from tests.docs.pages import DOCS, blocks
from tests.server.scripted_service import ScriptedService, app_of, outputs_of


class Service(ScriptedService):
    async def encode(self, text):
        return list(text.encode())


@pytest.fixture
def client():
    [example] = [
        block for block in blocks(DOCS / "extending" / "dialect.md") if block.language == "python"
    ]
    names: dict = {"__name__": "dialect"}
    exec(compile(example.text, str(example), "exec"), names)
    texts = ["High ", "water."]
    return TestClient(app_of(names["TideCodec"], "/tide", lambda: Service(outputs_of(texts))))


def test_whole(client):
    answer = client.post("/tide", json={"ask": "What?"})
    assert answer.json() == {"says": "High water.", "tokens": 3, "why": "stop"}


def test_streamed(client):
    answer = client.post("/tide", json={"ask": "What?", "stream": True})
    events = [line for line in answer.text.splitlines() if line]
    assert events == ['data: {"says":"High "}', 'data: {"says":"water."}', 'data: {"tokens":3}']
