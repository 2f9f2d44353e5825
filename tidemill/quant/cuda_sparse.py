"""Weights of which two of four values are zero, on the sparse tensor cores of a GPU, by cuSPARSELt."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.nn.functional as F

from tidemill.errors import ConfigError
from tidemill.kernels.linear import Weight
from tidemill.quant.cuda import CudaDense, CudaMatrix, CudaWeight

# rows of activations come in multiples of so many; sizes of a weight that the library takes
_ROWS, _LEAST = 16, 32
_PROBE = 7  # seed of the activations that show whether bits depend on their number


def is_sparse(weight_NK: torch.Tensor) -> bool:
    """At most two of every four values in a row are not zero."""
    if weight_NK.shape[1] % 4:
        return False
    return all(
        bool(((rows.unflatten(1, (-1, 4)) != 0).sum(2) <= 2).all())
        for rows in weight_NK.split(4096)
    )


class CudaSparseWeight(CudaMatrix):
    """In bfloat16: 9 bits for a value instead of 16. `act`: as `CudaWeight` has it."""

    def __init__(
        self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, fast: bool, act: str = ""
    ) -> None:
        self._packed = torch._cslt_compress(weight_NK)
        self._num_out, self._num_in = weight_NK.shape
        self._bias, self._fast, self._act = bias_N, fast, act

    def _multiply(
        self, x_TK: torch.Tensor, act: str, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        from tidemill.kernels.cuda.glu import glu

        num = x_TK.shape[0]
        given = F.pad(x_TK, (0, 0, 0, -num % _ROWS)) if num % _ROWS else x_TK
        made = torch._cslt_sparse_mm(
            self._packed, given.t(), bias=self._bias, transpose_result=True
        )[:num]
        made = glu(made, act) if act else made
        return made if out is None else out.copy_(made)

    def prepare(self, nums_rows: Collection[int]) -> None:
        """Refused unless a row has the same bits at every number of rows."""
        if self._fast:
            return
        most = max(nums_rows)
        device = self._packed.device
        generator = torch.Generator(device).manual_seed(_PROBE)
        x = torch.randn(
            most, self._num_in, generator=generator, device=device, dtype=torch.bfloat16
        )
        whole = self._multiply(x, "")
        for num in nums_rows:
            if not torch.equal(self._multiply(x[:num], ""), whole[:num]):
                raise ConfigError(
                    f"On this GPU a row of a 2:4 sparse matmul ({self._num_out} x {self._num_in}) has other bits among {num} "
                    f"rows than among {most}: tokens would depend on their batch.",
                    fix="Add --fast-math if they may, or leave --quantization out: weights are then multiplied as dense ones.",
                    param="quantization",
                )

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("tables are held dense")


class CudaSparse(CudaDense):
    """Linears of a pruned checkpoint; those that are not 2:4 stay dense."""

    def join(self, parts: list[torch.Tensor], bias: torch.Tensor | None) -> Weight:
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._made(weight, None if bias is None else bias.to("cuda", torch.bfloat16))

    def join_gated(
        self, gate: torch.Tensor, up: torch.Tensor, bias: torch.Tensor | None, act: str
    ) -> Weight:
        paired = (
            None
            if bias is None
            else torch.stack(bias.chunk(2), 1).flatten().to("cuda", torch.bfloat16)
        )
        return self._made(torch.stack([gate, up], 1).flatten(0, 1), paired, act)

    def _made(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, act: str = "") -> Weight:
        if weight_NK.shape[0] % _LEAST or weight_NK.shape[1] % _LEAST or not is_sparse(weight_NK):
            return CudaWeight(weight_NK, bias_N, self._fast, act)
        return CudaSparseWeight(weight_NK, bias_N, self._fast, act)
