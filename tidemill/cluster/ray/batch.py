"""Lines of a batch, executed by actors of a Ray cluster: a backend of `tidemill.batch.run`.

Lines are sent to actors a few at a time. Those of an actor that is lost are sent to another;
nothing of them has been written, since only the process that reads the input writes the output.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tidemill.batch.lines import Request
from tidemill.cluster.ray.actor import BatchActor
from tidemill.cluster.ray.cluster import Cluster, Needs, NoRoom
from tidemill.config import EngineOptions
from tidemill.engine.client import STALL_S
from tidemill.engine.link import START_S, error_from
from tidemill.errors import ConfigError, EngineDead, TidemillError
from tidemill.types.wire import Refused, decode_from_engine

_PER_CALL = 16  # lines
_MAX_DEATHS = 5  # of workers, while they had one line
_MAX_FAILED_STARTS = 3  # in a row
_AGAIN_S = 2.0
_KEPT = "What is written is kept: run the same command again."
_log = logging.getLogger("tidemill.cluster.ray")


@dataclass(eq=False, slots=True)
class _Task:
    request: Request
    answer: asyncio.Future[tuple[int, bytes]]
    num_deaths: int = 0


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    engine: EngineOptions
    num_workers: int
    needs: Needs
    num_at_once: int | None = None  # lines of one worker
    stall_s: float = STALL_S
    start_s: float = START_S


@dataclass(eq=False)
class RayWorkers:
    cluster: Cluster
    options: WorkerOptions
    num_at_once: int = 0
    num_lost: int = 0  # workers
    _queue: deque[_Task] = field(default_factory=deque)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _workers: list[asyncio.Task[None]] = field(default_factory=list)
    actors: dict[int, Any] = field(default_factory=dict)  # by worker
    _failure: TidemillError | None = None

    async def start(self) -> None:
        """All workers, or none: raises what is wrong with the cluster or the model."""
        num = self.options.num_workers
        try:
            actors = await self.cluster.place(BatchActor, self.options.needs, num)
        except NoRoom as error:
            fix = "Ask for fewer --replicas or --threads, or add nodes."
            raise ConfigError(
                f"The cluster has no room for the workers: {error}.", fix=fix, param="replicas"
            ) from error
        self.actors = dict(enumerate(actors))
        try:
            sizes = await asyncio.gather(*map(self._load, actors))
        except BaseException:
            self.cluster.kill(*actors)
            raise
        self.num_at_once = sum(sizes)
        self._workers = [
            asyncio.create_task(self._work(index, size)) for index, size in enumerate(sizes)
        ]

    async def _load(self, actor: Any) -> int:
        options, engine = self.options, msgspec.msgpack.encode(self.options.engine)
        try:
            reply = await actor.start.remote(
                engine, options.num_at_once, options.stall_s, options.start_s
            )
        except self.cluster.errors as error:
            raise EngineDead(
                f"A worker ended while it started ({type(error).__name__})."
            ) from error
        if isinstance(reply, int):
            return reply
        refused = decode_from_engine(reply)
        assert isinstance(refused, Refused)
        raise error_from(refused)

    async def respond(self, request: Request) -> tuple[int, bytes]:
        if self._failure is not None:
            raise self._failure
        task = _Task(request, asyncio.get_running_loop().create_future())
        await self._put([task])
        return await task.answer

    async def _put(self, tasks: list[_Task], first: bool = False) -> None:
        async with self._changed:
            if first:
                self._queue.extendleft(reversed(tasks))
            else:
                self._queue.extend(tasks)
            self._changed.notify_all()

    async def _take(self) -> list[_Task]:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._queue) > 0)
            found = [self._queue.popleft() for _ in range(min(_PER_CALL, len(self._queue)))]
        return [task for task in found if not task.answer.done()]

    async def _work(self, index: int, size: int) -> None:
        """One worker; when its actor is lost, another takes its place."""
        try:
            while True:
                calls = [
                    asyncio.create_task(self._feed(self.actors[index]))
                    for _ in range(-(-size // _PER_CALL))
                ]
                await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
                for call in calls:
                    call.cancel()
                await asyncio.wait(calls)
                for call in calls:
                    if not call.cancelled() and not isinstance(
                        call.exception(), self.cluster.errors
                    ):
                        call.result()
                self.num_lost += 1
                _log.warning("a worker is lost; another takes its place")
                self.cluster.kill(self.actors.pop(index))
                size = await self._replace(index)
        except TidemillError as error:
            if not self.actors:
                self._fail(error)
        except Exception as error:
            _log.exception("a worker failed")
            self._fail(EngineDead(f"A worker failed: {type(error).__name__}: {error}", fix=_KEPT))

    async def _replace(self, index: int) -> int:
        """Tried again for as long as other workers go on; alone it is given up after a few times."""
        num_failed = 0
        while True:
            try:
                (actor,) = await self.cluster.place(BatchActor, self.options.needs)
                try:
                    size = await self._load(actor)
                except BaseException:
                    self.cluster.kill(actor)
                    raise
                self.actors[index] = actor
                return size
            except (TidemillError, NoRoom) as error:
                _log.error("a worker could not be started: %s", error)
                num_failed += 1
                if num_failed >= _MAX_FAILED_STARTS and not self.actors:
                    raise EngineDead(
                        f"No worker can be started any more: {error}", fix=_KEPT
                    ) from error
            await asyncio.sleep(_AGAIN_S)

    async def _feed(self, actor: Any) -> None:
        """Lines to an actor, a few at a time, until it is lost."""
        while True:
            tasks = await self._take()
            if not tasks:
                continue
            try:
                reply = await actor.execute.remote(
                    msgspec.msgpack.encode([task.request for task in tasks])
                )
                answers = msgspec.msgpack.decode(reply, type=list[tuple[int, bytes]])
            except BaseException:  # also if another call of the same actor has failed
                for task in tasks:
                    task.num_deaths += 1
                    if task.num_deaths >= _MAX_DEATHS and not task.answer.done():
                        what = f"{_MAX_DEATHS} workers were lost while they had the line {task.request.custom_id[:100]!r}."
                        task.answer.set_exception(EngineDead(what, fix=_KEPT))
                await asyncio.shield(
                    self._put([task for task in tasks if not task.answer.done()], first=True)
                )
                raise
            for task, answer in zip(tasks, answers, strict=True):
                if not task.answer.done():
                    task.answer.set_result(answer)

    def _fail(self, error: TidemillError) -> None:
        self._failure = error
        while self._queue:
            task = self._queue.popleft()
            if not task.answer.done():
                task.answer.set_exception(error)

    async def close(self) -> None:
        for worker in self._workers:
            worker.cancel()
        if self._workers:
            await asyncio.wait(self._workers)
        self.cluster.kill(*self.actors.values())
        self.cluster.close()
