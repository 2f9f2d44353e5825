"""Decoders saved without their heads, as those that make embeddings are: against Transformers in
float32."""

import json

import pytest
import torch

from tests.encoders import pooling_files
from tests.helpers import greedy, load_model, make_core, make_llama, run
from tests.models.test_families import make
from tests.models.test_llama import prompts
from tests.models.test_settings import tiny
from tests.weights.test_safetensors import edit_config, edit_weights, fails
from tidemill.errors import InvalidRequest
from tidemill.frontend.scoring import check_scores
from tidemill.types.sampling import SamplingParams


def save(family, path):
    reference = make_llama(tie_word_embeddings=False) if family == "Llama" else make(family)
    reference.model.save_pretrained(path)
    return reference


def vectors(core, asked, pooling):
    params = SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling)
    answers = run(core, {name: (ids, params) for name, ids in asked.items()})
    return {
        name: torch.tensor(answer.last.embedding, dtype=torch.float64)
        for name, answer in answers.items()
    }


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_vectors_equal_transformers(family, tmp_path):
    reference = save(family, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [f"{family}Model"]
    model = load_model(tmp_path)
    assert not model.config.has_head
    core, asked = make_core(model), prompts(5, 256)
    last, mean = (vectors(core, asked, pooling) for pooling in ("last", "mean"))
    for name, prompt in asked.items():
        with torch.inference_mode():
            states = reference.model(torch.tensor([prompt])).last_hidden_state[0].double()
        for made, expected in ((last, states[-1]), (mean, states.mean(0))):
            assert (made[name] - expected / expected.norm()).abs().max() < 1e-4


def test_names_may_have_the_prefix(tmp_path):
    save("Qwen3", tmp_path)
    asked = {"x": list(range(5, 40))}
    bare = vectors(make_core(load_model(tmp_path)), asked, "last")

    def rename(weights):
        for name in list(weights):
            weights[f"model.{name}"] = weights.pop(name)

    edit_weights(tmp_path, rename)
    model = load_model(tmp_path)
    assert not model.config.has_head
    assert torch.equal(vectors(make_core(model), asked, "last")["x"], bare["x"])


def test_without_a_head_nothing_is_generated(tmp_path):
    save("Qwen3", tmp_path)
    config = load_model(tmp_path).config
    assert config.own_pooling == "last"
    with pytest.raises(
        InvalidRequest, match=r"has no output head: it makes embeddings and generates no text"
    ):
        config.check_pooling(None)
    with pytest.raises(InvalidRequest, match=r"knows nothing of the others"):
        config.check_pooling("cls")


def test_a_tied_head_generates(tmp_path):
    """Qwen3-Embedding is called Qwen3ForCausalLM, and has the names of its base model."""
    reference = make("Qwen3 tied")
    reference.model.save_pretrained(tmp_path / "base")
    reference.save_pretrained(tmp_path / "whole")
    edit_config(tmp_path / "base", architectures=["Qwen3ForCausalLM"])
    asked = {"x": (list(range(5, 40)), greedy(8))}
    base, whole = (
        run(make_core(load_model(tmp_path / name)), asked)["x"] for name in ("base", "whole")
    )
    assert base.tokens == whole.tokens


def test_the_folder_says_how_a_text_becomes_a_vector(tmp_path):
    save("Qwen3", tmp_path)
    for mode, expected in (("lasttoken", "last"), ("mean_tokens", "mean")):
        pooling_files(tmp_path, mode)
        config = load_model(tmp_path).config
        assert (config.embeds_by, config.own_pooling) == (expected, expected)
    pooling_files(tmp_path, "cls_token")
    fails(tmp_path, "the pooling cls is not supported", "Mean and last are.")


def test_what_is_missing_is_named(tmp_path):
    save("Mistral", tmp_path)
    edit_config(tmp_path, is_causal=False)
    fails(tmp_path, "is_causal is false")
    edit_config(tmp_path, is_causal=True)
    edit_weights(tmp_path, lambda weights: weights.pop("layers.1.mlp.up_proj.weight"))
    fails(tmp_path, "tensor model.layers.1.mlp.up_proj.weight is missing")


@pytest.mark.parametrize("family", ["Gemma3Text", "GPT2", "Mamba", "Gemma2", "Olmo2", "Phi"])
def test_base_models_of_other_families(family, tmp_path):
    reference = tiny(tmp_path / "whole", family, tie_word_embeddings=False)
    base = reference.base_model
    base.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [f"{family}Model"]
    model, prompt = load_model(tmp_path), list(range(5, 60))
    assert model.config.own_pooling == "last"
    made = vectors(make_core(model), {"x": prompt}, "mean")["x"]
    with torch.inference_mode():
        expected = base(torch.tensor([prompt])).last_hidden_state[0].double().mean(0)
    assert (made - expected / expected.norm()).abs().max() < 1e-4


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("family", ["Qwen3", "Llama", "GPT2", "Gemma3Text", "Bloom"])
def test_classifiers_equal_transformers(family, num_labels, tmp_path):
    import transformers

    config = tiny(tmp_path / "whole", family).config
    config.num_labels = num_labels
    torch.manual_seed(1)
    reference = getattr(transformers, f"{family}ForSequenceClassification")(config).eval().float()
    reference.save_pretrained(tmp_path)
    model, asked = load_model(tmp_path), prompts(4, 96)
    assert model.config.own_pooling == "score"
    core = make_core(model, token_budget=40)  # in several chunks
    for name, scores in vectors(core, asked, "score").items():
        with torch.inference_mode():
            expected = reference(torch.tensor([asked[name]])).logits[0].double()
        expected = expected.sigmoid() if num_labels == 1 else expected
        assert (scores - expected).abs().max() < 1e-4
    with pytest.raises(InvalidRequest, match="generates no text"):
        model.config.check_pooling(None)
    if num_labels == 1:
        assert check_scores(model.config)
