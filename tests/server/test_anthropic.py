"""Anthropic's official client against `tidemill serve`."""

import json

import anthropic
import httpx
import pytest

from tidemill.frontend.output import TextDelta
from tidemill.frontend.parsers import Dialect
from tidemill.server.anthropic import MessagesRequest, MessageWriter
from tidemill.wire import Delta

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


INPUTS = [{"port": "Brest"}, {"port": "Hull"}, {}, {"port": "Brest", "deep": {"a": ["}", 1]}}]


@pytest.mark.parametrize("step", [1, 7, 10_000])
@pytest.mark.parametrize("is_forced", [True, False])
def test_each_of_several_calls_keeps_its_input(step, is_forced):
    calls = [json.dumps({"name": "high_water", "arguments": one}) for one in INPUTS]
    text = f"[{', '.join(calls)}]" if is_forced else "So: " + "".join(f"<tool_call>{call}</tool_call>" for call in calls)
    choice = {"type": "any"} if is_forced else None
    asked = MessagesRequest(**ASK, tools=[TOOL], tool_choice=choice)
    writer = MessageWriter("m", "tiny", asked, 5, Dialect.of("").reading("", asked.functions(), asked.must_call))
    parts = [text[i : i + step] for i in range(0, len(text), step)]
    events = [event for part in parts for event in writer.take(Delta("r", 0, [1]), TextDelta(part, 1, None))]
    events += writer.take(Delta("r", 0, [], "stop"), TextDelta("", 0, "stop"))
    whole = writer.whole()
    assert whole["stop_reason"] == "tool_use"
    assert [block["input"] for block in whole["content"] if block["type"] == "tool_use"] == INPUTS
    streamed = {}
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(streamed)
            streamed[event["index"]] = [event["content_block"], ""]
        elif event["type"] == "content_block_delta":
            streamed[event["index"]][1] += event["delta"].get("partial_json", "") + event["delta"].get("text", "")
    assert [block["type"] for block, _ in streamed.values()] == [block["type"] for block in whole["content"]]
    for (_, pieces), block in zip(streamed.values(), whole["content"], strict=True):
        assert (json.loads(pieces) if block["type"] == "tool_use" else pieces) == block.get("input", block.get("text"))


def test_several_calls_by_the_client(client):
    """Streamed and whole, greedily: the same calls with the same inputs."""
    settings = ASK | {"max_tokens": 400, "tools": [TOOL], "tool_choice": {"type": "any"}}
    whole = client.messages.create(**settings, extra_body=GREEDY)
    with client.messages.stream(**settings, extra_body=GREEDY) as stream:
        streamed = stream.get_final_message()
    assert [(block.name, block.input) for block in whole.content] == [(block.name, block.input) for block in streamed.content]
    assert all(block.input["port"] in ("Brest", "Hull") for block in whole.content[:-1])


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
