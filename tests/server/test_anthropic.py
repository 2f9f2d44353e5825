"""Anthropic's official client against `tidemill serve`."""

import json
from typing import Literal

import anthropic
import httpx
import pytest

from tests.server.conftest import behind_our_protocol
from tests.server.scripted_service import ScriptedService, app_of, endpoint_of, outputs_of
from tidemill.server.api.anthropic.codec import MessagesCodec
from tidemill.server.api.anthropic.types import MessagesRequest

ASK = {
    "model": "tiny",
    "max_tokens": 12,
    "messages": [{"role": "user", "content": "Hello there, how high is the water?"}],
}
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


@pytest.mark.parametrize(
    "choice",
    [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "high_water"}],
)
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
    result = {
        "type": "tool_result",
        "tool_use_id": block.id,
        "content": [{"type": "text", "text": "at noon"}],
    }
    turns = [
        *ASK["messages"],
        {"role": "assistant", "content": [block.model_dump()]},
        {"role": "user", "content": [result]},
    ]
    assert client.messages.create(**ASK | {"messages": turns, "tools": [TOOL]}).content is not None


INPUTS = [{"port": "Brest"}, {"port": "Hull"}, {}, {"port": "Brest", "deep": {"a": ["}", 1]}}]


@pytest.mark.parametrize("step", [1, 7, 10_000])
@pytest.mark.parametrize("is_forced", [True, False])
async def test_each_of_several_calls_keeps_its_input(step, is_forced):
    calls = [json.dumps({"name": "high_water", "arguments": one}) for one in INPUTS]
    text = (
        f"[{', '.join(calls)}]"
        if is_forced
        else "So: " + "".join(f"<tool_call>{call}</tool_call>" for call in calls)
    )
    choice = {"type": "any"} if is_forced else None
    parts = [text[i : i + step] for i in range(0, len(text), step)]

    def codec(stream):
        body = MessagesRequest(**ASK, tools=[TOOL], tool_choice=choice, stream=stream)
        return endpoint_of(MessagesCodec, ScriptedService(outputs_of(parts)), body, "/v1/messages")

    whole = json.loads(await codec(False).answer())
    streamer = codec(True)
    lines = [event async for event in streamer.stream([], await streamer.begin())]
    events = [json.loads(line.partition(b"data: ")[2]) for line in lines]
    assert whole["stop_reason"] == "tool_use"
    assert [block["input"] for block in whole["content"] if block["type"] == "tool_use"] == INPUTS
    streamed = {}
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(streamed)
            streamed[event["index"]] = [event["content_block"], ""]
        elif event["type"] == "content_block_delta":
            streamed[event["index"]][1] += event["delta"].get("partial_json", "") + event[
                "delta"
            ].get("text", "")
    assert [block["type"] for block, _ in streamed.values()] == [
        block["type"] for block in whole["content"]
    ]
    for (_, pieces), block in zip(streamed.values(), whole["content"], strict=True):
        assert (json.loads(pieces) if block["type"] == "tool_use" else pieces) == block.get(
            "input", block.get("text")
        )


def test_several_calls_by_the_client(client):
    """Streamed and whole, greedily: the same calls with the same inputs."""
    settings = ASK | {"max_tokens": 400, "tools": [TOOL], "tool_choice": {"type": "any"}}
    whole = client.messages.create(**settings, extra_body=GREEDY)
    with client.messages.stream(**settings, extra_body=GREEDY) as stream:
        streamed = stream.get_final_message()
    assert [(block.name, block.input) for block in whole.content] == [
        (block.name, block.input) for block in streamed.content
    ]
    assert all(block.input["port"] in ("Brest", "Hull") for block in whole.content[:-1])


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"max_tokens": None},
        {"messages": []},
        {
            "messages": [
                {
                    "role": "system",
                    "content": [{"type": "document", "source": {"type": "text", "data": "x"}}],
                }
            ]
        },
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "document", "source": {"type": "url", "url": "x"}}],
                }
            ]
        },
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}
                    ],
                }
            ]
        },
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"temperature": "hot"},
        {"thinking": {"type": "sometimes"}},
        {"container": "container_1"},
        {"mcp_servers": [{"type": "url", "url": "x", "name": "x"}]},
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        {"tools": [{"type": "bash_20250124", "name": "bash"}]},
        {
            "tools": [{"type": "web_search_20250305", "name": "web_search"}],
            "tool_choice": {"type": "tool", "name": "web_search"},
        },
        {"output_config": {"format": {"type": "json_schema"}}},
        {"tool_choice": {"type": "tool", "name": "nothing"}},
        {"nonsense": 1},
    ],
)
def test_what_cannot_be_served_is_told_as_the_client_expects(roomy, wrong):
    reply = httpx.post(f"{roomy.url}/v1/messages", json=ASK | wrong)
    assert reply.status_code == 400
    assert reply.json()["type"] == "error"
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert str(next(iter(wrong))) in reply.text or "'image'" in reply.text or "schema" in reply.text


def test_what_has_no_effect_is_accepted_and_named(client):
    cached = {"type": "ephemeral", "ttl": "1h"}
    said = [{"type": "text", "text": "Hello.", "cache_control": cached}]
    reply = client.beta.messages.with_raw_response.create(
        model="tiny",
        max_tokens=5,
        betas=["interleaved-thinking-2025-05-14", "context-management-2025-06-27"],
        cache_control=cached,
        system=[{"type": "text", "text": "Be brief.", "cache_control": cached}],
        messages=[{"role": "user", "content": said}],
        tools=[
            TOOL | {"type": "custom", "cache_control": cached, "strict": True},
            {"type": "web_search_20250305", "name": "web_search"},
        ],
        tool_choice={"type": "none"},
        thinking={"type": "enabled", "budget_tokens": 1024},
        metadata={"user_id": "u"},
        service_tier="auto",
        mcp_servers=[],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        extra_body={"container": None, "top_k": 5},
    )
    assert reply.headers["x-tidemill-ignored"].split(", ") == [
        "context_management.clear_thinking", "metadata", "service_tier", "thinking",
        "tools.web_search",
    ]  # fmt: skip
    assert reply.parse().id.startswith("msg_")


def test_structured_output(client):
    shape = {"type": "json_schema", "schema": TOOL["input_schema"]}
    for more in (
        {"output_config": {"format": shape, "effort": "low"}},
        {"extra_body": {"output_format": shape}},
    ):
        reply = client.messages.create(**ASK | {"max_tokens": 100}, **more)
        assert json.loads(reply.content[0].text)["port"] in ("Brest", "Hull")


def test_more_tokens_than_fit_the_context(client):
    """Programs ask for the most their usual model can write."""
    # it cannot end earlier
    long = {"type": "json_schema", "schema": {"type": "string", "minLength": 5000}}
    messages = [{"role": "user", "content": "x" * 4000}]
    with client.messages.stream(
        model="tiny", max_tokens=32000, messages=messages, output_config={"format": long}
    ) as stream:
        reply = stream.get_final_message()
    counted = client.messages.count_tokens(model="tiny", messages=messages).input_tokens
    assert reply.stop_reason == "model_context_window_exceeded"
    assert reply.usage.output_tokens == 4096 - counted


def prompt_of(**body):
    request = MessagesRequest(**ASK | body)
    conversation = request.conversation()
    return conversation, request.template_options(conversation)["continue_final_message"]


def test_a_prefill_is_continued_as_text_or_as_blocks(client):
    user = ASK["messages"]
    for content in (
        "The water is",
        [{"type": "text", "text": "The water"}, {"type": "text", "text": " is"}],
    ):
        said, continues = prompt_of(messages=[*user, {"role": "assistant", "content": content}])
        assert (said[-1]["content"], continues) == ("The water is", True)
    texts = [
        client.messages.create(
            **ASK | {"messages": [*user, {"role": "assistant", "content": content}]},
            extra_body=GREEDY,
        ).content
        for content in ("The water is", [{"type": "text", "text": "The water is"}])
    ]
    assert texts[0] == texts[1]
    called = [
        {"type": "text", "text": "So"},
        {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}},
    ]
    assert not prompt_of(messages=[*user, {"role": "assistant", "content": called}])[1]
    assert not prompt_of(messages=[*user, {"role": "assistant", "content": ""}])[1]


def test_a_conversation_of_every_block():
    document = {
        "type": "document",
        "title": "Tables",
        "source": {"type": "text", "media_type": "text/plain", "data": "3 m"},
    }
    found = {
        "type": "search_result",
        "source": "a.b",
        "title": "Tide",
        "content": [{"type": "text", "text": "5 m"}],
    }
    thought = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
    ]
    call = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": "é"}}
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [{"type": "text", "text": "no"}, found],
        "is_error": True,
    }
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1f;"}
    said, _ = prompt_of(
        system=[billing, {"type": "text", "text": "One."}, {"type": "text", "text": "Two."}],
        messages=[
            {"role": "system", "content": "Three."},
            {"role": "user", "content": [document, {"type": "text", "text": "How high?"}]},
            {"role": "assistant", "content": [*thought, {"type": "text", "text": "Wait."}, call]},
            {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
            {"role": "system", "content": [{"type": "text", "text": "Hurry."}]},
        ],
    )
    function = {"name": "f", "arguments": '{"a": "é"}'}
    assert said == [
        {"role": "system", "content": "One.\n\nTwo.\n\nThree."},
        {"role": "user", "content": "Tables\n3 m\nHow high?"},
        {
            "role": "assistant", "content": "Wait.", "reasoning_content": "hm",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "Error: noTide (a.b)\n5 m\n"},
        {"role": "user", "content": "Well?"},
        {"role": "system", "content": "Hurry."},
    ]  # fmt: skip


def test_every_block_by_the_client(client):
    found = {
        "type": "search_result",
        "source": "a.b",
        "title": "Tide",
        "content": [{"type": "text", "text": "5 m"}],
    }
    turns = [
        *ASK["messages"],
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "So."},
            ],
        },
        {"role": "system", "content": "Be quick."},
        {"role": "user", "content": [found, {"type": "text", "text": "And?"}]},
    ]
    assert client.messages.create(**ASK | {"messages": turns}).usage.output_tokens > 0


CALL = '<tool_call>{"name": "high_water", "arguments": {"port": "Brest"}}</tool_call>'
SCRIPT = [
    "<think>", "The tide", " turns.", "</think>", "\n", "At ", "noon.", "<tool_call>", '{"name": "high_water", ',
    '"arguments": {"port": "Hull"}}', "</tool_call>", CALL,
]  # fmt: skip


@pytest.mark.parametrize("display", ["summarized", "omitted"])
async def test_thinking_and_several_calls_streamed_to_the_client(display):
    """What a reasoning model's tokens look like."""

    def service():
        outputs = outputs_of(SCRIPT, num_cached=3, reasoning=("The tide", " turns."))
        return ScriptedService(outputs, "<think> <tool_call>")

    app = app_of(MessagesCodec, "/v1/messages", service)
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": display}
    async with behind_our_protocol(app) as port:
        client = anthropic.AsyncAnthropic(
            base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0
        )
        async with client.messages.stream(**ASK, tools=[TOOL], thinking=thinking) as stream:
            kinds = [event.type async for event in stream]
            reply = await stream.get_final_message()
        await client.close()
    thought, text, *calls = reply.content
    assert (thought.type, thought.thinking) == (
        "thinking",
        "The tide turns." if display == "summarized" else "",
    )
    assert thought.signature
    assert ("thinking" in kinds) == (display == "summarized")
    assert "signature" in kinds
    assert text.text == "At noon."
    assert [call.input for call in calls] == [{"port": "Hull"}, {"port": "Brest"}]
    assert len({call.id for call in calls}) == 2
    assert reply.stop_reason == "tool_use"
    assert reply.usage.output_tokens_details.thinking_tokens == 2
    assert (reply.usage.input_tokens, reply.usage.cache_read_input_tokens) == (2, 3)


def high_water(port: Literal["Brest"]) -> str:
    """Says when.

    Args:
        port: the port
    """
    return f"at noon in {port}"


def test_the_tool_runner_goes_on_without_a_thread(client):
    """Threads are stored conversations: it begins one by default, and sends all messages where
    there are none."""
    tool = anthropic.beta_tool(high_water)
    choice = {"type": "tool", "name": "high_water", "disable_parallel_tool_use": True}
    runner = client.beta.messages.tool_runner(
        **ASK | {"max_tokens": 100},
        tools=[tool],
        tool_choice=choice,
        max_iterations=2,
        extra_body=GREEDY,
    )
    replies = list(runner)
    assert [block.name for reply in replies for block in reply.content] == ["high_water"] * 2


def test_a_thread_is_refused_as_anthropic_refuses_what_threads_cannot_do(roomy):
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        reply = httpx.post(f"{roomy.url}/v1/messages", json=ASK | {"thread": thread})
        assert reply.status_code == 400
        assert reply.json()["error"]["type"] == "invalid_request_error"
        assert reply.json()["error"]["details"] == {
            "error_code": "thread_unsupported_request",
            "unsupported": ["thread"],
        }


def test_what_counts_tokens_takes_a_whole_request(roomy):
    counted = httpx.post(
        f"{roomy.url}/v1/messages/count_tokens", json={"messages": ASK["messages"]}
    )
    more = {
        "stream": True,
        "temperature": 0.3,
        "top_p": 0.9,
        "top_k": 4,
        "stop_sequences": ["x"],
        "metadata": {"user_id": "u"},
    }
    whole = httpx.post(f"{roomy.url}/v1/messages/count_tokens", json=ASK | more)
    assert whole.status_code == 200, whole.text
    assert whole.json() == counted.json()
    assert whole.headers["x-tidemill-ignored"].split(", ") == sorted([*more, "max_tokens"])
    wrong = httpx.post(f"{roomy.url}/v1/messages/count_tokens", json=ASK | {"temprature": 1})
    assert wrong.status_code == 400
    assert "temprature" in wrong.text


def test_every_response_has_a_request_id_and_errors_have_anthropics_types(client, roomy, tenants):
    assert client.messages.create(**ASK)._request_id.startswith("msg_")
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(**ASK | {"model": "other"}, extra_headers={"x-request-id": "mine"})
    assert caught.value.type == "not_found_error"
    assert caught.value.request_id == caught.value.body["request_id"] == "mine"
    keyless = httpx.post(f"{tenants.url}/v1/messages", json=ASK)
    assert keyless.json()["error"]["type"] == "authentication_error"
    assert keyless.json()["request_id"] == keyless.headers["request-id"]
    large = httpx.post(
        f"{roomy.url}/v1/messages",
        content=b"[" * 9_000_000,
        headers={"content-type": "application/json"},
    )
    assert (large.status_code, large.json()["error"]["type"]) == (413, "request_too_large")
    nowhere = httpx.get(f"{roomy.url}/v1/messages/nowhere")
    assert (nowhere.status_code, nowhere.json()["error"]["type"]) == (404, "not_found_error")
