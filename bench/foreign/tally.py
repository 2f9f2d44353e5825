"""What became of each test of a foreign suite, and the percentage that counts."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

PASSED, DESIGN, UNEXPLAINED, NOT_APPLICABLE = (
    "passed",
    "by design",
    "without a reason",
    "not applicable",
)
# a regular expression that is searched for in the name of a test: the reason
Rules = dict[str, str]


@dataclass(frozen=True)
class Outcome:
    test: str  # file::class::name[parameters]
    outcome: str  # passed, failed or skipped
    message: str = ""


@dataclass(frozen=True)
class Verdict:
    test: str
    kind: str
    reason: str = ""


def reason_for(test: str, rules: Rules) -> str | None:
    return next((reason for pattern, reason in rules.items() if re.search(pattern, test)), None)


def judge(outcomes: Iterable[Outcome], by_design: Rules, not_applicable: Rules) -> list[Verdict]:
    """What is not applicable does not count, not even if it passed."""
    verdicts = {}
    for one in outcomes:
        design, left_out = reason_for(one.test, by_design), reason_for(one.test, not_applicable)
        if one.outcome == "skipped" or left_out is not None:
            verdict = Verdict(one.test, NOT_APPLICABLE, left_out or one.message)
        elif one.outcome == "passed":
            verdict = Verdict(one.test, PASSED)
        elif design is not None:
            verdict = Verdict(one.test, DESIGN, design)
        else:
            verdict = Verdict(one.test, UNEXPLAINED, one.message)
        verdicts[one.test] = verdict  # of a test that was run twice, the last
    return list(verdicts.values())


def share_passed(verdicts: Iterable[Verdict]) -> float:
    """Of what is applicable: what differs by design counts as failed."""
    counts = Counter(verdict.kind for verdict in verdicts)
    applicable = counts[PASSED] + counts[DESIGN] + counts[UNEXPLAINED]
    return counts[PASSED] / applicable if applicable else 0.0


def table(verdicts: list[Verdict]) -> str:
    """One row for each file, then the failures and what was left out by reason."""
    files: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        files.setdefault(verdict.test.split("::")[0], Counter())[verdict.kind] += 1
    kinds = (PASSED, DESIGN, UNEXPLAINED, NOT_APPLICABLE)
    width = max([4, *map(len, files)])
    lines = [f"{'file':{width}}  passed  by design  without a reason  not applicable"]
    for name, counts in sorted(files.items()):
        lines.append(
            f"{name:{width}}  {counts[PASSED]:6}  {counts[DESIGN]:9}  {counts[UNEXPLAINED]:16}  {counts[NOT_APPLICABLE]:14}"
        )
    total = Counter(verdict.kind for verdict in verdicts)
    applicable = sum(total[kind] for kind in kinds[:3])
    lines += [
        "",
        f"{total[PASSED]} of {applicable} applicable tests passed: {share_passed(verdicts):.1%}",
    ]
    for kind, title in (
        (UNEXPLAINED, "Failed without a reason"),
        (DESIGN, "Failed, by design"),
        (NOT_APPLICABLE, "Not applicable"),
    ):
        reasons: dict[str, list[str]] = {}
        for verdict in verdicts:
            if verdict.kind == kind:
                first = (verdict.reason or "no reason").splitlines()[0][:160]
                reasons.setdefault(first, []).append(verdict.test)
        lines += ["", f"{title}: {total[kind]}"] if reasons else []
        for reason, tests in sorted(reasons.items(), key=lambda item: -len(item[1])):
            lines.append(f"  {len(tests):3}  {reason}")
            lines += (
                [f"         {test.split('::', 1)[-1][:140]}" for test in tests]
                if kind != NOT_APPLICABLE
                else []
            )
    return "\n".join(lines)


def append(path: Path, outcome: Outcome) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")


def read_outcomes(path: Path) -> list[Outcome]:
    return (
        [Outcome(**json.loads(line)) for line in path.read_text().splitlines()]
        if path.exists()
        else []
    )
