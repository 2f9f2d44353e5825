"""What OpenAI's client and clients of other engines send and read, against `tidemill serve`."""

import base64
import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import torch

from tests.server.conftest import Server
from tidemill.server.api.openai.types import ChatRequest
from tidemill.version import __version__

MESSAGES = [{"role": "user", "content": "Hello there"}]
TIDE = {
    "type": "object",
    "properties": {"port": {"enum": ["Brest", "Hull"]}},
    "required": ["port"],
    "additionalProperties": False,
}
FUNCTIONS = [
    {"name": name, "description": "says when", "parameters": TIDE}
    for name in ("high_water", "low_water")
]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
COMPLETION = {"model": "tiny", "prompt": "x", "max_tokens": 30, "temperature": 0}
CHAT = {"model": "tiny", "messages": MESSAGES, "max_tokens": 30, "temperature": 0}


def client_of(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(roomy):
    return client_of(roomy)


@pytest.fixture(scope="module")
def narrow(roomy_folder, tmp_path_factory):
    """One request at a time, a name with a slash, a template that knows the effort of reasoning,
    comments every 0.1 s."""
    folder = tmp_path_factory.mktemp("narrow") / "model"
    shutil.copytree(roomy_folder, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] = "effort={{ reasoning_effort }} " + settings["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    patch = "from tidemill.server.http import responses\nresponses.KEEP_ALIVE_S = 0.1"
    options = ("--served-name", "org/tiny", "--max-requests", "1", "--trust-request-chat-template")
    running = Server(folder, *options, patch=patch).wait()
    yield running
    assert running.stop() == 0


# ---- fields


def test_fields_that_change_nothing_are_accepted_and_named(client):
    plain = client.chat.completions.create(**CHAT)
    reply = client.chat.completions.with_raw_response.create(
        **CHAT, store=True, metadata={"a": "b"}, service_tier="auto", prompt_cache_key="k", safety_identifier="s", user="u",
        verbosity="low", modalities=["text"], prediction={"type": "content", "content": "x"}, reasoning_effort="low",
        extra_body={
            "prompt_cache_retention": "24h", "stream_options": {"include_usage": True, "include_obfuscation": False},
            "cache_prompt": True, "mirostat": 0, "use_beam_search": False, "logit_bias": None, "tools": None,
        },
    )  # fmt: skip
    assert reply.parse().choices[0].message.content == plain.choices[0].message.content
    assert reply.headers["x-tidemill-ignored"].split(", ") == [
        "cache_prompt", "include_obfuscation", "metadata", "mirostat", "prediction", "reasoning_effort",
        "safety_identifier", "service_tier", "store", "user", "verbosity",
    ]  # fmt: skip
    assert (
        "x-tidemill-ignored"
        not in client.completions.with_raw_response.create(**COMPLETION).headers
    )


def test_completions_take_null_for_absent(client):
    nulls = dict.fromkeys(["max_tokens", "logprobs", "suffix", "stop", "echo", "best_of", "user"])
    given = {name: value for name, value in COMPLETION.items() if name not in nulls}
    assert (
        client.completions.create(
            **given, **nulls, extra_body={"ignore_eos": True}
        ).usage.completion_tokens
        == 16
    )


def test_usage_in_every_chunk(client):
    options = {"continuous_usage_stats": True, "include_usage": True}
    chunks = list(
        client.chat.completions.create(
            **CHAT, stream=True, stream_options=options, extra_body={"ignore_eos": True}
        )
    )
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 30
    assert chunks[-1].choices == []


def test_the_effort_of_reasoning_reaches_a_template_that_knows_it(narrow):
    client = client_of(narrow)
    settings = {"model": "org/tiny", "messages": MESSAGES, "max_tokens": 2}
    reply = client.chat.completions.with_raw_response.create(**settings, reasoning_effort="high")
    assert "x-tidemill-ignored" not in reply.headers
    render = f"{narrow.url}/v1/chat/completions/render"
    assert (
        "effort=high"
        in httpx.post(render, json={"messages": MESSAGES, "reasoning_effort": "high"}).json()[
            "prompt"
        ]
    )


def test_a_template_of_the_request(narrow):
    def render(template):
        body = {"messages": MESSAGES, "chat_template": template}
        return httpx.post(f"{narrow.url}/v1/chat/completions/render", json=body).json()

    made = render("said: {{ messages[0].content }}")
    assert made["prompt"] == "said: Hello there"
    reply = client_of(narrow).chat.completions.create(
        model="org/tiny",
        messages=MESSAGES,
        max_tokens=2,
        extra_body={"chat_template": "said: {{ messages[0].content }}"},
    )
    assert reply.usage.prompt_tokens == len(made["prompt_token_ids"])
    assert render("{% if %}")["error"]["param"] == "chat_template"
    assert (
        render("{% for i in range(10**9) %}{% endfor %}")["error"]["type"]
        == "invalid_request_error"
    )
    assert (
        "effort="
        in httpx.post(
            f"{narrow.url}/v1/chat/completions/render", json={"messages": MESSAGES}
        ).json()["prompt"]
    )


# ---- tools


def streamed(client, **settings):
    """The parts of a message, put together as clients do, and the finish reason."""
    texts, calls, function, reason = "", [], {"name": "", "arguments": ""}, None
    for chunk in client.chat.completions.create(**settings, stream=True):
        delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason or reason
        texts += delta.content or ""
        if delta.function_call:
            function["name"] += delta.function_call.name or ""
            function["arguments"] += delta.function_call.arguments
        for call in delta.tool_calls or []:
            if call.index == len(calls):
                calls.append(call.model_dump(exclude_none=True))
            else:
                calls[call.index]["function"]["arguments"] += call.function.arguments
    return texts, calls, function, reason


def test_functions_as_before_there_were_tools(client):
    settings = {
        "model": "tiny",
        "messages": MESSAGES,
        "functions": FUNCTIONS,
        "max_tokens": 200,
        "seed": 1,
    }
    whole = client.chat.completions.create(**settings, function_call={"name": "low_water"}).choices[
        0
    ]
    assert whole.finish_reason == "function_call"
    assert whole.message.tool_calls is None
    assert whole.message.function_call.name == "low_water"
    assert json.loads(whole.message.function_call.arguments)["port"] in ("Brest", "Hull")
    _, calls, function, reason = streamed(client, **settings, function_call={"name": "low_water"})
    assert (calls, function, reason) == (
        [],
        whole.message.function_call.model_dump(),
        "function_call",
    )
    history = [
        *MESSAGES,
        whole.message.model_dump(),
        {"role": "function", "name": "low_water", "content": "at noon"},
    ]
    again = client.chat.completions.create(
        **settings | {"messages": history, "max_tokens": 5}, function_call="none"
    )
    assert again.choices[0].message.function_call is None


def test_allowed_tools(client, roomy):
    only = {"mode": "required", "tools": [{"type": "function", "function": {"name": "high_water"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": only}
    settings = {
        "model": "tiny",
        "messages": MESSAGES,
        "tools": TOOLS,
        "max_tokens": 300,
        "tool_choice": choice,
    }
    for seed in range(3):
        for call in (
            client.chat.completions.create(**settings, seed=seed).choices[0].message.tool_calls
        ):
            assert call.function.name == "high_water"
    render = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": choice}
    assert (
        "low_water"
        not in httpx.post(f"{roomy.url}/v1/chat/completions/render", json=render).json()["prompt"]
    )
    only["tools"][0]["function"]["name"] = "ebb"
    with pytest.raises(openai.BadRequestError, match="ebb"):
        client.chat.completions.create(**settings)


def test_a_required_call_goes_before_a_response_format(client):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["text"]}}}
    settings = {
        "model": "tiny",
        "messages": MESSAGES,
        "tools": TOOLS,
        "max_tokens": 300,
        "response_format": form,
    }
    choice = {"type": "function", "function": {"name": "low_water"}}
    reply = client.chat.completions.create(**settings, tool_choice=choice).choices[0]
    assert reply.message.tool_calls[0].function.name == "low_water"
    assert client.chat.completions.create(**settings).choices[0].message.content == '"text"'


def test_custom_tools(client, roomy):
    quote = httpx.post(f"{roomy.url}/tokenize", json={"content": '"'}).json()["tokens"][0]
    custom = {
        "type": "custom",
        "custom": {"name": "shell", "description": "runs it", "format": {"type": "text"}},
    }
    settings = {
        "model": "tiny", "messages": MESSAGES, "tools": [custom, *TOOLS], "max_tokens": 300, "seed": 3,
        "tool_choice": {"type": "custom", "custom": {"name": "shell"}}, "logit_bias": {str(quote): 4},
    }  # fmt: skip
    whole = client.chat.completions.create(**settings).choices[0]
    assert whole.finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls
    assert (call.type, call.custom.name) == ("custom", "shell")
    assert not call.custom.input.startswith("{")
    _, calls, _, reason = streamed(client, **settings)
    assert (calls[0]["custom"], reason) == (call.custom.model_dump(), "tool_calls")
    history = [
        *MESSAGES,
        whole.message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    prompt = httpx.post(
        f"{roomy.url}/v1/chat/completions/render", json={"messages": history, "tools": [custom]}
    ).json()["prompt"]
    assert '{"input":' in prompt
    cut = client.chat.completions.create(
        **settings | {"max_tokens": 60, "logit_bias": {str(quote): -100}}
    ).choices[0]
    assert cut.finish_reason == "length"
    assert '"input"' not in cut.message.tool_calls[0].custom.input
    custom["custom"]["format"] = {
        "type": "grammar",
        "grammar": {"syntax": "regex", "definition": "[0-9]{3}"},
    }
    (call,) = client.chat.completions.create(**settings).choices[0].message.tool_calls
    assert re.fullmatch("[0-9]{3}", call.custom.input)
    custom["custom"]["format"]["grammar"]["syntax"] = "lark"
    with pytest.raises(openai.BadRequestError, match="lark grammar cannot be enforced"):
        client.chat.completions.create(**settings)


def test_what_is_sent_is_taken_back(client, roomy):
    """As the client dumps it, with what other libraries add."""
    choice = {"type": "function", "function": {"name": "low_water"}}
    reply = client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice=choice, max_tokens=200
    )
    message = reply.choices[0].message.model_dump()
    assert {"annotations", "audio", "function_call", "refusal"} <= message.keys()
    message["tool_calls"][0] |= {"index": 0, "provider_specific_fields": {"a": 1}}
    message |= {
        "reasoning": "hm",
        "reasoning_content": "hm",
        "provider_specific_fields": {"b": 2},
        "annotations": [],
    }
    result = {
        "role": "tool",
        "tool_call_id": message["tool_calls"][0]["id"],
        "content": [{"type": "text", "text": "at noon"}],
    }
    again = client.chat.completions.create(
        model="tiny", messages=[*MESSAGES, message, result], tools=TOOLS, max_tokens=3
    )
    assert again.choices[0].finish_reason
    for said in (
        {"refusal": "I cannot"},
        {"content": [{"type": "refusal", "refusal": "I cannot"}]},
    ):
        body = {"messages": [*MESSAGES, {"role": "assistant", **said}]}
        assert (
            "I cannot"
            in httpx.post(f"{roomy.url}/v1/chat/completions/render", json=body).json()["prompt"]
        )
    image = {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}],
    }
    with pytest.raises(openai.BadRequestError, match="image_url"):
        client.chat.completions.create(model="tiny", messages=[image])


# ---- names of other engines


@pytest.mark.parametrize(
    ("body", "fits"),
    [
        ({"guided_json": TIDE}, lambda text: json.loads(text)["port"] in ("Brest", "Hull")),
        (
            {"guided_json": json.dumps(TIDE)},
            lambda text: json.loads(text)["port"] in ("Brest", "Hull"),
        ),
        ({"guided_regex": "[ab]{3}"}, lambda text: len(text) == 3 and set(text) <= set("ab")),
        ({"guided_choice": ["ebb", "flood"]}, lambda text: text in ("ebb", "flood")),
        ({"guided_grammar": 'start: "<" ("a" | "b") ">"'}, lambda text: text in ("<a>", "<b>")),
        ({"regex": "[ab]{3}"}, lambda text: len(text) == 3 and set(text) <= set("ab")),
        ({"ebnf": 'root ::= "<" ("a" | "b") ">"'}, lambda text: text in ("<a>", "<b>")),
        ({"grammar": 'root ::= "<" ("a" | "b") ">"'}, lambda text: text in ("<a>", "<b>")),
        ({"json_schema": TIDE}, lambda text: json.loads(text)["port"] in ("Brest", "Hull")),
        (
            {"json_schema": json.dumps(TIDE)},
            lambda text: json.loads(text)["port"] in ("Brest", "Hull"),
        ),
        (
            {"response_format": {"type": "json_object", "schema": TIDE}},
            lambda text: json.loads(text)["port"] in ("Brest", "Hull"),
        ),
        (
            {"response_format": {"type": "json_schema", "schema": TIDE}},
            lambda text: json.loads(text)["port"] in ("Brest", "Hull"),
        ),
    ],
)
def test_spellings_of_structured_output(client, body, fits):
    reply = client.completions.create(
        model="tiny", prompt="x", max_tokens=100, seed=5, extra_body=body
    ).choices[0]
    assert reply.finish_reason == "stop"
    assert fits(reply.text)


def test_spellings_of_parameters(client):
    def text(**body):
        settings = {"model": "tiny", "prompt": "abcabc", "temperature": 0}
        return (
            client.completions.create(**settings, extra_body={"ignore_eos": True} | body)
            .choices[0]
            .text
        )

    assert (
        text(repeat_penalty=1.7, max_tokens=20)
        == text(repetition_penalty=1.7, max_tokens=20)
        != text(max_tokens=20)
    )
    assert text(n_predict=20) == text(max_tokens=20)
    messages = [{"role": "user", "content": "x"}]
    for name in ("max_tokens", "max_completion_tokens"):
        with pytest.raises(openai.BadRequestError, match="differ"):
            client.chat.completions.create(
                model="tiny", messages=messages, extra_body={"n_predict": 4, name: 5}
            )


def test_allowed_tokens_and_bad_words(client):
    settings = {"model": "tiny", "prompt": "abc", "max_tokens": 40, "temperature": 0}
    extra = {"ignore_eos": True, "return_token_ids": True}
    free = client.completions.create(**settings, extra_body=extra).choices[0]
    allowed = sorted(set(free.token_ids))[:3]
    some = client.completions.create(
        **settings, extra_body=extra | {"allowed_token_ids": allowed}
    ).choices[0]
    assert set(some.token_ids) <= set(allowed)
    with pytest.raises(openai.BadRequestError, match="No token is left"):
        client.completions.create(
            **settings, extra_body={"allowed_token_ids": [1], "min_tokens": 3}
        )
    word = next(free.text[i : i + 2] for i in range(30) if free.text[i : i + 2].isascii())

    def without(_: int = 0) -> str:
        return (
            client.completions.create(**settings, extra_body=extra | {"bad_words": [word]})
            .choices[0]
            .text
        )

    alone = without()
    assert word not in alone
    assert set(word) & set(alone)  # each character may come, only not after the other
    with ThreadPoolExecutor(4) as threads:
        others = [
            threads.submit(
                client.completions.create, **settings, seed=i, extra_body={"ignore_eos": True}
            )
            for i in range(2)
        ]
        assert list(threads.map(without, range(2))) == [alone] * 2
        assert {one.result().choices[0].text for one in others} == {free.text}


def test_the_end_of_a_prompt(client):
    ids = list(range(40, 140))
    settings = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    short = client.completions.create(**settings, prompt=ids[-30:])
    cut = client.completions.create(
        **settings, prompt=ids, extra_body={"truncate_prompt_tokens": 30}
    )
    assert (cut.usage.prompt_tokens, cut.choices[0].text) == (30, short.choices[0].text)
    long = [60] * 5000
    assert (
        client.completions.create(
            **settings, prompt=long, extra_body={"truncate_prompt_tokens": -1}
        ).usage.prompt_tokens
        == 4088
    )


def test_token_ids_are_returned(client):
    extra = {"return_token_ids": True, "return_tokens_as_token_ids": True, "ignore_eos": True}
    settings = {
        "model": "tiny",
        "prompt": [70, 71, 72],
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": 1,
        "extra_body": extra,
    }
    whole = client.completions.create(**settings).choices[0]
    assert whole.prompt_token_ids == [70, 71, 72]
    assert whole.logprobs.tokens == [f"token_id:{token}" for token in whole.token_ids]
    chunks = [chunk.choices[0] for chunk in client.completions.create(**settings, stream=True)]
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert chunks[0].prompt_token_ids == [70, 71, 72]
    chat = client.chat.completions.create(**CHAT, extra_body=extra)
    assert len(chat.choices[0].token_ids) == 30
    chunks = list(client.chat.completions.create(**CHAT, stream=True, extra_body=extra))
    assert chunks[0].prompt_token_ids == chat.prompt_token_ids
    told = [
        token
        for chunk in chunks
        for choice in chunk.choices
        for token in getattr(choice, "token_ids", None) or []
    ]
    assert told == chat.choices[0].token_ids


# ---- embeddings, tokens, models


def test_many_embeddings_and_fewer_dimensions(client):
    texts = [f"text {i % 7}" for i in range(2048)]
    reply = client.embeddings.create(model="tiny", input=texts, dimensions=8)
    assert [one.index for one in reply.data] == list(range(2048))
    full = client.embeddings.create(model="tiny", input=texts[:3]).data
    for short, whole in zip(reply.data[:3], full, strict=True):
        first = torch.tensor(whole.embedding[:8])
        assert torch.allclose(torch.tensor(short.embedding), first / first.norm(), atol=1e-5)
    assert reply.data[7].embedding == reply.data[0].embedding
    coded = (
        client.embeddings.create(
            model="tiny", input=[[70, 71]], dimensions=8, encoding_format="base64"
        )
        .data[0]
        .embedding
    )
    assert len(base64.b64decode(coded)) == 32
    with pytest.raises(openai.BadRequestError, match="2048"):
        client.embeddings.create(model="tiny", input=["x"] * 2049)


def test_tokens_as_other_servers_tell_them(roomy):
    def ask(route, **body):
        return httpx.post(f"{roomy.url}{route}", json=body).json()

    told = ask("/tokenize", content="Flüt", with_pieces=True)["tokens"]
    assert [one["piece"] for one in told[:2]] == ["F", "l"]
    assert all(isinstance(one["piece"], list) for one in told[2:4])  # halves of ü
    ids = [one["id"] for one in told]
    assert ask("/detokenize", tokens=ids)["content"] == "Flüt"
    assert ask("/tokenize", prompt="ebb", add_special_tokens=False, return_token_strs=True)[
        "token_strs"
    ] == ["e", "b", "b"]
    chat = {"messages": MESSAGES, "tools": TOOLS}
    whole = ask("/v1/chat/completions/render", **chat)["prompt_token_ids"]
    assert ask("/tokenize", **chat)["tokens"] == whole
    assert ask("/tokenize", **chat, add_generation_prompt=False)["count"] < len(whole)
    assert ask("/tokenize", messages=MESSAGES)["count"] < len(whole)


def test_models_with_a_slash_in_their_name(narrow):
    assert client_of(narrow).models.retrieve("org/tiny").id == "org/tiny"
    for path in ("org/tiny", "org%2Ftiny", "org%2ftiny"):
        assert httpx.get(f"{narrow.url}/v1/models/{path}").json()["id"] == "org/tiny"
    assert httpx.get(f"{narrow.url}/v1/models/org%2Fother").status_code == 404
    assert httpx.get(f"{narrow.url}/version").json() == {"version": __version__}


# ---- waiting

LONG = {"prompt": "x", "max_tokens": 4000, "n": 100, "ignore_eos": True, "stream": True}


def test_a_request_that_waits_gets_headers_and_comments(narrow):
    """There is one slot. The first request holds it until it is cancelled."""
    routes = {
        "/v1/completions": {"prompt": "x", "max_tokens": 3},
        "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3},
        "/v1/messages": {"model": "org/tiny", "messages": MESSAGES, "max_tokens": 3},
        "/v1/responses": {"model": "org/tiny", "input": "x", "max_output_tokens": 3},
    }
    for route, body in routes.items():
        with httpx.stream(
            "POST", f"{narrow.url}/v1/completions", json=LONG, headers={"X-Request-Id": "long"}
        ) as first:
            held = first.iter_lines()  # kept: when it goes, so does the connection
            next(held)
            with httpx.stream(
                "POST", f"{narrow.url}{route}", json=body | {"stream": True}
            ) as second:
                assert second.status_code == 200
                lines = second.iter_lines()
                for line in lines:
                    if line.startswith(":"):
                        break
                    assert '"text":"' not in line  # nothing was computed so far
                assert httpx.delete(f"{narrow.url}/v1/requests/long").status_code == 200
                assert any(
                    "stop" in line or "length" in line or "complete" in line for line in lines
                )


def test_refusals_have_a_status_and_later_errors_are_events(narrow):
    short = {"prompt": "x", "max_tokens": 3, "timeout": 0.3}
    with httpx.stream("POST", f"{narrow.url}/v1/completions", json=LONG) as first:
        lines = first.iter_lines()
        next(lines)
        assert (
            httpx.post(
                f"{narrow.url}/v1/completions", json={"prompt": ["a", "x" * 5000], "stream": True}
            ).status_code
            == 400
        )
        late = httpx.post(f"{narrow.url}/v1/completions", json=short)
        assert (late.status_code, late.headers["x-should-retry"]) == (408, "false")
        with httpx.stream(
            "POST", f"{narrow.url}/v1/completions", json=short | {"stream": True, "timeout": 1}
        ) as streaming:
            assert streaming.status_code == 200
            told = [line for line in streaming.iter_lines() if line.startswith("data: {")]
        assert json.loads(told[-1][6:])["error"]["type"] == "deadline_exceeded"
        client = openai.OpenAI(base_url=f"{narrow.url}/v1", api_key="none", max_retries=3)
        with pytest.raises(openai.APIStatusError) as caught:  # after one attempt
            client.completions.with_raw_response.create(
                model="org/tiny", prompt="x", extra_body={"timeout": 0.3}
            )
        assert caught.value.response.request.headers["x-stainless-retry-count"] == "0"


def test_every_alias_of_the_chat_is_in_the_description(roomy):
    spec = httpx.get(f"{roomy.url}/openapi.json").json()
    body = spec["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"][
        "application/json"
    ]["schema"]
    assert {field.alias or name for name, field in ChatRequest.model_fields.items()} == body[
        "properties"
    ].keys()
