"""Small random models of each kind of KV cache, the same bits on every machine: weights are
fractions of whole numbers.

python -m bench.tiny_models FOLDER
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.helpers import byte_tokenizer

_VOCABULARY = 320
_COMMON = {
    "vocab_size": _VOCABULARY,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}
_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_STATES = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
# By name: the architecture's configuration in Transformers, its model, and what is not common.
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "full": ("LlamaConfig", "LlamaForCausalLM", {"num_hidden_layers": 3, "max_position_embeddings": 2048}),
    "window": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "num_hidden_layers": 3, "max_position_embeddings": 2048, "sliding_window": 32, "query_pre_attn_scalar": 16,
            "tie_word_embeddings": False,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "state": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            "num_hidden_layers": 4, "max_position_embeddings": 2048, "full_attention_interval": 4, "decoder_sparse_step": 1,
            "mlp_only_layers": [], **_STATES, **_EXPERTS,
        },
    ),
}  # fmt: skip
# In place of these: sizes that the kernels of a GPU have.
_WIDE = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
    "query_pre_attn_scalar": 128, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "num_experts": 16, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 192,
}  # fmt: skip
_ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj")
_FRACTION = 1 << 12


def whole_numbers(rng: np.random.Generator, shape: tuple[int, ...], scale: float) -> torch.Tensor:
    """Values that are the same bits on every machine."""
    numbers = rng.integers(-_FRACTION, _FRACTION + 1, size=shape)
    return torch.from_numpy((numbers / _FRACTION).astype(np.float32)) * scale


def make(folder: Path, kind: str, seed: int = 0, wide: bool = False) -> None:
    import transformers

    config_name, model_name, own = KINDS[kind]
    settings = {**_COMMON, **_SHAPE, **own}
    if wide:
        settings |= {name: size for name, size in _WIDE.items() if name in settings}
    config = getattr(transformers, config_name)(**settings)
    model = getattr(transformers, model_name)(config).eval().float()
    rng = np.random.default_rng(seed)
    for name, weight in sorted(model.named_parameters()):
        if "norm" in name:
            weight.data = (
                1 + whole_numbers(rng, tuple(weight.shape), 0.25) - (0 if kind == "full" else 1)
            )
        else:
            weight.data = whole_numbers(rng, tuple(weight.shape), 0.1 if wide else 0.5)
    model.save_pretrained(folder)
    byte_tokenizer(folder)


def make_adapter(folder: Path, base: Path, seed: int, rank: int = 4) -> None:
    """As PEFT saves it."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    rng = np.random.default_rng(seed)
    tensors = {}
    with safe_open(base / "model.safetensors", "pt") as weights:
        for name in sorted(weights.keys()):
            module = name.removesuffix(".weight")
            if module.rpartition(".")[2] in _ADAPTED:
                rows, columns = weights.get_slice(name).get_shape()
                prefix = f"base_model.model.{module}"
                tensors[f"{prefix}.lora_A.weight"] = whole_numbers(rng, (rank, columns), 0.5)
                tensors[f"{prefix}.lora_B.weight"] = whole_numbers(rng, (rows, rank), 0.5)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(_ADAPTED),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def make_all(folder: Path, wide: bool = False) -> None:
    """All kinds, and two adapters of the first; what is there already is left as it is. `wide`: for
    a GPU."""
    for number, kind in enumerate(KINDS):
        if not (folder / kind / "tokenizer.json").exists():
            make(folder / kind, kind, seed=number, wide=wide)
    for name, seed in (("first", 11), ("second", 12)):
        if not (folder / name / "adapter_config.json").exists():
            make_adapter(folder / name, folder / "full", seed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    make_all(parser.parse_args().folder)


if __name__ == "__main__":
    main()
