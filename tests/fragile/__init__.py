"""An engine with weaknesses: prompts that kill it, prompts at which it waits until a test lets it
go on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

DEADLY = 300  # as the first token of a prompt: the engine dies in the first step with it
# the engine waits at that prompt: from position 10 x the second token on, until the gate is open
GATED = 301


class Fragile:
    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        here = Path(__file__).parent
        known = os.environ.get("PYTHONPATH")
        patch.setenv(
            "PYTHONPATH",
            os.pathsep.join([str(here), str(here.parent.parent), *([known] if known else [])]),
        )
        patch.setenv("FRAGILE_FOLDER", str(folder))

    def open_gate(self) -> None:
        (self._folder / "gate").touch()

    def close_gate(self) -> None:
        (self._folder / "gate").unlink(missing_ok=True)

    def set_available_bytes(self, num_bytes: int) -> None:
        """Of memory, for engines that start from now on."""
        (self._folder / "available").write_text(str(num_bytes))

    def take_kernels_away(self) -> None:
        """From engines that start from now on."""
        (self._folder / "no-kernels").touch()
