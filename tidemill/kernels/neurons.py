"""A feed-forward by some of its neurons, down(act(gate) * up): those that a ReLU does not make
zero, or that a predictor chooses (neurons.c)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from tidemill.kernels import native
from tidemill.kernels.glu import ACTIVATIONS, glu_reference
from tidemill.kernels.linear import KIND_OF, Panels
from tidemill.kernels.native.streams import HostNeurons, Neurons

_LANES, _COLUMNS, _ALIGN = 8, 64, 64


@dataclass(frozen=True, slots=True)
class NeuronLayout:
    """The layout of a neuron's bytes: its row of up, then its column of down. `num_bytes`: from one
    to the next."""

    kind: int
    num_in: int
    num_inner: int
    num_out: int
    down_place: int
    num_bytes: int


def neurons_reference(
    x_TH: torch.Tensor, gate_TI: torch.Tensor, up_IH: torch.Tensor, down_NI: torch.Tensor
) -> torch.Tensor:
    return (gate_TI.clamp(min=0) * (x_TH @ up_IH.float().t())) @ down_NI.float().t()


def lay_out(
    up_IH: torch.Tensor, down_NI: torch.Tensor, page: int
) -> tuple[NeuronLayout, torch.Tensor]:
    """Neurons one after the other, each at a multiple of a page, [I, bytes]."""
    if up_IH.dtype != down_NI.dtype:
        up_IH, down_NI = up_IH.float(), down_NI.float()
    (num_inner, num_in), num_out, size = up_IH.shape, down_NI.shape[0], up_IH.element_size()
    down_place = -(-_up(num_in, _LANES) * size // _ALIGN) * _ALIGN
    num_bytes = _up(down_place + _up(num_out, _COLUMNS) * size, page)
    made = torch.zeros(num_inner, num_bytes, dtype=torch.uint8)
    made[:, : num_in * size] = up_IH.contiguous().view(torch.uint8)
    made[:, down_place : down_place + num_out * size] = down_NI.t().contiguous().view(torch.uint8)
    kind = native.KINDS[KIND_OF[up_IH.dtype]]
    return NeuronLayout(kind, num_in, num_inner, num_out, down_place, num_bytes), made


def _up(num: int, unit: int) -> int:
    return -(-num // unit) * unit


def chosen_reference(
    x_TH: torch.Tensor,
    scores_TI: torch.Tensor,
    gate_IH: torch.Tensor,
    up_IH: torch.Tensor,
    down_NI: torch.Tensor,
    act: str,
) -> torch.Tensor:
    both = torch.cat([x_TH @ gate_IH.float().t(), x_TH @ up_IH.float().t()], 1)
    return torch.where(scores_TI <= 0, 0.0, glu_reference(both, act)) @ down_NI.float().t()


class ChosenNeurons:
    """The chosen neurons of one feed-forward, in memory. A row's outputs are those of its neurons
    whose scores are above 0."""

    def __init__(
        self,
        gate_IH: torch.Tensor,
        up_IH: torch.Tensor,
        down_NI: torch.Tensor,
        act: str,
        biases: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (
            None,
            None,
            None,
        ),
    ) -> None:
        """`biases`: of gate, up and down."""
        assert native.lib is not None
        self._lib, self._biases = native.lib, biases
        if len({gate_IH.dtype, up_IH.dtype, down_NI.dtype}) > 1:
            gate_IH, up_IH, down_NI = gate_IH.float(), up_IH.float(), down_NI.float()
        (num_inner, num_in), self._num_out, size = (
            gate_IH.shape,
            down_NI.shape[0],
            gate_IH.element_size(),
        )
        row_bytes = _up(_up(num_in, _LANES) * size, _ALIGN)
        num_bytes = _up(2 * row_bytes + _up(self._num_out, _COLUMNS) * size, _ALIGN)
        self.memory = torch.zeros(num_inner, num_bytes, dtype=torch.uint8)
        for place, rows in ((0, gate_IH), (row_bytes, up_IH), (2 * row_bytes, down_NI.t())):
            self.memory[:, place : place + rows.shape[1] * size] = rows.contiguous().view(
                torch.uint8
            )
        self.num_chosen = torch.zeros(1, dtype=torch.int64)  # by rows, counted
        gate_bias, up_bias, down_bias = (
            None if bias is None else bias.data_ptr() for bias in biases
        )
        self._struct = Neurons(
            kind=native.KINDS[KIND_OF[gate_IH.dtype]], num_in=num_in, num_inner=num_inner, num_out=self._num_out,
            down_place=2 * row_bytes, up_bias=up_bias, down_bias=down_bias, memory=self.memory.data_ptr(), up_place=row_bytes,
            num_bytes=num_bytes, act=ACTIVATIONS[act], gate_bias=gate_bias, num_chosen=self.num_chosen.data_ptr(),
        )  # fmt: skip

    @property
    def num_inner(self) -> int:
        return int(self.memory.shape[0])

    def __call__(self, x_TH: torch.Tensor, scores_TI: torch.Tensor) -> torch.Tensor:
        return self._lib.neurons(ctypes.addressof(self._struct), x_TH, scores_TI, self._num_out)


class GivenNeurons:
    """The neurons of one feed-forward, in memory. The gate is computed before: its neurons that are
    above 0 are computed, of the activations relu and relu2 all that are not zero."""

    def __init__(
        self,
        up_IH: torch.Tensor,
        down_NI: torch.Tensor,
        act: str,
        up_bias: torch.Tensor | None,
        gate: tuple[torch.Tensor, torch.Tensor | None] | None,
    ) -> None:
        """`gate`: its matrix and bias, if the host computes it, too."""
        assert native.lib is not None
        self._lib, self._up_bias, self._gate_bias = (
            native.lib,
            up_bias,
            None if gate is None else gate[1],
        )
        if len({one.dtype for one in (up_IH, down_NI, *(gate or ())[:1])}) > 1:
            up_IH, down_NI = up_IH.float(), down_NI.float()
            gate = None if gate is None else (gate[0].float(), gate[1])
        self.layout, made = lay_out(up_IH, down_NI, _ALIGN)
        # An odd number of cache lines from one to the next: a column of down is not always in the
        # same set.
        self.memory = torch.zeros(
            len(made), made.shape[1] // _ALIGN // 2 * 2 * _ALIGN + _ALIGN, dtype=torch.uint8
        )
        self.memory[:, : made.shape[1]] = made
        self.gate = None if gate is None else Panels(*gate)
        self.num_read = torch.zeros(1, dtype=torch.int64)
        up_address, gate_address = (
            None if bias is None else bias.data_ptr() for bias in (up_bias, self._gate_bias)
        )
        self._struct = Neurons(
            kind=self.layout.kind, num_in=self.layout.num_in, num_inner=self.layout.num_inner, num_out=self.layout.num_out,
            down_place=self.layout.down_place, up_bias=up_address, memory=self.memory.data_ptr(), num_bytes=self.memory.shape[1],
            act=ACTIVATIONS[act], gate_bias=gate_address, num_chosen=self.num_read.data_ptr(), is_given=1,
        )  # fmt: skip

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes + (0 if self.gate is None else self.gate.held.codes.nbytes)

    def __call__(self, x_TH: torch.Tensor, gate_TI: torch.Tensor) -> torch.Tensor:
        return self._lib.neurons(ctypes.addressof(self._struct), x_TH, gate_TI, self.layout.num_out)

    def host_call(
        self,
        given: torch.Tensor,
        gate: torch.Tensor,
        out: torch.Tensor,
        rows: range,
        num_ns: torch.Tensor,
    ) -> HostNeurons:
        """The arguments of `Library.run_host_neurons`: of these rows of a step, from `given` to
        `out`. `gate`: room for it."""
        codes, room = (
            (None, None)
            if self.gate is None
            else (self.gate.held.codes.data_ptr(), gate.data_ptr())
        )
        return HostNeurons(
            neurons=ctypes.addressof(self._struct), given=given.data_ptr(), gate=room, out=out.data_ptr(), gate_codes=codes,
            first_row=rows.start, num_rows=len(rows), num_ns=num_ns.data_ptr(),
        )  # fmt: skip


class NeuronWeights:
    """The neurons of one feed-forward. `read_from` says where its neurons are, before the first
    use."""

    def __init__(
        self, layout: NeuronLayout, up_bias: torch.Tensor | None, down_bias: torch.Tensor | None
    ) -> None:
        assert native.lib is not None
        self._lib, self.layout, self._biases = native.lib, layout, (up_bias, down_bias)
        addresses = [None if bias is None else bias.data_ptr() for bias in self._biases]
        self._struct = Neurons(
            kind=layout.kind,
            num_in=layout.num_in,
            num_inner=layout.num_inner,
            num_out=layout.num_out,
            down_place=layout.down_place,
            up_bias=addresses[0],
            down_bias=addresses[1],
        )

    def read_from(self, stream: int, first_unit: int) -> None:
        """Neurons are in slots of a stream (its address), the first as this unit."""
        self._struct.stream, self._struct.first_unit = stream, first_unit

    def __call__(self, x_TH: torch.Tensor, gate_TI: torch.Tensor) -> torch.Tensor:
        """`gate_TI`: before the activation."""
        return self._lib.neurons(ctypes.addressof(self._struct), x_TH, gate_TI, self.layout.num_out)
