"""Rows of embeddings on the GPU's runner, its kernels interpreted: what the CPU's engine says, and
the same bits however a prompt is cut and whoever is in the batch."""

import pytest

from tests.helpers import greedy, load_model, make_core, run
from tests.runner.test_cuda_runner import assert_same, folder, ids, on_gpu  # noqa: F401 - fixtures
from tests.vectors import with_vectors
from tidemill.models.registry import ARCHITECTURES
from tidemill.types.inputs import EMBEDDINGS, PICTURE
from tidemill.types.sampling import SamplingParams

PLACES = [(3, 5), (10, 9), (30, 4)]


def request(params, kind=PICTURE, seed=0):
    prompt, segments, contents = with_vectors(ids(45, 1), PLACES, 32, kind, seed)
    return prompt, params, segments, contents


REQUESTS = {
    "one": request(greedy(4, logprobs=2)),
    "other": request(SamplingParams(temperature=0.9, seed=4, max_tokens=3, logprobs=1), seed=1),
    "text": (ids(20, 3), greedy(3, logprobs=1)),
}


@pytest.fixture
def engines_of_vectors(on_gpu, monkeypatch):  # noqa: F811
    monkeypatch.setitem(ARCHITECTURES, ("hf", "LlamaForCausalLM"), "tests.vectors:VectorLlama")
    return on_gpu


def test_vectors_on_the_gpu_are_those_of_the_cpu(engines_of_vectors, folder):  # noqa: F811
    expected = run(make_core(load_model(folder), max_requests=8), REQUESTS)
    core = engines_of_vectors()
    together = run(core, REQUESTS)
    assert_same(together, expected)
    assert run(core, {"one": REQUESTS["one"]})["one"] == together["one"]  # from the prefix cache
    assert run(engines_of_vectors(), {"one": REQUESTS["one"]})["one"] == together["one"]
    cut = run(
        engines_of_vectors(token_budget=16), {"one": request(greedy(4, logprobs=2), EMBEDDINGS)}
    )
    assert cut["one"] == together["one"]
