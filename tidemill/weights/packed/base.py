"""The common part of the layouts of quantized matrices: their stored pieces, how codes are
unpacked, and the checks of scales."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tidemill.errors import CheckpointError
from tidemill.kernels.quantized_linear import Codes
from tidemill.weights.slices import Inner

if TYPE_CHECKING:
    from tidemill.weights.checkpoint import WeightTensor

_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
_SCALES = ("F32", "F16", "BF16", "F8_E4M3", "F8_E8M0")
_FIX = "Quantize the model again, or download it again."


class Stored:
    """One tensor of a safetensors file, which is read when it is asked for."""

    def __init__(self, file: Any, name: str, path: Path) -> None:
        self._file, self.name, self._path = file, name, path
        view = file.get_slice(name)
        self.shape, self.dtype = tuple(view.get_shape()), str(view.get_dtype())
        self.num_bytes = math.prod(self.shape) * _BYTES.get(self.dtype, 1)

    def read(self) -> torch.Tensor:
        values: torch.Tensor = self._file.get_tensor(self.name)
        return values

    def view(self) -> Any:
        """The view of a part of it."""
        return self._file.get_slice(self.name)

    def check(self, dtypes: Sequence[str], shape: tuple[int | None, ...] | None = None) -> Stored:
        """That it has one of these types, and this shape, in which None stands for any size."""
        fits = shape is None or (
            len(shape) == len(self.shape)
            and all(wanted in (None, size) for wanted, size in zip(shape, self.shape, strict=True))
        )
        if self.dtype in dtypes and fits and all(self.shape):
            return self
        of_shape = (
            ""
            if shape is None
            else f" of shape {['any' if size is None else size for size in shape]}"
        )
        raise CheckpointError(
            f"{self._path}: tensor {self.name} is {self.dtype} {list(self.shape)}; {' or '.join(dtypes)}{of_shape} was expected.",
            fix=_FIX,
        )

    def scales(self, shape: tuple[int | None, ...] | None = None) -> torch.Tensor:
        """In float32, all finite."""
        values = self.check(_SCALES, shape).read().float()
        if not values.isfinite().all():
            raise CheckpointError(
                f"{self._path}: tensor {self.name} holds scales that are not finite.", fix=_FIX
            )
        return values

    def single(self) -> Stored:
        """That it is one number."""
        if math.prod(self.check(_SCALES).shape) != 1:
            raise self.broken(f"has shape {list(self.shape)}; it must be one number")
        return self

    def broken(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: tensor {self.name} {what}.", fix=_FIX)


class PackedTensor(ABC):
    """A quantized matrix of several stored tensors. `type_name`: what one value is, and how many
    share a scale (`-G128`, or `-C` where a row does)."""

    reads_rows = False

    def __init__(
        self, module: str, parts: Mapping[str, Stored], shape: tuple[int, ...], type_name: str
    ) -> None:
        self.name, self.shape, self.type_name = f"{module}.weight", shape, type_name
        self.num_bytes = sum(part.num_bytes for part in parts.values())

    @abstractmethod
    def codes(self) -> Codes | None: ...

    def read_into(self, out: torch.Tensor) -> None:
        codes = self.codes()
        assert codes is not None
        out.copy_(codes.dequantize())

    def matrix(self, number: int) -> WeightTensor:
        raise CheckpointError(f"Tensor {self.name} is one matrix, not a stack of them.")

    def rows(self, begin: int, end: int) -> WeightTensor:
        return Inner(self, 0, begin, end)

    def columns(self, begin: int, end: int) -> WeightTensor:
        return Inner(self, 1, begin, end)


class Scheme(ABC):
    """A layout. `parts`: endings of the names of the tensors that make up a matrix. `dropped`: of
    tensors that are not needed."""

    parts: tuple[str, ...]
    dropped: tuple[str, ...] = ()

    def __init__(self, settings: dict[str, Any], path: Path) -> None:
        self.path = path / "config.json"

    def split(self, name: str) -> tuple[str, str] | None:
        """Module and part, if the tensor is part of a quantized matrix."""
        for part in self.parts:
            if name.endswith(f".{part}"):
                return name[: -len(part) - 1], part
        return None

    @abstractmethod
    def tensor(self, module: str, parts: dict[str, Stored]) -> WeightTensor | None:
        """The matrix; None if its parts are tensors of their own, as those of modules that were not
        converted."""

    def refuse(self, what: str, fix: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}.", fix=fix)

    def number(self, settings: Mapping[str, Any], key: str, default: int | None = None) -> int:
        value = settings.get(key, default)
        if type(value) is not int or not -1 <= value < 2**31:
            raise self.refuse(
                f"{key} of quantization_config is {str(value)[:50]!r}", "It must be a whole number."
            )
        return value


def lacks(module: str, parts: Mapping[str, Stored], needed: Sequence[str]) -> None:
    """Raise if one of these is missing."""
    missing = [part for part in needed if part not in parts]
    if missing:
        raise CheckpointError(
            f"Of the quantized matrix {module}, the tensor {missing[0]} is missing.", fix=_FIX
        )


def unpack(words: torch.Tensor, bits: int, num: int) -> np.ndarray:
    """Unpacks `num` codes of so many bits from each row, the lowest bits first, without gaps: uint8
    [rows, num]."""
    raw = np.ascontiguousarray(words.numpy()).view(np.uint8).reshape(words.shape[0], -1)
    if bits == 8:
        return raw[:, :num]
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        return ((raw[:, :, None] >> shifts) & np.uint8(2**bits - 1)).reshape(raw.shape[0], -1)[
            :, :num
        ]
    flags = np.unpackbits(raw, axis=1, count=num * bits, bitorder="little").reshape(
        raw.shape[0], num, bits
    )
    return np.left_shift(flags, np.arange(bits, dtype=np.uint8)).sum(-1, dtype=np.uint8)


def num_words(bits: int, num: int) -> tuple[int, ...]:
    """The number of words of `num` codes: without gaps, or, as compressed-tensors wrote them until
    0.12, without codes that lie in two words."""
    return -(-num * bits // 32), -(-num // (32 // bits))


def unpack_words(words: torch.Tensor, bits: int, num: int) -> np.ndarray:
    """Unpacks `num` codes from each row of 32-bit words: uint8 [rows, num]. How many words there
    are tells whether they have gaps."""
    if words.shape[1] == num_words(bits, num)[0]:
        return unpack(words, bits, num)
    shifts = np.arange(0, 32 // bits * bits, bits, dtype=np.uint32)
    raw = np.ascontiguousarray(words.numpy()).view(np.uint32)
    codes = (raw[:, :, None] >> shifts) & np.uint32(2**bits - 1)
    return codes.astype(np.uint8).reshape(raw.shape[0], -1)[:, :num]


def unsigned_codes(
    values: np.ndarray, zeros: np.ndarray, bits: int
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Codes from 0 on and those that mean 0, as Codes has them: bits 4, or 8 and signed."""
    if bits <= 4:
        return (
            torch.from_numpy(np.ascontiguousarray(values)).view(torch.int8),
            torch.from_numpy(zeros.astype(np.float32)),
            4,
        )
    middle = 2 ** (bits - 1)
    codes = torch.from_numpy((values.astype(np.int16) - middle).astype(np.int8))
    return (
        codes,
        torch.from_numpy(zeros.astype(np.float32) - middle) if (zeros != middle).any() else None,
        8,
    )


def group_name(kind: str, group: int, width: int) -> str:
    return f"{kind}-C" if group >= width else f"{kind}-G{group}"
