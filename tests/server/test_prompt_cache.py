"""Prompt caches, cache_control and prompt_cache_key against `tidemill serve`; slow ones with a KV
cache that is too small."""

import os
import signal
import time

import anthropic
import httpx
import openai
import pytest

from tests.server.conftest import KEYS, Server
from tests.server.test_anthropic import TOOL
from tests.waiting import until
from tidemill.server.api.openai.types import ChatRequest

PAGE = 16
GREEDY = {"temperature": 0, "max_tokens": 4}


@pytest.fixture(scope="module")
def small(roomy_folder):
    """100 pages, of which 50 may be held and each key may pin 25 at most."""
    options = [
        "--kv-memory",
        "1200K",
        "--max-context",
        "1024",
        "--speculate",
        "off",
        "--session-retention",
        "60",
    ]
    options += [word for key in KEYS for word in ("--api-key", key)]
    running = Server(roomy_folder, *options, "--admin-key", "key-of-the-administrator").wait()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def http(tenants):
    with httpx.Client(
        base_url=tenants.url, headers={"authorization": f"Bearer {KEYS[0]}"}
    ) as client:
        yield client


@pytest.fixture(scope="module")
def other(tenants):
    with httpx.Client(
        base_url=tenants.url, headers={"authorization": f"Bearer {KEYS[1]}"}
    ) as client:
        yield client


@pytest.fixture(scope="module")
def pressed(small):
    with httpx.Client(base_url=small.url, headers={"authorization": f"Bearer {KEYS[0]}"}) as client:
        yield client


@pytest.fixture(scope="module")
def client(small):
    return openai.OpenAI(base_url=f"{small.url}/v1", api_key=KEYS[0], max_retries=0)


@pytest.fixture(scope="module")
def claude(small):
    return anthropic.Anthropic(base_url=small.url, api_key=KEYS[0], max_retries=0)


def gauge(small, name):
    text = httpx.get(
        f"{small.url}/metrics", headers={"authorization": "Bearer key-of-the-administrator"}
    ).text
    return next(
        float(line.split()[1]) for line in text.splitlines() if line.startswith(f"tidemill_{name} ")
    )


def evict(http, num=4):
    """Prompts that fill the KV cache, which nobody asks for again."""
    for i in range(num):
        prompt = f"{time.monotonic()}{i}" + "z" * 450
        assert (
            http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).status_code
            == 200
        )


def cached(reply):
    return reply.usage.prompt_tokens_details.cached_tokens


@pytest.mark.slow
def test_a_named_prompt_cache_is_continued_and_survives_what_evicts_others(small, pressed, client):
    http = pressed
    system = [{"role": "system", "content": "You know the tides of every port. " * 6}]
    made = http.post(
        "/v1/prompt_caches", json={"name": "tides", "messages": system, "ttl": 600}
    ).json()
    assert made["pinned_tokens"] == made["tokens"] // PAGE * PAGE > 150
    assert made["usage"] == {
        "prompt_tokens": made["tokens"],
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert gauge(small, "kv_pages_pinned") == made["pinned_tokens"] / PAGE
    ask = [{"role": "user", "content": "When is high water in Brest?"}]
    plain = client.chat.completions.create(model="tiny", messages=system + ask, **GREEDY)
    evict(http)
    continued = client.chat.completions.create(
        model="tiny", messages=ask, **GREEDY, extra_body={"prompt_cache": "tides"}
    )
    assert continued.choices[0].message.content == plain.choices[0].message.content
    assert continued.usage.prompt_tokens == plain.usage.prompt_tokens
    assert cached(continued) == made["pinned_tokens"]
    forked = http.post(
        "/v1/prompt_caches/tides/fork", json={"name": "brest", "messages": ask}
    ).json()
    assert forked["tokens"] > made["tokens"]
    assert forked["usage"]["prompt_tokens_details"]["cached_tokens"] >= made["pinned_tokens"]
    names = {one["name"]: one for one in http.get("/v1/prompt_caches").json()["data"]}
    assert set(names) == {"tides", "brest"}
    assert names["tides"]["uses"] == 1
    assert http.post("/v1/prompt_caches/tides", json={"ttl": 5000}).json()["expires_in"] > 4990
    for name in names:
        assert http.delete(f"/v1/prompt_caches/{name}").json()["deleted"]
    assert http.get("/v1/prompt_caches/tides").status_code == 404
    evict(http, 1)  # the engine has done it
    assert gauge(small, "kv_pages_pinned") == 0


def test_a_prompt_cache_of_text_or_tokens_is_continued_by_completions(http):
    text = "Spring tides come after new moon and full moon, neap tides between them. "
    made = http.post("/v1/prompt_caches", json={"name": "text", "prompt": text}).json()
    assert made["kind"] == "prompt"
    whole = http.post("/v1/completions", json={"prompt": text + "So", **GREEDY}).json()
    begun = http.post(
        "/v1/completions", json={"prompt": "So", "prompt_cache": "text", **GREEDY}
    ).json()
    assert begun["choices"][0]["text"] == whole["choices"][0]["text"]
    assert begun["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    wrong = http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "x"}], "prompt_cache": "text"},
    )
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "prompt_cache")
    tokens = http.post(
        "/v1/prompt_caches", json={"name": "tokens", "prompt": list(range(60, 100))}
    ).json()
    assert (tokens["tokens"], tokens["pinned_tokens"]) == (40, 32)
    for name in ("text", "tokens"):
        http.delete(f"/v1/prompt_caches/{name}")


def test_a_prompt_cache_is_whole_whatever_requests_keep(tiny_folder):
    """With a KV policy of the server that gives up most of a prompt."""
    running = Server(
        tiny_folder, "--kv-policy", '{"kind": "streaming", "sinks": 4, "recent": 60}'
    ).wait()
    with httpx.Client(base_url=running.url) as client:
        tokens = [40 + i % 50 for i in range(100)]
        alone = client.post("/v1/completions", json={"prompt": [*tokens, 7, 8], **GREEDY}).json()
        made = client.post("/v1/prompt_caches", json={"name": "long", "prompt": tokens})
        assert (made.status_code, made.json().get("pinned_tokens")) == (200, 96), made.text
        ask = {"prompt": [7, 8], "prompt_cache": "long", **GREEDY}
        begun, whole = (
            client.post("/v1/completions", json=ask | more).json()
            for more in ({}, {"kv_policy": "full"})
        )
        assert begun["choices"][0]["text"] == alone["choices"][0]["text"]
        assert [
            one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (begun, whole)
        ] == [48, 96]
        assert client.get("/v1/prompt_caches/long").json()["pinned_tokens"] == 96
        far = client.post("/v1/prompt_caches", json={"name": "far", "prompt": tokens * 40})
        assert (far.status_code, "context" in far.text) == (400, True)
    assert running.stop() == 0


def test_a_prompt_cache_expires(http):
    assert (
        http.post(
            "/v1/prompt_caches", json={"name": "brief", "prompt": "x" * 40, "ttl": 1}
        ).status_code
        == 200
    )
    until(lambda: http.get("/v1/prompt_caches/brief").status_code != 200)
    reply = http.post("/v1/completions", json={"prompt": "y", "prompt_cache": "brief"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (404, "prompt_cache")


def test_another_keys_prompt_cache_is_not_there(http, other):
    assert (
        http.post("/v1/prompt_caches", json={"name": "mine", "prompt": "x" * 40}).status_code == 200
    )
    assert other.get("/v1/prompt_caches").json()["data"] == []
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", ""), ("POST", "/fork")):
        body = {"ttl": 5} if path == "" else {"name": "b", "prompt": "more"}
        reply = other.request(
            method, f"/v1/prompt_caches/mine{path}", json=body if method == "POST" else None
        )
        assert reply.status_code == 404, (method, path)
    assert (
        other.post("/v1/completions", json={"prompt": "y", "prompt_cache": "mine"}).status_code
        == 404
    )
    assert (
        other.post("/v1/prompt_caches", json={"name": "mine", "prompt": "x" * 40}).status_code
        == 200
    ), "its own name"
    for one in (http, other):
        assert one.delete("/v1/prompt_caches/mine").status_code == 200


@pytest.mark.parametrize(
    ("wrong", "status", "param"),
    [
        ({"ttl": 10**9}, 400, "ttl"),
        ({"ttl": 0}, 400, "ttl"),
        ({"name": "a/b"}, 400, "name"),
        ({"name": "a" * 200}, 400, "name"),
        ({"prompt": None}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "x"}]}, 400, "messages"),
        ({"prompt": ["a", "b"]}, 400, "prompt"),
        ({"prompt": "short"}, 400, "prompt"),
        ({"prompt": [10**6] * 40}, 400, "prompt"),
        ({"prompt": "x" * 5000}, 400, "prompt"),
        ({"pinned": True}, 400, "pinned"),
    ],
)
def test_hostile_prompt_caches(http, wrong, status, param):
    reply = http.post("/v1/prompt_caches", json={"name": "x", "prompt": "x" * 40} | wrong)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), reply.text
    assert http.get("/v1/prompt_caches").json()["data"] == []


@pytest.mark.slow
def test_pins_are_bounded_by_key(pressed):
    large = pressed.post("/v1/prompt_caches", json={"name": "large", "prompt": "x" * 900})
    assert (large.status_code, large.json()["error"]["code"]) == (429, "prompt_cache_full")
    http = pressed
    made = [
        http.post("/v1/prompt_caches", json={"name": f"p{i}", "prompt": f"{i}" * 160})
        for i in range(3)
    ]
    assert [reply.status_code for reply in made] == [200, 200, 429]
    assert "may pin 5 more" in made[2].json()["error"]["message"]
    for i in range(2):
        http.delete(f"/v1/prompt_caches/p{i}")


def test_only_the_last_mark_of_a_time_to_live_is_made_into_a_conversation():
    """Else a request with thousands of marks would hold up everybody."""
    mark = {"type": "ephemeral", "ttl": "1h"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": str(i), "cache_control": mark}]}
        for i in range(2000)
    ]
    body = ChatRequest.model_validate(
        {"model": "tiny", "messages": [*messages, {"role": "user", "content": "x"}]}
    )
    ((ttl, conversation),) = body.marks()
    assert (ttl, len(conversation)) == ("1h", 2000)


def test_cache_control_is_reported_in_usage(roomy):
    check_marks(
        anthropic.Anthropic(base_url=roomy.url, api_key="none", max_retries=0), lambda: None
    )


@pytest.mark.slow
def test_cache_control_retains_the_prompt_up_to_the_mark(pressed, claude):
    check_marks(claude, lambda: evict(pressed))


def check_marks(claude, meanwhile):
    system = [
        {
            "type": "text",
            "text": "Answer about tides. " * 10,
            "cache_control": {"type": "ephemeral", "ttl": "1h"},
        }
    ]
    ask = [
        {"type": "text", "text": "How high? " * 10, "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "And when?"},
    ]
    body = {
        "model": "tiny",
        "max_tokens": 4,
        "system": system,
        "messages": [{"role": "user", "content": ask}],
    }
    num = claude.messages.count_tokens(
        model="tiny", system=system, messages=body["messages"]
    ).input_tokens
    first = claude.messages.create(**body).usage
    created = first.cache_creation
    assert (
        first.cache_creation_input_tokens
        == created.ephemeral_1h_input_tokens + created.ephemeral_5m_input_tokens
    )
    assert created.ephemeral_1h_input_tokens >= 200
    assert created.ephemeral_5m_input_tokens >= 80
    assert (
        first.input_tokens + first.cache_creation_input_tokens + first.cache_read_input_tokens
        == num
    )
    meanwhile()
    again = claude.messages.create(**body).usage
    assert again.cache_read_input_tokens >= first.cache_creation_input_tokens
    assert again.cache_creation_input_tokens == 0
    with claude.messages.stream(**body) as stream:
        assert (
            stream.get_final_message().usage.cache_read_input_tokens
            >= again.cache_read_input_tokens
        )
    body["messages"][0]["content"] = [
        {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    ] * 4
    with pytest.raises(anthropic.BadRequestError, match="maximum of 4 blocks"):
        claude.messages.create(**body)


def test_a_prompt_cache_by_openais_client(roomy):
    """Named in a chat; a key has no other effect than to retain."""
    client = openai.OpenAI(base_url=f"{roomy.url}/v1", api_key="none", max_retries=0)
    system, ask = (
        [{"role": "system", "content": "Say when the water is high. " * 4}],
        [{"role": "user", "content": "Brest?"}],
    )
    made = httpx.post(
        f"{roomy.url}/v1/prompt_caches", json={"name": "ports", "messages": system}
    ).json()
    plain = client.chat.completions.create(
        model="tiny", messages=system + ask, **GREEDY, prompt_cache_key="k"
    )
    named = client.chat.completions.create(
        model="tiny", messages=ask, **GREEDY, extra_body={"prompt_cache": "ports"}
    )
    assert named.choices[0].message.content == plain.choices[0].message.content
    assert cached(named) >= made["pinned_tokens"] > 100
    assert httpx.delete(f"{roomy.url}/v1/prompt_caches/ports").json()["deleted"]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(
            model="tiny", messages=ask, extra_body={"prompt_cache": "ports"}
        )


@pytest.mark.slow
def test_prompt_cache_key_retains_the_latest_request_with_it(pressed, client):
    http = pressed
    say = [{"role": "user", "content": "Tell me of the moon and of the sea. " * 4}]
    for more in ({}, {"prompt_cache_key": "thread"}):
        client.chat.completions.create(model="tiny", messages=say, **GREEDY, **more)
        evict(http)
        again = client.chat.completions.create(model="tiny", messages=say, **GREEDY)
        assert (cached(again) > 128) is bool(more)
    reply = client.responses.with_raw_response.create(
        model="tiny",
        input="x" * 64,
        max_output_tokens=2,
        prompt_cache_key="k",
        prompt_cache_retention="24h",
    )
    assert "prompt_cache_key" not in reply.headers.get("x-tidemill-ignored", "")
    assert reply.parse().prompt_cache_key == "k"


def held_of(http, request_id) -> list[str]:
    """Empty until both decisions are made."""
    held = http.get(f"/v1/requests/{request_id}/explain").json()["data"][0]["held"]
    return held if len(held) == 2 else []


@pytest.mark.slow
def test_a_session_is_retained_while_its_tool_call_is_under_way(pressed, claude):
    """Explain says so; one without a call is not."""
    http = pressed
    say = {"role": "user", "content": "When is high water? " * 10}
    made = [
        claude.messages.create(
            model="tiny", max_tokens=num, messages=[say], tools=[TOOL], tool_choice=choice
        )
        for num, choice in ((400, {"type": "tool", "name": TOOL["name"]}), (4, {"type": "auto"}))
    ]
    assert made[0].stop_reason == "tool_use"
    decided = (
        "for 60 s from then on: a tool call is under way",
        "evictable again: no tool was called",
    )
    for one, words in zip(made, decided, strict=True):
        held = until(lambda one=one: held_of(http, one.id))
        assert held[0].endswith("tokens retained for 10 s: a tool may have been called")
        assert held[1] == words
    evict(http)
    result = {"type": "tool_result", "tool_use_id": made[0].content[0].id, "content": "at noon"}
    back = [
        say,
        {"role": "assistant", "content": made[0].content},
        {"role": "user", "content": [result]},
    ]
    again = claude.messages.create(model="tiny", max_tokens=2, messages=back, tools=[TOOL]).usage
    assert again.cache_read_input_tokens > 200


@pytest.mark.slow
def test_a_prompt_cache_is_pinned_again_after_the_engine_was_killed(small, pressed):
    """By the next request with it; the tokens are the same."""
    http = pressed
    made = http.post(
        "/v1/prompt_caches",
        json={"name": "lasting", "prompt": "The sea rises and falls twice a day. " * 3},
    ).json()
    ask = {"prompt": "So", "prompt_cache": "lasting", **GREEDY}
    before = http.post("/v1/completions", json=ask).json()["choices"]
    os.kill(small.engine_pid(), signal.SIGKILL)
    until(lambda: not http.get("/v1/prompt_caches/lasting").json()["pinned_tokens"])
    assert http.post("/v1/completions", json=ask).json()["choices"] == before
    assert http.get("/v1/prompt_caches/lasting").json()["pinned_tokens"] == made["pinned_tokens"]
    http.delete("/v1/prompt_caches/lasting")
