"""The official ollama client against `tidemill serve`, and what it does not send."""

import asyncio
import json

import httpx
import ollama
import pytest

from tests.server.conftest import KEYS

MESSAGES = [{"role": "user", "content": "Hello there"}]
GREEDY = {"temperature": 0, "num_predict": 12}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
CALL = {
    "type": "object",
    "properties": {
        "name": {"const": "weather"},
        "arguments": {
            "type": "object",
            "properties": {"at": {"enum": ["Brest", "Hull"]}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(roomy):
    return ollama.Client(roomy.url)


@pytest.fixture(scope="module")
def thinker(scripted):
    return ollama.Client(scripted.url)


def openai_text(server, **more):
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12} | more
    return httpx.post(f"{server.url}/v1/chat/completions", json=body).json()["choices"][0][
        "message"
    ]["content"]


@pytest.mark.parametrize("model", ["tiny", "tiny:latest"])
def test_chat_whole_and_streamed_is_the_chat_of_the_other_apis(roomy, client, model):
    whole = client.chat(model, MESSAGES, options=GREEDY)
    assert whole.message.content == openai_text(roomy)
    assert (whole.model, whole.done, whole.message.role) == (model, True, "assistant")
    assert whole.done_reason in ("stop", "length")
    parts = list(client.chat(model, MESSAGES, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    last = parts[-1]
    assert last.eval_count == whole.eval_count == 12
    assert last.prompt_eval_count == whole.prompt_eval_count > len("Hello there")
    assert last.total_duration >= last.prompt_eval_duration + last.eval_duration > 2
    assert last.load_duration >= 1


def test_lines_are_json_lines(roomy):
    body = {"model": "tiny", "messages": MESSAGES, "options": GREEDY}
    reply = httpx.post(f"{roomy.url}/api/chat", json=body)
    assert reply.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert lines[-1]["done"] is True
    assert all(line["model"] == "tiny" and line["created_at"].endswith("Z") for line in lines)


def test_options_are_those_of_the_other_apis(roomy, client):
    options = {
        "num_predict": 20, "temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95, "seed": 5,
        "repeat_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3,
    }  # fmt: skip
    ours = {
        name: value
        for name, value in options.items()
        if name not in ("num_predict", "repeat_penalty")
    }
    expected = openai_text(roomy, **ours, max_tokens=20, repetition_penalty=1.2)
    assert client.chat("tiny", MESSAGES, options=options).message.content == expected
    off = {"repeat_last_n": 0, **options}
    plain = openai_text(
        roomy, **ours | {"presence_penalty": 0, "frequency_penalty": 0}, max_tokens=20
    )
    assert client.chat("tiny", MESSAGES, options=off).message.content == plain != expected
    stop = expected[4]
    cut = client.chat("tiny", MESSAGES, options={**options, "stop": [stop]})
    assert (cut.message.content, cut.done_reason) == (expected.partition(stop)[0], "stop")
    assert cut.eval_duration >= 1


def test_what_has_no_effect_is_named(roomy):
    options = {
        "num_ctx": 2048,
        "num_gpu": 1,
        "mirostat": 0,
        "repeat_last_n": 64,
        "tfs_z": 1.0,
        "num_predict": 1,
    }
    body = {
        "model": "tiny",
        "messages": MESSAGES,
        "options": options,
        "keep_alive": "5m",
        "stream": False,
    }
    reply = httpx.post(f"{roomy.url}/api/chat", json=body)
    assert reply.status_code == 200
    assert reply.headers["x-tidemill-ignored"] == "keep_alive, num_ctx, num_gpu"


def test_fields_that_ollama_does_not_know_are_ignored_and_named(roomy):
    """As Ollama does: ollama-ai-provider-v2 sends some with every call."""
    unknown = {
        "temperature": 0.3,
        "max_output_tokens": 4,
        "encoding_format": "float",
        "bad\r\nname": 1,
    }
    tool = {**WEATHER, "strict": True, "function": {**WEATHER["function"], "strict": True}}
    chat = {
        "messages": [MESSAGES[0] | {"name": "me"}],
        "tools": [tool],
        "options": {**GREEDY, "num_gqa": 8, "tempature": 1},
    }
    replies = [
        httpx.post(
            f"{roomy.url}/api/{route}", json={"model": "tiny", "stream": False, **body, **unknown}
        )
        for route, body in (
            ("chat", chat),
            ("generate", {"prompt": "x", "options": GREEDY}),
            ("embed", {"input": "x"}),
        )
    ]
    assert [reply.status_code for reply in replies] == [200] * 3
    named = [reply.headers["x-tidemill-ignored"].split(", ") for reply in replies]
    assert named[0] == [
        "?",
        "encoding_format",
        "max_output_tokens",
        "name",
        "num_gqa",
        "strict",
        "tempature",
        "temperature",
    ]
    assert named[1] == ["?", "encoding_format", "max_output_tokens", "temperature"]
    assert named[2] == ["?", "encoding_format", "max_output_tokens", "stream", "temperature"]
    plain = {
        "messages": MESSAGES,
        "tools": [WEATHER],
        "options": GREEDY,
        "model": "tiny",
        "stream": False,
    }
    assert (
        replies[0].json()["message"]
        == httpx.post(f"{roomy.url}/api/chat", json=plain).json()["message"]
    )
    many = httpx.post(
        f"{roomy.url}/api/show", json={"model": "tiny"} | {f"field_{i}": i for i in range(100)}
    )
    assert (many.status_code, len(many.headers["x-tidemill-ignored"].split(", "))) == (200, 65)


BAD = [
    ({"options": {"mirostat": 2}}, "mirostat"),
    ({"options": {"top_p": 7}}, "top_p"),
    ({"options": {"seed": 2**70}}, "seed"),
    ({"options": {"num_predict": 10**30}}, "max_tokens"),
    ({"format": "yaml"}, "format"),
    ({"format": {"type": "no such type"}}, "json_schema"),
    ({"think": True}, "does not support thinking"),
    ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "images"),
    ({"model": "other"}, "tiny"),
    ({"model": ""}, "model is required"),
    ({"tools": [{"type": "function"}]}, "function"),
    ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "context"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_are_refused_by_name_in_ollamas_shape(roomy, stream):
    for body, words in BAD:
        reply = httpx.post(
            f"{roomy.url}/api/chat",
            json={"model": "tiny", "messages": MESSAGES, "stream": stream} | body,
        )
        assert reply.status_code in (400, 404), body
        assert words in reply.json()["error"], (body, reply.text)
        assert reply.headers["content-length"] == str(len(reply.content))


def test_format(client):
    schema = {
        "type": "object",
        "properties": {"high": {"type": "boolean"}},
        "required": ["high"],
        "additionalProperties": False,
    }
    for stream in (False, True):
        reply = client.chat("tiny", MESSAGES, format=schema, options={"seed": 1}, stream=stream)
        text = "".join(part.message.content for part in reply) if stream else reply.message.content
        assert isinstance(json.loads(text)["high"], bool)
    made = client.generate(
        "tiny",
        "x",
        format={"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2},
    )
    assert len(json.loads(made.response)) == 2
    body = {
        "model": "tiny",
        "messages": MESSAGES,
        "format": "json",
        "options": {"num_predict": 1, "seed": 3},
    }
    assert (
        client._client.post("/api/chat", json={**body, "stream": False})
        .json()["message"]["content"]
        .startswith("{")
    )


def test_tools_there_and_back(client):
    """The format makes a random model write a call."""
    for stream in (False, True):
        reply = client.chat(
            "tiny", MESSAGES, tools=[WEATHER], format=CALL, options={"seed": 2}, stream=stream
        )
        parts = list(reply) if stream else [reply]
        calls = [call for part in parts for call in part.message.tool_calls or []]
        assert [call.function.name for call in calls] == ["weather"]
        assert calls[0].function.arguments["at"] in ("Brest", "Hull")
        assert not any(part.message.content for part in parts)
        assert parts[-1].done_reason == "stop"
    answer = {"role": "tool", "tool_name": "weather", "content": "rain"}
    assert client.chat(
        "tiny", [*MESSAGES, parts[0].message, answer], tools=[WEATHER], options=GREEDY
    ).message.content


def test_a_call_that_is_cut_off_is_text(client):
    reply = client.chat("tiny", MESSAGES, tools=[WEATHER], format=CALL, options={"num_predict": 34})
    assert reply.done_reason == "length"
    assert not reply.message.tool_calls
    assert '"weather"' in reply.message.content


def test_a_python_function_is_a_tool(client):
    def weather(at: str) -> str:
        """Tells the weather.

        Args:
          at: the place
        """
        return at

    reply = client.chat("tiny", MESSAGES, tools=[weather], format=CALL, options={"seed": 2})
    assert reply.message.tool_calls[0].function.name == "weather"


def test_an_effort_of_thinking_goes_into_the_prompt(thinker):
    low = thinker.chat("tiny", MESSAGES, think="low", options={"temperature": 0, "num_predict": 1})
    assert low.prompt_eval_count == reply_len(thinker) + len("low")


def reply_len(thinker):
    return thinker.chat("tiny", MESSAGES, options={"num_predict": 1}).prompt_eval_count


def test_generate_is_a_chat_of_one_turn(roomy, client):
    made = client.generate("tiny", "Hello there", options=GREEDY)
    assert made.response == openai_text(roomy)
    assert made.done_reason in ("stop", "length")
    parts = list(client.generate("tiny", "Hello there", options=GREEDY, stream=True))
    assert "".join(part.response for part in parts) == made.response
    assert parts[-1].context == made.context
    system = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    assert client.generate(
        "tiny", "Hello there", system="Be brief.", options=GREEDY
    ).response == openai_text(roomy, messages=system)


def test_generate_continues_a_context(roomy, client):
    first = client.generate("tiny", "Hello there", options=GREEDY)
    assert len(first.context) == first.prompt_eval_count + first.eval_count
    second = client.generate("tiny", "And?", context=first.context, options=GREEDY)
    assert second.context[: len(first.context)] == first.context
    assert second.prompt_eval_count > len(first.context)
    body = {
        "prompt": second.context[: second.prompt_eval_count],
        "temperature": 0,
        "max_tokens": 12,
    }
    same = httpx.post(f"{roomy.url}/v1/completions", json=body).json()["choices"][0]["text"]
    assert second.response == same


def test_generate_raw(roomy, client):
    made = client.generate("tiny", "The tide", raw=True, options=GREEDY)
    body = {"prompt": "The tide", "temperature": 0, "max_tokens": 12}
    assert (
        made.response
        == httpx.post(f"{roomy.url}/v1/completions", json=body).json()["choices"][0]["text"]
    )
    assert made.context is None
    with pytest.raises(ollama.ResponseError, match="raw"):
        client.generate("tiny", "x", raw=True, system="y")
    with pytest.raises(ollama.ResponseError, match="context"):
        client.generate("tiny", "x", context=[2**70])
    with pytest.raises(ollama.ResponseError, match="319"):
        client.generate("tiny", "x", context=[5000])
    with pytest.raises(ollama.ResponseError, match="template"):
        client.generate("tiny", "x", template="{{ .Prompt }}")


@pytest.mark.parametrize("num", [-1, 10**6])
def test_a_response_ends_with_the_context(client, num):
    options = {"temperature": 0, "num_predict": num}
    reply = client.generate("tiny", "x" * 2996, raw=True, options=options)
    assert (reply.done_reason, reply.eval_count) == ("length", 1100)


def test_generate_fills_in_the_middle(thinker, client):
    made = thinker.generate("tiny", "def f(", suffix="return 1", options={"temperature": 0})
    assert (made.response, made.done_reason) == ("xyz", "stop")
    assert made.prompt_eval_count == len("def f(return 1") + 3
    with pytest.raises(ollama.ResponseError, match="suffix is not supported"):
        client.generate("tiny", "def f(", suffix="return 1")


def test_without_a_prompt_the_model_is_loaded(client):
    assert client.generate("tiny").done_reason == "load"
    assert client.chat("tiny", []).done_reason == "load"
    assert [part.done for part in client.generate("tiny", stream=True)] == [True]


def test_embeddings(roomy, client):
    both = client.embed("tiny", ["one", "two"])
    assert len(both.embeddings) == 2
    assert both.prompt_eval_count == 6
    ours = httpx.post(f"{roomy.url}/v1/embeddings", json={"input": "two"}).json()["data"][0][
        "embedding"
    ]
    assert list(both.embeddings[1]) == ours
    assert list(client.embed("tiny", "two").embeddings[0]) == ours
    assert list(client.embeddings("tiny", "two").embedding) == ours
    assert client.embed("tiny", "").embeddings == []
    with pytest.raises(ollama.ResponseError, match="input"):
        client.embed("tiny", ["x"] * 100_000)
    long = "tide " * 20_000
    assert client.embed("tiny", long).prompt_eval_count == 4096
    with pytest.raises(ollama.ResponseError, match="context"):
        client.embed("tiny", long, truncate=False)
    assert len(client.embed("tiny", "two", dimensions=1).embeddings[0]) == 1
    for num in (0, -1):
        with pytest.raises(ollama.ResponseError, match="dimensions"):
            client.embed("tiny", "two", dimensions=num)


def test_models(client, thinker):
    (listed,) = client.list().models
    assert listed.model == "tiny:latest"
    assert len(listed.digest) == 64
    assert listed.size > 0
    assert listed.details.family == "llama"
    (running,) = client.ps().models
    assert running.context_length == 4096
    shown = client.show("tiny")
    assert shown.modelinfo["llama.context_length"] == 4096
    assert shown.capabilities == ["completion", "tools"]
    assert "m['content']" in shown.template
    assert "num_ctx 4096" in shown.parameters
    assert thinker.show("tiny:latest").capabilities == ["completion", "tools", "thinking", "insert"]
    with pytest.raises(ollama.ResponseError, match="tiny"):
        client.show("other")


def test_pull_and_what_cannot_be_changed(client):
    assert client.pull("tiny").status == "success"
    assert [part.status for part in client.pull("tiny:latest", stream=True)] == ["success"]
    with pytest.raises(ollama.ResponseError, match="tidemill serve"):
        client.pull("llama3")
    for refused in (
        lambda: client.create("mine", from_="tiny"),
        lambda: client.copy("tiny", "mine"),
        lambda: client.push("tiny"),
        lambda: client.delete("tiny"),
    ):
        with pytest.raises(ollama.ResponseError, match="does not change models"):
            refused()


def test_greetings(roomy):
    """The page is at /, and clients ask whether anybody is there."""
    assert httpx.head(roomy.url).status_code == 200
    version = httpx.get(f"{roomy.url}/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)
    assert httpx.head(f"{roomy.url}/api/tags").status_code == 200
    unknown = httpx.get(f"{roomy.url}/api/nothing").json()
    assert unknown["error"].startswith("There is no route GET /api/nothing here.")


def test_a_body_without_a_type_is_read_unless_a_page_sends_it(roomy):
    """As Ollama's own examples with curl do."""
    body = json.dumps(
        {"model": "tiny", "prompt": "x", "stream": False, "options": {"num_predict": 1}}
    )
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert httpx.post(f"{roomy.url}/api/generate", content=body, headers=form).status_code == 200
    for page in ({"origin": roomy.url}, {"sec-fetch-site": "cross-site"}):
        refused = httpx.post(f"{roomy.url}/api/generate", content=body, headers=form | page)
        assert refused.status_code == 415
        assert "application/json" in refused.json()["error"]


def test_refusals_of_the_guard_have_the_same_shape(tenants):
    body = {"model": "tiny", "prompt": "x", "options": {"num_predict": 1}}
    refused = httpx.post(f"{tenants.url}/api/generate", json=body)
    assert refused.status_code == 401
    assert "API key is missing" in refused.json()["error"]
    assert httpx.get(f"{tenants.url}/api/tags", headers={"host": "evil.example"}).json()["error"]
    known = ollama.Client(tenants.url, headers={"authorization": f"Bearer {KEYS[0]}"})
    assert known.generate(**body).eval_count == 1


async def test_the_async_client(roomy):
    client = ollama.AsyncClient(roomy.url)
    whole = await client.chat("tiny", MESSAGES, options=GREEDY)
    text = ""
    async for part in await client.chat("tiny", MESSAGES, options=GREEDY, stream=True):
        text += part.message.content
    assert text == whole.message.content
    many = await asyncio.gather(
        *(client.generate("tiny", f"{i}", options=GREEDY) for i in range(8))
    )
    assert all(one.eval_count for one in many)
    await client.close()
