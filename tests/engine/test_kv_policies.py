"""KV policies: a request that asks for one gets it, with the same bits in every path, and nobody
else changes by a bit."""

import pytest
import torch

from tests.helpers import Answer, greedy, load_model, make_core, make_llama, run, take
from tidemill.compress.evaluate import default_text
from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.load import load_core
from tidemill.errors import ConfigError, ContextTooLong, InvalidRequest
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.kernels import native
from tidemill.types import events
from tidemill.types.kv_policy import read_policy, settle
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

POLICIES = {
    "window": {"kind": "window", "recent": 40},
    # four pages: a hit must not end where tokens are given up
    "streaming": {"kind": "streaming", "sinks": 3, "recent": 61},
    "h2o": {"kind": "h2o", "budget": 40},
    "snapkv": {"kind": "snapkv", "budget": 50, "observed": 8},
    "quest": {"kind": "quest", "budget": 0.3, "dense_layers": 1},
    "double": {"kind": "double", "budget": 0.3, "channels": 4, "dense_layers": 1},
    "random": {"kind": "random", "budget": 40},
}
LENGTH = 100


@pytest.fixture(scope="module", params=["native", pytest.param("torch", marks=pytest.mark.slow)])
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
    """Alone, among others, in chunks, in other pages, with a cached prefix, after preemption.
    Others are as they are alone."""
    prompt, params, plain = ids(LENGTH), asks(kind), greedy(20, logprobs=1, ignore_eos=True)
    expected, of_others = (
        alone(model, params),
        {f"o{i}": (ids(10 + 40 * i, 9 + i), plain) for i in range(3)},
    )
    without = alone(model, plain)
    assert expected.logprobs != without.logprobs
    assert (
        run(make_core(model, token_budget=7, max_requests=1), {"x": (prompt, params)})["x"]
        == expected
    )
    if kind != "quest":  # which chooses pages
        assert run(make_core(model, page_size=1), {"x": (prompt, params)})["x"] == expected
    core = make_core(model, token_budget=64)
    assert run(core, {"before": (prompt, plain)})["before"] == without
    together = run(core, of_others | {"x": (prompt, params), "y": (prompt, plain)})
    assert together.pop("x") == expected
    assert together.pop("y") == without
    assert together == {
        name: run(make_core(model), {name: one})[name] for name, one in of_others.items()
    }
    _preempt_at(core, expected, prompt, params, {3, 11})
    assert run(core, {"y": (prompt, plain)})["y"] == without
    core.scheduler.table.check_integrity()


def _preempt_at(
    core: EngineCore, expected: Answer, prompt: list[int], params: SamplingParams, lengths: set[int]
) -> None:
    answers, left = {"x": Answer()}, set(lengths)
    core.submit(Submit("x", prompt, params))
    while core.has_work:
        take(core, answers)
        core.scheduler.table.check_integrity()
        for request in list(core.scheduler.running):
            if request.num_output in left:
                left.remove(request.num_output)
                core.scheduler.table.preempt(request, "for this test")
    assert not left
    assert answers["x"] == expected


def test_pages_are_bounded_and_nothing_moved_is_shared(model):
    """Beyond the context, in the pages of the window; what is moved is not in the prefix index,
    which keeps what was computed."""
    prompt = ids(LENGTH)
    core = make_core(model, token_budget=64, page_size=4)
    assert core.config.max_context == 256
    run(core, {"before": (prompt, greedy(1))})
    core.submit(Submit("x", prompt, asks("streaming", 200)))
    seen, most, answer = list[events.Event](), 0, Answer()
    while core.has_work:
        seen += take_with_events(core, {"x": answer})
        for request in core.scheduler.running:
            most = max(most, core.scheduler.kv.num_pages_of(request.seq))
            if request.num_computed >= 63:
                (table,) = core.scheduler.kv.tables(request.seq)
                assert not any(page in core.scheduler.kv.index for page in table)
        core.scheduler.table.check_integrity()
    assert len(answer.tokens) == 200
    assert most == -(-63 // 4)
    assert sum(
        event.num_tokens for event in seen if isinstance(event, events.TokensEvicted)
    ) == 3 * ((LENGTH + 199 - 63) // 3 + 1)
    admitted = next(event for event in seen if isinstance(event, events.Admitted))
    assert admitted.num_cached == 60  # what is the same with and without the policy
    assert run(core, {"y": (prompt, greedy(1))})["y"].last.num_cached == 96
    assert core.scheduler.kv.num_free_pages == core.scheduler.kv.num_pages


def take_with_events(core: EngineCore, answers: dict[str, Answer]) -> list[events.Event]:
    output, failed = core.step()
    assert not failed
    for delta in output.deltas:
        answers[delta.request_id].tokens += delta.token_ids
    return output.events


def test_all_of_it_is_no_policy(model, request):
    """H2O with room for every token, and before it gives up the first: the tokens without it."""
    plain = alone(model, greedy(20, logprobs=1, ignore_eos=True))
    assert (
        alone(
            model, greedy(20, logprobs=1, ignore_eos=True, kv_policy={"kind": "h2o", "budget": 1.0})
        )
        == plain
    )
    long = alone(
        model, greedy(100, logprobs=1, ignore_eos=True, kv_policy={"kind": "h2o", "budget": 120})
    )
    assert long.logprobs[:20] == plain.logprobs
    for kind in ("quest", "double"):
        whole = {"kind": kind, "budget": 1.0, "dense": 1, "dense_layers": 0}
        made = alone(model, greedy(20, logprobs=1, ignore_eos=True, kv_policy=whole))
        if "torch" in request.node.name:  # it adds up in another order
            assert made.tokens == plain.tokens
            assert [one.logprob for one in made.logprobs] == pytest.approx(
                [one.logprob for one in plain.logprobs], abs=1e-4
            )
        else:
            assert made == plain
    # a prompt of 1,024 tokens stays whole
    assert settle(read_policy("snapkv"), 100, 10**6, 2000) is None


def test_samples_and_snapkv_gives_pages_back(model):
    """Samples of one request are as requests of their own; a compressed prompt holds fewer pages."""
    prompt = ids(LENGTH)
    params = SamplingParams(
        temperature=1.0, max_tokens=8, n=3, seed=7, logprobs=1, kv_policy=POLICIES["snapkv"]
    )
    core, held = make_core(model, page_size=4), set[int]()
    core.submit(Submit("x", prompt, params))
    answers = {name: Answer() for name in ("x", "x:1", "x:2")}
    while core.has_work:
        take(core, answers)
        held |= {
            core.scheduler.kv.num_pages_of(one.seq)
            for one in core.scheduler.running
            if one.num_output > 2
        }
    for index, name in enumerate(answers):
        assert answers[name] == run(make_core(model), {"x": (prompt, params.sample(index))})["x"]
    assert held
    assert max(held) <= -(-60 // 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "lru"}, "no KV policy"),
        ({"kind": "streaming", "budget": 3}, "has no field budget"),
        ({"kind": "streaming", "sinks": -1}, "from 0 to"),
        ({"kind": "h2o", "budget": 0}, "budget"),
        ({"kind": "h2o", "keys": 1}, "no field 'keys'"),
        ("{", "not JSON"),
        ('{"a":' * 100_000, "not JSON"),
        (7, "kv_policy is 7"),
    ],
)
def test_what_is_wrong_with_a_policy(given, message):
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(kv_policy=given)


def test_limits_and_defaults(model, tmp_path):
    core = make_core(model, kv_policy='{"kind": "window", "recent": 40}', max_stream=300)
    assert run(core, {"x": (ids(LENGTH), greedy(20, logprobs=1, ignore_eos=True))})["x"] == alone(
        model, asks("window")
    )
    full = greedy(20, logprobs=1, ignore_eos=True, kv_policy="full")
    assert run(core, {"x": (ids(LENGTH), full)})["x"] == alone(
        model, greedy(20, logprobs=1, ignore_eos=True)
    )
    with pytest.raises(ContextTooLong):
        core.submit(Submit("x", ids(250), greedy(51)))
    with pytest.raises(ContextTooLong):
        core.submit(Submit("x", ids(250), greedy(10, kv_policy="h2o")))
    with pytest.raises(InvalidRequest, match="keeps 1024 tokens"):
        core.submit(Submit("x", ids(250), greedy(10, kv_policy="streaming")))
    with pytest.raises(InvalidRequest, match="h2o cannot be combined with pooling"):
        SamplingParams(pooling="mean", kv_policy="h2o")
    with pytest.raises(ConfigError, match="no KV policy"):
        make_core(model, kv_policy="lru")
    with pytest.raises(ConfigError, match="max_stream"):
        make_core(model, max_stream=100)
    with pytest.raises(InvalidRequest, match="float32 or bfloat16"):
        make_core(model, kv_dtype="int8").submit(Submit("x", ids(5), greedy(1, kv_policy="h2o")))


@pytest.mark.slow
def test_double_sparsity_by_default_beats_a_window(smollm2_path):
    """On the default model, with the same budget. Before the channels were chosen by queries too,
    it lost to the window."""
    core = load_core(
        EngineOptions(
            model=str(smollm2_path), prefix_caching=False, kv_memory_bytes=2**29, speculate="off"
        )
    )
    text = Tokenizer.load(smollm2_path).encode(default_text())[:640]
    policies = {
        "full": {"kind": "full"},
        "window": {"kind": "window", "recent": 80},
        "double": {"kind": "double", "dense": 256},
    }
    asked = {
        name: (text, greedy(1, prompt_logprobs=0, kv_policy=policy))
        for name, policy in policies.items()
    }
    answers = run(core, asked)
    lost = {
        name: -sum(one.logprob for one in answer.prompt_logprobs[255:]) / 384
        for name, answer in answers.items()
    }
    assert lost["double"] - lost["full"] < 0.3 * (lost["window"] - lost["full"])
