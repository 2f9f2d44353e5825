"""The rows of the matrix: what every API promises, unless it says that it lacks it."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest

from tests.server.matrix.client import API
from tests.server.matrix.dialects import AsText, Body, Dialect, Ignored, Lack, Refused, Untold
from tests.server.matrix.script import ANSWER, OTHER, REASONING, TEXT, said
from tests.waiting import until

Check = Callable[[API], None]


@dataclass(frozen=True)
class Row:
    """A feature. `server`: the fixture that it is checked with; `needs`: another feature, without
    which an API cannot have it."""

    check: Check
    server: str = "plain"
    needs: str = ""


ROWS: dict[str, Row] = {}


def row(name: str, **more: str) -> Callable[[Check], None]:
    def register(check: Check) -> None:
        ROWS[name] = Row(check, **more)

    return register


@row("text")
def _(api: API) -> None:
    answer = api.ask(said("text")).answer
    assert (answer.text, answer.reasoning, answer.calls, answer.reason) == (TEXT, "", [], "stop")


@row("max_tokens")
def _(api: API) -> None:
    reply = api.ask(said("text"), max_tokens=3)
    assert (reply.text, reply.answer.reason, reply.num_output) == ("The tide turns", "length", 3)


@row("stop strings")
def _(api: API) -> None:
    answer = api.ask(said("text"), stop=["noon", "never"]).answer
    assert (answer.text, answer.reason) == ("The tide turns at ", "stop")


@row("logprobs")
def _(api: API) -> None:
    """After «dice», each of four words is as likely as the others."""
    (answer,) = api.ask(said("dice"), max_tokens=5, top_logprobs=2, temperature=1.0).answers
    assert answer.logprobs == pytest.approx([-math.log(4)] * 5, abs=1e-3)
    assert [tops[:2] for tops in answer.top] == [pytest.approx([-math.log(4)] * 2, abs=1e-3)] * 5


@row("usage")
def _(api: API) -> None:
    """Longer prompts are counted; so is the token that ends an answer, but not in a text."""
    short, long = (api.ask(f"{text} {said('text')}") for text in ("a", "a" * 11))
    assert None not in (short.num_prompt, long.num_prompt)
    assert long.num_prompt == short.num_prompt + 10
    assert short.num_output == len(TEXT.split()) + 1


@row("seed")
def _(api: API) -> None:
    def thrown(seed: int) -> str:
        return api.ask(said("dice"), max_tokens=12, temperature=1.0, seed=seed).text

    assert thrown(1) == thrown(1) != thrown(2)


@row("n")
def _(api: API) -> None:
    reply = api.ask(said("dice"), max_tokens=12, temperature=1.0, n=3)
    assert len({answer.text for answer in reply.answers}) == len(reply.answers) == 3
    assert reply.num_output == 36


@row("several prompts")
def _(api: API) -> None:
    reply = api.ask([said("other"), said("text")], max_tokens=3)
    assert [answer.text for answer in reply.answers] == ["Low water", "The tide turns"]
    assert [answer.reason for answer in reply.answers] == ["stop", "length"]


@row("prompt longer than the context")
def _(api: API) -> None:
    refusal = api.refused("x" * 5000 + said("text"))
    assert refusal.status == 400
    assert "context" in refusal.message


@row("no such model")
def _(api: API) -> None:
    refusal = api.refused(said("text"), model="nonesuch")
    assert refusal.status == 404
    assert "nonesuch" in refusal.message


SCHEMA = {
    "type": "object",
    "properties": {"to": {"enum": ["ebb", "flow"]}},
    "required": ["to"],
    "additionalProperties": False,
}


@row("structured output")
def _(api: API) -> None:
    """Without a schema, more follows the object."""
    answer = api.ask(said("json"), schema=SCHEMA).answer
    assert (answer.text, answer.reason) == ('{"to":"ebb"}', "stop")


# ---- tools

WIND, TIDE = ("wind", {"at": "noon"}), ("tide", {"to": "ebb"})


def _tool(name: str, arguments: dict[str, str]) -> Body:
    properties = {name: {"enum": [value]} for name, value in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [_tool(*TIDE), _tool(*WIND)]


@row("tools")
def _(api: API) -> None:
    answer = api.ask(said("call"), tools=TOOLS).answer
    assert (answer.calls, answer.text, answer.reason) == ([WIND], "", "calls")
    assert api.ask(said("text"), tools=TOOLS).answer.reason == "stop"


@row("parallel tools")
def _(api: API) -> None:
    answer = api.ask(said("calls"), tools=TOOLS).answer
    assert (answer.calls, answer.text, answer.reason) == ([TIDE, WIND], "", "calls")


@row("one tool")
def _(api: API) -> None:
    """The second of two calls is left out if the client wants one at a time."""
    answer = api.ask(said("calls"), tools=TOOLS, one_tool=True).answer
    assert (answer.calls, answer.text, answer.reason) == ([TIDE], "", "calls")


@row("forced tool")
def _(api: API) -> None:
    """Any tool, or the one that is named. Left alone, the model writes text."""
    ways: list[Body] = [{"forced_tool": ""}, {"forced_tool": "wind"}]
    if not isinstance(api.dialect.lacks.get("one tool"), Refused):
        ways.append({"one_tool": True, "forced_tool": ""})
    for how in ways:
        answer = api.ask(said("text"), tools=TOOLS, **how).answer
        assert (answer.calls, answer.text, answer.reason) == ([WIND], "", "calls")


# ---- reasoning


@row("reasoning")
def _(api: API) -> None:
    reply = api.ask(said("think"))
    assert (reply.answer.reasoning, reply.text, reply.answer.reason) == (REASONING, ANSWER, "stop")
    assert reply.num_reasoning in (len(REASONING.split()), None)


@row("max_tokens in the reasoning", needs="reasoning")
def _(api: API) -> None:
    """There is no answer, whatever its form would have been."""
    for more in ({}, {"schema": SCHEMA}):
        reply = api.ask(said("think"), max_tokens=3, **more)
        answer = reply.answer
        assert (answer.reasoning, answer.text, answer.reason) == ("It depends", "", "length")
        assert reply.num_reasoning in (2, None)


@row("reasoning on or off")
def _(api: API) -> None:
    for thinks, reasoning in ((True, REASONING), (False, "")):
        answer = api.ask(said("think"), thinking=thinks).answer
        assert (answer.reasoning, answer.text) == (reasoning, ANSWER)


@row("reasoning budget")
def _(api: API) -> None:
    answer = api.ask(said("think"), thinking_token_budget=2).answer
    assert (answer.reasoning, answer.text) == ("It depends", ANSWER)


# ---- which model, and what it remembers


@row("LoRA")
def _(api: API) -> None:
    assert api.ask(said("text"), model="other").text == OTHER


def _new_prompt() -> str:
    """Text that no other test has sent, of more than two pages."""
    return f"{uuid.uuid4()} {said('text')}"


@row("prefix cache")
def _(api: API) -> None:
    prompt = _new_prompt()
    first, second = api.ask(prompt), api.ask(prompt)
    assert (first.num_cached, second.num_cached) == (0, 32)
    assert first.num_prompt == second.num_prompt


@row("cache salt")
def _(api: API) -> None:
    prompt = _new_prompt()
    cached = [api.ask(prompt, cache_salt=salt).num_cached for salt in "aab"]
    assert cached == [0, 32, 0]


@row("prompt cache")
def _(api: API) -> None:
    """The prompt continues a named one."""
    _, body = api.dialect.request({"prompt": _new_prompt()})
    name = str(uuid.uuid4())
    made = httpx.post(f"{api.url}/v1/prompt_caches", json=body | {"name": name})
    assert made.status_code == 200, made.text
    reply = api.ask(said("other"), prompt_cache=name)
    assert (reply.text, reply.num_cached) == (OTHER, made.json()["pinned_tokens"])
    assert httpx.delete(f"{api.url}/v1/prompt_caches/{name}").status_code == 200


# ---- endings


@row("later prompt refused", needs="several prompts")
def _(api: API) -> None:
    """The last of many, of token ids, whose number only the engine checks."""
    refusal = api.refused([[70]] * 70 + [[70] * 5000], max_tokens=2)
    assert refusal.status == 400
    assert "context" in refusal.message


ENDLESS = {"prompt": said("endless"), "max_tokens": 4000}


@row("cancelled")
def _(api: API) -> None:
    label = str(uuid.uuid4())
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(lambda: api.post(**ENDLESS, headers={"x-request-id": label}))
        until(lambda: httpx.delete(f"{api.url}/v1/requests/{label}").status_code == 200)
        assert "cancel" in api.failed(asked.result())


@row("disconnect")
def _(api: API) -> None:
    """The engine does not go on for a client that has left."""
    label = str(uuid.uuid4())
    api.leave(**ENDLESS, label=label)
    until(lambda: api.status(label) != "under way")
    assert api.status(label) not in ("stop", "length")


@row("deadline")
def _(api: API) -> None:
    response = api.post(**ENDLESS, timeout=0.02)
    assert response.status_code in ((200, 408) if api.is_streamed else (408,))
    assert "0.02 s are over" in api.failed(response)


# ---- what the server says for all requests


@row("server-wide policy", server="limited")
def _(api: API) -> None:
    """A policy that gives up old tokens has room for prompts beyond the context."""
    reply = api.ask("x" * 600 + said("text"))
    assert (reply.text, reply.answer.reason) == (TEXT, "stop")


@row("server-wide budget", server="limited", needs="reasoning")
def _(api: API) -> None:
    answer = api.ask(said("think")).answer
    assert (answer.reasoning, answer.text) == ("It", ANSWER)


@row("own budget", server="limited", needs="reasoning budget")
def _(api: API) -> None:
    """A request's budget goes over the server's."""
    answer = api.ask(said("think"), thinking_token_budget=2).answer
    assert (answer.reasoning, answer.text) == ("It depends", ANSWER)


@row("drain", server="draining")
def _(api: API) -> None:
    refusal = api.refused(said("text"))
    assert refusal.status == 503
    assert refusal.headers["retry-after"]
    assert "stopping" in refusal.message


# ---- what an API lacks

ASKED: dict[str, Body] = {  # what a client would send to have it
    "logprobs": {"top_logprobs": 2},
    "n": {"n": 3},
    "seed": {"seed": 1},
    "several prompts": {"prompt": [said("text"), said("other")]},
    "tools": {"tools": TOOLS},
    "parallel tools": {"tools": TOOLS},
    "one tool": {"tools": TOOLS, "parallel_tool_calls": False},
    "forced tool": {"tools": TOOLS, "tool_choice": "required"},
    "reasoning": {"prompt": said("think")},
    "reasoning on or off": {"chat_template_kwargs": {"enable_thinking": False}},
    "reasoning budget": {"thinking_token_budget": 2},
    "cache salt": {"cache_salt": "a"},
    "prompt cache": {"prompt_cache": "nonesuch"},
    "deadline": {"timeout": 100},
}


def lack_of(dialect: Dialect, feature: str) -> Lack | None:
    """Why an API does not have a feature; None: it has it."""
    lacks = dialect.lacks
    return lacks.get(feature) or lacks.get(ROWS[feature].needs)


def check_lack(api: API, feature: str, lack: Lack) -> None:
    ask = {"prompt": said("text")} | ASKED.get(feature, ASKED.get(ROWS[feature].needs, {}))
    if isinstance(lack, Refused):
        refusal = api.refused(**ask)
        assert refusal.status == 400
        assert f"'{lack.field}" in refusal.message
    elif isinstance(lack, Ignored):
        response = api.post(**ask)
        assert api.read(response).text == TEXT
        assert lack.field in response.headers["x-tidemill-ignored"].split(", ")
    elif isinstance(lack, AsText):
        assert api.ask(**ask).text == f"<think>{REASONING}</think>{ANSWER}"
    elif isinstance(lack, Untold):
        assert lack.word not in api.post(**ask).text
