"""The likelihood of labels after a prompt and each of some items: /generative_scoring as vLLM has
it, and the `items` of SGLang's /v1/score."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter
from pydantic import Field

from tidemill.errors import InvalidRequest
from tidemill.frontend.scoring import MAX_PAIRS
from tidemill.server.generation.models import Models
from tidemill.server.generation.pipeline import Endpoint, add_endpoint
from tidemill.server.generation.pooled import Asked, run_each
from tidemill.server.generation.service import Service
from tidemill.server.http.access import Caller
from tidemill.server.http.body import Body
from tidemill.types.sampling import MAX_LOGPROB_IDS, SamplingParams
from tidemill.types.wire import Delta

Id = Annotated[int, Field(ge=0, lt=2**31)]
Items = (
    str
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PAIRS)]
    | Annotated[
        list[Annotated[list[Id], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PAIRS)
    ]
)
Labels = Annotated[list[Id], Field(min_length=1, max_length=MAX_LOGPROB_IDS)]


class LabelScoreRequest(Body):
    """vLLM's: the score of an item is the probability of the first label."""

    model: str | None = None
    query: str | list[Id]
    items: Items
    label_token_ids: Labels
    apply_softmax: bool = True  # over the labels alone, so that they add up to 1
    item_first: bool = False  # the prompt is the item, then the query


@dataclass(frozen=True, slots=True)
class LabelScores:
    by_item: list[list[float]]  # in the order of the labels
    num_tokens: int  # of all prompts


def make_router(models: Models) -> APIRouter:
    router = APIRouter()
    add_endpoint(router, models, "/generative_scoring", GenerativeScoring)
    return router


class GenerativeScoring(Endpoint):
    body_type = LabelScoreRequest
    body: LabelScoreRequest

    async def answer(self) -> bytes:
        scores = await label_scores(self.service, self.body, self.caller)
        data = [
            {"index": i, "object": "score", "score": each[0]}
            for i, each in enumerate(scores.by_item)
        ]
        usage = {
            "prompt_tokens": scores.num_tokens,
            "completion_tokens": len(data),
            "total_tokens": scores.num_tokens + len(data),
        }
        return msgspec.json.encode(
            {
                "id": self.caller.call.request_id,
                "object": "list",
                "created": int(time.time()),
                "model": self.service.model_name,
                "data": data,
                "usage": usage,
            }
        )


async def label_scores(service: Service, body: LabelScoreRequest, caller: Caller) -> LabelScores:
    items = [body.items] if isinstance(body.items, str) else body.items
    size = service.ready.model.vocab_size
    if wrong := [label for label in body.label_token_ids if label >= size]:
        what = f"Token ID {wrong[0]} is out of vocabulary: the model has {size} tokens."
        raise InvalidRequest(what, fix="Give ids of /tokenize.", param="label_token_ids")
    if not items:
        return LabelScores([], 0)
    query = (
        await service.encode(body.query)
        if isinstance(body.query, str) and not isinstance(items[0], str)
        else body.query
    )
    _check_lengths(service, query, items)
    params = SamplingParams(
        max_tokens=1, temperature=0.0, logprobs=0, logprob_token_ids=tuple(body.label_token_ids)
    )
    num_tokens = 0

    async def request(item: Any) -> Asked:
        nonlocal num_tokens
        whole = item + query if body.item_first else query + item
        prompt = await service.encode(whole) if isinstance(whole, str) else whole
        num_tokens += len(prompt)
        return prompt, params, []

    by_item = [list[float]()] * len(items)
    async with aclosing(run_each(service, caller, items, request, _top)) as results:
        async for number, logprobs in results:
            values = [math.exp(logprobs[label]) for label in body.label_token_ids]
            total = sum(values) if body.apply_softmax else 1.0
            by_item[number] = [value / total if total else 1.0 / len(values) for value in values]
    return LabelScores(by_item, num_tokens)


def _top(delta: Delta) -> dict[int, float] | None:
    """The labels' log-probabilities, which come with the only token."""
    return dict(delta.logprobs[0].top) if delta.logprobs else None


def _check_lengths(
    service: Service, query: str | list[int], items: Sequence[str | list[int]]
) -> None:
    """Before any prompt is made of them: there may be thousands of items."""
    for item in items:
        if isinstance(item, str) is not isinstance(query, str):
            raise InvalidRequest(
                "query has token ids, and items are texts.",
                fix="Give both in the same way.",
                param="items",
            )
        if isinstance(item, list) and len(query) + len(item) >= service.max_context:
            raise InvalidRequest(
                f"The query and an item have {len(query) + len(item)} tokens; the context is "
                f"{service.max_context}.",
                fix="Shorten the query or the item.",
                param="items",
            )
