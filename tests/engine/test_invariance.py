"""The first promise: a request's tokens and logprobs do not depend on anything but the request. Bit
for bit, in every path."""

import gguf
import pytest
import torch

from tests.helpers import (
    Answer,
    engine_config,
    greedy,
    load_model,
    make_core,
    make_llama,
    run,
    take,
    watch,
)
from tests.weights.test_gguf import write_gguf
from tidemill.kernels import native
from tidemill.sched.policies import POLICIES
from tidemill.types import events
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

PARAMS = {
    "greedy": greedy(20, logprobs=3),
    "seeded": SamplingParams(
        temperature=0.9, top_p=0.95, top_k=50, max_tokens=20, seed=1234, logprobs=3
    ),
    "penalties": SamplingParams(
        temperature=1.0,
        min_p=0.02,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        max_tokens=20,
        seed=-7,
        logprobs=3,
    ),
}
# The layer shapes of the default model, and an awkward one with odd sizes and one query head per KV
# head.
SHAPES = {
    "smollm2": {
        "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 2048,
        "num_hidden_layers": 2, "initializer_range": 0.06,
    },
    "odd": {"hidden_size": 60, "intermediate_size": 133, "num_attention_heads": 5, "num_key_value_heads": 5, "vocab_size": 203},
}  # fmt: skip
PROMPT_LEN = 150


def with_kinds(values):
    """Each value with each way of sampling; in `make test`, each of the former and each of the
    latter at least once."""
    kinds = list(PARAMS)
    often = {(i % len(kinds), i) for i in range(len(values))} | {
        (j, j % len(values)) for j in range(len(kinds))
    }
    return [
        pytest.param(kind, value, marks=() if (j, i) in often else pytest.mark.slow)
        for i, value in enumerate(values)
        for j, kind in enumerate(kinds)
    ]


@pytest.fixture(
    scope="module", params=["smollm2 quantized", "smollm2 float32", "odd float32", "smollm2 torch"]
)
def model(request, tmp_path_factory):
    """4- and 8-bit weights with bfloat16 keys and values; float32; torch's attention under compiled
    products; torch alone."""
    shape, _, path_taken = request.param.partition(" ")
    folder = tmp_path_factory.mktemp(shape)
    reference = make_llama(folder, seed=3, **SHAPES[shape])
    with pytest.MonkeyPatch.context() as patch:
        if path_taken == "torch":
            patch.setattr(native, "lib", None)
        elif native.lib is None:
            pytest.skip(native.why)
        if path_taken == "quantized":
            file = write_gguf(
                folder / "q.gguf",
                reference,
                quantize=gguf.GGMLQuantizationType.Q4_1,
                table=gguf.GGMLQuantizationType.Q8_0,
            )
            yield load_model(file, "quantized")
        else:
            yield load_model(folder)


def ids(model, num: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (num,), generator=generator).tolist()


@pytest.fixture(scope="module")
def alone(model) -> dict[str, Answer]:
    """Each request by itself, its prompt in one piece."""
    prompt = ids(model, PROMPT_LEN, 0)
    return {
        name: run(make_core(model), {"x": (prompt, params)})["x"] for name, params in PARAMS.items()
    }


def others(model, num: int) -> dict[str, tuple[list[int], SamplingParams]]:
    """Neighbours of all lengths and kinds."""
    kinds = list(PARAMS.values())
    return {f"o{i}": (ids(model, 1 + (i * 37) % 200, 100 + i), kinds[i % 3]) for i in range(num)}


@pytest.mark.parametrize("kind", PARAMS)
def test_among_31_others(model, alone, kind):
    prompt = ids(model, PROMPT_LEN, 0)
    crowd = others(model, 31)
    requests = (
        dict(list(crowd.items())[:15])
        | {"x": (prompt, PARAMS[kind])}
        | dict(list(crowd.items())[15:])
    )
    assert run(make_core(model), requests)["x"] == alone[kind]


@pytest.mark.parametrize(("kind", "chunk"), with_kinds([1, 7, 64]))
def test_in_chunks(model, alone, kind, chunk):
    prompt = ids(model, PROMPT_LEN, 0)
    core = make_core(model, token_budget=chunk, max_requests=1)
    assert run(core, {"x": (prompt, PARAMS[kind])})["x"] == alone[kind]


@pytest.mark.parametrize(("kind", "page_size"), with_kinds([1, 32]))
def test_in_other_pages(model, alone, kind, page_size):
    prompt = ids(model, PROMPT_LEN, 0)
    assert (
        run(make_core(model, page_size=page_size), {"x": (prompt, PARAMS[kind])})["x"]
        == alone[kind]
    )


@pytest.mark.parametrize("kind", PARAMS)
def test_with_a_prefix_hit(model, alone, kind):
    prompt = ids(model, PROMPT_LEN, 0)
    core = make_core(model, token_budget=64)
    run(core, {"before": (prompt[:100], greedy(3))})
    answer = run(core, {"x": (prompt, PARAMS[kind])})["x"]
    assert answer.last.num_cached == 96
    assert answer == alone[kind]
    again = run(core, {"x": (prompt, PARAMS[kind])})["x"]
    assert again.last.num_cached == 144
    assert again == alone[kind]


def test_with_a_prefix_hit_within_a_page(model, alone):
    """The page is copied from a sequence that goes on differently."""
    prompt = ids(model, PROMPT_LEN, 0)
    core = make_core(model, token_budget=64, prefix_index="radix")
    seen = watch(core)
    run(core, {"before": ([*prompt[:103], *ids(model, 20, 1)], greedy(3))})
    answer = run(core, {"x": (prompt, PARAMS["seeded"])})["x"]
    assert answer.last.num_cached == 103
    assert any(isinstance(event, events.PageCopied) for event in seen)
    assert answer == alone["seeded"]
    again = run(core, {"x": (prompt, PARAMS["seeded"])})["x"]
    assert again.last.num_cached == PROMPT_LEN - 1
    assert again == alone["seeded"]


@pytest.mark.parametrize(("kind", "caching"), with_kinds([True, False]))
def test_after_preemption(model, alone, kind, caching):
    """Preempted in the middle of the prompt and twice in the middle of the output, with neighbours."""
    prompt = ids(model, PROMPT_LEN, 0)
    core = make_core(model, token_budget=64, prefix_caching=caching)
    answers = {"x": Answer()} | {name: Answer() for name in others(model, 5)}
    core.submit(Submit("x", prompt, PARAMS[kind]))
    for name, (tokens, params) in others(model, 5).items():
        core.submit(Submit(name, tokens, params))
    num_steps = num_preempted = 0
    while core.has_work:
        take(core, answers)
        num_steps += 1
        request = next((r for r in core.scheduler.running if r.request_id == "x"), None)
        if request and (num_steps == 1 or (request.num_output in (5, 11) and request.epoch < 3)):
            core.scheduler.table.preempt(request, "test")
            num_preempted += 1
    assert num_preempted >= 3
    assert answers["x"] == alone[kind]


def test_preempted_by_lack_of_pages(model):
    """The real thing: a pool too small for all of them."""
    crowd = others(model, 8)
    expected = {name: run(make_core(model), {name: one})[name] for name, one in crowd.items()}
    per_token = model.config.kv_bytes_per_token(engine_config(model).kv_dtype)
    core = make_core(model, kv_memory_bytes=(256 + 64) * per_token, token_budget=64)
    seen = watch(core)
    assert run(core, crowd) == expected
    assert any(isinstance(event, events.Preempted) for event in seen)


def test_samples_share_pages_and_equal_requests_of_their_own(model):
    """n = 4: each sample equals a lone request with its seed; the prompt is computed once."""
    prompt = ids(model, PROMPT_LEN, 0)
    params = SamplingParams(temperature=1.0, max_tokens=12, n=4, seed=99, logprobs=1)
    core = make_core(model, prefix_caching=False)
    seen = watch(core)
    together = run(core, {"x": (prompt, params)})
    assert (
        sum(event.num_tokens for event in seen if isinstance(event, events.StepPlanned))
        == PROMPT_LEN + 3 + 4 * 11
    )
    assert any(isinstance(event, events.PageCopied) for event in seen)
    for index in range(4):
        lone = run(make_core(model), {"x": (prompt, params.sample(index))})["x"]
        assert together["x" if index == 0 else f"x:{index}"] == lone
    assert len({tuple(answer.tokens) for answer in together.values()}) == 4


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"continuous"}))
def test_under_every_policy(model, alone, policy):
    prompt = ids(model, PROMPT_LEN, 0)
    requests = others(model, 6) | {"x": (prompt, PARAMS["seeded"])}
    assert (
        run(make_core(model, policy=policy, token_budget=64, max_requests=4), requests)["x"]
        == alone["seeded"]
    )


def test_prompt_logprobs_do_not_depend_on_chunks(model):
    prompt = ids(model, PROMPT_LEN, 0)
    params = greedy(2, prompt_logprobs=2)
    whole = run(make_core(model), {"x": (prompt, params)})["x"]
    assert len(whole.prompt_logprobs) == PROMPT_LEN - 1
    assert [entry.token_id for entry in whole.prompt_logprobs] == prompt[1:]
    assert (
        run(make_core(model, token_budget=7, max_requests=1), {"x": (prompt, params)})["x"] == whole
    )


@pytest.mark.parametrize("start", [50, PROMPT_LEN - 1])
def test_prompt_logprobs_from_a_position_on(model, start):
    """What is before it may be cached. Alone, chunked, or after a preemption, they are those of the
    whole prompt."""
    prompt = ids(model, PROMPT_LEN, 0)
    whole = run(make_core(model), {"x": (prompt, greedy(2, prompt_logprobs=2))})["x"]
    whole.prompt_logprobs = whole.prompt_logprobs[start - 1 :]
    params = greedy(2, prompt_logprobs=2, prompt_logprobs_start=start)
    core = make_core(model, page_size=16, token_budget=64, max_requests=2)
    assert run(core, {"x": (prompt, params)})["x"].tokens == whole.tokens
    again = run(core, {"x": (prompt, params)})["x"]
    assert (again.prompt_logprobs, again.tokens) == (whole.prompt_logprobs, whole.tokens)
    assert again.last.num_cached == (start - 1) // 16 * 16
    core, answers = make_core(model, token_budget=7, max_requests=1), {"x": Answer()}
    core.submit(Submit("x", prompt, params))
    for _ in range(PROMPT_LEN // 7):
        take(core, answers)
    core.scheduler.table.preempt(core.scheduler.running[0], "for this test")
    while core.has_work:
        take(core, answers)
    assert (answers["x"].prompt_logprobs, answers["x"].tokens) == (
        whole.prompt_logprobs,
        whole.tokens,
    )
