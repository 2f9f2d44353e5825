"""Prefill and decode engines on a Ray cluster of two local nodes."""

import asyncio
from contextlib import aclosing
from itertools import count

import pytest

from tests.waiting import until_async
from tidemill.cluster.ray.cluster import Cluster
from tidemill.cluster.ray.serving import RayFleet, RayOptions
from tidemill.config import EngineOptions
from tidemill.engine.client import EngineClient
from tidemill.errors import ConfigError
from tidemill.types.events import EngineRestarted, TakenOver
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
ray = pytest.importorskip("ray")

PROMPTS = [[2 + (7 * i + number) % 90 for i in range(70)] for number in range(16)]


def options(folder, **more):
    given = {
        "prefill_engines": 1,
        "decode_engines": 1,
        "threads": 1,
        "kv_memory_bytes": 2**24,
    } | more
    return EngineOptions(model=str(folder), served_name="tiny", **given)


async def answers(client, name, length=60):
    async def one(number):
        params = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.0)
        tokens = []
        async with aclosing(
            client.submit(Submit(f"{name}{number}", PROMPTS[number], params, salt=name))
        ) as deltas:
            async for delta in deltas:
                tokens += delta.token_ids
        return tokens

    return await asyncio.gather(*(one(number) for number in range(len(PROMPTS))))


def test_roles_are_placement_groups_and_lose_no_request(nodes, tiny_folder):
    async def whole():
        seen = []
        alone = EngineClient()
        await alone.start(options(tiny_folder))
        expected = await answers(alone, "alone")
        await alone.close()
        fleet = RayFleet(Cluster(nodes.address), RayOptions(), options(tiny_folder))
        client = fleet.client(seen.extend, 60.0, lambda _: None, 300.0)
        try:
            await client.start(fleet.engine)
            groups = [
                one
                for one in ray.util.placement_group_table().values()
                if one["state"] == "CREATED"
            ]
            assert len(groups) == 2
            assert await answers(client, "first") == expected
            taken = [one for one in seen if isinstance(one, TakenOver)]
            assert len(taken) == len(PROMPTS)
            assert sum(one.num_found for one in taken) > 0  # pages came by TCP
            for number, name in ((1, "decode"), (0, "prefill")):
                going = asyncio.create_task(answers(client, name))
                await until_async(lambda number=number: client.clients[number].num_pending > 2)
                client.clients[number].link.kill()
                assert await going == expected
                await until_async(
                    lambda number=number: any(
                        isinstance(e, EngineRestarted) and e.replica == number for e in seen
                    )
                )
            assert await answers(client, "last") == expected
        finally:
            await client.close()
        assert not [
            one for one in ray.util.placement_group_table().values() if one["state"] == "CREATED"
        ]

    asyncio.run(whole())


def test_roles_of_two_ranks_exchange_pages_by_tcp(nodes, tiny_folder):
    """Each rank of the prefill engine at a port of its own, for the same rank of the decode engine."""

    async def whole():
        seen, alone, given = [], EngineClient(), options(tiny_folder, tensor_parallel=2)
        await alone.start(given)
        expected = await answers(alone, "alone", 8)
        await alone.close()
        fleet = RayFleet(Cluster(nodes.address), RayOptions(), given)
        client = fleet.client(seen.extend, 60.0, lambda _: None, 300.0)
        try:
            await client.start(fleet.engine)
            for number in count():  # what comes late on a busy machine is computed again
                assert await answers(client, f"round {number}", 8) == expected
                if sum(one.num_found for one in seen if isinstance(one, TakenOver)):
                    break
        finally:
            await client.close()

    asyncio.run(whole())


def test_what_does_not_go_together(nodes, tiny_folder):
    cluster = Cluster(nodes.address, wait_s=1.0)
    with pytest.raises(ConfigError, match="alike or have roles"):
        RayFleet(cluster, RayOptions(3), options(tiny_folder))
    with pytest.raises(ConfigError, match="There is no decode engine"):
        RayFleet(cluster, RayOptions(), options(tiny_folder, decode_engines=0))

    async def whole():
        given = options(tiny_folder, decode_engines=9)
        fleet = RayFleet(cluster, RayOptions(), given)
        client = fleet.client(lambda _: None, 60.0, lambda _: None, 300.0)
        with pytest.raises(ConfigError, match="no room"):
            await client.start(fleet.engine)
        assert not [
            one for one in ray.util.placement_group_table().values() if one["state"] != "REMOVED"
        ]

    asyncio.run(whole())
