"""The client supervises its engine: real engine processes that are stopped, killed, or killed by
what they are asked."""

import asyncio
import contextlib
import os
import signal
import tempfile
from contextlib import aclosing

import pytest

from tests.fragile import DEADLY, GATED, Fragile
from tests.helpers import LONG_S
from tests.waiting import until_async
from tidemill.config import EngineOptions
from tidemill.engine import client as client_module
from tidemill.engine import inbox as inbox_module
from tidemill.engine.client import EngineClient
from tidemill.engine.inbox import Inbox
from tidemill.engine.link import EngineLink
from tidemill.engine.pending import Pending
from tidemill.errors import Cancelled, ClientTooSlow, DeadlineExceeded, EngineDead, InvalidRequest
from tidemill.sched.request import BACKGROUND
from tidemill.types.events import Aborted, EngineRestarted, Finished, KernelsFellBack, Submitted
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit


def request(name, length=40, prompt=(1, 2, 3), **params):
    return Submit(name, list(prompt), SamplingParams(max_tokens=length, ignore_eos=True, **params))


async def collect(client, name, length=40, n=1, timeout_s=None, prompt=(1, 2, 3), **params):
    tokens, ends = [[] for _ in range(n)], [None] * n
    async with aclosing(
        client.submit(request(name, length, prompt, n=n, **params), timeout_s)
    ) as deltas:
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


@pytest.fixture
def fragile(tmp_path, monkeypatch):
    return Fragile(tmp_path, monkeypatch)


class Shared:
    """One fragile engine for the tests after which it is as before. What one of them asked for is
    over when the next begins."""

    def __init__(self, folder, weaknesses):
        self.fragile, self._loop, self._seen, self._all = weaknesses, asyncio.Runner(), [], []
        self._client = EngineClient(on_events=self._note, stall_s=LONG_S)
        self._loop.run(self._client.start(EngineOptions(model=str(folder), threads=1)))

    def _note(self, events):
        self._seen.extend(events)
        self._all.extend(events)

    def run(self, test):
        self.fragile.close_gate()
        self._seen.clear()
        try:
            self._loop.run(test(self._client, self._seen))
        finally:
            self.fragile.open_gate()
            self._loop.run(until_async(self._is_at_rest))

    def _is_at_rest(self):
        begun, ended = (
            sum(isinstance(event, kind) for event in self._all)
            for kind in (Submitted, Finished | Aborted)
        )
        return begun == ended and not self._client.num_pending

    def close(self):
        self._loop.run(self._client.close())
        self._loop.close()


@pytest.fixture(scope="module")
def shared(tiny_folder, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        made = Shared(tiny_folder, Fragile(tmp_path_factory.mktemp("fragile"), patch))
        yield made
        made.close()


def test_a_stalled_engine_is_replaced_and_samples_go_on_as_they_were(tiny_folder):
    async def test(client, seen):
        undisturbed = await collect(client, "before", n=3, seed=5, length=300)
        going = asyncio.create_task(collect(client, "after", n=3, seed=5, length=300))
        await until_async(
            lambda: any(client.pending["after"].outputs if "after" in client.pending else ())
        )
        client.stall_s = 1.0
        os.kill(client.link.pid, signal.SIGSTOP)
        await until_async(lambda: any(isinstance(event, EngineRestarted) for event in seen))
        client.stall_s = LONG_S  # the next one may be slow
        assert await asyncio.wait_for(going, LONG_S) == undisturbed
        assert (
            "no step in"
            in next(event for event in seen if isinstance(event, EngineRestarted)).reason
        )
        assert not client.num_pending

    run(test, tiny_folder, stall_s=LONG_S)


def test_idle_time_does_not_count_as_a_stall(shared):
    """A client reads slowly what was computed long ago; then a step takes long. The engine had no
    work in between."""

    async def test(client, seen):
        async with aclosing(client.submit(request("slow", 5, n=2, seed=1))) as deltas:
            first = await anext(deltas)
            await until_async(lambda: client.pending["slow"].is_over)
            await asyncio.sleep(5 * client_module.WATCH_EVERY_S)
            assert client.stalled_s == 0
            going = asyncio.create_task(collect(client, "gated", prompt=[GATED, 0]))
            await until_async(lambda: client.stalled_s > 0)
            assert client.stalled_s <= 2 * client_module.WATCH_EVERY_S
            shared.fragile.open_gate()
            await going
            rest = [delta async for delta in deltas]
        assert sum(len(delta.token_ids) for delta in [first, *rest]) == 10
        assert client.num_restarts == 0

    shared.run(test)


def test_a_stall_takes_longer_where_steps_take_longer(shared, monkeypatch):
    async def test(client, _):
        config, step_s = client.ready.config, client.ready.step_s
        client.longest_step_s = 0.0
        assert client.stall_limit_s == max(client.stall_s, config.token_budget * step_s) > 0
        going = asyncio.create_task(collect(client, "gated", 1, prompt=[GATED, 0]))
        await until_async(lambda: "gated" in client.pending and client.pending["gated"].is_admitted)
        await asyncio.sleep(0.3)  # the step takes at least this long
        shared.fragile.open_gate()
        await going
        await until_async(lambda: client.longest_step_s > 0.1)
        monkeypatch.setattr(client, "stall_s", 1.0)
        assert client.stall_limit_s >= 20 * client.longest_step_s > 20 * 0.1

    shared.run(test)


def test_suspects_of_people_are_tried_before_those_of_batches():
    pending = [
        Pending(
            Submit(name, [1], SamplingParams(), priority=priority), Inbox(), [[]], num_deaths=num
        )
        for name, priority, num in (
            ("batch", BACKGROUND, 1),
            ("late", 5, 2),
            ("person", 0, 2),
            ("first", 3, 1),
        )
    ]
    assert [one.request.request_id for one in sorted(pending, key=lambda one: one.trial_rank)] == [
        "first",
        "person",
        "late",
        "batch",
    ]


def test_requests_that_kill_engines_are_given_up_alone(tiny_folder, fragile):
    """Two of them kill engine after engine before any step; others finish, and what was only queued
    is not suspected."""

    async def test(client, seen):
        undisturbed = await collect(client, "before", temperature=0)
        other = asyncio.create_task(collect(client, "other", temperature=0))
        poison = [
            asyncio.create_task(collect(client, f"poison-{i}", prompt=[DEADLY, i]))
            for i in range(2)
        ]
        outcomes = await asyncio.wait_for(asyncio.gather(*poison, return_exceptions=True), LONG_S)
        assert all(
            isinstance(one, EngineDead) and "failed 3 times at this request" in str(one)
            for one in outcomes
        )
        assert await asyncio.wait_for(other, LONG_S) == undisturbed
        assert client.alive
        assert client.num_restarts > client_module.MAX_FAILED_STARTS
        told = [event.request_id for event in seen if isinstance(event, Submitted)]
        assert len(told) == len(set(told))  # however often they were submitted

    run(test, tiny_folder)


def test_what_is_only_queued_is_no_suspect(tiny_folder, fragile):
    async def test(client, _):
        full = client.ready.config.max_requests
        gated = asyncio.create_task(collect(client, "gated", n=full, prompt=[GATED, 1]))
        await until_async(lambda: "gated" in client.pending and client.pending["gated"].has_token)
        queued = asyncio.create_task(collect(client, "queued"))
        await until_async(
            lambda: "queued" in client.pending and client.pending["queued"].is_submitted
        )
        client.link.kill()
        await until_async(lambda: client.num_restarts == 1)
        assert client.pending["queued"].num_deaths == 0
        assert client.pending["queued"].is_submitted
        fragile.open_gate()
        await gated
        await queued

    run(test, tiny_folder)


def test_deadline_and_cancellation(shared):
    async def test(client, _):
        with pytest.raises(DeadlineExceeded, match=r"0\.05 s are over"):
            await collect(client, "slow", length=400, n=16, timeout_s=0.05, prompt=[GATED, 2])
        going = asyncio.create_task(collect(client, "long", length=400, n=16, prompt=[GATED, 2]))
        await until_async(lambda: client.num_pending)
        assert client.cancel("long", Cancelled("enough"))
        with pytest.raises(Cancelled, match="enough"):
            await going
        assert not client.cancel("long", Cancelled("enough"))
        with pytest.raises(InvalidRequest, match="too large"):  # what cannot be sent to the engine
            await collect(client, "huge", prompt=(2**70,))
        shared.fragile.open_gate()
        await collect(client, "next", length=3)

    shared.run(test)


@pytest.mark.parametrize("how", ["deadline", "cancellation"])
def test_a_request_that_nobody_reads_is_aborted_at_once(shared, how):
    async def test(client, seen):
        deltas = client.submit(
            request("unread", 400, [GATED, 2]), 0.5 if how == "deadline" else None
        )
        reading = asyncio.create_task(anext(deltas))  # and no more
        await until_async(lambda: "unread" in client.pending)
        if how == "cancellation":
            assert client.cancel("unread", Cancelled("enough"))
        await until_async(lambda: not client.num_pending)
        shared.fragile.open_gate()
        await until_async(lambda: any(isinstance(event, Aborted) for event in seen))
        with contextlib.suppress(DeadlineExceeded, Cancelled):
            await reading  # a delta may have come in time, but then no second one
            with pytest.raises(DeadlineExceeded if how == "deadline" else Cancelled):
                await anext(deltas)
        assert not any(isinstance(event, Finished) for event in seen)

    shared.run(test)


def test_a_reader_that_stops_has_a_bounded_backlog(shared, monkeypatch):
    async def test(client, seen):
        async with aclosing(client.submit(request("unread", 400, n=4, logprobs=5))) as deltas:
            await anext(deltas)
            await until_async(lambda: any(isinstance(event, Aborted) for event in seen))
            with pytest.raises(ClientTooSlow, match="does not read"):
                async for _ in deltas:
                    pass
        assert not any(isinstance(event, Finished) for event in seen)
        # as much, but read
        assert len((await collect(client, "next", length=400, n=4, logprobs=5))[3]) == 400

    monkeypatch.setattr(inbox_module, "MAX_CELLS", 1000)
    shared.run(test)


def test_slower_kernels_are_an_event_of_the_start(tiny_folder, fragile):
    async def test(client, seen):
        await until_async(lambda: any(isinstance(event, KernelsFellBack) for event in seen))

    fragile.take_kernels_away()
    run(test, tiny_folder)


def test_an_id_that_is_used_again_gets_nothing_of_what_was_under_way(shared):
    async def test(client, _):
        expected = await collect(client, "expected", prompt=[5, 6, 7], temperature=0)
        deltas = client.submit(request("same", 400, [GATED, 2]))
        await anext(deltas)
        # the engine waits inside of the next step
        await until_async(lambda: len(client.pending["same"].outputs[0]) == 19)
        await deltas.aclose()
        going = asyncio.create_task(collect(client, "same", prompt=[5, 6, 7], temperature=0))
        await until_async(lambda: "same" in client.pending)
        shared.fragile.open_gate()
        assert await going == expected

    shared.run(test)


def test_an_engine_that_cannot_be_started_again_is_given_up(tiny_folder, monkeypatch):
    async def test(client, _):
        async def fail(self, options, on_loading=None, within_s=None):
            raise EngineDead("no memory")

        monkeypatch.setattr(EngineLink, "start", fail)
        going = asyncio.create_task(collect(client, "x", length=400, n=16))
        await until_async(lambda: client.num_pending)
        client.link.kill()
        with pytest.raises(EngineDead, match="3 times in a row: no memory"):
            await asyncio.wait_for(going, LONG_S)
        assert not client.alive
        assert client.gave_up.is_set()
        with pytest.raises(EngineDead):
            await collect(client, "y")

    monkeypatch.setattr(client_module, "_FIRST_DELAY_S", 0.01)
    run(test, tiny_folder)


def test_what_this_process_lacks_for_a_restart_is_waited_for(
    tiny_folder, monkeypatch, tmp_path, caplog
):
    """The temporary folder is gone for longer than an engine may fail to start."""

    async def test(client, _):
        going = asyncio.create_task(collect(client, "x", length=400))
        await until_async(lambda: client.num_pending)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
        client.link.kill()
        await until_async(
            lambda: (
                caplog.text.count("could not be started again") > client_module.MAX_FAILED_STARTS
            )
        )
        assert client.alive
        (tmp_path / "gone").mkdir()
        assert len((await asyncio.wait_for(going, LONG_S))[0]) == 400

    monkeypatch.setattr(client_module, "_FIRST_DELAY_S", 0.01)
    run(test, tiny_folder)


def test_a_start_without_progress_fails(tiny_folder):
    async def test():
        link = EngineLink()
        starting = asyncio.create_task(
            link.start(EngineOptions(model=str(tiny_folder), threads=1), within_s=0.5)
        )
        await until_async(lambda: link.pid is not None)
        os.kill(link.pid, signal.SIGSTOP)
        try:
            with pytest.raises(EngineDead, match=r"no progress in 0\.5 s"):
                await asyncio.wait_for(starting, LONG_S)
        finally:
            await link.close()

    asyncio.run(test())


def test_a_restart_keeps_the_configuration_of_the_first_start(tiny_folder, fragile):
    async def test(client, _):
        first = client.ready.config
        fragile.set_available_bytes(
            first.weight_bytes + first.activation_bytes + first.kv_bytes // 2
        )
        client.link.kill()
        await until_async(lambda: client.num_restarts == 1)
        second = client.ready.config
        for name in (
            "device",
            "dtype",
            "page_size",
            "num_pages",
            "max_context",
            "max_requests",
            "token_budget",
            "kv_bytes",
        ):
            assert getattr(second, name) == getattr(first, name)
        assert second.reasons == first.reasons
        assert first.reasons["max_requests"] != "given"

    run(test, tiny_folder)


def test_requests_that_come_and_go_while_there_is_no_engine(tiny_folder):
    """What comes then is no suspect; what goes then is accounted for."""

    async def test(client, seen):
        left = asyncio.create_task(collect(client, "left", n=2, length=400))
        await until_async(lambda: any(isinstance(event, Submitted) for event in seen))
        client.link.kill()
        await until_async(lambda: client.link is None)
        left.cancel()
        came = asyncio.create_task(collect(client, "came", temperature=0))
        await asyncio.sleep(0)
        assert not client.pending["came"].is_submitted
        await until_async(lambda: client.link is not None)
        assert "came" not in client.pending or client.pending["came"].num_deaths == 0
        await came
        begun = sorted(event.request_id for event in seen if isinstance(event, Submitted))
        ended = sorted(event.request_id for event in seen if isinstance(event, Finished | Aborted))
        assert begun == ended == ["came", "left:0", "left:1"]

    run(test, tiny_folder)
