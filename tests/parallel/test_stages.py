"""Which layers the stages of a pipeline have: computed, measured, given; and that engines with
other stages share no KV pages."""

import os

import msgspec
import pytest
from typer.testing import CliRunner

from tests.engine.test_tiers import FreeMoves, one_by_one
from tests.helpers import make_llama, run
from tests.parallel.test_workers import as_threads, core_of, requests  # noqa: F401
from tidemill.capabilities import asked, check
from tidemill.cli.main import app
from tidemill.config import EngineOptions, settled
from tidemill.distributed.stages import (
    FORMAT,
    LayerTimes,
    MeasuredWith,
    Times,
    decide_stages,
    stage_ms,
)
from tidemill.engine.load import inspect
from tidemill.engine.parts.tiers import PageMoves
from tidemill.errors import ConfigError, TidemillError
from tidemill.kernels.machine import detect
from tidemill.kv.tiers import Tier
from tidemill.types import events
from tidemill.version import __version__


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_llama(path, num_hidden_layers=6, tie_word_embeddings=False)
    return path


@pytest.fixture(scope="module")
def expected(folder):
    return run(core_of(folder), requests())


def options_of(folder, **options):
    return EngineOptions(model=str(folder), threads=1, **({"pipeline_parallel": 2} | options))


def write(path, folder, layers, head=0.0, embedding=0.0, **other):
    """A file of times: of prompts alone."""
    with_what = MeasuredWith.of(options_of(folder), inspect(str(folder))[2], detect())
    with_what = msgspec.structs.replace(with_what, **other)
    parts = [Times(seconds, 0.0) for seconds in (embedding, *layers, head)]
    LayerTimes(
        FORMAT, __version__, "", with_what, 512, 64, parts[0], tuple(parts[1:-1]), parts[-1]
    ).save(path)
    return str(path)


def division(folder, **options):
    given = options_of(folder, **options)
    return decide_stages(given, inspect(given.model)[2], detect())


def test_measured_times_move_the_cut(folder, tmp_path):
    file = tmp_path / "layers.json"
    layers, why = division(folder)
    assert layers == (3, 3)
    assert why.startswith("computed")
    for of_layers, others, stages in [
        ([1, 1, 1, 1, 1, 1], {}, (3, 3)),
        ([9, 1, 1, 1, 1, 1], {}, (1, 5)),
        ([1, 1, 1, 1, 1, 9], {}, (5, 1)),
        ([1, 1, 1, 1, 1, 1], {"head": 4}, (5, 1)),
        ([1, 1, 1, 1, 1, 1], {"embedding": 2}, (2, 4)),
        ([1, 1, 5, 5, 1, 1], {"num_stages": 3}, (2, 1, 3)),
    ]:
        num_stages = others.pop("num_stages", 2)
        given = write(file, folder, of_layers, **others)
        layers, why = division(folder, pipeline_parallel=num_stages, pipeline_layers=given)
        assert layers == stages
        assert why.startswith(f"measured ({given})")


def test_decode_counts_as_well(folder, tmp_path):
    """By a prompt and its output: here the first layer is slow to decode, and the last slow to
    prefill."""
    times = LayerTimes.load(tmp_path.joinpath(write(tmp_path / "layers.json", folder, [1] * 6)))
    slow = [Times(1.0, 2.0), *[Times(1.0, 0.0)] * 4, Times(3.0, 0.0)]
    times = msgspec.structs.replace(times, layers=tuple(slow))
    assert times.divide(2) == (1, 6)  # 1 + 2 * 256 / 64 = 9, and 7
    assert stage_ms(times, (1, 6)) == [9000, 7000]


def test_a_file_of_something_else_is_refused(folder, tmp_path):
    file = tmp_path / "layers.json"
    for other, match in [
        ({"threads": 7}, "threads: 7, here 1"),
        ({"tensor_parallel": 2}, "tensor_parallel: 2, here 1"),
        ({"machine": "abacus"}, "machine: abacus"),
        ({"dtype": "bfloat16"}, "dtype: bfloat16"),
        ({"model": "0" * 16}, "model: 0000"),
    ]:
        with pytest.raises(ConfigError, match=match) as caught:
            division(folder, pipeline_layers=write(file, folder, [1] * 6, **other))
        assert "measure-layers" in caught.value.fix
    with pytest.raises(ConfigError, match="5 layers"):
        division(folder, pipeline_layers=write(file, folder, [1] * 5))
    file.write_text('{"format": 99, "version": "9"}')
    with pytest.raises(ConfigError, match="format 99"):
        division(folder, pipeline_layers=str(file))
    file.write_text("[]")
    with pytest.raises(ConfigError, match="no times of layers"):
        division(folder, pipeline_layers=str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        division(folder, pipeline_layers=str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="cannot be read"):
        division(folder, pipeline_layers="~nobody-of-this-name/layers.json")


@pytest.mark.parametrize("given", ["3", "3,2", "6,0", "2,2,2", ",", "3 3", "9" * 5000])
def test_numbers_that_cannot_be(folder, given):
    with pytest.raises(ConfigError, match="2 stages of a model with 6 layers"):
        division(folder, pipeline_layers=given)


def test_one_stage_is_not_divided():
    with pytest.raises(
        ConfigError, match="--pipeline-layers needs --pipeline-parallel: there is one stage"
    ):
        check(asked(EngineOptions(pipeline_parallel=1, pipeline_layers="6")))


@pytest.mark.parametrize("by", ["given", "measured"])
def test_the_tokens_of_one_process_with_any_division(folder, expected, as_threads, tmp_path, by):  # noqa: F811
    given = "1,5" if by == "given" else write(tmp_path / "layers.json", folder, [9, 1, 1, 1, 1, 1])
    core = core_of(folder, pipeline_parallel=2, pipeline_layers=given)
    try:
        [told] = [event for event in core.take_events() if isinstance(event, events.LayersDivided)]
        assert told.layers == (1, 5)
        assert told.reason.startswith(by)
        assert core.runner.team.world.stage_ends == (1, 6)
        assert run(core, requests()) == expected
        # of the next start
        assert (
            settled(options_of(folder, pipeline_layers=given), core.config).pipeline_layers == "1,5"
        )
    finally:
        core.close()


def test_pages_on_disk_are_of_one_division(folder, as_threads, tmp_path):  # noqa: F811
    options = {
        "pipeline_parallel": 2,
        "page_size": 8,
        "kv_host_memory_bytes": 2**20,
        "kv_disk": f"{tmp_path}:{2**24}",
    }
    answers, found = [], []
    for layers in ("2,4", "2,4", "4,2"):
        core = core_of(folder, pipeline_layers=layers, **options)
        try:
            told, admitted, _ = one_by_one(core)
        finally:
            core.close()
        answers.append(told)
        found.append(sum(one.num_disk for one in admitted.values()))
    assert answers[0] == answers[1] == answers[2]
    assert found[1] > found[2] == found[0]


def test_engines_with_other_divisions_exchange_no_pages(folder, as_threads):  # noqa: F811
    options, name = {"pipeline_parallel": 2, "page_size": 8}, f"stages-{os.getpid()}"
    first = core_of(folder, pipeline_layers="2,4", kv_export=f"shm:{name}:1MiB", **options)
    try:
        with pytest.raises(TidemillError, match=r"another division of layers \(2\+4, here 4\+2\)"):
            core_of(folder, pipeline_layers="4,2", kv_import=f"shm:{name}", **options)
    finally:
        first.close()


def test_pages_of_other_engines_beside_host_memory(folder, expected, as_threads):  # noqa: F811
    """Without a disk: what other engines hold has no place that is one of host memory."""
    options, name = (
        {"pipeline_parallel": 2, "page_size": 8, "speculate": "off"},
        f"stages-{os.getpid()}",
    )
    first = core_of(folder, kv_export=f"shm:{name}:1MiB", **options)
    second = core_of(folder, kv_import=f"shm:{name}", kv_host_memory_bytes=2**20, **options)
    try:
        assert run(first, requests()) == expected
        tiers = second.scheduler.kv.offload.tiers
        tiers.costs = FreeMoves()
        while len(tiers.peers) < len(first.scheduler.kv.offload.tiers.exports):
            first.step()
            second.part(PageMoves).take()
        second.scheduler.kv.behind.announced.clear()  # they are fetched when they are needed
        assert {tiers.tier_of(tiers.find(key)) for key in tiers.peers._at} == {Tier.PEER}
        assert run(second, requests()) == expected
    finally:
        first.close()
        second.close()


def test_the_command_measures_what_a_start_uses(folder, as_threads, tmp_path):  # noqa: F811
    file, engine = (
        tmp_path / "layers.json",
        ["--threads", "1", "--pipeline-parallel", "2", "--kv-memory", "16MiB"],
    )
    result = CliRunner().invoke(app, ["measure-layers", str(folder), "-o", str(file), *engine])
    assert result.exit_code == 0, result.output
    times = LayerTimes.load(file)
    assert len(times.layers) == 6
    assert len({*times.layers}) == 1  # they are of one kind
    assert all(
        min(one.prefill_s, one.decode_s) > 0
        for one in (times.embedding, times.layers[0], times.head)
    )
    layers, why = division(folder, pipeline_layers=str(file))
    assert sum(layers) == 6
    assert why.startswith(f"measured ({file})")
    result = CliRunner().invoke(
        app, ["measure-layers", str(folder), "-o", str(file), "--threads", "1"]
    )
    assert isinstance(result.exception, ConfigError)
    assert "stages of a pipeline" in str(result.exception)
