"""Tools that must be called, with the schemas that pydantic writes for nested models, by each of
the three APIs."""

import json
from typing import Literal

import httpx
import jsonschema
import pytest
from pydantic import BaseModel, ConfigDict, create_model


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Port(Closed):
    name: Literal["Brest", "Hull"]


class Crossing(Closed):
    origin: Port
    goal: Port


Sounding = create_model(
    "Sounding",
    __base__=Closed,
    port=(create_model("Port", __base__=Closed, depth=(Literal[3, 5], ...)), ...),
)
SCHEMAS = {"cross": Crossing.model_json_schema(), "sound": Sounding.model_json_schema()}
USER = [{"role": "user", "content": "Which way?"}]
FUNCTIONS = [{"name": name, "parameters": schema} for name, schema in SCHEMAS.items()]


def chat(server, name):
    choice = {"type": "function", "function": {"name": name}} if name else "required"
    tools = [{"type": "function", "function": function} for function in FUNCTIONS]
    body = {"messages": USER, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    (call,) = reply.json()["choices"][0]["message"]["tool_calls"]
    return call["function"]["name"], json.loads(call["function"]["arguments"])


def responses(server, name):
    choice = {"type": "function", "name": name} if name else "required"
    tools = [{"type": "function", **function} for function in FUNCTIONS]
    body = {
        "model": "tiny",
        "input": "Which way?",
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    reply = httpx.post(f"{server.url}/v1/responses", json=body)
    assert reply.status_code == 200, reply.text
    (call,) = reply.json()["output"]
    return call["name"], json.loads(call["arguments"])


def messages(server, name):
    choice = (
        {"type": "tool", "name": name}
        if name
        else {"type": "any", "disable_parallel_tool_use": True}
    )
    tools = [
        {"name": function["name"], "input_schema": function["parameters"]} for function in FUNCTIONS
    ]
    body = {
        "model": "tiny",
        "messages": USER,
        "max_tokens": 300,
        "tools": tools,
        "tool_choice": choice,
    }
    reply = httpx.post(f"{server.url}/v1/messages", json=body)
    assert reply.status_code == 200, reply.text
    (call,) = reply.json()["content"]
    return call["name"], call["input"]


@pytest.mark.parametrize("api", [chat, responses, messages])
@pytest.mark.parametrize("name", [None, "cross", "sound"])
def test_nested_models(roomy, api, name):
    called, arguments = api(roomy, name)
    assert called == name or (name is None and called in SCHEMAS)
    jsonschema.validate(arguments, SCHEMAS[called])


def test_a_tool_whose_parameters_are_no_schema_is_named(roomy):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "no such type"}}}
    body = {"model": "tiny", "messages": USER, "tools": [tool], "tool_choice": "required"}
    error = httpx.post(f"{roomy.url}/v1/chat/completions", json=body).json()["error"]
    assert "invalid 'parameters' schema" in error["message"]
    assert error["param"] == "tools"
    other = body | {"tool_choice": {"type": "function", "function": {"name": "g"}}}
    error = httpx.post(f"{roomy.url}/v1/chat/completions", json=other).json()["error"]
    assert "Tool 'g' not found in tools list" in error["message"]


def test_a_call_that_a_stop_string_cuts_is_none_to_run(roomy):
    tools = [{"type": "function", "function": function} for function in FUNCTIONS]
    choice = {"type": "function", "function": {"name": "cross"}}
    body = {"messages": USER, "tools": tools, "tool_choice": choice}
    for stop, reason in (("goal", "stop"), ("no such text", "tool_calls")):
        reply = httpx.post(f"{roomy.url}/v1/chat/completions", json=body | {"stop": [stop]}).json()[
            "choices"
        ][0]
        (call,) = reply["message"]["tool_calls"]
        assert ("goal" in call["function"]["arguments"]) == (reason == "tool_calls")
        assert reply["finish_reason"] == reason
        with httpx.stream(
            "POST", f"{roomy.url}/v1/chat/completions", json=body | {"stop": [stop], "stream": True}
        ) as chunks:
            streamed = [
                json.loads(line[6:]) for line in chunks.iter_lines() if line.startswith("data: {")
            ]
        assert streamed[-1]["choices"][0]["finish_reason"] == reason


def test_a_function_without_parameters_takes_none(roomy):
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {
        "messages": USER,
        "tools": tools,
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    }
    reply = httpx.post(f"{roomy.url}/v1/chat/completions", json=body).json()["choices"][0]
    assert reply["message"]["tool_calls"][0]["function"]["arguments"] == "{}"


def test_too_many_of_what_may_be_one_says_so(roomy):
    reply = httpx.post(
        f"{roomy.url}/v1/completions", json={"prompt": "a", "stop": ["x"] * 5000}
    ).json()["error"]
    assert "at most" in reply["message"]
    assert reply["param"] == "stop"
