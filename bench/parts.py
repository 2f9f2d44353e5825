"""Tables whose rows take long: shared out among processes, and put together from their files.

for i in 1 2 3 4; do python -m bench.compression --part $i/4 --results part-$i.json & done; wait
python -m bench.compression --merge part-*.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Found = dict[str, dict[str, Any]]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only", default="", help="rows whose name contains one of these, separated by |"
    )
    parser.add_argument(
        "--part", default="1/1", help="I/N: of these rows, every N-th from the I-th on"
    )
    parser.add_argument(
        "--results", type=Path, help="a JSON file; what is in it is not measured again"
    )
    parser.add_argument(
        "--merge", type=Path, nargs="+", help="print the table of these files, and measure nothing"
    )


def chosen(names: Iterable[str], given: argparse.Namespace) -> list[str]:
    number, _, total = given.part.partition("/")
    wanted = [name for name in names if any(part in name for part in given.only.split("|"))]
    return wanted[int(number) - 1 :: int(total)]


def read(given: argparse.Namespace) -> Found:
    """What was measured before."""
    return json.loads(given.results.read_text()) if given.results and given.results.exists() else {}


def merged(given: argparse.Namespace, names: Iterable[str]) -> Found:
    """In the order of the rows."""
    found: Found = {}
    for path in given.merge:
        found |= json.loads(path.read_text())
    return {name: found[name] for name in ("original", *names) if name in found}


def keep(given: argparse.Namespace, found: Found) -> None:
    if given.results:
        given.results.write_text(json.dumps(found, indent=1))
