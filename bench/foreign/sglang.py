"""SGLang: test/registered and test/manual. Their popen_launch_server starts our server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import unittest
from collections.abc import Sequence
from typing import Any

import pytest

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

COMMIT = "cce0a1244b5a3ee60411fb403f65f856a1d012f0"
REPOSITORY = "https://github.com/sgl-project/sglang"
FOLDER = "."
FILES = {
    "test/registered/prefill_only/test_score_api.py": "small",
    "test/registered/core/test_srt_endpoint.py": "small",
    "test/registered/openai_server/basic/test_openai_server.py": "small",
    "test/registered/openai_server/validation/test_large_max_new_tokens.py": "small",
    "test/registered/openai_server/validation/test_matched_stop.py": "smollm2",
    "test/registered/openai_server/validation/test_request_length_validation.py": "small",
    "test/registered/openai_server/function_call/test_openai_function_calling.py": "smollm2",
    "test/registered/openai_server/function_call/test_anthropic_tool_use.py": "smollm2",
    "test/manual/openai_server/features/test_cache_report.py": "small",
    "test/manual/openai_server/features/test_continuous_usage_stats.py": "small",
    "test/manual/openai_server/features/test_structural_tag.py": "smollm2",
    "test/manual/openai_server/function_call/test_tool_choice.py": "smollm2",
    "test/registered/prefill_only/test_openai_embedding.py": "small",
    "test/registered/constrained_decoding/test_constrained_decoding.py": "smollm2",
}
LEFT_OUT = {
    "basic/test_serving_transcription, test_http2_server, test_openai_completion_rust": "audio, HTTP/2, their server in Rust",
    "features/test_openai_server_hidden_states": "hidden states in responses are not offered",
}
NOT_APPLICABLE = {
    r"test_large_max_new_tokens": "reads the log of their server",
    r"WithRust": "their server in Rust",
    r"tool_result_image_content_conversion": "their Python classes",
    r"count_tokens_with_system": "their chat template: it has no system message of its own",
    r"test_regex$|test_ebnf_strict_json": "needs a model that ends its answer",
    r"test_response_prefill": "a model of another name on the same server",
    r"function_call_strict|streaming_args_parsing|streaming_simple|pythonic_tool_call": "needs a model that calls tools unasked",
    r"anthropic_tool_use.*(result_multi_turn|tool_use_format)": "needs a model that calls tools unasked",
    r"test_cache_tokens|test_logprob_mixed|test_logprob_with_chunked_prefill": "needs a model with a longer context",
    r"test_logit_bias$|test_logit_bias_isolation": "a token of their vocabulary",
    r"constrained_decoding.*(test_json_generate|test_mix_json)": "a token of their vocabulary",
    r"Qwen25::test_multi_tool_scenario|Lfm2::test_multi_tool_scenario": "needs a model that calls two tools",
    r"complex_parameters_required": "needs a model that ends its answer",
    r"TestCacheReport::test_generate$": "a helper, not a test",
}
BY_DESIGN = {
    r"response_completion_stream|test_response_stream": "a cut answer ends with response.incomplete, as OpenAI's does",
    r"test_rerank_(batch|single)": "/v1/rerank answers as Jina's and Cohere's do",
    r"test_detokenize_invalid_tokens": "a request that is at fault is a 400, not a 500",
    r"test_get_server_info$": "/server_info has no startup_time",
    r"test_logprob_grammar": "log-probabilities are the model's own, not those under the grammar",
    r"[Cc]ustom_?[Ll]ogit": "a Python function in a request is refused",
    r"conflicting_defs": "$defs of two tools that conflict are each tool's own",
}
TAKEN = {"--dtype": 1, "--enable-custom-logit-processor": 0, "--json-model-override-args": 1}
_kept: dict[int, Served] = {}


def _launch(
    model: str,
    base_url: str,
    timeout: float,
    api_key: str | None = None,
    other_args: Sequence[str] = (),
    **more: Any,
) -> subprocess.Popen[bytes]:
    flags, taken = translated(other_args or (), TAKEN)
    names = (
        model
        if "cross" in model or "3.1-8B" in model
        else f"{model},meta-llama/Llama-3.1-8B-Instruct"
    )
    path = model_path("cross" if "cross-encoder" in model else MODEL)
    # a model for up to 1024 dimensions, which its configuration lists
    if "--json-model-override-args" in taken:
        path = model_path("bert1536")
    if api_key:
        flags += ["--api-key", api_key]
    if MODEL == "small":  # it never ends by itself
        flags += ["--default-max-tokens", "64"]
    port = int(base_url.rsplit(":", 1)[1].split("/")[0])
    served = Served(
        path, ["--served-name", names, "--page-size", "1", *flags], port=port, env=more.get("env")
    )
    _kept[served.process.pid] = served
    return served.process


def _kill(pid: int, *_: Any, **__: Any) -> None:
    served = _kept.pop(pid, None)
    if served is not None:
        served.stop()
    elif pid != os.getpid():
        os.kill(pid, signal.SIGTERM)


def _tokenizer(*_: Any, **__: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_path())


def install() -> None:
    theirs = CHECKOUT / "python" / "sglang" / "test"
    utils = names_from(
        theirs / "test_utils.py",
        r"DEFAULT_\w+|run_logprob_check|get_similarities",
        **_used_by_theirs(),
    ) | {
        "DEFAULT_URL_FOR_TEST": f"http://127.0.0.1:{free_port()}",
        "CustomTestCase": unittest.TestCase,
        "popen_launch_server": _launch,
        "find_available_port": lambda base=0: free_port(),
        "is_in_ci": lambda: False,
        "is_in_amd_ci": lambda: False,
        "is_rust_server_built": lambda: False,
    }
    given = {
        "sglang.test.test_utils": utils,
        "sglang.test.runners": names_from(theirs / "runners.py", r"TEST_\w+"),
        "sglang.srt.utils": {"kill_process_tree": _kill},
        "sglang.srt.utils.hf_transformers_utils": {"get_tokenizer": _tokenizer},
    }
    kits = {f"sglang.test.kits.{path.stem}": path for path in (theirs / "kits").glob("*.py")}
    Modules(
        "sglang", given, kits | {"sglang.test.ci.ci_register": theirs / "ci" / "ci_register.py"}
    ).install()


def _used_by_theirs() -> dict[str, Any]:
    import random

    import numpy
    import requests
    import torch
    import torch.nn.functional as functional

    return {
        "random": random,
        "requests": requests,
        "np": numpy,
        "torch": torch,
        "F": functional,
        "os": os,
        "sys": sys,
    }


def prepare(item: pytest.Item) -> None:
    pass


def finish() -> None:
    for served in list(_kept.values()):
        served.stop()
