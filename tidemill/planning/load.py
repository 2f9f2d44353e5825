"""What is asked of a cluster: jobs at a rate, or of a recorded trace."""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from tidemill.errors import ConfigError
from tidemill.sim.cluster import Job

_MAX_LINE = 1_000_000  # characters


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
    if len(parts) > 2 or not all(part.isdigit() and 0 < int(part) <= 1_000_000 for part in parts):
        raise ConfigError(f"{name} {text!r} is not a number of tokens.", fix="Write 1000, or 500-1500.")
    if int(parts[0]) > int(parts[-1]):
        raise ConfigError(f"{name} {text!r} ends before it begins.", fix=f"Write {parts[1]}-{parts[0]}.")
    return Lengths(int(parts[0]), int(parts[-1]))


def poisson(rates: Sequence[tuple[str, float]], num: int, prompt: Lengths, output: Lengths, seed: int = 0) -> list[Job]:
    """`rates`: of each model. `num`: jobs in all."""
    rng = random.Random(seed)
    total = math.fsum(rate for _, rate in rates)
    at, jobs = 0.0, []
    for number in range(num):
        at += rng.expovariate(total)
        model = rng.choices([name for name, _ in rates], [rate for _, rate in rates])[0]
        jobs.append(Job(number, at, prompt.draw(rng), output.draw(rng), model=model))
    return jobs


def read_trace(path: Path, model: str = "", limit: int | None = None, speed: float = 1.0) -> list[Job]:
    """Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens) or Mooncake's JSONL (milliseconds, lengths, a number for each 512
    tokens of the prompt). `speed`: times pass so many times faster."""
    try:
        rows = _azure(path) if path.suffix == ".csv" else _mooncake(path)
        jobs = [
            Job(number, at, prompt, max(output, 1), blocks, model)
            for number, (at, prompt, output, blocks) in zip(range(limit or 2**40), rows, strict=False)
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        fix = "Azure CSV and Mooncake JSONL are known."
        raise ConfigError(f"{path} cannot be read as a trace: {error!r}.", fix=fix) from error
    if not jobs:
        raise ConfigError(f"{path} holds no request.")
    jobs.sort(key=lambda job: job.at_s)
    start = jobs[0].at_s
    return [replace(job, number=i, at_s=(job.at_s - start) / speed) for i, job in enumerate(jobs)]


def copies(jobs: Sequence[Job], num: int) -> Iterator[Job]:
    """So many times the load: the same requests of other users, who share no prefix with each other, a little apart in time."""
    most = 1 + max((block for job in jobs for block in job.blocks), default=0)
    gap = (jobs[-1].at_s - jobs[0].at_s) / max(len(jobs) - 1, 1) / num
    for job in jobs:
        for i in range(num):
            blocks = tuple(block + i * most for block in job.blocks)
            yield replace(job, number=job.number * num + i, at_s=job.at_s + i * gap, blocks=blocks)


def in_order(jobs: Iterable[Job]) -> list[Job]:
    return [replace(job, number=i) for i, job in enumerate(sorted(jobs, key=lambda job: job.at_s))]


def _azure(path: Path) -> Iterator[tuple[float, int, int, tuple[int, ...]]]:
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            yield at, _positive(row["ContextTokens"]), int(row["GeneratedTokens"]), ()


def _mooncake(path: Path) -> Iterator[tuple[float, int, int, tuple[int, ...]]]:
    with path.open() as file:
        while line := file.readline(_MAX_LINE):
            row = json.loads(line)
            blocks = tuple(_natural(block) for block in row["hash_ids"])
            yield row["timestamp"] / 1000, _positive(row["input_length"]), int(row["output_length"]), blocks


def _positive(value: object) -> int:
    num = int(str(value))
    if not 0 < num <= 10_000_000:
        raise ValueError(f"a length of {num} tokens")
    return num


def _natural(value: object) -> int:
    num = int(str(value))
    if not 0 <= num < 2**24:
        raise ValueError(f"the block {num}")
    return num
