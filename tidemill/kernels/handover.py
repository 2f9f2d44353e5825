"""What a norm hands to the linear behind it besides its result: the same values in 8 bits, with their scales."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tidemill.kernels.cuda.elementwise import Scaled


class Handover:
    """Of a linear that takes its input in an 8-bit type. A norm that knows it puts the values in; the linear takes them out."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._put: dict[int, tuple[torch.Tensor, Scaled]] = {}  # by lane

    def put(self, x_TK: torch.Tensor, made: Scaled) -> None:
        from tidemill.kernels.cuda.lanes import lane

        self._put[lane()] = x_TK, made

    def take(self, x_TK: torch.Tensor) -> Scaled | None:
        """Of this input; None: nobody has put it in."""
        from tidemill.kernels.cuda.lanes import lane

        x, made = self._put.pop(lane(), (None, None))
        return made if x is x_TK else None
