"""The outliers that 8-bit and centroid matrices leave out, added to their sums: activations too
large for bytes (LLM.int8()), and single values of a matrix (GOBO).

First the matmul of the rest, in float32, then one of these, then bias and activation: always in
this order. A row's sums get what its own activations say; to those of other rows in a tile,
products of zeros are added, which change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tidemill.kernels.cuda.gemm import _place
from tidemill.kernels.cuda.launch import HOW, begin, launch
from tidemill.kernels.cuda.packed_gemm import _store
from tidemill.kernels.cuda.rounding import LARGEST, Scaled, quantized

# ---- LLM.int8()


@triton.jit
def _split_rows(
    x_ptr, codes_ptr, scales_ptr, kept_ptr, threshold, width, padded,
    LARGEST: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Outliers of quantized weights. Reference: `quantized_linear.quantized_linear_reference`."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    begin(AHEAD)
    stored = tl.load(x_ptr + row * width + columns, mask=columns < width, other=0.0)
    x = stored.to(tl.float32)
    is_outlier = tl.abs(x) >= threshold
    scale, codes = quantized(tl.where(is_outlier, 0.0, x), 0, LARGEST, AHEAD)
    tl.store(codes_ptr + row * padded + columns, codes, mask=columns < padded)
    tl.store(
        kept_ptr + row * padded + columns, tl.where(is_outlier, stored, 0.0), mask=columns < padded
    )
    tl.store(scales_ptr + row, scale)


def split_rows(x_TK: torch.Tensor, threshold: float, padded: int) -> tuple[Scaled, torch.Tensor]:
    """Activations as bytes with a scale for each token, zeros instead of those of this size and
    more; and these, zeros elsewhere."""
    num_rows, width = x_TK.shape
    codes = torch.empty(num_rows, padded, dtype=torch.int8, device=x_TK.device)
    scales, kept = (
        torch.empty(num_rows, dtype=torch.float32, device=x_TK.device),
        x_TK.new_empty(num_rows, padded),
    )
    block = triton.next_power_of_2(padded)
    launch(
        _split_rows, (num_rows,), x_TK, codes, scales, kept, threshold, width, padded, LARGEST=LARGEST[torch.int8], BLOCK=block,
        num_warps=min(32, max(1, block // 512)), **HOW,
    )  # fmt: skip
    return Scaled(codes, scales), kept


@triton.jit(do_not_specialize=["num_rows"])
def _add_outliers(
    x_ptr, w_ptr, scales_ptr, sums_ptr, bias_ptr, out_ptr, num_rows, num_out, num_in,
    ROWS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, ACT: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Outliers of quantized weights. Reference: `quantized_linear.quantized_linear_reference`."""
    begin(AHEAD)
    m, n = _place(num_rows, num_out, ROWS, OUTS, GROUP)
    rows, outs, ins = (
        m * ROWS + tl.arange(0, ROWS),
        n * OUTS + tl.arange(0, OUTS),
        tl.arange(0, INS),
    )
    x = x_ptr + rows[:, None].to(tl.int64) * num_in + ins[None, :]
    w = w_ptr + outs[None, :].to(tl.int64) * num_in + ins[:, None]
    acc = tl.zeros((ROWS, OUTS), tl.float32)
    for k in range(0, num_in, INS):
        a = tl.load(x + k, mask=(rows[:, None] < num_rows) & (k + ins[None, :] < num_in), other=0.0)
        if tl.max(tl.max((a != 0.0).to(tl.int32), 1), 0) > 0:  # most columns have no outliers
            b = tl.load(
                w + k, mask=(outs[None, :] < num_out) & (k + ins[:, None] < num_in), other=0
            )
            acc = tl.dot(a, b.to(a.dtype), acc)
    scales = tl.load(scales_ptr + outs, mask=outs < num_out, other=0.0)
    inside = (rows[:, None] < num_rows) & (outs[None, :] < num_out)
    sums = tl.load(
        sums_ptr + rows[:, None].to(tl.int64) * num_out + outs[None, :], mask=inside, other=0.0
    )
    _store(
        sums + acc * scales[None, :],
        bias_ptr,
        out_ptr,
        m,
        n,
        num_rows,
        num_out,
        ROWS,
        OUTS,
        HAS_BIAS,
        ACT,
    )


def add_outliers(
    kept_TK: torch.Tensor,
    weight: Scaled,
    sums_TN: torch.Tensor,
    *,
    bias_N: torch.Tensor | None = None,
    act: str = "",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sums and the products of what `split_rows` kept, in its type, or in that of `out`. `act`:
    as `gemm` has it."""
    num_rows, num_in = kept_TK.shape
    num_out = weight.values_NK.shape[0]
    if out is None:
        out = kept_TK.new_empty(num_rows, num_out // 2 if act else num_out)
    # of one tile, so that all are summed alike
    grid = (triton.cdiv(num_rows, 64) * triton.cdiv(num_out, 64),)
    launch(
        _add_outliers, grid, kept_TK, weight.values_NK, weight.scales, sums_TN, weight.scales if bias_N is None else bias_N, out,
        num_rows, num_out, num_in, ROWS=64, OUTS=64, INS=64, GROUP=8, HAS_BIAS=bias_N is not None, ACT=act, num_stages=2,
        num_warps=4, **HOW,
    )  # fmt: skip
    return out


# ---- GOBO


@dataclass(frozen=True, slots=True)
class SparseColumns:
    """Single values of a matrix: of each output, columns and values, filled up with zeros to the
    most that one has."""

    columns_MN: torch.Tensor  # int32
    values_MN: torch.Tensor  # float32

    @property
    def num_bytes(self) -> int:
        return self.columns_MN.nbytes + self.values_MN.nbytes


def sparse_columns(
    places: torch.Tensor, values: torch.Tensor, num_out: int, width: int
) -> SparseColumns:
    """`places`: row * width + column, ascending."""
    row, column = places // width, places % width
    counts = torch.bincount(row, minlength=num_out)
    number = torch.arange(places.numel(), device=places.device) - (counts.cumsum(0) - counts)[row]
    most = int(counts.max()) if places.numel() else 0
    columns = torch.zeros(max(most, 1), num_out, dtype=torch.int32, device=places.device)
    spread = torch.zeros(max(most, 1), num_out, device=places.device)
    columns[number, row] = column.to(torch.int32)
    spread[number, row] = values.float()
    return SparseColumns(columns, spread)


@triton.jit
def _add_sparse(
    x_ptr, columns_ptr, values_ptr, sums_ptr, bias_ptr, out_ptr, num_most, num_out, num_in,
    OUTS: tl.constexpr, HAS_BIAS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Outliers of quantized weights. Reference: `quantized_linear.quantized_linear_reference`."""
    begin(AHEAD)
    row, outs = tl.program_id(0).to(tl.int64), tl.program_id(1) * OUTS + tl.arange(0, OUTS)
    inside = outs < num_out
    acc = tl.zeros((OUTS,), tl.float32)
    for i in range(num_most):
        column = tl.load(columns_ptr + i * num_out + outs, mask=inside, other=0)
        value = tl.load(values_ptr + i * num_out + outs, mask=inside, other=0.0)
        acc += value * tl.load(x_ptr + row * num_in + column, mask=inside, other=0.0).to(tl.float32)
    acc += tl.load(sums_ptr + row * num_out + outs, mask=inside, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + outs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * num_out + outs, acc.to(out_ptr.dtype.element_ty), mask=inside)


def add_sparse(
    x_TK: torch.Tensor,
    sparse: SparseColumns,
    sums_TN: torch.Tensor,
    *,
    bias_N: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sums and the products of single values, in the type of x, or in that of `out`."""
    num_rows, num_in = x_TK.shape
    most, num_out = sparse.columns_MN.shape
    if out is None:
        out = x_TK.new_empty(num_rows, num_out)
    launch(
        _add_sparse, (num_rows, triton.cdiv(num_out, 256)), x_TK, sparse.columns_MN, sparse.values_MN, sums_TN,
        sums_TN if bias_N is None else bias_N, out, most, num_out, num_in, OUTS=256, HAS_BIAS=bias_N is not None,
        num_warps=4, **HOW,
    )  # fmt: skip
    return out
