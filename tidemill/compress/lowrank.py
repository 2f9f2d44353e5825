"""Matrices as products of two smaller ones: singular value decomposition, plain or of what the
inputs make of a matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tidemill.compress.decoder import matrix_of
from tidemill.compress.methods.inputs import collect
from tidemill.compress.walk import LayerJob
from tidemill.errors import CalibrationError, ConfigError

LOW_RANK = "low_rank"  # quant_method of config.json
A, B, ENERGY = "low_rank_a", "low_rank_b", "energy"


def factors(
    weight_NK: torch.Tensor, moments_KK: torch.Tensor | None, damping: float
) -> tuple[torch.Tensor, ...]:
    """b [N, R], a [R, K] with b a = W, and the squared error that each of the R ranks saves: of W,
    or with second moments of the inputs, of the outputs."""
    weight = weight_NK.double()
    if moments_KK is None:
        u, sigma, v = torch.linalg.svd(weight, full_matrices=False)
        return (u * sigma).float(), v.float(), sigma.square().float()
    moment = moments_KK.double()
    moment = moment + torch.diag(
        (damping * moment.diagonal().mean().clamp(min=1e-12)).expand(moment.shape[0])
    )
    root, failed = torch.linalg.cholesky_ex(moment)
    if failed.item():
        raise CalibrationError(
            "The inputs' second moments have no Cholesky factor.", fix="Give a larger --damping."
        )
    u, sigma, v = torch.linalg.svd(weight @ root, full_matrices=False)
    a = torch.linalg.solve_triangular(root, v, upper=False, left=False)
    return (u * sigma).float(), a.float(), sigma.square().float()


def factorize(method: str, damping: float) -> Callable[[LayerJob], dict[str, torch.Tensor]]:
    """A change of the walk that keeps all ranks of every matrix; how many stay is decided over all
    layers."""

    def change(job: LayerJob) -> dict[str, torch.Tensor]:
        found = collect(job, moments=True) if method == "asvd" else {}
        kept: dict[str, torch.Tensor] = {}
        for name, module in job.linears.items():
            b, a, energy = factors(
                matrix_of(module), found[name].moments_KK if found else None, damping
            )
            kept |= {f"{name}.{B}": b, f"{name}.{A}": a, f"{name}.{ENERGY}": energy}
        return kept

    return change


def choose_ranks(
    energies: dict[str, torch.Tensor], shapes: dict[str, tuple[int, int]], share: float
) -> dict[str, int]:
    """The rank of each matrix, so that all factors together have `share` of the matrices' values:
    rank by rank what saves the largest part of a matrix's error for a value. 0: the matrix stays as
    it is, since its factors would be no smaller."""
    budget = share * sum(num_out * num_in for num_out, num_in in shapes.values())
    steps = []
    for name, energy in energies.items():
        cost = sum(shapes[name])
        most = shapes[name][0] * shapes[name][1] // cost
        parts = (energy / energy.sum().clamp(min=1e-30)).tolist()
        steps += [(-part / cost, number, name) for number, part in enumerate(parts[:most])]
    ranks = dict.fromkeys(energies, 0)
    left = budget - sum(sum(shapes[name]) for name in ranks)
    if left < 0:
        raise ConfigError(
            f"{share:.0%} of the bytes do not hold matrices of rank 1.",
            fix="Give a lower --sparsity.",
            param="sparsity",
        )
    ranks = dict.fromkeys(energies, 1)
    for _, number, name in sorted(steps):
        if number > 0 and sum(shapes[name]) <= left:
            ranks[name] += 1
            left -= sum(shapes[name])
    return {
        name: rank if rank * sum(shapes[name]) < shapes[name][0] * shapes[name][1] * 0.98 else 0
        for name, rank in ranks.items()
    }


def low_rank_config(ranks: dict[str, int]) -> dict[str, Any]:
    """The configuration of factors for config.json: programs that do not know it refuse the folder
    instead of running without these matrices."""
    return {
        "quantization_config": {
            "quant_method": LOW_RANK,
            "ranks": {name: rank for name, rank in ranks.items() if rank},
        }
    }
