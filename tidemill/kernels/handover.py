"""The handover from one kernel to the next, besides its result, or instead of it: a norm the same
values in 8 bits, with their scales."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch

Made = TypeVar("Made")


class Place(Generic[Made]):
    def __init__(self) -> None:
        self._put: dict[int, tuple[torch.Tensor, Made]] = {}  # by lane

    def put(self, x_TK: torch.Tensor, made: Made) -> None:
        from tidemill.kernels.cuda.lanes import lane

        self._put[lane()] = x_TK, made

    def take(self, x_TK: torch.Tensor) -> Made | None:
        """Takes the form made of this tensor; None: nobody has put it in."""
        from tidemill.kernels.cuda.lanes import lane

        x, made = self._put.pop(lane(), (None, None))
        return made if x is x_TK else None


class Handover(Place[Any]):
    """The handover to a linear that takes its input in an 8-bit type. A norm that knows it puts a
    `Scaled` in; the linear takes it out."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
