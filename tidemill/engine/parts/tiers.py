"""PageMoves: pages that move between the device and the tiers behind it, while steps are computed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

from tidemill.engine.moments import Engine, EngineComponents, Part, Step
from tidemill.engine.parts.adapters import AdapterStore
from tidemill.errors import TidemillError, WorkerLost
from tidemill.types import events
from tidemill.types.wire import Expect, ToEngine

if TYPE_CHECKING:
    from tidemill.runner.page_moves import PageMover

_WAIT_S = 0.002  # for page moves, before messages are looked at again
SAVE_S = 5.0  # at most


class PageMoves(Part):
    def __init__(self, mover: PageMover) -> None:
        self._mover = mover
        self._last_s = 0.0  # when the last step was collected

    @classmethod
    def of(cls, engine: Engine, components: EngineComponents) -> PageMoves | None:
        return None if engine.runner.mover is None else cls(engine.runner.mover)

    def message(self, message: ToEngine) -> None:
        """Another engine computes this prompt for this one."""
        if isinstance(message, Expect):
            with suppress(TidemillError):  # an adapter that is not here: its request says so
                salt = self.engine.part(AdapterStore).salt(message)
                self.engine.scheduler.kv.offload.expect(message.prompt_ids, salt, message.segments)

    def alarms(self) -> Sequence[int]:
        return () if self._mover.alarm is None else (self._mover.alarm,)

    def before_plan(self) -> tuple[()]:
        self.take()
        return ()

    def take(self) -> None:
        """Tells the scheduler which moves are over."""
        if done := self._mover.done():
            self.engine.scheduler.table.moved(done)
        if (learned := self._mover.learned()) is not None:
            self.engine.scheduler.kv.offload.learn(learned.slots, learned.erased)
            for why in learned.problems:
                self.engine.emit(events.TierNotUsed(self.engine.clock.now(), "peer", why))

    def wait(self) -> None:
        self._mover.wait(_WAIT_S)

    def idle(self) -> None:
        if self.engine.scheduler.kv.offload.is_moving:
            self.wait()

    def done(self, step: Step) -> None:
        """The time of steps says when it is better to compute pages again."""
        tiers = self.engine.scheduler.kv.offload.tiers
        if tiers is not None:
            tiers.costs.computed(
                step.plan.num_tokens, step.done_s - max(step.started_s, self._last_s)
            )
        self._last_s = step.done_s

    def step_failed(self) -> None:
        self._mover.drain()
        self.take()

    def close(self) -> None:
        """Saves on disk what is cached, if there is one behind it."""
        with suppress(WorkerLost):  # then nothing can be saved
            self.engine.check()
            if not self.engine.in_flight:
                # what is pinned is saved, too
                self.engine.scheduler.retention.clear("the engine ends")
                save(self.engine, self._mover)
        self._mover.close()
        self.engine.runner.mover = None


def save(engine: Engine, mover: PageMover, seconds: float = SAVE_S) -> None:
    """The cached pages go to disk, the latest first, as far as the time allows."""
    scheduler, tiers = engine.scheduler, engine.scheduler.kv.offload.tiers
    if tiers is None or not tiers.disk.num:
        return
    until, pages = time.monotonic() + seconds, scheduler.kv.cached_pages()
    while time.monotonic() < until:
        scheduler.table.moved(mover.done())
        some = list(islice(pages, max(0, tiers.host.num // 4 - tiers.num_moves)))
        for page in some:
            scheduler.kv.save(page)
        plan = scheduler.plan_moves()
        if plan is not None:
            engine.runner.change_pages(plan)
        elif not tiers.is_busy and not some:
            break
        mover.wait(0.01)
