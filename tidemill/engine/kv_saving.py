"""The part of the KV cache that goes to disk when an engine ends."""

from __future__ import annotations

import time
from itertools import islice

from tidemill.runner.base import Runner
from tidemill.sched.scheduler import Scheduler

SAVE_S = 5.0  # at most


def save(scheduler: Scheduler, runner: Runner, seconds: float = SAVE_S) -> None:
    """Before an engine ends: what is cached goes to disk, the latest first, as far as the time allows."""
    mover, tiers = runner.mover, scheduler.kv.tiers
    if mover is None or tiers is None or not tiers.disk.num:
        return
    until, pages = time.monotonic() + seconds, scheduler.kv.cached_pages()
    while time.monotonic() < until:
        scheduler.moved(mover.done())
        some = list(islice(pages, max(0, tiers.host.num // 4 - tiers.num_moves)))
        for page in some:
            scheduler.kv.save(page)
        plan = scheduler.plan_moves()
        if plan is not None:
            runner.change_pages(plan)
        elif not tiers.is_busy and not some:
            break
        mover.wait(0.01)
