"""Weights that stay in the 2, 4 or 8 bits they are stored in, or are rounded to as they are read,
on the GPU."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from tidemill.kernels.linear import Weight
from tidemill.kernels.low_rank import Factors, Product
from tidemill.kernels.moe import ExpertWeights
from tidemill.kernels.pending import SplitK
from tidemill.kernels.quantized_linear import Codes, joined_activations
from tidemill.quant.base import ExpertParts
from tidemill.quant.cuda import CudaDense, CudaMatrix, CudaWeight
from tidemill.quant.cuda_scaled import CudaOnline, CudaScaledWeight, in_pairs, on_gpu
from tidemill.quant.low_rank import plain, read_factors
from tidemill.types.model_config import MoESpec
from tidemill.weights.checkpoint import WeightTensor
from tidemill.weights.packed.fp8 import FP8Tensor

if TYPE_CHECKING:
    from tidemill.kernels.cuda.outliers import SparseColumns

Part: TypeAlias = "Codes | Fp8Part | Factors | torch.Tensor"
_MOST_SPARSE = 1.5  # bytes of single values for a value of the matrix, beside its half byte
_MOST_ROWS = 512  # with more, a weight is dequantized into a buffer first
# By device and lane, one for all weights: they are used one after the other.
_buffers: dict[tuple[torch.device, int], torch.Tensor] = {}


def _buffer(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    from tidemill.kernels.cuda.lanes import lane

    num, where = shape[0] * shape[1], (device, lane())
    if where not in _buffers or _buffers[where].numel() < num:
        _buffers[where] = torch.empty(num, dtype=torch.bfloat16, device=device)
    return _buffers[where][:num].view(shape)


class CudaPackedWeight(CudaMatrix):
    """`order_K`: column k multiplies input order_K[k]. `act`: as `CudaWeight` has it."""

    def __init__(
        self,
        weight: Any,
        bias_N: torch.Tensor | None,
        act: str,
        order_K: torch.Tensor | None,
        fast: bool,
        sparse: SparseColumns | None = None,
    ) -> None:
        """`sparse`: single values on top of it."""
        self._weight, self._bias, self._act, self._order, self._fast = (
            weight,
            bias_N,
            act,
            order_K,
            fast,
        )
        self._sparse = sparse
        self._device, self._num_out = weight.words_NW.device, weight.num_out

    @property
    def num_bytes(self) -> int:
        num: int = self._weight.num_bytes + (0 if self._sparse is None else self._sparse.num_bytes)
        return num

    def split_k(self, x_TK: torch.Tensor) -> torch.Tensor | SplitK:
        from tidemill.kernels.cuda import hopper_packed

        if self._sparse is not None or not hopper_packed.covers(self._weight, x_TK.shape[0]):
            return self(x_TK)
        x_TK = x_TK if self._order is None else x_TK.index_select(1, self._order)
        return hopper_packed.gemm_warp_specialized(
            x_TK, self._weight, bias_N=self._bias, act=self._act, leave=True
        )

    def _multiply(
        self, x_TK: torch.Tensor, act: str, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        from tidemill.kernels.cuda import hopper_packed
        from tidemill.kernels.cuda.gemm import matmul
        from tidemill.kernels.cuda.packed_gemm import dequantize, gemm_chunked, gemm_packed

        weight = self._weight
        if self._sparse is not None:
            return self._with_sparse(x_TK, self._sparse, out)
        if self._order is not None:
            x_TK = x_TK.index_select(1, self._order)
        if out is None and hopper_packed.covers(weight, x_TK.shape[0]):
            product = hopper_packed.gemm_warp_specialized(x_TK, weight, bias_N=self._bias, act=act)
            assert isinstance(product, torch.Tensor)
            return product
        if x_TK.shape[0] <= _MOST_ROWS or out is not None:
            return gemm_packed(x_TK, weight, bias_N=self._bias, act=act, out=out)
        dense = dequantize(weight, out=_buffer((weight.num_out, weight.num_in), self._device))
        if weight.num_chunks > 1 and not self._fast:
            return gemm_chunked(x_TK, dense, weight.chunk, bias_N=self._bias, act=act)
        return matmul(x_TK, dense, self._bias, act, any_order=self._fast)

    def _with_sparse(
        self, x_TK: torch.Tensor, sparse: SparseColumns, out: torch.Tensor | None
    ) -> torch.Tensor:
        from tidemill.kernels.cuda.outliers import add_sparse
        from tidemill.kernels.cuda.packed_gemm import gemm_packed

        assert not self._act, "such matrices are not fused"
        sums = torch.empty(x_TK.shape[0], self._num_out, dtype=torch.float32, device=x_TK.device)
        gemm_packed(x_TK, self._weight, out=sums)
        return add_sparse(x_TK, sparse, sums, bias_N=self._bias, out=out)

    def compile(self, nums_rows: Collection[int]) -> None:
        from tidemill.kernels.cuda.tuning import compile_tiles

        many = [rows for rows in nums_rows if rows > _MOST_ROWS]
        if many and (self._fast or self._weight.num_chunks == 1):
            compile_tiles(
                _buffer((self._weight.num_out, self._weight.num_in), self._device),
                self._bias,
                self._act,
                many,
            )

    def prepare(self, nums_rows: Collection[int]) -> None:
        from tidemill.kernels.cuda.gemm import LIBRARY, choose_tile, library_agrees
        from tidemill.kernels.cuda.packed_gemm import dequantize
        from tidemill.kernels.cuda.tuning import find_tiles

        num_out, num_in = self._weight.num_out, self._weight.num_in
        many = [rows for rows in nums_rows if rows > _MOST_ROWS]
        if not many:
            return
        dense = dequantize(self._weight, out=_buffer((num_out, num_in), self._device))
        if self._weight.num_chunks > 1 and not self._fast:
            return
        find_tiles(dense, self._act, library=self._bias is None)
        for num_rows in many:
            if (
                self._bias is None
                and not self._fast
                and choose_tile(num_rows, num_out, num_in) is LIBRARY
            ):
                library_agrees(num_rows, num_out, num_in, self._device)

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        from tidemill.kernels.cuda.packed_gemm import dequantize

        assert self._sparse is None, "not a table"
        return dequantize(self._weight, ids_T)


def pack_codes(codes: Codes) -> Any:
    """The codes in the kernels' form. None: no kernel has their groups."""
    from tidemill.kernels.cuda.packed_gemm import E2M1, NF4, pack

    num_in = codes.codes_NK.shape[1]
    whole = codes.scales_NG.shape[1] == 1
    if not whole and (codes.group % 32 or num_in % codes.group):
        return None
    on = codes.codes_NK.to("cuda"), codes.scales_NG.to("cuda").float()
    zeros, offsets = (
        None if one is None else one.to("cuda").float()
        for one in (codes.zeros_NG, codes.offsets_NG)
    )
    if codes.table is not None:
        kind = next(
            (name for name, table in (("nf4", NF4), ("e2m1", E2M1)) if _same(codes.table, table)),
            None,
        )
        if kind is not None:
            return pack(on[0], 4, kind, on[1], None)
        return pack(on[0], 4, "table", on[1], None, table=codes.table) if whole else None
    if codes.bits == 8:
        if zeros is not None:
            offsets = -zeros * on[1]
        return pack(on[0], 8, "zeros" if offsets is None else "offsets", on[1], offsets)
    if codes.bits == 2:  # -1, 0 and 1
        return pack(on[0] + 1, 2, "zeros", on[1], torch.ones_like(on[1]))
    if zeros is not None:
        return pack(on[0], 4, "zeros", on[1], zeros)
    if offsets is not None:
        return pack(on[0], 4, "offsets", on[1], offsets)
    from tidemill.kernels.quantized_linear import _MX4_NUMBERS

    numbers = torch.from_numpy(_MX4_NUMBERS).to(on[0].device)[on[0].long() + 12]
    return pack(numbers, 4, "e2m1", on[1] * 2, None)  # the codes are twice the values


def _same(table: torch.Tensor, other: tuple[float, ...]) -> bool:
    return torch.allclose(table.cpu().float(), torch.tensor(other, device="cpu"), atol=1e-6)


class CudaSideBySide(CudaMatrix):
    """Matmuls of one input, their outputs side by side; with `act` of two, in turn, as `CudaWeight`
    has them."""

    def __init__(self, parts: list[Weight], act: str) -> None:
        self._parts, self._act = parts, act

    def _multiply(
        self, x_TK: torch.Tensor, act: str, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert out is None, "not a head"
        made = [part(x_TK) for part in self._parts]
        if not self._act:
            return torch.cat(made, 1)
        both = torch.stack(made, 2).flatten(1)
        return self.activate(both) if act else both

    def compile(self, nums_rows: Collection[int]) -> None:
        for part in self._parts:
            part.compile(nums_rows)

    def prepare(self, nums_rows: Collection[int]) -> None:
        for part in self._parts:
            part.prepare(nums_rows)

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        raise AssertionError("not a table")


# ---- stored formats


@dataclass(slots=True)
class Fp8Part:
    """`scales`: [N], or [K / 128, N]."""

    values_NK: torch.Tensor
    scales: torch.Tensor

    def take(self, rows: torch.Tensor) -> Fp8Part:
        rows = rows.to(self.scales.device)
        return Fp8Part(
            self.values_NK.view(torch.int8)[rows].view(self.values_NK.dtype), self.scales[..., rows]
        )

    def dequantize(self) -> torch.Tensor:
        num_in = self.values_NK.shape[1]
        wide = (
            self.scales[:, None]
            if self.scales.dim() == 1
            else self.scales.t().repeat_interleave(128, 1)[:, :num_in]
        )
        return self.values_NK.float() * wide


def read_fp8(tensor: FP8Tensor) -> Fp8Part | None:
    """Reads FP8 values with a scale for the whole, for each row or for blocks of 128 columns. None:
    in other blocks, or another type."""
    num_out, num_in = tensor.shape
    rows, columns = tensor.block
    values = tensor.values()
    if values.dtype != torch.float8_e4m3fn or (columns != num_in and columns != 128):
        return None
    scales = tensor.scales().float().repeat_interleave(rows, 0)[:num_out]
    return Fp8Part(
        values.to("cuda"),
        (scales[:, 0] if columns == num_in else scales.t()).contiguous().to("cuda"),
    )


def joined(parts: list[Codes]) -> Codes | None:
    """Rows of several matrices as one, on the GPU. Unlike ones meet in 8 bits with offsets; None:
    they cannot."""
    if len(parts) > 1 and any(part.outliers is not None for part in parts):
        return None
    parts = [_on_gpu(part) for part in parts]
    if len({_form(part) for part in parts}) > 1:
        if any(part.table is not None or part.order_K is not None for part in parts):
            return None
        group = min(part.group for part in parts)
        if any(part.group % group for part in parts):
            return None
        parts = [_in_bytes(part, group) for part in parts]
    first = parts[0]
    if any(
        not _equal(part.order_K, first.order_K) or not _equal(part.table, first.table)
        for part in parts
    ):
        return None
    return replace(
        first,
        activations=joined_activations(parts),
        codes_NK=torch.cat([part.codes_NK for part in parts]),
        scales_NG=torch.cat([part.scales_NG for part in parts]),
        offsets_NG=None
        if first.offsets_NG is None
        else torch.cat([part.offsets_NG for part in parts]),  # type: ignore[misc]
        zeros_NG=None if first.zeros_NG is None else torch.cat([part.zeros_NG for part in parts]),  # type: ignore[misc]
    )


def _on_gpu(part: Codes) -> Codes:
    given = {field.name: getattr(part, field.name) for field in fields(part)}
    moved: dict[str, Any] = {
        name: value.to("cuda") for name, value in given.items() if isinstance(value, torch.Tensor)
    }
    for name in ("scales_NG", "offsets_NG", "zeros_NG"):
        if name in moved:
            moved[name] = moved[name].float()
    return replace(part, **moved)


def _form(part: Codes) -> tuple[object, ...]:
    return (
        part.bits,
        part.group,
        part.offsets_NG is None,
        part.zeros_NG is None,
        part.table is None,
        part.order_K is None,
    )


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _in_bytes(part: Codes, group: int) -> Codes:
    scales, offsets = part.scales_NG, part.offsets_NG
    if offsets is None:
        offsets = torch.zeros_like(scales)
    if part.zeros_NG is not None:
        offsets = offsets - part.zeros_NG * scales
    times = -(-min(part.group, part.codes_NK.shape[1]) // group)
    scales, offsets = scales.repeat_interleave(times, 1), offsets.repeat_interleave(times, 1)
    return Codes(8, part.codes_NK, scales, offsets, group=group)


class CudaQuantized(CudaDense):
    """Matrices as they are stored: packed ones by bfloat16, fp8 and W8A8 by activations of their
    own type. What no kernel here has becomes bfloat16, as do experts."""

    def read(self, tensor: WeightTensor, row_order: torch.Tensor | None) -> Any:
        factors = read_factors(tensor, row_order)
        if factors is not None:
            return Factors(
                factors.b_NR.to("cuda", torch.bfloat16), factors.a_RK.to("cuda", torch.bfloat16)
            )
        part: Part | None = read_fp8(tensor) if isinstance(tensor, FP8Tensor) else tensor.codes()
        if part is None:
            return super().read(tensor, row_order)
        return part if row_order is None else part.take(row_order)

    def join(self, parts: list[Any], bias: torch.Tensor | None) -> Weight:
        return self._made(parts, None, bias, "")

    def join_gated(self, gate: Any, up: Any, bias: torch.Tensor | None, act: str) -> Weight:
        return self._made(
            [gate, up], torch.arange(2 * _num_rows(gate)).view(2, -1).t().flatten(), bias, act
        )

    def _made(
        self, parts: list[Any], order: torch.Tensor | None, bias: torch.Tensor | None, act: str
    ) -> Weight:
        """One below the other, then in this order of rows."""
        if any(isinstance(part, Factors) for part in parts) or (
            len(parts) > 1 and any(_is_centroids(part) for part in parts)
        ):
            return self._side_by_side(parts, bias, act)
        bias = in_pairs(bias) if act else on_gpu(bias)
        if (
            all(isinstance(part, Fp8Part) for part in parts)
            and len({part.scales.dim() for part in parts}) == 1
        ):
            values = torch.cat([part.values_NK.view(torch.int8) for part in parts]).view(
                torch.float8_e4m3fn
            )
            whole = Fp8Part(values, torch.cat([part.scales for part in parts], -1))
            whole = whole if order is None else whole.take(order)
            return CudaScaledWeight(whole.values_NK, whole.scales, bias, act)
        codes = joined(parts) if all(isinstance(part, Codes) for part in parts) else None
        if codes is not None:
            codes = codes if order is None else codes.take(order.to(codes.codes_NK.device))
            made = self._of_codes(codes, bias, act)
            if made is not None:
                return made
        dense = torch.cat([_dense(part) for part in parts])
        return CudaWeight(
            dense if order is None else dense[order.to(dense.device)], bias, self._fast, act
        )

    def _side_by_side(self, parts: list[Any], bias: torch.Tensor | None, act: str) -> Weight:
        """Factors have ranks of their own, so that nothing is fused."""
        biases = (
            [None] * len(parts)
            if bias is None
            else list(bias.split([_num_rows(part) for part in parts]))
        )
        made: list[Weight] = []
        for part, own in zip(parts, biases, strict=True):
            if isinstance(part, Factors):
                b = CudaWeight(part.b_NR.contiguous(), on_gpu(own), self._fast)
                made.append(Product(b, CudaWeight(part.a_RK.contiguous(), None, self._fast)))
            else:
                made.append(self._made([part], None, own, ""))
        return made[0] if len(made) == 1 else CudaSideBySide(made, act)

    def _of_codes(self, codes: Codes, bias: torch.Tensor | None, act: str) -> Weight | None:
        is_plain = codes.zeros_NG is None and codes.offsets_NG is None and codes.order_K is None
        how = codes.activations
        if how is not None and codes.bits == 8 and is_plain and codes.scales_NG.shape[1] == 1:
            static = None if how.scale is None else torch.tensor([how.scale], device="cuda")
            return CudaScaledWeight(
                codes.codes_NK, codes.scales_NG[:, 0], bias, act, static, how.threshold
            )
        packed, sparse = pack_codes(codes), None
        if packed is not None and codes.outliers is not None:
            sparse = _sparse(codes)
            packed = None if sparse is None else packed
        return (
            None
            if packed is None
            else CudaPackedWeight(packed, bias, act, codes.order_K, self._fast, sparse)
        )

    def join_experts(self, parts: ExpertParts[Any], spec: MoESpec) -> ExpertWeights:
        shared = (
            None
            if parts.shared is None
            else ([_dense(part) for part in parts.shared[0]], _dense(parts.shared[1]))
        )
        return CudaDense(self._fast).join_experts(replace(parts, shared=shared), spec)


def _is_centroids(part: Part) -> bool:
    """Tells if a matrix has a table of its own, or outliers: it is not fused with others."""
    return isinstance(part, Codes) and (
        part.outliers is not None or (part.table is not None and part.scales_NG.shape[1] == 1)
    )


def _sparse(codes: Codes) -> SparseColumns | None:
    """None: a row has so many outliers that the matrix takes less in bfloat16."""
    from tidemill.kernels.cuda.outliers import sparse_columns

    assert codes.outliers is not None
    num_out, width = codes.codes_NK.shape
    made = sparse_columns(
        codes.outliers.places.to("cuda"), codes.outliers.differences.to("cuda"), num_out, width
    )
    return made if made.num_bytes < _MOST_SPARSE * num_out * width else None


def _num_rows(part: Part) -> int:
    if isinstance(part, Factors):
        return part.b_NR.shape[0]
    values = (
        part
        if isinstance(part, torch.Tensor)
        else part.values_NK
        if isinstance(part, Fp8Part)
        else part.codes_NK
    )
    return values.shape[0]


def _dense(part: Part) -> torch.Tensor:
    whole = plain(part)
    values: torch.Tensor = whole if isinstance(whole, torch.Tensor) else whole.dequantize()
    return values.to("cuda", torch.bfloat16)


# ---- plain checkpoints


class CudaInt4(CudaOnline):
    """A plain checkpoint in 4 bits, rounded to the nearest: a scale for 128 values of a row, where
    they divide it."""

    def _quantized(
        self, weight_NK: torch.Tensor, bias_N: torch.Tensor | None, act: str = ""
    ) -> Weight:
        num_in = weight_NK.shape[1]
        group = next((size for size in (128, 64, 32) if num_in % size == 0), num_in)
        codes, scales = [], []
        for rows in weight_NK.split(4096):
            groups = rows.float().unflatten(1, (-1, group))
            by = groups.abs().amax(2).div_(7.5).clamp_min_(1e-30)
            codes.append(
                (groups / by[..., None]).add_(8).round_().clamp_(0, 15).to(torch.int8).flatten(1)
            )
            scales.append(by)
        made = Codes(4, torch.cat(codes), torch.cat(scales), None, group=group)
        made.zeros_NG = torch.full_like(made.scales_NG, 8.0)
        return CudaPackedWeight(pack_codes(made), bias_N, act, None, self._fast)
