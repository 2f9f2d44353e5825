"""KVQuant's constants on disk: one safetensors file that `tidemill calibrate-kv` has written. Not
trusted: sizes are bounded by the model's, and what does not fit is refused by its name."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from tidemill.errors import CalibrationError
from tidemill.kernels.kvquant import KVQuant
from tidemill.types.kv_format import FORMATS
from tidemill.types.model_config import ModelConfig
from tidemill.version import __version__

_FORMAT = 1
_KEY = "tidemill"  # of the file's metadata: a JSON object
_MAX_HEADER = 2**20
_AGAIN = "Calibrate this model: tidemill calibrate-kv MODEL -o FILE."


def model_shape(config: ModelConfig) -> dict[str, Any]:
    """The fields of the model that keys and values depend on, apart from the weights."""
    return {
        "architecture": config.architecture,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_layers,
        "num_kv_layers": len(config.token_layers),
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rotations": [repr(spec.rotation) for spec in config.token_layers],
    }


def config_digest(config: ModelConfig) -> str:
    return hashlib.sha256(json.dumps(model_shape(config), sort_keys=True).encode()).hexdigest()


def _shapes(config: ModelConfig, bits: int) -> dict[str, tuple[int, ...]]:
    layers = len(config.token_layers)
    channels = (layers, 2, config.num_kv_heads, config.head_dim)
    return {
        "scales": channels,
        "offsets": channels,
        "key_levels": (layers, 2**bits),
        "value_levels": (layers, 2**bits),
    }


def save_calibration(
    path: Path, quant: KVQuant, config: ModelConfig, about: dict[str, Any]
) -> None:
    """`about`: what they were fitted to. The file appears whole or not at all."""
    from safetensors.torch import save_file

    shape = model_shape(config)
    shape.pop("rotations")  # the digest has them
    said = {
        "format": _FORMAT,
        "kv_dtype": quant.name,
        "model": shape,
        "config": config_digest(config),
        **about,
    }
    tensors = {
        name: getattr(quant, name).float().contiguous() for name in _shapes(config, quant.bits)
    }
    new = path.with_name(f"{path.name}.new")
    save_file(tensors, new, metadata={_KEY: json.dumps(said | {"version": __version__})})
    os.replace(new, path)


def load_calibration(path: Path, config: ModelConfig, kv_dtype: str) -> KVQuant:
    path, bits = path.expanduser(), FORMATS[kv_dtype].bits
    shapes = _shapes(config, bits)
    said, tensors = _read(path, 4 * sum(torch.Size(shape).numel() for shape in shapes.values()))
    _check(path, said, config, kv_dtype)
    for name in sorted(shapes.keys() | tensors.keys()):
        if name not in shapes:
            raise CalibrationError(f"{path}: tensor {name[:200]} has no place.", fix=_AGAIN)
        if name not in tensors:
            raise CalibrationError(
                f"{path}: tensor {name} is missing.", fix="Is it the whole file?"
            )
        if tensors[name].shape != shapes[name]:
            found, wanted = list(tensors[name].shape), list(shapes[name])
            raise CalibrationError(
                f"{path}: tensor {name} has shape {found}; the model asks for {wanted}.", fix=_AGAIN
            )
        if not tensors[name].isfinite().all():
            raise CalibrationError(
                f"{path}: tensor {name} holds values that are not finite.", fix=_AGAIN
            )
    if not (tensors["scales"] > 1e-30).all():
        raise CalibrationError(
            f"{path}: tensor scales holds values that are not positive.", fix=_AGAIN
        )
    for name in ("key_levels", "value_levels"):
        tensors[name] = tensors[name].bfloat16().float()
        if not (tensors[name].diff(dim=-1) >= 0).all():
            raise CalibrationError(f"{path}: tensor {name} is not ascending.", fix=_AGAIN)
    return KVQuant(kv_dtype, bits, **tensors)


def _read(path: Path, num_bytes: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        if path.stat().st_size > num_bytes + _MAX_HEADER:
            raise CalibrationError(
                f"{path} is larger than a calibration of this model in this format can be.",
                fix=_AGAIN,
            )
        with safe_open(path, framework="pt") as file:
            said = json.loads((file.metadata() or {}).get(_KEY, "null"))
            tensors = {}
            for name in file.keys():  # noqa: SIM118 - not a dict
                kind = str(file.get_slice(name).get_dtype())
                if kind != "F32":
                    raise CalibrationError(
                        f"{path}: tensor {name[:200]} has type {kind}; it must be F32.", fix=_AGAIN
                    )
                tensors[name] = file.get_tensor(name)
    except FileNotFoundError as error:
        raise CalibrationError(
            f"There is no file {path}.", fix=_AGAIN, param="kv_calibration"
        ) from error
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CalibrationError(
            f"{path} is corrupt or truncated: {error}.", fix="Copy it again, or calibrate again."
        ) from error
    if not isinstance(said, dict):
        raise CalibrationError(f"{path} is not a calibration of the KV cache.", fix=_AGAIN)
    return said, tensors


def _check(path: Path, said: dict[str, Any], config: ModelConfig, kv_dtype: str) -> None:
    if said.get("format") != _FORMAT:
        raise CalibrationError(
            f"{path}: format {str(said.get('format'))[:50]!r} is not known.", fix=_AGAIN
        )
    if said.get("config") != config_digest(config):
        model = said.get("model")
        theirs = model if isinstance(model, dict) else {}
        differs = next(
            (
                name
                for name, value in model_shape(config).items()
                if name in theirs and theirs[name] != value
            ),
            "",
        )
        ours = (
            f": its {differs} is {str(theirs[differs])[:50]}, not {model_shape(config)[differs]}"
            if differs
            else ""
        )
        raise CalibrationError(
            f"{path} was calibrated for another model{ours}.", fix=_AGAIN, param="kv_calibration"
        )
    if said.get("kv_dtype") != kv_dtype:
        found = str(said.get("kv_dtype"))[:50]
        raise CalibrationError(
            f"{path} was calibrated for --kv-dtype {found}, not {kv_dtype}.",
            fix=f"Use --kv-dtype {found}, or calibrate with --bits {FORMATS[kv_dtype].bits}.",
            param="kv_calibration",
        )
