"""The names of requests, and the lines about them in the log."""

import json
import shutil

import httpx
import pytest

from tests.server.conftest import KEYS
from tests.waiting import until
from tidemill.server.http import context
from tidemill.server.http.context import RequestContext, RequestLog

SECRET = "what nobody may read"


@pytest.fixture
def path(log_of_requests):
    return log_of_requests


def ask(server, route="/v1/completions", body=None, key=KEYS[0], name=None, **more):
    headers = {"Authorization": f"Bearer {key}"} | (
        {"X-Request-Id": name} if name is not None else {}
    )
    body = {"prompt": SECRET, "max_tokens": 5, "ignore_eos": True, **more} if body is None else body
    return httpx.post(server.url + route, json=body, headers=headers)


def line_of(path, name):
    """Written when the request has ended, which may be after its response was read."""

    def find() -> dict | None:
        # the last may be half written
        whole, _, _ = path.read_text().rpartition("\n") if path.exists() else ("", "", "")
        lines = map(json.loads, whole.splitlines())
        return next((line for line in lines if name in (line["id"], line.get("label"))), None)

    return until(find, 0.02)


MESSAGES = [{"role": "user", "content": SECRET}]
ROUTES = {
    "/v1/completions": {"prompt": SECRET, "max_tokens": 5},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 5},
    "/v1/responses": {"model": "tiny", "input": SECRET, "max_output_tokens": 5},
    "/v1/messages": {"model": "tiny", "messages": MESSAGES, "max_tokens": 5},
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_label_leads_to_the_log_and_to_explanations(tenants, path, route, stream):
    name = f"my.{stream}-{route.replace('/', '_')}"
    reply = ask(tenants, route, ROUTES[route] | {"stream": stream, "temperature": 0}, name=name)
    assert reply.status_code == 200
    assert reply.headers["x-request-id"] == name
    line = line_of(path, name)
    assert line["id"] in reply.text
    for known in (name, line["id"]):
        explained = httpx.get(
            f"{tenants.url}/v1/requests/{known}/explain",
            headers={"Authorization": f"Bearer {KEYS[0]}"},
        ).json()
        assert [one["id"] for one in explained["data"]] == [f"{line['id']}/0"]
    assert (line["status"], line["route"], line["model"], line["output_tokens"]) == (
        200,
        route,
        "tiny",
        5,
    )
    assert line["prompt_tokens"] >= len(SECRET)
    assert line["finish_reason"] == "length"
    assert 0 <= line["queue_ms"] <= line["first_token_ms"] <= line["total_ms"]
    assert line["tokens_per_second"] > 0


def test_files_of_the_page_are_logged_only_if_they_are_not_there(tenants, path):
    for file in ("/", "/page/main.js", "/page/style.css"):
        assert (
            httpx.get(tenants.url + file, headers={"X-Request-Id": "of-the-page"}).status_code
            == 200
        )
    headers = {"X-Request-Id": "no-such-file", "Authorization": f"Bearer {KEYS[0]}"}
    assert httpx.get(f"{tenants.url}/page/nothing.js", headers=headers).status_code == 404
    assert line_of(path, "no-such-file")["status"] == 404
    assert "of-the-page" not in path.read_text()


def test_what_is_not_given_is_made(tenants):
    made = ask(tenants)
    assert made.headers["x-request-id"] == made.json()["id"]
    assert made.json()["id"].startswith("cmpl-")
    assert (
        ask(tenants, "/v1/embeddings", {"input": "x"}).headers["x-request-id"].startswith("embd-")
    )
    assert httpx.get(f"{tenants.url}/health").headers["x-request-id"].startswith("req-")
    assert httpx.get(
        f"{tenants.url}/nothing", headers={"Authorization": f"Bearer {KEYS[0]}"}
    ).headers["x-request-id"]


def test_the_body_may_name_it_too(tenants, path):
    assert ask(tenants, request_id="named-inside").headers["x-request-id"] == "named-inside"
    assert line_of(path, "named-inside")["status"] == 200
    assert ask(tenants, request_id="one", name="other").headers["x-request-id"] == "other"
    for name in ("one", "other"):
        found = httpx.get(
            f"{tenants.url}/v1/requests/{name}/explain",
            headers={"Authorization": f"Bearer {KEYS[0]}"},
        ).json()
        assert len(found["data"]) == 1


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a:b", "x" * 129, 'x"', "x%", "\xe9", "../x"])
def test_names_that_are_none(tenants, name):
    reply = ask(tenants, name=name.encode("latin-1"))
    assert reply.headers["x-request-id"] == reply.json()["id"]
    assert ask(tenants, request_id=name).status_code == 400


def test_requests_in_progress_may_have_the_same_label(tenants):
    headers = {"Authorization": f"Bearer {KEYS[0]}", "X-Request-Id": "busy"}
    body = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with (
        httpx.stream("POST", f"{tenants.url}/v1/completions", json=body, headers=headers) as reply,
        httpx.stream("POST", f"{tenants.url}/v1/completions", json=body, headers=headers) as same,
    ):
        lines, more = reply.iter_lines(), same.iter_lines()
        assert json.loads(next(lines)[6:])["id"] != json.loads(next(more)[6:])["id"]
        assert same.headers["x-request-id"] == "busy"
        other = ask(tenants, name="busy", key=KEYS[1])  # whose is another
        assert other.status_code == 200
        stranger = {"Authorization": f"Bearer {KEYS[1]}"}
        assert httpx.delete(f"{tenants.url}/v1/requests/busy", headers=stranger).status_code == 404
        assert httpx.delete(f"{tenants.url}/v1/requests/busy", headers=headers).status_code == 200
        assert any("request_cancelled" in line for line in lines)
        assert any("request_cancelled" in line for line in more)


def test_refusals_are_told_of_and_nothing_is_given_away(tenants, path):
    assert ask(tenants, key="not-a-key-of-anybody", name="refused-1").status_code == 401
    assert line_of(path, "refused-1")["error"] == "authentication_error"
    assert ask(tenants, name="refused-2", colour="blue").status_code == 400
    line = line_of(path, "refused-2")
    assert (line["status"], line["error"]) == (400, "invalid_request_error")
    httpx.get(
        f"{tenants.url}/v1/%0aforged%1b[31m",
        headers={"Authorization": f"Bearer {KEYS[0]}", "X-Request-Id": "refused-3"},
    )
    assert line_of(path, "refused-3")["status"] == 400
    written = path.read_text()
    assert SECRET not in written
    assert not any(key in written for key in KEYS)
    assert '"/health"' not in written
    assert len(line_of(path, "refused-2")["tenant"]) == 8


def test_who_leaves_is_told_of(tenants, path):
    headers = {"Authorization": f"Bearer {KEYS[0]}", "X-Request-Id": "leaves"}
    body = {"prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{tenants.url}/v1/completions", json=body, headers=headers) as reply:
        next(reply.iter_lines())
    line = line_of(path, "leaves")
    assert (line["error"], line["output_tokens"] > 0) == ("client_left", True)


def test_a_moved_log_is_begun_anew(tenants, path):
    ask(tenants, name="before")
    line_of(path, "before")
    path.rename(path.with_suffix(".old"))
    ask(tenants, name="after")
    assert line_of(path, "after")
    assert "before" not in path.read_text()
    assert "after" not in path.with_suffix(".old").read_text()


def test_a_flood_of_refusals_does_not_fill_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(context, "_REFUSED_PER_S", 0.0)
    log = RequestLog(tmp_path / "log")
    for i in range(1000):
        log.write(RequestContext(f"r{i}", path="/v1/x", status=401, error="authentication_error"))
    assert len((tmp_path / "log").read_text().splitlines()) == 50
    log.write(RequestContext("good", path="/v1/x", status=200))
    assert "refusals_not_logged=950" in (tmp_path / "log").read_text().splitlines()[-1]


def test_a_log_that_cannot_be_written_fails_no_call(tmp_path, caplog):
    (tmp_path / "folder").mkdir()
    log = RequestLog(tmp_path / "folder" / "log")
    shutil.rmtree(tmp_path / "folder")
    for _ in range(3):
        log.write(RequestContext("r", path="/v1/x", status=200))
    assert caplog.text.count("cannot be written") == 1
    (tmp_path / "folder").mkdir()
    log.write(RequestContext("again", path="/v1/x", status=200))
    assert "id=again" in (tmp_path / "folder" / "log").read_text()


def test_no_path_forges_a_line(tmp_path):
    log = RequestLog(tmp_path / "log")
    log.write(RequestContext("r", path="/a\n2026-01-01 id=forged status=200\x1b[31m é", status=200))
    (line,) = (tmp_path / "log").read_bytes().splitlines()
    assert b"\\n2026" in line
    assert b"\x1b" not in line
    assert line.isascii()
