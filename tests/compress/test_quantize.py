"""tidemill quantize: methods against round-to-nearest, layouts that are read back, budgets,
interrupted runs, errors."""

import json
import re

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from tests.helpers import byte_tokenizer, load_model, make_llama
from tests.models.test_families import FAMILIES, make
from tests.weights.test_gguf import write_gguf
from tidemill.cli.main import app
from tidemill.compress.calibration import Calibration
from tidemill.compress.decoder import Decoder, matrix_of
from tidemill.compress.grid import Grid, rounded
from tidemill.compress.grid import quantize as round_to_nearest
from tidemill.compress.layouts import layout_class
from tidemill.compress.layouts.gguf import GGUFLayout
from tidemill.compress.methods import METHODS, method_class
from tidemill.compress.methods.awq import AWQ
from tidemill.compress.methods.folds import folds
from tidemill.compress.methods.gobo import gobo
from tidemill.compress.methods.gptq import factor, gptq
from tidemill.compress.methods.nf4 import nf4
from tidemill.compress.methods.zeroquant import ZeroQuant
from tidemill.compress.mixed import Budget, Option, allocate
from tidemill.compress.quality import filled
from tidemill.compress.quantize import QuantizeOptions, quantize
from tidemill.compress.source import Source
from tidemill.compress.stored import from_state
from tidemill.compress.walk import OWN, TRUTH, LayerJob, Quiet, walk
from tidemill.compress.work import Work
from tidemill.config.cache import decide_kv_dtype
from tidemill.config.options import EngineOptions
from tidemill.engine.load import inspect
from tidemill.errors import ConfigError
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.weights.checkpoint import open_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_llama(
        path,
        vocab_size=300,
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=128,
        max_position_embeddings=512,
    )
    byte_tokenizer(path)
    (path / "text.txt").write_text(
        "The quick brown fox jumps over the lazy dog, and 1 + 1 = 2. " * 20
    )
    return path


def correlated(num_tokens=512, width=96):
    torch.manual_seed(0)
    return torch.randn(num_tokens, width // 4) @ torch.randn(width // 4, width) + 0.1 * torch.randn(
        num_tokens, width
    )


@pytest.mark.parametrize("act_order", ["off", "static", "group"])
@pytest.mark.parametrize("grid", [Grid(3, 32, True), Grid(4, 40, False), Grid(4, 0, True)], ids=str)
def test_gptq_errs_less_than_rounding(grid, act_order):
    x = correlated()
    matrix = torch.randn(48, 96)
    made = gptq(matrix, *factor(x.t() @ x, act_order != "off", 0.01), grid, act_order)

    def error(values):
        return (x @ (values - matrix).t()).square().mean()

    assert error(made.dequantize()) < 0.5 * error(round_to_nearest(matrix, grid).dequantize())
    assert made.codes_NK.min() >= grid.lowest
    assert made.codes_NK.max() <= grid.highest
    assert (made.groups_K is not None) == (act_order == "group" and grid.group > 0)


def test_rounding_without_codes_is_the_same():
    matrix = torch.randn(8, 100)
    for grid in (Grid(4, 32, True), Grid(3, 0, False), Grid(8, -1, True)):
        assert torch.equal(rounded(matrix, grid), round_to_nearest(matrix, grid).dequantize())


def test_centroids_err_less_than_a_grid():
    torch.manual_seed(0)
    matrix = 0.05 * torch.randn(64, 128)
    matrix[3, 5] = 2.0
    made = gobo(matrix, 3)
    assert made.dequantize()[3, 5] == 2.0
    assert made.places.numel() < 64
    error = (made.dequantize() - matrix).abs().mean()
    assert (
        error
        < 0.75 * (round_to_nearest(matrix, Grid(3, 0, False)).dequantize() - matrix).abs().mean()
    )


def test_nf4_errs_less_than_a_grid_and_nested_scales_cost_little():
    torch.manual_seed(0)
    matrix = torch.randn(64, 128)
    single, double = (nf4(matrix, 64, is_double) for is_double in (False, True))
    error, nested = ((one.dequantize() - matrix).square().mean() for one in (single, double))
    assert (
        error < (round_to_nearest(matrix, Grid(4, 64, True)).dequantize() - matrix).square().mean()
    )
    assert nested < 1.02 * error
    assert 8 * double.nested_codes.numel() < 9 * matrix.numel() / 64


FOLDED = ["Qwen2", "Gemma2", "Gemma3", "Phi3", "GPT2", "Olmo2", "Granite", "Qwen3"]


@pytest.mark.parametrize(
    "family",
    [
        one if one in ("Gemma2", "GPT2") else pytest.param(one, marks=pytest.mark.slow)
        for one in FOLDED
    ],
)
def test_folding_scales_changes_nothing(family, tmp_path):
    assert family in FAMILIES
    make(family).save_pretrained(tmp_path)
    decoder = Decoder(Source(tmp_path))
    ids = torch.randint(0, 256, (2, 40))
    states = decoder.embed(ids)
    with torch.no_grad(), decoder.layer(1) as layer:
        job = LayerJob(decoder, 1, layer, states)
        expected = job.run(states)
        found = list(folds(job))
        for fold in found:
            width = matrix_of(job.linears[fold.linears[0]]).shape[1]
            fold.apply(job, fold.shared(torch.rand(width) + 0.5))
        assert (job.run(states) - expected).abs().max() < 1e-3 * expected.abs().max()
    assert len(found) == {"GPT2": 2, "Olmo2": 2, "Phi3": 3}.get(family, 4)


def asked(folder, out, method, layout=None, options=None, **more):
    calibration = Calibration(data=folder / "text.txt", num_tokens=512, length=64)
    uses_text = method_class(method)(options or {}).needs_text or "budget" in more
    return QuantizeOptions(
        model=str(folder), out=out, method=method, layout=layout, options=options or {},
        calibration=calibration if uses_text else Calibration(), dtype="float32", **more,
    )  # fmt: skip


# method, layout, options; what activations go through is not the loaded model's business
LAYOUTS = [
    ("rtn", "compressed-tensors", {"group": 32}),
    ("rtn", "compressed-tensors", {"bits": 3, "group": 32, "symmetric": False}),
    ("rtn", "compressed-tensors", {"bits": 8, "weights": "channel", "activations": "token"}),
    ("gptq", "compressed-tensors", {"group": 32}),
    ("gptq", "gptq", {"group": 32, "act_order": "group"}),
    ("gptq", "gptq", {"bits": 3, "group": 32}),
    ("rtn", "gptq", {"weights": "channel", "symmetric": False}),
    ("awq", "awq", {"group": 32}),
    ("llm-int8", "bitsandbytes", {}),
    ("nf4", "bitsandbytes", {}),
    ("nf4", "bitsandbytes", {"double": False}),
    ("fp8", "compressed-tensors", {}),
    ("fp8", "compressed-tensors", {"weights": "tensor", "activations": "tensor", "static": True}),
    ("fp8", "fp8", {"weights": "block"}),
    ("ternary", "bitnet", {}),
    ("gobo", "gobo", {}),
    ("smoothquant", "compressed-tensors", {}),
]


def quantized(folder, out, method, layout, options, monkeypatch, **more):
    """The result, and the layers it was made of."""
    kept = {}

    def publish(self):
        kept.update({number: self.tensors(number) for number in range(self.num_finished)})
        real(self)

    real = Work.publish
    monkeypatch.setattr(Work, "publish", publish)
    made = quantize(asked(folder, out, method, layout, options, **more))
    return made, {number: from_state(tensors) for number, tensors in kept.items()}


@pytest.mark.parametrize(
    ("method", "layout", "options"),
    LAYOUTS,
    ids=[f"{m}-{f}-{i}" for i, (m, f, _) in enumerate(LAYOUTS)],
)
def test_layouts_are_read_as_what_they_stand_for(
    folder, tmp_path, method, layout, options, monkeypatch
):
    made, layers = quantized(folder, tmp_path / "out", method, layout, options, monkeypatch)
    assert made.layout == layout
    assert (
        json.loads((tmp_path / "out/config.json").read_text())["quantization_config"][
            "quant_method"
        ]
        == layout
    )
    read = Source(tmp_path / "out")
    expected = Decoder(Source(folder))
    for number, layer in layers.items():
        for name, values in filled(expected, number, layer).items():
            found = read.read({name})[name]
            assert (found - values).abs().max() <= 1e-6 * values.abs().max()
    assert not (tmp_path / "out.partial").exists()


def test_an_interrupted_run_ends_with_the_same_files(folder, tmp_path, monkeypatch):
    given = {"method": "zeroquant", "options": {"group": 32, "steps": 4}, "kv_scales": True}
    quantize(asked(folder, tmp_path / "whole", **given))
    real = ZeroQuant.quantize

    def stops_at_1(self, job):
        if job.number == 1:
            raise KeyboardInterrupt
        return real(self, job)

    with monkeypatch.context() as patch:
        patch.setattr(ZeroQuant, "quantize", stops_at_1)
        with pytest.raises(KeyboardInterrupt):
            quantize(asked(folder, tmp_path / "parts", **given))
    assert (tmp_path / "parts.partial/layer-00000.safetensors").exists()
    with pytest.raises(ConfigError, match="other settings"):
        quantize(
            asked(folder, tmp_path / "parts", method="zeroquant", options={"group": 32, "steps": 5})
        )
    quantize(asked(folder, tmp_path / "parts", **given))
    names = sorted(file.name for file in (tmp_path / "whole").iterdir())
    assert names == sorted(file.name for file in (tmp_path / "parts").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names)
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()


def test_training_a_layer_brings_it_closer(folder, tmp_path):
    decoder, ids = Decoder(Source(folder)), torch.randint(2, 250, (8, 64))
    errors = {}
    for steps in (0, 24):
        work = Work(tmp_path / f"out{steps}", {})
        walk(
            decoder,
            work,
            ZeroQuant({"bits": 3, "group": 32, "steps": steps}),
            ids,
            needs_truth=True,
        )
        errors[steps] = (work.states(OWN, 2) - work.states(TRUTH, 2)).square().mean()
    assert errors[24] < 0.9 * errors[0]


def test_quantized_gpt2_is_served(tmp_path):
    make("GPT2").save_pretrained(tmp_path / "model")
    quantize(
        QuantizeOptions(
            model=str(tmp_path / "model"),
            out=tmp_path / "out",
            method="rtn",
            options={"weights": "channel"},
        )
    )
    load_model(tmp_path / "out")


GGUF_TYPES = [(4, True, "Q4_0"), (4, False, "Q4_1"), (5, False, "Q5_1"), (8, True, "Q8_0")]


@pytest.mark.parametrize(("bits", "symmetric", "kind"), GGUF_TYPES)
def test_gguf_is_read_as_what_it_stands_for(tmp_path, bits, symmetric, kind):
    reference = make_llama(hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    decoder = Decoder(Source(write_gguf(tmp_path / "model.gguf", reference)))
    work = Work(tmp_path / "out.gguf", {})
    method = AWQ({"bits": bits, "group": 64, "symmetric": symmetric})  # norms change, too
    method.has_offsets = True
    walk(decoder, work, method, torch.randint(0, 256, (4, 64)))
    layers = [from_state(work.tensors(number)) for number in range(2)]
    GGUFLayout(decoder, "float32").write(work, Quiet())
    work.publish()
    read = Source(tmp_path / "out.gguf")
    for number, layer in enumerate(layers):
        assert any("norm" in name for name in layer[1])
        for name, values in filled(decoder, number, layer).items():
            assert (read.read({name})[name] - values).abs().max() <= 1e-6 * values.abs().max()
    types = {
        tensor.type_name
        for tensor in open_checkpoint(tmp_path / "out.gguf").tensors()
        if "ffn_up" in tensor.name
    }
    assert types == {kind}
    load_model(tmp_path / "out.gguf")


@pytest.mark.parametrize("how", ["kl", "second-order"])
def test_bits_by_sensitivity_fit_the_budget(folder, tmp_path, how):
    budget = Budget(6.0, (3, 8), how)
    made = quantize(
        asked(folder, tmp_path / "out", "rtn", "compressed-tensors", {"group": 32}, budget=budget)
    )
    assert set(made.bits_of.values()) == {3, 8}
    assert made.bits_per_weight <= 6.0
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"][
        "config_groups"
    ]
    assert {group["weights"]["num_bits"] for group in config.values()} == {3, 8}
    Decoder(Source(tmp_path / "out"))


def test_the_budget_goes_where_it_helps_most():
    matters, does_not = (
        [Option(3, 30, 9.0), Option(8, 80, 1.0)],
        [Option(3, 30, 2.0), Option(4, 40, 1.5), Option(8, 80, 1.4)],
    )
    assert allocate({"a": matters, "b": does_not}, 120) == {"a": 8, "b": 4}
    assert allocate({"a": matters, "b": does_not}, 1000) == {"a": 8, "b": 8}
    with pytest.raises(ConfigError, match="the fewest bits take 60"):
        allocate({"a": matters, "b": does_not}, 50)


WRONG = [
    ({"method": "best"}, "--method best is not known"),
    ({"method": "gptq", "options": {"alpha": 0.5}}, "--alpha is no option of gptq"),
    ({"method": "rtn", "options": {"bits": 9}}, "--bits is 9"),
    (
        {"method": "rtn", "options": {"group": 24}, "layout": "compressed-tensors"},
        "no whole groups of 24",
    ),
    ({"method": "nf4", "layout": "gptq"}, "--format gptq cannot hold what nf4 makes"),
    ({"method": "rtn", "options": {"bits": 5}, "layout": "gptq"}, "it has 5 bits"),
    (
        {
            "method": "gptq",
            "options": {"act_order": "group", "group": 32},
            "layout": "compressed-tensors",
        },
        "in another order",
    ),
    ({"method": "nf4", "budget": Budget(4.0)}, "nf4 has bits of its own"),
    ({"method": "llm-int8", "budget": Budget(4.0)}, "llm-int8 has bits of its own"),
    ({"method": "gobo", "budget": Budget(4.0)}, "the same bits for all"),
    ({"method": "gobo", "options": {"bits": 5}}, "--bits is 5.* 2 to 4"),
    ({"method": "rtn", "layout": "gguf"}, "ends in .gguf"),
    ({"method": "rtn", "budget": Budget(float("nan"))}, "--budget is nan"),
    ({"method": "rtn", "budget": Budget(4.0, how="best")}, "--sensitivity is best"),
    ({"method": "rtn", "budget": Budget(2.0)}, "the fewest bits take"),
]


@pytest.mark.parametrize(("given", "words"), WRONG, ids=[words for _, words in WRONG])
def test_wrong_wishes(folder, tmp_path, given, words):
    given = dict(given)
    method = given.pop("method")
    calibration = Calibration(data=folder / "text.txt", num_tokens=512, length=64)
    uses_text = method == "gptq" or "budget" in given
    with pytest.raises(ConfigError, match=words):
        quantize(
            QuantizeOptions(
                model=str(folder), out=tmp_path / "out", method=method,
                calibration=calibration if uses_text else Calibration(), **given,
            )
        )  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_an_advised_format_holds_what_was_asked_for(tmp_path):
    """The checks of each format name others; of those that cannot hold it either, none is advised."""
    make_llama(
        tmp_path / "model",
        num_hidden_layers=1,
        hidden_size=48,
        intermediate_size=80,
        num_attention_heads=3,
    )
    wish = {"model": str(tmp_path / "model"), "method": "rtn", "out": tmp_path / "out"}
    advice = {}
    for layout in ("gptq", "compressed-tensors", "awq"):
        with pytest.raises(ConfigError) as caught:
            quantize(
                QuantizeOptions(
                    layout=layout,
                    options={"bits": 3 if layout != "awq" else 4, "group": 33},
                    **wish,
                )
            )
        advice[layout] = caught.value.fix
    for layout, fix in advice.items():
        for one in re.findall(r"--format ([\w-]+\w)", fix):
            group = re.search(r"--group (\d+)", fix)
            options = {"bits": 3 if layout != "awq" else 4, "group": int(group[1]) if group else 33}
            assert quantize(QuantizeOptions(layout=one, options=options, **wish)), (layout, fix)


def test_default_groups_that_do_not_fit_become_smaller(tmp_path):
    make_llama(tmp_path / "model", num_hidden_layers=1, hidden_size=64, intermediate_size=192)
    wish = {"model": str(tmp_path / "model"), "method": "rtn"}
    assert quantize(QuantizeOptions(out=tmp_path / "out", **wish)).smaller_group == 64
    with pytest.raises(ConfigError, match="192 columns are no whole groups of 128"):
        quantize(QuantizeOptions(out=tmp_path / "other", options={"group": 128}, **wish))


def test_every_method_is_there_and_says_its_layouts():
    for name in METHODS:
        cls = method_class(name)
        assert cls.name == name
        assert all(layout == "gguf" or layout_class(layout) for layout in cls({}).formats)


def test_scales_of_keys_and_values(folder, tmp_path):
    """Against the cache of Transformers; and the result is served with 8 bits."""
    out = tmp_path / "out"
    quantize(asked(folder, out, "gptq", None, {"group": 32}, kv_scales=True))
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert settings["kv_cache_scheme"]["num_bits"] == 8
    with safe_open(out / "model.safetensors", "pt") as file:
        scales = [
            file.get_tensor(f"model.layers.{i}.self_attn.{part}_scale")
            for i in range(2)
            for part in "kv"
        ]
    reference = LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).eval()
    names = set(reference.state_dict()) - {"lm_head.weight"}
    reference.load_state_dict(Source(out).read(names), strict=False)
    ids = torch.tensor(Tokenizer.load(folder).encode((folder / "text.txt").read_text())[:512]).view(
        8, 64
    )
    with torch.no_grad():
        layers = reference(ids, use_cache=True).past_key_values.layers
    largest = [kept.abs().max() for layer in layers for kept in (layer.keys, layer.values)]
    assert torch.allclose(448 * torch.cat(scales), torch.stack(largest), rtol=1e-4)
    _, _, config = inspect(str(out))
    for dtype, device, expected in (
        ("quantized", "cpu", "int8"),
        ("float32", "cpu", "float32"),
        ("bfloat16", "cuda", "bfloat16"),
    ):
        # heads of 16: not on a GPU
        assert decide_kv_dtype(EngineOptions(model="x"), dtype, device, config)[0] == expected
    assert "scale of its own" in config.notes[0]
    with pytest.raises(ConfigError, match="--format gptq does not hold scales of keys"):
        quantize(asked(folder, tmp_path / "other", "gptq", "gptq", {"group": 32}, kv_scales=True))


def test_a_result_no_smaller_than_its_original_is_warned_of(folder, tmp_path):
    """The original is in 4 bits already."""

    def run(source, out, bits):
        command = [
            "quantize",
            str(source),
            "-o",
            str(out),
            "--method",
            "rtn",
            "--bits",
            str(bits),
            "--evaluate",
            "0",
        ]
        made = CliRunner().invoke(app, command)
        assert made.exit_code == 0, made.output
        return " ".join(made.output.split())

    assert "no smaller" not in run(folder, tmp_path / "four", 4)
    assert "warning: this is no smaller than the original" in run(
        tmp_path / "four", tmp_path / "eight", 8
    )
