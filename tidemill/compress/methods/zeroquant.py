"""ZeroQuant: groups of weights and whole tokens in few bits, each layer trained to give the
original's outputs."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch

from tidemill.compress.decoder import matrix_of
from tidemill.compress.grid import GROUP, fake, fake_activations, quantize
from tidemill.compress.methods.base import NONE, TOKEN, Method, among, with_activations
from tidemill.compress.methods.tune import tune
from tidemill.compress.stored import Stored
from tidemill.compress.walk import LayerJob


class ZeroQuant(Method):
    """`steps` of training a layer, each on one sequence; 0: none."""

    name = "zeroquant"
    defaults: ClassVar[dict[str, Any]] = {
        "bits": 4, "group": 64, "weights": GROUP, "symmetric": True, "activations": TOKEN, "steps": 64, "rate": 5e-3,
    }  # fmt: skip
    limits: ClassVar[dict[str, Any]] = {"activations": among(NONE, TOKEN)}
    formats = ("compressed-tensors", "gptq")
    uses_text = True
    uses_truth = True

    def quantize(self, job: LayerJob) -> tuple[dict[str, Stored], dict[str, torch.Tensor]]:
        if self["steps"]:
            rounding = {name: partial(fake, grid=self.grid(name)) for name in job.linears}
            act = (
                {}
                if self["activations"] == NONE
                else {name: lambda x: fake_activations(x, True) for name in rounding}
            )
            tune(job, rounding, act, self["steps"], self["rate"])
        stored: dict[str, Stored] = {}
        for name, module in job.linears.items():
            weight = quantize(matrix_of(module), self.grid(name))
            with_activations(weight, self["activations"], None, 127)
            stored[name] = weight
        return stored, {}
