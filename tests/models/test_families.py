"""Each family against Transformers in float32, on small random models; contexts go beyond every window."""

import pytest
import torch

from tests.helpers import greedy, load_model, make_core, reference_agrees, run
from tests.models.test_llama import prompt_logits, prompts

SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 100, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "rms_norm_eps": 1e-6, "pad_token_id": 0,
}  # fmt: skip
NUM_PROMPTS = 12
LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
FAMILIES = {
    "Qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "Qwen3 untied": {"hidden_size": 48, "head_dim": 24, "num_attention_heads": 6, "tie_word_embeddings": False},
    "Qwen2": {},
    "Qwen2 with windows": {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 2},
    "Mistral": {"sliding_window": 40},
    "SmolLM3": {"no_rope_layers": [1, 0, 1, 0]},
    "Gemma2": {
        "head_dim": 16, "sliding_window": 40, "layer_types": LAYERS, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
    },
    "Gemma3": {"head_dim": 24, "sliding_window": 33, "layer_types": LAYERS, "query_pre_attn_scalar": 30},
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request, tmp_path_factory):
    import transformers

    name = request.param.split()[0]
    config = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")(**SIZES | FAMILIES[request.param])
    torch.manual_seed(0)
    reference = getattr(transformers, f"{name}ForCausalLM")(config).eval().float()
    for weight_name, weight in reference.named_parameters():
        if "norm" in weight_name or "bias" in weight_name:
            weight.data.normal_(1.0 if "norm" in weight_name and "Gemma" not in name else 0.0, 0.2)
    path = tmp_path_factory.mktemp(name)
    reference.save_pretrained(path)
    return reference, path


def test_tokens_and_logits_equal_transformers(saved, backend):
    reference, path = saved
    model = load_model(path)
    asked = prompts(NUM_PROMPTS, model.config.vocab_size)
    with torch.inference_mode():
        for prompt in sorted(asked.values(), key=len)[-3:]:
            expected = reference(torch.tensor([prompt])).logits[0]
            assert (prompt_logits(model, prompt) - expected).abs().max() < 1e-3
    outputs = run(make_core(model), {name: (prompt, greedy(24)) for name, prompt in asked.items()})
    results = [reference_agrees(reference, prompt, outputs[name].tokens) for name, prompt in asked.items()]
    assert sum(agreed for agreed, _ in results) >= 0.98 * NUM_PROMPTS * 24


def test_a_forward_pass_is_recorded(saved):
    _, path = saved
    assert make_core(load_model(path)).runner.fallback == ""
