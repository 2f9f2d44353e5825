"""Qwen3-Next: three layers of a gated delta rule to one of attention, whose output is gated;
experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from tidemill.distributed.cuts import heads_of, together
from tidemill.errors import CheckpointError
from tidemill.kernels.gate import gated
from tidemill.layers.attention import Attention, AttentionStep
from tidemill.layers.linear import Linear
from tidemill.layers.mamba import StateMixer, StateParameters, state_cut
from tidemill.layers.moe import feed_forward
from tidemill.layers.norm import RMSNorm
from tidemill.models.llama import Llama, from_settings, source_of
from tidemill.models.mixtral import gguf_experts, hf_experts
from tidemill.models.qwen3 import Qwen3
from tidemill.models.qwen_moe import Qwen2MoE, with_experts
from tidemill.models.settings import Nullable, Settings, optional, required, rope_keys
from tidemill.quant import WeightPlan
from tidemill.types.model_config import LayerSpec, ModelConfig, StateSpec
from tidemill.weights.checkpoint import Checkpoint

_ATTENTION_EVERY = 4


class GatedAttention(Attention):
    """Attention with gates: of each head, the stored projection of queries has the query's rows and
    then the gate's."""

    reads_input_once = False  # but twice

    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__(config, layer, weights)
        size, num_q, bias = (
            config.hidden_size,
            config.num_heads * config.head_dim,
            config.attention_bias,
        )
        own = heads_of(config.layers[layer], weights.shard)
        q, kv = own.heads.times(config.head_dim).size, own.groups.times(config.head_dim).size
        self.qkv = Linear(
            size, {"q": q, "k": kv, "v": kv}, bias=bias, weights=weights, stored={"q": 2 * num_q}
        )
        self.gate = Linear(
            size, {"output_gate": q}, bias=bias, weights=weights, stored={"output_gate": 2 * num_q}
        )

    def forward(self, x_TH: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        attended = step.attend(self.layer, self.qkv(x_TH), self._learned())
        return self.out(gated(attended, self.gate(x_TH)))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__()
        spec = config.layers[layer]
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        if isinstance(spec, StateSpec):
            own = state_cut(spec, weights.shard)
            ins = {
                "qkv": own.channels.size,
                "z": own.inner.size,
                "ba": together(own.heads, own.heads).size,
            }
            both = spec.num_channels + spec.num_inner  # Hugging Face stores them as one matrix
            self.mixer = StateMixer(
                config, layer, weights, ins, stored={"qkv": both, "z": both}, conv_bias=False
            )
        else:
            self.attn = GatedAttention(config, layer, weights)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = feed_forward(config, layer, weights)

    def forward(
        self, delta_TH: torch.Tensor | None, residual_TH: torch.Tensor, step: Any
    ) -> torch.Tensor:
        """Takes the last block's contribution, not yet added, and returns its own: each norm adds
        what came before it."""
        x_TH = self.attn_norm.add(delta_TH, residual_TH)
        mixed_TH = self.mixer(x_TH, step) if hasattr(self, "mixer") else self.attn(x_TH, step)
        return self.mlp(self.mlp_norm.add(mixed_TH, residual_TH))


class Qwen3Next(Llama):
    block: ClassVar = Block
    has_experts: ClassVar = True
    NAMES: ClassVar = [
        *(line for line in Qwen3.NAMES if line[0] not in ("blocks.{}.mlp_norm", "ropes.0")),
        *(line for line in Qwen2MoE.NAMES if line not in Llama.NAMES),
        ("blocks.{}.attn.gate", "output_gate", "model.layers.{}.self_attn.q_proj", "blk.{}.attn_q"),
        (
            "blocks.{}.mixer.ins",
            "qkv",
            "model.layers.{}.linear_attn.in_proj_qkvz",
            "blk.{}.attn_qkv",
        ),
        (
            "blocks.{}.mixer.ins",
            "z",
            "model.layers.{}.linear_attn.in_proj_qkvz",
            "blk.{}.attn_gate",
        ),
        ("blocks.{}.mixer.ins", "ba", "model.layers.{}.linear_attn.in_proj_ba", "blk.{}.ssm_ba"),
        ("blocks.{}.mixer.conv", "conv", "model.layers.{}.linear_attn.conv1d", "blk.{}.ssm_conv1d"),
        (
            "blocks.{}.mixer.parameters_",
            "decay",
            "=model.layers.{}.linear_attn.A_log",
            "=blk.{}.ssm_a",
        ),
        (
            "blocks.{}.mixer.parameters_",
            "step_bias",
            "=model.layers.{}.linear_attn.dt_bias",
            "=blk.{}.ssm_dt.bias",
        ),
        ("blocks.{}.mixer.norm", "weight", "model.layers.{}.linear_attn.norm", "blk.{}.ssm_norm"),
        ("blocks.{}.mixer.out", "out", "model.layers.{}.linear_attn.out_proj", "blk.{}.ssm_out"),
        (
            "blocks.{}.mlp_norm",
            "weight",
            "model.layers.{}.post_attention_layernorm",
            "blk.{}.post_attention_norm",
        ),
    ]
    IGNORED: ClassVar[tuple[str, ...]] = (*Llama.IGNORED, r"mtp\..*")  # drafts of further tokens

    def loaded(self, checkpoint_format: str) -> None:
        """Hugging Face's files hold what is added to a norm's weight of 1, except of the gated
        norm."""
        for module in self.modules():
            if isinstance(module, RMSNorm) and checkpoint_format == "hf":
                module.weight.add_(1)
            if isinstance(module, StateParameters):
                module.settle(is_log=checkpoint_format == "hf")

    def row_order(self, checkpoint_format: str, part: str) -> torch.Tensor | None:
        """Queries and gates go by turns, head by head; the delta rule's inputs, key head by key
        head."""
        name, heads, dim = part.partition(".")[0], self.whole.num_heads, self.whole.head_dim
        if name in ("q", "output_gate"):
            return (
                torch.arange(2 * heads * dim, device="cpu")
                .view(heads, 2, dim)[:, 0 if name == "q" else 1]
                .flatten()
            )
        if name not in ("qkv", "z", "ba", "conv") or (name == "z" and checkpoint_format == "gguf"):
            return None
        spec = next(spec for spec in self.whole.layers if isinstance(spec, StateSpec))
        return _delta_order(spec, "conv" if name == "qkv" and checkpoint_format == "gguf" else name)

    KEYS: ClassVar = {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
        "head_dim": 256, "hidden_act": "silu", "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
        "partial_rotary_factor": 0.25, "layer_types": Nullable(list),
        "full_attention_interval": _ATTENTION_EVERY, "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "decoder_sparse_step": 1, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "num_experts_per_tok": 10, "num_experts": 512,
        "norm_topk_prob": True, "mlp_only_layers": Nullable(list), **rope_keys(),
    }  # fmt: skip

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        config = replace(super().read_config(checkpoint), qk_norm=True, gated_attention=True)
        return cls._of_gguf(config, checkpoint) if checkpoint.format == "gguf" else config

    @classmethod
    def _of_gguf(cls, config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
        data, source, arch = checkpoint.metadata, checkpoint.path, checkpoint.architecture
        heads, inner, size, groups, kernel = (
            required(data, f"{arch}.ssm.{key}", int, source)
            for key in ("time_step_rank", "inner_size", "state_size", "group_count", "conv_kernel")
        )
        if not heads or inner % heads:
            raise CheckpointError(
                f"{source}: {inner} inner values cannot be cut into {heads} heads."
            )
        interval = (
            optional(data, f"{arch}.full_attention_interval", int, _ATTENTION_EVERY, source)
            or _ATTENTION_EVERY
        )
        shared = required(data, f"{arch}.expert_shared_feed_forward_length", int, source)
        experts = gguf_experts(checkpoint, config, renormalise=True, shared_size=shared)
        are_states = [(layer + 1) % interval > 0 for layer in range(config.num_layers)]
        state = _delta(heads, inner // heads, size, groups, kernel)
        return replace(
            _assembled(config, are_states, state), experts=(experts,) * config.num_layers
        )

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        config, num = from_settings(settings, checkpoint), settings["num_hidden_layers"]
        interval = settings["full_attention_interval"] or _ATTENTION_EVERY
        kinds = settings["layer_types"] or [
            "linear_attention" if (layer + 1) % interval else "full_attention"
            for layer in range(num)
        ]
        if len(kinds) != num or set(map(str, kinds)) - {"linear_attention", "full_attention"}:
            source = source_of(checkpoint)
            raise CheckpointError(
                f"{source}: layer_types must name linear_attention or full_attention for each layer."
            )
        config = _assembled(
            config,
            [kind == "linear_attention" for kind in kinds],
            _delta(*(settings[key] for key in _KEYS)),
        )
        spec = hf_experts(
            settings, config, size="moe_intermediate_size", shared_size=settings["shared_expert_intermediate_size"],
            renormalise=settings["norm_topk_prob"],
        )  # fmt: skip
        return with_experts(config, spec, settings)


_KEYS = (
    "linear_num_value_heads", "linear_value_head_dim", "linear_key_head_dim", "linear_num_key_heads", "linear_conv_kernel_dim"
)  # fmt: skip


def _delta(num_heads: int, head_dim: int, key_dim: int, num_keys: int, kernel: int) -> StateSpec:
    return StateSpec(
        kind="delta", num_heads=num_heads, head_dim=head_dim, state_size=key_dim, num_groups=num_keys, kernel=kernel,
        norm_size=head_dim,
    )  # fmt: skip


def _assembled(config: ModelConfig, are_states: list[bool], state: StateSpec) -> ModelConfig:
    layers: list[LayerSpec] = [
        state if is_state else spec
        for is_state, spec in zip(are_states, config.layers, strict=True)
    ]
    if not any(spec.reads_tokens for spec in layers):
        raise CheckpointError("A Qwen3-Next without attention layers is not supported.")
    return replace(config, layers=tuple(layers))


def _delta_order(spec: StateSpec, part: str) -> torch.Tensor:
    """Rows as they are stored to [values | keys | queries], to the gate, and to [time steps | strengths]."""
    keys, per_key = spec.state_size, spec.num_heads // spec.num_groups
    if part == "conv":
        queries_keys_values = torch.arange(spec.num_channels, device="cpu").split(
            [spec.num_groups * keys, spec.num_groups * keys, spec.num_inner]
        )
        return torch.cat(queries_keys_values[::-1])
    if part == "ba":
        strengths, steps = (
            torch.arange(2 * spec.num_heads, device="cpu").view(-1, 2, per_key).unbind(1)
        )
        return torch.cat([steps.flatten(), strengths.flatten()])
    values = per_key * spec.head_dim
    rows = torch.arange(spec.num_channels + spec.num_inner, device="cpu").view(spec.num_groups, -1)
    query, key, value, gate = rows.split([keys, keys, values, values], dim=1)
    return (
        gate.flatten()
        if part == "z"
        else torch.cat([value.flatten(), key.flatten(), query.flatten()])
    )
