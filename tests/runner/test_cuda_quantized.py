"""Quantized weights on the GPU's runner without a GPU, see test_cuda_runner.py: what the dequantized model says, and what it says
alone, among others, in chunks and from the prefix cache."""

import pytest

from tests.helpers import greedy, run
from tests.runner.test_cuda_runner import folder, ids, on_gpu  # noqa: F401 - fixtures

REQUESTS = {
    "short": ([5, 6, 7], greedy(4, logprobs=0)),
    "long": (ids(40, 2), greedy(4, logprobs=0)),
    "other": (ids(21, 3), greedy(3, logprobs=0)),
}


def logprobs(answer):
    return [entry.logprob for entry in answer.logprobs]


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_plain_weights_are_quantized_as_they_are_read(quantization, on_gpu):  # noqa: F811
    core = on_gpu(quantization=quantization)
    among = run(core, REQUESTS)
    alone = {name: run(core, {name: request})[name] for name, request in REQUESTS.items()}  # from the prefix cache
    chunked = run(on_gpu(quantization=quantization, token_budget=8, prefix_caching=False), {"long": REQUESTS["long"]})
    for name, answer in among.items():
        assert answer.tokens == alone[name].tokens
        assert logprobs(answer) == logprobs(alone[name])
    assert logprobs(chunked["long"]) == logprobs(among["long"])
