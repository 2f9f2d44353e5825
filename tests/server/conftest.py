"""A real server: `tidemill serve` as a process of its own, on a tiny model."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.types import ASGIApp

from bench.ports import reserved_port
from tests.helpers import LONG_S, byte_tokenizer, make_llama
from tests.server.collector import Collector
from tests.server.lag import PATCH
from tests.server.scripted import make_scripted
from tests.waiting import until, until_async
from tidemill.server.http.connections import BoundedProtocol


class Server:
    def __init__(self, model: Path | None, *options: str, patch: str = "") -> None:
        """`model`: served as tiny; None: the options name the models. `patch`: Python that is run
        in the server first."""
        self._reserved = contextlib.ExitStack()
        self.port = self._reserved.enter_context(reserved_port())
        self.url = f"http://127.0.0.1:{self.port}"
        command = [
            sys.executable,
            *(
                ("-c", f"{patch}\nfrom tidemill.cli.main import main\nmain()")
                if patch
                else ("-m", "tidemill")
            ),
            "serve",
            *([str(model), "--served-name", "tiny"] if model else []),
            "--port",
            str(self.port),
            "--no-request-log",  # nobody reads the pipe until the end
            # threads that wait for each other spin, a third of what these tests would take
            "--threads",
            "1",
            "--data-dir",
            f"{tempfile.gettempdir()}/data-of-tests/{uuid.uuid4()}",  # made only if it is used
            *options,
        ]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def wait(self) -> Server:
        until(self._is_up)
        return self

    def _is_up(self) -> bool:
        assert self.process.poll() is None, self.process.stdout.read()
        with contextlib.suppress(OSError, httpx.HTTPError):
            # much cheaper while nobody listens
            socket.create_connection(("127.0.0.1", self.port)).close()
            return httpx.get(f"{self.url}/health").status_code == 200
        return False

    def gauge(self, name: str, model: str | None = None) -> float:
        """`model`: where there are several."""
        labels = "" if model is None else f'{{model="{model}"}}'
        for line in httpx.get(f"{self.url}/metrics").text.splitlines():
            if line.startswith(f"tidemill_{name}{labels} "):
                return float(line.split()[1])
        raise KeyError(name)

    def engine_pid(self, missing: int = 0) -> int:
        """`missing`: what to say if there is none at the moment."""
        found = self.engine_pids()
        return found[0] if found else missing

    def engine_pids(self) -> list[int]:
        """In the order in which they were started."""
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return sorted(
            int(pid)
            for path in children
            for pid in path.read_text().split()
            if b"tidemill.engine" in command_of(pid)
        )

    def stop(self, number: int = signal.SIGINT) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(LONG_S)
        finally:
            self.process.kill()
            self._reserved.close()


def command_of(pid: int | str) -> bytes:
    """Empty: there is no such process, or not any more."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@asynccontextmanager
async def behind_our_protocol(app: ASGIApp) -> AsyncIterator[int]:
    """An app of the test's own, served as ours is; its port."""
    running = uvicorn.Server(
        uvicorn.Config(app, port=0, http=BoundedProtocol, log_level="error", lifespan="off")
    )
    task = asyncio.create_task(running.serve())
    await until_async(lambda: running.started)
    try:
        yield running.servers[0].sockets[0].getsockname()[1]
    finally:
        running.should_exit = True
        await task


@pytest.fixture(scope="session")
def roomy_folder(tmp_path_factory) -> Path:
    """The tiny model with a context that has room for tools and conversations, of which each
    character is a token."""
    path = tmp_path_factory.mktemp("roomy")
    make_llama(path, vocab_size=320, max_position_embeddings=4096)
    byte_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def roomy(roomy_folder):
    """Without speculation: what it says soon repeats itself, and a long answer would be over before
    a test can stop it. It measures the turns of its event loop for who asks
    (tests/server/lag.py)."""
    running = Server(roomy_folder, "--speculate", "off", patch=PATCH).wait()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="session")
def scripted(tmp_path_factory):
    """A model that thinks and fills in the middle, always the same."""
    path = tmp_path_factory.mktemp("scripted")
    make_scripted(path)
    running = Server(path).wait()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="session")
def server(tiny_folder):
    running = Server(tiny_folder).wait()
    yield running
    assert running.stop() == 0


KEYS = ("key-of-the-first-user", "key-of-the-other-user")


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory) -> Path:
    """Of `tenants`: made when it is needed."""
    return tmp_path_factory.mktemp("files") / "deep" / "data"


@pytest.fixture(scope="session")
def log_of_requests(tmp_path_factory) -> Path:
    """What `tenants` writes about requests."""
    return tmp_path_factory.mktemp("log") / "requests.log"


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Where `tenants` sends its spans."""
    running = Collector()
    yield running
    running.close()


@pytest.fixture(scope="session")
def tenants(roomy_folder, data_folder, log_of_requests, collector):
    """Two keys, no admin key, and room for few files. Requests are logged and traced."""
    options = [word for key in KEYS for word in ("--api-key", key)]
    options += [
        "--request-log",
        "--log-format",
        "json",
        "--log-file",
        str(log_of_requests),
        "--otlp-endpoint",
        collector.url,
    ]
    options += ["--data-dir", str(data_folder), "--data-quota", "1MB"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        patch.setenv("OTEL_SERVICE_NAME", "mill-7")
        running = Server(roomy_folder, *options).wait()
    assert not data_folder.parent.exists(), "nothing is on the disk before it is needed"
    yield running
    assert running.stop() == 0
