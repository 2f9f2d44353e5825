"""A Ray cluster of two local nodes: actors and nodes are killed under load."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import aclosing
from itertools import count
from pathlib import Path

import httpx
import pytest

from tests.ray.conftest import MARK
from tests.server.conftest import Server
from tests.waiting import until, until_async
from tidemill.batch.run import Batch
from tidemill.cluster.ray.actor import EngineActor
from tidemill.cluster.ray.cluster import Cluster, Needs, NoRoom
from tidemill.config import EngineOptions
from tidemill.engine.client import EngineClient
from tidemill.errors import ConfigError, InvalidRequest
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
ray = pytest.importorskip("ray")

from tidemill.cluster.ray.batch import RayWorkers, WorkerOptions  # noqa: E402
from tidemill.cluster.ray.link import RayLink  # noqa: E402
from tidemill.cluster.ray.scale import ScalePolicy  # noqa: E402
from tidemill.cluster.ray.serving import RayOptions, RayReplicas  # noqa: E402

NUM = 40


def options(folder, **more):
    return EngineOptions(
        model=str(folder), served_name="tiny", threads=1, kv_memory_bytes=2**24, **more
    )


def request(number, length):
    return Submit(
        f"r{number}",
        [1 + number % 200, 7, 9],
        SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.0),
    )


async def answer(client, number, length=64):
    tokens = []
    async with aclosing(client.submit(request(number, length))) as deltas:
        async for delta in deltas:
            tokens += delta.token_ids
    return tokens


async def expected(folder, length=64):
    """By an engine of this machine, one request at a time."""
    client = EngineClient()
    await client.start(options(folder))
    try:
        return [await answer(client, number, length) for number in range(NUM)]
    finally:
        await client.close()


def engines():
    return processes(b"tidemill.engine")


def processes(module=None):
    """Those that run it and come from this run: others on this machine are not to be counted, and
    least of all to be killed. None: whatever they run."""
    found = []
    for pid in map(Path("/proc").joinpath, filter(str.isdecimal, os.listdir("/proc"))):
        try:
            is_ours = MARK.encode() in (pid / "environ").read_bytes().split(b"\0")
            if is_ours and (module is None or b"\0%b\0" % module in (pid / "cmdline").read_bytes()):
                found.append(int(pid.name))
        except OSError:
            continue
    return set(found)


def test_an_engine_in_an_actor(nodes, tiny_folder):
    """Killed, it is started elsewhere, and its requests go on; closed, nothing is left of it."""

    async def main():
        before = engines()
        truth = await expected(tiny_folder)
        cluster = Cluster(nodes.address, wait_s=120)
        links = []

        def new_link():
            links.append(RayLink(cluster, Needs(1)))
            return links[-1]

        client = EngineClient(new_link=new_link)
        try:
            await client.start(options(tiny_folder))
            assert await answer(client, 3) == truth[3]
            for num_lost, way in enumerate(("actor", "node", "engine"), 1):
                # before there is work, which may be done when the answer comes
                info = await links[-1]._actor.info.remote()
                node = next(one for one in nodes.worker_nodes if one.node_id == info.node_id)
                # not one that a lost node has left
                (engine,) = (pid for pid in engines() if parent(pid) == info.pid)
                work = [asyncio.create_task(answer(client, number)) for number in range(NUM)]
                await until_async(
                    lambda: any(pending.has_token for pending in client.pending.values()), 0.001
                )
                if way == "node":
                    nodes.remove_node(node, allow_graceful=False)
                else:
                    os.kill(info.pid if way == "actor" else engine, signal.SIGKILL)
                assert await asyncio.gather(*work) == truth, way
                await until_async(lambda num=num_lost: client.num_restarts >= num)
            assert client.num_restarts == 3
            cluster.wait_s = 2
            with pytest.raises(NoRoom, match="cannot be placed"):
                await cluster.place(EngineActor, Needs(2))
        finally:
            await client.close()
        await until_async(lambda: not engines() - before, 0.1)
        cluster.close()

    asyncio.run(main())


def test_ranks_of_a_replica(nodes, tiny_folder):
    """An actor whose engine has two ranks: one of them is killed, and requests go on; closed,
    neither is left."""

    async def main():
        before, truth = processes(b"tidemill.engine.worker"), await expected(tiny_folder, 32)
        cluster = Cluster(nodes.address, wait_s=120)
        client = EngineClient(
            new_link=lambda: RayLink(
                cluster, cluster.needs_of(options(tiny_folder, tensor_parallel=2), 1)
            )
        )
        try:
            await client.start(options(tiny_folder, tensor_parallel=2))
            work = [asyncio.create_task(answer(client, number, 32)) for number in range(8)]
            await until_async(
                lambda: any(pending.has_token for pending in client.pending.values()), 0.001
            )
            (worker,) = processes(b"tidemill.engine.worker") - before
            os.kill(worker, signal.SIGKILL)
            assert await asyncio.gather(*work) == truth[:8]
            assert client.num_restarts == 1
        finally:
            await client.close()
        await until_async(lambda: not processes(b"tidemill.engine.worker") - before, 0.1)
        cluster.close()

    asyncio.run(main())


def parent(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def node_of(nodes, pid):
    """Whose raylet has started the process."""
    raylets = {
        info.process.pid: node
        for node in nodes.worker_nodes
        for info in node.all_processes["raylet"]
    }
    while pid not in raylets:
        pid = parent(pid)
    return raylets[pid]


def test_a_server_loses_no_request_when_actors_and_nodes_are_killed(nodes, tiny_folder):
    """Over HTTP, with as many requests under way as it gets. Greedy answers are those of an
    undisturbed server."""
    before = engines()
    options = (
        "--ray",
        "--ray-address",
        nodes.address,
        "--replicas",
        "2",
        "--threads",
        "1",
        "--ray-wait",
        "120",
    )
    server = Server(tiny_folder, *options, "--kv-memory", "16M", "--speculate", "off").wait()

    async def ask(client, number, stream):
        body = {"model": "tiny", "prompt": f"Day {number}", "temperature": 0, "ignore_eos": True}
        body["max_tokens"] = 20 + 10 * number
        if not stream:
            reply = await client.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            return reply.json()["choices"][0]["text"]
        text = ""
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
            assert reply.status_code == 200
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    part = json.loads(line[6:])
                    assert "error" not in part, part
                    text += part["choices"][0]["text"] if part["choices"] else ""
        return text

    async def main():
        limits = httpx.Limits(max_connections=NUM)
        async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:
            truth = [await ask(client, number, False) for number in range(NUM)]
            num_moved = 0.0
            for way in ("actor", "node"):
                work = [
                    asyncio.create_task(ask(client, number, number % 2 == 0))
                    for number in range(NUM)
                ]
                # All are under way, and some have been answered.
                await until_async(lambda work=work: any(task.done() for task in work), 0.001)
                victim = sorted(engines() - before)[0]
                if way == "actor":
                    os.kill(parent(victim), signal.SIGKILL)
                else:
                    nodes.remove_node(node_of(nodes, victim), allow_graceful=False)
                assert await asyncio.gather(*work) == truth, way
                told = (await client.get("/metrics")).text.splitlines()
                moved = [
                    line
                    for line in told
                    if "requests_finished_total" in line and 'reason="abort"' in line
                ]
                assert sum(float(line.split()[-1]) for line in moved) > num_moved, (
                    "none was under way there"
                )
                num_moved = sum(float(line.split()[-1]) for line in moved)
                # What was lost is started again where there is room.
                await until_async(lambda: len(engines() - before) >= 2, 0.1)

    try:
        asyncio.run(main())
    finally:
        assert server.stop() == 0, server.process.stdout.read()
    until(lambda: engines() == before)


def test_replicas_come_and_go_with_the_load(nodes, tiny_folder):
    async def main():
        before = engines()
        cluster = Cluster(nodes.address, wait_s=120)
        policy = ScalePolicy(1, 2, wait_s=0.01, up_after_s=0.5, down_after_s=1.0, settle_s=0.5)
        seen = []
        replicas = RayReplicas(cluster, RayOptions(1, policy), Needs(1), seen.extend)
        await replicas.start(options(tiny_folder, max_requests=2))
        try:
            truth = await answer(replicas, 5)
            numbers, work = count(), set()
            while replicas.num_replicas < 2:
                while len(work) < 20:
                    work.add(asyncio.create_task(answer(replicas, next(numbers))))
                done, work = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
                assert all(len(task.result()) == 64 for task in done)
            assert len(engines() - before) == 2
            await asyncio.gather(*work)
            assert await answer(replicas, 5) == truth
            await until_async(
                lambda: replicas.num_replicas <= 1 and len(engines() - before) <= 1, 0.05
            )
            assert await answer(replicas, 5) == truth
            loaded = [type(event).__name__ for event in seen if "Model" in type(event).__name__]
            assert loaded == ["ModelLoading", "ModelLoaded", "ModelUnloaded"]
            with pytest.raises(InvalidRequest, match="autoscale"):
                await replicas.adapters.load("name", "path")
        finally:
            await replicas.close()
            cluster.close()
        until(lambda: engines() == before)

    asyncio.run(main())


def test_each_line_once_though_workers_are_killed(nodes, tiny_folder, tmp_path):
    lines = [
        {"custom_id": str(i), "prompt": f"Day {i % 20}", "max_tokens": 2, "temperature": 0}
        for i in range(1000)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    async def main():
        cluster = Cluster(nodes.address, wait_s=120)
        workers = RayWorkers(
            cluster, WorkerOptions(engine=options(tiny_folder), num_workers=2, needs=Needs(1))
        )
        await workers.start()
        infos = [await actor.info.remote() for actor in workers.actors.values()]
        assert infos[0].node_id != infos[1].node_id  # they are spread
        files = Batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl")
        killed = []

        def on_progress(done):
            if not killed and done.num_done > 200:
                killed.append(infos[0].pid)
                os.kill(infos[0].pid, signal.SIGKILL)
            if len(killed) == 1 and done.num_done > 600:
                killed.append(infos[1].node_id)
                node = next(one for one in nodes.worker_nodes if one.node_id == infos[1].node_id)
                nodes.remove_node(node, allow_graceful=False)

        try:
            await files.run(workers, on_progress)
        finally:
            files.close()
            await workers.close()
        assert len(killed) == 2
        assert workers.num_lost >= 2

    asyncio.run(main())
    made = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert Counter(one["custom_id"] for one in made) == Counter(line["custom_id"] for line in lines)
    texts = {}
    for one in made:
        texts.setdefault(int(one["custom_id"]) % 20, set()).add(
            one["response"]["body"]["choices"][0]["text"]
        )
    assert all(len(each) == 1 for each in texts.values())


def test_mistakes_are_told_and_nothing_is_left(nodes, tmp_path, tiny_folder):
    before = engines()
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    for more, said in (
        (["--replicas", "9", "--ray-wait", "3", "-m", str(tiny_folder)], "no room for the workers"),
        (["-m", str(tmp_path)], "config.json"),
        (
            ["--ray-address", "127.0.0.1:1", "-m", str(tiny_folder)],
            "No Ray cluster can be used at 127.0.0.1:1",
        ),
        (["--ray-address", "ray://127.0.0.1:1", "-m", str(tiny_folder)], "client proxy"),
    ):
        address = [] if "--ray-address" in more else ["--ray-address", nodes.address]
        command = [
            sys.executable,
            "-m",
            "tidemill",
            "batch",
            str(tmp_path / "in.jsonl"),
            str(tmp_path / "out.jsonl"),
            "--ray",
        ]
        ended = subprocess.run(
            [*command, *address, *more, "--threads", "1"],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ended.returncode == 1, ended
        assert said in ended.stderr, ended.stderr
        assert "Traceback" not in ended.stderr, ended.stderr
    assert engines() == before
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_the_serve_application(nodes, tiny_folder):
    from ray import serve

    from tidemill.cluster.ray import app

    ray.init(address=nodes.address)
    with pytest.raises(ConfigError, match="no argument 'colour'"):
        app({"colour": "blue"})
    with pytest.raises(ConfigError, match="cannot be used"):
        app({"max_context": "long"})
    serve.start(http_options={"host": "127.0.0.1", "port": 8199})
    try:
        serve.run(
            app(
                {
                    "model": str(tiny_folder),
                    "served_name": "tiny",
                    "num_replicas": "2",
                    "threads": "1",
                }
            )
        )
        with httpx.Client(base_url="http://127.0.0.1:8199", timeout=120) as client:
            body = {"model": "tiny", "prompt": "The tide", "max_tokens": 8, "temperature": 0}
            texts = {
                client.post("/v1/completions", json=body).json()["choices"][0]["text"]
                for _ in range(8)
            }
            assert len(texts) == 1
            events = client.post("/v1/completions", json=body | {"stream": True}).text
            assert events.rstrip().endswith("data: [DONE]")
            assert client.post("/v1/completions", json=body | {"model": "other"}).status_code == 404
            assert client.post("/v1/files").status_code == 501
    finally:
        serve.shutdown()
