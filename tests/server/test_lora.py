"""LoRA adapters of a real server: given at start, loaded and unloaded while requests run, and there
again after a crash."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from tests.engine.test_lora import make_lora
from tests.fragile import GATED, Fragile
from tests.server.conftest import Server
from tests.waiting import until

ADMIN, KEY = "an-admin-key-for-tests", "a-plain-key-for-tests"


class Client(httpx.Client):
    def __init__(self, url: str, key: str = ADMIN) -> None:
        super().__init__(base_url=url, headers={"Authorization": f"Bearer {key}"})

    def load(self, name: str, path: Path, **more: object) -> httpx.Response:
        return self.post(
            "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **more}
        )

    def unload(self, name: str) -> httpx.Response:
        return self.post("/v1/unload_lora_adapter", json={"lora_name": name})

    def complete(
        self, model: str, max_tokens: int = 12, prompt: str | list[int] = "abc", **more: object
    ) -> httpx.Response:
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
        }
        return self.post("/v1/completions", json=body | {"ignore_eos": True} | more)

    def tokens(self, model: str, **more: object) -> list[int]:
        reply = self.complete(model, **more)
        assert reply.status_code == 200, reply.text
        assert reply.json()["model"] == model
        return reply.json()["choices"][0]["token_ids"]

    def names(self) -> dict[str, str | None]:
        return {card["id"]: card["parent"] for card in self.get("/v1/models").json()["data"]}


@pytest.fixture(scope="module")
def paths(tiny_folder, tmp_path_factory) -> list[Path]:
    from transformers import LlamaForCausalLM

    base = LlamaForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    folder = tmp_path_factory.mktemp("loras")
    return [make_lora(folder / f"l{i}", base, i, rank=4 + i) for i in range(4)]


LONG = {"prompt": [GATED, 5], "max_tokens": 100}  # it does not end while the gate is closed


@pytest.fixture(scope="module")
def fragile(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        made = Fragile(tmp_path_factory.mktemp("fragile"), patch)
        made.open_gate()
        yield made


@pytest.fixture(scope="module")
def client(tiny_folder, paths, fragile):
    keys = ("--admin-key", ADMIN, "--api-key", KEY)
    running = Server(tiny_folder, "--lora", f"first={paths[0]}", "--max-loras", "2", *keys).wait()
    with Client(running.url) as made:
        made.server = running
        yield made
    assert running.stop() == 0


def test_adapters_come_and_go_while_requests_run(client, paths, fragile):
    """More adapters than slots, in one batch; unloading one loses no request; another of its name
    is another adapter."""
    assert client.names() == {"tiny": None, "first": "tiny"}
    base, first = client.tokens("tiny"), client.tokens("first")
    assert base != first
    for name, path in zip(("second", "third"), paths[1:], strict=False):
        reply = client.load(name, path)
        assert reply.status_code == 200
        assert "added successfully" in reply.text
    assert client.names() == {"tiny": None, "first": "tiny", "second": "tiny", "third": "tiny"}
    models = ["first", "second", "third", "tiny"]
    alone = {name: client.tokens(name, max_tokens=40) for name in models}
    assert len({tuple(tokens) for tokens in alone.values()}) == 4
    with ThreadPoolExecutor(8) as threads:
        asked = [(name, threads.submit(client.tokens, name, max_tokens=40)) for name in models * 2]
        assert all(answer.result() == alone[name] for name, answer in asked)
        long = client.tokens("second", **LONG)
        fragile.close_gate()
        last = [threads.submit(client.tokens, "second", **LONG) for _ in range(3)]
        until(lambda: client.get("/load").json()["server_load"] == 3)
        assert client.unload("second").status_code == 200
        assert client.names() == {"tiny": None, "first": "tiny", "third": "tiny"}
        fragile.open_gate()
        refused = client.complete("second")
        assert refused.status_code == 404
        assert "'tiny', 'first', 'third'" in refused.json()["error"]["message"]
        assert client.load("second", paths[3]).status_code == 200
        other = client.tokens("second", max_tokens=40)
        assert other not in alone.values()
        assert all(answer.result() == long for answer in last)
    assert client.load("second", paths[1], load_inplace=True).status_code == 200
    assert client.tokens("second", max_tokens=40) == alone["second"]
    chat = client.post(
        "/v1/messages",
        json={"model": "second", "max_tokens": 3, "messages": [{"role": "user", "content": "a"}]},
    )
    assert chat.status_code == 200
    assert chat.json()["model"] == "second"


@pytest.mark.slow
def test_a_crash_of_the_engine_loses_no_adapter(client, paths, fragile):
    """Requests under way go on with their adapters, also one that is being unloaded."""
    assert client.load("third", paths[2], load_inplace=True).status_code == 200
    expected = {name: client.tokens(name, **LONG) for name in ("first", "third")}
    fragile.close_gate()
    with ThreadPoolExecutor(2) as threads:
        asked = {name: threads.submit(client.tokens, name, **LONG) for name in expected}
        until(lambda: client.get("/load").json()["server_load"] == 2)
        client.unload("third")
        os.kill(client.server.engine_pid(), signal.SIGKILL)
        fragile.open_gate()
        assert {name: answer.result() for name, answer in asked.items()} == expected
    assert "third" not in client.names()
    assert client.complete("third").status_code == 404


def test_a_prompt_is_retained_for_each_adapter(client):
    """Their pages differ, so that one does not end what another holds."""
    asked = {
        "prompt": "spring tides and neap tides " * 4,
        "prompt_cache_retention": "24h",
        "max_tokens": 1,
    }
    held = []
    for name in ("tiny", "first", "tiny"):
        client.tokens(name, **asked)
        text = client.get("/metrics").text
        held.append(
            next(
                float(line.split()[1])
                for line in text.splitlines()
                if line.startswith("tidemill_kv_pages_held ")
            )
        )
    assert held[0] > 0
    assert held[1:] == [2 * held[0]] * 2


def test_a_prompt_cache_of_an_adapter_is_not_pinned_any_longer_when_it_is_unloaded(client, paths):
    """The name stays, and the next adapter of this name has it pinned again."""
    assert client.load("pinning", paths[2]).status_code == 200
    body = {"name": "manual", "model": "pinning", "prompt": "spring tides and neap tides " * 4}
    made = client.post("/v1/prompt_caches", json=body)
    assert made.json()["pinned_tokens"] > 0, made.text
    assert client.unload("pinning").status_code == 200
    until(lambda: client.get("/v1/prompt_caches/manual").json()["pinned_tokens"] == 0)
    until(lambda: "tidemill_kv_pages_pinned 0" in client.get("/metrics").text)
    assert client.complete("pinning", prompt="and", prompt_cache="manual").status_code == 404
    assert client.load("pinning", paths[3]).status_code == 200
    client.tokens("pinning", prompt="and", prompt_cache="manual")
    until(lambda: client.get("/v1/prompt_caches/manual").json()["pinned_tokens"] > 0)
    assert (
        client.delete("/v1/prompt_caches/manual").status_code
        == client.unload("pinning").status_code
        == 200
    )


def test_a_request_that_waits_for_its_adapter_does_not_pin_what_was_deleted_meanwhile(
    client, paths, fragile
):
    """Nobody could unpin it: the name is gone, or is that of another prompt cache."""
    for name, path in zip(("one", "other", "pinning"), paths, strict=False):
        assert client.load(name, path).status_code == 200
    body = {"name": "manual", "model": "pinning", "prompt": "spring tides and neap tides " * 4}
    assert client.post("/v1/prompt_caches", json=body).json()["pinned_tokens"] > 0
    fragile.close_gate()
    with ThreadPoolExecutor(3) as threads:
        # they have both slots
        busy = [threads.submit(client.tokens, name, **LONG) for name in ("one", "other")]
        until(lambda: client.get("/load").json()["server_load"] == 2)
        late = threads.submit(client.tokens, "pinning", prompt="and", prompt_cache="manual")
        until(lambda: client.get("/load").json()["server_load"] == 3)
        assert client.delete("/v1/prompt_caches/manual").status_code == 200
        fragile.open_gate()
        assert all(one.result() for one in (*busy, late))
    until(lambda: "tidemill_kv_pages_pinned 0" in client.get("/metrics").text)
    assert all(client.unload(name).status_code == 200 for name in ("one", "other", "pinning"))


def test_wrong_adapters_are_refused_and_others_go_on(client, paths, tmp_path):
    before = client.tokens("first")
    broken = tmp_path / "dora"
    broken.mkdir()
    for file in paths[0].iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    config = broken / "adapter_config.json"
    config.write_text(config.read_text().replace("{", '{"use_dora": true, ', 1))
    for reply, status, words in (
        (client.load("x", broken), 400, "DoRA"),
        (client.load("x", tmp_path / "nowhere"), 400, "adapter_config.json"),
        (client.load("first", paths[1]), 400, "loaded already"),
        (client.load("tiny", paths[1]), 400, "name of a model"),
        (client.load("x", paths[1], base_model_name="y"), 404, "no model 'y'"),
        (client.unload("x"), 404, "no adapter 'x'"),
        (client.post("/v1/load_lora_adapter", json={"lora_name": "x"}), 400, "lora_path"),
    ):
        assert reply.status_code == status, reply.text
        assert words in reply.json()["error"]["message"]
    with Client(str(client.base_url), KEY) as plain:
        assert plain.load("x", paths[1]).status_code == plain.unload("first").status_code == 403
        assert plain.complete("first").status_code == 200
    assert client.tokens("first") == before
