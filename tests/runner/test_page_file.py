"""A file of pages survives what can happen to a process and to a file."""

import errno
import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tidemill.runner import page_file
from tidemill.runner.page_file import SUFFIX, PageFile, PageFileError, least_bytes, stride

PAGE, DIGEST = 1000, b"m" * 32
ROOM = 4096 + 10 * stride(PAGE)


def page(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, PAGE, np.uint8)


def key(seed: int) -> bytes:
    return bytes([seed]) * 32


def read(file: PageFile, record: int, seed: int) -> np.ndarray:
    out = np.empty(PAGE, np.uint8)
    file.read(record, key(seed), out)
    return out


def test_pages_are_found_again_the_oldest_first(tmp_path):
    opened = PageFile.open(tmp_path, ROOM, DIGEST, PAGE)
    assert opened.contents == []
    for record, seed in ((3, 1), (0, 2), (7, 3), (0, 4)):
        opened.file.write(record, key(seed), page(seed))
    opened.file.erase(7)
    opened.file.close()
    again = PageFile.open(tmp_path, ROOM, DIGEST, PAGE)
    assert again.contents == [(key(1), 3), (key(4), 0)]
    assert not again.ignored
    assert (read(again.file, 3, 1) == page(1)).all()
    with pytest.raises(PageFileError, match="corrupt"):  # it holds another content
        read(again.file, 0, 2)
    again.file.close()


KILLED = """
import os, sys, numpy as np
from tidemill.runner import page_file
from tests.runner.test_page_file import DIGEST, PAGE, ROOM, key, page
file = page_file.PageFile.open(page_file.Path(sys.argv[1]), ROOM, DIGEST, PAGE).file
file.write(0, key(1), page(1))
file.write(1, key(2), page(2))
write = os.pwritev
def part_of_it(fd, parts, at):
    whole = b"".join(map(bytes, parts))
    os.pwrite(fd, whole[: int(sys.argv[2])], at)
    os.kill(os.getpid(), 9)
page_file.os.pwritev = part_of_it
file.write(1, key(3), page(3))
"""


@pytest.mark.parametrize("num_written", [30, 500])
def test_a_process_killed_in_a_write_leaves_all_other_records(tmp_path, num_written):
    root = Path(__file__).parents[2]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, tmp_path, str(num_written)],
        cwd=root,
        env=os.environ,
        check=False,
    )
    assert killed.returncode == -9
    opened = PageFile.open(tmp_path, ROOM, DIGEST, PAGE)
    assert (read(opened.file, 0, 1) == page(1)).all()
    for seed in (2, 3):
        with pytest.raises(PageFileError):
            read(opened.file, 1, seed)
    opened.file.close()
    # what was corrupt is erased
    assert [one for one, _ in PageFile.open(tmp_path, ROOM, DIGEST, PAGE).contents] == [key(1)]


def test_the_quota_is_kept(tmp_path):
    opened = PageFile.open(tmp_path, ROOM, DIGEST, PAGE)
    assert opened.file.num_records == 10
    for record in range(10):
        opened.file.write(record, key(record), page(record))
    opened.file.close()
    total = lambda: sum(file.stat().st_size for file in tmp_path.glob(f"*{SUFFIX}"))  # noqa: E731
    assert total() <= ROOM
    smaller = PageFile.open(tmp_path, ROOM // 2, DIGEST, PAGE)
    assert total() <= ROOM // 2
    assert len(smaller.contents) == smaller.file.num_records < 5
    smaller.file.close()
    # of another model: the first one's has at most half
    other = PageFile.open(tmp_path, ROOM, b"o" * 32, PAGE)
    assert 0 < other.file.num_records < 10
    for record in range(other.file.num_records):
        other.file.write(record, key(record), page(record))
    assert total() <= ROOM
    with pytest.raises(PageFileError, match="quota"):  # the other engine may fill the rest
        PageFile.open(tmp_path, least_bytes(PAGE), DIGEST, PAGE)
    other.file.close()


@pytest.mark.parametrize("change", ["digest", "page size", "magic", "header", "empty"])
def test_a_file_of_something_else_is_not_used(tmp_path, change):
    opened = PageFile.open(tmp_path, ROOM, DIGEST, PAGE)
    opened.file.write(0, key(1), page(1))
    opened.file.close()
    path = next(tmp_path.glob(f"*{SUFFIX}"))
    content = bytearray(path.read_bytes())
    if change == "magic":
        content[0] ^= 1
    elif change == "header":
        content[60] ^= 1
    path.write_bytes(b"" if change == "empty" else content)
    size = PAGE - 1 if change == "page size" else PAGE
    # the name of the file is the same
    digest = DIGEST[:16] + b"n" * 16 if change == "digest" else DIGEST
    again = PageFile.open(tmp_path, ROOM, digest, size)
    assert again.contents == []
    assert bool(again.ignored) == (change != "empty")
    again.file.close()


def no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_keeps_no_lock_and_leaves_no_file(tmp_path, monkeypatch):
    """The next engine of this process, of this model or of another, finds a folder as it was."""
    with monkeypatch.context() as patched:
        patched.setattr(page_file.os, "pwrite", no_space)
        for digest in (DIGEST, b"o" * 32, DIGEST):
            with pytest.raises(PageFileError, match="No space"):
                PageFile.open(tmp_path, ROOM, digest, PAGE)
    assert not list(tmp_path.glob(f"*{SUFFIX}"))
    for digest in (DIGEST, b"o" * 32):
        PageFile.open(tmp_path, ROOM, digest, PAGE).file.close()


def make_strange(path: Path, kind: str) -> None:
    """What may lie in a folder under the name of a file of pages."""
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "dangling link":
        path.symlink_to(path.parent / "nowhere")
    else:
        content = {
            "empty": b"",
            "short": b"tidemill KV page\1",
            "garbage": b"\xff" * 5000,
            "unreadable": b"x" * 100,
        }
        path.write_bytes(content[kind])
        path.chmod(0 if kind == "unreadable" else 0o600)


@pytest.mark.parametrize("is_locked", [False, True])
@pytest.mark.parametrize(
    "kind", ["empty", "short", "garbage", "unreadable", "folder", "pipe", "dangling link"]
)
def test_strange_files_of_others_are_no_obstacle(tmp_path, kind, is_locked):
    other = tmp_path / f"{'0' * 32}{SUFFIX}"
    make_strange(other, kind)
    lock = (
        os.open(other, os.O_RDONLY)
        if is_locked and other.is_file() and os.access(other, os.R_OK)
        else None
    )
    if lock is not None:
        fcntl.flock(lock, fcntl.LOCK_EX)
    opened = PageFile.open(tmp_path, ROOM, DIGEST, PAGE)
    opened.file.write(0, key(1), page(1))
    assert (read(opened.file, 0, 1) == page(1)).all()
    opened.file.close()
    if lock is not None:
        os.close(lock)


@pytest.mark.parametrize(
    "kind", ["short", "garbage", "unreadable", "folder", "pipe", "dangling link"]
)
def test_a_strange_file_in_its_place_is_replaced_or_told(tmp_path, kind):
    path = tmp_path / f"{DIGEST.hex()[:32]}{SUFFIX}"
    make_strange(path, kind)
    if path.is_file() and os.access(path, os.R_OK | os.W_OK):
        opened = PageFile.open(tmp_path, ROOM, DIGEST, PAGE)
        assert opened.contents == []
        assert opened.ignored
        opened.file.close()
    else:
        with pytest.raises(PageFileError, match=re.escape(str(tmp_path))):
            PageFile.open(tmp_path, ROOM, DIGEST, PAGE)


def test_a_folder_that_cannot_be_written_and_one_that_goes_away(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(PageFileError):
        PageFile.open(tmp_path / "file" / "folder", ROOM, DIGEST, PAGE)
    opened = PageFile.open(tmp_path / "folder", ROOM, DIGEST, PAGE)
    shutil.rmtree(tmp_path / "folder")
    opened.file.write(0, key(1), page(1))
    assert (read(opened.file, 0, 1) == page(1)).all()
    opened.file.close()
    PageFile.open(tmp_path / "folder", ROOM, DIGEST, PAGE).file.close()
