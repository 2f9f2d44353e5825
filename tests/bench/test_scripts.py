"""Every script of bench/ and tools/ starts and answers --help. What they call is checked by mypy,
which reads both."""

import contextlib
import io
import pkgutil
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import bench
import tools
from tests.helpers import LONG_S

ROOT = Path(__file__).parents[2]
NAMES = [
    module.name
    for package in (bench, tools)
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
    if not module.ispkg
]
SHARED = {"bench.gpu_workloads", "bench.parts", "bench.ports"}  # imported by others, and no scripts


def test_each_starts_and_answers_help():
    """In one process, since each alone would import torch anew. A GPU is needed to measure, and not
    to start."""
    has_triton = find_spec("triton") is not None
    names = [name for name in NAMES if has_triton or not name.startswith("bench.gpu")]
    command = [sys.executable, "-m", "tests.bench.test_scripts", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONG_S)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == names


def test_commands_are_written_so_that_they_work():
    for path in [
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "README.md",
        *(ROOT / "bench").glob("*.py"),
    ]:
        for line in path.read_text().splitlines():
            assert "python bench/" not in line, (
                f"{path}: bench is a package, write python -m bench.NAME: {line}"
            )


def ask_for_help(name: str) -> None:
    out, sys.argv, code = io.StringIO(), [name, "--help"], None
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_module(name, run_name=name if name in SHARED else "__main__")
    except SystemExit as end:
        code = end.code
    assert name in SHARED or (code == 0 and "usage" in out.getvalue()), (
        f"{name} --help: {code}, {out.getvalue()!r}"
    )


if __name__ == "__main__":
    for given in sys.argv[1:]:
        ask_for_help(given)
        print(given)
