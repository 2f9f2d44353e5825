"""litellm, by each of its providers whose API the server speaks."""

import asyncio
import json
from copy import deepcopy

import litellm
import pytest
from asked import ANSWER, LIMITS, MESSAGES, QUESTION, ROOM, TOOL, Tide

litellm.telemetry = False
litellm.suppress_debug_info = True


@pytest.fixture(scope="module")
def lite(url):
    """Arguments by the name of litellm's provider: four of them have an API that the server speaks."""
    return {
        "openai": {"model": "openai/tiny", "api_base": f"{url}/v1", "api_key": "none"},
        "hosted_vllm": {"model": "hosted_vllm/tiny", "api_base": f"{url}/v1", "api_key": "none"},
        "anthropic": {"model": "anthropic/tiny", "api_base": url, "api_key": "none"},
        "ollama_chat": {"model": "ollama_chat/tiny", "api_base": url},
    }


PROVIDERS = ["openai", "hosted_vllm", "anthropic", "ollama_chat"]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_litellm_answers_whole_and_streamed(lite, provider):
    whole = litellm.completion(**lite[provider], messages=MESSAGES, **LIMITS)
    assert whole.usage.completion_tokens == 20
    assert whole.usage.prompt_tokens > len(QUESTION)
    assert whole.choices[0].finish_reason == "length"
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(**lite[provider], messages=MESSAGES, **LIMITS, **streamed))
    rebuilt = litellm.stream_chunk_builder(chunks)
    assert rebuilt.choices[0].message.content == whole.choices[0].message.content
    assert rebuilt.usage.completion_tokens == 20
    assert rebuilt.choices[0].finish_reason == "length"


@pytest.mark.parametrize("provider", PROVIDERS[:-1])  # Ollama's API has no tool_choice
def test_litellm_calls_a_tool_and_sends_the_result_back(lite, provider):
    tools = [deepcopy(TOOL)]  # litellm changes them
    asked = {
        "messages": MESSAGES,
        "tools": tools,
        "tool_choice": {"type": "function", "function": {"name": "high_water"}},
    }
    message = litellm.completion(**lite[provider], **asked, **ROOM).choices[0].message
    call = message.tool_calls[0]
    assert (call.function.name, call.function.arguments.replace(" ", "")) == (
        "high_water",
        '{"port":"Brest"}',
    )
    result = {"role": "tool", "tool_call_id": call.id, "content": "at noon"}
    for dumped in (message, message.model_dump(), message.model_dump(exclude_none=True)):
        history = [*MESSAGES, dumped, result]
        answer = litellm.completion(
            **lite[provider], messages=history, response_format=ANSWER, **ROOM
        )
        assert json.loads(answer.choices[0].message.content) == {"port": "Brest"}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_litellm_structured_output(lite, provider):
    answer = litellm.completion(**lite[provider], messages=MESSAGES, response_format=Tide, **ROOM)
    assert Tide.model_validate_json(answer.choices[0].message.content)


async def test_litellm_async(lite):
    answers = await asyncio.gather(
        *(litellm.acompletion(**lite["openai"], messages=MESSAGES, **LIMITS) for _ in range(3))
    )
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    streamed = await litellm.acompletion(**lite["openai"], messages=MESSAGES, **LIMITS, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in streamed])
    assert text == answers[0].choices[0].message.content


@pytest.mark.parametrize("provider", PROVIDERS)
def test_litellm_errors(lite, provider):
    with pytest.raises(litellm.NotFoundError, match="tiny"):
        litellm.completion(
            **lite[provider] | {"model": f"{provider}/huge"}, messages=MESSAGES, num_retries=0
        )
    if provider == "ollama_chat":
        return  # a temperature below zero is greedy there
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**lite[provider], messages=MESSAGES, max_tokens=4, temperature=-3)


def test_litellm_other_routes(lite):
    vectors = litellm.embedding(**lite["openai"], input=["sea", "land"])
    assert len(vectors.data) == 2
    assert len(vectors.data[0]["embedding"]) == 64
    assert vectors.usage.prompt_tokens == 7
    place = lite["openai"] | {"model": "text-completion-openai/tiny"}
    text = litellm.text_completion(**place, prompt="The sea", **LIMITS)
    assert text.usage.completion_tokens > 0
    response = litellm.responses(**lite["openai"], input=QUESTION, max_output_tokens=16)
    assert response.usage.output_tokens <= 16
    again = litellm.responses(
        **lite["openai"], input="And then?", previous_response_id=response.id, max_output_tokens=16
    )
    assert again.usage.input_tokens > response.usage.input_tokens


def test_litellm_reasoning(url):
    place = {"model": "openai/scripted", "api_base": f"{url}/v1", "api_key": "none"}
    message = litellm.completion(**place, messages=MESSAGES, temperature=0).choices[0].message
    assert (message.reasoning_content, message.content) == ("hm", "ok")
    again = litellm.completion(
        **place, messages=[*MESSAGES, message.model_dump(), *MESSAGES], temperature=0
    )
    assert again.choices[0].message.content == "ok"
    deltas = [
        chunk.choices[0].delta
        for chunk in litellm.completion(**place, messages=MESSAGES, temperature=0, stream=True)
    ]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm"


def test_litellm_timeout(lite):
    with pytest.raises(litellm.Timeout):
        litellm.completion(
            **lite["openai"],
            messages=MESSAGES,
            max_tokens=3000,
            timeout=0.01,
            num_retries=0,
            max_retries=0,
        )
