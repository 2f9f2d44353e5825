"""The last layer for the tokens that are read alone: the same bits as for all of them, on a CPU and
in the GPU's runner."""

from __future__ import annotations

import pytest

from tests.engine.test_lora import ask, make_lora, with_loras
from tests.helpers import Guesser, greedy, guess_with, load_model, make_core, run
from tests.models.test_families import make as make_family
from tests.models.test_moe import make as make_experts
from tests.runner.test_cuda_runner import REQUESTS, folder, ids, on_gpu  # noqa: F401 - fixtures
from tidemill.runner import cpu_kinds, cuda_last

PLAIN = {name: REQUESTS[name] for name in ("long", "avoids", "one", "other", "several")}
POOLED = {
    "mean": (ids(50, 11), greedy(1, pooling="mean")),
    "last": (ids(45, 12), greedy(1, pooling="last")),
}


def count(monkeypatch, owner, name):
    """How many tokens are read, call by call."""
    seen, plain = [], getattr(owner, name)

    def counted(self, *given):
        seen.append(
            len(given[1]) if owner is cpu_kinds.LastLayerApart else given[1][1] - given[1][0]
        )
        return plain(self, *given)

    monkeypatch.setattr(owner, name, counted)
    return seen


def assert_same_bits(core, other, requests):
    answers, expected = run(core, requests), run(other, requests)
    assert answers == expected
    for name, (_, params) in requests.items():
        if params.pooling is not None:
            assert answers[name].last.embedding == expected[name].last.embedding


def test_on_a_cpu(folder, monkeypatch):  # noqa: F811
    """Chunks, prompts that end beside sequences that decode, several samples, what is asked about
    prompts, a cached prefix."""
    seen = count(monkeypatch, cpu_kinds.LastLayerApart, "forward")
    model = load_model(folder)
    core, whole = (make_core(model, max_requests=8, token_budget=40) for _ in range(2))
    whole.runner.kinds = [whole.runner.whole]
    assert_same_bits(core, whole, PLAIN)
    assert 0 in seen, "a chunk in the middle of a prompt"
    assert max(seen) > 1
    num = len(seen)
    assert_same_bits(core, whole, {"one": REQUESTS["one"]})  # from the prefix cache
    assert_same_bits(core, whole, POOLED)
    assert len(seen) == num, "few tokens are computed, or all of them are read"
    assert_same_bits(core, whole, REQUESTS)


@pytest.mark.parametrize("family", ["Gemma3", "GPT2", "Phi", "Olmo", "BitNet", "Olmo2"])
def test_families(family, tmp_path, monkeypatch):
    """OLMo 2 has no norm before its attention: all of its tokens go through the last layer."""
    make_family(family).save_pretrained(tmp_path)
    seen = count(monkeypatch, cpu_kinds.LastLayerApart, "forward")
    model = load_model(tmp_path)
    core, whole = (make_core(model, max_requests=8, token_budget=40) for _ in range(2))
    whole.runner.kinds = [whole.runner.whole]
    assert_same_bits(
        core,
        whole,
        {"long": (ids(90, 1), greedy(3, logprobs=2)), "other": (ids(41, 2), greedy(3, logprobs=2))},
    )
    assert bool(seen) == (family != "Olmo2")


@pytest.mark.parametrize("family", ["Qwen3Moe", "Olmoe"])
def test_families_with_experts(family, tmp_path):
    make_experts(family).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    core, whole = (
        make_core(model, max_requests=8, token_budget=40, speculate="off") for _ in range(2)
    )
    whole.runner.kinds = [whole.runner.whole]
    assert_same_bits(
        core,
        whole,
        {"long": (ids(90, 1), greedy(3, logprobs=2)), "other": (ids(41, 2), greedy(3, logprobs=2))},
    )


def test_adapters(folder, tmp_path, monkeypatch):  # noqa: F811
    from transformers import LlamaForCausalLM

    base = LlamaForCausalLM.from_pretrained(folder)
    paths = [make_lora(tmp_path / f"l{i}", base, i, rank=rank) for i, rank in enumerate((4, 20))]
    requests = {f"r{i}": (ids(60 - i, i), greedy(3, logprobs=1), i) for i in range(3)}
    seen = count(monkeypatch, cpu_kinds.LastLayerApart, "forward")
    core, whole = (with_loras(folder, *paths) for _ in range(2))
    whole.runner.kinds = [whole.runner.whole]
    assert ask(core, requests) == ask(whole, requests)
    assert seen


def test_drafts_beside_prompts(folder, monkeypatch):  # noqa: F811
    requests = {
        "loops": ([7, 8, 9] * 6, greedy(9)),
        "long": (ids(150, 2), greedy(2)),
        "other": (ids(90, 3), greedy(2)),
    }
    seen = count(monkeypatch, cpu_kinds.LastLayerApart, "forward")
    model = load_model(folder)
    expected = run(make_core(model, max_requests=8, token_budget=40, speculate="off"), requests)
    drafter = Guesser(
        {tuple(prompt): expected[name].tokens for name, (prompt, _) in requests.items()}, 0.6
    )
    assert (
        run(guess_with(make_core(model, max_requests=8, token_budget=40), drafter), requests)
        == expected
    )
    assert max(seen) > 3


@pytest.mark.slow
def test_in_the_gpus_runner(on_gpu, monkeypatch):  # noqa: F811
    """Graphs of 32 tokens end with the last layer's keys and values."""
    seen = count(monkeypatch, cuda_last.LastLayerApart, "sample")
    core = on_gpu()
    monkeypatch.setattr(cuda_last, "FROM_TOKENS", 64)
    assert_same_bits(core, whole := on_gpu(), PLAIN)
    assert_same_bits(core, whole, POOLED | {"asks": REQUESTS["asks"]})
    assert 0 in seen
    assert max(seen) > 1
