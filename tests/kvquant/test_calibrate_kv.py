"""Calibration of KVQuant by the command's own parts, its file and that file's faults; and the
engine over such a cache."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.helpers import Answer, greedy, load_model, make_core, run, take
from tidemill import LLM, SamplingParams
from tidemill.cli.main import app
from tidemill.compress.kvquant.calibrate import CalibrateOptions, calibrate
from tidemill.compress.kvquant.collect import Collector
from tidemill.compress.kvquant.fit import fit_channels, fit_levels, sensitivity
from tidemill.errors import CalibrationError, ConfigError
from tidemill.kernels import native
from tidemill.kernels.kv_cache import Angles
from tidemill.types.model_config import AttentionSpec
from tidemill.types.wire import Submit
from tidemill.weights.kv_calibration import load_calibration

TEXT = "\n".join(
    f"Line {i} of the text has {i * i} letters, and the word {chr(97 + i % 26) * (i % 7)}."
    for i in range(30)
)
PARAMS = SamplingParams(temperature=0.9, max_tokens=10, seed=5, logprobs=2)


class Silent:
    def stage(self, name, total):
        pass

    def at(self, done):
        pass


@pytest.fixture(scope="module")
def llm(tiny_folder):
    return LLM(str(tiny_folder), progress=False, threads=1, max_requests=32)


@pytest.fixture(scope="module")
def files(llm, tmp_path_factory):
    """By format."""
    folder = tmp_path_factory.mktemp("calibrated")
    (folder / "text.txt").write_text(TEXT)
    for bits in (4, 3, 4):  # the last again, to the same bytes
        before = (
            (folder / f"kvquant{bits}").read_bytes()
            if (folder / f"kvquant{bits}").exists()
            else None
        )
        options = CalibrateOptions(
            out=folder / f"kvquant{bits}", data=folder / "text.txt", bits=bits, num_tokens=600
        )
        calibrate(options, llm, Silent())
        assert before is None or (folder / f"kvquant{bits}").read_bytes() == before
    return folder


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_model(tiny_folder)


def ids(model, num, seed):
    return torch.randint(
        2, model.config.vocab_size, (num,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


@pytest.mark.parametrize("kind", ["kvquant4", "kvquant3"])
def test_tokens_depend_on_the_request_alone(model, files, kind):
    """Alone, among others, in chunks, in other pages, with a cached prefix, and after preemption:
    bit for bit."""

    def core(**options):
        return make_core(model, kv_dtype=kind, kv_calibration=str(files / kind), **options)

    request = ids(model, 70, 0), PARAMS
    alone = run(core(), {"x": request})["x"]
    crowd = {f"o{i}": (ids(model, 5 + 23 * i, 10 + i), PARAMS) for i in range(4)}
    assert run(core(), crowd | {"x": request})["x"] == alone
    assert run(core(token_budget=7, max_requests=1), {"x": request})["x"] == alone
    assert run(core(page_size=1), {"x": request})["x"] == alone
    cached = core()
    run(cached, {"before": (request[0][:50], greedy(2))})
    again = run(cached, {"x": request})["x"]
    assert again.last.num_cached == 48
    assert again == alone
    preempted, answers = core(token_budget=64), {"x": Answer()}
    preempted.submit(Submit("x", *request))
    for _ in range(200):
        if not preempted.has_work:
            break
        take(preempted, answers)
        own = next(iter(preempted.scheduler.running), None)
        if own and own.epoch < 2 and own.num_output in (0, 4):
            preempted.scheduler.table.preempt(own, "test")
    assert answers["x"] == alone


def test_the_cache_is_close_to_the_model(model, files):
    """In logprobs of a prompt: 4 bits nearer than 3, and both near. Without the compiled kernels,
    nearly the same."""
    prompt = ids(model, 60, 1)

    def logprobs(**options):
        found = run(
            make_core(model, prefix_caching=False, **options),
            {"x": (prompt, greedy(1, prompt_logprobs=0))},
        )["x"]
        return torch.tensor([entry.logprob for entry in found.prompt_logprobs])

    exact = logprobs()
    four, three = (
        logprobs(kv_dtype=kind, kv_calibration=str(files / kind))
        for kind in ("kvquant4", "kvquant3")
    )
    assert 0 < (four - exact).abs().mean() < (three - exact).abs().mean() < 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "lib", None)
        torch.testing.assert_close(
            logprobs(kv_dtype="kvquant4", kv_calibration=str(files / "kvquant4")),
            four,
            rtol=1e-3,
            atol=1e-3,
        )


def test_sensitivity_is_the_gradient_of_the_output():
    """By autograd: the sum over outputs of squared derivatives, for each number of keys and each
    token's values."""
    torch.manual_seed(0)
    num, dim = 6, 8
    spec = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=dim, scale=0.4, rotation=None)
    angle = torch.arange(num)[:, None] * torch.tensor([1.0, 0.1, 0.01])
    angles = Angles(angle.cos(), angle.sin())  # of six dimensions; two are not rotated
    q, k, v = torch.randn(num, 2, dim), torch.randn(num, 1, dim), torch.randn(num, 1, dim)

    by_key = (
        torch.autograd.functional.jacobian(lambda x: _output(q, x, v, angles), k)
        .square()
        .sum((0, 1, 2))
    )
    key_weights, value_weights = sensitivity(q, k, v, spec, angles)
    torch.testing.assert_close(key_weights, by_key, rtol=1e-3, atol=1e-6)
    by_value = (
        torch.autograd.functional.jacobian(lambda x: _output(q, k, x, angles), v)[..., 0]
        .square()
        .sum((0, 1, 2))[..., 0]
    )
    torch.testing.assert_close(value_weights[:, 0], by_value, rtol=1e-3, atol=1e-6)


def _output(q, k, v, angles):
    """Attention without writing into a buffer, which autograd does not follow."""
    half, num = angles.cos.shape[1], q.shape[0]

    def turn(x):
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        cos, sin = angles.cos[:, None], angles.sin[:, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    scores = torch.einsum("tnd,sgd->nts", turn(q), turn(k)) * 0.4
    probs = scores.masked_fill(
        torch.ones(num, num, dtype=torch.bool).triu(1), float("-inf")
    ).softmax(-1)
    return torch.einsum("nts,sgd->tnd", probs, v)


def test_levels_and_ranges_follow_the_weights():
    z = torch.cat([torch.full((50,), -0.5), torch.full((50,), 0.25), torch.tensor([0.9])])
    levels = fit_levels(z, torch.ones(101), 8)
    assert {-0.5, 0.25} <= set(levels.tolist())
    assert (levels.diff() >= 0).all()
    heavy = fit_levels(torch.tensor([0.0, 0.1]), torch.tensor([1.0, 99.0]), 2)
    assert abs(heavy[1] - 0.099) < 1e-3
    keys = torch.arange(1001.0).view(-1, 1, 1).expand(-1, 2, 8)
    scale, offset = fit_channels(keys, 0.1)
    torch.testing.assert_close(scale, torch.full((2, 8), 450.0))
    torch.testing.assert_close(offset, torch.full((2, 8), 500.0))


def test_samples_are_bounded(llm):
    runner = llm.core.runner
    sequences = [ids(runner.model, 60, seed) for seed in range(3)]
    few, many = Collector(runner, sequences, max_bytes=2**16), Collector(runner, sequences)
    assert few.stride > many.stride == 1
    assert few.collect(lambda _: None)[0].keys.shape[0] <= 180 / few.stride + 3
    whole = many.collect(lambda _: None)[0]
    assert whole.keys.shape[0] == 3 * 59
    assert whole.first_keys.shape[0] == len({token for one in sequences for token in one})


def test_the_command_writes_its_own_text(tiny_folder, tmp_path):
    out = tmp_path / "made.safetensors"
    text = ["--samples", "1", "--seq-len", "256"]
    arguments = [
        "calibrate-kv",
        str(tiny_folder),
        "--bits",
        "3",
        *text,
        "--threads",
        "1",
        "-o",
        str(out),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "--kv-dtype kvquant3 --kv-calibration" in result.output
    assert load_calibration(out, load_model(tiny_folder).config, "kvquant3").bits == 3


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"bits": 5}, "4 or 3"),
        ({"outliers": 0.5}, "0 to 0.2"),
        ({"num_tokens": 10}, "256"),
        ({"out": Path("/none/x")}, "no folder"),
    ],
)
def test_wrong_options(llm, tmp_path, more, said):
    with pytest.raises(ConfigError, match=said):
        calibrate(CalibrateOptions(**{"out": tmp_path / "x"} | more), llm, Silent())


def test_too_little_text_and_a_model_of_nan(llm, tmp_path, monkeypatch):
    (tmp_path / "short.txt").write_text("Just a few words, and no more than that.")
    with pytest.raises(ConfigError, match="tokens"):
        calibrate(CalibrateOptions(out=tmp_path / "x", data=tmp_path / "short.txt"), llm, Silent())
    (tmp_path / "long.txt").write_text(TEXT)
    model = llm.core.runner.model
    embed = type(model).embed_at
    monkeypatch.setattr(type(model), "embed_at", lambda *given: embed(*given) * float("nan"))
    with pytest.raises(CalibrationError, match="not finite"):
        calibrate(
            CalibrateOptions(out=tmp_path / "x", data=tmp_path / "long.txt", num_tokens=300),
            llm,
            Silent(),
        )
    assert not (tmp_path / "x").exists()


def rewritten(source, target, change, said=None):
    """A copy with tensors or metadata changed."""
    with safe_open(source, framework="pt") as file:
        metadata = json.loads(file.metadata()["tidemill"]) | (said or {})
    tensors = load_file(source)
    change(tensors)
    save_file(tensors, target, metadata={"tidemill": json.dumps(metadata)})
    return target


@pytest.mark.parametrize(
    ("change", "said", "match"),
    [
        (lambda t: t.pop("scales"), {}, "scales is missing"),
        (lambda t: t.update(more=torch.ones(2)), {}, "more has no place"),
        (lambda t: t.update(scales=torch.ones(1, 2, 2, 16)), {}, "has shape"),
        (
            lambda t: t["offsets"].fill_(float("nan")),
            {},
            "offsets holds values that are not finite",
        ),
        (lambda t: t["scales"].zero_(), {}, "not positive"),
        (lambda t: t.update(key_levels=t["key_levels"].flip(-1).contiguous()), {}, "not ascending"),
        (lambda t: t.update(scales=t["scales"].half()), {}, "type F16"),
        (lambda t: None, {"format": 9}, "format '9' is not known"),
        (
            lambda t: None,
            {"config": "0" * 64, "model": {"num_layers": 99}},
            "another model: its num_layers is 99",
        ),
        (lambda t: None, {"kv_dtype": "kvquant3"}, "Use --kv-dtype kvquant3"),
        (lambda t: t.update(more=torch.ones(2**19)), {}, "larger than"),
    ],
)
def test_a_wrong_file_is_refused(model, files, tmp_path, change, said, match):
    file = rewritten(files / "kvquant4", tmp_path / "wrong", change, said)
    with pytest.raises(CalibrationError, match=match):
        load_calibration(file, model.config, "kvquant4")


def test_a_file_that_is_none(model, files, tmp_path):
    whole = (files / "kvquant4").read_bytes()
    for content, match in (
        (whole[:-100], "truncated"),
        (whole[:5], "truncated"),
        (b"{}" * 50, "truncated"),
    ):
        (tmp_path / "cut").write_bytes(content)
        with pytest.raises(CalibrationError, match=match):
            load_calibration(tmp_path / "cut", model.config, "kvquant4")
    with pytest.raises(CalibrationError, match="no file"):
        load_calibration(tmp_path / "none", model.config, "kvquant4")
    save_file({"x": torch.ones(2)}, tmp_path / "plain")
    with pytest.raises(CalibrationError, match="not a calibration"):
        load_calibration(tmp_path / "plain", model.config, "kvquant4")


def test_options_that_do_not_fit(model, files):
    with pytest.raises(ConfigError, match="calibrate-kv MODEL --bits 3"):
        make_core(model, kv_dtype="kvquant3")
    with pytest.raises(ConfigError, match="leave --kv-calibration out"):
        make_core(model, kv_calibration=str(files / "kvquant4"))
