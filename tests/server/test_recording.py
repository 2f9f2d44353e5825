"""A real server records, and what it recorded is computed again: alone, together and like then."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import pytest
from typer.testing import CliRunner

from tests.engine.test_lora import make_lora
from tests.helpers import byte_tokenizer, make_llama
from tests.server.conftest import KEYS, Server
from tests.waiting import until
from tidemill.bench.workload import read_trace
from tidemill.cli.main import app
from tidemill.errors import ConfigError
from tidemill.models.llama import Llama
from tidemill.planning.load import read_trace as read_jobs
from tidemill.planning.trace import read_rows
from tidemill.record.reader import Recording
from tidemill.record.writer import RecordingWriter, files_of, read_key

SECRET = "the launch code is 7421. "
SHARED = SECRET * 8  # 200 tokens: one for each character
PERSON = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def post(server, path, body, key=KEYS[0]) -> httpx.Response:
    return httpx.post(
        f"{server.url}{path}", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=None
    )


def complete(server, prompt, key=KEYS[0], **more) -> dict:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True} | more
    reply = post(server, "/v1/completions", body, key)
    assert reply.status_code == 200, reply.text
    return reply.json()


def leave(server, prompt, num_tokens) -> None:
    """Ask for many tokens, and go away after the first."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers) as reply:
        next(line for line in reply.iter_lines() if line.startswith("data: {"))


def kill_under_way(server) -> None:
    """The engine dies, and the request goes on in the next one."""
    body = {
        "prompt": "while the engine dies",
        "max_tokens": 600,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=None
    ) as reply:
        lines = reply.iter_lines()
        next(line for line in lines if line.startswith("data: {"))
        os.kill(server.engine_pid(), signal.SIGKILL)
        assert '"finish_reason":"length"' in "".join(lines)


def ask_mixed(server, number: int) -> None:
    """One of ten kinds of request."""
    prompt, chat = (
        f"{SHARED[: 16 * (number % 9)]} {number}",
        [{"role": "user", "content": f"number {number}"}],
    )
    kinds = (
        {"temperature": 0.9, "seed": None},
        {"n": 3, "seed": number, "temperature": 1.2},
        {"logprobs": 2, "max_tokens": 6},
        {"stop": ["e", "a"], "temperature": 1.0, "max_tokens": 60},
        {"presence_penalty": 0.7, "logit_bias": {"101": 3}, "max_tokens": 12},
        {"use_beam_search": True, "n": 2, "best_of": 3, "temperature": 0},
        {"model": "adapted", "temperature": 0.7, "max_tokens": 10},
        {"guided_regex": "[0-9]{3}-[a-z]{2}", "max_tokens": 20},
        {"kv_policy": {"kind": "streaming", "sinks": 4, "recent": 32}, "max_tokens": 24},
        {"echo": True, "logprobs": 1, "max_tokens": 3},
    )
    reply = post(
        server, "/v1/completions", {"prompt": prompt, "max_tokens": 16} | kinds[number % len(kinds)]
    )
    assert reply.status_code == 200, reply.text
    if number % 5 == 0:
        schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": PERSON}}
        assert (
            post(
                server,
                "/v1/chat/completions",
                {"messages": chat, "response_format": schema, "max_tokens": 30},
            ).status_code
            == 200
        )
    if number % 7 == 0:
        leave(server, "w" * 50, 3000)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Requests of many kinds, of which some come while the engine is killed."""
    folder = tmp_path_factory.mktemp("recorded")
    base = make_llama(folder / "model", vocab_size=320, max_position_embeddings=4096)
    byte_tokenizer(folder / "model")
    make_lora(folder / "adapter", base, seed=1)
    keys = [word for key in KEYS for word in ("--api-key", key)]
    server = Server(folder / "model", *keys, "--admin-key", "key-of-the-administrator", "--lora", f"adapted={folder / 'adapter'}",
                    "--record", f"{folder / 'day'}:100MB").wait()  # fmt: skip
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda number: ask_mixed(server, number), range(30)))
        kill_under_way(server)
        list(threads.map(lambda number: ask_mixed(server, number), range(30, 40)))
    assert post(server, "/v1/embeddings", {"input": ["a tide", "a mill"]}).status_code == 200
    for body in ({"prompt": "v" * 5000}, {"prompt": "v", "temperature": -1}):  # refused
        assert post(server, "/v1/completions", body).status_code == 400
    assert server.stop(signal.SIGTERM) == 0
    return folder / "day"


def replayed(folder, *arguments, code=0) -> dict:
    result = CliRunner().invoke(
        app, ["replay", str(folder), "--json", *map(str, arguments)], catch_exceptions=False
    )
    assert result.exit_code == code, result.stdout
    (certificate,) = json.loads(result.stdout)
    return certificate


@pytest.mark.parametrize("mode", ["--alone", "--like-then", None])
def test_all_tokens_are_the_same(recorded, mode):
    certificate = replayed(recorded, *([mode] if mode else []))
    assert certificate["is_equal"]
    assert certificate["num_equal"] == certificate["num_compared"] >= 50
    assert certificate["num_tokens"] > 1000
    assert not certificate["notes"]
    if mode == "--like-then":
        assert certificate["num_steps"] > 100
        # grammars are compiled when there is time
        assert certificate["num_equal_steps"] > certificate["num_steps"] // 2


def test_a_build_that_computes_otherwise_is_caught(recorded, monkeypatch):
    """The first token that differs is named, with the margin."""
    real = Llama.read_config.__func__
    other = classmethod(lambda cls, checkpoint: replace(real(cls, checkpoint), norm_eps=0.02))
    monkeypatch.setattr(Llama, "read_config", other)
    certificate = replayed(recorded, "--alone", code=1)
    assert certificate["differences"]
    assert certificate["num_equal"] < certificate["num_compared"]
    tokens = [found for found in certificate["differences"] if found["what"] == "token"]
    assert all(found["recorded"] != found["replayed"] for found in tokens)
    assert any(
        found["recorded_logprob"] is not None and found["recorded_logprob"] <= 0 for found in tokens
    )


def test_other_options_are_named_and_keep_the_tokens(recorded):
    certificate = replayed(
        recorded,
        "--option",
        "token-budget=72",
        "--option",
        "prefix-caching=off",
        "--requests",
        "0,1,2,3,4,5,6",
    )
    assert certificate["is_equal"]
    assert certificate["num_requests"] == 7
    assert certificate["options"] == {"token-budget": "72", "prefix-caching": "off"}


def test_what_is_refused_now_is_a_difference(recorded):
    certificate = replayed(
        recorded, "--option", "max-context=64", "--requests", "0,1,2,3,4,5,6", code=1
    )
    assert certificate["num_compared"] == certificate["num_requests"] == 7
    assert {found["what"] for found in certificate["differences"]} == {"refusal"}
    assert 0 < len(certificate["differences"]) == 7 - certificate["num_equal"]


def test_mistakes_are_told(recorded, tmp_path):
    for arguments, what in (
        (["--alone", "--like-then"], "two ways"),
        (["--option", "speed=9"], "no engine option"),
        (["--requests", "0,no-such"], "no request no-such"),
        (["--model", f"nobody={tmp_path}"], "no model or adapter nobody"),
        (["--server", "3"], "servers' lives"),
        (["--build", str(tmp_path)], "no build"),
    ):
        result = CliRunner().invoke(app, ["replay", str(recorded), *arguments])
        assert isinstance(result.exception, ConfigError), arguments
        assert what in str(result.exception), arguments


def test_it_is_a_load(recorded, tmp_path):
    """For simulation, planning and a server under test: with its times and the tokens of its
    prompts."""
    rows = read_rows(recorded)
    assert rows[0].at_s == 0
    assert all(row.e2e_s >= row.ttft_s > 0 for row in rows if row.ttft_s is not None)
    assert any(row.abort_s is not None for row in rows)
    assert all(len(row.prompt_ids) == row.num_prompt for row in rows)
    assert {row.n for row in rows} == {1, 3}
    figures = json.loads(
        CliRunner()
        .invoke(app, ["simulate", str(recorded), "--json"], catch_exceptions=False)
        .stdout
    )
    assert figures["recorded"]["ttft_s"]["p50"] > 0
    assert [job.num_prompt for job in read_jobs(recorded)] == [
        max(row.num_prompt, 1) for row in rows
    ]
    items = read_trace(recorded, limit=100, max_context=4096, vocab=300)
    assert [tuple(item.prompt_ids) for item in items] == [row.prompt_ids for row in rows]


def test_what_is_sealed_shows_no_text(roomy_folder, tmp_path):
    server = Server(
        roomy_folder,
        "--record",
        str(tmp_path / "day"),
        "--record-text",
        "off",
        "--record-key",
        str(tmp_path / "key"),
    )
    server.wait()
    complete(server, SHARED)
    assert server.stop(signal.SIGTERM) == 0
    data = b"".join(path.read_bytes() for path in files_of(tmp_path / "day"))
    assert not any(
        bytes(part) in data for part in (b"launch", b"cmpl-", bytes([116, 0, 0, 0, 104, 0, 0, 0]))
    )
    with pytest.raises(ConfigError, match="sealed"):
        Recording(tmp_path / "day")
    assert replayed(tmp_path / "day", "--alone", "--key", tmp_path / "key")["num_equal"] == 1
    (server,) = Recording(tmp_path / "day", read_key(tmp_path / "key")).servers
    assert len(server.requests[0].prompt_ids()) == len(SHARED)


def test_several_engines_and_models(tiny_folder, roomy_folder, tmp_path):
    with_roles = "--prefill", "1", "--decode", "1", "--token-budget", "64"
    for name, model, options in (
        ("alike", roomy_folder, ("--data-parallel", "2")),
        ("roles", roomy_folder, with_roles),
    ):
        server = Server(model, *options, "--record", str(tmp_path / name)).wait()
        with ThreadPoolExecutor(4) as threads:
            list(
                threads.map(
                    lambda number, server=server: complete(
                        server, SHARED + str(number), max_tokens=30
                    ),
                    range(8),
                )
            )
        assert server.stop(signal.SIGTERM) == 0
        assert replayed(tmp_path / name, "--like-then")["num_equal"] == 8
    server = Server(
        None, f"one={tiny_folder}", f"two={roomy_folder}", "--record", str(tmp_path / "models")
    ).wait()
    for model in ("one", "two"):
        complete(server, "a tide", model=model, max_tokens=40, temperature=1.0)
    assert server.stop(signal.SIGTERM) == 0
    assert {row.model for row in read_rows(tmp_path / "models")} == {"one", "two"}
    moved = f"one={tiny_folder}"
    assert replayed(tmp_path / "models", "--like-then", "--model", moved)["num_equal"] == 2
    make_llama(tmp_path / "other", seed=5, vocab_size=320, max_position_embeddings=512)
    byte_tokenizer(tmp_path / "other")
    certificate = replayed(tmp_path / "models", "--model", f"one={tmp_path / 'other'}", code=1)
    assert certificate["notes"] == ["one: the weights are not those that were recorded"]
    (found,) = certificate["differences"]
    assert found["replayed_logprob"] is not None


def test_what_the_end_of_the_server_cuts(roomy_folder, tmp_path):
    server = Server(
        roomy_folder, "--speculate", "off", "--drain-seconds", "0", "--record", str(tmp_path)
    ).wait()
    body = {"prompt": "hello", "max_tokens": 3900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=None) as reply:
        lines = reply.iter_lines()
        next(line for line in lines if line.startswith("data: {"))
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(httpx.HTTPError):
            list(lines)
    assert server.stop(signal.SIGTERM) == 0
    (request,) = Recording(tmp_path).servers[0].requests
    assert request.num_output >= 1
    assert request.ended.error or request.num_output == 3900
    assert replayed(tmp_path, "--alone")["is_equal"]


def test_a_folder_that_cannot_be_written_is_told_at_start(tmp_path):
    (tmp_path / "notes.txt").write_text("milk, bread\n")
    for name in ("notes.txt", "notes.txt/day"):
        result = CliRunner().invoke(app, ["serve", "smollm2", "--record", str(tmp_path / name)])
        assert isinstance(result.exception, ConfigError), name
        assert "--record" in str(result.exception)
    first = RecordingWriter(tmp_path / "day")
    result = CliRunner().invoke(app, ["serve", "smollm2", "--record", str(tmp_path / "day")])
    assert "Another server" in str(result.exception)
    first.close()


def test_a_full_disk_stops_the_recording_and_nothing_else(tiny_folder, tmp_path):
    patch = f"""
import errno, tidemill.record.writer as writer
real = writer.os.write
class Full:
    def __getattr__(self, name):
        return getattr(real_os, name)
    def write(self, fd, data):
        if real_os.path.exists({str(tmp_path / "full")!r}):
            real(fd, bytes(data[:5]))
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)
real_os, writer.os = writer.os, Full()
"""
    server = Server(tiny_folder, "--record", str(tmp_path / "day"), patch=patch).wait()
    complete(server, "the first")
    until(lambda: len(Recording(tmp_path / "day").servers[0].requests) == 1)
    (tmp_path / "full").touch()

    def is_told():
        complete(server, "another")
        return server.gauge("recordings_stopped_total") == 1

    until(is_told)
    complete(server, "the last")
    assert server.stop(signal.SIGTERM) == 0
    (request,) = Recording(tmp_path / "day").servers[0].requests
    assert len(request.prompt_ids()) == len("the first")
    assert server.process.stdout.read().count("nothing more is recorded") == 1
