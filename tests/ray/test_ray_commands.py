"""`tidemill serve --ray` as a user types it, on two local nodes: ranks, roles, autoscaling; and
mistakes: one error each."""

import asyncio
import json
import os
import signal

import httpx
import pytest

from bench.parallel import RANDOM
from tests.helpers import byte_tokenizer
from tests.ray.conftest import MARK
from tests.ray.test_ray import engines, processes
from tests.server.conftest import Server
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
pytest.importorskip("ray")

NUM = 12
COMMON = ("--threads", "1", "--kv-memory", "16M", "--speculate", "off")
WORKER = b"tidemill.engine.worker"
QUICK = """
import tidemill.cluster.ray.scale as scale
quick = dict(wait_s=0.01, up_after_s=0.5, down_after_s=2.0, settle_s=0.5)
scale.ScalePolicy.__init__.__defaults__ = tuple(quick.values()) + scale.ScalePolicy.__init__.__defaults__[-1:]
"""


def on(nodes, *more):
    return ("--ray", "--ray-address", nodes.address, "--ray-wait", "120", *COMMON, *more)


async def ask(client, number):
    body = {
        "model": "tiny",
        "prompt": f"Day {number % NUM}",
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": 100,
    }
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"]


def client_of(server):
    return httpx.AsyncClient(
        base_url=server.url, timeout=600, limits=httpx.Limits(max_connections=200)
    )


async def ask_all(server):
    async with client_of(server) as client:
        return await asyncio.gather(*(ask(client, number) for number in range(NUM)))


@pytest.fixture(scope="module")
def truth(tiny_folder):
    """By a server without Ray."""
    server = Server(tiny_folder, *COMMON).wait()
    try:
        return asyncio.run(ask_all(server))
    finally:
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("given", "num_engines", "num_workers"),
    [
        (["--replicas", "2"], 2, 0),
        (["--replicas", "2", "--tensor-parallel", "2"], 2, 2),
        (["--prefill", "1", "--decode", "1"], 2, 0),
    ],
    ids=["replicas", "ranks", "roles"],
)
def test_what_a_server_without_ray_says(nodes, tiny_folder, truth, given, num_engines, num_workers):
    before = engines()
    server = Server(tiny_folder, *on(nodes, *given)).wait()
    try:
        assert len(engines() - before) == num_engines
        assert len(processes(WORKER)) == num_workers
        assert asyncio.run(ask_all(server)) == truth
    finally:
        assert server.stop() == 0, server.process.stdout.read()
    until(lambda: engines() == before and not processes(WORKER))


def test_autoscaling(nodes, tiny_folder, truth):
    """From one replica to three while requests wait, and back. Those that run on a replica which is
    to stop are answered."""
    before = engines()
    server = Server(
        tiny_folder, *on(nodes, "--autoscale", "1:3", "--max-requests", "2"), patch=QUICK
    ).wait()

    async def main():
        async with client_of(server) as client:
            numbers, work = iter(range(10**9)), set()

            async def keep(num_under_way, state):
                nonlocal work
                while not state():
                    while len(work) < num_under_way:
                        number = next(numbers)
                        work.add(asyncio.create_task(check(number)))
                    _, work = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)

            async def check(number):
                assert await ask(client, number) == truth[number % NUM]

            assert len(engines() - before) == 1
            await keep(30, lambda: len(engines() - before) == 3)
            await keep(1, lambda: len(engines() - before) == 1)
            await asyncio.gather(*work)

    try:
        asyncio.run(main())
    finally:
        assert server.stop() == 0, server.process.stdout.read()
    until(lambda: engines() == before)


def test_mistakes(nodes, tiny_folder, tmp_path):
    before = engines()
    there = ["--ray-address", nodes.address]
    for given, patch, said in (
        (["--ray-address", "127.0.0.1:1"], "", "No Ray cluster can be used at 127.0.0.1:1"),
        (
            [*there, "--replicas", "9", "--ray-wait", "3"],
            "",
            "no room for the replicas: 9 x 1 CPUs cannot be placed within 3 s",
        ),
        (
            [*there, "--tensor-parallel", "3", "--ray-wait", "3"],
            "",
            "no room for the replicas: 1 x 3 CPUs",
        ),
        ([*there, "--replicas", "0"], "", "--replicas"),
        ([*there, "--replicas", "two"], "", "--replicas"),
        ([*there, "--autoscale", "3:1"], "", "Write MIN:MAX"),
        ([*there, "--prefill", "1"], "", "There is no decode engine"),
        ([*there, "--data-parallel", "2"], "", "--ray is for a single model"),
        (
            there,
            "import tidemill.version\ntidemill.version.__version__ = '9.9.9'",
            "Install the same version on all nodes",
        ),
    ):
        server = Server(tiny_folder, "--ray", *COMMON, *given, patch=patch)
        told, _ = server.process.communicate(timeout=600)
        assert server.process.returncode in (1, 2), told
        assert said in told.replace("\n", " "), told
        assert "Traceback" not in told, told
        assert engines() == before
    server = Server(tmp_path, "--ray", *there, *COMMON)
    told, _ = server.process.communicate(timeout=600)
    assert server.process.returncode == 1, told
    assert "Traceback" not in told, told
    assert engines() == before


def test_a_cluster_that_is_started_for_the_command_ends_with_it(tiny_folder, truth, monkeypatch):
    """Also if the command fails."""
    monkeypatch.setenv(*MARK.split("="))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    before = processes()
    server = Server(tiny_folder, "--ray", "--replicas", "1", *COMMON).wait()
    try:
        assert asyncio.run(ask_all(server)) == truth
    finally:
        assert server.stop() == 0, server.process.stdout.read()
    until(lambda: processes() <= before)
    server = Server(tiny_folder, "--ray", "--replicas", "999", "--ray-wait", "1", *COMMON)
    told, _ = server.process.communicate(timeout=600)
    assert server.process.returncode == 1, told
    assert told.count("error:") == 1, told
    assert "no room for the replicas: 999 x 1 CPUs" in told, told
    until(lambda: processes() <= before)


def test_a_rank_that_dies_while_it_loads(nodes, tmp_path):
    """The server does not start, says so once, and nothing is left on the cluster."""
    (tmp_path / "config.json").write_text(json.dumps(RANDOM["dense"]))
    byte_tokenizer(tmp_path)
    before = engines()
    server = Server(
        tmp_path,
        *on(nodes, "--tensor-parallel", "2", "--load-format", "dummy", "--dtype", "float32"),
    )
    until(lambda: processes(WORKER) or server.process.poll() is not None)
    for worker in processes(WORKER):
        os.kill(worker, signal.SIGKILL)
    told, _ = server.process.communicate(timeout=600)
    assert server.process.returncode == 1, told
    assert told.count("error:") == 1, told
    assert "Worker 1" in told, told
    assert "Traceback" not in told, told
    until(lambda: engines() == before and not processes(WORKER))
