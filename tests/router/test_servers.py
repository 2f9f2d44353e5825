"""`tidemill route` in front of two real servers, used by the openai client."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import httpx
import openai
import pytest

from tests.helpers import LONG_S, byte_tokenizer, make_llama
from tests.server.conftest import Server


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("roomy")
    make_llama(path, vocab_size=320, max_position_embeddings=4096)
    byte_tokenizer(path)
    return path


@pytest.mark.slow
def test_two_servers_give_the_tokens_of_one_and_none_is_lost_if_one_is_killed(model):
    servers = [Server(model, "--threads", "1"), Server(model, "--threads", "1")]
    router = None
    try:
        for server in servers:
            server.wait()
        command = [
            sys.executable,
            "-m",
            "tidemill",
            "route",
            *(server.url for server in servers),
            "--port",
            "0",
        ]
        router = subprocess.Popen(
            [*command, "--health-seconds", "0.5"], stderr=subprocess.PIPE, text=True
        )
        lines = iter(router.stderr.readline, "")
        url = next(
            word
            for line in lines
            if "routes" in line
            for word in line.split()
            if word.startswith("http")
        )
        asyncio.run(_use(url, servers))
        # Ctrl-C while a response is under way: it ends as it would have
        with httpx.Client(base_url=url) as client:
            body = {
                "model": "tiny",
                "prompt": "the last one",
                "max_tokens": 200,
                "temperature": 0,
                "ignore_eos": True,
            }
            with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
                events = response.iter_lines()
                next(events)
                router.send_signal(signal.SIGINT)
                assert [line for line in events if line][-1] == "data: [DONE]"
        assert router.wait(LONG_S) == 0
    finally:
        if router is not None:
            router.kill()
        for server in servers:
            server.stop()


async def _use(url: str, servers: list[Server]) -> None:
    def ask(client: openai.AsyncOpenAI, number: int):
        return client.completions.create(
            model="tiny",
            prompt=f"{number} " + "words " * 30,
            max_tokens=60,
            temperature=0,
            extra_body={"ignore_eos": True},
        )

    direct = openai.AsyncOpenAI(base_url=f"{servers[0].url}/v1", api_key="x", max_retries=0)
    routed = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    assert [one.id for one in (await routed.models.list()).data] == ["tiny"]
    expected = [
        one.choices[0].text for one in await asyncio.gather(*(ask(direct, i) for i in range(24)))
    ]
    answers = [
        one.choices[0].text for one in await asyncio.gather(*(ask(routed, i) for i in range(24)))
    ]
    assert answers == expected
    assert min(server.gauge("requests_submitted_total") for server in servers) > 0
    again = asyncio.gather(*(ask(routed, i) for i in range(24)))
    load = f"{url}/router/upstreams"
    async with httpx.AsyncClient() as client:
        while not all(one["load"] for one in (await client.get(load)).json()["upstreams"]):
            await asyncio.sleep(0.01)
        servers[1].process.kill()
        # each once, whichever server was asked first
        assert [one.choices[0].text for one in await again] == expected
        states = (await client.get(load)).json()["upstreams"]
        assert [one["load"] for one in states] == [0, 0]
