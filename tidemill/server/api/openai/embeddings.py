"""Embeddings: /v1/embeddings, and how the prompts of one request are pooled side by side."""

from __future__ import annotations

import base64
import json
import math
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
from tidemill.frontend.scoring import label_probs
from tidemill.sampling import SamplingParams
from tidemill.server.api.openai.routes import check_truncation, merge, prompts_of, truncated
from tidemill.server.api.openai.types import ClassifyRequest, EmbeddingRequest, PoolingRequest
from tidemill.server.generation.models import Models
from tidemill.server.generation.service import Service
from tidemill.server.generation.vectors import packed
from tidemill.server.http.access import Caller
from tidemill.server.http.aside import aside, encoded
from tidemill.server.http.body import body_of, schema_of
from tidemill.server.http.responses import until_disconnect

_MAX_VALUES = 2**21  # of the vectors of single tokens in one response: about 40 MB as JSON
_BYTES_PER_VALUE, _VALUES_PER_CALL = 8, 2**16  # of vectors of single tokens
_MAX_IN_HEADER = 400  # inputs that the header `metadata` describes: clients and proxies take 64 KiB at most

_json = msgspec.json.Encoder().encode


def make_router(models: Models) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/embeddings", openapi_extra=schema_of(EmbeddingRequest))
    async def embeddings(request: Request, body: EmbeddingRequest = Depends(body_of(EmbeddingRequest))) -> Response:
        return await until_disconnect(request, _response(models, body, request.state.caller))

    @router.post("/pooling", openapi_extra=schema_of(PoolingRequest))
    async def pooling(request: Request, body: PoolingRequest = Depends(body_of(PoolingRequest))) -> Response:
        return await until_disconnect(request, _response(models, body, request.state.caller))

    @router.post("/classify", openapi_extra=schema_of(ClassifyRequest))
    async def classify(request: Request, body: ClassifyRequest = Depends(body_of(ClassifyRequest))) -> Response:
        made = await until_disconnect(request, _classified(models, body, request.state.caller))
        return Response(made, media_type="application/json")

    models.whole_responses["/v1/embeddings"] = (EmbeddingRequest, partial(embeddings_json, models))
    return router


@dataclass(frozen=True, slots=True)
class Input:
    """A prompt to pool. `pair_start`: of a pair of texts, where tokens of type 1 begin."""

    ids: list[int]
    pair_start: int = 0


async def pooled(
    service: Service, caller: Caller, inputs: Sequence[Input], pooling: str, is_normalized: bool | None = None
) -> AsyncGenerator[tuple[int, list[float]], None]:
    """The vector or scores of each, as they are computed."""
    left = iter(enumerate(inputs))
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, pooling=pooling, is_normalized=is_normalized)
    streams = [_pooled_in_turn(service, caller, left, params) for _ in range(min(service.num_at_once, len(inputs)))]
    async with aclosing(merge(streams)) as merged:
        async for _, made in merged:
            yield made


async def _pooled_in_turn(
    service: Service, caller: Caller, left: Iterator[tuple[int, Input]], params: SamplingParams
) -> AsyncGenerator[tuple[int, list[float]], None]:
    """Of one prompt after another, while there are any left: all at once would take everybody's places in the queue."""
    for i, one in left:
        own = msgspec.structs.replace(params, pair_start=one.pair_start)
        async with aclosing(service.stream(caller, one.ids, own, i)) as outputs:
            async for delta, _ in outputs:
                if delta.embedding is not None:
                    yield i, delta.embedding


def pooling_of(service: Service, asked: str | None = None) -> str:
    """What is asked for, or how the server or the model makes an embedding of a text."""
    own, set_to = service.ready.model.own_pooling, service.manner.pooling
    by_default = own or service.ready.model.embeds_by or "mean"
    return asked or (set_to if own != "score" and set_to != "none" else None) or by_default


@dataclass(frozen=True, slots=True)
class _Pooled:
    """Of all inputs of a request."""

    head: dict[str, Any]
    vectors: list[bytes]  # each as JSON, or packed
    usage: dict[str, int]
    width: int | None = None  # of the vectors of single tokens


async def embeddings_json(models: Models, body: EmbeddingRequest, caller: Caller) -> bytes:
    """As JSON. What /pooling has as `data` is `embedding` elsewhere."""
    if body.encoding_format in ("bytes", "bytes_only"):
        raise InvalidRequest(
            f"encoding_format {body.encoding_format} is not for responses of JSON, such as a line of a batch.",
            fix="Use float or base64.",
            param="encoding_format",
        )
    made, is_pooling = await _all_pooled(models, body, caller), isinstance(body, PoolingRequest)
    of_one = ("pooling", "data") if is_pooling else ("embedding", "embedding")
    data = [{"index": i, "object": of_one[0], of_one[1]: msgspec.Raw(vector)} for i, vector in enumerate(made.vectors)]
    return _json(made.head | {"data": data, "usage": made.usage})


async def _classified(models: Models, body: ClassifyRequest, caller: Caller) -> bytes:
    """Each input's label and the probabilities of all labels; with `use_activation` false, what they are made from."""
    made = await _all_pooled(models, body.model_copy(update={"task": "classify"}), caller)
    model = models.of(body.model).ready.model
    assert model.labels is not None, "the task was checked"
    data = []
    for i, vector in enumerate(made.vectors):
        scores = msgspec.json.decode(vector, type=list[float])
        probs = scores if body.use_activation is False else label_probs(scores, model)
        best = max(range(len(scores)), key=scores.__getitem__)
        data.append({"index": i, "label": model.labels.names[best], "probs": probs, "num_classes": len(probs)})
    return _json(made.head | {"data": data, "usage": made.usage})


async def _response(models: Models, body: EmbeddingRequest, caller: Caller) -> Response:
    if body.encoding_format not in ("bytes", "bytes_only"):
        return Response(await embeddings_json(models, body, caller), media_type="application/json")
    made = await _all_pooled(models, body, caller)
    data, at = list[dict[str, Any]](), 0
    for i, vector in enumerate(made.vectors):
        num = len(vector) // len(packed([0.0], body.embed_dtype, body.endianness))
        shape = [num] if made.width is None else [num // made.width, made.width]
        data.append({"index": i, "embed_dtype": body.embed_dtype, "endianness": body.endianness, "start": at})
        at += len(vector)
        data[-1] |= {"end": at, "shape": shape}
    metadata = {key: made.head[key] for key in ("id", "created", "model")} | {"data": data, "usage": made.usage}
    headers = {"metadata": json.dumps(metadata)} if body.encoding_format == "bytes" else None  # ASCII alone
    return Response(b"".join(made.vectors), media_type="application/octet-stream", headers=headers)


async def _all_pooled(models: Models, body: EmbeddingRequest, caller: Caller) -> _Pooled:
    service = models.of(body.model)
    pooling = pooling_of(service, body.pooling)
    task, is_each = _task(service, body), _is_each(service, body)
    if is_each:
        pooling = "none"
    is_classified = task == "classify" or (task is None and pooling == "score")
    if is_classified:
        service.ready.model.check_pooling("score")
    if not is_classified or body.pooling is not None:
        service.ready.model.check_pooling("mean" if pooling == "score" else pooling)
    if is_classified:
        pooling = "score"
    prompts = await _prompts(service, body)
    if body.encoding_format == "bytes" and len(prompts) > _MAX_IN_HEADER:
        fix = f"Ask for bytes_only, which has none, or for at most {_MAX_IN_HEADER} inputs at a time."
        raise InvalidRequest(f"The header `metadata` of {len(prompts)} inputs is too long.", fix=fix, param="encoding_format")
    size = service.ready.model.hidden_size
    if body.dimensions is not None:
        check_dimensions(service, body.dimensions, "dimensions", pooling)
    vectors, inputs = [b""] * len(prompts), [Input(ids) for ids in prompts]
    num_tokens, is_unit, width = sum(map(len, prompts)), body.use_activation is not False, body.dimensions or size
    if is_each and num_tokens * width > _MAX_VALUES:
        what = f"Vectors of {num_tokens} tokens have {num_tokens * width} values; at most {_MAX_VALUES} in one response."
        raise InvalidRequest(what, fix="Send fewer or shorter inputs.", param="input")
    async with aclosing(pooled(service, caller, inputs, pooling, body.use_activation)) as made:
        async for i, vector in made:  # encoded as they arrive, not all at the end
            if is_each:
                vectors[i] = await aside(partial(_encoded_rows, vector, size, body), _BYTES_PER_VALUE * len(vector))
            else:
                vectors[i] = _encoded(shortened(vector, body.dimensions, is_unit), body)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}
    head = {"id": caller.call.request_id, "object": "list", "created": int(time.time()), "model": service.model_name}
    return _Pooled(head, vectors, usage, width if is_each else None)


def _is_each(service: Service, body: EmbeddingRequest) -> bool:
    """Each token is to have a vector of its own."""
    is_own = service.manner.pooling == "none" and service.ready.model.own_pooling != "score"
    is_each = body.pooling == "none" or (body.pooling is None and is_own)
    if is_each and not isinstance(body, PoolingRequest):
        fix = "Use /pooling, or llama.cpp's /embeddings; or serve without --pooling none."
        raise InvalidRequest("In OpenAI's API an input has one vector, not one for each token.", fix=fix, param="pooling")
    return is_each


def _task(service: Service, body: EmbeddingRequest) -> str | None:
    """Of vLLM's. The server, not the request, decides whether single tokens have vectors."""
    if not isinstance(body, PoolingRequest):
        return "embed"
    can_score = service.ready.model.own_pooling == "score"
    has, other = ("token_embed", "embed") if service.manner.pooling == "none" else ("embed", "token_embed")
    if body.task is None or body.task == ("classify" if can_score else has):
        return body.task
    if body.task == other and not can_score:
        how = "none" if other == "token_embed" else "auto"
        what = f"Try switching the model's pooling_task via --pooling {how}, or give `pooling` instead of `task`."
        raise InvalidRequest(what, param="task")
    what = "No IOProcessor plugin installed." if body.task == "plugin" else f"Unsupported task: {body.task[:40]!r}."
    raise InvalidRequest(what, fix=f"This model has the task {'classify' if can_score else has}.", param="task")


async def _prompts(service: Service, body: EmbeddingRequest) -> list[list[int]]:
    if (body.input is None) == (body.messages is None):
        raise InvalidRequest("Give one of input and messages.", param="input")
    if body.messages is not None:
        chat = body.chat()
        prompts = [await service.encode_chat(chat.conversation, to_embed=True, **chat.how())]
        if body.add_special_tokens and "add_special_tokens" in body.model_fields_set:  # a template writes those it wants
            prompts = [service.tokenizer.with_special(ids) for ids in prompts]
        return truncated(service, prompts, body.truncate_prompt_tokens, 0, body.truncation_side)
    num: int | None = body.truncate_prompt_tokens
    texts: list[Any] = [body.input] if isinstance(body.input, str) else list(body.input or [])
    if service.ready.model.pooler is None or num is None or not texts or not all(isinstance(text, str) for text in texts):
        prompts = await prompts_of(service, body.input, body.add_special_tokens)
        return truncated(service, prompts, num, 0, body.truncation_side)
    most, side = num_kept(service, num), body.truncation_side or "right"  # an encoder's: its special tokens stay
    return [await service.encode_cut(text, most, side, body.add_special_tokens) for text in texts]


def check_dimensions(service: Service, num: int, param: str, pooling: str = "") -> None:
    """Raises unless embeddings can be cut to so many: of a model that tells which it was trained for, to these."""
    model = service.ready.model
    trained = model.pooler.dimensions if model.pooler else ()
    if num > model.hidden_size or pooling == "score":
        raise InvalidRequest(f"The model's embeddings have {model.hidden_size} dimensions; got {num}.", param=param)
    if trained and num not in (*trained, model.hidden_size):
        fix = f"Give one of {', '.join(map(str, trained[:32]))}, or leave it out."
        raise InvalidRequest(f"The model was not trained for embeddings of {num} dimensions.", fix=fix, param=param)


def num_kept(service: Service, num: int) -> int:
    """Tokens that an input is truncated to. -1: as many as the model takes."""
    if num == 0:
        raise InvalidRequest("truncate_prompt_tokens must be -1, or 1 or more.", param="truncate_prompt_tokens")
    check_truncation(service, num)
    return service.max_context if num < 0 else num


def shortened(vector: list[float], num: int | None, is_normalized: bool) -> list[float]:
    """The first dimensions, of length 1 again."""
    if num is None or num == len(vector):
        return vector
    norm = math.sqrt(sum(value * value for value in vector[:num])) or 1.0 if is_normalized else 1.0
    return [value / norm for value in vector[:num]]


def _encoded_rows(vector: list[float], size: int, body: EmbeddingRequest) -> bytes:
    """Vectors of a text's tokens: a list of them, or the values one after the other."""
    is_unit = body.use_activation is not False
    rows = (shortened(vector[at : at + size], body.dimensions, is_unit) for at in range(0, len(vector), size))
    if body.encoding_format in (None, "float"):
        return bytes(encoded(rows, max(_VALUES_PER_CALL // size, 1)))
    return _encoded([value for row in rows for value in row], body)


def _encoded(vector: list[float], body: EmbeddingRequest) -> bytes:
    if body.encoding_format in (None, "float"):
        return _json(vector)
    made = packed(vector, body.embed_dtype, body.endianness)
    return _json(base64.b64encode(made).decode()) if body.encoding_format == "base64" else made
