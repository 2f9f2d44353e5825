"""The GPU's runner with 8-bit keys and values, interpreted: what it says is what it says in any
other company."""

import pytest

pytest.importorskip("triton")

from tests.helpers import greedy, load_model, make_core, make_llama, run
from tests.runner.test_cuda_runner import ids, on_gpu
from tidemill.errors import ConfigError

__all__ = ["on_gpu"]
COMMON = ids(34, 1)
REQUESTS = {
    "one": ([*COMMON, 8], greedy(2, logprobs=1)),
    "other": ([*COMMON, 9, 10], greedy(2, logprobs=1)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cuda")
    make_llama(
        path, vocab_size=64, hidden_size=32, intermediate_size=80, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=2048,
    )  # fmt: skip
    return path


def said(answers, name):
    return answers[name].tokens, [entry.logprob for entry in answers[name].logprobs]


@pytest.mark.slow
def test_fp8_in_any_company(on_gpu):
    """Among others, from pages in the prefix cache, alone in chunks of 16: equal bits; and near
    what bfloat16 has."""
    core = on_gpu(kv_dtype="fp8")
    page_bytes = core.runner.cache[0].numel() * core.runner.cache.element_size()
    assert page_bytes == 2 * 16 * (32 + 2) == core.config.kv_bytes // core.config.num_pages
    answers = run(core, REQUESTS)
    assert said(run(core, {"one": REQUESTS["one"]}), "one") == said(answers, "one")
    alone = on_gpu(kv_dtype="fp8", token_budget=16, prefix_caching=False)
    assert said(run(alone, {"one": REQUESTS["one"]}), "one") == said(answers, "one")
    plain = said(run(on_gpu(), {"one": REQUESTS["one"]}), "one")[1]
    assert said(answers, "one")[1][:1] == pytest.approx(plain[:1], abs=0.3)
    assert said(answers, "one")[1] != plain


def test_int8_says_what_the_cpu_says(folder, on_gpu):
    """Which stores the same codes and scales. Again from pages of the prefix cache: the same bits."""
    core = on_gpu(kv_dtype="int8")
    mine = run(core, {"one": REQUESTS["one"]})
    assert said(run(core, {"one": REQUESTS["one"]}), "one") == said(mine, "one")
    theirs = run(make_core(load_model(folder), kv_dtype="int8"), {"one": REQUESTS["one"]})
    assert mine["one"].tokens == theirs["one"].tokens
    assert said(mine, "one")[1] == pytest.approx(said(theirs, "one")[1], abs=0.02)


def test_flash_attention_is_not_asked(on_gpu):
    assert (
        on_gpu(kv_dtype="fp8", fast_math=True).runner.flash.why
        == "it does not read keys and values with scales"
    )


def test_what_a_gpu_does_not_have_is_refused(on_gpu, tmp_path):
    with pytest.raises(ConfigError, match="kvquant4"):
        on_gpu(kv_dtype="kvquant4")
    with pytest.raises(ConfigError, match="at least 64 dimensions"):
        on_gpu(kv_dtype="int4")
    make_llama(
        tmp_path,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    with pytest.raises(ConfigError, match="at least 32 dimensions"):
        on_gpu(tmp_path, kv_dtype="fp8")
