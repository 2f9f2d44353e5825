"""The official client against `tidemill serve`."""

import base64
import json
import socket

import httpx
import openai
import pytest
import torch

from tests.server.conftest import Server
from tests.waiting import until
from tidemill.engine.llm import LLM
from tidemill.server.api import refused
from tidemill.types.sampling import SamplingParams

MESSAGES = [{"role": "user", "content": "Hello there"}]


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def llm(tiny_folder):
    return LLM(str(tiny_folder), progress=False)


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat_completion_equals_the_offline_engine(client, llm):
    reply = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=12, temperature=0, logprobs=True, top_logprobs=2
    )
    offline = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=12, logprobs=2))[0]
    choice = reply.choices[0]
    assert choice.message.content == offline.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == offline.outputs[0].finish_reason
    assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(
        [e.logprob for e in offline.outputs[0].logprobs]
    )
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    assert reply.usage.prompt_tokens == len(offline.prompt_token_ids)
    assert reply.usage.completion_tokens == len(offline.outputs[0].token_ids)


def test_completions_of_many_prompts(client, llm):
    prompts = ["abc", "Hello world", [70, 71, 72]]
    reply = client.completions.create(
        model="tiny", prompt=prompts[:2], max_tokens=6, temperature=0, n=1, logprobs=2
    )
    offline = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6, logprobs=2))
    assert [choice.text for choice in reply.choices] == [output.text for output in offline[:2]]
    assert len(reply.choices[0].logprobs.tokens) == len(offline[0].outputs[0].token_ids)
    ids = client.completions.create(model="tiny", prompt=[70, 71, 72], max_tokens=6, temperature=0)
    assert ids.choices[0].text == offline[2].text
    streamed = [""] * 4
    for chunk in client.completions.create(
        model="tiny", prompt=prompts[:2], max_tokens=6, n=2, seed=3, stream=True
    ):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    whole = client.completions.create(model="tiny", prompt=prompts[:2], max_tokens=6, n=2, seed=3)
    assert streamed == [choice.text for choice in whole.choices]


def test_a_client_that_leaves_frees_its_pages(server, client):
    def idle() -> bool:
        return server.gauge("requests_running") == 0 and server.gauge("requests_waiting") == 0

    until(idle)
    free = server.gauge("kv_pages_free")
    long = {"prompt": "go", "max_tokens": 480, "n": 32, "ignore_eos": True}
    stream = client.completions.create(
        model="tiny",
        prompt="go",
        max_tokens=480,
        n=32,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    assert server.gauge("requests_running") > 0
    finished = server.gauge("output_tokens_total")
    stream.close()
    until(idle)
    assert server.gauge("kv_pages_free") == free
    body = json.dumps(long).encode()  # the same for a response that is not streamed
    head = (
        "POST /v1/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall("\r\n".join([*head, "", ""]).encode() + body)
        until(lambda: server.gauge("requests_running") > 0)
    until(idle)
    assert server.gauge("kv_pages_free") == free
    # neither was computed to its end
    assert server.gauge("output_tokens_total") < finished + 2 * 32 * 480


BAD_COMPLETIONS = [
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [[]]}, "prompt", "empty"),
    ({"prompt": [1, -5]}, "prompt", "-5"),
    ({"prompt": [99999]}, "prompt", "0 to 319"),
    ({"prompt": [2**40]}, "prompt", "0 to 319"),
    ({"prompt": [2**70]}, "prompt", ""),
    ({"prompt": "x" * 600}, "prompt", "maximum context length is 512 tokens"),
    ({"prompt": "x" * 5_000_000}, "prompt", "characters"),
    ({"prompt": [1.5] * 300_000}, "prompt", "at most 256"),
    ({"prompt": [[0.5]] * 30_000}, "prompt", ""),
    ({"prompt": [1.5, "a"]}, "prompt", "list of token ids"),
    ({"prompt": ["a"] * 20, "n": 100}, "n", "at most 256"),
    ({"prompt": {"a": 1}}, "prompt", ""),
    ({"prompt": None}, "prompt", ""),
    ({"prompt": ["a"] * 300}, "prompt", "300 prompts"),
    ({}, "prompt", "required"),
    ({"prompt": "x", "max_tokens": 600}, "max_tokens", "511"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens", "1"),
    ({"prompt": "x", "max_tokens": "5"}, "max_tokens", ""),
    ({"prompt": "x", "temperature": -1}, "temperature", "from 0"),
    ({"prompt": "x", "temperature": 1e300}, "temperature", ""),
    ({"prompt": "x", "temperature": "hot"}, "temperature", ""),
    ({"prompt": "x", "top_p": 0}, "top_p", "above 0"),
    ({"prompt": "x", "top_p": True}, "top_p", ""),
    ({"prompt": "x", "n": 0}, "n", ""),
    ({"prompt": "x", "n": 2**31}, "n", ""),
    # pydantic's name of it, as vLLM tells it
    ({"prompt": "x", "seed": 2**63}, "seed", "(less_than_equal)"),
    ({"prompt": "x", "seed": -(2**63) - 1}, "seed", "(greater_than_equal)"),
    (
        {"prompt": "x", "truncation_side": "z" * 999},
        "truncation_side",
        f"; got '{'z' * 100}' (literal_error).",
    ),
    (
        {"prompt": "x", "truncation_side": [["left"] * 999]},
        "truncation_side",
        "'right' (literal_error).",
    ),
    ({"prompt": "x", "logprobs": 1000}, "logprobs", "20"),
    ({"prompt": "x", "logit_bias": {"one": 1}}, "logit_bias", "token ids"),
    ({"prompt": "x", "logit_bias": {"5000": 1}}, "logit_bias", "5000"),
    ({"prompt": "x", "stop": ["a", ""]}, "stop", ""),
    ({"prompt": "x", "stop_token_ids": [-1]}, "stop_token_ids", ""),
    ({"prompt": "x", "stream_options": {"nonsense": True}}, "stream_options", "not supported"),
    ({"prompt": "x", "mirostat": 2}, "mirostat", "not supported"),
    ({"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids", ""),
    ({"prompt": "x", "allowed_token_ids": [5000]}, "allowed_token_ids", "5000"),
    ({"prompt": "x", "bad_words": [""]}, "bad_words", ""),
    ({"prompt": "x", "bad_words": ["w" * 100]}, "bad_words", "32 tokens"),
    ({"prompt": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "1 or more"),
    ({"prompt": "x", "repetition_penalty": 1.1, "repeat_penalty": 1.2}, "repeat_penalty", "differ"),
    ({"prompt": "x", "max_tokens": 3, "n_predict": 4}, "n_predict", "differ"),
    ({"prompt": "x", "guided_regex": "a", "ebnf": "b"}, "ebnf", "both given"),
    ({"prompt": "x", "no_such_parameter": 1}, "no_such_parameter", "not supported"),
    ({"prompt": "x", "temprature": 1}, "temprature", "Did you mean temperature?"),
    ({"prompt": "x", "suffix": "y"}, "suffix", "not supported"),
    ({"prompt": "x", "priority": 2**40}, "priority", ""),
    ({"prompt": "x", "model": "other"}, "model", "tiny"),
    (
        {"prompt": [[5] * 500] * 64, "prompt_logprobs": 20},
        "prompt_logprobs",
        "524,288 fit one response",
    ),
    (
        {"prompt": [[5] * 500] * 64, "echo": True, "logprobs": 20},
        "echo",
        "524,288 fit one response",
    ),
]


@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_are_refused_by_name_and_the_next_works(server, client, stream):
    for body, param, words in BAD_COMPLETIONS:
        reply = httpx.post(
            f"{server.url}/v1/completions",
            json=body | ({"stream": True} if stream else {}),
        )
        assert reply.status_code in (400, 404), (body, reply.status_code)
        error = reply.json()["error"]
        assert error["param"] == param, (str(body)[:100], error)
        assert words in error["message"], (str(body)[:100], error)
    assert (
        client.completions.create(model="tiny", prompt="x", max_tokens=2).choices[0].finish_reason
    )


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"text"', b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "\\ud800"}', b"\xff\xfe",
        b"[" * 50_000, b'{"prompt": "x", "temperature": 1e999}',
    ],
)  # fmt: skip
def test_bad_bodies(server, body):
    reply = httpx.post(
        f"{server.url}/v1/completions", content=body, headers={"Content-Type": "application/json"}
    )
    assert reply.status_code == 400
    assert reply.json()["error"]["message"]


def test_only_json_of_bounded_size_is_read(server):
    plain = httpx.post(
        f"{server.url}/v1/completions",
        content=b'{"prompt": "x"}',
        headers={"Content-Type": "text/plain"},
    )
    assert plain.status_code == 415
    assert "application/json" in plain.json()["error"]["message"]
    large = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x" * 9_000_000})
    assert large.status_code == 413
    ids = httpx.post(f"{server.url}/v1/completions", json={"prompt": [5] * (2**19 + 2)})
    assert ids.status_code == 413
    assert (
        "524288 items. Send less at once; a longer prompt as text" in ids.json()["error"]["message"]
    )


def test_error_codes_that_clients_look_for(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x" * 600)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="nope", prompt="x")
    assert missing.value.code == "model_not_found"


def test_bad_chats(server, client):
    for body, param in [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}, {"content": "x"}]}, "messages"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            "messages",
        ),
        ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"messages": MESSAGES, "functions": [{"name": "f"}], "tools": TOOLS}, "functions"),
        ({"messages": MESSAGES, "modalities": ["text", "audio"]}, "modalities"),
        ({"messages": MESSAGES, "audio": {"voice": "alloy", "format": "wav"}}, "audio"),
        ({"messages": MESSAGES, "web_search_options": {}}, "web_search_options"),
        ({"messages": MESSAGES, "documents": [{"text": "x"}]}, "documents"),
        ({"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}
                ]
            },
            "messages",
        ),
        ({"messages": MESSAGES, "tools": [{"type": "web_search"}]}, "tools"),
        ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
        ({"messages": MESSAGES, "tool_choice": "sometimes"}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "prompt"),
    ]:
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=body)
        assert reply.status_code == 400, body
        assert reply.json()["error"]["param"] == param
    assert client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=2
    ).choices


def test_unknown_routes_and_methods(server):
    assert httpx.get(f"{server.url}/v1/nothing").status_code == 404
    doubled = httpx.post(f"{server.url}/v1/v1/chat/completions", json={})
    assert "Did you mean /v1/chat/completions?" in doubled.json()["error"]["message"]
    reply = httpx.get(f"{server.url}/v1/completions")
    assert reply.status_code == 405
    assert "Use POST." in reply.json()["error"]["message"]
    assert reply.json()["error"]["message"]


def test_metrics_come_from_events(server, client):
    before = server.gauge("output_tokens_total")
    client.completions.create(
        model="tiny", prompt="count me", max_tokens=7, extra_body={"ignore_eos": True}
    )
    assert server.gauge("output_tokens_total") == before + 7
    text = httpx.get(f"{server.url}/metrics").text
    assert "tidemill_time_to_first_token_seconds_bucket" in text
    assert 'tidemill_requests_finished_total{reason="length"}' in text


async def test_many_at_once_equal_one_by_one(server):
    import asyncio

    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none")

    async def ask(i: int) -> str:
        reply = await client.completions.create(
            model="tiny", prompt=f"request {i} ", max_tokens=16, seed=i, temperature=0.8
        )
        return reply.choices[0].text

    together = await asyncio.gather(*(ask(i) for i in range(24)))
    apart = [await ask(i) for i in range(24)]
    assert together == apart
    assert len(set(together)) > 12


def test_the_description_lists_the_parameters(server):
    spec = httpx.get(f"{server.url}/openapi.json").json()
    body = spec["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    assert "temperature" in json.dumps(body)


SHAPE = {
    "type": "object",
    "properties": {
        "mill": {"enum": ["tide", "wind"]},
        "wheels": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["mill", "wheels"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("grammar", "fits"),
    [
        ({"regex": "[a-c]{4}"}, lambda text: len(text) == 4 and set(text) <= set("abc")),
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"grammar": 'start: "<" ("a" | "b") ">"'}, lambda text: text in ("<a>", "<b>")),
        ({"json": SHAPE}, lambda text: set(json.loads(text)) == {"mill", "wheels"}),
    ],
)
def test_structured_outputs(client, grammar, fits):
    body = {"structured_outputs": grammar}
    reply = client.completions.create(
        model="tiny", prompt="x", max_tokens=100, logprobs=1, extra_body=body
    )
    assert fits(reply.choices[0].text)
    assert reply.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "body",
    [
        {"structured_outputs": {}},
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"nonsense": "a"}},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_schema"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"type": "nonsense"}},
            }
        },
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
    ],
)
def test_grammars_that_cannot_be_compiled(client, body):
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt="x", extra_body=body)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "says when",
            "parameters": {
                "type": "object",
                "properties": {
                    "port": {"enum": ["Brest", "Hull"]},
                    "day": {"type": "integer", "minimum": 1, "maximum": 31},
                },
                "required": ["port", "day"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("high_water", "low_water")
]


def client_of(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_tools_go_into_the_prompt_and_back(roomy):
    """A conversation with calls and their results is a prompt; `none` leaves the tools out."""
    client = client_of(roomy)
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "high_water", "arguments": '{"port": "Brest"}'},
    }
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "call_1", "content": "at noon"})
    render = f"{roomy.url}/v1/chat/completions/render"
    told = httpx.post(render, json={"messages": messages, "tools": TOOLS}).json()
    assert "low_water" in told["prompt"]
    assert "at noon" in told["prompt"]
    assert '"port": "Brest"' in told["prompt"]
    assert (
        "low_water"
        not in httpx.post(
            render, json={"messages": MESSAGES, "tools": TOOLS, "tool_choice": "none"}
        ).json()["prompt"]
    )
    reply = client.chat.completions.create(
        model="tiny", messages=messages, tools=TOOLS, max_tokens=5
    )
    assert reply.choices[0].message.content is not None
    assert reply.usage.prompt_tokens == len(told["prompt_token_ids"])


def test_continue_the_last_message(server):
    body = {
        "messages": [*MESSAGES, {"role": "assistant", "content": "The tide"}],
        "continue_final_message": True,
    }
    assert (
        httpx.post(f"{server.url}/v1/chat/completions/render", json=body)
        .json()["prompt"]
        .endswith("The tide")
    )
    reply = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "max_tokens": 3})
    assert reply.status_code == 200


def test_tokenize_and_back(server):
    told = httpx.post(f"{server.url}/tokenize", json={"prompt": "Ebbe und Flüt"}).json()
    assert told["count"] == len(told["tokens"])
    assert (
        "Ebbe und Flüt"
        in httpx.post(f"{server.url}/detokenize", json={"tokens": told["tokens"]}).json()["prompt"]
    )
    assert httpx.post(f"{server.url}/tokenize", json={"messages": MESSAGES}).json()["count"] > 3
    for wrong in ({}, {"prompt": "x", "messages": MESSAGES}, {"prompt": 3}):
        assert httpx.post(f"{server.url}/tokenize", json=wrong).status_code == 400
    for tokens in ([-1], [10**9], ["x"], None):
        assert httpx.post(f"{server.url}/detokenize", json={"tokens": tokens}).status_code == 400


def test_echo_scores_the_prompt(client, llm):
    ids = llm.generate(
        [[5, 6, 7, 8]], SamplingParams(temperature=0, max_tokens=3, logprobs=1, prompt_logprobs=1)
    )[0]
    settings = {
        "model": "tiny",
        "prompt": [5, 6, 7, 8],
        "temperature": 0,
        "echo": True,
        "logprobs": 1,
    }
    whole = client.completions.create(**settings, max_tokens=3).choices[0]
    only = client.completions.create(**settings, max_tokens=0).choices[0]
    assert whole.text == only.text + ids.text
    assert whole.logprobs.token_logprobs[0] is None
    expected = [entry.logprob for entry in ids.prompt_logprobs[1:]] + [
        entry.logprob for entry in ids.outputs[0].logprobs
    ]
    assert whole.logprobs.token_logprobs[1:] == pytest.approx(expected)
    assert only.logprobs.token_logprobs[1:] == pytest.approx(expected[:3])
    assert len(only.logprobs.tokens) == 4
    streamed = list(client.completions.create(**settings, max_tokens=3, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.text
    told = [value for chunk in streamed for value in chunk.choices[0].logprobs.token_logprobs]
    assert told == whole.logprobs.token_logprobs


def test_prompt_logprobs(client):
    reply = client.completions.create(
        model="tiny", prompt=[5, 6, 7], max_tokens=1, extra_body={"prompt_logprobs": 2}
    )
    first, *others = reply.choices[0].prompt_logprobs
    assert first is None
    assert [str(token) in told for token, told in zip((6, 7), others, strict=True)] == [True, True]
    assert all(2 <= len(told) <= 3 for told in others)


def test_best_of(client):
    settings = {
        "model": "tiny",
        "prompt": "x",
        "max_tokens": 5,
        "seed": 3,
        "temperature": 1.5,
        "logprobs": 0,
    }
    every = client.completions.create(**settings, n=6).choices
    best = client.completions.create(**settings, n=2, best_of=6)
    means = sorted(
        (sum(one.logprobs.token_logprobs) / len(one.logprobs.token_logprobs) for one in every),
        reverse=True,
    )
    sent = [
        sum(one.logprobs.token_logprobs) / len(one.logprobs.token_logprobs) for one in best.choices
    ]
    assert sent == pytest.approx(means[:2])
    assert best.usage.completion_tokens == sum(len(one.logprobs.tokens) for one in every)
    for wrong in ({"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(**settings | wrong)


def test_beam_search(client, server):
    settings = {"model": "tiny", "prompt": "x", "max_tokens": 6, "logprobs": 1}
    beams = {
        "use_beam_search": True,
        "length_penalty": 0.0,
        "early_stopping": True,
        "best_of": 4,
        "return_token_ids": True,
    }
    reply = client.completions.create(**settings, n=2, extra_body=beams)
    sums = [sum(one.logprobs.token_logprobs) for one in reply.choices]
    assert sums == sorted(sums, reverse=True)
    assert reply.usage.completion_tokens == sum(len(one.token_ids) for one in reply.choices)
    every = client.completions.create(**settings, n=4, extra_body=beams | {"best_of": None}).choices
    assert [one.text for one in every[:2]] == [one.text for one in reply.choices]
    assert len({tuple(one.token_ids) for one in every}) == 4
    diverse = beams | {"best_of": None, "num_beam_groups": 4, "diversity_penalty": 100.0}
    grouped = client.completions.create(**settings, n=4, extra_body=diverse).choices
    # one beam a group, each beginning with another token
    assert len({one.token_ids[0] for one in grouped}) == 4
    (story,) = httpx.get(f"{server.url}/v1/requests/{reply.id}/explain").json()["data"]
    assert story["beams"]["width"] == 4
    assert story["beams"]["reorderings"] >= 1
    assert story["beams"]["forks"] >= 3
    assert sum(span["percent"] for span in story["spans"]) == pytest.approx(100, abs=0.1)
    chat = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4}
    made = client.chat.completions.create(
        **chat, n=3, extra_body={"use_beam_search": True, "best_of": 4}
    )
    assert len(made.choices) == 3


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"use_beam_search": True, "stream": True}, "stream"),
        ({"use_beam_search": True, "n": 17}, "n"),
        ({"use_beam_search": True, "n": -1}, "n"),
        ({"use_beam_search": True, "n": 3, "best_of": 2}, "best_of"),
        ({"use_beam_search": True, "presence_penalty": 1.0}, "presence_penalty"),
        ({"use_beam_search": True, "guided_regex": "a+"}, "grammar"),
        ({"use_beam_search": True, "stop": "x"}, "stop"),
        ({"use_beam_search": True, "early_stopping": "soon"}, "early_stopping"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"num_beam_groups": 2}, "num_beam_groups"),
        (
            {"use_beam_search": True, "n": 4, "num_beam_groups": 3, "diversity_penalty": 1},
            "num_beam_groups",
        ),
        ({"use_beam_search": True, "n": 4, "num_beam_groups": 2}, "diversity_penalty"),
        ({"early_stopping": True}, "early_stopping"),
    ],
)
def test_wrong_beams(server, given, param):
    for route, asked in (
        ("completions", {"prompt": "x"}),
        ("chat/completions", {"messages": MESSAGES}),
    ):
        body = {"model": "tiny", "max_tokens": 4} | asked | given
        reply = httpx.post(f"{server.url}/v1/{route}", json=body)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == param


def test_timings(client):
    settings = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 5,
        "extra_body": {"timings": True},
    }
    told = client.chat.completions.create(**settings).timings
    assert 0 < told["first_token_ms"] <= told["total_ms"]
    assert told["prefill_ms"] > 0
    assert [
        chunk.timings
        for chunk in client.chat.completions.create(**settings, stream=True)
        if hasattr(chunk, "timings")
    ]


def test_every_sampling_parameter_is_taken(client):
    extra = {
        "top_k": 5, "min_p": 0.01, "typical_p": 0.9, "repetition_penalty": 1.1, "min_tokens": 2, "stop_token_ids": [3],
        "ignore_eos": True, "include_stop_str_in_output": True, "skip_special_tokens": False, "priority": 1, "timeout": 600,
    }  # fmt: skip
    reply = client.completions.create(
        model="tiny", prompt="x", max_tokens=4, temperature=0.7, top_p=0.9, presence_penalty=0.5, frequency_penalty=0.5,
        logit_bias={"5": 2}, seed=1, n=2, stop=["zzz"], logprobs=1, user="me", extra_body=extra,
    )  # fmt: skip
    assert len(reply.choices) == 2
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(model="tiny", prompt="x", suffix="y")


def test_structured_outputs_by_xgrammar(tiny_folder):
    running = Server(tiny_folder, "--structured-backend", "xgrammar").wait()
    try:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        settings = {"model": "tiny", "prompt": "x", "max_tokens": 100, "seed": 1, "n": 2}
        form = {
            "type": "object",
            "properties": {"n": {"enum": [1, 2]}},
            "required": ["n"],
            "additionalProperties": False,
        }
        for choice in client.completions.create(
            **settings, extra_body={"structured_outputs": {"json": form}}
        ).choices:
            assert json.loads(choice.text)["n"] in (1, 2)
            assert choice.finish_reason == "stop"
        with pytest.raises(openai.BadRequestError, match="parenthesis"):
            client.completions.create(**settings, extra_body={"structured_outputs": {"regex": "("}})
    finally:
        assert running.stop() == 0


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_equal_transformers(client, tiny_folder, pooling):
    from transformers import AutoModel

    model = AutoModel.from_pretrained(tiny_folder).eval()
    prompts = [[5, 6, 7, 8], list(range(20, 120)), [9]]
    for form in ("float", "base64"):
        reply = client.embeddings.create(
            model="tiny", input=prompts, encoding_format=form, extra_body={"pooling": pooling}
        )
        assert reply.usage.prompt_tokens == 105
        for prompt, told in zip(prompts, reply.data, strict=True):
            with torch.inference_mode():
                hidden = model(torch.tensor([prompt])).last_hidden_state[0]
            expected = torch.nn.functional.normalize(
                hidden.mean(0) if pooling == "mean" else hidden[-1], dim=0
            )
            vector = told.embedding
            if form == "base64":
                vector = torch.frombuffer(
                    bytearray(base64.b64decode(vector)), dtype=torch.float32
                ).tolist()
            assert torch.allclose(torch.tensor(vector), expected, atol=1e-4)
    first, again = (
        client.embeddings.create(model="tiny", input=prompts, extra_body={"pooling": pooling})
        for _ in range(2)
    )
    assert again.data[1].embedding == first.data[1].embedding  # from the cache or not
    assert len(client.embeddings.create(model="tiny", input="a text").data) == 1
    for wrong in (
        {"input": []},
        {"input": "x", "dimensions": 10**6},
        {"input": "x", "encoding_format": "hex"},
    ):
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model="tiny", **wrong)


@pytest.mark.parametrize("path", refused.ROUTES)
def test_routes_of_other_servers_are_refused_by_name(server, path):
    reply = httpx.post(f"{server.url}{path}", json={})
    assert (reply.status_code, reply.json()["error"]["type"]) == (501, "not_offered")
    assert path in reply.json()["error"]["message"]
    assert reply.headers["x-should-retry"] == "false"
