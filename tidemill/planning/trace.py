"""Recorded traffic: Azure's CSV and Mooncake's JSONL, as rows and as arrivals of a simulation; and
a row as a line."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from tidemill.errors import ConfigError
from tidemill.planning.runner import FIRST_TOKEN
from tidemill.planning.simulator import Arrival
from tidemill.types.sampling import MAX_N

MOONCAKE_BLOCK = 512  # tokens that one hash of a Mooncake trace stands for
MAX_REQUESTS = 10_000_000
_MAX_LINE = 1 << 20  # bytes
_MAX_REASON = 100  # characters
_MOST = 1 << 31


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace."""

    at_s: float
    num_prompt: int
    num_output: int
    # a number for each block of its prompt; the same numbers: the same tokens
    blocks: tuple[int, ...] = ()
    priority: int = 0
    tenant: str = ""
    n: int = 1
    abort_s: float | None = None  # after its arrival
    # tokens that a number of `blocks` stands for: a part of MOONCAKE_BLOCK
    block_len: int = MOONCAKE_BLOCK
    ttft_s: float | None = None  # as it was when it was recorded
    e2e_s: float | None = None
    model: str = ""  # where several were recorded
    prompt_ids: tuple[int, ...] = ()  # its tokens, of a recording
    salt: str = ""  # of the prefix cache: others with the same prompt share nothing
    outputs: tuple[tuple[int, ...], ...] = ()  # the tokens of each sample, of a recording

    @property
    def long_blocks(self) -> tuple[int, ...]:
        """Numbers of MOONCAKE_BLOCK tokens each. A number stands for all blocks before it as well:
        the last is taken."""
        num = MOONCAKE_BLOCK // self.block_len
        return self.blocks[num - 1 :: num]


def read_rows(path: Path, limit: int = MAX_REQUESTS, key: bytes | None = None) -> list[Row]:
    """In the order of time, the first at 0. A folder is a recording, with its owner's `key` where
    it is sealed. A CSV has the columns TIMESTAMP, ContextTokens and GeneratedTokens. A line of a
    JSONL has timestamp (ms), input_length and output_length, and may have hash_ids (one for
    block_size tokens, or 512), priority, tenant, n, abort_ms (after its arrival), and ttft_ms and
    e2e_ms, as measured. Other fields are ignored, and so is a last line that was not written in
    full."""
    if path.is_dir():
        return from_zero(_recorded_rows(path, min(limit, MAX_REQUESTS), key))
    read = _azure_rows if path.suffix.lower() == ".csv" else _json_rows
    lines = _Lines()
    try:
        with path.open("rb") as file:
            rows = list(islice(read(lines.of(file)), min(limit, MAX_REQUESTS)))
    except OSError as error:
        raise ConfigError(
            f"The trace {path} cannot be read: {error.strerror}.", param="trace"
        ) from error
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
        csv.Error,
    ) as error:
        what = f"{path} cannot be read as a trace: line {lines.number}: {_reason(error)}."
        raise ConfigError(
            what, fix="Azure's CSV and Mooncake's JSONL are known.", param="trace"
        ) from error
    if not rows:
        raise ConfigError(f"{path} holds no request.", param="trace")
    return from_zero(rows)


def from_zero(rows: list[Row]) -> list[Row]:
    rows.sort(key=lambda row: row.at_s)
    start = rows[0].at_s
    return [replace(row, at_s=row.at_s - start) for row in rows]


def _recorded_rows(folder: Path, limit: int, key: bytes | None) -> list[Row]:
    from tidemill.planning.recorded import rows_of  # its rows are of this module

    return rows_of(folder, limit, key)


def arrivals(
    rows: Iterable[Row],
    *,
    time_scale: float = 1.0,
    length_scale: float = 1.0,
    max_context: int = _MOST,
) -> list[Arrival]:
    """Times and lengths are multiplied by the scales; a request that does not fit `max_context` is
    cut to it."""
    return list(
        coming(rows, time_scale=time_scale, length_scale=length_scale, max_context=max_context)
    )


def coming(
    rows: Iterable[Row],
    *,
    time_scale: float = 1.0,
    length_scale: float = 1.0,
    max_context: int = _MOST,
) -> Iterator[Arrival]:
    """The arrivals one by one, like `arrivals`: prompts of a long trace take more memory than all
    else."""
    for number, row in enumerate(rows):
        length, output = _cut(row, length_scale, max_context)
        prompt: tuple[int, ...] = row.prompt_ids[:length] if length_scale == 1 else ()
        if row.blocks and not prompt:
            prompt = prompt_of(
                row.blocks, length, number, max(1, round(row.block_len * length_scale))
            )
        at_s = row.at_s * time_scale
        abort_s = None if row.abort_s is None else at_s + row.abort_s
        yield Arrival(
            f"r{number}",
            at_s,
            length,
            output,
            row.priority,
            row.tenant,
            prompt,
            n=row.n,
            abort_s=abort_s,
            salt=row.salt,
        )


def num_cut(rows: Iterable[Row], *, length_scale: float = 1.0, max_context: int = _MOST) -> int:
    """Requests that do not fit."""
    return sum(
        _cut(row, length_scale, max_context) != _cut(row, length_scale, 1 << 100) for row in rows
    )


def _cut(row: Row, length_scale: float, max_context: int) -> tuple[int, int]:
    """Tokens of its prompt and its output: the output has at most half of the context, and the
    prompt the rest."""
    output = max(1, min(round(row.num_output * length_scale), max_context // 2))
    return max(1, min(round(row.num_prompt * length_scale), max_context - output)), output


def prompt_of(
    blocks: Iterable[int], length: int, number: int, block_len: int = MOONCAKE_BLOCK
) -> tuple[int, ...]:
    """Tokens, of which prompts share as many as their first blocks are the same. What blocks do not
    cover is nobody else's."""
    ids: list[int] = []
    for block in blocks:
        if len(ids) >= length:
            break
        ids += [block] * block_len
    own = FIRST_TOKEN // 2 + number
    return tuple((ids + [own] * (length - len(ids)))[:length])


class _Lines:
    """The lines of a file, and the number of the last one that was read."""

    def __init__(self) -> None:
        self.number = 0

    def of(self, file: BinaryIO) -> Iterator[str]:
        while line := file.readline(_MAX_LINE + 1):
            self.number += 1
            if len(line) > _MAX_LINE:
                raise ValueError(f"it has more than {_MAX_LINE:,} bytes")
            yield line.decode("utf-8")


def _reason(error: Exception) -> str:
    """Short, whatever the file holds."""
    match error:
        case UnicodeDecodeError():
            return "it is not text (UTF-8)"
        case json.JSONDecodeError():
            return f"it is not JSON: {error.msg}"
        case KeyError():
            return f"{error} is missing"
        case TypeError() | AttributeError():
            return "a value is missing or of the wrong kind"
        case RecursionError():
            return "it is nested too deeply"
    return ascii(str(error)[:_MAX_REASON])[1:-1]


def _azure_rows(lines: Iterable[str]) -> Iterator[Row]:
    for row in csv.DictReader(lines):
        # seven digits of a second: one too many for Python
        at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        yield Row(at, _number(row["ContextTokens"]), _number(row["GeneratedTokens"]))


def _json_rows(lines: Iterable[str]) -> Iterator[Row]:
    is_first = True
    for line in lines:
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            if is_first or line.endswith("\n"):
                raise
            return  # it was being written when the server or its machine stopped
        is_first = False
        blocks = tuple(_number(block) for block in row.get("hash_ids") or ())
        yield Row(
            _real(row["timestamp"]) / 1000,
            _number(row["input_length"]),
            _number(row["output_length"]),
            tuple(block % (FIRST_TOKEN // 2) for block in blocks),
            int(row.get("priority") or 0),
            str(row.get("tenant") or ""),
            _samples(row.get("n") or 1),
            _seconds(row.get("abort_ms")),
            _block_len(row.get("block_size") or MOONCAKE_BLOCK),
            _seconds(row.get("ttft_ms")),
            _seconds(row.get("e2e_ms")),
            str(row.get("model") or ""),
        )


def _number(value: Any) -> int:
    number = int(value)
    if not 0 <= number < 1 << 63:
        raise ValueError(f"{number} is not a number of tokens")
    return number


def _samples(value: Any) -> int:
    number = int(value)
    if not 1 <= number <= MAX_N:
        raise ValueError(f"n is {number}, not 1 to {MAX_N}")
    return number


def _block_len(value: Any) -> int:
    number = int(value)
    if number < 1 or MOONCAKE_BLOCK % number:
        raise ValueError(f"block_size is {number}, which does not divide {MOONCAKE_BLOCK}")
    return number


def _seconds(ms: Any) -> float | None:
    return None if ms is None else _real(ms) / 1000


def _real(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{number} is not a time")
    return number
