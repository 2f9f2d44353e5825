"""BitNet b1.58: a Llama with one more norm before each output projection, and squared ReLU in its
feed-forward blocks. Weights are ternary as they are published (`quant_method: bitnet`), or plain
numbers."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from tidemill.distributed.cuts import Size, heads_of, num_of, whole_of
from tidemill.distributed.group import group_of
from tidemill.kernels.norm import NormGroup, shared_rms_norm
from tidemill.layers.attention import Attention, AttentionStep
from tidemill.layers.mlp import GatedMLP, inner_size
from tidemill.layers.norm import RMSNorm
from tidemill.models import llama
from tidemill.models.settings import Nullable, rope_keys
from tidemill.quant import WeightPlan
from tidemill.types.model_config import ModelConfig


class SubNorm(RMSNorm):
    """The norm of features of which this rank may have some."""

    def __init__(self, size: Size, eps: float, weights: WeightPlan) -> None:
        super().__init__(size, eps)
        self._group = group_of(weights.shard)
        self._columns = NormGroup(0, slice(0, num_of(size)), whole_of(size))

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        if self._group.size == 1:
            return super().forward(x_TH)
        return shared_rms_norm(
            x_TH, [self._columns], 1, [self.weight], self.eps, self._group.all_reduce
        )


class NormedAttention(Attention):
    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__(config, layer, weights)
        own = heads_of(config.layers[layer], weights.shard)
        self.sub_norm = SubNorm(own.heads.times(config.head_dim).size, config.norm_eps, weights)

    def forward(self, x_TH: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        return self.out(self.sub_norm(step.attend(self.layer, self.qkv(x_TH), self._learned())))


class NormedMLP(GatedMLP):
    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        size = inner_size(config, layer, weights)
        super().__init__(config.hidden_size, size, config.mlp_bias, weights, config.act)
        self.sub_norm = SubNorm(size, config.norm_eps, weights)
        self.gate_up.read_by = ()

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self.down(self.sub_norm(self.gate_up(x_TH)))


class Block(llama.Block):
    attention: ClassVar = NormedAttention

    def feed_forward(self, config: ModelConfig, layer: int, weights: WeightPlan) -> nn.Module:
        return NormedMLP(config, layer, weights)


class BitNet(llama.Llama):
    block: ClassVar = Block
    NAMES: ClassVar = [
        *llama.Llama.NAMES,
        ("blocks.{}.attn.sub_norm", "weight", "model.layers.{}.self_attn.attn_sub_norm", ""),
        ("blocks.{}.mlp.sub_norm", "weight", "model.layers.{}.mlp.ffn_sub_norm", ""),
    ]
    KEYS: ClassVar = {
        "vocab_size": 128256, "hidden_size": 2560, "intermediate_size": 6912,
        "num_hidden_layers": 30, "num_attention_heads": 20, "num_key_value_heads": Nullable(int, 5),
        "head_dim": Nullable(int), "hidden_act": "relu2", "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "attention_bias": False,
        **rope_keys(500000.0),
    }  # fmt: skip
