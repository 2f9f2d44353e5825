"""The orders in which requests are computed again: each alone, or many together as fast as they go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tidemill.record.reader import RecordedRequest
from tidemill.replay.engine import ReplayEngine
from tidemill.replay.outcome import Running

_AT_ONCE = 64  # requests that are queued or run, together


def alone(engine: ReplayEngine, requests: Sequence[RecordedRequest]) -> Iterator[Running]:
    """Each request in an engine that has nothing else to do, and finds nothing of others in its
    cache."""
    for request in requests:
        name = f"replay-{request.number}"
        running = engine.submit(request, name, salt=name)
        while engine.core.has(name):
            engine.step()
        del engine.running[name]
        yield running


def together(engine: ReplayEngine, requests: Sequence[RecordedRequest]) -> Iterator[Running]:
    """Sends as many at once as the engine computes, in the recorded order, with the prefixes that
    they share."""
    left = list(reversed(requests))
    while left or engine.running:
        while left and len(engine.running) < _AT_ONCE:
            request = left.pop()
            engine.submit(request, f"replay-{request.number}")
        if engine.core.has_work:
            engine.step()
        for name in [name for name in engine.running if not engine.core.has(name)]:
            yield engine.running.pop(name)


ORDERS: dict[str, Callable[[ReplayEngine, Sequence[RecordedRequest]], Iterator[Running]]] = {
    "alone": alone,
    "together": together,
}
