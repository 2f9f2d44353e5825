"""KV policies: a request that asks for one gets it, with the same bits in every path, and nobody else changes by a bit."""

import pytest
import torch

from tests.helpers import Answer, greedy, load_model, make_core, make_llama, run, take
from tidemill import events
from tidemill.engine.core import EngineCore
from tidemill.errors import ConfigError, ContextTooLong, InvalidRequest
from tidemill.kernels import native
from tidemill.kv_policy import read_policy, settle
from tidemill.sampling import SamplingParams
from tidemill.wire import Submit

POLICIES = {
    "window": {"kind": "window", "recent": 40},
    "streaming": {"kind": "streaming", "sinks": 3, "recent": 60},
    "h2o": {"kind": "h2o", "budget": 40},
    "snapkv": {"kind": "snapkv", "budget": 50, "observed": 8},
    "quest": {"kind": "quest", "budget": 0.3, "dense_layers": 1},
    "random": {"kind": "random", "budget": 40},
}
LENGTH = 100


@pytest.fixture(scope="module", params=["native", "torch"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make_llama(folder, seed=5)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setattr(native, "lib", None)
        elif native.lib is None:
            pytest.skip(native.why)
        yield load_model(folder)


def ids(num: int, seed: int = 0) -> list[int]:
    return torch.randint(2, 250, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


def asks(kind: str, max_tokens: int = 20, **more) -> SamplingParams:
    return greedy(max_tokens, logprobs=1, ignore_eos=True, kv_policy=POLICIES[kind], **more)


def alone(model, params: SamplingParams, **options) -> Answer:
    return run(make_core(model, **options), {"x": (ids(LENGTH), params)})["x"]


@pytest.mark.parametrize("kind", POLICIES)
def test_the_same_bits_in_every_path(model, kind):
    """Alone, among others, in chunks, in other pages, with a cached prefix, after preemption. Others are as they are alone."""
    prompt, params, plain = ids(LENGTH), asks(kind), greedy(20, logprobs=1, ignore_eos=True)
    expected, of_others = alone(model, params), {f"o{i}": (ids(10 + 40 * i, 9 + i), plain) for i in range(3)}
    without = alone(model, plain)
    assert expected.logprobs != without.logprobs
    assert run(make_core(model, token_budget=7, max_requests=1), {"x": (prompt, params)})["x"] == expected
    if kind != "quest":  # which chooses pages
        assert run(make_core(model, page_size=1), {"x": (prompt, params)})["x"] == expected
    core = make_core(model, token_budget=64)
    assert run(core, {"before": (prompt, plain)})["before"] == without
    together = run(core, of_others | {"x": (prompt, params), "y": (prompt, plain)})
    assert together.pop("x") == expected
    assert together.pop("y") == without
    assert together == {name: run(make_core(model), {name: one})[name] for name, one in of_others.items()}
    _preempt_at(core, expected, prompt, params, {3, 11})
    assert run(core, {"y": (prompt, plain)})["y"] == without
    core.scheduler.check_integrity()


def _preempt_at(core: EngineCore, expected: Answer, prompt: list[int], params: SamplingParams, lengths: set[int]) -> None:
    answers, left = {"x": Answer()}, set(lengths)
    core.submit(Submit("x", prompt, params))
    while core.has_work:
        take(core, answers)
        core.scheduler.check_integrity()
        for request in list(core.scheduler.running):
            if request.num_output in left:
                left.remove(request.num_output)
                core.scheduler._preempt(request, "for this test")
    assert not left
    assert answers["x"] == expected
