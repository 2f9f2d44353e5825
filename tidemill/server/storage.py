"""What outlives the server: uploaded files, batches and the answers to their lines, in one folder.

Files are files, named by ids that we make; everything else is in SQLite, where a write is on the disk before it is answered for,
and a half-written one is undone when the database is opened again. All of it is done by one thread, so one thing after another.
The folder is made when it is first needed, and belongs to one server at a time.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tidemill.errors import InvalidRequest, TidemillError
from tidemill.server.call import new_id

T = TypeVar("T")
OVER = ("failed", "completed", "expired", "cancelled")  # what may become of a batch
_BLOCK = 4096  # a file takes at least this much of the quota
_NUM_BATCHES_KEPT = 10_000  # that are over
_TABLES = """
CREATE TABLE IF NOT EXISTS files (n INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT, purpose TEXT,
    expires_at INTEGER, bytes INTEGER, told BLOB);
CREATE TABLE IF NOT EXISTS batches (n INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT, model TEXT, status TEXT,
    file_id TEXT, told BLOB);
CREATE TABLE IF NOT EXISTS answers (batch TEXT, line INTEGER, failed INTEGER, text BLOB, PRIMARY KEY (batch, line));
"""
_log = logging.getLogger("tidemill.server")
_json = msgspec.json.encode
_told = msgspec.json.decode


class StorageUnavailable(TidemillError):
    """The folder cannot be used."""

    kind = "storage_unavailable"
    status = 503


class StorageFull(TidemillError):
    """The disk is full."""

    kind = "storage_full"
    status = 507


class QuotaExceeded(InvalidRequest):
    """More bytes than all files together may have."""

    status = 413
    code = "storage_quota_exceeded"


class FileUnknown(InvalidRequest):
    status = 404


class BatchUnknown(InvalidRequest):
    status = 404


class Storage:
    def __init__(self, folder: Path, quota_bytes: int) -> None:
        self._folder, self._quota_bytes = folder, quota_bytes
        self._thread = ThreadPoolExecutor(1, "storage")
        self._opened: sqlite3.Connection | None = None
        self._lock = -1
        self._used_bytes = 0  # by files and answers
        self._coming_bytes = 0  # of uploads under way

    async def do(self, what: Callable[..., T], *arguments: Any) -> T:
        """Any of the methods below, in the thread. What the disk refuses is told without its paths."""

        def doing() -> T:
            try:
                if self._opened is None:
                    self._open()
                return what(*arguments)
            except (OSError, sqlite3.Error) as error:
                _log.error("the data folder %s: %s", self._folder, error)
                full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
                if full or getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
                    raise StorageFull("The disk is full.", fix="Make room, then try again.") from None
                raise StorageUnavailable(
                    "The server's data folder cannot be used.", fix="Its log says why; another can be given with --data-dir."
                ) from None

        return await asyncio.get_running_loop().run_in_executor(self._thread, doing)

    @property
    def exists(self) -> bool:
        """Has there ever been anything to keep?"""
        return (self._folder / "state.sqlite3").is_file()

    def close(self) -> None:
        self._thread.submit(self._close)
        self._thread.shutdown()

    def _close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            os.close(self._lock)
            self._opened = None

    def _open(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self._folder / "files").mkdir(mode=0o700, exist_ok=True)
        lock = os.open(self._folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(os.open(self._folder / "state.sqlite3", os.O_CREAT | os.O_RDWR, 0o600))
            database = sqlite3.connect(self._folder / "state.sqlite3", isolation_level=None, check_same_thread=False)
            database.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;" + _TABLES)
        except BlockingIOError:
            os.close(lock)
            raise StorageUnavailable(
                "Another server uses the same data folder.", fix="Give this one its own with --data-dir."
            ) from None
        except BaseException:
            os.close(lock)
            raise
        self._opened, self._lock = database, lock
        known = {row[0] for row in self._rows("SELECT id FROM files")}
        for path in (self._folder / "files").iterdir():
            if path.name not in known:  # cut off on its way in
                path.unlink()
        self._count_bytes()

    def _rows(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        assert self._opened is not None
        return self._opened.execute(sql, values).fetchall()

    def _count_bytes(self) -> None:
        ((files,),) = self._rows("SELECT TOTAL(MAX(bytes, ?)) FROM files", _BLOCK)
        ((answers,),) = self._rows("SELECT TOTAL(LENGTH(text)) FROM answers")
        self._used_bytes = int(files + answers)

    def check_room(self, num_bytes: int) -> None:
        if self._used_bytes + self._coming_bytes + num_bytes > self._quota_bytes:
            raise QuotaExceeded(
                f"All files together may have {self._quota_bytes} bytes; {self._used_bytes} are taken.", fix="Delete some."
            )

    # ---- files

    def path(self, file_id: str) -> Path:
        """`file_id`: one that we made."""
        return self._folder / "files" / file_id

    def begin_file(self) -> Upload:
        return Upload(self, new_id("file"))

    def add_file(self, owner: str, told: dict[str, Any]) -> None:
        """Of a file that is on the disk."""
        sql = "INSERT INTO files (id, owner, purpose, expires_at, bytes, told) VALUES (?, ?, ?, ?, ?, ?)"
        self._rows(sql, told["id"], owner, told["purpose"], told["expires_at"], told["bytes"], _json(told))
        self._used_bytes += max(told["bytes"], _BLOCK)

    def file(self, owner: str, file_id: str) -> dict[str, Any]:
        sql = "SELECT told FROM files WHERE id = ? AND owner = ? AND (expires_at IS NULL OR expires_at > ?)"
        for (told,) in self._rows(sql, file_id, owner, int(time.time())):
            return dict(_told(told))
        raise FileUnknown(f"There is no file {file_id[:100]!r}.", param="file_id")

    def files(
        self, owner: str, purpose: str | None, after: str | None, limit: int, order: str
    ) -> tuple[list[dict[str, Any]], bool]:
        self._sweep()
        start = self._number("files", owner, after)
        sql = f"SELECT told FROM files WHERE owner = ? AND (? IS NULL OR purpose = ?) {_page(start, order)}"
        return _first(self._rows(sql, owner, purpose, purpose, limit + 1), limit)

    def delete_file(self, owner: str, file_id: str) -> None:
        self.file(owner, file_id)
        if self._rows(f"SELECT 1 FROM batches WHERE file_id = ? AND status NOT IN {OVER}", file_id):
            raise InvalidRequest("A batch still reads this file.", fix="Cancel the batch first.", param="file_id")
        self._drop_file(file_id)

    def _drop_file(self, file_id: str) -> None:
        self._rows("DELETE FROM files WHERE id = ?", file_id)
        self.path(file_id).unlink(missing_ok=True)
        self._count_bytes()

    def _sweep(self) -> None:
        """Files whose time is over, but not those that a batch reads."""
        used = f"SELECT file_id FROM batches WHERE status NOT IN {OVER}"
        for (file_id,) in self._rows(f"SELECT id FROM files WHERE expires_at <= ? AND id NOT IN ({used})", int(time.time())):
            self._drop_file(file_id)

    # ---- batches

    def add_batch(self, owner: str, model: str, told: dict[str, Any]) -> None:
        sql = "INSERT INTO batches (id, owner, model, status, file_id, told) VALUES (?, ?, ?, ?, ?, ?)"
        self._rows(sql, told["id"], owner, model, told["status"], told["input_file_id"], _json(told))
        old = f"SELECT n FROM batches WHERE status IN {OVER} ORDER BY n DESC LIMIT -1 OFFSET {_NUM_BATCHES_KEPT}"
        self._rows(f"DELETE FROM batches WHERE n IN ({old})")

    def batch(self, owner: str, batch_id: str) -> dict[str, Any]:
        for (told,) in self._rows("SELECT told FROM batches WHERE id = ? AND owner = ?", batch_id, owner):
            return self._with_counts(_told(told))
        raise BatchUnknown(f"There is no batch {batch_id[:100]!r}.", param="batch_id")

    def batches(self, owner: str, after: str | None, limit: int) -> tuple[list[dict[str, Any]], bool]:
        start = self._number("batches", owner, after)
        sql = f"SELECT told FROM batches WHERE owner = ? {_page(start, 'desc')}"
        found, more = _first(self._rows(sql, owner, limit + 1), limit)
        return [self._with_counts(told) for told in found], more

    def unfinished(self) -> list[tuple[str, str, str]]:
        """Batches that are not over: id, owner and model."""
        return [
            (one, owner, model)
            for one, owner, model in self._rows(f"SELECT id, owner, model FROM batches WHERE status NOT IN {OVER}")
        ]

    def move(self, owner: str, batch_id: str, since: Iterable[str], status: str, **changes: Any) -> bool:
        """To another status, if it has one of these."""
        told = self.batch(owner, batch_id)
        if told["status"] not in since:
            return False
        changes[f"{status}_at"] = int(time.time())
        told |= {"status": status} | changes
        self._rows("UPDATE batches SET status = ?, told = ? WHERE id = ?", status, _json(told), batch_id)
        return True

    def _with_counts(self, told: dict[str, Any]) -> dict[str, Any]:
        if told["status"] not in OVER:
            counts = dict(self._rows("SELECT failed, COUNT(*) FROM answers WHERE batch = ? GROUP BY failed", told["id"]))
            told["request_counts"] |= {"completed": counts.get(0, 0), "failed": counts.get(1, 0)}
        return told

    def add_answer(self, batch_id: str, line: int, failed: bool, text: bytes) -> None:
        """On the disk when this returns; once, however often it is told."""
        self.check_room(len(text))
        self._rows("INSERT OR IGNORE INTO answers VALUES (?, ?, ?, ?)", batch_id, line, failed, text)
        self._used_bytes += len(text)

    def add_unanswered(self, batch_id: str, texts: Iterable[tuple[int, bytes]]) -> None:
        """Of lines that nobody will answer any more. They are short; the quota does not keep a batch from its end."""
        self._rows("BEGIN")
        try:
            for line, text in texts:
                self._rows("INSERT OR IGNORE INTO answers VALUES (?, ?, 1, ?)", batch_id, line, text)
            self._rows("COMMIT")
        except BaseException:
            assert self._opened is not None
            self._opened.rollback()
            raise

    def answered(self, batch_id: str) -> set[int]:
        return {line for (line,) in self._rows("SELECT line FROM answers WHERE batch = ?", batch_id)}

    def finish(self, owner: str, batch_id: str, since: str, status: str, expire_s: int | None) -> None:
        """Answers become files, and the batch is over: all of it or nothing, however it is interrupted."""
        assert self._opened is not None
        told = self.batch(owner, batch_id)
        files: dict[str, dict[str, Any]] = {}
        is_kept = False
        try:
            for failed, name in enumerate(("output", "error")):
                sql = "SELECT text FROM answers WHERE batch = ? AND failed = ? ORDER BY line"
                lines = self._opened.execute(sql, (batch_id, failed))
                if (made := self._write(lines, f"{batch_id}_{name}.jsonl", expire_s)) is not None:
                    files[f"{name}_file_id"] = made
            self._rows("BEGIN")
            for made in files.values():
                self.add_file(owner, made)
            ids = {name: made["id"] for name, made in files.items()}
            if self.move(owner, batch_id, [since], status, request_counts=told["request_counts"], **ids):
                self._rows("DELETE FROM answers WHERE batch = ?", batch_id)
                self._rows("COMMIT")
                is_kept = True
        finally:
            if not is_kept:  # it was cancelled meanwhile, or there is no room
                if self._opened.in_transaction:
                    self._opened.rollback()
                for made in files.values():
                    self.path(made["id"]).unlink(missing_ok=True)
            self._count_bytes()

    def _write(self, lines: Iterable[tuple[bytes]], filename: str, expire_s: int | None) -> dict[str, Any] | None:
        file_id = new_id("file")
        try:
            with open(self.path(file_id), "xb", opener=_private) as file:
                for (line,) in lines:
                    file.write(line + b"\n")
                num_bytes = file.tell()
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            self.path(file_id).unlink(missing_ok=True)  # a full disk should not be fuller for it
            raise
        if num_bytes == 0:
            self.path(file_id).unlink()
            return None
        _sync_folder(self.path(file_id).parent)
        return file_object(file_id, num_bytes, filename, "batch_output", expire_s)

    def _number(self, table: str, owner: str, after: str | None) -> int | None:
        if after is None:
            return None
        for (number,) in self._rows(f"SELECT n FROM {table} WHERE id = ? AND owner = ?", after, owner):
            return int(number)
        raise InvalidRequest(f"There is nothing called {after[:100]!r} to go on after.", param="after")


class Upload:
    """A file on its way in. Left without `keep`, nothing of it remains."""

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

    async def keep(self, owner: str, told: dict[str, Any]) -> None:
        await self._storage.do(self._keep, owner, told)

    def _keep(self, owner: str, told: dict[str, Any]) -> None:
        with open(self._path, "rb") as file:
            os.fsync(file.fileno())
        _sync_folder(self._path.parent)
        self._storage._sweep()
        self._storage.add_file(owner, told)
        self._is_kept = True

    async def end(self) -> None:
        self._storage._coming_bytes -= self.num_bytes
        if self.num_bytes and not self._is_kept:
            await self._storage.do(self._path.unlink, True)


def file_object(file_id: str, num_bytes: int, filename: str, purpose: str, expire_s: int | None) -> dict[str, Any]:
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


def _page(start: int | None, order: str) -> str:
    """`start` and `order` are ours: no text of a request gets into SQL."""
    beyond = "" if start is None else f"AND n {'>' if order == 'asc' else '<'} {start}"
    return f"{beyond} ORDER BY n {'ASC' if order == 'asc' else 'DESC'} LIMIT ?"


def _first(rows: list[tuple[Any, ...]], limit: int) -> tuple[list[dict[str, Any]], bool]:
    return [_told(told) for (told,) in rows[:limit]], len(rows) > limit


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _sync_folder(folder: Path) -> None:
    """A new name is on the disk only when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
