"""Persistent state of the server: uploaded files, batches and the results of their lines, in one
folder.

The content of a file is a file, named by an id that the server made. Everything else is in SQLite:
a write is on the disk before it is acknowledged, and an interrupted one is rolled back when the
database is opened again. One thread does all of it, one operation after another. The folder is
created when it is first needed, and belongs to one server at a time.

A database that is damaged, emptied or deleted is renamed to `*.damaged-<time>`, together with the
contents that it described, and a new one is begun. The operation that found the damage fails with
`StorageDamaged`; the next one works on the new database.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tidemill.errors import InvalidRequest, TidemillError
from tidemill.server.http.context import new_id

T = TypeVar("T")
OVER = ("failed", "completed", "expired", "cancelled")  # final statuses of a batch
_BLOCK = 4096  # a file takes at least this much of the quota
_NUM_BATCHES_KEPT = 10_000  # that are over
_DATABASE = "state.sqlite3"
# The columns keep their first names, so that existing data stays readable: `owner` is the tenant,
# `told` the record as the API
# shows it, `answers` the results of a batch's lines.
_TABLES = """
CREATE TABLE IF NOT EXISTS files (n INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT,
    purpose TEXT, expires_at INTEGER, bytes INTEGER, told BLOB);
CREATE TABLE IF NOT EXISTS batches (n INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT,
    model TEXT, status TEXT, file_id TEXT, told BLOB);
CREATE TABLE IF NOT EXISTS answers (batch TEXT, line INTEGER, failed INTEGER, text BLOB,
    PRIMARY KEY (batch, line));
"""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_UNCLEAR = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)  # may mean a full disk
_log = logging.getLogger("tidemill.server")
_json = msgspec.json.encode


class StorageUnavailable(TidemillError):
    """The folder cannot be used."""

    kind = "storage_unavailable"
    status = 503


class StorageDamaged(StorageUnavailable):
    """Stored state cannot be read. It has been set aside, and a new one was begun."""

    kind = "storage_damaged"


class StorageFull(TidemillError):
    """The disk is full."""

    kind = "storage_full"
    status = 507


class ContentLost(TidemillError):
    """A file is recorded, but its content is not on the disk as it was stored."""

    kind = "file_content_lost"
    status = 410


class QuotaExceeded(InvalidRequest):
    """More bytes than all files together may have."""

    status = 413
    code = "storage_quota_exceeded"


class FileUnknown(InvalidRequest):
    status = 404


class BatchUnknown(InvalidRequest):
    status = 404


class _Damage(Exception):
    """Damage that was found in the database."""


class Storage:
    def __init__(self, folder: Path, quota_bytes: int) -> None:
        self._folder, self._quota_bytes = folder, quota_bytes
        self._contents = folder / "files"
        self._thread = ThreadPoolExecutor(1, "storage")
        self._opened: sqlite3.Connection | None = None
        self._lock = -1
        self._inode, self._size = (0, 0), 0  # of the database file
        self._used_bytes = 0  # by files and results
        self._coming_bytes = 0  # of uploads under way

    async def do(self, what: Callable[..., T], *arguments: Any) -> T:
        """Any of the methods below, in the thread. Errors of the disk become typed ones, without
        paths."""

        def doing() -> T:
            try:
                self._ensure_open()
                result = what(*arguments)
                self._size = (self._folder / _DATABASE).stat().st_size
                return result
            except (OSError, sqlite3.Error, _Damage) as error:
                raise self._typed(error) from None

        return await asyncio.get_running_loop().run_in_executor(self._thread, doing)

    @property
    def exists(self) -> bool:
        """Has anything ever been stored?"""
        return (self._folder / _DATABASE).is_file() or self._contents.is_dir()

    def close(self) -> None:
        self._thread.submit(self._close)
        self._thread.shutdown()

    # ---- opening, and what can be wrong with the folder

    def _ensure_open(self) -> None:
        """The database may be deleted, replaced or cut off while it is open; SQLite would go on
        with the file that is gone."""
        if self._opened is None:
            self._open()
            return
        try:
            found = (self._folder / _DATABASE).stat()
        except FileNotFoundError:
            raise _Damage("the database was deleted while in use") from None
        if (found.st_dev, found.st_ino) != self._inode:
            _log.error(
                "the data folder %s: the database was replaced while in use; it is opened again",
                self._folder,
            )
            self._close()
            self._open()
        elif found.st_size < self._size:
            raise _Damage(
                f"the database was cut from {self._size} to {found.st_size} bytes while in use"
            )
        if not self._contents.is_dir():
            _log.error("the data folder %s: the folder of file contents is gone", self._folder)
            self._contents.mkdir(mode=0o700)

    def _open(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._contents.mkdir(mode=0o700, exist_ok=True)
        self._lock = os.open(self._folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        path = self._folder / _DATABASE
        is_new = not path.exists()
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._check_not_emptied(path)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            self._opened = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._opened.executescript(
                "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;" + _TABLES
            )
            known = {row[0] for row in self._rows("SELECT id FROM files")}
            self._count_bytes()
            found = path.stat()
            self._inode, self._size = (found.st_dev, found.st_ino), found.st_size
        except BlockingIOError:
            self._close()
            raise StorageUnavailable(
                "Another server uses the same data folder.",
                fix="Give this one its own with --data-dir.",
            ) from None
        except BaseException:
            self._close()
            # A disk that is full from the start leaves an empty file, which would look like an
            # emptied one.
            if is_new:
                for name in ("", "-wal", "-shm"):
                    path.with_name(f"{_DATABASE}{name}").unlink(missing_ok=True)
            raise
        for content in self._contents.iterdir():
            if content.name not in known:  # an interrupted upload
                content.unlink()

    def _check_not_emptied(self, path: Path) -> None:
        """A new folder has neither a database nor contents."""
        if path.exists():
            if path.stat().st_size == 0:
                raise _Damage("the database is empty")
        elif any(self._contents.iterdir()) or path.with_name(f"{_DATABASE}-wal").exists():
            raise _Damage("the database is missing, but there is data that it described")

    def _close(self) -> None:
        if self._opened is not None:
            with contextlib.suppress(sqlite3.Error):  # of a damaged one
                self._opened.close()
            self._opened = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _typed(self, error: Exception) -> TidemillError:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        lost = str(error).startswith(
            "no such table"
        )  # of a database that was overwritten while in use
        if (
            isinstance(error, _Damage)
            or code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
            or lost
        ):
            try:
                return self._set_aside(str(error))
            except OSError as failed:
                error = failed
        _log.error("the data folder %s: %s", self._folder, error)
        is_full = code == sqlite3.SQLITE_FULL or getattr(error, "errno", None) in _NO_ROOM
        if is_full or (code in _UNCLEAR and self._has_no_room()):
            return StorageFull(
                "The disk of the server's data folder is full.",
                fix="Free some space, then try again.",
            )
        return StorageUnavailable(
            "The server's data folder cannot be used.",
            fix="See the server's log; another can be given with --data-dir.",
        )

    def _set_aside(self, reason: str) -> StorageDamaged:
        """The database with its log, under names by which SQLite can still open them, and the
        contents that it described."""
        self._close()
        suffix = f".damaged-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}"
        for name in ("", "-wal", "-shm"):
            if (path := self._folder / f"{_DATABASE}{name}").exists():
                path.rename(self._folder / f"{_DATABASE}{suffix}{name}")
        if self._contents.is_dir() and any(self._contents.iterdir()):
            self._contents.rename(f"{self._contents}{suffix}")
        _log.error(
            "the data folder %s: %s; set aside as *%s, a new database is begun",
            self._folder,
            reason,
            suffix,
        )
        return StorageDamaged(
            f"The server's stored state was damaged ({reason}). It was set aside: files and "
            "batches from before are gone.",
            fix="Upload them again.",
        )

    def _has_no_room(self) -> bool:
        """SQLite reports some failed writes without the cause. A write of our own has it."""
        path = self._folder / "probe"
        try:
            with open(path, "wb", opener=_private) as file:
                file.write(bytes(2**16))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            return error.errno in _NO_ROOM
        finally:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        return False

    def _lost_before(self) -> str:
        """A hint in messages about unknown ids: when state was last set aside."""
        times = sorted(
            path.name.partition(".damaged-")[2]
            for path in self._folder.glob(f"{_DATABASE}.damaged-*Z")
        )
        return (
            f"Files and batches from before {times[-1]} were set aside: the database was damaged."
            if times
            else ""
        )

    def _rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        assert self._opened is not None
        return self._opened.execute(sql, values).fetchall()

    def _count_bytes(self) -> None:
        ((files,),) = self._rows("SELECT TOTAL(MAX(bytes, ?)) FROM files", _BLOCK)
        ((results,),) = self._rows("SELECT TOTAL(LENGTH(text)) FROM answers")
        self._used_bytes = int(files + results)

    def check_room(self, num_bytes: int) -> None:
        if self._used_bytes + self._coming_bytes + num_bytes > self._quota_bytes:
            raise QuotaExceeded(
                f"All files together may have {self._quota_bytes} bytes; {self._used_bytes} "
                "are taken.",
                fix="Delete some.",
            )

    # ---- files

    def path(self, file_id: str) -> Path:
        """`file_id`: one that the server made."""
        return self._contents / file_id

    def content_path(self, file_id: str) -> Path:
        """The path of a file's content, if it is there as it was stored."""
        path = self.path(file_id)
        sizes = [
            num_bytes
            for (num_bytes,) in self._rows("SELECT bytes FROM files WHERE id = ?", file_id)
        ]
        found = path.stat().st_size if path.is_file() else None
        if sizes != [found]:
            what = (
                "missing"
                if found is None
                else f"{found} bytes instead of {sizes[0]}"
                if sizes
                else "not recorded"
            )
            _log.error("the data folder %s: the content of %s is %s", self._folder, file_id, what)
            raise ContentLost(
                f"The content of file {file_id!r} is {what} on the server's disk.",
                fix="Upload it again.",
                param="file_id",
            )
        return path

    def begin_file(self) -> Upload:
        return Upload(self, new_id("file"))

    def add_file(self, tenant: str, record: dict[str, Any]) -> None:
        """Adds the record of a file whose content is on the disk."""
        sql = (
            "INSERT INTO files (id, owner, purpose, expires_at, bytes, told) VALUES (?, ?, "
            "?, ?, ?, ?)"
        )
        self._rows(
            sql,
            record["id"],
            tenant,
            record["purpose"],
            record["expires_at"],
            record["bytes"],
            _json(record),
        )
        self._used_bytes += max(record["bytes"], _BLOCK)

    def file(self, tenant: str, file_id: str) -> dict[str, Any]:
        sql = (
            "SELECT told FROM files WHERE id = ? AND owner = ? AND (expires_at IS NULL OR "
            "expires_at > ?)"
        )
        for (record,) in self._rows(sql, file_id, tenant, int(time.time())):
            return _record(record)
        raise FileUnknown(
            f"There is no file {file_id[:100]!r}.", fix=self._lost_before(), param="file_id"
        )

    def file_with_path(self, tenant: str, file_id: str) -> tuple[dict[str, Any], Path]:
        return self.file(tenant, file_id), self.content_path(file_id)

    def files(
        self, tenant: str, purpose: str | None, after: str | None, limit: int, order: str
    ) -> tuple[list[dict[str, Any]], bool]:
        self._sweep()
        start = self._number("files", tenant, after)
        sql = (
            "SELECT told FROM files WHERE owner = ? AND (? IS NULL OR purpose = ?) "
            f"{_page(start, order)}"
        )
        return _first(self._rows(sql, tenant, purpose, purpose, limit + 1), limit)

    def delete_file(self, tenant: str, file_id: str) -> None:
        self.file(tenant, file_id)
        if self._is_read(file_id):
            raise InvalidRequest(
                "A batch still reads this file.", fix="Cancel the batch first.", param="file_id"
            )
        self._drop_file(file_id)

    def _is_read(self, file_id: str) -> bool:
        """A batch that is not over has it as its input."""
        return bool(
            self._rows(f"SELECT 1 FROM batches WHERE file_id = ? AND status NOT IN {OVER}", file_id)
        )

    def _drop_file(self, file_id: str) -> None:
        """The content first: on a full disk, that makes the room which the database needs."""
        self.path(file_id).unlink(missing_ok=True)
        self._rows("DELETE FROM files WHERE id = ?", file_id)
        self._count_bytes()

    def _sweep(self) -> None:
        """Delete expired files, but not those that a batch reads."""
        used = f"SELECT file_id FROM batches WHERE status NOT IN {OVER}"
        for (file_id,) in self._rows(
            f"SELECT id FROM files WHERE expires_at <= ? AND id NOT IN ({used})", int(time.time())
        ):
            self._drop_file(file_id)

    # ---- batches

    def add_batch(self, tenant: str, model: str, record: dict[str, Any]) -> None:
        sql = (
            "INSERT INTO batches (id, owner, model, status, file_id, told) VALUES (?, ?, "
            "?, ?, ?, ?)"
        )
        self._rows(
            sql,
            record["id"],
            tenant,
            model,
            record["status"],
            record["input_file_id"],
            _json(record),
        )
        old = (
            f"SELECT n FROM batches WHERE status IN {OVER} ORDER BY n DESC LIMIT -1 OFFSET "
            f"{_NUM_BATCHES_KEPT}"
        )
        self._rows(f"DELETE FROM batches WHERE n IN ({old})")

    def batch(self, tenant: str, batch_id: str) -> dict[str, Any]:
        for (record,) in self._rows(
            "SELECT told FROM batches WHERE id = ? AND owner = ?", batch_id, tenant
        ):
            return self._with_counts(_record(record))
        raise BatchUnknown(
            f"There is no batch {batch_id[:100]!r}.", fix=self._lost_before(), param="batch_id"
        )

    def batches(
        self, tenant: str, after: str | None, limit: int, endpoint: str | None = None
    ) -> tuple[list[dict[str, Any]], bool]:
        """The latest first. `endpoint`: only those for it."""
        start = self._number("batches", tenant, after)
        of_one = "(? IS NULL OR json_extract(CAST(told AS TEXT), '$.endpoint') = ?)"
        sql = f"SELECT told FROM batches WHERE owner = ? AND {of_one} {_page(start, 'desc')}"
        found, more = _first(self._rows(sql, tenant, endpoint, endpoint, limit + 1), limit)
        return [self._with_counts(record) for record in found], more

    def delete_batch(self, tenant: str, batch_id: str) -> None:
        """Deletes a batch with its files, but for an input that another batch reads. One that is
        not over is not deleted."""
        record = self.batch(tenant, batch_id)
        if record["status"] not in OVER:
            raise InvalidRequest(
                "The batch has not ended.", fix="Cancel it first.", param="batch_id"
            )
        self._rows("DELETE FROM batches WHERE id = ?", batch_id)
        for name in ("input_file_id", "output_file_id", "error_file_id"):
            if record[name] is not None and not self._is_read(record[name]):
                self._drop_file(record[name])

    def unfinished(self) -> list[tuple[str, str, str]]:
        """Batches that are not over: id, tenant and model."""
        return [
            (batch_id, tenant, model)
            for batch_id, tenant, model in self._rows(
                f"SELECT id, owner, model FROM batches WHERE status NOT IN {OVER}"
            )
        ]

    def move(
        self, tenant: str, batch_id: str, since: Iterable[str], status: str, **changes: Any
    ) -> bool:
        """To another status, if it has one of these."""
        record = self.batch(tenant, batch_id)
        if record["status"] not in since:
            return False
        changes[f"{status}_at"] = int(time.time())
        record |= {"status": status} | changes
        self._rows(
            "UPDATE batches SET status = ?, told = ? WHERE id = ?", status, _json(record), batch_id
        )
        return True

    def _with_counts(self, record: dict[str, Any]) -> dict[str, Any]:
        if record["status"] not in OVER:
            counts = dict(
                self._rows(
                    "SELECT failed, COUNT(*) FROM answers WHERE batch = ? GROUP BY failed",
                    record["id"],
                )
            )
            record["request_counts"] |= {"completed": counts.get(0, 0), "failed": counts.get(1, 0)}
        return record

    def add_result(self, batch_id: str, line: int, failed: bool, text: bytes) -> None:
        """On the disk when this returns; once per line, however often it is called."""
        self.check_room(len(text))
        self._rows(
            "INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)", batch_id, line, failed, text
        )
        self._used_bytes += len(text)

    def add_skipped(self, batch_id: str, texts: Iterable[tuple[int, bytes]]) -> None:
        """Adds the results of lines that will not be executed. They are short; the quota does not
        keep a batch from its end."""
        self._rows("BEGIN")
        try:
            for line, text in texts:
                self._rows(
                    "INSERT OR IGNORE INTO answers VALUES (?, ?, 1, ?)", batch_id, line, text
                )
            self._rows("COMMIT")
        except BaseException:
            assert self._opened is not None
            self._opened.rollback()
            raise

    def lines_done(self, batch_id: str) -> set[int]:
        return {
            line for (line,) in self._rows("SELECT line FROM answers WHERE batch = ?", batch_id)
        }

    def finish(
        self,
        tenant: str,
        batch_id: str,
        since: str,
        status: str,
        expire_s: int | None,
        **changes: Any,
    ) -> None:
        """Results become files, and the batch is over: all of it or nothing, however it is
        interrupted."""
        assert self._opened is not None
        record = self.batch(tenant, batch_id)
        files: dict[str, dict[str, Any]] = {}
        is_kept = False
        try:
            for failed, name in enumerate(("output", "error")):
                sql = "SELECT text FROM answers WHERE batch = ? AND failed = ? ORDER BY line"
                lines = self._opened.execute(sql, (batch_id, failed))
                if (
                    written := self._write(lines, f"{batch_id}_{name}.jsonl", expire_s)
                ) is not None:
                    files[f"{name}_file_id"] = written
            self._rows("BEGIN")
            for written in files.values():
                self.add_file(tenant, written)
            changes |= {name: record["id"] for name, record in files.items()}
            if self.move(
                tenant,
                batch_id,
                [since],
                status,
                request_counts=record["request_counts"],
                **changes,
            ):
                self._rows("DELETE FROM answers WHERE batch = ?", batch_id)
                self._rows("COMMIT")
                is_kept = True
        finally:
            if not is_kept:  # it was cancelled meanwhile, or there is no room
                if self._opened.in_transaction:
                    self._opened.rollback()
                for written in files.values():
                    self.path(written["id"]).unlink(missing_ok=True)
            self._count_bytes()

    def _write(
        self, lines: Iterable[tuple[bytes]], filename: str, expire_s: int | None
    ) -> dict[str, Any] | None:
        file_id = new_id("file")
        try:
            with open(self.path(file_id), "xb", opener=_private) as file:
                for (line,) in lines:
                    file.write(line + b"\n")
                num_bytes = file.tell()
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            self.path(file_id).unlink(missing_ok=True)  # give back what it took of a full disk
            raise
        if num_bytes == 0:
            self.path(file_id).unlink()
            return None
        _sync_folder(self._contents)
        return file_object(file_id, num_bytes, filename, "batch_output", expire_s)

    def _number(self, table: str, tenant: str, after: str | None) -> int | None:
        if after is None:
            return None
        for (number,) in self._rows(
            f"SELECT n FROM {table} WHERE id = ? AND owner = ?", after, tenant
        ):
            return int(number)
        raise InvalidRequest(
            f"There is nothing with the id {after[:100]!r} to continue after.", param="after"
        )


class Upload:
    """A file that is being received. Without `keep`, nothing of it remains."""

    def __init__(self, storage: Storage, file_id: str) -> None:
        self._storage, self.file_id = storage, file_id
        self._path = storage.path(file_id)
        self._is_kept = False
        self.num_bytes = 0

    async def write(self, data: bytes) -> None:
        self._storage.check_room(len(data))
        self._storage._coming_bytes += len(data)
        self.num_bytes += len(data)
        await self._storage.do(self._write, data)

    def _write(self, data: bytes) -> None:
        with open(self._path, "ab", opener=_private) as file:
            file.write(data)

    async def keep(self, tenant: str, record: dict[str, Any]) -> None:
        await self._storage.do(self._keep, tenant, record)

    def _keep(self, tenant: str, record: dict[str, Any]) -> None:
        with open(self._path, "rb") as file:
            os.fsync(file.fileno())
            if (size := os.fstat(file.fileno()).st_size) != self.num_bytes:
                raise OSError(
                    errno.EIO, f"an upload of {self.num_bytes} bytes has {size} on the disk"
                )
        _sync_folder(self._path.parent)
        self._storage._sweep()
        self._storage.add_file(tenant, record)
        self._is_kept = True

    async def end(self) -> None:
        self._storage._coming_bytes -= self.num_bytes
        if self.num_bytes and not self._is_kept:
            await self._storage.do(self._path.unlink, True)


def file_object(
    file_id: str, num_bytes: int, filename: str, purpose: str, expire_s: int | None
) -> dict[str, Any]:
    now = int(time.time())
    return {
        "id": file_id,
        "object": "file",
        "bytes": num_bytes,
        "created_at": now,
        "expires_at": None if expire_s is None else now + expire_s,
        "filename": filename,
        "purpose": purpose,
        "status": "processed",
        "status_details": None,
    }


def _record(stored: bytes) -> dict[str, Any]:
    try:
        return dict(msgspec.json.decode(stored))
    except (msgspec.DecodeError, TypeError, ValueError) as error:
        raise _Damage(f"a record is unreadable: {error}") from None


def _page(start: int | None, order: str) -> str:
    """`start` and `order` are ours: no text of a request gets into SQL."""
    beyond = "" if start is None else f"AND n {'>' if order == 'asc' else '<'} {start}"
    return f"{beyond} ORDER BY n {'ASC' if order == 'asc' else 'DESC'} LIMIT ?"


def _first(rows: list[tuple[Any, ...]], limit: int) -> tuple[list[dict[str, Any]], bool]:
    return [_record(record) for (record,) in rows[:limit]], len(rows) > limit


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _sync_folder(folder: Path) -> None:
    """A new name is on the disk only when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
