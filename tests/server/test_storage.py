"""The server's storage: what becomes of files and batches when the disk is full, or the state is
damaged."""

import contextlib
import errno
import logging
import os
import sqlite3
import subprocess
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from tidemill.server.http import errors
from tidemill.server.http.access import Access, Guard
from tidemill.server.http.context import RequestMiddleware
from tidemill.server.store import files
from tidemill.server.store.storage import (
    BatchUnknown,
    ContentLost,
    FileUnknown,
    QuotaExceeded,
    Storage,
    StorageDamaged,
    StorageFull,
    StorageUnavailable,
    file_object,
)


@contextlib.asynccontextmanager
async def opened(folder, quota_bytes=10**6):
    storage = Storage(folder, quota_bytes)
    try:
        yield storage
    finally:
        storage.close()


async def keep(storage, content=b"x", tenant="me", expire_s=None):
    upload = storage.begin_file()
    try:
        await upload.write(content)
        record = file_object(upload.file_id, len(content), "f", "batch", expire_s)
        await upload.keep(tenant, record)
    finally:
        await upload.end()
    return record


async def test_a_folder_belongs_to_one_server(tmp_path):
    first, second = Storage(tmp_path, 10**6), Storage(tmp_path, 10**6)
    await keep(first)
    with pytest.raises(StorageUnavailable, match="Another server"):
        await second.do(second.unfinished)
    first.close()
    assert len((await second.do(second.files, "me", None, None, 10, "asc"))[0]) == 1
    second.close()


async def test_a_folder_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    storage = Storage(tmp_path / "file" / "data", 10**6)
    with pytest.raises(StorageUnavailable) as refused:
        await storage.do(storage.unfinished)
    assert str(tmp_path) not in str(refused.value)
    storage.close()


async def test_a_disk_that_is_full_when_a_file_is_synced(tmp_path, monkeypatch):
    storage = Storage(tmp_path, 10**6)
    await keep(storage)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tidemill.server.store.storage.os.fsync", full)
    with pytest.raises(StorageFull):
        await keep(storage)
    monkeypatch.undo()
    assert len(list((tmp_path / "files").iterdir())) == 1  # nothing of it is left
    await keep(storage)
    storage.close()


async def test_a_deleted_batch_leaves_an_input_that_another_reads(tmp_path):
    async with opened(tmp_path) as storage:
        made = (await keep(storage))["id"]
        files = {
            "input_file_id": made,
            "output_file_id": None,
            "error_file_id": None,
            "request_counts": {"total": 1},
        }
        for name, status in (
            ("batch_1", "completed"),
            ("batch_2", "in_progress"),
            ("batch_3", "completed"),
        ):
            await storage.do(storage.add_batch, "me", "m", files | {"id": name, "status": status})
        await storage.do(storage.delete_batch, "me", "batch_1")
        assert storage.path(made).is_file()
        await storage.do(storage.finish, "me", "batch_2", "in_progress", "expired", None)
        await storage.do(storage.delete_batch, "me", "batch_3")
        assert not storage.path(made).exists()


async def test_a_batch_ends_wholly_or_not_at_all(tmp_path, monkeypatch):
    """No room for its files, then cancelled while they were written: its answers are kept, and
    nothing else."""
    storage = Storage(tmp_path, 10**6)
    batch = {
        "id": "batch_1",
        "status": "in_progress",
        "input_file_id": "f",
        "request_counts": {"total": 2},
    }
    await storage.do(storage.add_batch, "me", "m", batch)
    await storage.do(storage.add_result, "batch_1", 1, False, b'{"a": 1}')

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tidemill.server.store.storage.os.fsync", full)
    with pytest.raises(StorageFull):
        await storage.do(storage.finish, "me", "batch_1", "in_progress", "expired", None)
    monkeypatch.undo()
    await storage.do(lambda: storage.move("me", "batch_1", ["in_progress"], "cancelling"))
    await storage.do(storage.finish, "me", "batch_1", "in_progress", "expired", None)
    assert not list((tmp_path / "files").iterdir())
    assert await storage.do(storage.lines_done, "batch_1") == {1}
    assert (await storage.do(storage.batch, "me", "batch_1"))["status"] == "cancelling"
    await storage.do(storage.finish, "me", "batch_1", "cancelling", "cancelled", None)
    record = await storage.do(storage.batch, "me", "batch_1")
    assert (record["status"], record["request_counts"]["completed"]) == ("cancelled", 1)
    assert storage.path(record["output_file_id"]).read_bytes() == b'{"a": 1}\n'
    storage.close()


async def test_uploads_under_way_count(tmp_path):
    storage = Storage(tmp_path, 100_000)
    first, second = storage.begin_file(), storage.begin_file()
    await first.write(b"x" * 60_000)
    with pytest.raises(QuotaExceeded):
        await second.write(b"x" * 60_000)
    await first.end()
    await second.write(b"x" * 60_000)
    await second.end()
    storage.close()


async def test_files_expire_and_leftovers_are_removed(tmp_path):
    storage = Storage(tmp_path, 10**6)
    await keep(storage, expire_s=-1)
    kept = await keep(storage)
    assert [
        one["id"] for one in (await storage.do(storage.files, "me", None, None, 10, "asc"))[0]
    ] == [kept["id"]]
    storage.close()
    Path(tmp_path / "files" / "file-cut-off").write_bytes(b"half")
    again = Storage(tmp_path, 10**6)
    assert (await again.do(again.file, "me", kept["id"])) == kept
    assert [path.name for path in (tmp_path / "files").iterdir()] == [kept["id"]]
    again.close()


# ---- damaged state

DATABASE = "state.sqlite3"
BATCH = {
    "id": "batch_1",
    "status": "in_progress",
    "input_file_id": "f",
    "request_counts": {"total": 2},
}


def overwrite(path):
    path.write_bytes(b"nonsense" * (path.stat().st_size // 8))


def cut(path):
    os.truncate(path, path.stat().st_size // 2 // 4096 * 4096)


def empty(path):
    os.truncate(path, 0)


def spoil_record(path):
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("UPDATE files SET told = x'00ff'")


async def fill(storage, num_files=30):
    """Enough for a database of several pages, all of them in its file rather than in its log."""
    kept = [await keep(storage, b"%d" % i) for i in range(num_files)]
    await storage.do(storage.add_batch, "me", "m", BATCH)
    await storage.do(storage._rows, "PRAGMA wal_checkpoint(TRUNCATE)")
    return kept


def set_aside(folder):
    return sorted(path.name for path in folder.glob("*.damaged-*"))


@pytest.mark.parametrize("is_running", [False, True])
@pytest.mark.parametrize("damage", [overwrite, cut, empty, spoil_record, Path.unlink])
async def test_a_damaged_database_is_reported_and_set_aside(tmp_path, caplog, damage, is_running):
    storage = Storage(tmp_path, 10**6)
    kept = await fill(storage)
    if not is_running:
        storage.close()
        storage = Storage(tmp_path, 10**6)
    damage(tmp_path / DATABASE)
    # SQLite has pages in memory, and reads the file when it needs others
    if is_running and damage is overwrite:
        await storage.do(storage._rows, "PRAGMA shrink_memory")
    with caplog.at_level(logging.ERROR), pytest.raises(StorageDamaged) as refused:
        await storage.do(storage.files, "me", None, None, 100, "asc")
    assert (refused.value.status, refused.value.kind) == (503, "storage_damaged")
    assert str(tmp_path) not in str(refused.value)
    assert "set aside" in caplog.text
    moved = set_aside(tmp_path)
    assert any(name.startswith("files.damaged-") for name in moved)
    assert any(name.startswith(f"{DATABASE}.damaged-") for name in moved) or damage is Path.unlink
    (contents,) = tmp_path.glob("files.damaged-*")
    # nothing is deleted
    assert sorted(path.name for path in contents.iterdir()) == sorted(one["id"] for one in kept)
    again = await keep(storage)  # the server goes on
    assert (await storage.do(storage.file_with_path, "me", again["id"]))[1].read_bytes() == b"x"
    if damage is not Path.unlink:
        with pytest.raises(FileUnknown, match="set aside"):
            await storage.do(storage.file, "me", kept[0]["id"])
        with pytest.raises(BatchUnknown, match="set aside"):
            await storage.do(storage.batch, "me", "batch_1")
    storage.close()
    assert set_aside(tmp_path) == moved
    async with opened(tmp_path) as later:
        assert await later.do(later.file, "me", again["id"]) == again


async def test_a_folder_deleted_while_in_use_is_begun_anew(tmp_path):
    async with opened(tmp_path / "data") as storage:
        await keep(storage)
        subprocess.run(["rm", "-r", tmp_path / "data"], check=True)
        with pytest.raises(StorageDamaged, match="deleted while in use"):
            await keep(storage)
        await keep(storage)


async def test_a_restored_database_is_opened_again(tmp_path):
    async with opened(tmp_path) as storage:
        (first, *_) = await fill(storage, 2)
        backup = (tmp_path / DATABASE).read_bytes()
        (tmp_path / "backup").write_bytes(backup)
        (tmp_path / "backup").rename(tmp_path / DATABASE)
        assert await storage.do(storage.file, "me", first["id"]) == first
    assert not set_aside(tmp_path)


async def test_an_upload_does_not_survive_damage_in_part(tmp_path):
    async with opened(tmp_path) as storage:
        await fill(storage, 2)
        upload = storage.begin_file()
        await upload.write(b"first half")
        empty(tmp_path / DATABASE)
        with pytest.raises(StorageDamaged):
            await storage.do(storage.unfinished)
        await upload.write(b"second half")
        with pytest.raises(StorageUnavailable):
            await upload.keep(
                "me", file_object(upload.file_id, upload.num_bytes, "f", "batch", None)
            )
        await upload.end()
        assert not list((tmp_path / "files").iterdir())


@pytest.mark.parametrize(
    ("lose", "why"),
    [
        (Path.unlink, "missing"),
        (empty, "0 bytes instead of 7"),
        (lambda path: path.write_bytes(b"x" * 9), "9 bytes instead of 7"),
    ],
)
async def test_lost_content_is_reported(tmp_path, caplog, lose, why):
    async with opened(tmp_path) as storage:
        kept, other = await keep(storage, b"content"), await keep(storage)
        lose(tmp_path / "files" / kept["id"])
        with caplog.at_level(logging.ERROR), pytest.raises(ContentLost, match=why) as refused:
            await storage.do(storage.file_with_path, "me", kept["id"])
        assert refused.value.status == 410
        assert kept["id"] in caplog.text
        # its record is still there, and can be deleted
        assert await storage.do(storage.file, "me", kept["id"]) == kept
        await storage.do(storage.delete_file, "me", kept["id"])
        await storage.do(storage.file_with_path, "me", other["id"])
        subprocess.run(["rm", "-r", tmp_path / "files"], check=True)
        with pytest.raises(ContentLost, match="missing"):
            await storage.do(storage.file_with_path, "me", other["id"])
        await keep(storage)


# ---- full and read-only disks


@contextlib.contextmanager
def mounted(folder, size):
    """A disk of its own."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder],
        capture_output=True,
        text=True,
    )
    if made.returncode:
        pytest.skip(f"a disk cannot be mounted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def small_disk(tmp_path):
    with mounted(tmp_path / "disk", "1m") as folder:
        yield folder


@contextlib.contextmanager
def nearly_full(folder, left_bytes):
    room = os.statvfs(folder)
    (folder / "filler").write_bytes(bytes(max(room.f_bavail * room.f_frsize - left_bytes, 0)))
    yield
    (folder / "filler").unlink()


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_full_disk_is_always_reported_as_one(small_disk, is_open):
    """With room for so many more blocks, every operation works or says that the disk is full."""
    data = small_disk / "data"
    outcomes = []
    for num_blocks in range(0, 61, 3):
        async with opened(data) as storage:
            if is_open:
                await keep(storage)
            with nearly_full(small_disk, num_blocks * 4096):
                try:
                    await keep(storage, b"y" * 20_000)
                    await storage.do(storage.add_batch, "me", "m", BATCH)
                    await storage.do(storage.add_result, "batch_1", 1, False, b"z" * 20_000)
                    await storage.do(
                        storage.finish, "me", "batch_1", "in_progress", "completed", None
                    )
                    outcomes.append("done")
                except StorageFull:
                    outcomes.append("full")
            await keep(storage)  # there is room again
        subprocess.run(["rm", "-r", data], check=True)
    assert outcomes[0] == "full"
    assert outcomes[-1] == "done"


async def test_files_can_be_deleted_on_a_full_disk(small_disk):
    async with opened(small_disk / "data") as storage:
        kept = [await keep(storage, b"x" * 40_000) for _ in range(3)]
        with nearly_full(small_disk, 0):
            with pytest.raises(StorageFull):
                await keep(storage)
            for one in kept:
                await storage.do(storage.delete_file, "me", one["id"])
            await keep(storage)


async def test_a_disk_that_cannot_be_written(tmp_path):
    with mounted(tmp_path / "disk", "1m") as folder:
        async with opened(folder / "data") as storage:
            kept = await keep(storage)
        subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
        async with opened(folder / "data") as storage:
            with pytest.raises(StorageUnavailable, match="cannot be used"):
                await storage.do(storage.file, "me", kept["id"])
            subprocess.run(["mount", "-o", "remount,rw", folder], check=True)
            assert await storage.do(storage.file, "me", kept["id"]) == kept
        assert not set_aside(folder / "data")


# ---- as clients see it


@contextlib.asynccontextmanager
async def client_of(storage):
    app = FastAPI()
    app.add_middleware(Guard, access=Access())
    errors.install(app)
    app.include_router(files.make_router(storage))
    transport = httpx.ASGITransport(RequestMiddleware(app, None))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


async def upload_over_http(client, content=b"content"):
    return await client.post("/v1/files", files={"file": ("a", content)}, data={"purpose": "batch"})


async def test_clients_learn_what_is_wrong(tmp_path):
    async with opened(tmp_path) as storage, client_of(storage) as client:
        first, second = [(await upload_over_http(client)).json()["id"] for _ in range(2)]
        (tmp_path / "files" / first).unlink()
        lost = await client.get(f"/v1/files/{first}/content")
        assert (lost.status_code, lost.json()["error"]["type"]) == (410, "file_content_lost")
        assert (await client.get(f"/v1/files/{second}/content")).content == b"content"
        empty(tmp_path / DATABASE)
        damaged = await client.get(f"/v1/files/{second}")
        assert (damaged.status_code, damaged.json()["error"]["type"]) == (503, "storage_damaged")
        gone = await client.get(f"/v1/files/{second}")
        assert gone.status_code == 404
        assert "set aside" in gone.json()["error"]["message"]
        assert (await upload_over_http(client)).status_code == 200


async def test_a_full_disk_answers_507(small_disk):
    async with opened(small_disk / "data", 10**9) as storage, client_of(storage) as client:
        refused = await upload_over_http(client, b"x" * 2**21)
        assert (refused.status_code, refused.json()["error"]["type"]) == (507, "storage_full")
        assert (await upload_over_http(client)).status_code == 200


@pytest.mark.parametrize(
    "ranges",
    ["0-,", "0-1,", "-1,", "5-6,0-,", ",", "-,", "x-y,", f"{'9' * 5000}-,", "1-0,"],
    ids=lambda ranges: ranges[:10],
)
async def test_hostile_range_headers(tmp_path, ranges):
    """Overlapping ranges are merged: a response is never longer than the file and the headers of
    its parts."""
    async with opened(tmp_path) as storage, client_of(storage) as client:
        file_id = (await upload_over_http(client, bytes(1000))).json()["id"]
        header = "bytes=" + ranges * (60_000 // len(ranges))
        reply = await client.get(f"/v1/files/{file_id}/content", headers={"range": header})
        assert reply.status_code in (200, 206, 400, 416)
        assert len(reply.content) < 2000
