"""Host memory and disk behind the KV cache: a request's tokens and logprobs are those of an engine
without them, bit for bit."""

import os
import random
import resource
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers import (
    KINDS_OF_CACHE,
    LONG_S,
    Answer,
    engine_config,
    greedy,
    load_model,
    make_llama,
    model_with_cache,
    run,
)
from tidemill.engine import kv_tiers
from tidemill.engine.core import EngineCore
from tidemill.engine.load import core_of
from tidemill.errors import ConfigError
from tidemill.kernels import machine, native
from tidemill.kv.costs import Costs
from tidemill.kv.tiers import Tier
from tidemill.runner import page_file
from tidemill.types import events
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

PAGES = 16  # of the device: one prompt of the following and a bit more


def prompt(seed: int, num: int = 150) -> list[int]:
    return random.Random(seed).choices(range(2, 250), k=num)


PROMPTS = {f"p{seed}": (prompt(seed), greedy(8, logprobs=2)) for seed in range(4)}
PROMPTS["drawn"] = prompt(9), SamplingParams(max_tokens=8, seed=3, temperature=1.0, logprobs=2)


@pytest.fixture(scope="module", params=KINDS_OF_CACHE)
def model(request, tmp_path_factory):
    return model_with_cache(request.param, tmp_path_factory.mktemp(request.param))


def make_core(
    model, pages: int = PAGES, slots: int = 0, folder=None, quota: int = 2**24, **options
) -> EngineCore:
    """A pool so small that each prompt evicts those before it."""
    page_bytes = engine_config(model, max_context=256).page_bytes
    if slots:
        options["kv_host_memory_bytes"] = slots * page_bytes
    if folder is not None:
        options["kv_disk"] = f"{folder}:{quota}"
    layout = engine_config(model, max_context=256).layout
    num = (3 if layout.states else pages) * len(layout.groups)  # of states a sequence keeps few
    config = engine_config(model, kv_memory_bytes=num * page_bytes, max_context=256, **options)
    core = core_of(model, config, None, None, b"w")
    if core.scheduler.kv.offload.tiers is not None:
        core.scheduler.kv.offload.tiers.costs = FreeMoves()
    return core


class FreeMoves(Costs):
    """What moves take is not noted, so that a slow disk does not make the engine compute instead."""

    def moved(self, *_) -> None: ...


@pytest.fixture(scope="module")
def expected(model) -> dict[str, Answer]:
    return run(make_core(model, prefix_caching=False), PROMPTS)


def settle(core: EngineCore) -> None:
    while core.has_moves:
        core.step()


def one_by_one(
    core: EngineCore, names=PROMPTS
) -> tuple[dict[str, Answer], dict[str, events.Admitted], list[events.Event]]:
    """Answers, what each started from, and all that was decided. Each begins when the pages of the
    one before are moved."""
    answers, happened = {}, core.take_events()
    take = core.step
    for name in names:
        core.step = lambda: (result := take(), happened.extend(result[0].events))[0]
        answers |= run(core, {name: PROMPTS[name]})
        settle(core)
    core.step = take
    return (
        answers,
        {one.request_id: one for one in happened if isinstance(one, events.Admitted)},
        happened,
    )


def kinds(happened, kind):
    return [one for one in happened if isinstance(one, kind)]


def test_a_prefix_comes_back_from_host_memory(model, expected):
    core = make_core(model, slots=200)
    assert one_by_one(core)[0] == expected
    answers, started, happened = one_by_one(core)
    assert answers == expected
    assert all(
        one.num_host >= 96 and one.num_host <= one.num_cached for one in list(started.values())[:-1]
    )
    assert "from host memory" in started["p0"].reason
    loaded = [one for one in kinds(happened, events.PagesMoved) if one.is_load]
    assert (
        sum(one.num_bytes for one in loaded)
        == core.config.page_bytes * sum(one.num_pages for one in loaded)
        > 0
    )
    assert (
        len(kinds(happened, events.PagesLoading))
        == len(kinds(happened, events.PagesLoaded))
        >= len(PROMPTS) - 1
    )
    core.close()


def test_a_prefix_comes_back_from_disk_also_after_a_restart(model, expected, tmp_path):
    slots = 4 if model.config.has_states else 30
    core = make_core(model, slots=slots, folder=tmp_path)
    assert one_by_one(core)[0] == expected
    answers, started, _ = one_by_one(core)
    assert answers == expected
    assert any(one.num_disk for one in started.values())
    core.close()
    again = make_core(model, slots=slots, folder=tmp_path)
    answers, started, _ = one_by_one(again)
    assert answers == expected
    assert all(one.num_disk >= 96 for one in started.values())
    again.close()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 2**24


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    make_llama(path, seed=5, hidden_size=32, intermediate_size=48)
    return load_model(path)


@pytest.fixture(scope="module")
def llama_expected(llama):
    return run(make_core(llama, prefix_caching=False), PROMPTS)


def test_a_preempted_request_is_swapped(llama, llama_expected):
    core = make_core(llama, pages=24, slots=200, max_requests=5)
    one_by_one(core, ["p0"])
    happened, take = [], core.step
    core.step = lambda: (result := take(), happened.extend(result[0].events))[0]
    longer = {name: (tokens, greedy(60, logprobs=2)) for name, (tokens, _) in PROMPTS.items()}
    answers = run(core, longer)
    assert answers == run(make_core(llama, prefix_caching=False), longer)
    preempted = kinds(happened, events.Preempted)
    assert any(one.is_swap and "swap" in one.how_back for one in preempted)
    back = [one for one in kinds(happened, events.Admitted) if one.num_host]
    assert {one.request_id for one in back} & {one.request_id for one in preempted}
    core.close()


def test_another_tenant_finds_nothing(llama):
    core = make_core(llama, slots=200)
    one_by_one(core)
    core.submit(Submit("other", *PROMPTS["p0"], salt="another tenant"))
    happened = []
    while core.has_work:
        happened += core.step()[0].events
    assert [one.num_cached for one in kinds(happened, events.Admitted)] == [0]
    core.close()


def filled(model, folder) -> object:
    """The file of an engine that has ended."""
    core = make_core(model, slots=40, folder=folder)
    one_by_one(core)
    core.close()
    return next(folder.glob(f"*{page_file.SUFFIX}"))


def flip(file, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 0x10
    file.write_bytes(content)


@pytest.mark.parametrize("damage", ["page", "record header", "header", "cut off", "not ours"])
def test_a_corrupt_file_is_not_used(llama, llama_expected, tmp_path, damage):
    file = filled(llama, tmp_path)
    page_bytes = engine_config(llama, max_context=256).page_bytes
    first, each = 4096, page_file.stride(page_bytes)
    if damage == "cut off":
        file.write_bytes(file.read_bytes()[: first + 5 * each + 99])
    elif damage == "not ours":
        file.write_bytes(b"my notes " * 1000)
    else:
        num = (file.stat().st_size - first) // each
        within = {"page": page_bytes // 2, "record header": 9, "header": 20 - first}[damage]
        for record in range(num if damage != "header" else 1):
            flip(file, first + record * each + within)
    core = make_core(llama, slots=40, folder=tmp_path)
    answers, started, happened = one_by_one(core)
    assert answers == llama_expected
    if damage == "page":
        assert kinds(happened, events.MovesFailed)
        # when they were started for good
        assert all(one.num_cached == 0 for one in started.values())
    else:
        assert kinds(happened, events.TierNotUsed)
        assert all(one.num_disk <= 5 * 16 for one in started.values())
    core.close()


def test_pages_of_another_model_are_not_used(llama, llama_expected, tmp_path):
    filled(llama, tmp_path)
    config = make_core(llama, slots=40, folder=tmp_path / "elsewhere").config
    core = core_of(llama, replace(config, kv_disk=str(tmp_path)), None, None, b"other weights")
    answers, started, _ = one_by_one(core)
    assert answers == llama_expected
    assert not any(one.num_disk for one in started.values())
    core.close()


@contextmanager
def largest_file(num_bytes: int):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_an_event(llama, llama_expected, tmp_path):
    core = make_core(llama, slots=8, folder=tmp_path)
    with largest_file(4096 + 4 * page_file.stride(core.config.page_bytes)):
        happened = one_by_one(core)[2]
        answers, _, more = one_by_one(core)
    assert answers == llama_expected
    failed = kinds(happened + more, events.MovesFailed)
    assert failed
    assert all(one.tier == "disk" for one in failed)
    core.close()


def test_two_models_go_on_without_a_disk_that_is_full_when_they_start(
    llama, llama_expected, tmp_path, caplog
):
    with largest_file(0):
        cores = [make_core(llama, slots=8, folder=tmp_path, max_requests=num) for num in (4, 8)]
        cores.append(core_of(llama, cores[0].config, None, None, b"other weights"))
    for core in cores:
        answers, _, happened = one_by_one(core)
        assert answers == llama_expected
        (unused,) = kinds(happened, events.TierNotUsed)
        assert "File too large" in unused.reason
        core.close()
    assert "pages of the KV cache on disk are not used" in caplog.text
    assert not list(tmp_path.glob(f"*{page_file.SUFFIX}"))
    core = make_core(llama, slots=8, folder=tmp_path)  # the lock was given back
    assert not kinds(one_by_one(core)[2], events.TierNotUsed)
    core.close()


@pytest.mark.parametrize(
    "part", ["instruction set", "build of kernels", "instruction set of torch"]
)
def test_pages_of_a_machine_with_other_arithmetic_are_not_used(
    llama, llama_expected, tmp_path, monkeypatch, part
):
    filled(llama, tmp_path)
    monkeypatch.setattr(
        kv_tiers, "arithmetic", lambda device: machine.arithmetic(device) | {part: "another"}
    )
    core = make_core(llama, slots=40, folder=tmp_path)
    answers, started, _ = one_by_one(core)
    assert answers == llama_expected
    assert not any(one.num_disk for one in started.values())
    core.close()


def test_the_kernels_that_are_loaded_tell_machines_apart(monkeypatch):
    here = machine.arithmetic("cpu")
    for name in ("avx2", "avx512", "avx512 with AMX", "neon"):
        with monkeypatch.context() as patched:
            patched.setattr(native, "why", name)
            assert (machine.arithmetic("cpu") == here) == (
                native.lib is None or native.why == here["instruction set"]
            )
            patched.setattr(native, "lib", None)
            assert machine.arithmetic("cpu")["instruction set"] == "torch"


def test_two_engines_do_not_share_a_file(llama, llama_expected, tmp_path):
    first = make_core(llama, slots=8, folder=tmp_path)
    second = make_core(llama, slots=8, folder=tmp_path)
    answers, _, happened = one_by_one(second)
    assert answers == llama_expected
    assert "in use" in kinds(happened, events.TierNotUsed)[0].reason
    first.close()
    second.close()


def test_others_go_on_while_a_page_comes_from_disk(llama, llama_expected, tmp_path, monkeypatch):
    filled(llama, tmp_path)
    core = make_core(llama, pages=40, slots=8, folder=tmp_path)
    may_read, read = threading.Event(), page_file.PageFile.read
    monkeypatch.setattr(
        page_file.PageFile, "read", lambda *args: (may_read.wait(LONG_S), read(*args))[1]
    )
    core.submit(Submit("p0", *PROMPTS["p0"]))
    other = prompt(77)
    core.submit(Submit("other", other, greedy(8)))
    ended = []
    while not ended:  # the first request cannot
        ended += [delta.request_id for delta in core.step()[0].deltas if delta.finish_reason]
    assert ended == ["other"]
    may_read.set()
    tokens = []
    while core.has_work:
        tokens += [token for delta in core.step()[0].deltas for token in delta.token_ids]
    assert tokens == llama_expected["p0"].tokens
    core.close()


def test_a_failed_step_takes_no_untrusted_page_along(llama, llama_expected, tmp_path):
    core = make_core(llama, slots=60, folder=tmp_path)
    one_by_one(core)
    core.submit(Submit("p0", *PROMPTS["p0"]))
    launch = core.runner.launch
    core.runner.launch = lambda plan: 1 / 0
    failed = []
    while core.has_work:
        failed += core.step()[1]
    assert len(failed) == 1
    core.runner.launch = launch
    core.scheduler.table.check_integrity()
    assert one_by_one(core)[0] == llama_expected
    core.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prefix_index": "radix"}, "prefix index hash"),
        ({"prefix_caching": False}, "no prefix caching"),
        ({"kv_host_memory_bytes": 2**50}, "more than"),
        ({"kv_host_memory_bytes": 100}, "hold 0 pages"),
        ({"kv_disk": "/somewhere"}, "kv_disk is"),
        ({"kv_disk": "/somewhere:lots"}, "kv_disk is"),
    ],
)
def test_what_cannot_be_is_refused(llama, options, says):
    with pytest.raises(ConfigError, match=says) as refused:
        engine_config(llama, **{"kv_host_memory_bytes": 2**20} | options)
    assert refused.value.fix


SERVES = """
import sys
from pathlib import Path
from tests.engine.test_tiers import PROMPTS, make_core, one_by_one
from tests.helpers import load_model
core = make_core(load_model(Path(sys.argv[1])), slots=30, folder=sys.argv[2])
print("ready", flush=True)
while True:
    one_by_one(core)
"""


@pytest.mark.slow
def test_an_engine_that_is_killed_at_any_moment_leaves_what_can_be_used(tmp_path):
    saved, folder = tmp_path / "model", tmp_path / "pages"
    make_llama(saved, seed=5, hidden_size=32, intermediate_size=48)
    model, chance = load_model(saved), random.Random(1)
    expected = run(make_core(model, prefix_caching=False), PROMPTS)
    for _ in range(5):
        root = Path(__file__).parents[2]
        engine = subprocess.Popen(
            [sys.executable, "-c", SERVES, saved, folder],
            cwd=root,
            env=os.environ,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert engine.stdout.readline() == "ready\n"
        time.sleep(chance.uniform(0.05, 2.0))
        engine.kill()
        engine.wait()
        core = make_core(model, slots=30, folder=folder)
        assert one_by_one(core)[0] == expected
        core.close()
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 2**24


def test_a_page_that_a_kv_policy_writes_is_stored_before(llama, monkeypatch):
    """Its tokens are not where their positions say."""
    core, unwritten = make_core(llama, slots=64), {}
    one_by_one(core, ["p0", "p1"])
    mover = core.runner.mover
    store = mover.store

    def watch(moves, written):
        sources = {
            move.source for move in moves if not move.is_load and move.tier is Tier.HOST
        } - set(written)
        unwritten.update({page: core.runner.cache[page].clone() for page in sources})
        store(moves, written)

    monkeypatch.setattr(mover, "store", watch)
    policy = {"kind": "snapkv", "budget": 50, "observed": 8}
    core.submit(
        Submit(
            "x",
            prompt(7),
            SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True, kv_policy=policy),
        )
    )
    num = 0
    while core.has_work:
        unwritten.clear()
        core.step()
        num += len(unwritten)
        assert all(
            torch.equal(core.runner.cache[page], before) for page, before in unwritten.items()
        )
    assert num or not core.scheduler.kv.offload.tiers.num_moves
