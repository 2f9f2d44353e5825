"""How groups of real processes begin and end: killed workers, other hosts, mistakes. One error
each, and nobody is left."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, aclosing, contextmanager
from pathlib import Path

import pytest

from tests.helpers import LONG_S, greedy, make_llama, run
from tests.models.test_llama import prompts
from tests.parallel.test_processes import LAYOUTS, dense, moe
from tests.waiting import until, until_async
from tidemill.config import EngineOptions
from tidemill.engine.client import EngineClient
from tidemill.engine.load import load_core
from tidemill.errors import ConfigError, WorkerLost
from tidemill.types.events import EngineRestarted
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

pytestmark = pytest.mark.slow
KEY = "0123456789abcdef0123"


def children(pid: int) -> list[int]:
    """Workers that a process has started."""
    found = [
        child
        for task in Path(f"/proc/{pid}/task").glob("*/children")
        for child in task.read_text().split()
    ]
    return [
        int(child)
        for child in found
        if b"tidemill.engine.worker" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
    except OSError:
        return True


def shared_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("tidemill-*")}


# ---- on one host


@pytest.mark.parametrize("layout", ["tp2", "pp2", "ep2"])
def test_a_batch_goes_on_after_a_worker_was_killed(tmp_path, layout):
    (moe if layout == "ep2" else dense)(tmp_path)
    drawn = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.9, seed=5)
    asked = {
        f"r{i}": ([5 + i, 6, 7], drawn if i % 2 else greedy(40, ignore_eos=True)) for i in range(6)
    }

    async def tokens(client, turn, name, on_token):
        seen = []
        async with aclosing(client.submit(Submit(f"{turn} {name}", *asked[name]))) as deltas:
            async for delta in deltas:
                seen += delta.token_ids
                on_token(len(seen))
        return seen

    async def whole():
        events = []
        client = EngineClient(on_events=events.extend)

        def kill_once(num):
            if num >= 5 and not killed:
                (worker,) = children(client.link.pid)
                killed.append(worker)
                os.kill(worker, signal.SIGKILL)

        async def batch(turn, on_token=lambda num: None):
            return await asyncio.wait_for(
                asyncio.gather(*(tokens(client, turn, name, on_token) for name in asked)), LONG_S
            )

        killed = []
        try:
            await client.start(EngineOptions(model=str(tmp_path), threads=1, **LAYOUTS[layout]))
            undisturbed = await batch("undisturbed")
            assert {len(each) for each in undisturbed} == {40}
            assert await batch("disturbed", kill_once) == undisturbed
            assert client.num_restarts == 1
            assert "orker" in next(
                event.reason for event in events if isinstance(event, EngineRestarted)
            )
            # Also while nothing is asked of it.
            (worker,) = children(client.link.pid)
            os.kill(worker, signal.SIGKILL)
            await until_async(lambda: client.num_restarts >= 2)
            engine = client.link.pid
            left = [*killed, worker, engine, *children(engine)]
        finally:
            await client.close()
        until(lambda: all(map(is_gone, left)))

    asyncio.run(whole())


@pytest.mark.parametrize("layout", ["tp4", "tp2 pp2", "gathered2"])
def test_a_worker_killed_while_it_loads(tmp_path, layout):
    """The group does not start, the reason is one error, and neither processes nor shared memory
    are left."""
    dense(tmp_path)
    before, workers = shared_files(), []

    def progress(name, done, total):
        if name.startswith("worker") and not workers:
            workers.extend(children(os.getpid()))
            os.kill(workers[0], signal.SIGKILL)

    ranks = EngineOptions(model=str(tmp_path), threads=1, **LAYOUTS[layout])
    with pytest.raises(WorkerLost, match=r"Worker \d of the group is gone: it ended with code -9"):
        load_core(ranks, progress)
    assert len(workers) == ranks.tensor_parallel * ranks.pipeline_parallel - 1
    assert all(map(is_gone, workers))
    assert shared_files() <= before


def test_a_worker_killed_before_it_comes(tmp_path):
    dense(tmp_path)
    killed = []

    def progress(name, done, total):
        if (
            "have not come yet" in name
            and not killed
            and len(started := children(os.getpid())) == 3
        ):
            killed.extend(started)
            os.kill(killed[0], signal.SIGKILL)

    with pytest.raises(WorkerLost, match="Worker 1 ended with code -9 while starting"):
        load_core(EngineOptions(model=str(tmp_path), threads=1, tensor_parallel=4), progress)
    assert len(killed) == 3
    assert all(map(is_gone, killed))


def test_workers_end_with_an_engine_that_was_killed(tmp_path):
    dense(tmp_path)
    code = (
        "import time; from tidemill.engine.load import load_core, EngineOptions; "
        f"core = load_core(EngineOptions(model={str(tmp_path)!r}, threads=1, tensor_parallel=2)); "
        "print('ready', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"ready\n"
        workers = children(process.pid)
        assert len(workers) == 1
    finally:
        process.kill()
        process.wait()
    until(lambda: all(map(is_gone, workers)))


# ---- workers of other hosts. Here it is this host: what differs is how they come.


@pytest.fixture
def remote(tmp_path, port):
    """Options of a group with one of them, and what starts it."""
    dense(tmp_path)
    key = tmp_path / "key"
    key.write_text(KEY)
    address = f"127.0.0.1:{port}"
    given = {"remote_workers": 1, "workers_address": address, "workers_key_file": str(key)}

    @contextmanager
    def worker(*more, key_file=key):
        command = [
            "worker",
            "--join",
            address,
            "--key-file",
            str(key_file),
            "--threads",
            "1",
            *map(str, more),
        ]
        process = subprocess.Popen(
            [sys.executable, "-m", "tidemill", *command], stderr=subprocess.PIPE, text=True
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    return EngineOptions(model=str(tmp_path), threads=1, **given), worker


def with_layout(options, layout):
    return EngineOptions(
        **{
            name: getattr(options, name)
            for name in (
                "model",
                "threads",
                "remote_workers",
                "workers_address",
                "workers_key_file",
            )
        },
        **layout,
    )


@pytest.mark.parametrize("layout", ["tp2", "pp2", "gathered2"])
def test_a_worker_of_another_host(remote, layout):
    options, worker = remote
    asked = {name: (prompt, greedy(12)) for name, prompt in prompts(4, 256).items()}
    expected = run(load_core(EngineOptions(model=options.model, threads=1)), asked)
    with worker() as joined:
        for turn in range(2):  # after a group that failed, the worker joins the next
            core = load_core(with_layout(options, LAYOUTS[layout]))
            answers = run(core, asked)
            assert {name: answer.tokens for name, answer in answers.items()} == {
                name: answer.tokens for name, answer in expected.items()
            }
            if turn == 0:
                core.runner.team.fail(ConnectionError("as if"))
            core.close()
        assert joined.wait(LONG_S) == 0  # the second ended in good order


def test_requests_go_on_after_a_worker_of_another_host_was_killed(remote):
    """First its process, which the command starts again; then the command itself, in whose place
    another comes."""
    options, worker = remote
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.9, seed=5)

    async def tokens(client, name, on_token=lambda num: None):
        seen = []
        async with aclosing(client.submit(Submit(name, [5, 6, 7], params))) as deltas:
            async for delta in deltas:
                seen += delta.token_ids
                on_token(len(seen))
        return seen

    async def whole():
        client, begun = EngineClient(on_events=lambda events: None), ExitStack()
        joined, killed = [begun.enter_context(worker())], []

        def kill_process(num):
            if num >= 5 and not killed:
                killed.extend(children(joined[0].pid))
                os.kill(killed[0], signal.SIGKILL)

        def kill_command(num):
            if num >= 5 and len(joined) == 1:
                killed.extend(children(joined[0].pid))
                joined[0].kill()
                joined.append(begun.enter_context(worker()))

        with begun:
            try:
                await client.start(with_layout(options, LAYOUTS["tp2"]))
                undisturbed = await tokens(client, "undisturbed")
                for number, kill in enumerate((kill_process, kill_command), 1):
                    assert (
                        await asyncio.wait_for(tokens(client, f"disturbed {number}", kill), LONG_S)
                        == undisturbed
                    )
                    assert client.num_restarts == number
            finally:
                await client.close()
            assert len(killed) == 2
            until(lambda: all(map(is_gone, killed)))
            assert joined[1].wait(LONG_S) == 0  # in good order, with the server

    asyncio.run(whole())


# ---- mistakes


def ended(process) -> tuple[int, str]:
    """Its code, and what it says but for progress."""
    _, said = process.communicate(timeout=LONG_S)
    return process.returncode, "\n".join(
        line for line in said.splitlines() if not line.startswith("Joining")
    )


def test_a_worker_that_nobody_answers(remote):
    _, worker = remote
    with worker("--wait", 1) as lonely:
        code, said = ended(lonely)
    assert code == 1
    assert "Cannot reach rank 0 at 127.0.0.1:" in said
    assert "Traceback" not in said


def test_a_worker_with_another_key(remote, tmp_path):
    options, worker = remote
    other = tmp_path / "other"
    other.write_text(KEY[::-1])
    with worker(key_file=other) as stranger, worker():
        core = load_core(with_layout(options, LAYOUTS["tp2"]))  # with the one that knows it
        code, said = ended(stranger)
        core.close()
    assert code == 1
    assert "another key" in said
    assert "Traceback" not in said


def test_a_worker_with_another_model(remote, tmp_path):
    options, worker = remote
    (tmp_path / "other").mkdir()
    make_llama(
        tmp_path / "other",
        seed=1,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    )
    with worker("--model", tmp_path / "other") as wrong:
        with pytest.raises(ConfigError, match="Worker 1 has another model than rank 0"):
            load_core(with_layout(options, LAYOUTS["tp2"]))
        code, said = ended(wrong)
    assert code == 1
    assert said.count("has another model than rank 0") == 1
    assert "Traceback" not in said


def test_a_port_that_is_taken(remote):
    options, _ = remote
    host, _, port = options.workers_address.rpartition(":")
    with (
        socket.create_server((host, int(port))),
        pytest.raises(ConfigError, match=f"Cannot listen on {host}:{port}"),
    ):
        load_core(with_layout(options, LAYOUTS["tp2"]))
