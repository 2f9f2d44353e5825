"""Mamba: a selective scan over a state of constant size in every layer, and nothing else."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from tidemill.errors import CheckpointError
from tidemill.layers.mamba import MambaMixer, StateMixer, StateParameters, StateStep
from tidemill.layers.norm import RMSNorm
from tidemill.models.base import stored_values
from tidemill.models.llama import Llama, source_of
from tidemill.models.settings import Nullable, Settings, one_of, required
from tidemill.quant import WeightPlan
from tidemill.types.model_config import ModelConfig, StateSpec, alike
from tidemill.weights.checkpoint import Checkpoint

# nothing in the model limits it: the length that the engine keeps tables for, unless a file says
# less
MAX_CONTEXT = 2**17
_CHANNELS = 64  # that one thread or program advances together


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = self.make_mixer(config, layer, weights)

    def make_mixer(self, config: ModelConfig, layer: int, weights: WeightPlan) -> StateMixer:
        return MambaMixer(config, layer, weights, config.attention_bias, config.conv_bias)

    def forward(
        self, delta_TH: torch.Tensor | None, residual_TH: torch.Tensor, step: StateStep
    ) -> torch.Tensor:
        """Takes the last block's contribution, not yet added, and returns its own."""
        return self.mixer(self.norm.add(delta_TH, residual_TH), step)


class Mamba(Llama):
    block: ClassVar = Block
    PREFIXES: ClassVar[tuple[str, ...]] = ("backbone.", "")
    KEYS: ClassVar = {
        "vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 32, "state_size": 16,
        "conv_kernel": 4, "expand": 2, "intermediate_size": Nullable(int),
        "time_step_rank": Nullable(object, "auto"), "hidden_act": "silu",
        "layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True,
        "tie_word_embeddings": True, "max_position_embeddings": MAX_CONTEXT,
    }  # fmt: skip
    NAMES: ClassVar = [
        ("embed", "weight", "backbone.embeddings", "token_embd"),
        ("blocks.{}.norm", "weight", "backbone.layers.{}.norm", "blk.{}.attn_norm"),
        ("blocks.{}.mixer.ins", "in", "backbone.layers.{}.mixer.in_proj", "blk.{}.ssm_in"),
        ("blocks.{}.mixer.conv", "conv", "backbone.layers.{}.mixer.conv1d", "blk.{}.ssm_conv1d"),
        ("blocks.{}.mixer.to_rank", "rank", "backbone.layers.{}.mixer.x_proj", "blk.{}.ssm_x"),
        ("blocks.{}.mixer.to_bc", "bc", "backbone.layers.{}.mixer.x_proj", "blk.{}.ssm_x"),
        ("blocks.{}.mixer.to_steps", "steps", "backbone.layers.{}.mixer.dt_proj", "blk.{}.ssm_dt"),
        (
            "blocks.{}.mixer.parameters_",
            "decay",
            "=backbone.layers.{}.mixer.A_log",
            "=blk.{}.ssm_a",
        ),
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
        return (
            _from_gguf(checkpoint, *cls._of_gguf(checkpoint))
            if checkpoint.format == "gguf"
            else cls.read_hf(checkpoint)
        )

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        return config_of(settings, cls.state_of(settings, source_of(checkpoint)), checkpoint)

    @classmethod
    def state_of(cls, settings: Settings, source: object) -> StateSpec:
        hidden_size = settings["hidden_size"]
        inner = settings["intermediate_size"] or settings["expand"] * hidden_size
        is_auto = settings["time_step_rank"] in ("auto", None)
        rank = (
            math.ceil(hidden_size / 16)
            if is_auto
            else required(settings, "time_step_rank", int, source)
        )
        return _mamba(inner, settings["state_size"], settings["conv_kernel"], rank)

    @classmethod
    def _of_gguf(cls, checkpoint: Checkpoint) -> tuple[StateSpec, int]:
        data, source, arch = checkpoint.metadata, checkpoint.path, checkpoint.architecture
        if data.get(f"{arch}.ssm.dt_b_c_rms"):
            raise CheckpointError(f"{source}: norms of time steps, B and C are not supported.")
        keys = "inner_size", "state_size", "conv_kernel", "time_step_rank"
        inner, size, kernel, rank = (
            required(data, f"{arch}.ssm.{key}", int, source) for key in keys
        )
        return _mamba(inner, size, kernel, rank), required(data, f"{arch}.block_count", int, source)


def _mamba(inner: int, state_size: int, kernel: int, rank: int) -> StateSpec:
    size = math.gcd(inner, _CHANNELS)
    return StateSpec(
        kind="mamba",
        num_heads=inner // size,
        head_dim=size,
        state_size=state_size,
        kernel=kernel,
        rank=rank,
    )


def _from_gguf(checkpoint: Checkpoint, spec: StateSpec, num_layers: int) -> ModelConfig:
    data, source, arch = checkpoint.metadata, checkpoint.path, checkpoint.architecture
    shapes = {tensor.name: tensor.shape for tensor in checkpoint.tensors()}
    if "token_embd.weight" not in shapes:
        raise CheckpointError(
            f"{source}: tensor token_embd.weight is missing.", fix="Is it the whole checkpoint?"
        )
    settings = {
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": required(data, f"{arch}.embedding_length", int, source),
        "layer_norm_epsilon": required(
            data, f"{arch}.attention.layer_norm_rms_epsilon", float, source
        ),
        "max_position_embeddings": required(data, f"{arch}.context_length", int, source),
        "use_bias": "blk.0.ssm_in.bias" in shapes,
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in shapes,
        "num_hidden_layers": num_layers,
        "hidden_act": "silu",
    }
    return replace(
        config_of(settings, spec, checkpoint), tie_embeddings="output.weight" not in shapes
    )


def config_of(settings: Settings, spec: StateSpec, checkpoint: Checkpoint) -> ModelConfig:
    """The part of the configuration that Mamba and Mamba-2 files say alike."""
    context, eps = (
        min(settings["max_position_embeddings"], MAX_CONTEXT),
        settings["layer_norm_epsilon"],
    )
    if not 0 <= eps <= 1 or context < 1:
        raise CheckpointError(
            f"{checkpoint.path}: the norm epsilon or the context length of the configuration cannot be used."
        )
    one_of(settings, "hidden_act", {"silu": "silu"}, source_of(checkpoint))
    return ModelConfig(
        architecture=checkpoint.architecture,
        vocab_size=settings["vocab_size"],
        hidden_size=settings["hidden_size"],
        intermediate_size=0,
        layers=alike(settings["num_hidden_layers"], spec),
        max_context=context,
        norm_eps=eps,
        attention_bias=settings["use_bias"],
        conv_bias=settings["use_conv_bias"],
        stored=stored_values(checkpoint),
    )
