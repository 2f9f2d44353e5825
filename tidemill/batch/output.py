"""Output: results on the disk, each line of the input once, whatever ends the process.

There is no other state than the results. The id of a result names its line and the line's digest,
so the output itself says what is left to do. A process that was killed may leave an incomplete last
line, and after a loss of power the end that was not synced may be anything: the output is read
before it is continued, and cut at the first line that is not a result.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from array import array
from pathlib import Path

import msgspec

from tidemill.batch.lines import Line
from tidemill.errors import ConfigError, TidemillError

_ID = re.compile(r"batch_req_([1-9][0-9]{0,11})_([0-9a-f]{8})")
_MAX_RESULT_BYTES = 2**28
_MAX_CUT_BYTES = 2**26  # a process that is killed leaves far less
_START = b'{"id":"batch_req_'
_AWAY = "Move it away, or choose another output."


class OutputFull(TidemillError):
    """The output cannot be written; what is there can be continued."""


class _Response(msgspec.Struct):
    status_code: int


class _Result(msgspec.Struct):
    id: str
    response: _Response | None = None


_decode = msgspec.json.Decoder(_Result).decode


class Done:
    """The set of the input's lines that have a result: four bytes a line."""

    def __init__(self, num_lines: int) -> None:
        self._digests = array("I", bytes(4 * (num_lines + 1)))
        self.num = self.num_failed = 0

    def add(self, number: int, digest: int, failed: bool) -> None:
        self._digests[number] = digest
        self.num += 1
        self.num_failed += failed

    def has_line(self, number: int) -> bool:
        return number < len(self._digests)

    def digest(self, number: int) -> int:
        """0: it has no result."""
        return self._digests[number]


class _File:
    """One file of results. Locked while it is open."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written: {error.strerror}.", fix="Choose another output."
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise ConfigError(
                f"Another process writes {path}.", fix="Wait for it, or choose another output."
            ) from None
        self._end = 0  # of the last whole result
        self.in_order = True  # as far as it was read

    def recover(self, done: Done) -> None:
        """Read the results that are there, and cut what follows them."""
        size, last = os.fstat(self._fd).st_size, 0
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            while text := file.readline(_MAX_RESULT_BYTES):
                found = _read_result(text)
                if found is None:
                    break
                number, digest, failed = found
                if not done.has_line(number):
                    raise ConfigError(
                        f"{self.path} has a result of line {number}, which the input does not have.",
                        fix=_AWAY,
                    )
                if done.digest(number):
                    raise ConfigError(f"{self.path} has two results of line {number}.", fix=_AWAY)
                done.add(number, digest, failed)
                self.in_order &= number > last
                last = number
                self._end += len(text)
        if size - self._end > _MAX_CUT_BYTES or (not self._end and not self._is_torn(size)):
            where = f"byte {self._end:,} on" if self._end else "the start"
            raise ConfigError(
                f"{self.path} holds something else than results of a batch, from {where}.",
                fix=_AWAY,
            )
        if size > self._end:
            os.ftruncate(self._fd, self._end)
            os.fsync(self._fd)
        os.lseek(self._fd, self._end, os.SEEK_SET)

    def _is_torn(self, size: int) -> bool:
        """Nothing but the beginning of the first result is there, or nothing at all."""
        found = os.pread(self._fd, size, 0)
        return found[: len(_START)] == _START[:size] and b"\n" not in found

    def write(self, texts: list[bytes]) -> None:
        """On the disk when it returns. If it raises, nothing of them is there."""
        data = memoryview(b"\n".join([*texts, b""]))
        end = self._end
        try:
            while data:
                written = os.write(self._fd, data)
                data, end = data[written:], end + written
            os.fdatasync(self._fd)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end)
                os.lseek(self._fd, self._end, os.SEEK_SET)
            why = (
                "the disk is full"
                if error.errno in (errno.ENOSPC, errno.EDQUOT)
                else error.strerror
            )
            fix = "What is written is kept: run the same command again."
            raise OutputFull(f"{self.path} cannot be written: {why}.", fix=fix) from error
        self._end = end

    def close(self) -> None:
        os.close(self._fd)


def _read_result(text: bytes) -> tuple[int, int, bool] | None:
    """Number and digest of its line, and whether that failed; None: it is not a result, or not all
    of one."""
    if not text.endswith(b"\n"):
        return None
    try:
        result = _decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    found = _ID.fullmatch(result.id)
    if found is None:
        return None
    return (
        int(found[1]),
        int(found[2], 16),
        result.response is None or result.response.status_code >= 400,
    )


class Output:
    """`num_lines`: of the input. `errors`: a file for the lines that failed; None: they are among
    the others."""

    def __init__(self, path: Path, num_lines: int, errors: Path | None = None) -> None:
        self.done = Done(num_lines)
        self._files = [_File(path)]
        try:
            if errors is not None:
                self._files.append(_File(errors))
            for file in self._files:
                file.recover(self.done)
        except BaseException:
            self.close()
            raise
        self._path = path

    def is_done(self, line: Line) -> bool:
        """Raises if it has the result of another line."""
        digest = self.done.digest(line.number)
        if digest and digest != line.digest:
            what = (
                f"Line {line.number} of the input is not the one that {self._path} has a result of."
            )
            raise ConfigError(
                what,
                fix="Give the input that this output was begun with, or choose another output.",
            )
        return bool(digest)

    @property
    def in_order(self) -> bool:
        """The results that were there are in the order of the input."""
        return all(file.in_order for file in self._files)

    def write(self, results: list[tuple[Line, bytes, bool]]) -> None:
        """Lines, their results, and whether they failed."""
        for index, file in enumerate(self._files):
            texts = [
                text for _, text, failed in results if min(failed, len(self._files) - 1) == index
            ]
            if texts:
                file.write(texts)
        for line, _, failed in results:
            self.done.add(line.number, line.digest, failed)

    def close(self) -> None:
        for file in self._files:
            file.close()
