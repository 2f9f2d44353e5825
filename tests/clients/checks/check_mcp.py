"""mcp: tools of an MCP server, which the client runs; the model calls them by OpenAI's two APIs."""

import json
from typing import Literal

import openai
from asked import QUESTION
from mcp import Client
from mcp.server import MCPServer

ports = MCPServer("ports")


@ports.tool()
def high_water(port: Literal["Brest"]) -> str:
    """Says when."""
    return f"at noon in {port}"


async def test_the_model_calls_a_tool_of_an_mcp_server(base):
    async with (
        Client(ports) as session,
        openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client,
    ):
        (tool,) = (await session.list_tools()).tools
        schema = {**tool.input_schema, "additionalProperties": False}
        function = {"name": tool.name, "description": tool.description, "parameters": schema}
        asked = {"model": "tiny", "temperature": 0}
        messages = [{"role": "user", "content": QUESTION}]
        tools = {
            "tools": [{"type": "function", "function": function}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }
        reply = await client.chat.completions.create(
            **asked, **tools, messages=messages, max_tokens=400
        )
        (call,) = reply.choices[0].message.tool_calls
        result = await session.call_tool(call.function.name, json.loads(call.function.arguments))
        text = result.content[0].text
        assert text == "at noon in Brest"
        messages += [
            reply.choices[0].message,
            {"role": "tool", "tool_call_id": call.id, "content": text},
        ]
        last = await client.chat.completions.create(
            **asked, tools=tools["tools"], messages=messages, max_tokens=20
        )
        assert last.usage.prompt_tokens > reply.usage.prompt_tokens
        by_item = {
            "tools": [{"type": "function", **function}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }
        response = await client.responses.create(
            **asked, **by_item, input=QUESTION, max_output_tokens=400
        )
        assert [item.name for item in response.output] == ["high_water"]
