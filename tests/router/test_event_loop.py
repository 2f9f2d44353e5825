"""Large bodies do not keep the router's event loop from others. Measured in CPU seconds of this
process, in which the stub runs as well, between two turns of the loop.
"""

import asyncio
import contextlib
import json
import time

import pytest

from tests.router.stub import Client, Stub, post, routed
from tests.server.largest_bodies import ANTHROPIC, CHATS, COMPLETIONS, JUNK, RESPONSES

MOST_LAG_S = 0.1
BODIES = {
    "/v1/completions": COMPLETIONS[:8],
    "/v1/chat/completions": CHATS[:7],
    "/v1/responses": RESPONSES[:3],
    "/v1/messages": ANTHROPIC[-3:],
    "/v1/embeddings": JUNK,
}


@contextlib.asynccontextmanager
async def measured():
    """The longest gap, as the last of a list."""
    longest = [0.0]

    async def tick() -> None:
        while True:
            begun = time.process_time()
            await asyncio.sleep(0.001)
            longest[0] = max(longest[0], time.process_time() - begun)

    task = asyncio.create_task(tick())
    try:
        yield longest
    finally:
        task.cancel()


# a limit on time: with other slow tests, on a machine that has nothing else to do
@pytest.mark.slow
@pytest.mark.parametrize("path", BODIES)
async def test_large_bodies_pass_the_router(path):
    stub, lags_s = Stub("a"), []
    async with routed(stub, check_every_s=60) as (_, port):
        for body in BODIES[path]:
            data, client = post(json.dumps(body).encode(), path), await Client.open(port)
            async with measured() as longest:
                client.send(data)
                assert (await client.answer())[0] == 200
            client.close()
            lags_s.append(longest[0])
    assert len(stub.sent) == len(lags_s)
    print([f"{1000 * lag_s:.1f} ms" for lag_s in lags_s])
    assert max(lags_s) < MOST_LAG_S
