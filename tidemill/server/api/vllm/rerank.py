"""Scores of pairs of texts: /v1/rerank as Jina, Cohere, vLLM and llama.cpp have it, /v1/score as
vLLM has it. By a cross-encoder, or by the cosine of embeddings of any other model."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter
from pydantic import Field

from tidemill.errors import InvalidRequest
from tidemill.frontend.scoring import MAX_PAIRS, check_scores, cosine, pairs_of, without_activation
from tidemill.server.api.vllm.label_scores import (
    Id,
    Items,
    Labels,
    LabelScoreRequest,
    label_scores,
)
from tidemill.server.generation.models import Models
from tidemill.server.generation.pipeline import add_endpoint
from tidemill.server.generation.pooled import Input, PooledEndpoint, Pooling, num_kept, pooling_kind
from tidemill.server.http.body import Body

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
    """A request to score pairs of texts, under any of vLLM's names, or SGLang's: how likely labels
    follow each item."""

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
    items: Items | Annotated[list[str], Field(max_length=0)] | None = (
        None  # no items, no scores: as SGLang
    )
    label_token_ids: Labels | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None

    @property
    def of_labels(self) -> LabelScoreRequest | None:
        fields = {name: value for name in _OF_LABELS if (value := getattr(self, name)) is not None}
        pairs = [
            name
            for name in (*_FIRST, *_SECOND)
            if name != "items" and getattr(self, name) is not None
        ]
        if not fields or (pairs and [*fields] == ["items"]):
            return None
        if pairs:
            raise InvalidRequest(
                f"{pairs[0]} does not go with {next(iter(fields))}.",
                fix="Give one of them.",
                param="items",
            )
        if missing := [
            name for name in ("query", "items", "label_token_ids") if name not in fields
        ]:
            raise InvalidRequest(f"The parameter {missing[0]!r} is required.", param=missing[0])
        return LabelScoreRequest.model_construct(
            **{"apply_softmax": False, "item_first": False} | fields
        )

    def texts(self, names: tuple[str, ...]) -> tuple[str, list[str]]:
        """The one of these names that is given, and its texts."""
        used = [name for name in names if getattr(self, name) is not None]
        if not used:
            raise InvalidRequest(f"The parameter {names[0]!r} is required.", param=names[0])
        value = getattr(self, used[0])
        texts = [value] if isinstance(value, str) else value
        if len(used) > 1 or not all(isinstance(text, str) for text in texts):
            raise InvalidRequest(f"Give texts, as one of {', '.join(names)}.", param=used[-1])
        return used[0], texts


class PairScores(PooledEndpoint):
    """Scores of pairs: by a cross-encoder, or by the cosine of the embeddings of their texts."""

    body: RerankRequest | ScoreRequest

    async def read_pairs(
        self,
        first: list[str],
        second: list[str],
        names: tuple[str, str],
        max_second: int | None = None,
    ) -> Pooling:
        """`names`: of the fields with the texts. `max_second`: tokens of each second text."""
        service, num = self.service, self.body.truncate_prompt_tokens
        self._pairs, self._num_first = pairs_of(first, second, names), len(first)
        most = None if num is None else num_kept(service, num)
        self._is_cross_encoder = check_scores(service.ready.model)
        if self._is_cross_encoder:
            inputs = [
                Input(*await service.encode_pair(first[i], second[j], most, max_second))
                for i, j in self._pairs
            ]
        else:
            of_second = most if max_second is None else min(max_second, most or max_second)
            texts = [*((text, most) for text in first), *((text, of_second) for text in second)]
            inputs = [Input(await self._encoded(text, limit)) for text, limit in texts]
            for i, pair in enumerate(inputs):
                if not pair.ids:
                    name = names[0 if i < len(first) else 1]
                    raise InvalidRequest("A text is empty.", fix="Give texts.", param=name)
        self._vectors: list[list[float]] = [[]] * len(inputs)
        return Pooling(inputs, pooling_kind(service))

    async def _encoded(self, text: str, limit: int | None) -> list[int]:
        if limit is None:
            return await self.service.encode(text, must_fit=True)
        return await self.service.encode_cut(text, limit)

    async def take(self, number: int, vector: list[float]) -> None:
        self._vectors[number] = vector

    def scores(self) -> list[float]:
        if not self._is_cross_encoder:
            vectors, num = self._vectors, self._num_first
            return [cosine(vectors[i], vectors[num + j]) for i, j in self._pairs]
        scores = [vector[0] for vector in self._vectors]
        if self.body.use_activation is not False:
            return scores
        return [without_activation(score, self.service.ready.model) for score in scores]


class Rerank(PairScores):
    body_type = RerankRequest
    body: RerankRequest

    async def read(self) -> Pooling:
        body = self.body
        if (body.documents is None) == (body.texts is None):
            raise InvalidRequest("Give one of documents and texts.", param="documents")
        most = body.max_tokens_per_doc
        if most is not None and most < 0:
            what = "max_tokens_per_doc must be a non-negative integer."
            raise InvalidRequest(what, param="max_tokens_per_doc")
        documents = body.documents or ()
        self._texts = body.texts or [
            document if isinstance(document, str) else document.text for document in documents
        ]
        return await self.read_pairs(
            [body.query], self._texts, ("query", "documents"), most or None
        )

    def whole(self) -> Any:
        body, texts, scores = self.body, self._texts, self.scores()
        best = sorted(range(len(texts)), key=lambda i: -scores[i])[: body.top_n or None]
        if body.texts is not None:
            shown = [{"text": texts[i]} if body.return_text else {} for i in best]
            return [
                {"index": i, "score": scores[i]} | more for i, more in zip(best, shown, strict=True)
            ]
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": scores[i]} for i in best]
        if body.return_documents:
            results = [
                result | {"document": {"text": texts[result["index"]]}} for result in results
            ]
        request_id = self.caller.call.request_id
        head = {"id": request_id, "object": "list", "model": self.service.model_name}
        return head | {"results": results, "usage": self.usage()}


class Score(PairScores):
    body_type = ScoreRequest
    body: ScoreRequest

    async def read(self) -> Pooling:
        (name, first), (other, second) = self.body.texts(_FIRST), self.body.texts(_SECOND)
        return await self.read_pairs(first, second, (name, other))

    async def answer(self) -> bytes:
        of_labels = self.body.of_labels
        if of_labels is None:
            return await super().answer()
        scores = await label_scores(self.service, of_labels, self.caller)
        num = scores.num_tokens
        usage = {"prompt_tokens": num, "total_tokens": num, "completion_tokens": 0}
        head = {"object": "scoring", "model": self.service.model_name}
        return msgspec.json.encode(head | {"scores": scores.by_item, "usage": usage})

    def whole(self) -> dict[str, Any]:
        return {
            "id": self.caller.call.request_id,
            "object": "list",
            "created": int(time.time()),
            "model": self.service.model_name,
            "data": [
                {"index": i, "object": "score", "score": score}
                for i, score in enumerate(self.scores())
            ],
            "usage": self.usage(),
        }


def make_router(models: Models) -> APIRouter:
    router = APIRouter()
    for endpoint, paths in (
        (Rerank, ("/v1/rerank", "/rerank", "/v2/rerank", "/reranking", "/v1/reranking")),
        (Score, ("/v1/score", "/score")),
    ):
        for path in paths:
            add_endpoint(router, models, path, endpoint, include_in_schema=path == paths[0])
    return router
