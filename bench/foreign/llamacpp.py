"""llama.cpp: tools/server/tests. Their ServerProcess starts our server; servers with the same flags
are kept between tests."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from typing import Any

import pytest
import requests

from bench.foreign.serving import MODEL, Served, model_path, translated
from bench.foreign.stubs import AnyCount

COMMIT = "b21e4de74567f5eef213765c9476a843c2e43f0d"
REPOSITORY = "https://github.com/ggml-org/llama.cpp"
FOLDER = "tools/server/tests"
FILES = {
    "unit/test_completion.py": "small",
    "unit/test_chat_completion.py": "small",
    "unit/test_compat_anthropic.py": "small",
    "unit/test_compat_oai_responses.py": "small",
    "unit/test_embedding.py": "small",
    "unit/test_basic.py": "small",
    "unit/test_rerank.py": "small",
    "unit/test_tokenize.py": "small",
    "unit/test_infill.py": "small",
    "unit/test_ignore_eos.py": "small",
    "unit/test_ctx_shift.py": "small",
}
LEFT_OUT = {
    "test_vision_api, test_lora, test_speculative, test_tool_call, test_template": "images, and models that are not here",
    "test_router, test_stream, test_proxy, test_mcp_servers, test_tools_builtin, test_compat_gcp": "parts of llama-server itself",
    "test_security": "CORS and media files: the rules are others, see docs/reference/security.md",
    "test_slot_save, test_sleep, test_metrics, test_kv_keep_only_active": "slots on disk, idle models, names of metrics",
}
NOT_APPLICABLE = {
    r"test_cache_vs_nocache_prompt": "skipped by the suite itself",
    r"test_completion_response_fields": "their tokenizer: text of its <s>",
    r"test_chat_template$": "their tokenizer: text of its <s>",
    r"test_chat_completion_cached_tokens": "their tokenizer: an exact number of tokens",
    r"test_completion_prompt_cache": "their tokenizer: an exact number of tokens",
    r"test_nocache_long_input_prompt": "their tokenizer: a prompt longer than the context",
    r"test_tokenize_with_bos": "their tokenizer: it has a BOS",
    r"test_embedding_usage": "their tokenizer: an exact number of tokens",
    r"test_return_progress\[64-4": "their tokenizer: an exact number of batches",
    r"test_rerank$|test_rerank_tei_format|test_rerank_usage": "their reranker: its order, and numbers of tokens",
    r"ctx_shift_disabled_(short_prompt\[-1-|long_prompt)": "their tokenizer: an exact number of tokens",
    r"test_no_ui": "their page",
    r"vision_base64_with_multimodal": "images",
}
BY_DESIGN = {
    r"This is not a chat template": "a template that renders no message is refused",
    r"template_assistant_prefill|messages7": "a last assistant message is continued only if that is asked for",
    r"test_logprobs_stream": "the first chunk under /v1 has an empty content, as OpenAI's has",
    r"stream_with_llama_telemetry": "an answer cut by its limit ends with response.incomplete, as OpenAI's does",
    r"tool_result_with_image|vision_format_accepted": "an image to a text model is a 400, not a 500",
    r"test_anthropic_empty_messages": "a request without messages is refused, as Anthropic's API does",
    r"test_server_model_aliases_and_tags": "the first alias is the id, and there are no tags",
    r"test_ctx_shift_enabled": "the context is never shifted",
    r"test_server_props": "/props has the model's name, not its path",
}
NAMES = (
    "gpt-3.5-turbo-instruct,gpt-3.5-turbo,gpt-4.1,gpt-4,codellama70b,test,dummy,embedding,davinci-002,any,jina-reranker,"
    "text-embedding-3-small"
)  # that their tests ask for: llama-server ignores the name of the model
TAKEN = dict.fromkeys(
    (
        "--hf-repo",
        "--hf-file",
        "--port",
        "--host",
        "--alias",
        "--batch-size",
        "--ubatch-size",
        "--ctx-size",
    ),
    1,
)
TAKEN |= {"--jinja": 0, "--no-jinja": 0, "--verbose": 0, "--offline": 0, "--cont-batching": 0}
_kept: dict[tuple[str, ...], Served] = {}
MOST_KEPT = 3


class _Flags(Exception):
    pass


def _flags_of(server: Any, their_start: Any) -> list[str]:
    """What their start() would give to llama-server."""
    started = subprocess.Popen

    def give(command: list[str], **_: Any) -> None:
        raise _Flags(command[1:])

    os.environ.setdefault("LLAMA_SERVER_BIN_PATH", "llama-server")
    subprocess.Popen = give  # type: ignore[misc, assignment]
    try:
        their_start(server, 1)
    except _Flags as flags:
        return list(flags.args[0])
    finally:
        subprocess.Popen = started  # type: ignore[misc]
    raise AssertionError("their start() started nothing")


def _model_of(server: Any) -> str:
    theirs = f"{server.model_hf_repo}/{server.model_hf_file}"
    for part, ours in (
        ("bert", "bert"),
        ("DeepSeek-R1", "thinks"),
        ("jina", "cross"),
        ("infill", "infill"),
        ("Coder", "infill"),
    ):
        if part in theirs:
            return model_path(ours)
    return model_path(MODEL)


def _start(their_start: Any) -> Any:
    def start(self: Any, timeout_seconds: float = 0) -> None:
        flags, taken = translated(_flags_of(self, their_start), TAKEN)
        if "--ctx-size" in taken:  # theirs is shared by the slots
            shared = 1 if self.kv_unified else self.n_slots or 1
            flags += ["--ctx-size", str(int(taken["--ctx-size"][0]) // shared)]
        alias = self.model_alias or "tinyllama-2"
        names = alias if "," in alias else ",".join(dict.fromkeys([alias, *NAMES.split(",")]))
        key = (_model_of(self), "--alias", names, *flags)
        served = _kept.get(key)
        if served is None or served.process.poll() is not None:
            while len(_kept) >= MOST_KEPT:
                _kept.pop(next(iter(_kept))).stop()
            served = _kept[key] = Served(key[0], key[1:])
        else:
            headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
            requests.post(
                f"http://127.0.0.1:{served.port}/flush_cache", headers=headers, timeout=60
            )
        self.server_port = served.port

    return start


def _matches(theirs: Any) -> Any:
    """The words of their models are not compared; what a grammar makes is."""

    def match_regex(regex: str, text: str) -> bool:
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        made = any(word in test for word in ("grammar", "json_schema", "response_format"))
        return (
            bool(theirs(regex, text))
            if made and "John" not in regex and "-3000" not in regex
            else True
        )

    return match_regex


def _verbose(theirs: Any) -> Any:
    """What llama-server's --verbose adds to every answer is a field of the request here."""

    def make_request(
        self: Any, method: str, path: str, data: Any = None, headers: Any = None, **more: Any
    ) -> Any:
        if self.debug and isinstance(data, dict) and path.endswith("chat/completions"):
            data = data | {"verbose": True}
        return theirs(self, method, path, data, headers, **more)

    return make_request


def install() -> None:
    sys.modules.setdefault("wget", types.ModuleType("wget"))  # they download with it
    sys.path.insert(0, os.getcwd())
    import utils  # type: ignore[import-not-found]  # theirs

    server = utils.ServerProcess
    server.start = _start(server.start)
    server.stop = lambda self: None
    server.make_request = _verbose(server.make_request)
    utils.ServerPreset.load_all = staticmethod(lambda: None)  # downloads
    utils.match_regex = _matches(utils.match_regex)


def prepare(item: pytest.Item) -> None:
    params = getattr(getattr(item, "callspec", None), "params", {})
    if "n_prompt" in params:
        params["n_prompt"] = AnyCount(params["n_prompt"])


def finish() -> None:
    for served in _kept.values():
        served.stop()
