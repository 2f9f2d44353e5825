"""langchain-openai: chat by both APIs, completions, embeddings."""

import langchain_openai
import openai
import pytest
from asked import LIMITS, QUESTION, Port, Tide, Water


def chain(base, **more):
    place = {"model": "tiny", "base_url": base, "api_key": "none", "max_retries": 0}
    return langchain_openai.ChatOpenAI(**place | LIMITS | more)


APIS = pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])


@APIS
def test_langchain_answers_whole_and_streamed(base, responses):
    model = chain(base, use_responses_api=responses, stream_usage=True)
    whole = model.invoke(QUESTION)
    assert whole.usage_metadata["output_tokens"] == 20
    chunks = list(model.stream(QUESTION))
    merged = chunks[0]
    for chunk in chunks[1:]:
        merged += chunk
    assert merged.text == whole.text
    assert merged.usage_metadata == whole.usage_metadata | {
        "input_token_details": merged.usage_metadata["input_token_details"]  # what was cached
    }


@APIS
def test_langchain_calls_a_tool_and_sends_the_result_back(base, responses):
    from langchain_core.messages import (
        HumanMessage,
        ToolMessage,
        messages_from_dict,
        messages_to_dict,
    )
    from langchain_core.tools import tool

    @tool
    def high_water(port: Port) -> str:
        """Says when."""
        return f"at noon in {port.value}"

    model = chain(base, use_responses_api=responses, max_tokens=400)
    message = model.bind_tools([high_water], tool_choice="high_water").invoke(QUESTION)
    result = high_water.invoke(message.tool_calls[0])
    assert isinstance(result, ToolMessage)
    assert result.content.startswith("at noon in")
    streamed = None
    for chunk in model.bind_tools([high_water], tool_choice="any").stream(QUESTION):
        streamed = chunk if streamed is None else streamed + chunk
    assert [(call["name"], call["args"]) for call in streamed.tool_calls] == [
        ("high_water", message.tool_calls[0]["args"])
    ]
    history = messages_from_dict(messages_to_dict([HumanMessage(QUESTION), message, result]))
    answer = model.bind_tools([high_water]).invoke([*history, HumanMessage("Thanks.")])
    assert answer.usage_metadata["input_tokens"] > message.usage_metadata["input_tokens"]


@APIS
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(base, responses, method):
    model = chain(base, use_responses_api=responses, max_tokens=400)
    assert isinstance(model.with_structured_output(Tide, method=method).invoke(QUESTION), Tide)
    strict = model.with_structured_output(
        Water, method=method, strict=True, include_raw=True
    ).invoke(QUESTION)
    assert strict["parsing_error"] is None
    assert isinstance(strict["parsed"], Water)


def test_langchain_errors(base):
    with pytest.raises(openai.NotFoundError, match="tiny"):
        chain(base, model="huge").invoke(QUESTION)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chain(base, temperature=-3).invoke(QUESTION)
    with pytest.raises(openai.APITimeoutError):
        chain(base, timeout=0.01, max_tokens=3000).invoke(QUESTION)
    with pytest.raises(openai.BadRequestError) as caught:
        chain(base).invoke("long " * 2000)
    assert caught.value.code == "context_length_exceeded"


async def test_langchain_async(base):
    """Both APIs in one test: langchain keeps a client for each address, which belongs to an event
    loop."""
    for responses in (False, True):
        model = chain(base, use_responses_api=responses)
        whole, other = await model.abatch([QUESTION, "And then?"])
        assert (
            "".join([chunk.text async for chunk in model.astream(QUESTION)])
            == whole.text
            != other.text
        )
    embed = langchain_openai.OpenAIEmbeddings(
        model="tiny", base_url=base, api_key="none", check_embedding_ctx_length=False
    )
    vectors = await embed.aembed_documents(["sea", "land"])
    assert [len(vector) for vector in vectors] == [64, 64]
    assert embed.embed_query("sea") == pytest.approx(vectors[0], abs=1e-6)


def test_langchain_completions(base):
    model = langchain_openai.OpenAI(model="tiny", base_url=base, api_key="none", **LIMITS)
    assert "".join(model.stream("The sea")) == model.invoke("The sea")
