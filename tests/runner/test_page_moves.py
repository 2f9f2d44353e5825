"""Page moves of the CPU, with other engines that are only pretended."""

import threading

import numpy as np

from tests.helpers import LONG_S
from tidemill.kv.tiers import PageMove, Tier
from tidemill.runner.page_moves import CpuMover, Outside


class SlowExporter:
    """Does not write before `may_write` is set."""

    def __init__(self):
        self.may_write, self.written = threading.Event(), []

    def write(self, slot, key, page):
        assert self.may_write.wait(LONG_S)
        self.written.append(page.copy())
        return 1

    def is_known(self, number):
        return True

    def close(self):
        pass


class OtherEngine:
    """Its pages hold sevens."""

    def fetch(self, place, key, page):
        page[:] = 7

    def close(self):
        pass


def test_a_load_into_a_page_that_is_being_exported_waits_for_the_export_only():
    pages, exporter = np.full((8, 64), 3, np.uint8), SlowExporter()
    mover = CpuMover(pages, 0, Outside(None, exporter, OtherEngine()))
    mover.store(
        [PageMove(0, Tier.EXPORT, False, 2, 0, b"a"), PageMove(1, Tier.EXPORT, False, 3, 1, b"b")],
        set(),
    )
    mover.load([PageMove(2, Tier.PEER, True, 5, 3, b"c")])
    exporter.may_write.set()
    done = set()
    while len(done) < 3:
        mover.wait(0.1)
        done.update(moved.number for moved in mover.done() if not moved.error)
    assert [int(page.max()) for page in exporter.written] == [3, 3]
    assert (pages[3] == 7).all()
    mover.close()
