"""Weights that stay in the 4 or 8 bits they are stored in (GGUF), multiplied as they are by bytes of activations."""

from __future__ import annotations

from typing import TypeAlias

import torch

from tidemill.kernels.linear import Weight
from tidemill.kernels.quantized_linear import Codes, QuantizedPanels, concat
from tidemill.quant.base import LinearMethod
from tidemill.quant.dense import Dense
from tidemill.weights.checkpoint import WeightTensor

Part: TypeAlias = Codes | torch.Tensor


class Quantized(LinearMethod[Part]):
    """Matrices stored as plain numbers are kept dense."""

    _dense = Dense()

    def read(self, tensor: WeightTensor, row_order: torch.Tensor | None) -> Part:
        codes = tensor.codes()
        if codes is None:
            return self._dense.read(tensor, row_order)
        return codes if row_order is None else codes.take(row_order)

    def join(self, parts: list[Part], bias: torch.Tensor | None) -> Weight:
        codes = [part for part in parts if isinstance(part, Codes)]
        if len(codes) == len(parts):
            return QuantizedPanels(codes[0] if len(codes) == 1 else concat(codes), bias)
        return self._dense.join([part.dequantize() if isinstance(part, Codes) else part for part in parts], bias)
