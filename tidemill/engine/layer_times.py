"""Measures how long the layers of a model take, in the ranks of a pipeline that computes steps of
prefill and of decode."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from datetime import UTC, datetime

from tidemill.config import EngineOptions
from tidemill.distributed.stages import FORMAT, LayerTimes, MeasuredWith, Times
from tidemill.engine.core import EngineCore
from tidemill.errors import TidemillError
from tidemill.machine import Machine
from tidemill.runner.layer_timer import EMBEDDING, HEAD
from tidemill.runner.worker_group import WorkerGroup
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit
from tidemill.version import __version__

_PROMPT_LEN, _BATCH, _SHORT_LEN = 512, 64, 16
_TIMES = 7  # that each is measured; the median counts
_STEPS = 2  # of decode, each time


class _Measurement:
    def __init__(self, core: EngineCore, progress: Callable[[float], None]) -> None:
        assert isinstance(core.runner, WorkerGroup)
        config = core.config
        self._core, self._group, self._progress = core, core.runner, progress
        self._draw, self._number, self._done = random.Random(0), 0, 0
        self.prompt_len = min(_PROMPT_LEN, config.max_context - 1, config.num_kv_tokens // 2)
        # steps until all decode
        self._num_first = -(-_BATCH * _SHORT_LEN // config.token_budget) + 2
        num_tokens = _SHORT_LEN + self._num_first + (_TIMES + 1) * _STEPS + 1
        self.batch = max(
            1, min(_BATCH, config.max_requests, config.num_kv_tokens // 2 // num_tokens)
        )

    def prefill(self) -> list[dict[int, float]]:
        return [self._tell(self._prompt()) for _ in range(_TIMES + 1)][1:]  # the first is slower

    def _prompt(self) -> dict[int, float]:
        self._submit(self.prompt_len, 1)
        self._take()
        while self._core.has_work:
            self._step()
        return self._take()

    def decode(self) -> list[dict[int, float]]:
        num_output = self._num_first + (_TIMES + 1) * _STEPS + 1
        for _ in range(self.batch):
            self._submit(_SHORT_LEN, num_output)
        for _ in range(self._num_first):
            self._step()
        taken = [self._tell(self._steps()) for _ in range(_TIMES + 1)][1:]
        while self._core.has_work:
            self._step()
        return [{unit: spent / _STEPS for unit, spent in spent_of.items()} for spent_of in taken]

    def _steps(self) -> dict[int, float]:
        self._take()
        for _ in range(_STEPS):
            self._step()
        return self._take()

    def _submit(self, num_tokens: int, num_output: int) -> None:
        vocab = self._core.model_config.vocab_size
        prompt = [self._draw.randrange(min(100, vocab // 2), vocab) for _ in range(num_tokens)]
        params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        self._core.submit(Submit(f"measure-{self._number}", prompt, params))
        self._number += 1

    def _step(self) -> None:
        _, failed = self._core.step()
        if failed:
            raise TidemillError(failed[0].message, fix=failed[0].fix)

    def _take(self) -> dict[int, float]:
        return self._group.take_times()

    def _tell(self, taken: dict[int, float]) -> dict[int, float]:
        self._done += 1
        self._progress(self._done / (2 * (_TIMES + 1)))
        return taken


def measure_layers(
    core: EngineCore,
    options: EngineOptions,
    machine: Machine,
    progress: Callable[[float], None] = lambda part: None,
) -> LayerTimes:
    """`core`: of ranks on CPUs, started with these options. Layers of one kind are taken to need
    the same time."""
    measurement, model = _Measurement(core, progress), core.model_config
    prefill, decode = measurement.prefill(), measurement.decode()
    kinds = [(spec, model.moe(layer)) for layer, spec in enumerate(model.layers)]

    def times(*units: int) -> Times:
        return Times(
            *(
                statistics.median(times_of.get(unit, 0.0) for times_of in taken for unit in units)
                for taken in (prefill, decode)
            )
        )

    of_kind = {
        kind: times(*(i for i, other in enumerate(kinds) if other == kind))
        for kind in dict.fromkeys(kinds)
    }
    return LayerTimes(
        FORMAT,
        __version__,
        datetime.now(UTC).strftime("%Y-%m-%d"),
        MeasuredWith.of(options, model, machine),
        measurement.prompt_len,
        measurement.batch,
        times(EMBEDDING),
        tuple(of_kind[kind] for kind in kinds),
        times(HEAD),
    )
