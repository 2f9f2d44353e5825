"""Worker processes for untrusted work that may not end: chat templates, which come with a model and
may loop or exhaust memory, and grammars, which come with a request and may take minutes to compile
or overflow the compiler's stack.

A worker arms a timer of CPU time before each task and limits its own memory. The timer's signal
ends the process, whatever it is doing, even if the server is gone by then. The next task starts a
new one.
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

import msgspec

from tidemill.errors import InvalidRequest, TidemillError
from tidemill.frontend.control import ControlTokens

TEMPLATE_CPU_S = 1.0  # a conversation of 100,000 tokens takes a fiftieth of it
# a schema of 1,000 properties takes half of the first, one of five a second
GRAMMAR_CPU_S = {"llguidance": 0.5, "xgrammar": 5.0}
# of addresses; a vocabulary takes some hundred MiB
_MEMORY_BYTES = {"template": 2**29, "llguidance": 2**31, "xgrammar": 2**33}
# less than the engine has, so that a grammar that compiles here compiles there
_STACK_BYTES = 2**21
_LENGTH = struct.Struct("<I")


class _Pool:
    """Workers of one kind, started when needed. As many tasks run at once as there are workers;
    further ones block."""

    def __init__(self, num_workers: int, *start: Any) -> None:
        self._start = start
        self._num_workers = num_workers
        # None: to be started
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes] | None] = queue.SimpleQueue()
        for _ in range(num_workers):
            self._idle.put(None)

    def run(self, task: Any, too_much: InvalidRequest) -> Any:
        """The worker's result, or its error; `too_much`, if it ran out of time or memory."""
        worker = self._idle.get()
        try:
            if worker is None or worker.poll() is not None:  # it may have been killed from outside
                worker = self._begin()
            reply = _exchange(worker, task)
            if reply is None:
                _end(worker)
                worker = None
                raise too_much
        finally:
            self._idle.put(worker)
        if "error" in reply:
            raise InvalidRequest(reply["error"], fix=reply["fix"], param=reply["param"])
        return reply["result"]

    def close(self) -> None:
        for _ in range(self._num_workers):
            worker = self._idle.get()  # a busy one ends within its time limit
            if worker is not None:
                _end(worker)

    def _begin(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "tidemill.frontend.sandbox"]
        pipe = subprocess.PIPE
        worker = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True
        )
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
        text: str = self._pool.run(
            [messages, tools, variables, marks], InvalidRequest(why, param="messages")
        )
        return text


class GrammarChecker:
    """Compiles grammars at a bounded cost, to find out whether they can be used."""

    def __init__(self, backend: str, tokenizer_path: Path, num_tokens: int) -> None:
        self._pool = _Pool(1, backend, str(tokenizer_path), num_tokens)
        self._seconds = GRAMMAR_CPU_S[backend]
        self.close = self._pool.close

    def check(self, kind: str, text: str) -> None:
        why = f"The {kind} is too much: compiling it takes more than {self._seconds:g} s, or all memory."
        self._pool.run([kind, text], InvalidRequest(why, fix="Use a smaller grammar.", param=kind))


def _exchange(worker: subprocess.Popen[bytes], task: Any) -> dict[str, Any] | None:
    """The reply; None: the worker has ended."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        _write(worker.stdin, task)
        reply: dict[str, Any] | None = _read(worker.stdout)
        return reply
    except (OSError, ValueError):  # it ended amid a message
        return None


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # unsent data
                pipe.close()
    worker.wait()


def _write(stream: IO[bytes], value: Any) -> None:
    try:
        # the library's own takes ten times as long, amid which no other thread runs
        data = msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError):  # an integer that is too large for it
        data = json.dumps(value).encode()
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def _read(stream: IO[bytes]) -> Any:
    """The next message; None: the stream has ended."""
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
    from tidemill.types.sampling import Grammar

    grammars = Grammars.of(backend, Tokenizer.load(Path(tokenizer_path)), num_tokens)

    def check(kind: str, text: str) -> None:
        grammars.compile(Grammar(kind, text))

    return check


_MAKERS: dict[str, tuple[Callable[..., Callable[..., Any]], float]] = {
    "template": (_renderer, TEMPLATE_CPU_S),
    **{
        backend: (partial(_checker, backend), seconds) for backend, seconds in GRAMMAR_CPU_S.items()
    },
}


def _work() -> None:
    """Reads what kind of worker to be, then tasks until the stream ends."""
    tasks, replies = sys.stdin.buffer, sys.stdout.buffer
    kind, *arguments = _read(tasks)
    os.nice(5)  # below the server and the engine
    with contextlib.suppress(ValueError, OSError):  # not every system can
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES[kind], _MEMORY_BYTES[kind]))
    make, seconds = _MAKERS[kind]
    do = make(*arguments)
    _write(replies, {})
    while (task := _read(tasks)) is not None:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            reply: dict[str, Any] = {"result": do(*task)}
        except InvalidRequest as error:
            reply = {"error": error.message, "fix": error.fix, "param": error.param}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(replies, reply)


def main() -> None:
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_work)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
