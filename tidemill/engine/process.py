"""The engine core as a process of its own: messages in, steps, messages out. Started by
`engine.client`.

It ends on Shutdown, when terminated, or when its parent is gone: the parent holds the other end of
standard input.
"""

from __future__ import annotations

import gc
import math
import os
import shutil
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import zmq

from tidemill.engine.core import EngineCore
from tidemill.engine.load import inspect, inspect_draft, load_core
from tidemill.engine.parts.adapters import AdapterStore
from tidemill.engine.parts.announcer import Announcer
from tidemill.engine.parts.structured import StructuredOutput
from tidemill.engine.refusals import refusal
from tidemill.errors import TidemillError
from tidemill.frontend.structured import Matcher
from tidemill.kernels import machine
from tidemill.kernels.cuda import compile_server
from tidemill.types.events import Event
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import (
    Abort,
    Finish,
    FromEngine,
    Gone,
    Inspect,
    Inspected,
    Loading,
    Ready,
    Refused,
    Renew,
    ShowPages,
    Shutdown,
    Start,
    StepOutput,
    Submit,
    decode_to_engine,
    encode,
)

_PROGRESS_EVERY_S = 0.1
_LOOK_EVERY_MS = 2  # for a grammar to be compiled, when there is nothing else to do
_STACK_BYTES = 2**24  # grammar compilers are recursive


class EngineProcess:
    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.connect(endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(sys.stdin.fileno(), zmq.POLLIN)
        self._running = True
        threading.stack_size(_STACK_BYTES)
        self._compiler = ThreadPoolExecutor(1)
        # requests that wait for their grammar
        self._compiling: dict[str, tuple[Submit, Future[Matcher | None]]] = {}

    def send(self, message: FromEngine) -> None:
        self._socket.send(encode(message))

    def close(self) -> None:
        """Waits until what was sent has left, at most the socket's linger time."""
        self._socket.close()
        zmq.Context.instance().term()

    def run(self) -> None:
        start = self._first_message()
        if start is None:
            return
        try:
            core = load_core(start.options, self._report)
            of_start = core.take_events()
            step_s = _measure_step(core)
        except TidemillError as error:
            self.send(refusal(None, error))
            return
        finally:
            compile_server.stop()  # unless it has ended: on a CPU nobody asked it
        core.use(Announcer(self._announce), *core.parts)
        adapters = [adapter.info for adapter in core.part(AdapterStore)]
        self.send(Ready(core.model_config, core.config, step_s, adapters))
        if of_start:
            self.send(StepOutput([], of_start))
        for alarm in core.alarms:
            self._poller.register(alarm, zmq.POLLIN)
        gc.collect()
        core.host_times.watch_gc()
        gc.freeze()  # what is loaded stays; the collector need not walk it again
        while self._running:
            idle_s = 0.0 if core.has_moves else core.idle_s if core.has_work else None
            self._take_messages(core, idle_s)
            core.check()
            self._take_grammars(core)
            for reply in core.replies():
                self.send(reply)
            core.host_times.mark("messages")
            output, failed = core.step()
            if output.deltas or output.events:
                self.send(output)
            for refused in failed:
                self.send(refused)
            core.host_times.mark("outputs")
        core.close()

    def _first_message(self) -> Start | None:
        """Start, or None if the process is to end. Models may be inspected before."""
        while True:
            self._poller.poll(None)
            if not self._socket.poll(0):
                self._parent_gone()
                return None
            message = decode_to_engine(self._socket.recv())
            if not isinstance(message, Inspect):
                return message if isinstance(message, Start) else None
            try:
                checkpoint, _, model = inspect(message.model)
                draft = (
                    None
                    if message.draft_model is None
                    else inspect_draft(message.draft_model, checkpoint)[2]
                )
                self.send(Inspected(model, machine.detect(), draft))
            except TidemillError as error:
                self.send(refusal(None, error))

    def _announce(self, admitted: list[Event]) -> None:
        """If the step ends the process, its parent must know which requests were in it for the
        first time."""
        self.send(StepOutput([], admitted))

    def _take_messages(self, core: EngineCore, wait_s: float | None) -> None:
        """`wait_s`: for the first; None: until one comes."""
        most_ms = None if wait_s is None else math.ceil(1000 * wait_s)
        ready = dict(
            self._poller.poll(_LOOK_EVERY_MS if self._compiling and most_ms != 0 else most_ms)
        )
        if most_ms != 0:
            core.host_times.mark("idle")
        if sys.stdin.fileno() in ready and not os.read(sys.stdin.fileno(), 1):
            self._parent_gone()
            return
        while self._socket.poll(0):
            message = decode_to_engine(self._socket.recv())
            if isinstance(message, Submit):
                structured = core.part(StructuredOutput)
                if structured.is_ready(message.params):
                    self._submit(core, message)
                else:  # the next step does not wait for it
                    compiled = self._compiler.submit(structured.compile, message.params.grammar)
                    core.prepare(message, "its grammar is compiled")
                    self._compiling[message.request_id] = message, compiled
            elif isinstance(message, Abort):
                if message.request_id in self._compiling:
                    self._compiling.pop(message.request_id)[1].cancel()
                core.abort(message)
                self.send(Gone(message.request_id))
            elif isinstance(message, Finish):
                core.finish(message)
            elif isinstance(message, Renew):
                core.renew(message)
            elif isinstance(message, ShowPages):
                self.send(core.pages())
            elif isinstance(message, Shutdown):
                self._running = False
                return
            else:
                core.take(message)

    def _take_grammars(self, core: EngineCore) -> None:
        for request_id, (message, grammar) in list(self._compiling.items()):
            if grammar.done():
                del self._compiling[request_id]
                self._submit(core, message, grammar)

    def _submit(
        self, core: EngineCore, message: Submit, grammar: Future[Matcher | None] | None = None
    ) -> None:
        try:
            core.submit(message, None if grammar is None else grammar.result())
        except TidemillError as error:
            self.send(refusal(message.request_id, error))

    def _parent_gone(self) -> None:
        """It was killed, so it could not clean up: the socket's folder is removed here."""
        self._running = False
        shutil.rmtree(os.path.dirname(self._endpoint.removeprefix("ipc://")), ignore_errors=True)

    _last_report_s = 0.0

    def _report(self, name: str, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or now - self._last_report_s > _PROGRESS_EVERY_S:
            self._last_report_s = now
            self.send(Loading(name, done, total))


def _measure_step(core: EngineCore) -> float:
    """Seconds that a step of one token takes: the faster of two, since the first may be slow. An
    engine that cannot compute it has not started, so that a later failure is some request's
    doing."""
    took, pooling = [], core.model_config.own_pooling
    for _ in range(2):
        core.submit(
            Submit(
                "start",
                [0],
                SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling),
                salt="start",
            )
        )
        began = time.monotonic()
        while core.has_work:
            _, failed = core.step()
            for refused in failed:
                # logits that are not numbers: another prompt may do better
                if refused.error != "ModelFailed":
                    raise TidemillError(f"The engine cannot compute a step: {refused.message}")
        took.append(time.monotonic() - began)
    core.take_events()
    return min(took)


def main() -> None:
    process = EngineProcess(sys.argv[1])
    try:
        process.run()
    except Exception as error:
        process.send(
            Refused(None, "TidemillError", f"The engine failed: {type(error).__name__}: {error}")
        )
        raise
    finally:
        process.close()
