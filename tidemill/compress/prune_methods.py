"""The weights of a matrix that are set to 0, and the changes by which the others make up for it:
magnitude, wanda and SparseGPT.

Shapes: W [N, K]; moments X^T X [K, K] of the inputs X [T, K].
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tidemill.compress.grid import Grid, fit, round_to
from tidemill.compress.methods.gptq import factor
from tidemill.compress.stored import IntWeight
from tidemill.errors import ConfigError

METHODS = ("magnitude", "wanda", "sparsegpt")
_SLAB = 128  # columns that SparseGPT decides on at once
_MAX_GROUP = 64
Rounding = Callable[[torch.Tensor], torch.Tensor]  # a column's values as they are stored


@dataclass(frozen=True, slots=True)
class Pattern:
    """Any weights (`group` 1 x 1), whole blocks of `rows` x `columns`, or `kept` of each `columns`
    in a row."""

    rows: int = 1
    columns: int = 1
    kept: int = 0  # of each group of columns; 0: `sparsity` says how many groups are set to 0

    @staticmethod
    def read(text: str) -> Pattern:
        """unstructured, N:M (N of M are kept) or RxC."""
        if text == "unstructured":
            return Pattern()
        if found := re.fullmatch(r"(\d{1,3}):(\d{1,3})", text):
            kept, size = int(found[1]), int(found[2])
            if 0 < kept < size <= _MAX_GROUP:
                return Pattern(columns=size, kept=kept)
        if found := re.fullmatch(r"(\d{1,3})x(\d{1,3})", text):
            rows, columns = int(found[1]), int(found[2])
            if 0 < rows <= _MAX_GROUP and 0 < columns <= _MAX_GROUP:
                return Pattern(rows, columns)
        raise ConfigError(
            f"--pattern {text} is not known.",
            fix="Give unstructured, 2:4, 4:8 or blocks like 4x4.",
            param="pattern",
        )

    def check(self, name: str, shape: tuple[int, int]) -> None:
        if shape[0] % self.rows or shape[1] % self.columns:
            what = (
                f"{name} has {shape[0]} x {shape[1]} values, which are no multiple of the pattern's "
                f"{self.rows} x {self.columns}."
            )
            raise ConfigError(what, fix="Give another --pattern.", param="pattern")

    def keep(self, scores_NK: torch.Tensor, sparsity: float, by_row: bool = False) -> torch.Tensor:
        """The mask of the values that stay: those with the highest scores, of all or (`by_row`) of
        each row of blocks."""
        num_rows, num_columns = scores_NK.shape
        grid = scores_NK.view(
            num_rows // self.rows, self.rows, num_columns // self.columns, self.columns
        )
        if self.kept:
            order = scores_NK.view(-1, self.columns).argsort(dim=1, descending=True, stable=True)
            keep = torch.zeros_like(order, dtype=torch.bool).scatter_(
                1, order[:, : self.kept], True
            )
            return keep.view(num_rows, num_columns)
        blocks = grid.mean((1, 3))
        flat = blocks if by_row else blocks.reshape(1, -1)
        num_zero = round(sparsity * flat.shape[1])
        order = flat.argsort(dim=1, descending=True, stable=True)
        keep = torch.zeros_like(order, dtype=torch.bool).scatter_(
            1, order[:, : flat.shape[1] - num_zero], True
        )
        spread = keep.view(blocks.shape)[:, None, :, None].expand(grid.shape)
        return spread.reshape(num_rows, num_columns)


def magnitude(weight_NK: torch.Tensor, pattern: Pattern, sparsity: float) -> torch.Tensor:
    """The smallest become 0."""
    return weight_NK * pattern.keep(weight_NK.abs(), sparsity)


def wanda(
    weight_NK: torch.Tensor, squares_K: torch.Tensor, pattern: Pattern, sparsity: float
) -> torch.Tensor:
    """The smallest of a row times the length of their inputs become 0. `squares_K`: of these
    lengths."""
    scores = weight_NK.abs() * squares_K.sqrt()
    return weight_NK * pattern.keep(scores, sparsity, by_row=True)


def inverse_factor(moments_KK: torch.Tensor, damping: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The upper Cholesky factor of the damped inverse, and which inputs are always 0."""
    return factor(moments_KK, False, damping)[1], moments_KK.diagonal() == 0


def sparsegpt(
    weight_NK: torch.Tensor,
    inverse: tuple[torch.Tensor, torch.Tensor],
    pattern: Pattern,
    sparsity: float,
    rounding: Rounding | None = None,
) -> torch.Tensor:
    """Column by column: what becomes 0 (and what rounding takes off) is made up for by the columns
    after it, as far as the inputs' second moments allow. `inverse`: of those, as `inverse_factor`
    gives it."""
    upper_KK, is_dead = inverse
    weight = weight_NK.float().clone()
    weight[:, is_dead] = 0
    num_columns = weight.shape[1]
    slab = max(_SLAB // pattern.columns, 1) * pattern.columns
    for first in range(0, num_columns, slab):
        end = min(first + slab, num_columns)
        own = upper_KK[first:end, first:end]
        importance = own.diagonal() ** 2
        # so that a column of the matrix is one piece of memory
        part_KN = weight[:, first:end].t().contiguous()
        errors_KN, keep_KN = torch.zeros_like(part_KN), torch.ones_like(part_KN)
        if not pattern.kept:
            keep_KN = (
                pattern.keep((part_KN.t() ** 2 / importance).contiguous(), sparsity)
                .t()
                .to(part_KN.dtype)
            )
        for i in range(end - first):
            if pattern.kept and i % pattern.columns == 0:
                some = slice(i, i + pattern.columns)
                scores = (part_KN[some].t() ** 2 / importance[some]).contiguous()
                keep_KN[some] = pattern.keep(scores, 0.0).t().to(part_KN.dtype)
            value = part_KN[i] * keep_KN[i]
            if rounding is not None:
                value = rounding(value)
            torch.div(part_KN[i] - value, own[i, i], out=errors_KN[i])
            part_KN[i] = value
            part_KN[i + 1 :].addr_(own[i, i + 1 :], errors_KN[i], alpha=-1)
        weight[:, first:end] = part_KN.t()
        weight[:, end:] -= errors_KN.t() @ upper_KK[first:end, end:]
    return weight


def sparse_integers(
    weight_NK: torch.Tensor,
    inverse: tuple[torch.Tensor, torch.Tensor],
    pattern: Pattern,
    sparsity: float,
    bits: int,
) -> IntWeight:
    """SparseGPT with what is left rounded in the same sweep, to integers with a scale for each row;
    0 stays 0. Scales are those of a sweep without rounding: what is left grows to make up for what
    goes."""
    grid = Grid(bits, 0, symmetric=True)
    scales, _ = fit(sparsegpt(weight_NK, inverse, pattern, sparsity), grid)
    row = scales[:, 0]
    pruned = sparsegpt(
        weight_NK,
        inverse,
        pattern,
        sparsity,
        lambda column: round_to(column, row, None, grid) * row,
    )
    return IntWeight(bits, round_to(pruned, scales, None, grid).short(), scales, weight_NK.shape[1])


# ---- structured: whole inputs of a matrix go


def fit_columns(
    weight_NK: torch.Tensor, moments_KK: torch.Tensor, kept: torch.Tensor, damping: float
) -> torch.Tensor:
    """[N, kept]: the matrix of the kept inputs whose outputs are nearest to those of all."""
    moments = moments_KK.double()
    own = moments[kept][:, kept]
    own = own + torch.diag((damping * own.diagonal().mean().clamp(min=1e-12)).expand(len(kept)))
    return torch.linalg.solve(own, moments[kept] @ weight_NK.double().t()).t().float()


def best_groups(scores_K: torch.Tensor, size: int, num_kept: int) -> torch.Tensor:
    """The columns of the groups of `size` neighbours with the highest sums, in order."""
    groups = scores_K.view(-1, size).sum(1)
    chosen = groups.argsort(descending=True, stable=True)[:num_kept].sort().values
    return (chosen.unsqueeze(1) * size + torch.arange(size, device=chosen.device)).flatten()
