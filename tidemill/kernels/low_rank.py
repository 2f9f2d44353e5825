"""y = x (b a)ᵀ + bias as two matmuls, of one or several matrices side by side."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from tidemill.kernels.linear import Weight
from tidemill.kernels.parts import side_by_side


@dataclass(slots=True)
class Factors:
    """A matrix [N, K] as a product b a, not yet in any kernel's layout."""

    b_NR: torch.Tensor
    a_RK: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.b_NR.shape[0], self.a_RK.shape[1]

    def take(self, rows: torch.Tensor) -> Factors:
        return Factors(self.b_NR[rows.to(self.b_NR.device)], self.a_RK)

    def product(self) -> torch.Tensor:
        return self.b_NR.float() @ self.a_RK.float()


class Product(Weight):
    """The product of two weights: first by `a`, then by `b`."""

    def __init__(self, b: Weight, a: Weight) -> None:
        self.b, self.a = b, a

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x_TK))

    def compile(self, nums_rows: Collection[int]) -> None:
        self.a.compile(nums_rows)
        self.b.compile(nums_rows)

    def prepare(self, nums_rows: Collection[int]) -> None:
        self.a.prepare(nums_rows)
        self.b.prepare(nums_rows)

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        raise AssertionError("not a table")


class SideBySide(Weight):
    """Matmuls of one input, their outputs side by side. On a CPU."""

    def __init__(self, parts: list[Weight]) -> None:
        self.parts = parts

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        return side_by_side([part(x_TK) for part in self.parts])

    def rows(self, ids_T: torch.Tensor) -> torch.Tensor:
        raise AssertionError("not a table")
