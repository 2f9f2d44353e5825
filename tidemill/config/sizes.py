"""Amounts of memory, as people write them."""

from __future__ import annotations

import re

from tidemill.errors import ConfigError

GIB = 2**30
MIB = 2**20


def fmt_bytes(num_bytes: float) -> str:
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", 1024)):
        if num_bytes >= size:
            return (
                f"{num_bytes / size:.2f} {unit}"
                if unit == "GiB"
                else f"{num_bytes / size:.0f} {unit}"
            )
    return f"{num_bytes:.0f} B"


def parse_bytes(text: str) -> int:
    """'512M', '4G', '1.5GiB', '1000000'."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)i?b?\s*", text.lower())
    if not match:
        raise ConfigError(f"{text!r} is not an amount of memory.", fix="Write it like 512M or 4G.")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2] or " "))
