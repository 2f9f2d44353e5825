"""Attention by the compiled kernel: one call a layer rotates, writes the cache and attends
(native/attention.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tidemill.kernels import native
from tidemill.kernels.kv_cache import PLAIN, HeadWeights, PagedKV
from tidemill.kernels.kvquant import KVQuantLayer, bounds_of
from tidemill.kernels.native import structs
from tidemill.kernels.native.program import Program
from tidemill.kernels.policies import NUMBERS, Placed, Round, RowPolicy
from tidemill.kernels.trees import Paths
from tidemill.types.coverage import uncovered

# Rows, which are (token, query head of a KV head's group), of a tile: larger ones copy keys and
# values less often, smaller ones keep more threads busy. Bits do not depend on it.
_MIN_TILE_ROWS, _MAX_TILE_ROWS = 32, 192  # the latter as in attention.c
_TASKS_PER_THREAD = 8
_TILE_FIELDS = ("tile_token", "tile_len", "tile_start", "tile_row", "tile_end")
_BLOCK = 32  # keys; as in attention.c
# as in tidemill.h
_FORMATS = {
    "float32": 0,
    "bfloat16": 1,
    "float16": 2,
    "int8": 3,
    "int4": 4,
    "kvquant4": 5,
    "kvquant3": 6,
}
_MAX_CODE_DIM = 1024  # as in kv_codes.h and kvquant.c


@dataclass(frozen=True, slots=True)
class _Tiles:
    fields: np.ndarray  # `_TILE_FIELDS`
    paths: tuple[np.ndarray, np.ndarray] | None  # bases and places


class NativeAttention:
    def __init__(self, kv: PagedKV) -> None:
        assert native.lib is not None
        self.kv, self._lib = kv, native.lib
        self._group = max(spec.num_heads // spec.num_kv_heads for spec in kv.specs)
        self._num_tasks = max(spec.num_kv_heads for spec in kv.specs)  # of a tile
        biases = kv.by_distance()
        # layers may share one
        tables = {id(bias): None if bias is None else _bias_table(bias) for bias in biases}
        self._biases = [tables[id(bias)] for bias in biases]
        self._quants = (
            [] if kv.quant is None else [_quant(kv.quant.layer(i)) for i in range(len(kv.specs))]
        )
        self._specs = [_spec(kv, layer, bias) for layer, bias in enumerate(self._biases)]
        for own, (quant, _) in zip(self._specs, self._quants, strict=False):
            own.quant = ctypes.addressof(quant)
        for number, spec in enumerate(self._specs):
            spec.number = number
        self._layers = [
            _Layer(
                ctypes.addressof(own),
                keys.values.data_ptr(),
                values.values.data_ptr(),
                spec.num_inner,
            )
            for own, (keys, values), spec in zip(self._specs, kv.parts, kv.specs, strict=True)
        ]
        self._tables = (ctypes.c_void_p * len(kv.tables))(
            *(table.data_ptr() for table in kv.tables)
        )
        self._every_step = structs.Step(
            page_size=kv.page_size,
            page_bytes=kv.cache.stride(0) * kv.cache.element_size(),
            table_width=kv.tables[0].stride(0),
            kv_format=_FORMATS[kv.format.name],
            tables=ctypes.addressof(self._tables),
        )

    @staticmethod
    def can_run(kv: PagedKV) -> bool:
        return native.lib is not None and not NativeAttention.uncovered(kv)

    @staticmethod
    def uncovered(kv: PagedKV) -> str:
        """The features of this cache or its layers that the kernel does not do, or empty."""
        if kv.page_size & (kv.page_size - 1):
            return f"the C attention kernel takes pages of a power of two, not of {kv.page_size}"
        if kv.format.name not in _FORMATS:
            return f"the C attention kernel does not read keys and values in {kv.format.name}"
        if kv.scales is not None and kv.head_dim > _MAX_CODE_DIM:
            return (
                f"the C attention kernel takes heads of up to {_MAX_CODE_DIM} in {kv.format.name}"
            )
        if any(spec.num_heads // spec.num_kv_heads > _MIN_TILE_ROWS for spec in kv.specs):
            return f"the C attention kernel takes up to {_MIN_TILE_ROWS} query heads a KV head"
        return uncovered("C", kv.specs, (), kv.format.name)

    def plan(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        positions_T: torch.Tensor,
        slots_GT: torch.Tensor,
        paths: Paths | None = None,
    ) -> NativeStep:
        tiles = self._tiles(rows, np.cumsum(counts) - counts, starts, counts, paths)
        step = self._step(tiles, positions_T, slots_GT)
        return NativeStep(
            self._lib, ctypes.addressof(step), self._layers, (step, tiles, positions_T, slots_GT)
        )

    def plan_policies(
        self,
        rounds: Sequence[Round],
        positions_T: torch.Tensor,
        slots_GT: torch.Tensor,
        paths: Paths | None = None,
    ) -> NativeStep:
        """A step in which some rows have a KV policy. The first round is the step's own."""
        tiles = [
            self._tiles(one.rows, one.tokens, one.slots, one.counts, one.paths(paths))
            for one in rounds
        ]
        steps = [self._step(of_round, positions_T, slots_GT) for of_round in tiles]
        made, alive = (structs.Round * len(rounds))(), list[Any]()
        for i, one in enumerate(rounds):
            segments, policies = _segments(one.segments)
            alive += [segments, policies]
            made[i] = structs.Round(
                len(one.segments),
                ctypes.addressof(segments),
                ctypes.addressof(steps[i]) if i else None,
            )
        steps[0].num_rounds, steps[0].rounds = len(rounds), ctypes.addressof(made)
        kept = (*steps, made, alive, tiles, positions_T, slots_GT)
        return NativeStep(self._lib, ctypes.addressof(steps[0]), self._layers, kept)

    def _tiles(
        self,
        rows: np.ndarray,
        first_token: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        paths: Paths | None,
    ) -> _Tiles:
        """`starts`: where in the cache the first tokens are."""
        balanced = (
            int(counts.sum()) * self._num_tasks // (_TASKS_PER_THREAD * self._lib.num_threads)
        )
        tile_tokens = min(
            max(balanced, _MIN_TILE_ROWS // self._group), _MAX_TILE_ROWS // self._group
        )
        request = np.arange(counts.size)
        tiles = np.array([first_token, counts, starts, rows, starts + counts], np.int64)
        if counts.size == 1 and counts[0] == 1:
            return _Tiles(tiles, None if paths is None else (paths.bases, paths.places))
        if counts.max(initial=0) > tile_tokens:
            num_tiles = -(-counts // tile_tokens)
            request = np.repeat(request, num_tiles)
            offset = (
                np.arange(request.size) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
            ) * tile_tokens
            tiles = tiles[:, request]
            tiles[:3] += np.stack(
                [offset, np.minimum(tiles[1] - offset, tile_tokens) - tiles[1], offset]
            )
        # Longest first, so that no thread starts the longest when the others are done.
        order = np.argsort(-(tiles[1] + tiles[2]), kind="stable")
        of_paths = (
            None if paths is None else (paths.bases[request[order]], paths.places[request[order]])
        )
        return _Tiles(np.ascontiguousarray(tiles[:, order]), of_paths)

    def _step(
        self, tiles: _Tiles, positions_T: torch.Tensor, slots_GT: torch.Tensor
    ) -> structs.Step:
        step = structs.Step.from_buffer_copy(self._every_step)
        num_tiles, at = tiles.fields.shape[1], torch.from_numpy(tiles.fields).data_ptr()
        step.num_tokens, step.num_tiles = positions_T.shape[0], num_tiles
        step.positions, step.slots = positions_T.data_ptr(), slots_GT.data_ptr()
        for i, name in enumerate(_TILE_FIELDS):
            setattr(step, name, at + i * num_tiles * tiles.fields.itemsize)
        if tiles.paths is not None:
            step.path_width = tiles.paths[1].shape[1]
            step.tile_base, step.tile_path = (part.ctypes.data for part in tiles.paths)
        return step


def _segments(placed: Sequence[Placed]) -> tuple[Any, list[structs.Policy]]:
    """The arguments in C's form: the segments, and what they point to."""
    segments, policies = (structs.Segment * len(placed))(), list[structs.Policy]()
    for i, part in enumerate(placed):
        policy, memory = part.owner.policy, part.owner.memory_LGX
        policies.append(
            structs.Policy(
                NUMBERS[policy.kind],
                RowPolicy.num_slots(policy),
                policy.kept,
                policy.recent,
                policy.sinks,
                policy.first_observed,
                policy.dense_layers,
                policy.channels,
                memory.shape[2],
                memory.ctypes.data,
            )
        )
        where = (part.row, part.token, part.count, part.position, part.slot)
        how = (part.evicts, part.num_read, part.first_page, part.num_pages)
        segments[i] = structs.Segment(ctypes.addressof(policies[-1]), *where, *how)
    return segments, policies


def _bias_table(bias: torch.Tensor) -> torch.Tensor:
    """The table with room for a block that goes past the last key, and the number of distance 0 in
    the middle of each row."""
    return F.pad(bias, (_BLOCK + 1, _BLOCK)).contiguous()


def _quant(layer: KVQuantLayer) -> tuple[structs.KVQuantSpec, dict[str, torch.Tensor]]:
    """The constants in C's form, and what they point to."""
    made = {
        "scales": layer.scales,
        "factors": 1 / layer.scales,
        "offsets": layer.offsets,
        "key_bounds": bounds_of(layer.key_levels),
        "value_bounds": bounds_of(layer.value_levels),
        "key_levels": F.pad(layer.key_levels, (0, 16 - layer.key_levels.numel())).bfloat16(),
        "value_levels": F.pad(layer.value_levels, (0, 16 - layer.value_levels.numel())).bfloat16(),
    }
    made = {name: tensor.contiguous() for name, tensor in made.items()}
    return structs.KVQuantSpec(
        bits=layer.bits, **{name: tensor.data_ptr() for name, tensor in made.items()}
    ), made


def _spec(kv: PagedKV, layer: int, bias: torch.Tensor | None) -> structs.LayerSpec:
    spec, angles, place = kv.specs[layer], kv.angles[layer], kv.places[layer]
    key_scales, value_scales = (
        None if part.scales is None else part.scales.data_ptr() for part in kv.parts[layer]
    )
    return structs.LayerSpec(
        group=place.group,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        value_dim=spec.value_dim,
        num_stored=sum(part.num_heads for part in spec.stored[:1]),
        num_values=sum(part.num_heads for part in spec.stored[1:]),
        value_row=spec.head_dim if spec.values_in_keys else spec.value_dim,
        num_rotated=0 if angles is None else 2 * angles.cos.shape[1],
        window=spec.window,
        is_bidirectional=spec.is_bidirectional,
        bias_stride=0 if bias is None else bias.shape[1],
        bias=None if bias is None else bias.data_ptr(),
        cos=None if angles is None else angles.cos.data_ptr(),
        sin=None if angles is None else angles.sin.data_ptr(),
        key_scales=key_scales,
        value_scales=value_scales,
        scale=spec.scale,
        softcap=spec.softcap,
    )


@dataclass(slots=True)
class _Layer:
    """Addresses: its tm_layer, and its keys and values in the first page."""

    spec: int
    keys: int
    values: int
    num_out: int  # values of a token that come out


@dataclass(slots=True)
class NativeStep:
    lib: native.Library
    address: int  # of the tm_step
    layers: list[_Layer]
    alive: tuple[Any, ...]  # what the tm_step points to

    def attend(
        self, layer: int, qkv_TC: torch.Tensor, learned: HeadWeights = PLAIN
    ) -> torch.Tensor:
        at = self.layers[layer]
        return self.lib.attention(
            self.address, at.spec, learned, qkv_TC, at.keys, at.values, at.num_out
        )

    def enter(self, layer: int, qkv_TC: torch.Tensor, learned: HeadWeights = PLAIN) -> None:
        at = self.layers[layer]
        self.lib.write_kv(self.address, at.spec, learned, qkv_TC, at.keys, at.values)

    def replay(self, program: Program, embedded_TH: torch.Tensor) -> torch.Tensor:
        """All layers of a recorded model at once."""
        return self.lib.replay(program, embedded_TH, self.address)
