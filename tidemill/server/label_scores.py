"""How likely labels follow a prompt and each of some items: /generative_scoring as vLLM has it, and the `items` of SGLang's
/v1/score."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from tidemill.errors import InvalidRequest
from tidemill.frontend.scoring import MAX_PAIRS
from tidemill.sampling import MAX_LOGPROB_IDS, SamplingParams
from tidemill.server.body import Body, body_of, schema_of
from tidemill.server.guard import Caller
from tidemill.server.models import Models
from tidemill.server.openai import merge
from tidemill.server.service import Service
from tidemill.server.sse import until_disconnect

_AT_ONCE = 64  # items of one request

_json = msgspec.json.Encoder().encode

Items = (
    str
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PAIRS)]
    | Annotated[list[Annotated[list[int], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PAIRS)]
)
Labels = Annotated[list[int], Field(min_length=1, max_length=MAX_LOGPROB_IDS)]


class LabelScoreRequest(Body):
    """vLLM's: the score of an item is the probability of the first label."""

    model: str | None = None
    query: str | list[int]
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

    @router.post("/generative_scoring", openapi_extra=schema_of(LabelScoreRequest))
    async def scoring(request: Request, body: LabelScoreRequest = Depends(body_of(LabelScoreRequest))) -> Response:
        made = await until_disconnect(request, _scoring(models, body, request.state.caller))
        return Response(made, media_type="application/json")

    return router


async def _scoring(models: Models, body: LabelScoreRequest, caller: Caller) -> bytes:
    service = models.of(body.model)
    made = await label_scores(service, body, caller)
    data = [{"index": i, "object": "score", "score": scores[0]} for i, scores in enumerate(made.by_item)]
    usage = {"prompt_tokens": made.num_tokens, "completion_tokens": len(data), "total_tokens": made.num_tokens + len(data)}
    head = {"id": caller.call.request_id, "object": "list", "created": int(time.time()), "model": service.model_name}
    return _json(head | {"data": data, "usage": usage})


async def label_scores(service: Service, body: LabelScoreRequest, caller: Caller) -> LabelScores:
    query = await service.encode(body.query) if isinstance(body.query, str) else body.query
    prompts = []
    for item in [body.items] if isinstance(body.items, str) else body.items:
        prompt: list[int]
        if isinstance(item, str) and isinstance(body.query, str):
            prompt = await service.encode(item + body.query if body.item_first else body.query + item)
        elif isinstance(item, str):
            raise InvalidRequest("query has token ids, and items are texts.", fix="Give both in the same way.", param="items")
        else:
            prompt = [*item, *query] if body.item_first else [*query, *item]
        prompts.append(prompt)
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, logprob_token_ids=tuple(body.label_token_ids))
    by_item: list[list[float]] = [[]] * len(prompts)
    left = iter(enumerate(prompts))
    streams = [_in_turn(service, caller, left, params) for _ in range(min(_AT_ONCE, len(prompts)))]
    async with aclosing(merge(streams)) as merged:
        async for _, (i, logprobs) in merged:
            values = [math.exp(logprobs[label]) for label in body.label_token_ids]
            total = sum(values) if body.apply_softmax else 1.0
            by_item[i] = [value / total if total else 1.0 / len(values) for value in values]
    return LabelScores(by_item, sum(map(len, prompts)))


async def _in_turn(
    service: Service, caller: Caller, left: Iterator[tuple[int, list[int]]], params: SamplingParams
) -> AsyncGenerator[tuple[int, dict[int, float]], None]:
    """The labels' logprobs after one prompt after another, while there are any left."""
    for i, prompt in left:
        async with aclosing(service.stream(caller, prompt, params, i)) as outputs:
            async for delta, _ in outputs:
                for made in delta.logprobs or ():
                    yield i, dict(made.top)
