"""KV policies: which of them an engine has, and how long their requests may become."""

from __future__ import annotations

from collections.abc import Collection

from tidemill.config.drafts import HEADS
from tidemill.config.options import Decision, EngineOptions
from tidemill.coverage import uncovered
from tidemill.errors import ConfigError, InvalidRequest
from tidemill.kv_policy import KINDS, KVPolicy, read_policy, settle
from tidemill.model_config import ModelConfig

_BY_KERNEL = "its steps are launched kernel by kernel, and double is computed on a CPU only"
_TIMES_CONTEXT, _MOST_BY_DEFAULT, _MOST = 8, 2**17, 2**20  # tokens of a request whose cache is bounded


def decide_kv_policies(
    options: EngineOptions,
    device: str,
    kv_dtype: str,
    kv_layout: str,
    drafters: Collection[str],
    model: ModelConfig,
) -> Decision[tuple[str, ...]]:
    """The kinds that requests may ask for, or why they may not."""
    specs, why = model.token_layers, ""
    if model.pooler is not None:
        why = "an encoder keeps no tokens"
    elif model.has_states:
        why = "this model's states of constant size keep no tokens that could be given up"
    elif kinds := sorted({kind for spec in specs for kind in spec.kinds}):
        why = f"this model's layers have {' and '.join(kinds)}, which KV policies do not know"
    elif not any(spec.rotation for spec in specs):
        why = "this model has learned its positions; KV policies need rotary ones"
    elif any(spec.kv_is_shared for spec in specs):
        why = "there are more ranks than KV heads: none sees all of the attention that a key gets"
    elif kv_dtype not in ("float32", "bfloat16"):
        why = f"KV policies take keys in float32 or bfloat16, not in {kv_dtype}"
    elif kv_layout != "paged":
        why = f"KV policies need pages, and the layout is {kv_layout}"
    elif not options.evict:
        why = "what a policy's copies of shared pages take is not reserved, and nothing is preempted (--no-evict)"
    elif device != "cpu" and options.kv_policy is None:
        why = "on a GPU they take memory of their own and are there if the server has --kv-policy (full: requests choose)"
    elif device != "cpu" and (missing := uncovered("Triton", specs)):
        why = missing
    elif device != "cpu" and (heads := [name for name in drafters if name in HEADS]):
        why = f"on a GPU the drafter {heads[0]} does not know KV policies"
    if why:
        return (), why
    if device != "cpu":
        return tuple(kind for kind in (*KINDS, "random") if kind != "double"), f"a request may ask for them; {_BY_KERNEL}"
    return (*KINDS, "random"), "a request may ask for them"


def decide_kv_policy(options: EngineOptions, kinds: tuple[str, ...], why_not: str, context: int) -> Decision[KVPolicy | None]:
    if options.kv_policy is None:
        return None, "all tokens of a request stay in the KV cache"
    try:
        policy = read_policy(options.kv_policy)
        check_kv_policy(policy, kinds, why_not)
        settle(policy, context - 1, 1, context)
    except InvalidRequest as error:
        raise ConfigError(error.message, fix=error.fix, param="kv_policy") from None
    return policy, "given; a request may ask for another"


def check_kv_policy(policy: KVPolicy | None, kinds: tuple[str, ...], why_not: str) -> None:
    """Raises unless the engine has it."""
    if policy is not None and policy.kind not in ("full", *kinds):
        raise InvalidRequest(
            f"The KV policy {policy.kind} is not available here: {why_not}.", fix="Leave kv_policy out.", param="kv_policy"
        )


def beside_a_page(kinds: tuple[str, ...], device: str, page_size: int, num_layers: int, model: ModelConfig) -> tuple[int, int]:
    """Bytes for each page of a GPU's KV cache: Quest's lowest and highest keys, and what rows may keep, a sum of attention for
    every token that the cache holds."""
    if not kinds or device == "cpu":
        return 0, 0
    num_heads = num_layers * model.num_kv_heads
    return num_heads * 2 * model.head_dim * 2, num_heads * page_size * 8


def decide_policy_bytes(kinds: tuple[str, ...], device: str, num_bytes: int) -> Decision[int]:
    if not num_bytes:
        return 0, "not limited: memory is mapped as it is used" if kinds and device == "cpu" else "no KV policies"
    return num_bytes, "a sum of attention for every token that the KV cache holds"


def decide_max_stream(options: EngineOptions, kinds: tuple[str, ...], context: int) -> Decision[int]:
    if not kinds:
        return context, "no KV policies"
    if options.max_stream is None:
        return max(context, min(_TIMES_CONTEXT * context, _MOST_BY_DEFAULT)), "tokens of a request with a window in its cache"
    if not context <= options.max_stream <= _MOST:
        raise ConfigError(
            f"max_stream is {options.max_stream}.", fix=f"It must be from {context}, the context, to {_MOST}.", param="max_stream"
        )
    return options.max_stream, "given"
