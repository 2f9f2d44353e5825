"""SafetensorsFile: an open safetensors file. Tensors are read from it, not mapped: no pages of the
file stay in this process, values go where they are wanted without a copy in between, and a file
that is cut off meanwhile is an error, not a signal."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tidemill.errors import CheckpointError

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BUFFER_BYTES = 2**20  # small enough to stay in a cache
_DEVICE_BUFFER_BYTES = 2**25


class SafetensorsFile:
    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            self._checked = safe_open(path, framework="pt")  # header, places and the file's length
            self._file = path.open("rb", buffering=0)
            size = int.from_bytes(self._file.read(8), "little")
            self._header: dict[str, Any] = json.loads(self._file.read(size))
        except (SafetensorError, OSError, ValueError) as error:
            raise self._corrupt(error) from error
        self._start = 8 + size

    def keys(self) -> list[str]:
        return list(self._checked.keys())

    def get_slice(self, name: str) -> Any:
        return self._checked.get_slice(name)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Mapped, of any type."""
        values: torch.Tensor = self._checked.get_tensor(name)
        return values

    def read_into(self, out: torch.Tensor, name: str, at: Sequence[int | slice]) -> None:
        """A stored tensor of a type in DTYPES, or a part of it: numbers first, then ranges of rows
        and columns."""
        about = self._header[name]
        dtype, shape, offset = (
            DTYPES[about["dtype"]],
            list(about["shape"]),
            self._start + about["data_offsets"][0],
        )
        inner = list(at)
        while inner and isinstance(inner[0], int):
            number, shape = inner.pop(0), shape[1:]
            assert isinstance(number, int)
            offset += number * math.prod(shape) * dtype.itemsize
        ranges = [
            one.indices(num)
            for one, num in zip(inner, shape, strict=False)
            if isinstance(one, slice)
        ]
        begin, end, _ = ranges[0] if ranges else (0, shape[0] if shape else 1, 1)
        row_shape, columns = shape[1:], tuple(slice(*one) for one in ranges[1:])
        row_bytes = math.prod(row_shape) * dtype.itemsize
        is_whole = all(one == (0, num, 1) for one, num in zip(ranges[1:], row_shape, strict=False))
        if is_whole and out.dtype == dtype and out.device.type == "cpu" and out.is_contiguous():
            self._read(out.view(-1), offset + begin * row_bytes)
            return
        wanted = [
            end - begin,
            *(len(range(*one)) for one in ranges[1:]),
            *row_shape[len(columns) :],
        ]
        places, most = (
            out.view(wanted),
            _BUFFER_BYTES if out.device.type == "cpu" else _DEVICE_BUFFER_BYTES,
        )
        num = max(1, most // max(row_bytes, 1))
        buffer = torch.empty([min(num, end - begin), *row_shape], dtype=dtype, device="cpu")
        for row in range(begin, end, num):
            rows = buffer[: min(num, end - row)]
            self._read(rows.view(-1), offset + row * row_bytes)
            places[row - begin : row - begin + num].copy_(rows[(slice(None), *columns)])

    def _read(self, values: torch.Tensor, offset: int) -> None:
        if not values.numel():
            return
        left = values.view(torch.uint8).numpy().data
        while left:
            try:
                num = os.preadv(self._file.fileno(), [left], offset)
            except OSError as error:
                raise self._corrupt(error) from error
            if not num:
                raise self._corrupt("it ends before its last tensor does")
            left, offset = left[num:], offset + num

    def _corrupt(self, why: object) -> CheckpointError:
        return CheckpointError(
            f"{self.path} is corrupt or truncated: {why}.", fix="Download it again."
        )
