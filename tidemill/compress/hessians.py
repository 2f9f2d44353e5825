"""Second moments of what the matrices of a layer get to multiply."""

from __future__ import annotations

import torch

from tidemill.compress.walk import LayerJob
from tidemill.errors import CalibrationError


def hessians(job: LayerJob, diagonal: bool = False) -> dict[str, torch.Tensor]:
    """X^T X by linear, over the calibration text, or only its diagonal. Linears with the same input share one."""
    sums: dict[str, torch.Tensor] = {}
    owner: dict[str, str] = {}
    last: tuple[str, int, torch.Size] | None = None

    def see(name: str, x: torch.Tensor) -> None:
        nonlocal last
        key = x.data_ptr(), x.shape
        if last is not None and last[1:] == key and owner.get(name, last[0]) == last[0]:
            owner[name] = last[0]  # q, k and v; gate and up
            return
        last = name, *key
        owner[name] = name
        product = x.square().sum(0) if diagonal else x.t() @ x
        sums[name] = sums[name].add_(product) if name in sums else product

    job.observe(see)
    for name, total in sums.items():
        if not bool(total.isfinite().all()):
            raise CalibrationError(
                f"Inputs of {name} are not finite.", fix="Is the checkpoint whole? Try it with tidemill generate."
            )
    return {name: sums[first] for name, first in owner.items()}
