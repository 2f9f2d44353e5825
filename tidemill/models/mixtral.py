"""Mixtral: a Llama whose feed-forward blocks are mixtures of experts. What the families with
experts share is here, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from tidemill.errors import CheckpointError
from tidemill.models.llama import Llama, from_settings
from tidemill.models.settings import Nullable, Settings, optional, required, rope_keys
from tidemill.types.model_config import ModelConfig, MoESpec
from tidemill.weights.checkpoint import Checkpoint

Names = list[tuple[str, str, str, str]]

# How GGUF files say that experts are chosen.
_GATING = {1: "softmax_then_topk", 3: "topk_then_softmax"}


def expert_names(layer: str, router: str, gate: str, up: str, down: str) -> Names:
    """`layer`: the feed-forward's name in Hugging Face's files, where experts may also be stacked;
    the others below it."""
    experts = "blocks.{}.mlp.experts"
    return [
        ("blocks.{}.mlp.router", "router", f"{layer}.{router}", "blk.{}.ffn_gate_inp"),
        (experts, "gate.{}", f"{layer}.experts.{{}}.{gate}", ""),
        (experts, "up.{}", f"{layer}.experts.{{}}.{up}", ""),
        (experts, "down.{}", f"{layer}.experts.{{}}.{down}", ""),
        (experts, "gates", "", "blk.{}.ffn_gate_exps"),
        (experts, "ups", "", "blk.{}.ffn_up_exps"),
        (experts, "downs", f"={layer}.experts.down_proj", "blk.{}.ffn_down_exps"),
        (experts, "gate_ups", f"={layer}.experts.gate_up_proj", ""),
    ]


class Mixtral(Llama):
    has_experts: ClassVar = True
    NAMES: ClassVar = [
        *Llama.NAMES,
        *expert_names("model.layers.{}.block_sparse_moe", "gate", "w1", "w3", "w2"),
    ]

    KEYS: ClassVar = {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": Nullable(int, 8),
        "head_dim": Nullable(int), "hidden_act": "silu", "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "sliding_window": Nullable(int),
        "num_local_experts": 8, "num_experts_per_tok": 2, **rope_keys(1000000.0),
    }  # fmt: skip
    ALIASES: ClassVar = {"num_experts": "num_local_experts"}

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        config = from_settings(settings, checkpoint)
        spec = hf_experts(settings, config, num="num_local_experts", renormalise=True)
        return replace(config, experts=(spec,) * config.num_layers)

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        config = super().read_config(checkpoint)
        if checkpoint.format != "gguf":
            return config
        return replace(
            config,
            experts=(gguf_experts(checkpoint, config, renormalise=True),) * config.num_layers,
        )


def hf_experts(
    settings: Settings,
    config: ModelConfig,
    *,
    num: str = "num_experts",
    size: str = "intermediate_size",
    **more: Any,
) -> MoESpec:
    """The experts that config.json describes. `num`, `size`: the keys of their number and size.
    `more`: other fields of the spec."""
    fields = {
        "num_experts": settings[num],
        "top_k": settings["num_experts_per_tok"],
        "expert_size": settings[size],
    }
    return MoESpec(**fields | {"act": config.act} | more)


def gguf_experts(
    checkpoint: Checkpoint, config: ModelConfig, *, renormalise: bool, **more: Any
) -> MoESpec:
    """`renormalise`: what the family does, unless the file says otherwise."""
    data, source, arch = checkpoint.metadata, checkpoint.path, checkpoint.architecture
    gating = optional(data, f"{arch}.expert_gating_func", int, 0, source)
    if gating and gating not in _GATING:
        raise CheckpointError(
            f"{source}: key {arch}.expert_gating_func is {gating}, which is not supported.",
            fix="1 and 3 are.",
        )
    for key in ("expert_weights_scale", "expert_group_count"):
        if data.get(f"{arch}.{key}") not in (None, 0, 1, 0.0, 1.0):
            raise CheckpointError(
                f"{source}: routing with {arch}.{key} = {data[f'{arch}.{key}']} is not supported."
            )
    fields: dict[str, Any] = {
        "num_experts": required(data, f"{arch}.expert_count", int, source),
        "top_k": required(data, f"{arch}.expert_used_count", int, source),
        "expert_size": optional(
            data, f"{arch}.expert_feed_forward_length", int, config.intermediate_size, source
        ),
        "act": config.act,
    }
    if gating:
        more["scoring"] = _GATING[gating]
    return MoESpec(
        **fields | more, renormalise=bool(data.get(f"{arch}.expert_weights_norm", renormalise))
    )
