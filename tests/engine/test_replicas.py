"""Several engines that serve one model: the same tokens as one, wherever a request runs and
whichever engine dies."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from array import array
from itertools import count
from types import SimpleNamespace

import pytest

from tests.core_link import CoreLink
from tests.engine.test_client import collect
from tests.helpers import LONG_S
from tests.waiting import until_async
from tidemill.config import EngineOptions
from tidemill.engine import client as client_module
from tidemill.engine import replicas as replicas_module
from tidemill.engine.client import EngineClient
from tidemill.engine.metrics import MetricsOfReplicas
from tidemill.engine.pending import EngineLost
from tidemill.engine.replicas import Replicas, _gpus, joined
from tidemill.engine.roles import routing_of
from tidemill.errors import AdapterError, EngineDead, InvalidRequest, TidemillError
from tidemill.kv.manager import CACHED, FIRST_OWNER, SHARED
from tidemill.server.generation.models import Models
from tidemill.server.observe.explain import ExplainerOfReplicas
from tidemill.types.events import Admitted, EngineRestarted, Finished, StepPlanned, Submitted
from tidemill.types.wire import Delta, Pages


def test_page_maps_are_joined():
    kinds = [
        array("H", [CACHED, FIRST_OWNER, SHARED]),
        array("H", [FIRST_OWNER + 1, 0, FIRST_OWNER]),
    ]
    parts = [
        Pages([("a", 1)], kinds[0].tobytes(), 0.1, [("host", 1, 10)]),
        Pages([("b", 1), ("c", 1)], kinds[1].tobytes(), 0.2, [("host", 2, 10)]),
    ]
    whole = joined(parts)
    assert whole.owners == [("a", 1), ("b", 1), ("c", 1)]
    assert list(array("H", whole.kinds)) == [
        CACHED,
        FIRST_OWNER,
        SHARED,
        FIRST_OWNER + 2,
        0,
        FIRST_OWNER + 1,
    ]
    assert (whole.tiers, whole.took_s) == ([("host", 3, 20)], 0.2)


def test_metrics_and_explanations_tell_replicas_apart():
    metrics, explainer = MetricsOfReplicas(2), ExplainerOfReplicas(2)
    batch = [
        Submitted(1.0, "/a/0", 3),
        Submitted(1.0, "/b/0", 3, replica=1),
        StepPlanned(2.0, 7, 3, 8, 0, 1, 1, 0, 10, (("/a/0", 3),)),
        StepPlanned(2.5, 7, 3, 8, 0, 1, 1, 5, 20, (("/b/0", 3),), replica=1),
    ]
    metrics.take(batch)
    explainer.take(batch)
    text = metrics.render().decode()
    assert 'tidemill_requests_submitted_total{replica="0"} 1.0' in text
    assert 'tidemill_requests_submitted_total{replica="1"} 1.0' in text
    assert 'tidemill_kv_pages_free{replica="1"} 20.0' in text
    assert metrics.totals()["requests_submitted"] == 2
    assert metrics.totals()["kv_pages_free"] == 30
    assert [(story.request_id, story.body()["replica"]) for story in explainer.under_way()] == [
        ("/a/0", 0),
        ("/b/0", 1),
    ]


def test_a_request_with_which_engine_after_engine_is_lost_ends(monkeypatch):
    """Though nobody can say that it was the cause: as of nodes that run out of memory."""
    asked, gives_token = [], []

    async def lose(client, request, *_):
        asked.append(request)
        if len(asked) in gives_token:
            yield Delta(request.request_id, 0, [5])
        lost = EngineLost("gone")
        lost.is_known, lost.may_have_killed = True, len(asked) not in gives_token
        raise lost

    monkeypatch.setattr(EngineClient, "submit", lose)
    monkeypatch.setattr(EngineClient, "working", True)

    async def ask():
        asked.clear()
        with pytest.raises(EngineDead, match="5 engines were lost"):
            await collect(Replicas(2), "x")
        return len(asked)

    assert asyncio.run(ask()) == 5
    gives_token.append(3)
    assert asyncio.run(ask()) == 8  # three, of which the last made progress, and five
    assert asked[-1].resumed[0].output_ids == [5]


def test_gpus_are_those_that_the_process_may_use():
    assert _gpus({"CUDA_VISIBLE_DEVICES": "2, 3"}) == ["2", "3"]
    assert _gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


@pytest.mark.slow
def test_replicas_give_the_tokens_of_one_engine_also_if_one_is_killed(tiny_folder):
    prompts = [tuple(range(2 + number, 80 + number)) for number in range(12)]

    async def outputs(client, length):
        going = [
            collect(client, f"{length}-{i}", length, n=2, prompt=prompt, seed=i)
            for i, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*going)

    async def whole():
        seen = []
        alone, replicas = EngineClient(), Replicas(2, seen.extend)
        try:
            options = EngineOptions(model=str(tiny_folder), threads=1, data_parallel=2)
            await alone.start(options)
            await replicas.start(options)
            same = [
                dataclasses.replace(client.ready.config, reasons={}) for client in replicas.clients
            ]
            assert same[0] == same[1]
            expected = [await outputs(alone, length) for length in (20, 150)]
            assert await outputs(replicas, 20) == expected[0]
            assert {event.replica for event in seen if isinstance(event, Admitted)} == {0, 1}
            went = {
                event.request_id: event.replica for event in seen if isinstance(event, Admitted)
            }
            for number, prompt in enumerate(prompts):  # what continues a prompt finds its prefix
                await collect(replicas, f"next-{number}", 2, prompt=(*prompt, 5, 6, 7))
                hit = next(
                    one
                    for one in seen
                    if isinstance(one, Admitted) and one.request_id == f"next-{number}"
                )
                assert (hit.replica, hit.num_cached) == (went[f"20-{number}:0"], 64)
            going = asyncio.create_task(outputs(replicas, 150))
            await until_async(lambda: all(client.num_pending for client in replicas.clients))
            await until_async(
                lambda: any(
                    route.outputs[0]
                    for route in replicas.routes.values()
                    if route.client is replicas.clients[1]
                )
            )
            moved = {
                name
                for name, route in replicas.routes.items()
                if route.client is replicas.clients[1]
            }
            os.kill(replicas.clients[1].link.pid, signal.SIGKILL)
            assert await asyncio.wait_for(going, LONG_S) == expected[1]
            assert any(
                isinstance(one, Finished)
                and one.request_id.partition(":")[0] in moved
                and one.replica == 0
                for one in seen
            )
            await until_async(
                lambda: any(isinstance(one, EngineRestarted) and one.replica == 1 for one in seen)
            )
            assert await outputs(replicas, 20) == expected[0]
            assert not replicas.num_pending
            assert replicas.num_restarts == 1
            with pytest.raises((AdapterError, InvalidRequest, TidemillError)):
                await replicas.adapters.load("no", "/nowhere")
            assert not list(replicas.adapters)
        finally:
            await asyncio.gather(alone.close(), replicas.close())
        assert replicas.gave_up.is_set()

    asyncio.run(whole())


class FailingLink(CoreLink):
    """It cannot be started while a test says so."""

    fails, num_tried = False, 0

    async def start(self, *given, **more):
        FailingLink.num_tried += 1
        if FailingLink.fails:
            raise EngineDead("no memory")
        return await super().start(*given, **more)


@pytest.mark.parametrize(
    "how",
    [{"data_parallel": 2}, {"prefill_engines": 1, "decode_engines": 1}],
    ids=["alike", "roles"],
)
def test_one_of_several_that_is_given_up_is_tried_until_it_works(tiny_folder, monkeypatch, how):
    monkeypatch.setattr(FailingLink, "fails", False)
    monkeypatch.setattr(replicas_module, "EngineLink", FailingLink)
    for name in ("_FIRST_DELAY_S", "_MAX_GIVEN_UP_DELAY_S"):
        monkeypatch.setattr(client_module, name, 0.001)
    options = EngineOptions(model=str(tiny_folder), threads=1, **how)
    routing = routing_of(options)
    metrics, seen = MetricsOfReplicas(2, routing.names), []
    labels = [
        f'replica="{at}"' + (f',role="{role}"' if role else "")
        for at, role in enumerate(routing.names or ("", ""))
    ]

    def value(name, at):
        return float(
            metrics.render().decode().partition(f"tidemill_{name}{{{labels[at]}}} ")[2].split()[0]
        )

    async def whole():
        replicas = Replicas(
            2, lambda batch: (metrics.take(batch), seen.extend(batch)), routing=routing
        )
        service = SimpleNamespace(
            model_name="m", aliases=(), live=SimpleNamespace(), client=replicas, state="loaded"
        )
        models, prompts = Models([service]), [tuple(range(2 + at, 60 + at)) for at in range(4)]
        names = [
            f"{at} ({role})" if role else str(at)
            for at, role in enumerate(routing.names or ("", ""))
        ]
        numbers = count()

        async def outputs():
            return await asyncio.gather(
                *(collect(replicas, f"r{next(numbers)}", 8, prompt=one, seed=1) for one in prompts)
            )

        try:
            await replicas.start(options)
            expected = await outputs()
            assert models.health() == {"status": "ok", "engines": dict.fromkeys(names, "running")}
            FailingLink.fails = True
            lost = replicas.clients[1]
            lost.link.kill()
            await until_async(lambda: lost.death)
            tried = FailingLink.num_tried
            await until_async(
                lambda: FailingLink.num_tried > tried + client_module.MAX_FAILED_STARTS
            )
            assert models.health() == {
                "status": "degraded",
                "engines": {names[0]: "running", names[1]: "down"},
            }
            assert (value("engine_up", 1), value("engines_given_up_total", 1)) == (0, 1)
            assert not replicas.gave_up.is_set()
            assert await outputs() == expected
            FailingLink.fails = False
            await until_async(lambda: lost.working)
            assert models.health()["status"] == "ok"
            assert (value("engine_up", 1), value("engines_given_up_total", 1)) == (1, 1)
            seen.clear()
            # cached nowhere
            fresh = [
                collect(replicas, f"f{at}", 8, prompt=[at, *range(90 - at, 40, -1)])
                for at in range(2, 8)
            ]
            await asyncio.gather(*fresh)
            assert {event.replica for event in seen if isinstance(event, Admitted)} == {0, 1}
            FailingLink.fails = True
            for client in replicas.clients:
                client.link.kill()
            await asyncio.wait_for(replicas.gave_up.wait(), LONG_S)
            with pytest.raises(EngineDead, match="3 times in a row: no memory"):
                await collect(replicas, "late")
        finally:
            await replicas.close()

    asyncio.run(whole())


@pytest.mark.slow
def test_a_replica_that_cannot_start_ends_the_others(tiny_folder, monkeypatch):
    """All or nothing: the second one gets an option that its engine refuses."""

    async def whole():
        replicas = Replicas(2)
        options_of = replicas._options

        def broken(options, number):
            return (
                options_of(options, number) if not number else EngineOptions(model="/nowhere.gguf")
            )

        monkeypatch.setattr(replicas, "_options", broken)
        with pytest.raises(TidemillError):
            await replicas.start(EngineOptions(model=str(tiny_folder), threads=1, data_parallel=2))
        assert all(client.link is None for client in replicas.clients)
        assert not replicas.alive

    asyncio.run(whole())
