"""The ledger of an engine: whose requests its time went to, read from its events and from nothing
else.

Each moment of the engine is in one row. While a step is computed it belongs to the tenants of the
step, each by the tokens that were computed for it; so does the engine's own work before the step,
which planned and launched it. Without a step to compute the engine is idle. What belongs to
nobody's request, such as a restart, is the engine's own. So the rows add up to the whole.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from tidemill.types import events
from tidemill.types.events import Event

MAX_TENANTS = 1000  # with a row of their own
OTHERS = "others"  # the row of all tenants beyond that
# between an engine's clock and this one's; engines of other machines have others
_MAX_SKEW_S = 60.0
_MAX_AHEAD = 8  # steps planned and not done; one that failed never is


@dataclass(slots=True)
class Account:
    """A tenant's row."""

    device_s: float = 0.0
    host_s: float = 0.0
    num_requests: int = 0  # samples
    num_prompt: int = 0  # tokens
    num_cached: int = 0
    num_computed: int = 0
    num_output: int = 0
    joules: float = 0.0

    @property
    def seconds(self) -> float:
        return self.device_s + self.host_s

    def add(self, other: Account) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Ledger:
    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}  # by tenant
        self.idle, self.own = Account(), Account()  # of nobody
        # up to where its time is accounted for; None: it has not begun
        self._since_s: float | None = None
        self._loaded_s: float | None = None
        self._taken_s = time.monotonic()  # when the latest events came
        self._host_s = 0.0  # since the last step, of nobody yet
        self._steps: dict[int, Mapping[str, int]] = {}  # planned and not done: tokens by tenant
        self._live: Counter[str] = Counter()  # requests by tenant
        self._tenant_of: dict[str, str] = {}  # of these

    def account(self, tenant: str) -> Account:
        """The row of a tenant, which is made if there is none."""
        if tenant not in self.accounts and len(self.accounts) >= MAX_TENANTS:
            tenant = OTHERS
        return self.accounts.setdefault(tenant, Account())

    def take(self, batch: Iterable[Event]) -> None:
        for event in batch:
            self._take(event)
        self._taken_s = time.monotonic()

    def _take(self, event: Event) -> None:
        now = event.time_s
        match event:
            case events.StepPlanned():
                self._plan(event)
            case events.StepDone():
                self._end(event)
            case events.LoopTimed():
                self._divide(event)
            case events.Submitted():
                account = self.account(event.tenant)
                account.num_requests += 1
                account.num_prompt += event.num_prompt if _is_first(event.request_id) else 0
                if event.request_id not in self._tenant_of:
                    self._live[event.tenant] += 1
                    self._tenant_of[event.request_id] = event.tenant
            case events.Finished():
                account = self.account(self._tenant_of.get(event.request_id, ""))
                account.num_cached += event.num_cached if _is_first(event.request_id) else 0
                account.num_output += event.num_output
                self._leave(event.request_id)
            case events.Aborted():
                self.account(
                    self._tenant_of.get(event.request_id, "")
                ).num_output += event.num_output
                self._leave(event.request_id)
            case events.ModelLoaded():
                self._since_s, self._loaded_s = None, now
            case events.EngineDown() | events.EngineRestarted() | events.ModelUnloaded():
                self._stop(event)

    def _leave(self, request_id: str) -> None:
        tenant = self._tenant_of.pop(request_id, None)
        if tenant is not None:
            self._live[tenant] -= 1
            if not self._live[tenant]:
                del self._live[tenant]

    def _advance(self, now: float) -> float:
        """Seconds since the time that is accounted for, which is now."""
        spent = 0.0 if self._since_s is None else max(now - self._since_s, 0.0)
        self._since_s = now
        return spent

    def _elapsed(self, now: float) -> float:
        """The same, by this process's clock."""
        begun_s = self._loaded_s if self._since_s is None else self._since_s
        if begun_s is None:
            return 0.0
        since_taken_s = time.monotonic() - self._taken_s
        is_same_clock = abs(now - begun_s - since_taken_s) < _MAX_SKEW_S
        return max(now - begun_s, 0.0) if is_same_clock else since_taken_s

    def _divide(self, event: events.LoopTimed) -> None:
        """The loop's time until a step is planned."""
        if self._since_s is None:
            self._since_s = (
                event.time_s - event.outputs_s - event.messages_s - event.idle_s - event.gc_s
            )
        spent = self._advance(event.time_s)
        if self._steps:
            self._share(next(iter(self._steps.values())), spent, 0.0)
            return
        idle_s = min(event.idle_s, spent)
        self.idle.host_s += idle_s
        self._host_s += spent - idle_s

    def _plan(self, event: events.StepPlanned) -> None:
        spent = self._advance(event.time_s)
        if self._steps:
            self._share(next(iter(self._steps.values())), spent, 0.0)
        else:
            self._host_s += spent
        tokens = self._tokens_by_tenant(event.tokens_of, event.num_tokens)
        for tenant, num in tokens.items():
            self.account(tenant).num_computed += num
        self._share(tokens, 0.0, self._host_s)
        self._host_s = 0.0
        self._steps[event.step] = tokens
        self._steps.pop(event.step - _MAX_AHEAD, None)

    def _tokens_by_tenant(
        self, tokens_of: Iterable[tuple[str, int]], num_tokens: int
    ) -> Mapping[str, int]:
        if len(self._live) == 1:  # nearly always: a step of hundreds need not be looked at
            return {next(iter(self._live)): num_tokens}
        tokens: dict[str, int] = {}
        for request_id, num in tokens_of:
            tenant = self._tenant_of.get(request_id, "")
            tokens[tenant] = tokens.get(tenant, 0) + num
        return tokens

    def _end(self, event: events.StepDone) -> None:
        spent = self._advance(event.time_s)
        tokens = self._steps.pop(event.step, None)
        if tokens is None:
            self.own.host_s += spent
            return
        host_s = min(event.launch_s + event.commit_s, spent)
        self._share(tokens, spent - host_s, host_s)

    def _share(self, tokens: Mapping[str, int], device_s: float, host_s: float) -> None:
        num_tokens = sum(tokens.values())
        if not num_tokens:
            self.own.host_s += device_s + host_s
        for tenant, num in tokens.items() if num_tokens else ():
            account = self.account(tenant)
            account.device_s += device_s * num / num_tokens
            account.host_s += host_s * num / num_tokens

    def _stop(self, event: Event) -> None:
        """There is no engine, or another one: what was computed last is lost."""
        if not isinstance(event, events.EngineDown):
            self._steps.clear()
        spent, self._since_s, self._loaded_s = self._elapsed(event.time_s), None, None
        if isinstance(event, events.EngineDown):
            self._since_s = event.time_s  # it is started again, unless it is given up
        self.own.host_s += spent + self._host_s
        self._host_s = 0.0

    def read(self, now: float) -> tuple[dict[str, Account], Account, Account]:
        """The tenants' rows, the engine's idle and its own, up to now."""
        spent = self._elapsed(now)
        tenants = {tenant: _sum(account) for tenant, account in self.accounts.items()}
        idle, own = _sum(self.idle), _sum(self.own)
        own.host_s += self._host_s
        if self._steps and (tokens := next(iter(self._steps.values()))):
            for tenant, num in tokens.items():
                tenants[tenant if tenant in tenants else OTHERS].device_s += (
                    spent * num / max(sum(tokens.values()), 1)
                )
        else:
            idle.host_s += spent
        return tenants, idle, own


class LedgerCollector(Collector):
    """The ledger as metrics."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        # a counter never falls, though the latest part may turn out to be another's
        self._idle_s = 0.0

    def describe(self) -> list[CounterMetricFamily]:
        self._seconds = CounterMetricFamily(
            "tidemill_tenant_seconds", "Time of the engine that went to a tenant's requests: computing, or the host's part",
            labels=("tenant", "kind"),
        )  # fmt: skip
        self._idle = CounterMetricFamily(
            "tidemill_idle_seconds", "Time in which the engine had nothing to do"
        )
        self._own = CounterMetricFamily(
            "tidemill_own_seconds", "Time of the engine that went to nobody's request"
        )
        self._tokens = CounterMetricFamily(
            "tidemill_tenant_tokens",
            "Tokens of a tenant's requests: prompt, cached, computed, output",
            labels=("tenant", "kind"),
        )
        self._joules = CounterMetricFamily(
            "tidemill_tenant_joules", "Energy of GPUs that went to a tenant", labels=("tenant",)
        )
        return [self._seconds, self._idle, self._own, self._tokens, self._joules]

    def collect(self) -> list[CounterMetricFamily]:
        families = self.describe()
        ledger = self._ledger
        for tenant, account in list(ledger.accounts.items()):
            self._seconds.add_metric((tenant, "device"), account.device_s)
            self._seconds.add_metric((tenant, "host"), account.host_s)
            for kind in ("prompt", "cached", "computed", "output"):
                self._tokens.add_metric((tenant, kind), getattr(account, f"num_{kind}"))
            if account.joules:
                self._joules.add_metric((tenant,), account.joules)
        self._idle_s = max(self._idle_s, ledger.read(time.monotonic())[1].seconds)
        self._idle.add_metric((), self._idle_s)
        self._own.add_metric((), ledger.own.seconds)
        return families


def _sum(account: Account) -> Account:
    total = Account()
    total.add(account)
    return total


def _is_first(request_id: str) -> bool:
    """Tells if it is the first of a request's samples."""
    _, found, index = request_id.rpartition(":")
    return not found or index == "0"
