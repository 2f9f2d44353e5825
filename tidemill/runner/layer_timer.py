"""LayerTimer: how long the layers of a rank take, while it computes steps."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from torch import nn

from tidemill.models.base import Model

CallT = TypeVar("CallT", bound=Callable[..., Any])

EMBEDDING, HEAD = -1, -2  # beside the numbers of layers


class LayerTimer:
    def __init__(self, model: Model) -> None:
        """Times the layers of a model whose forward pass runs op by op."""
        self._seconds, self._began_s = defaultdict[int, float](float), 0.0
        for number in range(model.config.num_layers):
            block = model.blocks[number]
            if not isinstance(block, nn.Identity):  # which other stages have
                block.register_forward_pre_hook(self._begin)
                block.register_forward_hook(lambda *_, number=number: self._end(number))

    def take(self) -> dict[int, float]:
        """Seconds of each since the last call."""
        taken, self._seconds = dict(self._seconds), defaultdict(float)
        return taken

    def _begin(self, *_: Any) -> None:
        self._began_s = time.perf_counter()

    def _end(self, unit: int) -> None:
        self._seconds[unit] += time.perf_counter() - self._began_s

    def timed(self, call: CallT, unit: int) -> CallT:
        """The same call, whose time counts as that of `unit`."""

        @wraps(call)
        def timed(*args: Any) -> Any:
            self._begin()
            result = call(*args)
            self._end(unit)
            return result

        return timed  # type: ignore[return-value]
