"""The inputs that the calibration text sends into each linear of a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tidemill.compress.walk import LayerJob
from tidemill.errors import CalibrationError


@dataclass(slots=True)
class Inputs:
    """The inputs of linears that share them."""

    num_tokens: int
    mean_K: torch.Tensor  # of absolute values
    largest_K: torch.Tensor
    squares_K: torch.Tensor  # sums
    moments_KK: torch.Tensor | None  # sum of x xᵀ
    sample_TK: torch.Tensor  # some tokens

    def divide(self, scales_K: torch.Tensor) -> None:
        """The layer before now gives inputs divided by these."""
        self.mean_K, self.largest_K = self.mean_K / scales_K, self.largest_K / scales_K
        self.sample_TK, self.squares_K = self.sample_TK / scales_K, self.squares_K / scales_K**2
        if self.moments_KK is not None:
            self.moments_KK = self.moments_KK / scales_K / scales_K[:, None]

    @property
    def largest(self) -> float:
        return float(self.largest_K.max())


def collect(job: LayerJob, *, moments: bool = False, num_samples: int = 0) -> dict[str, Inputs]:
    """By linear."""
    inputs: dict[str, Inputs] = {}
    last = torch.empty(0)  # held, so that its address is not that of another tensor meanwhile
    owner = ""

    def see(name: str, x_TK: torch.Tensor) -> None:
        nonlocal last, owner
        is_last = (x_TK.data_ptr(), x_TK.shape) == (last.data_ptr(), last.shape)
        # what the linear before got, too
        if is_last and (name not in inputs or inputs[name] is inputs[owner]):
            inputs[name] = inputs[owner]
            return
        last, owner = x_TK, name
        largest, mean = x_TK.abs().amax(0), x_TK.abs().sum(0)
        if name not in inputs:
            zeros = torch.zeros_like(mean)
            square = (
                torch.zeros(mean.numel(), mean.numel(), device=mean.device) if moments else None
            )
            inputs[name] = Inputs(0, zeros, zeros, zeros, square, x_TK[:0])
        own = inputs[name]
        own.num_tokens += x_TK.shape[0]
        own.largest_K, own.mean_K = torch.maximum(own.largest_K, largest), own.mean_K + mean
        own.squares_K = own.squares_K + x_TK.square().sum(0)
        if own.moments_KK is not None:
            own.moments_KK.addmm_(x_TK.t(), x_TK)
        if own.sample_TK.shape[0] < num_samples:
            stride = max(1, x_TK.shape[0] // max(1, num_samples // 4))
            own.sample_TK = torch.cat([own.sample_TK, x_TK[::stride]])[:num_samples]

    job.observe(see)
    if unseen := job.linears.keys() - inputs:
        raise CalibrationError(
            f"The inputs of {min(unseen)} cannot be observed: the model does not call it as a linear.",
            fix="Choose a method that needs no calibration text: quantize --method rtn, prune --method magnitude.",
        )
    for name, own in {id(own): (name, own) for name, own in inputs.items()}.values():
        if not bool(own.mean_K.isfinite().all()):
            raise CalibrationError(
                f"Inputs of {name} are not finite.",
                fix="Is the checkpoint whole? Try tidemill generate.",
            )
        own.mean_K = own.mean_K / max(own.num_tokens, 1)
    return inputs


def output_error(error_NK: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """The mean square of what this error of a matrix adds to an output."""
    assert inputs.moments_KK is not None
    return ((error_NK @ inputs.moments_KK) * error_NK).sum() / (
        inputs.num_tokens * error_NK.shape[0]
    )
