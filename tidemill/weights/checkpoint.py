"""One interface to checkpoints of every format: their metadata, and their tensors one by one."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from tidemill.errors import CheckpointError
from tidemill.kernels.quantized_linear import Codes, concat, quantize
from tidemill.types.weight_types import PLAIN_TYPES
from tidemill.weights.choose import parts
from tidemill.weights.gguf import GGUFFile, GGUFTensor
from tidemill.weights.gguf_codes import can_read, read_codes
from tidemill.weights.locate import OTHER_FORMAT, read_json, shards, weight_files
from tidemill.weights.packed.base import Scheme
from tidemill.weights.packed.scheme import gathered, read_scheme
from tidemill.weights.safetensors_file import SafetensorsFile
from tidemill.weights.slices import Inner

_ROWS_AT_ONCE = 2048


class WeightTensor(Protocol):
    """A stored tensor that has not been read yet."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def type_name(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def reads_rows(self) -> bool:
        """Its format reads some rows as fast as all, each once."""
        ...

    def read_into(self, out: torch.Tensor) -> None:
        """Write the values into `out`, a tensor of the same shape: float32, or the stored type if
        that is a 16-bit one."""
        ...

    def codes(self) -> Codes | None:
        """The matrix as it is quantized; None if it is not."""
        ...

    def matrix(self, number: int) -> WeightTensor:
        """One of a stack of matrices."""
        ...

    def rows(self, begin: int, end: int) -> WeightTensor:
        """Neighbouring rows: `num_bytes` and what is read are theirs."""
        ...

    def columns(self, begin: int, end: int) -> WeightTensor:
        """Some neighbouring columns of a matrix; bytes as above, and those of blocks that the cut
        goes through."""
        ...


class RandomTensor:
    """Stands in for a stored tensor where only its shape matters. Norms near 1, matrices small
    enough to keep activations so. By the name alone, so that ranks agree about what all of them
    have."""

    type_name = "BF16"
    reads_rows = False

    def __init__(self, name: str, shape: tuple[int, ...], num_in: int = 0, place: str = "") -> None:
        """`num_in`, `place`: of a part of a matrix, the columns of the whole, and which part it is."""
        self.name, self.shape, self.num_bytes = name, shape, 0
        self._num_in, self._place = num_in or shape[-1], place

    def read_into(self, out: torch.Tensor) -> None:
        if len(self.shape) == 1:
            out.fill_(0.0 if self.name.endswith(".bias") else 1.0)
        else:
            source = torch.Generator(out.device).manual_seed(
                zlib.crc32(f"{self.name}{self._place}".encode())
            )
            out.normal_(0.0, self._num_in**-0.5, generator=source)

    def codes(self) -> None:
        return None

    def matrix(self, number: int) -> RandomTensor:
        return self._part(self.shape[1:], f"[{number}]")

    def rows(self, begin: int, end: int) -> RandomTensor:
        return self._part((end - begin, *self.shape[1:]), f"[{begin}:]")

    def columns(self, begin: int, end: int) -> RandomTensor:
        return self._part((self.shape[0], end - begin), f"[:, {begin}:]")

    def _part(self, shape: tuple[int, ...], place: str) -> RandomTensor:
        return RandomTensor(self.name, shape, self._num_in, self._place + place)


class Checkpoint(Protocol):
    path: Path
    format: str  # "gguf" or "hf"
    architecture: str  # as the format names it
    metadata: dict[str, Any]

    @property
    def has_weights(self) -> bool:
        """False: only the configuration is there."""
        ...

    @property
    def num_bytes(self) -> int: ...
    def tensors(self) -> Iterator[WeightTensor]: ...


class PartOf:
    """A checkpoint read by another configuration than its own, without the tensors whose names
    match `left_out`."""

    def __init__(self, whole: Checkpoint, metadata: dict[str, Any], left_out: str = "") -> None:
        self.path, self.format, self.architecture = whole.path, whole.format, whole.architecture
        self.metadata, self._whole, self._left_out = metadata, whole, left_out

    @property
    def has_weights(self) -> bool:
        return self._whole.has_weights

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors())

    def tensors(self) -> Iterator[WeightTensor]:
        return (
            tensor
            for tensor in self._whole.tensors()
            if not re.fullmatch(self._left_out, tensor.name)
        )


def open_checkpoint(path: Path) -> Checkpoint:
    return SafetensorsCheckpoint(path) if path.is_dir() else GGUFCheckpoint(path)


class _FromGGUF:
    reads_rows = True

    def __init__(self, tensor: GGUFTensor) -> None:
        self._tensor = tensor
        self.name, self.shape, self.type_name = tensor.name, tensor.shape, tensor.type_name
        self.num_bytes = tensor.num_bytes

    def read_into(self, out: torch.Tensor) -> None:
        direct = out.dtype == torch.float32 and out.device.type == "cpu"
        values = out if direct else torch.empty(out.shape, dtype=torch.float32, device="cpu")
        try:
            self._tensor.read_into(values.numpy())
        except NotImplementedError as error:
            raise CheckpointError(
                f"Tensor {self.name} has type {self.type_name}, which cannot be dequantized."
            ) from error
        if values is not out:
            out.copy_(values)

    def codes(self) -> Codes | None:
        if self.type_name in PLAIN_TYPES:
            return None
        rows = np.ascontiguousarray(self._tensor.raw).reshape(self.shape[0], -1)
        if can_read(self.type_name):
            codes = read_codes(self.type_name, rows)
        else:  # a slice of rows at a time: the floats in between are several times the result
            codes = concat(
                [
                    self._quantized(rows[i : i + _ROWS_AT_ONCE])
                    for i in range(0, self.shape[0], _ROWS_AT_ONCE)
                ]
            )
        if not all(
            values.isfinite().all()
            for values in (codes.scales_NG, codes.offsets_NG)
            if values is not None
        ):
            raise CheckpointError(
                f"Tensor {self.name} ({self.type_name}) holds scales that are not finite in 16 bits.",
                fix="Use --dtype float32.",
            )
        return codes

    def matrix(self, number: int) -> _FromGGUF:
        num_rows = self._tensor.raw.shape[0] // self.shape[0]
        rows = self._tensor.raw[number * num_rows : (number + 1) * num_rows]
        return _FromGGUF(replace(self._tensor, raw=rows, shape=self.shape[1:]))

    def rows(self, begin: int, end: int) -> WeightTensor:
        if len(self.shape) == 1:  # stored as one row
            return _FromGGUF(self._tensor.columns(begin, end))
        per_row = self._tensor.raw.shape[0] // self.shape[0]
        raw = self._tensor.raw[begin * per_row : end * per_row]
        return _FromGGUF(replace(self._tensor, raw=raw, shape=(end - begin, *self.shape[1:])))

    def columns(self, begin: int, end: int) -> WeightTensor:
        block = self._tensor.block
        first, last = begin // block * block, min(-(-end // block) * block, self.shape[1])
        whole = _FromGGUF(self._tensor.columns(first, last))
        return (
            whole if (first, last) == (begin, end) else Inner(whole, 1, begin - first, end - first)
        )

    def _quantized(self, raw: np.ndarray) -> Codes:
        part = replace(self._tensor, raw=raw, shape=(raw.shape[0], *self.shape[1:]))
        values = torch.empty(part.shape, dtype=torch.float32, device="cpu")
        try:
            part.read_into(values.numpy())
        except NotImplementedError as error:
            raise CheckpointError(
                f"Tensor {self.name} has type {self.type_name}, which cannot be dequantized."
            ) from error
        return quantize(values)


class GGUFCheckpoint:
    format = "gguf"
    has_weights = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = [GGUFFile(part) for part in parts(path)]
        self.metadata = self._files[0].metadata  # of a split model, the first part has all keys
        architecture = self.metadata.get("general.architecture")
        if not isinstance(architecture, str):
            raise CheckpointError(
                f"{path} does not say its architecture: key general.architecture is missing."
            )
        self.architecture = architecture
        self._check_parts()

    def _check_parts(self) -> None:
        """That the files belong together."""
        stated = self.metadata.get("split.count", 1)
        if stated != len(self._files) and stated not in (0, 1):
            raise CheckpointError(
                f"{self.path} is part of a model in {stated} files.",
                fix="Keep their names, like model-00001-of-00003.gguf.",
            )
        names: set[str] = set()
        for number, file in enumerate(self._files):
            if len(self._files) > 1 and file.metadata.get("split.no") != number:
                raise CheckpointError(
                    f"{file.path} is not part {number + 1}: key split.no is {file.metadata.get('split.no')!r}."
                )
            if twice := names & file.tensors.keys():
                raise CheckpointError(
                    f"{file.path} holds tensor {min(twice)}, which an earlier part holds, too."
                )
            names |= file.tensors.keys()
        expected = self.metadata.get("split.tensors.count", len(names))
        if len(self._files) > 1 and expected != len(names):
            raise CheckpointError(
                f"The parts of {self.path} hold {len(names)} tensors, not {expected}.",
                fix="Download them again.",
            )

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for file in self._files for tensor in file.tensors.values())

    def tensors(self) -> Iterator[WeightTensor]:
        for file in self._files:
            for tensor in file.tensors.values():
                yield _FromGGUF(tensor)


class _FromSafetensors:
    """`at`: of one of a stack of matrices, of rows or of columns, what the stored tensor is indexed
    by; empty: the whole."""

    reads_rows = True

    def __init__(
        self, file: SafetensorsFile, name: str, path: Path, at: tuple[int | slice, ...] = ()
    ) -> None:
        self._file, self.name, self._path, self._at = file, name, path, at
        view = file.get_slice(name)
        stored = tuple(view.get_shape())
        places = zip(at + (slice(None),) * (len(stored) - len(at)), stored, strict=True)
        self.shape = tuple(
            len(range(num)[place]) for place, num in places if isinstance(place, slice)
        )
        self.type_name = str(view.get_dtype())
        self.num_bytes = math.prod(self.shape) * _SAFETENSORS_BYTES.get(self.type_name, 4)

    def read_into(self, out: torch.Tensor) -> None:
        if self.type_name not in _SAFETENSORS_BYTES:
            raise CheckpointError(
                f"Tensor {self.name} in {self._path} has type {self.type_name}.",
                fix=f"Only {', '.join(_SAFETENSORS_BYTES)} can be read.",
            )
        self._file.read_into(out, self.name, self._at)

    def codes(self) -> Codes | None:
        return None

    def matrix(self, number: int) -> _FromSafetensors:
        return _FromSafetensors(self._file, self.name, self._path, (number,))

    def rows(self, begin: int, end: int) -> _FromSafetensors:
        return self._narrowed(0, begin, end)

    def columns(self, begin: int, end: int) -> _FromSafetensors:
        return self._narrowed(1, begin, end)

    def _narrowed(self, dim: int, begin: int, end: int) -> _FromSafetensors:
        at = list(self._at) + [slice(None)] * (
            dim + 1 - sum(isinstance(place, slice) for place in self._at)
        )
        number = [i for i, place in enumerate(at) if isinstance(place, slice)][dim]
        before = at[number]
        assert isinstance(before, slice)
        first = before.start or 0
        at[number] = slice(first + begin, first + end)
        return _FromSafetensors(self._file, self.name, self._path, tuple(at))


_SAFETENSORS_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class SafetensorsCheckpoint:
    """A Hugging Face folder: config.json and one or many safetensors files."""

    format = "hf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata = read_json(path / "config.json")
        architectures = self.metadata.get("architectures")
        if (
            not isinstance(architectures, list)
            or not architectures
            or not isinstance(architectures[0], str)
        ):
            raise CheckpointError(
                f"{path / 'config.json'} names no architecture: key architectures is missing."
            )
        self.architecture = architectures[0]
        self._scheme = read_scheme(self.metadata.get("quantization_config"), path)

    @property
    def has_weights(self) -> bool:
        return bool(weight_files(self.path))

    def _files(self) -> list[Path]:
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            files = shards(index)
            for file in files:
                if not file.is_file():
                    raise CheckpointError(
                        f"{index} lists {file.name}, which is not there.", fix="Download it again."
                    )
            return files
        files = weight_files(self.path)
        if not files:
            if any(self.path.glob(f"{OTHER_FORMAT}*.safetensors")):
                raise CheckpointError(
                    f"{self.path} holds weights in Mistral's own format alone ({OTHER_FORMAT}*.safetensors).",
                    fix="Download the repository's model*.safetensors, too, or convert these with Transformers' script.",
                )
            raise CheckpointError(
                f"{self.path} holds no safetensors file.",
                fix="Files that need unpickling (.bin, .pth) are not read: convert them to safetensors.",
            )
        return files

    @property
    def num_bytes(self) -> int:
        return sum(file.stat().st_size for file in self._files())

    def tensors(self) -> Iterator[WeightTensor]:
        from safetensors import SafetensorError

        path = self.path
        try:
            if self._scheme is not None:
                yield from self._gathered(self._scheme)
                return
            for path in self._files():
                file = SafetensorsFile(path)
                for name in file.keys():  # noqa: SIM118 - not a dict
                    yield _FromSafetensors(file, name, path)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is corrupt or truncated: {error}.", fix="Download it again."
            ) from error

    def _gathered(self, scheme: Scheme) -> Iterator[WeightTensor]:
        """The quantized matrices. Several stored tensors are one matrix; they may lie in different
        files, so all are open."""
        for found in gathered(scheme, [(path, SafetensorsFile(path)) for path in self._files()]):
            yield _FromSafetensors(*found) if isinstance(found, tuple) else found
