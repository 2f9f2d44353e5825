"""Layer-by-layer distillation: weights of a layer are trained through rounding until its outputs
are the original's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from tidemill.compress.decoder import matrix_of, set_matrix
from tidemill.compress.walk import LayerJob, Quantizer

Rounding = Callable[[torch.Tensor], torch.Tensor]  # of a matrix; gradients pass


def tune(
    job: LayerJob,
    rounding: Mapping[str, Rounding],
    act: Mapping[str, Quantizer],
    steps: int,
    rate: float,
) -> None:
    """Changes the layer's matrices, so that rounded ones give outputs closer to the original
    model's: `job.target`. What is not better on the whole calibration text is not kept. `rate`: of
    a matrix's mean absolute value, at the first step."""
    assert job.inputs is not None
    assert job.target is not None
    before = {name: matrix_of(module).clone() for name, module in job.linears.items()}
    learned = {name: matrix.clone().requires_grad_(True) for name, matrix in before.items()}
    groups = [
        {"params": [parameter], "lr": rate * float(before[name].abs().mean())}
        for name, parameter in learned.items()
    ]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / max(steps, 1)))
    )
    with _linears_as(job, learned, rounding, act):
        first = _error(job)
        for step in range(steps):
            if step % job.inputs.shape[0] == 0:
                order = torch.randperm(job.inputs.shape[0])
            at = int(order[step % job.inputs.shape[0]])
            target = job.target[at : at + 1].to(job.device)
            loss = F.mse_loss(job.run(job.inputs[at : at + 1].to(job.device)), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        is_better = _error(job) < first
    for name, module in job.linears.items():
        set_matrix(module, learned[name].detach() if is_better else before[name])


@torch.no_grad()
def _error(job: LayerJob) -> float:
    assert job.target is not None
    total, first = 0.0, 0
    for batch in job.batches():
        target = job.target[first : first + batch.shape[0]].to(job.device)
        total += float((job.run(batch) - target).square().sum())
        first += batch.shape[0]
    return total


@contextmanager
def _linears_as(
    job: LayerJob,
    learned: dict[str, torch.Tensor],
    rounding: Mapping[str, Rounding],
    act: Mapping[str, Quantizer],
) -> Iterator[None]:
    """Meanwhile linears compute with rounded ones of these matrices."""

    def forward(name: str, module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        bias = getattr(module, "bias", None)

        def run(x: torch.Tensor) -> torch.Tensor:
            if name in act:
                with torch.no_grad():
                    difference = act[name](x) - x
                x = x + difference
            return F.linear(x, rounding[name](learned[name]), bias)

        return run

    modules = job.linears
    for name, module in modules.items():
        module.forward = forward(name, module)  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in modules.values():
            del module.forward
