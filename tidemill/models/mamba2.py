"""Mamba-2: a state for each head, with one decay; gated norms before the last projection of a
layer."""

from __future__ import annotations

from typing import ClassVar

import torch

from tidemill.distributed.cuts import together
from tidemill.errors import CheckpointError
from tidemill.layers.mamba import StateMixer, state_cut
from tidemill.models import mamba
from tidemill.models.mamba import MAX_CONTEXT, Mamba
from tidemill.models.settings import Nullable, Settings, required
from tidemill.quant import WeightPlan
from tidemill.types.model_config import ModelConfig, StateSpec
from tidemill.weights.checkpoint import Checkpoint


class Block(mamba.Block):
    def make_mixer(self, config: ModelConfig, layer: int, weights: WeightPlan) -> StateMixer:
        own = state_cut(config.layers[0], weights.shard)
        ins = {"in": together(own.channels, own.inner, own.heads).size}
        return StateMixer(
            config, layer, weights, ins, bias=config.attention_bias, conv_bias=config.conv_bias
        )


class Mamba2(Mamba):
    block: ClassVar = Block
    NAMES: ClassVar = [
        *(
            line
            for line in Mamba.NAMES
            if line[0].rpartition(".")[2] not in ("to_rank", "to_bc", "to_steps")
        ),
        (
            "blocks.{}.mixer.parameters_",
            "step_bias",
            "=backbone.layers.{}.mixer.dt_bias",
            "=blk.{}.ssm_dt.bias",
        ),
        ("blocks.{}.mixer.norm", "weight", "backbone.layers.{}.mixer.norm", "blk.{}.ssm_norm"),
    ]

    def row_order(self, checkpoint_format: str, part: str) -> torch.Tensor | None:
        """Stored: gate, channels, time steps."""
        if part.partition(".")[0] != "in":
            return None
        spec = self.whole.layers[0]
        assert isinstance(spec, StateSpec)
        gate, channels, steps = torch.arange(spec.num_projected, device="cpu").split(
            [spec.num_inner, spec.num_channels, spec.num_heads]
        )
        return torch.cat([channels, gate, steps])

    KEYS: ClassVar = {
        "vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128,
        "head_dim": 64, "state_size": 128, "conv_kernel": 4, "n_groups": 8, "hidden_act": "silu",
        "layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True,
        "time_step_limit": Nullable(list), "tie_word_embeddings": False,
        "max_position_embeddings": MAX_CONTEXT,
    }  # fmt: skip

    @classmethod
    def state_of(cls, settings: Settings, source: object) -> StateSpec:
        num_heads, head_dim, groups = (
            settings["num_heads"],
            settings["head_dim"],
            settings["n_groups"],
        )
        low, *high = settings["time_step_limit"] or [0.0, float("inf")]
        if low != 0 or high not in ([float("inf")], ["Infinity"], [{"__float__": "Infinity"}]):
            raise CheckpointError(
                f"{source}: time_step_limit {[low, *high]} is not supported.",
                fix="[0, infinity] is.",
            )
        if groups < 1 or num_heads * head_dim % groups:
            raise CheckpointError(
                f"{source}: {num_heads * head_dim} inner values cannot be cut into {groups} groups."
            )
        # A group is normed on its own, as in the authors' code. Transformers before 5.23 normed all
        # of them together.
        return StateSpec(
            kind="mamba2", num_heads=num_heads, head_dim=head_dim, state_size=settings["state_size"], num_groups=groups,
            kernel=settings["conv_kernel"], norm_size=num_heads * head_dim // groups,
        )  # fmt: skip

    @classmethod
    def _of_gguf(cls, checkpoint: Checkpoint) -> tuple[StateSpec, int]:
        """Here the time step's rank is the number of heads."""
        data, source, arch = checkpoint.metadata, checkpoint.path, checkpoint.architecture
        inner, size, kernel, heads, groups = (
            required(data, f"{arch}.ssm.{key}", int, source)
            for key in ("inner_size", "state_size", "conv_kernel", "time_step_rank", "group_count")
        )
        if not heads or not groups or inner % heads or inner % groups:
            raise CheckpointError(
                f"{source}: {inner} inner values cannot be cut into {heads} heads and {groups} groups."
            )
        spec = StateSpec(
            kind="mamba2", num_heads=heads, head_dim=inner // heads, state_size=size, num_groups=groups, kernel=kernel,
            norm_size=inner // groups,
        )  # fmt: skip
        return spec, required(data, f"{arch}.block_count", int, source)
