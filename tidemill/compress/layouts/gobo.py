"""GOBO's layout, which is our own: codes as a stream of bits, centroids, and outliers with their
places."""

from __future__ import annotations

from typing import Any

import torch

from tidemill.compress.layouts.base import Layout, pack
from tidemill.compress.stored import CentroidWeight, Stored


class GOBOLayout(Layout):
    name = "gobo"

    def tensors(self, name: str, stored: Stored) -> dict[str, torch.Tensor]:
        if not isinstance(stored, CentroidWeight):
            raise self.refuse(name, "it has no centroids", "Choose --method gobo.")
        self._bits = stored.bits
        return {
            f"{name}.weight_packed": pack(stored.codes_NK, stored.bits),
            f"{name}.weight_shape": torch.tensor(list(stored.codes_NK.shape)),
            f"{name}.weight_centroids": stored.centroids,
            f"{name}.weight_outliers": stored.outliers,
            f"{name}.weight_places": stored.places.to(torch.int32),
        }

    def config(self) -> dict[str, Any]:
        return {"quant_method": "gobo", "bits": self._bits}
