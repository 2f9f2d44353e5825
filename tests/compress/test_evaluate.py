"""Evaluation by the engine, beside Transformers' own figures; tasks, and mistakes in their files."""

import hashlib
import json
import math

import pytest
import torch
from typer.testing import CliRunner

from tests.helpers import byte_tokenizer, make_llama
from tidemill import LLM
from tidemill.cli.main import app
from tidemill.compress.evaluate import (
    default_text,
    measure_quality,
    prompt_logits,
    text_sha256,
    text_windows,
)
from tidemill.compress.evaluate_tasks import SUITES, MultipleChoice, passkey, read_choices
from tidemill.errors import ConfigError

SIZES = {"vocab_size": 320, "max_position_embeddings": 512}
ITEMS = [
    {"question": "2 + 2?", "choices": ["four", "5", "a longer text"], "answer": 0},
    {"context": "The sky is", "choices": ["blue", "a dog"], "answer": "B"},
    {"question": "Which?", "choices": ["this one", "that"], "answer": "that"},
]


def load(folder):
    return LLM(str(folder), progress=False, threads=1, max_requests=8, dtype="float32")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = [tmp_path_factory.mktemp(name) for name in ("original", "smaller")]
    for folder, layers in zip(made, (3, 2), strict=True):
        make_llama(folder, seed=layers, num_hidden_layers=layers, **SIZES)
        byte_tokenizer(folder)
    return made


@pytest.fixture(scope="module")
def llms(folders):
    return [load(folder) for folder in folders]


def reference(folder, ids):
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        return (
            AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([ids]))
            .logits[0]
            .log_softmax(-1)
        )


def test_perplexity_and_distances_are_those_of_transformers(folders, llms):
    original, smaller = llms
    windows = text_windows(smaller, None, 90)
    assert [len(piece) for piece in windows] == [90]
    assert text_windows(smaller, None, 80, skip=10) == [windows[0][10:]]
    (ids,) = windows
    true, own = (reference(folder, ids)[:-1] for folder in folders)
    quality = measure_quality(smaller, original, windows, lambda _: None)
    nll = -own.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).mean().item()
    assert quality.num_tokens == 89
    assert quality.perplexity == pytest.approx(math.exp(nll), rel=1e-4)
    assert quality.kl == pytest.approx((true.exp() * (true - own)).sum(-1).mean().item(), rel=1e-4)
    assert quality.top1 == pytest.approx((true.argmax(-1) == own.argmax(-1)).float().mean().item())
    itself = measure_quality(smaller, smaller, windows, lambda _: None)
    assert (itself.kl, itself.top1) == (0.0, 1.0)
    assert prompt_logits(smaller, ids).shape == (89, 320)


def test_multiple_choice_by_likelihood(folders, llms, tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(map(json.dumps, ITEMS)))
    suite = read_choices(path)
    assert [item.answer for item in suite.items] == [0, 1, 1]
    assert suite.items[0].context == "Question: 2 + 2?\nAnswer:"
    right = right_norm = 0
    for item in suite.items:
        start = len(llms[0].tokenizer.encode(item.context))
        sums = []
        for choice in item.choices:
            ids = llms[0].tokenizer.encode(item.context + choice)
            logprobs = reference(folders[0], ids)
            sums.append(sum(logprobs[at - 1, ids[at]].item() for at in range(start, len(ids))))
        norm = [value / (len(choice) - 1) for value, choice in zip(sums, item.choices, strict=True)]
        right += sums.index(max(sums)) == item.answer
        right_norm += norm.index(max(norm)) == item.answer
    score = suite.run(llms[0], lambda _: None)["some"]
    assert (score.num_items, score.acc, score.acc_norm) == (3, right / 3, right_norm / 3)
    wrong = [
        MultipleChoice("x", [item]).run(llms[0], lambda _: None)["x"].acc for item in suite.items
    ]
    assert sum(wrong) == right


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "not JSON"),
        ("[]", "no item"),
        ('{"question": "?", "choices": ["one"], "answer": 0}', "no item"),
        ('{"question": "?", "choices": ["a", "b"], "answer": 2}', "the answer is '2'"),
        ('{"question": "?", "choices": ["a", "b"], "answer": "Z"}', "the answer is 'Z'"),
        ("", "holds no items"),
    ],
)
def test_wrong_files_of_tasks(tmp_path, line, what):
    path = tmp_path / "wrong.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=what):
        read_choices(path)


def test_generated_suites(llms):
    for name, make in SUITES.items():
        first, again, other = (
            {key: [item.prompt for item in items] for key, items in made.make(llms[0]).items()}
            for made in (make(3, 1), make(3, 1), make(3, 2))
        )
        assert first == again
        assert name == "questions" or first != other
        sizes = [len(llms[0].tokenizer.encode(prompt)) for key in first for prompt in first[key]]
        assert name != "passkey" or 160 < min(sizes) <= max(sizes) < 512
    (items,) = SUITES["json"](1, 0).make(llms[0]).values()
    schema = json.loads(items[0].prompt.rpartition("Schema: ")[2].partition("\n")[0])
    right = {
        name: {"string": "x", "integer": 1, "boolean": True}[kind] for name, kind in schema.items()
    }
    assert items[0].is_right(json.dumps(right))
    assert not items[0].is_right(json.dumps(right | {"more": 1}))
    assert not items[0].is_right(json.dumps(dict.fromkeys(right)))
    assert not items[0].is_right("no JSON")
    sums = SUITES["arithmetic"](1, 0).make(llms[0])["arithmetic@2"][0]
    left, sign, value = sums.prompt.rpartition("\n")[2].split()[:3]
    result = int(left) + int(value) if sign == "+" else int(left) - int(value)
    assert sums.is_right(f" {result} and")
    assert not sums.is_right(f" 7{result}")


def test_the_command(folders, tmp_path):
    choices = tmp_path / "some.jsonl"
    choices.write_text("\n".join(map(json.dumps, ITEMS)))
    command = [
        "evaluate",
        str(folders[1]),
        "--tokens",
        "64",
        "--tasks",
        f"arithmetic,{choices}",
        "--items",
        "2",
    ]
    command += [
        "--against",
        str(folders[0]),
        "--json",
        str(tmp_path / "made.json"),
        "--dtype",
        "float32",
    ]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "top-1 agreement" in result.output
    original, smaller = json.loads((tmp_path / "made.json").read_text())
    text = hashlib.sha256(default_text().encode()).hexdigest()
    assert original["text_sha256"] == smaller["text_sha256"] == text
    assert text[:12] in result.output
    assert original["quality"]["kl"] is None
    assert smaller["quality"]["kl"] > 0
    assert smaller["num_bytes"] < original["num_bytes"]
    assert smaller["kv_bytes_per_token"] * 3 == original["kv_bytes_per_token"] * 2
    assert list(smaller["scores"]) == ["arithmetic@1", "arithmetic@2", "some"]


def test_the_hash_is_of_the_text(tmp_path):
    (tmp_path / "a.txt").write_text("A text.")
    assert (
        text_sha256(tmp_path / "a.txt")
        == hashlib.sha256(b"A text.").hexdigest()
        != text_sha256(None)
    )


def test_mistakes(folders, llms, tmp_path):
    for more, what in (
        (["--tasks", "arithmetics"], "no task"),
        (["--lengths", "many"], "--lengths"),
        (["--items", "0"], "--items"),
        (["--against", str(folders[0])], "own original"),
    ):
        result = CliRunner().invoke(app, ["evaluate", str(folders[0]), *more])
        assert isinstance(result.exception, ConfigError)
        assert what in str(result.exception)
    with pytest.raises(ConfigError, match="do not fit"):
        passkey(1, 0, (600,)).make(llms[0])
    (tmp_path / "short.txt").write_text("Too short a text, with few tokens.")
    with pytest.raises(ConfigError, match="at least 64"):
        text_windows(llms[0], tmp_path / "short.txt", 512)


def test_results_that_cannot_be_written_are_refused_first(folders, tmp_path):
    for path in (tmp_path / "nope/x.json", tmp_path):
        made = CliRunner().invoke(app, ["evaluate", str(folders[0]), "--json", str(path)])
        assert isinstance(made.exception, ConfigError)
        assert "cannot be written" in str(made.exception)


def test_a_comparison_needs_a_number_of_tokens(folders, tmp_path):
    made = CliRunner().invoke(
        app, ["quantize", str(folders[0]), "-o", str(tmp_path / "out"), "--evaluate", "-5"]
    )
    assert isinstance(made.exception, ConfigError)
    assert "--evaluate is -5" in str(made.exception)


@pytest.mark.slow
def test_quantize_compares_models_of_short_contexts(folders, tmp_path):
    wish = [
        "quantize",
        str(folders[0]),
        "--method",
        "rtn",
        "--weights",
        "channel",
        "-o",
        str(tmp_path / "out"),
    ]
    made = CliRunner().invoke(app, [*wish, "--evaluate", "64"])
    assert made.exit_code == 0, made.output
    assert "perplexity" in made.output
