"""Models larger than the memory that weights may take: layers and experts come from disk, and
tokens stay the same."""

import errno
import fcntl
import itertools
import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
import torch

from tests.engine.test_lora import make_lora
from tests.helpers import load_model, make_llama, run
from tests.models.test_llama import prompt_logits
from tests.models.test_moe import IN_GGUF, make
from tests.models.test_moe import write_gguf as write_moe
from tests.models.test_smollm2 import answers_agree, asked_of
from tests.weights.test_gguf import write_gguf
from tidemill.config import EngineOptions
from tidemill.engine.load import load_core
from tidemill.engine.metrics import Metrics
from tidemill.errors import CheckpointError, ConfigError, WeightsLost
from tidemill.kernels import native
from tidemill.layers.streamed import evenly, plan_layers, slots_in_turn
from tidemill.runner.cpu_kinds import Pass, Passes
from tidemill.types.events import WeightsStreamed
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit
from tidemill.weights.prepared import Folder, PreparedCorrupt, PreparedFile

pytestmark = pytest.mark.skipif(native.lib is None, reason=native.why)


SHAPE = {
    "num_hidden_layers": 7,
    "vocab_size": 128,
    "intermediate_size": 160,
    "attention_bias": True,
}


def core_of(path: Path, budget: int | None = None, **options):
    given = {
        "kv_memory_bytes": 2**22,
        "threads": 2,
        "weight_cache": f"{path.parent}/cache",
    } | options
    return load_core(EngineOptions(model=str(path), weight_memory_bytes=budget, **given))


def answers(core):
    asked = {
        str(i): (
            [3 + i, 5, 7, 9] * (1 + 6 * i),
            SamplingParams(max_tokens=6, temperature=i % 2, seed=4, logprobs=2),
        )
        for i in range(4)
    }
    return run(core, asked)


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    path = tmp_path_factory.mktemp("dense") / "model"
    make_llama(path, **SHAPE)
    return path


@pytest.fixture
def own(dense, tmp_path):
    """The same model with a cache of its own."""
    path = tmp_path / "model"
    path.symlink_to(dense)
    return path


def quantized(path: Path) -> Path:
    reference = make_llama(num_hidden_layers=6, intermediate_size=192)
    write_gguf(path / "q.gguf", reference, gguf.GGMLQuantizationType.Q4_0)
    return path / "q.gguf"


def with_experts(family: str, kind: gguf.GGMLQuantizationType | None, **more):
    def write(path: Path) -> Path:
        return write_moe(
            path / "moe.gguf", make(family, **IN_GGUF.get(family, {}), **more), family, kind
        )

    return write


def fused_experts(path: Path) -> Path:
    make("GptOss").save_pretrained(path / "moe")
    return path / "moe"


MODELS = {
    "quantized layers": quantized,
    "experts, gate and up as one": fused_experts,
    "quantized experts and a shared one": with_experts(
        "Qwen2Moe",
        gguf.GGMLQuantizationType.Q8_0,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_half_the_memory_gives_the_same_bits(name, tmp_path):
    path = MODELS[name](tmp_path)
    whole = core_of(path)
    expected = answers(whole)
    budget = int(whole.config.weight_bytes * (0.8 if "experts" in name else 0.55))
    for is_new in (True, False):  # the second time, the file is there
        core = core_of(path, budget)
        streaming = core.runner.model.streaming
        assert streaming.store.is_new == is_new
        assert core.runner.fallback == ""
        assert streaming.held_bytes <= budget
        assert answers(core) == expected
        assert streaming.stream.figures.num_bytes > streaming.streamed_bytes > 0


@pytest.mark.slow
def test_the_default_model_in_less_memory_than_it_has_bytes(
    smollm2_path, smollm2_reference, tmp_path
):
    """In float32, by processes of their own: the first writes the file, the second streams, the
    last holds all weights."""
    asked, runs = asked_of(smollm2_path), []
    given = {
        "model": str(smollm2_path),
        "dtype": "float32",
        "threads": 1,
        "max_context": 256,
        "max_requests": 50,
    }
    given |= {"kv_memory_bytes": 2**28, "weight_cache": str(tmp_path / "cache")}
    for budget, prompts in (
        (200_000_000, dict(list(asked.items())[:1])),
        (200_000_000, asked),
        (None, asked),
    ):
        options = given | {"weight_memory_bytes": budget}
        command = [
            sys.executable,
            "-m",
            "tests.engine.streamed_process",
            json.dumps(options),
            json.dumps(prompts),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        runs.append(SimpleNamespace(**json.loads(done.stdout.splitlines()[-1])))
    first, streamed, whole = runs
    print(
        f"weights of {whole.weights / 1e6:.0f} MB; memory grew by {[round(one.grown / 1e6) for one in runs]} MB"
    )
    assert first.streamed == streamed.streamed > 0 == whole.streamed
    assert max(first.grown, streamed.grown) < whole.weights < whole.grown
    assert streamed.tokens == whole.tokens
    reference, _ = smollm2_reference
    answers_agree(
        reference,
        asked,
        {text: SimpleNamespace(tokens=tokens) for text, tokens in streamed.tokens.items()},
    )


def test_adapters_of_streamed_layers(dense, tmp_path):
    adapter = make_lora(tmp_path / "adapter", make_llama(**SHAPE), seed=1)
    given = {"loras": (f"a={adapter}",), "max_lora_rank": 8}
    found = []
    for core in (core_of(dense, **given), core_of(dense, 450_000, **given), core_of(dense)):
        core.submit(
            Submit(
                "a",
                [3, 4, 5],
                SamplingParams(max_tokens=8, temperature=0.0),
                adapter=0 if found[1:] else 1,
            )
        )
        tokens: list[int] = []
        while core.has_work:
            output, failed = core.step()
            assert not failed
            tokens += [token for delta in output.deltas for token in delta.token_ids]
        found.append(tokens)
    assert found[0] == found[1] != found[2]


def test_what_is_read_is_an_event_and_a_metric(dense):
    core = core_of(dense, 450_000)
    core.submit(Submit("a", [3, 4], SamplingParams(max_tokens=3)))
    said = []
    while core.has_work:
        said += [event for event in core.step()[0].events if isinstance(event, WeightsStreamed)]
    (event,) = said
    streaming = core.runner.model.streaming
    assert event.num_bytes >= 2 * streaming.streamed_bytes
    assert event.num_asked % (streaming.streamed_bytes // streaming.stream.slot_bytes) == 0
    assert event.num_read > 0
    metrics = Metrics()
    metrics.take([event])
    assert metrics.registry.get_sample_value("tidemill_weights_read_bytes_total") == event.num_bytes


def test_layers_that_stay_and_layers_that_come(dense):
    """With any budget, down to two layers beside the tables."""
    whole = core_of(dense)
    expected, seen = answers(whole), set()
    for share in (0.5, 0.6, 0.7, 0.8, 0.9):
        core = core_of(dense, int(share * whole.config.weight_bytes))
        streaming = core.runner.model.streaming
        seen.add(streaming.streamed_bytes)
        assert streaming.held_bytes <= share * whole.config.weight_bytes
        assert answers(core) == expected
    assert len(seen) >= 3


def test_without_a_recorded_pass_and_in_another_order(dense):
    """Layers are right in whatever order they are asked for."""
    core, whole = core_of(dense, 450_000), core_of(dense)
    runners = core.runner, whole.runner
    for layers in ([3], [6, 0], [2, 1, 2], list(range(7))):
        for runner in runners:
            part = runner.whole.op_by_op()
            part.passes = Passes(*[Pass(runner.model.only(layers))] * 2)
            runner.kinds = [part]
        assert answers(core) == answers(whole)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def relu(request, tmp_path_factory):
    """Gates with a bias below zero, as training with a ReLU makes them: most neurons are zero."""
    path = tmp_path_factory.mktemp("relu") / "model"
    reference = make_llama(
        num_hidden_layers=4, vocab_size=128, hidden_size=512, intermediate_size=204, hidden_act="relu", mlp_bias=True,
        num_attention_heads=8, initializer_range=0.05,
    )  # fmt: skip
    for layer in reference.model.layers:
        layer.mlp.gate_proj.bias.data -= 1.0
    reference.to(getattr(torch, request.param)).save_pretrained(path)
    return path


def test_a_llama_with_relu_is_the_model_of_transformers(tmp_path):
    reference, prompt = (
        make_llama(tmp_path, hidden_act="relu", num_hidden_layers=2),
        list(range(2, 60)),
    )
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    assert (prompt_logits(load_model(tmp_path), prompt) - expected).abs().max() < 1e-3


def test_neurons_that_are_zero_are_neither_read_nor_computed(relu):
    whole = core_of(relu)
    expected = answers(whole)
    total = whole.config.weight_bytes
    for is_new in (True, False):
        core = core_of(relu, int(0.92 * total))
        streaming = core.runner.model.streaming
        assert core.runner.model.blocks[0].mlp.neurons is not None
        assert streaming.store.is_new == is_new
        assert streaming.held_bytes <= 0.92 * total
        assert core.runner.fallback == ""
        figures = streaming.stream.figures
        asked, read = figures.num_asked, figures.num_read
        assert answers(core) == expected
        num_steps, num_neurons = 12, 4 * 204
        # a prompt of many tokens needs most
        assert streaming.stream.figures.num_asked - asked < 0.7 * num_steps * num_neurons
        run(core, {"b": ([7, 8], SamplingParams(max_tokens=8, temperature=0.0))})
        figures = streaming.stream.figures
        assert figures.num_read - read < figures.num_asked - asked  # others were in memory


def test_experts_that_are_used_often_stay(tmp_path):
    path = with_experts("Mixtral", None)(tmp_path)
    core = core_of(path, 1_100_000)
    streaming = core.runner.model.streaming
    stream, num_experts = streaming.stream, 3 * 6
    num_slots = stream.num_bytes // stream.slot_bytes
    assert num_slots < num_experts
    for turn in range(6):  # all experts, each in its turn: most of those in slots stay there
        before = stream.figures.num_read
        run(
            core, {"a": ([(31 * i + turn) % 250 for i in range(120)], SamplingParams(max_tokens=1))}
        )
    assert 0 < stream.figures.num_read - before <= num_experts - num_slots // 2
    for turn in range(20):  # always the same token: its experts come to stay
        before = stream.figures.num_missed
        run(core, {"a": ([7] * 3 + [turn], SamplingParams(max_tokens=1))})
    assert stream.figures.num_missed - before <= 3
    assert stream.figures.num_foreseen > 0  # read while the layer before was computed


@pytest.mark.parametrize("harm", ["changed", "cut short"])
def test_a_file_that_is_harmed_in_use_ends_the_engine_and_is_written_anew(harm, own):
    expected = answers(core_of(own))
    core = core_of(own, 450_000)
    (path,) = (own.parent / "cache").glob("*.weights")
    if harm == "changed":
        with path.open("r+b") as file:
            file.seek(8192)
            file.write(b"x" * 4096)
        os.utime(path)
    else:
        os.truncate(path, path.stat().st_size - 4096)
    with pytest.raises(WeightsLost, match="changed or cut short"):
        answers(core)
    core = core_of(own, 450_000)
    assert core.runner.model.streaming.store.is_new
    assert answers(core) == expected


def test_too_little_memory_says_how_much_is_needed(own):
    with pytest.raises(ConfigError, match="at least about") as error:
        core_of(own, 60_000)
    assert error.value.param == "weight_memory_bytes"
    with pytest.raises(ConfigError, match=r"2 layers of .* Give at least 1M"):
        core_of(own, 330_000)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel": 2}, "several ranks"),
        ({"weight_cache": "/x:many"}, "PATH:SIZE"),
        ({"weight_cache": "/proc/x:1G"}, "/proc/x"),
    ],
)
def test_what_cannot_be_is_refused(options, words, own):
    with pytest.raises(ConfigError, match=words):
        core_of(own, 450_000, **options)


def test_enough_memory_streams_nothing(own):
    core = core_of(own, 2**30)
    assert core.runner.model.streaming is None
    assert "fit in" in core.config.reasons["weight_memory"]


def test_a_full_disk_leaves_nothing_behind(own):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        with pytest.raises(ConfigError, match="disk is full") as error:
            core_of(own, 450_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.value.param == "weight_cache"
    assert list((own.parent / "cache").iterdir()) == []


def test_a_checkpoint_that_cannot_be_read_leaves_nothing_behind(tmp_path):
    make_llama(tmp_path / "model", num_hidden_layers=4)
    (file,) = (tmp_path / "model").glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 1000)
    with pytest.raises(CheckpointError):
        core_of(tmp_path / "model", 300_000)
    assert not (tmp_path / "cache").exists() or list((tmp_path / "cache").iterdir()) == []


def test_the_quota_makes_room_by_removing_what_nobody_uses(own):
    core = core_of(own, 450_000)
    folder = own.parent / "cache"
    (used,) = folder.glob("*.weights")
    unused, unfinished = folder / "old.weights", folder / "x.1.unfinished"
    for path in (unused, unfinished):
        path.write_bytes(bytes(2**20))
    size = used.stat().st_size
    Folder(folder, size + 2**20 + 2**19).write("new", 2**20).discard()
    assert sorted(folder.iterdir()) == [used]
    with pytest.raises(ConfigError, match="the quota of"):
        Folder(folder, 2**20).write("new", 2**21)
    with pytest.raises(ConfigError, match="left"):
        Folder(folder, size + 2**19).write("new", 2**20)
    assert used.exists()
    del core


# ---- files


def write(folder: Folder, key: str = "k", value: int = 1) -> PreparedFile:
    writer = folder.write(key, 2**20)
    writer.put("a", [torch.full((3000,), value, dtype=torch.uint8)], {})
    return writer.finish()


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "cache", 2**23)


def test_two_that_write_the_same_do_not_meet(folder):
    """Not even with the same process number, as in two containers."""
    one, other = (folder.write("k", 2**20) for _ in range(2))
    for writer in (one, other):
        writer.put("a", [torch.ones(100)], {})
    for file in [one.finish(), other.finish()]:
        file.verify(file.items.values())
    assert [path.name for path in folder.path.iterdir()] == ["k.weights"]


def test_a_new_file_is_verified(own, monkeypatch):
    """What the disk lost while it was written is found before it is used, and it is written again."""
    expected, asked = answers(core_of(own)), []
    verify = PreparedFile.verify

    def lost_once(self, items):
        asked.append(self.path)
        if len(asked) == 1:
            raise self._corrupt("lost")
        verify(self, items)

    monkeypatch.setattr(PreparedFile, "verify", lost_once)
    assert answers(core_of(own, 450_000)) == expected
    assert len(asked) == 2


def test_a_finished_file_is_open_before_others_can_remove_it(folder, monkeypatch):
    rename = Path.rename

    def removed(self, target):
        made = rename(self, target)
        target.unlink()
        return made

    monkeypatch.setattr(Path, "rename", removed)
    file = write(folder)
    file.verify(file.items.values())


@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "other user"])
def test_what_is_no_file_of_this_user_is_refused_and_stays(kind, folder, monkeypatch):
    write(folder, "other").close()
    path = folder.path_of("k")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(folder.path_of("other"))
    elif kind == "folder":
        path.mkdir()
    else:
        folder.path_of("other").rename(path)
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match="cannot be used") as error:
        folder.open("k")
    assert error.value.param == "weight_cache"
    assert os.path.lexists(path)
    # which neither waits for a pipe nor removes what is another's
    folder.write("new", 2**20).discard()
    assert os.path.lexists(path)


def test_errors_of_the_system_remove_nothing(folder, monkeypatch, tmp_path):
    write(folder).close()

    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", fails)
        with pytest.raises(ConfigError, match="Input/output error"):
            folder.open("k")
    assert folder.open("k") is not None
    (tmp_path / "file").touch()
    for call in (
        lambda: Folder(tmp_path / "file", 2**23).open("k"),
        lambda: Folder(tmp_path / "file", 2**23).write("k", 1),
    ):
        with pytest.raises(ConfigError, match="Choose another folder"):
            call()


def test_a_file_with_a_wrong_content_is_removed(folder):
    write(folder).close()
    os.truncate(folder.path_of("k"), 5000)
    assert folder.open("k") is None
    assert not folder.path_of("k").exists()
    file = write(folder)
    newer = write(folder, value=2)  # took its name
    file.items["a"] = replace(file.items["a"], checksum=0)
    with pytest.raises(PreparedCorrupt):
        file.verify(file.items.values())
    newer.verify(newer.items.values())
    assert folder.path_of("k").exists()


def test_one_that_somebody_removes_is_not_waited_for(folder):
    write(folder).close()
    with folder.path_of("k").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert folder.open("k") is None
    assert folder.open("k") is not None


def test_unfinished_files_count_with_what_they_will_have(tmp_path):
    folder = Folder(tmp_path, 2**21)
    first = folder.write("a", 2**20 + 4096)
    with pytest.raises(ConfigError, match="left"):
        folder.write("b", 2**20)
    first.discard()
    folder.write("b", 2**20).discard()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_leaves_the_stream_alone(dense):
    core = core_of(dense, 450_000)
    child = os.fork()
    if child == 0:
        core.runner.model.streaming.stream.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert run(core, {"a": ([3, 5], SamplingParams(max_tokens=2))})


# ---- which layers, and where


@pytest.mark.parametrize(("num", "of"), [(3, 7), (1, 5), (5, 5), (0, 4), (4, 30)])
def test_streamed_layers_are_spread(num, of):
    chosen = evenly(num, of)
    assert len(chosen) == num
    gaps = {b - a for a, b in itertools.pairwise([*chosen, *([chosen[0] + of] if chosen else [])])}
    assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("num_slots", [2, 3])
def test_neighbours_have_different_slots(num_slots):
    for num in range(num_slots + 1, 40):
        slots = slots_in_turn(num, num_slots)
        assert len(slots) == num
        assert max(slots) < num_slots
        for i in range(num):
            near = [slots[(i + step) % num] for step in range(num_slots - 1)]
            assert len(set(near)) == len(near)


def test_as_many_layers_stay_as_fit():
    plan = plan_layers([10] * 10, 75)
    assert (len(plan.streamed), plan.num_slots) == (6, 3)  # four stay, three slots
    assert plan_layers([10] * 10, 100).streamed == ()
    assert plan_layers([10] * 10, 20).num_slots == 2
    assert plan_layers([10] * 10, 19) is None
