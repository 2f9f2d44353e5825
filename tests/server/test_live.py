"""The live view, from a core's own events and pages. Over HTTP: test_page."""

import base64
import json
import zlib
from array import array

import pytest

from tests.helpers import load_model, make_core
from tidemill.engine.client import EngineClient
from tidemill.engine.metrics import Metrics
from tidemill.errors import QueueFull
from tidemill.kv.manager import FIRST_OWNER, SHARED
from tidemill.server.observe.explain import Explainer
from tidemill.server.observe.live import MAX_WATCHERS, Live
from tidemill.types.events import ExpertsUsed
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit


class Watched:
    """A core, and everything that reads its events."""

    def __init__(self, folder, **options):
        self.core = make_core(load_model(folder), **options)
        self.metrics, self.explainer = Metrics(), Explainer()
        self.live = Live(EngineClient(), self.metrics, self.explainer)

    def submit(self, name, prompt, length):
        self.core.submit(
            Submit(name, prompt, SamplingParams(max_tokens=length, ignore_eos=True, seed=1))
        )

    def step(self, num=1):
        for _ in range(num):
            batch = self.core.step()[0].events
            for reader in (self.metrics, self.explainer, self.live):
                reader.take(batch)

    def watch(self, tenant=None):
        return self.live.watch(lambda: False, tenant)


def parsed(frame):
    name, data = frame.decode().strip().split("\n")
    assert name.startswith("event: ")
    body = json.loads(data.removeprefix("data: "))
    assert body["type"] == name.removeprefix("event: ")
    return body


def kinds_of(pages):
    return array("H", zlib.decompress(base64.b64decode(pages["kinds"])))


async def next_of(frames, kind):
    while (body := parsed(await anext(frames)))["type"] != kind:
        pass
    return body


async def test_a_frame_tells_what_runs_and_waits(tiny_folder):
    watched = Watched(tiny_folder, max_requests=2, token_budget=32)
    frames = watched.watch().frames()
    assert parsed(await anext(frames))["type"] == "engine"
    for i in range(3):
        watched.submit(f"r{i}", [5] * 40, 20)
    watched.step(6)
    state = await next_of(frames, "state")
    first, second, third = state["requests"]
    assert (first["id"], first["phase"], first["prompt"], first["prefilled"]) == (
        "r0",
        "decode",
        40,
        40,
    )
    assert first["output"] == len(watched.core.live["r0"].requests[0].tokens) - 40
    assert second["cached"] == 32  # the same prompt, but for the page that must be computed
    assert third["phase"] == "queued"
    assert state["totals"]["requests_running"] == 2
    assert state["totals"]["requests_waiting"] == 1
    assert state["totals"]["cached_tokens"] == 32
    assert len(state["steps"]) == 6
    assert sum(step[3] for step in state["steps"]) == 40 + 8  # prompt tokens
    assert any("all 2 slots are taken" in words for _, _, _, words in state["decisions"])


async def test_pages_are_coloured_by_who_holds_them(tiny_folder):
    watched = Watched(tiny_folder)
    frames = watched.watch().frames()
    for name in ("a", "b"):
        watched.submit(name, [7] * 100, 30)
        watched.step(2)
    watched.live.take_pages(watched.core.pages())
    pages = await next_of(frames, "pages")
    kinds, kv = kinds_of(pages), watched.core.scheduler.kv
    assert len(kinds) == kv.num_pages
    assert [name for name, _ in pages["requests"]] == ["a", "b"]
    assert kinds.count(SHARED) == 96 // kv.page_size
    for i, (_, num) in enumerate(pages["requests"]):
        assert kinds.count(FIRST_OWNER + i) == num - kinds.count(SHARED) > 0


async def test_a_tenant_sees_ids_of_its_own_only(tiny_folder):
    watched = Watched(tiny_folder)
    every, mine = watched.watch().frames(), watched.watch(tenant="me").frames()
    for name in ("me/a/0", "you/secret/0", "you/secret/1"):
        watched.submit(name, [7] * 40, 30)
    watched.step(3)
    watched.live.take_pages(watched.core.pages())
    frames = [await next_of(mine, kind) for kind in ("state", "pages")]
    assert "secret" not in json.dumps(frames)
    assert "you" not in json.dumps(frames)
    state, pages = frames
    names = [one["id"] for one in state["requests"]]
    assert names[0] == "me/a/0"
    assert len(set(names)) == 3
    assert [name for name, _ in pages["requests"]] == names  # the same alias everywhere
    assert {name for _, _, name, _ in state["decisions"]} == set(names)
    assert [one["id"] for one in (await next_of(every, "state"))["requests"]] == [
        "me/a/0",
        "you/secret/0",
        "you/secret/1",
    ]


async def test_a_slow_watcher_misses_frames_and_gets_the_newest(tiny_folder):
    watched = Watched(tiny_folder)
    slow, fast = watched.watch().frames(), watched.watch().frames()
    watched.submit("long", [3] * 10, 400)
    await next_of(slow, "state")
    for _ in range(8):
        watched.step(45)
        latest = await next_of(fast, "state")
    state = await next_of(slow, "state")
    assert state["steps"][-1] == latest["steps"][-1]
    assert state["steps"][-1][0] == 359
    assert len(state["steps"]) == 128
    assert len(state["decisions"]) <= 40


async def test_the_last_state_reaches_all(tiny_folder):
    watched = Watched(tiny_folder)
    early, late = watched.watch().frames(), watched.watch().frames()
    watched.submit("x", [3] * 10, 5)
    await next_of(early, "state")
    watched.step(5)
    # the first of them may get a state that was made before the steps, and then another
    for frames in (late, early):
        while len((await next_of(frames, "state"))["steps"]) < 5:
            pass


async def test_nothing_is_kept_when_nobody_watches(tiny_folder):
    watched = Watched(tiny_folder)
    watchers = [watched.watch() for _ in range(MAX_WATCHERS)]
    with pytest.raises(QueueFull):
        watched.watch()
    watched.submit("x", [3] * 10, 50)
    watched.step(10)
    assert len(watched.live._steps) == 10
    for watcher in watchers:
        await watcher.aclose()
    watched.step(10)
    assert not watched.live._steps
    assert not watched.live._decisions
    watched.watch()


async def test_a_crowd_is_told_in_part(tiny_folder):
    watched = Watched(tiny_folder, max_requests=2)
    frames = watched.watch().frames()
    for i in range(300):
        watched.submit(f"r{i}", [i % 200 + 1], 5)
    watched.step(2)
    state = await next_of(frames, "state")
    assert len(state["requests"]) + state["num_unlisted"] == 300
    assert len(state["requests"]) < 100


async def test_experts_are_a_frame_of_their_own(tiny_folder):
    watched = Watched(tiny_folder)
    frames = watched.watch("someone").frames()
    watched.live.take([ExpertsUsed(0.0, 64, ((1, (3, 0, 5)), (2, (4, 4, 0))))])
    experts = await next_of(frames, "experts")
    assert (experts["layers"], experts["tokens"]) == ([1, 2], [[3, 0, 5], [4, 4, 0]])
