"""How likely labels follow a prompt and each of some items: /generative_scoring as vLLM has it, and the `items` of SGLang's
/v1/score."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from tidemill.errors import InvalidRequest
from tidemill.frontend.scoring import MAX_PAIRS
from tidemill.sampling import MAX_LOGPROB_IDS, SamplingParams
from tidemill.server.api.openai.routes import merge
from tidemill.server.generation.models import Models
from tidemill.server.generation.service import Service
from tidemill.server.http.access import Caller
from tidemill.server.http.body import Body, body_of, schema_of
from tidemill.server.http.responses import until_disconnect

_json = msgspec.json.Encoder().encode

Id = Annotated[int, Field(ge=0, lt=2**31)]
Items = (
    str
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PAIRS)]
    | Annotated[list[Annotated[list[Id], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PAIRS)]
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
    items = [body.items] if isinstance(body.items, str) else body.items
    size = service.ready.model.vocab_size
    if wrong := [label for label in body.label_token_ids if label >= size]:
        what = f"Token ID {wrong[0]} is out of vocabulary: the model has {size} tokens."
        raise InvalidRequest(what, fix="Give ids of /tokenize.", param="label_token_ids")
    if not items:
        return LabelScores([], 0)
    query = await service.encode(body.query) if isinstance(body.query, str) and not isinstance(items[0], str) else body.query
    _check_lengths(service, query, items)
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, logprob_token_ids=tuple(body.label_token_ids))
    by_item, num_tokens = [list[float]()] * len(items), 0
    left, num = enumerate(items), min(service.num_at_once, len(items))
    streams = [_in_turn(service, caller, query, left, body.item_first, params) for _ in range(num)]
    async with aclosing(merge(streams)) as merged:
        async for _, (i, num, logprobs) in merged:
            num_tokens += num
            values = [math.exp(logprobs[label]) for label in body.label_token_ids]
            total = sum(values) if body.apply_softmax else 1.0
            by_item[i] = [value / total if total else 1.0 / len(values) for value in values]
    return LabelScores(by_item, num_tokens)


def _check_lengths(service: Service, query: str | list[int], items: Sequence[str | list[int]]) -> None:
    """Before any prompt is made of them: there may be thousands of items."""
    for item in items:
        if isinstance(item, str) is not isinstance(query, str):
            raise InvalidRequest("query has token ids, and items are texts.", fix="Give both in the same way.", param="items")
        if isinstance(item, list) and len(query) + len(item) >= service.max_context:
            raise InvalidRequest(
                f"The query and an item have {len(query) + len(item)} tokens; the context is {service.max_context}.",
                fix="Shorten the query or the item.",
                param="items",
            )


async def _in_turn(
    service: Service, caller: Caller, query: Any, left: Iterator[tuple[int, Any]], item_first: bool, params: SamplingParams
) -> AsyncGenerator[tuple[int, int, dict[int, float]], None]:
    """The number of tokens and the labels' logprobs of one prompt after another, while there are any left. `query` and items are
    both texts, or both ids."""
    for i, item in left:
        whole = item + query if item_first else query + item
        prompt = await service.encode(whole) if isinstance(whole, str) else whole
        async with aclosing(service.stream(caller, prompt, params, i)) as outputs:
            async for delta, _ in outputs:
                for made in delta.logprobs or ():
                    yield i, len(prompt), dict(made.top)
