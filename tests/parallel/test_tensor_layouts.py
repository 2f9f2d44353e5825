"""Ranks that share layers in other ways than by heads and columns: weights gathered on use, and a
grid."""

import pytest

from tests.engine.test_tiers import PROMPTS, one_by_one
from tests.helpers import greedy, make_llama, run
from tests.parallel.test_tensor_parallel import excused
from tests.parallel.test_workers import as_threads  # noqa: F401
from tidemill.config import EngineOptions
from tidemill.distributed.world import World
from tidemill.engine.load import load_core
from tidemill.errors import ConfigError
from tidemill.kernels import native
from tidemill.layers.gathered import GatheredStreaming

pytestmark = pytest.mark.skipif(native.lib is None, reason="the layouts need the compiled kernels")
SIZES = {
    "num_hidden_layers": 6,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_llama(path, **SIZES, attention_bias=True, mlp_bias=True)
    return path


def core_of(folder, **options):
    return load_core(
        EngineOptions(model=str(folder), threads=1, **{"kv_memory_bytes": 2**24} | options)
    )


def requests():
    prompts = {f"{i}": [(7 * i + 3 * j) % 250 + 2 for j in range(1 + 40 * i)] for i in range(3)}
    return {name: (prompt, greedy(8, logprobs=2)) for name, prompt in prompts.items()}


@pytest.fixture(scope="module")
def expected(folder):
    return run(core_of(folder), requests())


def alone(core):
    return {name: run(core, {name: request})[name] for name, request in requests().items()}


def held_and_layer(core):
    """Bytes of weights on rank 0, of all, and of a layer."""
    model = core.runner.own.model
    assert isinstance(model.streaming, GatheredStreaming)
    total = model.whole.weight_bytes("float32", compiled=True)
    table = 4 * model.whole.vocab_size * model.whole.hidden_size
    return model.streaming.held_bytes, total, (total - table) / model.whole.num_layers


@pytest.mark.usefixtures("as_threads")
@pytest.mark.parametrize("size", [2, 3])
def test_gathered_weights_give_the_bits_of_one_process(folder, expected, size):
    """Also on a rank that has no row of a step, and with heads that three ranks do not share
    evenly."""
    core = core_of(folder, tensor_parallel=size, tensor_layout="gathered")
    try:
        assert run(core, requests()) == expected
        assert alone(core) == expected
        held, total, layer = held_and_layer(core)
        assert held <= 1.05 * total / size + 2 * layer
        share = {2: 1.05 / 2, 3: 3 / 8}[size]  # of 64 rows, in units of 8
        assert max(core.runner.team.read_bytes) <= share * total
    finally:
        core.close()


@pytest.mark.usefixtures("as_threads")
def test_a_grid_gives_the_tokens_of_one_process(folder, expected):
    core = core_of(folder, tensor_parallel=4, tensor_layout="2d")
    try:
        answers = run(core, requests())
        assert excused(answers, expected) == 0
        assert alone(core) == answers  # batch-invariant within the layout
        total = core.runner.own.model.whole.weight_bytes("float32", compiled=True)
        assert max(core.runner.team.read_bytes) <= 1.05 * total / 4
    finally:
        core.close()


@pytest.mark.usefixtures("as_threads")
@pytest.mark.parametrize("layout", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}])
def test_pages_on_disk_are_there_after_a_restart(folder, tmp_path, layout):
    """Each rank has a file of its own."""
    given = {"kv_disk": f"{tmp_path}:64M", "max_context": 256, **layout}
    answers, loaded = [], []
    for _ in range(2):
        core = core_of(folder, **given)
        try:
            found, started, _ = one_by_one(core, list(PROMPTS)[:2])
            answers.append(found)
            loaded.append([one.num_disk for one in started.values()])
        finally:
            core.close()
    assert answers[0] == answers[1]
    assert loaded[0] == [0, 0]
    assert min(loaded[1]) > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0-of-2", "rank-1-of-2"]


def test_groups_of_a_grid():
    world = World(6, (4,), "2d", 2)
    parts = [world.part(rank) for rank in range(6)]
    assert [(part.shard.rank, part.hidden.rank) for part in parts] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]
    assert [part.tables.rank for part in parts] == list(range(6))
    own = [(shard.axis, shard.rank, ranks) for shard, ranks in world.axes(3) if 3 in ranks]
    assert own == [("", 3, [0, 1, 2, 3, 4, 5]), ("row 1", 1, [2, 3]), ("column 1", 1, [1, 3, 5])]


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"tensor_layout": "3d"}, "tensor_layout '3d' is not known"),
        ({"tensor_layout": "gathered"}, "needs --tensor-parallel"),
        ({"tensor_layout": "2d", "tensor_parallel": 3}, "a number of ranks that makes no grid"),
        (
            {"tensor_layout": "gathered", "tensor_parallel": 2, "pipeline_parallel": 2},
            "--pipeline-parallel",
        ),
        ({"tensor_layout": "2d", "tensor_parallel": 4, "max_loras": 1}, "--lora"),
        ({"kv_export": "nixl:127.0.0.1:7000", "tensor_parallel": 2}, "by nixl"),
    ],
)
def test_what_does_not_go_together(folder, given, what):
    with pytest.raises(ConfigError, match=what):
        core_of(folder, **given)
