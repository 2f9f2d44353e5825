"""`tidemill prompt-cache`: against a server that is asked by HTTP, and in a folder."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from typer.testing import CliRunner

from tidemill.cli.main import app
from tidemill.engine.llm import LLM
from tidemill.errors import TidemillError
from tidemill.types.sampling import SamplingParams

TEXT = "Spring tides come after new moon and full moon, neap tides between them."
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def invoke(*arguments):
    done = CliRunner().invoke(app, ["prompt-cache", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.output


@pytest.fixture
def asked():
    """What a server is asked, which keeps nothing; its address first."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            given = self.rfile.read(int(self.headers.get("content-length") or 0))
            asked.append((self.command, self.path, json.loads(given) if given else None))
            made = {"name": "n", "tokens": 20, "pinned_tokens": 16, "expires_in": 9, "data": []}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(
                json.dumps(
                    made | {"usage": {"prompt_tokens_details": {"cached_tokens": 8}}}
                ).encode()
            )

        do_GET = do_POST = do_DELETE = answer

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    asked.append(f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield asked
    server.shutdown()


def test_what_a_server_is_asked(asked, tmp_path):
    messages = tmp_path / "messages.json"
    messages.write_text(json.dumps([{"role": "user", "content": "x"}]))
    url = asked.pop()
    assert "16 of 20 tokens are pinned" in invoke(
        "save", "n", "--prompt", "abc", "--ttl", 9, "--url", url
    )
    invoke("save", "m", "--messages", messages, "--fork", "n", "--url", url)
    invoke("extend", "n", "--ttl", 60, "--url", url)
    invoke("list", "--url", url)
    invoke("rm", "n", "m", "--url", url)
    assert asked == [
        ("POST", "/v1/prompt_caches", {"name": "n", "ttl": 9, "prompt": "abc"}),
        (
            "POST",
            "/v1/prompt_caches/n/fork",
            {"name": "m", "ttl": 3600, "messages": [{"role": "user", "content": "x"}]},
        ),
        ("POST", "/v1/prompt_caches/n", {"ttl": 60}),
        ("GET", "/v1/prompt_caches", None),
        ("DELETE", "/v1/prompt_caches/n", None),
        ("DELETE", "/v1/prompt_caches/m", None),
    ]


def test_saved_in_a_folder_and_found_by_another_engine(tiny_folder, tmp_path, asked, monkeypatch):
    monkeypatch.setenv("TIDEMILL_SPECULATE", "off")
    # of requests, not of what is saved
    monkeypatch.setenv("TIDEMILL_KV_POLICY", '{"kind": "window", "recent": 20}')
    folder = tmp_path / "caches"
    plain = LLM(str(tiny_folder), speculate="off", progress=False).generate(TEXT + " So", GREEDY)[0]
    assert "0 of them were in" in invoke(
        "save", "tides", "--folder", folder, "--model", tiny_folder, "--prompt", TEXT
    )
    assert "tides" in invoke("list", "--folder", folder)
    llm = LLM(str(tiny_folder), speculate="off", progress=False, kv_disk=f"{folder}:1G")
    found = llm.generate(TEXT + " So", GREEDY)[0]
    llm.close()
    assert found.num_cached >= 64
    assert found.outputs[0].token_ids == plain.outputs[0].token_ids
    url = asked.pop()
    assert "8 were found" in invoke("load", "tides", "--folder", folder, "--url", url)
    assert asked[0][2] == {
        "name": "tides",
        "ttl": 3600,
        "prompt": found.prompt_token_ids[: len(TEXT)],
    }
    file = next(folder.glob("*.prompt.json"))
    file.write_text(file.read_text().replace('"token_ids": [', '"token_ids": [7, '))
    with pytest.raises(TidemillError, match="changed after it was saved"):
        invoke("load", "tides", "--folder", folder, "--url", url)
    file.write_text("{")
    with pytest.raises(TidemillError, match="cannot be read"):
        invoke("list", "--folder", folder)
    invoke("rm", "tides", "--folder", folder)
    assert not list(folder.glob("*.tidemill-kv"))
    with pytest.raises(TidemillError, match="no prompt cache"):
        invoke("rm", "tides", "--folder", folder)
