"""The load of a cluster: jobs at a rate, or of a recorded trace."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tidemill.errors import ConfigError
from tidemill.planning.cluster import Job
from tidemill.planning.trace import MAX_REQUESTS, read_rows

_MOST = 10_000_000  # tokens of a request


@dataclass(frozen=True, slots=True)
class Lengths:
    """Uniform within these bounds."""

    least: int
    most: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.least, self.most)


def parse_lengths(text: str, name: str) -> Lengths:
    """Like 1000, or 500-1500."""
    parts = text.split("-")
    if len(parts) > 2 or not all(part.isdecimal() and 0 < int(part) <= 1_000_000 for part in parts):
        raise ConfigError(
            f"{name} {text!r} is not a number of tokens.", fix="Write 1000, or 500-1500."
        )
    if int(parts[0]) > int(parts[-1]):
        raise ConfigError(
            f"{name} {text!r} ends before it begins.", fix=f"Write {parts[1]}-{parts[0]}."
        )
    return Lengths(int(parts[0]), int(parts[-1]))


def poisson(
    rates: Sequence[tuple[str, float]], num: int, prompt: Lengths, output: Lengths, seed: int = 0
) -> list[Job]:
    """`rates`: of each model. `num`: jobs in all."""
    rng = random.Random(seed)
    total = math.fsum(rate for _, rate in rates)
    at, jobs = 0.0, []
    for number in range(num):
        at += rng.expovariate(total)
        model = rng.choices([name for name, _ in rates], [rate for _, rate in rates])[0]
        jobs.append(Job(number, at, prompt.draw(rng), output.draw(rng), model=model))
    return jobs


def read_trace(
    path: Path, model: str = "", limit: int = MAX_REQUESTS, speed: float = 1.0
) -> list[Job]:
    """`speed`: its time passes so many times faster."""
    rows = read_rows(path, limit)
    most = max(row.num_prompt + row.num_output for row in rows)
    if most > _MOST:
        raise ConfigError(
            f"{path} cannot be read as a trace: a request has {most:,} tokens.",
            fix=f"At most {_MOST:,} are.",
        )
    return [
        Job(
            number,
            row.at_s / speed,
            max(row.num_prompt, 1),
            max(row.num_output, 1),
            row.long_blocks,
            model,
        )
        for number, row in enumerate(rows)
    ]


def copies(jobs: Sequence[Job], num: int) -> Iterator[Job]:
    """The load so many times: the same requests of other users, who share no prefix with each
    other, a little apart in time."""
    most = 1 + max((block for job in jobs for block in job.blocks), default=0)
    gap = (jobs[-1].at_s - jobs[0].at_s) / max(len(jobs) - 1, 1) / num
    for job in jobs:
        for i in range(num):
            blocks = tuple(block + i * most for block in job.blocks)
            yield replace(job, number=job.number * num + i, at_s=job.at_s + i * gap, blocks=blocks)


def in_order(jobs: Iterable[Job]) -> list[Job]:
    return [replace(job, number=i) for i, job in enumerate(sorted(jobs, key=lambda job: job.at_s))]
