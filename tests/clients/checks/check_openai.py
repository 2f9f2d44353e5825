"""openai: chat, completions, responses, embeddings, files and batches."""

import json
import time

import openai
import pytest
from asked import ANSWER, LIMITS, MESSAGES, QUESTION, ROOM, TOOL, Water

CHAT = {"model": "tiny", "messages": MESSAGES}


@pytest.fixture(scope="module")
def client(base):
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as made:
        yield made


def test_a_chat_whole_and_streamed(client):
    whole = client.chat.completions.create(**CHAT, **LIMITS)
    assert (whole.usage.completion_tokens, whole.choices[0].finish_reason) == (20, "length")
    chunks = list(
        client.chat.completions.create(
            **CHAT, **LIMITS, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert (text, chunks[-1].usage.completion_tokens) == (whole.choices[0].message.content, 20)


def test_a_forced_call_and_its_result(client):
    choice = {"type": "function", "function": {"name": "high_water"}}
    message = (
        client.chat.completions.create(**CHAT, **ROOM, tools=[TOOL], tool_choice=choice)
        .choices[0]
        .message
    )
    call = message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"port": "Brest"}
    turns = [*MESSAGES, message, {"role": "tool", "tool_call_id": call.id, "content": "at noon"}]
    answer = client.chat.completions.create(
        model="tiny", messages=turns, response_format=ANSWER, **ROOM
    )
    assert json.loads(answer.choices[0].message.content) == {"port": "Brest"}


def test_parsed_output(client):
    parsed = (
        client.chat.completions.parse(**CHAT, **ROOM, response_format=Water)
        .choices[0]
        .message.parsed
    )
    assert isinstance(parsed, Water)
    asked = {"model": "tiny", "input": QUESTION, "max_output_tokens": 400, "temperature": 0}
    assert isinstance(client.responses.parse(**asked, text_format=Water).output_parsed, Water)


def test_responses_whole_streamed_and_continued(client):
    asked = {"model": "smollm2", "input": QUESTION, "max_output_tokens": 16, "temperature": 0}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta")
        == whole.output_text
    )
    again = client.responses.create(**asked | {"input": "And then?"}, previous_response_id=whole.id)
    assert again.usage.input_tokens > whole.usage.input_tokens
    assert client.responses.retrieve(whole.id).output_text == whole.output_text
    client.responses.delete(whole.id)


def test_completions_embeddings_and_models(client):
    text = client.completions.create(model="tiny", prompt="The sea", **LIMITS)
    assert text.usage.completion_tokens > 0
    assert [
        len(one.embedding)
        for one in client.embeddings.create(model="tiny", input=["sea", "land"]).data
    ] == [64, 64]
    assert {one.id for one in client.models.list()} == {"tiny", "scripted", "smollm2"}


def test_a_batch(client):
    line = {
        "custom_id": "one",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": CHAT | LIMITS,
    }
    file = client.files.create(file=("lines.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint=line["url"], completion_window="24h"
    )
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 1)
    assert json.loads(client.files.content(batch.output_file_id).text)["custom_id"] == "one"


def test_errors(client):
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.chat.completions.create(**CHAT | {"model": "huge"})
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(**CHAT, temperature=-3)
