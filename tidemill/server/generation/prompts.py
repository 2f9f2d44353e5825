"""Prompts that are text, token ids or both, as completions and embeddings take them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, cast

from pydantic import WithJsonSchema

from tidemill.errors import InvalidRequest, TruncationTooLong
from tidemill.frontend.infill import infill_prompt, infill_tokens
from tidemill.server.generation.service import Service
from tidemill.types.sampling import SamplingParams

MAX_CHOICES = 256  # prompts times samples of one request
MAX_INPUTS = 2048  # texts to embed
_MAX_TEXTS = 1024  # between token ids: each is tokenized by itself
Mixed = str | list[int | str]  # a prompt of text, token ids or both
_IDS = {"type": "array", "items": {"type": "integer"}}
_TEXTS = {"type": "array", "items": {"type": "string"}}
_KINDS = [{"type": "string"}, _TEXTS, _IDS, {"type": "array", "items": _IDS}]
PromptField = Annotated[Any, WithJsonSchema({"anyOf": _KINDS})]  # checked by `one_kind`


def one_kind(prompt: Any, most: int = MAX_CHOICES) -> Any:
    """Checks for a text, token ids, or token ids and texts; or a list of these. The engine checks
    that the model has the tokens."""
    if isinstance(prompt, str) or prompt == []:
        return prompt
    if is_mixed(prompt):
        few_texts([prompt])
        return prompt
    if isinstance(prompt, list) and len(prompt) > most:
        raise ValueError(f"{len(prompt)} prompts in one request; at most {most}")
    is_list = isinstance(prompt, list)
    if is_list and all(isinstance(item, str) or item == [] or is_mixed(item) for item in prompt):
        return few_texts(prompt)
    raise ValueError("it must be a text, a list of token ids, or a list of texts and such lists")


def is_mixed(value: Any) -> bool:
    """Tells if it is a list of token ids, at least one, and texts. There may be millions, so
    without a Python loop."""
    if not isinstance(value, list) or int not in (kinds := set(map(type, value))):
        return False
    if not kinds <= {int, str}:
        return False
    ids = value if kinds == {int} else [token_id for token_id in value if type(token_id) is int]
    return min(ids) >= -(2**63) and max(ids) < 2**63


def few_texts(prompts: list[Mixed]) -> list[Mixed]:
    """Checks that there are not too many texts between token ids."""
    if (
        sum(list(map(type, prompt)).count(str) for prompt in prompts if isinstance(prompt, list))
        > _MAX_TEXTS
    ):
        raise ValueError(f"prompts of token ids and texts may have {_MAX_TEXTS} texts")
    return prompts


async def prompts_of(
    service: Service, prompt: Any, add_special: bool = True, params: SamplingParams | None = None
) -> list[list[int]]:
    """The token ids of a prompt of any of the kinds that `one_kind` accepts."""
    if isinstance(prompt, str):
        return [await service.encode(prompt, add_special, params)]
    if not prompt:
        raise empty_prompt()
    if int in map(type, prompt):
        return [await ids_of(service, prompt, add_special, params)]
    return [await ids_of(service, item, add_special, params) for item in prompt]


async def ids_of(
    service: Service, prompt: Mixed, add_special: bool = True, params: SamplingParams | None = None
) -> list[int]:
    """The token ids of a text, token ids or both. Only a text at the start begins as the model
    expects texts to begin."""
    if isinstance(prompt, str):
        return await service.encode(prompt, add_special, params)
    if str not in map(type, prompt):  # there may be a million: without a Python loop, or a copy
        return cast(list[int], prompt)
    ids: list[int] = []
    for i, part in enumerate(prompt):
        is_first = add_special and i == 0
        ids += [part] if isinstance(part, int) else await service.encode(part, is_first, params)
    return ids


def empty_prompt(param: str = "prompt") -> InvalidRequest:
    return InvalidRequest(
        "The prompt is empty.", fix="Give a text or at least one token.", param=param
    )


async def infill(
    service: Service,
    prefix: str,
    suffix: str,
    begun: str = "",
    files: Sequence[tuple[str, str]] = (),
) -> tuple[list[int], tuple[int, ...]]:
    """The prompt for what comes between prefix and suffix, and the tokens that end it."""
    limits: Any = {"begun": begun, "files": files, "max_tokens": service.max_context}
    work = partial(infill_prompt, service.tokenizer, prefix, suffix, **limits)
    prompt = await asyncio.to_thread(work)
    tokens = infill_tokens(service.tokenizer)
    return prompt, tuple(tokens.ends) if tokens else ()


def check_truncation(service: Service, num: int) -> None:
    if num == 0:
        what = "truncate_prompt_tokens must be -1, or 1 or more."
        raise InvalidRequest(what, param="truncate_prompt_tokens")
    if num > service.max_context:
        raise TruncationTooLong(num, service.max_context)


def truncated(
    service: Service,
    prompts: list[list[int]],
    num: int | None,
    max_tokens: int | None,
    side: str | None = None,
) -> list[list[int]]:
    """The last `num` tokens of each, or the first if the right side is cut; -1: as many as leave
    room for the output."""
    if num is None:
        return prompts
    check_truncation(service, num)
    num = (
        num if num > 0 else max(service.max_context - (1 if max_tokens is None else max_tokens), 1)
    )
    return [prompt[:num] if side == "right" else prompt[-num:] for prompt in prompts]
