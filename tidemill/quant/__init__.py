"""How a linear layer stores and applies its weight. A new way is one file and a line in METHODS."""

from typing import Any

from tidemill.quant.base import ExpertParts, ExpertStacks, LinearMethod
from tidemill.quant.cuda import CudaDense
from tidemill.quant.dense import Dense
from tidemill.quant.quantized import Quantized

METHODS: dict[str, LinearMethod[Any]] = {
    "float32": Dense(),
    "quantized": Quantized(),
    "bfloat16": CudaDense(),
    "bfloat16-fast": CudaDense(fast=True),
}

__all__ = ["METHODS", "ExpertParts", "ExpertStacks", "LinearMethod"]
