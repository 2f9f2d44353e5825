"""Reasoning that the prompt opens, by the real server, and answers that keep to a grammar after it."""

import json

import httpx
import pytest

from tests.server.conftest import Server
from tidemill.frontend.tokenizer import Tokenizer

USER = [{"role": "user", "content": "Which way?"}]
SCHEMA = {
    "type": "object",
    "properties": {"to": {"enum": ["ebb", "flow"]}},
    "required": ["to"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "tide", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "tide", "parameters": SCHEMA}}]
OFF = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def server(thinking_folder):
    running = Server(thinking_folder, "--tool-parser", "pythonic").wait()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def ends(thinking_folder):
    """A bias that makes the random model end its reasoning after some tokens."""
    (token,) = Tokenizer.load(thinking_folder).encode("</think>", add_special=False)
    return {str(token): 3.0}


def post(server, body, path="/v1/chat/completions"):
    reply = httpx.post(f"{server.url}{path}", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_the_answer_keeps_to_the_schema_after_the_reasoning(server, ends):
    body = {
        "messages": USER,
        "response_format": FORMAT,
        "logit_bias": ends,
        "seed": 5,
        "n": 3,
        "max_tokens": 400,
        "logprobs": True,
    }
    reply = post(server, body)
    num_reasoning = 0
    for choice in reply["choices"]:
        message = choice["message"]
        assert json.loads(message["content"])["to"] in ("ebb", "flow")
        assert message["reasoning"] == message["reasoning_content"]
        tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
        num_reasoning += tokens.index("</think>")
        assert choice["finish_reason"] == "stop"
    assert num_reasoning > 3
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_reasoning}


def test_without_reasoning_the_grammar_applies_at_once(server, ends):
    reply = post(
        server,
        {
            "messages": USER,
            "response_format": FORMAT,
            "logit_bias": ends,
            "seed": 5,
            "max_tokens": 400,
        }
        | OFF,
    )
    message = reply["choices"][0]["message"]
    assert json.loads(message["content"])["to"] in ("ebb", "flow")
    assert message["reasoning"] is None
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_a_forced_call_follows_the_reasoning(server, ends):
    body = {
        "messages": USER,
        "tools": TOOLS,
        "tool_choice": "required",
        "logit_bias": ends,
        "seed": 5,
        "max_tokens": 1500,
    }
    choice = post(server, body | {"parallel_tool_calls": False})["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning"]
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])["to"] in (
        "ebb",
        "flow",
    )


@pytest.mark.parametrize(
    ("text", "arguments"), [("[tide(to='ebb')]", {"to": "ebb"}), ("[wave(to='ebb')]", None)]
)
def test_the_named_parser_reads_calls_of_known_tools(server, text, arguments):
    """The choice makes the model write it; the parser was named on the command line."""
    body = {
        "messages": USER,
        "tools": TOOLS,
        "structured_outputs": {"choice": [text]},
        "max_tokens": 100,
    } | OFF
    choice = post(server, body)["choices"][0]
    if arguments is None:
        assert choice["message"]["content"] == text
        assert "tool_calls" not in choice["message"]
    else:
        (call,) = choice["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
            "tide",
            arguments,
        )
        assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    "name", ["thinking_token_budget", "reasoning_budget_tokens", "thinking_budget_tokens"]
)
def test_a_budget_of_reasoning(server, ends, name):
    body = {
        "messages": USER,
        "logit_bias": dict.fromkeys(ends, -100.0),
        "seed": 5,
        "max_tokens": 20,
        "ignore_eos": True,
    }
    reply = post(server, body | {name: 6})
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    assert reply["choices"][0]["message"]["content"]
    unlimited = post(server, body | {name: -1})
    assert unlimited["usage"]["completion_tokens_details"] == {"reasoning_tokens": 20}
    for wrong in (-2, 10**30):
        refused = httpx.post(f"{server.url}/v1/chat/completions", json=body | {name: wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    beams = {"use_beam_search": True, "n": 2, "temperature": 0}
    refused = httpx.post(
        f"{server.url}/v1/chat/completions",
        json={"messages": USER, "max_tokens": 20, name: 6} | beams,
    )
    assert (refused.status_code, "budget of reasoning" in refused.text) == (400, True), (
        refused.text
    )
    refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", name: 6})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
