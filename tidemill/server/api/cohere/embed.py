"""Embeddings as Cohere's API has them: /v2/embed."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter
from pydantic import Field

from tidemill.errors import InvalidRequest
from tidemill.server.generation.models import Models
from tidemill.server.generation.pipeline import add_endpoint
from tidemill.server.generation.pooled import (
    Input,
    PooledEndpoint,
    Pooling,
    check_dimensions,
    embedding_pooling,
    num_kept,
    shortened,
)
from tidemill.server.generation.prompts import MAX_INPUTS
from tidemill.server.generation.vectors import packed
from tidemill.server.http.body import Body

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
    add_endpoint(router, models, "/v2/embed", CohereEmbeddings)
    return router


class CohereEmbeddings(PooledEndpoint):
    body_type = EmbedRequest
    body: EmbedRequest

    async def read(self) -> Pooling:
        body, service = self.body, self.service
        if body.input_type is not None:
            what = (
                f"Unsupported input_type {body.input_type[:40]!r}: the model has no prompts "
                "for kinds of input."
            )
            fix = "Leave it out, and write the prompt into the texts."
            raise InvalidRequest(what, fix=fix, param="input_type")
        kind = embedding_pooling(service)
        if body.output_dimension is not None:
            check_dimensions(service, body.output_dimension, "output_dimension")
        kinds = dict.fromkeys(body.embedding_types or ["float"])
        width = body.output_dimension or service.ready.model.hidden_size
        if width % 8 and kinds.keys() & {"binary", "ubinary"}:
            what = "Binary embeddings need a multiple of 8 dimensions."
            raise InvalidRequest(what, param="embedding_types")
        most, side = num_kept(service, body.max_tokens or -1), _SIDES.get(body.truncate)
        inputs = [
            Input(await (service.encode_cut(text, most, side) if side else service.encode(text)))
            for text in body.texts
        ]
        self._embeddings: dict[str, list[Any]] = {kind: [None] * len(inputs) for kind in kinds}
        return Pooling(inputs, kind)

    async def take(self, number: int, vector: list[float]) -> None:
        short = shortened(vector, self.body.output_dimension, is_normalized=True)
        for kind, embeddings in self._embeddings.items():
            embeddings[number] = msgspec.Raw(_json(_as_kind(short, kind)))

    def whole(self) -> dict[str, Any]:
        units = {"input_tokens": self.pooling.num_tokens, "image_tokens": 0}
        return {
            "id": self.caller.call.request_id,
            "response_type": "embeddings_by_type",
            "texts": self.body.texts,
            "embeddings": self._embeddings,
            "meta": {"api_version": {"version": "2"}, "billed_units": units},
        }


def _as_kind(vector: list[float], kind: str) -> Any:
    if kind == "float":
        return vector
    if kind == "base64":
        return base64.b64encode(packed(vector, "float32", "little")).decode()
    signs = [value >= 0 for value in vector]  # a bit each, the first is the highest
    values = [
        sum(sign << 7 - i for i, sign in enumerate(signs[at : at + 8]))
        for at in range(0, len(signs), 8)
    ]
    return values if kind == "ubinary" else [value - 128 for value in values]
