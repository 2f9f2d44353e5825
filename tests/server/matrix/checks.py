"""The rows of the matrix: what every API promises, unless it says that it lacks it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from tests.server.matrix.client import API
from tests.server.matrix.dialects import AsText, Body, Ignored, Lack, Refused, Untold
from tests.server.matrix.script import TEXT, said

Check = Callable[[API], None]
ROWS: dict[str, Check] = {}


def row(name: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        ROWS[name] = check
        return check

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


# ---- what an API lacks

ASKED: dict[str, Body] = {  # what a client would send to have it
    "logprobs": {"top_logprobs": 2},
    "n": {"n": 3},
    "seed": {"seed": 1},
    "several prompts": {"prompt": [said("text"), said("other")]},
}


def check_lack(api: API, feature: str, lack: Lack) -> None:
    ask = {"prompt": said("text")} | ASKED[feature]
    if isinstance(lack, Refused):
        refusal = api.refused(**ask)
        assert refusal.status == 400
        assert f"'{lack.field}" in refusal.message
    elif isinstance(lack, Ignored):
        response = api.post(**ask)
        assert api.read(response).text == TEXT
        assert lack.field in response.headers["x-tidemill-ignored"].split(", ")
    elif isinstance(lack, AsText):
        answer = api.ask(**ask).answer
        assert answer.text == ask["text"]
    elif isinstance(lack, Untold):
        assert lack.word not in api.post(**ask).text
