"""Gemma 1: a Llama with embeddings scaled by the square root of their size. Gemma 2 and the text
models of Gemma 3: norms before and after attention and feed-forward, too, and windows in most
layers. Gemma 2 caps its scores and logits; Gemma 3 norms queries and keys, and rotates windowed
layers by angles of their own. Of Gemma 3 with vision, the text model is read."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from tidemill.kernels.masks import capped
from tidemill.layers.attention import Attention, AttentionStep
from tidemill.layers.mlp import GatedMLP, inner_size
from tidemill.layers.norm import RMSNorm
from tidemill.models.llama import (
    Llama,
    from_settings,
    gguf_windows,
    source_of,
    windows_of,
    with_windows,
)
from tidemill.models.settings import (
    Nullable,
    Settings,
    optional,
    read_layered_rope,
    read_settings,
    refuse,
    required,
    rope_keys,
)  # fmt: skip
from tidemill.quant import WeightPlan
from tidemill.types.model_config import ModelConfig, RopeScaling, Rotation
from tidemill.weights.checkpoint import Checkpoint, PartOf

# layers of the 27B models, whose scores are scaled by the size of a head as if hidden_size were cut
# into heads
_WIDE = (46, 62)
_LOCAL_THETA = 10000.0  # of Gemma 3's windowed layers, in files that do not say
# of a model that also sees
_OUTER = {"tie_word_embeddings": True, "quantization_config": Nullable(dict)}
_VISION = r"(model\.)?(vision_tower|multi_modal_projector)\..*"


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.attn_norm, self.post_attn_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.attn = Attention(config, layer, weights)
        self.mlp_norm, self.post_mlp_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.mlp = GatedMLP(
            size, inner_size(config, layer, weights), config.mlp_bias, weights, config.act
        )

    def forward(
        self, delta_TH: torch.Tensor | None, residual_TH: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        """Takes the last block's contribution, not yet added, and returns its own: each norm adds
        what came before it."""
        delta_TH = self.post_attn_norm(self.attn(self.attn_norm.add(delta_TH, residual_TH), step))
        return self.post_mlp_norm(self.mlp(self.mlp_norm.add(delta_TH, residual_TH)))


class Gemma(Llama):
    """Gemma 1: a Llama with embeddings scaled and norms stored as those of its successors."""

    PAIRS: ClassVar = ()
    KEYS: ClassVar = {
        "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 16,
        "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
        "attention_bias": False, "use_bidirectional_attention": False, **rope_keys(),
    }  # fmt: skip

    def embed_tokens(self, ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        embedded = self.embed(ids_T)
        return embedded * torch.tensor(self.config.hidden_size**0.5, dtype=embedded.dtype)

    def loaded(self, checkpoint_format: str) -> None:
        """Hugging Face's files hold what is added to a norm's weight of 1."""
        if checkpoint_format == "hf":
            for module in self.modules():
                if isinstance(module, RMSNorm):
                    module.weight.add_(1)

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        config = super().read_config(checkpoint)
        return cls._of_gguf(config, checkpoint) if checkpoint.format == "gguf" else config

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        refuse(settings, ["use_bidirectional_attention"], source_of(checkpoint))
        return from_settings(settings, checkpoint)

    @classmethod
    def _of_gguf(cls, config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
        return replace(config, act="gelu_tanh")


class Gemma2(Gemma):
    block: ClassVar = Block
    every: ClassVar = 2  # layers, the last of which is without a window, in files that do not say
    KEYS: ClassVar = {
        "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "attention_bias": False,
        "query_pre_attn_scalar": 256.0, "sliding_window": Nullable(int, 4096),
        "layer_types": Nullable(list), "final_logit_softcapping": Nullable(float, 30.0),
        "attn_logit_softcapping": Nullable(float, 50.0), "use_bidirectional_attention": False,
        **rope_keys(),
    }  # fmt: skip
    NAMES: ClassVar = [
        *(line for line in Llama.NAMES if line[0] not in ("blocks.{}.mlp_norm", "ropes.0")),
        (
            "blocks.{}.post_attn_norm",
            "weight",
            "model.layers.{}.post_attention_layernorm",
            "blk.{}.post_attention_norm",
        ),
        (
            "blocks.{}.mlp_norm",
            "weight",
            "model.layers.{}.pre_feedforward_layernorm",
            "blk.{}.ffn_norm",
        ),
        (
            "blocks.{}.post_mlp_norm",
            "weight",
            "model.layers.{}.post_feedforward_layernorm",
            "blk.{}.post_ffw_norm",
        ),
    ]

    def logits(self, hidden_TH: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return capped(super().logits(hidden_TH, out), self.config.logits_softcap)

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        source, num_layers = source_of(checkpoint), settings["num_hidden_layers"]
        refuse(settings, ["use_bidirectional_attention"], source)
        config = from_settings(settings, checkpoint, act="hidden_activation")
        every = settings.get("sliding_window_pattern") or cls.every
        kinds = settings["layer_types"] or [
            "sliding_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)
        ]
        config = with_windows(
            config, windows_of(kinds, settings["sliding_window"], num_layers, source)
        )
        softcap, scale = (
            settings["attn_logit_softcapping"] or 0.0,
            max(settings["query_pre_attn_scalar"], 1e-6) ** -0.5,
        )
        layers = tuple(spec.but(scale=scale, softcap=softcap) for spec in config.layers)
        return replace(
            config, layers=layers, logits_softcap=settings["final_logit_softcapping"] or 0.0
        )

    @classmethod
    def _of_gguf(cls, config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
        data, source, arch = checkpoint.metadata, checkpoint.path, checkpoint.architecture
        sizes = gguf_windows(checkpoint, config.num_layers, cls.every)
        wide = config.num_layers in _WIDE
        scalar = config.hidden_size / config.num_heads if wide else config.head_dim
        softcap = optional(data, f"{arch}.attn_logit_softcapping", float, 0.0, source)
        layers = [
            spec.but(scale=scalar**-0.5, softcap=softcap, window=window)
            for spec, window in zip(config.layers, sizes, strict=True)
        ]
        return replace(
            config,
            layers=tuple(layers),
            logits_softcap=optional(data, f"{arch}.final_logit_softcapping", float, 0.0, source),
            act="gelu_tanh",
        )


class Gemma3(Gemma2):
    every: ClassVar = 6
    NAMES: ClassVar = [
        *Gemma2.NAMES,
        (
            "blocks.{}.attn.q_norm",
            "weight",
            "model.layers.{}.self_attn.q_norm",
            "blk.{}.attn_q_norm",
        ),
        (
            "blocks.{}.attn.k_norm",
            "weight",
            "model.layers.{}.self_attn.k_norm",
            "blk.{}.attn_k_norm",
        ),
    ]

    KEYS: ClassVar = {
        **Gemma2.KEYS, "vocab_size": 262208, "max_position_embeddings": 131072,
        "final_logit_softcapping": Nullable(float), "attn_logit_softcapping": Nullable(float),
        "sliding_window_pattern": 6, "rope_local_base_freq": _LOCAL_THETA, **rope_keys(1000000.0),
    }  # fmt: skip

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        local, full = read_layered_rope(
            settings, settings["rope_local_base_freq"], source_of(checkpoint)
        )
        config = super().of_settings(settings, checkpoint)
        return cls._with_rotations(config, (local.theta, local.scaling), (full.theta, full.scaling))

    @classmethod
    def _of_gguf(cls, config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
        whole = config.layers[0].rotation
        assert whole is not None
        key = f"{checkpoint.architecture}.rope.freq_base_swa"
        local = optional(checkpoint.metadata, key, float, _LOCAL_THETA, checkpoint.path)
        return cls._with_rotations(
            super()._of_gguf(config, checkpoint), (local, None), (whole.theta, whole.scaling)
        )

    @classmethod
    def _with_rotations(
        cls,
        config: ModelConfig,
        local: tuple[float, RopeScaling | None],
        whole: tuple[float, RopeScaling | None],
    ) -> ModelConfig:
        dim = config.head_dim
        rotations = [
            Rotation(num_dims=dim, theta=theta, scaling=scaling)
            for theta, scaling in (local, whole)
        ]
        layers = (spec.but(rotation=rotations[0 if spec.window else 1]) for spec in config.layers)
        return replace(config, layers=tuple(layers), qk_norm=True)


class Gemma3Multimodal(Gemma3):
    """The text model of Gemma 3 that also sees. Its tensors are under one of two names, by the age
    of the file."""

    PREFIXES: ClassVar = ("model.", "language_model.model.", "model.language_model.")
    IGNORED: ClassVar = (*Gemma3.IGNORED, _VISION)
    HEADS: ClassVar = (*Gemma3.HEADS, "language_model.lm_head.weight")

    @classmethod
    def read_hf(cls, checkpoint: Checkpoint) -> ModelConfig:
        """Reads the configuration. Where both parts of the configuration say whether the head is
        the table, Transformers goes by the outer one."""
        data, source = checkpoint.metadata, source_of(checkpoint)
        text = required(data, "text_config", dict, source) | read_settings(data, _OUTER, source)
        config = super().read_hf(PartOf(checkpoint, text, _VISION))
        note = "The vision tower and its projector are not read: the model takes and gives text."
        return replace(config, notes=(*config.notes, note))
