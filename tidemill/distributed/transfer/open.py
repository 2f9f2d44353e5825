"""Exporters and importers by their addresses."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tidemill.config.keys import read_key
from tidemill.config.transfer import TransferAddress, parse_address
from tidemill.distributed.channel import Address, Channel, Door
from tidemill.distributed.transfer import nixl
from tidemill.distributed.transfer.base import Identity, Reader, Source, Welcome
from tidemill.distributed.transfer.exporter import Exporter
from tidemill.distributed.transfer.importer import Importer, Peer
from tidemill.distributed.transfer.shm import SharedReader, SharedSource
from tidemill.distributed.transfer.tcp import TcpReader, TcpSource
from tidemill.errors import ConfigError

_LOCK_TRIES, _LOCK_PAUSE_S = 10, 0.02


def open_exporter(
    address: str, num_slots: int, page_bytes: int, identity: Identity, key_file: str | None
) -> Exporter:
    at = parse_address(address, "kv_export")
    source = _source(at.kind, num_slots, page_bytes)
    try:
        if at.kind != "shm":
            return Exporter(source, Door((at.name, at.port), _key(at, key_file)), identity)
        place = SocketFile(at.name)
        return Exporter(source, Door(str(place.path), _key(at, None)), identity, place.close)
    except BaseException:
        source.close()
        raise


def open_importer(
    addresses: Sequence[str],
    page_bytes: int,
    identity: Identity,
    key_file: str | None,
    patience_s: float = 0.0,
) -> Importer:
    peers = [_peer(parse_address(address, "kv_import"), key_file) for address in addresses]
    return Importer(peers, identity, page_bytes, patience_s)


def _source(kind: str, num_slots: int, page_bytes: int) -> Source:
    if kind == "nixl":
        return nixl.NixlSource(num_slots, page_bytes)
    return (SharedSource if kind == "shm" else TcpSource)(num_slots, page_bytes)


def _peer(at: TransferAddress, key_file: str | None) -> Peer:
    where: Address = str(folder() / at.name) if at.kind == "shm" else (at.name, at.port)
    if at.kind == "nixl":
        nixl.check()

    def make(channel: Channel, welcome: Welcome) -> Reader:
        if at.kind == "shm":
            return SharedReader(channel, welcome.num_slots, welcome.page_bytes)
        if at.kind == "nixl":
            return nixl.NixlReader(channel, welcome.page_bytes, welcome.offer)
        return TcpReader(channel, welcome.page_bytes)

    return Peer(str(at), where, _key(at, key_file), make)


def _key(at: TransferAddress, key_file: str | None) -> bytes:
    """The key of a link. That of shared memory is no secret: the socket's folder lets nobody else
    in."""
    if at.kind == "shm":
        return b"tidemill " + at.name.encode()
    assert key_file is not None, "checked by resolve"
    return read_key(key_file, "kv_key_file")


# ---- sockets of engines that share memory


def folder() -> Path:
    """The folder of the sockets: of mode 0700, of this user."""
    path = Path(tempfile.gettempdir()) / f"tidemill-kv-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{path} is not a folder that only this user can read.",
            fix="Remove it, or set TMPDIR.",
            param="kv_export",
        )
    return path


class SocketFile:
    """The path of a socket, and a lock that tells whether its engine lives: what killed engines
    left is removed."""

    def __init__(self, name: str) -> None:
        self.path = folder() / name
        for left in self.path.parent.glob("*.lock"):
            if left.stem != name and (fd := _lock(left)) is not None:
                _remove(left.with_suffix(""), left, fd)
        held = _lock_own(self._lock_path)
        if held is None:
            fix = "Give it another name."
            raise ConfigError(
                f"Another engine exports its pages as shm:{name}.", fix=fix, param="kv_export"
            )
        self._held = held
        self.path.unlink(missing_ok=True)

    @property
    def _lock_path(self) -> Path:
        return self.path.with_name(self.path.name + ".lock")

    def close(self) -> None:
        _remove(self.path, self._lock_path, self._held)


def _lock_own(path: Path) -> int | None:
    """An engine that starts just now may have it for a moment, to see whether its owner lives."""
    for _ in range(_LOCK_TRIES):
        if (fd := _lock(path)) is not None:
            return fd
        time.sleep(_LOCK_PAUSE_S)
    return None


def _lock(path: Path) -> int | None:
    """None: another process has it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(fd).st_nlink:  # else it was removed meanwhile
            return fd
    os.close(fd)
    return None


def _remove(socket: Path, lock: Path, fd: int) -> None:
    socket.unlink(missing_ok=True)
    lock.unlink(missing_ok=True)
    os.close(fd)
