"""Run: the states of one execution of a program. If one of them fails, or the program is cancelled,
all end, and their requests are freed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

from tidemill.errors import Cancelled
from tidemill.programs.backend import Backend, Usage


class Run:
    def __init__(self, backend: Backend, shares: bool) -> None:
        self.backend, self.shares = backend, shares
        self.usage = Usage()
        self.error: BaseException | None = None
        self.is_over = False  # nothing can be appended
        self.changed = threading.Condition()  # new text, an error, or the end
        self._futures: set[Future[Any]] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def future(self) -> Future[Any]:
        """Fails with the run. Raises the error of a run that has failed."""
        with self.changed:
            if self.error is not None:
                raise self.error
            future: Future[Any] = Future()
            self._futures.add(future)
        future.add_done_callback(self._forget)
        return future

    def _forget(self, done: Future[Any]) -> None:
        with self.changed:
            self._futures.discard(done)

    def call(self, work: Any, *arguments: Any) -> None:
        """In the backend's thread."""
        self.backend.loop.call_soon_threadsafe(work, *arguments)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """In the backend's thread: what fails there fails the run."""
        if self.error is not None:
            work.close()
            return
        task = self.backend.loop.create_task(self._watch(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            raise
        except BaseExceptionGroup as group:  # of several requests at once
            self._fail(group.exceptions[0])
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self.changed:
            if self.error is not None:
                return
            self.error = error
            futures = list(self._futures)
            self.changed.notify_all()
        for future in futures:
            if not future.done():
                future.set_exception(error)
        for task in list(self._tasks):
            if task is not asyncio.current_task(self.backend.loop):
                task.cancel()

    def end(self, error: BaseException | None = None) -> None:
        """Wait until all states are done, or with an error until their requests are freed. From any
        thread but the backend's."""
        if error is not None and not isinstance(error, Exception):  # Ctrl-C
            error = Cancelled("The program was cancelled.")
        asyncio.run_coroutine_threadsafe(self._end(error), self.backend.loop).result()
        with self.changed:
            self.is_over = True
            self.changed.notify_all()

    async def _end(self, error: BaseException | None) -> None:
        if error is not None:
            self._fail(error)
        while self._tasks:
            await asyncio.wait(self._tasks)
