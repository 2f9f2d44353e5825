"""Progress: how much of a prompt is computed, told to those who read its output and asked for it."""

from __future__ import annotations

from collections.abc import Iterable

from tidemill.engine.pending import Pending
from tidemill.types import events
from tidemill.types.events import Event
from tidemill.types.wire import Delta, PromptProgress


class Progress:
    """The progress of requests, from `tell` to their first token."""

    def __init__(self) -> None:
        self._telling: dict[str, Pending] = {}
        # by step, while there are such requests
        self._planned: dict[int, tuple[tuple[str, int], ...]] = {}

    def tell(self, pending: Pending) -> None:
        self._telling[pending.request.request_id] = pending

    def forget(self, request_id: str) -> None:
        self._telling.pop(request_id, None)

    def take(self, batch: Iterable[Event]) -> None:
        for event in batch if self._telling else ():
            if isinstance(event, events.Admitted):
                # of its first sample
                if (pending := self._telling.get(event.request_id.removesuffix(":0"))) is not None:
                    _put(pending, event.num_cached, event.num_cached)
            elif isinstance(event, events.StepPlanned):
                self._planned[event.step] = event.tokens_of
            elif isinstance(event, events.StepDone):
                for name, num in self._planned.pop(event.step, ()):
                    if (
                        pending := self._telling.get(name.removesuffix(":0"))
                    ) is not None and pending.progress is not None:
                        _put(pending, pending.progress.num_cached, pending.num_prefilled + num)
        if not self._telling:
            self._planned.clear()


def _put(pending: Pending, num_cached: int, num_done: int) -> None:
    num_prompt = len(pending.request.prompt_ids)
    pending.num_prefilled = min(num_done, num_prompt)
    if pending.progress is None or pending.num_prefilled > pending.progress.num_done:
        pending.progress = progress = PromptProgress(num_prompt, num_cached, pending.num_prefilled)
        pending.inbox.put(
            Delta(pending.request.request_id, 0, [], num_cached=num_cached, progress=progress)
        )
