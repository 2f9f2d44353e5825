"""OpenAI routes: models, completions, chat completions."""

from __future__ import annotations

import asyncio
import base64
import struct
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from tidemill.errors import InvalidRequest, TidemillError
from tidemill.frontend.output import TextDelta
from tidemill.frontend.parsers import Reading
from tidemill.sampling import SamplingParams
from tidemill.server.body import body_of, schema_of
from tidemill.server.errors import error_body
from tidemill.server.guard import Caller
from tidemill.server.openai_types import (
    MAX_CHOICES,
    ChatMessages,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    SamplingRequest,
    TokenizeRequest,
)
from tidemill.server.openai_writers import ChatWriter, CompletionWriter, Writer
from tidemill.server.service import Service
from tidemill.server.sse import EventStream, until_disconnect
from tidemill.wire import Delta, Timings

_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class _Usage:
    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0
    num_reasoning: int = 0

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_output,
            "total_tokens": self.num_prompt + self.num_output,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning},
        }


@dataclass(slots=True)
class _Clock:
    """Where a request's time went: as measured here, and as reported by the engine."""

    begun_s: float = field(default_factory=time.monotonic)
    first_s: float = 0.0
    engine: Timings | None = None

    def body(self, num_output: int) -> dict[str, float]:
        now = time.monotonic()
        decode_s = now - self.first_s if self.engine is None else self.engine.decode_s  # several tokens may arrive here together
        times = {
            "total_ms": 1000 * (now - self.begun_s),
            "first_token_ms": 1000 * (self.first_s - self.begun_s),
            "tokens_per_second": (num_output - 1) / max(decode_s, 1e-6) if num_output > 1 else 0.0,
        }
        if self.engine is not None:
            engine = self.engine
            times |= {
                "queue_ms": 1000 * engine.queue_s,
                "prefill_ms": 1000 * engine.prefill_s,
                "decode_ms": 1000 * engine.decode_s,
            }
        return {name: round(value, 3) for name, value in times.items()}


@dataclass(slots=True)
class _Job:
    """A completion or a chat completion: what to run, and the writer of its response."""

    model: str
    prompts: list[list[int]]
    params: SamplingParams
    asked: SamplingRequest
    writer: Writer
    caller: Caller
    reading: Reading | None = None  # of a chat
    usage: _Usage = field(default_factory=_Usage)
    created_s: int = field(default_factory=lambda: int(time.time()))
    clock: _Clock = field(default_factory=_Clock)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    def body(self, name: str, choices: list[dict[str, Any]], usage: bool, is_last: bool = False) -> dict[str, Any]:
        request_id = self.caller.call.request_id
        body = {"id": request_id, "object": name, "created": self.created_s, "model": self.model, "choices": choices}
        if usage:
            body["usage"] = self.usage.body()
        if is_last and self.asked.timings:
            body["timings"] = self.clock.body(self.usage.num_output)
        return body

    def chunk(self, choice: dict[str, Any], is_last: bool = False) -> bytes:
        return _json(self.body(self.writer.chunk_name, [choice], False, is_last))


def make_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(service)]}

    @router.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> dict[str, Any]:
        service.check_model(model_id)
        return _model_card(service)

    @router.post("/v1/completions", openapi_extra=schema_of(CompletionRequest))
    async def completions(request: Request, body: CompletionRequest = Depends(body_of(CompletionRequest))) -> Response:
        return await _respond(service, request, body, _prepare_completion)

    @router.post("/v1/chat/completions", openapi_extra=schema_of(ChatRequest))
    async def chat_completions(request: Request, body: ChatRequest = Depends(body_of(ChatRequest))) -> Response:
        return await _respond(service, request, body, _prepare_chat)

    @router.post("/v1/embeddings", openapi_extra=schema_of(EmbeddingRequest))
    async def embeddings(request: Request, body: EmbeddingRequest = Depends(body_of(EmbeddingRequest))) -> Response:
        made = await until_disconnect(request, _embeddings(service, body, request.state.caller))
        return Response(made, media_type="application/json")

    @router.post("/v1/chat/completions/render", openapi_extra=schema_of(ChatMessages))
    async def render(body: ChatMessages = Depends(body_of(ChatMessages))) -> Response:
        """The prompt, without a completion."""
        service.check_model(body.model)
        text = await service.render_chat(body.conversation(), **body.how())
        return _json_response({"prompt": text, "prompt_token_ids": await service.encode_chat(body.conversation(), **body.how())})

    @router.post("/tokenize", openapi_extra=schema_of(TokenizeRequest))
    async def tokenize(body: TokenizeRequest = Depends(body_of(TokenizeRequest))) -> Response:
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("Give either prompt or messages.", param="prompt")
        if body.messages is not None:
            ids = await service.encode_chat([message.model_dump(exclude_none=True) for message in body.messages])
        else:
            ids = await service.encode(body.prompt or "", body.add_special_tokens)
        return _json_response({"tokens": ids, "count": len(ids), "max_model_len": service.max_context})

    @router.post("/detokenize", openapi_extra=schema_of(DetokenizeRequest))
    async def detokenize(body: DetokenizeRequest = Depends(body_of(DetokenizeRequest))) -> Response:
        service.check_model(body.model)
        return _json_response({"prompt": await service.decode(body.tokens)})

    @router.get("/v1/requests/{request_id}/explain")
    async def explain(request: Request, request_id: str) -> dict[str, Any]:
        """Where its time went, for each of its prompts and samples."""
        caller = request.state.caller
        stories = service.explainer.find(request_id, None if caller.is_admin else caller.tenant)
        if not stories:
            raise RequestUnknown(f"There are no records of a request {request_id[:100]!r}.", param="request_id")
        return {"id": request_id, "object": "list", "data": [story.body() for story in stories]}

    @router.delete("/v1/requests/{request_id}")
    async def cancel(request: Request, request_id: str) -> dict[str, Any]:
        caller = request.state.caller
        if not service.cancel(request_id, None if caller.is_admin else caller.tenant):
            raise RequestUnknown(f"There is no request {request_id[:100]!r} in progress.", param="request_id")
        return {"id": request_id, "object": "request", "cancelled": True}

    service.whole_responses |= {
        "/v1/completions": (CompletionRequest, partial(_respond_whole, service, _prepare_completion)),
        "/v1/chat/completions": (ChatRequest, partial(_respond_whole, service, _prepare_chat)),
        "/v1/embeddings": (EmbeddingRequest, partial(_embeddings, service)),
    }
    return router


def _json_response(body: dict[str, Any]) -> Response:
    """Encoded at once: FastAPI would look at each item of a list of token ids."""
    return Response(_json(body), media_type="application/json")


class RequestUnknown(InvalidRequest):
    status = 404


def _model_card(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created_s,
        "owned_by": "tidemill",
        "max_model_len": service.max_context,
    }


# ---- running a job


_Prepare = Callable[[Service, Any, Caller], Awaitable[_Job]]
_Output = tuple[int, Delta, TextDelta]  # of the choice of that number


async def _respond(service: Service, request: Request, body: SamplingRequest, prepare: _Prepare) -> Response:
    caller: Caller = request.state.caller
    if not body.stream:
        whole = await until_disconnect(request, _respond_whole(service, prepare, body, caller))
        return Response(whole, media_type="application/json")
    job = await _prepare(service, prepare, body, caller)
    outputs = _outputs(service, job)
    # The first output is awaited before the headers are sent, so that a refused request gets its status code.
    first = await until_disconnect(request, anext(outputs))
    return EventStream(_stream(job, first, outputs), also_close=outputs)


async def _respond_whole(service: Service, prepare: _Prepare, body: SamplingRequest, caller: Caller) -> bytes:
    job = await _prepare(service, prepare, body, caller)
    writer = job.writer
    async with aclosing(_outputs(service, job)) as outputs:
        async for number, delta, text in outputs:
            writer.add(number, text.text, (delta.logprobs or [])[: text.num_tokens], text.finish_reason)
    return _json(job.body(writer.object_name, writer.choices(), True, True))


async def _prepare(service: Service, prepare: _Prepare, body: SamplingRequest, caller: Caller) -> _Job:
    service.check_model(body.model)
    if body.request_id is not None:
        caller.rename(body.request_id)
    job = await prepare(service, body, caller)
    job.params = job.writer.bounded(service.max_context, bool(body.stream))
    await service.check_grammar(job.params)
    return job


async def _prepare_completion(service: Service, body: CompletionRequest, caller: Caller) -> _Job:
    params = body.params()
    prompts = await _prompts(service, body.prompt)
    if len(prompts) * params.n > MAX_CHOICES:
        raise InvalidRequest(f"{len(prompts)} prompts of {params.n} samples; at most {MAX_CHOICES} in all.", param="n")
    writer = CompletionWriter(service.tokenizer, prompts, params, body)
    return _Job(service.model_name, prompts, params, body, writer, caller)


async def _prepare_chat(service: Service, body: ChatRequest, caller: Caller) -> _Job:
    params = body.params()
    prompts = [await service.encode_chat(body.conversation(), **body.how())]
    reading = service.reading(prompts[0], body.functions(), body.must_call, body.continued)
    params = reading.gated(params)
    writer = ChatWriter(service.tokenizer, prompts, params, body, reading)
    return _Job(service.model_name, prompts, params, body, writer, caller, reading)


async def _outputs(service: Service, job: _Job) -> AsyncGenerator[_Output, None]:
    """Outputs of all prompts, by choice number: prompt * n + sample."""
    job.usage.num_prompt = sum(map(len, job.prompts))
    asked = job.asked
    streams = [
        service.stream(job.caller, prompt, job.params, i, asked.priority, asked.cache_salt or "", asked.timeout, job.reading)
        for i, prompt in enumerate(job.prompts)
    ]
    async with aclosing(_merge(streams)) as merged:
        async for i, (delta, text) in merged:
            job.usage.num_output += text.num_tokens
            job.usage.num_reasoning += text.num_reasoning
            job.clock.first_s = job.clock.first_s or time.monotonic()
            job.clock.engine = delta.timings or job.clock.engine
            if delta.prompt_logprobs:
                await job.writer.take_prompt_logprobs(i, delta.prompt_logprobs)
            if delta.index == 0 and text.finish_reason:
                job.usage.num_cached += delta.num_cached
            yield i * job.params.n + delta.index, delta, text


async def _stream(job: _Job, first: _Output, rest: AsyncGenerator[_Output, None]) -> AsyncGenerator[bytes, None]:
    try:
        for number in range(job.num_choices):
            if (opening := job.writer.first_chunk(number)) is not None:
                yield job.chunk(opening)
        for chunk in _chunks(job, first):
            yield chunk
        async for output in rest:
            for chunk in _chunks(job, output):
                yield chunk
        if job.asked.stream_options and job.asked.stream_options.include_usage:
            yield _json(job.body(job.writer.chunk_name, [], True))
    except TidemillError as error:
        yield _json(error_body(error))
    finally:
        await rest.aclose()


def _chunks(job: _Job, output: _Output) -> list[bytes]:
    number, delta, text = output
    logprobs = (delta.logprobs or [])[: text.num_tokens]
    if not text.text and not logprobs and not text.finish_reason:
        return []
    choices = job.writer.chunks(number, text.text, logprobs, text.finish_reason)
    return [job.chunk(choice, choice["finish_reason"] is not None) for choice in choices]


async def _merge(streams: list[AsyncGenerator[Any, None]]) -> AsyncGenerator[tuple[int, Any], None]:
    """Several streams as one, in order of arrival. When it ends, for whatever reason, they are all closed. The queue is bounded:
    what a slow reader has not taken stays in the streams."""
    if len(streams) == 1:
        try:
            async for item in streams[0]:
                yield 0, item
        finally:
            await streams[0].aclose()
        return
    queue: asyncio.Queue[tuple[int, Any, BaseException | None]] = asyncio.Queue(maxsize=len(streams))

    async def pump(number: int, stream: AsyncGenerator[Any, None]) -> None:
        try:
            async for item in stream:
                await queue.put((number, item, None))
            await queue.put((number, None, None))
        except Exception as error:
            await queue.put((number, None, error))
        finally:
            await stream.aclose()

    tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    num_left = len(streams)
    try:
        while num_left:
            number, item, error = await queue.get()
            if error is not None:
                raise error
            if item is None:
                num_left -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _embeddings(service: Service, body: EmbeddingRequest, caller: Caller) -> bytes:
    service.check_model(body.model)
    prompts = await _prompts(service, body.input)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, pooling=body.pooling)
    vectors = [msgspec.Raw(b"[]")] * len(prompts)
    streams = [service.stream(caller, prompt, params, i) for i, prompt in enumerate(prompts)]
    async with aclosing(_merge(streams)) as merged:
        async for i, (delta, _) in merged:  # encoded as they arrive, not all at the end
            vectors[i] = msgspec.Raw(_encoded_vector(delta.embedding or [], body.encoding_format == "base64"))
    data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
    num_tokens = sum(map(len, prompts))
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return _json({"object": "list", "data": data, "model": service.model_name, "usage": usage})


def _encoded_vector(vector: list[float], as_base64: bool) -> bytes:
    return _json(base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode() if as_base64 else vector)


async def _prompts(service: Service, prompt: Any) -> list[list[int]]:
    """Of any of the four kinds that the request model accepts."""
    if isinstance(prompt, str):
        return [await service.encode(prompt)]
    if not prompt:
        raise InvalidRequest("The prompt is empty.", fix="Give a text or at least one token.", param="prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    return [await service.encode(one) if isinstance(one, str) else one for one in prompt]
