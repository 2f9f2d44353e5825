"""Heads as they run: matrices in the compiled kernels' layout, in 8 bits where those multiply them. Drafts need not be exact."""

from __future__ import annotations

import torch

from tidemill.kernels import native
from tidemill.kernels.linear import Weight, pack_linear
from tidemill.kernels.quantized_linear import GROUP, QuantizedPanels, quantize
from tidemill.runner.spec.heads import Target


def pack(weight_NK: torch.Tensor, bias_N: torch.Tensor | None = None) -> Weight:
    if native.lib and weight_NK.shape[1] % GROUP == 0:
        return QuantizedPanels(quantize(weight_NK.float()), bias_N)
    return pack_linear(weight_NK.half(), bias_N)


class PackedTable:
    """The target's head, cut to the draft vocabulary."""

    def __init__(self, target: Target) -> None:
        self._weight, self._softcap = pack(target.table_DH), target.softcap

    def logits(self, states_RH: torch.Tensor) -> torch.Tensor:
        made = self._weight(states_RH)
        return made if not self._softcap else torch.tanh(made / self._softcap) * self._softcap
