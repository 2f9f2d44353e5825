"""The cells of the matrix: each API with each feature, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.matrix.checks import ROWS
from tests.server.matrix.dialects import DIALECTS

# What the server gets wrong today: by API and feature, and why.
FAULTS: dict[tuple[str, str], str] = {}


def cells() -> list[Any]:
    """Parameters (API, whether it streams, feature) of a test."""
    made = []
    for feature in ROWS:
        for dialect in DIALECTS:
            for is_streamed in (False, True):
                how = "streamed" if is_streamed else "whole"
                why = FAULTS.get((dialect.name, feature)) or FAULTS.get(
                    (f"{dialect.name} {how}", feature)
                )
                marks = [pytest.mark.xfail(reason=why, strict=True)] if why else []
                made.append(
                    pytest.param(
                        dialect,
                        is_streamed,
                        feature,
                        id=f"{feature}-{dialect.name}-{how}",
                        marks=marks,
                    )
                )
    return made
