"""The files that a Hugging Face folder needs beside weights, from a GGUF file: config.json and the
tokenizer's files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, processors

from tidemill.errors import CheckpointError
from tidemill.frontend.gguf_tokenizer import build_tokenizer
from tidemill.types.model_config import ModelConfig, RopeScaling, Rotation
from tidemill.weights.checkpoint import Checkpoint

_ACTS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
Settings = dict[str, Any]


def hf_config(checkpoint: Checkpoint, config: ModelConfig) -> Settings:
    """The configuration that Transformers writes for the same model."""
    if config.architecture not in _FAMILIES or config.experts:
        kind = f"{config.architecture}{' with experts' if config.experts else ''}"
        raise CheckpointError(
            f"{checkpoint.path}: a GGUF of {kind} cannot be compressed.",
            fix=f"Give its Hugging Face folder, or a GGUF of {', '.join(_FAMILIES)}.",
        )
    architecture, model_type, own = _FAMILIES[config.architecture]
    windows = {spec.window for spec in config.layers} - {0}
    if windows and config.architecture in _WITH_WINDOWS:
        architecture, model_type, own = _WITH_WINDOWS[config.architecture]
    ids = {
        f"{name}_token_id": checkpoint.metadata.get(f"tokenizer.ggml.{name}_token_id")
        for name in ("bos", "eos")
    }
    settings: Settings = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": _ACTS[config.act],
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "pad_token_id": None,
        "dtype": "float32",
    } | ids
    rotation = next((spec.rotation for spec in config.layers if spec.rotation is not None), None)
    if rotation is not None:
        settings["rope_parameters"] = _rope(rotation, config.head_dim, _factors(checkpoint))
    if windows:
        kinds = ["sliding_attention" if spec.window else "full_attention" for spec in config.layers]
        settings |= {
            "sliding_window": max(windows),
            "layer_types": kinds,
            "use_sliding_window": True,
        }
    return settings | own(config)


def _factors(checkpoint: Checkpoint) -> torch.Tensor | None:
    tensor = next(
        (tensor for tensor in checkpoint.tensors() if tensor.name == "rope_freqs.weight"), None
    )
    if tensor is None:
        return None
    values = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
    tensor.read_into(values)
    return values


def _rope(rotation: Rotation, head_dim: int, factors: torch.Tensor | None = None) -> Settings:
    rope: Settings = {"rope_type": "default", "rope_theta": rotation.theta}
    if rotation.num_dims != head_dim:
        rope["partial_rotary_factor"] = rotation.num_dims / head_dim
    if factors is not None:
        return rope | _llama3(rotation, factors)
    scaling = rotation.scaling
    if scaling is None:
        return rope
    rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        rope["original_max_position_embeddings"] = scaling.original_context
    if scaling.kind == "longrope":
        rope |= {
            "short_factor": list(scaling.short_factors),
            "long_factor": list(scaling.long_factors),
        }
    if scaling.attention_factor is not None:
        rope["attention_factor"] = scaling.attention_factor
    return rope


def _llama3(rotation: Rotation, factors: torch.Tensor) -> Settings:
    """Llama 3's scaling is stored as the factors that come out of it: those of the published
    settings are recognized."""
    settings = _LLAMA3 | {"rope_type": "llama3", "factor": round(float(factors.max()), 4)}
    if not torch.allclose(llama3_factors(rotation, settings), factors, rtol=1e-3):
        raise CheckpointError(
            "The file's rope factors are not Llama 3's.",
            fix="Give the model's Hugging Face folder.",
        )
    return settings


def llama3_factors(rotation: Rotation, settings: Settings) -> torch.Tensor:
    """The divisors of the frequencies."""
    waves = (
        2
        * math.pi
        * rotation.theta
        ** (torch.arange(0, rotation.num_dims, 2, dtype=torch.float64) / rotation.num_dims)
    )
    low, high, factor = (
        settings[name] for name in ("low_freq_factor", "high_freq_factor", "factor")
    )
    smooth = ((settings["original_max_position_embeddings"] / waves - low) / (high - low)).clamp(
        0, 1
    )
    return (1 / ((1 - smooth) / factor + smooth)).float()


def _plain(config: ModelConfig) -> Settings:
    return {}


def _smollm3(config: ModelConfig) -> Settings:
    return {
        "no_rope_layers": [int(spec.rotation is not None) for spec in config.layers],
        "use_sliding_window": False,
    }


def _gemma2(config: ModelConfig) -> Settings:
    spec = config.layers[0]
    return {
        "hidden_activation": _ACTS[config.act],
        "query_pre_attn_scalar": _whole(spec.scale**-2),
        "attn_logit_softcapping": spec.softcap or None,
        "final_logit_softcapping": config.logits_softcap or None,
    }


def _by_kind(config: ModelConfig) -> Settings:
    """Windowed layers and others are rotated differently."""
    rope = {
        "sliding_attention" if spec.window else "full_attention": spec.rotation
        for spec in config.layers
    }
    parameters = {
        kind: _rope(rotation, config.head_dim)
        for kind, rotation in rope.items()
        if rotation is not None
    }
    return {"rope_parameters": parameters}


def _gemma3(config: ModelConfig) -> Settings:
    return _gemma2(config) | _by_kind(config)


def _gpt2(config: ModelConfig) -> Settings:
    return {
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_positions": config.num_positions,
        "n_inner": config.intermediate_size,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": "gelu_new",
    }


def _whole(value: float) -> float | int:
    return round(value) if abs(value - round(value)) < 1e-6 * value else value


def _granite(config: ModelConfig) -> Settings:
    return {
        "embedding_multiplier": config.embedding_scale,
        "attention_multiplier": config.layers[0].scale,
        "residual_multiplier": config.residual_scale,
        "logits_scaling": 1 / config.logits_scale,
    }


def _phi3(config: ModelConfig) -> Settings:
    rotation = config.layers[0].rotation
    scaling: RopeScaling | None = rotation.scaling if rotation else None
    original = scaling.original_context if scaling else config.max_context
    return {"original_max_position_embeddings": original, "layer_types": None}


_FAMILIES: dict[str, tuple[str, str, Callable[[ModelConfig], Settings]]] = {
    "llama": ("LlamaForCausalLM", "llama", _plain),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3", _smollm3),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", _plain),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", _plain),
    "gemma2": ("Gemma2ForCausalLM", "gemma2", _gemma2),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", _gemma3),
    "phi3": ("Phi3ForCausalLM", "phi3", _phi3),
    "olmo2": ("Olmo2ForCausalLM", "olmo2", _plain),
    "granite": ("GraniteForCausalLM", "granite", _granite),
    "gpt2": ("GPT2LMHeadModel", "gpt2", _gpt2),
}
_WITH_WINDOWS = {
    "llama": ("MistralForCausalLM", "mistral", _plain),
    "olmo2": ("Olmo3ForCausalLM", "olmo3", _by_kind),
}

# Hugging Face's names of them to GGUF's
ARCHITECTURES = {
    cls: name for table in (_FAMILIES, _WITH_WINDOWS) for name, (cls, _, _) in table.items()
}


def write_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json with the chat template, and generation_config.json with
    what ends an answer."""
    if "tokenizer.ggml.model" not in checkpoint.metadata:
        return  # a file without a vocabulary: weights alone
    built = build_tokenizer(checkpoint.metadata, str(checkpoint.path))
    backend = Tokenizer.from_str(built.backend.to_str())
    ends = built.eos_token_ids
    bos = None if built.bos_token_id is None else backend.id_to_token(built.bos_token_id)
    eos = backend.id_to_token(ends[0]) if ends else None
    before = [(bos, built.bos_token_id)] if built.add_bos and bos else []
    after = [(eos, ends[0])] if built.add_eos and eos else []
    if before or after:
        single = [*(token for token, _ in before), "$A", *(token for token, _ in after)]
        backend.post_processor = processors.TemplateProcessing(
            single=" ".join(single), special_tokens=before + after
        )
    backend.save(str(folder / "tokenizer.json"))
    settings: Settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    settings |= {"bos_token": bos, "eos_token": eos}
    if isinstance(template := checkpoint.metadata.get("tokenizer.chat_template"), str):
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    generation = {"bos_token_id": built.bos_token_id, "eos_token_id": list(ends)}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
