"""The server begins and ends cleanly, whatever happens."""

import glob
import os
import signal
import stat
import time

import httpx
import pytest

from tests.server.conftest import Server


def gone(pid: int, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def sockets() -> set[str]:
    return set(glob.glob("/tmp/tidemill-*/engine.sock"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_it_cleanly_even_in_the_middle_of_an_answer(tiny_folder, number):
    before = sockets()
    server = Server(tiny_folder).wait()
    (socket_file,) = sockets() - before
    assert stat.S_IMODE(os.stat(socket_file).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(socket_file)).st_mode) == 0o700
    engine = server.engine_pid()
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True}
    ) as reply:
        lines = reply.iter_lines()
        next(lines)
        server.process.send_signal(number)
        assert "[DONE]" in "".join(lines)  # an answer under way is finished
    assert server.stop(number) == 0
    assert gone(engine)
    assert not os.path.exists(os.path.dirname(socket_file))


def test_interrupt_while_loading(tiny_folder):
    server = Server(tiny_folder)
    time.sleep(1.5)
    engine = server.engine_pid() if server.process.poll() is None else None
    assert server.stop() in (0, 130)  # 130: it was still importing
    assert engine is None or gone(engine)


def test_the_engine_does_not_outlive_a_killed_server(tiny_folder):
    server = Server(tiny_folder).wait()
    engine = server.engine_pid()
    server.process.kill()
    server.process.wait()
    assert gone(engine)


def test_a_dead_engine_is_told_not_hidden(tiny_folder):
    server = Server(tiny_folder).wait()
    os.kill(server.engine_pid(), signal.SIGKILL)
    end = time.monotonic() + 5
    while httpx.get(f"{server.url}/health").status_code == 200 and time.monotonic() < end:
        time.sleep(0.05)
    assert httpx.get(f"{server.url}/health").status_code == 503
    reply = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
    assert reply.status_code == 503
    assert reply.json()["error"]["type"] == "engine_unavailable"
    assert server.stop() == 0


def test_a_taken_port_and_a_wrong_model_are_told_at_once(tiny_folder):
    server = Server(tiny_folder).wait()
    other = Server(tiny_folder, "--port", str(server.port))
    assert other.process.wait(30) == 1
    assert "Choose another --port" in other.process.stdout.read()
    assert server.stop() == 0
    wrong = Server(tiny_folder / "config.json")
    assert wrong.process.wait(30) == 1
    assert "not a .gguf file" in wrong.process.stdout.read()
    narrow = Server(tiny_folder, "--max-context", "100000")
    assert narrow.process.wait(30) == 1
    text = narrow.process.stdout.read()
    assert "--max-context 512" in text
    assert "Traceback" not in text
