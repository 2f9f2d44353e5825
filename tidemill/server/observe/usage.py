"""Usage: whose requests the machine's time went to.

The machine's time is the time of the engines, by the clock, and the CPU time of the server's
process. Each moment of it is in one row: of a tenant, idle, of the engines or of the server. So the
rows add up to the whole.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from tidemill.engine.ledger import MAX_TENANTS, OTHERS, Account, Ledger
from tidemill.server.http.context import RequestContext
from tidemill.server.http.stopwatch import OWN_WORK
from tidemill.server.observe.energy import Energy

_ENERGY_EVERY_S = 1.0
_FIELDS = ("num_prompt", "num_cached", "num_computed", "num_output")


class Usage:
    def __init__(self, ledgers: Callable[[], Sequence[Ledger]]) -> None:
        self._ledgers = ledgers
        self.since_s = time.time()
        self._server_s: dict[str, float] = {}  # by tenant
        self._began_cpu_s = time.process_time()
        self._energy: Energy | None = None
        self._joules = 0.0  # that are in the rows
        self._shared_s: dict[tuple[int, str], float] = {}  # the time of each row, up to there

    def take_call(self, call: RequestContext) -> None:
        """A call has ended."""
        spans = call.stopwatch.snapshot()
        seconds = sum(spans.get(state, 0.0) for state in OWN_WORK)
        is_known = call.tenant in self._server_s or len(self._server_s) < MAX_TENANTS
        tenant = call.tenant if is_known else OTHERS
        self._server_s[tenant] = self._server_s.get(tenant, 0.0) + seconds

    # ---- energy

    async def watch(self, num_gpus: int) -> None:
        """Shares the energy of the GPUs among the rows, for ever; none, if nobody tells of it."""
        self._energy = await asyncio.to_thread(Energy.of, num_gpus)
        while self._energy is not None:
            try:
                joules = await asyncio.to_thread(self._energy.joules)
            except LookupError:  # a GPU is gone
                return
            self.share(joules)
            await asyncio.sleep(_ENERGY_EVERY_S)

    def share(self, joules: float) -> None:
        """All joules up to now. Since the last time they went where the engines' time went."""
        now, gained = time.monotonic(), list[tuple[Account, float]]()
        for number, ledger in enumerate(self._ledgers()):
            tenants, idle, own = ledger.read(now)
            rows = [(name, ledger.accounts[name], account) for name, account in tenants.items()]
            rows += [("idle/", ledger.idle, idle), ("own/", ledger.own, own)]
            for name, account, read in rows:
                before_s = self._shared_s.get((number, name), 0.0)
                gained.append((account, max(read.seconds - before_s, 0.0)))
                self._shared_s[number, name] = read.seconds
        if not (total := sum(seconds for _, seconds in gained)):
            return
        for account, seconds in gained:
            account.joules += (joules - self._joules) * seconds / total
        self._joules = joules

    # ---- for who asks

    def body(self, tenant: str | None = None, has_keys: bool = False) -> dict[str, Any]:
        """`tenant`: only the row of this one. `has_keys`: all tenants have names; what is of none
        is the engines' own."""
        now, server_s = time.monotonic(), dict(self._server_s)
        tenants, idle, own = dict[str, Account](), Account(), Account()
        for ledger in self._ledgers():
            of_tenants, of_idle, of_own = ledger.read(now)
            idle.add(of_idle)
            own.add(of_own)
            for name, account in of_tenants.items():
                if has_keys and not name:
                    own.add(account)
                else:
                    tenants.setdefault(name, Account()).add(account)
        if has_keys:
            server_s.pop("", None)
        for name in server_s:
            tenants.setdefault(name, Account())
        cpu_s = time.process_time() - self._began_cpu_s
        rest_s = max(cpu_s - sum(server_s.values()), 0.0)
        rows = [
            _row("tenant", account, server_s.get(name, 0.0)) | {"tenant": name}
            for name, account in tenants.items()
        ]
        rows.sort(key=lambda row: -row["machine_ms"])
        rows += [_row("idle", idle), _row("engine", own), _row("server", Account(), rest_s)]
        total = sum(row["machine_ms"] for row in rows)
        for row in rows:
            row["percent"] = round(100 * row["machine_ms"] / max(total, 1e-9), 3)
            if self._energy is None:
                del row["joules"]
        shown = [row for row in rows if tenant is None or row.get("tenant") == tenant]
        body = {"object": "usage", "since": round(self.since_s), "machine_ms": round(total, 3)}
        return body | {"data": shown}


def usage_rows(
    ledgers: Sequence[Ledger], now: float
) -> list[tuple[str | None, str, float, float, int, int]]:
    """The rows of the live view: tenant, name, seconds of the device and of the host, tokens
    computed and generated. First what is nobody's."""
    nobody = {"idle": Account(), "engine": Account()}
    tenants: dict[str, Account] = {}
    for ledger in ledgers:
        of_tenants, idle, own = ledger.read(now)
        nobody["idle"].add(idle)
        nobody["engine"].add(own)
        for tenant, account in of_tenants.items():
            tenants.setdefault(tenant, Account()).add(account)
    ordered = sorted(tenants.items(), key=lambda row: -row[1].seconds)
    rows = [(None, name, account) for name, account in nobody.items()]
    return [
        (
            tenant,
            name,
            round(account.device_s, 3),
            round(account.host_s, 3),
            account.num_computed,
            account.num_output,
        )
        for tenant, name, account in [*rows, *((tenant, tenant, of) for tenant, of in ordered)]
    ]


def _row(kind: str, account: Account, server_s: float = 0.0) -> dict[str, Any]:
    return {
        "row": kind,
        "machine_ms": round(1000 * (account.seconds + server_s), 3),
        "device_ms": round(1000 * account.device_s, 3),
        "host_ms": round(1000 * account.host_s, 3),
        "server_ms": round(1000 * server_s, 3),
        "requests": account.num_requests,
        **{f"{name.removeprefix('num_')}_tokens": getattr(account, name) for name in _FIELDS},
        "joules": round(account.joules, 3),
    }
