"""Quantized weights on the GPU's runner without a GPU, see test_cuda_runner.py: what the
dequantized model says, and what it says alone, among others, in chunks and from the prefix
cache."""

import pytest
import torch
from gguf import GGMLQuantizationType

from tests.helpers import greedy, load_model, make_core, make_llama, run
from tests.runner.test_cuda_runner import folder, ids, on_gpu  # noqa: F401 - fixtures
from tests.weights.test_gguf import write_gguf

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
    # from the prefix cache
    alone = {name: run(core, {name: request})[name] for name, request in REQUESTS.items()}
    chunked = run(
        on_gpu(quantization=quantization, token_budget=8, prefix_caching=False),
        {"long": REQUESTS["long"]},
    )
    for name, answer in among.items():
        assert answer.tokens == alone[name].tokens
        assert logprobs(answer) == logprobs(alone[name])
    assert logprobs(chunked["long"]) == logprobs(among["long"])


@pytest.mark.slow
def test_a_gguf_stays_as_it_is_stored(on_gpu, tmp_path):  # noqa: F811
    """Log probabilities are near those of the CPU's engine with the dequantized weights; the table
    is the head as well."""
    reference = make_llama(
        tmp_path, vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    path = write_gguf(tmp_path / "q.gguf", reference, quantize=GGMLQuantizationType.Q8_0)
    core = on_gpu(path)
    assert core.config.scheme == "quantized"
    asked = {"long": (ids(40, 2), greedy(1, prompt_logprobs=0))}
    mine, theirs = (
        run(one, asked)["long"] for one in (core, make_core(load_model(path), max_requests=8))
    )
    values = [
        torch.tensor([entry.logprob for entry in answer.prompt_logprobs if entry])
        for answer in (mine, theirs)
    ]
    error = (values[0] - values[1]).std() / values[1].std()  # scales are rounded to bfloat16
    assert error < 0.02, error
