"""Engine processes that exchange KV pages, one of them killed again and again."""

import asyncio
import os
import random
import signal
from contextlib import aclosing

import pytest

from tests.waiting import until_async
from tidemill.config import EngineOptions
from tidemill.distributed.transfer import open as opening
from tidemill.engine.client import EngineClient
from tidemill.types import events
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Resumed, Submit


async def ask(client, name, prompt, length, resumed=None) -> list[int]:
    tokens = []
    submit = Submit(
        name,
        prompt,
        SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True),
        resumed=resumed,
    )
    async with aclosing(client.submit(submit)) as deltas:
        async for delta in deltas:
            tokens += delta.token_ids
    return tokens


def peer_tokens(seen) -> dict[str, int]:
    return {one.request_id: one.num_peer for one in seen if isinstance(one, events.Admitted)}


@pytest.mark.slow
def test_requests_go_from_process_to_process_and_survive_kills(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(opening.tempfile, "tempdir", None)
    draw = random.Random(3)
    prompts = [draw.choices(range(2, 200), k=150) for _ in range(8)]

    async def whole():
        seen = []
        first, second, plain = EngineClient(), EngineClient(on_events=seen.extend), EngineClient()
        how = {
            "model": str(tiny_folder),
            "threads": 1,
            "max_context": 256,
            "token_budget": 64,
            "max_requests": 8,
        }
        try:
            await second.start(EngineOptions(**how, kv_import="shm:one"))  # it waits for the other
            await first.start(EngineOptions(**how, kv_export="shm:one:16M"))
            await plain.start(EngineOptions(**how))
            for number, prompt in enumerate(prompts):
                expected = await ask(plain, f"r{number}", prompt, 12)
                if number % 2:
                    going = asyncio.create_task(ask(first, f"r{number}", prompt, 1))
                    await asyncio.sleep(draw.uniform(0.0, 0.05))
                    os.kill(first.link.pid, signal.SIGKILL)
                    begun = await going  # by the engine that replaces it
                else:
                    begun = await ask(first, f"r{number}", prompt, 1)
                    if number == 0:  # fetched though nobody asks the engine for anything
                        await until_async(
                            lambda: any(
                                isinstance(one, events.PagesMoved) and one.tier == "peer"
                                for one in seen
                            )
                        )
                rest = await ask(second, f"r{number}", prompt, 12, [Resumed(0, begun)])
                assert begun + rest == expected
            # the last one may have answered before it was killed
            await until_async(lambda: first.num_restarts == 4)
            assert peer_tokens(seen)["r0"] > 0
        finally:
            for client in (first, second, plain):
                await client.close()

    asyncio.run(whole())
    assert not list(opening.folder().iterdir())
