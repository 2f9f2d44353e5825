"""ollama: chat, generate, tools, thinking, formats, embeddings, models."""

import json

import ollama
import pytest
from asked import MESSAGES, PARAMETERS, QUESTION, TOOL

GREEDY = {"temperature": 0, "num_predict": 20}


@pytest.fixture(scope="module")
def client(url):
    return ollama.Client(url)


def test_chat_and_generate_whole_and_streamed(client):
    whole = client.chat("tiny", MESSAGES, options=GREEDY)
    assert (whole.eval_count, whole.done_reason) == (20, "length")
    streamed = client.chat("tiny", MESSAGES, options=GREEDY, stream=True)
    assert "".join(part.message.content for part in streamed) == whole.message.content
    assert client.generate("tiny", QUESTION, options=GREEDY).response == whole.message.content


def test_tools_and_formats(client):
    call = {
        "type": "object",
        "properties": {"name": {"const": "high_water"}, "arguments": PARAMETERS},
    }
    call |= {"required": ["name", "arguments"], "additionalProperties": False}
    reply = client.chat("tiny", MESSAGES, tools=[TOOL], format=call)  # there is no tool_choice
    assert reply.message.tool_calls[0].function.arguments == {"port": "Brest"}
    turns = [
        *MESSAGES,
        reply.message,
        {"role": "tool", "tool_name": "high_water", "content": "at noon"},
    ]
    answer = client.chat("tiny", turns, tools=[TOOL], format=PARAMETERS)
    assert json.loads(answer.message.content) == {"port": "Brest"}


def test_thinking(client):
    reply = client.chat("scripted", MESSAGES, think=True, options={"temperature": 0})
    assert (reply.message.thinking, reply.message.content) == ("hm", "ok")


def test_embeddings_and_models(client):
    assert [len(one) for one in client.embed("tiny", ["sea", "land"]).embeddings] == [64, 64]
    assert {one.model for one in client.list().models} == {
        "tiny:latest",
        "scripted:latest",
        "smollm2:latest",
    }
    assert "tools" in client.show("smollm2").capabilities
    with pytest.raises(ollama.ResponseError, match="tiny") as caught:
        client.chat("huge", MESSAGES)
    assert caught.value.status_code == 404
