"""The engine in this process under a workload: arrivals in real time, records from its own events."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from tidemill.bench.record import Record
from tidemill.bench.workload import Item
from tidemill.config import EngineConfig
from tidemill.config.compute import WINDOW_MS
from tidemill.engine.core import EngineCore
from tidemill.engine.load import core_of
from tidemill.models.base import CausalLM
from tidemill.types import events
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit


def run_core(
    core: EngineCore, items: Sequence[Item], on_done: Callable[[int], None] | None = None
) -> list[Record]:
    """Submit every item at its time, step, and record each token when its step ends."""
    records = [Record(item.at_s, num_prompt=len(item.prompt_ids)) for item in items]
    begin = time.monotonic()  # the engine's clock, so that its events can be placed
    num_sent = num_done = 0
    while num_done < len(items):
        now = time.monotonic() - begin
        while num_sent < len(items) and items[num_sent].at_s <= now:
            item = items[num_sent]
            params = SamplingParams(temperature=0.0, max_tokens=item.num_output, ignore_eos=True)
            records[num_sent].sent_s = time.monotonic() - begin
            core.submit(Submit(str(num_sent), item.prompt_ids, params))
            num_sent += 1
        if not core.has_work:
            time.sleep(max(0.0, items[num_sent].at_s - (time.monotonic() - begin)))
            continue
        output, failed = core.step()
        now = time.monotonic() - begin
        for event in output.events:
            if (
                isinstance(event, events.Admitted)
                and records[int(event.request_id)].started_s is None
            ):
                records[int(event.request_id)].started_s = event.time_s - begin
        for delta in output.deltas:
            record = records[int(delta.request_id)]
            record.token_times_s += [now] * len(delta.token_ids)
            record.num_output += len(delta.token_ids)
            record.num_cached, record.end_s = delta.num_cached, now
            num_done += delta.finish_reason is not None
        for refused in failed:
            records[int(refused.request_id or 0)].error = refused.message
            num_done += 1
        if on_done:
            on_done(num_done)
    return records


def run_policies(
    model: CausalLM,
    config: EngineConfig,
    policies: Sequence[str],
    items: Sequence[Item],
    on_done: Callable[[int], None] | None = None,
) -> dict[str, list[Record]]:
    """The same load under each policy, one after the other, with the same weights."""
    windows = {"dynamic": WINDOW_MS / 1000}
    configs = {
        policy: replace(config, policy=policy, batch_window_s=windows.get(policy, 0.0))
        for policy in policies
    }
    return {
        policy: run_core(core_of(model, own), items, on_done) for policy, own in configs.items()
    }
