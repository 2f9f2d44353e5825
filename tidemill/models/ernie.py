"""ERNIE 4.5, dense and with experts: a Llama whose rotated pairs are neighbouring dimensions.
Experts are chosen by softmax scores and a bias; some layers are dense."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from tidemill.errors import CheckpointError
from tidemill.models.llama import Llama, from_settings, source_of
from tidemill.models.mixtral import hf_experts
from tidemill.models.scored_experts import NAMES
from tidemill.models.settings import Nullable, Settings, rope_keys
from tidemill.types.model_config import ModelConfig, Routing
from tidemill.weights.checkpoint import Checkpoint


class Ernie(Llama):
    PAIRS: ClassVar = ("hf",)
    KEYS: ClassVar = {
        "vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 18, "num_attention_heads": 16, "num_key_value_heads": Nullable(int, 2),
        "head_dim": Nullable(int, 128), "hidden_act": "silu", "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "use_bias": False, **rope_keys(500000.0),
    }  # fmt: skip

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        has_bias = settings["use_bias"]
        return from_settings(
            settings | {"attention_bias": has_bias, "mlp_bias": has_bias}, checkpoint
        )


class ErnieMoE(Ernie):
    has_experts: ClassVar = True
    NAMES: ClassVar = [
        *Llama.NAMES,
        *(line for line in NAMES if line[1] != "bias"),
        (
            "blocks.{}.mlp.scores", "bias", "=model.layers.{}.mlp.moe_statics.e_score_correction_bias",
            "=blk.{}.exp_probs_b.bias",
        ),
    ]  # fmt: skip
    IGNORED: ClassVar[tuple[str, ...]] = (*Llama.IGNORED, r"model\.mtp_.*")
    KEYS: ClassVar = {
        "vocab_size": 103424, "hidden_size": 2560, "intermediate_size": 12288,
        "num_hidden_layers": 28, "num_attention_heads": 20, "num_key_value_heads": Nullable(int, 4),
        "head_dim": Nullable(int), "hidden_act": "silu", "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "use_bias": False,
        "moe_intermediate_size": 1536, "moe_k": 6, "moe_num_experts": 64,
        "moe_num_shared_experts": Nullable(int, 2), "moe_layer_start_index": 1,
        "moe_layer_end_index": Nullable(object, -1), "moe_layer_interval": 1,
        "moe_norm_min": 1e-12, **rope_keys(500000.0),
    }  # fmt: skip
    ALIASES: ClassVar = {"num_experts_per_tok": "moe_k", "num_experts": "moe_num_experts"}

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        config, num = super().of_settings(settings, checkpoint), settings["num_hidden_layers"]
        settings = settings | {"num_experts_per_tok": settings["moe_k"]}
        shared = settings["moe_intermediate_size"] * (settings["moe_num_shared_experts"] or 0)
        spec = hf_experts(
            settings, config, num="moe_num_experts", size="moe_intermediate_size", scoring="scores",
            renormalise=True, shared_size=shared, routing=Routing(score="softmax", has_bias=True),
        )  # fmt: skip
        last = settings["moe_layer_end_index"]
        if isinstance(last, bool) or not isinstance(last, int | None):
            source = source_of(checkpoint)
            raise CheckpointError(f"{source}: moe_layer_end_index is {str(last)[:50]!r}.")
        last, every = (
            num - 1 if last is None or last < 0 else last,
            max(settings["moe_layer_interval"], 1),
        )
        first = settings["moe_layer_start_index"]
        sparse = (first <= i <= last and (i + 1) % every == 0 for i in range(num))
        return replace(config, experts=tuple(spec if is_sparse else None for is_sparse in sparse))
