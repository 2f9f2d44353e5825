"""The counts of how often neurons are used: what `tidemill measure-neurons` writes, and how it is
read."""

from __future__ import annotations

from pathlib import Path

import torch

from tidemill.errors import CheckpointError

TENSORS = "neurons.safetensors"
_FIX = "Is it of this model? Measure it again: tidemill measure-neurons."


def tensor_name(layer: int) -> str:
    return f"frequency.{layer}"


def read_hottest(
    folder: Path, num_layers: int, num_neurons: int, num_hot: int
) -> list[torch.Tensor]:
    """The numbers of each layer's most used neurons, in order."""
    from safetensors import SafetensorError, safe_open

    path = folder / TENSORS
    hottest = []
    try:
        with safe_open(path, framework="pt") as file:
            for layer in range(num_layers):
                often = file.get_tensor(tensor_name(layer))
                if tuple(often.shape) != (num_neurons,) or not bool(often.isfinite().all()):
                    what = f"has shape {list(often.shape)}; the model has {num_neurons} neurons in a layer"
                    raise CheckpointError(
                        f"{path}: tensor {tensor_name(layer)} {what}, each with a finite number.",
                        fix=_FIX,
                    )
                hottest.append(
                    often.sort(descending=True, stable=True).indices[:num_hot].sort().values
                )
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}.", fix=_FIX) from error
    return hottest
