"""Client libraries against `tidemill serve`: litellm, langchain-openai, instructor and pydantic-ai.

The model is random, so grammars fix what it writes: a tool that must be called, an answer of a schema.
openai, anthropic, ollama and openai-agents have files of their own.
"""

import asyncio
import enum
import json
import os
from copy import deepcopy
from typing import Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field, field_validator

for variable in ("ANONYMIZED_TELEMETRY", "LANGSMITH_TRACING", "PYDANTIC_AI_NO_TELEMETRY"):
    os.environ[variable] = "false"
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise its import asks GitHub

pytestmark = pytest.mark.slow  # their imports alone take seconds
QUESTION = "When is high water?"
MESSAGES = [{"role": "user", "content": QUESTION}]
LIMITS = {"max_tokens": 20, "temperature": 0}  # less than the random model wants to write
ROOM = {"max_tokens": 400, "temperature": 0}  # for JSON, of which each character is a token


class Port(enum.Enum):
    BREST = "Brest"
    HULL = "Hull"


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")  # a random model would invent members without end


class Water(Closed):
    """A level of the sea."""

    hour: Literal[6, 12]
    is_spring: bool


class Tide(Closed):
    """A tide of a port."""

    port: Port
    high: Water
    low: Water | None = None
    remarks: list[Literal["calm", "rough"]] = Field(max_length=1)


class Pilot(Closed):
    """Any answer of a model that follows the schema is wrong for its program."""

    name: Literal["Ann"]

    @field_validator("name")
    @classmethod
    def never(cls, value):
        raise ValueError("Ann is ill")


PARAMETERS = {"type": "object", "properties": {"port": {"enum": ["Brest"]}}, "required": ["port"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "high_water", "description": "Says when.", "parameters": PARAMETERS}}
ANSWER = {"type": "json_schema", "json_schema": {"name": "port", "schema": PARAMETERS}}


@pytest.fixture(scope="module")
def base(roomy):
    return f"{roomy.url}/v1"


# ---- litellm


@pytest.fixture(scope="module")
def litellm():
    module = pytest.importorskip("litellm", reason="litellm is not installed")
    module.telemetry = False
    module.suppress_debug_info = True
    return module


@pytest.fixture(scope="module")
def lite(litellm, roomy):
    """Arguments by the name of litellm's provider: four of them have an API that the server speaks."""
    return {
        "openai": {"model": "openai/tiny", "api_base": f"{roomy.url}/v1", "api_key": "none"},
        "hosted_vllm": {"model": "hosted_vllm/tiny", "api_base": f"{roomy.url}/v1", "api_key": "none"},
        "anthropic": {"model": "anthropic/tiny", "api_base": roomy.url, "api_key": "none"},
        "ollama_chat": {"model": "ollama_chat/tiny", "api_base": roomy.url},
    }


PROVIDERS = ["openai", "hosted_vllm", "anthropic", "ollama_chat"]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_litellm_answers_whole_and_streamed(litellm, lite, provider):
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
def test_litellm_calls_a_tool_and_sends_the_result_back(litellm, lite, provider):
    tools = [deepcopy(TOOL)]  # litellm changes them
    asked = {"messages": MESSAGES, "tools": tools, "tool_choice": {"type": "function", "function": {"name": "high_water"}}}
    message = litellm.completion(**lite[provider], **asked, **ROOM).choices[0].message
    call = message.tool_calls[0]
    assert (call.function.name, call.function.arguments.replace(" ", "")) == ("high_water", '{"port":"Brest"}')
    result = {"role": "tool", "tool_call_id": call.id, "content": "at noon"}
    for dumped in (message, message.model_dump(), message.model_dump(exclude_none=True)):
        history = [*MESSAGES, dumped, result]
        answer = litellm.completion(**lite[provider], messages=history, response_format=ANSWER, **ROOM)
        assert json.loads(answer.choices[0].message.content) == {"port": "Brest"}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_litellm_structured_output(litellm, lite, provider):
    answer = litellm.completion(**lite[provider], messages=MESSAGES, response_format=Tide, **ROOM)
    assert Tide.model_validate_json(answer.choices[0].message.content)


async def test_litellm_async(litellm, lite):
    answers = await asyncio.gather(*(litellm.acompletion(**lite["openai"], messages=MESSAGES, **LIMITS) for _ in range(3)))
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    streamed = await litellm.acompletion(**lite["openai"], messages=MESSAGES, **LIMITS, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in streamed])
    assert text == answers[0].choices[0].message.content


@pytest.mark.parametrize("provider", PROVIDERS)
def test_litellm_errors(litellm, lite, provider):
    with pytest.raises(litellm.NotFoundError, match="tiny"):
        litellm.completion(**lite[provider] | {"model": f"{provider}/huge"}, messages=MESSAGES, num_retries=0)
    if provider == "ollama_chat":
        return  # a temperature below zero is greedy there
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**lite[provider], messages=MESSAGES, max_tokens=4, temperature=-3)


def test_litellm_other_routes(litellm, lite):
    vectors = litellm.embedding(**lite["openai"], input=["sea", "land"])
    assert len(vectors.data) == 2
    assert len(vectors.data[0]["embedding"]) == 64
    assert vectors.usage.prompt_tokens == 7
    place = lite["openai"] | {"model": "text-completion-openai/tiny"}
    text = litellm.text_completion(**place, prompt="The sea", **LIMITS)
    assert text.usage.completion_tokens > 0
    response = litellm.responses(**lite["openai"], input=QUESTION, max_output_tokens=16)
    assert response.usage.output_tokens <= 16
    again = litellm.responses(**lite["openai"], input="And then?", previous_response_id=response.id, max_output_tokens=16)
    assert again.usage.input_tokens > response.usage.input_tokens


def test_litellm_reasoning(litellm, scripted):
    place = {"model": "openai/tiny", "api_base": f"{scripted.url}/v1", "api_key": "none"}
    message = litellm.completion(**place, messages=MESSAGES, temperature=0).choices[0].message
    assert (message.reasoning_content, message.content) == ("hm", "ok")
    again = litellm.completion(**place, messages=[*MESSAGES, message.model_dump(), *MESSAGES], temperature=0)
    assert again.choices[0].message.content == "ok"
    deltas = [chunk.choices[0].delta for chunk in litellm.completion(**place, messages=MESSAGES, temperature=0, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "hm"


def test_litellm_timeout(litellm, lite):
    with pytest.raises(litellm.Timeout):
        litellm.completion(**lite["openai"], messages=MESSAGES, max_tokens=3000, timeout=0.01, num_retries=0, max_retries=0)


# ---- langchain-openai


@pytest.fixture(scope="module")
def langchain():
    return pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")


def chain(langchain, base, **more):
    return langchain.ChatOpenAI(**{"model": "tiny", "base_url": base, "api_key": "none", "max_retries": 0, **LIMITS} | more)


APIS = pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])


@APIS
def test_langchain_answers_whole_and_streamed(langchain, base, responses):
    model = chain(langchain, base, use_responses_api=responses, stream_usage=True)
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
def test_langchain_calls_a_tool_and_sends_the_result_back(langchain, base, responses):
    from langchain_core.messages import HumanMessage, ToolMessage, messages_from_dict, messages_to_dict
    from langchain_core.tools import tool

    @tool
    def high_water(port: Port) -> str:
        """Says when."""
        return f"at noon in {port.value}"

    model = chain(langchain, base, use_responses_api=responses, max_tokens=400)
    message = model.bind_tools([high_water], tool_choice="high_water").invoke(QUESTION)
    result = high_water.invoke(message.tool_calls[0])
    assert isinstance(result, ToolMessage)
    assert result.content.startswith("at noon in")
    streamed = None
    for chunk in model.bind_tools([high_water], tool_choice="any").stream(QUESTION):
        streamed = chunk if streamed is None else streamed + chunk
    assert [(call["name"], call["args"]) for call in streamed.tool_calls] == [("high_water", message.tool_calls[0]["args"])]
    history = messages_from_dict(messages_to_dict([HumanMessage(QUESTION), message, result]))
    answer = model.bind_tools([high_water]).invoke([*history, HumanMessage("Thanks.")])
    assert answer.usage_metadata["input_tokens"] > message.usage_metadata["input_tokens"]


@APIS
@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(langchain, base, responses, method):
    model = chain(langchain, base, use_responses_api=responses, max_tokens=400)
    assert isinstance(model.with_structured_output(Tide, method=method).invoke(QUESTION), Tide)
    strict = model.with_structured_output(Water, method=method, strict=True, include_raw=True).invoke(QUESTION)
    assert strict["parsing_error"] is None
    assert isinstance(strict["parsed"], Water)


def test_langchain_errors(langchain, base):
    with pytest.raises(openai.NotFoundError, match="tiny"):
        chain(langchain, base, model="huge").invoke(QUESTION)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chain(langchain, base, temperature=-3).invoke(QUESTION)
    with pytest.raises(openai.APITimeoutError):
        chain(langchain, base, timeout=0.01, max_tokens=3000).invoke(QUESTION)
    with pytest.raises(openai.BadRequestError) as caught:
        chain(langchain, base).invoke("long " * 2000)
    assert caught.value.code == "context_length_exceeded"


async def test_langchain_async(langchain, base):
    """Both APIs in one test: langchain keeps a client for each address, which belongs to an event loop."""
    for responses in (False, True):
        model = chain(langchain, base, use_responses_api=responses)
        whole, other = await model.abatch([QUESTION, "And then?"])
        assert "".join([chunk.text async for chunk in model.astream(QUESTION)]) == whole.text != other.text
    embed = langchain.OpenAIEmbeddings(model="tiny", base_url=base, api_key="none", check_embedding_ctx_length=False)
    vectors = await embed.aembed_documents(["sea", "land"])
    assert [len(vector) for vector in vectors] == [64, 64]
    assert embed.embed_query("sea") == pytest.approx(vectors[0], abs=1e-6)


def test_langchain_completions(langchain, base):
    model = langchain.OpenAI(model="tiny", base_url=base, api_key="none", **LIMITS)
    assert "".join(model.stream("The sea")) == model.invoke("The sea")


# ---- instructor


@pytest.fixture(scope="module")
def instructor():
    return pytest.importorskip("instructor", reason="instructor is not installed")


@pytest.fixture(scope="module")
def client(base):
    return openai.OpenAI(base_url=base, api_key="none", max_retries=0)


MODES = ["TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS"]  # JSON asks for any object


@pytest.mark.parametrize("mode", MODES)
def test_instructor(instructor, client, mode):
    asked = instructor.from_openai(client, mode=instructor.Mode[mode])
    tide, raw = asked.create_with_completion(model="tiny", messages=MESSAGES, response_model=Tide, max_retries=0)
    assert isinstance(tide, Tide)
    assert raw.usage.total_tokens > 0


def test_instructor_streams(instructor, client):
    asked = instructor.from_openai(client)
    parts = list(asked.create_partial(model="tiny", messages=MESSAGES, response_model=Water, **ROOM))
    whole = Water.model_validate(parts[-1].model_dump())
    told = [part.model_dump(exclude_none=True) for part in parts]  # each is a part of the whole: of 12, the 1 comes first
    assert all(str(whole.model_dump()[name]).startswith(str(value)) for part in told for name, value in part.items())
    several = asked.create_iterable(model="tiny", messages=MESSAGES, response_model=Water, **ROOM)
    assert all(isinstance(water, Water) for water in several)


def test_instructor_retries_with_the_answer_in_the_history(instructor, client):
    from instructor.exceptions import InstructorRetryException

    for mode in ("TOOLS", "JSON_SCHEMA"):
        asked = instructor.from_openai(client, mode=instructor.Mode[mode])
        with pytest.raises(InstructorRetryException) as caught:
            asked.create(model="tiny", messages=MESSAGES, response_model=Pilot, max_retries=2, **ROOM)
        assert "Ann is ill" in str(caught.value)
        assert caught.value.n_attempts > 1


async def test_instructor_async_and_anthropic(instructor, roomy, base):
    async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
        assert isinstance(
            await instructor.from_openai(client).create(model="tiny", messages=MESSAGES, response_model=Water), Water
        )
    with anthropic.Anthropic(base_url=roomy.url, api_key="none", max_retries=0) as client:
        asked = instructor.from_anthropic(client)
        assert isinstance(asked.create(model="tiny", max_tokens=400, messages=MESSAGES, response_model=Tide, max_retries=0), Tide)


# ---- pydantic-ai


@pytest.fixture(scope="module")
def ai():
    return pytest.importorskip("pydantic_ai", reason="pydantic-ai-slim is not installed")


def model_of(api, roomy, name="tiny"):
    if api == "anthropic":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        if not anthropic.__version__.startswith("0."):
            pytest.skip(f"pydantic-ai does not work with anthropic {anthropic.__version__}, but with those below 1.0")
        client = anthropic.AsyncAnthropic(base_url=roomy.url, api_key="none", max_retries=0)
        return AnthropicModel(name, provider=AnthropicProvider(anthropic_client=client))
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    client = openai.AsyncOpenAI(base_url=f"{roomy.url}/v1", api_key="none", max_retries=0)
    return {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[api](name, provider=OpenAIProvider(openai_client=client))


MODELS = pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])


@MODELS
async def test_pydantic_ai_answers_whole_and_streamed(ai, roomy, api):
    agent = ai.Agent(model_of(api, roomy), instructions="Be brief.", model_settings=LIMITS)
    whole = await agent.run(QUESTION)
    assert whole.usage.output_tokens == 20
    async with agent.run_stream(QUESTION) as streamed:
        assert await streamed.get_output() == whole.output
    again = await agent.run("And then?", message_history=whole.all_messages())
    assert again.usage.input_tokens > whole.usage.input_tokens


@MODELS
@pytest.mark.parametrize("kind", ["ToolOutput", "NativeOutput"])
async def test_pydantic_ai_output_types(ai, roomy, api, kind):
    if (api, kind) == ("anthropic", "NativeOutput"):
        pytest.skip("pydantic-ai asks only models of known names for it")
    agent = ai.Agent(model_of(api, roomy), output_type=getattr(ai, kind)(Tide), model_settings=ROOM, retries=0)
    assert isinstance((await agent.run(QUESTION)).output, Tide)


@MODELS
async def test_pydantic_ai_calls_a_tool_and_sends_the_result_back(ai, roomy, api):
    from pydantic_ai.direct import model_request
    from pydantic_ai.messages import ModelMessagesTypeAdapter, ModelRequest, ToolReturnPart
    from pydantic_ai.models import ModelRequestParameters
    from pydantic_ai.tools import ToolDefinition

    model, asked = model_of(api, roomy), ModelRequest.user_text_prompt(QUESTION)
    tools = [ToolDefinition(name="high_water", parameters_json_schema=PARAMETERS)]
    forced = ModelRequestParameters(function_tools=tools, allow_text_output=False)
    response = await model_request(model, [asked], model_request_parameters=forced, model_settings=ROOM)
    call = response.tool_calls[0]
    assert (call.tool_name, call.args_as_dict()) == ("high_water", {"port": "Brest"})
    result = ModelRequest(parts=[ToolReturnPart(call.tool_name, "at noon", call.tool_call_id)])
    dumped = ModelMessagesTypeAdapter.dump_json([asked, response, result])
    agent = ai.Agent(model, output_type=ai.ToolOutput(Water), model_settings=ROOM, retries=0)
    answer = await agent.run("Say it.", message_history=ModelMessagesTypeAdapter.validate_json(dumped))
    assert isinstance(answer.output, Water)
    again = await agent.run("And then?", message_history=ModelMessagesTypeAdapter.validate_json(answer.all_messages_json()))
    assert again.usage.input_tokens > answer.usage.input_tokens


@MODELS
async def test_pydantic_ai_errors(ai, roomy, api):
    from pydantic_ai.exceptions import ModelHTTPError

    with pytest.raises(ModelHTTPError) as caught:
        await ai.Agent(model_of(api, roomy, "huge")).run(QUESTION)
    assert caught.value.status_code == 404
    assert "tiny" in str(caught.value.body)
