"""A command line of llama.cpp's server, and what its flags then do."""

import httpx
import pytest

from tests.server.conftest import Server

HI = [{"role": "user", "content": "Hi"}]
FLAGS = "--alias thinker,gpt-4o --reasoning off --temp 0.7 --top-k 5 -n 20 --pooling last --no-webui --jinja -fa on --embedding"


@pytest.fixture(scope="module")
def server(thinking_folder):
    running = Server(None, "-m", str(thinking_folder), *FLAGS.split()).wait()
    yield running
    assert running.stop() == 0


def post(server, path, **body):
    reply = httpx.post(f"{server.url}{path}", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_the_names_and_the_defaults(server):
    (card,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert (card["id"], card["aliases"]) == ("thinker", ["gpt-4o"])
    chosen = {"temperature": 0.7, "top_k": 5, "max_tokens": 20}
    assert {name: card["sampling_defaults"][name] for name in chosen} == chosen
    made = post(server, "/v1/chat/completions", model="gpt-4o", messages=HI, ignore_eos=True)
    assert made["usage"]["completion_tokens"] == 20


def test_reasoning_is_off_unless_a_request_says_otherwise(server):
    message = post(server, "/v1/chat/completions", messages=HI)["choices"][0]["message"]
    assert message.get("reasoning_content") is None
    prompt = post(server, "/apply-template", messages=HI)["prompt"]
    assert prompt.endswith("<think>\n\n</think>\n\n")
    asked = {"chat_template_kwargs": {"enable_thinking": True}}
    ended = post(server, "/v1/chat/completions", messages=HI, logprobs=True, **asked)["choices"][0]
    assert ended["logprobs"]["content"][0]["token"] == "</think>"  # the budget of the server
    more = asked | {"thinking_token_budget": 8, "logit_bias": {}, "seed": 1}
    message = post(server, "/v1/chat/completions", messages=HI, **more)["choices"][0]["message"]
    assert message["reasoning_content"]
    free = asked | {"thinking_token_budget": -1, "logit_bias": {}, "seed": 1}
    assert post(server, "/v1/chat/completions", messages=HI, **free)["choices"][0]["message"][
        "reasoning_content"
    ]


def test_embeddings_are_pooled_as_the_server_says(server):
    def vector(**more):
        return post(server, "/v1/embeddings", input="ebb and flood", **more)["data"][0]["embedding"]

    assert vector() == vector(pooling="last") != vector(pooling="mean")


def test_there_is_no_page(server):
    assert httpx.get(f"{server.url}/").status_code == 404
    assert httpx.get(f"{server.url}/page/page.css").status_code == 404
    assert httpx.head(f"{server.url}/").status_code == 200
