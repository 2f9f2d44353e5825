"""The checked inputs of `LLM` and `AsyncLLM`: options, also under vLLM's names, prompts, messages
and parameters."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from tidemill.config import STORED_FORMATS, EngineOptions, parse_bytes
from tidemill.errors import ConfigError, InvalidRequest
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.types.sampling import SamplingParams
from tidemill.weights.locate import locate

NO_LIMIT = 2**31 - 1
_LORAS = 8  # slots where vLLM's enable_lora is given, and no number
# vLLM's names of options: those that are ours under another name, those that cannot change an
# answer, and those of which only one value can be had.
_SAME = {
    "max_model_len": "max_context",
    "max_num_seqs": "max_requests",
    "max_num_batched_tokens": "token_budget",
    "block_size": "page_size",
    "enable_prefix_caching": "prefix_caching",
    "kv_cache_memory_bytes": "kv_memory_bytes",
    "served_model_name": "served_name",
    "tensor_parallel_size": "tensor_parallel",
    "pipeline_parallel_size": "pipeline_parallel",
    "enable_expert_parallel": "expert_parallel",
    "kv_memory": "kv_memory_bytes",
    "kv_host_memory": "kv_host_memory_bytes",
}
_WITHOUT_EFFECT = frozenset({
    "enforce_eager", "trust_remote_code", "disable_log_stats", "download_dir", "swap_space",
    "cpu_offload_gb", "max_seq_len_to_capture", "disable_custom_all_reduce", "enable_chunked_prefill", "max_logprobs",
    "tokenizer_mode", "disable_cascade_attn", "compilation_config", "distributed_executor_backend",
})  # fmt: skip
_ONLY: dict[str, tuple[Any, ...]] = {
    "data_parallel_size": (1,), "tokenizer": (None,), "revision": (None,), "tokenizer_revision": (None,),
    "kv_cache_dtype": (None, "auto"),
    "speculative_config": (None,), "hf_overrides": (None,), "skip_tokenizer_init": (False,),
    "runner": (None, "auto", "generate", "pooling"), "task": (None, "auto", "generate", "embed", "score"),
}  # fmt: skip


def engine_options(options: dict[str, Any], model: str) -> dict[str, Any]:
    """The fields of EngineOptions. Options of vLLM that cannot change an answer are dropped with a
    warning."""
    known = {field.name for field in fields(EngineOptions)} - {"model"}
    checked: dict[str, Any] = {}
    dropped = []
    if options.pop("enable_lora", None):
        checked["max_loras"] = _LORAS
    for name, value in options.items():
        target = _SAME.get(name, name)
        if target in known:
            if target in checked and target != "max_loras":
                raise ConfigError(
                    f"{target} is given twice, also as {name}.", fix="Give one.", param=name
                )
            if value is not None:
                checked[target] = value
        elif name in _ONLY:
            if value not in _ONLY[name] and not (name == "tokenizer" and value == model):
                raise ConfigError(
                    f"{name}={value!r} is not supported.", fix=f"Leave {name} out.", param=name
                )
        elif name in _WITHOUT_EFFECT:
            dropped.append(name)
        else:
            nearest = difflib.get_close_matches(
                name, [*known, *_SAME, *_ONLY, "progress", "seed"], n=1, cutoff=0.5
            )
            fix = (
                f"Did you mean {nearest[0]}?"
                if nearest
                else f"There are {', '.join(sorted(known))}."
            )
            raise ConfigError(f"LLM has no option {name!r}.", fix=fix, param=name)
    if dropped:
        warnings.warn(f"LLM: without effect: {', '.join(sorted(dropped))}.", stacklevel=3)
    if "dtype" in checked:  # also as torch.float32
        dtype = str(checked["dtype"]).removeprefix("torch.")
        checked["dtype"] = {"float": "float32"}.get(dtype, dtype)
    if checked.get("quantization") in STORED_FORMATS:
        checked["quantization"] = "auto"
    if isinstance(checked.get("loras"), Mapping):
        checked["loras"] = tuple(f"{name}={path}" for name, path in checked["loras"].items())
    for name in ("kv_memory_bytes", "kv_host_memory_bytes"):
        if isinstance(checked.get(name), str):
            checked[name] = parse_bytes(checked[name])
    return checked


def located_options(model: str, options: dict[str, Any]) -> tuple[Path, EngineOptions]:
    """The folder of a model's files, fetched if need be, and the options of an engine for it. A
    script may queue any number of requests."""
    settings = engine_options(dict(options), model)
    path = locate(model, fetch=True)
    defaults: dict[str, Any] = {"model": str(path), "max_waiting": NO_LIMIT}
    return path, EngineOptions(**defaults | settings)


class PromptEncoder:
    """Token ids of prompts and conversations, in any of the forms that a script may give them."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: int) -> None:
        self._tokenizer, self._max_tokens = tokenizer, max_tokens

    def encode(self, prompt: Any) -> tuple[str | None, list[int]]:
        """The prompt's text, if it is one, and its token ids."""
        if isinstance(prompt, Mapping):
            prompt = of_mapping(prompt)
        if isinstance(prompt, str):
            return prompt, self._tokenizer.encode(prompt, max_tokens=self._max_tokens)
        if not isinstance(prompt, Sequence) or not all(type(token) is int for token in prompt):
            raise InvalidRequest(
                f"A prompt is a text or a list of token ids; got {shown(prompt)}.",
                fix='Give "text", [1, 2, 3], {"prompt": "text"} or {"prompt_token_ids": [1, 2, 3]}.',
                param="prompt",
            )
        return None, list(prompt)

    def encode_chat(self, messages: Any, **template_options: Any) -> list[int]:
        check_messages(messages)
        return self._tokenizer.encode_chat(
            messages, max_tokens=self._max_tokens, **template_options
        )


def params_list(params: Any, num: int) -> list[SamplingParams]:
    each = (
        [params or SamplingParams()] * num
        if params is None or isinstance(params, SamplingParams)
        else params
    )
    if not isinstance(each, Sequence) or not all(
        isinstance(params, SamplingParams) for params in each
    ):
        raise InvalidRequest(
            f"sampling_params is a SamplingParams or a list of them; got {shown(params)}.",
            fix="Write SamplingParams(temperature=0, max_tokens=100).",
            param="sampling_params",
        )
    if len(each) != num:
        raise InvalidRequest(
            f"{num} prompts and {len(each)} sets of sampling parameters.", param="sampling_params"
        )
    return list(each)


def prompt_list(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts, and whether they came as a list of them."""
    if isinstance(prompts, str | Mapping):
        return [prompts], False
    if not isinstance(prompts, Sequence):
        raise InvalidRequest(
            f"generate() takes a prompt or a list of prompts; got {shown(prompts)}.",
            fix='Give "text", a list of token ids, or a list of these.',
            param="prompts",
        )
    is_ids = len(prompts) > 0 and isinstance(prompts[0], int)
    return ([prompts], False) if is_ids else (list(prompts), True)


def conversation_list(messages: Any) -> tuple[list[Any], bool]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        check_messages(messages)
    return ([messages], False) if isinstance(messages[0], Mapping) else (list(messages), True)


def check_messages(messages: Any) -> None:
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str) and len(messages) > 0
    if not is_list or not all(
        isinstance(message, Mapping) and "role" in message for message in messages
    ):
        raise InvalidRequest(
            f"chat() takes a list of messages; got {shown(messages)}.",
            fix='Write [{"role": "user", "content": "text"}], or use generate() to continue a text.',
            param="messages",
        )


def of_mapping(prompt: Mapping[str, Any]) -> Any:
    """vLLM's {"prompt": text} and {"prompt_token_ids": ids}; of both, the ids are the prompt."""
    unknown = [
        name
        for name, value in prompt.items()
        if name not in ("prompt", "prompt_token_ids", "cache_salt") and value
    ]
    if unknown or (prompt.get("prompt") is None and prompt.get("prompt_token_ids") is None):
        what = f"not {unknown[0]!r}" if unknown else "neither is there"
        raise InvalidRequest(
            f"A prompt as a dict has prompt or prompt_token_ids; {what}.", param="prompt"
        )
    return (
        prompt["prompt"] if prompt.get("prompt_token_ids") is None else prompt["prompt_token_ids"]
    )


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:50]}... ({type(value).__name__})"


def wants_bar(progress: bool | None, use_tqdm: bool | Callable[..., Any] | None) -> bool | None:
    """`use_tqdm` is vLLM's name of `progress`; a tqdm class is taken as True."""
    return progress if use_tqdm is None else bool(use_tqdm)
