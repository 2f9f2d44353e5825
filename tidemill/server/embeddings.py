"""Embeddings: /v1/embeddings, and how the prompts of one request are pooled side by side."""

from __future__ import annotations

import base64
import math
import struct
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from tidemill.errors import InvalidRequest
from tidemill.sampling import SamplingParams
from tidemill.server.body import body_of, schema_of
from tidemill.server.guard import Caller
from tidemill.server.models import Models
from tidemill.server.openai import merge, prompts_of, truncated
from tidemill.server.openai_types import EmbeddingRequest
from tidemill.server.service import Service
from tidemill.server.sse import until_disconnect

_AT_ONCE = 64  # prompts of one request

_json = msgspec.json.Encoder().encode


def make_router(models: Models) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/embeddings", openapi_extra=schema_of(EmbeddingRequest))
    async def embeddings(request: Request, body: EmbeddingRequest = Depends(body_of(EmbeddingRequest))) -> Response:
        made = await until_disconnect(request, _embeddings(models, body, request.state.caller))
        return Response(made, media_type="application/json")

    models.whole_responses["/v1/embeddings"] = (EmbeddingRequest, partial(_embeddings, models))
    return router


@dataclass(frozen=True, slots=True)
class Input:
    """A prompt to pool. `pair_start`: of a pair of texts, where tokens of type 1 begin."""

    ids: list[int]
    pair_start: int = 0


async def pooled(
    service: Service, caller: Caller, inputs: Sequence[Input], pooling: str
) -> AsyncGenerator[tuple[int, list[float]], None]:
    """The vector or scores of each, as they are computed."""
    left = iter(enumerate(inputs))
    streams = [_pooled_in_turn(service, caller, left, pooling) for _ in range(min(_AT_ONCE, len(inputs)))]
    async with aclosing(merge(streams)) as merged:
        async for _, made in merged:
            yield made


async def _pooled_in_turn(
    service: Service, caller: Caller, left: Iterator[tuple[int, Input]], pooling: str
) -> AsyncGenerator[tuple[int, list[float]], None]:
    """Of one prompt after another, while there are any left: all at once would take everybody's places in the queue."""
    for i, one in left:
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, pooling=pooling, pair_start=one.pair_start)
        async with aclosing(service.stream(caller, one.ids, params, i)) as outputs:
            async for delta, _ in outputs:
                if delta.embedding is not None:
                    yield i, delta.embedding


def pooling_of(service: Service, asked: str | None = None) -> str:
    """What is asked for, or how the model makes embeddings."""
    return asked or service.ready.model.own_pooling or "mean"


async def _embeddings(models: Models, body: EmbeddingRequest, caller: Caller) -> bytes:
    service = models.of(body.model)
    pooling = pooling_of(service, body.pooling)
    service.ready.model.check_pooling("mean" if pooling == "score" else pooling)
    prompts = await _prompts(service, body)
    size = service.ready.model.hidden_size
    if body.dimensions is not None and body.dimensions > size:
        raise InvalidRequest(f"The model's embeddings have {size} dimensions; got {body.dimensions}.", param="dimensions")
    vectors = [msgspec.Raw(b"[]")] * len(prompts)
    async with aclosing(pooled(service, caller, [Input(ids) for ids in prompts], pooling)) as made:
        async for i, vector in made:  # encoded as they arrive, not all at the end
            vectors[i] = msgspec.Raw(_encoded(_shortened(vector, body.dimensions), body.encoding_format == "base64"))
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
    num_tokens = sum(map(len, prompts))
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}
    head = {"id": caller.call.request_id, "object": "list", "created": int(time.time()), "model": service.model_name}
    return _json(head | {"data": data, "usage": usage})


async def _prompts(service: Service, body: EmbeddingRequest) -> list[list[int]]:
    if (body.input is None) == (body.messages is None):
        raise InvalidRequest("Give one of input and messages.", param="input")
    if body.messages is not None:
        chat = body.chat()
        prompts = [await service.encode_chat(chat.conversation(), **chat.how())]
        return truncated(service, prompts, body.truncate_prompt_tokens, 0, body.truncation_side)
    num: int | None = body.truncate_prompt_tokens
    texts: list[Any] = [body.input] if isinstance(body.input, str) else list(body.input or [])
    if service.ready.model.pooler is None or num is None or not texts or not all(isinstance(text, str) for text in texts):
        prompts = await prompts_of(service, body.input, body.add_special_tokens)
        return truncated(service, prompts, num, 0, body.truncation_side)
    most, side = num_kept(service, num), body.truncation_side or "right"  # an encoder's: its special tokens stay
    return [await service.encode_cut(text, most, side, body.add_special_tokens) for text in texts]


def num_kept(service: Service, num: int) -> int:
    """Tokens that an input is truncated to. -1: as many as the model takes."""
    if num == 0:
        raise InvalidRequest("truncate_prompt_tokens must be -1, or 1 or more.", param="truncate_prompt_tokens")
    return service.max_context if num < 0 else min(num, service.max_context)


def _shortened(vector: list[float], num: int | None) -> list[float]:
    """The first dimensions, of length 1 again."""
    if num is None or num == len(vector):
        return vector
    norm = math.sqrt(sum(value * value for value in vector[:num])) or 1.0
    return [value / norm for value in vector[:num]]


def _encoded(vector: list[float], as_base64: bool) -> bytes:
    return _json(base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if as_base64 else vector)
