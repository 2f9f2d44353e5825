"""What the examples have in common: where they run, and what sharing prefixes saves."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from tidemill import LLM
from tidemill.programs import Program, State


def backend_of(description: str, given: Sequence[str] | None) -> Any:
    """A server (--url), or a model in this process."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--url", help="of a Tidemill server, instead of a model in this process")
    asked = parser.parse_args(given)
    return asked.url or LLM(asked.model)


def compare(what: Program, backend: Any, *arguments: Any) -> State:
    """Run it without sharing, then with it, and print what each computed. Returns the second."""
    rows = []
    for share in (False, True):
        begun = time.perf_counter()
        state = what.run(*arguments, backend=backend, share_prefix=share)
        rows.append((state.usage, time.perf_counter() - begun))
    (alone, alone_s), (shared, shared_s) = rows
    print(
        f"\n{'':20}{'requests':>10}{'prompt':>10}{'cached':>10}{'generated':>11}{'computed':>10}{'seconds':>10}"
    )
    for name, (usage, seconds) in zip(
        ("without sharing", "with shared prefixes"), rows, strict=True
    ):
        numbers = f"{usage.num_requests:10}{usage.num_prompt:10}{usage.num_cached:10}{usage.num_output:11}{usage.num_computed:10}"
        print(f"{name:20}{numbers}{seconds:10.2f}")
    print(
        f"computed tokens: {alone.num_computed / shared.num_computed:.1f}x fewer; time: {alone_s / shared_s:.1f}x faster"
    )
    return state
