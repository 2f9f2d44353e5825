"""Text to token ids and back, under the names of vLLM, SGLang and llama.cpp."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Depends
from starlette.responses import Response

from tidemill.errors import InvalidRequest
from tidemill.server.api.openai.types import DetokenizeRequest, TokenizeRequest
from tidemill.server.generation.models import Models
from tidemill.server.generation.service import Service
from tidemill.server.http.aside import aside, encoded
from tidemill.server.http.body import body_of, schema_of

_BYTES_PER_ID = 8  # of JSON
_json = msgspec.json.Encoder().encode


def make_router(models: Models) -> APIRouter:
    router = APIRouter()

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        return _tokenizer_card(models.default)

    @router.post("/tokenize", openapi_extra=schema_of(TokenizeRequest))
    async def tokenize(body: TokenizeRequest = Depends(body_of(TokenizeRequest))) -> Response:
        service = models.of(body.model)
        if sum(field is not None for field in (body.prompt, body.content, body.messages)) != 1:
            raise InvalidRequest("Give one of prompt, content and messages.", param="prompt")
        return Response(await _tokenized(service, body), media_type="application/json")

    @router.post("/detokenize", openapi_extra=schema_of(DetokenizeRequest))
    async def detokenize(body: DetokenizeRequest = Depends(body_of(DetokenizeRequest))) -> Response:
        service = models.of(body.model)
        text = await service.decode(body.tokens, body.skip_special_tokens)
        response = {
            "prompt": text,
            "content": text,
            "text": text,
        }  # as vLLM, llama.cpp and SGLang call it
        return Response(
            await aside(partial(_json, response), len(text)), media_type="application/json"
        )

    for route in (tokenize, detokenize):
        router.add_api_route(
            f"/v1/{route.__name__}", route, methods=["POST"], include_in_schema=False
        )  # SGLang's names
    return router


def _tokenizer_card(service: Service) -> dict[str, Any]:
    """The names are those of tokenizer_config.json."""
    tokenizer, template = service.tokenizer, service.tokenizer.chat_template
    ends = tokenizer.eos_token_ids
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None
        if tokenizer.bos_token_id is None
        else tokenizer.token_name(tokenizer.bos_token_id),
        "eos_token": tokenizer.token_name(ends[0]) if ends else None,
        "model_max_length": service.max_context,
        "chat_template": None if template is None else template.source,
    }


async def _tokenized(service: Service, body: TokenizeRequest) -> bytes:
    if body.messages is not None:
        chat = body.chat()
        ids = await service.encode_chat(chat.conversation, **chat.template_options())
    else:
        text = body.prompt if body.prompt is not None else body.content or ""
        wanted = (
            body.add_special_tokens if body.add_special_tokens is not None else body.add_special
        )
        add_special = body.prompt is not None if wanted is None else wanted
        if isinstance(text, list):
            several = [await service.encode(item, add_special) for item in text]
            return await aside(
                partial(_told_of_several, service, several), _BYTES_PER_ID * sum(map(len, several))
            )
        ids = await service.encode(text, add_special)
    return await aside(partial(_told, service, ids, body), _BYTES_PER_ID * len(ids))


def _told_of_several(service: Service, several: list[list[int]]) -> bytes:
    counts = list(map(len, several))
    tokens = encoded(map(encoded, several))
    return _json({"tokens": tokens, "count": counts, "max_model_len": service.max_context})


def _told(service: Service, ids: list[int], body: TokenizeRequest) -> bytes:
    tokenizer = service.tokenizer
    response: dict[str, Any] = {
        "tokens": None,
        "count": len(ids),
        "max_model_len": service.max_context,
        "token_strs": None,
    }
    if body.return_token_strs:
        response["token_strs"] = encoded(map(tokenizer.token_name, ids))
    pieces = ({"id": token, "piece": _piece(tokenizer.token_bytes(token))} for token in ids)
    response["tokens"] = encoded(pieces if body.with_pieces else ids)
    return _json(response)


def _piece(data: bytes) -> str | list[int]:
    """A token's text; its bytes if they are none."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
