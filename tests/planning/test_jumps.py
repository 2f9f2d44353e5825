"""Steps that repeat the one before are made at once: the result is that of making each."""

import math
import random

import msgspec
import pytest

from tidemill.planning.cost import Curve, FittedCost, LinearCost
from tidemill.planning.simulator import Arrival, SimConfig, SimEngine
from tidemill.sched.policies import POLICIES
from tidemill.sched.request import BACKGROUND
from tidemill.types.cache_layout import Group
from tidemill.types.events import PagesEvicted, StepDone, StepPlanned
from tidemill.types.wire import Hold

COST = LinearCost(fixed_s=0.01, per_token_s=0.0003, per_context_token_s=0.00001, host_s=0.0007)


RATES = 1e-5, 2e-6, 1.5e-5, 1e-6, 1e-4, 1e-6, 7e-4
FITTED = FittedCost(
    Curve([1, 8], [0.01, 0.012]), Curve([2, 64], [0.01, 0.03]), *RATES, longest_prompt_s=1e-5
)
WARM = msgspec.structs.replace(
    FITTED, heat_decay_s=0.05, decode_rise=0.04, mixed_rise=0.5, shared_unit=16, sharing_s=1e-3
)
COSTS = [COST, FITTED, WARM, WARM]


def run(arrivals, config, cost=COST, **options):
    engine = SimEngine(config, cost, **options)
    for arrival in arrivals:
        engine.run_until(arrival.arrival_s)
        engine.submit(arrival)
    engine.run_until(math.inf)
    return engine


def decisions(result):
    """All events but those of single steps."""
    return [
        event
        for event in result.events
        if not isinstance(event, StepPlanned | StepDone | PagesEvicted)
    ]


def state(engine):
    """What is left of a run: times, sums, and free pages in the order in which they would be taken."""
    free = list(engine.kv.pool.free_pages())
    return (
        engine.token_times_s,
        engine.clock.now(),
        engine.num_steps,
        engine.tally.num_output,
        engine.tally.num_aborted,
        free,
    )


def num_evicted(result):
    return sum(event.num_pages for event in result.events if isinstance(event, PagesEvicted))


def drawn(seed):
    """A load and an engine, with few pages or many, and everything that decides who runs."""
    draw = random.Random(seed)
    size = draw.choice([4, 16])
    context = 256
    windows = draw.random() < 0.25
    num_pages = draw.choice([context // size * (2 if windows else 1) + 4, 60, 400])
    num_pages = max(num_pages, context // size * (2 if windows else 1) + 4)
    config = SimConfig(
        policy=draw.choice(sorted(POLICIES)),
        num_rows=draw.choice([2, 5, 16]),
        token_budget=draw.choice([24, 64]),
        num_pages=num_pages,
        page_size=size,
        max_context=context,
        prefix_caching=draw.random() < 0.8,
        prefix_index=draw.choice(["hash", "radix"]),
        queue_order=draw.choice(["arrival", "arrival", "prefix"]),
        batch_window_s=draw.choice([0.0, 0.2]),
        evict=windows or draw.random() < 0.8,
        steps_ahead=draw.choice([0, 1]),
        # which fills steps with parts of prompts, while requests are queued
        device=draw.choice(["cpu", "cuda"]),
        groups=(Group(size), Group(size, window=64)) if windows else (),
    )
    spread, tenants, priorities = (
        draw.choice([0.02, 0.3, 3.0]),
        draw.choice([1, 1, 3]),
        draw.choice([1, 1, 2]),
    )
    arrivals, at = [], 0.0
    shared = tuple(draw.randrange(1000) for _ in range(80))
    for i in range(draw.randint(5, 25)):
        at += draw.expovariate(1 / spread)
        num_prompt, num_output = draw.randint(1, 150), draw.randint(1, 100)
        own = tuple(draw.randrange(1000) for _ in range(num_prompt))
        prompt = (*shared, *own)[:num_prompt] if draw.random() < 0.3 else own
        prefix_leases = (
            (Hold(f"h{i}", 0, draw.uniform(0.1, 5), draw.random() < 0.3, "test"),)
            if draw.random() < 0.1
            else ()
        )
        priority = BACKGROUND if draw.random() < 0.1 else draw.randrange(priorities)
        tenant = f"t{draw.randrange(tenants)}"
        n = draw.choice([1, 1, 1, 1, 1, 3])
        abort_s = at + draw.expovariate(1.0) if draw.random() < 0.15 else None
        arrivals.append(
            Arrival(
                f"r{i}",
                at,
                num_prompt,
                num_output,
                priority,
                tenant,
                prompt,
                prefix_leases,
                n,
                abort_s,
            )
        )
    return arrivals, config


@pytest.mark.parametrize(
    "seeds", [range(14), pytest.param(range(14, 300), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_jumps_change_nothing(seeds):
    num_steps = num_made = 0
    for seed in seeds:
        arrivals, config = drawn(seed)
        # without events, jumps go further
        how = {"jumps": False}, {"jumps": True}, {"keeps_events": False}
        engines = [run(arrivals, config, COSTS[seed % 4], **options) for options in how]
        for engine in engines[1:]:
            assert state(engine) == state(engines[0]), seed
        plain, jumped = (engine.result() for engine in engines[:2])
        assert decisions(jumped) == decisions(plain), seed
        assert num_evicted(jumped) == num_evicted(plain), seed
        assert sum(step.num_steps for step in jumped.steps) == len(plain.steps)
        num_steps, num_made = num_steps + len(plain.steps), num_made + len(jumped.steps)
    assert num_made < 0.8 * num_steps
