"""Weights that stream from pinned host memory to the GPU at hand: the same tokens in less memory."""

from __future__ import annotations

import pytest

from bench.gpu_streaming import compare, core_of, expected_and_bytes, let_go, settings, show_memory


@pytest.mark.parametrize("quantization", ["auto", "fp8", "int4"])
def test_tokens_are_those_of_resident_weights(quantization: str) -> None:
    config = settings(6, 512, 2048)
    ((expected, _),), total = expected_and_bytes(config, quantization=quantization, max_requests=8)
    budget = int(0.75 * total)
    core = core_of(config, budget, quantization, max_requests=8)
    show_memory(core, total, budget)  # asserts what it may hold
    compare(core, expected)
    let_go(core)
