"""Layers with a window: pages that no query sees any more are given back, and no bit of any answer
changes."""

import dataclasses

import pytest

from tests.helpers import engine_config, greedy, load_model, make_core, run
from tests.models.test_families import LAYERS, SIZES
from tidemill.engine.core import EngineCore
from tidemill.engine.load import core_of
from tidemill.types.cache_layout import lay_out, one_group
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

WINDOW = 20


@pytest.fixture(scope="module", params=["some layers", "all layers"])
def model(request, tmp_path_factory):
    import transformers

    path = tmp_path_factory.mktemp("windows")
    if request.param == "all layers":
        transformers.MistralForCausalLM(
            transformers.MistralConfig(**SIZES, sliding_window=WINDOW)
        ).save_pretrained(path)
    else:
        config = transformers.Gemma3TextConfig(
            **SIZES, head_dim=24, sliding_window=WINDOW, layer_types=LAYERS
        )
        transformers.Gemma3ForCausalLM(config).save_pretrained(path)
    return load_model(path)


def without_groups(model, **options) -> EngineCore:
    """An engine that keeps every page."""
    config = engine_config(model, **options)
    layout = one_group(model.config.num_layers, config.page_size)
    return core_of(model, dataclasses.replace(config, layout=layout, num_pages=64))


PROMPTS = {
    f"p{n}": ([(7 * i + n) % 250 + 2 for i in range(n)], greedy(40)) for n in (1, 19, 70, 150)
}
PROMPTS["drawn"] = PROMPTS["p70"][0], SamplingParams(max_tokens=40, seed=3, temperature=1.0)


@pytest.fixture(scope="module")
def expected(model):
    return run(without_groups(model), PROMPTS)


def test_the_layout_follows_the_windows(model):
    layout = engine_config(model).layout
    assert {group.window for group in layout.groups} == (
        {WINDOW} if model.config.layers[1].window else {0, WINDOW}
    )
    assert engine_config(model, max_context=WINDOW).layout == one_group(4, 16)
    assert lay_out([0, 512, 512, 512, 512, 512] * 4 + [512, 512], 16, 4096).layers_per_page == 4


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"token_budget": 16, "max_requests": 8},
        {"page_size": 1},
        {"prefix_caching": False},
        {"max_requests": 1},
    ],
)
def test_no_bit_changes(model, expected, options):
    answers = run(make_core(model, **options), PROMPTS)
    assert answers == expected


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_a_cached_prefix_and_preemption_change_no_bit(model, expected, index):
    core = make_core(model, prefix_index=index)
    run(core, PROMPTS)
    again = run(core, PROMPTS)
    assert again == expected
    small = make_core(
        model,
        kv_memory_bytes=engine_config(model).layout.num_pages_for(256, 64) * page_bytes(model),
        token_budget=64,
        prefix_index=index,
    )
    assert run(small, PROMPTS) == expected


def page_bytes(model):
    config = engine_config(model)
    return config.kv_bytes // config.num_pages


def test_samples_of_one_prompt_share_what_they_see(model):
    prompt = PROMPTS["p70"][0]
    params = SamplingParams(max_tokens=30, seed=5, temperature=1.0, n=3)
    keep = run(without_groups(model), {"x": (prompt, params)})
    assert run(make_core(model), {"x": (prompt, params)}) == keep


def test_pages_are_constant_in_the_length(model):
    """A long answer holds no more pages of a windowed group than a short one."""
    assert_pages_are_constant(
        make_core(model, prefix_caching=False, token_budget=64), PROMPTS["p150"][0], 100
    )


@pytest.mark.slow
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_32k_tokens_hold_as_many_pages_as_250(tmp_path, prefix_caching):
    """Half prompt, half answer, in memory that holds no more than that many pages."""
    import transformers

    sizes = SIZES | {"max_position_embeddings": 32768, "num_hidden_layers": 2}
    transformers.MistralForCausalLM(
        transformers.MistralConfig(**sizes, sliding_window=WINDOW)
    ).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    options = {"max_context": 32768, "token_budget": 64, "prefix_caching": prefix_caching}
    config = engine_config(model, **options, max_requests=1)
    layout, page_bytes = config.layout, config.kv_bytes // config.num_pages
    assert layout.num_pages_for(32768, 64) == layout.num_pages_for(250, 64)
    core = make_core(
        model,
        **options,
        max_requests=1,
        kv_memory_bytes=(layout.num_pages_for(250, 64) + 1) * page_bytes,
    )
    assert_pages_are_constant(core, [i % 250 + 2 for i in range(16384)], 16384)


def assert_pages_are_constant(core, prompt, num_tokens):
    core.submit(Submit("x", prompt, greedy(num_tokens), []))
    most = {
        g: group.most_pages(256, 64)
        for g, group in enumerate(core.scheduler.kv.groups)
        if group.window
    }
    longest = 0
    while core.has_work:
        core.step()
        for request in core.scheduler.table.holders():
            tables = core.scheduler.kv.tables(request.seq)
            assert all(sum(page > 0 for page in tables[g]) <= most[g] for g in most)
            longest = max(longest, request.num_computed)
    assert longest > len(prompt) + num_tokens // 2  # the last step's length is not seen here
