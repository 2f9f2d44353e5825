"""Loaded by each Python process that a test starts (see tests/seeded/__init__.py)."""

import importlib.util
import os
from pathlib import Path

if "TESTS_WITH_RANDOM_SEEDS" not in os.environ:
    spec = importlib.util.spec_from_file_location(
        "tests_seeded", Path(__file__).with_name("__init__.py")
    )
    seeded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(seeded)
    seeded.seed_this_process()
