"""Weights that a stream of the compiled library reads from a file (stream.c)."""

from __future__ import annotations

import ctypes

_LONG, _POINTER = ctypes.c_long, ctypes.c_void_p


class Piece(ctypes.Structure):
    """tm_piece of tidemill.h."""

    _fields_ = [(name, ctypes.c_int64) for name in ("offset", "num_bytes", "place")]


class StreamSpec(ctypes.Structure):
    """tm_stream_spec of tidemill.h."""

    _fields_ = [
        *(
            (name, _LONG)
            for name in ("fd", "file_bytes", "changed_ns", "num_units", "num_slots", "slot_bytes")
        ),
        *((name, _POINTER) for name in ("slots", "pieces", "first_piece", "slot_of")),
    ]


class StreamFigures(ctypes.Structure):
    """tm_stream_figures of tidemill.h."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "num_bytes",
            "waited_ns",
            "num_asked",
            "num_read",
            "num_missed",
            "num_foreseen",
        )
    ]


class Neurons(ctypes.Structure):
    """tm_neurons of tidemill.h."""

    _fields_ = [
        *((name, _LONG) for name in ("kind", "num_in", "num_inner", "num_out", "down_place")),
        *((name, _POINTER) for name in ("up_bias", "down_bias", "stream")),
        ("first_unit", _LONG),
        ("memory", _POINTER),
        *((name, _LONG) for name in ("up_place", "num_bytes", "act")),
        *((name, _POINTER) for name in ("gate_bias", "num_chosen")),
        ("is_given", _LONG),
    ]


class HostNeurons(ctypes.Structure):
    """tm_host_neurons of tidemill.h."""

    _fields_ = [
        *((name, _POINTER) for name in ("neurons", "given", "gate", "out", "gate_codes")),
        *((name, _LONG) for name in ("first_row", "num_rows")),
        ("num_ns", _POINTER),
    ]


# What streams return; the numbers are tidemill.h's.
STREAM_ERRORS = {
    -5: "the file of prepared weights was changed or cut short while it was in use",
    -6: "the file of prepared weights cannot be read",
}
