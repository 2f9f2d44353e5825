"""The commands, as processes, as a person runs them."""

import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest


def tidemill(*arguments: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tidemill", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def test_generate_prints_the_text_alone_on_stdout(tiny_folder):
    done = tidemill("generate", "hello", "-m", str(tiny_folder), "-n", "8", "-t", "0")
    again = tidemill("generate", "-", "-m", str(tiny_folder), "-n", "8", "-t", "0", input="hello")
    assert done.returncode == 0, done.stderr
    assert done.stdout == again.stdout
    assert "8 generated" in done.stderr.replace("\n", " ")


def test_memory(tiny_folder):
    done = tidemill("memory", str(tiny_folder), "--context", "100", "--requests", "3", "--available", "1G")
    assert done.returncode == 0, done.stderr
    assert "2 · 2 heads · 16 · 3 layers · 4 bytes = 768 a" in done.stdout
    assert "requests of 100 tokens fit" in done.stdout


def test_models(tiny_folder):
    assert "smollm2" in tidemill("models").stdout
    inside = tidemill("models", "smollm2").stdout
    assert "210 Q4_1" in inside
    assert "9 query and 3 KV heads of 64" in inside
    assert "hf" in tidemill("models", str(tiny_folder)).stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "x", "-m", "/nowhere"], "There is no model '/nowhere'"),
        (["generate", "x", "-t", "-1"], "temperature"),
        (["serve", "smollm2", "--kv-memory", "lots"], "amount of memory"),
        (["serve", "smollm2", "--policy", "magic", "--port", "0"], "no scheduling policy 'magic'"),
        (["memory", "smollm2", "--dtype", "int2"], "int2"),
    ],
)
def test_mistakes_are_told_in_a_line(arguments, words):
    done = tidemill(*arguments)
    assert done.returncode == 1
    assert words in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, [sys.executable, "-m", "tidemill", *arguments])
        self.seen = ""

    def until(self, words: str, seconds: float = 60.0) -> None:
        """Read until `words` appear in what was not looked at yet."""
        end = time.monotonic() + seconds
        while words not in self.seen:
            assert time.monotonic() < end, self.seen
            if select.select([self._fd], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self._fd, 65536).decode(errors="replace")
                except OSError:
                    break
        assert words in self.seen, self.seen
        self.seen = self.seen[self.seen.index(words) + len(words) :]

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def exit_code(self) -> int:
        for _ in range(200):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        os.kill(self.pid, signal.SIGKILL)
        raise AssertionError("it did not end")


def test_chat_survives_ctrl_c_and_ends_with_exit(tiny_folder):
    terminal = Terminal("chat", str(tiny_folder), "--seed", "3", "-n", "100000")
    terminal.until("> ")
    terminal.type("hello\n")
    time.sleep(0.3)
    terminal.type("\x03")
    terminal.until("ended by")
    terminal.until("> ")
    terminal.type("\x03")
    terminal.until("leaves")
    terminal.type("/system be brief\n/nonsense\n")
    terminal.until("/reset")
    terminal.type("again\n")
    terminal.until("ended by")
    terminal.type("/exit\n")
    assert terminal.exit_code() == 0
