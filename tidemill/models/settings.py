"""Reading config.json by a family's table: the keys that the family knows, and what each means
where it is missing.

A table maps a key to its default, whose type is the key's; `Nullable` is for keys that may be null.
A key that a family does not know is not seen. Tables hold the defaults of Transformers'
configuration classes, against which tests compare them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tidemill.errors import CheckpointError
from tidemill.types.model_config import RopeScaling

_NUMBERS_BELOW = 2**31
_SCALINGS = ("linear", "llama3", "yarn", "longrope")
_SCALING_NUMBERS = (
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale",
    "mscale_all_dim",
)  # fmt: skip


@dataclass(frozen=True)
class Nullable:
    """A key where null is a value of its own, and not the default."""

    kind: type
    default: Any = None


Keys = Mapping[str, Any]  # key to default, or Nullable
Settings = dict[str, Any]


def rope_keys(theta: float = 10000.0) -> Keys:
    """Keys of all families that rotate queries and keys."""
    return {
        "rope_theta": theta, "rope_parameters": Nullable(dict), "rope_scaling": Nullable(dict),
        "original_max_position_embeddings": Nullable(int),
    }  # fmt: skip


def read_settings(
    data: Mapping[str, Any], keys: Keys, source: object, aliases: Mapping[str, str] | None = None
) -> Settings:
    """The value of each key of the table. `aliases`: other names, each with the key it stands for;
    they come first."""
    values = {key: value for key, value in data.items() if key in keys}
    for alias, key in (aliases or {}).items():
        if data.get(alias) is not None:
            values[key] = data[alias]
    settings: Settings = {}
    for key, stated in keys.items():
        nullable = stated if isinstance(stated, Nullable) else None
        default, kind = (
            (stated, type(stated)) if nullable is None else (nullable.default, nullable.kind)
        )
        if values.get(key) is not None:
            settings[key] = required(values, key, kind, source)
        else:
            settings[key] = None if key in values and nullable is not None else default
    return settings


def optional(
    metadata: Mapping[str, Any], key: str, kind: type, default: Any, source: object
) -> Any:
    """A key that may be missing or null."""
    return default if metadata.get(key) is None else required(metadata, key, kind, source)


def required(metadata: Mapping[str, Any], key: str, kind: type, source: object) -> Any:
    """A key of a configuration, of the type it must have: a whole number that is not negative, or a
    finite one."""
    value = metadata.get(key)
    if kind is bool and (isinstance(value, bool) or value in (0, 1)):
        return bool(value)
    if (
        isinstance(value, int)
        and not isinstance(value, bool)
        and kind in (int, float)
        and not 0 <= value < _NUMBERS_BELOW
    ):
        raise CheckpointError(
            f"{source}: key {key} is {str(value)[:100]}; it must be from 0 to {_NUMBERS_BELOW - 1}."
        )
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if (
        not isinstance(value, kind)
        or isinstance(value, bool)
        or (isinstance(value, float) and not math.isfinite(value))
    ):
        problem = "is missing" if value is None else f"is {str(value)[:100]!r}"
        raise CheckpointError(f"{source}: key {key} {problem}; it must be of type {kind.__name__}.")
    return value


def one_of(settings: Settings, key: str, known: Mapping[str, str], source: object) -> str:
    """The name that we have for the value of a key."""
    value = settings[key]
    if value not in known:
        raise CheckpointError(
            f"{source}: {key} {str(value)[:100]!r} is not supported.",
            fix=f"{', '.join(known)} are.",
        )
    return known[value]


def refuse(
    settings: Settings, keys: Collection[str], source: object, why: str = "is not supported"
) -> None:
    """Raises if one of these is set."""
    for key in keys:
        if settings.get(key):
            raise CheckpointError(f"{source}: {key} {why}.")


@dataclass(frozen=True)
class Rope:
    """A file's settings of a rotation."""

    theta: float
    partial: float | None  # of a head's dimensions, that are rotated; None: it does not say
    scaling: RopeScaling | None


def read_rope(settings: Settings, source: object, parameters: Settings | None = None) -> Rope:
    """The rotation of all layers. Older files have `rope_scaling` beside `rope_theta`, newer ones
    all in `rope_parameters`. `parameters`: those of some layers, in files that tell layers
    apart."""
    rope = (
        parameters
        if parameters is not None
        else settings["rope_scaling"] or settings["rope_parameters"] or {}
    )
    original = settings["max_position_embeddings"]
    # before that of the parameters
    if parameters is None and settings["original_max_position_embeddings"] is not None:
        rope = rope | {
            "original_max_position_embeddings": settings["original_max_position_embeddings"]
        }
    theta = optional(rope, "rope_theta", float, settings["rope_theta"], source)
    partial = optional(
        rope, "partial_rotary_factor", float, settings.get("partial_rotary_factor"), source
    )
    return Rope(theta, partial, _scaling(rope, original, source))


def read_layered_rope(settings: Settings, local_theta: float, source: object) -> tuple[Rope, Rope]:
    """The rotations of layers with and without windows. Older files say how the latter's is scaled."""
    parameters = settings["rope_parameters"] or {}
    local, full = (
        optional(parameters, kind, dict, {}, source)
        for kind in ("sliding_attention", "full_attention")
    )
    full = full | (settings["rope_scaling"] or {})
    return read_rope(settings | {"rope_theta": local_theta}, source, local), read_rope(
        settings, source, full
    )


def _scaling(rope: Settings, context: int, source: object) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind in ("default", "dynamic"):
        # dynamic scaling starts past max_position_embeddings, where this engine's context ends
        return None
    if kind not in _SCALINGS:
        raise CheckpointError(
            f"{source}: rope scaling {str(kind)[:100]!r} is not supported.",
            fix=f"{', '.join(_SCALINGS)} are.",
        )
    numbers = {name: optional(rope, name, float, None, source) for name in _SCALING_NUMBERS}
    mscale, mscale_all_dim = numbers.pop("mscale"), numbers.pop("mscale_all_dim")
    fields: dict[str, Any] = {name: value for name, value in numbers.items() if value is not None}
    original = optional(rope, "original_max_position_embeddings", int, context, source)
    if kind in ("linear", "llama3"):
        fields["factor"] = required(rope, "factor", float, source)
    else:
        fields["factor"] = optional(rope, "factor", float, context / max(original, 1), source)
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            values = required(rope, name, list, source)
            fields[f"{name}s"] = tuple(
                required({name: value}, name, float, source) for value in values
            )
    if kind == "yarn":
        fields["truncate"] = bool(rope.get("truncate", True))
        if mscale and mscale_all_dim and "attention_factor" not in fields:
            fields["attention_factor"] = _strength(fields["factor"], mscale) / _strength(
                fields["factor"], mscale_all_dim
            )
    return RopeScaling(kind=kind, original_context=original, **fields)


def _strength(factor: float, mscale: float) -> float:
    """yarn's factor of cosines and sines."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
