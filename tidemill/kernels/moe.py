"""A mixture of experts: each token goes through the `top_k` experts that its router logits choose,
and their outputs are added by weight.

A token's sum runs over its experts in the order of their rank, so its bits never depend on the
other tokens of a step. No expert has a capacity: whatever the number of tokens that choose it, all
are computed. Dropping what overflows, as Switch Transformers do in training, would make a token
depend on those around it.

Shape letters: E experts, K = top_k, I size of an expert, L router logits (E, or E + 1 with a shared
expert).
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from tidemill.kernels import native
from tidemill.kernels.glu import ACTIVATIONS, glu, glu_reference
from tidemill.kernels.linear import KIND_OF, Weight, pack_linear, to_panels
from tidemill.kernels.native import structs
from tidemill.kernels.quantized_linear import Codes, code_panels, kind_number, kind_of
from tidemill.types.model_config import MoESpec


def route_reference(
    logits_TE: torch.Tensor, top_k: int, renormalise: bool, scoring: str = "softmax_then_topk"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (float32) and numbers of the chosen experts, [T, K], the highest logit first; of
    equal ones, the lowest number. With scores, logits are the weights (`routing.score_experts`)."""
    logits = logits_TE.float()
    best, chosen = logits.sort(dim=-1, descending=True, stable=True)
    best, chosen = best[:, :top_k], chosen[:, :top_k]
    if scoring == "scores":
        return best, chosen
    if scoring == "topk_then_softmax":
        return best.softmax(-1), chosen
    assert scoring == "softmax_then_topk", scoring
    weights = logits.softmax(-1).gather(1, chosen)
    return weights / weights.sum(-1, keepdim=True) if renormalise else weights, chosen


def moe_reference(
    x_TH: torch.Tensor,
    router_logits_TE: torch.Tensor,
    gate_up_E2IH: torch.Tensor,
    down_EHI: torch.Tensor,
    top_k: int,
    renormalise: bool,
    act: str,
    gate_up_bias_E2I: torch.Tensor | None = None,
    down_bias_EH: torch.Tensor | None = None,
    scoring: str = "softmax_then_topk",
) -> torch.Tensor:
    """The reference of every implementation. Rows of gate first, then of up; in float32, whatever
    the types."""
    x = x_TH.float()
    weights, chosen = route_reference(router_logits_TE, top_k, renormalise, scoring)
    out_TKH = x.new_zeros(*chosen.shape, x.shape[1])
    for expert in chosen.unique().tolist():
        token, rank = (chosen == expert).nonzero(as_tuple=True)
        gate_up = x[token] @ gate_up_E2IH[expert].float().t()
        if gate_up_bias_E2I is not None:
            gate_up += gate_up_bias_E2I[expert].float()
        out = glu_reference(gate_up, act) @ down_EHI[expert].float().t()
        if down_bias_EH is not None:
            out += down_bias_EH[expert].float()
        out_TKH[token, rank] = out
    return combine(out_TKH, weights).to(x_TH.dtype)


def combine(out_TKH: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """The experts' outputs, added in the order of their rank."""
    total = out_TKH[:, 0] * weights_TK[:, :1]
    for rank in range(1, weights_TK.shape[1]):
        total += out_TKH[:, rank] * weights_TK[:, rank : rank + 1]
    return total


class ExpertWeights(ABC):
    """The matrices of all experts of a layer, laid out as a kernel reads them. `counts`: how many
    tokens each expert got since the start, [E] integers that may wrap around; None where that is
    not known."""

    counts: np.ndarray | torch.Tensor | None = None

    @abstractmethod
    def __call__(self, x_TH: torch.Tensor, logits_TL: torch.Tensor) -> torch.Tensor:
        """`logits_TL`: the router's, in float32."""

    def count(self, live: torch.Tensor) -> None:
        """On a GPU: count tokens from now on. `live`: [1], how many of a step's tokens do not only
        fill it up."""
        return

    def compile(self, nums_rows: Collection[int]) -> None:
        """Compiles the kernels; same as a weight's."""
        return

    def prepare(self, nums_rows: Collection[int]) -> None:
        """Prepares the kernels; same as a weight's."""
        return


def read_counts(counts: Sequence[np.ndarray | torch.Tensor]) -> list[np.ndarray]:
    """The counts as they are now. Those on a GPU are copied on a stream of their own: nobody waits
    for the step under way, some of whose tokens are in them."""
    if not any(isinstance(one, torch.Tensor) and one.is_cuda for one in counts):
        return [np.array(one) for one in counts]
    stream = _reading_stream()
    with torch.cuda.stream(stream):
        copies = [
            torch.empty(one.shape, dtype=torch.int32, pin_memory=True).copy_(
                torch.as_tensor(one), non_blocking=True
            )
            for one in counts
        ]
    stream.synchronize()
    return [one.numpy() for one in copies]


@cache
def _reading_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


@dataclass(slots=True)
class Stack:
    """One matrix of each expert in the compiled kernel's layout, one after the other."""

    kind: int
    num_in: int
    num_out: int
    codes: torch.Tensor  # [E, ...]
    scales: torch.Tensor | None = None  # [E, ...]
    bias: torch.Tensor | None = None  # [E, num_out]

    def struct(self) -> structs.Matrices:
        """Addresses of tensors that the owner keeps."""
        return structs.Matrices(
            kind=self.kind,
            num_in=self.num_in,
            num_out=self.num_out,
            codes=self.codes.data_ptr(),
            scales=None if self.scales is None else self.scales.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            code_bytes=self.codes[0].nbytes,
            num_scales=0 if self.scales is None else self.scales[0].numel(),
        )


@dataclass(slots=True)
class StreamedStack:
    """One matrix of each expert, which a stream reads into slots. `code_place`, `scale_place`:
    where it lies in a slot."""

    kind: int
    num_in: int
    num_out: int
    code_place: int
    scale_place: int | None
    bias: torch.Tensor | None = None  # [E, num_out]

    def struct(self) -> structs.Matrices:
        return structs.Matrices(
            kind=self.kind,
            num_in=self.num_in,
            num_out=self.num_out,
            bias=None if self.bias is None else self.bias.data_ptr(),
            num_scales=0 if self.scale_place is None else 1,
            code_place=self.code_place,
            scale_place=self.scale_place or 0,
        )


def stack_dense(weights: list[torch.Tensor], bias_EN: torch.Tensor | None = None) -> Stack:
    """A stack of matrices [N, K] of 32 or 16 bits."""
    (num_out, num_in), dtype = weights[0].shape, weights[0].dtype
    codes = torch.empty(len(weights), -(-num_out // 8), num_in, 8, dtype=dtype, device="cpu")
    for expert, weight in enumerate(weights):
        codes[expert] = to_panels(weight)
    return Stack(native.KINDS[KIND_OF[dtype]], num_in, num_out, codes, bias=bias_EN)


def stack_codes(weights: list[Codes], bias_EN: torch.Tensor | None = None) -> Stack:
    """A stack of quantized matrices of one kind."""
    num_out, num_in = weights[0].codes_NK.shape
    kind = kind_of(weights)
    panels, scales = code_panels(weights[0], kind)
    all_codes, all_scales = (
        panels.new_empty(len(weights), *panels.shape),
        scales.new_empty(len(weights), *scales.shape),
    )
    for expert, weight in enumerate(weights):
        all_codes[expert], all_scales[expert] = code_panels(weight, kind)
    return Stack(kind_number(weights), num_in, num_out, all_codes, all_scales, bias_EN)


class NativeExperts(ExpertWeights):
    """By the compiled kernel (moe.c): one call routes, sorts, multiplies and adds."""

    def __init__(
        self,
        spec: MoESpec,
        gate_up: Stack | StreamedStack,
        down: Stack | StreamedStack,
        shared: tuple[Stack, Stack] | None,
    ) -> None:
        assert native.lib is not None
        self._lib, self.stacks = native.lib, (gate_up, down, *(shared or ()))
        self._following: tuple[NativeExperts, Callable[[torch.Tensor], torch.Tensor]] | None = None
        self.counts: np.ndarray = np.zeros(spec.num_experts, np.int64)
        matrices = [stack.struct() for stack in self.stacks]
        self._struct = structs.MoE(
            num_experts=spec.num_experts,
            top_k=spec.top_k,
            renormalise=spec.renormalise,
            topk_first=spec.scoring == "topk_then_softmax",
            is_scored=spec.scoring == "scores",
            act=ACTIVATIONS[spec.act],
            counts=self.counts.ctypes.data,
            **dict(
                zip(("gate_up", "down", "shared_gate_up", "shared_down"), matrices, strict=False)
            ),
        )

    def read_from(self, stream: int, first_unit: int) -> None:
        """Experts are in slots of a stream (its address), the first as this unit."""
        self._struct.stream, self._struct.first_unit = stream, first_unit

    def foresee(
        self, following: NativeExperts, router: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Reads the experts that the next layer's router would choose for the same rows, while this
        layer computes."""
        self._following = following, router

    def __call__(self, x_TH: torch.Tensor, logits_TL: torch.Tensor) -> torch.Tensor:
        if self._following is None:
            return self._lib.moe(ctypes.addressof(self._struct), x_TH, logits_TL)
        following, router = self._following
        return self._lib.moe(
            ctypes.addressof(self._struct),
            x_TH,
            logits_TL,
            ctypes.addressof(following._struct),
            router(x_TH),
        )


class TorchExperts(ExpertWeights):
    """Expert by expert, by linears whose rows keep their bits at any number of rows. `weights`: of
    each expert, gate and up, then down; the shared one's, if there is one, come last."""

    def __init__(self, spec: MoESpec, weights: list[tuple[Weight, Weight]]) -> None:
        self._spec, self._weights = spec, weights
        self.counts: np.ndarray = np.zeros(spec.num_experts, np.int64)

    def __call__(self, x_TH: torch.Tensor, logits_TL: torch.Tensor) -> torch.Tensor:
        spec = self._spec
        logits_TE = logits_TL[:, : spec.num_experts].contiguous()
        weights, chosen = route_reference(logits_TE, spec.top_k, spec.renormalise, spec.scoring)
        out_TKH = x_TH.new_empty(*chosen.shape, x_TH.shape[1])
        assert self.counts is not None
        for expert in chosen.unique().tolist():
            token, rank = (chosen == expert).nonzero(as_tuple=True)
            self.counts[expert] += token.shape[0]
            out_TKH[token, rank] = self._expert(expert, x_TH[token])
        out = combine(out_TKH, weights)
        if spec.shared_size:
            out += self._expert(spec.num_experts, x_TH) / torch.exp(
                -logits_TL[:, spec.num_experts :]
            ).add_(1.0)
        return out

    def _expert(self, number: int, x_TH: torch.Tensor) -> torch.Tensor:
        gate_up, down = self._weights[number]
        return down(glu(gate_up(x_TH), self._spec.act))


def dense_experts(
    spec: MoESpec,
    gate_ups: list[torch.Tensor],
    downs: list[torch.Tensor],
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    shared: tuple[torch.Tensor, torch.Tensor] | None,
) -> ExpertWeights:
    """The experts of matrices of 32 or 16 bits, rows of gate before rows of up."""
    if native.lib:
        both = None if shared is None else (stack_dense([shared[0]]), stack_dense([shared[1]]))
        return NativeExperts(
            spec, stack_dense(gate_ups, gate_up_bias), stack_dense(downs, down_bias), both
        )
    weights = [
        (
            pack_linear(gate_up, None if gate_up_bias is None else gate_up_bias[expert]),
            pack_linear(down, None if down_bias is None else down_bias[expert]),
        )
        for expert, (gate_up, down) in enumerate(zip(gate_ups, downs, strict=True))
    ]
    if shared is not None:
        weights.append((pack_linear(shared[0]), pack_linear(shared[1])))
    return TorchExperts(spec, weights)
