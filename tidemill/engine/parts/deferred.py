"""DeferredFinishes: ends of requests whose pages other engines need are told once the pages are
where those find them."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tidemill.engine.moments import Engine, EngineComponents, Part, Step
from tidemill.engine.parts.tiers import PageMoves
from tidemill.sched.request import HANDED_OVER, Request
from tidemill.types.wire import Delta

_EXPORT_S = 0.05  # waited for, at most


class _Finish(NamedTuple):
    delta: Delta
    keys: set[bytes]  # its contents that are on their way
    until_s: float


class DeferredFinishes(Part):
    def __init__(self) -> None:
        self._kept: list[_Finish] = []

    @classmethod
    def of(cls, engine: Engine, components: EngineComponents) -> DeferredFinishes | None:
        return cls() if engine.config.export_slots else None

    def has_work(self) -> bool:
        return bool(self._kept)

    def before_plan(self) -> list[Delta]:
        """Ends whose pages are exported by now. That is waited for, for a moment: the next step may
        take long."""
        if not self._kept:
            return []
        scheduler, moves = self.engine.scheduler, self.engine.part(PageMoves)
        while True:
            if (plan := scheduler.plan_moves()) is not None:
                self.engine.runner.change_pages(plan)
            exporting, now = scheduler.kv.offload.exporting, self.engine.clock.now()
            over = [
                each for each in self._kept if exporting.isdisjoint(each.keys) or now > each.until_s
            ]
            if len(over) == len(self._kept):
                break
            moves.wait()
            moves.take()
        self._kept = [each for each in self._kept if each not in over]
        return [each.delta for each in over]

    def deltas(self, step: Step) -> None:
        """Keeps the ends back; the token of a request that is handed over is told at once."""
        ended = [delta for delta in step.deltas if delta.finish_reason]
        if not ended:
            return
        told = [delta for delta in step.deltas if not delta.finish_reason]
        requests = {
            item.request.request_id: item.request for item in step.progress if item.finish_reason
        }
        until_s = self.engine.clock.now() + _EXPORT_S
        for delta in ended:
            name = f"{delta.request_id}:{delta.index}"
            keys = self._keys(requests.get(delta.request_id) or requests.get(name))
            if delta.finish_reason == HANDED_OVER:
                told.append(msgspec.structs.replace(delta, finish_reason=None, timings=None))
                delta = msgspec.structs.replace(
                    delta, token_ids=[], logprobs=None, prompt_pieces=None
                )
            self._kept.append(_Finish(delta, keys, until_s))
        step.deltas = told

    def cut_short(self, request_id: str, index: int | None, is_broken: bool) -> None:
        """Its ends are not told. Another request may take its id."""
        self._kept = [
            each
            for each in self._kept
            if each.delta.request_id != request_id or index not in (None, each.delta.index)
        ]

    def _keys(self, request: Request | None) -> set[bytes]:
        """Contents of its pages that are on their way. Which tokens of beams were kept is not
        known: all that are."""
        kv = self.engine.scheduler.kv
        if request is None:
            return kv.offload.exporting
        return kv.offload.exporting_of(request.tokens, request.spec.salt, request.spec.segments)
