"""BLOOM, which has ALiBi: against Transformers in float32, in any company, on the GPU's runner
without a GPU."""

import pytest
import torch

from tests.helpers import greedy, load_model, make_core, reference_agrees, run
from tests.models import test_families
from tests.models.test_llama import prompt_logits, prompts
from tests.weights.test_safetensors import edit_config, edit_weights, fails
from tidemill.kernels import native
from tidemill.types import events


def make(**more):
    from transformers import BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 256,
        "hidden_size": 48,
        "n_layer": 3,
        "n_head": 6,
        "initializer_range": 0.2,
    }
    model = BloomForCausalLM(BloomConfig(**sizes | more)).eval().float()
    for name, weight in model.named_parameters():
        is_norm = name.endswith("weight") and ("norm" in name or "ln_f" in name)
        if is_norm or name.endswith("bias"):
            weight.data.normal_(float(is_norm), 0.2)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path, model = tmp_path_factory.mktemp("bloom"), make()
    model.save_pretrained(path)
    return model, path


def test_tokens_and_logits_equal_transformers(saved):
    reference, path = saved
    model = load_model(path)
    asked = prompts(6, 256)
    with torch.inference_mode():
        for prompt in sorted(asked.values(), key=len)[-2:]:
            assert (
                prompt_logits(model, prompt) - reference(torch.tensor([prompt])).logits[0]
            ).abs().max() < 1e-3
    outputs = run(make_core(model), {name: (prompt, greedy(12)) for name, prompt in asked.items()})
    agreed = [
        reference_agrees(reference, prompt, outputs[name].tokens)[0]
        for name, prompt in asked.items()
    ]
    assert sum(agreed) >= 0.98 * 6 * 12


def test_tokens_do_not_depend_on_the_company(saved):
    test_families.test_tokens_do_not_depend_on_the_company(saved[1])


def test_it_is_computed_by_the_compiled_kernels_alone(saved):
    core = make_core(load_model(saved[1]))
    fell_back = [event for event in core.take_events() if isinstance(event, events.KernelsFellBack)]
    assert bool(fell_back) == (native.lib is None)


def test_names_without_the_prefix(saved, tmp_path):
    """As in the first files of the family, which name sizes differently, too."""
    reference, path = saved
    reference.save_pretrained(tmp_path)

    def rename(weights):
        for name in list(weights):
            weights[name.removeprefix("transformer.")] = weights.pop(name)

    edit_weights(tmp_path, rename)
    edit_config(
        tmp_path, hidden_size=None, n_embed=48, n_head=None, num_attention_heads=6, seq_length=512
    )
    model = load_model(tmp_path)
    assert model.config.max_context == 512
    assert torch.equal(prompt_logits(model, [5, 6, 7]), prompt_logits(load_model(path), [5, 6, 7]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_head": 5}, "5 heads do not divide 48 dimensions"),
        (
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm",
        ),
        ({"n_layer": 2}, "has no place"),
        ({"hidden_size": 96}, "the tensors hold"),
    ],
)
def test_wrong_configurations(saved, changes, words, tmp_path):
    saved[0].save_pretrained(tmp_path)
    edit_config(tmp_path, **changes)
    fails(tmp_path, words)


def test_a_missing_tensor(saved, tmp_path):
    saved[0].save_pretrained(tmp_path)
    edit_weights(tmp_path, test_families.pop("transformer.word_embeddings_layernorm.bias"))
    fails(tmp_path, "word_embeddings_layernorm.bias is missing")
