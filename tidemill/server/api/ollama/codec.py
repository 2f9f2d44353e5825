"""The codecs of Ollama's chat, generate and embed: objects of JSON, a line each."""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import msgspec
from fastapi import Request
from starlette.responses import Response

from tidemill.errors import InvalidRequest, TidemillError
from tidemill.server.api.ollama.types import (
    Chat,
    Embed,
    Embeddings,
    Generate,
    OllamaRequest,
    Tool,
    conversation,
)
from tidemill.server.generation.conversation import template_tools
from tidemill.server.generation.logprobs import as_list, cells, llamacpp_logprobs
from tidemill.server.generation.message import Part
from tidemill.server.generation.models import Models, ModelUnknown
from tidemill.server.generation.pipeline import Codec
from tidemill.server.generation.pooled import (
    Input,
    PooledEndpoint,
    Pooling,
    VectorFormat,
    check_dimensions,
    embedding_pooling,
)
from tidemill.server.generation.prompts import infill
from tidemill.server.generation.request import Choice, Generation, Output, Prompt
from tidemill.server.generation.service import Service
from tidemill.server.http.aside import aside
from tidemill.server.http.responses import JSONLines
from tidemill.types.sampling import SamplingParams

LATEST = ":latest"  # the tag of a name that has none
_THINKS = ("enable_thinking", "thinking", "reasoning_effort", "reasoning_content", "<think>")
_BYTES_PER_MESSAGE = 128  # of JSON, to estimate
_json = msgspec.json.Encoder().encode


def served(models: Models, model: str) -> Service:
    """The service of a name, with or without the tag that names have by default."""
    if not model:
        fix = f"Ask for {models.default.model_name!r}."
        raise InvalidRequest("model is required.", fix=fix, param="model")
    for name in (model.removesuffix(LATEST), model + LATEST):
        with suppress(ModelUnknown):
            return models.of(name)
    return models.of(model)


def can_think(service: Service) -> bool:
    template = service.tokenizer.chat_template
    return template is not None and any(word in template.source for word in _THINKS)


def ns(seconds: float) -> int:
    """Nanoseconds. Clients divide by durations."""
    return max(int(seconds * 1e9), 1)


class LinesCodec(Codec):
    """The codec of what chat and generate share."""

    body: OllamaRequest
    stream_type = JSONLines
    _keeps_context = False

    def find_service(self) -> Service:
        return served(self.models, self.body.model)

    # ---- from the body to the generation

    async def conversation_prompt(
        self, messages: list[dict[str, Any]], tools: list[Tool] | None
    ) -> Prompt:
        service, functions = self.service, [tool.as_function() for tool in tools or ()]
        variables = self._thinking()
        params = self.params()
        ids = await service.encode_chat(
            messages, tools=template_tools(functions), variables=variables or None
        )
        output_format = service.output_format(ids, functions, variables=variables)
        return Prompt(ids, output_format.gated(params), output_format)

    def params(self, stops: tuple[int, ...] = ()) -> SamplingParams:
        body = self.body
        values = body.sampling() | {"max_tokens": body.options.max_tokens, "stop_token_ids": stops}
        if body.logprobs:
            values["logprobs"] = body.top_logprobs
        return SamplingParams(**values)

    def generation_of(self, prompt: Prompt) -> Generation:
        self._entry = llamacpp_logprobs(self.service.tokenizer)
        keeps = self.body.logprobs and not self.body.stream
        return Generation(
            self.service, self.caller, [prompt], ends_with_context=True, keeps_logprobs=keeps
        )

    def _thinking(self) -> dict[str, Any]:
        """Variables of the chat template."""
        think = self.body.think
        if think is None or think == "":
            return {}
        if not can_think(self.service):
            if think is False:
                return {}
            what = f"{self.body.model!r} does not support thinking."
            raise InvalidRequest(what, fix="Leave think out, or send false.", param="think")
        is_on = think is not False
        effort = {"reasoning_effort": think} if isinstance(think, str) else {}
        return {"enable_thinking": is_on, "thinking": is_on, **effort}

    # ---- what is written

    @abstractmethod
    def fields(self, content: str, thinking: str, calls: list[Part]) -> dict[str, Any]:
        """The parts of a message, as this route has them."""

    @abstractmethod
    def empty(self) -> dict[str, Any] | None:
        """The response if there is nothing to generate from: the model is asked to be loaded, which
        it is."""

    def _line(
        self, fields: dict[str, Any], probs: Iterable[bytes], is_last: bool
    ) -> dict[str, Any]:
        line = {"model": self.body.model, "created_at": _now(), **fields, "done": is_last}
        if probs := [part for part in probs if part]:
            line["logprobs"] = as_list(probs)
        return line

    def _last_line(self, fields: dict[str, Any], probs: Iterable[bytes] = ()) -> dict[str, Any]:
        (prompt,) = self.generation.prompts
        (choice,) = prompt.choices
        figures = prompt.figures
        line = self._line(fields, probs, True) | {
            "done_reason": choice.finish_reason or "stop",
            "total_duration": ns(time.monotonic() - figures.begun_s),
            "load_duration": ns(figures.queue_s),
            "prompt_eval_count": figures.num_prompt,
            "prompt_eval_duration": ns(figures.prefill_s),
            "eval_count": figures.num_output,
            "eval_duration": ns(figures.decode_s),
        }
        return line | ({"context": prompt.ids + choice.token_ids} if self._keeps_context else {})

    def _new(self, output: Output) -> dict[str, Any] | None:
        """The fields of new output; None if it says nothing. A call is sent when it is whole, since
        its arguments are an object; one that was cut off becomes text."""
        if output.choice.reader is None:
            return self.fields(output.text.text, "", []) if output.text.text else None
        content, thinking, calls = "", "", []
        for stage, part, text in output.events:
            if stage == "end" and part.kind == "call":
                whole = part.arguments() is not None
                calls += [part] if whole else []
                content += "" if whole else _cut_call(part)
            elif stage == "more" and part.kind != "call":
                content += text if part.kind == "text" else ""
                thinking += text if part.kind == "reasoning" else ""
        return self.fields(content, thinking, calls) if content or thinking or calls else None

    def event(self, output: Output) -> Iterable[bytes]:
        self._keep_ids(output)
        fields, probs = self._new(output), cells(output.logprobs, self._entry)
        if fields is not None or probs:
            yield _json(self._line(fields or self.fields("", "", []), [probs], False)) + b"\n"

    def end(self) -> Iterable[bytes]:
        return (_json(self._last_line(self.fields("", "", []))) + b"\n",)

    def error(self, error: TidemillError) -> Iterable[bytes]:
        return (_json({"error": str(error)}) + b"\n",)

    def _keep_ids(self, output: Output) -> None:
        if self._keeps_context:
            output.choice.token_ids += output.token_ids

    def keep(self, output: Output) -> None:
        super().keep(output)
        self._keep_ids(output)
        output.choice.cells.append(cells(output.logprobs, self._entry))

    async def whole(self) -> dict[str, Any]:
        (choice,) = self.generation.choices
        content, thinking, calls = _parts(choice)
        return self._last_line(self.fields(content, thinking, calls), choice.cells)

    async def respond(self, request: Request) -> Response:
        if (fields := self.empty()) is None:
            return await super().respond(request)
        line = self._line(fields, [], True) | {"done_reason": "load"}
        media_type = JSONLines.media_type if self.body.stream else "application/json"
        return Response(_json(line) + b"\n", media_type=media_type)


class ChatCodec(LinesCodec):
    body_type = Chat
    body: Chat

    def empty(self) -> dict[str, Any] | None:
        return None if self.body.messages else self.fields("", "", [])

    async def read(self) -> Generation:
        body = self.body
        messages = await aside(
            lambda: conversation(body.messages), _BYTES_PER_MESSAGE * len(body.messages)
        )
        return self.generation_of(await self.conversation_prompt(messages, body.tools))

    def fields(self, content: str, thinking: str, calls: list[Part]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = [_call(part) for part in calls]
        return {"message": message}


class GenerateCodec(LinesCodec):
    body_type = Generate
    body: Generate

    def empty(self) -> dict[str, Any] | None:
        self.body.check()
        return None if self.body.prompt or self.body.suffix else {"response": ""}

    async def read(self) -> Generation:
        body, service = self.body, self.service
        self._keeps_context = not body.raw and not body.suffix
        if self._keeps_context and service.tokenizer.chat_template is not None:
            system = [{"role": "system", "content": body.system}] if body.system else []
            messages = [*system, {"role": "user", "content": body.prompt}]
            prompt = await self.conversation_prompt(messages, None)
            prompt.ids = append_context(service, body.context or [], prompt.ids)
            return self.generation_of(prompt)
        if body.system:
            what = "This model has no chat template, so that there can be no system message."
            raise InvalidRequest(what, param="system")
        if body.suffix:
            ids, stops = await infill(service, body.prompt, body.suffix)
            return self.generation_of(Prompt(ids, self.params(stops)))
        ids = append_context(service, body.context or [], await service.encode(body.prompt))
        return self.generation_of(Prompt(ids, self.params()))

    def fields(self, content: str, thinking: str, calls: list[Part]) -> dict[str, Any]:
        return {"response": content} | ({"thinking": thinking} if thinking else {})


def append_context(service: Service, context: list[int], prompt: list[int]) -> list[int]:
    """A prompt after the tokens of an earlier response; a text begins only once."""
    begins_again = context and prompt[:1] == [service.tokenizer.bos_token_id]
    return context + prompt[1:] if begins_again else context + prompt


def _parts(choice: Choice) -> tuple[str, str, list[Part]]:
    """Content, thinking and calls of a whole message."""
    if choice.reader is None:
        return "".join(choice.texts), "", []
    cut = "".join(_cut_call(part) for part in choice.reader.calls if part.arguments() is None)
    calls = [part for part in choice.reader.calls if part.arguments() is not None]
    return choice.reader.text_of("text") + cut, choice.reader.text_of("reasoning"), calls


def _call(part: Part) -> dict[str, Any]:
    function = {"index": part.index, "name": part.name, "arguments": part.arguments()}
    return {"id": part.call_id, "function": function}


def _cut_call(part: Part) -> str:
    return f'{{"name": {json.dumps(part.name)}, "arguments": {part.text}'


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


# ---- embeddings


class TextEmbeddings(PooledEndpoint):
    """The embeddings of texts, which both routes share."""

    body: Embed | Embeddings

    def __init__(self, models: Models, body: Any, caller: Any) -> None:
        self._begun_s = time.monotonic()
        super().__init__(models, body, caller)

    def find_service(self) -> Service:
        return served(self.models, self.body.model)

    async def read_texts(
        self, texts: list[str], truncate: bool, dimensions: int | None = None
    ) -> Pooling:
        service, kind = self.service, embedding_pooling(self.service)
        if dimensions is not None:
            check_dimensions(service, dimensions, "dimensions")
        most = service.max_context
        inputs = [
            Input(await (service.encode_cut(text, most) if truncate else service.encode(text)))
            for text in texts
        ]
        self._format = VectorFormat(dimensions=dimensions)
        self.vectors = [msgspec.Raw()] * len(inputs)
        return Pooling(inputs, kind)

    async def take(self, number: int, vector: list[float]) -> None:
        self.vectors[number] = msgspec.Raw(self._format.one(vector))


class EmbedEndpoint(TextEmbeddings):
    body_type = Embed
    body: Embed

    async def read(self) -> Pooling:
        body = self.body
        texts = body.input if isinstance(body.input, list) else [body.input] if body.input else []
        return await self.read_texts(texts, body.truncate, body.dimensions)

    def whole(self) -> dict[str, Any]:
        return {
            "model": self.body.model,
            "embeddings": self.vectors,
            "total_duration": ns(time.monotonic() - self._begun_s),
            "load_duration": 1,
            "prompt_eval_count": self.pooling.num_tokens,
        }


class EmbeddingsEndpoint(TextEmbeddings):
    body_type = Embeddings
    body: Embeddings

    async def read(self) -> Pooling:
        return await self.read_texts([self.body.prompt] if self.body.prompt else [], True)

    def whole(self) -> dict[str, Any]:
        return {"embedding": self.vectors[0] if self.vectors else []}
