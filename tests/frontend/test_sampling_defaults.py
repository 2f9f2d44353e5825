"""Defaults of sampling from what a model brings: generation_config.json, GGUF metadata, the table
of packaged models."""

import json
import shutil

import gguf
import pytest

from tidemill import LLM, SamplingParams
from tidemill.errors import ConfigError
from tidemill.frontend.sampling_defaults import NEUTRAL, SamplingDefaults, sampling_defaults
from tidemill.types.sampling import SamplingParams as Params

BIG = 10**10


def of_config(folder, **config) -> SamplingDefaults:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return sampling_defaults(folder, BIG)


def test_generation_config(tmp_path):
    assert sampling_defaults(tmp_path, BIG).values == NEUTRAL
    read = of_config(
        tmp_path,
        temperature=0.6,
        top_p=0.95,
        top_k=20,
        repetition_penalty=1.05,
        do_sample=True,
        max_new_tokens=7,
    )
    assert read.values == NEUTRAL | {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "repetition_penalty": 1.05,
    }
    assert read.limit == 7
    assert of_config(tmp_path, eos_token_id=1).values == NEUTRAL
    assert of_config(tmp_path, temperature=0.6).values["temperature"] == 0.6
    assert sampling_defaults(tmp_path, BIG, "neutral").values == NEUTRAL


def test_those_given_are_above_the_models(tmp_path):
    of_config(tmp_path, temperature=0.6, top_p=0.8)
    read = sampling_defaults(tmp_path, BIG, '{"temperature": 0.3, "repeat_last_n": 64}')
    assert read.values == NEUTRAL | {"temperature": 0.3, "top_p": 0.8, "penalty_window": 64}
    assert "temperature 0.3" in str(read)
    assert (read.fill(Params(), 9).seed, "seed" in read.shown()) == (None, False)
    seeded = sampling_defaults(tmp_path, BIG, '{"seed": 42}')
    assert (
        seeded.fill(Params(), 9).seed,
        seeded.fill(Params(seed=7), 9).seed,
        seeded.shown()["seed"],
    ) == (42, 7, 42)


def test_null_is_absent_and_the_base_may_be_neutral(tmp_path):
    of_config(tmp_path, temperature=0.6, top_p=0.8)
    read = sampling_defaults(tmp_path, BIG, '{"temperature": null, "repeat_last_n": 64, "seed": 3}')
    assert read.values == NEUTRAL | {"temperature": 0.6, "top_p": 0.8, "penalty_window": 64}
    assert "repeat_last_n, seed by --sampling-defaults" in str(read)
    assert "seed 3" in str(read)
    assert sampling_defaults(tmp_path, BIG, '{"base": "neutral", "top_k": 4}').values == NEUTRAL | {
        "top_k": 4
    }


@pytest.mark.parametrize(
    "wrong",
    ["mine", "[1]", '{"base": "x"}', '{"top_x": 1}', '{"temperature": "hot"}', '{"seed": "x"}'],
)
def test_wrong_ones_are_refused(tmp_path, wrong):
    with pytest.raises(ConfigError) as caught:
        sampling_defaults(tmp_path, BIG, wrong)
    assert caught.value.param == "sampling_defaults"


def test_do_sample_false_is_greedy(tmp_path):
    read = of_config(tmp_path, temperature=0.6, top_p=0.8, do_sample=False)
    assert read.values == NEUTRAL | {"temperature": 0.0, "top_p": 0.8}


@pytest.mark.parametrize("wrong", ["hot", -1, True, [], 1e400, {}])
def test_a_value_that_cannot_be_is_left_out_and_noted(tmp_path, wrong):
    read = of_config(tmp_path, temperature=wrong, top_p=0.8)
    assert read.values == NEUTRAL | {"top_p": 0.8}
    assert "temperature" in read.notes[0]


def test_gguf(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for key, value in {"temp": 0.7, "top_p": 0.8, "penalty_repeat": 1.05}.items():
        writer.add_float32(f"general.sampling.{key}", value)
    writer.add_int32("general.sampling.top_k", 20)
    writer.add_int32("general.sampling.penalty_last_n", 64)
    writer.add_int32("general.sampling.mirostat", 0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = sampling_defaults(tmp_path / "model.gguf", BIG)
    changed = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    assert read.values == NEUTRAL | changed | {"penalty_window": 64}
    assert read.shown()["repeat_last_n"] == 64
    assert "repeat_last_n 64" in str(read)
    assert read.fill(Params(), 9).penalty_window == 64
    assert read.fill(Params(penalty_window=-1), 9).penalty_window == -1
    assert read.notes == ("general.sampling.mirostat of the GGUF file have no effect",)


def test_the_packaged_model(smollm2_path, tmp_path):
    read = sampling_defaults(smollm2_path, 134_515_008)
    assert read.values == NEUTRAL | {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}
    assert read.shown()["max_tokens"] == 1024
    assert sampling_defaults(smollm2_path, 134_515_008, "neutral").values == NEUTRAL


def test_the_packaged_penalty_is_for_tokens_that_are_drawn(smollm2_path):
    read = sampling_defaults(smollm2_path, BIG)
    assert read.fill(Params(), 9).repetition_penalty == 1.1
    assert read.fill(Params(temperature=0), 9).repetition_penalty == 1.0
    assert read.fill(Params(temperature=0, repetition_penalty=1.2), 9).repetition_penalty == 1.2
    greedy = sampling_defaults(smollm2_path, BIG, '{"temperature": 0}')
    assert greedy.fill(Params(), 9).repetition_penalty == 1.0
    assert greedy.fill(Params(temperature=0.5), 9).repetition_penalty == 1.1
    asked = sampling_defaults(smollm2_path, BIG, '{"repetition_penalty": 1.3}')
    assert asked.fill(Params(temperature=0), 9).repetition_penalty == 1.3


def test_what_is_given_counts_and_leaves_the_others():
    defaults = SamplingDefaults(
        values=NEUTRAL | {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}, limit=100
    )
    filled = defaults.fill(Params(temperature=1.0, top_k=0), room=50)
    assert (filled.temperature, filled.top_p, filled.repetition_penalty, filled.max_tokens) == (
        1.0,
        0.9,
        1.1,
        50,
    )
    assert defaults.fill(Params(temperature=0, repetition_penalty=1.0), room=500) == Params(
        temperature=0.0, top_p=0.9, repetition_penalty=1.0, max_tokens=100
    )
    assert defaults.fill(Params(max_tokens=300), 500).max_tokens == 300
    assert defaults.fill(Params(max_tokens=None), 500).max_tokens is None
    assert defaults.fill(Params(max_tokens=None), 500, null_is_absent=True).max_tokens == 100
    assert defaults.fill(Params(min_tokens=200), 500).max_tokens == 200
    assert defaults.fill(Params(pooling="mean"), 500) == Params(pooling="mean")


@pytest.mark.parametrize(
    ("num_parameters", "given", "limit"),
    [(1, None, 1024), (BIG, None, 16384), (1, 0, None), (1, 5, 5)],
)
def test_limit_of_answers(tmp_path, num_parameters, given, limit):
    assert sampling_defaults(tmp_path, num_parameters, limit=given).limit == limit


def test_in_python(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    config = {
        "do_sample": True,
        "top_k": 1,
        "temperature": 3.0,
        "repetition_penalty": 1.3,
        "max_new_tokens": 12,
    }
    (folder / "generation_config.json").write_text(json.dumps(config))
    llm, neutral = (
        LLM(str(folder), progress=False),
        LLM(str(folder), progress=False, sampling_defaults="neutral"),
    )
    plain = llm.generate("hello")[0].outputs[0]
    same = neutral.generate(
        "hello", SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=12)
    )[0].outputs[0]
    assert plain.token_ids == same.token_ids
    # top_k is still 1
    assert llm.generate("hello", SamplingParams(temperature=5.0))[0].text == plain.text
    assert llm.get_default_sampling_params() == SamplingParams(
        temperature=3.0, top_k=1, repetition_penalty=1.3, max_tokens=12
    )
    assert "".join(llm.stream("hello")) == plain.text
    whole = llm.generate("hello", SamplingParams(max_tokens=None, ignore_eos=True))[0].outputs[0]
    assert len(whole.token_ids) == llm.config.max_context - len(llm.tokenizer.encode("hello"))
