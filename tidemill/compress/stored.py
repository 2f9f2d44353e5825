"""Compressed matrices: what is kept of each, the values it stands for, and its bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch

MARK = "#"  # between a matrix's name and a part's, in the state of a run


class Stored(ABC):
    """Fields are tensors, numbers or None."""

    kind: ClassVar[str]

    @abstractmethod
    def dequantize(self) -> torch.Tensor:
        """float32 [out, in]"""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """The number of bytes as written, packed."""

    def to_state(self, name: str) -> dict[str, torch.Tensor]:
        """Under names of its own, for the state of a run."""
        state = {}
        for field in fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is not None:
                tensor = (
                    value
                    if isinstance(value, torch.Tensor)
                    else torch.tensor(value, dtype=torch.float64)
                )
                state[f"{name}{MARK}{self.kind}{MARK}{field.name}"] = tensor
        return state

    @classmethod
    def from_state(cls, parts: dict[str, torch.Tensor]) -> Self:
        types: dict[str, Any] = {field.name: str(field.type) for field in fields(cls)}  # type: ignore[arg-type]
        return cls(
            **{
                name: value if "Tensor" in types[name] else _number(value, types[name])
                for name, value in parts.items()
            }
        )


def _number(value: torch.Tensor, kind: str) -> Any:
    number = value.item()
    return number if "float" in kind else bool(number) if "bool" in kind else int(number)


@dataclass(slots=True)
class IntWeight(Stored):
    """Integers times a scale of their group: (codes - zeros) * scales. Symmetric codes are signed
    and have no zeros; others count from 0. With `steps`, scales and zeros times scales are at most
    so many times a float16 number of 256 columns."""

    kind: ClassVar[str] = "int"
    bits: int
    codes_NK: torch.Tensor  # int16
    scales_NG: torch.Tensor  # float32, values of float16
    group: int  # columns that share a scale; the last group may have fewer
    zeros_NG: torch.Tensor | None = None  # int16, or float32: then zeros times scales are float16
    groups_K: torch.Tensor | None = None  # int32: each column's group, if they are not in order
    act_scale: float | None = None  # static: of activations
    act_per: int | None = None  # 0: the tensor, 1: the token; None: activations stay as they are
    threshold: float | None = None  # of LLM.int8(): larger activations stay as they are
    steps: int | None = None

    def column_groups(self) -> torch.Tensor:
        if self.groups_K is not None:
            return self.groups_K.long()
        return torch.arange(self.codes_NK.shape[1], device=self.codes_NK.device) // self.group

    def dequantize(self) -> torch.Tensor:
        index = self.column_groups()
        codes = self.codes_NK.float()
        if self.zeros_NG is not None:
            codes = codes - self.zeros_NG.float()[:, index]
        return codes * self.scales_NG[:, index]

    @property
    def num_bytes(self) -> int:
        if self.steps is not None:
            nums = self.scales_NG.numel() + (0 if self.zeros_NG is None else self.zeros_NG.numel())
            units = 2 * self.codes_NK.numel() // 256 * (1 if self.zeros_NG is None else 2)
            return (
                self.codes_NK.numel() * self.bits + nums * (8 if self.zeros_NG is None else 6)
            ) // 8 + units
        zeros = 0 if self.zeros_NG is None else self.zeros_NG.numel() * self.bits // 8
        order = 0 if self.groups_K is None else 4 * self.groups_K.numel()
        return (
            (self.codes_NK.numel() * self.bits + 7) // 8
            + 2 * self.scales_NG.numel()
            + zeros
            + order
        )


@dataclass(slots=True)
class Fp8Weight(Stored):
    """8-bit floats (E4M3) times a scale of their block."""

    kind: ClassVar[str] = "fp8"
    values_NK: torch.Tensor  # float8_e4m3fn
    scales: torch.Tensor  # float32 [rows / rows of a block, columns / columns of a block]
    block_rows: int
    block_columns: int
    act_scale: float | None = None
    act_per: int | None = None

    def dequantize(self) -> torch.Tensor:
        num_out, width = self.values_NK.shape
        tall = self.scales.repeat_interleave(self.block_rows, 0)[:num_out]
        return self.values_NK.float() * tall.repeat_interleave(self.block_columns, 1)[:, :width]

    @property
    def num_bytes(self) -> int:
        return self.values_NK.numel() + 4 * self.scales.numel()


@dataclass(slots=True)
class TableWeight(Stored):
    """Numbers of a table, times the largest absolute value of a block of consecutive values (NF4),
    which may be quantized itself: 8-bit numbers of a second table times a scale for every so many,
    plus an offset."""

    kind: ClassVar[str] = "table"
    codes_NK: torch.Tensor  # uint8
    table: torch.Tensor  # float32
    block: int
    largest: torch.Tensor | None = None  # float32, of each block
    nested_codes: torch.Tensor | None = None  # uint8
    nested_table: torch.Tensor | None = None  # float32 [256]
    nested_largest: torch.Tensor | None = None  # float32
    nested_block: int | None = None
    nested_offset: float | None = None

    def of_blocks(self) -> torch.Tensor:
        if self.largest is not None:
            return self.largest
        assert self.nested_codes is not None
        assert self.nested_table is not None
        assert self.nested_largest is not None
        wide = self.nested_largest.repeat_interleave(self.nested_block or 1)[
            : self.nested_codes.numel()
        ]
        return self.nested_table[self.nested_codes.long()] * wide + (self.nested_offset or 0.0)

    def dequantize(self) -> torch.Tensor:
        wide = self.of_blocks().repeat_interleave(self.block)[: self.codes_NK.numel()]
        return self.table[self.codes_NK.long()] * wide.view(self.codes_NK.shape)

    @property
    def num_bytes(self) -> int:
        floats = [self.largest, self.nested_largest, self.nested_table, self.table]
        nested = 0 if self.nested_codes is None else self.nested_codes.numel()
        return (
            self.codes_NK.numel() // 2
            + nested
            + sum(4 * tensor.numel() for tensor in floats if tensor is not None)
        )


@dataclass(slots=True)
class CentroidWeight(Stored):
    """Each value is one of a few centroids of the matrix; the values far from the others are kept
    as they are (GOBO)."""

    kind: ClassVar[str] = "centroids"
    bits: int
    codes_NK: torch.Tensor  # uint8
    centroids: torch.Tensor  # float32 [2 ** bits]
    places: torch.Tensor  # int32: outliers' places among all values
    outliers: torch.Tensor  # float32

    def dequantize(self) -> torch.Tensor:
        values = self.centroids[self.codes_NK.long()]
        values.view(-1)[self.places.long()] = self.outliers
        return values

    @property
    def num_bytes(self) -> int:
        return (
            (self.codes_NK.numel() * self.bits + 7) // 8
            + 4 * self.centroids.numel()
            + 8 * self.places.numel()
        )


KINDS: dict[str, type[Stored]] = {
    weight_class.kind: weight_class
    for weight_class in (IntWeight, Fp8Weight, TableWeight, CentroidWeight)
}


def from_state(
    tensors: dict[str, torch.Tensor],
) -> tuple[dict[str, Stored], dict[str, torch.Tensor]]:
    """A layer's state: compressed matrices by name, and other tensors that were changed."""
    parts: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
    dense = {}
    for key, value in tensors.items():
        name, mark, rest = key.partition(MARK)
        if not mark:
            dense[key] = value
            continue
        kind, _, field = rest.partition(MARK)
        parts.setdefault((name, kind), {})[field] = value
    return {
        name: KINDS[kind].from_state(fields_of) for (name, kind), fields_of in parts.items()
    }, dense
