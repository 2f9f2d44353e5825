"""The names of a build and of a machine, by which recordings are compared."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from functools import cache
from pathlib import Path
from typing import Any

from tidemill.version import __version__

_PACKAGE = Path(__file__).parents[1]
_SOURCES = frozenset({".py", ".c", ".h", ".json"})


@cache
def build_name() -> str:
    """The version, and a digest of the package's sources: two builds with the same name compute the
    same."""
    digest = hashlib.blake2b(digest_size=5)
    for path in sorted(path for path in _PACKAGE.rglob("*") if path.suffix in _SOURCES):
        digest.update(str(path.relative_to(_PACKAGE)).encode() + path.read_bytes())
    return f"{__version__}+{digest.hexdigest()}"


def about_machine() -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "arch": platform.machine(),
        "cores": os.cpu_count() or 1,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
    }


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = re.search(r"^(?:model name|CPU part)\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor()
