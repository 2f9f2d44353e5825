"""Pictures across pages: what a prompt shares of another's pages, and what it does not."""

import pytest

from tests.helpers import greedy, make_core, make_llama, run
from tests.vectors import VectorLlama, with_vectors
from tidemill.quant import SCHEMES, WeightPlan
from tidemill.weights.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vectors")
    make_llama(folder, seed=5)
    checkpoint = open_checkpoint(folder)
    return VectorLlama.load(
        checkpoint, VectorLlama.read_config(checkpoint), WeightPlan(SCHEMES["float32"])
    )


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_prompts_that_part_within_a_picture_share_no_page_after_where_it_begins(model, index):
    """The tree knows the prompt up to the middle of the picture, which is pages after the one in
    which it begins."""
    prompt, segments, contents = with_vectors(range(10, 90), [(20, 24)], model.config.hidden_size)
    other = [*prompt[:40], 4, *prompt[41:]]
    params = greedy(12, logprobs=2)
    options = {"prefix_index": index, "page_size": 16}
    alone = run(make_core(model, **options), {"x": (other, params, segments, contents)})["x"]
    core = make_core(model, **options)
    run(core, {"first": (prompt, params, segments, contents)})
    assert run(core, {"x": (other, params, segments, contents)})["x"] == alone


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_logprobs_asked_for_from_within_a_picture(model, index):
    """What may be found ends there, too."""
    asked = with_vectors(range(10, 90), [(20, 24)], model.config.hidden_size)
    prompt, *inputs = asked
    params = greedy(6, logprobs=1, prompt_logprobs=1, prompt_logprobs_start=41)
    options = {"prefix_index": index, "page_size": 16}
    alone = run(make_core(model, **options), {"x": (prompt, params, *inputs)})["x"]
    core = make_core(model, **options)
    run(core, {"first": (prompt, greedy(1), *inputs)})
    assert run(core, {"x": (prompt, params, *inputs)})["x"].tokens == alone.tokens
