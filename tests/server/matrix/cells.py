"""The cells of the matrix: each API with each feature, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.matrix.checks import ROWS
from tests.server.matrix.dialects import DIALECTS


def cells() -> list[Any]:
    """Parameters (API, whether it streams, feature) of a test."""
    made = []
    for feature in ROWS:
        for dialect in DIALECTS:
            for is_streamed in (False, True):
                how = "streamed" if is_streamed else "whole"
                made.append(
                    pytest.param(
                        dialect,
                        is_streamed,
                        feature,
                        id=f"{feature}-{dialect.name}-{how}",
                    )
                )
    return made
