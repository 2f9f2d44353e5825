"""Matrices of which every rank holds some rows, in memory that others read: before a layer
computes, they are put together."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tidemill.distributed.cuts import Cut, even
from tidemill.distributed.group import Group
from tidemill.distributed.shard import Shard
from tidemill.errors import ConfigError
from tidemill.kernels.linear import Held, Panels, PlacedMatrix, Weight
from tidemill.kernels.moe import ExpertWeights, NativeExperts
from tidemill.kernels.quantized_linear import QuantizedPanels
from tidemill.quant.base import ExpertParts, LinearMethod
from tidemill.quant.low_rank import plain
from tidemill.quant.streamed import of_expert, streamed_stack
from tidemill.types.model_config import MoESpec
from tidemill.weights.checkpoint import WeightTensor

LANES = 8  # rows of a matrix that the kernels keep together
_ALIGN = 64
_APART = 2**38  # bytes of the file between what two ranks write; what nobody writes takes no memory


def own_rows(num: int, shard: Shard) -> Cut:
    return even(num, shard, LANES)


@dataclass(frozen=True, slots=True)
class Stored:
    """The part of a matrix, or of several, that a rank holds: where in the file, and the bytes of
    eight rows of each array."""

    kind: int
    offsets: list[int]
    num_bytes: list[int]
    panel_bytes: list[int]
    shape: tuple[int, int] = (0, 0)  # of one matrix that others use as it is: in and out
    bias: int = -1  # of that one: where in the file, or -1


class SharedWeights:
    """The ranks' rows. `path`: a file in shared memory, or empty: each has its own in a file
    without a name."""

    def __init__(self, shard: Shard, path: str) -> None:
        self._shard, self.is_shared = shard, bool(path)
        self.fd = (
            os.open(Path(path), os.O_RDWR | os.O_CLOEXEC)
            if path
            else os.memfd_create("weights", os.MFD_CLOEXEC)
        )
        self._end = shard.rank * _APART
        self.held_bytes = 0
        self.own: dict[str, Stored] = {}
        self.of_ranks: list[dict[str, Stored]] = []
        self.file_bytes = self.changed_ns = 0

    def put(self, name: str, matrices: Sequence[Held], kind: int) -> None:
        offsets, sizes, panels = list[int](), list[int](), list[int]()
        for one in matrices:
            for array in (one.codes, one.scales):
                if array is None:
                    continue
                data = array.contiguous().view(torch.uint8).flatten().numpy()
                offsets.append(self._end)
                sizes.append(len(data))
                panels.append(len(data) // -(-one.num_out // LANES))
                self._write(data.data)
        self.own[name] = Stored(kind, offsets, sizes, panels)

    def put_whole(self, name: str, matrix: Held, bias: torch.Tensor | None) -> None:
        """A matrix that others multiply by where it lies."""
        self.put(name, [matrix], matrix.kind)
        at = self._end if bias is not None else -1
        if bias is not None:
            self._write(bias.contiguous().view(torch.uint8).numpy().data)
        self.own[name] = replace(self.own[name], shape=(matrix.num_in, matrix.num_out), bias=at)

    def map(self, rank: int) -> np.ndarray:
        """Maps the part that a rank holds into memory. This works only if all are on one host,
        after `finish`."""
        ends = [one.offsets[-1] + one.num_bytes[-1] for one in self.of_ranks[rank].values()]
        ends += [
            one.bias + 4 * one.shape[1] for one in self.of_ranks[rank].values() if one.bias >= 0
        ]
        first = rank * _APART
        return np.frombuffer(
            mmap.mmap(self.fd, max(ends) - first, prot=mmap.PROT_READ, offset=first), np.uint8
        )

    def _write(self, data: memoryview) -> None:
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self.fd, data[done:], self._end + done)
        except OSError as error:
            raise ConfigError(
                f"The ranks' weights do not fit in shared memory: {error.strerror}.",
                fix="Give /dev/shm the size of the model (in a container: --shm-size), or use --tensor-layout 1d.",
                param="tensor_layout",
            ) from error
        self._end += -(-len(data) // _ALIGN) * _ALIGN
        self.held_bytes += len(data)

    def finish(self, group: Group) -> None:
        """All have written theirs, and know what the others have."""
        mine = json.dumps({name: asdict(stored) for name, stored in self.own.items()}).encode()
        tables = [json.loads(group.broadcast_bytes(mine, rank)) for rank in range(group.size)]
        self.of_ranks = [
            {name: Stored(**stored) for name, stored in table.items()} for table in tables
        ]
        group.barrier()
        if self.is_shared and self._shard.rank == 0:
            os.ftruncate(self.fd, group.size * _APART)
        group.barrier()
        status = os.fstat(self.fd)
        self.file_bytes, self.changed_ns = status.st_size, status.st_mtime_ns

    @property
    def rank(self) -> int:
        return self._shard.rank

    @staticmethod
    def rank_of(offsets: np.ndarray) -> np.ndarray:
        """Whose bytes these are."""
        return offsets // _APART

    def read(self, offset: int, num_bytes: int) -> bytes:
        return os.pread(self.fd, num_bytes, offset)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Gathered(LinearMethod[Any]):
    """Another method's matrices, of which this rank reads and keeps some rows."""

    def __init__(
        self,
        inner: LinearMethod[Any],
        store: SharedWeights,
        name: str,
        num_in: int,
        nums_out: Sequence[int],
    ) -> None:
        super().__init__()
        self._inner, self._store, self.name, self._num_in, self._nums_out = (
            inner,
            store,
            name,
            num_in,
            nums_out,
        )
        self.matrix: PlacedMatrix | None = None

    def read(self, tensor: WeightTensor, row_order: torch.Tensor | None) -> Any:
        return plain(self._inner.read(tensor, row_order)) if tensor.shape[0] else None

    def join(self, parts: list[Any], bias: torch.Tensor | None) -> Weight:
        own = [part for part in parts if part is not None]
        if own:
            made = self._inner.join(own, None)
            if not isinstance(made, Panels | QuantizedPanels) or (
                isinstance(made, QuantizedPanels) and made.has_head
            ):
                raise ConfigError(
                    f"Weights quantized as those of {self.name} cannot be gathered.",
                    fix="Use --tensor-layout 1d, or --dtype float32.",
                    param="tensor_layout",
                )
            self._store.put(self.name, [made.held], made.held.kind)
        self.matrix = PlacedMatrix(0, self._num_in, sum(self._nums_out), bias)
        return self.matrix

    def join_experts(self, parts: ExpertParts[Any], spec: MoESpec) -> ExpertWeights:
        raise AssertionError("not for experts")

    def pieces(self, size: int) -> tuple[np.ndarray, list[int], int]:
        """The place in the file of the ranks' parts, the number of bytes, and the place in the
        whole; where the whole's arrays begin, and the bytes of all."""
        assert self.matrix is not None
        tables = [ranks.get(self.name) for ranks in self._store.of_ranks]
        there = [one for one in tables if one is not None]
        if len({(one.kind, tuple(one.panel_bytes)) for one in there}) > 1:
            raise ConfigError(
                f"{self.name}: ranks have parts of it that are quantized in different ways.",
                fix="Use --tensor-layout 1d, or --dtype float32.",
                param="tensor_layout",
            )
        self.matrix.kind = there[0].kind
        pieces, starts, end = list[tuple[int, int, int]](), list[int](), 0
        for array, panel in enumerate(there[0].panel_bytes):
            starts.append(end)
            offsets = [0 if one is None else one.offsets[array] for one in tables]
            for num_out in self._nums_out:
                for rank in range(size):
                    panels = -(-own_rows(num_out, Shard(rank, size)).num // LANES)
                    if panels:
                        pieces.append((offsets[rank], panels * panel, end))
                    offsets[rank] += panels * panel
                    end += panels * panel
            end += -end % _ALIGN
        return np.array(pieces, np.int64), starts, end


class Shown(LinearMethod[Any]):
    """Another method's matrices, as a rank has them, in memory that other ranks multiply by as
    well."""

    def __init__(self, inner: LinearMethod[Any], store: SharedWeights, name: str) -> None:
        super().__init__()
        self._inner, self._store, self.name = inner, store, name
        self.matrix: PlacedMatrix | None = None

    def read(self, tensor: WeightTensor, row_order: torch.Tensor | None) -> Any:
        return self._inner.read(tensor, row_order)

    def join(self, parts: list[Any], bias: torch.Tensor | None) -> Weight:
        made = self._inner.join(parts, bias)
        if not isinstance(made, Panels | QuantizedPanels):
            raise ConfigError(
                f"Weights as those of {self.name} cannot be used by several ranks.",
                fix="Use --tensor-layout 1d.",
                param="tensor_layout",
            )
        self._store.put_whole(self.name, made.held, bias)
        self.matrix = PlacedMatrix(made.held.kind, made.held.num_in, made.held.num_out, None)
        return self.matrix

    def join_experts(self, parts: ExpertParts[Any], spec: MoESpec) -> ExpertWeights:
        raise AssertionError("not for experts")

    def matrices(self, regions: Sequence[np.ndarray]) -> list[PlacedMatrix]:
        """The matrices of each rank, in the memory where that has its own. This rank's own is
        placed, too."""
        made = []
        for rank, region in enumerate(regions):
            stored, base = (
                self._store.of_ranks[rank][self.name],
                int(region.ctypes.data) - rank * _APART,
            )
            codes, *scales = (base + offset for offset in stored.offsets)
            made.append(PlacedMatrix(stored.kind, *stored.shape, None))
            bias = None if stored.bias < 0 else base + stored.bias
            for matrix in (made[-1], self.matrix) if rank == self._store.rank else (made[-1],):
                assert matrix is not None
                matrix.place(codes, scales[0] if scales else None, bias)
        return made


class GatheredExperts(LinearMethod[Any]):
    """Another method's experts, of which this rank reads and keeps some. The shared expert stays in
    memory."""

    def __init__(
        self, inner: LinearMethod[Any], store: SharedWeights, name: str, own: range
    ) -> None:
        super().__init__()
        self._inner, self._store, self.name, self._own = inner, store, name, own

    def read(self, tensor: WeightTensor, row_order: torch.Tensor | None) -> Any:
        return self._inner.read(tensor, row_order)

    def join(self, parts: list[Any], bias: torch.Tensor | None) -> Weight:
        return self._inner.join(parts, bias)

    def join_experts(self, parts: ExpertParts[Any], spec: MoESpec) -> ExpertWeights:
        made = self._inner.join_experts(parts, replace(spec, num_experts=len(self._own), top_k=1))
        assert isinstance(made, NativeExperts)
        gate_up, down, *shared = made.stacks
        about: list[list[int]] = []
        for i, number in enumerate(self._own):
            both = [of_expert(stack, i) for stack in (gate_up, down)]
            self._store.put(f"{self.name}.{number}", both, both[0].kind)
            about = [
                [one.kind, one.num_in, one.num_out, int(one.scales is not None)] for one in both
            ]
        first = self._store.own[f"{self.name}.{self._own.start}"]
        places = iter(places_of(first)[0])
        return NativeExperts(
            spec,
            streamed_stack(about[0], places),
            streamed_stack(about[1], places),
            (shared[0], shared[1]) if shared else None,  # type: ignore[arg-type]
        )


def places_of(stored: Stored) -> tuple[list[int], int]:
    """The offsets of arrays in a slot, and the bytes of all."""
    places, end = list[int](), 0
    for num in stored.num_bytes:
        places.append(end)
        end += -(-num // _ALIGN) * _ALIGN
    return places, end
