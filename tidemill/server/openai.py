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
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.frontend.tools import AnswerParser, CallBegins, Words
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
from tidemill.server.service import Service
from tidemill.server.sse import EventStream, until_disconnect
from tidemill.wire import Delta, Timings, TokenLogprobs

_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class _Usage:
    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_output,
            "total_tokens": self.num_prompt + self.num_output,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }


@dataclass(slots=True)
class _Choice:
    """One sample as it grows."""

    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def mean_logprob(self) -> float:
        return sum(entry.logprob for entry in self.logprobs) / max(len(self.logprobs), 1)


@dataclass(slots=True)
class _Clock:
    """Where a request's time went: as seen here, and as the engine tells."""

    begun_s: float = field(default_factory=time.monotonic)
    first_s: float = 0.0
    engine: Timings | None = None

    def body(self, num_output: int) -> dict[str, float]:
        now = time.monotonic()
        decode_s = now - self.first_s if self.engine is None else self.engine.decode_s  # tokens may have come here together
        told = {
            "total_ms": 1000 * (now - self.begun_s),
            "first_token_ms": 1000 * (self.first_s - self.begun_s),
            "tokens_per_second": (num_output - 1) / max(decode_s, 1e-6) if num_output > 1 else 0.0,
        }
        if self.engine is not None:
            engine = self.engine
            told |= {
                "queue_ms": 1000 * engine.queue_s,
                "prefill_ms": 1000 * engine.prefill_s,
                "decode_ms": 1000 * engine.decode_s,
            }
        return {name: round(value, 3) for name, value in told.items()}


@dataclass(slots=True)
class _Job:
    """A request of either kind: what to run, and how its answer is written."""

    object_name: str  # of the whole answer
    chunk_name: str  # of a streamed piece
    model: str
    prompts: list[list[int]]
    params: SamplingParams
    asked: SamplingRequest
    whole: Callable[[int, _Choice], dict[str, Any]]
    pieces: Callable[[int, str, list[TokenLogprobs], str | None], list[dict[str, Any]]]
    opening: Callable[[int], dict[str, Any]] | None = None
    num_sent: int | None = None  # of each prompt's samples, the likeliest; None: all
    caller: Caller = field(default_factory=Caller)
    request_id: str = ""
    usage: _Usage = field(default_factory=_Usage)
    created_s: int = field(default_factory=lambda: int(time.time()))
    clock: _Clock = field(default_factory=_Clock)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by prompt

    def body(self, name: str, choices: list[dict[str, Any]], usage: bool, is_last: bool = False) -> dict[str, Any]:
        body = {"id": self.request_id, "object": name, "created": self.created_s, "model": self.model, "choices": choices}
        if usage:
            body["usage"] = self.usage.body()
        if is_last and self.asked.timings:
            body["timings"] = self.clock.body(self.usage.num_output)
        return body


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
        return await _answer(service, request, body, _completion_job)

    @router.post("/v1/chat/completions", openapi_extra=schema_of(ChatRequest))
    async def chat_completions(request: Request, body: ChatRequest = Depends(body_of(ChatRequest))) -> Response:
        return await _answer(service, request, body, _chat_job)

    @router.post("/v1/embeddings", openapi_extra=schema_of(EmbeddingRequest))
    async def embeddings(request: Request, body: EmbeddingRequest = Depends(body_of(EmbeddingRequest))) -> Response:
        made = await until_disconnect(request, _embeddings(service, body, request.state.caller))
        return Response(made, media_type="application/json")

    @router.post("/v1/chat/completions/render", openapi_extra=schema_of(ChatMessages))
    async def render(body: ChatMessages = Depends(body_of(ChatMessages))) -> dict[str, Any]:
        """The prompt, without an answer."""
        service.check_model(body.model)
        text = await service.render_chat(body.conversation(), **body.how())
        return {"prompt": text, "prompt_token_ids": await service.encode_chat(body.conversation(), **body.how())}

    @router.post("/tokenize", openapi_extra=schema_of(TokenizeRequest))
    async def tokenize(body: TokenizeRequest = Depends(body_of(TokenizeRequest))) -> dict[str, Any]:
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("Give either prompt or messages.", param="prompt")
        if body.messages is not None:
            ids = await service.encode_chat([message.model_dump(exclude_none=True) for message in body.messages])
        else:
            ids = await service.encode(body.prompt or "", body.add_special_tokens)
        return {"tokens": ids, "count": len(ids), "max_model_len": service.max_context}

    @router.post("/detokenize", openapi_extra=schema_of(DetokenizeRequest))
    async def detokenize(body: DetokenizeRequest = Depends(body_of(DetokenizeRequest))) -> dict[str, Any]:
        service.check_model(body.model)
        wrong = next((token for token in body.tokens if not 0 <= token < service.ready.model.vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(f"The model has no token {wrong}.", param="tokens")
        return {"prompt": service.tokenizer.decode(body.tokens, skip_special=False)}

    @router.get("/v1/requests/{request_id}/explain")
    async def explain(request: Request, request_id: str) -> dict[str, Any]:
        """Where its time went. A request of several prompts or samples has several stories."""
        caller = request.state.caller
        stories = service.explainer.find(request_id, None if caller.is_admin else caller.tenant)
        if not stories:
            raise RequestUnknown(f"Nothing is known of a request {request_id[:100]!r}.", param="request_id")
        return {"id": request_id, "object": "list", "data": [story.body() for story in stories]}

    @router.delete("/v1/requests/{request_id}")
    async def cancel(request: Request, request_id: str) -> dict[str, Any]:
        caller = request.state.caller
        if not service.cancel(request_id, None if caller.is_admin else caller.tenant):
            raise RequestUnknown(f"There is no request {request_id[:100]!r} under way.", param="request_id")
        return {"id": request_id, "object": "request", "cancelled": True}

    service.whole_answers |= {
        "/v1/completions": (CompletionRequest, partial(_answer_whole, service, _completion_job)),
        "/v1/chat/completions": (ChatRequest, partial(_answer_whole, service, _chat_job)),
        "/v1/embeddings": (EmbeddingRequest, partial(_embeddings, service)),
    }
    return router


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


_MakeJob = Callable[[Service, Any], Awaitable[_Job]]


async def _answer(service: Service, request: Request, body: SamplingRequest, make: _MakeJob) -> Response:
    caller: Caller = request.state.caller
    if not body.stream:
        whole = await until_disconnect(request, _answer_whole(service, make, body, caller))
        return Response(whole, media_type="application/json")
    job = await _prepare(service, make, body, caller)
    outputs = _outputs(service, job)
    # The first output is awaited before the headers go out, so that a refused request gets its status code.
    first = await until_disconnect(request, anext(outputs))
    return EventStream(_stream(job, first, outputs), also_close=outputs)


async def _answer_whole(service: Service, make: _MakeJob, body: SamplingRequest, caller: Caller) -> bytes:
    job = await _prepare(service, make, body, caller)
    return await _whole(job, _outputs(service, job))


async def _prepare(service: Service, make: _MakeJob, body: SamplingRequest, caller: Caller) -> _Job:
    if body.request_id is not None:
        caller.rename(body.request_id)
    job = await make(service, body)
    await service.check_grammar(job.params)
    job.caller, job.request_id = caller, caller.call.request_id
    return job


async def _outputs(service: Service, job: _Job) -> AsyncGenerator[tuple[int, Delta, TextDelta], None]:
    """Outputs of all prompts, by choice number: prompt * n + sample."""
    job.usage.num_prompt = sum(map(len, job.prompts))
    asked = job.asked
    streams = [
        service.stream(job.caller, prompt, job.params, i, asked.priority, asked.cache_salt or "", asked.timeout)
        for i, prompt in enumerate(job.prompts)
    ]
    async with aclosing(_merge(streams)) as merged:
        async for i, (delta, text) in merged:
            job.usage.num_output += text.num_tokens
            job.clock.first_s = job.clock.first_s or time.monotonic()
            job.clock.engine = delta.timings or job.clock.engine
            if delta.prompt_logprobs:
                job.prompt_logprobs[i] = delta.prompt_logprobs
            if delta.index == 0 and text.finish_reason:
                job.usage.num_cached += delta.num_cached
            yield i * job.params.n + delta.index, delta, text


async def _whole(job: _Job, outputs: AsyncGenerator[tuple[int, Delta, TextDelta], None]) -> bytes:
    choices = [_Choice() for _ in range(len(job.prompts) * job.params.n)]
    async with aclosing(outputs):
        async for number, delta, text in outputs:
            choice = choices[number]
            choice.text += text.text
            choice.logprobs += (delta.logprobs or [])[: text.num_tokens]
            choice.finish_reason = text.finish_reason
    if job.num_sent is not None:
        groups = [choices[i : i + job.params.n] for i in range(0, len(choices), job.params.n)]
        choices = [one for group in groups for one in sorted(group, key=lambda one: -one.mean_logprob)[: job.num_sent]]
    return _json(job.body(job.object_name, [job.whole(i, choice) for i, choice in enumerate(choices)], True, True))


async def _stream(
    job: _Job, first: tuple[int, Delta, TextDelta], rest: AsyncGenerator[tuple[int, Delta, TextDelta], None]
) -> AsyncGenerator[bytes, None]:
    try:
        if job.opening:
            for number in range(len(job.prompts) * job.params.n):
                yield _json(job.body(job.chunk_name, [job.opening(number)], False))
        for piece in _pieces(job, first):
            yield piece
        async for output in rest:
            for piece in _pieces(job, output):
                yield piece
        if job.asked.stream_options and job.asked.stream_options.include_usage:
            yield _json(job.body(job.chunk_name, [], True))
    except TidemillError as error:
        yield _json(error_body(error))
    finally:
        await rest.aclose()


def _pieces(job: _Job, output: tuple[int, Delta, TextDelta]) -> list[bytes]:
    number, delta, text = output
    logprobs = (delta.logprobs or [])[: text.num_tokens]
    if not text.text and not logprobs and not text.finish_reason:
        return []
    made = job.pieces(number, text.text, logprobs, text.finish_reason)
    return [_json(job.body(job.chunk_name, [piece], False, piece["finish_reason"] is not None)) for piece in made]


async def _merge(streams: list[AsyncGenerator[Any, None]]) -> AsyncGenerator[tuple[int, Any], None]:
    """Several streams as one, in the order in which things come; when it ends, for whatever reason, so do they all."""
    if len(streams) == 1:
        try:
            async for item in streams[0]:
                yield 0, item
        finally:
            await streams[0].aclose()
        return
    queue: asyncio.Queue[tuple[int, Any, BaseException | None]] = asyncio.Queue()

    async def pump(number: int, stream: AsyncGenerator[Any, None]) -> None:
        try:
            async for item in stream:
                queue.put_nowait((number, item, None))
            queue.put_nowait((number, None, None))
        except Exception as error:
            queue.put_nowait((number, None, error))
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


# ---- completions


async def _completion_job(service: Service, body: CompletionRequest) -> _Job:
    service.check_model(body.model)
    params = body.params()
    prompts = await _prompts(service, body.prompt)
    if len(prompts) * params.n > MAX_CHOICES:
        raise InvalidRequest(f"{len(prompts)} prompts of {params.n} samples; at most {MAX_CHOICES} in all.", param="n")
    tokenizer = service.tokenizer
    lengths: dict[int, int] = {}
    num_sent = params.n if body.best_of is None else body.n or 1
    only_echo = bool(body.echo) and body.max_tokens == 0

    def one(number: int, text: str, logprobs: list[TokenLogprobs], reason: str | None, is_first: bool) -> dict[str, Any]:
        """All of an answer, or a piece of it."""
        prompt, offset = number // num_sent, lengths.get(number, 0)
        scores = job.prompt_logprobs.get(prompt, [])
        if only_echo:
            text, logprobs = "", []
        said = tokenizer.decode(prompts[prompt]) if body.echo and is_first else ""
        lengths[number] = offset + len(said + text)
        written = None
        if body.logprobs is not None:
            entries = [TokenLogprobs(prompts[prompt][0], 0.0, []), *scores] if body.echo and is_first else []
            written = _completion_logprobs(tokenizer, entries + logprobs, offset)
            if entries:  # the first token follows nothing
                written["token_logprobs"][0] = written["top_logprobs"][0] = None
        made = {"index": number, "text": said + text, "logprobs": written, "finish_reason": reason}
        if body.prompt_logprobs is not None and is_first:
            made["prompt_logprobs"] = _prompt_logprobs(tokenizer, scores)
        return made

    def whole(number: int, choice: _Choice) -> dict[str, Any]:
        return one(number, choice.text, choice.logprobs, choice.finish_reason, True)

    def pieces(number: int, text: str, logprobs: list[TokenLogprobs], reason: str | None) -> list[dict[str, Any]]:
        return [one(number, text, logprobs, reason, number not in lengths)]

    job = _Job(
        object_name="text_completion",
        chunk_name="text_completion",
        model=service.model_name,
        prompts=prompts,
        params=params,
        asked=body,
        whole=whole,
        pieces=pieces,
        num_sent=None if body.best_of is None else num_sent,
    )
    return job


async def _embeddings(service: Service, body: EmbeddingRequest, caller: Caller) -> bytes:
    service.check_model(body.model)
    prompts = await _prompts(service, body.input)
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, pooling=body.pooling)
    vectors: list[list[float]] = [[] for _ in prompts]
    streams = [service.stream(caller, prompt, params, i) for i, prompt in enumerate(prompts)]
    async with aclosing(_merge(streams)) as merged:
        async for i, (delta, _) in merged:
            vectors[i] = delta.embedding or []

    def written(vector: list[float]) -> list[float] | str:
        if body.encoding_format != "base64":
            return vector
        return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()

    made = [{"object": "embedding", "index": i, "embedding": written(vector)} for i, vector in enumerate(vectors)]
    num_tokens = sum(map(len, prompts))
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return _json({"object": "list", "data": made, "model": service.model_name, "usage": usage})


async def _prompts(service: Service, prompt: Any) -> list[list[int]]:
    """Of any of the four kinds that the request model lets through."""
    if isinstance(prompt, str):
        return [await service.encode(prompt)]
    if not prompt:
        raise InvalidRequest("The prompt is empty.", fix="Give a text or at least one token.", param="prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    return [await service.encode(one) if isinstance(one, str) else one for one in prompt]


def _completion_logprobs(tokenizer: Tokenizer, entries: list[TokenLogprobs], offset: int) -> dict[str, Any]:
    tokens, offsets = [], []
    for entry in entries:
        text = tokenizer.token_text(entry.token_id)
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [
            {tokenizer.token_text(token): _finite(value) for token, value in reversed(entry.top)} for entry in entries
        ],
        "text_offset": offsets,
    }


def _prompt_logprobs(tokenizer: Tokenizer, entries: list[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """The first token follows nothing; of each other, its own and the likeliest in its place."""

    def told(entry: TokenLogprobs) -> dict[str, Any]:
        pairs = dict([*entry.top, (entry.token_id, entry.logprob)])
        return {
            str(token): {"logprob": _finite(value), "decoded_token": tokenizer.token_text(token)}
            for token, value in pairs.items()
        }

    return [None, *(told(entry) for entry in entries)]


# ---- chat


async def _chat_job(service: Service, body: ChatRequest) -> _Job:
    service.check_model(body.model)
    params = body.params()
    prompt = await service.encode_chat(body.conversation(), **body.how())
    tokenizer = service.tokenizer
    looks_for_calls = bool(body.tools) and body.tool_choice != "none"
    readers = [_ChatReader(looks_for_calls, body.must_call, body.parallel_tool_calls is False) for _ in range(params.n)]

    def written(logprobs: list[TokenLogprobs]) -> dict[str, Any] | None:
        return {"content": [_chat_logprob(tokenizer, entry) for entry in logprobs]} if body.logprobs else None

    def whole(number: int, choice: _Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        for delta in readers[number].read(choice.text, True):
            _add(message, delta)
        reason = readers[number].reason(choice.finish_reason)
        if message["content"] is None and not message.get("tool_calls"):
            message["content"] = ""
        made = {"index": number, "message": message, "logprobs": written(choice.logprobs), "finish_reason": reason}
        if body.prompt_logprobs is not None:
            made["prompt_logprobs"] = _prompt_logprobs(tokenizer, job.prompt_logprobs.get(0, []))
        return made

    def pieces(number: int, text: str, logprobs: list[TokenLogprobs], reason: str | None) -> list[dict[str, Any]]:
        deltas = readers[number].read(text, reason is not None)
        if not deltas and (logprobs or reason):
            deltas = [{}]
        told = written(logprobs)
        made: list[dict[str, Any]] = [
            {"index": number, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
        ]
        if made:
            made[0]["logprobs"] = told
            made[-1]["finish_reason"] = readers[number].reason(reason)
        return made

    def opening(number: int) -> dict[str, Any]:
        return {"index": number, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    job = _Job(
        object_name="chat.completion",
        chunk_name="chat.completion.chunk",
        model=service.model_name,
        prompts=[prompt],
        params=params,
        asked=body,
        whole=whole,
        pieces=pieces,
        opening=opening,
    )
    return job


class _ChatReader:
    """One sample's text as deltas of a message: content, reasoning, tool calls."""

    def __init__(self, tools: bool, only_calls: bool, one_call: bool) -> None:
        self._parser = AnswerParser(tools, only_calls)
        self._one_call = one_call
        self._has_calls = False

    def read(self, text: str, is_last: bool) -> list[dict[str, Any]]:
        pieces = self._parser.push(text)
        if is_last:
            pieces += self._parser.finish()
        deltas: list[dict[str, Any]] = []
        for piece in pieces:
            if isinstance(piece, Words):
                names = ("reasoning_content", "reasoning") if piece.is_reasoning else ("content",)  # clients know either name
                deltas.append(dict.fromkeys(names, piece.text))
            elif self._one_call and piece.index > 0:
                continue
            elif isinstance(piece, CallBegins):
                self._has_calls = True
                function = {"name": piece.name, "arguments": ""}
                deltas.append(
                    {"tool_calls": [{"index": piece.index, "id": piece.call_id, "type": "function", "function": function}]}
                )
            else:
                deltas.append({"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]})
        return deltas

    def reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._has_calls else reason


def _add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """What a client does with streamed deltas."""
    for name, value in delta.items():
        if name != "tool_calls":
            message[name] = (message.get(name) or "") + value
            continue
        for call in value:
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                calls.append({name: call[name] for name in ("id", "type")} | {"function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]


def _chat_logprob(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, Any]:
    def one(token: int, value: float) -> dict[str, Any]:
        return {"token": tokenizer.token_text(token), "logprob": _finite(value), "bytes": list(tokenizer.token_bytes(token))}

    return one(entry.token_id, entry.logprob) | {"top_logprobs": [one(token, value) for token, value in entry.top]}


def _finite(value: float) -> float:
    return max(value, -9999.0)  # JSON has no infinity
