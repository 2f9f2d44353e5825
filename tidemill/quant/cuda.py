"""bfloat16 weights on the GPU."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING

import torch

from tidemill.kernels.linear import Weight
from tidemill.kernels.moe import ExpertWeights
from tidemill.quant.base import ExpertParts, ExpertStacks, LinearMethod
from tidemill.types.model_config import MoESpec
from tidemill.weights.checkpoint import WeightTensor

if TYPE_CHECKING:
    from tidemill.kernels.cuda.expert_blocks import Tally
    from tidemill.kernels.cuda.moe import InSlots

    # From a step's hidden states, how many of its tokens do not only fill it up ([1], None: all),
    # and their chosen experts.
    FindExperts = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], InSlots]


class CudaMatrix(Weight):
    """A matrix on the GPU. With `_act`, its rows are of gate and up in turn, and the matmul gives
    act(gate) * up."""

    _act: str
    _num_out: int

    @abstractmethod
    def _multiply(
        self, x_TK: torch.Tensor, act: str, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`out`: of float32, for logits."""

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self._multiply(x_TK, self._act)

    def matmul(self, x_TK: torch.Tensor) -> torch.Tensor:
        """The product with the matrix. A gated weight yields columns of gate and up in turn."""
        return self._multiply(x_TK, "")

    def activate(self, y_TN: torch.Tensor) -> torch.Tensor:
        from tidemill.kernels.cuda.glu import glu

        return glu(y_TN, self._act) if self._act else y_TN

    def logits(self, x_TK: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is None:
            out = torch.empty(x_TK.shape[0], self._num_out, dtype=torch.float32, device=x_TK.device)
        return self._multiply(x_TK, "", out)


class CudaWeight(CudaMatrix):
    """In bfloat16. `fast`: sums may run in an order that depends on the number of rows."""

    def __init__(
        self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, fast: bool, act: str = ""
    ) -> None:
        self._weight_NK, self._bias, self._num_out = weight_NK, bias_N, weight_NK.shape[0]
        self._fast, self._act = fast, act

    def _multiply(
        self, x_TK: torch.Tensor, act: str, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        from tidemill.kernels.cuda.gemm import gemm, matmul

        if out is not None:
            return gemm(x_TK, self._weight_NK, bias_N=self._bias, out=out)
        return matmul(x_TK, self._weight_NK, self._bias, act, any_order=self._fast)

    def compile(self, nums_rows: Collection[int]) -> None:
        from tidemill.kernels.cuda.tuning import compile_tiles

        compile_tiles(self._weight_NK, self._bias, self._act, nums_rows)

    def prepare(self, nums_rows: Collection[int]) -> None:
        from tidemill.kernels.cuda.gemm import LIBRARY, choose_tile, library_agrees
        from tidemill.kernels.cuda.tuning import find_tiles

        num_out, num_in = self._weight_NK.shape
        find_tiles(self._weight_NK, self._act, library=self._bias is None)
        for num_rows in nums_rows:
            if (
                self._bias is None
                and not self._fast
                and choose_tile(num_rows, num_out, num_in) is LIBRARY
            ):
                library_agrees(num_rows, num_out, num_in, self._weight_NK.device)

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        return self._weight_NK[ids_T]


class CudaExperts(ExpertWeights):
    """The shared expert is two linears. `first`: the number of the first expert that is here, if
    not all are."""

    def __init__(
        self,
        spec: MoESpec,
        stacks: ExpertStacks,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        shared: tuple[Weight, Weight] | None,
        first: int = 0,
    ) -> None:
        self._spec, self._shared, self._first = spec, shared, first
        self._stacks: ExpertStacks | None = stacks
        self._gate_up_bias, self._down_bias = gate_up_bias, down_bias
        self._tally: Tally | None = None
        self._find: FindExperts | None = None  # where they are, if they are in slots
        self._sizes = stacks.gate_up_E2IH.shape[1], stacks.gate_up_E2IH.shape[2]

    def read_from(self, find: FindExperts) -> None:
        """Experts are in slots from now on. `find`: as `FindExperts`."""
        self._find, self._stacks = find, None

    @property
    def stacks(self) -> ExpertStacks:
        assert self._stacks is not None
        return self._stacks

    @property
    def biases(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The biases of gate and up, and of down."""
        return self._gate_up_bias, self._down_bias

    def count(self, live: torch.Tensor) -> None:
        from tidemill.kernels.cuda.expert_blocks import Tally

        self.counts = torch.zeros(self._spec.num_experts, dtype=torch.int32, device=live.device)
        self._tally = Tally(self.counts, live)

    def __call__(self, x_TH: torch.Tensor, logits_TL: torch.Tensor) -> torch.Tensor:
        from tidemill.kernels.cuda.moe import moe, moe_in_slots

        spec, shared_TH, logits_TE = (
            self._spec,
            None,
            logits_TL[:, : self._spec.num_experts].contiguous(),
        )
        if self._shared is not None:
            gate_up, down = self._shared
            shared_TH = (torch.sigmoid(logits_TL[:, spec.num_experts :]) * down(gate_up(x_TH))).to(
                x_TH.dtype
            )
        how = spec.top_k, spec.renormalise, spec.act
        if self._find is not None:
            live = None if self._tally is None else self._tally.live
            find = partial(self._find, x_TH, live)
            return moe_in_slots(
                x_TH, logits_TE, find, self._sizes, *how, spec.scoring, shared_TH, self._tally
            )
        return moe(
            x_TH,
            logits_TE,
            self.stacks.gate_up_E2IH,
            self.stacks.down_EHI,
            *how,
            self._gate_up_bias,
            self._down_bias,
            spec.scoring,
            shared_TH,
            self._tally,
            self._first,
        )

    def compile(self, nums_rows: Collection[int]) -> None:
        for linear in self._shared or ():
            linear.compile(nums_rows)

    def prepare(self, nums_rows: Collection[int]) -> None:
        for linear in self._shared or ():
            linear.prepare(nums_rows)


class CudaDense(LinearMethod[torch.Tensor]):
    def read(self, tensor: WeightTensor, row_order: torch.Tensor | None) -> torch.Tensor:
        rows = torch.empty(tensor.shape, dtype=torch.bfloat16, device="cuda")
        tensor.read_into(rows)
        return rows if row_order is None else rows[row_order.to("cuda")]

    def new_stacks(self, spec: MoESpec, hidden_size: int) -> ExpertStacks:
        num, size = spec.num_experts, spec.expert_size
        shapes = (num, 2 * size, hidden_size), (num, hidden_size, size)
        return ExpertStacks(
            *(torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
        )

    def join(self, parts: list[torch.Tensor], bias: torch.Tensor | None) -> Weight:
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        return CudaWeight(
            weight, None if bias is None else bias.to("cuda", torch.bfloat16), self._fast
        )

    def join_gated(
        self, gate: torch.Tensor, up: torch.Tensor, bias: torch.Tensor | None, act: str
    ) -> Weight:
        weight = torch.stack([gate, up], 1).flatten(0, 1)
        paired = (
            None
            if bias is None
            else torch.stack(bias.chunk(2), 1).flatten().to("cuda", torch.bfloat16)
        )
        return CudaWeight(weight, paired, self._fast, act)

    def join_experts(self, parts: ExpertParts[torch.Tensor], spec: MoESpec) -> ExpertWeights:
        assert parts.stacks is not None
        gate_up_bias, down_bias = (
            None if bias is None else bias.to("cuda", torch.bfloat16)
            for bias in (parts.gate_up_bias, parts.down_bias)
        )
        shared = None
        if parts.shared is not None:
            gate, up = torch.cat(parts.shared[0]).chunk(2)
            shared = self.join_gated(gate, up, None, spec.act), self.join([parts.shared[1]], None)
        return CudaExperts(spec, parts.stacks, gate_up_bias, down_bias, shared, parts.first)
