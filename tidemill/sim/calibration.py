"""Measures what steps cost: an engine in this process gets loads that cover batches, contexts, prompts and mixtures of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from tidemill.engine.core import EngineCore
from tidemill.errors import TidemillError
from tidemill.runner.base import StepResult
from tidemill.sampling import SamplingParams
from tidemill.sched.plan import StepPlan
from tidemill.sim.cost import Shapes, StepShape
from tidemill.sim.fit import Sample, fit
from tidemill.sim.profile import FORMAT, EngineShape, FitErrors, ModelShape, Profile
from tidemill.version import __version__
from tidemill.wire import Submit

_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_CONTEXTS = (32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_PROMPTS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048)
_DECODE_STEPS = 10
_SIZED = 4  # prompts of a size
_LEAST_LOADS = 16  # of those in any order, that are measured even if it takes longer


class StepTimer:
    """Stands before a runner and notes when its steps end, by a clock."""

    def __init__(self, runner: Any, shapes: Shapes, now: Callable[[], float] = time.perf_counter) -> None:
        self._runner, self._now, self._shape_of = runner, now, shapes.of
        self._shapes: list[tuple[StepShape, float]] = []  # launched and not collected: when the host began with it
        self._begin_s = self._now()  # of the planning of the next step
        self._end_s: float | None = None  # of the step before, if the next follows at once
        self.samples: list[Sample] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan) -> Any:
        self._shapes.append((self._shape_of(plan), self._begin_s))
        return self._runner.launch(plan)

    def collect(self, launched: Any) -> StepResult:
        result = self._runner.collect(launched)
        now, (shape, begin_s) = self._now(), self._shapes.pop(0)
        since = begin_s if self._end_s is None else self._end_s
        self.samples.append(Sample(shape, now - since, follows=self._end_s is not None))
        self._end_s = now
        return result

    def begin_step(self, was_idle: bool) -> None:
        self._begin_s = self._now()
        if was_idle:
            self._end_s = None


@contextmanager
def timed(core: EngineCore, now: Callable[[], float] = time.perf_counter) -> Iterator[StepTimer]:
    """Its steps are measured. Only while it is driven by `drive`."""
    shapes = Shapes(core.config.page_size, getattr(core.runner, "shared_unit", 0))
    timer, runner = StepTimer(core.runner, shapes, now), core.runner
    core.runner = timer  # type: ignore[assignment]
    try:
        yield timer
    finally:
        core.runner = runner


def drive(core: EngineCore, timer: StepTimer, arrivals: Sequence[tuple[int, list[int], int]]) -> None:
    """`arrivals`: each as the step before which it comes, its prompt and the number of its output tokens."""
    step, at, was_idle = 0, 0, True
    while at < len(arrivals) or core.has_work:
        while at < len(arrivals) and (arrivals[at][0] <= step or not core.has_work):
            _, prompt, num_output = arrivals[at]
            params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
            core.submit(Submit(f"calibrate-{at}", prompt, params))
            at += 1
        timer.begin_step(was_idle)
        _, failed = core.step()
        if failed:
            raise TidemillError(failed[0].message, fix=failed[0].fix)
        step += 1
        was_idle = not core.has_work


class Calibration:
    """Steps of an engine, measured for about so many seconds. `progress`: gets the part that is done. `now`: the clock; on a
    machine that others use as well, a CPU engine of one thread is measured better by its own CPU time."""

    def __init__(
        self,
        core: EngineCore,
        seconds: float = 60.0,
        seed: int = 0,
        progress: Callable[[float], None] | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._core, self._seconds, self._progress, self._now = core, seconds, progress or (lambda part: None), now
        self._draw = random.Random(seed)
        self._prompts: dict[int, list[int]] = {}  # by number: the same text again, so that a longer one has its begin cached
        self.samples: list[Sample] = []

    def run(self) -> list[Sample]:
        """Returns all samples so far. What is cached is forgotten before and after."""
        config = self._core.config
        begin = self._now()
        self._core.scheduler.kv.clear_prefixes()
        self._measure([(0, self._prompt(0, min(config.token_budget, config.max_context - 8)), 4)], keep=False)
        rate = self._rate()
        most = int(rate * self._seconds / 10)  # prompt tokens of one load
        loads = [*self._decode_loads(most), *self._alone_loads(most), *self._mixed_loads(most), *self._sized_loads()]
        if getattr(self._core.runner, "shared_unit", 0):
            loads += self._shared_loads(most)
        shuffled = sorted(range(len(loads)), key=lambda _: self._draw.random())
        for number, at in enumerate(shuffled):
            if self._now() - begin > 1.5 * self._seconds and number >= _LEAST_LOADS:
                break
            self._measure(loads[at])
            self._progress((number + 1) / len(loads))
        self._core.scheduler.kv.clear_prefixes()
        return self.samples

    def _rate(self) -> float:
        """Prompt tokens a second, roughly."""
        config = self._core.config
        num = min(config.token_budget, config.max_context - 8)
        begin = self._now()
        self._measure([(0, self._fresh(num), 1)], keep=False)
        return num / (self._now() - begin)

    def _measure(self, arrivals: Sequence[tuple[int, list[int], int]], keep: bool = True) -> None:
        with timed(self._core, self._now) as timer:
            drive(self._core, timer, arrivals)
        if keep:
            self.samples += timer.samples

    # ---- what is measured

    def _decode_loads(self, most: int) -> Iterator[list[tuple[int, list[int], int]]]:
        """Batches that decode, at contexts of about the same length."""
        config = self._core.config
        for context in _CONTEXTS:
            for batch in dict.fromkeys([*(b for b in _BATCHES if b < config.max_requests), config.max_requests]):
                fits = context + 2 * _DECODE_STEPS <= config.max_context and batch * (context + 32) < 0.8 * config.num_kv_tokens
                if fits and batch * context <= most:
                    yield [(0, self._prompt(i, context), _DECODE_STEPS) for i in range(batch)]

    def _alone_loads(self, most: int) -> Iterator[list[tuple[int, list[int], int]]]:
        """A prompt that comes while nothing else is computed, as the first of several; and several at once."""
        longest = min(self._core.config.max_context - 8, most)
        for length in (*_PROMPTS, 4096, 8192, 16384, 32768):
            if length <= longest:
                yield [(0, self._fresh(length), 3)]
                yield [(0, self._fresh(length), 3) for _ in range(max(2, min(4, most // length // 4)))]

    def _mixed_loads(self, most: int) -> Iterator[list[tuple[int, list[int], int]]]:
        """Prompts of all lengths that come while a batch decodes."""
        config = self._core.config
        longest = min(2 * config.token_budget, config.max_context // 2)
        for batch in (1, 4, 16, 64, 128, 192):
            for context in (32, 512, 2048):
                room = context + 96 < config.max_context and batch * (context + 128) < 0.6 * config.num_kv_tokens
                if batch >= config.max_requests or batch * context > most or not room:
                    continue
                load = [(0, self._prompt(i, context), 40) for i in range(batch)]
                left, step = most // 2, 3 + batch * context // config.token_budget
                while left > 0 and len(load) < batch + 16:
                    length = min(int(2 ** self._draw.uniform(4, longest.bit_length())), longest, max(left, 16))
                    load.append((step, self._fresh(length), 2))
                    step += self._draw.randint(1, 3)
                    left -= length
                yield load

    def _sized_loads(self) -> Iterator[list[tuple[int, list[int], int]]]:
        """Steps of every size that they are padded to: a few sequences decode, and one prompt after the other fills the rest."""
        _, sizes = getattr(self._core.runner, "graph_sizes", ((), ()))
        for size in sizes:
            for batch in (2, 24):
                if size > batch + 8:
                    load = [(0, self._prompt(i, 32), 3 * _SIZED + 6) for i in range(batch)]
                    length = size - batch - 4  # the prompt before may decode meanwhile
                    yield load + [(4 + 3 * i, self._fresh(length), 2) for i in range(_SIZED)]

    def _shared_loads(self, most: int) -> Iterator[list[tuple[int, list[int], int]]]:
        """Batches that decode after a common prefix."""
        config = self._core.config
        for shared in (1024, 2048, 8192):
            prefix = self._fresh(shared)
            for batch in (2, 8, 32, 64, 128):
                if batch <= config.max_requests and shared + 256 < config.max_context and shared + 64 * batch <= most:
                    first = [(0, prefix + self._fresh(64), 2 * _DECODE_STEPS)]
                    yield first + [(4 + shared // config.token_budget, prefix + self._fresh(64), 16) for _ in range(batch - 1)]

    def _prompt(self, number: int, length: int) -> list[int]:
        known = self._prompts.setdefault(number, [])
        known += self._fresh(length - len(known))
        return known[:length]

    def _fresh(self, length: int) -> list[int]:
        vocab = self._core.model_config.vocab_size
        low = min(100, vocab // 2)
        return [self._draw.randrange(low, vocab) for _ in range(max(length, 0))]


def profile_of(core: EngineCore, samples: Sequence[Sample], name: str, machine: str) -> Profile:
    """The fit, with what it is about."""
    config, runner = core.config, core.runner
    decode_sizes, mixed_sizes = getattr(runner, "graph_sizes", ((), ()))
    cost, errors = fit(samples, decode_sizes, mixed_sizes, runner.steps_ahead, getattr(runner, "shared_unit", 0))
    engine = EngineShape(
        config.device,
        config.dtype,
        config.scheme,
        config.kv_dtype,
        config.page_size,
        config.num_pages,
        config.max_context,
        config.max_requests,
        config.token_budget,
        runner.steps_ahead,
        config.threads,
        config.fast_math,
    )
    shape = ModelShape.of(name, core.model_config, config.weight_bytes, config.kv_dtype)
    told = FitErrors(errors.num_samples, errors.median, errors.p90, errors.total)
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    return Profile(FORMAT, __version__, date, machine, shape, engine, cost, told)
