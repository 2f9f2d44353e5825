"""Ends of transports that are closed while they are used."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from tests.helpers import LONG_S
from tidemill.distributed.transfer import nixl
from tidemill.distributed.transfer.base import TransferError
from tidemill.distributed.transfer.shm import SharedSource


class Agent:
    """Of NIXL, as far as a reader uses it. A transfer lasts until `may_end` is set."""

    def __init__(self):
        self.began, self.may_end, self.calls = threading.Event(), threading.Event(), []

    def transfer(self, handle):
        self.began.set()
        assert self.may_end.wait(LONG_S)
        return "DONE"

    def release_xfer_handle(self, handle):
        self.calls.append("released")

    def deregister_memory(self, registered):
        self.calls.append("deregistered")

    def __getattr__(self, name):
        return lambda *args: name


class FakeChannel(SimpleNamespace):
    def __init__(self):
        super().__init__(peer="the other", abort=lambda: None, close=lambda: None)


def test_memory_that_is_read_into_stays_registered(monkeypatch):
    agent, page = Agent(), np.zeros(64, np.uint8)
    monkeypatch.setattr(nixl, "_agent", lambda name: agent)
    reader = nixl.NixlReader(FakeChannel(), 64, bytes(8))
    reading = threading.Thread(target=reader.read, args=(0, b"k", page))
    reading.start()
    assert agent.began.wait(LONG_S)
    closing = threading.Thread(target=reader.close)
    closing.start()
    closing.join(0.05)
    assert not agent.calls
    agent.may_end.set()
    for thread in (reading, closing):
        thread.join(LONG_S)
    assert agent.calls == ["released", "deregistered"]
    with pytest.raises(TransferError, match="gone"):
        reader.read(0, b"k", page)


def test_memory_of_a_closed_source_is_given_to_nobody():
    source, channel = SharedSource(2, 64), FakeChannel()
    channel.receive = lambda num: source.close()  # while the reader is waited for
    source.serve(channel)
    source.close()
