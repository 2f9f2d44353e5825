"""Rotary tables have the bits of numpy's float64 functions, in every process."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tidemill.kernels.rope import apply_rope, rope_frequencies, rope_tables
from tidemill.types.model_config import RopeScaling

NUM_POSITIONS, THETA, DIM = 9000, 100_000.0, 64

# In a process of its own, whose first vector math call this is; torch has several threads.
FRESH = f"""
import hashlib, torch
from tidemill.kernels.rope import rope_frequencies, rope_tables
torch.set_num_threads(4)
tables = rope_tables(*rope_frequencies({DIM}, {THETA}, None), {NUM_POSITIONS})
print(hashlib.sha256(b"".join(table.numpy().tobytes() for table in tables)).hexdigest())
"""
# The torch fallback: large calls of the functions of its ops right after the engine's set_threads.
FALLBACK = """
import torch
from tidemill.kernels import machine, native
native.lib = None
machine.set_threads(4)
x = torch.rand(2_000_000) * 8 + 0.01
for function in (torch.exp, torch.log, torch.log1p):
    exact = function(x.double())
    assert ((function(x) - exact).abs() <= exact.abs() * 2**-22 + 1e-7).all(), function
"""


def expected_tables() -> tuple[np.ndarray, np.ndarray]:
    exponents = np.arange(0, DIM, 2) / DIM
    freqs = np.float32(1) / (THETA**exponents).astype(np.float32)
    angles = (np.arange(NUM_POSITIONS, dtype=np.float32)[:, None] * freqs).astype(np.float64)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def in_fresh_processes(program: str, count: int) -> list[str]:
    """At the same time: the fault is a race, and contention for the cores brings it out."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=os.environ
        )
        for _ in range(count)
    ]
    printed = [process.communicate()[0].strip() for process in running]
    assert [process.returncode for process in running] == [0] * count
    return printed


def test_tables_equal_numpys_in_fresh_processes():
    expected = hashlib.sha256(b"".join(table.tobytes() for table in expected_tables())).hexdigest()
    assert in_fresh_processes(FRESH, 4) == [expected] * 4


def test_the_torch_fallbacks_first_large_calls_are_accurate():
    in_fresh_processes(FALLBACK, 3)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        RopeScaling(kind="linear", factor=4.0),
        RopeScaling(
            kind="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_context=8192,
        ),
        RopeScaling(kind="yarn", factor=4.0, original_context=4096),
    ],
)
def test_everything_is_float32(scaling):
    freqs, factor = rope_frequencies(128, 500_000.0, scaling)
    assert freqs.dtype == np.float32
    assert all(table.dtype == torch.float32 for table in rope_tables(freqs, factor, 5000))


def test_rope_rotates_pairs_by_position():
    freqs, factor = rope_frequencies(8, 10000.0, None)
    cos, sin = rope_tables(freqs, factor, 16)
    x = torch.randn(16, 3, 8)
    out = apply_rope(x, cos, sin)
    pairs = torch.complex(x[..., :4], x[..., 4:])
    angles = torch.arange(16.0)[:, None] * torch.from_numpy(freqs)
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    assert torch.allclose(out, torch.cat([turned.real, turned.imag], -1), atol=1e-5)
    assert torch.equal(out[0], x[0])
