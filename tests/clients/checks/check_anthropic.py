"""anthropic: messages, tools and its runner, structured output, token counts, batches."""

import time
from typing import Literal

import anthropic
import pytest
from asked import MESSAGES, PARAMETERS

ASK = {"model": "tiny", "messages": MESSAGES, "max_tokens": 20}
GREEDY = {"temperature": 0}  # the newest releases have no parameter for it
TOOL = {"name": "high_water", "description": "Says when.", "input_schema": PARAMETERS}
FORCED = {"type": "tool", "name": "high_water", "disable_parallel_tool_use": True}


@pytest.fixture(scope="module")
def client(url):
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as made:
        yield made


def test_a_message_whole_and_streamed(client):
    whole = client.messages.create(**ASK, extra_body=GREEDY)
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 20)
    assert whole._request_id
    with client.messages.stream(**ASK, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text


def test_a_forced_call_and_its_result(client):
    reply = client.messages.create(
        **ASK | {"max_tokens": 200}, tools=[TOOL], tool_choice=FORCED, extra_body=GREEDY
    )
    (call,) = reply.content
    assert (call.name, call.input) == ("high_water", {"port": "Brest"})
    result = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "at noon"}],
    }
    turns = [*MESSAGES, {"role": "assistant", "content": reply.content}, result]
    assert client.messages.create(**ASK | {"messages": turns}, tools=[TOOL]).usage.output_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner(client, stream):
    asked = []

    @anthropic.beta_tool
    def high_water(port: Literal["Brest"]) -> str:
        """Says when.

        Args:
            port: the port
        """
        asked.append(port)
        return "at noon"

    more = {
        "tools": [high_water],
        "tool_choice": FORCED,
        "max_iterations": 2,
        "extra_body": GREEDY,
        "stream": stream,
    }
    for reply in client.beta.messages.tool_runner(**ASK | {"max_tokens": 200}, **more):
        message = reply.get_final_message() if stream else reply
        assert message.stop_reason == "tool_use"
    assert asked[0] == "Brest"


def test_structured_output_and_counts(client):
    shape = {"format": {"type": "json_schema", "schema": PARAMETERS}}
    reply = client.messages.create(**ASK | {"max_tokens": 200}, output_config=shape)
    assert reply.content[0].text.replace(" ", "") == '{"port":"Brest"}'
    counted = client.messages.count_tokens(model="tiny", messages=MESSAGES).input_tokens
    assert counted == reply.usage.input_tokens + reply.usage.cache_read_input_tokens


def test_a_batch(client):
    batch = client.messages.batches.create(
        requests=[{"custom_id": "one", "params": ASK}, {"custom_id": "two", "params": ASK}]
    )
    while batch.processing_status != "ended":
        time.sleep(0.1)
        batch = client.messages.batches.retrieve(batch.id)
    assert batch.request_counts.succeeded == 2
    results = list(client.messages.batches.results(batch.id))
    assert [(one.custom_id, one.result.type) for one in results] == [
        ("one", "succeeded"),
        ("two", "succeeded"),
    ]


def test_errors(client):
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**ASK | {"model": "huge"})
    assert caught.value.type == "not_found_error"
    assert caught.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**ASK, extra_body={"temperature": -3})
