"""Requests and their arrival times: synthetic lengths or a recorded trace; Poisson, bursty or
recorded arrivals."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tidemill.planning.trace import read_rows

_FIRST_ID = 100  # below it many vocabularies have special tokens


@dataclass(frozen=True, slots=True)
class Item:
    """One request of a workload."""

    at_s: float
    prompt_ids: list[int]
    num_output: int


def synthetic(
    num_requests: int,
    prompt_len: int,
    output_len: int,
    *,
    spread: float = 0.0,
    shared_prefix: int = 0,
    vocab: int = 30_000,
    seed: int = 0,
) -> list[Item]:
    """Random prompts, all at time 0. Lengths are uniform within ±spread of the given ones."""
    rng = random.Random(seed)
    prefix = _ids(rng, shared_prefix, vocab)

    def around(length: int) -> int:
        return max(1, round(length * rng.uniform(1 - spread, 1 + spread)))

    return [
        Item(0.0, prefix + _ids(rng, around(prompt_len), vocab), around(output_len))
        for _ in range(num_requests)
    ]


def arriving(
    items: Iterable[Item], rate: float, *, burstiness: float = 1.0, seed: int = 0
) -> list[Item]:
    """The same requests, `rate` a second on average. Gaps are gamma distributed: burstiness 1 is a
    Poisson process, larger values come in bursts (the coefficient of variation of the gaps is its
    square root)."""
    rng = random.Random(seed + 1)
    at, out = 0.0, []
    for item in items:
        out.append(Item(at, item.prompt_ids, item.num_output))
        at += rng.gammavariate(1 / burstiness, burstiness / rate)
    return out


def read_trace(
    path: Path,
    *,
    limit: int,
    time_scale: float = 1.0,
    length_scale: float = 1.0,
    max_context: int = 4096,
    vocab: int = 30_000,
    seed: int = 0,
) -> list[Item]:
    """A recorded trace: Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens), Mooncake's JSONL
    (timestamp in ms, lengths, a number for each block of tokens, so that shared prefixes stay
    shared), or a recording, with its tokens. Times and lengths are multiplied by the scales; a
    request that does not fit `max_context` is cut to it."""
    rows = read_rows(path, limit)
    rng = random.Random(seed)
    items = []
    for row in rows:
        output = max(1, min(round(row.num_output * length_scale), max_context // 2))
        length = max(1, min(round(row.num_prompt * length_scale), max_context - output))
        ids: list[int] = []
        block_len = max(1, round(row.block_len * length_scale))
        if row.prompt_ids and length_scale == 1:
            ids = list(row.prompt_ids)
        for block in () if ids else row.blocks[: -(-length // block_len)]:
            ids += _ids(random.Random(f"block {block}"), block_len, vocab)
        ids = (ids + _ids(rng, max(0, length - len(ids)), vocab))[:length]
        items.append(Item(row.at_s * time_scale, ids, output))
    return items


def _ids(rng: random.Random, num: int, vocab: int) -> list[int]:
    return [rng.randrange(min(_FIRST_ID, vocab // 2), vocab) for _ in range(num)]
