from pathlib import Path

import pytest

from bench.small import train_small
from tidemill.compress.evaluate import text_sha256

_STEPS = 600


@pytest.fixture(scope="session")
def small_model() -> Path:
    """A small model of bytes that has learned Python's documentation but for its end; trained once
    for each text, and kept."""
    kept = (
        Path(__file__).parent.parent.parent
        / ".test-cache"
        / f"small-{_STEPS}-{text_sha256(None)[:12]}"
    )
    if not kept.is_dir():
        part = kept.with_suffix(".part")  # goes on where it was stopped
        train_small(part, _STEPS)
        part.rename(kept)
    return kept
