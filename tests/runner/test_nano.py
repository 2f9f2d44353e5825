"""Steps in two halves, on the GPU's runner without a GPU: the same answers as whole ones, and only
where a trial is faster."""

import numpy as np
import pytest
import torch

from tests.helpers import run
from tests.runner.test_cuda_runner import (  # noqa: F401 - fixtures
    REQUESTS,
    Again,
    OnCpu,
    assert_same,
    expected,
    folder,
    on_gpu,
)
from tidemill.config import EngineOptions
from tidemill.config.compute import decide_nano_batching
from tidemill.errors import ConfigError
from tidemill.kernels.cuda import lanes
from tidemill.kernels.cuda.records import MEMBER_SLOT, SINGLE_SLOT, SINGLE_SPLITS, SINGLE_TOKEN
from tidemill.runner import cuda_graphs, cuda_microbatches, make_cuda, nano
from tidemill.runner.cuda_graphs import microbatches, sizes
from tidemill.runner.cuda_work import make_microbatches, make_work
from tidemill.types.events import NanoBatchingTried


@pytest.fixture
def in_halves(on_gpu, monkeypatch):  # noqa: F811
    monkeypatch.setattr(lanes, "new_context", OnCpu)
    return on_gpu


@pytest.mark.slow
def test_steps_in_halves_give_the_same_answers(expected, in_halves, monkeypatch):  # noqa: F811
    """Prompts, decoding sequences and a shared prefix among them."""
    cut = []
    monkeypatch.setattr(
        cuda_microbatches,
        "make_microbatches",
        lambda *given: cut.append(given[2]) or make_microbatches(*given),
    )
    core = in_halves(nano_batching="on")
    assert_same(run(core, REQUESTS), expected)
    assert {1, 16} <= set(cut), "of decoding sequences, and of prompts"
    assert len(core.runner.microbatches.graphs) == 2 * len(core.runner.microbatches.cuts)


@pytest.mark.parametrize(
    ("halves_ms", "is_same", "is_taken"),
    [(9.7, True, True), (9.9, True, False), (5.0, False, False)],
)
def test_a_trial_decides(in_halves, monkeypatch, halves_ms, is_same, is_taken):
    seen, used = [], []

    def captured(step, pool, run_first):
        assert not any(buffers.metadata.any() for buffers in used), (
            "a graph is captured with no work to do"
        )
        return Again(step)

    def timed(replay, graph, work):
        used[:] = [replay.__self__._slots.buffers]
        used[0].metadata.fill_(7)
        used[0].hidden.fill_(float(graph.second_grid.prompts and not is_same))
        seen.append((graph.size, work.rows.size, work.second_half is not None))
        return halves_ms if graph.second_grid.prompts else 10.0

    monkeypatch.setattr(cuda_graphs, "capture", captured)
    for name, value in {"time_replay": timed, "_MIXED": (32,), "_CONTEXT": 40}.items():
        monkeypatch.setattr(nano, name, value)
    core = in_halves(nano_batching="auto")
    assert set(seen) == {(32, 32, False), (32, 32, True)}
    [trial] = core.runner.nano
    assert trial.is_taken == is_taken, str(trial)
    assert core.runner.microbatches.cuts == ({(False, 32): 16} if is_taken else {})
    assert not core.runner.state.pages.any()
    assert not core.runner.cache.any()
    [event] = [event for event in core.take_events() if isinstance(event, NanoBatchingTried)]
    assert (event.decodes, event.tokens, event.is_taken) == (False, 32, is_taken)


class TwoRanks:
    """The other one has decided."""

    size = 2

    def broadcast_bytes(self, data):
        return b"\1"


def test_ranks_decide_as_the_first_does(in_halves, monkeypatch):
    """And try decode steps, too."""
    monkeypatch.setattr(make_cuda, "group_of", lambda shard: TwoRanks())

    def timed(replay, graph, work):
        graph.out = torch.zeros(1)
        return 10.0

    for name, value in {
        "time_replay": timed,
        "_DECODE": (4, 8),
        "_MIXED": (32,),
        "_CONTEXT": 40,
    }.items():
        monkeypatch.setattr(nano, name, value)
    core = in_halves(nano_batching="auto")
    assert not any(trial.is_taken for trial in core.runner.nano)
    assert set(core.runner.microbatches.cuts) == {(True, 3), (True, 4), (True, 8), (False, 32)}


def test_what_cannot_be_cut_is_refused(in_halves):
    with pytest.raises(ConfigError, match="--kv-layout virtual: attention is not by our kernels"):
        in_halves(nano_batching="on", kv_layout="virtual")
    assert decide_nano_batching(EngineOptions(nano_batching="auto"), {"GPU", "experts"})[0] == "off"


def test_a_cut_prompt_and_slots_of_both_halves():
    items = np.array([[0, 1100, 1], [1, 20, 1], [2, 0, 7], [3, 1500, 1]], np.int32)
    samples = np.array([True, True, False, True])
    table = np.arange(4 * 64, dtype=np.int32).reshape(4, 64) + 1
    whole = make_work(items, samples, [table], 4, 4)
    work = make_microbatches(items, samples, 5, [table], 4, 4)
    second = work.second_half
    assert np.array_equal(work.rows, whole.rows)
    assert np.array_equal(work.positions, whole.positions)
    assert np.array_equal(work.last, whole.last)
    assert work.prompts[:, :4].tolist() == [[2, 3, 0, 2]]
    assert second.prompts[:, :4].tolist() == [[0, 4, 3, 2]]
    used = [
        int(one[SINGLE_SLOT.value]) + i
        for one in (*work.singles, *second.singles)
        for i in range(one[SINGLE_SPLITS.value])
    ]
    own = {
        (int(one[SINGLE_SLOT.value]), int(one[SINGLE_SPLITS.value]))
        for one in (*work.singles, *second.singles)
    }
    assert max(used) < 3 + 1 + 3
    assert own == {(0, 3), (3, 1), (4, 3)}, "no two sequences share a slot"
    assert second.singles[0, SINGLE_TOKEN.value] == 4
    shared = np.array([[0, 600, 1], [1, 700, 1], [2, 800, 1], [3, 900, 1]], np.int32)
    table[:, :8] = np.arange(1, 9)
    work = make_microbatches(shared, np.ones(4, bool), 2, [table], 4, 4)
    slots = [
        work.members[:, MEMBER_SLOT.value].tolist(),
        work.second_half.members[:, MEMBER_SLOT.value].tolist(),
    ]
    assert slots == [[0, 2], [4, 6]]


def test_there_is_room_for_the_partial_results_of_both_halves(in_halves):
    """All sequences at the end of the context, and the last two tokens of a prompt, which is cut
    between them."""
    runner = in_halves(nano_batching="on", max_requests=16, speculate="off").runner
    items = np.array([*([row, 127, 1] for row in range(15)), [15, 126, 2]], np.int32)
    table = np.arange(16 * 8, dtype=np.int32).reshape(16, 8) + 1
    work = make_microbatches(
        items, np.ones(16, bool), runner.microbatches.cuts[False, 32], [table], 4, 4
    )
    ends = [
        one[SINGLE_SLOT.value] + one[SINGLE_SPLITS.value]
        for one in (*work.singles, *work.second_half.singles)
    ]
    assert max(ends) == 17 * 4 <= runner.slots.attention.partial.shape[0]


def test_halves_are_sizes_themselves():
    some = sizes(256, ((4, 1), (64, 8), (256, 16)))
    made = microbatches(some)
    assert made[256] == 128
    assert made[2] == 1
    assert all(cut in some and size - cut in some for size, cut in made.items())
    assert microbatches([3, 7]) == {}


class Stream:
    """Notes what it waits for."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.append((self.name, "waits for", other.name))

    def wait_event(self, event):
        self.log.append((self.name, "waits for", event.of))


def test_lanes_take_turns_and_wait_for_each_other(monkeypatch):
    log = []

    class Event:
        def record(self, stream):
            self.of = f"{stream.name} {sum(1 for one in log if one[:2] == (stream.name, 'runs'))}"

    main, side = Stream(log, "first"), Stream(log, "second")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: side if lanes.lane() else main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: lanes.new_context())

    def work():
        for _ in range(2):
            with lanes.in_order("attention"):
                log.append(("second" if lanes.lane() else "first", "runs"))
            lanes.change_over()
        return torch.tensor(lanes.lane())

    assert [one.item() for one in lanes.Lanes(side).run(work, work)] == [0, 1]
    assert log == [
        ("second", "waits for", "first"),
        ("first", "runs"),
        ("second", "waits for", "first 1"),
        ("second", "runs"),
        ("first", "waits for", "second 1"),
        ("first", "runs"),
        ("second", "waits for", "first 2"),
        ("second", "runs"),
        ("first", "waits for", "second"),
    ]
    assert lanes.lane() == 0


@pytest.mark.parametrize("which", [0, 1])
def test_an_error_in_a_lane_is_raised(monkeypatch, which):
    log = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(log, "first"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: lanes.new_context())

    def work():
        lanes.change_over()
        if lanes.lane() == which:
            raise ValueError("no room")
        return torch.zeros(1)

    with pytest.raises(ValueError, match="no room"):
        lanes.Lanes(Stream(log, "second")).run(work, work)
    assert lanes.lane() == 0
