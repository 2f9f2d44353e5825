"""Gemma 2 and the text models of Gemma 3: norms before and after attention and feed-forward, windows in most layers, embeddings
scaled by the square root of their size. Gemma 2 caps its scores and logits; Gemma 3 norms queries and keys, and rotates windowed
layers by angles of their own. Of Gemma 3 with vision, the text model is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from tidemill.errors import CheckpointError
from tidemill.kernels.masks import capped
from tidemill.layers.attention import Attention, AttentionStep
from tidemill.layers.mlp import GatedMLP, inner_size
from tidemill.layers.norm import RMSNorm
from tidemill.model_config import ModelConfig, RopeScaling, Rotation
from tidemill.models.base import optional, required
from tidemill.models.llama import Llama, gguf_windows, hf_scaling, windows
from tidemill.quant import WeightPlan
from tidemill.weights.checkpoint import Checkpoint, PartOf

_LOCAL_THETA = 10000.0  # of Gemma 3's windowed layers, in files that do not say
_WIDE = (46, 62)  # layers of the 27B models, whose scores are scaled by the size of a head as if hidden_size were cut into heads
_GEMMA3 = {  # what the configuration of a text model leaves out, above all within that of a model that also sees
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
_VISION = r"(model\.)?(vision_tower|multi_modal_projector)\..*"


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.norm_eps
        self.attn_norm, self.post_attn_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.attn = Attention(config, layer, weights)
        self.mlp_norm, self.post_mlp_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.mlp = GatedMLP(size, inner_size(config, layer, weights), config.mlp_bias, weights, config.act)

    def forward(self, delta_TH: torch.Tensor | None, residual_TH: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """Takes the last block's contribution, not yet added, and returns its own: each norm adds what came before it."""
        delta_TH = self.post_attn_norm(self.attn(self.attn_norm.add(delta_TH, residual_TH), step))
        return self.post_mlp_norm(self.mlp(self.mlp_norm.add(delta_TH, residual_TH)))


class Gemma2(Llama):
    block: ClassVar = Block
    every: ClassVar = 2  # layers, the last of which is without a window, in files that do not say
    NAMES: ClassVar = [
        *(line for line in Llama.NAMES if line[0] not in ("blocks.{}.mlp_norm", "ropes.0")),
        ("blocks.{}.post_attn_norm", "weight", "model.layers.{}.post_attention_layernorm", "blk.{}.post_attention_norm"),
        ("blocks.{}.mlp_norm", "weight", "model.layers.{}.pre_feedforward_layernorm", "blk.{}.ffn_norm"),
        ("blocks.{}.post_mlp_norm", "weight", "model.layers.{}.post_feedforward_layernorm", "blk.{}.post_ffw_norm"),
    ]

    def embed_tokens(self, ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        embedded = self.embed(ids_T)
        return embedded * torch.tensor(self.config.hidden_size**0.5, dtype=embedded.dtype)

    def logits(self, hidden_TH: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return capped(super().logits(hidden_TH, out), self.config.logits_softcap)

    def loaded(self, checkpoint_format: str) -> None:
        """Hugging Face's files hold what is added to a norm's weight of 1."""
        if checkpoint_format == "hf":
            for module in self.modules():
                if isinstance(module, RMSNorm):
                    module.weight.add_(1)

    def row_order(self, checkpoint_format: str, part: str) -> None:
        """GGUF keeps this family's rows as they are."""
        return

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        config = super().read_config(checkpoint)
        return cls._of_gguf(config, checkpoint) if checkpoint.format == "gguf" else cls._of_hf(config, checkpoint)

    @classmethod
    def _of_hf(cls, config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
        data, source = checkpoint.metadata, checkpoint.path / "config.json"
        scalar = optional(data, "query_pre_attn_scalar", float, float(config.head_dim), source)
        softcap = optional(data, "attn_logit_softcapping", float, None, source) or 0.0
        every = optional(data, "sliding_window_pattern", int, None, source) or cls.every
        kinds = ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(config.num_layers)]
        sizes = windows(data | {"layer_types": data.get("layer_types") or kinds}, config.num_layers, source)
        layers = (
            replace(spec, scale=scalar**-0.5, softcap=softcap, window=window)
            for spec, window in zip(config.attention_layers, sizes, strict=True)
        )
        return replace(
            config,
            layers=tuple(layers),
            logits_softcap=optional(data, "final_logit_softcapping", float, None, source) or 0.0,
            tie_embeddings=bool(data.get("tie_word_embeddings", True)),
        )

    @classmethod
    def _of_gguf(cls, config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
        data, source, arch = checkpoint.metadata, checkpoint.path, checkpoint.architecture
        sizes = gguf_windows(checkpoint, config.num_layers, cls.every)
        wide = config.num_layers in _WIDE
        scalar = config.hidden_size / config.num_heads if wide else config.head_dim
        softcap = optional(data, f"{arch}.attn_logit_softcapping", float, 0.0, source)
        layers = [
            replace(spec, scale=scalar**-0.5, softcap=softcap, window=window)
            for spec, window in zip(config.attention_layers, sizes, strict=True)
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
        ("blocks.{}.attn.q_norm", "weight", "model.layers.{}.self_attn.q_norm", "blk.{}.attn_q_norm"),
        ("blocks.{}.attn.k_norm", "weight", "model.layers.{}.self_attn.k_norm", "blk.{}.attn_k_norm"),
    ]

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        if checkpoint.format == "gguf":
            return super().read_config(checkpoint)
        if checkpoint.metadata.get("use_bidirectional_attention"):
            raise CheckpointError(f"{checkpoint.path / 'config.json'}: use_bidirectional_attention is not supported.")
        return super().read_config(PartOf(checkpoint, _GEMMA3 | checkpoint.metadata))

    @classmethod
    def _of_hf(cls, config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
        data, source = checkpoint.metadata, checkpoint.path / "config.json"
        rope = optional(data, "rope_parameters", dict, {}, source)
        scaled = optional(data, "rope_scaling", dict, {}, source)  # as older files say it, beside the two thetas

        def rotation(kind: str, older: dict[str, Any], key: str, theta: float) -> tuple[float, RopeScaling | None]:
            given = optional(rope, kind, dict, None, source) or older
            theta = optional(given, "rope_theta", float, optional(data, key, float, theta, source), source)
            return theta, hf_scaling(given, config.max_context, source)

        return cls._with_rotations(
            super()._of_hf(config, checkpoint),
            rotation("sliding_attention", {}, "rope_local_base_freq", _LOCAL_THETA),
            rotation("full_attention", scaled, "rope_theta", 1e6),
        )

    @classmethod
    def _of_gguf(cls, config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
        whole = config.attention_layers[0].rotation
        assert whole is not None
        key = f"{checkpoint.architecture}.rope.freq_base_swa"
        local = optional(checkpoint.metadata, key, float, _LOCAL_THETA, checkpoint.path)
        return cls._with_rotations(super()._of_gguf(config, checkpoint), (local, None), (whole.theta, whole.scaling))

    @classmethod
    def _with_rotations(
        cls, config: ModelConfig, local: tuple[float, RopeScaling | None], whole: tuple[float, RopeScaling | None]
    ) -> ModelConfig:
        dim = config.head_dim
        rotations = [Rotation(num_dims=dim, theta=theta, scaling=scaling) for theta, scaling in (local, whole)]
        layers = (replace(spec, rotation=rotations[0 if spec.window else 1]) for spec in config.attention_layers)
        return replace(config, layers=tuple(layers), qk_norm=True)


class Gemma3Multimodal(Gemma3):
    """The text model of Gemma 3 that also sees. Its tensors are under one of two names, by the age of the file."""

    PREFIXES: ClassVar = ("model.", "language_model.model.", "model.language_model.")
    IGNORED: ClassVar = (*Gemma3.IGNORED, _VISION)

    def __init__(self, config: ModelConfig, weights: WeightPlan) -> None:
        super().__init__(config, weights)
        if config.tie_embeddings:
            self.ignored = (*self.ignored, r"language_model\.lm_head\.weight")
        else:
            self.names = [*self.names, ("head", "head", "language_model.lm_head", "")]

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        data = checkpoint.metadata
        text = required(data, "text_config", dict, checkpoint.path / "config.json")
        outer = {key: data[key] for key in ("tie_word_embeddings", "quantization_config") if data.get(key) is not None}
        # Where both say it, Transformers goes by the outer one.
        config = super().read_config(PartOf(checkpoint, text | outer, _VISION))
        note = "The vision tower and its projector are not read: the model takes and gives text."
        return replace(config, notes=(*config.notes, note))
