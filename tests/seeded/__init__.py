"""One seed for all requests of tests that give none, in this process and in those that tests start.

A test that samples without a seed fails by chance, once in a hundred runs. So requests without a
seed have the same one everywhere; tests of randomness itself use the fixture `random_seeds`,
in-process and for servers they start.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

# set: processes that are started draw seeds, as they do for users
RANDOM = "TESTS_WITH_RANDOM_SEEDS"
SEED = 3
_MODULE = "tidemill.types.sampling"


class _Patched(MetaPathFinder):
    """Finds `tidemill.types.sampling` as Python does, and gives it a source of seeds that is always
    the same."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == _MODULE else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            seed_alike(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def seed_alike(sampling: Any) -> None:
    sampling.secrets = SimpleNamespace(randbits=lambda num_bits: SEED)


def seed_this_process() -> None:
    """Now, if the module is loaded, or when it is."""
    if _MODULE in sys.modules:
        seed_alike(sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _Patched())


def seed_child_processes() -> None:
    """Python loads `sitecustomize` of this folder in each process that inherits the environment."""
    here = Path(__file__).parent
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(here), *([known] if known else [])])


@contextmanager
def random_seeds(patch: Any) -> Iterator[None]:
    """Seeds are drawn in this process, and in those that are started meanwhile."""
    import secrets

    from tidemill.types import sampling

    with patch.context() as inner:
        inner.setattr(sampling, "secrets", secrets)
        inner.setenv(RANDOM, "1")
        yield
