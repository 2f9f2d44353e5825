"""The compiled kernels are there, keep to their threads, and a recorded forward pass is the forward
pass."""

import ctypes
import io
import os
import platform
import shutil
import subprocess
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.helpers import greedy, load_model, make_core, make_llama, run
from tidemill.cli.serve import budget_table
from tidemill.kernels import machine, native
from tidemill.kernels.native.sources import source_hash
from tidemill.kernels.quantized_linear import QuantizedPanels, quantize
from tidemill.runner.graphs import record_forward
from tidemill.types import events
from tidemill.types.wire import Ready

needs_library = pytest.mark.skipif(native.lib is None, reason=native.why)


def test_they_are_built_where_a_compiler_is():
    if shutil.which("gcc") and "this CPU lacks" not in native.why and "none for" not in native.why:
        assert native.lib is not None, native.why
        assert machine.detect().kernels in ("neon", "avx2", "avx512", "avx512 with AMX")


def test_without_them_the_machine_says_why(monkeypatch):
    monkeypatch.setattr(native, "lib", None)
    monkeypatch.setattr(native, "why", "they were not built")
    assert not machine.detect().kernels
    assert machine.detect().no_kernels == "they were not built"


@needs_library
@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_the_number_of_threads_changes_no_bit(num_threads):
    torch.manual_seed(0)
    x, residual, weight = torch.randn(3, 100, 640).unbind()[0:2] + (torch.randn(640),)
    gate_up = torch.randn(100, 1280)
    try:
        native.lib.set_threads(2)
        expected = (
            native.lib.add_rms_norm(x, residual.clone(), weight, 1e-5),
            native.lib.glu(gate_up, 0),
        )
        assert native.lib.set_threads(num_threads) == num_threads
        for _ in range(20):
            again = (
                native.lib.add_rms_norm(x, residual.clone(), weight, 1e-5),
                native.lib.glu(gate_up, 0),
            )
            assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))
    finally:
        native.lib.set_threads(2)


@needs_library
def test_two_callers_at_once_take_turns():
    torch.manual_seed(0)
    rows = [torch.randn(64, 2 * 512) for _ in range(2)]
    expected = [native.lib.glu(x, 0) for x in rows]
    wrong = []

    def call(i: int) -> None:
        wrong.extend(
            i for _ in range(200) if not torch.equal(native.lib.glu(rows[i], 0), expected[i])
        )

    threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@needs_library
class TestRecordedForward:
    @pytest.fixture
    def model(self, tmp_path):
        make_llama(tmp_path)
        return load_model(tmp_path)

    def test_every_op_of_every_layer_is_in_it(self, model):
        program = make_core(model).runner.whole.passes.plain.program
        assert program is not None
        names = list(native.lib.op_numbers)
        counts = Counter(names[op.op] for op in program.ops)
        assert counts == {"linear": 4 * 3, "norm": 2 * 3 + 1, "glu": 3, "attention": 3}
        # Buffers are used again: three layers need no more than one.
        widest = 2 * model.config.intermediate_size
        assert program.num_columns < 2 * widest + 8 * model.config.hidden_size

    def test_it_gives_the_bits_of_the_model_itself(self, model):
        core, plain = make_core(model), make_core(model)
        assert core.runner.whole.passes.plain.program
        plain.runner.kinds = [plain.runner.whole.op_by_op()]
        asked = {
            f"r{i}": (list(range(2 + i, 60 + 3 * i)), greedy(12, logprobs=2)) for i in range(7)
        }
        assert run(core, asked) == run(plain, asked)

    def test_a_model_that_does_something_in_between_is_not_replayed(self, model, monkeypatch):
        """Once by making a tensor of its own, once in place, which only the comparison can notice."""
        runner = make_core(model).runner
        forward = type(model.blocks[0].mlp).forward
        monkeypatch.setattr(
            type(model.blocks[0].mlp), "forward", lambda self, x: forward(self, x) * 2
        )
        assert record_forward(model, runner.mixers, runner.cache) is None
        monkeypatch.setattr(
            type(model.blocks[0].mlp), "forward", lambda self, x: forward(self, x).mul_(2)
        )
        assert record_forward(model, runner.mixers, runner.cache) is None
        monkeypatch.setattr(type(model.blocks[0].mlp), "forward", forward)
        assert record_forward(model, runner.mixers, runner.cache) is not None

    def test_what_only_many_tokens_show_is_noticed(self, model, monkeypatch):
        """More than WIDE_ROWS of linear.c, more than one chunk of norm.c; and the trial leaves no
        page in the table."""
        runner = make_core(model).runner
        forward = type(model.blocks[0].mlp).forward
        limit = max(8, -(-8192 // model.config.hidden_size))

        def wrong_for_many(self, x):
            return forward(self, x).mul_(1 if x.shape[0] <= limit else 2)

        monkeypatch.setattr(type(model.blocks[0].mlp), "forward", wrong_for_many)
        assert record_forward(model, runner.mixers, runner.cache) is None
        assert not runner.state.pages.any()


@needs_library
def test_a_forked_child_can_use_it():
    """multiprocessing forks; the child has none of the threads."""
    x = torch.randn(64, 2 * 512)
    expected = native.lib.glu(x, 0)
    child = os.fork()
    if child == 0:
        same = torch.equal(native.lib.glu(x, 0), expected)
        native.lib.set_threads(3)
        os._exit(0 if same and torch.equal(native.lib.glu(x, 0), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(native.lib.glu(x, 0), expected)


@needs_library
def test_other_defaults_of_torch_change_nothing(tmp_path):
    make_llama(tmp_path)
    asked = {"a": (list(range(2, 40)), greedy(6, logprobs=2))}
    expected = run(make_core(load_model(tmp_path)), asked)
    torch.set_default_dtype(torch.bfloat16)
    try:
        core = make_core(load_model(tmp_path))
        assert core.runner.whole.passes.plain.program
        assert run(core, asked) == expected
    finally:
        torch.set_default_dtype(torch.float32)


@needs_library
def test_what_is_not_finite_stays_so():
    x = torch.randn(3, 64)
    x[1, 40] = float("nan")
    weight = quantize(torch.randn(16, 64))
    out = QuantizedPanels(weight, None)(x)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


def build(folder: Path, library: Path, define: str = "") -> ctypes.CDLL:
    """All C sources of a folder, with setup.py's flags."""
    flags = (
        ["-march=armv8.2-a+dotprod"]
        if platform.machine() in ("aarch64", "arm64")
        else ["-mavx2", "-mfma", "-mf16c"]
    )
    sources = [str(path) for path in sorted(folder.glob("*.c"))]
    command = [
        "gcc",
        "-shared",
        "-fPIC",
        "-O1",
        "-std=gnu11",
        "-pthread",
        *flags,
        *([define] if define else []),
    ]
    if not shutil.which("gcc") or native.lib is None:
        pytest.skip("no compiler, or no vector instructions")
    subprocess.run([*command, "-o", str(library), *sources, "-lm"], check=True)
    return ctypes.CDLL(str(library))


class TestStaleLibraries:
    SOURCES = Path(native.__file__).parent

    def test_one_that_says_nothing_of_its_sources_is_not_used(self, tmp_path):
        (tmp_path / "x.c").write_text("int tm_abi(void) { return 12345; }")
        with pytest.raises(OSError, match="other sources"):
            native.check_build(build(tmp_path, tmp_path / "x.so"), "")

    def test_any_change_of_a_source_makes_it_stale(self, tmp_path):
        """Though no struct changes."""
        for path in [*self.SOURCES.glob("*.c"), *self.SOURCES.glob("*.h")]:
            shutil.copy(path, tmp_path)
        before = source_hash(tmp_path)
        assert before == source_hash(self.SOURCES)
        library = build(tmp_path, tmp_path / "x.so", f'-DTM_SOURCES="{before}"')
        native.check_build(library, before)
        native.check_build(library, "")  # an installation without sources
        with (tmp_path / "rows.c").open("a") as file:
            file.write("/* changed */\n")
        with pytest.raises(OSError, match=r"other sources.*build_ext"):
            native.check_build(library, source_hash(tmp_path))

    def test_fields_in_another_order_are_noticed(self, tmp_path):
        """Sizes are the same."""
        for path in [*self.SOURCES.glob("*.c"), *self.SOURCES.glob("*.h")]:
            shutil.copy(path, tmp_path)
        header = tmp_path / "tidemill.h"
        text = header.read_text()
        swapped = text.replace("long num_heads, num_kv_heads,", "long num_kv_heads, num_heads,")
        assert swapped != text
        header.write_text(swapped)
        with pytest.raises(OSError, match=r"tm_layer\.num_"):
            native.check_build(build(tmp_path, tmp_path / "x.so"), "")


class TestFallbackIsVisible:
    def started(self, core):
        """Its event, and the line of `tidemill serve`."""
        [event] = [
            event for event in core.take_events() if isinstance(event, events.KernelsFellBack)
        ]
        console = Console(width=300, record=True, file=io.StringIO())
        console.print(budget_table("m", Ready(core.model_config, core.config)))
        assert event.reason in console.export_text()
        return event.reason

    def test_no_library(self, tmp_path, monkeypatch):
        make_llama(tmp_path)
        monkeypatch.setattr(native, "lib", None)
        monkeypatch.setattr(native, "why", "they were not built")
        assert "they were not built" in self.started(make_core(load_model(tmp_path)))

    @needs_library
    def test_no_replay(self, tmp_path, monkeypatch):
        make_llama(tmp_path)
        model = load_model(tmp_path)
        forward = type(model.blocks[0].mlp).forward
        monkeypatch.setattr(
            type(model.blocks[0].mlp), "forward", lambda self, x: forward(self, x) * 2
        )
        assert "one by one" in self.started(make_core(model))

    @needs_library
    def test_nothing_is_said_otherwise(self, tmp_path):
        make_llama(tmp_path)
        core = make_core(load_model(tmp_path))
        assert core.runner.fallback == ""
        assert "kernels" not in core.config.reasons
        assert core.take_events() == []
