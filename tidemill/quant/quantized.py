"""Weights that stay in the 4 or 8 bits they are stored in (GGUF), multiplied as they are by bytes
of activations; and those that stay two factors."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

import torch

from tidemill.kernels.linear import Weight, pack_linear
from tidemill.kernels.low_rank import Factors, Product, SideBySide
from tidemill.kernels.moe import ExpertWeights, NativeExperts, Stack, stack_codes, stack_dense
from tidemill.kernels.quantized_linear import (
    Codes,
    QuantizedPanels,
    concat,
    fit,
    likeness,
    quantize,
    widened,
)
from tidemill.quant.base import ExpertParts, LinearMethod
from tidemill.quant.dense import SHORT, Dense
from tidemill.quant.low_rank import plain, read_factors
from tidemill.types.model_config import MoESpec
from tidemill.weights.checkpoint import WeightTensor

Matrix: TypeAlias = Codes | torch.Tensor
Part: TypeAlias = Matrix | Factors


class Quantized(LinearMethod[Part]):
    """Matrices stored as plain numbers are kept dense; 8-bit floats become bfloat16."""

    _dense = Dense()

    def read(self, tensor: WeightTensor, row_order: torch.Tensor | None) -> Part:
        factors = read_factors(tensor, row_order)
        if factors is not None:
            return factors
        codes = tensor.codes()
        fitted = None if codes is None else fit(codes)
        if fitted is None:
            return self._dense.read_as(_short(tensor.type_name), tensor, row_order)
        return fitted if row_order is None else fitted.take(row_order)

    def join(self, parts: list[Part], bias: torch.Tensor | None) -> Weight:
        if any(isinstance(part, Factors) for part in parts) or _loses(parts):
            return _side_by_side(parts, bias)
        joined = _below(parts)
        return (
            QuantizedPanels(joined, bias)
            if isinstance(joined, Codes)
            else self._dense.join([joined], bias)
        )

    def join_experts(self, parts: ExpertParts[Part], spec: MoESpec) -> ExpertWeights:
        shared = (
            None
            if parts.shared is None
            else (_stack([parts.shared[0]], None), _stack([[parts.shared[1]]], None))
        )
        down = _stack([[part] for part in parts.downs], parts.down_bias)
        return NativeExperts(spec, _stack(parts.gate_ups, parts.gate_up_bias), down, shared)


def _short(type_name: str) -> torch.dtype:
    return torch.bfloat16 if type_name.startswith("F8") else SHORT.get(type_name, torch.float32)


def _loses(parts: list[Part]) -> bool:
    """Tells if quantized matrices would have to be rounded anew to be fused: they have tables,
    groups or bits of their own."""
    codes = [part for part in parts if isinstance(part, Codes)]
    # 32 to a scale: they meet in 8 bits as they are
    is_short = all(one.scales_NG.dtype == torch.float16 for one in codes)
    return len(codes) == len(parts) and not is_short and len({likeness(one) for one in codes}) > 1


def _side_by_side(parts: list[Part], bias: torch.Tensor | None) -> Weight:
    """Factors have ranks of their own, so that nothing is fused."""
    sizes = [part.codes_NK.shape[0] if isinstance(part, Codes) else part.shape[0] for part in parts]
    biases = (
        [None] * len(parts) if bias is None else [one.contiguous() for one in bias.split(sizes)]
    )
    made: list[Weight] = []
    for part, own in zip(parts, biases, strict=True):
        if isinstance(part, Factors):
            made.append(Product(pack_linear(part.b_NR, own), pack_linear(part.a_RK)))
        else:
            made.append(
                QuantizedPanels(part, own) if isinstance(part, Codes) else pack_linear(part, own)
            )
    return made[0] if len(made) == 1 else SideBySide(made)


def _stack(parts: list[list[Part]], bias_EN: torch.Tensor | None) -> Stack:
    """The stack of each expert's matrices, one below the other. Unless all are quantized in one
    way, all are plain numbers."""
    joined = [_below(matrices) for matrices in parts]
    codes = [_for_experts(one) for one in joined if isinstance(one, Codes)]
    if len(codes) == len(joined) and len({likeness(one) for one in codes}) == 1:
        return stack_codes(codes, bias_EN)
    dense = [one.dequantize() if isinstance(one, Codes) else one for one in joined]
    if len({one.dtype for one in dense}) > 1:
        dense = [one.float() for one in dense]
    return stack_dense(dense, bias_EN)


def _for_experts(codes: Codes) -> Codes:
    """The rows of activations are rounded once for all experts, 32 to a scale, with their columns
    in order."""
    if codes.order_K is not None or codes.outliers is not None:
        return quantize(codes.dequantize())
    return widened(codes) if codes.bits == 2 else replace(codes, activations=None)


def _below(given: list[Part]) -> Matrix:
    parts: list[Matrix] = [plain(part) for part in given]
    codes = [part for part in parts if isinstance(part, Codes)]
    if len(codes) == len(parts):
        return codes[0] if len(codes) == 1 else concat(codes)
    if len(parts) == 1:
        assert isinstance(parts[0], torch.Tensor)
        return parts[0]
    dense = [part.dequantize() if isinstance(part, Codes) else part for part in parts]
    return torch.cat(
        dense if len({one.dtype for one in dense}) == 1 else [one.float() for one in dense]
    )
