"""A server under a mixed load, recorded: every dialect, several models, adapters, grammars,
samples, beams, KV policies, tiers, drafts, clients that leave, and engines that are killed.

    python -m bench.mixed_load FOLDER --requests 1000 [--kill 2] [--seed 0] [--smollm2 40]

FOLDER gets `models` (bench.tiny_models), `server.toml`, and `day`, the recording: `tidemill replay
FOLDER/day` computes it again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from bench.ports import reserved_port
from bench.tiny_models import make_all

WORDS = (
    "the",
    "tide",
    "turns",
    "the",
    "mill",
    "and",
    "the",
    "wheel",
    "grinds",
    "what",
    "the",
    "harbour",
    "brought",
    "at",
    "noon",
)
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "maximum": 99}},
          "required": ["name", "age"], "additionalProperties": False}  # fmt: skip
TOOL = {"name": "tide_at", "description": "The tide at a place.", "parameters": PERSON}
ADAPTERS = ("first", "second")
_READY_S = 300


class Load:
    """Requests of a seed, one after the other: which are next does not depend on answers."""

    def __init__(self, seed: int, num_smollm2: int, num: int) -> None:
        self._rng = random.Random(seed)
        self._shared = [" ".join(self._rng.choices(WORDS, k=60)) for _ in range(4)]
        self._large = set(self._rng.sample(range(num), min(num_smollm2, num)))

    def request(self, number: int) -> tuple[str, dict[str, Any], bool]:
        """The path, the body, and whether its client leaves early."""
        rng = self._rng
        model = (
            "smollm2"
            if number in self._large
            else rng.choice(["full", "full", "full", "window", "state"])
        )
        kinds: list[Callable[[str], tuple[str, dict[str, Any]]]] = [
            self._completion, self._completion, self._samples, self._structured, self._chat, self._chat, self._tools,
            self._messages, self._responses, self._gemini, self._ollama, self._llamacpp, self._sglang, self._policy,
            self._beams, self._adapter, self._embeddings, self._logprobs,
        ]  # fmt: skip
        path, body = rng.choice(kinds)(model)
        # streamed
        leaves = (
            rng.random() < 0.04
            and path in ("/v1/completions", "/v1/chat/completions")
            and "best_of" not in body
        )
        return path, body, leaves

    def _prompt(self) -> str:
        rng = self._rng
        begin = rng.choice(self._shared)[: rng.choice([0, 16, 50, 200])]
        return f"{begin} {' '.join(rng.choices(WORDS, k=rng.randint(1, 8)))}"

    def _sampling(self) -> dict[str, Any]:
        rng = self._rng
        return rng.choice([
            {"temperature": 0},
            {"temperature": 0.8, "seed": rng.randrange(2**31)},
            {"temperature": 1.0},
            {"temperature": 1.2, "top_p": 0.9, "presence_penalty": 0.4},
        ])  # fmt: skip

    def _most(self, model: str) -> int:
        return self._rng.choice([4, 8, 12] if model == "smollm2" else [6, 12, 24, 40])

    def _completion(self, model: str) -> tuple[str, dict[str, Any]]:
        more: dict[str, Any] = self._rng.choice(
            [
                {},
                {"stop": ["e", "a "]},
                {"logit_bias": {"70": 4}},
                {"top_k": 20},
                {"min_p": 0.05},
                {"stream": True},
            ]
        )
        body = {
            "model": model,
            "prompt": self._prompt(),
            "max_tokens": self._most(model),
            "ignore_eos": True,
        }
        return "/v1/completions", body | self._sampling() | more

    def _samples(self, model: str) -> tuple[str, dict[str, Any]]:
        body = {
            "model": model,
            "prompt": self._prompt(),
            "max_tokens": self._most(model),
            "n": 4,
            "temperature": 1.0,
        }
        return "/v1/completions", body

    def _logprobs(self, model: str) -> tuple[str, dict[str, Any]]:
        more: dict[str, Any] = self._rng.choice(
            [{"logprobs": 3}, {"logprobs": 1, "echo": True}, {"logprobs": 2, "stream": True}]
        )
        return "/v1/completions", {
            "model": model,
            "prompt": self._prompt(),
            "max_tokens": self._most(model),
        } | more

    def _structured(self, model: str) -> tuple[str, dict[str, Any]]:
        kind = self._rng.choice(["schema", "regex", "choice"])
        if kind == "schema":
            shape = {
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": PERSON, "strict": True},
            }
            return "/v1/chat/completions", self._chat_body(model) | {
                "response_format": shape,
                "max_tokens": 40,
            }
        grammar = (
            {"guided_regex": "[0-9]{2}:[0-5][0-9]"}
            if kind == "regex"
            else {"guided_choice": ["ebb", "flood", "slack"]}
        )
        return "/v1/completions", {
            "model": model,
            "prompt": self._prompt(),
            "max_tokens": 20,
            "temperature": 1.0,
        } | grammar

    def _chat_body(self, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "messages": [{"role": "user", "content": self._prompt()}],
            "max_tokens": self._most(model),
        }

    def _chat(self, model: str) -> tuple[str, dict[str, Any]]:
        more: dict[str, Any] = self._rng.choice(
            [
                {},
                {"stream": True},
                {"logprobs": True, "top_logprobs": 2},
                {"n": 2, "temperature": 1.0},
            ]
        )
        return "/v1/chat/completions", self._chat_body(model) | self._sampling() | more

    def _tools(self, model: str) -> tuple[str, dict[str, Any]]:
        tools = [{"type": "function", "function": TOOL}]
        return "/v1/chat/completions", self._chat_body(model) | {
            "tools": tools,
            "tool_choice": "required",
            "max_tokens": 60,
        }

    def _messages(self, model: str) -> tuple[str, dict[str, Any]]:
        return "/v1/messages", self._chat_body(model) | {
            "temperature": 1.0,
            "stream": self._rng.random() < 0.5,
        }

    def _responses(self, model: str) -> tuple[str, dict[str, Any]]:
        body = {
            "model": model,
            "input": self._prompt(),
            "max_output_tokens": max(self._most(model), 16),
        }
        return "/v1/responses", body | {"stream": self._rng.random() < 0.5}

    def _gemini(self, model: str) -> tuple[str, dict[str, Any]]:
        config = {
            "maxOutputTokens": self._most(model),
            "temperature": 0.9,
            "seed": self._rng.randrange(2**31),
        }
        body = {
            "contents": [{"role": "user", "parts": [{"text": self._prompt()}]}],
            "generationConfig": config,
        }
        return f"/v1beta/models/{model}:generateContent", body

    def _ollama(self, model: str) -> tuple[str, dict[str, Any]]:
        options = {"num_predict": self._most(model), "temperature": 0.8, "repeat_penalty": 1.2}
        if self._rng.random() < 0.5:
            return "/api/generate", {
                "model": model,
                "prompt": self._prompt(),
                "options": options,
                "stream": False,
            }
        body = {
            "model": model,
            "messages": [{"role": "user", "content": self._prompt()}],
            "options": options,
        }
        return "/api/chat", body

    def _llamacpp(self, model: str) -> tuple[str, dict[str, Any]]:
        body = {
            "model": model,
            "prompt": self._prompt(),
            "n_predict": self._most(model),
            "temperature": 0.8,
            "n_probs": 2,
        }
        return "/completion", body | {"stream": self._rng.random() < 0.5}

    def _sglang(self, model: str) -> tuple[str, dict[str, Any]]:
        params = {
            "max_new_tokens": self._most(model),
            "temperature": 0.8,
            "n": self._rng.choice([1, 2]),
        }
        return "/generate", {"model": model, "text": self._prompt(), "sampling_params": params}

    def _policy(self, model: str) -> tuple[str, dict[str, Any]]:
        policies = (
            {"kind": "streaming", "sinks": 4, "recent": 32},
            {"kind": "h2o", "budget": 64},
            {"kind": "snapkv", "budget": 64},
        )
        policy = self._rng.choice(policies)
        body = {
            "model": "full",
            "prompt": f"{self._shared[0]} {self._prompt()}",
            "max_tokens": 24,
            "kv_policy": policy,
        }
        return "/v1/completions", body

    def _beams(self, model: str) -> tuple[str, dict[str, Any]]:
        body = {
            "model": "full",
            "prompt": self._prompt(),
            "max_tokens": 12,
            "use_beam_search": True,
            "n": 2,
            "best_of": 3,
        }
        return "/v1/completions", body | {"temperature": 0}

    def _adapter(self, model: str) -> tuple[str, dict[str, Any]]:
        body = {"model": self._rng.choice(ADAPTERS), "prompt": self._prompt(), "max_tokens": 20}
        return "/v1/completions", body | self._sampling()

    def _embeddings(self, model: str) -> tuple[str, dict[str, Any]]:
        return "/v1/embeddings", {"model": "full", "input": [self._prompt(), self._prompt()]}


def write_config(folder: Path, record_bytes: str, has_smollm2: bool, wide: bool) -> Path:
    models = folder / "models"
    make_all(models, wide)
    scale = 8 if wide else 1
    adapters = [f"{name}={models / name}" for name in ADAPTERS]
    tables = [
        (
            "full",
            models / "full",
            f'kv-memory = "{scale}M"\nkv-host-memory = "{4 * scale}M"\nlora = {adapters}\n',
        ),
        ("window", models / "window", f'kv-memory = "{2 * scale}M"\n'),
        ("state", models / "state", f'kv-memory = "{8 * scale}M"\n'),
        ("smollm2", "smollm2", 'kv-memory = "200M"\n'),
    ]
    text = f'record = "{folder / "day"}:{record_bytes}"\nthreads = 1\nmax-context = 1024\nmax-requests = 16\ntoken-budget = 128\n'
    for name, model, more in tables if has_smollm2 else tables[:-1]:
        text += f'\n[[models]]\nname = "{name}"\nmodel = "{model}"\n{more}'
    path = folder / "server.toml"
    path.write_text(text)
    return path


def engines_of(pid: int) -> list[int]:
    """Processes of engines that a server has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            child = int(path.parent.name)
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"tidemill.engine" in (path.parent / "cmdline").read_bytes():
                found.append(child)
    return sorted(found)


def send(client: httpx.Client, path: str, body: dict[str, Any], leaves: bool) -> tuple[int, str]:
    if leaves:
        with client.stream("POST", path, json=body | {"stream": True, "max_tokens": 400}) as reply:
            for _ in zip(range(3), reply.iter_lines(), strict=False):
                pass
            return reply.status_code, ""
    reply = client.post(path, json=body)
    return reply.status_code, reply.text


def run(
    url: str, pid: int, load: Load, num: int, num_kills: int, seed: int, num_threads: int = 8
) -> Counter[str]:
    """Sends the load. Returns how many requests had each status, by path."""
    requests = [load.request(number) for number in range(num)]
    kills, done, statuses, lock = (
        [num * (1 + i) // (num_kills + 1) for i in range(num_kills)],
        0,
        Counter[str](),
        threading.Lock(),
    )
    rng = random.Random(seed)
    with httpx.Client(base_url=url, timeout=None) as client:

        def one(request: tuple[str, dict[str, Any], bool]) -> None:
            nonlocal done
            path, body, leaves = request
            status, text = send(client, path, body, leaves)
            with lock:
                done += 1
                statuses[f"{path} {status}"] += 1
                if status >= 300:
                    print(path, status, json.dumps(body)[-300:], text[:300], file=sys.stderr)
                if kills and done >= kills[0]:
                    kills.pop(0)
                    os.kill(rng.choice(engines_of(pid)), signal.SIGKILL)

        with ThreadPoolExecutor(num_threads) as threads:
            list(threads.map(one, requests))
    return statuses


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--kill", type=int, default=2, help="engines that are killed on the way")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smollm2", type=int, default=40, help="requests for the packaged model")
    parser.add_argument(
        "--wide", action="store_true", help="models with the sizes of a GPU's kernels"
    )
    parser.add_argument("--size", default="100MB", help="most that the recording may take")
    given = parser.parse_args()
    folder: Path = given.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    config = write_config(folder, given.size, given.smollm2 > 0, given.wide)
    with reserved_port() as port:
        command = [
            sys.executable,
            "-m",
            "tidemill",
            "serve",
            "--config",
            str(config),
            "--port",
            str(port),
            "--no-request-log",
        ]
        server = subprocess.Popen([*command, "--data-dir", str(folder / "data")])
        url, until_s = f"http://127.0.0.1:{port}", time.monotonic() + _READY_S
        while True:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            if server.poll() is not None or time.monotonic() > until_s:
                sys.exit("the server did not start")
            time.sleep(0.2)
        began = time.monotonic()
        statuses = run(
            url,
            server.pid,
            Load(given.seed, given.smollm2, given.requests),
            given.requests,
            given.kill,
            given.seed,
        )
        server.send_signal(signal.SIGINT)
        code = server.wait()
    for name, count in sorted(statuses.items()):
        print(f"{count:6,}  {name}")
    num_bytes = sum(path.stat().st_size for path in (folder / "day").iterdir())
    print(
        f"{given.requests:,} requests in {time.monotonic() - began:.0f} s; the recording has {num_bytes:,} bytes; exit {code}"
    )
    if code or any(not name.endswith(" 200") for name in statuses):
        sys.exit(1)


if __name__ == "__main__":
    main()
