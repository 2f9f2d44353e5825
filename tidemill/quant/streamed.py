"""Matrices that go to a file of prepared weights instead of staying in memory, and come back from
it as they are needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tidemill.errors import ConfigError
from tidemill.kernels.linear import Held, Panels, PlacedMatrix, Weight
from tidemill.kernels.memory import memory
from tidemill.kernels.moe import ExpertWeights, NativeExperts, Stack, StreamedStack
from tidemill.kernels.quantized_linear import QuantizedPanels
from tidemill.quant.base import ExpertParts, LinearMethod
from tidemill.quant.low_rank import plain
from tidemill.types.model_config import MoESpec
from tidemill.weights.checkpoint import WeightTensor
from tidemill.weights.prepared import Folder, Item, PreparedFile


class Store:
    """Prepared weights of a model: a file that is there, or one that is written as the checkpoint
    is read."""

    def __init__(self, folder: Folder, key: str, num_bytes: int) -> None:
        """`num_bytes`: what a new file will have at most."""
        self.file: PreparedFile | None = folder.open(key)
        self.is_new = self.file is None
        self._writer = folder.write(key, num_bytes) if self.is_new else None

    def put(self, name: str, matrices: list[Held], about: dict[str, Any]) -> None:
        assert self._writer is not None
        arrays = [
            array for one in matrices for array in (one.codes, one.scales) if array is not None
        ]
        self._writer.put(name, arrays, about)

    def put_array(self, name: str, array: torch.Tensor, about: dict[str, Any]) -> None:
        assert self._writer is not None
        self._writer.put(name, [array], about)

    def about(self, name: str) -> dict[str, Any]:
        return self.item(name).about

    def item(self, name: str) -> Item:
        source = self.file if self.file is not None else self._writer
        assert source is not None
        return source.items[name]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Nothing is left behind if the model cannot be loaded."""
        try:
            yield
        except BaseException:
            if self._writer is not None:
                self._writer.discard()
            raise

    def finish(self) -> PreparedFile:
        """All matrices are there."""
        if self._writer is not None:
            self.file, self._writer = self._writer.finish(), None
        assert self.file is not None
        return self.file


class Streamed(LinearMethod[Any]):
    """Another method's matrices, under names in a store."""

    def __init__(self, inner: LinearMethod[Any], store: Store, name: str) -> None:
        super().__init__()
        self._inner, self._store, self.name = inner, store, name

    def read(self, tensor: WeightTensor, row_order: torch.Tensor | None) -> Any:
        """Nothing, if the store has it."""
        return plain(self._inner.read(tensor, row_order)) if self._store.is_new else ()

    def join(self, parts: list[Any], bias: torch.Tensor | None) -> Weight:
        if self._store.is_new:
            made = self._inner.join(parts, None)
            if not isinstance(made, Panels | QuantizedPanels):
                raise ConfigError(
                    f"Weights quantized as those of {self.name}, whose parts differ, cannot be streamed.",
                    fix="Leave --weight-memory out.",
                    param="weight_memory_bytes",
                )
            self._store.put(self.name, [made.held], {"matrix": _about(made.held)})
        kind, num_in, num_out, _ = self._store.about(self.name)["matrix"]
        return PlacedMatrix(kind, num_in, num_out, bias)

    def join_experts(self, parts: ExpertParts[Any], spec: MoESpec) -> ExpertWeights:
        shared = None
        if self._store.is_new:
            made = self._inner.join_experts(parts, spec)
            assert isinstance(made, NativeExperts)
            shared = self._put_experts(made, spec.num_experts)
        elif spec.shared_size:
            shared = self._read_shared()
        item = self._store.item(self.expert(0))
        places = iter(item.starts)
        gate_up, down = (streamed_stack(item.about[side], places) for side in ("gate_up", "down"))
        gate_up.bias, down.bias = parts.gate_up_bias, parts.down_bias
        return NativeExperts(spec, gate_up, down, shared)

    def expert(self, number: int) -> str:
        """Its name in the store."""
        return f"{self.name}.{number}"

    def _put_experts(self, made: NativeExperts, num_experts: int) -> tuple[Stack, Stack] | None:
        """Returns the shared expert, which stays in memory."""
        stacks = [stack for stack in made.stacks if isinstance(stack, Stack)]
        gate_up, down, *shared = stacks
        for number in range(num_experts):
            self._put_pair(self.expert(number), gate_up, down, number)
        if not shared:
            return None
        self._put_pair(f"{self.name}.shared", shared[0], shared[1], 0)
        return shared[0], shared[1]

    def _put_pair(self, name: str, gate_up: Stack, down: Stack, number: int) -> None:
        both = [of_expert(stack, number) for stack in (gate_up, down)]
        self._store.put(name, both, {"gate_up": _about(both[0]), "down": _about(both[1])})

    def _read_shared(self) -> tuple[Stack, Stack]:
        item, file = self._store.item(f"{self.name}.shared"), self._store.file
        assert file is not None
        data = memory(item.num_bytes)
        file.read(item, data)
        ends = iter([*item.starts[1:], item.num_bytes])
        arrays = iter(
            [
                torch.from_numpy(data[start:end])[None]
                for start, end in zip(item.starts, ends, strict=True)
            ]
        )
        made = []
        for side in ("gate_up", "down"):
            kind, num_in, num_out, has_scales = item.about[side]
            made.append(
                Stack(
                    kind,
                    num_in,
                    num_out,
                    next(arrays),
                    next(arrays).view(torch.int16) if has_scales else None,
                )
            )
        return made[0], made[1]


def of_expert(stack: Stack, number: int) -> Held:
    scales = None if stack.scales is None else stack.scales[number]
    return Held(stack.kind, stack.num_in, stack.num_out, stack.codes[number], scales)


def _about(matrix: Held) -> list[int]:
    return [matrix.kind, matrix.num_in, matrix.num_out, int(matrix.scales is not None)]


def streamed_stack(about: list[int], places: Iterator[int]) -> StreamedStack:
    kind, num_in, num_out, has_scales = about
    return StreamedStack(kind, num_in, num_out, next(places), next(places) if has_scales else None)
