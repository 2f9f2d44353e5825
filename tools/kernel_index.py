"""The page about kernels, from their index.

    python -m tools.kernel_index

It writes docs/reference/kernels.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tidemill.kernels.index import OPS, SERVICES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "kernels.md"
_HEAD = """# Kernels

Every operation that has a kernel, its reference in torch, the test that compares them, and the
benchmark that times them. Modules are those of `tidemill/kernels/`, for Triton and Hopper those of
`tidemill/kernels/cuda/`. Functions in C begin with `tm_`. Hopper kernels are written in Gluon and
run on the H100 and H200 alone. Without a compiler the CPU computes with the reference.

A test walks the package: a kernel that is not in the index, or that does not name its reference,
fails it.

<!-- Made by `python -m tools.kernel_index`. -->

| operation | reference | C | Triton | Hopper | test | benchmark |
|---|---|---|---|---|---|---|
"""


def _cell(names: str) -> str:
    return "<br>".join(f"`{name}`" for name in names.split())


def page() -> str:
    """The page's text."""
    rows = [
        [op.name, *map(_cell, (op.reference, op.c, op.triton, op.hopper, op.tests))]
        + [_cell(" ".join(f"bench.{name}" for name in op.bench.split()))]
        for op in OPS
    ]
    lines = [f"| {' | '.join(row)} |\n" for row in rows]
    others = ", ".join(f"`tm_{name}`" for name in SERVICES)
    return "".join([_HEAD, *lines, f"\nFunctions in C that are no operations: {others}.\n"])


if __name__ == "__main__":
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
