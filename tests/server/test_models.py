"""Several models on one server: chosen by name, loaded together or swapped within a memory budget,
and none disturbs another."""

import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from typer.testing import CliRunner

from tests.fragile import GATED, Fragile
from tests.helpers import LONG_S, byte_tokenizer, make_llama
from tests.server.conftest import Server
from tests.waiting import until
from tidemill import LLM
from tidemill.cli.main import app
from tidemill.errors import ConfigError
from tidemill.types.sampling import SamplingParams

MESSAGES = {"messages": [{"role": "user", "content": "x"}]}
ONE_AT_A_TIME = ("--kv-memory", "4M", "--memory-budget", "8M")  # each needs about 6 MiB


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models that answer differently, by name."""
    made = {}
    for seed, name in enumerate(("ebb", "flow")):
        made[name] = tmp_path_factory.mktemp(name)
        make_llama(made[name], seed=seed, vocab_size=320, max_position_embeddings=512)
        byte_tokenizer(made[name])
    return made


def named(folders) -> list[str]:
    return [f"{name}={folder}" for name, folder in folders.items()]


def body_of(model: str, number: int, **more: object) -> dict:
    body = {
        "model": model,
        "prompt": f"number {number}",
        "max_tokens": 24,
        "ignore_eos": True,
        "seed": number,
    }
    return body | {"temperature": number % 2} | more


def ask(server: Server, model: str, number: int, **more: object) -> str:
    reply = httpx.post(f"{server.url}/v1/completions", json=body_of(model, number, **more))
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == model
    return reply.json()["choices"][0]["text"]


@pytest.fixture(scope="module")
def expected(folders):
    """Each model's texts when it is alone: by model and number."""
    texts = {}
    for name, folder in folders.items():
        llm = LLM(str(folder), kv_memory_bytes=2**22, threads=1)
        params = [
            SamplingParams(max_tokens=24, ignore_eos=True, seed=i, temperature=i % 2)
            for i in range(12)
        ]
        for i, output in enumerate(llm.generate([f"number {i}" for i in range(12)], params)):
            texts[name, i] = output.outputs[0].text
    assert texts["ebb", 0] != texts["flow", 0]
    return texts


class Census:
    """Counts engine processes all the time."""

    def __init__(self, server: Server) -> None:
        self.most = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._count, args=[server])

    def _count(self, server: Server) -> None:
        while not self._over.wait(0.005):
            self.most = max(self.most, len(server.engine_pids()))

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()


def test_swapping_under_load_loses_nothing_and_stays_within_the_budget(folders, expected):
    server = Server(None, *named(folders), *ONE_AT_A_TIME).wait()
    with Census(server) as census, ThreadPoolExecutor(24) as threads:
        answers = {
            (name, i): threads.submit(ask, server, name, i) for i in range(4) for name in folders
        }
        got = {key: answer.result(LONG_S) for key, answer in answers.items()}
        assert got == {key: expected[key] for key in answers}
        # A model that is never without requests does not keep the other from being loaded.
        over = threading.Event()

        def keep_busy(number: int) -> None:
            while not over.is_set():
                assert ask(server, "ebb", number) == expected["ebb", number]

        busy = [threads.submit(keep_busy, i) for i in range(3)]
        until(lambda: server.gauge("requests_submitted_total", "ebb") > 12)
        assert ask(server, "flow", 1) == expected["flow", 1]
        over.set()
        for one in busy:
            one.result(LONG_S)
    assert census.most == 1
    for name in folders:
        loads, unloads = (
            server.gauge(f"model_{what}_total", name) for what in ("loads", "unloads")
        )
        assert loads - unloads == server.gauge("model_loaded", name)
        assert loads >= 2
        until(
            lambda name=name: (
                server.gauge("requests_running", name)
                == server.gauge("requests_waiting", name)
                == 0
            )
        )
        assert server.gauge("engine_restarts_total", name) == 0
    # A model that cannot be loaded any more fails alone.
    assert ask(server, "ebb", 1) == expected["ebb", 1]
    away = folders["flow"].rename(folders["flow"].with_name("away"))
    failed = httpx.post(f"{server.url}/v1/completions", json=body_of("flow", 1))
    away.rename(folders["flow"])
    assert failed.status_code == 503
    assert "'flow' cannot be loaded" in failed.json()["error"]["message"]
    assert httpx.get(f"{server.url}/health").json()["models"]["flow"] == "failed"
    assert server.gauge("requests_waiting", "flow") == 0
    assert ask(server, "ebb", 2) == expected["ebb", 2]
    assert server.stop() == 0


def test_a_request_that_waits_for_its_model_can_be_cancelled_and_is_answered_while_the_server_stops(
    folders, expected, tmp_path, monkeypatch
):
    fragile = Fragile(tmp_path, monkeypatch)
    server = Server(
        None,
        *named(folders),
        *ONE_AT_A_TIME,
        "--drain-seconds",
        str(LONG_S),
        "--stall-seconds",
        str(LONG_S),
    ).wait()
    gated = {
        "model": "ebb",
        "prompt": [GATED, 5],
        "max_tokens": 100,
        "ignore_eos": True,
        "stream": True,
    }
    with (
        httpx.stream("POST", f"{server.url}/v1/completions", json=gated) as busy,
        ThreadPoolExecutor(3) as threads,
    ):
        lines = busy.iter_lines()
        next(lines)
        late = httpx.post(f"{server.url}/v1/completions", json=body_of("flow", 1, timeout=0.1))
        assert late.status_code == 408
        # no model is swapped for it
        for wrong in ({"prompt": [9999]}, {"prompt": [5] * 512}, {"max_tokens": 9999}):
            for stream in (False, True):
                asked = body_of("flow", 1, stream=stream) | wrong
                assert httpx.post(f"{server.url}/v1/completions", json=asked).status_code == 400
        for path, more in (("completions", {"prompt": "x"}), ("chat/completions", MESSAGES), ("responses", {"input": "x"}),
                           ("messages", MESSAGES | {"max_tokens": 9})):  # fmt: skip
            asked = {"model": "flow", "stream": True} | more
            with httpx.stream("POST", f"{server.url}/v1/{path}", json=asked) as early:
                assert early.status_code == 200  # though there is no model yet
        headers = {"x-request-id": "waiting"}
        waiting = threads.submit(
            httpx.post, f"{server.url}/v1/completions", json=body_of("flow", 1), headers=headers
        )
        until(lambda: httpx.get(f"{server.url}/v1/requests/waiting/explain").status_code == 200)
        explained = httpx.get(f"{server.url}/v1/requests/waiting/explain").json()["data"][0]
        assert explained["status"] == "under way"
        until(
            lambda: (
                httpx.get(f"{server.url}/health").json()["models"]
                == {"ebb": "held", "flow": "unloaded"}
            )
        )
        assert httpx.delete(f"{server.url}/v1/requests/waiting").json()["cancelled"]
        assert waiting.result(LONG_S).status_code == 499
        until(lambda: httpx.get(f"{server.url}/health").json()["models"]["ebb"] == "loaded")
        last = threads.submit(ask, server, "flow", 2)
        until(lambda: httpx.get(f"{server.url}/health").json()["models"]["ebb"] == "held")
        after = threads.submit(ask, server, "ebb", 3)  # it must not go before the other
        until(lambda: server.gauge("requests_waiting", "ebb") == 1)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        fragile.open_gate()
        assert "[DONE]" in "".join(lines)
        assert last.result(LONG_S) == expected["flow", 2]
        assert after.result(LONG_S) == expected["ebb", 3]
    assert server.process.wait(LONG_S) == 0


@pytest.fixture(scope="module")
def both(folders, tmp_path_factory):
    """Two models that are loaded together, from a config file."""
    file = tmp_path_factory.mktemp("config") / "tidemill.toml"
    tables = "\n".join(
        f"[[models]]\nname = {json.dumps(name)}\nmodel = {json.dumps(str(folder))}\naliases = [{json.dumps(name[0])}]\n"
        for name, folder in folders.items()
    )
    file.write_text(f'threads = 1\nkv-memory = "4M"\n{tables}max-context = 256\n')
    running = Server(None, "--config", str(file)).wait()
    yield running
    assert running.stop() == 0


def test_the_model_is_chosen_by_name_or_alias_and_an_unknown_name_lists_the_known_ones(
    both, expected
):
    assert len(both.engine_pids()) == 2
    assert ask(both, "flow", 3) == expected["flow", 3]
    aliased = httpx.post(f"{both.url}/v1/completions", json=body_of("f", 3)).json()
    assert (aliased["model"], aliased["choices"][0]["text"]) == ("flow", expected["flow", 3])
    default = body_of("", 3)
    del default["model"]
    assert httpx.post(f"{both.url}/v1/completions", json=default).json()["model"] == "ebb"
    for path, more in (
        ("chat/completions", {}),
        ("messages", {"max_tokens": 3}),
        ("responses", {"input": "x"}),
    ):
        body = {"model": "neap", "messages": [{"role": "user", "content": "x"}]} | more
        body = {
            name: value for name, value in body.items() if name != "messages" or "input" not in more
        }
        refused = httpx.post(f"{both.url}/v1/{path}", json=body)
        assert refused.status_code == 404
        assert "'ebb'" in refused.json()["error"]["message"]
        assert "'flow'" in refused.json()["error"]["message"]


def test_models_are_listed_with_their_aliases_and_states(both):
    cards = httpx.get(f"{both.url}/v1/models").json()["data"]
    assert [
        (card["id"], card["aliases"], card["state"], card["max_model_len"]) for card in cards
    ] == [
        ("ebb", ["e"], "loaded", 512),
        ("flow", ["f"], "loaded", 256),  # as in its own table
    ]
    assert httpx.get(f"{both.url}/v1/models/f").json() == cards[1]
    assert httpx.get(f"{both.url}/v1/models/neap").status_code == 404
    assert httpx.get(f"{both.url}/health").json() == {
        "status": "ok",
        "models": {"ebb": "loaded", "flow": "loaded"},
    }


def test_the_live_view_is_of_one_model(both):
    for query, model in (("", "ebb"), ("?model=flow", "flow")):
        with httpx.stream("GET", f"{both.url}/v1/engine/live{query}") as reply:
            events = (
                json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: ")
            )
            assert next(events)["model"] == model
            assert next(events)["models"] == {"ebb": "loaded", "flow": "loaded"}
    assert httpx.get(f"{both.url}/v1/engine/live?model=neap").status_code == 404


def test_a_killed_engine_does_not_touch_the_other(both, expected):
    first, second = both.engine_pids()
    with ThreadPoolExecutor(2) as threads:
        answers = [threads.submit(ask, both, name, 5) for name in ("ebb", "flow")]
        os.kill(first, signal.SIGKILL)
        assert ask(both, "flow", 4) == expected["flow", 4]
        assert [answer.result(LONG_S) for answer in answers] == [
            expected["ebb", 5],
            expected["flow", 5],
        ]
    until(lambda: both.gauge("engine_restarts_total", "ebb") == 1)
    assert both.gauge("engine_restarts_total", "flow") == 0
    assert second in both.engine_pids()


def test_a_model_without_requests_is_unloaded_and_loaded_again(folders, expected):
    server = Server(
        None, f"ebb={folders['ebb']}", "--idle-unload", "0.2", "--kv-memory", "4M"
    ).wait()
    until(lambda: httpx.get(f"{server.url}/v1/models/ebb").json()["state"] == "unloaded")
    assert not server.engine_pids()
    assert httpx.get(f"{server.url}/ready").json() == {"status": "ready"}
    assert ask(server, "ebb", 7) == expected["ebb", 7]
    assert server.gauge("model_loads_total") == 2
    assert server.stop() == 0


def test_models_that_can_never_be_served_are_refused_at_the_start(folders):
    server = Server(None, *named(folders), "--memory-budget", "1M")
    assert server.process.wait(LONG_S) == 1
    text = server.process.stdout.read()
    assert "ebb: The model needs" in text
    assert "it may use 1 MiB" in text
    for models, told in (
        ([f"x={folders['ebb']}", f"x={folders['flow']}"], "Two models are named 'x'"),
        ([*named(folders), "--served-name", "y"], "--served-name is for a single model"),
        ([f"={folders['ebb']}"], "NAME=MODEL"),
    ):
        # in this process: it does not come to start anything
        wrong = CliRunner().invoke(app, ["serve", *models])
        assert isinstance(wrong.exception, ConfigError)
        assert told in str(wrong.exception)
