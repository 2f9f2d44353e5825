"""`tidemill capabilities`: which features can be used together, and why others cannot."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tidemill.capabilities import DEVICE, FEATURES, REFUSALS, Refusal
from tidemill.errors import ConfigError

_DEVICES = frozenset(name for name, feature in FEATURES.items() if feature.group == DEVICE)
_PREFIXES = ("speculate ", "quantization ", "collectives ", "dtype ")


def capabilities(
    with_: Annotated[
        str | None,
        typer.Option(
            "--with",
            help="A feature, or the first word of several, like kv-policy: all others, and "
            "whether they go with it.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The whole table as JSON.")] = False,
) -> None:
    """Show which features can be used together."""
    if as_json:
        print(json.dumps(as_data(), indent=2))
        return
    console = Console(highlight=False)
    if with_ is None:
        for heading, rows in sections():
            table = Table(
                "feature", "not with", "because", "instead", title=heading, title_justify="left"
            )
            for row in rows:
                table.add_row(*row)
            console.print(table, markup=False)
        return
    for name in _named(with_):
        table = Table("feature", "answer", title=name, title_justify="left")
        for other in FEATURES:
            if other != name:
                table.add_row(other, "; ".join(cell(name, other)) or "yes")
        console.print(table, markup=False)


def _named(text: str) -> list[str]:
    names = [name for name in FEATURES if name == text] or [
        name for name in FEATURES if name.split(" ")[0] == text
    ]
    if not names:
        near = difflib.get_close_matches(text, FEATURES, n=1)
        fix = f"Did you mean {near[0]}?" if near else "`tidemill capabilities` lists them."
        raise ConfigError(f"There is no feature {text!r}.", fix=fix, param="with")
    return names


def cell(name: str, other: str) -> list[str]:
    """Why the two cannot be used together; empty: they can be."""
    found = []
    for refusal in REFUSALS:
        pair = {refusal.feature, *refusal.others}
        if {name, other} <= pair and (len(pair) == 2 or not {name, other} & _DEVICES):
            further = "".join(
                f" on {FEATURES[more].words}" for more in sorted(pair - {name, other})
            )
            found.append(f"{'left out' if refusal.is_left_out else 'no'}{further}: {refusal.why}")
        elif name == refusal.feature and other in refusal.needed:
            found.append(f"it needs {' or '.join(refusal.needed)}: {refusal.why}")
    return found


def sections() -> list[tuple[str, list[tuple[str, str, str, str]]]]:
    """The refusals by groups of features: a feature, what it cannot be used with, why, and what to
    do instead. Features with the same reason share a row."""
    merged: dict[tuple[str, str, str, bool], list[Refusal]] = {}
    for refusal in REFUSALS:
        group = FEATURES[refusal.feature].group
        merged.setdefault((group, refusal.why, refusal.fix, bool(refusal.needed)), []).append(
            refusal
        )
    found: dict[str, list[tuple[str, str, str, str]]] = {
        feature.group: [] for feature in FEATURES.values()
    }
    for (group, why, fix, _), refusals in merged.items():
        names = _listed(refusal.feature for refusal in refusals)
        places = {tuple(sorted(refusal.others & _DEVICES)) for refusal in refusals}
        others = [name for refusal in refusals for name in refusal.others - _DEVICES] or list(
            refusals[0].others
        )
        where = (
            f" (on {' or '.join(sorted(' and '.join(place) for place in places))})"
            if all(places) and others[0] not in _DEVICES
            else ""
        )
        needed = f"without {_listed(refusals[0].needed)}" if refusals[0].needed else ""
        what = " and ".join(
            filter(None, (needed, _listed(name for name in FEATURES if name in others) + where))
        )
        found[group].append(
            (names, what, why, "it is left out" if refusals[0].is_left_out else fix)
        )
    return [(group, rows) for group, rows in found.items() if rows]


def _listed(names: Iterable[str]) -> str:
    """Names with commas between them; of several values of an option, the option once."""
    kinds: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        option, _, value = (
            name.partition(" ")
            if "-" in name.partition(" ")[0] or name.startswith(_PREFIXES)
            else (name, "", "")
        )
        kinds.setdefault(option, []).append(value)
    return ", ".join(f"{option} {', '.join(values)}".strip() for option, values in kinds.items())


def as_data() -> dict[str, Any]:
    features = [
        {
            "name": feature.name,
            "group": feature.group,
            "words": feature.words,
            "param": feature.param,
        }
        for feature in FEATURES.values()
    ]
    refusals = [
        {
            "feature": refusal.feature,
            "with": sorted(refusal.others),
            "needs": list(refusal.needed),
            "why": refusal.why,
            "fix": refusal.fix,
            "left_out": refusal.is_left_out,
        }
        for refusal in REFUSALS
    ]
    return {"features": features, "refusals": refusals}
