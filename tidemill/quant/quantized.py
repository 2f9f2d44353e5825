"""Weights that stay in the 4 or 8 bits they are stored in (GGUF), multiplied as they are by bytes of activations."""

from __future__ import annotations

from typing import TypeAlias

import torch

from tidemill.kernels.linear import Weight
from tidemill.kernels.moe import ExpertWeights, NativeExperts, Stack, stack_codes, stack_dense
from tidemill.kernels.quantized_linear import Codes, QuantizedPanels, concat
from tidemill.model_config import MoESpec
from tidemill.quant.base import ExpertParts, LinearMethod
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

    def join_experts(self, parts: ExpertParts[Part], spec: MoESpec) -> ExpertWeights:
        shared = None if parts.shared is None else (_stack([parts.shared[0]], None), _stack([[parts.shared[1]]], None))
        down = _stack([[part] for part in parts.downs], parts.down_bias)
        return NativeExperts(spec, _stack(parts.gate_ups, parts.gate_up_bias), down, shared)


def _stack(parts: list[list[Part]], bias_EN: torch.Tensor | None) -> Stack:
    """Of each expert, matrices one below the other. Unless all are quantized in one way, all are plain numbers."""
    joined = [_below(matrices) for matrices in parts]
    codes = [one for one in joined if isinstance(one, Codes)]
    if len(codes) == len(joined) and len({(one.bits, one.offsets_NG is None) for one in codes}) == 1:
        return stack_codes(codes, bias_EN)
    dense = [one.dequantize() if isinstance(one, Codes) else one for one in joined]
    if len({one.dtype for one in dense}) > 1:
        dense = [one.float() for one in dense]
    return stack_dense(dense, bias_EN)


def _below(parts: list[Part]) -> Part:
    codes = [part for part in parts if isinstance(part, Codes)]
    if len(codes) == len(parts):
        return codes[0] if len(codes) == 1 else concat(codes)
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.dequantize() if isinstance(part, Codes) else part.float() for part in parts])
