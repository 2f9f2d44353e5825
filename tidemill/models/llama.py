"""The Llama family: Llama 2 and 3, SmolLM2 and 3, Mistral. Others derive from it."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from tidemill.distributed.world import Stage
from tidemill.errors import CheckpointError
from tidemill.layers.attention import Attention, AttentionStep, EnteringStep
from tidemill.layers.base import Layer
from tidemill.layers.embedding import Embedding, Head, TiedHead
from tidemill.layers.mlp import GatedMLP
from tidemill.layers.moe import feed_forward
from tidemill.layers.norm import LayerNorm, RMSNorm
from tidemill.layers.stage import ResidualSum, StageBlocks
from tidemill.models.base import CausalLM, stored_kv_bits, stored_values
from tidemill.models.heads import Labels, ties_head
from tidemill.models.settings import (
    Keys,
    Nullable,
    Settings,
    one_of,
    optional,
    read_rope,
    read_settings,
    required,
    rope_keys,
)
from tidemill.quant import WeightPlan
from tidemill.types.model_config import AttentionSpec, ModelConfig, RopeScaling, Rotation, alike
from tidemill.weights.checkpoint import Checkpoint
from tidemill.weights.sentence_transformers import decoder_pooling

_SMOLLM3_EVERY = 4  # layers, the last of which is not rotated
# GGUF's names for it, by the kind of norm
_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
_LONGROPE = {
    "short_factors": "rope_factors_short.weight",
    "long_factors": "rope_factors_long.weight",
}
ACTS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_python": "gelu", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh",
    "relu": "relu", "relu2": "relu2",
}  # fmt: skip


class Block(nn.Module):
    attention: ClassVar[type[Attention]] = Attention

    def __init__(self, config: ModelConfig, layer: int, weights: WeightPlan) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps, config.residual_scale)
        self.attn = self.attention(config, layer, weights)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, config.residual_scale)
        self.mlp = self.feed_forward(config, layer, weights)
        self.attn.fused_norm = True
        if isinstance(self.mlp, GatedMLP):
            self.mlp.fused_norm = True

    def feed_forward(self, config: ModelConfig, layer: int, weights: WeightPlan) -> nn.Module:
        return feed_forward(config, layer, weights)

    def forward(
        self, delta_TH: torch.Tensor | None, residual_TH: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        """Takes the last block's contribution, not yet added, and returns its own: each norm adds
        what came before it."""
        delta_TH = self.attn(self.attn_norm.add(delta_TH, residual_TH), step)
        return self.mlp(self.mlp_norm.add(delta_TH, residual_TH))


class Llama(CausalLM):
    block: ClassVar[type[nn.Module]] = Block
    has_experts: ClassVar = False
    # formats whose rows of q and k have rotated pairs side by side
    PAIRS: ClassVar[Collection[str]] = ("gguf",)
    KEYS: ClassVar[Keys] = {  # of config.json
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": Nullable(int),
        "head_dim": Nullable(int), "hidden_act": "silu", "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
        "mlp_bias": False, **rope_keys(),
    }  # fmt: skip
    ALIASES: ClassVar[dict[str, str]] = {}  # other names of keys
    HEADS: ClassVar[tuple[str, ...]] = ("lm_head.weight",)  # names of the stored head
    NAMES: ClassVar = [
        ("embed", "weight", "model.embed_tokens", "token_embd"),
        ("blocks.{}.attn_norm", "weight", "model.layers.{}.input_layernorm", "blk.{}.attn_norm"),
        ("blocks.{}.attn.qkv", "q", "model.layers.{}.self_attn.q_proj", "blk.{}.attn_q"),
        ("blocks.{}.attn.qkv", "k", "model.layers.{}.self_attn.k_proj", "blk.{}.attn_k"),
        ("blocks.{}.attn.qkv", "v", "model.layers.{}.self_attn.v_proj", "blk.{}.attn_v"),
        ("blocks.{}.attn.out", "out", "model.layers.{}.self_attn.o_proj", "blk.{}.attn_output"),
        (
            "blocks.{}.mlp_norm",
            "weight",
            "model.layers.{}.post_attention_layernorm",
            "blk.{}.ffn_norm",
        ),
        ("blocks.{}.mlp.gate_up", "gate", "model.layers.{}.mlp.gate_proj", "blk.{}.ffn_gate"),
        ("blocks.{}.mlp.gate_up", "up", "model.layers.{}.mlp.up_proj", "blk.{}.ffn_up"),
        ("blocks.{}.mlp.down", "down", "model.layers.{}.mlp.down_proj", "blk.{}.ffn_down"),
        ("norm", "weight", "model.norm", "output_norm"),
        ("ropes.0", "factors", "", "rope_freqs"),
    ]
    PREFIXES: ClassVar[tuple[str, ...]] = ("model.", "")  # those of base models have none
    IGNORED: ClassVar[tuple[str, ...]] = (
        r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
        r"rope_factors_(short|long)\.weight",
    )

    def __init__(self, config: ModelConfig, weights: WeightPlan) -> None:
        super().__init__(config, weights)
        self.embed: nn.Module = Embedding(config.vocab_size, config.hidden_size, weights)
        self.blocks = nn.ModuleList(
            self.block(config, i, weights) for i in range(config.num_layers)
        )
        self.norm: RMSNorm | LayerNorm | ResidualSum = RMSNorm(
            config.hidden_size, config.norm_eps, config.residual_scale
        )
        self.head: nn.Module
        if config.tie_embeddings:
            self.head = TiedHead(self.embed)
            self.ignored = (*self.IGNORED, *map(re.escape, self.HEADS))  # copies of the table
        else:
            self.head = Head(config.hidden_size, config.vocab_size, weights)
            usual, *others = (name.removesuffix(".weight") for name in self.HEADS)
            more = [("head", "head", name, "") for name in others]
            self.names = [*self.NAMES, ("head", "head", usual, "output"), *more]
        if config.labels is not None:
            self.labels = Labels(config, weights)
            self.names = [*self.names, ("labels", "labels", "score", "")]

    def embed_tokens(self, ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        return self.embed(ids_T)

    def forward(self, residual_TH: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        delta = None
        for block in self.blocks:
            delta = block(delta, residual_TH, step)
        return self.norm.add(delta, residual_TH)

    @property
    def can_enter(self) -> bool:
        """Not if the last layer has a state, or no norm in front of its attention, nor if weights
        come when a layer runs, nor in a stage whose hidden states all go on to the next, nor with
        another forward pass than this one."""
        last, goes_on = list(self.blocks)[-1], isinstance(self.norm, ResidualSum)
        is_own = type(self).forward is Llama.forward
        return (
            is_own
            and hasattr(last, "attn_norm")
            and hasattr(last, "attn")
            and self.streaming is None
            and not goes_on
        )

    def enter(self, residual_TH: torch.Tensor, step: EnteringStep) -> torch.Tensor:
        blocks: list[Any] = list(self.blocks)
        last, delta = blocks.pop(), None
        for block in blocks:
            delta = block(delta, residual_TH, step)
        last.attn.enter(last.attn_norm.add(delta, residual_TH), step)
        return residual_TH

    def finish(self, residual_TH: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        return self.norm.add(list(self.blocks)[-1](None, residual_TH, step), residual_TH)

    def logits(self, hidden_TH: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(hidden_TH, out)

    def keep(self, stage: Stage) -> None:
        self.blocks = StageBlocks(self.blocks, stage)
        needs_table = stage.is_first or (stage.is_last and self.config.tie_embeddings)
        for name, is_needed in (
            ("embed", needs_table),
            ("positions", stage.is_first),
            ("embed_norm", stage.is_first),
        ):
            if not is_needed and hasattr(self, name):
                setattr(self, name, nn.Identity())
        if not stage.is_last:
            self.norm, self.head = ResidualSum(self.config.residual_scale), nn.Identity()
            for module in self.blocks.modules():  # any block may be the last of a trial
                if isinstance(module, GatedMLP):
                    module.fused_norm = False

    def trial_input(self, positions_T: torch.Tensor) -> torch.Tensor:
        if isinstance(self.embed, Embedding):
            return super().trial_input(positions_T)
        size = self.config.hidden_size
        return torch.sin(torch.arange(positions_T.numel() * size, dtype=torch.float32)).view(
            -1, size
        )

    def stand_ins(
        self, targets: dict[str, list[tuple[Layer, str]]], stored: Collection[str]
    ) -> dict[str, list[tuple[Layer, str]]]:
        """The head, of which the table was left out as its copy."""
        tables, heads = self.table_names(), [name for name in self.HEADS if name in stored]
        places = next((targets[name] for name in tables if name in targets), None)
        is_needed = (
            self.config.tie_embeddings
            and places is not None
            and not any(name in stored for name in tables)
        )
        return {heads[0]: places} if is_needed and heads and places else {}

    @property
    def bias_keys(self) -> list[str]:
        return [key for key in ("mlp_bias", "qkv_bias", "attention_bias") if key in self.KEYS]

    def row_order(self, checkpoint_format: str, part: str) -> torch.Tensor | None:
        """Rotated pairs that are stored side by side (0, R/2, 1, R/2 + 1, ...) are halves here."""
        if checkpoint_format not in self.PAIRS or part.partition(".")[0] not in ("q", "k"):
            return None
        num_heads = self.whole.num_heads if part[0] == "q" else self.whole.num_kv_heads
        num_rotated = max(
            spec.rotation.num_dims for spec in self.whole.layers if spec.rotation is not None
        )
        rows = torch.arange(num_heads * self.whole.head_dim, device="cpu").view(num_heads, -1)
        rotated, rest = rows[:, :num_rotated], rows[:, num_rotated:]
        halves = rotated.view(num_heads, num_rotated // 2, 2).transpose(1, 2).reshape(num_heads, -1)
        return torch.cat([halves, rest], 1).flatten()

    def heads_apart(self) -> torch.Tensor:
        """Rows of query, key and value of each head in turn, to all queries, all keys, all values."""
        heads, dim = self.whole.num_heads, self.whole.head_dim
        rows = torch.arange(heads * 3 * dim, device="cpu").view(heads, 3, dim)
        return rows.transpose(0, 1).reshape(-1)

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        if not cls.has_experts and checkpoint.metadata.get(
            f"{checkpoint.architecture}.expert_count"
        ):
            raise CheckpointError(
                f"{checkpoint.path}: {checkpoint.architecture} with experts is not supported."
            )
        config = _from_gguf(checkpoint) if checkpoint.format == "gguf" else cls.read_hf(checkpoint)
        check_numbers(config, checkpoint.path)
        return replace(config, notes=(*config.notes, *_notes(config)))

    @classmethod
    def read_hf(cls, checkpoint: Checkpoint) -> ModelConfig:
        settings = read_settings(checkpoint.metadata, cls.KEYS, source_of(checkpoint), cls.ALIASES)
        return cls.with_head(cls.of_settings(settings, checkpoint), settings, checkpoint)

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        """The configuration that the family makes of its keys, without what follows the last norm."""
        return from_settings(settings, checkpoint)

    @classmethod
    def with_head(
        cls, config: ModelConfig, settings: Settings, checkpoint: Checkpoint
    ) -> ModelConfig:
        """A head of its own, that of the embeddings' table, none, or that of a classifier."""
        if (labels := Labels.read(checkpoint)) is not None:
            return replace(config, labels=labels, has_head=False, tie_embeddings=True)
        is_tied = ties_head(
            checkpoint, settings["tie_word_embeddings"], cls.table_names(), cls.HEADS
        )
        has_head = is_tied or not _is_base(checkpoint, cls.HEADS)
        by = decoder_pooling(checkpoint.path)
        # tied: for trials alone
        return replace(
            config, tie_embeddings=is_tied or not has_head, has_head=has_head, embeds_by=by
        )

    @classmethod
    def table_names(cls) -> tuple[str, ...]:
        """The possible names of the embeddings' table."""
        name = next(f"{hf}.weight" for layer, _, hf, _ in cls.NAMES if layer == "embed")
        return tuple(
            dict.fromkeys(prefix + name.removeprefix(cls.PREFIXES[0]) for prefix in cls.PREFIXES)
        )


def _is_base(checkpoint: Checkpoint, heads: tuple[str, ...]) -> bool:
    """Tells if it is a model without its head, as those that make embeddings are saved."""
    is_named_so = checkpoint.architecture.endswith("Model")
    if not checkpoint.has_weights:
        return is_named_so
    names = {tensor.name for tensor in checkpoint.tensors()}
    return names.isdisjoint(heads) and (
        is_named_so or any(name.startswith("layers.") for name in names)
    )


class Mistral(Llama):
    KEYS: ClassVar = {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": Nullable(int, 8),
        "head_dim": Nullable(int), "hidden_act": "silu", "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "sliding_window": Nullable(int, 4096),
        **rope_keys(),
    }  # fmt: skip


class SmolLM3(Llama):
    KEYS: ClassVar = {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008,
        "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": Nullable(int, 4),
        "head_dim": Nullable(int), "hidden_act": "silu", "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "attention_bias": False,
        "mlp_bias": False, "use_sliding_window": False, "sliding_window": Nullable(int),
        "no_rope_layers": Nullable(list), "no_rope_layer_interval": _SMOLLM3_EVERY,
        "layer_types": Nullable(list), **rope_keys(2000000.0),
    }  # fmt: skip

    @classmethod
    def of_settings(cls, settings: Settings, checkpoint: Checkpoint) -> ModelConfig:
        """Files list which layers are rotated, or say how many are between those that are not. Only
        these may have windows."""
        config, source = from_settings(settings, checkpoint), source_of(checkpoint)
        are_rotated = settings["no_rope_layers"]
        if are_rotated is None:
            every = settings["no_rope_layer_interval"] or _SMOLLM3_EVERY
            are_rotated = [(layer + 1) % every > 0 for layer in range(config.num_layers)]
        if len(are_rotated) < config.num_layers:
            raise CheckpointError(
                f"{source}: no_rope_layers has {len(are_rotated)} entries for {config.num_layers} layers."
            )
        window = (
            settings["sliding_window"]
            if settings["use_sliding_window"] or settings["layer_types"]
            else None
        )
        kinds = settings["layer_types"] or [
            "full_attention" if is_rotated else "sliding_attention" for is_rotated in are_rotated
        ]
        config = with_windows(
            config, windows_of(kinds[: config.num_layers], window, config.num_layers, source)
        )
        specs = zip(config.layers, are_rotated, strict=False)
        return replace(
            config,
            layers=tuple(
                spec if is_rotated else spec.but(rotation=None) for spec, is_rotated in specs
            ),
        )

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> ModelConfig:
        config = super().read_config(checkpoint)
        if checkpoint.format != "gguf":
            return config
        specs = enumerate(config.layers)  # files of GGUF do not say which layers are rotated
        layers = (
            spec.but(rotation=None) if (i + 1) % _SMOLLM3_EVERY == 0 else spec for i, spec in specs
        )
        return replace(config, layers=tuple(layers))


def _notes(config: ModelConfig) -> tuple[str, ...]:
    scalings = {spec.rotation.scaling for spec in config.layers if spec.rotation is not None}
    notes = [
        f"--max-context decides the rope factors: above {scaling.original_context} the long ones, else the short ones."
        for scaling in scalings
        if scaling is not None
        and scaling.kind == "longrope"
        and scaling.original_context < config.max_context
    ][:1]
    if config.kv_bits == 8:
        notes.append(
            "k_scale and v_scale are not used: in the 8-bit KV cache each token and head has a scale of its own."
        )
    elif config.kv_bits:
        notes.append(
            f"A KV cache of {config.kv_bits} bits (kv_cache_scheme) is not followed: --kv-dtype decides."
        )
    return tuple(notes)


def check_numbers(config: ModelConfig, source: object) -> None:
    """Refuses numbers that would make rope tables or norms that are not numbers."""
    rotations = {spec.rotation for spec in config.layers if spec.rotation is not None}
    scalings = [
        rotation.scaling or RopeScaling(kind="linear", factor=1.0) for rotation in rotations
    ]
    wrong = {
        "context length": config.max_context < 1,
        "head_dim": config.head_dim % 2,
        "number of rotated dimensions": any(
            not 0 < rotation.num_dims <= config.head_dim or rotation.num_dims % 2
            for rotation in rotations
        ),
        "sliding window": any(spec.window < 0 for spec in config.layers),
        "norm epsilon": not 0 <= config.norm_eps <= 1,
        "rope theta": not all(1 < rotation.theta < 1e30 for rotation in rotations),
        "rope scaling factor": not all(1e-6 < s.factor < 1e6 for s in scalings),
        "rope scaling's original context": any(
            s.kind != "linear" and s.original_context < 2 for s in scalings
        ),
        "rope scaling's short_factor or long_factor": any(
            len(factors) != rotation.num_dims // 2
            or not all(1e-6 < factor < 1e6 for factor in factors)
            for rotation in rotations
            if rotation.scaling is not None and rotation.scaling.kind == "longrope"
            for factors in (rotation.scaling.short_factors, rotation.scaling.long_factors)
        ),
        "rope scaling's attention factor": not all(
            1e-6 < (s.attention_factor or 1.0) < 1e6 for s in scalings
        ),
        "rope scaling's low_freq_factor and high_freq_factor": not all(
            0 < s.low_freq_factor < s.high_freq_factor for s in scalings
        ),
        "rope scaling's beta_fast and beta_slow": not all(
            s.beta_fast > 0 and s.beta_slow > 0 for s in scalings
        ),
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise CheckpointError(f"{source}: the {name} of the configuration cannot be used.")


def from_settings(
    settings: Settings, checkpoint: Checkpoint, act: str = "hidden_act"
) -> ModelConfig:
    """The configuration that families of decoders have in common. A key that the family's table
    does not have is not there. `act`: the key of the activation."""
    source, num_heads, hidden_size = (
        source_of(checkpoint),
        settings["num_attention_heads"],
        settings["hidden_size"],
    )
    rope = read_rope(settings, source)
    head_dim = settings.get("head_dim") or hidden_size // max(num_heads, 1)
    num_rotated = (
        head_dim
        if "partial_rotary_factor" not in settings
        else int(head_dim * (rope.partial or 1.0))
    )
    spec = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=settings["num_key_value_heads"] or num_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rotation=Rotation(num_dims=num_rotated, theta=rope.theta, scaling=rope.scaling),
    )
    layers = alike(
        settings["num_hidden_layers"], spec.but(window=settings.get("sliding_window") or 0)
    )
    if checkpoint.metadata.get("is_causal") is False:
        raise CheckpointError(
            f"{source}: is_causal is false: a decoder that sees the whole text is not supported."
        )
    has_bias = settings.get("attention_bias", False)
    return ModelConfig(
        architecture=checkpoint.architecture,
        vocab_size=settings["vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=settings["intermediate_size"],
        layers=layers,
        max_context=settings["max_position_embeddings"],
        norm_eps=settings["rms_norm_eps"],
        act=one_of(settings, act, ACTS, source) if act in settings else "silu",
        attention_bias=has_bias,
        attention_out_bias=has_bias and _stores(checkpoint, "o_proj.bias"),
        mlp_bias=settings.get("mlp_bias", False),
        stored=stored_values(checkpoint),
        kv_bits=stored_kv_bits(checkpoint),
    )


def source_of(checkpoint: Checkpoint) -> Path:
    return checkpoint.path / "config.json"


def _stores(checkpoint: Checkpoint, ending: str) -> bool:
    """True if a tensor of such a name is there, or, without weights, may be."""
    return not checkpoint.has_weights or any(
        tensor.name.endswith(ending) for tensor in checkpoint.tensors()
    )


def windows_of(kinds: list[str], window: int | None, num_layers: int, source: object) -> list[int]:
    """Each layer's sliding window, 0 without one, by the kinds of the layers."""
    if len(kinds) != num_layers or set(map(str, kinds)) - {"sliding_attention", "full_attention"}:
        raise CheckpointError(
            f"{source}: layer_types must name sliding_attention or full_attention for each layer."
        )
    return [window or 0 if kind == "sliding_attention" else 0 for kind in kinds]


def with_windows(config: ModelConfig, sizes: list[int]) -> ModelConfig:
    layers = tuple(spec.but(window=size) for spec, size in zip(config.layers, sizes, strict=True))
    return replace(config, layers=layers)


def rotated_by_windows(config: ModelConfig, windows: list[int]) -> ModelConfig:
    """Layers without a window (0) are not rotated."""
    specs = with_windows(config, windows).layers
    layers = tuple(spec if spec.window else replace(spec, rotation=None) for spec in specs)
    return replace(config, layers=layers)


def table_rows(checkpoint: Checkpoint) -> int:
    """The rows of a GGUF file's table: the size of its vocabulary."""
    table = next(
        (tensor.shape for tensor in checkpoint.tensors() if tensor.name == "token_embd.weight"),
        None,
    )
    if table is None:
        raise CheckpointError(
            f"{checkpoint.path}: tensor token_embd.weight is missing.",
            fix="Is it the whole checkpoint?",
        )
    return table[0]


def gguf_windows(checkpoint: Checkpoint, num_layers: int, every: int) -> list[int]:
    """Each layer's sliding window: every so many layers, one is without. Files may say how many, or
    which layers have one."""
    data, source, arch = checkpoint.metadata, checkpoint.path, checkpoint.architecture
    window = optional(data, f"{arch}.attention.sliding_window", int, 0, source)
    key = f"{arch}.attention.sliding_window_pattern"
    if not isinstance(data.get(key), list):
        every = optional(data, key, int, every, source)
        return [0 if every and (layer + 1) % every == 0 else window for layer in range(num_layers)]
    if len(data[key]) != num_layers:
        raise CheckpointError(
            f"{source}: {key} has {len(data[key])} entries for {num_layers} layers."
        )
    return [window if has_window else 0 for has_window in data[key]]


def _gguf_scaling(checkpoint: Checkpoint, num_rotated: int, context: int) -> RopeScaling | None:
    data, source, arch = checkpoint.metadata, checkpoint.path, checkpoint.architecture
    factors = {
        tensor.name: tensor for tensor in checkpoint.tensors() if tensor.name in _LONGROPE.values()
    }
    kind = data.get(f"{arch}.rope.scaling.type", "none")
    original = optional(data, f"{arch}.rope.scaling.original_context_length", int, context, source)
    if factors or kind == "longrope":
        values: dict[str, Any] = {}
        for field, name in _LONGROPE.items():
            if name not in factors:
                raise CheckpointError(
                    f"{source}: tensor {name} is missing.", fix="Is it the whole checkpoint?"
                )
            if factors[name].shape != (num_rotated // 2,):
                raise CheckpointError(
                    f"{source}: tensor {name} has shape {list(factors[name].shape)}, not [{num_rotated // 2}]."
                )
            read = torch.empty(num_rotated // 2, dtype=torch.float32, device="cpu")
            factors[name].read_into(read)
            values[field] = tuple(read.tolist())
        return RopeScaling(
            kind="longrope",
            factor=context / max(original, 1),
            original_context=original,
            attention_factor=optional(
                data, f"{arch}.rope.scaling.attn_factor", float, None, source
            ),
            **values,
        )
    if kind in ("linear", "yarn"):
        factor = required(data, f"{arch}.rope.scaling.factor", float, source)
        return RopeScaling(kind=kind, factor=factor, original_context=original)
    if f"{arch}.rope.scale_linear" in data:  # how older files say it
        return RopeScaling(
            kind="linear", factor=required(data, f"{arch}.rope.scale_linear", float, source)
        )
    if kind != "none":
        raise CheckpointError(
            f"{source}: rope scaling {kind!r} is not supported.",
            fix="linear, yarn and longrope are.",
        )
    return None


def _from_gguf(checkpoint: Checkpoint) -> ModelConfig:
    data, source, arch = checkpoint.metadata, checkpoint.path, checkpoint.architecture

    def need(key: str, kind: type = int) -> Any:
        return required(data, f"{arch}.{key}", kind, source)

    shapes = {tensor.name: tensor.shape for tensor in checkpoint.tensors()}
    epsilon = next((name for name in _EPSILONS if f"{arch}.{name}" in data), _EPSILONS[0])
    num_heads, hidden_size = need("attention.head_count"), need("embedding_length")
    head_dim = optional(
        data, f"{arch}.attention.key_length", int, hidden_size // max(num_heads, 1), source
    )
    rotated = optional(data, f"{arch}.rope.dimension_count", int, head_dim, source)
    trained = need("context_length")
    window = optional(data, f"{arch}.attention.sliding_window", int, 0, source)
    theta = optional(data, f"{arch}.rope.freq_base", float, 10000.0, source)
    spec = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=optional(data, f"{arch}.attention.head_count_kv", int, num_heads, source),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rotation=Rotation(
            num_dims=rotated, theta=theta, scaling=_gguf_scaling(checkpoint, rotated, trained)
        ),
        window=window,
    )
    return ModelConfig(
        architecture=arch,
        vocab_size=table_rows(checkpoint),
        hidden_size=hidden_size,
        intermediate_size=need("feed_forward_length"),
        layers=alike(need("block_count"), spec),
        max_context=trained,
        stored=stored_values(checkpoint),
        norm_eps=need(epsilon, float),
        tie_embeddings="output.weight" not in shapes,
        attention_bias="blk.0.attn_q.bias" in shapes,
        attention_out_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
    )
