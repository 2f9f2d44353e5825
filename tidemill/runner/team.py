"""Team: the other ranks of a group, as rank 0 has them. Their processes, channels to them, and what
becomes of them.

All of them start, or none: whoever fails, ends or does not come, ends the rest, and the reason is
one error.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import msgspec

from tidemill.distributed.channel import Address, Channel, Door
from tidemill.distributed.shared import WEIGHTS_SUFFIX, make_shared
from tidemill.distributed.world import World
from tidemill.errors import ERRORS_BY_NAME, ConfigError, TidemillError, WorkerLost
from tidemill.kernels import native
from tidemill.kv.tiers import Moved
from tidemill.runner.worker_messages import (
    Failed,
    FromWorker,
    Hello,
    Join,
    Loading,
    PageMoved,
    Result,
    Stop,
    ToWorker,
    decode_from_worker,
    encode,
)
from tidemill.version import __version__

T = TypeVar("T", bound=FromWorker)
COME_S = 120.0  # for workers of other hosts to connect
# for a process of this host, whose end would be noticed: a busy host takes minutes to import torch
_START_S = 600.0
_LOOK_S = 0.1
_STOP_S = 5.0


def own_kernels() -> str:
    """Ranks compute the same bits only with the same kernels."""
    return native.why if native.lib is not None else "torch"


class Team:
    def __init__(
        self,
        world: World,
        num_remote: int = 0,
        address: tuple[str, int] | None = None,
        key: bytes = b"",
    ) -> None:
        """`num_remote`: ranks, the last ones, that come from other hosts, to `address`, and know
        `key`."""
        self.world, self.key = world, key or secrets.token_bytes(32)
        self._folder = Path(tempfile.mkdtemp(prefix="tidemill-"))  # mode 0700
        self._shared: list[Path] = []
        self._num_local = world.size - num_remote
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._channels: dict[int, Channel] = {}
        self._inbox: SimpleQueue[tuple[int, FromWorker | None]] = SimpleQueue()  # None: it is gone
        self._results: SimpleQueue[Result | None] = SimpleQueue()
        self._alarm_read, self._alarm = os.pipe()
        self._lock = threading.Lock()
        self._is_closed = False
        self.lost: TidemillError | None = None
        self.on_moved: Callable[[Moved], None] = lambda moved: None  # a worker has moved a page
        self.on_lost: list[Callable[[], None]] = []
        self.on_closed: list[Callable[[], None]] = []
        self.addresses: list[Address] = []
        self.read_bytes: list[int] = []  # of the checkpoint, by each rank
        try:
            self.door = Door(address or str(self._folder / "0.sock"), self.key)
        except BaseException:
            self.close()
            raise

    @property
    def alarm(self) -> int:
        """Readable once a worker is lost."""
        return self._alarm_read

    # ---- start

    def start(self, waiting: Callable[[str], None] = lambda text: None) -> None:
        """Spawn those of this host, and wait until all have come. `waiting`: is told for whom."""
        for rank in range(1, self._num_local):
            self._spawn(rank)
        hellos: dict[int, Hello] = {}
        began = time.monotonic()
        while missing := set(range(1, self.world.size)) - set(self._channels):
            waiting(f"{len(missing)} of {self.world.size - 1} workers have not come yet")
            self._check_processes()
            here = missing & set(self._processes)
            if time.monotonic() > began + (_START_S if here else COME_S):
                raise self._nobody_came(missing, here)
            channel = self.door.accept("a worker", _LOOK_S)
            if channel is not None:
                rank, hello = self._greet(channel, missing)
                channel.peer, self._channels[rank], hellos[rank] = f"worker {rank}", channel, hello
        self.addresses = [self.door.address, *(hellos[rank].address for rank in sorted(hellos))]
        for rank, channel in self._channels.items():
            threading.Thread(
                target=self._listen, args=(rank, channel), name=f"from worker {rank}", daemon=True
            ).start()

    def _spawn(self, rank: int) -> None:
        # -P: the current folder is not searched for modules.
        command = [sys.executable, "-P", "-m", "tidemill.engine.worker"]
        process = self._processes[rank] = subprocess.Popen(command, stdin=subprocess.PIPE)
        address = self.door.address
        parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0
        start = {"address": address, "key": self.key.hex(), "rank": rank, "parent": parent}
        if isinstance(address, str):
            start["listen"] = str(self._folder / f"{rank}.sock")
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which is noticed
            process.stdin.write(json.dumps(start).encode() + b"\n")
            process.stdin.flush()  # it stays open: at its end the worker ends

    def _greet(self, channel: Channel, missing: set[int]) -> tuple[int, Hello]:
        message = decode_from_worker(channel.receive())
        if isinstance(message, Failed):
            raise error_of(message)
        if not isinstance(message, Hello):
            raise WorkerLost("A worker did not begin with its version.")
        for what, theirs, ours in (
            ("version", message.version, __version__),
            ("kernels", message.kernels, own_kernels()),
        ):
            if theirs != ours:
                wrong = f"A worker has another {what} than rank 0: {theirs} instead of {ours}."
                fix = "Install the same version on all hosts, of one kind of CPU."
                channel.send(encode(Failed("ConfigError", wrong, fix)))
                channel.close()
                raise ConfigError(wrong, fix=fix)
        rank = (
            message.rank
            if message.rank in missing
            else min(missing - set(self._processes), default=0)
        )
        if not rank:
            raise WorkerLost("More workers came than the group has ranks.")
        return rank, message

    def _check_processes(self) -> None:
        for rank, process in self._processes.items():
            if process.poll() is not None:
                raise WorkerLost(
                    f"Worker {rank} ended with code {process.returncode} while starting."
                )

    def _nobody_came(self, missing: set[int], here: set[int]) -> TidemillError:
        """`here`: those of this host."""
        if here:
            return WorkerLost(f"Worker {min(here)} did not connect in {_START_S:.0f} s.")
        address = self.door.address
        where = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
        return ConfigError(
            f"{len(missing)} workers of other hosts did not come to {where} in {COME_S:.0f} s.",
            fix=f"Start on each: tidemill worker --join {where} --key-file FILE.",
            param="remote_workers",
        )

    def shared_memory(self, rank: int) -> str:
        """A file for the ranks that share layers with this one, if all are on this host and there
        are kernels for it."""
        ranks = self.world.stage_ranks(rank)
        if len(ranks) < 2 or ranks[-1] >= self._num_local or native.lib is None:
            return ""
        folder = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else self._folder
        path = folder / f"{self._folder.name}-{ranks[0]}"
        if path not in self._shared:  # one that somebody else made there is refused
            make_shared(path, *(shard.size for shard, _ in self.world.axes(rank)))
            self._shared.append(path)
            if self.world.layout in ("gathered", "phased"):
                weights = path.with_name(path.name + WEIGHTS_SUFFIX)
                self._shared.append(weights)
                os.close(os.open(weights, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        return str(path)

    def join(self, make: Callable[[int], Join]) -> None:
        for rank in self._channels:
            self.send(rank, make(rank))

    def wait(
        self, kind: type[T], on_loading: Callable[[int, Loading], None] | None = None
    ) -> dict[int, T]:
        """One message of this kind from each."""
        found = dict[int, T]()
        while len(found) < len(self._channels):
            rank, message = self._inbox.get()
            self.check()
            if isinstance(message, Loading):
                if on_loading is not None:
                    on_loading(rank, message)
            elif isinstance(message, kind):
                found[rank] = message
        return found

    def all_are_here(self) -> None:
        """Nobody connects any more, or maps the shared memory: what only that needs goes, also in
        case this process is killed."""
        if hasattr(self, "door"):
            self.door.close()
        for path in self._shared:
            path.unlink(missing_ok=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- work

    def send(self, rank: int, message: ToWorker) -> None:
        self._channels[rank].send(encode(message))

    def send_all(self, message: ToWorker) -> None:
        self.send_encoded(encode(message))

    def send_encoded(self, encoded: bytes) -> None:
        for channel in self._channels.values():
            channel.send(encoded)

    def result(self, step: int) -> Result:
        """The result of the step from the rank that samples."""
        result = self._results.get()
        if result is None or self.lost is not None:
            self.check()
        assert result is not None
        if result.step != step:
            self.fail(WorkerLost(f"A worker is at step {result.step}, the engine at {step}."))
            self.check()
        return result

    def check(self) -> None:
        """Raises if a worker is lost."""
        if self.lost is not None:
            raise self.lost

    def fail(self, why: TidemillError) -> None:
        """The group is of no use any more. The first reason stays."""
        with self._lock:
            if self.lost is not None or self._is_closed:
                return
            self.lost = why
        self._inbox.put((0, None))
        self._results.put(None)
        os.write(self._alarm, b"!")
        for tell in self.on_lost:
            # of a device that is broken; the others are told all the same
            with contextlib.suppress(Exception):
                tell()

    def _listen(self, rank: int, channel: Channel) -> None:
        while True:
            try:
                message = decode_from_worker(channel.receive())
            except (TidemillError, msgspec.DecodeError):
                self.fail(WorkerLost(f"Worker {rank} of the group is gone{self._exit_of(rank)}."))
                return
            if isinstance(message, Failed):
                self.fail(error_of(message))
                return
            if isinstance(message, Result):
                self._results.put(message)
            elif isinstance(message, PageMoved):
                self.on_moved(message.moved)
            else:
                self._inbox.put((rank, message))

    def _exit_of(self, rank: int) -> str:
        process = self._processes.get(rank)
        if process is None:
            return ""
        try:
            return f": it ended with code {process.wait(1.0)}"
        except subprocess.TimeoutExpired:
            return ""

    # ---- end

    def close(self) -> None:
        """End all workers, in good order if they are. Safe to call twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        if self.lost is None:
            self.send_all(Stop())
        else:
            for channel in self._channels.values():
                channel.abort()
        until = time.monotonic() + _STOP_S
        for process in self._processes.values():
            try:
                process.wait(0.0 if self.lost is not None else max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        for channel in self._channels.values():
            channel.close()
        for tell in self.on_closed:
            with contextlib.suppress(Exception):
                tell()
        self.all_are_here()


def error_of(message: Failed) -> TidemillError:
    cls = ERRORS_BY_NAME.get(message.error, TidemillError)
    return cls(message.message, fix=message.fix, param=message.param)
