"""One client must not keep the event loop from others: long backlogs and large bodies are formatted
in bounded pieces, and what one response may hold is bounded. Counted in turns of the event loop,
not in seconds."""

import asyncio
import json
from contextlib import aclosing
from types import SimpleNamespace

import msgspec
import pytest
import pytest_asyncio

from tests.server.scripted_service import ScriptedService, endpoint_of
from tidemill.config import EngineOptions
from tidemill.engine.client import EngineClient
from tidemill.engine.metrics import Metrics
from tidemill.errors import InvalidRequest
from tidemill.frontend.output import CELLS_PER_TURN, in_pieces, num_cells
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.server.api.endpoints import ENDPOINTS
from tidemill.server.api.openai.chat import ChatCodec
from tidemill.server.api.openai.completions import CompletionCodec
from tidemill.server.app import create_app
from tidemill.server.generation.logprobs import MAX_LOGPROB_CELLS
from tidemill.server.generation.models import Models
from tidemill.server.generation.service import MAX_DETOKENIZED, Service
from tidemill.server.generation.streams import merge
from tidemill.server.http.access import Access
from tidemill.server.observe.explain import Explainer
from tidemill.server.observe.live import Live
from tidemill.server.store.batches import Batches
from tidemill.server.store.storage import Storage
from tidemill.types.wire import Delta, TokenLogprobs, logprob_pieces

in_the_loop = pytest.mark.asyncio(loop_scope="module")  # of the engine
BYTES_PER_TURN = 128 * CELLS_PER_TURN  # of JSON; a cell takes some 60
N, LENGTH = 8, 150
BACKLOG = {
    "prompt": "x",
    "n": N,
    "max_tokens": LENGTH,
    "ignore_eos": True,
    "logprobs": 20,
    "seed": 1,
}
CHAT = {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 20}
PROMPT = [5 + i % 250 for i in range(3000)]


class Behind(EngineClient):
    """The deltas of a sample arrive as one, when all have been generated: as if the reader had been
    away meanwhile."""

    num_left_early = 0
    ticker = None
    at_turn = 0  # of the ticker, when everything had been generated

    async def submit(self, request, timeout_s=None, tells_accepted=False, tells_progress=False):
        by_sample: dict[int, list[Delta]] = {}
        async for delta in super().submit(request, timeout_s):
            by_sample.setdefault(delta.index, []).append(delta)
        num_given, self.at_turn = 0, self.ticker.turns if self.ticker else 0
        try:
            for parts in by_sample.values():
                num_given += 1
                yield msgspec.structs.replace(
                    parts[-1],
                    token_ids=[token for part in parts for token in part.token_ids],
                    logprobs=parts[0].logprobs
                    and [entry for part in parts for entry in part.logprobs],
                    prompt_pieces=parts[0].prompt_pieces,
                )
        finally:
            self.num_left_early += num_given < len(by_sample)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(roomy_folder):
    client = Behind()
    await client.start(EngineOptions(model=str(roomy_folder), threads=1))
    metrics, explainer = Metrics(), Explainer()
    made = Service(
        client,
        Tokenizer.load(roomy_folder),
        "tiny",
        metrics,
        explainer,
        Live(client, metrics, explainer),
    )
    yield made
    made.close()
    await client.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def app(service, tmp_path_factory):
    storage, access, models = (
        Storage(tmp_path_factory.mktemp("data"), 2**20),
        Access(),
        Models([service]),
    )
    yield create_app(
        models, access, storage, Batches(models, ENDPOINTS, storage, access.caller_of, None), None
    )
    storage.close()


class Ticker:
    """Counts the turns that others have."""

    def __init__(self):
        self.turns = 0

    async def __aenter__(self):
        self._task = asyncio.create_task(self._tick())
        return self

    async def _tick(self):
        while True:
            self.turns += 1
            await asyncio.sleep(0)

    async def __aexit__(self, *_):
        self._task.cancel()


async def call(app, path, body=None, on_send=None):
    """Status and body of a request to the app. `on_send(data)`: sees what is sent; True: the client
    leaves. Sending never waits, as for a client that reads fast enough, or has left."""
    left, parts, status = asyncio.Event(), [], 0
    asked = iter(
        [
            {
                "type": "http.request",
                "body": b"" if body is None else json.dumps(body).encode(),
                "more_body": False,
            }
        ]
    )

    async def receive():
        if (message := next(asked, None)) is not None:
            return message
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))
        if on_send is not None and on_send(parts[-1]):
            left.set()

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http", "method": "GET" if body is None else "POST", "path": path, "raw_path": path.encode(), "headers": headers,
        "query_string": b"", "http_version": "1.1", "scheme": "http", "server": ("localhost", 80), "client": ("127.0.0.1", 1),
    }  # fmt: skip
    await app(scope, receive, send)
    return status, b"".join(parts)


def choices_of(data):
    return [
        json.loads(line[6:])["choices"][0]
        for line in data.split(b"\n\n")
        if line.startswith(b"data: {")
    ]


@in_the_loop
@pytest.mark.parametrize("chat", [False, True])
async def test_others_are_served_between_the_pieces_of_a_backlog(app, chat):
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = BACKLOG | (CHAT | {"logprobs": True} if chat else {}) | {"stream": True}
    if chat:
        del body["prompt"]
    at_turn: dict[int, int] = {}
    num_healthy = 0

    async def others():
        nonlocal num_healthy
        while True:
            assert (await call(app, "/health"))[0] == 200
            num_healthy += at_turn != {}
            await asyncio.sleep(0)  # nothing in it waits

    def count(data):
        at_turn[ticker.turns] = at_turn.get(ticker.turns, 0) + len(data)

    async with Ticker() as ticker:
        other = asyncio.create_task(others())
        status, data = await call(app, path, body, count)
        other.cancel()
    assert status == 200
    choices = choices_of(data)
    if chat:
        num_tokens = sum(
            len(choice["logprobs"]["content"]) for choice in choices if choice["logprobs"]
        )
    else:
        num_tokens = sum(len(choice["logprobs"]["tokens"]) for choice in choices)
    assert num_tokens == N * LENGTH
    assert max(at_turn.values()) <= BYTES_PER_TURN
    assert len(at_turn) > N * LENGTH * 21 // (2 * CELLS_PER_TURN)
    assert num_healthy >= 2


@in_the_loop
async def test_a_reader_who_leaves_amid_a_backlog_ends_it(app, service):
    sent, before = [], service.client.num_left_early

    def leave(data):
        sent.append(len(data))
        return sum(sent) > 10_000

    await call(app, "/v1/completions", BACKLOG | {"stream": True}, leave)
    assert sum(sent) < 10_000 + 6 * BYTES_PER_TURN
    assert service.client.num_left_early == before + 1
    assert not service.in_progress


@in_the_loop
@pytest.mark.parametrize("stream", [False, True])
async def test_a_large_body_is_made_in_pieces(app, service, stream):
    """Prompt logprobs come all at once, and in a whole response so does everything."""
    body = {
        "prompt": PROMPT,
        "max_tokens": 1,
        "prompt_logprobs": 20,
        "echo": True,
        "logprobs": 20,
        "stream": stream,
    }
    async with Ticker() as ticker:
        service.client.ticker = ticker
        status, data = await call(app, "/v1/completions", body)
        num_turns = ticker.turns - service.client.at_turn
    assert status == 200
    cells = 2 * 21 * (len(PROMPT) - 1)
    assert num_turns > cells // CELLS_PER_TURN
    choice = choices_of(data)[0] if stream else json.loads(data)["choices"][0]
    assert len(choice["prompt_logprobs"]) == len(PROMPT)
    assert choice["prompt_logprobs"][0] is None
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert len(choice["logprobs"][name]) == len(PROMPT) + 1
    assert choice["logprobs"]["token_logprobs"][0] is None
    # what a response of as many as are allowed would take
    assert len(data) * MAX_LOGPROB_CELLS / cells < 40 * 2**20


@in_the_loop
async def test_many_tokens_are_decoded_and_more_are_refused(app, service):
    text = "Ebbe und Flüt " * 4000
    status, data = await call(app, "/detokenize", {"tokens": service.tokenizer.encode(text)})
    assert status == 200
    assert json.loads(data)["prompt"] == text
    status, data = await call(app, "/detokenize", {"tokens": [5] * (MAX_DETOKENIZED + 1)})
    assert status == 400
    error = json.loads(data)["error"]
    assert error["param"] == "tokens"
    assert str(MAX_DETOKENIZED) in error["message"]


# ---- without an engine


async def limit_of(num_prompts, context=4096, default=None, **body):
    """The maximum of tokens that a request ends up with."""
    service = ScriptedService([], num_prompt=len(PROMPT))
    service.max_context, service.defaults = context, SimpleNamespace(limit=default)
    service.with_defaults = lambda params, ids: params
    codec, body = (
        (ChatCodec, body)
        if "messages" in body
        else (CompletionCodec, {"prompt": [PROMPT] * num_prompts} | body)
    )
    asked = codec.body_type(**body)
    codec = endpoint_of(codec, service, asked, "/")
    await codec.begin()
    return codec.generation.prompts[0].params.max_tokens


@pytest.mark.parametrize(
    ("num_prompts", "body", "param"),
    [
        (32, {"prompt_logprobs": 20}, "prompt_logprobs"),  # 32 prompts of 3,000 tokens: 2 million
        (2, {"prompt_logprobs": 20, "n": 8}, "prompt_logprobs"),  # each choice lists them
        (9, {"echo": True, "logprobs": 20}, "echo"),
        (16, {"echo": True, "n": 16, "max_tokens": 1000}, None),
        (16, {"echo": True, "n": 16, "max_tokens": 1000, "prompt": [PROMPT * 6] * 16}, "echo"),
        (8, {"prompt_logprobs": 20}, None),
        (1, {"logprobs": 20, "n": 25, "max_tokens": 1000}, "logprobs"),
        (1, {"logprobs": 20, "n": 24, "max_tokens": 1000}, None),
        # is not held as a whole
        (1, {"logprobs": 20, "n": 25, "max_tokens": 1000, "stream": True}, None),
        (1, {"logprobs": 20, "best_of": 25, "max_tokens": 1000}, "logprobs"),
        (32, {"logprobs": 0, "max_tokens": 1000}, None),
        (1, {"n": 128, "max_tokens": 1000}, None),
        (1, CHAT | {"logprobs": True, "n": 25, "max_tokens": 1000}, "logprobs"),
    ],
)
async def test_the_logprobs_of_a_response_are_bounded(num_prompts, body, param):
    if param is None:
        await limit_of(num_prompts, **body)
        return
    with pytest.raises(InvalidRequest, match=f"{MAX_LOGPROB_CELLS:,} fit one response") as caught:
        await limit_of(num_prompts, **body)
    assert caught.value.param == param
    assert caught.value.fix


async def test_without_max_tokens_the_output_ends_where_its_logprobs_no_longer_fit():
    body = CHAT | {"logprobs": True}
    assert await limit_of(1, **body) is None
    limit = await limit_of(1, 131072, **body)
    assert 21 * limit <= MAX_LOGPROB_CELLS < 21 * (limit + 1)
    assert await limit_of(1, 131072, **body, stream=True) is None
    assert await limit_of(1, 131072, 1024, **body) is None  # the default is less

    # and does not count if more is asked for
    with pytest.raises(InvalidRequest, match="min_tokens"):
        await limit_of(1, 131072, 1024, **body, min_tokens=50_000)


@pytest.mark.parametrize("top", [None, 0, 20, 3000])
def test_a_delta_in_pieces_adds_up(top):
    tokens = list(range(5000))
    logprobs = (
        None
        if top is None
        else [TokenLogprobs(token, -1.0, [(7, -2.0)] * top) for token in tokens[:500]]
    )
    tokens = tokens[: len(logprobs)] if logprobs else tokens
    whole = Delta(
        "r",
        0,
        tokens,
        "length",
        logprobs,
        logprob_pieces([TokenLogprobs(1, -1.0, [])]),
        num_cached=3,
    )
    pieces = list(in_pieces(whole))
    assert [token for piece in pieces for token in piece.token_ids] == tokens
    assert logprobs is None or [entry for piece in pieces for entry in piece.logprobs] == logprobs
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert [piece.prompt_logprobs is not None for piece in pieces] == [True] + [False] * (
        len(pieces) - 1
    )
    assert all(num_cells(piece) <= max(CELLS_PER_TURN, (top or 0) + 1) for piece in pieces)
    assert [piece.token_ids for piece in in_pieces(whole, one_by_one=True)] == [
        [token] for token in tokens
    ]


@in_the_loop
async def test_several_prompts_are_merged_without_a_backlog():
    """What a slow reader has not taken stays where it is made."""
    num_made = [0, 0, 0]

    async def stream(number):
        for i in range(1000):
            num_made[number] += 1
            yield i

    async with aclosing(merge([stream(i) for i in range(3)])) as merged:
        seen = [0, 0, 0]
        async for number, item in merged:
            assert item == seen[number]
            seen[number] += 1
            for _ in range(5):
                await asyncio.sleep(0)
            assert sum(num_made) - sum(seen) <= 2 * len(seen)
    assert seen == [1000] * 3


@in_the_loop
async def test_many_texts_of_a_request_are_tokenized_in_turns(app):
    texts = ["x" * 1000] * 200
    too_many = {
        "/v1/completions": {"prompt": texts, "n": 9},
        "/v1/embeddings": {"input": texts, "dimensions": 10**6},
    }
    for path, body in too_many.items():  # refused here, after tokenization
        async with Ticker() as ticker:
            status, _ = await call(app, path, body)
        assert status == 400
        assert ticker.turns > len(texts)
