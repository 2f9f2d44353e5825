"""Exporter and importer by each transport: pages arrive as they are, or not at all."""

import os
import socket
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.waiting import until
from tidemill.distributed.channel import Door
from tidemill.distributed.transfer import base, checksum
from tidemill.distributed.transfer import exporter as exporting
from tidemill.distributed.transfer import open as opening
from tidemill.distributed.transfer.base import (
    MAX_NEWS,
    Ask,
    Hello,
    News,
    SlotNews,
    TransferError,
    Welcome,
)
from tidemill.distributed.transfer.exporter import Journal
from tidemill.distributed.transfer.open import SocketFile, open_exporter, open_importer
from tidemill.errors import ConfigError, PeerMismatch, WorkerLost
from tidemill.kernels import native

SIZE, SLOTS = 1000, 8
SAME = {"weights": "abc", "KV format": "bfloat16"}


def key(i: int) -> bytes:
    return bytes([i]) * 32


def page(i: int) -> np.ndarray:
    return np.random.default_rng(i).integers(0, 256, SIZE, dtype=np.uint8)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(opening.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "key").write_text("0123456789abcdef")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=["shm", "tcp", "nixl"])
def address(request, port):
    if request.param == "nixl":
        pytest.importorskip("nixl")
    if request.param == "shm":
        return "shm:here"
    return f"{request.param}:127.0.0.1:{port}"


@pytest.fixture
def opened(address):
    exporter = open_exporter(address, SLOTS, SIZE, SAME, "key")
    importer = open_importer([address], SIZE, SAME, "key")
    yield exporter, importer
    importer.close()
    exporter.close()


def wait(importer, is_right) -> tuple[dict[int, bytes], list[bytes], list[str]]:
    """What was learned, once it is as it should be."""
    slots, erased, problems = {}, [], []

    def learn() -> bool:
        if (learned := importer.take()) is not None:
            slots.update(learned.slots)
            erased.extend(learned.erased)
            problems.extend(learned.problems)
        return is_right(slots, erased, problems)

    until(learn, 0.001)
    return slots, erased, problems


def in_use() -> tuple[int, int]:
    """Files and threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def wait_for_use(most: tuple[int, int]) -> None:
    until(lambda: all(now <= before for now, before in zip(in_use(), most, strict=True)), 0.005)


@pytest.mark.parametrize("address", ["shm", "tcp"], indirect=True)
def test_a_connection_that_ends_leaves_no_files_and_threads(address):
    before = in_use()
    exporter = open_exporter(address, SLOTS, SIZE, SAME, "key")
    for _ in range(3):
        open_importer([address], SIZE, SAME, "key").close()
    exporter.close()
    del exporter  # and the memory it shared
    wait_for_use(before)


def test_pages_arrive(opened):
    exporter, importer = opened
    for i in range(SLOTS):
        exporter.write(i, key(i), page(i))
    slots, _, _ = wait(importer, lambda slots, *_: len(slots) == SLOTS)
    assert slots == {i: key(i) for i in range(SLOTS)}
    got = np.zeros(SIZE, np.uint8)
    for i in (3, 0, 7):
        importer.fetch(i, key(i), got)
        assert (got == page(i)).all()


def test_what_is_overwritten_torn_or_gone_is_never_taken_for_the_page(opened):
    exporter, importer = opened
    got = np.zeros(SIZE, np.uint8)
    for i in range(3):
        exporter.write(i, key(i), page(i))
    wait(importer, lambda slots, *_: len(slots) == 3)
    # another page is being written there
    exporter._source.slots[0, SIZE // 2 :] = page(50)[SIZE // 2 :]
    with pytest.raises(TransferError, match="overwritten or damaged"):
        importer.fetch(0, key(0), got)
    exporter.write(1, key(9), page(9))
    wait(importer, lambda slots, *_: slots.get(1) == key(9))
    with pytest.raises(TransferError, match="any more"):
        importer.fetch(1, key(1), got)
    exporter.erase(2, key(2))
    slots, erased, _ = wait(importer, lambda slots, erased, _: erased)
    assert (slots[2], erased) == (b"", [key(2)])


def test_an_exporter_that_is_gone_takes_its_pages_along_and_comes_back(address):
    exporter, got = open_exporter(address, SLOTS, SIZE, SAME, "key"), np.zeros(SIZE, np.uint8)
    importer = open_importer([address], SIZE, SAME, "key")
    exporter.write(5, key(5), page(5))
    wait(importer, lambda slots, *_: slots == {5: key(5)})
    exporter.close()
    wait(importer, lambda slots, *_: slots == {5: b""})
    with pytest.raises(TransferError, match="gone"):
        importer.fetch(5, key(5), got)
    again = open_exporter(address, SLOTS, SIZE, SAME, "key")
    again.write(1, key(5), page(5))
    wait(importer, lambda slots, *_: slots.get(1) == key(5))
    importer.fetch(1, key(5), got)
    assert (got == page(5)).all()
    importer.close()
    again.close()


def test_another_model_is_refused_and_what_differs_is_said():
    exporter = open_exporter("shm:a", SLOTS, SIZE, SAME, None)
    with pytest.raises(
        PeerMismatch,
        match=r"another KV format \(bfloat16, here int8\), another weights \(abc, here d",
    ):
        open_importer(["shm:a"], SIZE, {"weights": "d", "KV format": "int8"}, None)
    with pytest.raises(PeerMismatch, match="1000 bytes; pages here have 999"):
        open_importer(["shm:a"], SIZE - 1, SAME, None)
    importer = open_importer(["shm:b"], SIZE, SAME, None)  # nobody is there yet
    other = open_exporter("shm:b", SLOTS, SIZE, SAME | {"version": "2"}, None)
    _, _, problems = wait(importer, lambda *known: known[2])
    assert "another version (2, here none)" in problems[0]
    for one in (importer, exporter, other):
        one.close()


def test_who_does_not_know_the_key_gets_nothing(tmp_path, port):
    address = f"tcp:127.0.0.1:{port}"
    exporter = open_exporter(address, SLOTS, SIZE, SAME, "key")
    exporter.write(0, key(0), page(0))
    (tmp_path / "other").write_text("fedcba9876543210")
    importer = open_importer([address], SIZE, SAME, "other")
    _, _, problems = wait(importer, lambda *known: known[2])
    assert "another key" in problems[0]
    assert not exporter.journal._known
    importer.close()
    until(lambda: not exporter._readers, 0.005)
    exporter.close()


@pytest.mark.parametrize("address", ["tcp"], indirect=True)
def test_who_connects_and_says_nothing_keeps_nobody_waiting(address, monkeypatch):
    host, port = address.split(":")[1:]
    monkeypatch.setattr(exporting, "_PROVE_S", 3600.0)  # whoever waited for it would do so for good
    exporter = open_exporter(address, SLOTS, SIZE, SAME, "key")
    with ExitStack() as silent:
        for _ in range(exporting._MOST_READERS + 8):  # from one other host
            silent.enter_context(
                socket.create_connection((host, int(port)), source_address=("127.0.0.2", 0))
            )
        importer = open_importer([address], SIZE, SAME, "key")
        exporter.write(0, key(0), page(0))
        wait(importer, lambda slots, *_: slots == {0: key(0)})
        importer.close()
        exporter.close()
    monkeypatch.setattr(exporting, "_PROVE_S", 0.2)
    again = open_exporter(address, SLOTS, SIZE, SAME, "key")
    # it is closed in the end
    with socket.create_connection((host, int(port))) as slow, suppress(OSError):
        while True:  # the beginning of a message without an end
            slow.sendall(b"\0")
            time.sleep(0.05)
    again.close()


@pytest.mark.parametrize(
    "wrong", ["slot", "key", "erased", "checksum", "too many", "not ours", "too long"]
)
def test_a_peer_that_announces_nonsense_is_given_up(wrong):
    place = SocketFile("odd")
    door = Door(str(place.path), b"tidemill odd")
    news = {
        "slot": News(1, [SlotNews(SLOTS, key(1), b"s" * 16)], []),
        "key": News(1, [SlotNews(0, b"k" * 100, b"s" * 16)], []),
        "erased": News(1, [], [b"k" * 100]),
        "checksum": News(1, [SlotNews(0, key(1), b"s")], []),
        "too many": News(1, [SlotNews(0, key(1), b"s" * 16)] * (MAX_NEWS + 1), []),
    }
    answer = {"not ours": b"\xc1 what?", "too long": b"x" * (base.MAX_MESSAGE + 1)}.get(wrong)

    def accept():
        channel = door.accept("importer", 30.0)
        msgspec.msgpack.decode(channel.receive(), type=Hello)
        channel.send_now(msgspec.msgpack.encode(Welcome(SLOTS, SIZE, b"")))
        return channel

    def serve():
        told = accept()
        pages = accept()
        pages.receive()
        fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, SLOTS * SIZE)
        opening.fcntl.fcntl(fd, opening.fcntl.F_ADD_SEALS, opening.fcntl.F_SEAL_SHRINK)
        with socket.socket(fileno=os.dup(pages.fileno())) as own:
            socket.send_fds(own, [b"!"], [fd])
        msgspec.msgpack.decode(told.receive(), type=Ask)
        with suppress(WorkerLost):  # it does not read all of it
            told.send_now(answer or msgspec.msgpack.encode(news[wrong]))
        told.has_message(30.0)
        pages.abort()

    thread = threading.Thread(target=serve)
    thread.start()
    importer = open_importer(["shm:odd"], SIZE, SAME, None)
    slots, _, problems = wait(importer, lambda *known: known[2])
    assert problems
    assert not any(slots.values())
    importer.close()
    thread.join()
    door.close()
    place.close()


def test_memory_that_could_be_cut_under_the_reader_is_refused(monkeypatch):
    monkeypatch.setattr("tidemill.distributed.transfer.shm._anonymous", lambda num: _plain(num))
    exporter = open_exporter("shm:cut", SLOTS, SIZE, SAME, None)
    before = in_use()
    importer = open_importer(["shm:cut"], SIZE, SAME, None)
    _, _, problems = wait(importer, lambda *known: known[2])
    assert "made smaller" in problems[0]
    assert importer._links[0].pause_s > 0.2  # it is asked less often
    importer.close()
    wait_for_use(before)
    exporter.close()


def _plain(num: int) -> int:
    fd = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num)
    return fd


def test_what_killed_engines_left_is_removed_and_a_living_one_is_not():
    exporter = open_exporter("shm:alive", SLOTS, SIZE, SAME, None)
    folder = opening.folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    for name in ("dead", "again"):
        (folder / f"{name}.lock").touch()
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(folder / name))
    other = open_exporter("shm:again", SLOTS, SIZE, SAME, None)
    assert {path.name for path in folder.iterdir()} == {
        "alive",
        "alive.lock",
        "again",
        "again.lock",
    }
    with pytest.raises(ConfigError, match="Another engine exports its pages as shm:alive"):
        open_exporter("shm:alive", SLOTS, SIZE, SAME, None)
    exporter.close()
    other.close()
    assert not list(folder.iterdir())
    assert not list(Path("/dev/shm").glob("*tidemill-kv*"))


def test_engines_that_start_together_do_not_take_each_other_for_the_owner():
    lock = opening.folder() / "own.lock"
    looked_at = opening._lock(lock)  # by another engine, which then removes what it takes for left
    timer = threading.Timer(0.03, lambda: opening._remove(lock.with_suffix(""), lock, looked_at))
    timer.start()
    place = SocketFile("own")
    timer.join()
    assert opening._lock(lock) is None
    place.close()


def test_a_slow_reader_gets_the_latest_and_nothing_piles_up():
    journal = Journal()
    for i in range(3 * MAX_NEWS):
        journal.put(i % (MAX_NEWS + 10), key(i % 250), b"s" * 16)
    first = journal.after(0, 0.0)
    assert len(first.slots) == MAX_NEWS
    rest = journal.after(first.until, 0.0)
    assert len(rest.slots) == 10
    assert {one.slot for one in first.slots + rest.slots} == set(range(MAX_NEWS + 10))
    assert journal.after(rest.until, 0.0).slots == []


def test_a_reader_that_does_not_ask_is_waited_for_a_while(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("tidemill.distributed.transfer.exporter.time.monotonic", lambda: now[0])
    journal = Journal()
    journal.knows("reader", 0)
    now[0] += 100.0
    first = journal.put(0, key(1), b"s" * 16)
    assert not journal.is_known(first)
    journal.knows("reader", first)
    assert journal.is_known(first)
    second = journal.put(1, key(2), b"s" * 16)
    assert not journal.is_known(second)
    now[0] += 1.0
    assert journal.is_known(second)


@pytest.mark.parametrize("num", [0, 1, 63, 64, 65, 4096, 9999])
def test_a_checksum_tells_what_arrived(num, monkeypatch):
    source, target = (
        np.random.default_rng(num).integers(0, 256, num, dtype=np.uint8),
        np.zeros(num, np.uint8),
    )
    made = checksum.copy(target, source, key(1))
    assert (target == source).all()
    assert made == checksum.of(source, key(1)) != checksum.of(source, key(2))
    for at in {0, num // 2, num - 1} if num else ():
        source[at] ^= 1
        assert checksum.of(source, key(1)) != made
        source[at] ^= 1
    if num >= 4096:
        rows = source[: num // 64 * 64].reshape(-1, 64)
        rows[[0, 5]] = rows[[5, 0]]
        assert checksum.of(source, key(1)) != made
        rows[[0, 5]] = rows[[5, 0]]
    monkeypatch.setattr(native, "lib", None)
    assert checksum.copy(target, source, key(1)) == made
