"""The server starts and stops cleanly, whatever happens."""

import glob
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.fragile import GATED, Fragile
from tests.helpers import LONG_S
from tests.server.conftest import Server
from tests.waiting import until


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def gone(pid: int) -> bool:
    until(lambda: is_gone(pid))
    return True


@pytest.fixture
def fragile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fragile:
    return Fragile(tmp_path, monkeypatch)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where servers of this test put their temporary files."""
    (tmp_path / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    return tmp_path / "t"


def socket_of_engine(folder: Path) -> Path:
    (socket_file,) = folder.glob("tidemill-*/engine.sock")
    assert stat.S_IMODE(os.stat(socket_file).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(socket_file.parent).st_mode) == 0o700
    return socket_file


@pytest.mark.slow  # the last but one test of this file has the second of them
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_stop_it_cleanly_even_in_the_middle_of_a_response(tiny_folder, folder, number):
    server = Server(tiny_folder).wait()
    socket_file, engine = socket_of_engine(folder), server.engine_pid()
    with httpx.stream(
        "POST",
        f"{server.url}/v1/completions",
        json={"prompt": "x", "max_tokens": 150, "ignore_eos": True, "stream": True},
    ) as reply:
        lines = reply.iter_lines()
        next(lines)
        server.process.send_signal(number)
        assert "[DONE]" in "".join(lines)  # a response under way is finished
    assert server.stop(number) == 0
    assert gone(engine)
    assert not socket_file.parent.exists()


def engines(folder: Path) -> list[str]:
    """Endpoints of the engine processes whose socket is in the folder."""
    found = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            words = Path(path).read_bytes().split(b"\0")
        except OSError:
            continue
        if b"tidemill.engine" in words and str(folder) in words[-2].decode():
            found.append(words[-2].decode())
    return found


@pytest.mark.parametrize(
    "delay_s",
    [1.0, *(pytest.param(delay, marks=pytest.mark.slow) for delay in (0.3, 1.6, 2.2, 3.0, 4.0))],
)
def test_interrupt_while_loading(tiny_folder, folder, delay_s):
    server = Server(tiny_folder)
    time.sleep(delay_s)
    # not 0 only while Python itself is still importing; 1 if that is its site module
    code = server.stop()
    assert code in (0, 130, -signal.SIGINT) or "init_import_site" in server.process.stdout.read()
    until(lambda: not engines(folder))
    assert not list(folder.glob("tidemill-*"))


def test_ctrl_c_is_not_lost_while_modules_are_read():
    """As an exception it may come where Python swallows it; so it ends the process until a command
    heeds it."""
    script = """if True:
        import runpy, signal, sys

        class See:
            def find_spec(self, name, path=None, target=None):
                if name in ("typer", "uvicorn"):
                    print(name, signal.getsignal(signal.SIGINT).name)

        sys.meta_path.insert(0, See())
        sys.argv = ["tidemill", "serve", "/nowhere"]
        runpy.run_module("tidemill", run_name="__main__")
    """
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=LONG_S
    )
    assert done.stdout.split() == ["typer", "SIG_DFL", "uvicorn", "SIG_DFL"], done.stderr
    assert "There is no model" in done.stderr


def test_an_ignored_ctrl_c_stays_ignored():
    """As shells expect of what a script runs in the background."""
    script = """if True:
        import atexit, runpy, signal, sys
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        atexit.register(lambda: print(signal.getsignal(signal.SIGINT).name))
        sys.argv = ["tidemill", "bench", "latency", "-m", "/nowhere"]
        runpy.run_module("tidemill", run_name="__main__")
    """
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=LONG_S
    )
    assert done.stdout.split()[-1] == "SIG_IGN"


def test_a_model_without_tokenizer_leaves_nothing_behind(tiny_folder, folder, tmp_path):
    shutil.copytree(tiny_folder, tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").unlink()
    server = Server(tmp_path / "m")
    assert server.process.wait(LONG_S) == 1
    assert "tokenizer.json" in server.process.stdout.read()
    until(lambda: not engines(folder))


def test_code_in_the_current_folder_is_not_run_and_port_0_is_a_free_one_that_is_printed(
    tiny_folder, tmp_path
):
    """`cd downloaded-model && tidemill serve .` must not import what lies there."""
    shutil.copytree(tiny_folder, tmp_path / "m")
    for name in ("safetensors", "torch", "gguf", "pip"):
        (tmp_path / "m" / f"{name}.py").write_text("raise SystemExit('foreign code ran')")
    tidemill = Path(sys.executable).parent / "tidemill"
    done = subprocess.run(
        [tidemill, "generate", "x", "-m", ".", "-n", "1"],
        cwd=tmp_path / "m",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    server = subprocess.Popen(
        [tidemill, "serve", ".", "--port", "0"],
        cwd=tmp_path / "m",
        stderr=subprocess.PIPE,
        text=True,
    )
    seen = ""
    for line in server.stderr:
        seen += line
        if "serves" in line:
            break
    (address,) = (word for word in line.split() if word.startswith("http://"))
    assert httpx.get(f"{address}/health").status_code == 200
    server.send_signal(signal.SIGINT)
    assert server.wait(LONG_S) == 0, seen
    assert "foreign code" not in seen


def ask(server: Server, number: int, length: int) -> tuple[list[str], str]:
    """A streamed response, greedy or seeded by turns: its pieces, and its end."""
    body = {
        "prompt": f"number {number}",
        "max_tokens": length,
        "ignore_eos": True,
        "stream": True,
        "seed": number,
    }
    pieces, end = [], ""
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body | {"temperature": number % 2}
    ) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            end = line or end
            if line.startswith("data: {"):
                told = json.loads(line[6:])
                assert "error" not in told, told
                pieces.append(told["choices"][0]["text"])
    return pieces, end


def test_an_engine_does_not_outlive_a_killed_server(tiny_folder, folder):
    server = Server(tiny_folder).wait()
    engine = server.engine_pid()
    server.process.kill()
    server.process.wait()
    assert gone(engine)
    until(lambda: not list(folder.glob("tidemill-*")))


@pytest.mark.slow  # test_chaos.py has this under load
def test_a_killed_engine_is_replaced_and_responses_only_pause(tiny_folder):
    server = Server(tiny_folder).wait()
    undisturbed = [ask(server, i, 120) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        responses = [pool.submit(ask, server, i, 120) for i in range(4)]
        for num in (1, 2):
            time.sleep(0.15)  # at any moment
            os.kill(server.engine_pid(), signal.SIGKILL)
            until(lambda num=num: server.gauge("engine_restarts_total") == num)
        for i, response in enumerate(responses):
            pieces, last = response.result(LONG_S)
            assert last == "data: [DONE]"
            assert "".join(pieces) == "".join(undisturbed[i][0])
    assert server.gauge("requests_submitted_total") == 8
    until(lambda: server.gauge("requests_running") == server.gauge("requests_waiting") == 0)
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert server.stop() == 0


def test_a_taken_port_is_told_at_once(tiny_folder, server):
    other = Server(tiny_folder, "--port", str(server.port))
    assert other.process.wait(LONG_S) == 1
    assert "Choose another --port" in other.process.stdout.read()


def stream(server: Server, **body: object):
    body = {"prompt": [GATED, 5], "max_tokens": 400, "ignore_eos": True, "stream": True} | body
    return httpx.stream("POST", f"{server.url}/v1/completions", json=body)


def test_a_server_that_cancels_by_id_and_deadline_and_stops(tiny_folder, folder, fragile):
    server = Server(tiny_folder, "--drain-seconds", str(LONG_S)).wait()
    socket_file, engine = socket_of_engine(folder), server.engine_pid()
    cancellation_by_id_and_deadline(server, fragile)
    fragile.close_gate()
    it_refuses_new_requests_and_finishes_old_ones(server, fragile)
    assert gone(engine)
    assert not socket_file.parent.exists()


def it_refuses_new_requests_and_finishes_old_ones(server, fragile):
    assert httpx.get(f"{server.url}/ready").json() == {"status": "ready"}
    with stream(server) as reply:
        lines = reply.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "y"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["type"] == "server_stopping"
        assert httpx.get(f"{server.url}/health").status_code == 200
        fragile.open_gate()  # until now the old one could not end
        assert "[DONE]" in "".join(lines)
    assert server.process.wait(LONG_S) == 0


def test_requests_that_do_not_end_while_the_server_stops_are_ended(tiny_folder, fragile):
    server = Server(tiny_folder, "--drain-seconds", "0.2").wait()
    with stream(server) as reply:
        next(reply.iter_lines())
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(LONG_S) == 0


def cancellation_by_id_and_deadline(server, fragile):
    with stream(server) as reply:
        lines = reply.iter_lines()
        name = json.loads(next(lines)[6:])["id"]
        assert httpx.delete(f"{server.url}/v1/requests/{name}").json() == {
            "id": name,
            "object": "request",
            "cancelled": True,
        }
        assert any('"request_cancelled"' in line for line in lines)
    assert httpx.delete(f"{server.url}/v1/requests/{name}").status_code == 404
    fragile.open_gate()
    until(lambda: server.gauge("requests_running") == 0)
    fragile.close_gate()
    body = {"prompt": [GATED, 5], "max_tokens": 400, "ignore_eos": True, "timeout": 0.02}
    late = httpx.post(f"{server.url}/v1/completions", json=body)
    assert late.status_code == 408
    assert late.json()["error"]["type"] == "deadline_exceeded"
    assert (
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "timeout": 0}).status_code
        == 400
    )
    fragile.open_gate()
    until(lambda: server.gauge("requests_running") == 0)
