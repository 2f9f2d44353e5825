"""KV policies: which of them an engine has, and how long their requests may become."""

from __future__ import annotations

from collections.abc import Collection

from tidemill.capabilities import POLICIES, require, why_not
from tidemill.config.options import Decision, EngineOptions
from tidemill.errors import ConfigError, InvalidRequest
from tidemill.types.kv_policy import KVPolicy, read_policy, settle
from tidemill.types.model_config import ModelConfig

_BY_KERNEL = "its steps are launched kernel by kernel, and double is computed on a CPU only"
# tokens of a request whose cache is bounded
_TIMES_CONTEXT, _MOST_BY_DEFAULT, _MOST = 8, 2**17, 2**20


def decide_kv_policies(features: Collection[str]) -> Decision[tuple[str, ...]]:
    """The kinds that requests may ask for, or why they may not."""
    refusals = {kind: why_not(f"kv-policy {kind}", features) for kind in POLICIES}
    kinds = tuple(kind for kind, refusal in refusals.items() if refusal is None)
    if not kinds:
        return (), next(refusal.why for refusal in refusals.values() if refusal is not None)
    return ("full", *kinds), "a request may ask for them" + (
        f"; {_BY_KERNEL}" if "GPU" in features else ""
    )


def decide_kv_policy(
    options: EngineOptions, features: Collection[str], context: int
) -> Decision[KVPolicy | None]:
    if options.kv_policy is None:
        return None, "all tokens of a request stay in the KV cache"
    try:
        policy = read_policy(options.kv_policy)
        check_kv_policy(policy, features)
        settle(policy, context - 1, 1, context)
    except InvalidRequest as error:
        raise ConfigError(error.message, fix=error.fix, param="kv_policy") from None
    return policy, "given; a request may ask for another"


def check_kv_policy(policy: KVPolicy | None, features: Collection[str]) -> None:
    """Raises unless the engine has it."""
    if policy is not None:
        require(f"kv-policy {policy.kind}", features)


def beside_a_page(
    kinds: tuple[str, ...], device: str, page_size: int, num_layers: int, model: ModelConfig
) -> tuple[int, int]:
    """Bytes for each page of a GPU's KV cache: Quest's lowest and highest keys, and what rows may
    keep, a sum of attention for every token that the cache holds."""
    if not kinds or device == "cpu":
        return 0, 0
    num_heads = num_layers * model.num_kv_heads
    return num_heads * 2 * model.head_dim * 2, num_heads * page_size * 8


def decide_policy_bytes(kinds: tuple[str, ...], device: str, num_bytes: int) -> Decision[int]:
    if not num_bytes:
        return (
            0,
            "not limited: memory is mapped as it is used"
            if kinds and device == "cpu"
            else "no KV policies",
        )
    return num_bytes, "a sum of attention for every token that the KV cache holds"


def decide_max_stream(
    options: EngineOptions, kinds: tuple[str, ...], context: int
) -> Decision[int]:
    if not kinds:
        return context, "no KV policies"
    if options.max_stream is None:
        return max(
            context, min(_TIMES_CONTEXT * context, _MOST_BY_DEFAULT)
        ), "tokens of a request with a window in its cache"
    if not context <= options.max_stream <= _MOST:
        raise ConfigError(
            f"max_stream is {options.max_stream}.",
            fix=f"It must be from {context}, the context, to {_MOST}.",
            param="max_stream",
        )
    return options.max_stream, "given"
