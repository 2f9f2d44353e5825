"""openai-agents: a tool that must be called, its result sent back, and an answer of a type, by both
of its models."""

from typing import Literal

import agents
import openai
import pytest
from asked import QUESTION
from pydantic import BaseModel

agents.set_tracing_disabled(True)  # traces would go to OpenAI
MODELS = {"responses": agents.OpenAIResponsesModel, "chat": agents.OpenAIChatCompletionsModel}


class HighWater(BaseModel):
    time: Literal["noon"]


@pytest.mark.parametrize("api", MODELS)
async def test_a_run_whole_streamed_and_continued(base, api):
    asked = []

    @agents.function_tool
    def high_water(is_spring: bool) -> str:
        """When the water is high."""
        asked.append(is_spring)
        return "at noon"

    client = openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0)
    settings = agents.ModelSettings(
        tool_choice="required", parallel_tool_calls=False, max_tokens=400, temperature=0.0
    )
    agent = agents.Agent(
        name="Pilot",
        instructions="Be brief.",
        tools=[high_water],
        model=MODELS[api]("tiny", client),
        model_settings=settings,
        output_type=HighWater,  # an answer that ends by itself
    )
    result = await agents.Runner.run(agent, QUESTION, max_turns=3)
    assert len(asked) == 1
    assert [item.type for item in result.new_items] == [
        "tool_call_item",
        "tool_call_output_item",
        "message_output_item",
    ]
    assert result.final_output == HighWater(time="noon")
    assert result.context_wrapper.usage.requests == 2
    streamed = agents.Runner.run_streamed(agent, "And tomorrow?", max_turns=3)
    kinds = {event.type async for event in streamed.stream_events()}
    assert kinds >= {"raw_response_event", "run_item_stream_event"}
    assert streamed.final_output == HighWater(time="noon")
    assert len(asked) == 2
    again = [*result.to_input_list(), {"role": "user", "content": "And then?"}]
    answer = await agents.Runner.run(
        agent.clone(tools=[], model_settings=agents.ModelSettings(max_tokens=400)), again
    )
    assert answer.final_output == HighWater(time="noon")
    await client.close()
