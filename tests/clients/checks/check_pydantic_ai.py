"""pydantic-ai, by the three APIs that it has models for."""

import anthropic
import openai
import pydantic_ai
import pytest
from asked import LIMITS, PARAMETERS, QUESTION, ROOM, Tide, Water

# for Anthropic's newest clients it leaves the parameter out
GREEDY = LIMITS | {"extra_body": {"temperature": 0}}


def model_of(api, url, name="tiny"):
    if api == "anthropic":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        client = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
        return AnthropicModel(name, provider=AnthropicProvider(anthropic_client=client))
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return {"chat": OpenAIChatModel, "responses": OpenAIResponsesModel}[api](
        name, provider=OpenAIProvider(openai_client=client)
    )


MODELS = pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])


@MODELS
async def test_pydantic_ai_answers_whole_and_streamed(url, api):
    agent = pydantic_ai.Agent(model_of(api, url), instructions="Be brief.", model_settings=GREEDY)
    whole = await agent.run(QUESTION)
    assert 0 < whole.usage.output_tokens <= 20
    async with agent.run_stream(QUESTION) as streamed:
        assert await streamed.get_output() == whole.output
    again = await agent.run("And then?", message_history=whole.all_messages())
    assert again.usage.input_tokens > whole.usage.input_tokens


@MODELS
@pytest.mark.parametrize("kind", ["ToolOutput", "NativeOutput"])
async def test_pydantic_ai_output_types(url, api, kind):
    if (api, kind) == ("anthropic", "NativeOutput"):
        pytest.skip("pydantic-ai asks only models of known names for it")
    agent = pydantic_ai.Agent(
        model_of(api, url),
        output_type=getattr(pydantic_ai, kind)(Tide),
        model_settings=ROOM,
        retries=0,
    )
    assert isinstance((await agent.run(QUESTION)).output, Tide)


@MODELS
async def test_pydantic_ai_calls_a_tool_and_sends_the_result_back(url, api):
    from pydantic_ai.direct import model_request
    from pydantic_ai.messages import ModelMessagesTypeAdapter, ModelRequest, ToolReturnPart
    from pydantic_ai.models import ModelRequestParameters
    from pydantic_ai.tools import ToolDefinition

    model, asked = model_of(api, url), ModelRequest.user_text_prompt(QUESTION)
    tools = [ToolDefinition(name="high_water", parameters_json_schema=PARAMETERS)]
    forced = ModelRequestParameters(function_tools=tools, allow_text_output=False)
    response = await model_request(
        model, [asked], model_request_parameters=forced, model_settings=ROOM
    )
    call = response.tool_calls[0]
    assert (call.tool_name, call.args_as_dict()) == ("high_water", {"port": "Brest"})
    result = ModelRequest(parts=[ToolReturnPart(call.tool_name, "at noon", call.tool_call_id)])
    dumped = ModelMessagesTypeAdapter.dump_json([asked, response, result])
    agent = pydantic_ai.Agent(
        model, output_type=pydantic_ai.ToolOutput(Water), model_settings=ROOM, retries=0
    )
    answer = await agent.run(
        "Say it.", message_history=ModelMessagesTypeAdapter.validate_json(dumped)
    )
    assert isinstance(answer.output, Water)
    again = await agent.run(
        "And then?",
        message_history=ModelMessagesTypeAdapter.validate_json(answer.all_messages_json()),
    )
    assert again.usage.input_tokens > answer.usage.input_tokens


@MODELS
async def test_pydantic_ai_errors(url, api):
    from pydantic_ai.exceptions import ModelHTTPError

    with pytest.raises(ModelHTTPError) as caught:
        await pydantic_ai.Agent(model_of(api, url, "huge")).run(QUESTION)
    assert caught.value.status_code == 404
    assert "tiny" in str(caught.value.body)
