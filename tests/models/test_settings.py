"""What a family makes of config.json, against Transformers' configuration classes: keys and
defaults, keys that it does not know, rotations, windows."""

import dataclasses
import json
import sys

import numpy as np
import pytest
import torch
import transformers

from tests.helpers import load_model
from tests.models.test_llama import prompt_logits
from tests.weights.test_safetensors import edit_config, edit_weights, fails
from tidemill.distributed.world import Stage
from tidemill.kernels.rope import rope_frequencies
from tidemill.models.registry import ARCHITECTURES, model_class
from tidemill.models.settings import Nullable
from tidemill.quant import PLAIN
from tidemill.weights.checkpoint import open_checkpoint

CONFIGS = {
    "BitNet": "BitNetConfig", "Bloom": "BloomConfig", "GPT2": "GPT2Config", "Gemma2": "Gemma2Config",
    "Gemma3Text": "Gemma3TextConfig", "GptOss": "GptOssConfig", "Granite": "GraniteConfig", "GraniteMoe": "GraniteMoeConfig",
    "Llama": "LlamaConfig", "Mamba": "MambaConfig", "Mamba2": "Mamba2Config", "Mistral": "MistralConfig",
    "Mixtral": "MixtralConfig", "Olmo": "OlmoConfig", "Olmo2": "Olmo2Config", "Olmo3": "Olmo3Config", "Olmoe": "OlmoeConfig",
    "Phi": "PhiConfig", "Phi3": "Phi3Config", "Qwen2": "Qwen2Config", "Qwen2Moe": "Qwen2MoeConfig", "Qwen3": "Qwen3Config",
    "Qwen3Moe": "Qwen3MoeConfig", "Qwen3Next": "Qwen3NextConfig", "SmolLM3": "SmolLM3Config",
    **{
        name: f"{name}Config"
        for name in ("Dots1", "Ernie4_5", "Ernie4_5_Moe", "Glm4Moe", "MiniMaxM2", "SolarOpen",
                     "Arcee", "Cohere", "Cohere2", "Exaone4", "GPTNeoX", "Gemma", "Glm", "Glm4", "Helium", "Nemotron", "SeedOss",
                     "StableLm", "Starcoder2")
    },
    "Albert": "AlbertConfig", "Bert": "BertConfig", "Camembert": "CamembertConfig", "DistilBert": "DistilBertConfig",
    "Electra": "ElectraConfig", "MPNet": "MPNetConfig", "Roberta": "RobertaConfig", "XLMRoberta": "XLMRobertaConfig",
}  # fmt: skip
# Fields of the classes that change nothing of what is computed from a trained model's weights.
WITHOUT_EFFECT = {
    "initializer_range", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "pretraining_tp", "attention_dropout",
    "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob",
    "classifier_dropout", "classifier_dropout_prob", "dropout", "qa_dropout", "seq_classif_dropout", "output_router_logits",
    "router_aux_loss_coef", "router_jitter_noise", "residual_in_fp32", "rescale_prenorm_residual", "time_step_scale",
    "time_step_min", "time_step_max", "time_step_init_scheme", "time_step_floor", "use_mambapy", "use_associative_scan",
    "chunk_size", "reorder_and_upcast_attn", "slow_but_exact", "sinusoidal_pos_embds", "cross_attention_hidden_size",
    "add_cross_attention",  # refused with is_decoder
    "residual_dropout", "embedding_dropout", "is_decoder", "num_mtp_layers",
    "expand",  # of Mamba-2, where it must agree with the heads
}  # fmt: skip
OF_OTHERS = {  # of heads that we do not compute
    "summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout", "summary_proj_to_labels",
    "summary_first_dropout",
}  # fmt: skip
# Keys that are no fields: read from what is left over, or with a default of ours.
LEFT_OVER = {
    "rope_theta", "rope_scaling", "original_max_position_embeddings", "head_dim", "partial_rotary_factor",
    "matryoshka_dimensions", "position_embedding_type", "sliding_window_pattern", "rope_local_base_freq", "is_decoder",
    "full_attention_interval", "intermediate_size", "seq_length", "max_position_embeddings",
    "rotary_emb_base", "rotary_pct", "rotary_dim",
}  # fmt: skip
ENCODERS = (
    "Albert",
    "Bert",
    "Camembert",
    "DistilBert",
    "Electra",
    "MPNet",
    "Roberta",
    "XLMRoberta",
)
DECODERS = [family for family in CONFIGS if family not in ENCODERS]
ROTATED = [family for family in DECODERS if family not in ("Bloom", "GPT2", "Mamba", "Mamba2")]
# Windows by kinds of layers.
BY_TYPES = (
    "Dots1",
    "Cohere2",
    "Exaone4",
    "Gemma2",
    "Gemma3Text",
    "GptOss",
    "Olmo3",
    "Qwen2",
    "Qwen2Moe",
    "Qwen3",
    "SmolLM3",
)
IN_ALL = ("Starcoder2", "Mistral", "Mixtral", "Phi3", "Qwen3Moe")


def config_class(family):
    return getattr(transformers, CONFIGS[family])


def name_of(family):
    own = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel"}
    return own.get(family, f"{family}Model" if family in ENCODERS else f"{family}ForCausalLM")


def read(path, family, **data):
    (path / "config.json").write_text(json.dumps({"architectures": [name_of(family)], **data}))
    checkpoint = open_checkpoint(path)
    return model_class(checkpoint).read_config(checkpoint)


def test_every_family_is_compared():
    loaded = {
        name
        for kind, name in ARCHITECTURES
        if kind == "hf" and name != "Gemma3ForConditionalGeneration"
    }
    assert {ARCHITECTURES["hf", name_of(family)] for family in CONFIGS} >= {
        ARCHITECTURES["hf", name] for name in loaded if "Classification" not in name
    }


@pytest.mark.parametrize("family", CONFIGS)
def test_keys_and_defaults_are_those_of_transformers(family, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name_of(family)]}))
    keys, cls = model_class(open_checkpoint(tmp_path)).KEYS, config_class(family)
    no_effect = WITHOUT_EFFECT | (
        {"hidden_act"}
        if family == "GptOss"
        else {"time_step_rank"}
        if family == "Mamba2"
        else set()
    )
    own = set(cls.__annotations__) & {one.name for one in dataclasses.fields(cls)}
    theirs = {one.name: one.default for one in dataclasses.fields(cls) if one.name in own}
    assert set(theirs) - set(keys) <= no_effect | OF_OTHERS | {
        "use_bidirectional_attention",
        "tie_word_embeddings",
    }
    assert set(keys) - set(theirs) <= LEFT_OVER
    for key, stated in keys.items():
        default = stated.default if isinstance(stated, Nullable) else stated
        if key in theirs:
            expected = (
                theirs[key].default if isinstance(theirs[key], dataclasses.Field) else theirs[key]
            )
            is_limit = key == "time_step_limit"  # None: no limit
            assert (default or False) == (expected or False) or is_limit, (key, default, expected)
        elif key == "rope_theta":
            theta = cls.default_theta
            assert default == (theta["global"] if isinstance(theta, dict) else theta)
    with_null = {key for key, stated in keys.items() if not isinstance(stated, Nullable)}
    assert not {
        key
        for key in with_null & set(theirs)
        if theirs[key] is None and key != "use_bidirectional_attention"
    }


def rotations(family, theirs):
    """Of each layer, what rotates it in Transformers: frequencies and the factor of cosines and
    sines."""
    name = f"{'Gemma3' if family == 'Gemma3Text' else family}RotaryEmbedding"
    rotary = getattr(sys.modules[config_module(family)], name)(theirs)
    for layer in range(theirs.num_hidden_layers):
        kind = theirs.layer_types[layer] if family in ("Gemma3Text", "Olmo3") else ""
        found = getattr(rotary, f"{kind}_inv_freq" if kind else "inv_freq")
        factor = getattr(rotary, f"{kind}_attention_scaling" if kind else "attention_scaling")
        is_rotated = family != "SmolLM3" or theirs.no_rope_layers[layer]
        if family == "Cohere2" or (family == "Exaone4" and theirs.sliding_window):
            is_rotated = window_of(family, theirs, layer) > 0
        yield (found.numpy(), float(factor)) if is_rotated else None


def config_module(family):
    model = getattr(transformers, f"{'Gemma3Text' if family == 'Gemma3Text' else family}Model")
    return model.__module__


def window_of(family, theirs, layer):
    if family not in (*BY_TYPES, *IN_ALL) or not theirs.sliding_window:
        return 0
    return (
        theirs.sliding_window
        if family in IN_ALL or theirs.layer_types[layer] == "sliding_attention"
        else 0
    )


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 64},
    "llama3 from the whole context": LLAMA3,
    "yarn": YARN,
    "yarn with attention factor": YARN
    | {"attention_factor": 1.7, "mscale": 0.5, "mscale_all_dim": 2.0},
    "yarn with betas": YARN | {"beta_fast": 20.0, "beta_slow": 2.0},
    "yarn, not truncated": YARN | {"truncate": False},
    "yarn with equal mscales": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn with mscales": YARN | {"mscale": 0.707, "mscale_all_dim": 1.3},
    "yarn with one mscale": YARN | {"mscale": 0.707},
    "yarn without factor": YARN | {"factor": None},
    "yarn with equal bounds": YARN | {"beta_fast": 4.0, "beta_slow": 4.0, "truncate": False},
    "yarn with a theta of its own": YARN | {"rope_theta": 5000.0},
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2, 1.3] * 2,
    "long_factor": [2.0, 3.0, 4.0, 5.0] * 2,
}
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip
VARIANTS = {
    "only sizes": {},
    "windows": {"use_sliding_window": True},
    "small windows": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    "a window that is switched off": {"use_sliding_window": False, "sliding_window": 7},
    "no window": {"sliding_window": None},
    "listed layers": {
        "use_sliding_window": True,
        "sliding_window": 9,
        "layer_types": [
            "full_attention",
            "sliding_attention",
            "sliding_attention",
            "full_attention",
        ],
    },
    "theta": {"rope_theta": 7777.0},
    "two thetas": {
        "rope_theta": 7777.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 888.0},
    },
    "part of a head": {"partial_rotary_factor": 0.5},
    "not all rotated": {"no_rope_layers": [0, 1, 1, 0]},
    "interval": {"no_rope_layer_interval": 2},
    "pattern": {"sliding_window_pattern": 2, "sliding_window": 5},
    "null": {"num_key_value_heads": None, "rope_scaling": None, "rope_parameters": None},
    "local theta": {"rope_local_base_freq": 333.0},
    "original context": {"original_max_position_embeddings": 32, "rope_scaling": YARN},
}


ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
}
NOT_NULL = (
    "Glm4Moe",
    "MiniMaxM2",
    "SolarOpen",
    "Gemma",
    "Glm4",
    "Helium",
    "StableLm",
    "Starcoder2",
    "Exaone4",
    "Gemma2",
    "Gemma3Text",
    "Qwen3Next",
    "Mistral",
    "Mixtral",
    "Qwen3Moe",
    "Qwen2Moe",
    "GptOss",
)
EXCEPTIONS = [
    ("part of a head", "GptOss"),  # where Transformers cannot apply what it makes
    ("listed layers", "Qwen3Next"),
    ("theta", "Olmo3"),  # Transformers 4 rotates all layers by it, 5.23 only those without a window
    ("two thetas", "Olmo3"),
    ("yarn, not truncated", "Olmo3"),  # which it overlooks in parameters by kinds of layers
    ("no window", "Gemma3Text"),  # where it makes no mask
    ("no window", "Exaone4"),  # where it divides by zero
]


@pytest.mark.parametrize("family", ROTATED)
def test_layers_are_those_of_transformers(family, tmp_path):
    """Of many configurations: the rotation of each layer, its window, its scale."""
    variants = VARIANTS | {name: {"rope_scaling": one} for name, one in SCALINGS.items()}
    variants |= {
        f"{name} in rope_parameters": {"rope_parameters": one} for name, one in SCALINGS.items()
    }
    for name, variant in variants.items():
        if "null" in name and family in NOT_NULL:
            variant = {key: value for key, value in variant.items() if key != "num_key_value_heads"}
        if (name, family) in EXCEPTIONS:
            continue
        scaling = variant.get("rope_scaling") or variant.get("rope_parameters") or {}
        if (
            family == "Phi3"
            and scaling.get("rope_type", scaling.get("type", "default")) != "default"
        ):
            continue  # which has longrope only
        data = SIZES | variant | (ROUTED if family == "Dots1" else {})
        theirs = config_class(family)(**json.loads(json.dumps(data)))
        ours = read(tmp_path, family, **data)
        full = getattr(theirs, "layer_types", None) or [""] * 4
        for layer, (spec, rotation) in enumerate(
            zip(ours.layers, rotations(family, theirs), strict=True)
        ):
            if full[layer] == "linear_attention":
                continue
            where = (name, layer)
            assert spec.window == window_of(family, theirs, layer), where
            num_kv_heads = 4 if family == "GPTNeoX" else theirs.num_key_value_heads or 4
            assert (spec.num_heads, spec.num_kv_heads) == (4, num_kv_heads), where
            expected = getattr(theirs, "query_pre_attn_scalar", 16) ** -0.5
            assert spec.scale == pytest.approx(getattr(theirs, "attention_multiplier", expected)), (
                where
            )
            assert (spec.rotation is None) == (rotation is None), where
            if rotation is not None:
                made, factor = rope_frequencies(
                    spec.rotation.num_dims, spec.rotation.theta, spec.rotation.scaling, 64
                )
                np.testing.assert_allclose(made, rotation[0], rtol=1e-5, err_msg=str(where))
                assert factor == pytest.approx(rotation[1]), where


@pytest.mark.parametrize("more", [{}, {"factor": 3.0}, {"attention_factor": 1.5}])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_longrope_is_that_of_transformers(more, place, tmp_path):
    data = SIZES | {place: LONGROPE | more, "original_max_position_embeddings": 64}
    theirs = transformers.Phi3Config(**json.loads(json.dumps(data)))
    rotation = read(tmp_path, "Phi3", **data).layers[0].rotation
    found, factor = next(iter(rotations("Phi3", theirs)))
    made, strength = rope_frequencies(rotation.num_dims, rotation.theta, rotation.scaling, 64)
    np.testing.assert_allclose(made, found, rtol=1e-5)
    assert strength == pytest.approx(factor)
    assert (
        rotation.scaling.original_context
        == theirs.rope_parameters["original_max_position_embeddings"]
    )


def shapes_of(path, family, **data):
    """Of the tensors that a model asks for, by their names."""
    config = read(path, family, **data)
    cls = model_class(open_checkpoint(path))
    with torch.device("meta"):
        model = cls(config, PLAIN)
    targets = model._targets("hf")
    return config, {
        name: [layer.parts[part] for layer, part in places] for name, places in targets.items()
    }


@pytest.mark.parametrize("family", CONFIGS)
def test_tensors_without_a_configuration_are_those_of_transformers(family, tmp_path):
    """Names and numbers of values of all tensors, where only the number of layers is stated."""
    layers = {"Bloom": "n_layer", "GPT2": "n_layer", "DistilBert": "n_layers"}.get(
        family, "num_hidden_layers"
    )
    data = {layers: 4, "vocab_size": 96, "pad_token_id": 0}
    data |= {"num_experts": 16} if any(part in family for part in ("Moe", "moe", "Next")) else {}
    data |= {"num_key_value_heads": 8} if family == "Nemotron" else {}
    data |= {"head_dim": 128} if family == "Glm4Moe" else {}
    data |= ROUTED if family == "Dots1" else {}
    data |= {"num_local_experts": 16} if family in ("Mixtral", "GptOss", "GraniteMoe") else {}
    _, ours = shapes_of(tmp_path, family, **data)
    with torch.device("meta"):
        model = getattr(transformers, name_of(family))(config_class(family)(**data))
    unused = ("pooler.dense", "pooler.weight", "pooler.bias")
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    stored = {
        name: one
        for name, one in model.named_parameters(remove_duplicate=False)
        if name not in tied
    }
    # whose experts are stored by other names
    if family in ("Mixtral", "GraniteMoe", "Ernie4_5_Moe", "MiniMaxM2"):
        stored = {
            name: one
            for name, one in stored.items()
            if "mlp" not in name and "block_sparse_moe" not in name
        }
    missing = [name for name in stored if name not in ours and not name.startswith(unused)]
    assert not missing
    for name, one in stored.items():
        if name in ours and "conv1d" not in name and "experts" not in name:
            expected = sum(int(np.prod(shape)) for shape in ours[name])
            assert expected in (one.numel(), one.numel() * len(ours[name])), name


# Keys of other families, which these do not know.
STRAYS = {
    "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0, "no_rope_layers": [0, 0, 0, 0],
    "no_rope_layer_interval": 1, "partial_rotary_factor": 0.5, "moe_intermediate_size": 24, "attention_bias": True,
    "mlp_bias": True, "qkv_bias": False, "layer_types": ["sliding_attention"] * 4, "sliding_window_pattern": 1,
    "query_pre_attn_scalar": 3, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 2.0, "embedding_multiplier": 3.0,
    "attention_multiplier": 3.0, "residual_multiplier": 3.0, "logits_scaling": 3.0, "clip_qkv": 0.1, "qk_layernorm": True,
    "rope_local_base_freq": 5.0, "norm_topk_prob": True, "decoder_sparse_step": 3, "mlp_only_layers": [0, 1],
    "shared_expert_intermediate_size": 24, "hidden_activation": "relu", "use_bidirectional_attention": True,
    "swiglu_limit": 3.0, "layer_norm_eps": 0.5, "layer_norm_epsilon": 0.5, "n_group": 4, "scoring_func": "sigmoid",
    "full_attention_interval": 2, "activation_function": "relu", "scale_attn_weights": False, "n_inner": 24,
    "embedding_size": 24, "hidden_act": "relu", "rms_norm_eps": 0.5,
}  # fmt: skip
SMALL = SIZES | {"initializer_range": 0.2, "pad_token_id": 0}


@pytest.mark.parametrize("family", DECODERS)
def test_keys_that_the_family_does_not_know_have_no_effect(family, tmp_path):
    cls = config_class(family)
    known = {one.name for one in dataclasses.fields(cls)} | set(getattr(cls, "attribute_map", {}))
    keys = model_class(checkpoint_of(tmp_path, family)).KEYS
    data = {key: value for key, value in (SMALL | ROUTED).items() if key in known}
    plain = read(tmp_path, family, **data)
    for key, value in STRAYS.items():
        if key not in keys:
            assert key not in known or (key, family) == ("hidden_act", "GptOss")
            assert read(tmp_path, family, **data, **{key: value}) == plain, key


def checkpoint_of(path, family):
    (path / "config.json").write_text(json.dumps({"architectures": [name_of(family)]}))
    return open_checkpoint(path)


# ---- whole models


def tiny(path, family, **more):
    """A random model of a family, saved by Transformers."""
    cls = config_class(family)
    known = (
        {one.name for one in dataclasses.fields(cls)}
        | set(getattr(cls, "attribute_map", {}))
        | {"head_dim"}
    )
    moe = {
        "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "n_routed_experts": 4, "n_shared_experts": 1,
        "shared_expert_intermediate_size": 40, "num_heads": 8, "n_groups": 2, "state_size": 16,
    }  # fmt: skip
    sizes = {
        key: value for key, value in (SMALL | moe | more).items() if key in known or key in more
    }
    if family.startswith("Mamba"):
        sizes |= {"head_dim": 16} if family == "Mamba2" else {}
    torch.manual_seed(0)
    model = getattr(transformers, name_of(family))(cls(**sizes)).eval().float()
    for name, weight in model.named_parameters():
        if "bias" in name or "norm" in name.lower() or ".ln_" in name:
            weight.data.normal_(
                1.0 if name.endswith("weight") and "Gemma" not in family else 0.0, 0.2
            )
    model.save_pretrained(path)
    return model


def logits_of(path, family, prompt):
    """By Transformers, from the files."""
    model = getattr(transformers, name_of(family)).from_pretrained(path).eval().float()
    with torch.inference_mode():
        return model(torch.tensor([prompt]), use_cache=False).logits[0]


@pytest.mark.parametrize(
    "family", [family for family in DECODERS if family not in ("Mamba", "Mamba2", "Qwen3Next")]
)
def test_logits_with_keys_of_other_families(family, tmp_path):
    tiny(tmp_path, family)
    cls = config_class(family)
    known = {one.name for one in dataclasses.fields(cls)} | set(
        model_class(open_checkpoint(tmp_path)).KEYS
    )
    known |= {"partial_rotary_factor"} if family == "GptOss" else set()  # Transformers fails
    edit_config(tmp_path, **{key: value for key, value in STRAYS.items() if key not in known})
    prompt = list(range(3, 60))
    expected = logits_of(tmp_path, family, prompt)
    assert (prompt_logits(load_model(tmp_path), prompt) - expected).abs().max() < 1e-3


@pytest.mark.parametrize("family", ["Llama", "SmolLM3", "Gemma2", "GPT2", "Bloom"])
def test_a_stored_head_counts_if_it_has_other_values_than_the_table(family, tmp_path):
    model = tiny(tmp_path, family, tie_word_embeddings=True)
    prompt, table = list(range(3, 60)), model.get_input_embeddings().weight.detach()
    for head, is_tied in ((table.clone(), True), (table + 0.1 * torch.randn(table.shape), False)):
        edit_weights(tmp_path, lambda weights, head=head: weights.update({"lm_head.weight": head}))
        ours = load_model(tmp_path)
        assert ours.config.tie_embeddings == is_tied
        expected = logits_of(tmp_path, family, prompt)
        assert (prompt_logits(ours, prompt) - expected).abs().max() < 1e-3


def test_a_head_without_a_table_is_the_table(tmp_path):
    tiny(tmp_path, "Llama", tie_word_embeddings=True)
    prompt = list(range(3, 60))
    edit_weights(
        tmp_path,
        lambda weights: weights.update(
            {"lm_head.weight": weights.pop("model.embed_tokens.weight")}
        ),
    )
    expected = logits_of(tmp_path, "Llama", prompt)
    assert (prompt_logits(load_model(tmp_path), prompt) - expected).abs().max() < 1e-3


Q_BIAS = "model.layers.1.self_attn.q_proj.bias"


def test_biases_are_loaded_or_refused(tmp_path):
    tiny(tmp_path, "Llama")
    sizes = {"q": 64, "k": 32, "v": 32}
    parts = {
        f"model.layers.{i}.self_attn.{part}_proj.bias": torch.randn(sizes[part]) for i in range(4) for part in sizes
    }  # fmt: skip
    edit_weights(tmp_path, lambda weights: weights.update(parts))
    fails(tmp_path, "has no place", "gives this layer no bias", "Set attention_bias to true")
    zeros = {name: torch.zeros_like(bias) for name, bias in parts.items()}
    edit_weights(tmp_path, lambda weights: weights.update(zeros))  # as some quantizers write them
    checkpoint = open_checkpoint(tmp_path)
    config = model_class(checkpoint).read_config(checkpoint)
    # also those of layers that other ranks have
    for stage in (Stage(0, 2, 0, 2), Stage(1, 2, 2, 4)):
        model_class(checkpoint).load(checkpoint, config, PLAIN, stage=stage)
    edit_weights(tmp_path, lambda weights: weights.update(parts))
    # that of o_proj is not stored: Transformers takes zeros
    edit_config(tmp_path, attention_bias=True)
    prompt = list(range(3, 60))
    expected = logits_of(tmp_path, "Llama", prompt)
    assert (prompt_logits(load_model(tmp_path), prompt) - expected).abs().max() < 1e-3


def test_biases_of_a_family_without_them(tmp_path):
    tiny(tmp_path, "Mistral")
    prompt = list(range(3, 60))
    plain = prompt_logits(load_model(tmp_path), prompt)
    edit_weights(tmp_path, lambda weights: weights.update({Q_BIAS: torch.zeros(64)}))
    assert torch.equal(prompt_logits(load_model(tmp_path), prompt), plain)
    edit_weights(tmp_path, lambda weights: weights.update({Q_BIAS: torch.ones(64)}))
    fails(tmp_path, f"tensor {Q_BIAS} has no place", "The family has none there")
