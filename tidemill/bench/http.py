"""An open-loop load generator for any OpenAI-compatible server: requests are sent when due, not when earlier ones end."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from tidemill.bench.record import Record
from tidemill.bench.workload import Item
from tidemill.errors import ConfigError


async def run_load(
    base_url: str,
    model: str,
    items: Sequence[Item],
    *,
    api_key: str | None = None,
    ignore_eos: bool = True,
    timeout_s: float = 600.0,
    on_done: Callable[[int], None] | None = None,
) -> list[Record]:
    """Send every item at its time and record what comes back."""
    try:
        import httpx
    except ImportError:
        raise ConfigError("The load generator needs httpx.", fix="Run: pip install 'tidemill[bench]'") from None

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    records = [Record(item.at_s, num_prompt=len(item.prompt_ids)) for item in items]
    num_done = 0

    async with httpx.AsyncClient(base_url=base_url.rstrip("/"), headers=headers, timeout=timeout_s, limits=limits) as client:
        begin = time.perf_counter()

        async def one(item: Item, record: Record) -> None:
            nonlocal num_done
            body: dict[str, Any] = {
                "model": model, "prompt": item.prompt_ids, "max_tokens": item.num_output, "temperature": 0.0,
                "stream": True, "stream_options": {"include_usage": True},
            }  # fmt: skip
            if ignore_eos:  # and no default of the model that would change what is computed
                body |= {"ignore_eos": True, "repetition_penalty": 1.0}
            record.sent_s = time.perf_counter() - begin
            try:
                async with client.stream("POST", "/completions", json=body) as reply:
                    if reply.status_code != 200:
                        text = (await reply.aread()).decode(errors="replace")
                        record.error = f"{reply.status_code}: {text[:200]}"
                    else:
                        async for line in event_lines(reply):
                            _take_line(line, record, time.perf_counter() - begin)
            except (httpx.HTTPError, ValueError) as error:
                record.error = type(error).__name__
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
            tasks.append(asyncio.create_task(one(item, record)))
        await asyncio.gather(*tasks)
    return records


def check_server(base_url: str) -> None:
    """Nothing is measured where nothing listens."""
    try:
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(f"{base_url!r} is no address.", fix="Give one like http://127.0.0.1:8000/v1 with --base-url.")
        socket.create_connection((url.hostname, url.port or (443 if url.scheme == "https" else 80)), timeout=10).close()
    except (OSError, ValueError) as error:
        fix = "Start it with `tidemill serve`, or give its address with --base-url."
        raise ConfigError(f"No server responds at {base_url}: {error}.", fix=fix) from error


async def event_lines(reply: Any) -> AsyncGenerator[str, None]:
    """Lines of server-sent events. httpx's own reader also breaks lines at Unicode separators within a text."""
    rest = b""
    async for part in reply.aiter_bytes():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            yield line.decode()


def _take_line(line: str, record: Record, now_s: float) -> None:
    if not line.startswith("data:") or line.endswith("[DONE]"):
        return
    chunk = json.loads(line[5:])
    if "error" in chunk:
        record.error = str(chunk["error"])[:200]
        return
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
