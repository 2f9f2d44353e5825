"""Groups of ranks behind one engine: the tokens of one process, starts that fail as a whole, ends
that leave nothing behind.

Most workers here are threads, to save the start of processes: they run a worker's code over the
same sockets.
"""

import asyncio
import os
import signal
import threading
from pathlib import Path

import msgspec
import pytest
import transformers

from tests.engine.test_lora import ask, make_lora
from tests.engine.test_tiers import PROMPTS, one_by_one
from tests.helpers import greedy, make_llama, run
from tidemill.config import EngineOptions
from tidemill.distributed.channel import connect
from tidemill.distributed.world import World, split_layers
from tidemill.engine.load import load_core
from tidemill.engine.parts.adapters import AdapterStore
from tidemill.engine.worker_rank import Worker
from tidemill.errors import ConfigError, WorkerLost
from tidemill.kernels import native
from tidemill.runner import make_cpu
from tidemill.runner import team as team_module
from tidemill.runner.cpu_stage import cut_items
from tidemill.runner.page_moves import CpuMover
from tidemill.runner.team import Team, own_kernels
from tidemill.runner.worker_messages import Hello, encode
from tidemill.sched.plan import StepItem
from tidemill.server.generation.models import Served
from tidemill.server.http.listen import Listen
from tidemill.server.run import Sharing, serve
from tidemill.types import events
from tidemill.types.sampling import Grammar, SamplingParams
from tidemill.types.wire import Submit
from tidemill.version import __version__


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_llama(path, num_hidden_layers=4, tie_word_embeddings=False)
    return path


@pytest.fixture
def as_threads(monkeypatch):
    start_threads(monkeypatch)


def start_threads(monkeypatch):
    """A recording belongs to the process, and a replay holds its kernels: ranks that are threads
    compute op by op."""
    monkeypatch.setattr(make_cpu, "record_forward", lambda *given: None)
    monkeypatch.setattr(
        Team, "_spawn", lambda team, rank: threading.Thread(target=work, args=(team, rank)).start()
    )


def work(team, rank):
    start = {"address": team.door.address, "key": team.key.hex(), "rank": rank}
    Worker(start | {"listen": str(Path(team.door.address).with_name(f"{rank}.sock"))}).run()


def core_of(folder, **options):
    return load_core(EngineOptions(model=str(folder), threads=1, kv_memory_bytes=2**24, **options))


def requests():
    sampled = SamplingParams(max_tokens=10, temperature=0.8, seed=3, repetition_penalty=1.1)
    prompts = {f"{i}": [(7 * i + 3 * j) % 250 + 2 for j in range(3 + 41 * i)] for i in range(5)}
    kinds = [greedy(10, logprobs=2), sampled, greedy(10, prompt_logprobs=1), greedy(10), sampled]
    return {
        name: (prompt, params)
        for (name, prompt), params in zip(prompts.items(), kinds, strict=True)
    }


@pytest.fixture(scope="module")
def expected(folder):
    return run(core_of(folder), requests())


@pytest.mark.parametrize("layout", [{"pipeline_parallel": 2}, {"pipeline_parallel": 3}])
def test_stages_give_the_bits_of_one_process(folder, expected, as_threads, layout):
    core = core_of(folder, **layout)
    try:
        assert run(core, requests()) == expected
        assert run(core, requests()) == expected  # with cached prefixes
    finally:
        core.close()


def test_ranks_that_share_layers(folder, expected, as_threads):
    core = core_of(folder, tensor_parallel=2)
    try:
        answers = run(core, requests())
        assert {name: answer.tokens for name, answer in answers.items()} == {
            name: answer.tokens for name, answer in expected.items()
        }
        alone = {}
        for name, request in requests().items():
            alone |= run(core, {name: request})
        assert alone == answers  # batch-invariant within a layout
    finally:
        core.close()


def test_a_real_process_shares_layers_and_is_missed_when_it_ends(folder, expected):
    core = core_of(folder, tensor_parallel=2)
    try:
        assert not core.runner.fallback  # collectives are ops of the recorded forward pass
        folder = core.runner.team._folder
        assert not folder.exists()  # a process that is killed leaves nothing behind
        assert not Path("/dev/shm").joinpath(f"{folder.name}-0").exists()
        tokens = {name: answer.tokens for name, answer in run(core, requests()).items()}
        assert tokens == {name: answer.tokens for name, answer in expected.items()}
        core.submit(Submit("last", [1, 2, 3], greedy(100, ignore_eos=True)))
        core.step()
        (process,) = core.runner.team._processes.values()
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(WorkerLost, match=r"orker (1 )?of the group is gone"):
            run(core, {})
        with pytest.raises(WorkerLost):
            core.step()
    finally:
        core.close()
    assert process.poll() is not None


def with_host_memory(folder, layout, pages=16, slots=200):
    """A pool so small that each of the prompts evicts those before it."""
    page_bytes = core_of(folder, max_context=256).config.page_bytes // layout.get(
        "tensor_parallel", 1
    )
    sizes = {"kv_memory_bytes": pages * page_bytes, "kv_host_memory_bytes": slots * page_bytes}
    return load_core(
        EngineOptions(model=str(folder), threads=1, max_context=256, **sizes, **layout)
    )


@pytest.mark.parametrize("layout", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
def test_every_rank_moves_its_part_of_a_page(folder, as_threads, layout):
    core = with_host_memory(folder, layout)
    try:
        first = one_by_one(core)[0]
        again, started, happened = one_by_one(core)
        assert again == first  # from host memory, bit for bit
        assert all(one.num_host >= 96 for one in list(started.values())[:-1])
        moved = [one for one in happened if isinstance(one, events.PagesMoved) and one.is_load]
        own = core.runner.own.mover._pages.shape[1]
        assert (
            sum(one.num_bytes for one in moved) == 2 * own * sum(one.num_pages for one in moved) > 0
        )
        assert not core.runner.mover._under_way
    finally:
        core.close()
    assert {name: answer.tokens for name, answer in first.items()} == {
        name: answer.tokens
        for name, answer in run(core_of(folder, max_context=256), PROMPTS).items()
    }


def test_an_engine_with_pages_in_host_memory_ends_though_a_rank_is_gone(folder, as_threads):
    core = with_host_memory(folder, {"tensor_parallel": 2})
    core.submit(Submit("p0", *PROMPTS["p0"]))
    while core.has_work:
        core.step()
    core.runner.team.fail(WorkerLost("as if"))
    core.runner.mover.drain()  # nobody is waited for
    core.close()
    assert core.runner.own.mover is None


def test_a_page_that_one_rank_cannot_load_is_computed_again(folder, as_threads, monkeypatch):
    core = with_host_memory(folder, {"tensor_parallel": 2})
    copy = CpuMover._copy

    def fails(mover, move):
        if mover is not core.runner.own.mover and move.is_load and move.target % 3 == 0:
            raise OSError("as if the memory were broken")
        return copy(mover, move)

    monkeypatch.setattr(CpuMover, "_copy", fails)
    try:
        first = one_by_one(core)[0]
        again, _, happened = one_by_one(core)
        assert again == first
        assert any(
            isinstance(one, events.MovesFailed) and "broken" in one.reason for one in happened
        )
    finally:
        core.close()


def test_a_stage_has_pages_for_its_own_layers(folder, expected, as_threads):
    small = EngineOptions(model=str(folder), threads=1, kv_memory_bytes=2**21, pipeline_parallel=2)
    one, core = core_of(folder), load_core(small)
    try:
        assert core.runner.cache.shape[1] == 2  # of 4 layers
        assert core.runner.cache[0].nbytes == core.config.page_bytes == one.config.page_bytes // 2
        # of each rank
        assert core.config.kv_bytes <= 2**21 < core.config.kv_bytes + core.config.page_bytes
        assert run(core, requests()) == expected
    finally:
        core.close()


@pytest.mark.skipif(native.lib is None, reason="needs the compiled kernels")
@pytest.mark.parametrize("layout", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
def test_policies_give_up_the_tokens_that_one_process_does(folder, as_threads, layout):
    prompt = [(7 * i * i) % 250 + 2 for i in range(90)]
    kinds = {
        "window": {"recent": 40},
        "streaming": {"sinks": 3, "recent": 40},
        "h2o": {"budget": 48},
    }
    kinds |= {"snapkv": {"budget": 40, "observed": 8}, "quest": {"budget": 0.4, "dense_layers": 1}}
    asked = {
        kind: (prompt, greedy(20, ignore_eos=True, kv_policy={"kind": kind} | more))
        for kind, more in kinds.items()
    }
    asked |= {"full": (prompt, greedy(20, ignore_eos=True))}
    expected = run(core_of(folder), asked)
    core = core_of(folder, **layout)
    try:
        answers = run(core, asked)
    finally:
        core.close()
    assert {name: answer.tokens for name, answer in answers.items()} == {
        name: answer.tokens for name, answer in expected.items()
    }
    # they do give up something
    assert len({tuple(answer.tokens) for answer in answers.values()}) > 3


@pytest.mark.parametrize("layout", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
def test_a_token_that_is_drawn_after_the_end_of_a_structured_output(
    tiny_folder, as_threads, layout
):
    """Drafts were right up to the end. The ranks have drawn one more, and the others know of it as
    well."""
    grammar = SamplingParams(max_tokens=20, seed=1, grammar=Grammar("choice", '["tide mill"]'))
    asked = {"grammar": ([3, 4, 5], grammar), "after it": ([3, 4], greedy(12))}
    core = core_of(tiny_folder, speculate="forced", adaptive_drafts=False, **layout)
    try:
        answers = run(core, asked)
    finally:
        core.close()
    assert len(answers["grammar"].tokens) == 9
    assert answers["after it"].tokens == run(core_of(tiny_folder), asked)["after it"].tokens


@pytest.mark.parametrize("layout", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
def test_every_rank_has_its_part_of_an_adapter(folder, as_threads, tmp_path, layout):
    base = transformers.LlamaForCausalLM.from_pretrained(folder)
    paths = [make_lora(tmp_path / f"{seed}", base, seed, rank=4) for seed in (1, 2)]
    prompt = [(7 * i) % 250 + 2 for i in range(20)]
    asked = {f"{i}": (prompt, greedy(8, ignore_eos=True), i) for i in range(3)}

    def answers(**layout):
        core = core_of(folder, max_loras=1, **layout)  # the second takes the slot of the first
        try:
            for number, path in enumerate(paths, 1):
                core.part(AdapterStore).load_now(number, f"a{number}", str(path))
            return {name: answer.tokens for name, answer in ask(core, asked).items()}
        finally:
            core.close()

    expected = answers()
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    assert answers(**layout) == expected


# ---- starts that fail


class Guest:
    """Comes in the place of a worker, and says what it is told."""

    def __init__(self, team, hello):
        self.channel = connect(team.door.address, team.key, "rank 0", 30.0)
        self.channel.send(encode(hello))


def guests(monkeypatch, hello, then=lambda guest: None):
    monkeypatch.setattr(
        Team,
        "_spawn",
        lambda team, rank: threading.Thread(target=lambda: then(Guest(team, hello))).start(),
    )


HELLO = Hello(__version__, own_kernels(), "nowhere", 1)


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        (
            msgspec.structs.replace(HELLO, version="0.0.1"),
            f"another version than rank 0: 0.0.1 instead of {__version__}",
        ),
        (msgspec.structs.replace(HELLO, kernels="other"), "another kernels than rank 0: other"),
    ],
)
def test_workers_must_be_alike(folder, monkeypatch, hello, words):
    guests(monkeypatch, hello)
    with pytest.raises(ConfigError, match=words):
        core_of(folder, tensor_parallel=2)


def test_a_worker_that_dies_while_loading(folder, monkeypatch):
    def leave(guest):
        guest.channel.receive()  # Join
        guest.channel.abort()

    guests(monkeypatch, HELLO, leave)
    with pytest.raises(WorkerLost, match="Worker 1 of the group is gone"):
        core_of(folder, tensor_parallel=2)


def test_a_worker_that_dies_before_it_comes(folder, monkeypatch):
    monkeypatch.setattr(team_module.sys, "executable", "/bin/false")
    with pytest.raises(WorkerLost, match="Worker 1 ended with code 1 while starting"):
        core_of(folder, tensor_parallel=2)


def test_workers_of_other_hosts_that_do_not_come(folder, monkeypatch, tmp_path):
    (tmp_path / "key").write_text("0123456789abcdef")
    monkeypatch.setattr(team_module, "COME_S", 0.0)
    remote = {
        "remote_workers": 1,
        "workers_address": "127.0.0.1:0",
        "workers_key_file": str(tmp_path / "key"),
    }
    with pytest.raises(
        ConfigError,
        match=r"did not come to 127.0.0.1:\d+ in 0 s. Start on each: tidemill worker --join",
    ):
        core_of(folder, tensor_parallel=2, **remote)


def test_a_worker_with_another_model(folder, as_threads, monkeypatch, tmp_path):
    make_llama(tmp_path, seed=1, num_hidden_layers=4, tie_word_embeddings=False)
    told = Worker._prepare
    monkeypatch.setattr(
        Worker,
        "_prepare",
        lambda self, join: setattr(self, "_model", str(tmp_path)) or told(self, join),
    )
    with pytest.raises(ConfigError, match="Worker 1 has another model than rank 0"):
        core_of(folder, pipeline_parallel=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel": 0}, "It must be from 1 to 64"),
        ({"tensor_parallel": 2, "pipeline_parallel": 64}, "are 128 ranks"),
        ({"tensor_parallel": 5}, "cannot be shared out among 5 ranks"),
        ({"pipeline_parallel": 5}, "the model has 4 layers"),
        ({"expert_parallel": True}, "needs several ranks"),
        ({"remote_workers": 1}, "At least rank 0 is on this host"),
        ({"tensor_parallel": 2, "remote_workers": 1}, "needs --workers-address"),
        ({"tensor_parallel": 4, "kv_policy": "streaming"}, "there are more ranks than KV heads"),
        (
            {"pipeline_parallel": 2, "speculate": "eagle"},
            "cannot be combined with --speculate eagle",
        ),
    ],
)
def test_what_cannot_be(folder, options, words):
    with pytest.raises(ConfigError, match=words):
        core_of(folder, **options)


def test_workers_of_other_hosts_are_not_unloaded(folder):
    served = Served(EngineOptions(model=str(folder), tensor_parallel=2, remote_workers=1))
    with pytest.raises(ConfigError, match="they end when it is unloaded"):
        asyncio.run(serve([served], Listen(port=0), sharing=Sharing(idle_s=5)))


# ---- plans


def test_layers_are_shared_out_by_cost():
    assert split_layers([1] * 10, 2) == (5, 10)
    assert split_layers([1] * 10, 2, last=3) == (6, 10)
    assert split_layers([9, 1, 1, 1], 2) == (1, 4)
    assert split_layers([1] * 4, 4) == (1, 2, 3, 4)
    assert split_layers([1, 1, 9, 1], 2, fits=lambda begin, end: end - begin == 2) == (2, 4)
    assert split_layers([1] * 4, 2, fits=lambda begin, end: end - begin == 1) is None
    world = World(2, (3, 5))
    assert [(world.stage(rank).first, world.stage(rank).end, world.shard(rank).rank) for rank in range(4)] == [
        (0, 3, 0), (0, 3, 1), (3, 5, 0), (3, 5, 1),
    ]  # fmt: skip
    assert world.sampler == 2
    assert (world.before(3), world.after(1), world.after(2)) == (1, 3, None)


def test_micro_batches_keep_the_order_and_all_tokens():
    items = [StepItem(i, i, 5, count, True, 0) for i, count in enumerate([100, 3, 1, 1, 30])]
    parts = cut_items(items, 4, [True, True, True, True, False])
    assert 2 <= len(parts) <= 4
    flat = [item for part in parts for item in part]
    for item in items:
        own = [each for each in flat if each.row == item.row]
        assert sum(each.count for each in own) == item.count
        assert [each.samples for each in own] == [False] * (len(own) - 1) + [True]
        assert [each.start for each in own] == [
            5 + sum(other.count for other in own[:i]) for i in range(len(own))
        ]
    assert [item.row for item in flat] == sorted(item.row for item in flat)
    assert len([item for item in flat if item.row == 4]) == 1
    assert max(sum(item.count for item in part) for part in parts) < 60
    assert cut_items(items[2:4], 1, [True, True]) == [items[2:4]]
