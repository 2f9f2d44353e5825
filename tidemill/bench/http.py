"""An open-loop load generator for any OpenAI-compatible server: requests are sent when due, not
when earlier ones end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from tidemill.bench.record import Record
from tidemill.bench.workload import Item
from tidemill.client import AsyncClient, BadResponse, Client
from tidemill.errors import InvalidRequest, TidemillError


async def run_load(
    url: str,
    model: str,
    items: Sequence[Item],
    *,
    api_key: str | None = None,
    ignore_eos: bool = True,
    timeout_s: float = 600.0,
    on_done: Callable[[int], None] | None = None,
) -> list[Record]:
    """Send every item at its time and record what comes back."""
    records = [Record(item.at_s, num_prompt=len(item.prompt_ids)) for item in items]
    num_done = 0

    async with AsyncClient(url, api_key, timeout_s=timeout_s, connect_s=timeout_s) as client:
        begin = time.perf_counter()

        async def send(item: Item, record: Record) -> None:
            nonlocal num_done
            body: dict[str, Any] = {
                "model": model, "prompt": item.prompt_ids, "max_tokens": item.num_output, "temperature": 0.0,
                "stream": True, "stream_options": {"include_usage": True},
            }  # fmt: skip
            if ignore_eos:  # and no default of the model that would change what is computed
                body |= {"ignore_eos": True, "repetition_penalty": 1.0}
            record.sent_s = time.perf_counter() - begin
            try:
                async with client.stream("/v1/completions", body) as chunks:
                    async for chunk in chunks:
                        _take(chunk, record, time.perf_counter() - begin)
            except TidemillError as error:
                record.error = error.message[:200]
            if record.error is None and not record.token_times_s:
                record.error = "no tokens"
            num_done += 1
            if on_done:
                on_done(num_done)

        tasks = []
        for item, record in zip(items, records, strict=True):
            delay = item.at_s - (time.perf_counter() - begin)
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.append(asyncio.create_task(send(item, record)))
        await asyncio.gather(*tasks)
    return records


def check_server(url: str, api_key: str | None) -> None:
    """Nothing is measured where nothing listens, or where the key is wrong."""
    with (
        Client(url, api_key, timeout_s=10) as client,
        contextlib.suppress(BadResponse, InvalidRequest),
    ):
        client.json("GET", "/v1/models")


def _take(chunk: dict[str, Any], record: Record, now_s: float) -> None:
    choices = chunk.get("choices") or []
    if any(choice.get("text") or choice.get("finish_reason") for choice in choices):
        if any(choice.get("text") for choice in choices) or not record.token_times_s:
            record.token_times_s.append(now_s)
            record.num_output = max(record.num_output, len(record.token_times_s))
        record.end_s = now_s
    usage = chunk.get("usage")
    if usage:
        record.num_output = usage["completion_tokens"]
        record.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
