"""GOBO: values of a matrix are nearly Gaussian. Those that are not are kept; the others become the
nearest of a few centroids."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from tidemill.compress.decoder import matrix_of
from tidemill.compress.methods.base import Method, between
from tidemill.compress.stored import CentroidWeight, Stored
from tidemill.compress.walk import LayerJob

_LEAST_LOG_PROBABILITY = -4.0  # of a value under the matrix's Gaussian; those below are outliers
_MAX_ROUNDS = 50


class GOBO(Method):
    name = "gobo"
    defaults: ClassVar[dict[str, Any]] = {"bits": 3}
    limits: ClassVar[dict[str, Any]] = {"bits": between(2, 4)}  # what is read back
    formats = ("gobo",)

    def quantize(self, job: LayerJob) -> tuple[dict[str, Stored], dict[str, torch.Tensor]]:
        return {
            name: gobo(matrix_of(module), self.grid(name).bits)
            for name, module in job.linears.items()
        }, {}


def gobo(matrix_NK: torch.Tensor, bits: int) -> CentroidWeight:
    values = matrix_NK.reshape(-1)
    mean, deviation = values.double().mean(), values.double().std().clamp(min=1e-12)
    distance = (values.double() - mean) / deviation
    log_probability = -0.5 * distance.square() - torch.log(deviation) - 0.5 * math.log(2 * math.pi)
    is_outlier = log_probability < _LEAST_LOG_PROBABILITY
    centroids = find_centroids(values[~is_outlier], 2**bits)
    codes = nearest(values, centroids)
    places = is_outlier.nonzero()[:, 0].int()
    return CentroidWeight(
        bits,
        codes.to(torch.uint8).view(matrix_NK.shape),
        centroids,
        places,
        values[is_outlier].clone(),
    )


def nearest(values: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    return torch.bucketize(values, (centroids[1:] + centroids[:-1]) / 2)


def find_centroids(values: torch.Tensor, num: int) -> torch.Tensor:
    """First the means of parts of equal size; then means of the values nearest to each, while
    absolute errors fall."""
    ordered = values.sort().values
    if ordered.numel() < num:
        ordered = (
            torch.cat([ordered, torch.zeros(num - ordered.numel(), device=values.device)])
            .sort()
            .values
        )
    sums = torch.cat(
        [torch.zeros(1, dtype=torch.float64, device=values.device), ordered.double().cumsum(0)]
    )
    edges = torch.linspace(0, ordered.numel(), num + 1, device=values.device).long()
    centroids = _means(sums, edges, None)
    best, least = centroids, torch.inf
    for _ in range(_MAX_ROUNDS):
        middle = torch.searchsorted(ordered, (centroids[1:] + centroids[:-1]) / 2)
        edges = torch.cat([middle.new_zeros(1), middle, middle.new_tensor([ordered.numel()])])
        # within each part, where values pass its centroid
        at = torch.searchsorted(ordered, centroids)
        at = torch.maximum(torch.minimum(at, edges[1:]), edges[:-1])
        below, above = at - edges[:-1], edges[1:] - at
        error = (
            centroids * (below - above) - 2 * sums[at] + sums[edges[:-1]] + sums[edges[1:]]
        ).sum()
        if float(error) >= least:
            break
        best, least = centroids, float(error)
        centroids = _means(sums, edges, centroids)
    return best.float()


def _means(sums: torch.Tensor, edges: torch.Tensor, empty: torch.Tensor | None) -> torch.Tensor:
    """The means of parts of the ordered values. `empty`: of parts without values."""
    counts = edges[1:] - edges[:-1]
    means = (sums[edges[1:]] - sums[edges[:-1]]) / counts.clamp(min=1)
    return (means if empty is None else torch.where(counts > 0, means, empty.double())).float()
