"""Autoscaler: how many replicas there should be. Ints and floats only; time is passed in.

The load is the time that a request that comes now would wait for a slot: the requests that wait,
divided by the rate at which requests end. One more replica is wanted when that has been long for a
while; one less, when the requests of all have fitted into the slots of fewer, with a margin, for a
longer while. After a change nothing happens until its effect can be seen.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.errors import ConfigError


@dataclass(frozen=True)
class Load:
    """The load of all replicas together, at a moment."""

    num_replicas: int  # that take requests
    num_running: int
    num_waiting: int
    num_slots: int  # of one replica
    num_finished: int  # requests, since the start


@dataclass(frozen=True)
class ScalePolicy:
    low: int
    high: int
    wait_s: float = 2.0  # for a slot, which is too long
    up_after_s: float = 3.0
    down_after_s: float = 60.0
    settle_s: float = 15.0  # after a change
    fill: float = 0.6  # of the slots of the replicas that would be left

    @staticmethod
    def parse(text: str) -> ScalePolicy:
        low, _, high = text.partition(":")
        if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high) <= 1024):
            raise ConfigError(
                f"autoscale is {text!r}.", fix="Write MIN:MAX, such as 1:4.", param="autoscale"
            )
        return ScalePolicy(int(low), int(high))


class Autoscaler:
    def __init__(self, policy: ScalePolicy) -> None:
        self._policy = policy
        self._long_since: float | None = None  # that requests wait too long
        self._idle_since: float | None = None
        self._changed_s = float("-inf")
        self._rate = 0.0  # requests finished a second
        self._last: tuple[float, int] | None = None
        self.reason = ""

    def wanted(self, now: float, load: Load) -> int:
        """Called now and then. The number of replicas that there should be; `reason` says why, if
        it is another."""
        policy = self._policy
        self._measure(now, load)
        if load.num_replicas < policy.low:
            return self._change(now, policy.low, "fewer than the least")
        wait_s = (
            load.num_waiting / self._rate
            if self._rate
            else policy.wait_s + 1
            if load.num_waiting
            else 0.0
        )
        is_full = load.num_waiting > 0 and wait_s > policy.wait_s
        left_slots = (load.num_replicas - 1) * load.num_slots
        is_idle = not load.num_waiting and load.num_running <= policy.fill * left_slots
        self._long_since = (
            None if not is_full else now if self._long_since is None else self._long_since
        )
        self._idle_since = (
            None if not is_idle else now if self._idle_since is None else self._idle_since
        )
        if now - self._changed_s < policy.settle_s:
            return load.num_replicas
        if (
            self._long_since is not None
            and now - self._long_since >= policy.up_after_s
            and load.num_replicas < policy.high
        ):
            return self._change(
                now,
                load.num_replicas + 1,
                f"{load.num_waiting} requests wait, about {wait_s:.1f} s",
            )
        if (
            self._idle_since is not None
            and now - self._idle_since >= policy.down_after_s
            and load.num_replicas > policy.low
        ):
            return self._change(
                now, load.num_replicas - 1, f"{load.num_running} requests fit into fewer"
            )
        return load.num_replicas

    def _measure(self, now: float, load: Load) -> None:
        """The rate at which requests end, smoothed over some ten seconds."""
        if self._last is not None and now > self._last[0]:
            seconds = now - self._last[0]
            rate, part = (load.num_finished - self._last[1]) / seconds, min(seconds / 10, 1.0)
            self._rate = rate if not self._rate else (1 - part) * self._rate + part * rate
        self._last = now, load.num_finished

    def _change(self, now: float, num: int, reason: str) -> int:
        self._changed_s, self._long_since, self._idle_since, self.reason = now, None, None, reason
        return num
