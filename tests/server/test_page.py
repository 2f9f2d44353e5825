"""The chat page's files and its live stream, as a browser gets them."""

import contextlib
import json
import os
import re
import signal
import threading

import httpx
import pytest

from tests.server.conftest import Server
from tests.server.test_live import kinds_of
from tests.waiting import until
from tidemill.kv.manager import SHARED
from tidemill.server import page

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@pytest.mark.parametrize("path", sorted(page.PATHS))
def test_files_are_sent_as_they_are_and_kept(server, path):
    first = httpx.get(f"{server.url}{path}")
    assert first.status_code == 200
    assert first.headers["content-type"].startswith(
        TYPES[path.rpartition(".")[2] if "." in path else "html"]
    )
    assert first.headers["x-content-type-options"] == "nosniff"
    again = httpx.get(f"{server.url}{path}", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert httpx.get(f"{server.url}{path}", headers={"if-none-match": '"old"'}).status_code == 200
    head = httpx.head(f"{server.url}{path}")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == first.headers["content-length"]
    assert httpx.post(f"{server.url}{path}").status_code == 405


def test_the_policy_allows_nothing_but_ourselves(server):
    policy = dict(
        part.strip().split(" ", 1)
        for part in httpx.get(server.url).headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["frame-ancestors"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert {policy[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {
        "'self'"
    }
    assert not any("unsafe" in value for value in policy.values())


def test_files_ask_for_nothing_from_elsewhere_and_for_nothing_that_is_not_there(server):
    for path in page.PATHS:
        text = httpx.get(f"{server.url}{path}").text
        hosts = set(re.findall(r"https?://([\w.]+)", text)) - {"www.w3.org"}  # the name of SVG
        assert not hosts, path
        assert "innerHTML" not in text
        assert not re.search(r"\sstyle=|<script>|\son\w+=\"", text), path
        # the page may be served under a prefix
        assert not re.search(r"""(?:src|href)="/|call\(["`]/""", text), path
        used = re.findall(r'(?:src|href)="(page/[^"]+)"', text) + [
            f"page/{one}" for one in re.findall(r'from "\./([^"]+)"', text)
        ]
        for name in used:
            assert f"/{name}" in page.PATHS, name


@pytest.mark.parametrize(
    "path",
    [
        "/page",
        "/page/",
        "/page/__init__.py",
        "/page/..%2fguard.py",
        "/page/nothing.js",
        "/index.html",
    ],
)
def test_there_is_nothing_else(server, path):
    assert httpx.get(f"{server.url}{path}").status_code == (400 if "%" in path else 404)


# ---- the live stream


@contextlib.contextmanager
def watching(server, **headers):
    with httpx.stream("GET", f"{server.url}/v1/engine/live", headers=headers) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        yield (json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: "))


def test_the_stream_follows_the_server(server):
    body = {
        "prompt": "the same prefix of several pages, ",
        "max_tokens": 400,
        "ignore_eos": True,
        "n": 4,
    }
    asking = threading.Thread(target=lambda: httpx.post(f"{server.url}/v1/completions", json=body))
    until(lambda: server.gauge("requests_running") == 0)  # of other tests
    with watching(server) as frames:
        assert next(frames)["num_pages"] > 0
        assert next(frames)["requests"] == []
        asking.start()
        seen = {"running": 0, "held": 0, "shared": 0}
        for frame in frames:
            if frame["type"] == "state":
                seen["running"] = max(seen["running"], frame["totals"]["requests_running"])
                if seen["held"] and not frame["requests"] and not asking.is_alive():
                    break
            elif frame["requests"]:
                kinds = kinds_of(frame)
                seen["held"] = max(seen["held"], len(kinds) - kinds.count(0) - kinds.count(1))
                # none before the other samples are there
                seen["shared"] = max(seen["shared"], kinds.count(SHARED))
                assert sum(count for _, count in frame["requests"]) > kinds.count(SHARED)
    asking.join()
    assert seen["running"] == 4
    assert seen["held"] > 4
    assert seen["shared"] > 0


def test_a_lost_engine_is_seen_and_a_server_that_stops_does_not_wait_for_watchers(tiny_folder):
    server = Server(tiny_folder).wait()
    with watching(server) as frames:
        next(frames)
        os.kill(server.engine_pid(), signal.SIGKILL)
        seen = []
        for frame in frames:
            if frame["type"] == "state" and frame["engine"] not in seen[-1:]:
                seen.append(frame["engine"])
                if seen[-2:] == ["restarting", "running"]:
                    break
        assert frame["totals"]["engine_restarts"] == 1
        assert frame["decisions"][-1][1] == "EngineRestarted"
        server.process.send_signal(signal.SIGINT)
        # the stream ends as it should
        assert all(frame["type"] in ("state", "pages") for frame in frames)
        assert server.stop() == 0
