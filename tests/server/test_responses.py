"""OpenAI's Responses API with the official client."""

import json
import re
import time

import httpx
import openai
import pytest

from tests.server.conftest import behind_our_protocol
from tests.server.scripted_service import ScriptedService, app_of, outputs_of
from tidemill.server.api.responses.codec import ResponseCodec
from tidemill.server.api.responses.types import messages_of
from tidemill.server.store import responses
from tidemill.server.store.responses import Item, Store, Stored, Unknown

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
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
ASK = {
    "model": "tiny",
    "input": "How high is the water?",
    "max_output_tokens": 20,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def client(roomy):
    return openai.OpenAI(base_url=f"{roomy.url}/v1", api_key="none", max_retries=0)


def without_ids(item):
    return {
        name: value for name, value in item.model_dump().items() if name not in ("id", "call_id")
    }


@pytest.mark.parametrize(
    "more",
    [
        {},
        {
            "tools": [TOOL],
            "tool_choice": "required",
            "max_output_tokens": 300,
            "parallel_tool_calls": False,
        },
    ],
)
def test_streamed_events_add_up_to_the_whole(client, more):
    whole = client.responses.create(**ASK | more)
    events = list(client.responses.create(**ASK | more, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{whole.status}"
    last = events[-1].response
    assert [without_ids(item) for item in last.output] == [
        without_ids(item) for item in whole.output
    ]
    assert last.usage.output_tokens == whole.usage.output_tokens
    added = kinds.count("response.output_item.added")
    assert added == kinds.count("response.output_item.done") == len(whole.output)
    if more:
        arguments = "".join(
            event.delta
            for event in events
            if event.type == "response.function_call_arguments.delta"
        )
        assert arguments == whole.output[0].arguments
        assert json.loads(arguments)["port"] in ("Brest", "Hull")
        assert whole.status == "completed"
    else:
        assert (
            "".join(event.delta for event in events if event.type == "response.output_text.delta")
            == whole.output_text
        )


def test_times_under_llamacpps_names(client):
    asked = {
        "model": "tiny",
        "input": "Hi",
        "max_output_tokens": 4,
        "extra_body": {"timings_per_token": True},
    }
    events = list(client.responses.create(**asked, stream=True))
    told = [event for event in events if hasattr(event, "timings")]
    assert {event.type for event in told} == {"response.output_text.delta", events[-1].type}
    assert (
        told[-1].timings["predicted_n"]
        == client.responses.create(**asked).timings["predicted_n"]
        == 4
    )


def test_a_strict_schema_has_no_other_properties(client):
    inner = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"]}
    schema = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    shape = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    made = client.responses.create(
        model="tiny", input="Hi", text={"format": shape}, max_output_tokens=60
    )
    assert json.loads(made.output_text) == {"a": {"n": 7}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    made = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hi"}],
        response_format=wanted,
        max_tokens=60,
    )
    assert json.loads(made.choices[0].message.content) == {"a": {"n": 7}}


def test_responses_are_stored_and_continued(client):
    first = client.responses.create(**ASK)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(**ASK | {"input": "And now?"}, previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.previous_response_id == first.id
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(first.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**ASK, previous_response_id=first.id)
    not_stored = client.responses.create(**ASK, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(not_stored.id)


def test_prompt_and_output_as_text_and_tokens(client):
    made = client.responses.create(
        **ASK, extra_body={"enable_response_messages": True}
    ).model_dump()
    (prompt,), (output,) = made["input_messages"], made["output_messages"]
    assert prompt["type"] == output["type"] == "raw_message_tokens"
    assert (len(prompt["tokens"]), len(output["tokens"])) == (
        made["usage"]["input_tokens"],
        made["usage"]["output_tokens"],
    )
    assert ASK["input"] in prompt["message"]
    assert "input_messages" not in client.responses.create(**ASK).model_dump()


def test_cancel_in_the_middle(client):
    events = client.responses.create(**ASK | {"max_output_tokens": 3500}, text=LONG, stream=True)
    name = next(iter(events)).response.id
    assert client.responses.cancel(name).status == "cancelled"
    assert [event.type for event in events][-1] == "response.failed"


def test_tool_results_and_conversations_as_input(client):
    call = {
        "type": "function_call",
        "call_id": "c1",
        "name": "high_water",
        "arguments": '{"port": "Hull"}',
    }
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "When?"}]},
        call,
        {"type": "function_call_output", "call_id": "c1", "output": "at noon"},
    ]
    assert client.responses.create(
        **ASK | {"input": items}, tools=[TOOL], instructions="Say it."
    ).output


@pytest.mark.parametrize(
    "wrong",
    [
        {"input": [{"type": "input_image"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {
            "input": [
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_image", "image_url": "x"}],
                }
            ]
        },
        {"input": []},
        {"tools": [{"type": "file_search", "vector_store_ids": ["v"]}]},
        {"tools": [{"type": "mcp", "server_label": "x", "server_url": "x"}]},
        {"tools": [{"type": "computer_use_preview"}]},
        {"tool_choice": "required"},
        {"tool_choice": "required", "tools": [{"type": "web_search"}]},
        {"tool_choice": {"type": "web_search"}},
        {
            "tool_choice": {"type": "custom", "name": "patch"},
            "tools": [{"type": "custom", "name": "patch", "format": LARK}],
        },
        {"background": True, "store": False},
        {"text": {"format": {"type": "json_schema"}}},
        {"max_output_tokens": 0},
        {"truncation": "sometimes"},
        {"include": ["nonsense"]},
        {"prompt": {"id": "pmpt_1"}},
        {"conversation": "conv_1", "previous_response_id": "resp_1"},
    ],
)
def test_what_is_not_supported_is_refused(roomy, wrong):
    reply = httpx.post(f"{roomy.url}/v1/responses", json=ASK | wrong)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == next(iter(wrong))


def test_what_has_no_effect_is_accepted_and_named(client):
    reply = client.responses.with_raw_response.create(
        input="How high?",
        max_output_tokens=5,
        include=["reasoning.encrypted_content", "web_search_call.action.sources"],
        reasoning={"effort": "low", "summary": "auto", "generate_summary": None},
        text={"verbosity": "low"},
        max_tool_calls=3,
        metadata={"a": "b"},
        parallel_tool_calls=True,
        prompt_cache_key="k",
        safety_identifier="s",
        service_tier="auto",
        store=False,
        stream_options=None,
        tools=[
            {"type": "web_search"},
            {"type": "local_shell"},
            {"type": "web_search_preview_2025_03_11"},
        ],
        truncation="auto",
        user="u",
        extra_body={
            "chat_template_kwargs": {"x": 1},
            "client_metadata": {"a": "b"},
            "top_k": 3,
            "seed": 5,
        },
    )
    assert reply.headers["x-tidemill-ignored"].split(", ") == [
        "client_metadata", "max_tool_calls", "reasoning.effort", "safety_identifier", "service_tier",
        "summary", "tools.local_shell", "tools.web_search", "tools.web_search_preview", "user", "verbosity",
    ]  # fmt: skip
    made = reply.parse()
    assert made.id.startswith("resp_")
    assert made.output[0].id.startswith("msg_")
    assert (made.metadata, made.truncation, made.model) == ({"a": "b"}, "auto", "tiny")
    assert (
        client.responses.create(input="x", include=[], max_output_tokens=2).status == "incomplete"
    )


def test_logprobs(client):
    more = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = client.responses.create(**ASK, **more)
    (part,) = whole.output[0].content
    assert len(part.logprobs) == whole.usage.output_tokens
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    assert (
        b"".join(bytes(entry.bytes) for entry in part.logprobs).decode(errors="replace")
        == part.text
    )
    events = list(client.responses.create(**ASK, **more, stream=True))
    streamed = [
        entry.logprob
        for event in events
        if event.type == "response.output_text.delta"
        for entry in event.logprobs
    ]
    assert streamed == [entry.logprob for entry in part.logprobs]
    assert not client.responses.create(**ASK).output[0].content[0].logprobs


def test_logprobs_after_reasoning(scripted):
    client = openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0)
    made = client.responses.create(model="tiny", input="Hi", temperature=0, top_logprobs=1)
    reasoning, message = made.output
    assert (reasoning.content[0].text, message.content[0].text) == ("hm", "ok")
    assert [entry.token for entry in message.content[0].logprobs][:2] == ["o", "k"]


def wait_for(client, name, *statuses):
    while (found := client.responses.retrieve(name)).status not in statuses:
        assert found.status in ("queued", "in_progress")
        assert found.usage is None
        time.sleep(0.02)
    return found


def test_in_the_background(client):
    made = client.responses.create(**ASK, background=True)
    assert made.status in ("queued", "in_progress")
    assert made.background
    done = wait_for(client, made.id, "completed", "incomplete")
    assert done.output_text == client.responses.create(**ASK).output_text
    assert client.responses.cancel(made.id).status == done.status  # too late
    follow = client.responses.create(**ASK, previous_response_id=made.id)
    assert follow.usage.input_tokens > done.usage.input_tokens


def test_a_stream_in_the_background_can_be_left_and_taken_up_again(client):
    whole = list(client.responses.create(**ASK, background=True, stream=True))
    name = whole[0].response.id
    assert [event.sequence_number for event in whole] == list(range(len(whole)))
    assert (whole[0].type, whole[0].response.status) == ("response.created", "queued")
    assert whole[-1].response.output_text == client.responses.retrieve(name).output_text
    assert list(client.responses.retrieve(name, stream=True)) == whole
    assert list(client.responses.retrieve(name, stream=True, starting_after=3)) == whole[4:]
    with client.responses.create(
        **ASK | {"max_output_tokens": 3500}, text=LONG, background=True, stream=True
    ) as stream:
        seen = [next(stream) for _ in range(6)]  # and it leaves
    name = seen[0].response.id
    assert client.responses.retrieve(name).status == "in_progress"
    with client.responses.retrieve(name, stream=True, starting_after=5) as stream:
        assert next(stream).sequence_number == 6
        client.responses.cancel(name)
        last = list(stream)[-1]
    assert (last.type, last.response.status) == ("response.failed", "cancelled")
    cancelled = client.responses.retrieve(name)
    assert (cancelled.status, cancelled.output[-1].status) == ("cancelled", "incomplete")
    assert list(client.responses.retrieve(name, stream=True))[-1] == last
    other = client.responses.create(**ASK)
    with pytest.raises(openai.BadRequestError, match="background and stream"):
        client.responses.retrieve(other.id, stream=True)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_none", stream=True)


LONG = {
    "format": {
        "type": "json_schema",
        "name": "long",
        "schema": {"type": "string", "minLength": 3000},
    }
}  # it cannot end earlier


def test_a_response_in_the_background_is_cancelled_or_deleted(client, roomy):
    made = client.responses.create(**ASK | {"max_output_tokens": 3500}, text=LONG, background=True)
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**ASK, previous_response_id=made.id)
    assert client.responses.cancel(made.id).status == "cancelled"
    assert client.responses.retrieve(made.id).status == "cancelled"
    other = client.responses.create(**ASK | {"max_output_tokens": 3500}, text=LONG, background=True)
    wait_for(client, other.id, "in_progress")
    client.responses.delete(other.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(other.id)
    headers = {"x-request-id": "by-label"}
    labelled = client.responses.create(
        **ASK | {"max_output_tokens": 3500}, text=LONG, background=True, extra_headers=headers
    )
    wait_for(client, labelled.id, "in_progress")
    assert httpx.delete(f"{roomy.url}/v1/requests/by-label").json()["cancelled"]
    wait_for(client, labelled.id, "cancelled")
    while roomy.gauge("requests_running"):
        time.sleep(0.02)


def test_a_response_that_was_refused_is_not_stored(client, roomy):
    for stream in (False, True):
        refused = httpx.post(
            f"{roomy.url}/v1/responses", json=ASK | {"max_output_tokens": 10**6, "stream": stream}
        )
        assert refused.status_code == 400
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(refused.headers["x-request-id"])


def test_what_is_continued_does_not_grow_without_end(client):
    made = client.conversations.create()
    padded = [{"role": "user", "content": "x", "pad": "y" * 7 * 2**20}]
    for _ in range(3):
        client.conversations.items.create(made.id, items=padded)
    too_large = (
        lambda: client.conversations.items.create(
            made.id, items=[{"role": "user", "content": "x"}]
        ),
        lambda: client.responses.create(**ASK, conversation=made.id),
    )
    for refused in too_large:
        with pytest.raises(openai.BadRequestError, match="more than 16777216 bytes"):
            refused()
    assert client.conversations.delete(made.id).deleted
    before = None
    for _ in range(3):
        before = client.responses.create(**ASK | {"input": padded}, previous_response_id=before).id
    with pytest.raises(openai.BadRequestError, match="more than 16777216 bytes"):
        client.responses.create(**ASK, previous_response_id=before)


def test_a_background_response_that_fails(client):
    made = client.responses.create(**ASK | {"max_output_tokens": 10**6}, background=True)
    failed = wait_for(client, made.id, "failed")
    assert failed.error.code == "context_length_exceeded"


def test_input_items(client):
    first = client.responses.create(**ASK)
    items = [{"role": "user", "content": f"And {i}?"} for i in range(4)]
    second = client.responses.create(**ASK | {"input": items}, previous_response_id=first.id)
    page = client.responses.input_items.list(second.id, limit=2, order="asc")
    assert page.has_more
    listed = list(client.responses.input_items.list(second.id, limit=2, order="asc"))
    assert [item.content[0].text for item in listed] == [
        ASK["input"],
        first.output_text,
        *(item["content"] for item in items),
    ]
    assert listed[1].id == first.output[0].id
    assert [item.id for item in client.responses.input_items.list(second.id)] == [
        item.id for item in listed
    ][::-1]
    for wrong in ({"limit": 0}, {"order": "up"}, {"after": "msg_0"}):
        with pytest.raises(openai.BadRequestError):
            client.responses.input_items.list(second.id, **wrong)


def test_input_tokens(client):
    made = client.responses.create(**ASK, instructions="Be brief.", tools=[TOOL])
    counted = client.responses.input_tokens.count(
        model="tiny", input=ASK["input"], instructions="Be brief.", tools=[TOOL]
    )
    assert counted.input_tokens == made.usage.input_tokens


def test_what_was_sent_is_taken_back(client):
    """As the client dumps it, as references, and by the id of the response: one prompt."""
    forced = {
        "tools": [TOOL],
        "tool_choice": "required",
        "max_output_tokens": 300,
        "parallel_tool_calls": False,
    }
    first = client.responses.create(**ASK | forced)
    (call,) = first.output
    asked = {"role": "user", "content": [{"type": "input_text", "text": ASK["input"]}]}
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": [{"type": "input_text", "text": "at noon"}],
    }
    ways = [
        {"input": [asked, call.model_dump(), result | {"id": "fco_1", "status": "completed"}]},
        {"input": [asked, {"type": "item_reference", "id": call.id}, result]},
        {"input": [asked, {"id": call.id}, result]},
        {"input": [result], "previous_response_id": first.id},
    ]
    made = [client.responses.create(**ASK | way, tools=[TOOL]) for way in ways]
    assert len({(one.usage.input_tokens, one.output_text) for one in made}) == 1
    with pytest.raises(openai.NotFoundError):
        client.responses.create(
            **ASK | {"input": [asked, {"type": "item_reference", "id": "fc_0"}]}
        )
    assert (
        client.get(f"/response_items/{call.id}", cast_to=httpx.Response).json()["call_id"]
        == call.call_id
    )
    with pytest.raises(openai.NotFoundError):
        client.get("/response_items/fc_0", cast_to=httpx.Response)


def test_items_as_messages():
    said = {"type": "output_text", "text": "So.", "annotations": [], "logprobs": []}
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": None,
         "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "phase": "commentary", "content": [said]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}", "namespace": "mcp__x"},
        {"type": "custom_tool_call", "id": "ctc_1", "call_id": "c2", "name": "patch", "input": "a\nb"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "x"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]  # fmt: skip
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "mcp__x__f", "arguments": "{}"}},
        {
            "id": "c2",
            "type": "function",
            "function": {"name": "patch", "arguments": '{"input": "a\\nb"}'},
        },
    ]
    assert messages_of(items) == [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "So.", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {"role": "assistant", "content": "No."},
    ]


def test_conversations(client):
    made = client.conversations.create(
        items=[{"role": "user", "content": "Hello."}], metadata={"a": "b"}
    )
    assert client.conversations.retrieve(made.id).metadata == {"a": "b"}
    assert client.conversations.update(made.id, metadata={"a": "c"}).metadata == {"a": "c"}
    added = client.conversations.items.create(
        made.id, items=[{"role": "user", "content": "Are you there?"}]
    )
    assert added.data[0].content[0].text == "Are you there?"
    first = client.responses.create(**ASK, conversation=made.id)
    second = client.responses.create(**ASK | {"input": "And now?"}, conversation={"id": made.id})
    assert second.conversation.id == made.id
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    texts = [item.content[0].text for item in client.conversations.items.list(made.id, order="asc")]
    assert texts == [
        "Hello.",
        "Are you there?",
        ASK["input"],
        first.output_text,
        "And now?",
        second.output_text,
    ]
    client.conversations.items.delete(added.data[0].id, conversation_id=made.id)
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(added.data[0].id, conversation_id=made.id)
    assert client.conversations.delete(made.id).deleted
    for gone in (
        lambda: client.conversations.retrieve(made.id),
        lambda: client.responses.create(**ASK, conversation=made.id),
    ):
        with pytest.raises(openai.NotFoundError):
            gone()
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(first.id)  # another kind of object


def test_truncation(client):
    """Of a conversation that is too long, the oldest turns go; what remains begins with a user's
    message."""
    turns = [
        {"role": role, "content": f"{i} " + "x" * 500}
        for i in range(10)
        for role in ("user", "assistant")
    ]
    items = [*turns, {"role": "user", "content": "Well?"}]
    with pytest.raises(openai.BadRequestError):
        client.responses.create(**ASK | {"input": items})
    made = client.responses.create(
        **ASK | {"input": items}, instructions="Be brief.", truncation="auto"
    )
    counted = [
        client.responses.input_tokens.count(
            input=items[2 * num :], instructions="Be brief."
        ).input_tokens
        for num in range(4, 10)
    ]
    assert made.usage.input_tokens == max(
        num for num in counted if num + ASK["max_output_tokens"] <= 4096
    )
    with pytest.raises(openai.BadRequestError):
        # a turn that does not fit by itself
        client.responses.create(**ASK | {"input": "x" * 5000}, truncation="auto")


def test_custom_tools_and_allowed_tools(client):
    shape = {"type": "grammar", "syntax": "regex", "definition": "[ab]{3}"}
    tools = [TOOL, {"type": "custom", "name": "spell", "description": "spells", "format": shape}]
    forced = {"tools": tools, "max_output_tokens": 300, "parallel_tool_calls": False}
    made = client.responses.create(**ASK | forced, tool_choice={"type": "custom", "name": "spell"})
    (call,) = made.output
    assert call.type == "custom_tool_call"
    assert call.id.startswith("ctc_")
    assert re.fullmatch("[ab]{3}", call.input)
    events = list(
        client.responses.create(
            **ASK | forced, tool_choice={"type": "custom", "name": "spell"}, stream=True
        )
    )
    done = [event for event in events if event.type == "response.custom_tool_call_input.done"]
    assert [event.input for event in done] == [call.input]
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "well"}
    assert client.responses.create(
        **ASK | {"input": [call.model_dump(), result]}, tools=tools
    ).usage
    allowed = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "high_water"}],
    }
    (call,) = client.responses.create(**ASK | forced, tool_choice=allowed).output
    assert call.name == "high_water"
    assert call.id.startswith("fc_")
    namespace = {"type": "namespace", "name": "mcp__sea", "description": "the sea", "tools": [TOOL]}
    (call,) = client.responses.create(
        **ASK | forced | {"tools": [namespace]}, tool_choice="required"
    ).output
    assert (call.name, call.namespace) == ("high_water", "mcp__sea")


SCRIPT = [
    "<think>", "The tide", " turns.", "</think>", "At ", "noon.", '<tool_call>{"name": "high_water", ',
    '"arguments": {"port": "Hull"}}',
    '</tool_call><tool_call>{"name": "note", "arguments": {"input": "a\\nb"}}</tool_call>',
]  # fmt: skip
OF_TEXT = ["content_part.added", "{}.delta", "{}.delta", "{}.done", "content_part.done"]


async def test_reasoning_and_calls_streamed_to_the_client():
    """Every event in OpenAI's order, of what a reasoning model writes."""

    def service():
        outputs = outputs_of(SCRIPT, reasoning=("The tide", " turns."))
        return ScriptedService(outputs, "<think> <tool_call>")

    app = app_of(ResponseCodec, "/v1/responses", service)
    async with behind_our_protocol(app) as port:
        client = openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0
        )
        tools = [TOOL, {"type": "custom", "name": "note"}]
        async with client.responses.stream(model="tiny", input="When?", tools=tools) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        await client.close()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    item = ["output_item.added", "{}", "output_item.done"]
    expected = ["created", "in_progress"]
    for name in ("reasoning_text", "output_text"):
        expected += [item[0], *(kind.format(name) for kind in OF_TEXT), item[2]]
    arguments = "function_call_arguments"
    expected += [item[0], f"{arguments}.delta", f"{arguments}.done", item[2]]
    expected += [
        item[0],
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        item[2],
        "completed",
    ]
    assert [event.type for event in events] == [f"response.{kind}" for kind in expected]
    thought, said, call, note = final.output
    assert thought.content[0].text == "The tide turns."
    assert thought.id.startswith("rs_")
    assert said.content[0].text == final.output_text == "At noon."
    assert (json.loads(call.arguments), note.input) == ({"port": "Hull"}, "a\nb")
    assert final.usage.output_tokens_details.reasoning_tokens == 2


def has(store, tenant, name):
    try:
        return json.loads(store.get(tenant, name).body())["id"] == name
    except Unknown:
        return False


@pytest.mark.parametrize(("num", "num_bytes"), [(4, 10**6), (10**6, 400)])
def test_a_tenant_cannot_evict_the_responses_of_another(monkeypatch, num, num_bytes):
    monkeypatch.setattr(responses, "MAX_STORED", num)
    monkeypatch.setattr(responses, "MAX_STORED_BYTES", num_bytes)
    monkeypatch.setattr(responses, "MAX_STORED_OF_ALL", 2 * num)
    monkeypatch.setattr(responses, "MAX_STORED_BYTES_OF_ALL", 2 * num_bytes)
    store = Store()

    def fill(tenant, number):
        for i in range(number):
            items = [Item.of({"id": "i", "role": "user", "content": "x" * 40})]
            store.put(
                tenant,
                f"r{i}",
                Stored.of(items, {"id": f"r{i}", "object": "response", "output": [{"id": "y"}]}),
            )

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
