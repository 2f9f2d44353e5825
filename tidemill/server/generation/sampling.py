"""Sampling parameters that several APIs share: structured output, biases, and parameters that must
be off."""

from __future__ import annotations

from json import dumps
from typing import Any

from tidemill.errors import InvalidRequest
from tidemill.types.sampling import Grammar

_OFF = 0, -1
# Parameters of other engines that are not supported, and the values at which they do nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    # llama.cpp
    "min_keep": (0, 1), "mirostat": (0,), "dry_multiplier": (0,), "xtc_probability": (0,),
    "dynatemp_range": (0,), "top_n_sigma": _OFF, "t_max_predict_ms": _OFF, "n_indent": (0,),
    "lora": ([],), "reasoning_format": ("auto", "deepseek"), "parse_tool_calls": (True,),
    "post_sampling_probs": (False,), "response_fields": ([],), "penalize_newline": (True,),
    "penalize_nl": (True,), "adaptive_target": (-1,), "t_max_prompt_ms": _OFF,
    "grammar_lazy": (False,), "grammar_triggers": ([],), "reasoning_budget_tokens": (-1,),
    "thinking_budget_tokens": (-1,),
    # vLLM
    "spaces_between_special_tokens": (True,), "include_reasoning": (True,),
    "logits_processors": ([],), "kv_transfer_params": ({},), "mm_processor_kwargs": ({},),
    "ec_transfer_params": ({},), "media_io_kwargs": ({},), "vllm_xargs": ({},),
    "return_assistant_tokens_mask": (False,), "return_token_offsets": (False,),
    "return_prompt_text": (False,), "thinking_token_budget": (-1,),
    # SGLang
    "separate_reasoning": (True,), "stream_reasoning": (True,), "no_stop_trim": (False,),
    "return_hidden_states": (False,), "tfs_z": (1,), "return_meta_info": (False,),
    "return_prompt_token_ids": (False,), "return_cached_tokens_details": (False,),
    "return_routed_experts": (False,), "return_spec_tokens_details": (False,),
    "return_sampling_mask": (False,), "session_params": ({},),
}  # fmt: skip


def grammar_of(kind: str, value: Any) -> Grammar:
    """A grammar of a text, or of a JSON value."""
    return Grammar(kind, value if isinstance(value, str) else dumps(value))


def biases(bias_of: dict[str, float]) -> dict[int, float]:
    """A logit_bias by token id."""
    if wrong := [token[:40] for token in bias_of if not is_token_id(token)]:
        what = f"logit_bias is keyed by token ids; got {', '.join(map(repr, wrong[:10]))}."
        raise InvalidRequest(what, param="logit_bias")
    return {int(token): bias for token, bias in bias_of.items()}


def is_token_id(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 10


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Several values, or the one that stands for a list of one."""
    return tuple(value) if isinstance(value, list) else (value,)
