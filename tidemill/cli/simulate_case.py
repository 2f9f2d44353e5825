"""The case that `tidemill simulate` simulates: rows of a trace, or a recording with its own engine
and profile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tidemill.bench.record import Record
from tidemill.cli.settings import Settings
from tidemill.config import fmt_bytes
from tidemill.errors import ConfigError
from tidemill.planning.fleet import Delays
from tidemill.planning.profile import MOST_ROWS, Profile
from tidemill.planning.simulator import SimConfig
from tidemill.planning.trace import Row, read_rows
from tidemill.types.cache_layout import Group

DEFAULT_PROFILE = "h200-llama8b"
_MOST_PAGES = 2**24  # some hundred bytes of memory each
_FIELDS = {
    "policy": ("policy", "batch_window_s"), "max-context": ("max_context",), "max-requests": ("num_rows",),
    "token-budget": ("token_budget",), "kv-memory": ("num_pages",), "page-size": ("page_size", "num_pages"),
    "prefix-caching": ("prefix_caching",), "prefix-index": ("prefix_index",), "queue-order": ("queue_order",),
    "batch-window": ("batch_window_s",), "evict": ("evict",), "max-pinned": ("max_pinned",),
}  # fmt: skip
_SPARE = 0.1  # of a machine's memory that is left alone


@dataclass(slots=True)
class RecordedCase:
    """One model's requests and the engine that they are simulated in."""

    rows: list[Row]
    config: SimConfig
    profile: Profile
    delays: Delays
    model: str = ""
    num_engines: int = 1
    page_bytes: int = 0
    free_bytes: int = 0
    speeds: tuple[float, float] = (1.0, 1.0)
    faster: Profile | None = None  # of the machine's good and bad times
    slower: Profile | None = None

    def recorded(self, rows: Iterable[Row]) -> list[Record]:
        return recorded_of(rows)


def cases_of(
    trace: Path,
    settings: Settings,
    profile: str,
    limit: int,
    model: str,
    server: int,
    key: Path | None,
) -> list[RecordedCase]:
    """One for each model. `profile`: another than a recording's own."""
    if not trace.is_dir():
        for flag, value in (("--model", model), ("--server", server), ("--key", key)):
            if value:
                raise ConfigError(
                    f"{flag} is for a recording, and {trace} is a file.", fix=f"Leave {flag} out."
                )
        cost = Profile.load(profile or DEFAULT_PROFILE)
        config = engine_of(settings, cost)
        return [
            RecordedCase(
                read_rows(trace, limit),
                config,
                cost,
                Delays(),
                cost.model.name,
                1,
                _page_bytes(config, cost),
            )
        ]
    from tidemill.planning.recorded_engine import recorded_engine, recorded_models
    from tidemill.record.reader import Recording

    recording = Recording(trace, _key(key))
    names = recorded_models(recording)
    if model and model not in names:
        fix = f"It has {', '.join(names) or 'none'}."
        raise ConfigError(
            f"The recording has no request of a model {model!r}.", fix=fix, param="model"
        )
    cases = []
    for name in [model] if model else names:
        loaded = Profile.load(profile) if profile else None
        found = recorded_engine(recording, name, limit, server, loaded)
        config = (
            engine_of(settings, found.profile)
            if loaded
            else _changed(found.config, settings, found.profile)
        )
        free_bytes = int(found.memory_bytes * (1 - _SPARE)) - found.used_bytes
        cases.append(
            RecordedCase(
                found.rows, config, found.profile, Delays() if loaded else found.delays, name, 1 if loaded else found.num_engines,
                _page_bytes(config, found.profile), max(free_bytes, 0), found.speeds, found.faster,
                found.slower,
            )
        )  # fmt: skip
    if not cases:
        raise ConfigError(f"{trace} holds no request that has ended.", param="trace")
    return cases


def _key(path: Path | None) -> bytes | None:
    from tidemill.cli.serve import data_key
    from tidemill.record.writer import read_key

    if path is not None:
        return read_key(path.expanduser())
    return read_key(data_key()) if data_key().exists() else None


def _page_bytes(config: SimConfig, profile: Profile) -> int:
    return profile.engine.page_bytes or config.page_size * profile.model.kv_bytes_per_token


def _changed(config: SimConfig, settings: Settings, profile: Profile) -> SimConfig:
    """The recorded engine, with the options that are given."""
    given = [name for name in _FIELDS if settings.source(name)]
    if not given:
        return config
    asked = engine_of(settings, profile)
    fields: dict[str, Any] = {
        field: getattr(asked, field) for name in given for field in _FIELDS[name]
    }
    config = replace(config, **fields)
    if config.background_budget is not None and config.background_budget > config.token_budget:
        config = replace(config, background_budget=config.token_budget)
    return config


def engine_of(settings: Settings, profile: Profile) -> SimConfig:
    """The engine to simulate. Options that are not given are as in the profile."""
    own, page_size = profile.engine, settings["page-size"] or profile.engine.page_size
    if page_size & (page_size - 1):
        raise ConfigError(
            f"page_size is {page_size}.",
            fix="It must be a power of two up to 64.",
            param="page_size",
        )
    if own.groups and page_size != own.page_size:
        what = f"page_size is {page_size}, and the profile's layers with windows or states were measured with {own.page_size}."
        raise ConfigError(what, fix="Leave --page-size out.", param="page_size")
    page_bytes = own.page_bytes or page_size * profile.model.kv_bytes_per_token
    kv_bytes = settings["kv-memory"] or own.num_pages * own.page_size // page_size * page_bytes
    num_pages = int(kv_bytes // page_bytes)
    max_context, num_rows = (
        settings["max-context"] or own.max_context,
        settings["max-requests"] or own.max_requests,
    )
    token_budget = settings["token-budget"] or own.token_budget
    if num_rows > MOST_ROWS:
        raise ConfigError(
            f"--max-requests {num_rows} is too large.",
            fix=f"At most {MOST_ROWS:,}.",
            param="max_requests",
        )
    if num_pages > _MOST_PAGES:
        what = f"{fmt_bytes(kv_bytes)} of KV cache are {num_pages:,} pages, and at most {_MOST_PAGES:,} can be simulated."
        raise ConfigError(
            what, fix="Give less --kv-memory, or a larger --page-size.", param="kv_memory_bytes"
        )
    num_needed = sum(
        group.most_pages(max_context, token_budget) for group in own.groups or (Group(page_size),)
    )
    if num_pages < num_needed:
        pages = f"{num_pages:,} pages, and a request of {max_context:,} tokens needs up to {num_needed:,}"
        what = f"{fmt_bytes(kv_bytes)} of KV cache hold {pages}."
        raise ConfigError(
            what, fix="Give more --kv-memory, or less --max-context.", param="kv_memory_bytes"
        )
    window_ms = settings["batch-window"]
    window_ms = (
        window_ms if window_ms is not None else 50.0 if settings["policy"] == "dynamic" else 0.0
    )
    return replace(
        SimConfig.measured(own),
        policy=settings["policy"],
        num_rows=num_rows,
        token_budget=token_budget,
        num_pages=num_pages,
        page_size=page_size,
        max_context=max_context,
        prefix_caching=settings["prefix-caching"],
        prefix_index=settings["prefix-index"],
        queue_order=settings["queue-order"],
        batch_window_s=window_ms / 1000,
        evict=settings["evict"],
        max_pinned=settings["max-pinned"],
    )


def recorded_of(rows: Iterable[Row]) -> list[Record]:
    """The record of each sample, as the server that recorded the trace measured its request."""
    records = []
    for row in rows:
        if row.ttft_s is not None and row.e2e_s is not None:
            first_s, end_s = row.at_s + row.ttft_s, row.at_s + row.e2e_s
            records += [
                Record(
                    row.at_s,
                    row.at_s,
                    None,
                    [first_s],
                    end_s,
                    row.num_prompt,
                    0,
                    max(row.num_output, 1),
                )
            ] * row.n
    return records
