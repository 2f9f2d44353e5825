"""Recording: the load of this server as a trace, which `simulate`, `plan` and `bench serve` replay.

A line for each request that has ended: when it came, how long its prompt and its output were, and
which blocks of its prompt others had as well. Times and counts are read from the engine's events,
as metrics are. `begin` and `end` add what no event holds: the tokens of a prompt, and when its
client left.

No token is kept. A block is known by a hash of it and all before it, which stays in memory; the
file has numbers, in the order in which blocks first came. Tenants are numbers, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import stat
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue

from tidemill import events
from tidemill.errors import ConfigError
from tidemill.events import Event
from tidemill.sampling import MAX_N
from tidemill.sched.placement import prefix_keys
from tidemill.sim.trace import Row, line_of
from tidemill.wire import Submit

BLOCK_LEN = 64  # tokens of a prompt that have a number
MAX_BLOCKS = 2**18  # whose numbers are remembered: of 16.8 million tokens
MAX_TENANTS = 2**14
MAX_UNKNOWN = 2**12  # requests whose client has left, and of which no engine has told yet
MAX_BEHIND = 16 * 2**20  # bytes that wait to be written
_LONG_IDS = 4096  # tokens, whose hashes are made in a thread: 0.05 ms for 1,000
_TOKEN_BYTES = 4
_MAX_PARTLY = 2**20  # bytes of a line that was not written in full
_CLOSE_S = 5.0  # to write what waits; a disk that hangs does not hold up the end
_OURS = re.compile(rb'\{"timestamp":[\d.]+,"input_length":\d')
_log = logging.getLogger("tidemill.server")


class IdAllocator:
    """A number for each key, in the order in which they first come. Those that were not asked for
    longest are forgotten: such a key gets another number."""

    def __init__(self, first: int, most: int) -> None:
        self._next, self._most = first, most
        self._known: OrderedDict[Hashable, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def of(self, keys: Sequence[Hashable]) -> tuple[int, ...]:
        for key in keys:
            if key not in self._known:
                self._known[key] = self._next
                self._next += 1
        found = tuple([self._known[key] for key in keys])
        for key in reversed(keys):  # the first block is forgotten last
            self._known.move_to_end(key)
        while len(self._known) > self._most:
            self._known.popitem(last=False)
        return found


class TraceFile:
    """Whole lines at the end of a file, written by a thread. If that fails, or falls too far
    behind, nothing more is written."""

    def __init__(self, path: Path) -> None:
        """Made with mode 0600. A file that was recorded before is continued; any other is
        refused."""
        self._path = path
        self._size = self._open()
        # Each number is in the file, where it takes two bytes or more: none that is there already
        # is given again.
        self._blocks, self._tenants = (
            IdAllocator(self._size // 2 + 1, most) for most in (MAX_BLOCKS, MAX_TENANTS)
        )
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._num_put = self._num_taken = 0  # bytes: each is changed by one thread
        self._num_lines = 0
        self._failure = ""
        self._is_told = False
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    def _open(self) -> int:
        """Opens the file and returns its size in bytes."""
        fix = "Choose another --record-trace."
        try:
            self._fd = os.open(
                self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK, 0o600
            )
        except OSError as error:
            raise _refusal(
                f"The trace {self._path} cannot be written: {error.strerror}.", fix
            ) from error
        try:
            found = os.fstat(self._fd)
            if not stat.S_ISREG(found.st_mode):
                raise _refusal(f"{self._path} is no file that a trace can be written to.", fix)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = os.fstat(self._fd).st_size
            if size and not _OURS.match(os.pread(self._fd, 64, 0)):
                raise _refusal(
                    f"{self._path} holds something other than a recorded trace, which is not "
                    "continued.",
                    fix,
                )
            tail = os.pread(self._fd, _MAX_PARTLY, max(size - _MAX_PARTLY, 0))
            num_partly = (
                len(tail) - tail.rfind(b"\n") - 1
            )  # of a line that was being written when the machine stopped
            os.ftruncate(self._fd, size - num_partly)
            return size - num_partly
        except BaseException as error:
            os.close(self._fd)
            if isinstance(error, BlockingIOError):
                raise _refusal(
                    f"Another server records into {self._path}.",
                    "Give each its own --record-trace.",
                ) from None
            if isinstance(error, OSError):
                raise _refusal(
                    f"The trace {self._path} cannot be written: {error.strerror}.", fix
                ) from error
            raise

    def recording(self, model: str = "") -> Recording:
        """The recording of a model. `model`: its name, where there are several."""
        return Recording(self, model)

    def put(self, row: Row, keys: Sequence[int]) -> None:
        """`row`: with its tenant's name. `keys`: of its blocks."""
        if self._failure:
            return
        if self._num_put - self._num_taken > MAX_BEHIND:
            self._fail("the disk does not keep up")
            return
        tenant = str(self._tenants.of([row.tenant])[0]) if row.tenant else ""
        line = line_of(replace(row, blocks=self._blocks.of(keys), tenant=tenant))
        self._num_put += len(line)
        self._queue.put(line)

    def stopped(self) -> list[Event]:
        """That it has failed: told once."""
        if not self._failure or self._is_told:
            return []
        self._is_told = True
        return [events.RecordingStopped(time.monotonic(), self._failure, self._num_lines)]

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            os.close(self._fd)

    def _run(self) -> None:
        is_open = True
        while is_open:
            lines = [self._queue.get()]
            with contextlib.suppress(Empty):
                while True:
                    lines.append(self._queue.get_nowait())
            is_open = None not in lines
            whole = [line for line in lines if line is not None]
            if not self._failure:
                try:
                    self._write(b"".join(whole))
                    self._num_lines += len(whole)
                except OSError as error:
                    self._fail(error.strerror or type(error).__name__)
            self._num_taken += sum(map(len, whole))

    def _write(self, text: bytes) -> None:
        """All of it, or nothing."""
        left = memoryview(text)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError:
            with contextlib.suppress(OSError):  # it may have been made shorter meanwhile
                os.ftruncate(self._fd, min(self._size, os.fstat(self._fd).st_size))
            raise
        self._size += len(text)

    def _fail(self, why: str) -> None:
        self._failure = why
        _log.error("the load is not recorded any more, %s cannot be written: %s", self._path, why)


@dataclass(slots=True)
class _RecordedRequest:
    """A request that has not been written."""

    row: Row  # as far as it is known
    keys: array[int]
    is_known: bool = False  # an engine has taken it
    open: set[str] = field(
        default_factory=set
    )  # samples that an engine has, or will report as ended
    num_outputs: dict[str, int] = field(default_factory=dict)  # by sample
    first_s: float | None = None  # when the first token came
    last_s: float = 0.0  # when a sample ended
    left_s: float | None = None  # when the server was done with it
    num_delivered: int = 0  # tokens of all samples
    num_samples: int = 1  # that are delivered: of a beam search, fewer than beams
    is_whole: bool = False


class Recording:
    """The recording of one model. Times are the server's: engines may be on other hosts."""

    def __init__(self, file: TraceFile, model: str = "") -> None:
        """`model`: its name, where there are several."""
        self._file, self._model = file, model
        self._requests: dict[str, _RecordedRequest] = {}
        self._unknown: dict[
            str, None
        ] = {}  # of those, what waits for an engine's word that it has taken them
        self._offset_s = time.time() - time.monotonic()

    async def begin(self, request: Submit) -> None:
        """It is about to be submitted."""
        now, params = time.monotonic(), request.params
        n = params.n if params.beams is None else params.beams.width
        what = Row(
            now,
            len(request.prompt_ids),
            0,
            (),
            request.priority,
            request.tenant,
            min(n, MAX_N),
            block_len=BLOCK_LEN,
        )
        is_long = len(request.prompt_ids) >= _LONG_IDS
        keys = (
            await asyncio.to_thread(self._keys_of, request) if is_long else self._keys_of(request)
        )
        self._requests[request.request_id] = _RecordedRequest(
            replace(what, model=self._model), keys, num_samples=params.n
        )

    def end(
        self, request_id: str, num_delivered: int, is_whole: bool, has_failed: bool = False
    ) -> None:
        """The server is done with it. Its engine may report later that it has taken it, where the
        client left at once, and the end of samples: after a stop string, or an abort. `has_failed`:
        what no engine has taken was refused."""
        request = self._requests.get(request_id)
        if request is None or request.left_s is not None:
            return
        request.left_s, request.num_delivered, request.is_whole = (
            time.monotonic(),
            num_delivered,
            is_whole,
        )
        if request.is_known:
            self._write_if_over(request_id, request)
        elif has_failed:
            del self._requests[request_id]
        else:
            self._unknown[request_id] = None
            while len(self._unknown) > MAX_UNKNOWN:
                oldest = next(iter(self._unknown))
                del self._unknown[oldest], self._requests[oldest]

    def take(self, batch: list[Event]) -> list[Event]:
        """Notes the events of requests; returns those that tell of a recording that stopped."""
        for event in batch:
            match event:
                case (
                    events.Submitted() | events.FirstToken() | events.Finished() | events.Aborted()
                ):
                    request_id = event.request_id.partition(":")[0]  # after it: the sample
                    request = self._requests.get(request_id)
                    if request is not None:
                        self._note(request, event)
                        self._unknown.pop(request_id, None)
                        self._write_if_over(request_id, request)
        return self._file.stopped()

    def close(self) -> None:
        """Before the file is closed. What is under way has ended: with the server."""
        for request_id in list(self._requests):
            self.end(request_id, 0, False, has_failed=True)
        for request_id, request in list(self._requests.items()):
            request.open.clear()
            self._write_if_over(request_id, request)

    def _keys_of(self, request: Submit) -> array[int]:
        """The keys of the blocks of a request's prompt; the last may be shorter."""
        try:
            ids = array("I", request.prompt_ids).tobytes()
        except OverflowError:  # the engine will refuse it
            ids = b""
        size = _TOKEN_BYTES * BLOCK_LEN
        ids += b"\xff" * (-len(ids) % size)  # no token has this number
        root = f"{self._model}\0{request.adapter}\0{request.salt}".encode()
        return array("Q", prefix_keys(root, ids, size, most=len(ids)))

    @staticmethod
    def _note(
        request: _RecordedRequest,
        event: events.Submitted | events.FirstToken | events.Finished | events.Aborted,
    ) -> None:
        name, now = event.request_id, time.monotonic()
        match event:
            case events.Submitted():
                request.is_known = True
                request.open.add(name)
            case events.FirstToken() if request.first_s is None:
                request.first_s = now
            case events.Finished() | events.Aborted():  # here; it may go on in another engine
                request.open.discard(name)
                request.last_s = now
                request.num_outputs[name] = max(request.num_outputs.get(name, 0), event.num_output)

    def _write_if_over(self, request_id: str, request: _RecordedRequest) -> None:
        if request.left_s is None or request.open or not request.is_known:
            return
        del self._requests[request_id]
        row, at_s = request.row, request.row.at_s
        num_reported = sum(request.num_outputs.values()) / max(len(request.num_outputs), 1)
        ended_s = min(request.last_s or request.left_s, request.left_s)
        self._file.put(
            replace(
                row,
                at_s=at_s + self._offset_s,
                num_output=round(
                    max(num_reported, request.num_delivered / request.num_samples)
                ),  # the mean of the samples
                abort_s=None if request.is_whole else request.left_s - at_s,
                ttft_s=None if request.first_s is None else request.first_s - at_s,
                e2e_s=None if request.first_s is None else max(ended_s, request.first_s) - at_s,
            ),
            request.keys,
        )


def _refusal(what: str, fix: str) -> ConfigError:
    return ConfigError(what, fix=fix, param="record_trace")
