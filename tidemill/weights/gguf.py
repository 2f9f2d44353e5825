"""GGUF files: header, metadata and tensor bytes, checked against the file's real size.

The reader of the `gguf` package takes seconds on a vocabulary of 50,000 tokens and trusts the
lengths it reads; the format is small, so the header is read here and the package only dequantizes.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tidemill.errors import CheckpointError
from tidemill.weights import gguf_iq

MAGIC = b"GGUF"
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
# Beyond what any model has; each bounds what a header can make this process allocate, whatever the
# file's size.
_MAX_TENSORS = 2**18
_MAX_ENTRIES = 2**22  # of all arrays together; a vocabulary of 262,144 tokens has a quarter of it
_MAX_NAME_BYTES = 2**16
_MAX_STRING_BYTES = 2**24
_ROWS_AT_ONCE = 2048  # dequantization makes temporaries several times the size of its result


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor: where its bytes lie and what they mean. Shape is outermost first."""

    name: str
    shape: tuple[int, ...]
    qtype: int
    raw: np.ndarray  # uint8, [rows, bytes per row], a view of the file

    @property
    def type_name(self) -> str:
        import gguf

        return gguf.GGMLQuantizationType(self.qtype).name

    @property
    def num_bytes(self) -> int:
        return self.raw.nbytes

    @property
    def block(self) -> int:
        """Values that are stored together."""
        import gguf

        return int(gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(self.qtype)][0])

    def columns(self, begin: int, end: int) -> GGUFTensor:
        """Whole blocks of the last dimension."""
        width = self.shape[-1]
        raw = self.raw[:, begin * self.raw.shape[1] // width : end * self.raw.shape[1] // width]
        return replace(self, raw=raw, shape=(*self.shape[:-1], end - begin))

    def read_into(self, out: np.ndarray) -> None:
        """Dequantize into float32, a slice of rows at a time."""
        import gguf

        rows = out.reshape(self.raw.shape[0], -1)
        qtype = gguf.GGMLQuantizationType(self.qtype)
        for start in range(0, rows.shape[0], _ROWS_AT_ONCE):
            part = np.ascontiguousarray(self.raw[start : start + _ROWS_AT_ONCE])
            if gguf_iq.can_read(qtype.name):
                gguf_iq.dequantize(qtype.name, part, rows[start : start + _ROWS_AT_ONCE])
                continue
            rows[start : start + _ROWS_AT_ONCE] = gguf.quants.dequantize(part, qtype).reshape(
                part.shape[0], -1
            )


class GGUFFile:
    """An open file: `metadata` (plain Python values) and `tensors` by name, in file order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}.") from error
        self._at = self._num_entries = 0
        if self._data[:4] != MAGIC:
            raise CheckpointError(f"{path} is not a GGUF file: it does not start with GGUF.")
        self._at = 4
        version = self._scalar("I", "version")
        if version not in (2, 3):
            raise CheckpointError(
                f"{path} is GGUF version {version}; versions 2 and 3 can be read."
            )
        num_tensors, num_keys = self._scalar("Q", "tensor count"), self._scalar("Q", "key count")
        self.metadata: dict[str, Any] = {}
        for i in range(self._count(num_keys, 13, "key count", _MAX_ENTRIES)):
            key = self._string(f"key {i}", _MAX_NAME_BYTES)
            self.metadata[key] = self._value(self._scalar("I", key), key)
        self.tensors = self._read_tensors(
            self._count(num_tensors, 24, "tensor count", _MAX_TENSORS)
        )

    def _read_tensors(self, num_tensors: int) -> dict[str, GGUFTensor]:
        import gguf

        entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for i in range(num_tensors):
            name = self._string(f"tensor {i}", _MAX_NAME_BYTES)
            if name in entries:
                raise self._broken(f"tensor {name} stands there twice")
            num_dims = self._scalar("I", name)
            if num_dims > _MAX_DIMS:
                raise self._broken(f"tensor {name} has {num_dims} dimensions")
            dims = tuple(self._scalar("Q", name) for _ in range(num_dims))
            entries[name] = dims, self._scalar("I", name), self._scalar("Q", name)
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 2**20:
            raise self._broken(f"general.alignment is {alignment!r}")
        base = -(-self._at // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        for name, (dims, qtype, offset) in entries.items():
            try:
                block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(qtype)]
            except (ValueError, KeyError):
                raise CheckpointError(
                    f"{self.path}: tensor {name} has the unknown type {qtype}."
                ) from None
            num_rows = 1
            for dim in dims[1:]:
                num_rows *= dim
            width = dims[0] if dims else 1
            if width % block or width == 0 or num_rows == 0:
                raise self._broken(
                    f"tensor {name} has shape {dims[::-1]}, not divisible into blocks of {block}"
                )
            row_bytes = width // block * block_bytes
            start, end = base + offset, base + offset + num_rows * row_bytes
            if end > len(self._data):
                raise CheckpointError(
                    f"{self.path} is truncated: tensor {name} ends at byte {end}, the file at byte {len(self._data)}.",
                    fix="Download it again.",
                )
            raw = np.frombuffer(self._data, np.uint8, num_rows * row_bytes, start).reshape(
                num_rows, row_bytes
            )
            tensors[name] = GGUFTensor(name, dims[::-1], qtype, raw)
        return tensors

    # ---- the pieces of a header, each checked before it is read

    def _broken(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is corrupt: {what}.", fix="Download it again.")

    def _need(self, num_bytes: int, what: str) -> None:
        if self._at + num_bytes > len(self._data):
            raise CheckpointError(
                f"{self.path} is truncated: {what} needs {num_bytes} bytes at {self._at}, the file has {len(self._data)}.",
                fix="Download it again.",
            )

    def _count(self, count: int, min_bytes: int, what: str, limit: int) -> int:
        """A number of things that each take at least `min_bytes`: no more than the file can hold,
        and than any model has."""
        self._need(count * min_bytes, what)
        if count > limit:
            raise self._broken(f"{what} is {count}, more than {limit}")
        return count

    def _length(self, length: int, min_bytes: int, key: str) -> int:
        """The length of an array."""
        self._num_entries += self._count(length, min_bytes, f"the length of {key}", _MAX_ENTRIES)
        self._count(self._num_entries, 0, "the number of all array entries", _MAX_ENTRIES)
        return length

    def _scalar(self, code: str, what: str) -> Any:
        size = struct.calcsize("<" + code)
        self._need(size, what)
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += size
        return value

    def _string(self, what: str, limit: int = _MAX_STRING_BYTES) -> str:
        length = self._count(self._scalar("Q", what), 1, what, limit)
        text = self._data[self._at : self._at + length].decode("utf-8", errors="replace")
        self._at += length
        return text

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind], key)
        if kind == _STRING:
            return self._string(key)
        if kind != _ARRAY:
            raise self._broken(f"key {key} has the unknown type {kind}")
        item_kind, length = self._scalar("I", key), self._scalar("Q", key)
        if item_kind in _SCALARS:
            code = _SCALARS[item_kind]
            size = struct.calcsize("<" + code)
            self._length(length, size, key)
            values = list(struct.unpack_from(f"<{length}{code}", self._data, self._at))
            self._at += length * size
            return values
        if item_kind == _STRING:
            return [self._string(key) for _ in range(self._length(length, 8, key))]
        raise self._broken(f"key {key} is an array of type {item_kind}")
