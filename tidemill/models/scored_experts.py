"""Families whose experts are chosen by sigmoid scores and a bias: GLM-4.5 to 4.7, dots.llm1, Solar
Open, MiniMax-M2. The first layers of some are dense; some have an expert that every token goes
through."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from tidemill.models.llama import Block as LlamaBlock
from tidemill.models.llama import Llama, from_settings, source_of, windows_of, with_windows
from tidemill.models.mixtral import expert_names, hf_experts
from tidemill.models.olmo2 import NormedAttention
from tidemill.models.qwen3 import Qwen3
from tidemill.models.settings import Nullable, Settings, rope_keys
from tidemill.quant import WeightPlan
from tidemill.types.model_config import ModelConfig, MoESpec, Routing
from tidemill.weights.checkpoint import Checkpoint

_MLP = "model.layers.{}.mlp"
NAMES = [
    *expert_names(_MLP, "gate", "gate_proj", "up_proj", "down_proj"),
    (
        "blocks.{}.mlp.scores",
        "bias",
        f"={_MLP}.gate.e_score_correction_bias",
        "=blk.{}.exp_probs_b.bias",
    ),
    (
        "blocks.{}.mlp.experts",
        "shared_gate",
        f"{_MLP}.shared_experts.gate_proj",
        "blk.{}.ffn_gate_shexp",
    ),
    ("blocks.{}.mlp.experts", "shared_up", f"{_MLP}.shared_experts.up_proj", "blk.{}.ffn_up_shexp"),
    (
        "blocks.{}.mlp.experts",
        "shared_down",
        f"{_MLP}.shared_experts.down_proj",
        "blk.{}.ffn_down_shexp",
    ),
]
KEYS = {  # of DeepSeek-V3's routing
    "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True,
}  # fmt: skip


def with_scored_experts(config: ModelConfig, settings: Settings) -> ModelConfig:
    """Experts in all layers but the first ones."""
    routing = Routing(
        score="sigmoid",
        has_bias=True,
        num_groups=settings["n_group"] or 1,
        top_groups=settings["topk_group"] or 1,
        scale=settings["routed_scaling_factor"],
    )
    size = settings["moe_intermediate_size"]
    spec = hf_experts(
        settings, config, num="n_routed_experts", size="moe_intermediate_size", scoring="scores",
        renormalise=settings["norm_topk_prob"], routing=routing,
        shared_size=size * (settings["n_shared_experts"] or 0),
    )  # fmt: skip
    first = settings.get("first_k_dense_replace") or 0
    layers: list[MoESpec | None] = [spec if i >= first else None for i in range(config.num_layers)]
    return replace(config, experts=tuple(layers))


class Glm4MoE(Llama):
    has_experts: ClassVar = True
    PAIRS: ClassVar = ()
    NAMES: ClassVar = [
        *(line for line in Qwen3.NAMES if line[0] != "ropes.0"),
        *NAMES,
    ]
    KEYS: ClassVar = {
        "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944,
        "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
        "head_dim": Nullable(int), "hidden_act": "silu", "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "attention_bias": False,
        "use_qk_norm": False, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5, **KEYS,
        **rope_keys(),
    }  # fmt: skip

    def __init__(self, config: ModelConfig, weights: WeightPlan) -> None:
        super().__init__(config, weights)
        heads = rf"model\.layers\.({config.num_layers}|{config.num_layers + 1})\..*"
        self.ignored = (*self.ignored, heads)  # that predict further tokens

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        config = replace(from_settings(settings, checkpoint), qk_norm=settings["use_qk_norm"])
        return with_scored_experts(config, settings)


class Dots1(Glm4MoE):
    KEYS: ClassVar = {
        "vocab_size": 152064, "hidden_size": 4608, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 62, "num_attention_heads": 32,
        "num_key_value_heads": Nullable(int, 32), "head_dim": Nullable(int),
        "n_shared_experts": Nullable(int), "n_routed_experts": Nullable(int),
        "num_experts_per_tok": Nullable(int), "n_group": Nullable(int, 1),
        "topk_group": Nullable(int, 1), "first_k_dense_replace": Nullable(int, 0),
        "norm_topk_prob": False, "hidden_act": "silu", "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
        "routed_scaling_factor": 1.0, "sliding_window": Nullable(int, 4096),
        "max_window_layers": Nullable(int, 62), "layer_types": Nullable(list), **rope_keys(),
    }  # fmt: skip

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        config, num = (
            replace(from_settings(settings, checkpoint), qk_norm=True),
            settings["num_hidden_layers"],
        )
        first, window = settings["max_window_layers"] or 0, settings["sliding_window"]
        kinds = settings["layer_types"] or [
            "sliding_attention" if window is not None and i >= first else "full_attention"
            for i in range(num)
        ]
        windows = windows_of(kinds, window, num, source_of(checkpoint))
        return with_scored_experts(with_windows(config, windows), settings)


class SolarOpen(Glm4MoE):
    KEYS: ClassVar = {
        "vocab_size": 196608, "hidden_size": 4096, "num_hidden_layers": 48,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "attention_bias": False, **KEYS, "moe_intermediate_size": 1280,
        "partial_rotary_factor": 1.0, **rope_keys(1000000.0),
    }  # fmt: skip

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        inner = settings["moe_intermediate_size"]
        config = from_settings(settings | {"intermediate_size": inner}, checkpoint)
        return with_scored_experts(config, settings)


class NormedBlock(LlamaBlock):
    attention: ClassVar = NormedAttention


class MiniMaxM2(Llama):
    block: ClassVar = NormedBlock
    has_experts: ClassVar = True
    PAIRS: ClassVar = ()
    NAMES: ClassVar = [
        *(line for line in Qwen3.NAMES if line[0] != "ropes.0"),
        *expert_names("model.layers.{}.block_sparse_moe", "gate", "w1", "w3", "w2"),
        (
            "blocks.{}.mlp.scores",
            "bias",
            "=model.layers.{}.block_sparse_moe.e_score_correction_bias",
            "=blk.{}.exp_probs_b.bias",
        ),
    ]
    IGNORED: ClassVar[tuple[str, ...]] = (*Llama.IGNORED, r"model\.mtp.*")
    KEYS: ClassVar = {
        "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536,
        "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8,
        "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 196608,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "num_experts_per_tok": 8,
        "num_local_experts": 256, "rotary_dim": Nullable(int),
        "partial_rotary_factor": Nullable(float), **rope_keys(5000000.0),
    }  # fmt: skip

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        """Files say how many dimensions of a head are rotated."""
        partial, rotated = settings["partial_rotary_factor"], settings["rotary_dim"]
        if partial is None and rotated:
            settings = settings | {"partial_rotary_factor": rotated / settings["head_dim"]}
        config = from_settings(settings, checkpoint)
        routing = Routing(score="sigmoid", has_bias=True)
        spec = hf_experts(
            settings,
            config,
            num="num_local_experts",
            scoring="scores",
            renormalise=True,
            routing=routing,
        )
        return replace(config, experts=(spec,) * config.num_layers)
