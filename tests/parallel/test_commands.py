"""Mistakes and failures of groups, by the commands that a user types: one error each, and nothing
is left of them."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

import tidemill
from bench.parallel import RANDOM
from tests.helpers import byte_tokenizer, make_llama
from tests.waiting import until
from tidemill.version import __version__

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LONG_S = 600.0
KEY = "0123456789abcdef0123"
OLD = "0.0.1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_llama(
        path, vocab_size=320, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2
    )
    byte_tokenizer(path)
    return path


class Place:
    """Where commands are run: a mark by which all that they start is found again, and a package of
    this or another version."""

    def __init__(self, path: Path, port: int) -> None:
        self.path, self.mark, self.began = path, f"TEST_RUN={uuid4()}", shared_files()
        self.key = path / "key"
        self.key.write_text(KEY)
        self.address = f"127.0.0.1:{port}"

    @contextmanager
    def run(self, *arguments, root: Path | None = None):
        environment = os.environ | dict([self.mark.split("=")])
        if root is not None:
            environment["PYTHONPATH"] = str(root)
        command = [sys.executable, "-m", "tidemill", *map(str, arguments)]
        with (self.path / uuid4().hex).open("w+") as said:
            process = subprocess.Popen(
                command, stdout=said, stderr=subprocess.STDOUT, env=environment, cwd=root
            )
            process.said = Path(said.name)
            try:
                yield process
            finally:
                process.kill()
                process.wait()

    def serve(self, model, *options):
        common = [
            "--port",
            "0",
            "--threads",
            "1",
            "--kv-memory",
            "16M",
            "--data-dir",
            self.path / "data",
        ]
        return self.run("serve", model, *common, *options)

    def worker(self, *options, root=None):
        return self.run(
            "worker",
            "--join",
            self.address,
            "--key-file",
            self.key,
            "--threads",
            "1",
            *options,
            root=root,
        )

    @property
    def remote(self):
        return [
            "--remote-workers",
            "1",
            "--workers-address",
            self.address,
            "--workers-key-file",
            self.key,
        ]

    def processes(self, module=b"") -> list[int]:
        """That run, of all that was started here."""
        found = []
        for pid in map(Path("/proc").joinpath, filter(str.isdecimal, os.listdir("/proc"))):
            try:
                if (
                    self.mark.encode() in (pid / "environ").read_bytes().split(b"\0")
                    and module in (pid / "cmdline").read_bytes()
                ):
                    found.append(int(pid.name))
            except OSError:
                continue
        return found

    def failed(self, process, *words) -> None:
        """It has ended with one error that says this, and what it has started is gone."""
        assert process.wait(LONG_S) == 1, process.said.read_text()
        said = process.said.read_text()
        for word in words:
            assert word in said, said
        assert said.count("error:") == 1, said
        assert "Traceback" not in said, said

    def check_nothing_is_left(self) -> None:
        until(lambda: not self.processes())
        assert shared_files() <= self.began


def shared_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("tidemill-*")}


@pytest.fixture
def place(tmp_path, port):
    made = Place(tmp_path, port)
    yield made
    made.check_nothing_is_left()


def older(path: Path) -> Path:
    """This package with another version: a folder to import it from."""
    package = path / "older" / "tidemill"
    package.mkdir(parents=True)
    for one in Path(tidemill.__file__).parent.iterdir():
        if one.name not in ("version.py", "__pycache__"):
            (package / one.name).symlink_to(one)
    (package / "version.py").write_text(f'__version__ = "{OLD}"\n')
    return package.parent


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tensor-parallel", "5"], "cannot be shared out among 5 ranks"),
        (["--pipeline-parallel", "5"], "the model has 4 layers"),
        (["--tensor-parallel", "2", "--remote-workers", "2"], "At least rank 0 is on this host"),
        (["--tensor-parallel", "0"], "tensor-parallel"),
    ],
)
def test_wrong_world_sizes(folder, place, options, words):
    with place.serve(folder, *options) as server:
        place.failed(server, words)


def test_a_worker_that_has_another_version(folder, place, tmp_path):
    """Both sides say so, and both end."""
    with (
        place.worker(root=older(tmp_path)) as worker,
        place.serve(folder, "--tensor-parallel", "2", *place.remote) as server,
    ):
        wrong = f"A worker has another version than rank 0: {OLD} instead of {__version__}"
        place.failed(server, wrong, "Install the same version")
        place.failed(worker, wrong)


def test_a_worker_that_has_another_model(folder, place, tmp_path):
    (tmp_path / "other").mkdir()
    make_llama(
        tmp_path / "other",
        vocab_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        seed=1,
    )
    with (
        place.worker("--model", tmp_path / "other") as worker,
        place.serve(folder, "--tensor-parallel", "2", *place.remote) as server,
    ):
        place.failed(
            server, "Worker 1 has another model than rank 0", "Give all hosts the same files"
        )
        place.failed(worker, "Worker 1 has another model than rank 0")


def test_peers_that_are_not_there(folder, place):
    """A server to which no worker comes, and a worker to which no server does."""
    with place.serve(folder, "--tensor-parallel", "2", *place.remote) as server:
        place.failed(server, f"did not come to {place.address} in 120 s", "tidemill worker --join")
    with place.worker("--wait", "1") as worker:
        place.failed(worker, f"Cannot reach rank 0 at {place.address}")


@pytest.mark.parametrize("layout", ["--tensor-parallel", "--pipeline-parallel"])
def test_a_rank_that_dies_while_it_loads(place, tmp_path, layout):
    """Of a model whose share takes seconds to fill: killed when it holds a part of it."""
    (tmp_path / "config.json").write_text(json.dumps(RANDOM["dense"]))
    byte_tokenizer(tmp_path)

    def is_loading(pid: int) -> bool:
        held = Path(f"/proc/{pid}/status").read_text().partition("RssAnon:")[2].split()[0]
        return int(held) > 200_000  # KiB: more than any import takes

    with place.serve(
        tmp_path, "--load-format", "dummy", "--dtype", "float32", layout, "2"
    ) as server:
        until(
            lambda: (
                any(map(is_loading, place.processes(b"tidemill.engine.worker")))
                or server.poll() is not None
            )
        )
        (worker,) = place.processes(b"tidemill.engine.worker")
        os.kill(worker, signal.SIGKILL)
        place.failed(server, "Worker 1 of the group is gone: it ended with code -9")
