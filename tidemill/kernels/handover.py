"""The handover from one kernel to the next, besides its result, or instead of it: a norm the same values in 8 bits, with their
scales; a linear the sums of chunks of K, or what adapters add, which the kernel behind it adds up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

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
    """The handover to a linear that takes its input in an 8-bit type. A norm that knows it puts a `Scaled` in; the linear takes
    it out."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype


# Of a linear that is not added up yet: float32 [chunk, T, N], to be added in this order and rounded to the type of activations.
# The tensor that it returns has no memory, so that nothing but a norm, which takes these, can read it.
CHUNKS: Place[torch.Tensor] = Place()


class Unadded(NamedTuple):
    """A linear's result and what its adapters add, both rounded, to be added and rounded again. The latter is computed on another
    stream, which the current one waits for by `wait`."""

    y_TN: torch.Tensor
    added_TN: torch.Tensor
    wait: Callable[[], None]


# Again the tensor that was returned has no memory.
UNADDED: Place[Unadded] = Place()


def with_added(y_TN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A linear's result, and what is to be added to it, when the current stream has waited for that."""
    made = UNADDED.take(y_TN)
    if made is None:
        return y_TN, None
    made.wait()
    return made.y_TN, made.added_TN
