"""Anthropic's official client against `tidemill serve`."""

import json

import anthropic
import httpx
import pytest

ASK = {"model": "tiny", "max_tokens": 12, "messages": [{"role": "user", "content": "Hello there, how high is the water?"}]}
GREEDY = {"temperature": 0}  # the newest clients have no parameter for it
TOOL = {
    "name": "high_water",
    "description": "says when",
    "input_schema": {
        "type": "object",
        "properties": {"port": {"enum": ["Brest", "Hull"]}},
        "required": ["port"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(roomy):
    return anthropic.Anthropic(base_url=roomy.url, api_key="none", max_retries=0)


def test_a_message_whole_and_streamed(client):
    whole = client.messages.create(**ASK, extra_body=GREEDY, system="Be brief.")
    assert whole.role == "assistant"
    assert whole.stop_reason in ("max_tokens", "end_turn")
    assert whole.usage.output_tokens <= 12
    with client.messages.stream(**ASK, extra_body=GREEDY, system="Be brief.") as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert [block.text for block in streamed.content] == [block.text for block in whole.content]
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens


def test_the_prompt_is_counted_and_found_again(client):
    counted = client.messages.count_tokens(model="tiny", messages=ASK["messages"])
    client.messages.create(**ASK)
    usage = client.messages.create(**ASK).usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens
    assert usage.cache_read_input_tokens > 0


def test_stop_sequences(client):
    text = client.messages.create(**ASK | {"max_tokens": 40}, extra_body=GREEDY).content[0].text
    stop = next(char for i, char in enumerate(text) if i > 0 and char not in text[:i])
    reply = client.messages.create(**ASK | {"max_tokens": 40}, extra_body=GREEDY, stop_sequences=[stop])
    assert reply.stop_reason == "stop_sequence"
    assert reply.stop_sequence == stop
    assert reply.content[0].text == text[: text.find(stop)]


@pytest.mark.parametrize("choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "high_water"}])
def test_a_tool_that_must_be_used(client, choice):
    settings = ASK | {"max_tokens": 200, "tools": [TOOL], "tool_choice": choice}
    whole = client.messages.create(**settings)
    (block,) = whole.content
    assert whole.stop_reason == "tool_use"
    assert block.name == "high_water"
    assert block.input["port"] in ("Brest", "Hull")
    with client.messages.stream(**settings) as stream:
        pieces = "".join(event.partial_json for event in stream if event.type == "input_json")
        (streamed,) = stream.get_final_message().content
    assert streamed.input == json.loads(pieces)
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "at noon"}]}
    turns = [*ASK["messages"], {"role": "assistant", "content": [block.model_dump()]}, {"role": "user", "content": [result]}]
    assert client.messages.create(**ASK | {"messages": turns, "tools": [TOOL]}).content is not None


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"max_tokens": None},
        {"messages": []},
        {"messages": [{"role": "system", "content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"temperature": "hot"},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"tool_choice": {"type": "tool", "name": "nothing"}},
        {"nonsense": 1},
    ],
)
def test_what_cannot_be_served_is_told_as_the_client_expects(roomy, wrong):
    reply = httpx.post(f"{roomy.url}/v1/messages", json=ASK | wrong)
    assert reply.status_code == 400
    assert reply.json()["type"] == "error"
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_an_unknown_model(client):
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**ASK | {"model": "other"})
