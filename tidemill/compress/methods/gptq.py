"""GPTQ: columns are rounded one after the other, and what each rounding adds to outputs is taken
back by the columns to come."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch

from tidemill.compress.decoder import matrix_of
from tidemill.compress.grid import GROUP, Grid, as_stored, fit, round_to
from tidemill.compress.methods.base import Method
from tidemill.compress.methods.inputs import collect
from tidemill.compress.stored import IntWeight, Stored
from tidemill.compress.walk import LayerJob
from tidemill.errors import CalibrationError

_BLOCK = 128  # columns whose effect on later ones is applied at once
_MAX_TRIES = 6


class GPTQ(Method):
    """`act_order`: columns with the largest inputs first. "static": groups and their scales stay
    those of neighbours, which costs nothing when served; "group": groups are of columns in that
    order."""

    name = "gptq"
    defaults: ClassVar[dict[str, Any]] = {
        "bits": 4, "group": 128, "weights": GROUP, "symmetric": True, "act_order": "static", "damping": 0.01,
    }  # fmt: skip
    formats = ("gptq", "compressed-tensors", "gguf")
    uses_text = True

    def quantize(self, job: LayerJob) -> tuple[dict[str, Stored], dict[str, torch.Tensor]]:
        found = collect(job, moments=True)
        factors: dict[tuple[int, bool], tuple[torch.Tensor, torch.Tensor]] = {}
        stored: dict[str, Stored] = {}
        for name, module in job.linears.items():
            moments = found[name].moments_KK
            assert moments is not None
            key = id(moments), self["act_order"] != "off"
            if key not in factors:
                factors = {key: factor(moments, key[1], self["damping"])}
            stored[name] = gptq(
                matrix_of(module), *factors[key], self.grid(name), self["act_order"]
            )
        return stored, {}


def factor(
    moments_KK: torch.Tensor, is_ordered: bool, damping: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The order of columns, and the upper Cholesky factor of the inverse of the damped moments in
    that order. Inputs that are always 0 do not matter: their diagonal becomes 1."""
    moments = moments_KK.clone()
    diagonal = moments.diagonal()
    diagonal[diagonal == 0] = 1.0
    order = (
        torch.argsort(diagonal, descending=True, stable=True)
        if is_ordered
        else torch.arange(diagonal.numel())
    )
    order = order.to(moments.device)
    moments = moments[order][:, order]
    added = damping * float(moments.diagonal().mean())
    for _ in range(_MAX_TRIES):
        damped = moments.clone()
        damped.diagonal().add_(added)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not int(failed) and bool(upper.isfinite().all()):
                return order, upper
        added = max(10 * added, 1e-6 * float(moments.diagonal().mean()))
    raise CalibrationError(
        "The calibration text's activations have no Cholesky factor.",
        fix="Give more text, or more --damping.",
    )


def gptq(
    matrix_NK: torch.Tensor,
    order_K: torch.Tensor,
    upper_KK: torch.Tensor,
    grid: Grid,
    act_order: str,
) -> IntWeight:
    num_in, width = matrix_NK.shape[1], grid.width(matrix_NK.shape[1])
    rest = matrix_NK[:, order_K].clone()
    codes = torch.empty_like(rest)
    by_order = act_order == "group" and grid.group > 0
    place_of = torch.arange(num_in, device=rest.device) if by_order else order_K
    groups = place_of // width  # of each column, as it is taken
    # Groups are taken whole: scales see corrected values. Those in steps are of several groups.
    is_running = by_order or (act_order == "off" and grid.group > 0 and not grid.steps)
    scales, zeros = fit(matrix_NK[:, order_K] if by_order else matrix_NK, grid)
    for begin in range(0, num_in, _BLOCK):
        end = min(begin + _BLOCK, num_in)
        part, errors = rest[:, begin:end].clone(), torch.zeros_like(rest[:, begin:end])
        factor_part = upper_KK[begin:end, begin:end]
        for i in range(end - begin):
            at = begin + i
            group = int(groups[at])
            if is_running and at % width == 0:
                if at > begin:  # corrections of this block have not reached `rest` yet
                    rest[:, begin + i : end] = part[:, i:]
                ahead = rest[:, at : at + width]
                if at + width > end > at:  # nor have those of columns beyond the block
                    ahead = ahead.clone()
                    ahead[:, end - at :] -= errors[:, :i] @ upper_KK[begin:at, end : at + width]
                of_group = fit(ahead, replace(grid, group=0))
                scales[:, group] = of_group[0][:, 0]
                if zeros is not None and of_group[1] is not None:
                    zeros[:, group] = of_group[1][:, 0]
            column = part[:, i]
            own_zeros = None if zeros is None else zeros[:, group]
            code = round_to(column, scales[:, group], own_zeros, grid)
            codes[:, at] = code
            value = (code if own_zeros is None else code - own_zeros) * scales[:, group]
            error = (column - value) / factor_part[i, i]
            part[:, i:] -= error[:, None] * factor_part[i, i:]
            errors[:, i] = error
        rest[:, end:] -= errors @ upper_KK[begin:end, end:]
    inverse = torch.argsort(order_K)
    stored = as_stored(codes[:, inverse], scales, zeros, width, grid)
    stored.groups_K = groups[inverse].int() if by_order else None
    return stored
