"""Against Transformers in float32, on random models of every shape the family has."""

import numpy as np
import pytest
import torch

from tests.helpers import (
    engine_config,
    greedy,
    load_model,
    make_core,
    make_llama,
    reference_agrees,
    run,
)
from tidemill.runner.batch import gather_batch
from tidemill.runner.make_cpu import make_cpu_runner
from tidemill.sched.plan import NewRow, StepItem, StepPlan
from tidemill.sched.request import RowSpec

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SHAPES = {
    "gqa 9/3 tied": {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3},
    "gqa 4/1 untied": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "mha": {"num_key_value_heads": 4},
    "mha untied, odd sizes": {
        "num_key_value_heads": 4,
        "vocab_size": 251,
        "intermediate_size": 133,
        "tie_word_embeddings": False,
    },
    "head_dim apart from hidden size": {"head_dim": 24},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "rope linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "rope llama3": {"rope_scaling": LLAMA3, "rope_theta": 500000.0},
    "rope yarn": {"rope_scaling": YARN},
    "rope yarn, mscale 1 and 1": {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    "rope yarn, mscale 0.7 and 1.5": {
        "rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.5}
    },
    "gelu": {"hidden_act": "gelu"},
}


def prompts(num: int, vocab_size: int) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 150, (num,), generator=generator).tolist()
    return {
        f"p{i}": torch.randint(2, vocab_size, (n,), generator=generator).tolist()
        for i, n in enumerate(lengths)
    }


@torch.inference_mode()
def prompt_logits(model, prompt: list[int], **options) -> torch.Tensor:
    """Logits of every position, through the runner and its paged cache."""
    runner = make_cpu_runner(model, engine_config(model, **options))
    num_pages = -(-len(prompt) // runner.state.page_size)
    pages = np.arange(1, len(runner.state.tables) * num_pages + 1).reshape(-1, num_pages).tolist()
    row = NewRow(0, prompt, pages, RowSpec(greedy(1), len(prompt)))
    plan = StepPlan(0, [StepItem(0, 0, 0, len(prompt), True, 0)], [row])
    runner.state.stage(plan)
    runner.state.apply()
    batch = gather_batch(plan.items, runner.state)
    return model.logits(runner.forward(batch))


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_and_logits_equal_transformers(shape, tmp_path):
    reference = make_llama(tmp_path, **SHAPES[shape])
    model = load_model(tmp_path)
    asked = prompts(12, model.config.vocab_size)
    with torch.inference_mode():
        for prompt in list(asked.values())[:4]:
            expected = reference(torch.tensor([prompt])).logits[0]
            assert (prompt_logits(model, prompt) - expected).abs().max() < 1e-3
    answers = run(make_core(model), {name: (prompt, greedy(24)) for name, prompt in asked.items()})
    results = [
        reference_agrees(reference, prompt, answers[name].tokens) for name, prompt in asked.items()
    ]
    assert sum(agreed for agreed, _ in results) >= 0.98 * 12 * 24


@pytest.mark.parametrize("page_size", [1, 32])  # 16 is what the others have
def test_every_page_size(page_size, tmp_path):
    reference = make_llama(tmp_path, **SHAPES["gqa 9/3 tied"])
    model = load_model(tmp_path)
    asked = prompts(16, model.config.vocab_size)
    core = make_core(model, page_size=page_size, token_budget=100)
    answers = run(core, {name: (prompt, greedy(40)) for name, prompt in asked.items()})
    results = [
        reference_agrees(reference, prompt, answers[name].tokens) for name, prompt in asked.items()
    ]
    assert sum(agreed for agreed, _ in results) >= 0.98 * 16 * 40


def test_sharded_checkpoint_is_the_same_model(tmp_path):
    reference = make_llama(tmp_path / "one")
    reference.save_pretrained(tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    prompt = list(range(2, 90))
    one, many = (prompt_logits(load_model(tmp_path / name), prompt) for name in ("one", "many"))
    assert torch.equal(one, many)
