"""The server begins and ends cleanly, whatever happens."""

import glob
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
    return set(glob.glob(f"{tempfile.gettempdir()}/tidemill-*/engine.sock"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_it_cleanly_even_in_the_middle_of_an_answer(tiny_folder, number):
    before = sockets()
    server = Server(tiny_folder).wait()
    (socket_file,) = sockets() - before
    assert stat.S_IMODE(os.stat(socket_file).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(os.path.dirname(socket_file)).st_mode) == 0o700
    engine = server.engine_pid()
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 150, "ignore_eos": True, "stream": True}
    ) as reply:
        lines = reply.iter_lines()
        next(lines)
        server.process.send_signal(number)
        assert "[DONE]" in "".join(lines)  # an answer under way is finished
    assert server.stop(number) == 0
    assert gone(engine)
    assert not os.path.exists(os.path.dirname(socket_file))


def engines() -> set[str]:
    """Endpoints of all engine processes on this machine."""
    found = set()
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            words = Path(path).read_bytes().split(b"\0")
        except OSError:
            continue
        if b"tidemill.engine.process" in words:
            found.add(words[-2].decode())
    return found


@pytest.mark.parametrize("delay_s", [0.3, 1.0, 1.6, 2.2])
def test_interrupt_while_loading(tiny_folder, delay_s):
    before, files = engines(), set(glob.glob(f"{tempfile.gettempdir()}/tidemill-*"))
    server = Server(tiny_folder)
    time.sleep(delay_s)
    assert server.stop() in (0, 130, -signal.SIGINT)  # not 0 only while Python itself is still importing
    end = time.monotonic() + 5
    while engines() - before and time.monotonic() < end:
        time.sleep(0.05)
    assert not engines() - before
    assert not set(glob.glob(f"{tempfile.gettempdir()}/tidemill-*")) - files


def test_ctrl_c_is_not_lost_while_modules_are_read():
    """As an exception it may come where Python swallows it; so it ends the process until a command heeds it."""
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
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["typer", "SIG_DFL", "uvicorn", "SIG_DFL"], done.stderr
    assert "There is no model" in done.stderr


@pytest.mark.parametrize("arguments", [["--version"], ["bench", "latency", "-m", "/nowhere"]])
def test_who_ignores_ctrl_c_goes_on_doing_so(arguments):
    """As a shell wants it of what a script runs in the background."""
    script = f"""if True:
        import atexit, runpy, signal, sys
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        atexit.register(lambda: print(signal.getsignal(signal.SIGINT).name))
        sys.argv = ["tidemill", *{arguments}]
        runpy.run_module("tidemill", run_name="__main__")
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.split()[-1] == "SIG_IGN"


def test_any_free_port_is_told(tiny_folder):
    command = [sys.executable, "-m", "tidemill", "serve", str(tiny_folder), "--port", "0", "--served-name", "tiny"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            address = next(word for line in process.stderr for word in line.split() if word.startswith("http://"))
            assert httpx.get(f"{address}/health").status_code == 200
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=20)
    assert process.returncode == 0


def test_a_model_without_tokenizer_leaves_nothing_behind(tiny_folder, tmp_path):
    before = engines()
    shutil.copytree(tiny_folder, tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").unlink()
    server = Server(tmp_path / "m")
    assert server.process.wait(30) == 1
    assert "tokenizer.json" in server.process.stdout.read()
    end = time.monotonic() + 5
    while engines() - before and time.monotonic() < end:
        time.sleep(0.05)
    assert not engines() - before


def test_code_in_the_current_folder_is_not_run(tiny_folder, tmp_path):
    """`cd downloaded-model && tidemill serve .` must not import what lies there."""
    shutil.copytree(tiny_folder, tmp_path / "m")
    for name in ("safetensors", "torch", "gguf", "pip"):
        (tmp_path / "m" / f"{name}.py").write_text("raise SystemExit('foreign code ran')")
    tidemill = Path(sys.executable).parent / "tidemill"
    done = subprocess.run([tidemill, "generate", "x", "-m", ".", "-n", "1"], cwd=tmp_path / "m", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    server = subprocess.Popen([tidemill, "serve", ".", "--port", "0"], cwd=tmp_path / "m", stderr=subprocess.PIPE, text=True)
    seen = ""
    for line in server.stderr:
        seen += line
        if "serves" in line:
            break
    server.send_signal(signal.SIGINT)
    assert server.wait(20) == 0, seen
    assert "foreign code" not in seen


def test_the_engine_does_not_outlive_a_killed_server(tiny_folder):
    server = Server(tiny_folder).wait()
    before = sockets()
    engine = server.engine_pid()
    server.process.kill()
    server.process.wait()
    assert gone(engine)
    assert len(sockets()) == len(before) - 1


def ask(server: Server, number: int, length: int) -> tuple[list[str], str]:
    """A streamed answer, greedy or seeded by turns: its pieces, and its end."""
    body = {"prompt": f"number {number}", "max_tokens": length, "ignore_eos": True, "stream": True, "seed": number}
    pieces, end = [], ""
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"temperature": number % 2}, timeout=120) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            end = line or end
            if line.startswith("data: {"):
                told = json.loads(line[6:])
                assert "error" not in told, told
                pieces.append(told["choices"][0]["text"])
    return pieces, end


def test_a_killed_engine_is_replaced_and_nobody_notices_more_than_a_pause(tiny_folder):
    server = Server(tiny_folder).wait()
    undisturbed = [ask(server, i, 120) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, server, i, 120) for i in range(4)]
        for _ in range(2):
            time.sleep(0.15)
            engine = server.engine_pid()
            os.kill(engine, signal.SIGKILL)
            end = time.monotonic() + 20
            while (server.engine_pid(missing=engine) == engine or server.gauge("requests_running") == 0) and any(
                not answer.done() for answer in answers
            ):
                assert time.monotonic() < end
                time.sleep(0.05)
        for i, answer in enumerate(answers):
            pieces, last = answer.result(60)
            assert last == "data: [DONE]"
            assert "".join(pieces) == "".join(undisturbed[i][0])
    assert server.gauge("engine_restarts_total") >= 1
    assert server.gauge("requests_submitted_total") == 8
    assert server.gauge("requests_running") == server.gauge("requests_waiting") == 0
    assert httpx.get(f"{server.url}/health").status_code == 200
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


def test_told_to_stop_it_refuses_new_requests_and_finishes_old_ones(tiny_folder):
    server = Server(tiny_folder).wait()
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 8}  # longer than the questions below take
    assert httpx.get(f"{server.url}/ready").json() == {"status": "ready"}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "y"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["type"] == "server_stopping"
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert "[DONE]" in "".join(lines)
    assert server.stop(signal.SIGTERM) == 0


def test_what_does_not_end_in_time_is_ended(tiny_folder):
    server = Server(tiny_folder, "--drain-seconds", "0.2").wait()
    body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True, "n": 8}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as reply:
        next(reply.iter_lines())
        begin = time.monotonic()
        assert server.stop(signal.SIGTERM) == 0
        assert time.monotonic() - begin < 10


def test_cancel_by_id_and_deadline(tiny_folder):
    server = Server(tiny_folder).wait()
    body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        name = json.loads(next(lines)[6:])["id"]
        assert httpx.delete(f"{server.url}/v1/requests/{name}").json() == {"id": name, "object": "request", "cancelled": True}
        assert any('"request_cancelled"' in line for line in lines)
    assert httpx.delete(f"{server.url}/v1/requests/{name}").status_code == 404
    late = httpx.post(f"{server.url}/v1/completions", json={**body, "stream": False, "timeout": 0.02})
    assert late.status_code == 408
    assert late.json()["error"]["type"] == "deadline_exceeded"
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "timeout": 0}).status_code == 400
    end = time.monotonic() + 5
    while server.gauge("requests_running") and time.monotonic() < end:
        time.sleep(0.05)
    assert server.gauge("requests_running") == 0
    assert server.stop() == 0
