"""The cells of the matrix: each API with each feature, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.matrix.checks import ROWS
from tests.server.matrix.dialects import DIALECTS

_POLICY = "the context of the server's policy is known to other APIs only"
_RACE = "it arrives inside a response if that has begun"
# What the server gets wrong today: by API, with how it answers if it is only wrong then, and
# feature; and why.
FAULTS: dict[tuple[str, str], str] = {
    ("messages", "server-wide policy"): _POLICY,
    ("completion", "server-wide policy"): _POLICY,
    ("infill", "server-wide policy"): _POLICY,
    ("generate", "server-wide policy"): _POLICY,
    ("completion streamed", "later prompt refused"): _RACE,
    ("generate streamed", "later prompt refused"): _RACE,
}


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
                marks = [pytest.mark.xfail(reason=why, strict=why != _RACE)] if why else []
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
