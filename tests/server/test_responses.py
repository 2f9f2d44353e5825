"""OpenAI's Responses API with the official client."""

import json

import httpx
import openai
import pytest

from tidemill.server import responses_store
from tidemill.server.responses_store import Store, Unknown

TOOL = {
    "type": "function",
    "name": "high_water",
    "parameters": {
        "type": "object",
        "properties": {"port": {"enum": ["Brest", "Hull"]}},
        "required": ["port"],
        "additionalProperties": False,
    },
    "strict": True,
}
ASK = {"model": "tiny", "input": "How high is the water?", "max_output_tokens": 20, "temperature": 0}


@pytest.fixture(scope="module")
def client(roomy):
    return openai.OpenAI(base_url=f"{roomy.url}/v1", api_key="none", max_retries=0)


def without_ids(item):
    return {name: value for name, value in item.model_dump().items() if name not in ("id", "call_id")}


@pytest.mark.parametrize(
    "more", [{}, {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 300, "parallel_tool_calls": False}]
)
def test_streamed_events_add_up_to_the_whole(client, more):
    whole = client.responses.create(**ASK | more)
    events = list(client.responses.create(**ASK | more, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{whole.status}"
    last = events[-1].response
    assert [without_ids(item) for item in last.output] == [without_ids(item) for item in whole.output]
    assert last.usage.output_tokens == whole.usage.output_tokens
    added = kinds.count("response.output_item.added")
    assert added == kinds.count("response.output_item.done") == len(whole.output)
    if more:
        arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
        assert arguments == whole.output[0].arguments
        assert json.loads(arguments)["port"] in ("Brest", "Hull")
        assert whole.status == "completed"
    else:
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text


def test_structured_output(client):
    wanted = {"type": "json_schema", "name": "water", "schema": TOOL["parameters"], "strict": True}
    reply = client.responses.create(**ASK | {"max_output_tokens": 100}, text={"format": wanted})
    assert json.loads(reply.output_text)["port"] in ("Brest", "Hull")


def test_responses_are_stored_and_continued(client):
    first = client.responses.create(**ASK)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(**ASK | {"input": "And now?"}, previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.previous_response_id == first.id
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**ASK, previous_response_id=first.id)
    not_stored = client.responses.create(**ASK, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(not_stored.id)


def test_cancel_in_the_middle(client):
    long = {"type": "json_schema", "name": "long", "schema": {"type": "string", "minLength": 3000}}  # it cannot end earlier
    events = client.responses.create(**ASK | {"max_output_tokens": 3500}, text={"format": long}, stream=True)
    name = next(iter(events)).response.id
    assert client.responses.cancel(name).status == "cancelled"
    assert [event.type for event in events][-1] == "response.failed"


def test_tool_results_and_conversations_as_input(client):
    call = {"type": "function_call", "call_id": "c1", "name": "high_water", "arguments": '{"port": "Hull"}'}
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "When?"}]},
        call,
        {"type": "function_call_output", "call_id": "c1", "output": "at noon"},
    ]
    assert client.responses.create(**ASK | {"input": items}, tools=[TOOL], instructions="Say it.").output


@pytest.mark.parametrize(
    "wrong",
    [
        {"input": [{"type": "input_image"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"tools": [{"type": "web_search"}]},
        {"tool_choice": "required"},
        {"background": True},
        {"text": {"format": {"type": "json_schema"}}},
        {"max_output_tokens": 0},
        {"truncation": "auto"},
    ],
)
def test_what_is_not_supported_is_refused(roomy, wrong):
    reply = httpx.post(f"{roomy.url}/v1/responses", json=ASK | wrong)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == next(iter(wrong))


def has(store, tenant, name):
    try:
        return store.get(tenant, name)[1]["id"] == name
    except Unknown:
        return False


@pytest.mark.parametrize(("num", "num_bytes"), [(4, 10**6), (10**6, 400)])
def test_a_tenant_cannot_evict_the_responses_of_another(monkeypatch, num, num_bytes):
    monkeypatch.setattr(responses_store, "MAX_STORED", num)
    monkeypatch.setattr(responses_store, "MAX_STORED_BYTES", num_bytes)
    monkeypatch.setattr(responses_store, "MAX_STORED_OF_ALL", 2 * num)
    monkeypatch.setattr(responses_store, "MAX_STORED_BYTES_OF_ALL", 2 * num_bytes)
    store = Store()

    def fill(tenant, number):
        for i in range(number):
            store.put(tenant, [{"role": "user", "content": "x" * 40}], {"id": f"r{i}", "object": "response", "output": [{"id": "y"}]})

    fill("small", 2)
    fill("large", 50)
    assert has(store, "small", "r0")
    assert has(store, "small", "r1")
    assert has(store, "large", "r49")
    assert not has(store, "large", "r0")  # its own oldest
    for other in range(20):  # many others: the total is bounded, and the largest gives way first
        fill(f"other{other}", 1)
        stored = [has(store, tenant, f"r{i}") for tenant in ("small", "large") for i in range(50)]
        stored += [has(store, f"other{i}", "r0") for i in range(20)]
        assert sum(stored) <= 2 * num
        assert 100 * sum(stored) <= 2 * num_bytes
        assert has(store, f"other{other}", "r0") or other > 3
    assert not has(store, "large", "r47")
    store.drop("small", "r0")
    assert not has(store, "small", "r0")
