"""The autoscaler: up when requests wait long, down when fewer suffice, and never to and fro."""

from itertools import pairwise

import pytest

from tidemill.cluster.ray.scale import Autoscaler, Load, ScalePolicy
from tidemill.errors import ConfigError


def simulate(scaler, arrivals, seconds, num=1, slots=4, service_s=2.0):
    """Requests that take `service_s` each, `arrivals(t)` of them a second; how many replicas there
    are after each second."""
    running, waiting, finished, counts = 0.0, 0.0, 0.0, []
    for now in range(seconds):
        waiting += arrivals(now)
        done = running / service_s
        finished, running = finished + done, running - done
        starts = min(waiting, num * slots - running)
        waiting, running = waiting - starts, running + starts
        num = scaler.wanted(
            float(now), Load(num, round(running), round(waiting), slots, int(finished))
        )
        counts.append(num)
    return counts


def test_it_follows_the_load_within_its_bounds():
    policy = ScalePolicy(1, 4)
    counts = simulate(Autoscaler(policy), lambda now: 12.0 if now < 300 else 0.5, 900)
    assert max(counts[:300]) == 4
    assert counts[-1] == 1
    changes = [b - a for a, b in pairwise(counts) if a != b]
    assert changes == [1, 1, 1, -1, -1, -1]


def test_a_steady_load_that_fits_changes_nothing():
    """Also one between the load of one replica and the margin of two."""
    for rate in (0.2, 1.0, 1.9):
        assert set(simulate(Autoscaler(ScalePolicy(1, 4)), lambda now, rate=rate: rate, 600)) == {1}
    assert set(simulate(Autoscaler(ScalePolicy(1, 4)), lambda now: 1.6, 600, num=2)) == {2}
    assert simulate(Autoscaler(ScalePolicy(2, 4)), lambda now: 0.0, 300)[-1] == 2


def test_a_burst_that_is_over_at_once_starts_nothing():
    assert set(
        simulate(Autoscaler(ScalePolicy(1, 4)), lambda now: 10.0 if now == 50 else 0.0, 200)
    ) == {1}


def test_bounds_are_read():
    assert (ScalePolicy.parse("1:4").low, ScalePolicy.parse("1:4").high) == (1, 4)
    for wrong in ("4", "0:4", "4:1", "a:b", "1:", "1:99999"):
        with pytest.raises(ConfigError, match="autoscale"):
            ScalePolicy.parse(wrong)
