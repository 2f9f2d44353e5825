"""A batch run: lines are read, executed many at a time, and written, each once. Running again
continues."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tidemill.batch import lines
from tidemill.batch.lines import Line, Problem, Request
from tidemill.batch.output import Output
from tidemill.errors import ConfigError
from tidemill.server.store import batch_lines

_AHEAD = 4  # lines that are read or not written yet, in multiples of those executed at once
_READ_AT_ONCE = 16
_SYNC_EVERY_S = 0.25


class Backend(Protocol):
    """Who executes lines."""

    num_at_once: int

    async def respond(self, request: Request) -> tuple[int, bytes]:
        """A status and the response's body, JSON on one line. A mistake in the request is its
        response; raises if no request can be executed."""
        ...


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _Body(msgspec.Struct):
    usage: _Usage | None = None


_decode_body = msgspec.json.Decoder(_Body).decode


@dataclass(slots=True)
class Progress:
    """The progress of a run, so far. `num_*` lines; tokens are of this run only."""

    total: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_kept: int = 0  # that were there at the start
    num_prompt: int = 0
    num_output: int = 0
    began_s: float = field(default_factory=time.monotonic)

    @property
    def rate(self) -> float:
        """Lines a second of this run."""
        return (self.num_done - self.num_kept) / max(time.monotonic() - self.began_s, 1e-3)

    @property
    def left_s(self) -> float | None:
        """None: it cannot be said yet."""
        return (self.total - self.num_done) / self.rate if self.rate > 0 else None


class Batch:
    """The output is locked from here until `close`. `defaults`: see `lines.parse`."""

    def __init__(
        self,
        source: Path,
        target: Path,
        errors: Path | None = None,
        ordered: bool = False,
        defaults: Mapping[str, Any] = {},
    ) -> None:
        if ordered and errors is not None:
            raise ConfigError(
                "--ordered and --errors are both given.",
                fix="With --ordered, failed lines are in their place.",
            )
        _check_files(source, target, errors)
        self._source, self._ordered, self._defaults = source, ordered, defaults
        num_lines = last = 0
        for line in lines.read(source):
            num_lines, last = num_lines + 1, line.number
        self._output = Output(target, last, errors)
        self.progress = Progress(total=num_lines)
        try:
            self._check_kept()
        except BaseException:
            self.close()
            raise
        done = self._output.done
        self.progress.num_done = self.progress.num_kept = done.num
        self.progress.num_failed = done.num_failed

    def _check_kept(self) -> None:
        """The results that are there are of this input and, if it is asked for, in its order."""
        first_left = None
        if not self._output.done.num:
            return
        for line in lines.read(self._source):
            if not self._output.is_done(line):
                first_left = first_left or line.number
            elif self._ordered and first_left is not None:
                what = f"The output has a result of line {line.number} and none of line {first_left}: it is not in order."
                raise ConfigError(what, fix="Continue without --ordered, or choose another output.")
        if self._ordered and not self._output.in_order:
            raise ConfigError(
                "The output is not in order.",
                fix="Continue without --ordered, or choose another output.",
            )

    @property
    def is_done(self) -> bool:
        return self.progress.num_done == self.progress.total

    async def run(
        self, backend: Backend, on_progress: Callable[[Progress], None] = lambda _: None
    ) -> None:
        """Until each line has its result. If it raises or is cancelled, the results so far are
        written."""
        self.progress.began_s = time.monotonic()
        writer = _Writer(self._output, self._ordered, self.progress, on_progress)
        slots, window = (
            asyncio.Semaphore(backend.num_at_once),
            asyncio.Semaphore(_AHEAD * backend.num_at_once),
        )
        writing = asyncio.create_task(writer.run(window.release))

        async def execute(place: int, line: Line) -> None:
            async with slots:
                text, failed = await self._execute(backend, line)
            writer.take(place, line, text, failed)

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_fail_with(writing))
                left = self._left()
                place = 0
                while some := await asyncio.to_thread(list, islice(left, _READ_AT_ONCE)):
                    for line in some:
                        await window.acquire()  # so that no more is read than is executed soon
                        group.create_task(execute(place, line))
                        place += 1
                writer.num_expected = place
                writer.changed.set()
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            writing.cancel()
            await asyncio.wait([writing])
            writer.write_all()

    def _left(self) -> Iterator[Line]:
        return (line for line in lines.read(self._source) if not self._output.is_done(line))

    async def _execute(self, backend: Backend, line: Line) -> tuple[bytes, bool]:
        request = lines.parse(line, self._defaults)
        if isinstance(request, Problem):
            return batch_lines.error_line(
                line.result_id, request.custom_id, request.code, request.message
            ), True
        status, body = await backend.respond(request)
        # a body without such figures
        with contextlib.suppress(msgspec.ValidationError, RecursionError):
            usage = _decode_body(body).usage or _Usage()
            self.progress.num_prompt += usage.prompt_tokens + usage.input_tokens
            self.progress.num_output += usage.completion_tokens + usage.output_tokens
        return batch_lines.response_line(
            line.result_id, request.custom_id, status, body
        ), status >= 400

    def close(self) -> None:
        self._output.close()


class _Writer:
    """Writes results a few times a second, so that one sync is for many of them."""

    def __init__(
        self,
        output: Output,
        ordered: bool,
        progress: Progress,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._output, self._ordered, self._progress, self._on_progress = (
            output,
            ordered,
            progress,
            on_progress,
        )
        self._ready: deque[tuple[Line, bytes, bool]] = deque()
        self._early: dict[int, tuple[Line, bytes, bool]] = {}  # whose turn has not come, by place
        self._next = 0
        self._num_written = 0
        self.num_expected: int | None = None
        self.changed = asyncio.Event()

    def take(self, place: int, line: Line, text: bytes, failed: bool) -> None:
        if not self._ordered:
            self._ready.append((line, text, failed))
        else:
            self._early[place] = line, text, failed
            while self._next in self._early:
                self._ready.append(self._early.pop(self._next))
                self._next += 1
        self.changed.set()

    async def run(self, on_written: Callable[[], None]) -> None:
        """Until all that is expected is on the disk."""
        while self._num_written != self.num_expected:
            await self.changed.wait()
            self.changed.clear()
            results = list(self._ready)
            self._ready.clear()
            if not results:
                continue
            writing = asyncio.ensure_future(asyncio.to_thread(self._output.write, results))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await asyncio.wait([writing])  # it must not be cut in two
                if writing.exception() is None:
                    self._count(results)
                raise
            self._count(results)
            for _ in results:
                on_written()
            if self._num_written != self.num_expected:
                await asyncio.sleep(_SYNC_EVERY_S)

    def write_all(self) -> None:
        """Writes the results that are there when the run is interrupted."""
        results = list(self._ready)
        self._ready.clear()
        if results:
            self._output.write(results)
            self._count(results)

    def _count(self, results: list[tuple[Line, bytes, bool]]) -> None:
        self._num_written += len(results)
        self._progress.num_done += len(results)
        self._progress.num_failed += sum(failed for _, _, failed in results)
        self._on_progress(self._progress)


async def _fail_with(task: asyncio.Task[None]) -> None:
    """Ends a group of tasks when this one fails."""
    await asyncio.wait([task])
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


def _check_files(source: Path, *targets: Path | None) -> None:
    if not source.is_file():
        raise ConfigError(f"There is no file {source}.", fix="Give a file of JSON lines.")
    paths = [source.resolve(), *(target.resolve() for target in targets if target is not None)]
    if len(set(paths)) < len(paths):
        raise ConfigError(
            "Input, output and errors are not different files.", fix="Name them apart."
        )
