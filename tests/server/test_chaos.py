"""Under load, engines are killed, clients leave and the server is stopped: nothing is lost, nothing
is sent twice, every response is the one that an undisturbed server gives, and no process or file is
left behind.

Load comes in waves. Engines are killed at most twice in a wave, at random moments, so no request
sees the three deaths after which it would be given up: what is asserted holds by rule, not by luck.
"""

import asyncio
import json
import os
import random
import signal

import httpx
import pytest

from tests.helpers import LONG_S
from tests.server.conftest import Server
from tests.server.test_lifecycle import gone
from tests.server.watch import children
from tests.waiting import until_async

LONG = 120


def request(i: int) -> tuple[str, dict]:
    """Greedy and seeded, streamed and whole; of several samples, with logprobs, with a grammar;
    text and chat."""
    body = {
        "max_tokens": LONG,
        "ignore_eos": True,
        "seed": i,
        "temperature": float(i % 2),
        "stream": i % 3 != 0,
    }
    text = {"prompt": f"request number {i} ", **body}
    match i % 4:
        case 0:
            return "/v1/completions", text
        case 1:
            return "/v1/completions", text | {"n": 2, "logprobs": 1}
        case 2:
            return "/v1/completions", text | {"structured_outputs": {"regex": f"[a-f ]{{{LONG}}}"}}
        case _:
            return "/v1/chat/completions", body | {
                "messages": [{"role": "user", "content": f"number {i}"}]
            }


class Response:
    """What one client received: by choice, the text, logprobs and how it ended."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.logprobs: dict[int, list[float]] = {}
        self.ended: dict[int, str] = {}
        self.is_whole = False
        self.is_settled = False  # nothing more comes
        self.num_pieces = 0

    def take(self, told: dict) -> None:
        assert "error" not in told, told
        self.num_pieces += 1
        for choice in told["choices"]:
            index = choice["index"]
            said = (
                choice.get("text")
                or (choice.get("delta") or choice.get("message") or {}).get("content")
                or ""
            )
            self.texts[index] = self.texts.get(index, "") + said
            if choice.get("logprobs"):
                self.logprobs.setdefault(index, []).extend(choice["logprobs"]["token_logprobs"])
            if choice["finish_reason"]:
                assert index not in self.ended, "it ended twice"
                self.ended[index] = choice["finish_reason"]

    def take_line(self, line: str) -> bool:
        """False: there is nothing in it to take."""
        if line.startswith("data: {"):
            self.take(json.loads(line[6:]))
        return line.startswith("data: {")

    def begins(self, other: "Response") -> bool:
        return all(other.texts[i].startswith(text) for i, text in self.texts.items()) and all(
            other.logprobs[i][: len(values)] == values for i, values in self.logprobs.items()
        )


async def ask(
    http: httpx.AsyncClient, i: int, leaves_s: float | None = None, response: Response | None = None
) -> Response:
    path, body = request(i)
    response = response or Response()

    async def read() -> None:
        async with http.stream("POST", path, json=body) as reply:
            if not body["stream"]:
                told = json.loads(await reply.aread())
                assert reply.status_code == 200, told
                response.take(told)
            else:
                assert reply.status_code == 200, await reply.aread()
                lines = [
                    line
                    async for line in reply.aiter_lines()
                    if line and not response.take_line(line)
                ]
                # a comment: it is alive
                assert [line for line in lines if not line.startswith(":")] == ["data: [DONE]"]
        response.is_whole = True

    try:
        await asyncio.wait_for(read(), leaves_s or LONG_S)
    except TimeoutError:
        assert leaves_s, f"request {i} was lost"
    finally:
        response.is_settled = True
    return response


def metrics(server: Server) -> dict[str, float]:
    """By name; of those with labels, the sum."""
    told: dict[str, float] = {}
    for line in httpx.get(f"{server.url}/metrics").text.splitlines():
        if line.startswith("tidemill_") and "_bucket" not in line:
            name, value = line.removeprefix("tidemill_").rsplit(" ", 1)
            name = name.partition("{")[0]
            told[name] = told.get(name, 0.0) + float(value)
    return told


async def kill_engines(
    server: Server, num: int, rng: random.Random, responses: list[Response]
) -> None:
    """Each at a random moment: when there are some more pieces, or all clients have what they
    wanted."""
    for _ in range(num):
        begun = sum(one.num_pieces for one in responses)
        some = rng.randrange(1, 200)
        enough = begun + some
        await until_async(
            lambda enough=enough: (
                sum(one.num_pieces for one in responses) >= enough
                or all(one.is_settled for one in responses)
            ),
            0.001,
        )
        num_before = metrics(server)["engine_restarts_total"]
        os.kill(rng.choice(server.engine_pids()), signal.SIGKILL)
        # One that is killed while it starts is no restart.
        await until_async(
            lambda num=num_before: metrics(server)["engine_restarts_total"] > num, 0.2
        )


async def settled(server: Server, num_restarts: int) -> dict[str, float]:
    def at_rest() -> dict[str, float] | None:
        told = metrics(server)
        is_idle = told["requests_running"] == told["requests_waiting"] == 0
        return told if is_idle and told["engine_restarts_total"] == num_restarts else None

    return await until_async(at_rest, 0.2)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where the server puts its temporary files."""
    (tmp_path / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    return tmp_path / "t"


@pytest.fixture
def server(folder, tiny_folder, options):
    running = Server(tiny_folder, "--drain-seconds", str(LONG_S), *options).wait()
    yield running
    running.stop()


@pytest.mark.parametrize(
    ("num_clients", "waves", "seed", "options"),
    [
        (12, [1], 1, ()),
        pytest.param(48, [2, 1, 2], 2, (), marks=pytest.mark.slow),
        pytest.param(
            24,
            [2, 1, 2],
            3,
            ("--prefill", "1", "--decode", "1", "--threads", "1"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["short", "full", "roles"],
)
async def test_chaos(folder, server, num_clients, waves, seed):
    rng = random.Random(seed)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, limits=limits) as http:
        first = await ask(http, 0)
        free = (await settled(server, 0))["kv_pages_free"]
        undisturbed = await asyncio.gather(*(ask(http, i) for i in range(num_clients)))
        assert undisturbed[0].texts == first.texts

        for wave, num in enumerate(waves):
            leavers = set(rng.sample(range(num_clients), num_clients // 3))
            responses = [Response() for _ in range(num_clients)]
            clients = [
                ask(http, i, rng.uniform(0.05, 4) if i in leavers else None, responses[i])
                for i in range(num_clients)
            ]
            await asyncio.gather(kill_engines(server, num, rng, responses), *clients)
            for i, (response, expected) in enumerate(zip(responses, undisturbed, strict=True)):
                if response.is_whole:
                    assert (response.texts, response.ended) == (expected.texts, expected.ended), i
                    assert response.logprobs == expected.logprobs, i
                else:
                    assert i in leavers
                    assert response.begins(expected), i
            told = await settled(server, sum(waves[: wave + 1]))
            assert told["requests_submitted_total"] == told["requests_finished_total"]
        # so that the current engine, or both, have reported their pages
        await ask(http, num_clients)
        told = await settled(server, sum(waves))
        assert told["kv_pages_free"] == free
        assert told["requests_submitted_total"] == told["requests_finished_total"]
        assert httpx.get(f"{server.url}/ready").status_code == 200

        last = [asyncio.create_task(ask(http, i)) for i in range(num_clients)]
        await until_async(lambda: metrics(server)["requests_running"])
        processes = children(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        for i, outcome in enumerate(await asyncio.gather(*last, return_exceptions=True)):
            if isinstance(outcome, Response):
                assert outcome.texts == undisturbed[i].texts
            else:  # it came when no more were accepted
                assert "server_stopping" in str(outcome), outcome
    assert server.process.wait(LONG_S) == 0
    assert all(gone(pid) for pid in processes)
    left = [
        path for path in folder.rglob("*") if not path.is_dir() or path.name.startswith("tidemill-")
    ]
    assert [path for path in left if not path.name.startswith("tidemill-kv-")] == []
