"""Measures what steps cost: an engine in this process gets loads that cover batches, contexts,
prompts and mixtures of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import msgspec

from tidemill.config.cache import bytes_of_page
from tidemill.engine.core import EngineCore
from tidemill.errors import ConfigError, TidemillError
from tidemill.planning.cost import Shapes, StepShape
from tidemill.planning.fit import Sample, fit
from tidemill.planning.profile import FORMAT, EngineShape, FitErrors, ModelShape, Profile
from tidemill.runner.base import StepResult
from tidemill.sched.plan import StepPlan
from tidemill.types.cache_layout import Group
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit
from tidemill.version import __version__

# Of few tokens every number: on a CPU they are computed in tiles of rows, and a step's time is a
# staircase.
_BATCHES = (*range(1, 9), 10, 12, 14, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_CONTEXTS = (32, 128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_PROMPTS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 1792, 2048)
_SHORT_PROMPTS = (2, 3, 4, 5, 6, 8, 10, 12)  # where steps are not padded to larger sizes
_EACH = 4  # steps that a batch of a size decodes
_SIZED = 3  # prompts of a size
_LEAST_TOKENS = 256
_LEAST_LOADS = 16  # of those in any order, that are measured even if it takes longer

# of requests: the step before which it comes, its prompt, its output tokens
_Load = list[tuple[int, list[int], int]]


class StepTimer:
    """Stands before a runner and notes when its steps end, by a clock."""

    def __init__(
        self, runner: Any, shapes: Shapes, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._runner, self.now, self._shape_of = runner, now, shapes.of
        # in flight: when the host began, how long it took
        self._shapes: list[tuple[StepShape, float, float, float]] = []
        self._submit_s = 0.0  # what came before the next step
        self._begin_s = self.now()  # of the planning of the next step
        self._end_s: float | None = None  # of the step before, if the next follows at once
        self.samples: list[Sample] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan) -> Any:
        shape = self._shape_of(plan)
        launched = self._runner.launch(plan)
        self._shapes.append((shape, self._begin_s, self.now() - self._begin_s, self._submit_s))
        self._submit_s = 0.0
        return launched

    def collect(self, launched: Any) -> StepResult:
        result = self._runner.collect(launched)
        now, (shape, begin_s, host_s, submit_s) = self.now(), self._shapes.pop(0)
        since = begin_s if self._end_s is None else self._end_s
        self.samples.append(Sample(shape, now - since, self._end_s is not None, host_s, submit_s))
        self._end_s = now
        return result

    def begin_step(self, was_idle: bool, submit_s: float = 0.0) -> None:
        """`submit_s`: how long taking the request took that ended the idleness."""
        self._begin_s, self._submit_s = self.now(), submit_s
        if was_idle:
            self._end_s = None


def shared_unit(core: EngineCore) -> int:
    """Tokens of context that cost less if several sequences see the same ones: on a GPU they are
    read once, on a CPU they are in a cache after the first."""
    return getattr(
        core.runner, "shared_unit", core.config.page_size if core.config.device == "cpu" else 0
    )


@contextmanager
def timed(core: EngineCore, now: Callable[[], float] = time.perf_counter) -> Iterator[StepTimer]:
    """Its steps are measured. Only while it is driven by `drive`."""
    shapes = Shapes(core.config.page_size, shared_unit(core), core.config.device == "cpu")
    timer, runner = StepTimer(core.runner, shapes, now), core.runner
    core.runner = timer  # type: ignore[assignment]
    try:
        yield timer
    finally:
        core.runner = runner


def drive(
    core: EngineCore, timer: StepTimer, arrivals: Sequence[tuple[int, list[int], int]]
) -> None:
    """`arrivals`: each as the step before which it comes, its prompt and the number of its output
    tokens."""
    step, at, was_idle, now = 0, 0, True, timer.now
    while at < len(arrivals) or core.has_work:
        submit_s = 0.0
        while at < len(arrivals) and (arrivals[at][0] <= step or not core.has_work):
            _, prompt, num_output = arrivals[at]
            begin_s = now()
            params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
            core.submit(Submit(f"calibrate-{at}", prompt, params))
            submit_s = submit_s or now() - begin_s
            at += 1
        timer.begin_step(was_idle, submit_s)
        _, failed = core.step()
        if failed:
            raise TidemillError(failed[0].message, fix=failed[0].fix)
        step += 1
        was_idle = not core.has_work


class Calibration:
    """Steps of an engine, measured for about so many seconds. `progress`: gets the part that is
    done. `now`: the clock; on a machine that others use as well, a CPU engine of one thread is
    measured better by its own CPU time."""

    def __init__(
        self,
        core: EngineCore,
        seconds: float = 60.0,
        seed: int = 0,
        progress: Callable[[float], None] | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not core.model_config.token_layers:
            what = "The model keeps states of constant size and no KV cache, and such engines are not simulated."
            raise ConfigError(what, fix="Calibrate a model with attention.", param="model")
        self._core, self._seconds, self._progress, self._now = (
            core,
            seconds,
            progress or (lambda part: None),
            now,
        )
        self._draw = random.Random(seed)
        # by number: the same text again, so that a longer one has its begin cached
        self._prompts: dict[int, list[int]] = {}
        self._loads: list[_Load] = []  # made in the first part of a run
        self.samples: list[Sample] = []

    def run(self, part: int = 0, num_parts: int = 1) -> list[Sample]:
        """Returns all samples so far. What is cached is forgotten before and after. A run can be
        made in parts, the first of them first, with other work in between: a machine that others
        use is not always as fast."""
        config = self._core.config
        begin = self._now()
        self._core.scheduler.kv.clear_prefixes()
        if part == 0:
            self._measure(
                [(0, self._prompt(0, min(config.token_budget, config.max_context - 8)), 4)],
                keep=False,
            )
            # prompt tokens of one load
            most = max(int(self._rate() * self._seconds / 10), _LEAST_TOKENS)
            kinds = [
                self._decode_loads,
                self._alone_loads,
                self._mixed_loads,
                self._sized_loads,
                self._shared_loads,
            ]
            self._loads = self._in_turn([kind(most) for kind in kinds])
        loads = self._loads[part::num_parts]
        for number, load in enumerate(loads):
            if (
                self._now() - begin > 1.5 * self._seconds / num_parts
                and number * num_parts >= _LEAST_LOADS
            ):
                break
            self._measure(load)
            self._progress((part + (number + 1) / len(loads)) / num_parts)
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

    def _in_turn(self, kinds: Sequence[Iterator[_Load]]) -> list[_Load]:
        """Each kind in any order, and evenly among the others: whatever the time ends before is
        missing of all of them."""
        placed = []
        for loads in map(list, kinds):
            self._draw.shuffle(loads)
            placed += [((i + 0.5) / len(loads), load) for i, load in enumerate(loads)]
        return [load for _, load in sorted(placed, key=lambda pair: pair[0])]

    def _decode_loads(self, most: int) -> Iterator[_Load]:
        """Batches that decode, at contexts of about the same length, and become smaller: some steps
        of every size."""
        config = self._core.config
        graph_sizes, _ = getattr(self._core.runner, "graph_sizes", ((), ()))
        sizes = sorted(
            {
                1,
                *(size for size in graph_sizes or _BATCHES if size < config.max_requests),
                config.max_requests,
            }
        )
        for context in _CONTEXTS:
            own = [size for size in sizes if size * context <= most]
            while (
                own
                and own[-1] * (context + self._num_output(0, context, own))
                > 0.8 * config.num_kv_tokens
            ):
                own.pop()
            if own and context + self._num_output(0, context, own) < config.max_context:
                yield [
                    (0, self._prompt(i, context), self._num_output(i, context, own))
                    for i in range(own[-1])
                ]

    def _num_output(self, number: int, context: int, sizes: Sequence[int]) -> int:
        """The output length of the sequence of this number, so that as many are left as each size
        says, the largest first. Those that come first decode while the others' prompts are
        computed."""
        waits = (sizes[-1] - number) * context // self._core.config.token_budget + 2
        return waits + _EACH * sum(1 for size in sizes if size > number)

    def _alone_loads(self, most: int) -> Iterator[_Load]:
        """A prompt that comes while nothing else is computed, as the first of several; and several
        at once."""
        longest = min(self._core.config.max_context - 8, most // 4)
        _, sizes = getattr(self._core.runner, "graph_sizes", ((), ()))
        # of sizes, others measure each
        few = _PROMPTS[::4] if sizes else (*_SHORT_PROMPTS, *_PROMPTS)
        for length in (*few, 4096, 8192, 16384, 32768):
            if length <= longest:
                yield [(0, self._fresh(length), 3)]
                yield [
                    (0, self._fresh(length), 3) for _ in range(max(2, min(4, most // length // 4)))
                ]

    def _mixed_loads(self, most: int) -> Iterator[_Load]:
        """Prompts of all lengths that come while a batch decodes."""
        config = self._core.config
        longest = min(2 * config.token_budget, config.max_context // 2)
        _, sizes = getattr(self._core.runner, "graph_sizes", ((), ()))
        least = 4 if sizes else 1  # bits of the shortest prompt
        for batch in (1, 4, 16, 64, 192):
            for context in (32, 512, 2048):
                room = (
                    context + 96 < config.max_context
                    and batch * (context + 128) < 0.6 * config.num_kv_tokens
                )
                if batch >= config.max_requests or batch * context > most or not room:
                    continue
                load = [(0, self._prompt(i, context), 40) for i in range(batch)]
                left, step = most // 2, 3 + batch * context // config.token_budget
                while left > 0 and len(load) < batch + 16:
                    length = min(
                        int(2 ** self._draw.uniform(least, longest.bit_length())),
                        longest,
                        max(left, 16),
                    )
                    load.append((step, self._fresh(length), 2))
                    step += self._draw.randint(1, 3)
                    left -= length
                yield load

    def _sized_loads(self, most: int) -> Iterator[_Load]:
        """Steps of every size that they are padded to: some sequences decode, and one prompt after
        the other fills the rest, from its begin or after a part that is cached."""
        config = self._core.config
        _, sizes = getattr(self._core.runner, "graph_sizes", ((), ()))
        for number, size in enumerate(sizes):
            for batch, context, cached in (
                (2, 32, 0),
                (24, 512, 0),
                (8, 128, 8192 if number % 2 else 2048),
            ):
                length = size - batch - 4  # the prompt before may decode meanwhile
                if (
                    length <= 4
                    or cached + size > min(most, config.max_context - 8)
                    or batch > config.max_requests
                ):
                    continue
                begin = self._prompt(config.max_requests, cached)
                first = 4 + (batch * context + cached) // config.token_budget
                load = [(0, self._prompt(i, context), first + 3 * _SIZED + 2) for i in range(batch)]
                load += [(0, begin, 1)] if cached else []
                yield load + [
                    (first + 3 * i, begin + self._fresh(length), 2) for i in range(_SIZED)
                ]

    def _shared_loads(self, most: int) -> Iterator[_Load]:
        """Batches that decode after a common prefix, if that costs less than as many different
        ones."""
        config = self._core.config
        lengths, own = (
            ((192, 512, 1024, 4096), 8) if config.device == "cpu" else ((1024, 2048, 8192), 64)
        )
        for shared in lengths if shared_unit(self._core) else ():
            prefix = self._fresh(shared)
            for batch in (2, 4, 8, 16, 32, 64, 128):
                if (
                    batch <= config.max_requests
                    and shared + 256 < config.max_context
                    and shared + own * batch <= most
                ):
                    first = [(0, prefix + self._fresh(own), 20)]
                    yield first + [
                        (4 + shared // config.token_budget, prefix + self._fresh(own), 16)
                        for _ in range(batch - 1)
                    ]

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
    groups = config.layout.groups if config.layout.groups != (Group(config.page_size),) else ()
    decode_sizes, mixed_sizes = getattr(runner, "graph_sizes", ((), ()))
    cost, errors = fit(samples, decode_sizes, mixed_sizes, runner.steps_ahead, shared_unit(core))
    cost = msgspec.structs.replace(cost, first_pays=config.device == "cpu")
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
        groups,
        bytes_of_page(core.model_config, config.kv_dtype, config.page_size, config.layout)
        if groups
        else 0,
    )
    shape = ModelShape.of(name, core.model_config, config.weight_bytes, config.kv_dtype)
    fit_errors = FitErrors(errors.num_samples, errors.median, errors.p90, errors.total)
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    return Profile(FORMAT, __version__, date, machine, shape, engine, cost, fit_errors)
