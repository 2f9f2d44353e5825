"""Log-probabilities in responses: how many fit one, and how the APIs write them.

They are encoded to JSON as they arrive, since their objects take many times the memory of their
text, and in bounded pieces, so that the event loop can serve others in between.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from tidemill.errors import InvalidRequest
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import TokenLogprobs, decode_logprobs

if TYPE_CHECKING:
    from tidemill.server.generation.request import Generation

# A cell is one log-probability: a token reported with k alternatives has k + 1. A cell takes some
# 60 bytes of JSON, so a whole
# response takes about 32 MB at most.
MAX_LOGPROB_CELLS = 2**19
_ECHOED_PER_CELL = 8  # tokens of a prompt that is echoed as text

_json = msgspec.json.Encoder().encode


def check_size(generation: Generation) -> None:
    """Raises if the log-probabilities that are asked for do not fit one response. Without
    max_tokens, the output ends where they no longer would."""
    cells = generation.num_echoed // _ECHOED_PER_CELL
    for prompt in generation.prompts:
        if prompt.params.prompt_logprobs is not None:
            width = (
                max(prompt.params.prompt_logprobs, len(prompt.params.prompt_logprob_token_ids)) + 1
            )
            cells += len(prompt.ids) * width * generation.num_prompt_copies
    if cells > MAX_LOGPROB_CELLS:
        fix = "Send fewer or shorter prompts at once, or ask for fewer logprobs or samples."
        raise _too_many(cells, fix, generation.prompt_param)
    if not generation.keeps_logprobs:
        return
    service, unlimited = generation.service, list[Any]()
    width = sum(_cells_per_token(prompt.params) for prompt in generation.prompts)
    affordable = max((MAX_LOGPROB_CELLS - cells) // max(width, 1), 1)
    for prompt in generation.prompts:
        params = prompt.params
        left, default = max(service.context_of(params) - len(prompt.ids), 0), service.defaults.limit
        if params.max_tokens is None:
            unlimited.append(prompt)
            most = left if default is None else min(left, max(default, params.min_tokens))
            if most > affordable:
                prompt.params = msgspec.structs.replace(params, max_tokens=affordable)
        else:
            cells += min(params.max_tokens, left) * _cells_per_token(params)
    if not unlimited and cells > MAX_LOGPROB_CELLS:
        fix = (
            "Lower max_tokens, n or the number of logprobs; a completion or a chat that is "
            "streamed has no such limit."
        )
        raise _too_many(cells, fix, "logprobs")


def _cells_per_token(params: SamplingParams) -> int:
    if params.logprobs is None:
        return 0
    return params.n * (max(params.logprobs, len(params.logprob_token_ids)) + 1)


def _too_many(cells: int, fix: str, param: str) -> InvalidRequest:
    what = (
        f"The response could hold {cells:,} log-probabilities; at most {MAX_LOGPROB_CELLS:,} "
        "fit one response."
    )
    return InvalidRequest(what, fix=fix, param=param)


# ---- as JSON


def finite(value: float) -> float:
    """JSON has no infinity."""
    return max(value, -9999.0)


def id_name(token_id: int) -> str:
    """A token by its number, as vLLM writes it."""
    return f"token_id:{token_id}"


def as_list(parts: Iterable[bytes]) -> msgspec.Raw:
    """A JSON list of JSON lists without brackets."""
    return msgspec.Raw(b"[" + b",".join(part for part in parts if part) + b"]")


def cells(entries: Iterable[TokenLogprobs], write: Callable[[TokenLogprobs], Any]) -> bytes:
    """A JSON list without its brackets."""
    return _json([write(entry) for entry in entries])[1:-1]


async def encoded(pieces: Iterable[msgspec.Raw], write: Callable[[TokenLogprobs], Any]) -> bytes:
    """The log-probabilities of a prompt as a JSON list without its brackets."""
    parts = []
    for piece in pieces:
        parts.append(cells(decode_logprobs(piece), write))
        await asyncio.sleep(0)
    return b",".join(part for part in parts if part)


def openai_logprobs(
    tokenizer: Tokenizer, name: Callable[[int], str]
) -> Callable[[TokenLogprobs], dict[str, Any]]:
    """Writes a token as OpenAI's chats and responses do. `name`: a token's text."""

    def cell(token: int, value: float) -> dict[str, Any]:
        return {
            "token": name(token),
            "logprob": finite(value),
            "bytes": list(tokenizer.token_bytes(token)),
        }

    return lambda entry: (
        cell(entry.token_id, entry.logprob) | {"top_logprobs": [cell(*pair) for pair in entry.top]}
    )


def llamacpp_logprobs(
    tokenizer: Tokenizer, as_probs: bool = False
) -> Callable[[TokenLogprobs], dict[str, Any]]:
    """Writes a token as llama.cpp and Ollama do. `as_probs`: probabilities, without tokens that
    have none."""
    name = "prob" if as_probs else "logprob"

    def cell(token: int, value: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        text = data.decode("utf-8", errors="replace")
        return {
            "id": token,
            "token": text,
            "bytes": list(data),
            name: math.exp(value) if as_probs else finite(value),
        }

    def write(entry: TokenLogprobs) -> dict[str, Any]:
        top = [
            cell(token, value) for token, value in entry.top if not as_probs or math.exp(value) > 0
        ]
        return cell(entry.token_id, entry.logprob) | {f"top_{name}s": top}

    return write
