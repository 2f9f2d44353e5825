"""KV policies on the GPU's runner, interpreted: what the CPU's engine says, in any company, and
nobody else changes by a bit."""

import pytest

pytest.importorskip("triton")

from tests.helpers import greedy, load_model, make_core, run
from tests.runner.test_cuda_runner import folder, ids, on_gpu  # noqa: F401 - fixtures
from tidemill.errors import InvalidRequest
from tidemill.types.wire import Submit

POLICIES = {
    "window": {"kind": "window", "recent": 34},
    "streaming": {"kind": "streaming", "sinks": 2, "recent": 38},
    "h2o": {"kind": "h2o", "budget": 34},
    "snapkv": {"kind": "snapkv", "budget": 20, "observed": 4},
    "quest": {"kind": "quest", "budget": 0.4, "dense_layers": 1},
    "random": {"kind": "random", "budget": 34},
}
PROMPT = ids(50, 2)


def said(answer):
    return answer.tokens, [entry.logprob for entry in answer.logprobs]


def asks(kind, num=6):
    return greedy(num, logprobs=1, ignore_eos=True, kv_policy=POLICIES[kind])


@pytest.mark.parametrize(
    "kind",
    [
        "streaming",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in POLICIES if kind != "streaming"),
    ],
)
def test_the_cpus_tokens_in_any_company(kind, folder, on_gpu):  # noqa: F811
    """A prompt in chunks that evict in the middle, beside one without a policy; and alone in other
    chunks: equal bits."""
    other, plain = ids(20, 9), greedy(3, logprobs=1, ignore_eos=True)
    core = on_gpu(token_budget=48, kv_policy="full")
    both = run(core, {"x": (PROMPT, asks(kind)), "y": (other, plain)})
    cpu = make_core(load_model(folder), max_requests=8, page_size=16, max_context=128)
    theirs = run(cpu, {"x": (PROMPT, asks(kind)), "y": (other, plain)})
    for name in both:
        assert both[name].tokens == theirs[name].tokens
        assert said(both[name])[1] == pytest.approx(said(theirs[name])[1], abs=1e-3)
    assert said(
        run(on_gpu(token_budget=16, kv_policy="full"), {"x": (PROMPT, asks(kind))})["x"]
    ) == said(both["x"])
    assert said(run(core, {"y": (other, plain)})["y"]) == said(both["y"])
    assert said(run(core, {"x": (PROMPT, asks(kind))})["x"]) == said(both["x"])


def test_a_policy_that_keeps_more_than_there_is_memory_for_is_refused(on_gpu):  # noqa: F811
    """Sinks are kept as they were in the beginning, beside the pages."""
    core = on_gpu(kv_policy="full", kv_memory_bytes=2**15)
    many = {"kind": "streaming", "sinks": 100, "recent": 20}
    with pytest.raises(
        InvalidRequest, match=r"streaming would keep .* beside the pages of this request; all have"
    ) as caught:
        core.submit(Submit("x", PROMPT, greedy(76, kv_policy=many)))
    assert caught.value.param == "kv_policy"
    core.submit(Submit("y", PROMPT, greedy(76, kv_policy=many | {"sinks": 4})))
