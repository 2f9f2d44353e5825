"""Work on what strangers send that cannot be trusted to end, in processes of its own: chat templates, which come with a model and
may loop or fill all memory, and forms of answers, which may take minutes to compile or overflow the compiler's stack.

A worker arms a timer of processor time before each task and bounds its own memory. The timer's signal ends the process, whatever
it is doing, even if the server is gone by then. The next task finds a new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from tidemill.errors import InvalidRequest, TidemillError
from tidemill.frontend.control import ControlTokens

TEMPLATE_CPU_S = 1.0  # a conversation of 100,000 tokens takes a fiftieth of it
GRAMMAR_CPU_S = {"llguidance": 0.5, "xgrammar": 5.0}  # a schema of 1,000 properties takes half of the first, one of five a second
_MEMORY_BYTES = {"template": 2**29, "llguidance": 2**31, "xgrammar": 2**33}  # of addresses; a vocabulary takes some hundred MiB
_STACK_BYTES = 2**21  # less than where forms are compiled in earnest, so that what passes here passes there
_LENGTH = struct.Struct("<I")


class _Pool:
    """Workers of a kind, started when they are needed. As many threads as there are workers may ask; more wait."""

    def __init__(self, num_workers: int, *start: Any) -> None:
        self._start = start
        self._num_workers = num_workers
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes] | None] = queue.SimpleQueue()  # None: to be started
        for _ in range(num_workers):
            self._idle.put(None)

    def ask(self, task: Any, too_much: InvalidRequest) -> Any:
        """What the worker makes of it, or raises; `too_much`, if it did not live to tell."""
        worker = self._idle.get()
        try:
            if worker is None or worker.poll() is not None:  # somebody else may have ended it
                worker = self._begin()
            told = _exchange(worker, task)
            if told is None:
                _end(worker)
                worker = None
                raise too_much
        finally:
            self._idle.put(worker)
        if "error" in told:
            raise InvalidRequest(told["error"], fix=told["fix"], param=told["param"])
        return told["made"]

    def close(self) -> None:
        for _ in range(self._num_workers):
            worker = self._idle.get()  # one that is at work has its time
            if worker is not None:
                _end(worker)

    def _begin(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "tidemill.frontend.apart"]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL  # its last words would be of no use
        worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, start_new_session=True)
        if _exchange(worker, self._start) is None:
            _end(worker)
            raise TidemillError("A worker process cannot be started.")
        return worker


class Renderer:
    """Renders as ChatTemplate does, in worker processes."""

    num_workers = 2

    def __init__(self, source: str, control: Iterable[str] = ()) -> None:
        self.source, self.control = source, ControlTokens(control)
        self._pool = _Pool(self.num_workers, "template", source, self.control.texts)
        self.close = self._pool.close

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
        *,
        marks: bool = False,
    ) -> str:
        why = "The model's chat template does not come to an end with these messages."
        made: str = self._pool.ask([messages, tools, variables, marks], InvalidRequest(why, param="messages"))
        return made


class GrammarChecker:
    """Says whether a form can be kept to, at a bounded price."""

    def __init__(self, backend: str, tokenizer_path: Path, num_tokens: int) -> None:
        self._pool = _Pool(1, backend, str(tokenizer_path), num_tokens)
        self._seconds = GRAMMAR_CPU_S[backend]
        self.close = self._pool.close

    def check(self, kind: str, text: str) -> None:
        why = f"The {kind} is too much: compiling it takes more than {self._seconds:g} s, or all memory."
        self._pool.ask([kind, text], InvalidRequest(why, fix="Ask for a smaller form.", param=kind))


def _exchange(worker: subprocess.Popen[bytes], asked: Any) -> dict[str, Any] | None:
    """None: it is gone."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        _write(worker.stdin, asked)
        told: dict[str, Any] | None = _read(worker.stdout)
        return told
    except (OSError, ValueError):  # it ended amid a word
        return None


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # there was more to say to it
                pipe.close()
    worker.wait()


def _write(stream: IO[bytes], value: Any) -> None:
    data = json.dumps(value).encode()
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def _read(stream: IO[bytes]) -> Any:
    """None: there is no more."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    data = stream.read(_LENGTH.unpack(head)[0])
    return json.loads(data)


# ---- in the worker


def _renderer(source: str, control: list[str]) -> Callable[..., str]:
    from tidemill.frontend.chat import ChatTemplate

    template = ChatTemplate(source, control)

    def render(messages: Any, tools: Any = None, variables: Any = None, marks: bool = False) -> str:
        return template.render(messages, tools, variables, marks=marks)

    return render


def _checker(backend: str, tokenizer_path: str, num_tokens: int) -> Callable[[str, str], None]:
    from tidemill.frontend.structured import Grammars
    from tidemill.frontend.tokenizer import Tokenizer
    from tidemill.sampling import Grammar

    grammars = Grammars.of(backend, Tokenizer.load(Path(tokenizer_path)), num_tokens)

    def check(kind: str, text: str) -> None:
        grammars.compile(Grammar(kind, text))

    return check


_MAKERS: dict[str, tuple[Callable[..., Callable[..., Any]], float]] = {
    "template": (_renderer, TEMPLATE_CPU_S),
    **{backend: (partial(_checker, backend), seconds) for backend, seconds in GRAMMAR_CPU_S.items()},
}


def _work() -> None:
    """What it is for, then tasks, until there are no more."""
    asking, telling = sys.stdin.buffer, sys.stdout.buffer
    kind, *how = _read(asking)
    os.nice(5)  # others first
    with contextlib.suppress(ValueError, OSError):  # not every system can
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES[kind], _MEMORY_BYTES[kind]))
    make, seconds = _MAKERS[kind]
    do = make(*how)
    _write(telling, {})
    while (task := _read(asking)) is not None:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            told: dict[str, Any] = {"made": do(*task)}
        except InvalidRequest as error:
            told = {"error": error.message, "fix": error.fix, "param": error.param}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(telling, told)


def main() -> None:
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_work)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
