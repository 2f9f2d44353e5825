"""Scores of pairs of texts: /v1/rerank as Jina, Cohere, vLLM and llama.cpp have it, /v1/score as vLLM has it. By a cross-encoder,
or by the cosine of embeddings of any other model."""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from tidemill.errors import InvalidRequest
from tidemill.frontend.scoring import MAX_PAIRS, check_scores, cosine, pairs_of, without_activation
from tidemill.server.api.openai.embeddings import Input, num_kept, pooled, pooling_of
from tidemill.server.api.vllm.label_scores import Id, Items, Labels, LabelScoreRequest, label_scores
from tidemill.server.generation.models import Models
from tidemill.server.generation.service import Service
from tidemill.server.http.access import Caller
from tidemill.server.http.body import Body, body_of, schema_of
from tidemill.server.http.responses import until_disconnect

_json = msgspec.json.Encoder().encode

_OF_LABELS = ("query", "items", "label_token_ids", "apply_softmax", "item_first")
Texts = str | Annotated[list[str], Field(max_length=MAX_PAIRS)]


class Document(Body):
    text: str


class RerankRequest(Body):
    """`texts`: as Text Embeddings Inference has it, whose response is a list."""

    without_effect = frozenset({"user"})
    model: str | None = None
    query: str
    documents: Annotated[list[str | Document], Field(max_length=MAX_PAIRS)] | None = None
    texts: Annotated[list[str], Field(max_length=MAX_PAIRS)] | None = None
    top_n: int | None = Field(default=None, ge=0)  # 0: all, as in vLLM
    return_documents: bool = True
    return_text: bool = False  # with `texts`
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    max_tokens_per_doc: int | None = None  # of each document, which is cut; 0: all
    use_activation: bool | None = None  # False: of a cross-encoder, scores without its activation


_FIRST, _SECOND = ("text_1", "queries", "data_1"), ("text_2", "documents", "items", "data_2")


class ScoreRequest(Body):
    """Of pairs of texts, under any of vLLM's names, or SGLang's: how likely labels follow each item."""

    without_effect = frozenset({"user"})
    model: str | None = None
    text_1: Texts | None = None
    queries: Texts | None = None
    data_1: Texts | None = None
    text_2: Texts | None = None
    documents: Texts | None = None
    data_2: Texts | None = None
    truncate_prompt_tokens: int | None = Field(default=None, ge=-1)
    use_activation: bool | None = None
    query: str | list[Id] | None = None
    items: Items | Annotated[list[str], Field(max_length=0)] | None = None  # no items, no scores: as SGLang
    label_token_ids: Labels | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None

    @property
    def of_labels(self) -> LabelScoreRequest | None:
        given = {name: value for name in _OF_LABELS if (value := getattr(self, name)) is not None}
        pairs = [name for name in (*_FIRST, *_SECOND) if name != "items" and getattr(self, name) is not None]
        if not given or (pairs and [*given] == ["items"]):
            return None
        if pairs:
            raise InvalidRequest(f"{pairs[0]} does not go with {next(iter(given))}.", fix="Give one of them.", param="items")
        if missing := [name for name in ("query", "items", "label_token_ids") if name not in given]:
            raise InvalidRequest(f"The parameter {missing[0]!r} is required.", param=missing[0])
        return LabelScoreRequest.model_construct(**{"apply_softmax": False, "item_first": False} | given)

    def texts(self, names: tuple[str, ...]) -> tuple[str, list[str]]:
        """The one of these names that is given, and its texts."""
        given = [name for name in names if getattr(self, name) is not None]
        if not given:
            raise InvalidRequest(f"The parameter {names[0]!r} is required.", param=names[0])
        value = getattr(self, given[0])
        texts = [value] if isinstance(value, str) else value
        if len(given) > 1 or not all(isinstance(text, str) for text in texts):
            raise InvalidRequest(f"Give texts, as one of {', '.join(names)}.", param=given[-1])
        return given[0], texts


def make_router(models: Models) -> APIRouter:
    router = APIRouter()

    async def rerank(request: Request, body: RerankRequest = Depends(body_of(RerankRequest))) -> Response:
        made = await until_disconnect(request, _rerank(models, body, request.state.caller))
        return Response(made, media_type="application/json")

    async def score(request: Request, body: ScoreRequest = Depends(body_of(ScoreRequest))) -> Response:
        made = await until_disconnect(request, _score(models, body, request.state.caller))
        return Response(made, media_type="application/json")

    for name, route, model in (("rerank", rerank, RerankRequest), ("score", score, ScoreRequest)):
        router.add_api_route(f"/v1/{name}", route, methods=["POST"], openapi_extra=schema_of(model))
    for path in ("/rerank", "/v2/rerank", "/reranking", "/v1/reranking"):
        router.add_api_route(path, rerank, methods=["POST"], include_in_schema=False)
    router.add_api_route("/score", score, methods=["POST"], include_in_schema=False)
    models.whole_responses |= {
        "/v1/rerank": (RerankRequest, partial(_rerank, models)),
        "/v1/score": (ScoreRequest, partial(_score, models)),
    }
    return router


async def _rerank(models: Models, body: RerankRequest, caller: Caller) -> bytes:
    service = models.of(body.model)
    if (body.documents is None) == (body.texts is None):
        raise InvalidRequest("Give one of documents and texts.", param="documents")
    if body.max_tokens_per_doc is not None and body.max_tokens_per_doc < 0:
        raise InvalidRequest("max_tokens_per_doc must be a non-negative integer.", param="max_tokens_per_doc")
    texts = body.texts or [one if isinstance(one, str) else one.text for one in body.documents or ()]
    how = _How(body.truncate_prompt_tokens, body.max_tokens_per_doc or None, body.use_activation is not False)
    scored = await _scored(service, caller, [body.query], texts, ("query", "documents"), how)
    best = sorted(range(len(texts)), key=lambda i: -scored.scores[i])[: body.top_n or None]
    if body.texts is not None:
        return _json([{"index": i, "score": scored.scores[i]} | ({"text": texts[i]} if body.return_text else {}) for i in best])
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": scored.scores[i]} for i in best]
    if body.return_documents:
        results = [one | {"document": {"text": texts[one["index"]]}} for one in results]
    head = {"id": caller.call.request_id, "object": "list", "model": service.model_name}
    return _json(head | {"results": results, "usage": scored.usage})


async def _score(models: Models, body: ScoreRequest, caller: Caller) -> bytes:
    service = models.of(body.model)
    if (of_labels := body.of_labels) is not None:
        made = await label_scores(service, of_labels, caller)
        usage = {"prompt_tokens": made.num_tokens, "total_tokens": made.num_tokens, "completion_tokens": 0}
        return _json({"object": "scoring", "model": service.model_name, "scores": made.by_item, "usage": usage})
    (name, first), (other, second) = body.texts(_FIRST), body.texts(_SECOND)
    how = _How(body.truncate_prompt_tokens, is_activated=body.use_activation is not False)
    scored = await _scored(service, caller, first, second, (name, other), how)
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scored.scores)]
    head = {"id": caller.call.request_id, "object": "list", "created": int(time.time()), "model": service.model_name}
    return _json(head | {"data": data, "usage": scored.usage})


@dataclass(frozen=True, slots=True)
class _How:
    """`truncate`: a pair, or a text, to so many tokens. `max_second`: tokens of each second text."""

    truncate: int | None = None
    max_second: int | None = None
    is_activated: bool = True


@dataclass(frozen=True, slots=True)
class _Scored:
    scores: list[float]
    num_tokens: int

    @property
    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": self.num_tokens, "total_tokens": self.num_tokens, "completion_tokens": 0}


async def _scored(
    service: Service, caller: Caller, first: list[str], second: list[str], names: tuple[str, str], how: _How
) -> _Scored:
    pairs = pairs_of(first, second, names)
    most = None if how.truncate is None else num_kept(service, how.truncate)
    model = service.ready.model
    if check_scores(model):
        inputs = [Input(*await service.encode_pair(first[i], second[j], most, how.max_second)) for i, j in pairs]
        made = [scores[0] for scores in await _all(service, caller, inputs)]
        made = made if how.is_activated else [without_activation(score, model) for score in made]
        return _Scored(made, sum(len(one.ids) for one in inputs))
    of_second = most if how.max_second is None else min(how.max_second, most or how.max_second)
    texts = [*((text, most) for text in first), *((text, of_second) for text in second)]
    inputs = [
        Input(await service.encode(text, must_fit=True) if num is None else await service.encode_cut(text, num))
        for text, num in texts
    ]
    for i, one in enumerate(inputs):
        if not one.ids:
            raise InvalidRequest("A text is empty.", fix="Give texts.", param=names[0 if i < len(first) else 1])
    vectors = await _all(service, caller, inputs)
    scores = [cosine(vectors[i], vectors[len(first) + j]) for i, j in pairs]
    return _Scored(scores, sum(len(one.ids) for one in inputs))


async def _all(service: Service, caller: Caller, inputs: list[Input]) -> list[list[float]]:
    vectors: list[list[float]] = [[]] * len(inputs)
    async with aclosing(pooled(service, caller, inputs, pooling_of(service))) as made:
        async for i, vector in made:
            vectors[i] = vector
    return vectors
