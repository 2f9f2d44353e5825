"""Batch inference over a file: each line once, whatever ends the process."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from itertools import count

import pytest

from tests.server.conftest import behind_our_protocol
from tests.waiting import until
from tidemill.batch import lines, remote
from tidemill.batch.lines import Line, Problem, Request
from tidemill.batch.local import Local
from tidemill.batch.output import OutputFull
from tidemill.batch.remote import Remote
from tidemill.batch.run import Batch
from tidemill.config import EngineOptions
from tidemill.errors import ConfigError, EngineDead
from tidemill.server.generation.models import Served

CHAT = [{"role": "user", "content": "How high?"}]


class Echo:
    """Answers with the request's body, the last of those that wait first. `dies_after`: so many
    answers it raises."""

    num_at_once = 8

    def __init__(self, dies_after=None):
        self.asked = []
        self._left = dies_after

    async def respond(self, request):
        self.asked.append(request.custom_id)
        await asyncio.sleep(random.Random(request.custom_id).random() / 1000)
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise EngineDead("It is gone.")
        failed = b"fail" in request.body
        return (400 if failed else 200), request.body


def write(path, objects):
    path.write_text("".join(json.dumps(one) + "\n" for one in objects))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(source, target, backend=None, **how):
    """All of it; the backend."""
    backend = backend or Echo()
    files = Batch(source, target, **how)
    try:
        asyncio.run(files.run(backend))
    finally:
        files.close()
    return backend


@pytest.fixture
def prompts(tmp_path):
    return write(
        tmp_path / "in.jsonl", [{"custom_id": f"c{i}", "prompt": f"{i}"} for i in range(50)]
    )


def size_of(path) -> int:
    return path.stat().st_size if path.exists() else 0


def ids(path):
    return [one["custom_id"] for one in read(path)]


def test_forms_of_lines():
    full = {"custom_id": "a", "method": "POST", "url": "/v1/score", "body": {"text_1": "x"}}

    def parse(line, number=3, **defaults):
        text = line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n"
        found = lines.parse(Line(number, text), defaults)
        return (
            found
            if isinstance(found, Problem)
            else (found.custom_id, found.url, json.loads(found.body))
        )

    assert parse(full, max_tokens=2) == ("a", "/v1/score", {"text_1": "x"})
    assert parse({"prompt": "p", "n": 2}, max_tokens=2) == (
        "line-3",
        "/v1/completions",
        {"max_tokens": 2, "prompt": "p", "n": 2},
    )
    assert parse({"messages": CHAT, "max_tokens": 5, "custom_id": "b"}, max_tokens=2) == (
        "b", "/v1/chat/completions", {"messages": CHAT, "max_tokens": 5},
    )  # fmt: skip
    assert parse({"input": "i"}, max_tokens=2)[1:] == ("/v1/embeddings", {"input": "i"})
    for wrong, code in (
        (b"{nonsense\n", "invalid_json_line"),
        (b"[1]\n", "invalid_request"),
        (b"\xff\xfe\n", "invalid_json_line"),
        ({"custom_id": 5, "prompt": "p"}, "invalid_request"),
        ({"prompt": "p", "messages": CHAT}, "invalid_request"),
        ({"text": "p"}, "invalid_request"),
        ({"prompt": "p", "stream": True}, "invalid_parameter"),
        (full | {"method": "GET"}, "invalid_method"),
        (full | {"url": "@elsewhere/v1/score"}, "invalid_url"),
        (full | {"url": "/v1\n"}, "invalid_url"),
        (full | {"more": 1}, "invalid_request"),
        (full | {"body": []}, "invalid_body"),
        (b"x" * 3_000_000, "line_too_long"),
    ):
        assert parse(wrong).code == code, wrong


def test_every_line_once_as_finished_or_in_order(tmp_path, prompts):
    run(prompts, tmp_path / "out.jsonl")
    assert ids(tmp_path / "out.jsonl") != ids(prompts)
    assert sorted(ids(tmp_path / "out.jsonl")) == sorted(ids(prompts))
    run(prompts, tmp_path / "ordered.jsonl", ordered=True)
    assert ids(tmp_path / "ordered.jsonl") == ids(prompts)
    one = read(tmp_path / "ordered.jsonl")[7]
    assert one["response"]["body"] == {"prompt": "7"}
    assert one["error"] is None


def test_errors_go_where_they_are_asked_for(tmp_path):
    source = write(
        tmp_path / "in.jsonl", [{"prompt": "a"}, {"text": "b"}, {"prompt": "fail"}, {"prompt": "c"}]
    )
    run(source, tmp_path / "all.jsonl", ordered=True)
    assert [
        one["response"] and one["response"]["status_code"] for one in read(tmp_path / "all.jsonl")
    ] == [200, None, 400, 200]
    run(source, tmp_path / "out.jsonl", errors=tmp_path / "errors.jsonl")
    assert sorted(ids(tmp_path / "out.jsonl")) == ["line-1", "line-4"]
    wrong = sorted(read(tmp_path / "errors.jsonl"), key=lambda one: one["custom_id"])
    assert wrong[0]["error"]["code"] == "invalid_request"
    assert wrong[1]["response"]["status_code"] == 400
    (tmp_path / "errors.jsonl").unlink()  # how failed lines are tried again
    assert run(source, tmp_path / "out.jsonl", errors=tmp_path / "errors.jsonl").asked == ["line-3"]
    assert len(read(tmp_path / "errors.jsonl")) == 2


@pytest.mark.parametrize("ordered", [False, True])
def test_a_run_that_failed_continues(tmp_path, prompts, ordered):
    target = tmp_path / "out.jsonl"
    with pytest.raises(EngineDead):
        run(prompts, target, Echo(dies_after=20), ordered=ordered)
    kept = target.read_bytes()
    assert 0 < len(ids(target)) <= 20
    second = run(prompts, target, ordered=ordered)
    assert target.read_bytes().startswith(kept)
    assert len(second.asked) == 50 - kept.count(b"\n")
    assert sorted(ids(target)) == sorted(ids(prompts))
    assert not ordered or ids(target) == ids(prompts)
    assert run(prompts, target, ordered=ordered).asked == []


def test_cut_anywhere_only_whole_results_are_kept(tmp_path):
    """What a process that is killed leaves is a beginning of what it would have written; a loss of
    power may add zeros."""
    source = write(
        tmp_path / "in.jsonl", [{"custom_id": f"c{i}", "prompt": "x" * i} for i in range(3)]
    )
    target = tmp_path / "out.jsonl"
    run(source, target, ordered=True)
    whole = target.read_bytes()
    for end in sorted(
        {
            *range(0, len(whole), 5),
            *(i + j for i in range(len(whole)) if whole[i] == 10 for j in (-1, 0, 1)),
        }
    ):
        for rest in (b"", b"\0" * 5):
            if rest and end < whole.index(b"\n"):
                continue  # nothing says that it is ours
            target.write_bytes(whole[:end] + rest)
            left = Batch(source, target)
            left.close()
            assert left.progress.num_kept == whole[:end].count(b"\n")
            assert (
                target.read_bytes()
                == whole[: whole.rindex(b"\n", 0, end) + 1 if left.progress.num_kept else 0]
            )
    run(source, target, ordered=True)
    assert target.read_bytes() == whole


def test_files_that_are_not_ours_are_left_alone(tmp_path, prompts):
    target = tmp_path / "out.jsonl"
    for content in (
        b"my notes\n",
        b'{"id":"batch_req_none"}\n',
        b'{"id": "batch_req_1_00000000"',
        b"\0\0",
    ):
        target.write_bytes(content)
        with pytest.raises(ConfigError, match="something else"):
            Batch(prompts, target)
        assert target.read_bytes() == content
    target.unlink()
    run(prompts, target, ordered=True)
    with pytest.raises(ConfigError, match="Line 50 of the input"):
        Batch(write(tmp_path / "b.jsonl", [*read(prompts)[:49], {"prompt": "other"}]), target)
    with pytest.raises(ConfigError, match="a result of line 50, which the input"):
        Batch(write(tmp_path / "b.jsonl", read(prompts)[:49]), target)
    some = target.read_text().splitlines(keepends=True)
    target.write_text(some[0] + some[2])
    with pytest.raises(ConfigError, match="line 3 and none of line 2"):
        Batch(prompts, target, ordered=True)
    target.write_text(some[0] + some[0])
    with pytest.raises(ConfigError, match="two results of line 1"):
        Batch(prompts, target)
    target.write_text(some[1] + some[0])
    with pytest.raises(ConfigError, match="not in order"):
        Batch(prompts, target, ordered=True)
    with pytest.raises(ConfigError, match="different files"):
        Batch(prompts, prompts)
    with pytest.raises(ConfigError, match="There is no file"):
        Batch(tmp_path / "none.jsonl", target)
    first = Batch(prompts, target)
    with pytest.raises(ConfigError, match="Another process"):
        Batch(prompts, target)
    first.close()


def test_a_full_disk_leaves_whole_lines(tmp_path, prompts, monkeypatch):
    target, real, room = tmp_path / "out.jsonl", os.write, [1000]

    def scarce(fd, data):
        if not room[0]:
            raise OSError(28, "No space left on device")
        taken = real(fd, bytes(data[: room[0]]))
        room[0] -= taken
        return taken

    monkeypatch.setattr(os, "write", scarce)
    with pytest.raises(OutputFull, match="the disk is full"):
        run(prompts, target)
    monkeypatch.undo()
    assert target.read_bytes()[-1:] in (b"\n", b"")
    run(prompts, target)
    assert sorted(ids(target)) == sorted(ids(prompts))


async def test_a_server_that_is_busy_or_away_is_asked_again(tmp_path, prompts, monkeypatch):
    monkeypatch.setattr(remote, "_FIRST_DELAY_S", 0.001)
    calls, bodies = count(), []

    async def app(scope, receive, send):
        body = (await receive())["body"]
        status = (200, 429, 503)[next(calls) % 3]
        bodies.append(body)
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send(
            {
                "type": "http.response.body",
                "body": b'{\n "text":\n %d}' % len(body) if len(bodies) % 2 else b"<html>",
            }
        )

    async with behind_our_protocol(app) as port:
        backend = Remote(f"http://127.0.0.1:{port}/v1")
        files = Batch(prompts, tmp_path / "out.jsonl", defaults={"model": "m"})
        await files.run(backend)
        files.close()
        await backend.close()
    assert sorted(ids(tmp_path / "out.jsonl")) == sorted(ids(prompts))
    assert all(one["response"]["status_code"] == 200 for one in read(tmp_path / "out.jsonl"))
    assert json.loads(bodies[0])["model"] == "m"
    calls = count(2)

    async with behind_our_protocol(app) as port:
        patient = Remote(f"http://127.0.0.1:{port}", give_up_s=0.1)
        await asyncio.sleep(0.2)  # a first failure after a long time is not a long time of failures
        assert (await patient.respond(Request("r", "c", "/v1/completions", b"{}")))[0] == 200
        await patient.close()
    gone = Remote(f"http://127.0.0.1:{port}", give_up_s=0.0)
    with pytest.raises(EngineDead, match="has answered no line"):
        await gone.respond(Request("r", "c", "/v1/completions", b"{}"))
    await gone.close()


async def test_an_engine_answers_as_a_server_would(tmp_path, tiny_folder):
    full = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "tiny", "prompt": "The", "seed": 1},
    }
    source = write(
        tmp_path / "in.jsonl",
        [
            full,
            {"prompt": "The tide"},
            {"messages": CHAT},
            {"prompt": "The", "model": "other"},
            full | {"url": "/v1/none"},
        ]
        + [{"prompt": "The tide"}] * 20,
    )
    local = Local(
        Served(EngineOptions(model=str(tiny_folder), served_name="tiny", max_requests=4, threads=1))
    )
    await local.start()
    try:
        assert local.num_at_once == 8
        files = Batch(
            source,
            tmp_path / "out.jsonl",
            ordered=True,
            defaults={"max_tokens": 3, "temperature": 0},
        )
        await files.run(local)
        files.close()
    finally:
        await local.close()
    made = read(tmp_path / "out.jsonl")
    assert [one["response"]["status_code"] for one in made] == [200, 200, 200, 404, 404] + [
        200
    ] * 20
    assert made[3]["response"]["body"]["error"]["code"] == "model_not_found"
    assert made[2]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    texts = {one["response"]["body"]["choices"][0]["text"] for one in (made[1], *made[5:])}
    assert len(texts) == 1
    assert files.progress.num_output == 22 * 3 + 3


@pytest.mark.slow
def test_killed_at_any_point_each_line_is_there_once(tmp_path, tiny_folder):
    source = write(
        tmp_path / "in.jsonl", [{"custom_id": f"c{i}", "prompt": f"Line {i}"} for i in range(3000)]
    )
    target = tmp_path / "out.jsonl"
    command = [
        sys.executable, "-m", "tidemill", "batch", str(source), str(target), "-m", str(tiny_folder), "-n", "2", "-t", "0",
    ]  # fmt: skip
    for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, None):
        before = size_of(target)
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if number is not None:
            until(
                lambda process=process, before=before: (
                    process.poll() is not None or size_of(target) >= before + 40_000
                ),
                0.01,
            )
            process.send_signal(number)
        said, _ = process.communicate()
        assert process.returncode == {None: 0, signal.SIGTERM: 130}.get(number, -9), said
    assert sorted(ids(target)) == sorted(ids(source))
    assert all(one["response"]["status_code"] == 200 for one in read(target))
