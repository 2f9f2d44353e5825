"""CoreLink: an engine core in this process behind the interface of EngineLink, where a process of
its own would take too long."""

from __future__ import annotations

import asyncio
from collections import deque

from tidemill.engine.load import load_core
from tidemill.engine.parts.adapters import AdapterStore
from tidemill.engine.parts.announcer import Announcer
from tidemill.engine.refusals import refusal
from tidemill.errors import EngineDead, TidemillError
from tidemill.types.wire import (
    Abort,
    Expect,
    Finish,
    Gone,
    Ready,
    Renew,
    Shutdown,
    StepOutput,
    Submit,
    decode_from_engine,
    decode_to_engine,
    encode,
)


class CoreLink:
    is_blameless = False
    last_error = "it was killed"

    def __init__(self, environ=None) -> None:
        self._sent: deque[bytes] = deque()
        self._is_over = False
        self._wake = asyncio.Event()
        self.may_step = True

    async def start(self, options, on_loading=None, within_s=0.0) -> Ready:
        for _ in range(10):  # a process takes much longer: others have their turn
            await asyncio.sleep(0)
        self.core = load_core(options, lambda *_: None)
        return Ready(
            self.core.model_config,
            self.core.config,
            0.001,
            [one.info for one in self.core.part(AdapterStore)],
        )

    def send(self, message) -> None:
        if self._is_over:
            raise EngineDead("it is gone")
        self._sent.append(encode(message))
        self._wake.set()

    async def read(self, take) -> None:
        def tell(message) -> None:
            take(decode_from_engine(encode(message)))

        core = self.core
        mover = core.runner.mover
        if mover is not None and mover.alarm is not None:
            asyncio.get_running_loop().add_reader(mover.alarm, self._wake.set)
        core.use(Announcer(lambda admitted: tell(StepOutput([], admitted))), *core.parts)
        while not self._is_over:
            if not (self._sent or ((core.has_work or core.has_moves) and self.may_step)):
                self._wake.clear()
                await self._wake.wait()
            while self._sent:
                self._handle(decode_to_engine(self._sent.popleft()), tell)
            if self.may_step and not self._is_over:
                output, failed = core.step()
                if output.deltas or output.events:
                    tell(output)
                for refused in failed:
                    tell(refused)
            await asyncio.sleep(0)

    def _handle(self, message, tell) -> None:
        match message:
            case Submit():
                try:
                    self.core.submit(message)
                except TidemillError as error:
                    tell(refusal(message.request_id, error))
            case Abort():
                self.core.abort(message)
                tell(Gone(message.request_id))
            case Finish():
                self.core.finish(message)
            case Renew():
                self.core.renew(message)
            case Expect():
                self.core.take(message)
            case Shutdown():
                self._is_over = True

    def pause(self, is_paused: bool) -> None:
        self.may_step = not is_paused
        self._wake.set()

    def kill(self) -> None:
        self._is_over = True
        self._wake.set()

    async def close(self) -> None:
        if not self._is_over:
            self.kill()
        if hasattr(self, "core"):
            mover = self.core.runner.mover
            if mover is not None and mover.alarm is not None:
                asyncio.get_running_loop().remove_reader(mover.alarm)
            self.core.close()
