"""Loras: the adapters that a model's linear layers hold, in numbered slots. Which row uses which
one changes with every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, ParamSpec

import numpy as np
import torch

from tidemill.kernels import native
from tidemill.kernels.lora import LinearLora, LoraStep, NativeLora, Pair, TorchLora
from tidemill.layers.linear import Linear, PartPair

P = ParamSpec("P")


class LoraPlace(NamedTuple):
    """A stored matrix that an adapter may change: its shape [N, K], and the parts of linear layers
    that it fills, each with the numbers of its rows."""

    shape: tuple[int, int]
    parts: list[tuple[Linear, str, torch.Tensor]]


class Loras:
    """On a CPU. While `is_on` is false, linear layers compute as if there were no adapters."""

    def __init__(self, places: Mapping[str, LoraPlace], num_slots: int, max_rank: int) -> None:
        """`places`: what an adapter may change, by the names of stored matrices."""
        self.is_on = False
        self._places = places
        self._linears = list(
            dict.fromkeys(linear for place in places.values() for linear, _, _ in place.parts)
        )
        self._num_slots, self._max_rank = num_slots, max_rank
        self._make_step()
        for linear in self._linears:
            assert linear.loras is None, (
                "another engine has adapters in this model, which its recorded steps point to"
            )
            linear.loras, linear.lora = self, self._make(linear)

    def _make_step(self) -> None:
        self.step = LoraStep()

    def _make(self, linear: Linear) -> LinearLora:
        if native.lib is None:
            return TorchLora(linear.outs, self.step)
        return NativeLora(linear.num_in, linear.outs, self.step, self._num_slots, self._max_rank)

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The shapes of the matrices that an adapter may change."""
        return {name: place.shape for name, place in self._places.items()}

    @torch.inference_mode()
    def put(self, slot: int, pairs: Mapping[str, Pair]) -> None:
        """An adapter, by names of stored matrices; nothing, to free the slot's memory."""
        by_linear: dict[Linear, dict[str, Pair]] = {linear: {} for linear in self._linears}
        for name, pair in pairs.items():
            for linear, part, rows in self._places[name].parts:
                of_part = PartPair(pair.down_RK, pair.up_NR[rows.to(pair.up_NR.device)], pair.scale)
                by_linear[linear][part] = linear.own_pair(part, of_part)
        for linear, of_linear in by_linear.items():
            assert linear.lora is not None
            linear.lora.put(slot, of_linear)

    def forward(self, forward: Callable[P, torch.Tensor]) -> Callable[P, torch.Tensor]:
        """The same forward pass with what adapters add."""

        def adapted(*args: P.args, **kwargs: P.kwargs) -> torch.Tensor:
            with self.on():
                return forward(*args, **kwargs)

        return adapted

    @contextmanager
    def on(self, slots_T: np.ndarray | None = None) -> Iterator[None]:
        """Meanwhile linear layers add what adapters do. `slots_T`: of each token of the step, -1
        without an adapter."""
        if slots_T is not None:
            self.step.set(slots_T)
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False
