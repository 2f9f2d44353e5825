"""Families with mixtures of experts against Transformers in float32, on small random models."""

import pytest
import torch

from tests.helpers import greedy, load_model, make_core, reference_agrees, run
from tests.models.test_llama import prompt_logits, prompts

SIZES = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "rms_norm_eps": 1e-6, "pad_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
FAMILIES = {
    "Mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "Qwen2Moe": {
        "num_experts": 9, "num_experts_per_tok": 3, "moe_intermediate_size": 36, "shared_expert_intermediate_size": 52,
        "mlp_only_layers": [1],
    },
    "Qwen3Moe": {
        "num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True,
        "decoder_sparse_step": 2,
    },
    "GptOss": {
        "num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 16, "sliding_window": 40, "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "rope_theta": 150000.0,
            "original_max_position_embeddings": 64,
        },
    },
}  # fmt: skip


def make(name: str, **more):
    """A random model. Routers with weights large enough to choose clearly."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | FAMILIES[name] | more)
    reference = getattr(transformers, f"{name}ForCausalLM")(config).eval().float()
    for weight_name, weight in reference.named_parameters():
        if "norm" in weight_name:
            weight.data.normal_(1.0, 0.2)
        elif "bias" in weight_name or "sinks" in weight_name:
            weight.data.normal_(0.0, 0.3)
        elif ".gate.weight" in weight_name or "router" in weight_name or "shared_expert_gate" in weight_name:
            weight.data.normal_(0.0, 0.3)
    return reference


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request, tmp_path_factory):
    reference = make(request.param)
    path = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(path)
    return reference, path


def check(reference, path, num_prompts: int, num_tokens: int, dtype: str = "float32") -> None:
    """Logits of the longest prompts, and tokens after all of them."""
    model = load_model(path, dtype)
    asked = prompts(num_prompts, model.config.vocab_size)
    with torch.inference_mode():
        for prompt in sorted(asked.values(), key=len)[-2:]:
            expected = reference(torch.tensor([prompt])).logits[0]
            assert (prompt_logits(model, prompt) - expected).abs().max() < 1e-3
    outputs = run(make_core(model), {name: (prompt, greedy(num_tokens)) for name, prompt in asked.items()})
    results = [reference_agrees(reference, prompt, outputs[name].tokens) for name, prompt in asked.items()]
    assert sum(agreed for agreed, _ in results) >= 0.98 * num_prompts * num_tokens


def test_tokens_and_logits_equal_transformers(saved, backend):
    check(*saved, num_prompts=4, num_tokens=8)


@pytest.mark.slow
def test_many_tokens_equal_transformers(saved, backend):
    check(*saved, num_prompts=20, num_tokens=32)


def test_a_forward_pass_is_recorded(saved):
    _, path = saved
    assert make_core(load_model(path)).runner.fallback == ""
