"""Embeddings as Cohere's API has them: /v2/embed."""

from __future__ import annotations

import base64
from contextlib import aclosing
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from tidemill.errors import InvalidRequest
from tidemill.server.api.openai.embeddings import Input, check_dimensions, num_kept, pooled, pooling_of, shortened
from tidemill.server.api.openai.types import MAX_INPUTS
from tidemill.server.generation.models import Models
from tidemill.server.generation.vectors import packed
from tidemill.server.http.access import Caller
from tidemill.server.http.body import Body, body_of, schema_of
from tidemill.server.http.responses import until_disconnect

_json = msgspec.json.Encoder().encode

_SIDES: dict[str, Literal["left", "right"]] = {"START": "left", "END": "right"}


class EmbedRequest(Body):
    without_effect = frozenset({"priority"})
    model: str | None = None
    texts: Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]
    input_type: str | None = None
    embedding_types: list[Literal["float", "base64", "binary", "ubinary"]] | None = None
    output_dimension: int | None = Field(default=None, ge=1)
    truncate: Literal["NONE", "START", "END"] = "END"
    max_tokens: int | None = Field(default=None, ge=1)  # of a text; more are cut off


def make_router(models: Models) -> APIRouter:
    router = APIRouter()

    @router.post("/v2/embed", openapi_extra=schema_of(EmbedRequest))
    async def embed(request: Request, body: EmbedRequest = Depends(body_of(EmbedRequest))) -> Response:
        made = await until_disconnect(request, _embedded(models, body, request.state.caller))
        return Response(made, media_type="application/json")

    return router


async def _embedded(models: Models, body: EmbedRequest, caller: Caller) -> bytes:
    service = models.of(body.model)
    if body.input_type is not None:
        what = f"Unsupported input_type {body.input_type[:40]!r}: the model has no prompts for kinds of input."
        raise InvalidRequest(what, fix="Leave it out, and write the prompt into the texts.", param="input_type")
    size, pooling = service.ready.model.hidden_size, pooling_of(service)
    service.ready.model.check_pooling("mean" if pooling == "score" else pooling)
    if body.output_dimension is not None:
        check_dimensions(service, body.output_dimension, "output_dimension")
    kinds = dict.fromkeys(body.embedding_types or ["float"])
    if (body.output_dimension or size) % 8 and kinds.keys() & {"binary", "ubinary"}:
        raise InvalidRequest("Binary embeddings need a multiple of 8 dimensions.", param="embedding_types")
    prompts = []
    for text in body.texts:
        most = num_kept(service, body.max_tokens or -1)
        side = _SIDES.get(body.truncate)
        prompts.append(await (service.encode(text) if side is None else service.encode_cut(text, most, side)))
    embeddings: dict[str, list[Any]] = {kind: [None] * len(prompts) for kind in kinds}
    async with aclosing(pooled(service, caller, [Input(ids) for ids in prompts], pooling)) as made:
        async for i, vector in made:
            short = shortened(vector, body.output_dimension, is_normalized=True)
            for kind in kinds:  # encoded one by one, as they come: all of them at the end would hold up everybody
                embeddings[kind][i] = msgspec.Raw(_json(_as_kind(short, kind)))
    units = {"input_tokens": sum(map(len, prompts)), "image_tokens": 0}
    meta = {"api_version": {"version": "2"}, "billed_units": units}
    head = {"id": caller.call.request_id, "response_type": "embeddings_by_type", "texts": body.texts}
    return _json(head | {"embeddings": embeddings, "meta": meta})


def _as_kind(vector: list[float], kind: str) -> Any:
    if kind == "float":
        return vector
    if kind == "base64":
        return base64.b64encode(packed(vector, "float32", "little")).decode()
    signs = [value >= 0 for value in vector]  # a bit each, the first is the highest
    made = [sum(sign << 7 - i for i, sign in enumerate(signs[at : at + 8])) for at in range(0, len(signs), 8)]
    return made if kind == "ubinary" else [value - 128 for value in made]
