"""RecordingWriter: records go to files of a folder, written by a thread. The folder is bounded: the
oldest file is dropped."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tidemill.config.sizes import fmt_bytes, parse_bytes
from tidemill.errors import ConfigError
from tidemill.record.build import about_machine, build_name
from tidemill.record.format import (
    KEY_BYTES,
    SEGMENT_LEN,
    SUFFIX,
    TOKEN_BYTES,
    VERSION,
    AdapterStart,
    Begun,
    ModelStart,
    Packer,
    RecordType,
    Segment,
    Start,
    bytes_of,
    digest_of,
)
from tidemill.types import events
from tidemill.types.events import Event

DEFAULT_BYTES = 2**30
MIN_BYTES = 2**20
MAX_BEHIND = 64 * 2**20  # bytes that wait to be written, about
_FILES = 8  # of the folder, when it is full
# between two blocks: a thread that is woken for each record costs more than all else
_EVERY_S = 0.5
_AT_ONCE = 500  # records of a block: while one is encoded, other threads wait
_CLOSE_S = 10.0  # to write what waits; a disk that hangs does not hold up the end
_FIX = "Choose another --record."
_log = logging.getLogger("tidemill.server")


class _Item(NamedTuple):
    record: RecordType
    size: int  # bytes, about
    is_sealed: bool
    prompt: Sequence[int]  # of a request that has begun


class RecordingWriter:
    """If writing fails, or falls too far behind, nothing more is written: requests are served as
    before."""

    def __init__(
        self,
        folder: Path,
        most_bytes: int = DEFAULT_BYTES,
        key: bytes | None = None,
        seals_all: bool = True,
    ) -> None:
        """`key`: with which records are sealed, all of them or those that say so."""
        self._folder, self._most = folder, most_bytes
        self._seals_all = key is not None and seals_all
        self._has_key = key is not None
        self._packer = Packer(key)
        self._start = Start(
            VERSION,
            secrets.token_hex(8),
            build_name(),
            time.time(),
            time.monotonic(),
            about_machine(),
        )
        # what each file begins with
        self._lasting: dict[tuple[str, str], tuple[RecordType, bool]] = {}
        self._known: set[bytes] = set()  # segments of the file
        self._queue: deque[_Item] = deque()
        self._is_closing = threading.Event()
        self._num_put = self._num_taken = 0  # bytes, about: each is changed by one thread
        self.num_requests = 0
        self._failure, self._is_told = "", False
        self._file, self._size = -1, 0
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._number = max((int(path.stem) for path in files_of(folder)), default=0)
            self._next_file()
        except BlockingIOError:
            raise _refusal(
                f"Another server records into {folder}.", "Give each its own --record."
            ) from None
        except OSError as error:
            raise _refusal(f"{folder} cannot be recorded into: {error.strerror}.", _FIX) from error
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    def __str__(self) -> str:
        sealed = (
            ", sealed with the owner's key"
            if self._seals_all
            else ", in part sealed"
            if self._has_key
            else ""
        )
        return f"{self._folder}, at most {fmt_bytes(self._most)}{sealed}"

    def put(
        self, record: RecordType, size: int, is_private: bool = False, prompt: Sequence[int] = ()
    ) -> None:
        """`size`: about so many bytes. `prompt`: of a request that has begun."""
        if self._failure:
            return
        if self.num_behind > MAX_BEHIND:
            self._fail("the disk does not keep up")
            return
        self._num_put += size
        self._queue.append(_Item(record, size, is_private or self._seals_all, prompt))

    @property
    def num_bytes(self) -> int:
        """The size of the file that is written."""
        return self._size

    @property
    def num_behind(self) -> int:
        """Bytes that wait to be written, about."""
        return self._num_put - self._num_taken

    def stopped(self) -> list[Event]:
        """That it has failed: told once."""
        if not self._failure or self._is_told:
            return []
        self._is_told = True
        return [events.RecordingStopped(time.monotonic(), self._failure, self.num_requests)]

    def close(self) -> None:
        """Safe to call twice."""
        self._is_closing.set()
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive() and self._file >= 0:
            os.close(self._file)
            os.close(self._lock)
            self._file = -1

    # ---- in the thread

    def _run(self) -> None:
        is_open = True
        while is_open:
            is_open = not self._is_closing.wait(_EVERY_S)
            while self._queue:
                items = self._next_items()
                try:
                    if not self._failure:
                        self._write_records(items)
                except OSError as error:
                    self._fail(error.strerror or type(error).__name__)
                except Exception as error:
                    _log.exception("recording failed")
                    self._fail(type(error).__name__)
                self._num_taken += sum(item.size for item in items)

    def _next_items(self) -> list[_Item]:
        """Those of the next block. What is large is alone."""
        items = [self._queue.popleft()]
        left = self._most // _FILES - items[0].size
        while self._queue and len(items) < _AT_ONCE and (left := left - self._queue[0].size) > 0:
            items.append(self._queue.popleft())
        return items

    def _write_records(self, items: list[_Item]) -> None:
        if self._size > max(self._most // _FILES, MIN_BYTES // _FILES):
            self._next_file()
        ready: dict[bool, list[RecordType]] = {False: [], True: []}
        for record, _, is_sealed, prompt in items:
            if isinstance(record, ModelStart | AdapterStart):
                name = record.info.name if isinstance(record, AdapterStart) else ""
                self._lasting[record.model, name] = record, is_sealed
            elif isinstance(record, Begun):
                self.num_requests += 1
                self._cut(record, prompt, ready[is_sealed])
            ready[is_sealed].append(record)
        for is_sealed, records in ready.items():
            if not records:
                continue
            block = self._packer.block(records, is_sealed)
            if len(block) <= self._most // 2:
                self._write(block)
            else:
                _log.warning("a request is not recorded, as it would take half of %s", self._folder)
                self._known.clear()

    def _cut(self, record: Begun, prompt: Sequence[int], ready: list[RecordType]) -> None:
        """The segments of a prompt that the file does not have."""
        try:
            data = bytes_of(prompt)
        except OverflowError:  # the engine refuses it
            return
        step = SEGMENT_LEN * TOKEN_BYTES
        for piece in (data[at : at + step] for at in range(0, len(data), step)):
            digest = digest_of(piece)
            record.segments.append(digest)
            if digest not in self._known:
                self._known.add(digest)
                ready.append(Segment(digest, piece))

    def _next_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._number, self._size = self._number + 1, 0
        self._known.clear()
        path = self._folder / f"{self._number:08d}{SUFFIX}"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        self._write(self._packer.block([self._start], is_sealed=False))
        for is_sealed in (False, True):
            records = [record for record, sealed in self._lasting.values() if sealed is is_sealed]
            if records:
                self._write(self._packer.block(records, is_sealed))

    def _write(self, block: bytes) -> None:
        """All of it, or nothing. Older files make room."""
        self._make_room(len(block))
        left = memoryview(block)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            raise
        self._size += len(block)

    def _make_room(self, num_bytes: int) -> None:
        files = [path for path in files_of(self._folder) if int(path.stem) != self._number]
        sizes = {path: path.stat().st_size for path in files}
        while files and sum(sizes.values()) + self._size + num_bytes > self._most:
            sizes.pop(oldest := files.pop(0))
            oldest.unlink()

    def _fail(self, why: str) -> None:
        self._failure = why
        _log.error("nothing more is recorded, %s cannot be written: %s", self._folder, why)


def folder_and_size(text: str) -> tuple[Path, int]:
    """DIR:SIZE, or DIR."""
    folder, _, size = text.rpartition(":")
    if not folder:
        return Path(text).expanduser(), DEFAULT_BYTES
    try:
        num_bytes = parse_bytes(size)
    except ConfigError:
        raise _refusal(
            f"--record is {text!r}.", "Write DIR, or DIR:SIZE, such as /var/log/tidemill:2GB."
        ) from None
    if num_bytes < MIN_BYTES:
        raise _refusal(
            f"A recording of {fmt_bytes(num_bytes)} would keep next to nothing.",
            "Give 1MB or more.",
        )
    return Path(folder).expanduser(), num_bytes


def files_of(folder: Path) -> list[Path]:
    """The files of a recording, oldest first."""
    return sorted(
        path
        for path in folder.iterdir()
        if re.fullmatch(r"\d{8}", path.stem) and path.suffix == SUFFIX
    )


def read_key(path: Path, creates: bool = False) -> bytes:
    """The owner's key. `creates`: if there is none yet, with mode 0600."""
    try:
        if creates and not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(KEY_BYTES) + "\n")
        key = bytes.fromhex(path.read_text().strip())
    except OSError as error:
        raise ConfigError(
            f"The key {path} cannot be read: {error.strerror}.", param="record_key"
        ) from error
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        what = f"{path} holds no key of a recording: {2 * KEY_BYTES} hexadecimal digits."
        raise ConfigError(
            what, fix="Name a file that does not exist, and one is made.", param="record_key"
        )
    return key


def _refusal(what: str, fix: str) -> ConfigError:
    return ConfigError(what, fix=fix, param="record")
