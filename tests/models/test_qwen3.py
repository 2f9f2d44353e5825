"""Qwen3 against Transformers: norms of query and key heads, in every path."""

import pytest
import torch

from tests.helpers import greedy, load_model, make_core, reference_agrees, run
from tests.models.test_llama import prompt_logits, prompts


@pytest.fixture(scope="module", params=[(4, 2, 16, True), (6, 2, 24, False)], ids=["tied", "untied"])
def saved(request, tmp_path_factory):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    heads, kv_heads, dim, tied = request.param
    torch.manual_seed(0)
    reference = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=256, hidden_size=48, intermediate_size=100, num_hidden_layers=3, num_attention_heads=heads,
            num_key_value_heads=kv_heads, head_dim=dim, max_position_embeddings=256, tie_word_embeddings=tied,
            initializer_range=0.2, rms_norm_eps=1e-6,
        )
    ).eval().float()  # fmt: skip
    for name, weight in reference.named_parameters():
        if "norm" in name:
            weight.data.normal_(1.0, 0.2)
    path = tmp_path_factory.mktemp("qwen3")
    reference.save_pretrained(path)
    return reference, path


def test_tokens_and_logits_equal_transformers(saved, backend):
    reference, path = saved
    model = load_model(path)
    asked = prompts(8, model.config.vocab_size)
    with torch.inference_mode():
        for prompt in list(asked.values())[:3]:
            expected = reference(torch.tensor([prompt])).logits[0]
            assert (prompt_logits(model, prompt) - expected).abs().max() < 1e-3
    answers = run(make_core(model), {name: (prompt, greedy(24)) for name, prompt in asked.items()})
    results = [reference_agrees(reference, prompt, answers[name].tokens) for name, prompt in asked.items()]
    assert sum(agreed for agreed, _ in results) >= 0.98 * 8 * 24
