"""Two engines that exchange KV pages: tokens and logprobs are those of one engine, bit for bit,
whatever becomes of the pages."""

import random
import sys
import threading
import time

import pytest
from msgspec.structs import replace

from tests.engine.test_tiers import FreeMoves
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
from tests.helpers import take as take_step
from tests.waiting import until
from tidemill.distributed.transfer import exporter as exporting
from tidemill.distributed.transfer import open as opening
from tidemill.engine.core import EngineCore
from tidemill.engine.load import core_of
from tidemill.engine.parts import deferred
from tidemill.engine.parts.deferred import DeferredFinishes
from tidemill.engine.parts.tiers import PageMoves
from tidemill.errors import ConfigError, ModelFailed, PeerMismatch
from tidemill.kv.costs import Costs
from tidemill.kv.tiers import Tier
from tidemill.types import events
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Abort, Expect, Resumed, Submit


def prompt(seed: int, num: int = 150) -> list[int]:
    return random.Random(seed).choices(range(2, 250), k=num)


PROMPTS = {f"p{seed}": (prompt(seed), greedy(8, logprobs=2)) for seed in range(2)}
PROMPTS["drawn"] = prompt(9), SamplingParams(max_tokens=8, seed=3, temperature=1.0, logprobs=2)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(opening.tempfile, "gettempdir", lambda: str(tmp_path))


@pytest.fixture(scope="module", params=KINDS_OF_CACHE)
def model(request, tmp_path_factory):
    return model_with_cache(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    make_llama(path, seed=5, hidden_size=32, intermediate_size=48)
    return load_model(path)


@pytest.fixture(scope="module")
def expected(llama) -> dict[str, Answer]:
    return run(make_core(llama), PROMPTS)


def make_core(model, weights: bytes = b"w", **options) -> EngineCore:
    given = {
        "max_context": 256,
        "max_requests": 8,
        "token_budget": 32,
        "kv_memory_bytes": 2**22,
    } | options
    core = core_of(model, engine_config(model, **given), None, None, weights)
    if core.scheduler.kv.offload.tiers is not None:
        core.scheduler.kv.offload.tiers.costs = FreeMoves()
    return core


def watched(core: EngineCore, requests) -> tuple[dict[str, Answer], list[events.Event]]:
    happened, take = core.take_events(), core.step
    core.step = lambda: (result := take(), happened.extend(result[0].events))[0]
    answers = run(core, requests)
    core.step = take
    return answers, happened


def prefill(core: EngineCore) -> tuple[dict[str, Answer], list[events.Event]]:
    """What a prefill engine is asked: one token of each."""
    return watched(
        core,
        {name: (ids, replace(params, max_tokens=1)) for name, (ids, params) in PROMPTS.items()},
    )


def has_learned(core: EngineCore, num: int) -> None:
    """Until it knows of so many pages; they are not fetched yet."""
    until(
        lambda: core.part(PageMoves).take() or len(core.scheduler.kv.offload.tiers.peers) >= num,
        0.001,
    )


def moved(happened, tier: str, is_load: bool) -> int:
    return sum(
        one.num_pages
        for one in kinds(happened, events.PagesMoved)
        if (one.tier, one.is_load) == (tier, is_load)
    )


def kinds(happened, kind):
    return [one for one in happened if isinstance(one, kind)]


@pytest.mark.parametrize("fetches_early", [True, False])
def test_a_request_goes_on_in_another_engine(model, fetches_early, monkeypatch):
    alone = run(make_core(model), PROMPTS)
    first, second = make_core(model, kv_export="shm:a:4M"), make_core(model, kv_import="shm:a")
    begun, happened = prefill(first)
    num = len(first.scheduler.kv.offload.tiers.exports)
    # the last ones are told after the last step
    while moved(happened, "export", is_load=False) < num:
        first.part(PageMoves).take()
        happened += first.take_events()
    assert moved(happened, "export", is_load=False) == num > 0
    has_learned(second, num)
    if not fetches_early:
        second.scheduler.kv.behind.announced.clear()
    for name, (ids, params) in PROMPTS.items():
        assert begun[name].tokens == alone[name].tokens[:1]
        resumed = [Resumed(0, begun[name].tokens)]
        second.submit(Submit(name, ids, params, resumed=resumed))
    tokens, happened = {name: list(begun[name].tokens) for name in PROMPTS}, []
    while second.has_work:
        output, failed = second.step()
        assert not failed
        happened += output.events
        for delta in output.deltas:
            tokens[delta.request_id] += delta.token_ids
    assert tokens == {name: answer.tokens for name, answer in alone.items()}
    started = kinds(happened, events.Admitted)
    assert all(one.num_peer >= 128 and one.num_peer == one.num_cached for one in started), started
    assert 0 < moved(happened, "peer", is_load=True) <= num
    assert not kinds(happened, events.MovesFailed)
    computed = sum(one.num_tokens for one in kinds(happened, events.StepPlanned))
    assert computed <= sum(len(ids) + 8 - 128 for ids, _ in PROMPTS.values())
    assert len(kinds(happened, events.PagesLoading)) == len(kinds(happened, events.PagesLoaded))
    again, happened = watched(second, PROMPTS)
    assert again == alone
    assert moved(happened, "peer", is_load=True) == 0  # it has them
    second.scheduler.table.check_integrity()
    first.close()
    second.close()


@pytest.mark.parametrize("kind", ["tcp", "nixl"])
def test_pages_come_from_another_host(llama, expected, tmp_path, port, kind):
    if kind == "nixl":
        pytest.importorskip("nixl")
    (tmp_path / "key").write_text("0123456789abcdef")
    address = f"{kind}:127.0.0.1:{port}"
    key = {"kv_key_file": str(tmp_path / "key")}
    first, second = (
        make_core(llama, kv_export=f"{address}:4M", **key),
        make_core(llama, kv_import=address, **key),
    )
    prefill(first)
    has_learned(second, 27)
    answers, happened = watched(second, PROMPTS)
    assert answers == expected
    assert moved(happened, "peer", is_load=True) == 27
    first.close()
    second.close()


def test_the_end_of_a_request_is_told_when_other_engines_know_its_pages(
    llama, expected, monkeypatch
):
    monkeypatch.setattr(deferred, "_EXPORT_S", LONG_S)
    monkeypatch.setattr(exporting, "_PATIENCE_S", LONG_S)
    core = make_core(llama, kv_export="shm:a:4M")
    other = make_core(llama, kv_import="shm:a")
    exporter, may_write = core.runner.mover.outside.exporter, threading.Event()
    until(lambda: exporter.journal._known, 0.01)  # the other one is connected
    write = exporter.write
    exporter.write = lambda *args: (may_write.wait(LONG_S), write(*args))[1]
    core.submit(Submit("p0", PROMPTS["p0"][0], greedy(1)))
    deltas = []
    while core.scheduler.has_work:
        deltas += core.step()[0].deltas
    assert core.has_work
    assert not deltas
    may_write.set()
    while core.has_work:
        deltas += core.step()[0].deltas
    assert [delta.token_ids for delta in deltas] == [expected["p0"].tokens[:1]]
    assert len(other.runner.mover.outside.importer._links[0].slots) == 150 // 16
    core.close()
    other.close()


def test_pages_are_exported_while_the_prompt_is_computed(llama):
    core = make_core(llama, kv_export="shm:a:4M")
    core.submit(Submit("p0", *PROMPTS["p0"]))
    exporter, seen = core.runner.mover.outside.exporter, []
    while core.has_work:
        output, _ = core.step()
        core.runner.mover.drain()
        seen.append(len(exporter.journal._slots))
        if any(delta.token_ids for delta in output.deltas):
            break
    # of five chunks, each after the next has begun
    assert seen == [0, 2, 4, 6, 9] or seen == [0, 2, 4, 6, 8], seen
    core.close()


def test_an_exporter_that_dies_in_between_costs_time_only(llama, expected):
    first, second = make_core(llama, kv_export="shm:a:4M"), make_core(llama, kv_import="shm:a")
    prefill(first)
    has_learned(second, 27)
    fetch, importer = (
        second.runner.mover.outside.importer.fetch,
        second.runner.mover.outside.importer,
    )
    fetched = []

    def die(*args):
        if len(fetched) == 3:
            first.close()
            until(lambda: importer._links[0].reader is None, 0.001)
        fetched.append(args)
        fetch(*args)

    importer.fetch = die
    answers, happened = watched(second, PROMPTS)
    failed = kinds(happened, events.MovesFailed)
    assert failed
    assert all(one.tier == "peer" for one in failed)
    assert "gone" in failed[0].reason
    assert answers == expected
    second.scheduler.table.check_integrity()
    second.close()


def test_a_damaged_page_is_computed(llama, expected):
    first, second = make_core(llama, kv_export="shm:a:4M"), make_core(llama, kv_import="shm:a")
    prefill(first)
    has_learned(second, 27)
    slots = first.runner.mover.outside.exporter._source.slots
    slots[3:20, 100] ^= 4
    answers, happened = watched(second, PROMPTS)
    assert answers == expected
    failed = kinds(happened, events.MovesFailed)
    assert sum(one.num_pages for one in failed) >= 3
    assert "overwritten or damaged" in failed[0].reason
    assert moved(happened, "peer", is_load=True) > 0
    first.close()
    second.close()


def test_what_is_faster_computed_is_not_fetched(llama, expected):
    first, second = make_core(llama, kv_export="shm:a:4M"), make_core(llama, kv_import="shm:a")
    prefill(first)
    has_learned(second, 27)
    costs = second.scheduler.kv.offload.tiers.costs = Costs()
    costs.moved(Tier.PEER, True, 1, 1000.0)
    costs.computed(100, 0.001)
    answers, happened = watched(second, PROMPTS)
    assert answers == expected
    assert not any(one.num_cached for one in kinds(happened, events.Admitted))
    assert moved(happened, "peer", is_load=True) == 0
    first.close()
    second.close()


def test_only_what_is_expected_is_fetched_before_it_is_needed(llama, expected):
    first, second = make_core(llama, kv_export="shm:a:4M"), make_core(llama, kv_import="shm:a")
    behind = second.scheduler.kv.behind
    second.take(Expect(PROMPTS["p0"][0]))
    prefill(first)
    has_learned(second, 27)
    second.take(Expect(PROMPTS["drawn"][0][:40]))  # what was announced before counts as well
    while second.has_moves or behind.announced:
        second.step()
    assert len(behind.fetched) == 9 + 2
    answers, happened = watched(second, PROMPTS)
    assert answers == expected
    assert moved(happened, "peer", is_load=True) > 0  # the rest, when it was needed
    first.close()
    second.close()


def test_an_end_waits_for_its_own_pages_alone(llama, monkeypatch):
    monkeypatch.setattr(deferred, "_EXPORT_S", 0.5)
    core = make_core(llama, kv_export="shm:a:4M")
    kv, mover = core.scheduler.kv, core.runner.mover
    done, mover.done, waits = mover.done, list, []  # no move is ever over
    mover.wait = waits.append
    core.submit(Submit("long", prompt(1, 200), greedy(2)))
    core.submit(Submit("short", prompt(2, 8), greedy(1)))  # no page of its own
    ends, had = [], 0
    while not ends:
        ends += [delta.request_id for delta in core.step()[0].deltas if delta.finish_reason]
        had = max(had, len(kv.offload.exporting))
    assert ends == ["short"]
    assert had > 0
    assert not waits
    mover.done = done
    core.close()


@pytest.mark.parametrize("leaves", ["aborted", "failed"])
def test_an_end_that_is_kept_is_not_told_to_the_next_request_of_its_id(llama, monkeypatch, leaves):
    monkeypatch.setattr(deferred, "_EXPORT_S", LONG_S)
    core = make_core(llama, kv_export="shm:a:4M", speculate="off")
    done, core.runner.mover.done = core.runner.mover.done, list  # no move is ever over
    expected = run(make_core(llama), {"x": (prompt(2, 40), greedy(6))})
    core.submit(Submit("x", prompt(1), SamplingParams(n=2, max_tokens=8, seed=1)))
    samples = core.live["x"].requests
    samples[1].max_tokens = 1  # one sample ends, the other goes on
    while len(core.part(DeferredFinishes)._kept) < 1:
        core.step()
    if leaves == "aborted":
        core.abort(Abort("x", "client left"))
    else:
        core.fail(samples[0].seq, ModelFailed("for this test"), "for this test")
    core.submit(Submit("x", prompt(2, 40), greedy(6)))
    core.runner.mover.done = done
    answers = {"x": Answer()}
    while core.has_work:
        take_step(core, answers)
    assert answers == expected
    core.close()


def test_a_step_fails_while_an_importer_does_not_listen(llama, expected):
    core = make_core(llama, kv_export="shm:a:4M")
    journal, launch = core.runner.mover.outside.exporter.journal, core.runner.launch
    journal._known["does not ask"] = 0, time.monotonic() + 1000
    core.submit(Submit("p0", *PROMPTS["p0"]))
    for _ in range(4):
        core.step()
    core.runner.mover._workers[Tier.EXPORT].drain()
    assert core.scheduler.kv.offload.tiers.num_exporting >= len(journal._slots) > 0
    core.runner.launch = lambda plan: 1 / 0
    assert len(core.step()[1]) == 1
    core.scheduler.table.check_integrity()
    core.runner.launch = launch
    journal.knows("does not ask", None)
    assert watched(core, PROMPTS)[0] == expected
    core.scheduler.table.check_integrity()
    core.close()


def test_a_small_export_keeps_the_latest(llama, expected):
    page_bytes = engine_config(llama, max_context=256).page_bytes
    first = make_core(llama, kv_export=f"shm:a:{6 * page_bytes}")
    second = make_core(llama, kv_import="shm:a")
    prefill(first)
    has_learned(second, 6)
    assert watched(second, PROMPTS)[0] == expected
    first.close()
    second.close()


def test_worthless_pages_are_taken_back(llama):
    """Of a request whose logits are not numbers."""
    first, second = make_core(llama, kv_export="shm:a:4M"), make_core(llama, kv_import="shm:a")
    prefill(first)
    has_learned(second, 27)
    while second.has_moves or second.scheduler.kv.behind.announced:
        second.step()
    core = first.scheduler
    core.table.add(Submit("bad", PROMPTS["p0"][0], greedy(4)))
    plan = core.plan()
    assert plan.items
    core.table.discard(core.running[0], "logits are not numbers")
    first.step()
    first.runner.mover.drain()
    until(lambda: second.step() and len(second.scheduler.kv.offload.tiers.peers) <= 18, 0.001)
    _, happened = watched(second, {"p0": PROMPTS["p0"]})
    assert [one.num_cached for one in kinds(happened, events.Admitted)] == [0]
    first.close()
    second.close()


def test_engines_with_other_pages_are_refused(llama):
    first = make_core(llama, kv_export="shm:a:4M")
    with pytest.raises(PeerMismatch, match="another weights") as refused:
        make_core(llama, weights=b"others", kv_import="shm:a")
    assert "same version, model" in refused.value.fix
    with pytest.raises(
        PeerMismatch, match=r"another page layout.*another page size \(16, here 8\)"
    ):
        make_core(llama, page_size=8, kv_import="shm:a")
    with pytest.raises(PeerMismatch, match=r"another KV format \(float32, here float16\)"):
        make_core(llama, kv_dtype="float16", kv_import="shm:a")
    first.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kv_export": "shm"}, "kv_export is 'shm'"),
        ({"kv_export": "shm:../a"}, "kv_export is"),
        ({"kv_export": "pipe:a"}, "kv_export is"),
        ({"kv_export": "tcp:host"}, "kv_export is"),
        ({"kv_export": "tcp:host:99999"}, "kv_export is"),
        ({"kv_export": "shm:a:lots"}, "not an amount of memory"),
        ({"kv_export": "shm:a:100"}, "hold 0 pages"),
        ({"kv_export": "shm:a:4T"}, "more than"),
        ({"kv_export": "tcp:host:1"}, "needs a key"),
        ({"kv_import": "tcp:host:1"}, "needs a key"),
        ({"kv_import": "nixl:host"}, "kv_import is"),
        ({"kv_import": "shm:a,shm:a"}, "2 engines, 1 different"),
        ({"kv_import": "shm:a", "kv_export": "shm:a:1G"}, "names the address of kv_export"),
        ({"kv_import": "shm:a", "prefix_index": "radix"}, "prefix index hash"),
        ({"kv_export": "shm:a", "prefix_caching": False}, "no prefix caching"),
        (
            {"kv_export": "nixl:127.0.0.1:1", "tensor_parallel": 2},
            "cannot be combined with --kv-export or --kv-import by nixl",
        ),
        (
            {"kv_export": "tcp:host:65535", "kv_key_file": "key", "tensor_parallel": 2},
            "2 ranks take the ports 65535 to 65536",
        ),
        (
            {"kv_import": "tcp:h:8,tcp:g:7,tcp:h:7", "kv_key_file": "key", "tensor_parallel": 2},
            "the ports 7 to 8 of h",
        ),
        ({"kv_import": "shm:a", "kv_layout": "virtual"}, "pages of one pool"),
    ],
)
def test_what_cannot_be_is_refused(llama, options, says):
    with pytest.raises(ConfigError, match=says) as refused:
        engine_config(llama, **options)
    assert refused.value.fix


def test_nixl_that_is_not_there_is_said(llama, tmp_path, monkeypatch):
    (tmp_path / "key").write_text("0123456789abcdef")
    for name in ("nixl", "nixl._api"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(PeerMismatch, match=r"nixl is not available.*pip install nixl") as refused:
        make_core(llama, kv_export="nixl:127.0.0.1:12345:1M", kv_key_file=str(tmp_path / "key"))
    assert "shm" in refused.value.fix


@pytest.mark.parametrize(
    ("roles", "like"),
    [
        ({}, "like shm:a:1G"),
        ({"prefill_engines": 1, "decode_engines": 1}, "like --kv-transfer-memory 1G"),
    ],
    ids=["alone", "roles"],
)
def test_too_little_memory_for_pages_names_the_option(llama, roles, like):
    with pytest.raises(ConfigError, match=like):
        make_core(llama, kv_export="shm:a:1K", **roles)
