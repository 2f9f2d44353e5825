"""The index of kernels is true: nothing is missing in it, and what it names is there."""

import ast
import re
from pathlib import Path

import pytest
import torch

from tidemill.kernels.index import OPS, SERVICES
from tools import kernel_index

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "tidemill" / "kernels"


def defined(path: Path) -> dict[str, ast.AST]:
    """Functions and classes of a module; methods as CLASS.METHOD and CLASS::METHOD."""
    found: dict[str, ast.AST] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        for inner in getattr(node, "body", ()) if isinstance(node, ast.ClassDef) else ():
            if isinstance(inner, ast.FunctionDef):
                found[f"{node.name}::{inner.name}"] = inner
    return found


def jitted(tree: ast.AST) -> dict[str, ast.FunctionDef]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {n.name: n for n in nodes if any(".jit" in ast.unparse(d) for d in n.decorator_list)}


def launched() -> set[str]:
    """Kernels: jitted functions that Python code hands on as values."""
    trees = {path.stem: ast.parse(path.read_text()) for path in (KERNELS / "cuda").glob("*.py")}
    names, kernels = {stem: jitted(tree) for stem, tree in trees.items()}, set()
    for stem, tree in trees.items():
        inside = {id(n) for f in names[stem].values() for n in ast.walk(f)}
        called = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
        homes = {
            alias.name: (node.module or "").rpartition(".")[2]
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and id(node) not in inside | called:
                home = homes.get(node.id, stem)
                if node.id in names.get(home, ()):
                    kernels.add(f"{home}.{node.id}")
    return kernels


def test_every_kernel_of_a_gpu_is_in_it():
    assert {name for op in OPS for name in (op.triton + " " + op.hopper).split()} == launched()


def test_every_function_of_the_library_is_in_it():
    sources = "".join(path.read_text() for path in (KERNELS / "native").glob("*.c"))
    exported = re.findall(r"^TM_API [\w *]*?\btm_(\w+)\(", sources, re.M)
    indexed = [name for op in OPS for name in op.c.split()] + list(SERVICES)
    assert sorted(indexed) == sorted(exported)


def test_every_reference_is_in_it():
    named = {op.reference for op in OPS}
    for path in sorted(KERNELS.rglob("*.py")):
        module = ".".join(path.relative_to(KERNELS).with_suffix("").parts)
        for name in defined(path):
            if name.endswith("_reference"):
                assert f"{module}.{name}" in named


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_what_it_names_is_there(op):
    module, _, name = op.reference.rpartition(".")
    if module == "torch":
        assert hasattr(torch, name)
    else:
        assert name in defined((KERNELS / module.replace(".", "/")).with_suffix(".py"))
    for test in op.tests.split():
        path, _, function = test.partition("::")
        assert function in defined(ROOT / "tests" / path), test
    for bench in op.bench.split():
        assert (ROOT / "bench" / f"{bench}.py").exists(), bench
    for kernel in (op.triton + " " + op.hopper).split():
        module, _, name = kernel.partition(".")
        docstring = ast.get_docstring(defined(KERNELS / "cuda" / f"{module}.py")[name]) or ""
        assert f"Reference: `{op.reference}`." in " ".join(docstring.split()), (
            f"{kernel} does not name it"
        )


def test_page():
    assert kernel_index.PAGE.read_text() == kernel_index.page(), "run python -m tools.kernel_index"
