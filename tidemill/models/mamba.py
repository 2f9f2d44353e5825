"""Mamba: a selective scan over a state of constant size in every layer, and nothing else."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import nn

from tidemill.errors import CheckpointError
from tidemill.layers.mamba import MambaMixer, StateMixer, StateParameters, StateStep
from tidemill.layers.norm import RMSNorm
from tidemill.model_config import ModelConfig, StateSpec, alike
from tidemill.models.base import optional, required, stored_values
from tidemill.models.llama import Llama
from tidemill.quant import WeightPlan
from tidemill.weights.checkpoint import Checkpoint

MAX_CONTEXT = 2**17  # nothing in the model limits it: the length that the engine keeps tables for, unless a file says less
_CHANNELS = 64  # that one thread or program advances together


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = self.make_mixer(config, layer, weights)

    def make_mixer(self, config: ModelConfig, layer: int, weights: WeightPlan) -> StateMixer:
        return MambaMixer(config, layer, weights, config.attention_bias, config.conv_bias)

    def forward(self, delta_TH: torch.Tensor | None, residual_TH: torch.Tensor, step: StateStep) -> torch.Tensor:
        """Takes the last block's contribution, not yet added, and returns its own."""
        return self.mixer(self.norm.add(delta_TH, residual_TH), step)


class Mamba(Llama):
    block: ClassVar = Block
    NAMES: ClassVar = [
        ("embed", "weight", "backbone.embeddings", "token_embd"),
        ("blocks.{}.norm", "weight", "backbone.layers.{}.norm", "blk.{}.attn_norm"),
        ("blocks.{}.mixer.ins", "in", "backbone.layers.{}.mixer.in_proj", "blk.{}.ssm_in"),
        ("blocks.{}.mixer.conv", "conv", "backbone.layers.{}.mixer.conv1d", "blk.{}.ssm_conv1d"),
        ("blocks.{}.mixer.to_rank", "rank", "backbone.layers.{}.mixer.x_proj", "blk.{}.ssm_x"),
        ("blocks.{}.mixer.to_bc", "bc", "backbone.layers.{}.mixer.x_proj", "blk.{}.ssm_x"),
        ("blocks.{}.mixer.to_steps", "steps", "backbone.layers.{}.mixer.dt_proj", "blk.{}.ssm_dt"),
        ("blocks.{}.mixer.parameters_", "decay", "=backbone.layers.{}.mixer.A_log", "=blk.{}.ssm_a"),
        ("blocks.{}.mixer.parameters_", "skip", "=backbone.layers.{}.mixer.D", "=blk.{}.ssm_d"),
        ("blocks.{}.mixer.out", "out", "backbone.layers.{}.mixer.out_proj", "blk.{}.ssm_out"),
        ("norm", "weight", "backbone.norm_f", "output_norm"),
    ]
    IGNORED: ClassVar[tuple[str, ...]] = ()

    def loaded(self, checkpoint_format: str) -> None:
        for module in self.modules():
            if isinstance(module, StateParameters):
                module.settle(is_log=checkpoint_format == "hf")

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        is_gguf = checkpoint.format == "gguf"
        spec, num_layers = cls._of_gguf(checkpoint) if is_gguf else cls._of_hf(checkpoint)
        return _config(checkpoint, alike(num_layers, spec))

    @classmethod
    def _of_hf(cls, checkpoint: Checkpoint) -> tuple[StateSpec, int]:
        data, source = checkpoint.metadata, checkpoint.path / "config.json"
        hidden_size = required(data, "hidden_size", int, source)
        rank = data.get("time_step_rank", "auto")
        inner = optional(data, "intermediate_size", int, 2 * hidden_size, source)
        spec = _mamba(
            inner,
            required(data, "state_size", int, source),
            required(data, "conv_kernel", int, source),
            math.ceil(hidden_size / 16) if rank == "auto" else required(data, "time_step_rank", int, source),
        )
        return spec, required(data, "num_hidden_layers", int, source)

    @classmethod
    def _of_gguf(cls, checkpoint: Checkpoint) -> tuple[StateSpec, int]:
        data, source, arch = checkpoint.metadata, checkpoint.path, checkpoint.architecture
        if data.get(f"{arch}.ssm.dt_b_c_rms"):
            raise CheckpointError(f"{source}: norms of time steps, B and C are not supported.")
        keys = "inner_size", "state_size", "conv_kernel", "time_step_rank"
        inner, size, kernel, rank = (required(data, f"{arch}.ssm.{key}", int, source) for key in keys)
        return _mamba(inner, size, kernel, rank), required(data, f"{arch}.block_count", int, source)


def _mamba(inner: int, state_size: int, kernel: int, rank: int) -> StateSpec:
    size = math.gcd(inner, _CHANNELS)
    return StateSpec(kind="mamba", num_heads=inner // size, head_dim=size, state_size=state_size, kernel=kernel, rank=rank)


def _config(checkpoint: Checkpoint, layers: tuple[Any, ...]) -> ModelConfig:
    """What Mamba and Mamba-2 files say alike."""
    data, arch = checkpoint.metadata, checkpoint.architecture
    shapes = {tensor.name: tensor.shape for tensor in checkpoint.tensors()} if checkpoint.has_weights else {}
    if checkpoint.format == "gguf":
        source: Any = checkpoint.path
        if "token_embd.weight" not in shapes:
            raise CheckpointError(f"{source}: tensor token_embd.weight is missing.", fix="Is it the whole checkpoint?")
        vocab_size, hidden_size = shapes["token_embd.weight"][0], required(data, f"{arch}.embedding_length", int, source)
        eps = required(data, f"{arch}.attention.layer_norm_rms_epsilon", float, source)
        context = min(required(data, f"{arch}.context_length", int, source), MAX_CONTEXT)
        is_tied, bias, conv_bias = "output.weight" not in shapes, "blk.0.ssm_in.bias" in shapes, "blk.0.ssm_conv1d.bias" in shapes
    else:
        source = checkpoint.path / "config.json"
        act = data.get("hidden_act", "silu")
        if act != "silu":
            raise CheckpointError(f"{source}: hidden_act {act!r} is not supported.", fix="silu is.")
        vocab_size, hidden_size = (required(data, key, int, source) for key in ("vocab_size", "hidden_size"))
        eps = required(data, "layer_norm_epsilon", float, source)
        context = min(optional(data, "max_position_embeddings", int, MAX_CONTEXT, source), MAX_CONTEXT)
        is_tied = bool(data.get("tie_word_embeddings", arch == "MambaForCausalLM"))
        bias, conv_bias = bool(data.get("use_bias", False)), bool(data.get("use_conv_bias", True))
    if not 0 <= eps <= 1 or context < 1:
        raise CheckpointError(f"{source}: the norm epsilon or the context length of the configuration cannot be used.")
    return ModelConfig(
        architecture=arch,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=0,
        layers=layers,
        max_context=context,
        norm_eps=eps,
        tie_embeddings=is_tied,
        attention_bias=bias,
        conv_bias=conv_bias,
        stored=stored_values(checkpoint),
    )
