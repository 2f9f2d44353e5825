"""Weights as kernels take them, written once to a file, so that they can be read again and again
while the model runs.

A file is a head of one page, items at multiples of a page, and a table of them as JSON, of which
the head has the hash. Files lie in a folder with a quota. One that is in use is locked, and stays;
of the others, the least recently used make room.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import stat
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from tidemill.config.sizes import fmt_bytes
from tidemill.errors import CheckpointError, ConfigError
from tidemill.kernels.memory import PAGE, memory
from tidemill.weights.choose import parts
from tidemill.weights.digest import fingerprint_of
from tidemill.weights.locate import weight_files

VERSION = 2
_MAGIC = b"tidemill weights"
_HEAD = struct.Struct("<16sIQQ32s")  # magic, version, where the table begins, its bytes, its hash
_ALIGN = 64  # of an array in an item
_MAX_TABLE = 2**28
_PIECE = 2**20
_NUM_READERS = 4
_SYNC_EVERY = 2**28
_SUFFIX, _UNFINISHED = ".weights", ".unfinished"
# neither through a link nor waiting, as for a pipe
_SAFELY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class PreparedCorrupt(CheckpointError):
    """A file of prepared weights that was changed since it was written. It is gone: the next start
    writes it anew."""


@dataclass(frozen=True, slots=True)
class Item:
    """Arrays that are read together."""

    name: str
    offset: int  # in the file
    num_bytes: int  # a multiple of a page
    checksum: int
    starts: list[int]  # of the arrays
    about: dict[str, Any] = field(default_factory=dict)  # what a kernel must know of them


def _up(num: int, unit: int) -> int:
    return -(-num // unit) * unit


def key_of(path: Path, about: str) -> str:
    """The key of prepared weights: the checkpoint's files and `about`, what is made of them."""
    digest = hashlib.sha256(f"{VERSION}\n{about}\n".encode())
    for file in parts(path) if path.is_file() else [path]:
        digest.update(fingerprint_of(file))
    for file in parts(path) if path.is_file() else weight_files(path):
        digest.update(f"{file.stat().st_mtime_ns}\n".encode())
    return digest.hexdigest()[:40]


class WeightFile(Protocol):
    """The file that a stream reads from."""

    fd: int
    file_bytes: int
    changed_ns: int

    def close(self) -> None: ...


class PreparedFile:
    """One that is complete. It is locked while it is open."""

    def __init__(self, path: Path, key: str, locks: bool = True) -> None:
        """Raises PreparedCorrupt if its content is wrong, and OSError if it cannot be used:
        BlockingIOError while another process removes it. `locks`: False if the caller has it
        locked."""
        self.path = path
        self.fd = _open_direct(path)
        try:
            if not _is_own(os.fstat(self.fd)):
                raise PermissionError(errno.EPERM, "it is no plain file of this user")
            os.set_blocking(self.fd, True)
            if locks:
                self.lock()
            status = os.fstat(self.fd)
            self.file_bytes, self.changed_ns = status.st_size, status.st_mtime_ns
            self.items = self._read_table(key)
            # used just now
            os.utime(self.fd, ns=(max(status.st_atime_ns, time.time_ns()), status.st_mtime_ns))
        except BaseException:
            self.close()
            raise

    def lock(self) -> None:
        fcntl.flock(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def _read_table(self, key: str) -> dict[str, Item]:
        head = memory(PAGE)
        self._read(head, 0)
        magic, version, offset, num_bytes, digest = _HEAD.unpack_from(head.data)
        is_ours = (
            magic == _MAGIC
            and version == VERSION
            and offset % PAGE == 0
            and 0 < num_bytes <= _MAX_TABLE
        )
        if not is_ours or self.file_bytes != offset + _up(num_bytes, PAGE):
            raise self._corrupt("it was cut short, or is of another kind")
        table = memory(num_bytes)
        self._read(table, offset)
        text = table[:num_bytes].tobytes()
        if hashlib.sha256(text).digest() != digest:
            raise self._corrupt("its table had another hash")
        try:
            data = json.loads(text)
            items = {item["name"]: Item(**item) for item in data["items"]}
            is_right = data["key"] == key and all(_fits(item, offset) for item in items.values())
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._corrupt("its table is no table") from error
        if not is_right:
            raise self._corrupt("it has the weights of another model")
        return items

    def read(self, item: Item, to: np.ndarray | None = None) -> None:
        """Into memory, if any is given, with the checksum checked."""
        piece, checksum = memory(_PIECE) if to is None else to, 0
        for start in range(0, item.num_bytes, _PIECE):
            num = min(_PIECE, item.num_bytes - start)
            part = piece[:num] if to is None else piece[start : start + num]
            self._read(part, item.offset + start)
            checksum = zlib.crc32(part.data, checksum)
        if checksum != item.checksum:
            raise self._corrupt(f"{item.name} had another checksum")

    def verify(self, items: Iterable[Item]) -> None:
        """That these are as they were written."""
        with ThreadPoolExecutor(_NUM_READERS) as threads:
            for _ in threads.map(self.read, items):
                pass

    def _read(self, to: np.ndarray, offset: int) -> None:
        done = 0
        while done < len(to):
            num = os.preadv(self.fd, [to[done:].data], offset + done)
            if num <= 0:
                raise self._corrupt("it was cut short")
            done += num

    def _corrupt(self, why: str) -> PreparedCorrupt:
        _unlink(self.path, self.fd)
        return PreparedCorrupt(f"{self.path} was corrupt, and is removed: {why}.")

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _fits(item: Item, end: int) -> bool:
    whole = all(
        isinstance(num, int) and num >= 0 for num in (item.offset, item.num_bytes, *item.starts)
    )
    aligned = whole and item.offset % PAGE == 0 and item.num_bytes % PAGE == 0
    is_inside = aligned and item.offset >= PAGE and item.offset + item.num_bytes <= end
    return is_inside and all(start <= item.num_bytes for start in item.starts)


def _open_direct(path: Path) -> int:
    """Past the page cache where the file system can do that: pages in it are memory, too."""
    flags = os.O_RDONLY | _SAFELY
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags)


def _is_own(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _unlink(path: Path, fd: int) -> None:
    """If it still is the file that is open."""
    with contextlib.suppress(OSError):
        if os.path.samestat(path.lstat(), os.fstat(fd)):
            path.unlink()


class Writer:
    """The writer of a new file, which has its name when it is complete. From the start it is as
    long as it may become: the quota counts it so."""

    def __init__(self, folder: Folder, key: str, num_bytes: int) -> None:
        self._folder, self._key = folder, key
        self.items: dict[str, Item] = {}
        self._written = 0  # bytes that are on the disk
        with self._reported():
            self._path, fd = _create(folder.path, key)
            self._file = os.fdopen(fd, "wb")
            os.truncate(fd, num_bytes)
            self._file.write(bytes(PAGE))

    def put(self, name: str, arrays: Sequence[torch.Tensor], about: dict[str, Any]) -> None:
        offset, num_bytes, checksum, starts = self._file.tell(), 0, 0, list[int]()
        for array in arrays:
            data = array.contiguous().view(torch.uint8).flatten().numpy().data
            starts.append(num_bytes)
            for part in (data, bytes(-len(data) % _ALIGN)):
                checksum = self._add(part, checksum)
                num_bytes += len(part)
        checksum = self._add(bytes(-num_bytes % PAGE), checksum)
        self.items[name] = Item(name, offset, _up(num_bytes, PAGE), checksum, starts, about)
        if self._file.tell() - self._written >= _SYNC_EVERY:
            self._forget_pages()

    def _add(self, data: bytes | memoryview, checksum: int) -> int:
        with self._reported():
            self._file.write(data)
        return zlib.crc32(data, checksum)

    def _forget_pages(self) -> None:
        """Drops the pages on the disk from the page cache, where they are not needed."""
        with self._reported():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._written = self._file.tell()
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def finish(self) -> PreparedFile:
        text = json.dumps(
            {"key": self._key, "items": [asdict(item) for item in self.items.values()]}
        ).encode()
        offset = self._file.tell()
        with self._reported():
            self._file.write(text + bytes(-len(text) % PAGE))
            self._file.truncate()
            self._file.seek(0)
            self._file.write(
                _HEAD.pack(_MAGIC, VERSION, offset, len(text), hashlib.sha256(text).digest())
            )
            self._forget_pages()
            # open before anybody may remove it
            made = PreparedFile(self._path, self._key, locks=False)
            made.path = self._path.rename(self._folder.path_of(self._key))
            self._file.close()
            # somebody removes it just now: what is open stays readable
            with contextlib.suppress(BlockingIOError):
                made.lock()
        return made

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        self._path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if hasattr(self, "_file"):
                self.discard()
            what = "The disk is full" if error.errno in _FULL else f"{error.strerror}"
            raise ConfigError(
                f"{what}: the prepared weights cannot be written to {self._folder.path}.",
                fix="Free space there, or choose another folder with --weight-cache.",
                param="weight_cache",
            ) from error


def _create(folder: Path, key: str) -> tuple[Path, int]:
    """A new file that is locked, under a name that no other process or machine has."""
    while True:
        path = folder / f"{key}.{secrets.token_hex(8)}{_UNFINISHED}"
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | _SAFELY, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:  # nobody made room of it before it was locked
                return path, fd
        except BaseException:
            os.close(fd)
            path.unlink(missing_ok=True)
            raise
        os.close(fd)


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of prepared weights, at most `quota` bytes of them."""

    path: Path
    quota: int

    def path_of(self, key: str) -> Path:
        return self.path / f"{key}{_SUFFIX}"

    def open(self, key: str) -> PreparedFile | None:
        """None: there is none that is right, or somebody is removing it. One with a wrong content
        is removed."""
        try:
            return PreparedFile(self.path_of(key), key)
        except (FileNotFoundError, BlockingIOError, PreparedCorrupt):
            return None
        except OSError as error:
            raise ConfigError(
                f"The prepared weights {self.path_of(key)} cannot be used: {error.strerror}.",
                fix="Choose another folder with --weight-cache.",
                param="weight_cache",
            ) from error

    def write(self, key: str, num_bytes: int) -> Writer:
        """`num_bytes`: what the file will have at most."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._make_room(num_bytes)
        except OSError as error:
            raise ConfigError(
                f"Prepared weights cannot be written to {self.path}: {error.strerror}.",
                fix="Choose another folder with --weight-cache.",
                param="weight_cache",
            ) from error
        return Writer(self, key, num_bytes)

    def _make_room(self, num_bytes: int) -> None:
        """Remove what nobody uses until there is room: what is unfinished, then the least recently
        used."""
        if num_bytes > self.quota:
            raise ConfigError(
                f"The prepared weights need {fmt_bytes(num_bytes)} on disk; the quota of {self.path} is {fmt_bytes(self.quota)}.",
                fix=f"Give at least {fmt_bytes(num_bytes)} with --weight-cache PATH:SIZE.",
                param="weight_cache",
            )
        for file in self.path.glob(f"*{_UNFINISHED}"):
            _remove_unused(file)
        used = _statuses(self.path, _SUFFIX)
        files = sorted(used, key=lambda file: used[file].st_atime_ns)
        while (short := self._lacks(num_bytes)) and files:
            _remove_unused(files.pop(0))
        if short:
            raise ConfigError(
                f"The prepared weights need {fmt_bytes(num_bytes)} on disk; {self.path} has {fmt_bytes(num_bytes - short)} left.",
                fix="Free space there, or choose another folder or a larger quota with --weight-cache.",
                param="weight_cache",
            )

    def _lacks(self, num_bytes: int) -> int:
        """Bytes that are missing on the disk or under the quota."""
        used = sum(
            one.st_size
            for suffix in (_SUFFIX, _UNFINISHED)
            for one in _statuses(self.path, suffix).values()
        )
        status = os.statvfs(self.path)
        return max(0, used + num_bytes - self.quota, num_bytes - status.f_bavail * status.f_frsize)


def _statuses(folder: Path, suffix: str) -> dict[Path, os.stat_result]:
    """The statuses of the files that are there; others may be removing some."""
    found = {}
    for file in folder.glob(f"*{suffix}"):
        with contextlib.suppress(FileNotFoundError):
            found[file] = file.lstat()
    return found


def _remove_unused(path: Path) -> None:
    """Unless somebody has it locked, or it is another user's."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | _SAFELY)
        try:
            if _is_own(os.fstat(fd)):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _unlink(path, fd)
        finally:
            os.close(fd)
