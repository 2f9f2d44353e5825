"""Keys and values in 8 and 4 bits: tokens and logprobs depend on the request alone, and are close
to the exact ones."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.test_lora import ask, make_lora
from tests.helpers import (
    Answer,
    Guesser,
    greedy,
    guess_with,
    load_model,
    make_core,
    make_llama,
    run,
    take,
)
from tests.models.test_families import make
from tidemill.config import EngineOptions, resolve
from tidemill.engine.parts.adapters import AdapterStore
from tidemill.errors import ConfigError
from tidemill.kernels import machine
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

PARAMS = SamplingParams(temperature=0.9, max_tokens=12, seed=5, logprobs=2)
PROMPT = [(i * i) % 97 + 3 for i in range(90)]


def others(num):
    return {
        f"o{i}": (
            [(i * 7 + k * k) % 97 + 3 for k in range(1 + i * 37 % 120)],
            greedy(8, logprobs=1),
        )
        for i in range(num)
    }


def preempted(core, crowd):
    """Of PROMPT among others, preempted in the middle of its output."""
    answers = {name: Answer() for name in [*crowd, "x"]}
    for name, (prompt, params) in {**crowd, "x": (PROMPT, PARAMS)}.items():
        core.submit(Submit(name, prompt, params))
    num = 0
    while core.has_work:
        take(core, answers)
        request = next((one for one in core.scheduler.running if one.request_id == "x"), None)
        if request and request.num_output == 5 and not num:
            core.scheduler.table.preempt(request, "test")
            num += 1
    assert num
    return answers["x"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Heads of 16; and of 24 with windows of 33 tokens, in pages of their own groups."""
    plain, windowed = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("windowed")
    reference = make_llama(plain, num_hidden_layers=2, vocab_size=128, intermediate_size=92)
    make("Gemma3").save_pretrained(windowed)
    return reference, plain, windowed


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["plain", "windowed"])
@pytest.mark.parametrize(
    "backend", ["compiled", pytest.param("torch", marks=pytest.mark.slow)], indirect=True
)
def test_tokens_depend_on_the_request_alone(folders, backend, kind, kv_dtype):
    model = load_model(folders[1 if kind == "plain" else 2])

    def core(**options):
        return make_core(model, kv_dtype=kv_dtype, **options)

    alone = run(core(), {"x": (PROMPT, PARAMS)})["x"]
    crowd = others(9)
    assert run(core(), {**crowd, "x": (PROMPT, PARAMS)})["x"] == alone
    assert run(core(token_budget=7, max_requests=1), {"x": (PROMPT, PARAMS)})["x"] == alone
    assert run(core(page_size=1), {"x": (PROMPT, PARAMS)})["x"] == alone
    cached = core(prefix_index="radix")  # pages are shared, and one is copied in part
    run(cached, {"before": ([*PROMPT[:77], 5, 6, 7], greedy(3))})
    answer = run(cached, {"x": (PROMPT, PARAMS)})["x"]
    assert answer.last.num_cached == 77
    assert answer == alone
    assert preempted(core(token_budget=64, speculate="off"), crowd) == alone
    guesses = guess_with(core(), Guesser({tuple(PROMPT): alone.tokens}))
    assert run(guesses, {"x": (PROMPT, PARAMS)})["x"] == alone
    # the prompt's last page is copied
    samples = SamplingParams(temperature=1.0, max_tokens=6, n=2, seed=99)
    together = run(core(), {"x": (PROMPT, samples)})
    assert together["x:1"] == run(core(), {"x": (PROMPT, samples.sample(1))})["x"]


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_adapters_have_the_bits_of_a_lone_request(folders, tmp_path, kv_dtype):
    lora = make_lora(tmp_path / "lora", folders[0], 1)

    def core():
        made = make_core(load_model(folders[1]), kv_dtype=kv_dtype, max_loras=1)
        made.part(AdapterStore).load_now(1, "a", str(lora))
        return made

    requests = {"with": (PROMPT, PARAMS, 1), "without": (PROMPT, PARAMS, 0)}
    together = ask(core(), requests)
    assert together["with"].tokens != together["without"].tokens
    assert all(ask(core(), {name: one})[name] == together[name] for name, one in requests.items())


def logprobs(model, **options):
    core = make_core(model, **options)
    answer = run(core, {"x": (PROMPT, greedy(1, prompt_logprobs=0))})["x"]
    return torch.tensor([entry.logprob for entry in answer.prompt_logprobs])


def test_fewer_bits_are_close_to_exact(folders, backend):
    model = load_model(folders[1])
    exact = logprobs(model)
    errors = {
        name: float((logprobs(model, kv_dtype=name) - exact).abs().mean())
        for name in ("fp16", "bf16", "int8", "int4")
    }
    assert 0 < errors["fp16"] < errors["bf16"] < errors["int8"] < errors["int4"]
    assert errors["int8"] < 0.05
    assert torch.equal(logprobs(model, kv_dtype="fp32"), exact)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_values_that_are_no_numbers_reach_their_request_alone(tmp_path, backend, kv_dtype):
    make_llama(tmp_path, num_hidden_layers=2, vocab_size=128, tie_word_embeddings=False)
    broken = load_file(tmp_path / "model.safetensors")
    broken["model.embed_tokens.weight"][7] = float("nan")
    save_file(broken, tmp_path / "model.safetensors", {"format": "pt"})
    model = load_model(tmp_path)
    good = ([20 + i % 9 for i in range(40)], greedy(6))
    alone = run(make_core(model, kv_dtype=kv_dtype), {"good": good})["good"].tokens
    core = make_core(model, kv_dtype=kv_dtype)
    core.submit(Submit("good", *good))
    core.submit(Submit("bad", [9, 7, *[9] * 38], greedy(6)))
    tokens, failed = [], []
    while core.has_work:
        output, refused = core.step()
        failed += [(one.request_id, one.error) for one in refused]
        tokens += [token for delta in output.deltas for token in delta.token_ids]
    assert failed == [("bad", "ModelFailed")]
    assert tokens == alone
    assert run(core, {"good": good})["good"].tokens == alone


@pytest.mark.parametrize(
    ("asked", "more", "fix"),
    [
        ("fp8", {}, "float32, bfloat16, float16, int8, int4"),
        ("int2", {}, "fp8, int8, int4"),
        ("", {}, "fp8, int8, int4"),
        ("int4", {"head_dim": 15}, "--kv-dtype int8"),
    ],
)
def test_what_cannot_be_is_refused(folders, asked, more, fix):
    config = load_model(folders[1]).config
    config = replace(config, layers=tuple(replace(spec, **more) for spec in config.layers))
    with pytest.raises(ConfigError, match=r"kv.dtype") as refused:
        resolve(EngineOptions(device="cpu", kv_dtype=asked), config, machine.detect())
    assert fix in refused.value.fix
    assert refused.value.param == "kv_dtype"
