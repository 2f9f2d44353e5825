"""Integer grids: scales and zero points of tensors, rows or groups, and rounding to them;
activations in 8 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tidemill.compress.stored import IntWeight

TENSOR, CHANNEL, GROUP = "tensor", "channel", "group"
SUPER = 256  # columns of a row whose scales are in steps of one number
_TINY = 2.0**-24  # the least float16


@dataclass(frozen=True, slots=True)
class Grid:
    """The way a matrix is rounded. `group`: columns that share a scale; 0: whole rows (per
    channel), -1: the whole matrix. `offsets`: values begin anywhere, not at a multiple of the scale
    (GGUF's types). `steps`: scales and offsets are at most so many times a number of 256 columns
    (its K types)."""

    bits: int = 4
    group: int = 128
    symmetric: bool = True
    offsets: bool = False
    steps: int = 0

    @property
    def lowest(self) -> int:
        return -(2 ** (self.bits - 1)) if self.symmetric else 0

    @property
    def highest(self) -> int:
        return self.lowest + 2**self.bits - 1

    def width(self, num_columns: int) -> int:
        return self.group if self.group > 0 else num_columns


def grouped(matrix_NK: torch.Tensor, width: int) -> torch.Tensor:
    """[N, groups, width]; a last group of fewer columns repeats its last one."""
    num_out, num_in = matrix_NK.shape
    short = -num_in % width
    if short:
        matrix_NK = torch.cat([matrix_NK, matrix_NK[:, -1:].expand(-1, short)], 1)
    return matrix_NK.reshape(num_out, -1, width)


def fit(
    matrix_NK: torch.Tensor, grid: Grid, shrink_NG: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales [N, groups] and, unless it is symmetric, zero points. `shrink_NG`: of the range that
    is covered."""
    parts = grouped(matrix_NK, grid.width(matrix_NK.shape[1]))
    low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
    if grid.group < 0:
        low, high = low.amin().expand_as(low), high.amax().expand_as(high)
    if shrink_NG is not None:
        low, high = low * shrink_NG, high * shrink_NG
    if grid.symmetric:
        return _in_steps(torch.maximum(-low, high) / ((2**grid.bits - 1) / 2), grid), None
    if grid.offsets:
        offsets = _in_steps(-low, grid, lowest=0)
        scales = _in_steps((high + offsets) / (2**grid.bits - 1), grid)
        return scales, offsets / scales
    scales = half((high - low) / (2**grid.bits - 1))
    return scales, torch.round(-low / scales).clamp(grid.lowest, grid.highest)


def _in_steps(values_NG: torch.Tensor, grid: Grid, lowest: int = 1) -> torch.Tensor:
    """The scales in steps, as they are stored. The largest of 256 columns takes all steps, so that
    the unit can be read off."""
    if not grid.steps:
        return half(values_NG) if lowest else values_NG.clamp(max=65504).to(torch.float16).float()
    parts = values_NG.view(values_NG.shape[0], -1, SUPER // grid.group)
    largest = parts.amax(2, keepdim=True)
    units = half(largest / grid.steps)
    counts = torch.round(parts / units).clamp(lowest, grid.steps)
    counts[(parts == largest) & (largest > 0)] = grid.steps
    return (counts * units).view(values_NG.shape)


def half(scales: torch.Tensor) -> torch.Tensor:
    """The scales as they are stored, so that codes are those of the stored scales."""
    return scales.clamp(_TINY, 65504).to(torch.float16).float()


def round_to(
    matrix: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, grid: Grid
) -> torch.Tensor:
    """Codes; all of one shape."""
    if zeros is None:
        shifted = torch.round(matrix / scales)
    elif grid.offsets:
        shifted = torch.round(matrix / scales + zeros)
    else:
        shifted = torch.round(matrix / scales) + zeros
    return shifted.clamp(grid.lowest, grid.highest)


def quantize(
    matrix_NK: torch.Tensor, grid: Grid, shrink_NG: torch.Tensor | None = None
) -> IntWeight:
    """Round to nearest."""
    width = grid.width(matrix_NK.shape[1])
    scales, zeros = fit(matrix_NK, grid, shrink_NG)
    index = torch.arange(matrix_NK.shape[1], device=matrix_NK.device) // width
    wide_zeros = None if zeros is None else zeros[:, index]
    codes = round_to(matrix_NK, scales[:, index], wide_zeros, grid)
    return as_stored(codes, scales, zeros, width, grid)


def as_stored(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, width: int, grid: Grid
) -> IntWeight:
    of_groups = zeros if zeros is None or grid.offsets else zeros.short()
    return IntWeight(grid.bits, codes.short(), scales, width, of_groups, steps=grid.steps or None)


def rounded(
    matrix_NK: torch.Tensor, grid: Grid, shrink_NG: torch.Tensor | None = None
) -> torch.Tensor:
    """The values that `quantize` gives, without codes in between."""
    num_out, num_in = matrix_NK.shape
    scales, zeros = fit(matrix_NK, grid, shrink_NG)
    parts, scales_NG1 = grouped(matrix_NK, grid.width(num_in)), scales[:, :, None]
    zeros_NG1 = None if zeros is None else zeros[:, :, None]
    codes = round_to(parts, scales_NG1, zeros_NG1, grid)
    values = (codes if zeros_NG1 is None else codes.sub_(zeros_NG1)).mul_(scales_NG1)
    return values.view(num_out, -1)[:, :num_in]


def fake(matrix_NK: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The values after rounding; gradients pass as if there was none."""
    with torch.no_grad():
        difference = rounded(matrix_NK, grid) - matrix_NK
    return matrix_NK + difference


def act_scales(x: torch.Tensor, per_token: bool) -> torch.Tensor:
    """The scales of symmetric 8-bit activations: one for the tensor or for each token."""
    largest = x.abs().amax(-1, keepdim=True) if per_token else x.abs().amax()
    return (largest / 127).clamp(min=1e-10)


def fake_activations(
    x: torch.Tensor, per_token: bool, scale: float | None = None, threshold: float | None = None
) -> torch.Tensor:
    """Through 8 bits and back. `scale`: static. `threshold`: values at least so large are left out
    and stay (LLM.int8())."""
    if threshold is not None:
        large = x.abs() >= threshold
        rest = x.masked_fill(large, 0.0)
        return torch.where(large, x, fake_activations(rest, per_token))
    scales = act_scales(x, per_token) if scale is None else torch.tensor(scale, device=x.device)
    return torch.round(x / scales).clamp(-128, 127) * scales


def fake_fp8(x: torch.Tensor, per_token: bool, scale: float | None = None) -> torch.Tensor:
    """Through E4M3 and back."""
    largest = x.abs().amax(-1, keepdim=True) if per_token else x.abs().amax()
    scales = (
        (largest / 448).clamp(min=1e-10) if scale is None else torch.tensor(scale, device=x.device)
    )
    return (x / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales
