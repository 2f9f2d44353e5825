"""Students and models of fewer KV heads: what they begin as, what they learn, runs that were
stopped, and what serves."""

import json

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from bench.small import HELD_OUT
from tests.helpers import byte_tokenizer, make_llama
from tidemill import LLM, SamplingParams
from tidemill.cli.main import app
from tidemill.compress.calibration import Calibration
from tidemill.compress.decoder import Decoder
from tidemill.compress.distill import DistillOptions, distill, spread
from tidemill.compress.draft.run import Stopped
from tidemill.compress.evaluate import default_text, measure_quality
from tidemill.compress.gqa import ConvertOptions, convert, pool_heads
from tidemill.compress.quality import compare, hidden_states
from tidemill.compress.source import Source
from tidemill.compress.student import Learning, distribution_loss
from tidemill.errors import ConfigError
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.types.events import DraftsVerified

TEXT = " ".join(
    f"Line {i} of the text has {i * i} letters, and the word {chr(97 + i % 26) * (i % 7)}."
    for i in range(60)
)
LOAD = {"progress": False, "threads": 1, "max_requests": 2, "dtype": "float32"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("teacher")
    make_llama(
        path, vocab_size=320, num_hidden_layers=4, num_key_value_heads=4, initializer_range=0.05
    )
    byte_tokenizer(path)
    (path / "text.txt").write_text(TEXT)
    return path


def given(folder, out, steps=12, **learning):
    calibration = Calibration(data=folder / "text.txt", num_tokens=2048, length=64)
    return {
        "model": str(folder),
        "out": out,
        "calibration": calibration,
        "learning": Learning(steps=steps, rate=3e-3, **learning),
    }


def distance(folder, out):
    original = LLM(str(folder), **LOAD)
    return measure_quality(
        LLM(str(out), **LOAD),
        original,
        [original.tokenizer.encode(TEXT)[2100:2350]],
        lambda _: None,
    ).kl


def verified(llm):
    """Of requests in steps: how many drafts there were, and how many of them the model accepted."""
    return [
        one[1:] for event in llm.events if isinstance(event, DraftsVerified) for one in event.of
    ]


def test_which_layers_a_student_begins_as():
    assert spread(30, 4) == [0, 10, 19, 29]
    assert spread(4, 3) == [0, 2, 3]
    assert spread(4, 1) == [3]
    with pytest.raises(ConfigError, match="has 4"):
        spread(4, 4)


def test_a_student_that_does_not_learn_is_the_teachers_layers(folder, tmp_path):
    distill(DistillOptions(layers=2, **given(folder, tmp_path / "out", steps=0)))
    own, true = (load_file(one / "model.safetensors") for one in (tmp_path / "out", folder))
    for name, value in own.items():
        assert torch.equal(value, true[name.replace("layers.1.", "layers.3.")]), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_hidden_layers"] == 2


@pytest.mark.parametrize("loss", ["soft", pytest.param("ted", marks=pytest.mark.slow)])
def test_a_student_comes_nearer_and_drafts(folder, tmp_path, loss):
    distances = []
    for steps in (0, 16):
        out = tmp_path / str(steps)
        distill(DistillOptions(layers=2, **given(folder, out, steps=steps, loss=loss)))
        distances.append(distance(folder, out))
    assert distances[1] < 0.9 * distances[0]
    alone, drafted = (
        LLM(str(folder), **LOAD),
        LLM(str(folder), draft_model=str(tmp_path / "16"), adaptive_drafts=False, **LOAD),
    )
    ids, params = (
        alone.tokenizer.encode(TEXT)[2100:],
        SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    )
    prompts = [ids[40 * i : 40 * i + 40] for i in range(6)]
    answers = [
        [one.outputs[0].token_ids for one in llm.generate(prompts, params)]
        for llm in (drafted, alone)
    ]
    assert answers[0] == answers[1]
    assert sum(right for _, right in verified(drafted)) > 0


@pytest.mark.slow
def test_soft_labels_teach_more_than_hard_ones(small_model, tmp_path):
    """Of a teacher that has learned a text: the same student, steps and seeds. Both losses are of
    text that neither has seen."""
    text = default_text()
    (tmp_path / "text.txt").write_text(text[:-HELD_OUT])
    teacher = Decoder(Source.open(str(small_model)))
    ids = torch.tensor(Tokenizer.load(small_model).encode(text, add_special=False)[-8192:]).view(
        -1, 128
    )
    truth = hidden_states(teacher, ids)

    def student(loss, steps, seed=0):
        out = tmp_path / f"{loss}-{steps}-{seed}"
        learning = Learning(loss=loss, steps=steps, batch=8, rate=3e-3, seed=seed)
        calibration = Calibration(data=tmp_path / "text.txt", num_tokens=4096, length=128)
        distill(
            DistillOptions(
                model=str(small_model),
                out=out,
                layers=2,
                learning=learning,
                calibration=calibration,
            )
        )
        own = Decoder(Source.open(str(out)))
        return out, compare(own, ids, hidden_states(own, ids), truth, teacher)

    undistilled, before = student("hard", 0)
    for seed in range(3):
        (_, hard), (distilled, soft) = (student(loss, 60, seed) for loss in ("hard", "soft"))
        losses = [one.nll / one.count for one in (soft, hard)]
        print(
            f"seed {seed}: loss {losses[0]:.3f} < {losses[1]:.3f}, KL {soft.mean_kl:.3f} < {hard.mean_kl:.3f}"
        )
        assert soft.nll < hard.nll < before.nll
        assert soft.mean_kl < hard.mean_kl < before.mean_kl
        assert soft.same > hard.same > before.same
    params, prompts = (
        SamplingParams(temperature=1.0, seed=1, max_tokens=32, ignore_eos=True),
        ids[:8, :64].tolist(),
    )
    answers, shares = [], []
    for draft in ({}, {"draft_model": str(undistilled)}, {"draft_model": str(distilled)}):
        llm = LLM(str(small_model), adaptive_drafts=False, max_drafts=4, **LOAD, **draft)
        answers.append([one.outputs[0].token_ids for one in llm.generate(prompts, params)])
        counts = verified(llm)
        shares.append(
            sum(right for _, right in counts) / max(1, sum(drafted for drafted, _ in counts))
        )
    print(
        f"of drafts, {shares[2]:.0%} are accepted; of the student before it learned, {shares[1]:.0%}"
    )
    assert answers[0] == answers[1] == answers[2]
    assert shares[2] > 1.3 * shares[1] > 0


def test_a_run_that_was_stopped_ends_with_the_same_bytes(folder, tmp_path):
    distill(DistillOptions(layers=2, **given(folder, tmp_path / "whole", loss="ted")))

    class Counter:
        def __init__(self):
            self.num = 0

        def stage(self, name, total):
            pass

        def at(self, done, note=""):
            self.num += "nan" not in note and note.startswith("loss")

    for stop_after in (3, 9):  # while filters are trained, and the student
        counter = Counter()
        with pytest.raises(Stopped):
            distill(
                DistillOptions(layers=2, **given(folder, tmp_path / "parts", loss="ted")),
                counter,
                lambda counter=counter, most=stop_after: counter.num >= most,
            )
    with pytest.raises(ConfigError, match="other settings"):
        distill(DistillOptions(layers=2, **given(folder, tmp_path / "parts", loss="hard")))
    distill(DistillOptions(layers=2, **given(folder, tmp_path / "parts", loss="ted")))
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "parts" / file.name).read_bytes() == file.read_bytes()


def test_temperature_keeps_the_scale_of_gradients():
    torch.manual_seed(0)
    true, sizes = torch.randn(5, 7, 40), []
    for temperature in (1.0, 4.0):
        logits = torch.zeros(5, 7, 40, requires_grad=True)
        distribution_loss(logits, true, temperature).backward()
        sizes.append(logits.grad.norm().item())
    assert 0.5 < sizes[0] / sizes[1] < 2
    assert distribution_loss(true, true, 2.0).item() == pytest.approx(0.0, abs=1e-6)


def test_fewer_kv_heads(folder, tmp_path):
    rows = torch.arange(8.0).view(8, 1).expand(8, 3)
    assert pool_heads(rows, 4, 2)[:, 0].tolist() == [1.0, 2.0, 5.0, 6.0]
    distances = []
    for steps in (0, 16):
        out = tmp_path / str(steps)
        convert(ConvertOptions(num_kv_heads=2, **given(folder, out, steps=steps)))
        distances.append(distance(folder, out))
    assert distances[1] < 0.9 * distances[0]
    before, after = (LLM(str(one), **LOAD) for one in (folder, tmp_path / "0"))
    kv = [llm.model_config.kv_bytes_per_token(llm.config.kv_dtype) for llm in (before, after)]
    assert kv[0] == 2 * kv[1]
    tensors = load_file(tmp_path / "0" / "model.safetensors")
    name = "model.layers.1.self_attn.v_proj.weight"
    heads = load_file(folder / "model.safetensors")[name].view(2, 2, 16, 64)
    torch.testing.assert_close(tensors[name], heads.mean(1).flatten(0, 1))


@pytest.mark.parametrize(
    ("command", "what"),
    [
        (["distill", "--layers", "4"], "the model has 4"),
        (["distill", "--layers", "2", "--loss", "best"], "--loss best"),
        (["distill", "--layers", "2", "--rate", "0"], "--rate is 0"),
        (["convert", "--gqa", "3"], "Give one of 1, 2."),
        (["convert", "--gqa", "4"], "has 4 KV heads"),
        (["distill", "--layers", "2", "--samples", "4000"], "were asked for"),
    ],
)
def test_mistakes(folder, tmp_path, command, what):
    more = ["-o", str(tmp_path / "out"), "--calibration", str(folder / "text.txt")]
    result = CliRunner().invoke(app, [command[0], str(folder), *command[1:], *more])
    assert isinstance(result.exception, ConfigError), result.output
    assert what in str(result.exception)


def test_a_rate_that_is_too_high(folder, tmp_path):
    from tidemill.compress import student
    from tidemill.errors import CalibrationError

    how = given(folder, tmp_path / "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(student, "distribution_loss", lambda logits, *_: logits.sum() * float("nan"))
        with pytest.raises(CalibrationError, match="step 0 is not finite"):
            distill(DistillOptions(layers=2, **how))
