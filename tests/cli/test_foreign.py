"""Flags of vLLM, SGLang and llama.cpp: the same meaning, no effect with a note, or an error with
the nearest name."""

import os
import re
from functools import cache

import pytest
from typer import main

from tidemill.cli.foreign import translate
from tidemill.cli.foreign_flags import FOREIGN
from tidemill.cli.main import app
from tidemill.cli.settings import Settings
from tidemill.errors import ConfigError

get_command = cache(main.get_command)


def read(command: str, *args: str) -> list[str]:
    return translate(args, get_command(app).commands[command].params)


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("--max-model-len 4096 --max-num-seqs=8", "--max-context 4096 --max-requests 8"),
        ("--max_model_len 4096", "--max-context 4096"),
        (
            "--max-num-batched-tokens 512 --served-model-name x",
            "--token-budget 512 --served-name x",
        ),
        ("--enable-prefix-caching --dtype bfloat16", "--prefix-caching --dtype bfloat16"),
        ("--no-enable-prefix-caching", "--no-prefix-caching"),
        ("--enable-force-include-usage --no-slots", "--force-include-usage --no-slots"),
        (
            "-m model.gguf -c 2048 -np 4 -t 2 --host 0.0.0.0",
            "-m model.gguf --max-context 2048 --max-requests 4 --threads 2 --host 0.0.0.0",
        ),
        (
            "-hf org/name:Q8_0 --alias x --api-key k",
            "--model org/name:Q8_0 --served-name x --api-key k",
        ),
        ("--model smollm2 -c 0 -np -1", "--model smollm2"),
        ("--chat-template-file t.jinja", "--chat-template t.jinja"),
        ("--default-chat-template-kwargs {}", "--chat-template-kwargs {}"),
        ("-ngl 0", "--device cpu"),
        ("-q awq -q fp8", "--quantization fp8"),
        (
            "-tp 2 --pipeline-parallel-size 3 -ep",
            "--tensor-parallel 2 --pipeline-parallel 3 --expert-parallel",
        ),
        ("--api-key -c smollm2", "--api-key -c smollm2"),
        ("-- --jinja", "-- --jinja"),
        (
            "--tool-call-parser hermes --reasoning-budget 64",
            "--tool-parser hermes --thinking-token-budget 64",
        ),
        ("--reasoning auto --reasoning-format deepseek --reasoning-effort default", ""),
        ("--reasoning-format none --no-webui", "--reasoning-parser none --no-ui"),
        (
            "-n 64 --sleep-idle-seconds 60 -md small.gguf",
            "--default-max-tokens 64 --idle-unload 60 --draft-model small.gguf",
        ),
        (
            "--cors-origins localhost,https://a.b",
            "--allowed-origin localhost --allowed-origin https://a.b",
        ),
        ("x --served-model-name a b --uds s", "x --served-name a,b --unix-socket s"),
        ("--served-model-name a x", "--served-name a x"),
        ("--generation-config vllm", "--sampling-defaults neutral"),
        ("--generation-config auto", ""),
        ("--ep-size 4 --expert-parallel-size 1", "--expert-parallel"),
        ("--hicache-size 30", "--kv-host-memory 30GB"),
        (
            "x --lora-modules a=p b=q --schedule-policy lpm",
            "x --lora a=p --lora b=q --queue-order prefix",
        ),
        (
            "--skip-chat-parsing --kv-offloading-size 2",
            "--tool-parser none --reasoning-parser none --kv-host-memory 2GiB",
        ),
        ("-tp=2 -q=fp8", "--tensor-parallel 2 --quantization fp8"),
        # the beginnings of flags
        ("--context-len 8192 --served-model x", "--max-context 8192 --served-name x"),
        ("--override-generation-config.top_k 4", '--sampling-defaults {"top_k":4}'),
        ("--gpu-memory-utilization 0.5", "--gpu-memory-utilization 0.5"),
        ("--mem-fraction-static 0.5", "--gpu-memory-utilization 0.5"),
        (
            "--model-path x --tp 2 --context-length 512",
            "--model x --tensor-parallel 2 --max-context 512",
        ),
    ],
)
def test_the_same_meaning(given, ours, capsys):
    assert [arg.replace(": ", ":") for arg in read("serve", *given.split())] == ours.split()
    assert not capsys.readouterr().err


def test_a_seed_and_adapters_keep_their_words(capsys):
    assert read("serve", "-s", "7") == ["--sampling-defaults", '{"seed": 7}']
    assert read("serve", "--seed", "7", "-c", "512") == [
        "--sampling-defaults",
        '{"seed": 7}',
        "--max-context",
        "512",
    ]
    assert read("serve", "--seed=-1", "--temp", "0.5") == [
        "--sampling-defaults",
        '{"temperature": 0.5}',
    ]
    module = '{"name": "a", "path": "/x,y"}'
    assert read("serve", "x", "--lora-modules", module, "b=/p,q") == [
        "x",
        "--lora",
        module,
        "--lora",
        "b=/p,q",
    ]
    assert not capsys.readouterr().err


def test_sampling_parameters_and_variables_of_the_template_are_joined():
    given = "--temp 0.5 --reasoning off --top-k 3 --reasoning-effort low"
    args = read("serve", *given.split(), "--chat-template-kwargs", '{"a": 1}')
    assert dict(zip(args[::2], args[1::2], strict=True)) == {
        "--sampling-defaults": '{"temperature": 0.5, "top_k": 3}',
        "--chat-template-kwargs": '{"enable_thinking": false, "reasoning_effort": "low", "a": 1}',
        "--thinking-token-budget": "0",
    }
    given = '--generation-config vllm --override-generation-config={"temperature":0.5,"top_k":4} --temp 0.7'
    assert read("serve", *given.split()) == [
        "--sampling-defaults",
        '{"base": "neutral", "temperature": 0.7, "top_k": 4}',
    ]
    assert read("generate", "x", "--reasoning", "off") == [
        "x",
        "--chat-template-kwargs",
        '{"enable_thinking": false}',
    ]


@pytest.mark.parametrize(
    "given",
    [
        "--jinja",
        "--seed 1",
        "--embedding",
        "--kv-unified",
        "--cache-ram 100",
        "--presence-penalty 0",
        "-ngl 99",
        "-fa",
        "-fa on",
        "--trust-remote-code",
        "--mlock",
        "-b 512",
        "-ctk f16",
        "--random-seed 3",
        "-O3",
        "--max-total-tokens 1000",
        "-O=3",
        "-cc.mode=3",
        "--compilation-config.pass_config.fuse_norm true",
        "--typical 1.0",
        "--top-nsigma -1",
        "--max-logprobs 151936",
        "--tokenizer-mode auto",
        "--log-level info",
        "--disable-custom-all-reduce",
        "--enable-deterministic-inference",
        "--ignore-patterns consolidated.safetensors",
        "--enable-mis",
        "--cuda-graph-max-bs-decode 8",
        "--skip-tokenizer-init",
    ],
)
def test_what_changes_no_answer_is_accepted_with_a_note(given, capsys):
    assert read("serve", *given.split(), "--port", "1") == ["--port", "1"]
    assert re.search(
        f"note: {re.split('[ =.3]', given)[0]} has no effect: ", capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("-ctk q8_0", "Possible: f16, bf16"),
        ("--reasoning maybe", "Possible: auto, on, off"),
        ("--presence-penalty 0.5", "give it in a request"),
        ("--max-model-len", "--max-model-len needs a value"),
        ("--typical 0.9", "give typical_p in a request"),
        ("--top-nsigma 2", "there is no such sampler"),
    ],
)
def test_a_value_that_would_change_answers_is_refused_with_the_reason(given, words):
    with pytest.raises(ConfigError) as caught:
        read("serve", *given.split())
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--max-contxt 5", "There is no option --max-contxt. Did you mean --max-context?"),
        ("--max-modl-len 5", "Did you mean --max-model-len?"),
        ("--draft-modl=x", "There is no option --draft-modl. Did you mean --draft-model?"),
        ("--allowed-origins x", "Did you mean --allowed-origin?"),
        ("--frobnicate", "There is no option --frobnicate. See --help-all."),
        ("--enable-l", "There is no option --enable-l."),  # the beginning of several
        ("--grammar x", "There is no option --grammar."),  # the beginning of one without effect
        ("-mm x", "There is no option -mm."),  # no -m with the value m
        ("-sc.method=ngram", "There is no option -sc."),
        ("-l 5", "There is no option -l."),
    ],
)
def test_another_flag_is_an_error_with_the_nearest_name(given, words):
    with pytest.raises(ConfigError) as caught:
        read("serve", *given.split())
    assert words in str(caught.value)


def test_the_error_of_a_command_with_few_options_names_its_help():
    with pytest.raises(ConfigError, match=r"See --help\.$"):
        read("memory", "--frobnicate")


def test_all_options_that_cannot_be_used_are_named_at_once():
    given = "x --trust-remote-code --cpu-offload-gb 4 --max-modl-len 5 --port 1 -mm y --frobnicate -ctk q8_0 --max-model-len"
    with pytest.raises(ConfigError) as caught:
        read("serve", *given.split())
    first, *others = caught.value.message.splitlines()
    assert first == "6 options cannot be used:"
    words = [
        "--cpu-offload-gb",
        "mean --max-model-len?",
        "option -mm",
        "option --frobnicate",
        "-ctk q8_0",
        "needs a value",
    ]
    assert all(one in line for one, line in zip(words, others, strict=True))


def test_what_is_set_by_a_variable_is_set(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.environ", dict(os.environ))
    assert read("serve", "--offline", "--hf-token", "t", "--download-dir", "/models") == []
    assert [os.environ[name] for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE")] == [
        "1",
        "t",
        "/models",
    ]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("max-model-len", "Did you mean max-context?"),
        ("n_predict", "Did you mean default-max-tokens?"),
        ("no-enable-prefix-caching", "Write prefix-caching = false."),
        ("temp", "Write sampling-defaults = '{\"temperature\": ...}'."),
        ("reasoning-format", "See reasoning-parser."),
        ("hf-token", "Set the environment variable HF_TOKEN."),
        (
            "trust-remote-code",
            "Leave it out. It has no effect: code in a model's repository is never run",
        ),
        ("enforce-eager", "Leave it out. It has no effect: it changes no answer."),
        ("speculative-num-steps", "Did you mean speculate?"),
        ("max-contex", "Did you mean max-context?"),
        ("frobnicate", "docs/reference/options.md lists them."),
    ],
)
def test_keys_of_a_config_file_that_are_anothers(key, words, tmp_path):
    path = tmp_path / "t.toml"
    for text in (f"{key} = 1\n", f'[[models]]\nmodel = "x"\n{key} = 1\n'):
        path.write_text(text)
        with pytest.raises(ConfigError, match=re.escape(words)):
            Settings.read(["max-context"], {}, config=str(path))


def test_other_commands_have_their_own_short_flags():
    assert read("generate", "x", "-t", "0.5", "-n", "3", "-m", "y") == [
        "x",
        "-t",
        "0.5",
        "-n",
        "3",
        "-m",
        "y",
    ]
    assert read("generate", "-", "-n5", "-m", "-5") == ["-", "-n5", "-m", "-5"]
    assert read("chat", "-m", "y", "--temp", "0.5", "-sys", "be brief") == [
        "y",
        "--temperature",
        "0.5",
        "--system",
        "be brief",
    ]


def test_every_entry_stands_for_a_real_option():
    known = {
        opt
        for command in get_command(app).commands.values()
        for param in command.params
        for opt in (*param.opts, *param.secondary_opts)
    }
    for each in FOREIGN:
        meant = {
            *each.ours,
            each.inside[0],
            *(word for words in each.stands_for.values() for word in words[::2]),
        } - {""}
        assert meant - {"MODEL"} <= known, each.names
        assert meant or each.why or each.variable
    flags = [flag for each in FOREIGN for flag in each.flags]
    assert len(flags) == len(set(flags))
