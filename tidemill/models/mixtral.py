"""Mixtral: a Llama whose feed-forward blocks are mixtures of experts. What the families with experts share is here, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from tidemill.errors import CheckpointError
from tidemill.model_config import ModelConfig, MoESpec
from tidemill.models.base import optional, required
from tidemill.models.llama import Llama
from tidemill.weights.checkpoint import Checkpoint

Names = list[tuple[str, str, str, str]]

# How GGUF files say that experts are chosen.
_GATING = {1: "softmax_then_topk", 3: "topk_then_softmax"}
# Keys of other families' routers that change what is computed, and the values that do not.
_PLAIN_ROUTING = {
    "scoring_func": ("softmax",), "topk_method": ("greedy",), "n_group": (0, 1), "topk_group": (0, 1),
    "routed_scaling_factor": (1, 1.0), "n_shared_experts": (0,),
}  # fmt: skip


def expert_names(layer: str, router: str, gate: str, up: str, down: str) -> Names:
    """`layer`: the feed-forward's name in Hugging Face's files, where experts may also be stacked; the others below it."""
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

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        config = super().read_config(checkpoint)
        spec = (
            gguf_experts(checkpoint, config, renormalise=True)
            if checkpoint.format == "gguf"
            else hf_experts(checkpoint, config, renormalise=True)
        )
        return replace(config, experts=(spec,) * config.num_layers)


def hf_experts(checkpoint: Checkpoint, config: ModelConfig, *, renormalise: bool, **more: Any) -> MoESpec:
    """What config.json says of the experts. `more`: other fields of the spec."""
    data, source = checkpoint.metadata, checkpoint.path / "config.json"
    for key, plain in _PLAIN_ROUTING.items():
        if data.get(key) is not None and data[key] not in plain:
            raise CheckpointError(f"{source}: routing with {key} = {data[key]!r} is not supported.", fix="Softmax and top-k are.")
    key = "num_local_experts" if data.get("num_local_experts") is not None else "num_experts"
    fields = {
        "num_experts": required(data, key, int, source),
        "top_k": required(data, "num_experts_per_tok", int, source),
        "expert_size": optional(data, "moe_intermediate_size", int, config.intermediate_size, source),
        "act": config.act,
    }
    return MoESpec(**fields | more, renormalise=renormalise)


def gguf_experts(checkpoint: Checkpoint, config: ModelConfig, *, renormalise: bool, **more: Any) -> MoESpec:
    """`renormalise`: what the family does, unless the file says otherwise."""
    data, source, arch = checkpoint.metadata, checkpoint.path, checkpoint.architecture
    gating = optional(data, f"{arch}.expert_gating_func", int, 0, source)
    if gating and gating not in _GATING:
        raise CheckpointError(f"{source}: key {arch}.expert_gating_func is {gating}, which is not supported.", fix="1 and 3 are.")
    for key in ("expert_weights_scale", "expert_group_count"):
        if data.get(f"{arch}.{key}") not in (None, 0, 1, 0.0, 1.0):
            raise CheckpointError(f"{source}: routing with {arch}.{key} = {data[f'{arch}.{key}']} is not supported.")
    fields: dict[str, Any] = {
        "num_experts": required(data, f"{arch}.expert_count", int, source),
        "top_k": required(data, f"{arch}.expert_used_count", int, source),
        "expert_size": optional(data, f"{arch}.expert_feed_forward_length", int, config.intermediate_size, source),
        "act": config.act,
    }
    if gating:
        more["scoring"] = _GATING[gating]
    return MoESpec(**fields | more, renormalise=bool(data.get(f"{arch}.expert_weights_norm", renormalise)))
