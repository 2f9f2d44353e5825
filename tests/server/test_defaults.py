"""Sampling defaults of the model in every API, on the page's route and on the command line: one
source, the same answers."""

import json
import shutil
import signal

import httpx
import pytest
from typer.testing import CliRunner

from tests.seeded import random_seeds
from tests.server.conftest import Server
from tidemill import LLM
from tidemill.cli.main import app
from tidemill.frontend.sampling_defaults import SamplingDefaults
from tidemill.server.api.llamacpp.types import CompletionOptions
from tidemill.server.api.openai.types import ChatRequest, CompletionRequest
from tidemill.server.api.responses.types import ResponseRequest
from tidemill.server.http.body import parse
from tidemill.types.sampling import SamplingParams

# top_k 1 is greedy at any temperature, so that a lost default shows in the text.
CONFIG = {
    "do_sample": True,
    "temperature": 5.0,
    "top_k": 1,
    "repetition_penalty": 1.3,
    "max_new_tokens": 12,
}
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    path = shutil.copytree(tiny_folder, tmp_path_factory.mktemp("defaults") / "model")
    (path / "generation_config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture(scope="module")
def with_defaults(folder):
    with random_seeds(pytest.MonkeyPatch()):
        running = Server(folder).wait()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def expected(folder):
    return LLM(str(folder), progress=False).chat(HI)[0].text


def post(server: Server, path: str, **body):
    reply = httpx.post(f"{server.url}{path}", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def chat(server: Server, **body) -> str:
    return post(server, "/v1/chat/completions", messages=HI, **body)["choices"][0]["message"][
        "content"
    ]


def test_every_api_has_them(with_defaults, expected):
    assert expected
    assert chat(with_defaults) == expected
    assert chat(with_defaults, temperature=None, max_tokens=None) == expected
    anthropic = post(with_defaults, "/v1/messages", model="tiny", max_tokens=12, messages=HI)
    assert "".join(block["text"] for block in anthropic["content"]) == expected
    answer = post(with_defaults, "/v1/responses", model="tiny", input="hi")
    assert answer["output"][0]["content"][0]["text"] == expected


def test_a_given_parameter_counts_and_the_others_stay(with_defaults, expected):
    assert chat(with_defaults, temperature=9) == expected
    assert chat(with_defaults, top_k=0, seed=1) != expected
    assert chat(with_defaults, repetition_penalty=1.0, max_tokens=40) != chat(
        with_defaults, max_tokens=40
    )
    assert chat(with_defaults, temperature=0) == expected  # greedy, with the penalty


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatRequest, {"messages": HI}),
        (CompletionRequest, {"prompt": "hi"}),
        (ResponseRequest, {"input": "hi"}),
        (CompletionOptions, {}),
    ],
)
def test_minus_one_is_any_seed_though_there_is_a_default_one(kind, body):
    def drawn(**more):
        asked = parse(kind, json.dumps(body | more).encode())
        params = SamplingParams(**asked.sampling()) if kind is CompletionOptions else asked.params()
        return SamplingDefaults(seed=5).fill(params, 100).seed

    assert drawn() == drawn(seed=None) == 5
    assert drawn(seed=7) == 7
    assert drawn(seed=-1) is None
    # llama.cpp's -1
    assert drawn(seed=2**32 - 1) == (None if kind is CompletionOptions else 2**32 - 1)


@pytest.mark.parametrize("route", ["/v1/completions", "/completion"])
def test_each_prompt_of_a_list_draws_its_own_seed(with_defaults, route):
    body = {
        "prompt": ["tide"] * 3,
        "max_tokens": 8,
        "temperature": 1.0,
        "top_k": 0,
        "ignore_eos": True,
    }

    def texts(seed):
        done = post(with_defaults, route, **body, seed=seed)
        return (
            [one["text"] for one in done["choices"]]
            if route == "/v1/completions"
            else [one["content"] for one in done]
        )

    assert len(set(texts(-1))) == 3
    assert len(set(texts(5))) == 1


def test_limit_of_answers(with_defaults):
    usage = post(with_defaults, "/v1/chat/completions", messages=HI, ignore_eos=True)["usage"]
    assert usage["completion_tokens"] == 12
    usage = post(
        with_defaults, "/v1/chat/completions", messages=HI, ignore_eos=True, max_tokens=100
    )["usage"]
    assert usage["completion_tokens"] == 100
    usage = post(
        with_defaults, "/v1/chat/completions", messages=HI, ignore_eos=True, min_tokens=20
    )["usage"]
    assert usage["completion_tokens"] == 20
    with_logprobs = post(
        with_defaults, "/v1/chat/completions", messages=HI, ignore_eos=True, logprobs=True
    )["usage"]
    assert with_logprobs["completion_tokens"] == 12


def test_they_are_shown(with_defaults, server, folder):
    card = httpx.get(f"{with_defaults.url}/v1/models").json()["data"][0]
    shown = {
        "temperature": 5.0,
        "top_p": 1.0,
        "top_k": 1,
        "min_p": 0.0,
        "repetition_penalty": 1.3,
        "repeat_last_n": -1,
    }
    shown["max_tokens"] = 12
    assert card["sampling_defaults"] == shown
    neutral = httpx.get(f"{server.url}/v1/models/tiny").json()["sampling_defaults"]
    assert neutral == shown | {
        "temperature": 1.0,
        "top_k": 0,
        "repetition_penalty": 1.0,
        "max_tokens": 1024,
    }
    llamacpp = {"temperature": 5.0, "top_k": 1, "repeat_penalty": 1.3}
    props = httpx.get(f"{with_defaults.url}/props").json()["default_generation_settings"]["params"]
    assert {name: props[name] for name in llamacpp} == llamacpp
    made = post(with_defaults, "/completion", prompt="hi", top_p=0.5)["generation_settings"]
    assert {name: made[name] for name in ("top_p", *llamacpp)} == llamacpp | {"top_p": 0.5}
    inside = CliRunner().invoke(app, ["models", str(folder)]).output
    assert "temperature 5, top_k 1, repetition_penalty" in " ".join(
        inside.replace("│", " ").split()
    )


def test_the_command_line_has_them(folder, expected):
    handler = signal.getsignal(signal.SIGINT)
    done = CliRunner().invoke(app, ["generate", "hi", "--chat", "-m", str(folder)])
    assert done.stdout == expected + "\n"
    done = CliRunner().invoke(
        app,
        [
            "generate",
            "hi",
            "--chat",
            "-m",
            str(folder),
            "--sampling-defaults",
            "neutral",
            "--seed",
            "1",
        ],
    )
    assert done.stdout != expected + "\n"
    signal.signal(signal.SIGINT, handler)  # which the command has set
