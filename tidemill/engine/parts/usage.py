"""UsageCounts: what layers count while they compute: tokens of experts, reads of streamed weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tidemill.engine.moments import Engine, EngineComponents, Part, Step
from tidemill.types import events

_EVERY = 64  # steps between two counts


class UsageCounts(Part):
    """Tells the counts every so many steps, and when nothing is left to do."""

    def __init__(
        self,
        expert_counts: Callable[[], Mapping[int, list[int]]],
        weight_reads: Callable[[], tuple[int, float, int, int, int] | None],
    ) -> None:
        self._take_expert_counts, self._take_weight_reads = expert_counts, weight_reads
        self._num_steps = 0  # since the last count

    @classmethod
    def of(cls, engine: Engine, components: EngineComponents) -> UsageCounts | None:
        components.expert_counts()  # what starting computed
        streams_weights = components.weight_reads() is not None
        if not engine.model_config.experts and not streams_weights:
            return None
        return cls(components.expert_counts, components.weight_reads)

    def done(self, step: Step) -> None:
        self._num_steps += 1
        if self._num_steps < _EVERY and self.engine.has_work:
            return
        counts = self._take_expert_counts()
        if any(map(any, counts.values())):
            tokens_of = tuple((layer, tuple(of_layer)) for layer, of_layer in counts.items())
            self.engine.emit(events.ExpertsUsed(step.done_s, self._num_steps, tokens_of))
        if (reads := self._take_weight_reads()) is not None and reads[0]:
            self.engine.emit(events.WeightsStreamed(step.done_s, *reads))
        self._num_steps = 0
