"""The choice of running requests that a queued one may preempt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tidemill.sched.request import Request


def lower(running: Sequence[Request], request: Request) -> list[Request]:
    """Those of strictly lower priority, by rank: none, if the last does not yield."""
    if not running or not running[-1].yields_to(request):
        return []
    return [each for each in running if each.yields_to(request)]


def beyond_their_part(
    running: Sequence[Request], request: Request, num_tenants: int, num_rows: int
) -> list[Request]:
    """The requests beyond its part of the slots, of the tenant that runs most (the part is the same
    for all tenants with requests), if the request's tenant has not got its own."""
    if num_tenants < 2:
        return []
    part = max(1, num_rows // num_tenants)
    num_running = Counter(
        each.account for each in running if each.in_background is request.in_background
    )
    most = max(num_running, key=lambda account: num_running[account], default=request.account)
    if num_running[request.account] >= part or num_running[most] <= part:
        return []
    beyond = [each for each in running if each.account is most][part:]
    # One that would come before the request in the queue would only start again.
    return [each for each in beyond if each.priority >= request.priority and not each.is_aged]
