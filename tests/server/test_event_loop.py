"""No request keeps the event loop from other clients: of every route, with the largest bodies of several shapes, while somebody
streams. Measured in CPU seconds of the server between two turns of its loop."""

# ruff: noqa: E501
import asyncio
import json

import httpx
import pytest

from tests.helpers import LONG_S, byte_tokenizer, make_llama
from tests.server.conftest import Server
from tests.server.lag import PATCH, routes_of, take_lag_s
from tidemill.server.refused import ROUTES

MOST_LAG_S = 0.1
NUM_ITEMS = 9600
EMOJI, WORDS = "😀" * 200_000, "the tide, " * 800_000  # as long as the context lets pass; as long as a body may be
IDS, TEXTS, FLOATS = [5] * 2**20, ["abcdef"] * 2**19, [0.5] * 2**19
MESSAGES = [{"role": "user", "content": "x"}] * 2**14
PARTS = [{"role": "user", "content": [{"type": "text", "text": "x"}] * 21_000}]
CALLS = [{"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f"}}] * 200}] * 60
WRONG = [{"role": 5}] * 2**14
SCHEMA = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(200)}}
TOOL = {"name": "f", "description": "d", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": TOOL | {"name": f"f{i}"}} for i in range(100)]
STOPS = ["a" * 1000 + char * 24 for char in "bcdefghijklmnopq"]
REGEXES = [f"[\\s\\S]*[ab][\\s\\S]{{{num}}}c" for num in (200, 199, 198, 197)]
BIAS = {str(i % 320): i % 7 for i in range(320)}
ITEM = {"role": "user", "content": "x" * 100}
ITEMS = [ITEM] * NUM_ITEMS
MANY = [f"text {i}" for i in range(2048)]
SHORT = {"role": "user", "content": "x"}
STREAM = {"max_tokens": 100, "ignore_eos": True, "stream": True}


def chats(**more):
    """Bodies of what takes messages."""
    asked = ({"messages": MESSAGES}, {"messages": PARTS}, {"messages": CALLS}, {"messages": WRONG},
             {"messages": [SHORT], "tools": TOOLS}, {"messages": [{"role": "user", "content": EMOJI}]},
             {"messages": [{"role": "user", "content": WORDS}]})  # fmt: skip
    return [more | one for one in asked]


def texts(name, **more):
    return [more | {name: value} for value in (EMOJI, WORDS, IDS, TEXTS, FLOATS, MANY, [EMOJI[:10_000]] * 20)]


def generates(**more):
    """What the output of a completion can be made to cost."""
    return [
        STREAM | {"n": 12, "stop": STOPS} | more,
        STREAM | {"n": 12, "stop_regex": REGEXES} | more,
        STREAM | {"n": 12, "logprobs": 20, "logit_bias": BIAS} | more,
        {"n": 64, "max_tokens": 300, "logprobs": 20, "ignore_eos": True} | more,
    ]


COMPLETIONS = [
    *texts("prompt", max_tokens=1), *generates(prompt="x"),
    {"prompt": [5] * 16_000, "max_tokens": 1, "echo": True, "logprobs": 20},
    {"prompt": [5] * 16_000, "max_tokens": 1, "prompt_logprobs": 20},
    {"prompt": [[5, 6]] * 256, "max_tokens": 2, "logprobs": 20},
    {"prompt": "x", "bad_words": ["x" * 200] * 64, "max_tokens": 1},
    {"prompt": "x", "structured_outputs": {"choice": TEXTS}, "max_tokens": 1},
    {"prompt": "x", "structured_outputs": {"regex": WORDS}, "max_tokens": 1},
    {"prompt": EMOJI[:100_000], "suffix": EMOJI[:100_000], "max_tokens": 1},
    {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA | {"enum": TEXTS[:60_000]}}}},
]  # fmt: skip
CHATS = [*chats(max_tokens=1), *[{"messages": [SHORT]} | one | ({"logprobs": True, "top_logprobs": 20} if "logprobs" in one else {})
                                 for one in generates()]]  # fmt: skip
LLAMACPP = [*texts("prompt", n_predict=1), {"prompt": "x", "n_predict": 100, "stream": True, "stop": STOPS, "n_probs": 20}]
EMBEDDINGS = [*texts("input"), {"input": [[5] * 500] * 500}]
POOLING = [*EMBEDDINGS, *({"input": [[5] * 8000], "pooling": "none", "encoding_format": kind, "embed_dtype": of}
                          for kind, of in (("float", "float32"), ("base64", "fp8_e4m3"), ("bytes", "bfloat16")))]  # fmt: skip
RERANK = [
    {"query": "x", "documents": MANY[:1000]}, {"query": EMOJI, "documents": MANY[:1000]}, {"query": "x", "documents": TEXTS},
    {"query": "x", "documents": [EMOJI[:5000]] * 100},
]  # fmt: skip
SCORE = [{"text_1": "x", "text_2": MANY[:1000]}, {"text_1": EMOJI, "text_2": EMOJI}, {"text_1": MANY[:1000], "text_2": MANY[:1000]}]
LABELS = [{"query": "x", "items": MANY[:1000], "label_token_ids": [5] * 128}, {"query": IDS, "items": [IDS[:9]], "label_token_ids": [5]}]
RESPONSES = [
    {"input": ITEMS, "max_output_tokens": 1}, {"input": [ITEM | {"content": EMOJI}], "max_output_tokens": 1}, {"input": WORDS},
    {"input": "x", "tools": [{"type": "function"} | one["function"] for one in TOOLS], "max_output_tokens": 1},
    {"input": "x", "max_output_tokens": 200, "stream": True, "top_logprobs": 20, "ignore_eos": True, "stop": STOPS},
    {"input": ITEMS, "truncation": "auto", "max_output_tokens": 1}, {"input": [{"role": 5}] * 2**14},
    {"input": "x", "background": True, "max_output_tokens": 200, "stream": True, "top_logprobs": 20, "ignore_eos": True},
    {"input": ITEMS, "background": True, "max_output_tokens": 1},
]  # fmt: skip
ANTHROPIC = [
    *chats(max_tokens=1)[:4], {"messages": [SHORT], "max_tokens": 1, "tools": [{"name": f"f{i}", "input_schema": SCHEMA} for i in range(100)]},
    {"messages": [{"role": "user", "content": EMOJI}], "max_tokens": 1}, {"messages": [SHORT], "system": WORDS, "max_tokens": 1},
    {"messages": [SHORT], "max_tokens": 100, "stream": True, "stop_sequences": STOPS},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 20_000}], "max_tokens": 1},
]  # fmt: skip
CACHES = [{"name": "n", "messages": MESSAGES}, {"name": "n", "messages": PARTS}, {"name": "n", "prompt": EMOJI}]
JSONL = b"".join(
    json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 1}}).encode() + b"\n"
    for i in range(50_000)
)
JUNK = [{"x": [{}] * 60_000}, {"x": IDS}, [[]] * 60_000, WORDS]
ASKED = {"max_tokens": 1, "messages": [SHORT]}
MESSAGE_BATCHES = [
    {"requests": [{"custom_id": str(i), "params": ASKED} for i in range(7000)]},
    {"requests": [{"custom_id": "x", "params": ASKED | {"messages": MESSAGES}}]},
    {"requests": [{"custom_id": str(i), "params": ASKED | {"system": WORDS[:700_000]}} for i in range(10)]},
]
NOTHING: list[object] = [None]
EIGHT = [None] * 8
BODIES = {
    "POST /v1/completions": COMPLETIONS, "POST /invocations": [*COMPLETIONS[:4], *CHATS[:4]], "POST /v1/chat/completions": CHATS,
    "POST /v1/chat/completions/batch": [{"messages": [MESSAGES[:100]] * 100, "max_tokens": 1}, {"messages": [PARTS], "max_tokens": 1}],
    "POST /v1/chat/completions/render": chats(), "POST /v1/chat/completions/input_tokens": chats(), "POST /apply-template": chats(),
    "POST /tokenize": [*(one | {"with_pieces": True, "return_token_strs": True} for one in texts("prompt")), *texts("content"), *chats()],
    "POST /v1/tokenize": texts("prompt"), "POST /detokenize": [{"tokens": IDS[:2**17]}, {"tokens": IDS}, {"tokens": TEXTS}],
    "POST /v1/detokenize": [{"tokens": IDS[:2**17]}],
    "POST /completion": LLAMACPP, "POST /completions": LLAMACPP, "POST /infill": [
        {"input_prefix": EMOJI, "input_suffix": EMOJI, "n_predict": 1}, {"input_extra": [{"text": "x", "filename": "y"}] * 10_000},
    ],
    "POST /embedding": texts("content"), "POST /embeddings": texts("content"), "POST /v1/embeddings": EMBEDDINGS,
    "POST /pooling": POOLING, "POST /classify": texts("input"),
    **{f"POST {path}": JUNK for path in ROUTES},
    "POST /v1/messages/batches": MESSAGE_BATCHES, "POST /v1/messages/batches/{batch_id}/cancel": NOTHING,
    "POST /v2/embed": [{"texts": MANY[:96], "embedding_types": ["float", "int8", "ubinary"]}, {"texts": TEXTS}],
    **{f"POST {path}": RERANK for path in ("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking")},
    "POST /score": SCORE, "POST /v1/score": SCORE, "POST /generative_scoring": LABELS,
    "POST /v1/responses": RESPONSES, "POST /v1/responses/input_tokens": RESPONSES[:4],
    "POST /v1/messages": ANTHROPIC, "POST /v1/messages/count_tokens": [
        {name: value for name, value in one.items() if name in ("messages", "tools", "system")} for one in ANTHROPIC
    ],
    "POST /generate": [
        *texts("text"), {"input_ids": IDS}, {"text": "x", "sampling_params": {"max_new_tokens": 100, "n": 12, "stop": STOPS}, "stream": True},
        {"text": ["x"] * 200, "return_logprob": True, "top_logprobs_num": 20, "sampling_params": {"max_new_tokens": 5}},
    ],
    "POST /api/generate": [*({"model": "tiny", "prompt": text} for text in (EMOJI, WORDS)), {"model": "tiny", "prompt": "x", "context": IDS}],
    "POST /api/chat": [{"model": "tiny"} | one for one in chats()],
    "POST /api/embed": [{"model": "tiny"} | one for one in texts("input")],
    "POST /api/embeddings": [{"model": "tiny", "prompt": text} for text in (EMOJI, WORDS)],
    **{f"POST /api/{name}": JUNK for name in ("copy", "create", "pull", "push", "show")}, "DELETE /api/delete": JUNK,
    "POST /abort_request": [{"rid": "x"}, *JUNK], "POST /flush_cache": NOTHING,
    "POST /v1/conversations": [{"items": ITEMS}, {"items": [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * 20_000}]}],
    "POST /v1/conversations/{conversation_id}": [{"metadata": {str(i): WORDS[:400_000] for i in range(16)}}],
    "POST /v1/conversations/{conversation_id}/items": [{"items": [ITEM]}] * 16,
    "POST /v1/prompt_caches": CACHES, "POST /v1/prompt_caches/{name}": JUNK, "POST /v1/prompt_caches/{name}/fork": CACHES,
    "POST /v1/load_lora_adapter": JUNK, "POST /v1/unload_lora_adapter": JUNK,
    "POST /v1/batches": [{"input_file_id": "{file_id}", "endpoint": "/v1/completions", "completion_window": "24h"}, *JUNK],
    "POST /v1/batches/{batch_id}/cancel": NOTHING,
    "POST /v1/files": [JSONL], "POST /ping": JUNK,
    "POST /v1/responses/{response_id}/cancel": EIGHT,
    "GET /v1/conversations/{conversation_id}/items": [None] * 16, "GET /v1/conversations/{conversation_id}/items/{item_id}": [None] * 16,
    "GET /v1/responses/{response_id}/input_items": [None] * 16, "GET /v1/responses/{response_id}": EIGHT,
}  # fmt: skip
QUERIES = {"/v1/files": "?limit=10000", "/v1/conversations/{conversation_id}/items": "?limit=1"}
ENDLESS = "GET /v1/engine/live"


async def ask(client, route, body, ids):
    """Reads the answer, whatever it is; of one that does not end, a little."""
    method, path = route.split(" ")
    url = path + QUERIES.get(path, "")
    for name, value in ids.items():
        url = url.replace("{" + name + "}", value)
    how = {}
    if path == "/v1/files" and body is not None:
        how = {"files": {"file": body}, "data": {"purpose": "batch"}}
    elif body is not None:
        text = json.dumps(body).replace("{file_id}", ids["file_id"])
        how = {"content": text.encode(), "headers": {"Content-Type": "application/json"}}
    async with client.stream(method, url, **how) as reply:
        num_bytes = 0
        async for part in reply.aiter_bytes():
            num_bytes += len(part)
            if route == ENDLESS and num_bytes > 1000:
                break
        return reply.status_code


class Streaming:
    """Somebody who streams meanwhile, one completion after another."""

    def __init__(self, client):
        self._client, self.num_events = client, 0

    async def __aenter__(self):
        self._task = asyncio.create_task(self._stream())
        return self

    async def _stream(self):
        body = {"prompt": "the tide ", "max_tokens": 400, "ignore_eos": True, "stream": True}
        while True:
            async with self._client.stream("POST", "/v1/completions", json=body) as reply:
                async for line in reply.aiter_lines():
                    self.num_events += line.startswith("data: {")

    async def __aexit__(self, *_):
        self._task.cancel()


async def prepared(client):
    """What the routes with an id in their path are asked for."""
    made = await client.post("/v1/conversations", json={"items": ITEMS})
    name = made.json()["id"]
    items = (await client.get(f"/v1/conversations/{name}/items?limit=1")).json()
    response = await client.post("/v1/responses", json={"input": ITEMS[:100], "max_output_tokens": 2})
    file = await client.post("/v1/files", files={"file": JSONL[: JSONL.index(b"\n") + 1]}, data={"purpose": "batch"})
    return {
        "conversation_id": name, "item_id": items["first_id"], "response_id": response.json()["id"], "file_id": file.json()["id"],
        "batch_id": "batch-x", "name": "x", "request_id": response.json()["id"], "model_id:path": "tiny",
    }  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long")
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    make_llama(folder, vocab_size=320, max_position_embeddings=2**14, **small)
    byte_tokenizer(folder)
    running = Server(folder, "--speculate", "off", patch=PATCH).wait()
    yield running
    assert running.stop() == 0


async def lags(server, cases):
    """Of each case: the longest gap, with each of its bodies asked for on its own, and all at once if they are the same."""
    found = {}
    async with httpx.AsyncClient(base_url=server.url, timeout=LONG_S) as client:
        ids = await prepared(client)
        async with Streaming(client) as other:
            for route, bodies in cases:
                groups = [bodies] if all(body is bodies[0] for body in bodies) else [[body] for body in bodies]
                for number, group in enumerate(groups):
                    take_lag_s(server.url)
                    before = other.num_events
                    statuses = await asyncio.gather(*(ask(client, route, body, ids) for body in group))
                    lag_s = take_lag_s(server.url)
                    assert not any(status >= 500 for status in statuses if status not in (501, 503)), (route, number, statuses)
                    found[route, number] = lag_s
                    print(f"{1000 * lag_s:7.1f} ms  {route} {number}  {sorted(set(statuses))}  {other.num_events - before} events", flush=True)
    return found


QUICK = [
    ("POST /tokenize", [{"prompt": EMOJI, "with_pieces": True}]),
    ("POST /v1/completions", [STREAM | {"prompt": "x", "n": 12, "stop": STOPS}]),
    ("GET /v1/conversations/{conversation_id}/items", [None] * 16),
]


async def test_the_event_loop_is_free(server):
    found = await lags(server, QUICK)
    assert {case: lag_s for case, lag_s in found.items() if lag_s > MOST_LAG_S} == {}


@pytest.mark.slow
async def test_no_route_keeps_the_event_loop_from_others(server):
    take_lag_s(server.url)
    routes = {f"{method} {path}" for method, path in routes_of(server.url)}
    assert not BODIES.keys() - routes, "a route is gone"
    missing = {route for route in routes - BODIES.keys() if not route.startswith(("GET ", "DELETE "))}
    assert not missing, "a route is new: say here what the largest bodies are"
    without_body = sorted(routes - BODIES.keys(), key=lambda route: (route.startswith("DELETE"), route))
    found = await lags(server, [*BODIES.items(), *((route, EIGHT) for route in without_body)])
    assert {case: lag_s for case, lag_s in found.items() if lag_s > MOST_LAG_S} == {}
