"""Method: what is done to the matrices of a layer, and which options decide it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from tidemill.compress.decoder import set_matrix
from tidemill.compress.grid import CHANNEL, GROUP, TENSOR, Grid, fake_activations, fake_fp8
from tidemill.compress.stored import Fp8Weight, IntWeight, Stored
from tidemill.compress.walk import LayerJob, Quantizer
from tidemill.errors import ConfigError

NONE, TOKEN = "none", "token"
Check = Callable[[Any], bool]


def among(*allowed: Any) -> tuple[Check, str]:
    return lambda value: value in allowed, ", ".join(str(value) for value in allowed)


def between(low: float, high: float) -> tuple[Check, str]:
    return lambda value: low <= value <= high, f"{low} to {high}"


# What options may be, whichever method takes them.
CHECKS: dict[str, tuple[Check, str]] = {
    "bits": between(2, 8),
    "group": (
        lambda value: value >= 8 and value % 8 == 0 and value <= 2**16,
        "a multiple of 8, at least 8",
    ),
    "weights": among(TENSOR, CHANNEL, GROUP, "block"),
    "symmetric": among(True, False),
    "activations": among(NONE, TENSOR, TOKEN),
    "static": among(True, False),
    "act_order": among("off", "static", "group"),
    "damping": between(0.0, 1.0),
    "alpha": between(0.0, 1.0),
    "clip": among(True, False),
    "threshold": between(0.1, 1000.0),
    "steps": between(0, 100_000),
    "rate": between(1e-7, 1.0),
    "double": among(True, False),
}


class Method(ABC):
    """Called with each layer: changes it in place to what is kept of it, which it returns."""

    name: ClassVar[str]
    defaults: ClassVar[dict[str, Any]]  # the options it takes
    limits: ClassVar[dict[str, tuple[Check, str]]] = {}  # narrower ones
    formats: tuple[str, ...]  # layouts it can be written in, best first
    uses_text: ClassVar[bool] = False
    uses_truth: ClassVar[bool] = False

    def __init__(self, options: dict[str, Any], bits_of: dict[str, int] | None = None) -> None:
        """`bits_of`: of matrices whose bits differ from the option's."""
        for key, value in options.items():
            if key not in self.defaults:
                takes = ", ".join(_flag(option) for option in self.defaults)
                raise ConfigError(
                    f"{_flag(key)} is no option of {self.name}.",
                    fix=f"It takes {takes}.",
                    param=key,
                )
            check, allowed = self.limits.get(key, CHECKS[key])
            if not check(value):
                raise ConfigError(
                    f"{_flag(key)} is {value}.", fix=f"It must be {allowed}.", param=key
                )
        self.options: dict[str, Any] = self.defaults | options
        self.bits_of = bits_of or {}
        self.grids: dict[str, Grid] = {}  # of matrices that options do not decide
        # whether groups that are not symmetric begin anywhere, not at a multiple of their scale
        self.has_offsets = False

    def __getitem__(self, option: str) -> Any:
        return self.options[option]

    @property
    def needs_text(self) -> bool:
        return self.uses_text or (
            bool(self.options.get("static")) and self.options.get("activations") == TENSOR
        )

    @property
    def needs_truth(self) -> bool:
        return self.uses_truth

    def grid(self, name: str) -> Grid:
        """The grid of a matrix."""
        if name in self.grids:
            return self.grids[name]
        per = self.options.get("weights", GROUP)
        group = {TENSOR: -1, CHANNEL: 0}.get(per, self.options.get("group", 0))
        bits = self.bits_of.get(name, self.options.get("bits", 8))
        symmetric = self.options.get("symmetric", True)
        return Grid(bits, group, symmetric, offsets=self.has_offsets and not symmetric)

    def planned(self, name: str, shape: tuple[int, int]) -> IntWeight | None:
        """The matrix as it will be stored, without values; None: the method makes no integers."""
        if "symmetric" not in self.options:
            return None
        grid, activations = self.grid(name), self.options.get("activations", NONE)
        width = grid.width(shape[1])
        empty = torch.empty(shape, device="meta")
        weight = IntWeight(
            grid.bits, empty, empty, width, zeros_NG=None if grid.symmetric else empty
        )
        weight.groups_K = (
            empty if self.options.get("act_order") == "group" and grid.group > 0 else None
        )
        weight.threshold, weight.steps = self.options.get("threshold"), grid.steps or None
        with_activations(weight, activations, 1.0 if self.options.get("static") else None, 127)
        return weight

    @abstractmethod
    def quantize(self, job: LayerJob) -> tuple[dict[str, Stored], dict[str, torch.Tensor]]:
        """Matrices by name, and other tensors that were changed."""

    def __call__(self, job: LayerJob) -> dict[str, torch.Tensor]:
        stored, state = self.quantize(job)
        for name, weight in stored.items():
            set_matrix(job.linears[name], weight.dequantize())
            state |= weight.to_state(name)
            act = activations_of(weight)
            if act is not None:
                job.act[name] = act
        return state


def activations_of(stored: Stored) -> Quantizer | None:
    """The quantizer that a linear's activations go through when the matrix is served; None:
    nothing."""
    if isinstance(stored, IntWeight) and stored.act_per is not None:
        per_token, scale, threshold = bool(stored.act_per), stored.act_scale, stored.threshold
        return lambda x: fake_activations(x, per_token, scale, threshold)
    if isinstance(stored, Fp8Weight) and stored.act_per is not None:
        per_token, scale = bool(stored.act_per), stored.act_scale
        return lambda x: fake_fp8(x, per_token, scale)
    return None


def with_activations(
    weight: IntWeight | Fp8Weight, activations: str, largest: float | None, most: int
) -> None:
    """`largest`: absolute value of the calibration text's activations, if their scale is static."""
    if activations == NONE:
        return
    weight.act_per = int(activations == TOKEN)
    if largest is not None and activations == TENSOR:
        weight.act_scale = max(largest / most, 1e-10)


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")
