"""The commands: in this process where that shows as much, else as processes on a terminal, as a person runs them."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import urllib.request

import pytest
from typer.testing import CliRunner

from tests.helpers import byte_tokenizer, make_llama
from tidemill.cli.main import app
from tidemill.engine.client import EngineClient
from tidemill.errors import EngineDead, TidemillError
from tidemill.server import run

KEY = "a-key-that-nobody-may-see"


def tidemill(*arguments: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tidemill", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, **options)


@pytest.fixture
def invoke():
    """A command in this process, which has torch loaded. Commands leave a handler of SIGINT behind."""
    handler = signal.getsignal(signal.SIGINT)
    yield lambda *arguments, **more: CliRunner().invoke(app, arguments, **more)
    signal.signal(signal.SIGINT, handler)


def test_generate_prints_the_text_alone_on_stdout(tiny_folder, invoke):
    done = tidemill("generate", "hello", "-m", str(tiny_folder), "-n", "8", "-t", "0")
    assert done.returncode == 0, done.stderr
    assert "8 generated" in done.stderr.replace("\n", " ")
    again = invoke("generate", "-", "-m", str(tiny_folder), "-n", "8", "-t", "0", input="hello")
    assert done.stdout == again.stdout


def test_memory(tiny_folder, invoke):
    done = invoke("memory", str(tiny_folder), "--context", "100", "--requests", "3", "--available", "1G")
    assert done.exit_code == 0, done.output
    assert "2 · 2 heads · 16 · 3 layers · 4 bytes = 768 a" in done.output
    assert "requests of 100 tokens fit" in done.output


def test_models(tiny_folder, invoke):
    assert "smollm2" in invoke("models").output
    inside = invoke("models", "smollm2").output
    assert "210 Q4_1" in inside
    assert "9 query and 3 KV heads of 64" in inside
    assert "hf" in invoke("models", str(tiny_folder)).output


def test_a_mistake_is_an_error_of_two_lines():
    done = tidemill("serve", "smollm2", "--kv-memory", "lots")
    assert done.returncode == 1
    assert done.stderr == "error: --kv-memory is 'lots'.\nIt must be an amount of memory like 512M or 4G.\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "x", "-m", "/nowhere"], "There is no model '/nowhere'"),
        (["generate", "x", "-t", "-1"], "temperature"),
        (["serve", "smollm2", "--policy", "magic", "--port", "0"], "--policy is 'magic'. Choose one of continuous"),
        (["memory", "smollm2", "--dtype", "int2"], "int2"),
        (["explain", "x", "--url", "http://127.0.0.1:1"], "Give the server's address with --url."),
    ],
)
def test_mistakes_are_typed_errors(invoke, arguments, words):
    done = invoke(*arguments)
    assert isinstance(done.exception, TidemillError)
    assert words in str(done.exception)


def test_the_limit_for_stalled_steps_reaches_the_supervisor(tiny_folder, invoke, monkeypatch, tmp_path):
    seen: list[object] = []

    class Client(EngineClient):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            seen.extend([*arguments, *options.values()])

        async def start(self, *_):
            raise EngineDead("Far enough.")

    monkeypatch.setattr(run, "EngineClient", Client)
    done = invoke("serve", str(tiny_folder), "--port", "0", "--stall-seconds", "2.5", "--data-dir", str(tmp_path))
    assert str(done.exception) == "Far enough."
    assert 2.5 in seen


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, [sys.executable, "-m", "tidemill", *arguments])
        self.seen = ""

    def kill(self) -> None:
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass  # it has ended and been waited for
        os.close(self._fd)

    def until(self, pattern: str) -> re.Match:
        """Read until the pattern is found in what was not looked at yet. What never comes meets the test's own time limit."""
        while not (found := re.search(pattern, self.seen, re.S)):
            try:
                self.seen += os.read(self._fd, 65536).decode(errors="replace")
            except OSError:
                pytest.fail(f"It ended, and there is no {pattern!r} in: {self.seen}")
        self.seen = self.seen[found.end() :]
        return found

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def interrupt_until(self, pattern: str) -> None:
        """Ctrl-C, again and again: one that comes just before readline waits for a key is noticed with the next."""
        while not re.search(pattern, self.seen, re.S):
            self.type("\x03")
            if select.select([self._fd], [], [], 1.0)[0]:
                self.seen += os.read(self._fd, 65536).decode(errors="replace")
        self.until(pattern)

    def exit_code(self) -> int:
        """Reads to the end first: a program whose output nobody reads may not end."""
        try:
            while os.read(self._fd, 65536):
                pass
        except OSError:
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def terminal():
    """A program on a terminal; it is ended with the test."""
    started: list[Terminal] = []

    def start(*arguments: str) -> Terminal:
        started.append(Terminal(*arguments))
        return started[-1]

    yield start
    for each in started:
        each.kill()


def test_chat_survives_ctrl_c_and_ends_with_exit(tmp_path, terminal):
    make_llama(tmp_path, vocab_size=320, max_position_embeddings=8192)
    byte_tokenizer(tmp_path)
    chat = terminal("chat", str(tmp_path), "--seed", "3", "-n", "100000", "--threads", "1")
    chat.until("> ")
    chat.type("hello\n")
    chat.until("hello\r\n.")  # a first piece of the response
    chat.type("\x03")
    chat.until("ended by")
    chat.until("> ")
    chat.interrupt_until("leaves")
    chat.type("/system be brief\n/nonsense\n")
    chat.until("/reset")
    chat.type("/exit\n")
    assert chat.exit_code() == 0


def test_serve_with_a_config_file_until_ctrl_c(tiny_folder, tmp_path, terminal):
    file = tmp_path / "tidemill.toml"
    file.write_text(f"""
        model = "{tiny_folder}"
        served_name = "tiny"
        port = 0
        max-requests = 3
        max-queued = 7
        data-dir = "{tmp_path / "data"}"
        admin-key = "{KEY}"
    """)
    server = terminal("serve", "--config", str(file))
    table = server.until("Tidemill serves tiny on (http://[0-9.:]+) .*curl .*Authorization: Bearer YOUR_KEY")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", table.string)  # without colours
    assert re.search(r"slots +│ 3 sequences +│ given", shown)
    assert re.search(r"queue +│ 7 requests", shown)
    assert KEY not in table.string
    request = urllib.request.Request(f"{table[1]}/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request) as reply:
        assert json.load(reply)["data"][0]["id"] == "tiny"
    server.type("\x03")
    assert server.exit_code() == 0
