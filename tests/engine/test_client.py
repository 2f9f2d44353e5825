"""The client watches over its engine."""

import asyncio
import os
import signal
from contextlib import aclosing

import pytest

from tidemill.config import EngineOptions
from tidemill.engine import client as client_module
from tidemill.engine.client import EngineClient
from tidemill.engine.inbox import Inbox
from tidemill.engine.link import EngineLink
from tidemill.errors import Cancelled, DeadlineExceeded, EngineDead
from tidemill.events import Aborted, EngineRestarted, Finished, Submitted
from tidemill.sampling import SamplingParams
from tidemill.sched.request import BACKGROUND
from tidemill.wire import Submit


async def collect(client, name, length=40, n=1, timeout_s=None, **params):
    tokens, ends = [[] for _ in range(n)], [None] * n
    request = Submit(name, [1, 2, 3], SamplingParams(max_tokens=length, ignore_eos=True, n=n, **params))
    async with aclosing(client.submit(request, timeout_s)) as deltas:
        async for delta in deltas:
            assert ends[delta.index] is None
            tokens[delta.index] += delta.token_ids
            ends[delta.index] = delta.finish_reason
    assert ends == ["length"] * n
    return tokens


def run(test, folder, **settings):
    async def whole():
        seen = []
        client = EngineClient(on_events=seen.extend, **settings)
        try:
            await client.start(EngineOptions(model=str(folder), threads=1))
            await test(client, seen)
        finally:
            await client.close()

    asyncio.run(whole())


def test_a_stalled_engine_is_replaced_and_samples_go_on_as_they_were(tiny_folder):
    async def test(client, seen):
        undisturbed = await collect(client, "before", n=3, seed=5, length=300)
        going = asyncio.create_task(collect(client, "after", n=3, seed=5, length=300))
        while not any(client._pending["after"].outputs if "after" in client._pending else ()):
            await asyncio.sleep(0.001)
        os.kill(client._link._process.pid, signal.SIGSTOP)
        assert await asyncio.wait_for(going, 30) == undisturbed
        (restarted,) = [event for event in seen if isinstance(event, EngineRestarted)]
        assert "no step in" in restarted.reason
        assert client.num_restarts == 1
        assert not client.num_pending

    run(test, tiny_folder, stall_s=1.0)


def test_an_engine_that_is_done_is_not_taken_for_a_stalled_one(tiny_folder):
    """A client reads slowly what was computed long ago."""

    async def test(client, seen):
        request = Submit("slow", [1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True, n=2, seed=1))
        async with aclosing(client.submit(request)) as deltas:
            first = await anext(deltas)
            await asyncio.sleep(2.5)
            rest = [delta async for delta in deltas]
        assert sum(len(delta.token_ids) for delta in [first, *rest]) == 10
        assert client.num_restarts == 0

    run(test, tiny_folder, stall_s=0.5)


def test_people_are_tried_before_batches():
    pending = [
        client_module._Pending(Submit(name, [1], SamplingParams(), priority=priority), Inbox(), [[]], num_deaths=num)
        for name, priority, num in (("batch", BACKGROUND, 1), ("late", 5, 2), ("person", 0, 2), ("first", 3, 1))
    ]
    assert [one.request.request_id for one in sorted(pending, key=lambda one: one.trial_rank)] == [
        "first",
        "person",
        "late",
        "batch",
    ]


def test_a_request_that_kills_engines_is_given_up_alone(tiny_folder, monkeypatch):
    class Fragile(EngineLink):
        def send(self, message):
            super().send(message)
            if isinstance(message, Submit) and message.request_id == "poison":
                self.kill()

    async def test(client, seen):
        other = asyncio.create_task(collect(client, "other", temperature=0))
        with pytest.raises(EngineDead, match="failed 3 times at this request"):
            await collect(client, "poison")
        assert len((await asyncio.wait_for(other, 60))[0]) == 40
        assert client.alive
        told = [event.request_id for event in seen if isinstance(event, Submitted)]
        assert len(told) == len(set(told))  # however often they were submitted

    monkeypatch.setattr(client_module, "EngineLink", Fragile)
    run(test, tiny_folder)


def test_deadline_and_cancellation(tiny_folder):
    async def test(client, _):
        with pytest.raises(DeadlineExceeded, match=r"0\.05 s are over"):
            await collect(client, "slow", length=400, timeout_s=0.05)
        going = asyncio.create_task(collect(client, "long", length=400))
        while not client.num_pending:
            await asyncio.sleep(0)
        assert client.cancel("long", Cancelled("enough"))
        with pytest.raises(Cancelled, match="enough"):
            await going
        assert not client.cancel("long", Cancelled("enough"))
        await collect(client, "next", length=3)

    run(test, tiny_folder)


def test_an_engine_that_cannot_come_back_is_told(tiny_folder, monkeypatch):
    async def test(client, _):
        monkeypatch.setattr(client_module, "MAX_FAILED_STARTS", 1)

        async def fail(self, options, on_loading=None, within_s=None):
            raise EngineDead("no memory")

        monkeypatch.setattr(EngineLink, "start", fail)
        going = asyncio.create_task(collect(client, "x", length=400))
        await asyncio.sleep(0.05)
        client._link.kill()
        with pytest.raises(EngineDead, match="no memory"):
            await asyncio.wait_for(going, 10)
        assert not client.alive
        with pytest.raises(EngineDead):
            await collect(client, "y")

    run(test, tiny_folder)


def test_who_comes_and_goes_while_there_is_no_engine(tiny_folder):
    """What comes then is no suspect; what goes then is accounted for."""

    async def test(client, seen):
        left = asyncio.create_task(collect(client, "left", n=2, length=400))
        while not any(isinstance(event, Submitted) for event in seen):
            await asyncio.sleep(0.001)
        client._link.kill()
        while client._link is not None:
            await asyncio.sleep(0.001)
        left.cancel()
        came = asyncio.create_task(collect(client, "came", temperature=0))
        await asyncio.sleep(0)
        assert not client._pending["came"].is_submitted
        while client._link is None:
            await asyncio.sleep(0.01)
        assert client._pending["came"].num_deaths == 0
        await came
        begun = sorted(event.request_id for event in seen if isinstance(event, Submitted))
        ended = sorted(event.request_id for event in seen if isinstance(event, Finished | Aborted))
        assert begun == ended == ["came", "left:0", "left:1"]

    run(test, tiny_folder)
