"""The compiled CPU kernels: C for NEON and AVX2, built at installation where there is a compiler.

`lib` is the library for this machine's CPU, or None; `why` says which one, or why none. Every op
that has a compiled twin also has its torch reference, which is used where `lib` is None. Shapes and
layouts are said beside the C functions.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import EXTENSION_SUFFIXES
from itertools import count, takewhile
from pathlib import Path
from typing import Any, Final

import torch

from tidemill.errors import WeightsLost, WorkerLost
from tidemill.kernels.kv_cache import HeadWeights
from tidemill.kernels.native.exchanges import Exchange, ExchangeSpec
from tidemill.kernels.native.program import Op, Program, Recording
from tidemill.kernels.native.sources import source_hash
from tidemill.kernels.native.streams import (
    STREAM_ERRORS,
    HostNeurons,
    Neurons,
    Piece,
    StreamFigures,
    StreamSpec,
)
from tidemill.kernels.native.structs import (
    GroupSpec,
    KVQuantSpec,
    LayerSpec,
    Lora,
    LoraPair,
    LoraStep,
    Matrices,
    MoE,
    Policy,
    Round,
    Routing,
    Segment,
    StateLayer,
    States,
    Step,
)
from tidemill.kernels.state import ScanInputs, StateWeights

# Best first: (file, CPU flags it needs).
_VARIANTS: Final = {
    "aarch64": [("_neon", {"asimddp"})],
    "x86_64": [
        ("_avx512", {"avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx2", "fma", "f16c"}),
        ("_avx2", {"avx2", "fma", "f16c"}),
    ],
}
_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float

# How a weight is stored; the numbers are linear.c's.
_KIND_NAMES = (
    "F32",
    "F16",
    "BF16",
    "Q8",
    "Q8M",
    "Q4",
    "MX4",
    "S4",
    "G8",
    "G8M",
    "G4",
    "GS4",
    "GT4",
    "W8",
    "T2",
)
KINDS: Final = {name: number for number, name in enumerate(_KIND_NAMES)}  # of linear.h
ORDERED: Final = 1 << 28  # of a kind: the input's columns have an order of their own
SPARSE: Final = 1 << 29  # of a kind: single values are added to the matrix


def _check(*tensors: torch.Tensor) -> None:
    """C takes what it is given: addresses of anything else would be read past their end."""
    for tensor in tensors:
        assert tensor.dtype is torch.float32, tensor.dtype
        assert tensor.is_cpu, tensor.device
        assert tensor.is_contiguous()


# What collectives return; the numbers are tidemill.h's.
_GROUP_ERRORS: Final = {
    -2: "a worker of the group is gone",
    -3: "a worker of the group did not answer in time",
    -4: "the workers of the group do not compute the same step",
}


def check_group(code: int) -> None:
    """Raises for a code of a step that means that other workers or weights are lost."""
    if code in _GROUP_ERRORS:
        raise WorkerLost(f"The engine cannot go on: {_GROUP_ERRORS[code]}.")
    if code in STREAM_ERRORS:
        raise WeightsLost(
            f"The engine cannot go on: {STREAM_ERRORS[code]}.",
            fix="Start again: it is written anew if it is wrong.",
        )


class _Field(ctypes.Structure):
    """field of program.c."""

    _fields_ = [("name", ctypes.c_char_p), ("offset", _LONG)]


_STRUCTS: Final = (
    ("tm_step", Step), ("tm_layer", LayerSpec), ("tm_op", Op), ("tm_state_layer", StateLayer), ("tm_states", States),
    ("tm_routing", Routing),
    ("tm_moe", MoE), ("tm_matrices", Matrices), ("tm_lora_pair", LoraPair), ("tm_lora_step", LoraStep), ("tm_lora", Lora),
    ("tm_kvquant", KVQuantSpec), ("tm_policy", Policy), ("tm_segment", Segment), ("tm_round", Round),
    ("tm_group", GroupSpec), ("tm_exchange", ExchangeSpec), ("tm_neurons", Neurons), ("tm_host_neurons", HostNeurons),
    ("tm_piece", Piece), ("tm_stream_spec", StreamSpec), ("tm_stream_figures", StreamFigures),
)  # fmt: skip


def check_build(lib: ctypes.CDLL, sources: str) -> None:
    """Raises OSError unless the library was built from these sources (empty: they are not there)
    and has these structs."""
    fix = "install again, or run: python setup.py build_ext --inplace"
    if not hasattr(lib, "tm_sources") or not hasattr(lib, "tm_layout"):
        raise OSError(f"it was built from other sources; {fix}")
    lib.tm_sources.restype = ctypes.c_char_p
    lib.tm_layout.restype = ctypes.POINTER(_Field)
    if sources and lib.tm_sources().decode() != sources:
        raise OSError(f"it was built from other sources; {fix}")
    theirs, fields = dict[str, int](), lib.tm_layout()
    while name := fields[len(theirs)].name:
        theirs[name.decode()] = fields[len(theirs)].offset
    ours = dict[str, int]()
    for struct, mirror in _STRUCTS:
        ours |= {struct: ctypes.sizeof(mirror)}
        ours |= {
            f"{struct}.{name.rstrip('_')}": getattr(mirror, name).offset
            for name, *_ in mirror._fields_
        }
    if wrong := sorted(name for name, _ in ours.items() ^ theirs.items()):
        raise OSError(f"its structs are laid out differently ({wrong[0]}); {fix}")


class Library:
    """The C functions over tensors. All tensors are contiguous, on the CPU, and float32 where
    nothing else is said."""

    def __init__(self, path: Path) -> None:
        lib = ctypes.CDLL(str(path))
        check_build(lib, source_hash(Path(__file__).parent))
        self._set_threads = lib.tm_set_threads
        self._set_threads.argtypes = [_INT]
        self.num_threads = 1
        self._use_tiles = lib.tm_use_tiles
        self._use_tiles.argtypes = [_INT]
        self.use_tiles(True)
        self._linear = lib.tm_linear
        self._linear.argtypes = [
            _INT,
            _POINTER,
            _LONG,
            _LONG,
            _POINTER,
            _POINTER,
            _POINTER,
            _LONG,
            _POINTER,
        ]
        self._take_rows = lib.tm_take_rows
        self._take_rows.argtypes = [
            _INT,
            _POINTER,
            _POINTER,
            _LONG,
            _POINTER,
            _LONG,
            _LONG,
            _POINTER,
        ]
        self._norm = lib.tm_add_rms_norm
        self._norm.argtypes = [_POINTER, _FLOAT, _POINTER, _POINTER, _FLOAT, _POINTER, _LONG, _LONG]
        self._norm.restype = None
        self._post_norm = lib.tm_post_norm
        self._post_norm.argtypes = [_POINTER, _POINTER, _POINTER, _FLOAT, _POINTER, _LONG, _LONG]
        self._post_norm.restype = None
        self._qk_norm = lib.tm_qk_norm
        self._qk_norm.argtypes = [
            _POINTER,
            _POINTER,
            _LONG,
            _POINTER,
            _LONG,
            _FLOAT,
            _POINTER,
            _LONG,
            _LONG,
        ]
        self._qk_norm.restype = None
        self._layer_norm = lib.tm_add_layer_norm
        self._layer_norm.argtypes = [
            _POINTER,
            _POINTER,
            _POINTER,
            _POINTER,
            _FLOAT,
            _POINTER,
            _LONG,
            _LONG,
        ]
        self._layer_norm.restype = None
        self._act = lib.tm_act
        self._act.argtypes = [_INT, _POINTER, _POINTER, _LONG, _LONG]
        self._act.restype = None
        self._glu = lib.tm_glu
        self._glu.argtypes = [_INT, _POINTER, _POINTER, _LONG, _LONG]
        self._glu.restype = None
        self._draw = lib.tm_gumbel_argmax
        self._draw.argtypes = [_POINTER, _POINTER, _POINTER, _LONG, _LONG]
        self._draw.restype = None
        self._argmax = lib.tm_argmax
        self._argmax.argtypes = [_POINTER, _POINTER, _LONG, _LONG]
        self._argmax.restype = None
        self._write_kv = lib.tm_write_kv
        self._write_kv.argtypes = [_POINTER] * 4 + [_FLOAT] + [_POINTER] * 3
        self._write_kv.restype = None
        self._attention = lib.tm_attention
        self._attention.argtypes = [_POINTER] * 5 + [_FLOAT] + [_POINTER] * 5
        self._lora = lib.tm_lora_add
        self._lora.argtypes = [_POINTER, _POINTER, _POINTER, _LONG]
        self._conv = lib.tm_conv
        self._conv.argtypes = [_POINTER] * 6
        self._conv.restype = None
        self._scan = lib.tm_scan
        self._scan.argtypes = [_POINTER] * 6 + [_FLOAT] + [_POINTER] * 5
        self._gate = lib.tm_gate
        self._gate.argtypes = [_POINTER] * 3 + [_LONG] * 2
        self._gate.restype = None
        self._score_experts = lib.tm_score_experts
        self._score_experts.argtypes = [_POINTER, _POINTER, _POINTER, _LONG]
        self._score_experts.restype = None
        self._moe = lib.tm_run_moe
        self._moe.argtypes = [_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _LONG, _POINTER]
        self._neurons = lib.tm_run_neurons
        self._neurons.argtypes = [_POINTER, _POINTER, _POINTER, _LONG, _POINTER]
        self.run_host_neurons = lib.tm_run_host_neurons  # of the address of a HostNeurons
        self.run_host_neurons.argtypes, self.run_host_neurons.restype = [_POINTER], None
        self._concat = lib.tm_concat
        self._concat.argtypes = [_POINTER] * 4 + [_LONG, _POINTER]
        self._concat.restype = None
        self._add = lib.tm_add
        self._add.argtypes = [_POINTER, _FLOAT, _POINTER, _LONG, _LONG]
        self._add.restype = None
        self._clip = lib.tm_clip
        self._clip.argtypes = [_POINTER, _FLOAT, _LONG, _LONG]
        self._clip.restype = None
        self._all_reduce = lib.tm_all_reduce
        self._all_reduce.argtypes = [_POINTER, _POINTER, _LONG, _LONG]
        self._all_gather = lib.tm_all_gather
        self._all_gather.argtypes = [_POINTER] * 3 + [_LONG] * 3
        self._take_ranges = lib.tm_take_ranges
        self._take_ranges.argtypes = [
            _POINTER,
            _POINTER,
            _LONG,
            _LONG,
            _POINTER,
            _POINTER,
            _POINTER,
        ]
        self.fail_group = lib.tm_fail_group
        self.fail_group.argtypes, self.fail_group.restype = [_POINTER], None
        self._copy_sum = lib.tm_copy_sum
        self._copy_sum.argtypes, self._copy_sum.restype = (
            [_POINTER, _POINTER, _LONG, _POINTER],
            None,
        )
        self._open_stream = lib.tm_stream_open
        self._open_stream.argtypes, self._open_stream.restype = [_POINTER, _LONG], _POINTER
        self.close_stream = lib.tm_stream_close
        self.close_stream.argtypes, self.close_stream.restype = [_POINTER], None
        self._stream_layer = lib.tm_stream_layer
        self._stream_layer.argtypes = [_POINTER, _LONG]
        self._stream_figures = lib.tm_stream_figures_of
        self._stream_figures.argtypes, self._stream_figures.restype = [_POINTER, _POINTER], None
        self._own_rows, self._to_columns, self._to_rows = (
            lib.tm_own_rows,
            lib.tm_to_columns,
            lib.tm_to_rows,
        )
        self._own_rows.argtypes, self._own_rows.restype = (
            [_POINTER, _LONG, _LONG, _LONG, _LONG, _POINTER],
            None,
        )
        self._to_columns.argtypes = self._to_rows.argtypes = [_POINTER, _POINTER, _POINTER, _LONG]
        self._columns = lib.tm_columns
        self._columns.argtypes, self._columns.restype = (
            [_POINTER, _LONG, _LONG, _LONG, _LONG, _POINTER],
            None,
        )
        self._replay = lib.tm_replay
        self._replay.argtypes = [_POINTER, _LONG, _POINTER, _LONG, _POINTER]
        lib.tm_op_name.restype, lib.tm_op_name.argtypes = ctypes.c_char_p, [_LONG]
        self.op_numbers = {
            name.decode(): i for i, name in enumerate(takewhile(bool, map(lib.tm_op_name, count())))
        }
        self._recording: Recording | None = None

    def set_threads(self, num_threads: int) -> int:
        """The calling thread counts as one. Returns how many there are."""
        self.num_threads = int(self._set_threads(num_threads))
        return self.num_threads

    def use_tiles(self, wanted: bool) -> bool:
        """Tells if AMX is used from now on: where the CPU has it and the system lets this process
        use it."""
        self.has_tiles = bool(self._use_tiles(wanted))
        return self.has_tiles

    def linear(
        self,
        kind: int,
        x_TK: torch.Tensor,
        codes: int,
        scales: int | None,
        bias: int | None,
        num_out: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`codes`, `scales`, `bias`: addresses, which the owner of the weight keeps. `out`: room
        for the result."""
        if out is None:
            out = x_TK.new_empty(x_TK.shape[0], num_out)
        assert out.shape == (x_TK.shape[0], num_out)
        _check(x_TK, out)
        if self._linear(
            kind, x_TK.data_ptr(), *x_TK.shape, codes, scales, bias, num_out, out.data_ptr()
        ):
            raise MemoryError("no memory for a linear layer's input")
        if self._recording:
            self._recording.note(
                "linear",
                out,
                x_TK,
                kind=kind,
                width=x_TK.shape[1],
                num_out=num_out,
                a=codes,
                b=scales,
                c=bias,
            )
        return out

    def take_rows(
        self, kind: int, codes: int, scales: int, num_out: int, rows_T: torch.Tensor, width: int
    ) -> torch.Tensor:
        """The rows of a matrix of a kind to S4, as floats."""
        assert rows_T.dtype == torch.int64
        rows_T, out = rows_T.contiguous(), torch.empty(rows_T.numel(), width)
        if self._take_rows(
            kind, codes, scales, num_out, rows_T.data_ptr(), rows_T.numel(), width, out.data_ptr()
        ):
            raise IndexError(f"rows {rows_T.tolist()} of {num_out}")
        return out

    def add_rms_norm(
        self,
        x_TH: torch.Tensor | None,
        residual_TH: torch.Tensor,
        weight_H: torch.Tensor,
        eps: float,
        scale: float = 1.0,
    ) -> torch.Tensor:
        _check(residual_TH, weight_H, residual_TH if x_TH is None else x_TH)
        out = residual_TH.new_empty(residual_TH.shape)
        x, weight, width = (
            None if x_TH is None else x_TH.data_ptr(),
            weight_H.data_ptr(),
            residual_TH.shape[1],
        )
        self._norm(
            x, scale, residual_TH.data_ptr(), weight, eps, out.data_ptr(), *residual_TH.shape
        )
        if self._recording:
            self._recording.note(
                "norm", out, x_TH, residual_TH, width=width, a=weight, eps=eps, scale=scale
            )
        return out

    def post_norm(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, eps: float
    ) -> torch.Tensor:
        _check(x_TH, residual_TH, weight_H)
        out, weight, width = (
            residual_TH.new_empty(residual_TH.shape),
            weight_H.data_ptr(),
            residual_TH.shape[1],
        )
        self._post_norm(
            x_TH.data_ptr(), residual_TH.data_ptr(), weight, eps, out.data_ptr(), *residual_TH.shape
        )
        if self._recording:
            self._recording.note(
                "post_norm", out, x_TH, residual_TH, width=width, a=weight, eps=eps
            )
        return out

    def qk_norm(
        self, qkv_TC: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        _check(qkv_TC, q_weight, k_weight)
        out, num_q, num_k = qkv_TC.new_empty(qkv_TC.shape), q_weight.numel(), k_weight.numel()
        q, k = q_weight.data_ptr(), k_weight.data_ptr()
        self._qk_norm(qkv_TC.data_ptr(), q, num_q, k, num_k, eps, out.data_ptr(), *qkv_TC.shape)
        if self._recording:
            self._recording.note(
                "qk_norm",
                out,
                qkv_TC,
                width=qkv_TC.shape[1],
                kind=num_q,
                num_out=num_k,
                a=q,
                b=k,
                eps=eps,
            )
        return out

    def add_layer_norm(
        self,
        x_TH: torch.Tensor | None,
        residual_TH: torch.Tensor,
        weight_H: torch.Tensor,
        bias_H: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        _check(residual_TH, weight_H, bias_H, residual_TH if x_TH is None else x_TH)
        out = residual_TH.new_empty(residual_TH.shape)
        x, weight, bias = (
            None if x_TH is None else x_TH.data_ptr(),
            weight_H.data_ptr(),
            bias_H.data_ptr(),
        )
        self._layer_norm(
            x, residual_TH.data_ptr(), weight, bias, eps, out.data_ptr(), *residual_TH.shape
        )
        if self._recording:
            self._recording.note(
                "layer_norm",
                out,
                x_TH,
                residual_TH,
                width=residual_TH.shape[1],
                a=weight,
                b=bias,
                eps=eps,
            )
        return out

    def activate(self, x_TI: torch.Tensor, act: int) -> torch.Tensor:
        """`act`: a number of `glu.ACTIVATIONS`."""
        _check(x_TI)
        out = x_TI.new_empty(x_TI.shape)
        self._act(act, x_TI.data_ptr(), out.data_ptr(), *x_TI.shape)
        if self._recording:
            self._recording.note("act", out, x_TI, kind=act, width=x_TI.shape[1])
        return out

    def glu(self, gate_up_TI2: torch.Tensor, act: int) -> torch.Tensor:
        """`act`: a number of `glu.ACTIVATIONS`."""
        _check(gate_up_TI2)
        num_rows, width = gate_up_TI2.shape[0], gate_up_TI2.shape[1] // 2
        out = gate_up_TI2.new_empty(num_rows, width)
        self._glu(act, gate_up_TI2.data_ptr(), out.data_ptr(), num_rows, width)
        if self._recording:
            self._recording.note("glu", out, gate_up_TI2, kind=act, num_out=width)
        return out

    def attention(
        self,
        step: int,
        layer: int,
        learned: HeadWeights,
        qkv_TC: torch.Tensor,
        keys: int,
        values: int,
        num_out: int,
    ) -> torch.Tensor:
        """`step`, `layer`, `keys`, `values`: addresses. qkv is normed and rotated in place."""
        weights = learned.q_norm, learned.k_norm, learned.sinks
        given = *weights, learned.chosen
        _check(qkv_TC, *(weight for weight in given if weight is not None))
        q_norm, k_norm, sinks, chosen = (
            None if weight is None else weight.data_ptr() for weight in given
        )
        out = qkv_TC.new_empty(qkv_TC.shape[0], num_out)
        places = qkv_TC.data_ptr(), keys, values, out.data_ptr(), chosen
        if self._attention(step, layer, q_norm, k_norm, sinks, learned.eps, *places):
            raise MemoryError("no memory for attention")
        if self._recording:
            own: dict[str, Any] = {"c": q_norm, "d": k_norm, "e": sinks, "eps": learned.eps}
            self._recording.note(
                "attention", out, qkv_TC, in_2=learned.chosen, a=keys, b=values, f=layer, **own
            )
        return out

    def write_kv(
        self,
        step: int,
        layer: int,
        learned: HeadWeights,
        qkv_TC: torch.Tensor,
        keys: int,
        values: int,
    ) -> None:
        """Enters keys and values; same as `attention`, up to the cache."""
        weights = learned.q_norm, learned.k_norm
        _check(qkv_TC, *(weight for weight in weights if weight is not None))
        q_norm, k_norm = (None if weight is None else weight.data_ptr() for weight in weights)
        self._write_kv(step, layer, q_norm, k_norm, learned.eps, qkv_TC.data_ptr(), keys, values)
        if self._recording:
            own: dict[str, Any] = {"c": q_norm, "d": k_norm, "eps": learned.eps}
            self._recording.note("write_kv", None, qkv_TC, a=keys, b=values, f=layer, **own)

    def add(self, x_TH: torch.Tensor, residual_TH: torch.Tensor, scale: float = 1.0) -> None:
        """To the residual, in place."""
        _check(x_TH, residual_TH)
        self._add(x_TH.data_ptr(), scale, residual_TH.data_ptr(), *x_TH.shape)
        if self._recording:
            self._recording.note("add", None, x_TH, residual_TH, width=x_TH.shape[1], scale=scale)

    def clip(self, x_TC: torch.Tensor, limit: float) -> torch.Tensor:
        """In place."""
        _check(x_TC)
        self._clip(x_TC.data_ptr(), limit, *x_TC.shape)
        if self._recording:
            self._recording.note("clip", None, None, x_TC, width=x_TC.shape[1], scale=limit)
        return x_TC

    def concat(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Two or three matrices side by side."""
        _check(*parts)
        first, second, third = [*parts, None][:3]
        widths = [0 if one is None else one.shape[1] for one in (first, second, third)]
        places = [None if one is None else one.data_ptr() for one in (first, second, third)]
        out = parts[0].new_empty(parts[0].shape[0], sum(widths))
        self._concat(*places, (_LONG * 3)(*widths), out.shape[0], out.data_ptr())
        if self._recording:
            self._recording.note(
                "concat",
                out,
                first,
                in_2=second,
                in_3=third,
                width=widths[0],
                kind=widths[1],
                num_out=sum(widths),
            )
        return out

    def all_reduce(self, group: int, x_TN: torch.Tensor) -> None:
        """In place. `group`: the address of a GroupSpec."""
        _check(x_TN)
        check_group(self._all_reduce(group, x_TN.data_ptr(), *x_TN.shape))
        if self._recording:
            self._recording.note("all_reduce", None, None, x_TN, width=x_TN.shape[1], a=group)

    def all_gather(self, group: int, x_TN: torch.Tensor, num_out: int) -> torch.Tensor:
        """The ranks' columns side by side, `num_out` in all. `group`: the address of a GroupSpec."""
        _check(x_TN)
        out, (num_rows, width) = x_TN.new_empty(x_TN.shape[0], num_out), x_TN.shape
        check_group(
            self._all_gather(group, x_TN.data_ptr(), out.data_ptr(), num_rows, width, num_out)
        )
        if self._recording:
            self._recording.note("all_gather", out, x_TN, width=width, num_out=num_out, a=group)
        return out

    def take_ranges(
        self, group: int, shown: bytes, most: int, ranges: list[tuple[int, int]]
    ) -> bytearray:
        """All ranks show bytes, at most `most`; returned is of each rank's a range (first, how
        many)."""
        starts, lens = ((_LONG * len(ranges))(*column) for column in zip(*ranges, strict=True))
        out = bytearray(max(1, sum(lens)))
        place = (ctypes.c_char * len(out)).from_buffer(out)
        check_group(self._take_ranges(group, shown, len(shown), most, starts, lens, place))
        del place
        return out[: sum(lens)]

    def copy_sum(self, target: int, source: int, num_bytes: int) -> bytes:
        """Copies bytes from one address to another, and returns sums of what was written there."""
        sums = (ctypes.c_uint64 * 16)()
        self._copy_sum(target, source, num_bytes, sums)
        return bytes(sums)

    def lora(self, lora: int, x_TK: torch.Tensor, y_TN: torch.Tensor) -> None:
        """Adds to y what the rows' adapters do. `lora`: the address of a Lora."""
        _check(x_TK, y_TN)
        if self._lora(lora, x_TK.data_ptr(), y_TN.data_ptr(), y_TN.shape[1]):
            raise MemoryError("no memory for adapters")
        if self._recording:
            self._recording.note("lora", None, x_TK, y_TN, num_out=y_TN.shape[1], a=lora)

    def conv(
        self,
        states: int,
        layer: int,
        projected_TC: torch.Tensor,
        learned: StateWeights,
        num_out: int,
    ) -> torch.Tensor:
        """`states`, `layer`: addresses."""
        weight, bias = learned.conv_KC, learned.conv_bias_C
        _check(projected_TC, weight, *(() if bias is None else (bias,)))
        places = weight.data_ptr(), None if bias is None else bias.data_ptr()
        out = projected_TC.new_empty(projected_TC.shape[0], num_out)
        self._conv(states, layer, *places, projected_TC.data_ptr(), out.data_ptr())
        if self._recording:
            self._recording.note("conv", out, projected_TC, a=layer, b=places[0], c=places[1])
        return out

    def scan(
        self, states: int, layer: int, inputs: ScanInputs, learned: StateWeights, num_out: int
    ) -> torch.Tensor:
        """`states`, `layer`: addresses. The convolved channels are overwritten."""
        weights = learned.decay, learned.skip_I, learned.step_bias, learned.norm_I
        given = inputs.mixed_TC, inputs.projected_TC, inputs.steps_TI, inputs.bc_TS2
        _check(*(tensor for tensor in (*weights, *given) if tensor is not None))
        b, c, d, e = (None if tensor is None else tensor.data_ptr() for tensor in weights)
        out = inputs.mixed_TC.new_empty(inputs.mixed_TC.shape[0], num_out)
        places = (None if tensor is None else tensor.data_ptr() for tensor in given)
        if self._scan(states, layer, b, c, d, e, learned.eps, *places, out.data_ptr()):
            raise MemoryError("no memory for a state")
        if self._recording:
            self._recording.note("scan", out, *given, a=layer, b=b, c=c, d=d, e=e, eps=learned.eps)
        return out

    def gate(self, x_TH: torch.Tensor, gate_TH: torch.Tensor) -> torch.Tensor:
        """x * sigmoid(gate); 8 divides the width."""
        _check(x_TH, gate_TH)
        out = x_TH.new_empty(x_TH.shape)
        self._gate(x_TH.data_ptr(), gate_TH.data_ptr(), out.data_ptr(), *x_TH.shape)
        if self._recording:
            self._recording.note("gate", out, x_TH, in_2=gate_TH, width=x_TH.shape[1])
        return out

    def score_experts(self, routing: int, logits_TE: torch.Tensor, num_out: int) -> torch.Tensor:
        """`routing`: the address of a `Routing`."""
        _check(logits_TE)
        out = logits_TE.new_empty(logits_TE.shape[0], num_out)
        self._score_experts(routing, logits_TE.data_ptr(), out.data_ptr(), logits_TE.shape[0])
        if self._recording:
            self._recording.note("score_experts", out, logits_TE, a=routing)
        return out

    def moe(
        self,
        experts: int,
        x_TH: torch.Tensor,
        logits_TL: torch.Tensor,
        ahead: int | None = None,
        ahead_TL: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`experts`: the address of a `MoE`. `ahead`: of the next layer's, whose experts are read
        by guess; and what its router says of the same rows."""
        _check(x_TH, logits_TL)
        out = torch.empty_like(x_TH)
        guess = ahead, None if ahead_TL is None else ahead_TL.data_ptr()
        if failed := self._moe(
            experts, x_TH.data_ptr(), logits_TL.data_ptr(), *guess, x_TH.shape[0], out.data_ptr()
        ):
            check_group(failed)
            raise MemoryError("no memory for a mixture of experts")
        if self._recording:
            self._recording.note("moe", out, x_TH, logits_TL, in_2=ahead_TL, a=experts, b=ahead)
        return out

    def neurons(
        self, neurons: int, x_TH: torch.Tensor, gate_TI: torch.Tensor, num_out: int
    ) -> torch.Tensor:
        """`neurons`: the address of a `Neurons`."""
        _check(x_TH, gate_TI)
        out = x_TH.new_empty(x_TH.shape[0], num_out)
        if failed := self._neurons(
            neurons, x_TH.data_ptr(), gate_TI.data_ptr(), x_TH.shape[0], out.data_ptr()
        ):
            check_group(failed)
            raise MemoryError("no memory for a feed-forward")
        if self._recording:
            self._recording.note("neurons", out, x_TH, in_2=gate_TI, a=neurons)
        return out

    def stream_layer(self, stream: int, layer: int) -> None:
        """Wait until the layer's weights are in their slot."""
        check_group(self._stream_layer(stream, layer))
        if self._recording:
            self._recording.note("stream", None, None, kind=layer, a=stream)

    def argmax(self, x_SV: torch.Tensor) -> torch.Tensor:
        _check(x_SV)
        out = x_SV.new_empty(x_SV.shape[0], dtype=torch.int64)
        self._argmax(x_SV.data_ptr(), out.data_ptr(), *x_SV.shape)
        return out

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Ops run meanwhile are noted, too."""
        self._recording = Recording(self.op_numbers)
        try:
            yield self._recording
        finally:
            self._recording = None

    def replay(self, program: Program, given_TH: torch.Tensor, step: int) -> torch.Tensor:
        """The result is the program's own memory, good until the next replay. `step`: an address."""
        _check(given_TH)
        num_rows = given_TH.shape[0]
        at = program.buffers(num_rows)
        at.given.copy_(given_TH)
        failed = self._replay(at.ops, len(program.ops), at.arena, num_rows, step)
        if failed:
            check_group(failed)
            raise MemoryError("no memory for a step")
        return at.result

    def gumbel_argmax(self, logits_SV: torch.Tensor, keys_S: torch.Tensor) -> torch.Tensor:
        """`keys_S`: int64."""
        _check(logits_SV)
        out = keys_S.new_empty(keys_S.shape)
        self._draw(logits_SV.data_ptr(), keys_S.data_ptr(), out.data_ptr(), *logits_SV.shape)
        return out

    def open_stream(self, spec: StreamSpec, num_readers: int) -> int:
        """The address of a stream, until `close_stream`. The caller keeps what the spec names."""
        stream = self._open_stream(ctypes.addressof(spec), num_readers)
        if not stream:
            raise MemoryError("no memory or no threads for a stream of weights")
        return int(stream)

    def stream_figures(self, stream: int) -> StreamFigures:
        figures = StreamFigures()
        self._stream_figures(stream, ctypes.addressof(figures))
        return figures

    def columns(self, x_TN: torch.Tensor, first: int, num: int) -> torch.Tensor:
        """Neighbouring columns."""
        x_TN = x_TN.contiguous()
        out = x_TN.new_empty(x_TN.shape[0], num)
        self._columns(x_TN.data_ptr(), *x_TN.shape, first, num, out.data_ptr())
        if self._recording:
            self._recording.note("columns", out, x_TN, kind=first, width=x_TN.shape[1], num_out=num)
        return out

    def own_rows(self, x_TN: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """The rows of this rank, of all rows."""
        num, width = x_TN.shape
        out = x_TN.new_empty(num * (rank + 1) // size - num * rank // size, width)
        self._own_rows(x_TN.data_ptr(), num, width, rank, size, out.data_ptr())
        if self._recording:
            self._recording.note("own_rows", out, x_TN, kind=rank, width=width, num_out=size)
        return out

    def to_columns(
        self, exchange: Exchange, x_RN: torch.Tensor, num_rows: int
    ) -> tuple[int, torch.Tensor]:
        """From some rows of all columns to all `num_rows` rows of some columns. Besides them, what
        `check_group` takes."""
        out = x_RN.new_empty(num_rows, exchange.own_width)
        failed = self._to_columns(exchange.address, x_RN.data_ptr(), out.data_ptr(), num_rows)
        if self._recording:
            self._recording.note(
                "to_columns",
                out,
                x_RN,
                width=exchange.width,
                num_out=exchange.own_width,
                a=exchange.address,
            )
        return failed, out

    def to_rows(
        self, exchange: Exchange, x_TN: torch.Tensor, rank: int, size: int
    ) -> tuple[int, torch.Tensor]:
        """From all rows of some columns to some rows of all columns."""
        num = x_TN.shape[0]
        out = x_TN.new_empty(num * (rank + 1) // size - num * rank // size, exchange.width)
        failed = self._to_rows(exchange.address, x_TN.data_ptr(), out.data_ptr(), num)
        if self._recording:
            width = x_TN.shape[1]
            self._recording.note(
                "to_rows", out, x_TN, kind=rank, width=width, num_out=size, a=exchange.address
            )
        return failed, out


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux; Apple's ARM cores all have the dot product
        return {"asimddp"} if sys.platform == "darwin" else set()
    cores = [
        set(line.partition(":")[2].split())
        for line in lines
        if line.startswith(("flags", "Features"))
    ]
    return set.intersection(*cores) if cores else set()  # what every core has


def _load() -> tuple[Library | None, str]:
    machine = {"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())
    flags, problem = _cpu_flags(), f"there are none for {machine}"
    for name, needs in _VARIANTS.get(machine, []):
        if needs - flags:
            problem = f"this CPU lacks {', '.join(sorted(needs - flags))}"
            continue
        for suffix in EXTENSION_SUFFIXES:
            path = Path(__file__).with_name(name + suffix)
            if path.is_file():
                try:
                    library = Library(path)
                    return library, name.removeprefix("_") + (
                        " with AMX" if library.has_tiles else ""
                    )
                except (OSError, AttributeError) as error:
                    problem = f"{path.name} cannot be loaded: {error}"
                break
        else:
            problem = "they were not built: install again with a C compiler"
    return None, problem


lib, why = _load()
sources = source_hash(Path(__file__).parent)  # empty where they are not there
