"""Round to nearest, and LLM.int8(), which is that in 8 bits with large activations left out."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from tidemill.compress.decoder import matrix_of
from tidemill.compress.grid import CHANNEL, GROUP, quantize
from tidemill.compress.methods.base import NONE, TOKEN, Method, with_activations
from tidemill.compress.methods.inputs import collect
from tidemill.compress.stored import Stored
from tidemill.compress.walk import LayerJob


class RoundToNearest(Method):
    name = "rtn"
    defaults: ClassVar[dict[str, Any]] = {
        "bits": 4, "group": 128, "weights": GROUP, "symmetric": True, "activations": NONE, "static": False,
    }  # fmt: skip
    formats: tuple[str, ...] = ("compressed-tensors", "gptq", "awq", "gguf")

    def quantize(self, job: LayerJob) -> tuple[dict[str, Stored], dict[str, torch.Tensor]]:
        found = collect(job) if self.needs_text else {}
        stored: dict[str, Stored] = {}
        for name, module in job.linears.items():
            weight = quantize(matrix_of(module), self.grid(name))
            with_activations(
                weight, self["activations"], found[name].largest if name in found else None, 127
            )
            weight.threshold = self.options.get("threshold")
            stored[name] = weight
        return stored, {}


class LLMInt8(RoundToNearest):
    """Rows and tokens in 8 bits; of a token, values of at least the threshold are multiplied as
    they are."""

    name = "llm-int8"
    defaults: ClassVar[dict[str, Any]] = {"threshold": 6.0}
    formats = ("bitsandbytes",)

    def __init__(self, options: dict[str, Any], bits_of: dict[str, int] | None = None) -> None:
        super().__init__(options)
        self.options |= {"bits": 8, "weights": CHANNEL, "symmetric": True, "activations": TOKEN}
