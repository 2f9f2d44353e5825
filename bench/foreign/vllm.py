"""vLLM: tests/entrypoints and tests/tool_use. Their RemoteOpenAIServer is ours; nothing of vLLM is
installed."""

from __future__ import annotations

import base64
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import tidemill
from bench.foreign.serving import (
    CHECKOUT,
    MODEL,
    Served,
    free_port,
    model_path,
    tokenizer_path,
    translated,
)
from bench.foreign.stubs import Modules, names_from

COMMIT = "a014e35f38c80fb0652387740193ad2147fed6a3"
REPOSITORY = "https://github.com/vllm-project/vllm"
FOLDER = "."
OPENAI, POOLING = "tests/entrypoints/openai", "tests/entrypoints/pooling"
FILES = {
    "tests/entrypoints/anthropic/test_messages.py": "smollm2",
    f"{POOLING}/token_embed/test_online.py": "small",
    "tests/entrypoints/serve/instrumentator/test_basic.py": "small",
    "tests/entrypoints/serve/instrumentator/test_uds.py": "small",
    "tests/entrypoints/serve/tokenize/test_tokenization.py": "small",
    "tests/tool_use/test_chat_completions.py": "smollm2",
    "tests/tool_use/test_tool_calls.py": "small",
    "tests/tool_use/test_parallel_tool_calls.py": "small",
    f"{OPENAI}/chat_completion/test_chat.py": "small",
    f"{OPENAI}/chat_completion/test_chat_completion.py": "small",
    f"{OPENAI}/chat_completion/test_chat_echo.py": "smollm2",
    f"{OPENAI}/chat_completion/test_batched_chat_completions.py": "small",
    f"{OPENAI}/chat_completion/test_chat_logit_bias_validation.py": "small",
    f"{OPENAI}/chat_completion/test_completion_with_function_calling.py": "smollm2",
    f"{OPENAI}/chat_completion/test_enable_force_include_usage.py": "small",
    f"{OPENAI}/chat_completion/test_include_reasoning.py": "thinks",
    f"{OPENAI}/chat_completion/test_logprob_token_ids.py": "small",
    f"{OPENAI}/chat_completion/test_root_path.py": "smollm2",
    f"{OPENAI}/completion/test_completion.py": "small",
    f"{OPENAI}/completion/test_prompt_validation.py": "small",
    f"{OPENAI}/completion/test_token_in_token_out.py": "small",
    f"{OPENAI}/models/test_models.py": "small",
    f"{OPENAI}/responses/test_simple.py": "thinks",
    f"{OPENAI}/responses/test_basic.py": "smollm2",
    f"{OPENAI}/responses/test_stateful.py": "smollm2",
    f"{OPENAI}/responses/test_function_call.py": "smollm2",
    f"{OPENAI}/responses/test_structured_output.py": "smollm2",
    f"{OPENAI}/test_async_tokenization.py": "small",
    f"{OPENAI}/test_chunked_prompt.py": "small",
    f"{OPENAI}/test_return_token_ids.py": "small",
    f"{OPENAI}/test_return_tokens_as_ids.py": "small",
    "tests/entrypoints/generate/generative_scoring/test_generative_scoring_e2e.py": "small",
    f"{POOLING}/basic/test_truncation.py": "small",
    f"{POOLING}/embed/test_online.py": "small",
    f"{POOLING}/embed/test_cohere_online.py": "small",
    f"{POOLING}/embed/test_cohere_openai_parity.py": "small",
    f"{POOLING}/embed/test_online_dimensions.py": "small",
    f"{POOLING}/scoring/test_bi_encoder_online.py": "small",
    f"{POOLING}/scoring/test_cross_encoder_online.py": "small",
}
LEFT_OUT = {
    "multimodal, speech_to_text, *_vision, *_vlm": "images and audio",
    "pooling/classify, token_classify, reward, late_interaction": "classifiers of texts and tokens, ColBERT: no such routes",
    "serve/lora, serve/sagemaker, scale_out, tensorizer, prompt_embeds, harmony, mcp": "models and files that are not here",
    "cohere/test_chat_v2": "Cohere's chat API is not offered",
    "the rest": "their Python classes",
}
_CLASSES, _TEXT, _TOOLS = (
    "their Python classes",
    "the text that their model writes",
    "needs a model that calls tools",
)
NOT_APPLICABLE = {
    r"chat_completion_request_|completion_request_|(chat|completion)_request_decouples|requests_reject_": _CLASSES,
    r"rejects_explicit_token_ids_without": _CLASSES,
    r"tool_use/test_(parallel_)?tool_calls|test_chat_completion_with_tool_use": _TOOLS,
    r"streaming_expected_arguments|function_tool_use\[.*auto|test_named_tool_use|function_calling_with_streaming_types": _TOOLS,
    r"test_background$|test_previous_response_id|same_prev_id": _TEXT,
    r"responses/test_basic.py::test_(simple_input|instructions|chat)$": _TEXT,
    r"streaming_forced_tool_choice|function_tool_use\[True-": "needs a model that ends its reasoning",
    r"embed/test_online.py::test_chat_request": "their tokenizer: numbers of tokens",
    r"test_structured_outputs_choice_chat": _TEXT,
    r"test_complex_message_content|cross_encoder_online.py::test_(basic|rerank_api_texts|rerank_api_top_n)$": _TEXT,
    r"response_format_json_schema|responses/test_structured_output": _TEXT,
    r"outputs_json_chat|response_format_json_object": "needs a model that ends its answer",
    r"test_chat_completion_with_emoji_and_token_ids": "needs a model that ends its answer",
    r"responses/test_simple.py::test_max_tokens": "needs a model that thinks for longer",
    r"(?i)snowflake|model_info1": "needs a model with their Matryoshka settings",
    r"test_single_chat_session|test_single_completion|more_than_one_prompt_logprobs_chat": "their tokenizer: numbers of tokens",
    r"test_parallel_(no_)?streaming": "needs a model whose answers end by themselves",
    r"test_load_prompt_embeds|test_disable_prompt_embeds": _CLASSES,
    r"test_anthropic_tool_call": _TOOLS,
    r"test_health_check_engine_dead_error|test_responses_api_logprobs_with_return": _CLASSES,
    r"test_request_cancellation": "needs a model with a longer context",
    r"models/test_models": "adapters that they download",
    r"test_chat_logit_bias_(valid|invalid)$": "reads the vocabulary with their Python classes",
    r"start_vs_end_differ": "needs an embedding model: a random one tells no two long texts apart",
}
_FINISH = "the finish reason comes in a chunk of its own, as OpenAI's"
BY_DESIGN = {
    r"test_chat_streaming|force_include_usage|chat_completion_stream_options_and_logprobs": _FINISH,
    r"test_completion_stream_options|test_chat_completion_stream_options": "stream_options without stream is accepted",
    r"chat_echo.py::test_(prompt|top)_logprobs": "log-probabilities of the whole vocabulary",
    r"extra_fields_allowed": "an unknown field is refused by name",
    r"kv_transfer_prompt_token_ids": "kv_transfer_params is refused",
    r"matryoshka\[model_info0": "dimensions of any embedding model are accepted",
    r"test_pooling_not_supported\[token_classify": "the words of an error",
    r"test_detokenize": "/detokenize has more fields, for other clients",
    r"test_tokenize_chat_with_tools": "tools are described to a model whose template knows none",
    r"test_empty_prompt": "the words of an error",
    r"test_anthropic_streaming_cache_usage": "usage has no cache_creation_input_tokens",
}
PARTS = {
    "ms-marco": "cross", "reranker": "cross", "bge-base": "bert768", "e5-small": "bert384", "minilm": "bert384",
    "mixtral": "small", "tiny-random": "small",
}  # fmt: skip
ABSENT = ("colbert", "-vl", "siglip", "colpali", "gpt-oss", "reward")
TAKEN = {
    "--dtype": 1, "--gpu-memory-utilization": 1, "--load-format": 1, "--tokenizer-mode": 1, "--quantization": 1,
    "--enable-lora": 0, "--max-lora-rank": 1, "--max-cpu-loras": 1, "--max-loras": 1, "--lora-modules": -1, "--port": 1,
    "--host": 1,
    "--served-model-name": -1, "--max-model-len": 1, "--uds": 1, "--hf-overrides": 1, "--trust-remote-code": 0,
}  # fmt: skip
LONGEST = 8192
TIMEOUT_S = 600


def local(name: str) -> str:
    """The model that stands for theirs."""
    low = name.lower()
    if any(part in low for part in ABSENT):
        pytest.skip(f"needs a model that is not here: {name}")
    return model_path(next((ours for part, ours in PARTS.items() if part in low), MODEL))


class RemoteOpenAIServer:
    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self, model: str, vllm_serve_args: Sequence[str], *, seed: int | None = 0, **more: Any
    ) -> None:
        flags, taken = translated(vllm_serve_args, TAKEN)
        names = taken.get("--served-model-name", [model])
        # the adapters' names are the model's here: what is tested is the API
        if "--enable-lora" in taken:
            names += ["zephyr-lora", "zephyr-lora2"]
        if "--max-model-len" in taken:
            length = taken["--max-model-len"][0]
            flags += [
                "--max-model-len",
                str(min(int(length), LONGEST)) if length.isdigit() else length,
            ]
        if taken.get("--uds"):
            flags += ["--uds", taken["--uds"][0]]
        if seed is not None:
            flags += ["--seed", str(seed)]
        self.host, self.uds = "127.0.0.1", taken.get("--uds", [""])[0]
        self.port = int(taken["--port"][0]) if "--port" in taken else free_port()
        env = dict(more.get("env_dict") or {})
        if key := env.pop("VLLM_API_KEY", ""):
            flags += ["--api-key", key]
        self._served = Served(
            local(model), ["--served-model-name", *names, *flags], self.port, self.uds, env
        )
        self.proc = self._served.process

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._served.stop()

    @property
    def url_root(self) -> str:
        return "http://localhost" if self.uds else f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "/".join([self.url_root, *(part.lstrip("/") for part in parts)])

    def _options(self, given: dict[str, Any]) -> dict[str, Any]:
        return {"api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": TIMEOUT_S} | given

    def get_client(self, **given: Any) -> Any:
        import openai

        return openai.OpenAI(base_url=self.url_for("v1"), **self._options(given))

    def get_async_client(self, **given: Any) -> Any:
        import openai

        return openai.AsyncOpenAI(base_url=self.url_for("v1"), **self._options(given))

    def get_client_anthropic(self, **given: Any) -> Any:
        import anthropic

        return anthropic.Anthropic(base_url=self.url_for(), **self._options(given))

    def get_async_client_anthropic(self, **given: Any) -> Any:
        import anthropic

        return anthropic.AsyncAnthropic(base_url=self.url_for(), **self._options(given))


class HfRunner:
    """What Transformers computes of the model that stands for theirs."""

    def __init__(self, name: str, **_: Any) -> None:
        self._path = local(name)

    def __enter__(self) -> HfRunner:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def encode(self, prompts: Sequence[str], **_: Any) -> list[Any]:
        import torch
        from transformers import AutoModel

        model = AutoModel.from_pretrained(self._path).eval()
        with torch.no_grad():
            states = [
                model(**get_tokenizer(self._path)(text, return_tensors="pt")).last_hidden_state[0]
                for text in prompts
            ]
        return [torch.nn.functional.normalize(state.mean(0), dim=0).numpy() for state in states]

    def predict(self, prompts: Sequence[tuple[str, str]], **_: Any) -> Any:
        import torch
        from transformers import AutoModelForSequenceClassification

        model = AutoModelForSequenceClassification.from_pretrained(self._path).eval()
        with torch.no_grad():
            logits = [
                model(**get_tokenizer(self._path)(*pair, return_tensors="pt")).logits[0, 0]
                for pair in prompts
            ]
        return torch.sigmoid(torch.stack(logits))


def get_tokenizer(name: str = "", *_: Any, **__: Any) -> Any:
    from transformers import AutoTokenizer

    path = name if name and Path(name).is_dir() else local(name)
    return AutoTokenizer.from_pretrained(path if Path(path).is_dir() else tokenizer_path())


class _Platform:
    def __getattr__(self, name: str) -> Any:
        return (lambda *_, **__: False) if name.startswith("is_") else None


class _Unset:
    """Their environment variables: none is set."""

    def __getattr__(self, name: str) -> bool:
        return False


def _unmarked(*_: Any, **__: Any) -> Any:
    return lambda test: test


@pytest.fixture(scope="session")
def hf_runner() -> type[HfRunner]:
    return HfRunner


def install() -> None:
    import torch
    import torch.nn.functional as functional

    sys.modules.setdefault("pybase64", base64)
    tests = CHECKOUT / "tests"
    utils: dict[str, Any] = dict.fromkeys(
        ("RemoteOpenAIServer", "RemoteOpenAIServerCustom", "RemoteVLLMServer"), RemoteOpenAIServer
    )
    marks = dict.fromkeys(
        ("multi_gpu_only", "multi_gpu_test", "requires_fp8", "large_gpu_test"), _unmarked
    )
    known = {
        "torch": torch,
        "F": functional,
        "dataclass": dataclasses.dataclass,
        "Any": Any,
        "warnings": __import__("warnings"),
    }
    checks = names_from(
        tests / "models" / "utils.py",
        r"check_embeddings_close|matryoshka_fy|softmax|\w*ModelInfo",
        **known,
    )
    given: dict[str, dict[str, Any]] = {
        "tests.utils": {
            **utils,
            **marks,
            "VLLM_PATH": CHECKOUT,
            "ROCM_EXTRA_ARGS": [],
            "ROCM_ENV_OVERRIDES": {},
        },
        "tests.conftest": {
            "HfRunner": HfRunner,
            "hf_runner": hf_runner,
            "__file__": str(tests / "conftest.py"),
        },
        "tests.models.utils": checks,
        "vllm": {"envs": _Unset()},
        "vllm.platforms": {"current_platform": _Platform()},
        "vllm.tokenizers": {"get_tokenizer": get_tokenizer},
        "vllm.model_executor.model_loader.weight_utils": {
            "download_weights_from_hf": lambda name, *_, **__: name
        },
        "vllm.version": {"__version__": tidemill.__version__},
    }
    read = {
        "vllm.utils.serial_utils": CHECKOUT / "vllm" / "utils" / "serial_utils.py",
        "vllm.entrypoints.pooling.utils": CHECKOUT
        / "vllm"
        / "entrypoints"
        / "pooling"
        / "utils.py",
    }
    Modules("vllm", given, read).install()


def prepare(item: pytest.Item) -> None:
    module = getattr(item, "module", None)
    if getattr(module, "input_tokens", None) and getattr(module, "input_text", None):
        module.input_tokens = get_tokenizer(module.MODEL_NAME)(module.input_text)["input_ids"]  # type: ignore[union-attr]


def finish() -> None:
    pass
