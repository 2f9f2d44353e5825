"""Batches: every line executed once, in the background, across restarts of the server."""

import asyncio
import contextlib
import json
import re
import signal
from collections import Counter
from types import SimpleNamespace

import httpx
import openai
import pytest

from tests.server.conftest import Server
from tests.waiting import until
from tidemill.server.api.endpoints import ENDPOINTS
from tidemill.server.generation.models import Models
from tidemill.server.http.access import Access
from tidemill.server.store import batch_lines, batches
from tidemill.server.store.batch_lines import MAX_LINE_BYTES, problems_of
from tidemill.server.store.batches import Batches
from tidemill.server.store.storage import Storage, StorageUnavailable

CHAT = [{"role": "user", "content": "How high?"}]
BODIES = {
    "/v1/completions": {"model": "tiny", "prompt": "The tide", "max_tokens": 5, "temperature": 0},
    "/v1/chat/completions": {"model": "tiny", "messages": CHAT, "max_tokens": 5, "temperature": 0},
    "/v1/embeddings": {"model": "tiny", "input": "The tide"},
    "/v1/responses": {
        "model": "tiny",
        "input": "The tide",
        "max_output_tokens": 5,
        "temperature": 0,
    },
}


def client_of(server, **more):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, **more)


@pytest.fixture(scope="module")
def client(roomy):
    return client_of(roomy)


def lines_of(url, bodies):
    return [
        {"custom_id": f"line {i}", "method": "POST", "url": url, "body": body}
        for i, body in enumerate(bodies)
    ]


def begin(client, url, lines, window="24h", **more):
    content = lines if isinstance(lines, bytes) else "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=url, completion_window=window, **more
    )


def end(client, batch):
    until(
        lambda: (
            client.batches.retrieve(batch.id).status
            in ("completed", "failed", "expired", "cancelled")
        )
    )
    return client.batches.retrieve(batch.id)


def least_completed(client, batch, least: int) -> int:
    """The number of completed lines; 0 if it is less than that."""
    completed = client.batches.retrieve(batch.id).request_counts.completed
    return completed if completed >= least else 0


def read(client, file_id):
    return (
        []
        if file_id is None
        else [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    )


@pytest.mark.parametrize("url", BODIES)
def test_every_endpoint_answers_as_its_route_does(client, roomy, url):
    bodies = [
        BODIES[url],
        BODIES[url] | {"user": "somebody"},
        BODIES[url] | {"colour": "blue"},
        BODIES[url] | {"model": "other"},
    ]
    begun = begin(client, url, lines_of(url, bodies), metadata={"for": "the test"})
    assert begun.status == "validating"
    batch = end(client, begun)
    assert batch.status == "completed"
    assert (batch.endpoint, batch.metadata, batch.errors) == (url, {"for": "the test"}, None)
    assert (
        batch.request_counts.total,
        batch.request_counts.completed,
        batch.request_counts.failed,
    ) == (4, 2, 2)
    assert (
        batch.created_at
        <= batch.in_progress_at
        <= batch.finalizing_at
        <= batch.completed_at
        < batch.expires_at
    )
    made = read(client, batch.output_file_id)
    asked = httpx.post(roomy.url + url, json=BODIES[url]).json()

    def gist(answer):
        """Without ids and times."""
        return {name: answer.get(name) for name in ("choices", "data", "object", "model")} | {
            "texts": [
                item["content"][0]["text"]
                for item in answer.get("output", [])
                if item["type"] == "message"
            ]
        }

    assert [one["custom_id"] for one in made] == ["line 0", "line 1"]
    for one in made:
        assert one["error"] is None
        assert one["response"]["status_code"] == 200
        assert gist(one["response"]["body"]) == gist(asked)
    first, second = read(client, batch.error_file_id)
    assert (first["custom_id"], first["response"]["status_code"]) == ("line 2", 400)
    assert first["response"]["body"]["error"]["param"] == "colour"
    assert (second["custom_id"], second["response"]["status_code"]) == ("line 3", 404)
    assert len({one["id"] for one in [*made, first, second]}) == 4
    output = client.files.retrieve(batch.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")


def test_lists(client):
    ids = [
        end(
            client,
            begin(
                client, "/v1/completions", lines_of("/v1/completions", [BODIES["/v1/completions"]])
            ),
        ).id
        for _ in range(3)
    ]
    assert [one.id for one in client.batches.list(limit=2)][:3] == ids[::-1]
    assert client.batches.list(limit=1, after=ids[1]).data[0].id == ids[0]
    with pytest.raises(openai.BadRequestError):
        client.batches.list(limit=101)


def test_a_file_with_problems_fails_with_all_of_them(client):
    url = "/v1/completions"
    good = lines_of(url, [BODIES[url]] * 2)
    post = {"method": "POST", "url": url, "body": {}}
    lines = [
        good[0], good[0], good[1] | {"url": "/v1/embeddings"}, post | {"custom_id": "a", "method": "GET"},
        post | {"custom_id": "b", "body": {"stream": True}}, {"custom_id": "c", "method": "POST", "url": url},
        post | {"custom_id": 5}, post | {"custom_id": "d", "body": []}, post | {"custom_id": "e", "more": 1},
        post | {"custom_id": ""},
    ]  # fmt: skip
    content = "\n".join(map(json.dumps, lines)).encode() + b"\n\n{nonsense\n\xff\xfe\0\n"
    content += (
        json.dumps(post | {"custom_id": "f", "body": {"stream": "?"}})
        .encode()
        .replace(b"?", b"\xff")
        + b"\n"
    )
    batch = end(client, begin(client, url, content))
    assert batch.status == "failed"
    assert batch.failed_at
    assert batch.output_file_id is None
    found = [(problem.line, problem.code, problem.param) for problem in batch.errors.data]
    assert found == [
        (2, "duplicate_custom_id", "custom_id"), (3, "invalid_url", "url"), (4, "invalid_method", "method"),
        (5, "invalid_parameter", "body.stream"), (6, "invalid_request", None), (7, "invalid_request", None),
        (8, "invalid_body", "body"), (9, "invalid_request", None), (10, "invalid_custom_id", "custom_id"),
        (12, "invalid_json_line", None), (13, "invalid_json_line", None),
        (14, "invalid_json_line", "body"),
    ]  # fmt: skip
    assert "'stream'" in batch.errors.data[3].message
    assert end(client, begin(client, url, b"\n\n \n")).errors.data[0].code == "empty_file"


def test_files_beyond_measure(tmp_path, monkeypatch):
    path = tmp_path / "f"
    one = json.dumps(
        {"custom_id": "a", "method": "POST", "url": "/x", "body": {"prompt": ""}}
    ).encode()
    path.write_bytes(b"[" * 100_000 + b"\n" + b" " * (3 * MAX_LINE_BYTES) + one + b"\n" + one)
    assert [(problem["line"], problem["code"]) for problem in problems_of(path, "/x")[1]] == [
        (1, "invalid_request"),
        (2, "line_too_long"),
    ]
    path.write_bytes(
        b'{"custom_id": "a", "method": "POST", "url": "/x", "body": '
        + b'{"a":' * 100_000
        + b"1"
        + b"}" * 100_001
    )
    assert problems_of(path, "/x")[1][0]["code"] == "invalid_json_line"
    path.write_bytes(b"x\n" * 1000)
    assert len(problems_of(path, "/x")[1]) == 100
    monkeypatch.setattr(batch_lines, "MAX_LINES", 3)
    path.write_bytes(b"\n".join(one.replace(b'"a"', b'"%d"' % i) for i in range(5)))
    assert problems_of(path, "/x")[1][-1]["code"] == "too_many_tasks"


def test_what_cannot_be_created(client):
    file = client.files.create(file=("a", b"{}"), purpose="batch").id
    right = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    wrong = [
        ({"endpoint": "/v1/nowhere"}, "endpoint"), ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"), ({"completion_window": "31d"}, "completion_window"),
        ({"metadata": {"a" * 65: ""}}, "metadata"), ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"extra_body": {"colour": "blue"}}, "colour"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after"),
    ]  # fmt: skip
    for change, param in wrong:
        with pytest.raises(openai.BadRequestError) as refused:
            client.batches.create(**right | change)
        assert refused.value.param == param
    with pytest.raises(openai.NotFoundError):
        client.batches.create(**right | {"input_file_id": "../lock"})
    done = end(
        client,
        begin(client, "/v1/completions", lines_of("/v1/completions", [BODIES["/v1/completions"]])),
    )
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.batches.create(**right | {"input_file_id": done.output_file_id})
    with pytest.raises(openai.BadRequestError, match="completed"):
        client.batches.cancel(done.id)


LONG = {"model": "tiny", "prompt": "x", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}


def test_cancelled_and_expired_batches_keep_what_they_have(client):
    url = "/v1/completions"
    lines = lines_of(url, [LONG | {"max_tokens": 1}, *[LONG] * 100])
    batch = begin(client, url, lines)
    until(lambda: client.batches.retrieve(batch.id).request_counts.completed, 0.02)
    with pytest.raises(openai.BadRequestError, match="still reads"):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    cancelled = end(client, batch)
    assert cancelled.status == "cancelled"
    assert cancelled.cancelling_at <= cancelled.cancelled_at
    expired = end(client, begin(client, url, lines, window="1s"))
    assert expired.status == "expired"
    assert expired.expired_at
    for ended, code in ((cancelled, "batch_cancelled"), (expired, "batch_expired")):
        answered, unanswered = read(client, ended.output_file_id), read(client, ended.error_file_id)
        assert {one["custom_id"] for one in answered + unanswered} == {
            line["custom_id"] for line in lines
        }
        assert len(answered) + len(unanswered) == 101
        assert {(one["response"], one["error"]["code"]) for one in unanswered} == {(None, code)}
        assert ended.request_counts.completed == len(answered)
        assert ended.request_counts.failed == len(unanswered)


def test_batches_give_way_to_requests_of_people(client, roomy):
    """A full engine of batch lines, and more in the queue than there are slots: a new one shares
    its steps with few."""
    batch = begin(client, "/v1/completions", lines_of("/v1/completions", [LONG] * 200))
    until(lambda: roomy.gauge("requests_running") >= 64, 0.02)
    made = httpx.post(f"{roomy.url}/v1/completions", json=LONG | {"max_tokens": 60}).json()
    (story,) = httpx.get(f"{roomy.url}/v1/requests/{made['id']}/explain").json()["data"]
    (reason,) = (span["because"] for span in story["spans"] if span["span"] == "decode")
    # or fewer: drafts
    shared = re.fullmatch(
        r"\d+ steps for 59 tokens, (?:alone|shared with ([\d.]+) other requests).*", reason
    )
    assert float(shared[1] or 0) < 5, reason
    assert client.batches.retrieve(batch.id).status == "in_progress"
    client.batches.cancel(batch.id)
    assert end(client, batch).status == "cancelled"


def test_no_line_is_lost_or_doubled_by_a_restart(roomy_folder, tmp_path):
    url = "/v1/completions"
    bodies = [
        {
            "model": "tiny",
            "prompt": f"number {i}",
            "max_tokens": 40 + i % 7,
            "ignore_eos": True,
            "temperature": i % 2,
            "seed": i,
        }
        for i in range(120)
    ]
    options = ("--data-dir", str(tmp_path / "data"), "--max-requests", "4")
    server = Server(roomy_folder, *options).wait()
    client = client_of(server)
    batch = begin(client, url, lines_of(url, bodies))
    # its input is lost while the server is down
    doomed = begin(client, url, lines_of(url, bodies[:60]))
    counts = []
    for number in (signal.SIGTERM, signal.SIGKILL):
        before = counts[-1] if counts else 0
        done = until(
            lambda client=client, least=before + 20: least_completed(client, batch, least), 0.02
        )
        server.process.send_signal(number)
        server.process.wait()
        (tmp_path / "data" / "files" / doomed.input_file_id).unlink(missing_ok=True)
        server = Server(roomy_folder, *options).wait()
        client = client_of(server)
        resumed = client.batches.retrieve(batch.id)
        assert resumed.status == "in_progress"
        counts.append(resumed.request_counts.completed)
        assert counts[-1] >= done, "executed lines were lost"
        assert counts[-1] < 120
    batch = end(client, client.batches.retrieve(batch.id))
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == (
        "completed",
        120,
        0,
    )
    answers = read(client, batch.output_file_id)
    assert Counter(one["custom_id"] for one in answers) == {f"line {i}": 1 for i in range(120)}
    texts = {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in answers}
    for i in range(0, 120, 9):  # as if nothing had happened
        undisturbed = httpx.post(server.url + url, json=bodies[i]).json()["choices"][0]["text"]
        assert texts[f"line {i}"] == undisturbed
    doomed = end(client, client.batches.retrieve(doomed.id))
    assert (doomed.status, doomed.errors.data[0].code) == ("failed", "missing_file")
    assert len(read(client, doomed.output_file_id)) == doomed.request_counts.completed > 0
    with pytest.raises(openai.APIStatusError) as refused:
        client.batches.create(
            input_file_id=doomed.input_file_id, endpoint=url, completion_window="24h"
        )
    assert refused.value.status_code == 410
    assert server.stop() == 0


async def test_batches_are_resumed_when_the_data_folder_is_usable_again(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(batches, "_TRY_AGAIN_S", 0.01)
    first, second = Storage(tmp_path, 10**6), Storage(tmp_path, 10**6)
    record = {
        "id": "batch_1",
        "status": "finalizing",
        "input_file_id": "f",
        "request_counts": {"total": 1},
    }
    await first.do(first.add_batch, "", "tiny", record)
    await first.do(first.add_result, "batch_1", 1, False, b"{}")
    ready = SimpleNamespace(config=SimpleNamespace(max_requests=1))
    models = Models(
        [
            SimpleNamespace(
                ready=ready,
                model_name="tiny",
                aliases=(),
                live=SimpleNamespace(),
                is_draining=False,
            )
        ]
    )
    running = Batches(models, ENDPOINTS, second, Access().caller_of, None)
    tries, resume = 0, running._resume

    async def counted() -> None:
        nonlocal tries
        tries += 1
        await resume()

    monkeypatch.setattr(running, "_resume", counted)
    await running.resume()  # the other server still has the folder
    while tries < 4:
        await asyncio.sleep(0)
    assert sum(line.startswith("batches cannot be resumed yet") for line in caplog.messages) == 1
    with pytest.raises(StorageUnavailable):
        await second.do(second.unfinished)
    first.close()
    while True:
        with contextlib.suppress(StorageUnavailable):
            if (await second.do(second.batch, "", "batch_1"))["status"] == "completed":
                break
    await running.stop()
    second.close()
