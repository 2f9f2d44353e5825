"""Channel: messages between two processes of a group, over a Unix socket on one host and TCP
between hosts.

Both ends prove first that they know the key of the group (HMAC, as multiprocessing does it). Bytes
only: there is no pickle.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from queue import SimpleQueue
from threading import Thread, Timer

from tidemill.errors import ConfigError, WorkerLost

MAX_BYTES = 2**30  # of a message
_HANDSHAKE_S = 10.0
_PAUSE_S = 0.05  # if nobody can be let in
_LOOK_MS = 1000
# without the first, only once both ends are closed
_GONE = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
Address = str | tuple[str, int]  # a path, or host and port


class Channel:
    """`send` does not wait for the other end: a thread writes."""

    def __init__(self, connection: Connection, peer: str) -> None:
        """`peer`: in words, for errors."""
        self._connection, self.peer = connection, peer
        self._outbox: SimpleQueue[bytes | memoryview | None] = SimpleQueue()
        self._writer = Thread(target=self._write, name=f"to {peer}", daemon=True)
        self._writer.start()

    def send(self, message: bytes | memoryview) -> None:
        """It must not be changed any more."""
        self._outbox.put(message)

    def send_now(self, message: bytes | memoryview) -> None:
        """Returns when it has left. Not for a channel that also sends."""
        try:
            self._connection.send_bytes(message)
        except OSError as error:
            raise WorkerLost(f"{self.peer} is gone.") from error

    def receive(self, most: int = MAX_BYTES) -> bytes:
        """`most`: bytes; the other end is given up if it sends more."""
        try:
            return self._connection.recv_bytes(most)
        except (EOFError, OSError) as error:
            raise WorkerLost(f"The engine cannot go on: {self.peer} is gone.") from error

    def has_message(self, wait_s: float = 0.0) -> bool:
        """Or the other end is gone."""
        try:
            return self._connection.poll(wait_s)
        except (EOFError, OSError):
            return True

    def check(self) -> None:
        """Raises if the other end is gone, whatever it has sent before."""
        if _is_gone(self.fileno(), 0):
            raise WorkerLost(f"The engine cannot go on: {self.peer} is gone.")

    def when_gone(self, call: Callable[[], object]) -> None:
        """From a thread, once the other end is, also while nobody reads here."""

        def watch() -> None:
            while not _is_gone(own, _LOOK_MS):
                pass
            os.close(own)
            call()

        own = os.dup(self.fileno())
        Thread(target=watch, name=f"watches {self.peer}", daemon=True).start()

    def fileno(self) -> int:
        return self._connection.fileno()

    def limit(self, seconds: float) -> None:
        """Whoever waits longer for a message, or for one to leave, gets an error. 0: no limit."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as same:
            _limit(same, seconds)

    @property
    def own_host(self) -> str:
        """The address by which the other end sees this host."""
        with socket.socket(fileno=os.dup(self._connection.fileno())) as own:
            return str(own.getsockname()[0])

    def close(self) -> None:
        """Closes the channel; bytes that were sent still go out."""
        self._outbox.put(None)
        self._writer.join(1.0)
        self._connection.close()

    def abort(self) -> None:
        """Whoever reads or writes here gets an error, at both ends."""
        try:
            with socket.socket(fileno=os.dup(self._connection.fileno())) as own:
                own.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._connection.send_bytes(message)
            except OSError:  # whoever reads notices
                return


class Door:
    """The listener where others connect."""

    def __init__(self, address: Address, key: bytes) -> None:
        self._key = key
        self._socket = socket.socket(_family(address), socket.SOCK_STREAM)
        umask = os.umask(0o177)  # a socket file gets mode 0600
        try:
            if not isinstance(address, str):
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
            self._socket.listen(64)
        except OSError as error:
            self._socket.close()
            fix = "Choose another port, or an address of this host."
            raise ConfigError(
                f"Cannot listen on {_words(address)}: {error.strerror or error}.", fix=fix
            ) from error
        finally:
            os.umask(umask)

    @property
    def address(self) -> Address:
        return self._socket.getsockname()

    def accept(self, peer: str, within_s: float) -> Channel | None:
        """None: nobody came, or one who does not know the key."""
        accepted = self.answer(within_s)
        if accepted is None:
            return None
        with accepted:
            return self.prove(accepted, peer)

    def answer(self, within_s: float) -> socket.socket | None:
        """Whoever comes, whether they know the key or not. None: nobody came."""
        try:
            self._socket.settimeout(within_s)
            return self._socket.accept()[0]
        except TimeoutError:
            return None
        except OSError:  # no more files can be opened, or the door is closed
            time.sleep(_PAUSE_S)
            return None

    def prove(
        self, accepted: socket.socket, peer: str, within_s: float | None = None
    ) -> Channel | None:
        """None: it does not know the key. The socket remains the caller's, who may shut it down
        meanwhile."""
        try:
            return _proven(accepted, self._key, peer, is_door=True, within_s=within_s)
        except (AuthenticationError, EOFError, OSError):
            return None

    def close(self) -> None:
        """Whoever waits for somebody to come stops."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def connect(address: Address, key: bytes, peer: str, within_s: float) -> Channel:
    """Tries again for a while: the other end may not listen yet."""
    until = time.monotonic() + within_s
    while True:
        try:
            with socket.socket(_family(address), socket.SOCK_STREAM) as own:
                own.settimeout(_HANDSHAKE_S)
                own.connect(address)
                return _proven(own, key, peer, is_door=False)
        except AuthenticationError as error:
            raise ConfigError(
                f"{peer} has another key.", fix="Give all workers the same key."
            ) from error
        except (OSError, EOFError) as error:
            why = getattr(error, "strerror", "") or "nobody answers"
        if time.monotonic() > until:
            what = f"Cannot reach {peer} at {_words(address)}: {why}."
            raise ConfigError(what, fix="Is it started, and can this host reach it?")
        time.sleep(0.05)


def _is_gone(handle: int, wait_ms: int) -> bool:
    """Tells if the other end is gone. Bytes that it sent before are still to be read."""
    poll = select.poll()
    poll.register(handle, _GONE)
    return any(events & _GONE for _, events in poll.poll(wait_ms))


def _limit(own: socket.socket, seconds: float) -> None:
    for name in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        own.setsockopt(
            socket.SOL_SOCKET, name, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        )


def _family(address: Address) -> socket.AddressFamily:
    return socket.AF_UNIX if isinstance(address, str) else socket.AF_INET


def _words(address: Address) -> str:
    return address if isinstance(address, str) else f"{address[0]}:{address[1]}"


def _proven(
    own: socket.socket, key: bytes, peer: str, is_door: bool, within_s: float | None = None
) -> Channel:
    """Once both ends have shown that they know the key, within a few seconds. The channel has a
    socket of its own."""
    own.setblocking(True)
    if own.family != socket.AF_UNIX:
        # small messages do not wait for an acknowledgement
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # a host that lost its power or its network says nothing
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                own.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection = Connection(os.dup(own.fileno()))
    try:
        with _cut_after(own, _HANDSHAKE_S if within_s is None else within_s):
            for prove in (
                (deliver_challenge, answer_challenge)
                if is_door
                else (answer_challenge, deliver_challenge)
            ):
                prove(connection, key)
    except BaseException:
        connection.close()
        raise
    return Channel(connection, peer)


@contextmanager
def _cut_after(own: socket.socket, seconds: float) -> Iterator[None]:
    """In all, however little by little the other end sends."""

    def cut() -> None:
        with suppress(OSError):
            own.shutdown(socket.SHUT_RDWR)

    timer = Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
