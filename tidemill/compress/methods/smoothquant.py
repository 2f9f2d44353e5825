"""SmoothQuant: what makes activations hard to round is moved into weights, as far as that helps
both; then 8 bits for each."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from tidemill.compress.decoder import is_linear, matrix_of
from tidemill.compress.grid import CHANNEL, TENSOR, fake_activations, quantize, rounded
from tidemill.compress.methods.base import TOKEN, Method, among, with_activations
from tidemill.compress.methods.folds import Fold, folds
from tidemill.compress.methods.inputs import Inputs, collect
from tidemill.compress.stored import Stored
from tidemill.compress.walk import LayerJob

_TRIED = [0.05 * i for i in range(4, 20)]
_SAMPLES = 512


class SmoothQuant(Method):
    """`alpha`: how much of the activations' range moves; searched for every fold unless it is
    given."""

    name = "smoothquant"
    defaults: ClassVar[dict[str, Any]] = {
        "weights": CHANNEL,
        "activations": TENSOR,
        "static": True,
        "alpha": None,
    }
    limits: ClassVar[dict[str, Any]] = {
        "activations": among(TENSOR, TOKEN),
        "weights": among(TENSOR, CHANNEL),
    }
    formats = ("compressed-tensors",)
    uses_text = True

    def quantize(self, job: LayerJob) -> tuple[dict[str, Stored], dict[str, torch.Tensor]]:
        found = collect(job, num_samples=_SAMPLES)
        changed: dict[str, torch.Tensor] = {}
        for fold in folds(job):
            if is_linear(fold.before):
                # as in the paper: inputs of attention and of the feed-forward block, which come
                # from norms
                continue
            scales = self._search(job, fold, found)
            if scales is not None:
                changed |= fold.apply(job, scales)
                found[fold.linears[0]].divide(scales)
        stored: dict[str, Stored] = {}
        for name, module in job.linears.items():
            weight = quantize(matrix_of(module), self.grid(name))
            is_static = self["static"] and self["activations"] == TENSOR
            with_activations(
                weight, self["activations"], found[name].largest if is_static else None, 127
            )
            stored[name] = weight
        return stored, changed

    def _search(self, job: LayerJob, fold: Fold, found: dict[str, Inputs]) -> torch.Tensor | None:
        inputs = found[fold.linears[0]]
        largest = fold.shared(inputs.largest_K).clamp(min=1e-5)
        matrix = torch.cat([matrix_of(job.linears[name]) for name in fold.linears])
        of_weights = fold.shared(matrix.abs().amax(0)).clamp(min=1e-5)
        best = None
        least = (
            self._error(matrix, inputs, torch.ones_like(largest))
            if self["alpha"] is None
            else torch.inf
        )
        for alpha in _TRIED if self["alpha"] is None else [self["alpha"]]:
            scales = (largest**alpha / of_weights ** (1 - alpha)).clamp(1e-5, 1e5)
            error = self._error(matrix, inputs, scales)
            if error < least:
                best, least = scales, error
        return best

    def _error(self, matrix_NK: torch.Tensor, inputs: Inputs, scales_K: torch.Tensor) -> float:
        """The error of a sample's outputs, both sides rounded, relative to each token's output: a
        few tokens with huge activations would decide alone otherwise."""
        x_TK, per_token = inputs.sample_TK / scales_K, self["activations"] == TOKEN
        static = (
            float((inputs.largest_K / scales_K).max()) / 127
            if self["static"] and not per_token
            else None
        )
        out = (
            fake_activations(x_TK, per_token, static)
            @ rounded(matrix_NK * scales_K, self.grid("")).t()
        )
        true = inputs.sample_TK @ matrix_NK.t()
        return float(((out - true).square().sum(1) / true.square().sum(1).clamp(min=1e-12)).mean())
