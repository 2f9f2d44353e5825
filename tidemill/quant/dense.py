"""Weights as numbers of 32 or 16 bits; matmuls in float32."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tidemill.kernels import native
from tidemill.kernels.linear import Panels, Weight, empty_panels, pack_linear, put_rows
from tidemill.kernels.moe import ExpertWeights, dense_experts
from tidemill.quant.base import ExpertParts, LinearMethod, LinearRows
from tidemill.types.model_config import MoESpec
from tidemill.weights.checkpoint import WeightTensor
from tidemill.weights.slices import pieces

SHORT = {"F16": torch.float16, "BF16": torch.bfloat16}


class PanelRows(LinearRows):
    """In the layout of the compiled kernels, some rows at a time."""

    def __init__(self, nums_out: Mapping[str, int], num_in: int) -> None:
        self._num_out, self._num_in = sum(nums_out.values()), num_in
        self._begins, begin = dict[str, int](), 0
        for name, num in nums_out.items():
            self._begins[name], begin = begin, begin + num
        self._panels: torch.Tensor | None = None

    def read(self, name: str, tensor: WeightTensor, row_order: torch.Tensor | None) -> None:
        """Unless all are stored in the same 16 bits, they are in 32."""
        dtype = SHORT.get(tensor.type_name, torch.float32)
        if self._panels is None:
            self._panels = empty_panels(self._num_out, self._num_in, dtype)
        elif self._panels.dtype != dtype:
            self._panels = self._panels.float()
        begin = self._begins[name]
        parts = pieces(tensor) if row_order is None else [tensor]
        # the first is the largest
        buffer = torch.empty(parts[0].shape, dtype=self._panels.dtype, device="cpu")
        for piece in parts:
            rows = buffer[: piece.shape[0]]
            piece.read_into(rows)
            put_rows(self._panels, begin, rows if row_order is None else rows[row_order])
            begin += piece.shape[0]

    def weight(self, bias: torch.Tensor | None) -> Weight:
        assert self._panels is not None
        return Panels.of(self._panels, self._num_out, bias)


class Dense(LinearMethod[torch.Tensor]):
    def read(self, tensor: WeightTensor, row_order: torch.Tensor | None) -> torch.Tensor:
        """16-bit values stay as they are where the compiled kernels widen them on the way; the
        results are the same."""
        return self.read_as(
            SHORT.get(tensor.type_name, torch.float32) if native.lib else torch.float32,
            tensor,
            row_order,
        )

    def new_rows(self, nums_out: Mapping[str, int], num_in: int) -> LinearRows | None:
        return PanelRows(nums_out, num_in) if native.lib else None

    def read_as(
        self, dtype: torch.dtype, tensor: WeightTensor, row_order: torch.Tensor | None
    ) -> torch.Tensor:
        rows = torch.empty(tensor.shape, dtype=dtype, device="cpu")
        tensor.read_into(rows)
        return rows if row_order is None else rows[row_order]

    def join(self, parts: list[torch.Tensor], bias: torch.Tensor | None) -> Weight:
        return pack_linear(_below(parts), bias)

    def join_experts(self, parts: ExpertParts[torch.Tensor], spec: MoESpec) -> ExpertWeights:
        shared = None if parts.shared is None else (_below(parts.shared[0]), parts.shared[1])
        gate_ups = _same_type([_below(matrices) for matrices in parts.gate_ups])
        return dense_experts(
            spec, gate_ups, _same_type(parts.downs), parts.gate_up_bias, parts.down_bias, shared
        )


def _same_type(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return parts if len({part.dtype for part in parts}) == 1 else [part.float() for part in parts]


def _below(parts: list[torch.Tensor]) -> torch.Tensor:
    """One below the other."""
    return parts[0] if len(parts) == 1 else torch.cat(_same_type(parts))
