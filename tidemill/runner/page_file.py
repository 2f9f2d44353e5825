"""A file of KV pages: records of one size, each with its key and a checksum, for one model, dtype,
layout and build of kernels.

file    header | record 0 | record 1 | ...         it grows as records are written, up to its share of the folder's quota
record  its own header (key, order of writing, checksum of key and page) | the page's bytes

A record is whole or not there: a write that was cut off has a wrong checksum. Nothing else is
needed after a crash.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_MAGIC, _VERSION = b"tidemill KV page", 1
# magic, version, digest, bytes of a page, records at most, checksum of all that
_HEADER = struct.Struct("<16sI32sQQI")
# magic, length of the key, key, order, checksum of key and page, checksum of all that
_RECORD = struct.Struct("<4sH34sQII")
_FIRST = 4096  # where the records begin
_ALIGNMENT = 64
SUFFIX = ".tidemill-kv"
# neither through a link nor waiting, as for a pipe
_SAFELY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class PageFileError(Exception):
    """The file, or a record of it, cannot be used. The message says why."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A file, and what it holds: keys and records, the oldest first."""

    file: PageFile
    contents: list[tuple[bytes, int]]
    ignored: list[str]  # why something that was there is not used


class PageFile:
    def __init__(self, fd: int, page_bytes: int, num_records: int) -> None:
        self.page_bytes = page_bytes
        self.num_records = num_records
        self._fd = fd
        self._stride = stride(page_bytes)
        self._next_order = 1

    @staticmethod
    def open(folder: Path, quota: int, digest: bytes, page_bytes: int) -> Opened:
        """The folder's file for this digest; a new one if there is none, or none that can be used.
        Files of other models make room, if the quota is exceeded."""
        assert len(digest) == 32
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder / ".lock"):
                return _open(
                    folder, folder / f"{digest.hex()[:32]}{SUFFIX}", quota, digest, page_bytes
                )
        except OSError as error:
            raise PageFileError(f"{folder}: {error.strerror or error}") from error

    def close(self) -> None:
        os.close(self._fd)

    # ---- records

    def write(self, record: int, key: bytes, page: np.ndarray) -> None:
        header = self._record_header(key, zlib.crc32(page.data, zlib.crc32(key)))
        num = os.pwritev(self._fd, [header, page.data], _FIRST + record * self._stride)
        if num != len(header) + page.nbytes:
            raise PageFileError(f"only {num} bytes of a page could be written")

    def read(self, record: int, key: bytes, page: np.ndarray) -> None:
        """Into `page`, which holds nothing of use if this raises."""
        header = bytearray(_RECORD.size)
        num = os.preadv(self._fd, [header, page.data], _FIRST + record * self._stride)
        found = _read_record_header(bytes(header)) if num == len(header) + page.nbytes else None
        if found is None or found[0] != key or found[2] != zlib.crc32(page.data, zlib.crc32(key)):
            self.erase(record)
            raise PageFileError("a record is cut off or corrupt")

    def erase(self, record: int) -> None:
        os.pwrite(self._fd, bytes(_RECORD.size), _FIRST + record * self._stride)

    # ---- inside

    def begin(self, path: Path, digest: bytes) -> tuple[list[tuple[bytes, int]], list[str]]:
        header, ignored = os.pread(self._fd, _HEADER.size, 0), []
        wrong = _what_is_wrong(header, digest, self.page_bytes)
        if header and wrong:
            ignored.append(f"{path}: {wrong}")
        if wrong:
            os.ftruncate(self._fd, 0)
        most = _FIRST + self.num_records * self._stride
        if os.fstat(self._fd).st_size > most:  # the quota was larger
            os.ftruncate(self._fd, most)
        fields = _MAGIC, _VERSION, digest, self.page_bytes, self.num_records
        if os.pwrite(self._fd, _HEADER.pack(*fields, _checksum(_HEADER, fields)), 0) < _HEADER.size:
            raise PageFileError(f"{path}: there is no space for its header")
        contents, num_bad = self._scan()
        if num_bad:
            ignored.append(f"{path}: {num_bad} records are cut off or corrupt")
        return contents, ignored

    def _scan(self) -> tuple[list[tuple[bytes, int]], int]:
        """The contents that records name, with their places, and the number of bad records. Their
        pages are checked when they are read."""
        size, found, num_bad = os.fstat(self._fd).st_size, dict[bytes, tuple[int, int]](), 0
        for record in range(-(-max(0, size - _FIRST) // self._stride)):
            at = _FIRST + record * self._stride
            header = os.pread(self._fd, _RECORD.size, at)
            if not any(header):
                continue  # erased, or a hole
            fields = _read_record_header(header)
            if fields is None or at + _RECORD.size + self.page_bytes > size:
                num_bad += 1
                continue
            key, order, _ = fields
            found[key] = max(found.get(key, (0, 0)), (order, record))
        self._next_order = 1 + max((order for order, _ in found.values()), default=0)
        return [
            (key, record) for key, (_, record) in sorted(found.items(), key=lambda one: one[1])
        ], num_bad

    def _record_header(self, key: bytes, checksum: int) -> bytes:
        fields = b"page", len(key), key, self._next_order, checksum
        self._next_order += 1
        return _RECORD.pack(*fields, _checksum(_RECORD, fields))


def stride(page_bytes: int) -> int:
    return -(-(_RECORD.size + page_bytes) // _ALIGNMENT) * _ALIGNMENT


def records_in(num_bytes: int, page_bytes: int) -> int:
    """The number of records in a file of so many bytes."""
    return max(num_bytes - _FIRST, 0) // stride(page_bytes)


def least_bytes(page_bytes: int) -> int:
    """The size of a file that holds one page."""
    return _FIRST + stride(page_bytes)


def _checksum(form: struct.Struct, fields: tuple[object, ...]) -> int:
    return zlib.crc32(form.pack(*fields, 0))


def _what_is_wrong(header: bytes, digest: bytes, page_bytes: int) -> str:
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        return "not a file of KV pages"
    _, version, *fields, checksum = _HEADER.unpack(header)
    if checksum != _checksum(_HEADER, (_MAGIC, version, *fields)):
        return "its header is corrupt"
    if version != _VERSION:
        return f"it has version {version}, this is {_VERSION}"
    if fields[:2] != [digest, page_bytes]:
        return "it is of another model, or of another dtype or layout"
    return ""


def _read_record_header(header: bytes) -> tuple[bytes, int, int] | None:
    """Key, order, checksum of key and page."""
    if len(header) < _RECORD.size:
        return None
    magic, length, key, order, checksum, own = _RECORD.unpack(header)
    if (
        magic != b"page"
        or not 0 < length <= len(key)
        or own != _checksum(_RECORD, (magic, length, key, order, checksum))
    ):
        return None
    return key[:length], order, checksum


def _open(folder: Path, path: Path, quota: int, digest: bytes, page_bytes: int) -> Opened:
    """Opens a file of pages. An unused one is closed again, and a file without a header is not left
    behind."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | _SAFELY, 0o600)
    try:
        if not _lock(fd):
            raise PageFileError(f"{path} is in use by another engine")
        room = quota - _make_room(folder, path, quota)
        num_records = records_in(room, page_bytes)
        if num_records < 1:
            raise PageFileError(
                f"{folder}: {max(room, 0):,} bytes are left of its quota, too few for a page"
            )
        file = PageFile(fd, page_bytes, num_records)
        try:
            contents, ignored = file.begin(path, digest)
        except BaseException:
            if not os.fstat(fd).st_size:
                path.unlink()
            raise
        return Opened(file, contents, ignored)
    except BaseException:
        os.close(fd)
        raise


def _make_room(folder: Path, own: Path, quota: int) -> int:
    """Bytes that files of other models hold. The oldest that no engine uses go, until they have at
    most half of the quota."""
    kept, idle = 0, list[tuple[float, int, Path]]()
    for path in folder.glob(f"*{SUFFIX}"):
        if path == own:
            continue
        try:
            fd = os.open(path, os.O_RDONLY | _SAFELY)
        except OSError:  # not for us to read, or gone by now
            with contextlib.suppress(OSError):
                kept += path.lstat().st_size
            continue
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                continue
            if _lock(fd):
                idle.append((status.st_mtime, status.st_size, path))
            else:
                kept += max(status.st_size, _most_bytes(os.pread(fd, _HEADER.size, 0)))
        finally:
            os.close(fd)
    total = kept + sum(size for _, size, _ in idle)
    for _, size, path in sorted(idle):
        if total <= quota // 2:
            break
        with contextlib.suppress(OSError):  # what may not be removed stays
            path.unlink()
            total -= size
    return total


def _most_bytes(header: bytes) -> int:
    """To which a file in use may grow; 0: its header is not written, or is none."""
    if len(header) < _HEADER.size:
        return 0
    magic, version, digest, page_bytes, num_records, checksum = _HEADER.unpack(header)
    if magic != _MAGIC or checksum != _checksum(
        _HEADER, (magic, version, digest, page_bytes, num_records)
    ):
        return 0
    return int(_FIRST + num_records * stride(page_bytes))


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """While a file is opened; two engines that start together do not both take what is left of the
    quota."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | _SAFELY, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
