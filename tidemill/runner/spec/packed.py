"""Heads as they run: on a CPU matrices in the compiled kernels' layout, in 8 bits where those
multiply them; on a GPU the library's matmuls in bfloat16. Drafts need not be exact."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tidemill.kernels import native
from tidemill.kernels.linear import Weight, pack_linear
from tidemill.kernels.quantized_linear import GROUP, QuantizedPanels, quantize
from tidemill.runner.spec.heads import Target


class _OnDevice(Weight):
    def __init__(self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> None:
        self._weight_NK, self._bias_N = weight_NK, bias_N

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TK, self._weight_NK, self._bias_N)

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        return self._weight_NK[ids_T]


def pack(weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> Weight:
    if weight_NK.is_cuda:
        return _OnDevice(weight_NK, bias_N)
    if native.lib and weight_NK.shape[1] % GROUP == 0:
        return QuantizedPanels(quantize(weight_NK.float()), bias_N)
    return pack_linear(weight_NK.half(), bias_N)


class PackedTable:
    """The target's head, cut to the draft vocabulary."""

    def __init__(self, target: Target) -> None:
        self._weight, self._softcap = pack(target.table_DH), target.softcap

    def logits(self, states_RH: torch.Tensor) -> torch.Tensor:
        """float32."""
        made = self._weight(states_RH).float()
        return made if not self._softcap else torch.tanh(made / self._softcap) * self._softcap
