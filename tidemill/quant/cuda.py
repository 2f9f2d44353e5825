"""bfloat16 weights on the GPU."""

from __future__ import annotations

import importlib
from collections.abc import Collection

import torch

from tidemill.config import MoESpec
from tidemill.kernels.linear import Weight
from tidemill.kernels.moe import ExpertWeights
from tidemill.quant.base import ExpertParts, LinearMethod
from tidemill.weights.checkpoint import WeightTensor


class CudaWeight(Weight):
    """`act`: rows of gate and up in turn, and the matmul gives act(gate) * up. `fast`: sums may run in an order that depends on
    the number of rows."""

    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, fast: bool, act: str = "") -> None:
        self._weight_NK, self._bias = weight_NK, bias_N
        self._fast, self._act = fast, act

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        from tidemill.kernels.cuda.gemm import matmul

        return matmul(x_TK, self._weight_NK, self._bias, self._act, any_order=self._fast)

    def logits(self, x_TK: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        from tidemill.kernels.cuda.gemm import gemm

        if out is None:
            out = torch.empty(x_TK.shape[0], self._weight_NK.shape[0], dtype=torch.float32, device=x_TK.device)
        return gemm(x_TK, self._weight_NK, bias_N=self._bias, out=out)

    def compile(self, nums_rows: Collection[int]) -> None:
        from tidemill.kernels.cuda.tuning import compile_tiles

        compile_tiles(self._weight_NK, self._bias, self._act, nums_rows)

    def prepare(self, nums_rows: Collection[int]) -> None:
        from tidemill.kernels.cuda.gemm import LIBRARY, choose_tile, library_agrees
        from tidemill.kernels.cuda.tuning import find_tiles

        num_out, num_in = self._weight_NK.shape
        find_tiles(self._weight_NK, self._act, library=self._bias is None)
        for num_rows in nums_rows:
            if self._bias is None and not self._fast and choose_tile(num_rows, num_out, num_in) is LIBRARY:
                library_agrees(num_rows, num_out, num_in, self._weight_NK.device)

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        return self._weight_NK[ids_T]


class CudaExperts(ExpertWeights):
    """Stacked: rows of gate first, then of up. The shared expert is two linears."""

    def __init__(
        self, spec: MoESpec, gate_up_E2IH: torch.Tensor, down_EHI: torch.Tensor, biases: list[torch.Tensor | None],
        shared: tuple[Weight, Weight] | None,
    ) -> None:  # fmt: skip
        self._spec, self._shared = spec, shared
        self._gate_up, self._down, self._biases = gate_up_E2IH, down_EHI, biases

    def __call__(self, x_TH: torch.Tensor, logits_TL: torch.Tensor) -> torch.Tensor:
        moe = importlib.import_module("tidemill.kernels.cuda.moe").moe
        spec = self._spec
        logits_TE = logits_TL[:, : spec.num_experts].contiguous()
        out: torch.Tensor = moe(
            x_TH,
            logits_TE,
            self._gate_up,
            self._down,
            spec.top_k,
            spec.renormalise,
            spec.act,
            *self._biases,
            scoring=spec.scoring,
        )
        if self._shared is None:
            return out
        gate_up, down = self._shared
        weight = torch.sigmoid(logits_TL[:, spec.num_experts :].float())
        return (out.float() + weight * down(gate_up(x_TH)).float()).to(out.dtype)


class CudaDense(LinearMethod[torch.Tensor]):
    def __init__(self, fast: bool = False) -> None:
        self._fast = fast

    def read(self, tensor: WeightTensor, row_order: torch.Tensor | None) -> torch.Tensor:
        rows = torch.empty(tensor.shape, dtype=torch.bfloat16, device="cuda")
        tensor.read_into(rows)
        return rows if row_order is None else rows[row_order.to("cuda")]

    def join(self, parts: list[torch.Tensor], bias: torch.Tensor | None) -> Weight:
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        return CudaWeight(weight, None if bias is None else bias.to("cuda", torch.bfloat16), self._fast)

    def join_gated(self, gate: torch.Tensor, up: torch.Tensor, bias: torch.Tensor | None, act: str) -> Weight:
        weight = torch.stack([gate, up], 1).flatten(0, 1)
        paired = None if bias is None else torch.stack(bias.chunk(2), 1).flatten().to("cuda", torch.bfloat16)
        return CudaWeight(weight, paired, self._fast, act)

    def join_experts(self, parts: ExpertParts[torch.Tensor], spec: MoESpec) -> ExpertWeights:
        gate_up = torch.stack([torch.cat(matrices) for matrices in parts.gate_ups])
        parts.gate_ups.clear()
        down = torch.stack(parts.downs)
        biases = [None if bias is None else bias.to("cuda", torch.bfloat16) for bias in (parts.gate_up_bias, parts.down_bias)]
        shared = None
        if parts.shared is not None:
            gate, up = torch.cat(parts.shared[0]).chunk(2)
            shared = self.join_gated(gate, up, None, spec.act), self.join([parts.shared[1]], None)
        return CudaExperts(spec, gate_up, down, biases, shared)
