"""Predictors of which neurons and heads a token needs: what `tidemill train-predictors` writes, and
how it is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tidemill.errors import CheckpointError

SETTINGS, TENSORS = "predictors.json", "predictors.safetensors"
VERSION = 1
NEURONS, HEADS = "neurons", "heads"
_MAX_SETTINGS_BYTES = 2**24
_FIX = "Train them again: tidemill train-predictors."


@dataclass(frozen=True, slots=True)
class Predictor:
    """Scores of units, b (a x) + bias: those above 0 are computed."""

    a_RH: torch.Tensor
    b_UR: torch.Tensor
    bias_U: torch.Tensor

    def scores(self, x_TH: torch.Tensor) -> torch.Tensor:
        return (x_TH @ self.a_RH.t()) @ self.b_UR.t() + self.bias_U


def read_settings(folder: Path) -> dict[str, Any]:
    path = folder / SETTINGS
    try:
        if path.stat().st_size > _MAX_SETTINGS_BYTES:
            raise CheckpointError(f"{path} is too long.", fix=_FIX)
        settings = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.", fix=_FIX) from error
    if not isinstance(settings, dict) or settings.get("version") != VERSION:
        raise CheckpointError(f"{path} is not of version {VERSION}.", fix=_FIX)
    return settings


def read_predictors(
    folder: Path, num_layers: int, hidden_size: int, units: dict[str, int]
) -> dict[str, list[Predictor]]:
    """By kind, one for each layer. `units`: how many there must be of each kind, neurons or heads;
    a kind that was not trained is missing."""
    from safetensors import SafetensorError, safe_open

    read_settings(folder)
    path = folder / TENSORS
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is corrupt or truncated: {error}.", fix=_FIX) from error
    kinds = [kind for kind in units if any(name.startswith(f"{kind}.") for name in tensors)]
    if not kinds:
        raise CheckpointError(
            f"{path} has no predictors: no tensor is named {' or '.join(f'{kind}.*' for kind in units)}.",
            fix=_FIX,
        )
    return {
        kind: [
            _predictor(path, tensors, f"{kind}.{number}", hidden_size, units[kind])
            for number in range(num_layers)
        ]
        for kind in kinds
    }


def _predictor(
    path: Path, tensors: dict[str, torch.Tensor], name: str, hidden_size: int, num_units: int
) -> Predictor:
    rank = (
        tensors[f"{name}.a"].shape[0]
        if f"{name}.a" in tensors and tensors[f"{name}.a"].dim() == 2
        else 0
    )
    found = []
    for part, shape in (
        ("a", (rank, hidden_size)),
        ("b", (num_units, rank)),
        ("bias", (num_units,)),
    ):
        tensor = tensors.get(f"{name}.{part}")
        if tensor is None:
            raise CheckpointError(
                f"{path}: tensor {name}.{part} is missing.", fix="Are they of this model? " + _FIX
            )
        if tuple(tensor.shape) != shape or 0 in shape:
            raise CheckpointError(
                f"{path}: tensor {name}.{part} has shape {list(tensor.shape)}; the model asks for {list(shape)}.",
                fix="Are they of this model? " + _FIX,
            )
        values = tensor.float().contiguous()
        if not tensor.is_floating_point() or not bool(values.isfinite().all()):
            raise CheckpointError(
                f"{path}: tensor {name}.{part} holds values that are no finite numbers.", fix=_FIX
            )
        found.append(values)
    return Predictor(*found)
