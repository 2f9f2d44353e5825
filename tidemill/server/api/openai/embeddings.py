"""OpenAI's embeddings, and vLLM's /pooling and /classify, whose bodies are the same."""

from __future__ import annotations

import json
import time
from typing import Any, ClassVar

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from tidemill.errors import InvalidRequest
from tidemill.frontend.scoring import label_probs
from tidemill.server.api.openai.types import ClassifyRequest, EmbeddingRequest, PoolingRequest
from tidemill.server.generation.models import Models
from tidemill.server.generation.pipeline import add_endpoint
from tidemill.server.generation.pooled import (
    Input,
    PooledEndpoint,
    Pooling,
    VectorFormat,
    check_dimensions,
    num_kept,
    pooling_kind,
)
from tidemill.server.generation.prompts import prompts_of, truncated
from tidemill.server.http.body import Body
from tidemill.server.http.responses import until_disconnect

_MAX_IN_HEADER = (
    400  # inputs that the header `metadata` describes: clients and proxies take 64 KiB at most
)


def make_router(models: Models) -> APIRouter:
    router = APIRouter()
    add_endpoint(router, models, "/v1/embeddings", Embeddings)
    add_endpoint(router, models, "/pooling", PoolingEmbeddings)
    add_endpoint(router, models, "/classify", Classes)
    return router


class Embeddings(PooledEndpoint):
    body_type: ClassVar[type[Body]] = EmbeddingRequest
    body: EmbeddingRequest
    object_name, field_name = "embedding", "embedding"

    # ---- from the body to the inputs

    async def read(self) -> Pooling:
        body, model = self.body, self.service.ready.model
        task, is_each = self.task(), self._is_each()
        kind = "none" if is_each else pooling_kind(self.service, body.pooling)
        is_classified = task == "classify" or (task is None and kind == "score")
        if is_classified:
            model.check_pooling("score")
        if not is_classified or body.pooling is not None:
            model.check_pooling("mean" if kind == "score" else kind)
        if is_classified:
            kind = "score"
        inputs = [Input(ids) for ids in await self._prompts()]
        if body.encoding_format == "bytes" and len(inputs) > _MAX_IN_HEADER:
            fix = (
                f"Ask for bytes_only, which has none, or for at most {_MAX_IN_HEADER} inputs "
                "at a time."
            )
            what = f"The header `metadata` of {len(inputs)} inputs is too long."
            raise InvalidRequest(what, fix=fix, param="encoding_format")
        if body.dimensions is not None:
            check_dimensions(self.service, body.dimensions, "dimensions", kind)
        is_unit = body.use_activation is not False
        encoding, dtype, endianness = body.encoding_format, body.embed_dtype, body.endianness
        self._format = VectorFormat(encoding, dtype, endianness, body.dimensions, is_unit)
        self._vectors = [b""] * len(inputs)
        return Pooling(inputs, kind, body.use_activation, body.dimensions or 0)

    def task(self) -> str | None:
        """The model's task in the words of vLLM's clients; None: the task that the model has."""
        return "embed"

    def _is_each(self) -> bool:
        """Tells if each token is to have a vector of its own."""
        own = self.service.ready.model.own_pooling
        is_set = self.service.response_defaults.pooling == "none" and own != "score"
        is_each = self.body.pooling == "none" or (self.body.pooling is None and is_set)
        if is_each and not isinstance(self.body, PoolingRequest):
            what = "In OpenAI's API an input has one vector, not one for each token."
            fix = "Use /pooling, or llama.cpp's /embeddings; or serve without --pooling none."
            raise InvalidRequest(what, fix=fix, param="pooling")
        return is_each

    async def _prompts(self) -> list[list[int]]:
        body, service = self.body, self.service
        if (body.input is None) == (body.messages is None):
            raise InvalidRequest("Give one of input and messages.", param="input")
        num, side = body.truncate_prompt_tokens, body.truncation_side
        if body.messages is not None:
            chat = body.chat()
            options = chat.template_options()
            ids = await service.encode_chat(chat.conversation, to_embed=True, **options)
            if body.add_special_tokens and "add_special_tokens" in body.model_fields_set:
                ids = service.tokenizer.with_special(ids)  # else a template writes those it wants
            return truncated(service, [ids], num, 0, side)
        texts: list[Any] = [body.input] if isinstance(body.input, str) else list(body.input or [])
        are_texts = bool(texts) and all(isinstance(text, str) for text in texts)
        if service.ready.model.pooler is None or num is None or not are_texts:
            prompts = await prompts_of(service, body.input, body.add_special_tokens)
            return truncated(service, prompts, num, 0, side)
        most, side = num_kept(service, num), side or "right"  # an encoder's special tokens stay
        return [
            await service.encode_cut(text, most, side, body.add_special_tokens) for text in texts
        ]

    # ---- what is written

    async def take(self, number: int, vector: list[float]) -> None:
        if self.pooling.kind == "none":
            size = self.service.ready.model.hidden_size
            self._vectors[number] = await self._format.rows(vector, size)
        else:
            self._vectors[number] = self._format.one(vector)

    def head(self) -> dict[str, Any]:
        name, request_id = self.service.model_name, self.caller.call.request_id
        return {"id": request_id, "object": "list", "created": int(time.time()), "model": name}

    def data(self) -> list[dict[str, Any]]:
        return [
            {"index": i, "object": self.object_name, self.field_name: msgspec.Raw(vector)}
            for i, vector in enumerate(self._vectors)
        ]

    def whole(self) -> dict[str, Any]:
        return self.head() | {"data": self.data(), "usage": self.usage()}

    async def answer(self) -> bytes:
        if self.body.encoding_format in ("bytes", "bytes_only"):
            what = f"encoding_format {self.body.encoding_format} is not for responses of JSON, "
            what += "such as a line of a batch."
            raise InvalidRequest(what, fix="Use float or base64.", param="encoding_format")
        return await super().answer()

    async def respond(self, request: Request) -> Response:
        if self.body.encoding_format not in ("bytes", "bytes_only"):
            return await super().respond(request)
        await until_disconnect(request, self.run())
        headers = None
        if self.body.encoding_format == "bytes":
            head = self.head()
            del head["object"]
            metadata = head | {"data": self._places(), "usage": self.usage()}
            headers = {"metadata": json.dumps(metadata)}  # ASCII alone
        data = b"".join(self._vectors)
        return Response(data, media_type="application/octet-stream", headers=headers)

    def _places(self) -> list[dict[str, Any]]:
        """The description of each vector in the response: its bytes, type and shape."""
        places, at = list[dict[str, Any]](), 0
        each = {"embed_dtype": self.body.embed_dtype, "endianness": self.body.endianness}
        width = self.body.dimensions or self.service.ready.model.hidden_size
        for i, vector in enumerate(self._vectors):
            num = len(vector) // self._format.value_bytes
            shape = [num // width, width] if self.pooling.kind == "none" else [num]
            end = at + len(vector)
            places.append({"index": i, **each, "start": at, "end": end, "shape": shape})
            at = end
        return places


class PoolingEmbeddings(Embeddings):
    """vLLM's: the same for embeddings and for the scores of a classifier."""

    body_type: ClassVar[type[Body]] = PoolingRequest
    body: PoolingRequest
    object_name, field_name = "pooling", "data"

    def task(self) -> str | None:
        """The server, not the request, decides whether single tokens have vectors."""
        task = self.body.task
        can_score = self.service.ready.model.own_pooling == "score"
        is_each = self.service.response_defaults.pooling == "none"
        has, other = ("token_embed", "embed") if is_each else ("embed", "token_embed")
        if task is None or task == ("classify" if can_score else has):
            return task
        if task == other and not can_score:
            option = "none" if other == "token_embed" else "auto"
            what = f"Try switching the model's pooling_task via --pooling {option}, "
            raise InvalidRequest(what + "or give `pooling` instead of `task`.", param="task")
        what = f"Unsupported task: {task[:40]!r}."
        if task == "plugin":
            what = "No IOProcessor plugin installed."
        fix = f"This model has the task {'classify' if can_score else has}."
        raise InvalidRequest(what, fix=fix, param="task")


class Classes(PoolingEmbeddings):
    """vLLM's: each input's label and the probabilities of all labels; with `use_activation` false,
    what they are made from."""

    body_type = ClassifyRequest
    body: ClassifyRequest

    def task(self) -> str | None:
        self.body.task = "classify"
        return super().task()

    async def take(self, number: int, vector: list[float]) -> None:
        self._vectors[number] = msgspec.json.encode(vector)

    def data(self) -> list[dict[str, Any]]:
        model = self.service.ready.model
        assert model.labels is not None, "the task was checked"
        data = []
        for i, vector in enumerate(self._vectors):
            scores = msgspec.json.decode(vector, type=list[float])
            probs = scores if self.body.use_activation is False else label_probs(scores, model)
            label = model.labels.names[max(range(len(scores)), key=scores.__getitem__)]
            data.append({"index": i, "label": label, "probs": probs, "num_classes": len(probs)})
        return data
