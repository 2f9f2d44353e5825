"""The keys of a GGUF file beside its weights, from a Hugging Face folder: its shape and how it
rotates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from tidemill.compress.gguf_config import ARCHITECTURES, llama3_factors
from tidemill.errors import CheckpointError
from tidemill.models.registry import model_class
from tidemill.types.model_config import LayerSpec, ModelConfig, Rotation
from tidemill.weights.checkpoint import RandomTensor, WeightTensor

Keys = dict[str, Any]
# layers, the last of which is without a window, as readers assume
_EVERY = {"gemma2": 2, "gemma3": 6, "olmo2": 4}
_UNCOMPARED = ("architecture", "stored", "notes", "kv_bits")
_FACTORS, _SHORT, _LONG = (
    "rope_freqs.weight",
    "rope_factors_short.weight",
    "rope_factors_long.weight",
)


@dataclass(slots=True)
class Described:
    """`tensors`: those that no file of Hugging Face's has."""

    architecture: str
    keys: Keys
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def describe(config: ModelConfig, source: Path, shapes: dict[str, tuple[int, ...]]) -> Described:
    """`shapes`: of the tensors that will be written. Refuses a model that a reader would take for
    another one."""
    if config.architecture not in ARCHITECTURES or config.experts:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(
            f"{source}: {config.architecture} cannot be written as GGUF.",
            fix=f"These can: {known}.",
        )
    arch = ARCHITECTURES[config.architecture]
    full = next(
        (spec for spec in config.layers if spec.rotation and not spec.window), config.layers[0]
    )
    keys: Keys = {
        "context_length": config.max_context,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": full.num_heads,
    }
    described = Described(arch, keys)
    if arch == "gpt2":
        keys["attention.layer_norm_epsilon"] = float(config.norm_eps)
    else:
        keys |= {
            "attention.head_count_kv": full.head_groups,
            "attention.key_length": full.head_dim,
            "attention.value_length": full.head_dim,
            "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        }
        keys |= _windows(config, arch) | _own(config, arch, full)
    if full.rotation is not None:
        keys |= _rotation(full.rotation, described.tensors)
    described.keys = {f"{arch}.{name}": value for name, value in keys.items()}
    _check(config, described, source, shapes)
    return described


def _windows(config: ModelConfig, arch: str) -> Keys:
    """llama.cpp knows which layers have one, and not all its models read a list."""
    windows = [spec.window for spec in config.layers]
    if not any(windows):
        return {}
    keys: Keys = {"attention.sliding_window": max(windows)}
    every = _EVERY.get(arch)
    if every and windows != [
        0 if (i + 1) % every == 0 else max(windows) for i in range(len(windows))
    ]:
        keys["attention.sliding_window_pattern"] = [bool(window) for window in windows]
    return keys


def _own(config: ModelConfig, arch: str, full: LayerSpec) -> Keys:
    """The keys of single families."""
    if arch == "gemma2":
        return {
            "attn_logit_softcapping": full.softcap,
            "final_logit_softcapping": config.logits_softcap,
        }
    if arch == "gemma3":
        local = next((spec.rotation for spec in config.layers if spec.window), None)
        return {"rope.freq_base_swa": float(local.theta)} if local else {}
    if arch == "granite":
        return {
            "embedding_scale": config.embedding_scale,
            "attention.scale": full.scale,
            "residual_scale": config.residual_scale,
            "logit_scale": 1 / config.logits_scale,
        }
    return {}


def _rotation(rotation: Rotation, tensors: dict[str, torch.Tensor]) -> Keys:
    keys: Keys = {
        "rope.dimension_count": rotation.num_dims,
        "rope.freq_base": float(rotation.theta),
    }
    scaling = rotation.scaling
    if scaling is None:
        return keys
    if scaling.kind == "llama3":
        settings = {
            name: getattr(scaling, name)
            for name in ("low_freq_factor", "high_freq_factor", "factor")
        }
        settings["original_max_position_embeddings"] = scaling.original_context
        tensors[_FACTORS] = llama3_factors(rotation, settings)
        return keys
    if scaling.kind != "linear":
        keys["rope.scaling.original_context_length"] = scaling.original_context
    if scaling.kind == "longrope":
        tensors |= {
            _SHORT: torch.tensor(scaling.short_factors),
            _LONG: torch.tensor(scaling.long_factors),
        }
        return keys | {"rope.scaling.attn_factor": _attention_factor(rotation)}
    return keys | {"rope.scaling.type": scaling.kind, "rope.scaling.factor": scaling.factor}


def _attention_factor(rotation: Rotation) -> float:
    """longrope: what the configuration leaves to be computed, files of GGUF have as a number."""
    scaling = rotation.scaling
    assert scaling is not None
    if scaling.attention_factor is not None or scaling.factor <= 1.0:
        return scaling.attention_factor or 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_context))


class _Tensor(RandomTensor):
    """A tensor of a file that is not there yet."""

    def __init__(self, name: str, values: torch.Tensor) -> None:
        super().__init__(name, tuple(values.shape))
        self._values = values

    def read_into(self, out: torch.Tensor) -> None:
        out.copy_(self._values)


@dataclass(slots=True)
class _Planned:
    """The file before it is there, for the models' own readers of configurations."""

    path: Path
    architecture: str
    metadata: Keys
    planned: list[WeightTensor]
    format: str = "gguf"
    has_weights: bool = True
    num_bytes: int = 0

    def tensors(self) -> Iterator[WeightTensor]:
        return iter(self.planned)


def _check(
    config: ModelConfig, described: Described, source: Path, shapes: dict[str, tuple[int, ...]]
) -> None:
    tensors: list[WeightTensor] = [RandomTensor(name, shape) for name, shape in shapes.items()]
    tensors += [_Tensor(name, values) for name, values in described.tensors.items()]
    planned = _Planned(source, described.architecture, described.keys, tensors)
    read = model_class(planned).read_config(planned)
    expected = replace(config, layers=tuple(map(_as_read, config.layers)))
    for each in fields(ModelConfig):
        mine, theirs = getattr(expected, each.name), getattr(read, each.name)
        if each.name not in _UNCOMPARED and mine != theirs:
            where, mine, theirs = _difference(each.name, mine, theirs)
            raise CheckpointError(
                f"{source}: GGUF cannot hold this model's {where}: {mine!s:.200} would be read as {theirs!s:.200}.",
                fix="Choose another --format.",
            )


def _difference(name: str, mine: Any, theirs: Any) -> tuple[str, Any, Any]:
    """The first layer that differs, and in what."""
    if name != "layers" or len(mine) != len(theirs):
        return name, mine, theirs
    layer = next(i for i in range(len(mine)) if mine[i] != theirs[i])
    own, other = mine[layer], theirs[layer]
    part = next(
        part.name for part in fields(own) if getattr(own, part.name) != getattr(other, part.name)
    )
    return f"{part} of layer {layer}", getattr(own, part), getattr(other, part)


def _as_read(spec: LayerSpec) -> LayerSpec:
    """The spec as it is read back: a value that a file has as a tensor or a number is not computed
    again."""
    scaling = spec.rotation.scaling if spec.rotation else None
    if scaling is None or spec.rotation is None:
        return spec
    if scaling.kind == "llama3":
        return spec.but(rotation=replace(spec.rotation, scaling=None))
    if scaling.kind == "longrope":
        scaling = replace(
            scaling,
            attention_factor=_attention_factor(spec.rotation),
            short_factors=_float32(scaling.short_factors),
            long_factors=_float32(scaling.long_factors),
        )
    return spec.but(rotation=replace(spec.rotation, scaling=scaling))


def _float32(values: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(torch.tensor(values, dtype=torch.float32).tolist())
