"""Kernels that work row by row, timed beside a copy of as many bytes.

    python -m bench.kernels [--device cuda] [--rows 256] [--width 4096] [--only norm] [--turns 20]

A figure is the median over turns in which all kernels run one after the other. The last column is
the part of the time that copying the same bytes takes in the same run: the memory limit is 100 %.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from tidemill.kernels import machine
from tidemill.kernels.argmax import argmax
from tidemill.kernels.gate import gated
from tidemill.kernels.glu import activate
from tidemill.kernels.glu import glu as host_glu
from tidemill.kernels.norm import add_layer_norm, add_rms_norm, post_norm, qk_norm
from tidemill.kernels.parts import side_by_side

Case = tuple[str, Callable[[], object], int]  # name, kernel, values that it reads and writes


def cases(rows: int, width: int, device: str) -> list[Case]:
    """All kernels, on rows of one width."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def new(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device=device)

    x, residual, both, weight, bias = (
        new(rows, width),
        new(rows, width),
        new(rows, 2 * width),
        new(width),
        new(width),
    )
    few, half = new(rows, 8), width // 2
    glu = host_glu
    if device == "cuda":
        from tidemill.kernels.cuda.glu import glu
    num = rows * width
    found: list[Case] = [
        ("copy", lambda: x.clone(), 2 * num),
        ("rms_norm", lambda: add_rms_norm(None, residual, weight, 1e-5), 2 * num),
        ("add_rms_norm", lambda: add_rms_norm(x, residual, weight, 1e-5), 4 * num),
        ("add_layer_norm", lambda: add_layer_norm(x, residual, weight, bias, 1e-5), 4 * num),
        ("post_norm", lambda: post_norm(x, residual, weight, 1e-5), 3 * num),
        (
            "qk_norm",
            lambda: qk_norm(x, weight[:half].contiguous(), weight[:half].contiguous(), 1e-5),
            2 * num,
        ),
        ("activate", lambda: activate(x, "gelu"), 2 * num),
        ("glu", lambda: glu(both, "silu"), 3 * num),
        ("gate", lambda: gated(x, residual), 3 * num),
    ]
    if device == "cpu":
        found += [
            ("argmax", lambda: argmax(x), num),
            ("concat", lambda: side_by_side([x, few]), 2 * num + 16 * rows),
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--only", default="", help="kernels whose names contain this")
    arguments = parser.parse_args()
    machine.set_threads(arguments.threads)
    wanted = cases(arguments.rows, arguments.width, arguments.device)
    wanted = [case for case in wanted if case[0] == "copy" or arguments.only in case[0]]
    times: dict[str, list[float]] = {name: [] for name, _, _ in wanted}
    wait = torch.cuda.synchronize if arguments.device == "cuda" else lambda: None
    for turn in range(-2, arguments.turns):
        for name, kernel, _ in wanted:
            wait()
            begin = time.perf_counter()
            kernel()
            wait()
            if turn >= 0:
                times[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(found) for name, found in times.items()}
    copied = 2 * arguments.rows * arguments.width / medians["copy"]
    for name, _, num_values in wanted:
        share = num_values / medians[name] / copied
        print(f"{name:15} {medians[name] * 1e6:9.1f} us {share:6.0%} of a copy's rate")


if __name__ == "__main__":
    main()
