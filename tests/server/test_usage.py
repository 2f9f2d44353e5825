"""The ledger: whose requests the machine's time went to. Its rows add up to all of it."""

from __future__ import annotations

import ctypes
import gc
import re
import time
from types import SimpleNamespace

import httpx
import pytest

from tests.helpers import load_model, make_core
from tests.server.conftest import KEYS, Server
from tests.waiting import until
from tidemill.engine.host_times import HostTimes
from tidemill.engine.ledger import MAX_TENANTS, OTHERS, Ledger
from tidemill.engine.metrics import Metrics
from tidemill.sched.clock import MonotonicClock
from tidemill.server.http.context import RequestContext
from tidemill.server.observe import energy, usage
from tidemill.types import events
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

ADMIN = "key-of-the-administrator"


def planned(at, step, **tokens):
    counts = tuple((f"{tenant}/x/0", num) for tenant, num in tokens.items())
    return events.StepPlanned(at, step, sum(tokens.values()), 64, 1, 0, 1, 0, 1, counts)


def submitted(at, tenant, num_prompt=4, request="x"):
    return events.Submitted(at, f"{tenant}/{request}/0", num_prompt, tenant=tenant)


def seconds(ledger, now):
    tenants, idle, own = ledger.read(now)
    return (
        {name: (account.device_s, account.host_s) for name, account in tenants.items()},
        idle.seconds,
        own.seconds,
    )


def test_a_step_is_shared_by_the_tokens_computed():
    ledger = Ledger()
    ledger.take(
        [
            submitted(1.0, "a"),
            submitted(1.0, "b"),
            events.LoopTimed(2.0, messages_s=0.25, idle_s=0.75),
        ]
    )
    ledger.take(
        [planned(2.5, 0, a=3, b=1), events.StepDone(6.5, 0, 4.0, 1, launch_s=0.25, commit_s=0.25)]
    )
    # of the 0.25 s before and 0.5 s of planning, and of 4 s with 0.5 s of the host
    assert seconds(ledger, 6.5) == ({"a": (2.625, 0.9375), "b": (0.875, 0.3125)}, 0.75, 0.0)
    assert seconds(ledger, 8.5)[1] == 2.75  # nothing is computed
    ledger.take([events.LoopTimed(7.5, outputs_s=0.25, idle_s=0.5), planned(7.5, 1, a=1)])
    assert seconds(ledger, 8.5) == ({"a": (3.625, 1.4375), "b": (0.875, 0.3125)}, 1.25, 0.0)
    assert ledger.accounts["a"].num_computed == 4


def test_steps_that_are_launched_ahead_are_counted_once():
    ledger = Ledger()
    ledger.take([submitted(1.0, "a"), submitted(1.0, "b"), events.LoopTimed(1.0, idle_s=1.0)])
    ledger.take(
        [
            planned(1.0, 0, a=1),
            planned(2.0, 1, b=1),
            events.StepDone(4.0, 0, 3.0, 1),
            planned(5.0, 2, a=1),
        ]
    )
    ledger.take([events.StepDone(6.0, 1, 4.0, 1), events.StepDone(7.0, 2, 2.0, 1)])
    assert seconds(ledger, 7.0) == ({"a": (4.0, 0.0), "b": (2.0, 0.0)}, 1.0, 0.0)


def test_a_lost_engine_is_nobodys():
    ledger = Ledger()
    ledger.take([submitted(1.0, "a"), events.LoopTimed(1.0, idle_s=1.0), planned(1.0, 0, a=1)])
    ledger.take(
        [
            events.EngineDown(3.0, "killed"),
            events.EngineRestarted(8.0, "killed", 1),
            events.LoopTimed(9.0, idle_s=0.5),
        ]
    )
    tenants, idle_s, own_s = seconds(ledger, 9.0)
    assert (tenants["a"], idle_s, own_s) == ((0.0, 0.0), 1.5, 7.0)


def test_an_engine_of_another_machine_has_another_clock():
    ledger, ahead = Ledger(), time.monotonic() + 1e6
    ledger.take([events.ModelLoaded(time.monotonic(), "x", 1, 1.0), submitted(ahead, "a")])
    ledger.take(
        [
            events.LoopTimed(ahead, idle_s=1.0),
            planned(ahead, 0, a=1),
            events.StepDone(ahead + 2, 0, 2.0, 1),
        ]
    )
    ledger.take(
        [
            events.EngineDown(time.monotonic(), "lost"),
            events.EngineRestarted(time.monotonic(), "lost", 0),
        ]
    )
    tenants, idle, own = ledger.read(time.monotonic())
    assert tenants["a"].seconds == pytest.approx(2)
    assert idle.seconds == pytest.approx(1)
    assert own.seconds < 60


def test_garbage_collection_is_told():
    emitted, times = [], HostTimes(MonotonicClock())
    times.watch_gc()
    try:
        gc.collect()
    finally:
        gc.callbacks.pop()
    times.mark("messages")
    times.tell(emitted.append)
    (told,) = emitted
    assert told.gc_s > 0
    assert told.messages_s >= 0


def test_tokens_of_samples_and_of_aborted_requests():
    ledger = Ledger()
    for sample in ("a/x/0:0", "a/x/0:1", "a/y/0"):
        ledger.take([events.Submitted(1.0, sample, 10, tenant="a")])
    ledger.take(
        [events.Finished(2.0, f"a/x/0:{i}", "stop", 10, 5, 8, 0.0, 0.0, 0.0) for i in range(2)]
    )
    ledger.take([events.Aborted(2.0, "a/y/0", "client left", 3)])
    account = ledger.accounts["a"]
    assert (account.num_requests, account.num_prompt, account.num_cached, account.num_output) == (
        3,
        20,
        8,
        13,
    )
    assert not ledger._live
    assert not ledger._tenant_of


def test_there_are_not_more_rows_than_tenants_at_most():
    ledger = Ledger()
    for i in range(MAX_TENANTS + 5):
        ledger.take(
            [
                submitted(1.0, f"t{i}"),
                planned(1.0, i, **{f"t{i}": 1}),
                events.StepDone(1.5, i, 0.5, 1),
            ]
        )
    assert len(ledger.accounts) == MAX_TENANTS + 1
    assert ledger.accounts[OTHERS].num_requests == 5
    told = usage.Usage(lambda: [ledger])
    for i in range(MAX_TENANTS + 5):
        told.take_call(RequestContext(tenant=f"t{i}"))
    assert len(told._server_s) == MAX_TENANTS + 1


def test_an_engines_own_events_add_up_to_its_time(tiny_folder):
    core, ledger = make_core(load_model(tiny_folder), max_requests=4, token_budget=32), Ledger()
    for i in range(8):
        tenant = "ab"[i % 2]
        core.submit(
            Submit(
                f"{tenant}/r{i}/0",
                [i + 1] * 40,
                SamplingParams(max_tokens=6, ignore_eos=True),
                tenant=tenant,
            )
        )
    core.host_times.mark("messages")
    emitted = []
    while core.has_work:
        emitted += core.step()[0].events
        core.host_times.mark("outputs")
    ledger.take(emitted)
    first, ended = (
        next(event for event in emitted if isinstance(event, events.LoopTimed)),
        time.monotonic(),
    )
    begun = first.time_s - first.messages_s - first.outputs_s - first.idle_s - first.gc_s
    tenants, idle, own = ledger.read(ended)
    every = [*tenants.values(), idle, own]
    assert sum(account.seconds for account in every) == pytest.approx(ended - begun, rel=1e-6)
    assert tenants["a"].num_computed == tenants["b"].num_computed == 4 * 45
    assert tenants["a"].device_s > 0 < tenants["a"].host_s


def test_metrics_have_the_rows():
    metrics = Metrics()
    metrics.take(
        [
            submitted(1.0, "a"),
            events.LoopTimed(2.0, idle_s=0.5),
            planned(2.0, 0, a=2),
            events.StepDone(3.0, 0, 1.0, 1),
        ]
    )
    metrics.ledger.accounts["a"].joules = 7.0
    text = metrics.render().decode()
    for line in (
        'tenant_seconds_total{kind="device",tenant="a"} 1.0',
        'tenant_tokens_total{kind="computed",tenant="a"} 2.0',
        "own_seconds_total 0.0",
        'tenant_joules_total{tenant="a"} 7.0',
    ):
        assert f"tidemill_{line}" in text
    (idle_s,) = re.findall(r"^tidemill_idle_seconds_total (\S+)$", text, re.MULTILINE)
    assert 0.5 <= float(idle_s) < 60  # up to now


class Driver:
    """What NVML does, for two GPUs."""

    def __init__(self, *millijoules):
        self.millijoules, self.asked = list(millijoules), []

    def nvmlInit_v2(self):
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number, handle):
        self.asked.append(number)
        handle._obj.value = 1 + number
        return 0 if number < len(self.millijoules) else 2

    def nvmlDeviceGetHandleByUUID(self, name, handle):
        self.asked.append(name)
        handle._obj.value = 1
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle, total):
        total._obj.value = self.millijoules[handle.value - 1]
        return 0


def test_energy_is_that_of_the_gpus_in_use(monkeypatch):
    driver = Driver(1000, 5000)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)
    both, second = energy.Energy.of(2, {}), energy.Energy.of(1, {"CUDA_VISIBLE_DEVICES": "1,0"})
    driver.millijoules = [2500, 5250]
    assert (both.joules(), second.joules()) == (1.75, 0.25)
    assert energy.Energy.of(1, {"CUDA_VISIBLE_DEVICES": "GPU-5f"}) is not None
    assert driver.asked == [0, 1, 1, b"GPU-5f"]
    assert energy.Energy.of(3, {}) is None  # there are two
    assert energy.Energy.of(0, {}) is None
    monkeypatch.undo()
    monkeypatch.setattr(energy, "_LIBRARY", "libnot-there.so")
    assert energy.Energy.of(1, {}) is None


def test_joules_go_where_the_time_went():
    ledger = Ledger()
    now = time.monotonic()
    ledger.take([submitted(now, "a"), submitted(now, "b"), events.LoopTimed(now - 10, idle_s=10.0)])
    ledger.take([planned(now - 10, 0, a=3, b=1), events.StepDone(now, 0, 10.0, 1)])
    told = usage.Usage(lambda: [ledger])
    told._energy = SimpleNamespace()
    told.share(100.0)
    rows = {row.get("tenant") or row["row"]: row["joules"] for row in told.body()["data"]}
    assert rows["a"] == pytest.approx(37.5, rel=0.05)
    assert rows["b"] == pytest.approx(12.5, rel=0.05)
    assert rows["idle"] == pytest.approx(50, rel=0.05)
    assert sum(rows.values()) == pytest.approx(100, abs=0.01)
    told.share(160.0)
    assert sum(row["joules"] for row in told.body()["data"]) == pytest.approx(160, abs=0.01)


# ---- over HTTP


@pytest.fixture(scope="module")
def with_admin(tiny_folder):
    running = Server(
        tiny_folder, *(word for key in KEYS for word in ("--api-key", key)), "--admin-key", ADMIN
    ).wait()
    yield running
    assert running.stop() == 0


def usage_of(server, key=None):
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.get(f"{server.url}/v1/usage", headers=headers).raise_for_status().json()


def generate(server, key, **fields):
    body = {"prompt": "The ledger", "max_tokens": 8, "ignore_eos": True} | fields
    headers = {"Authorization": f"Bearer {key}"}
    return (
        httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
        .raise_for_status()
        .json()
    )


def test_rows_over_http(with_admin):
    first, second = generate(with_admin, KEYS[0]), generate(with_admin, KEYS[1], max_tokens=20)

    def told():
        found = usage_of(with_admin, ADMIN)
        rows = [row for row in found["data"] if row["row"] == "tenant" and row["output_tokens"]]
        return found if len(rows) == 2 else None

    found = until(told)
    rows = found["data"]
    assert sum(row["percent"] for row in rows) == pytest.approx(100, abs=0.05)
    assert sum(row["machine_ms"] for row in rows) == pytest.approx(found["machine_ms"], abs=0.1)
    assert [row["row"] for row in rows][-3:] == ["idle", "engine", "server"]
    assert sorted(row["output_tokens"] for row in rows if row.get("tenant")) == [8, 20]
    usages = [answer["usage"] for answer in (first, second)]
    assert sum(row["prompt_tokens"] for row in rows) == sum(one["prompt_tokens"] for one in usages)
    assert all(row["device_ms"] > 0 < row["server_ms"] for row in rows if row["output_tokens"])
    # what an engine's clock shows: it has been up for this long, and the server's CPU time comes on
    # top
    engines_ms = sum(row["device_ms"] + row["host_ms"] for row in rows)
    assert engines_ms <= 1000 * (time.time() - found["since"]) + 2000
    again = usage_of(with_admin, ADMIN)
    later_ms = sum(row["device_ms"] + row["host_ms"] for row in again["data"])
    assert later_ms >= engines_ms


def test_a_tenant_sees_its_own_row(with_admin):
    generate(with_admin, KEYS[0])
    (row,) = usage_of(with_admin, KEYS[0])["data"]
    assert row["tenant"]
    other = usage_of(with_admin, KEYS[1])["data"]
    assert all(one["tenant"] != row["tenant"] for one in other)
    assert httpx.get(f"{with_admin.url}/v1/usage").status_code == 401


def test_without_keys_there_is_one_tenant_without_a_name(server):
    assert {row["tenant"] for row in usage_of(server)["data"] if row["row"] == "tenant"} <= {""}
