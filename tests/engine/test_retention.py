"""Tokens and logprobs do not depend on what is pinned or retained, nor on whether requests are
preempted."""

import pytest

from tests.helpers import Answer, engine_config, greedy, load_model, run, take, watch
from tidemill.engine.load import core_of
from tidemill.errors import ConfigError, InvalidRequest
from tidemill.sched.clock import VirtualClock
from tidemill.types import events
from tidemill.types.sampling import Beams, SamplingParams
from tidemill.types.wire import Hold, Renew, Submit

PREFIX = [(7 * i) % 300 + 4 for i in range(48)]
PAGE_BYTES = 12288  # of 16 tokens


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_model(tiny_folder)


def small(model, num_pages=16, clock=None, **options):
    config = engine_config(
        model, kv_memory_bytes=num_pages * PAGE_BYTES, max_context=192, speculate="off", **options
    )
    return core_of(model, config, clock)


def ask(core, name, prompt, prefix_leases=(), params=None, tenant=""):
    """Its answer, bit for bit."""
    answer = Answer()
    core.submit(
        Submit(
            name,
            prompt,
            params or greedy(5, logprobs=2),
            prefix_leases=list(prefix_leases),
            tenant=tenant,
        )
    )
    while core.has_work:
        take(core, {name: answer})
    core.scheduler.table.check_integrity()
    return answer


def flood(core, num=6):
    run(
        core,
        {
            f"flood {i}": ([(31 * i + 7 * j) % 300 + 4 for j in range(90)], greedy(2))
            for i in range(num)
        },
    )


@pytest.mark.parametrize(("is_pinned", "index"), [(True, "hash"), (False, "radix")])
def test_a_held_prefix_gives_the_same_bits(model, is_pinned, index):
    plain = [
        ask(small(model, prefix_caching=False), "a", [*PREFIX, 5, 6]),
        ask(small(model), "b", [*PREFIX, 9]),
    ]
    core = small(model, prefix_index=index)
    made = ask(core, "make", PREFIX, [Hold("h", len(PREFIX), 60.0, is_pinned)], greedy(1))
    assert made.last.num_held == 48
    flood(core)
    first, second = ask(core, "a", [*PREFIX, 5, 6]), ask(core, "b", [*PREFIX, 9])
    assert [first, second] == plain
    assert (first.last.num_cached, second.last.num_cached) == (48, 48)
    core.renew(Renew("h", 0.0, "deleted"))
    flood(core)
    again = ask(core, "a", [*PREFIX, 5, 6])
    assert again.last.num_cached == 0
    assert again == plain[0]


def test_without_eviction_the_same_tokens_come_and_none_is_preempted(model):
    prompts = {
        f"r{i}": (
            [(13 * i + j) % 300 + 4 for j in range(60)],
            SamplingParams(seed=i, max_tokens=40),
        )
        for i in range(3)
    }
    alone = {name: run(small(model), {name: prompts[name]})[name].tokens for name in prompts}
    for evict in (True, False):
        core = small(model, evict=evict)
        emitted = watch(core)
        assert {name: answer.tokens for name, answer in run(core, prompts).items()} == alone
        assert any(isinstance(event, events.Preempted) for event in emitted) is evict
    with pytest.raises(InvalidRequest, match="preempt"):
        core.submit(Submit("beams", [1, 2], SamplingParams(max_tokens=3, beams=Beams(2))))


def test_a_dynamic_batch_starts_by_itself(model):
    clock = VirtualClock()
    core = small(model, clock=clock, policy="dynamic", batch_window_ms=30)
    core.submit(Submit("a", [1, 2, 3], greedy(2)))
    core.step()
    assert core.idle_s == pytest.approx(0.03)
    clock.advance(0.03)
    answer = Answer()
    while core.has_work:
        take(core, {"a": answer})
    assert len(answer.tokens) == 2
    assert core.idle_s == 0


@pytest.mark.parametrize(
    "options",
    [
        {"batch_window_ms": 5},
        {"policy": "dynamic", "batch_window_ms": -1},
        {"max_pinned": 1.5},
        {"session_retention_s": -1.0},
    ],
)
def test_options_that_cannot_be(model, options):
    with pytest.raises(ConfigError):
        small(model, **options)
