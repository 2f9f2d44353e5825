"""Structs of tidemill.h, as ctypes has them: names, order and types are checked when the library is
loaded."""

from __future__ import annotations

import ctypes

_POINTER, _LONG, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float


class LayerSpec(ctypes.Structure):
    """tm_layer of tidemill.h."""

    _fields_ = [
        *(
            (name, _LONG)
            for name in ("group", "num_heads", "num_kv_heads", "head_dim", "value_dim")
        ),
        *(
            (name, _LONG)
            for name in ("num_stored", "num_values", "value_row", "num_rotated", "window")
        ),
        *((name, _LONG) for name in ("is_bidirectional", "bias_stride")),
        *(
            (name, _POINTER)
            for name in ("bias", "cos", "sin", "key_scales", "value_scales", "quant")
        ),
        ("number", _LONG),
        *((name, _FLOAT) for name in ("scale", "softcap")),
    ]


class KVQuantSpec(ctypes.Structure):
    """tm_kvquant of tidemill.h."""

    _fields_ = [
        ("bits", _LONG),
        *(
            (name, _POINTER)
            for name in ("scales", "factors", "offsets", "key_bounds", "value_bounds", "key_levels")
        ),
        ("value_levels", _POINTER),
    ]


class Step(ctypes.Structure):
    """tm_step of tidemill.h."""

    _fields_ = [
        *(
            (name, _LONG)
            for name in (
                "num_tokens",
                "page_size",
                "page_bytes",
                "table_width",
                "kv_format",
                "num_tiles",
            )
        ),
        *(
            (name, _POINTER)
            for name in ("tile_token", "tile_len", "tile_start", "tile_row", "tile_end")
        ),
        ("path_width", _LONG),
        *((name, _POINTER) for name in ("tile_base", "tile_path")),
        *((name, _POINTER) for name in ("tables", "positions", "slots", "states")),
        ("num_rounds", _LONG),
        ("rounds", _POINTER),
    ]


class Policy(ctypes.Structure):
    """tm_policy of tidemill.h."""

    _fields_ = [
        *(
            (name, _LONG)
            for name in (
                "kind",
                "capacity",
                "kept",
                "recent",
                "sinks",
                "first_observed",
                "dense_layers",
                "channels",
                "stride",
            )
        ),
        ("memory", _POINTER),
    ]


class Segment(ctypes.Structure):
    """tm_segment of tidemill.h."""

    _fields_ = [
        ("policy", _POINTER),
        *(
            (name, _LONG)
            for name in (
                "row",
                "token",
                "count",
                "position",
                "slot",
                "evicts",
                "num_read",
                "first_page",
                "num_pages",
            )
        ),
    ]


class Round(ctypes.Structure):
    """tm_round of tidemill.h."""

    _fields_ = [("num_segments", _LONG), ("segments", _POINTER), ("tiles", _POINTER)]


class StateLayer(ctypes.Structure):
    """tm_state_layer of tidemill.h."""

    _fields_ = [
        *(
            (name, _LONG)
            for name in (
                "kind",
                "num_heads",
                "head_dim",
                "state_size",
                "num_groups",
                "kernel",
                "norm_size",
            )
        ),
        *((name, _LONG) for name in ("num_channels", "num_projected")),
        ("pieces", _POINTER),
    ]


class States(ctypes.Structure):
    """tm_states of tidemill.h."""

    _fields_ = [
        *(
            (name, _LONG)
            for name in ("num_tokens", "num_chains", "page_bytes", "table_width", "table_stride")
        ),
        *((name, _POINTER) for name in ("pool", "tables", "segments", "chains")),
    ]


class Matrices(ctypes.Structure):
    """tm_matrices of tidemill.h."""

    _fields_ = [
        *((name, _LONG) for name in ("kind", "num_in", "num_out")),
        *((name, _POINTER) for name in ("codes", "scales", "bias")),
        *((name, _LONG) for name in ("code_bytes", "num_scales", "code_place", "scale_place")),
    ]


class MoE(ctypes.Structure):
    """tm_moe of tidemill.h."""

    _fields_ = [
        *(
            (name, _LONG)
            for name in ("num_experts", "top_k", "renormalise", "topk_first", "is_scored", "act")
        ),
        *((name, Matrices) for name in ("gate_up", "down", "shared_gate_up", "shared_down")),
        ("counts", _POINTER),
        ("stream", _POINTER),
        ("first_unit", _LONG),
    ]


class Routing(ctypes.Structure):
    """tm_routing of tidemill.h."""

    _fields_ = [
        *(
            (name, _LONG)
            for name in ("num_experts", "top_k", "is_softmax", "renormalise", "num_groups")
        ),
        *((name, _LONG) for name in ("top_groups", "best_of_group", "has_shared")),
        ("scale", _FLOAT),
        ("bias", _POINTER),
    ]


COLLECTIVE = ctypes.CFUNCTYPE(_INT, _INT, _POINTER, _POINTER, _LONG, _LONG, _LONG)


class GroupSpec(ctypes.Structure):
    """tm_group of tidemill.h."""

    _fields_ = [
        *((name, _LONG) for name in ("rank", "size", "slot_bytes", "deadline_ns")),
        ("shared", _POINTER),
        ("call", COLLECTIVE),
    ]


class LoraPair(ctypes.Structure):
    """tm_lora_pair of tidemill.h."""

    _fields_ = [
        ("down", _POINTER),
        ("up", _POINTER),
        ("kind", _LONG),
        ("rank", _LONG),
        ("scale", _FLOAT),
    ]


class LoraStep(ctypes.Structure):
    """tm_lora_step of tidemill.h."""

    _fields_ = [
        ("num_tokens", _LONG),
        ("num_tiles", _LONG),
        ("order", _POINTER),
        ("tiles", _POINTER),
    ]


class Lora(ctypes.Structure):
    """tm_lora of tidemill.h."""

    _fields_ = [
        *((name, _LONG) for name in ("num_in", "num_parts", "max_rank")),
        *((name, _POINTER) for name in ("columns", "sizes", "pairs", "step")),
    ]
