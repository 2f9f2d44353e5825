"""OpenAI routes: models, completions, chat completions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any, cast

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from tidemill.errors import InvalidRequest, TidemillError, TruncationTooLong
from tidemill.frontend.infill import infill_prompt, infill_tokens
from tidemill.frontend.output import TextDelta
from tidemill.frontend.parsers import Reading
from tidemill.sampling import MAX_BAD_WORD_TOKENS, SamplingParams
from tidemill.server.api.openai.messages import ChatMessages
from tidemill.server.api.openai.types import (
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
    Mixed,
    SamplingRequest,
    StreamOptions,
)
from tidemill.server.api.openai.writers import ChatWriter, CompletionWriter, Writer
from tidemill.server.api.vllm.adapters import adapter_card
from tidemill.server.generation import sampling_aliases
from tidemill.server.generation.models import AdapterService, Models
from tidemill.server.generation.retention import PromptCache, key_holds, mark_holds
from tidemill.server.generation.service import Service
from tidemill.server.http.access import Caller
from tidemill.server.http.body import body_of, parsed, raw_body, schema_of
from tidemill.server.http.errors import error_body
from tidemill.server.http.responses import EventStream, until_disconnect
from tidemill.version import __version__
from tidemill.wire import Delta, Hold, Timings

_FINGERPRINT = f"b{__version__}"  # of the build, as llama.cpp writes it

_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Usage:
    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0
    num_reasoning: int = 0

    @staticmethod
    def sum(parts: Iterable[Usage]) -> Usage:
        return Usage(*map(sum, zip(*map(astuple, parts), strict=True)))

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
    last_s: float = 0.0
    num_cached: int = 0
    engine: Timings | None = None

    def llamacpp(self, usage: Usage) -> dict[str, float]:
        """The times under llama.cpp's names."""
        how = (self.begun_s, self.first_s, self.last_s, self.num_cached, usage.num_output, self.engine)
        return sampling_aliases.timings(sampling_aliases.Progress(usage.num_prompt, *how))

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
class Job:
    """A completion or a chat completion: what to run, and the writer of its response."""

    service: Service
    prompts: list[list[int]]
    params: SamplingParams
    asked: SamplingRequest
    writer: Writer
    caller: Caller
    reading: Reading | None = None  # of a chat
    usage: Usage = field(default_factory=Usage)
    created_s: int = field(default_factory=lambda: int(time.time()))
    clock: _Clock = field(default_factory=_Clock)
    part: int = 0  # the number of its first prompt among those of the call
    holds: list[list[Hold]] = field(default_factory=list)  # of each prompt
    has_begun: bool = False  # a chunk was made

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n

    def body(self, name: str, choices: list[dict[str, Any]], usage: bool, is_last: bool = False) -> dict[str, Any]:
        request_id = self.caller.call.request_id
        body = {"id": request_id, "object": name, "created": self.created_s, "model": self.service.model_name, "choices": choices}
        body["system_fingerprint"] = _FINGERPRINT
        if usage or self.asked.wants_usage_always:
            body["usage"] = self.usage.body()
        times = self.clock.body(self.usage.num_output) if is_last and self.asked.timings else {}
        if self.asked.timings_per_token and self.has_begun:
            times |= self.clock.llamacpp(self.usage)
        return body | {"timings": times} if times else body

    def chunk(self, choice: dict[str, Any], is_last: bool = False) -> bytes:
        body = self.body(self.writer.chunk_name, [choice], False, is_last)
        if not self.has_begun:
            body, self.has_begun = body | self.writer.prompt_ids(), True
        return _json(body)


def make_router(models: Models) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(service) for service in (*models, *models.adapters())]}

    @router.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> dict[str, Any]:
        return _model_card(models.of(model_id))

    @router.post("/v1/completions", openapi_extra=schema_of(CompletionRequest))
    async def completions(request: Request, body: CompletionRequest = Depends(body_of(CompletionRequest))) -> Response:
        return await _respond(models, request, body, _prepare_completion)

    @router.post("/v1/chat/completions", openapi_extra=schema_of(ChatRequest))
    async def chat_completions(request: Request, body: ChatRequest = Depends(body_of(ChatRequest))) -> Response:
        return await _respond(models, request, body, prepare_chat)

    @router.post("/invocations", openapi_extra=schema_of(ChatRequest))
    async def invocations(request: Request) -> Response:
        """As SageMaker calls it: what the body asks for tells the route."""
        raw = await raw_body(request)
        try:
            names = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"The body must be a JSON object: {error}.") from None
        call = request.state.caller.call
        if "prompt" in names:
            return await _respond(models, request, await parsed(CompletionRequest, raw, call), _prepare_completion)
        if route := _of_encoders(models, names):
            model, respond = models.whole_responses[route]
            made = respond(await parsed(model, raw, call), request.state.caller)
            return Response(await until_disconnect(request, made), media_type="application/json")
        return await _respond(models, request, await parsed(ChatRequest, raw, call), prepare_chat)

    @router.post("/v1/chat/completions/render", openapi_extra=schema_of(ChatMessages))
    async def render(body: ChatMessages = Depends(body_of(ChatMessages))) -> Response:
        """The prompt, without a completion."""
        service = models.of(body.model)
        text = await service.render_chat(body.conversation, **body.how())
        return json_response({"prompt": text, "prompt_token_ids": await service.encode_chat(body.conversation, **body.how())})

    @router.post("/v1/chat/completions/input_tokens", openapi_extra=schema_of(ChatRequest))
    async def input_tokens(body: ChatRequest = Depends(body_of(ChatRequest))) -> Response:
        """The length of the prompt, without a completion."""
        ids = await models.of(body.model).encode_chat(body.conversation, **body.how())
        return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})

    @router.get("/v1/requests/{request_id}/explain")
    async def explain(request: Request, request_id: str) -> dict[str, Any]:
        """Where its time went, for each of its prompts and samples; of a label, for the latest requests with it."""
        caller = request.state.caller
        parts = models.explain(request_id, None if caller.is_admin else caller.tenant)
        if not parts:
            raise RequestUnknown(f"There are no records of a request {request_id[:100]!r}.", param="request_id")
        return {"id": request_id, "object": "list", "data": parts}

    @router.delete("/v1/requests/{request_id}")
    async def cancel(request: Request, request_id: str) -> dict[str, Any]:
        caller = request.state.caller
        if not models.cancel(request_id, None if caller.is_admin else caller.tenant):
            raise RequestUnknown(f"There is no request {request_id[:100]!r} in progress.", param="request_id")
        return {"id": request_id, "object": "request", "cancelled": True}

    models.whole_responses |= {
        "/v1/completions": (CompletionRequest, partial(_respond_whole, models, _prepare_completion)),
        "/v1/chat/completions": (ChatRequest, partial(_respond_whole, models, prepare_chat)),
    }
    return router


def json_response(body: dict[str, Any]) -> Response:
    """Encoded at once: FastAPI would look at each item of a list of token ids."""
    return Response(_json(body), media_type="application/json")


class RequestUnknown(InvalidRequest):
    status = 404


def _model_card(service: Service) -> dict[str, Any]:
    card = {
        "id": service.model_name,
        "object": "model",
        "created": service.created_s,
        "owned_by": "tidemill",
        "root": service.model_name,
        "parent": None,
        "max_model_len": service.max_context,
        "sampling_defaults": service.defaults.shown(),
        "aliases": list(service.aliases),
        "state": service.state,
    }
    return adapter_card(card, service) if isinstance(service, AdapterService) else card


# ---- running a job


_Prepare = Callable[[Service, Any, Caller], Awaitable[Job]]
_Output = tuple[int, Delta, TextDelta]  # of the choice of that number


async def _respond(models: Models, request: Request, body: SamplingRequest, prepare: _Prepare) -> Response:
    caller: Caller = request.state.caller
    if not body.stream:
        whole = await until_disconnect(request, _respond_whole(models, prepare, body, caller))
        return Response(whole, media_type="application/json")
    job = await prepare_job(models, prepare, body, caller)
    outputs = _outputs(job)
    first = await until_disconnect(request, _until_accepted(job, outputs))
    return EventStream(_stream(job, first, outputs), also_close=outputs)


async def _until_accepted(job: Job, outputs: AsyncGenerator[_Output, None]) -> list[_Output]:
    """The outputs until the engine has accepted every prompt: a request that is refused gets a status code, one that waits gets
    its headers."""
    got: list[_Output] = []
    accepted: set[int] = set()
    while len(accepted) < len(job.prompts):
        got.append(await anext(outputs))
        accepted.add(got[-1][0] // job.params.n)
    return got


async def _respond_whole(models: Models, prepare: _Prepare, body: SamplingRequest, caller: Caller) -> bytes:
    job = await prepare_job(models, prepare, body, caller)
    await run_job(job)
    return _json(job.body(job.writer.object_name, job.writer.choices(), True, True) | job.writer.of_prompt())


async def run_job(job: Job) -> None:
    """The writer keeps the output."""
    writer = job.writer
    async with aclosing(_outputs(job)) as outputs:
        async for number, delta, text in outputs:
            if text.num_tokens or text.finish_reason:
                job.has_begun = True
                writer.take_ids(number, delta.token_ids[: text.num_tokens])
                writer.take_stop(number, text.stop)
                writer.add(number, text.text, (delta.logprobs or [])[: text.num_tokens], text.finish_reason)


def _of_encoders(models: Models, names: dict[str, msgspec.Raw]) -> str:
    """The route that a body of /invocations asks for, if it is not one that generates; else empty."""
    if "messages" in names:
        model = msgspec.json.decode(names.get("model", b"null"))
        return "/v1/embeddings" if models.of(model if isinstance(model, str) else None).ready.model.own_pooling else ""
    routes = {"input": "embeddings", "text_1": "score", "queries": "score", "data_1": "score", "documents": "rerank"}
    return next((f"/v1/{route}" for name, route in routes.items() if name in names), "")


async def prepare_job(models: Models, prepare: _Prepare, body: SamplingRequest, caller: Caller, num_jobs: int = 1) -> Job:
    """`num_jobs`: that share one response."""
    service = models.of(body.model)
    if body.request_id is not None and body.request_id not in caller.call.labels:
        caller.call.labels.append(body.request_id)
    if service.manner.usage_always:
        body.stream_options = StreamOptions(include_usage=True, continuous_usage_stats=True)
    body.return_tokens_as_token_ids |= service.manner.ids_in_logprobs
    job = await prepare(service, body, caller)
    if body.n_predict is not None:  # llama.cpp's name, so as there: the output ends with the context, at the latest
        room = max(service.context_of(job.params) - max(map(len, job.prompts)), 1)
        job.writer.limit(min(job.params.max_tokens or room, room))
    if body.verbose:
        texts = [await service.decode(prompt) for prompt in job.prompts]
        job.writer.verbose = {"__verbose": {"prompt": texts[0] if len(texts) == 1 else texts}}
    job.params = job.writer.bounded(service.context_of(job.params), bool(body.stream), service.defaults.limit, num_jobs)
    await service.check_grammar(job.params, of_tools=isinstance(body, ChatRequest) and body.must_call)
    return job


async def _prepare_completion(service: Service, body: CompletionRequest, caller: Caller) -> Job:
    params = await _params(service, body)
    cache = _cache(service, body, caller)
    if cache is not None:
        if cache.messages is not None or body.suffix:
            what = f"The prompt cache {cache.name!r} is made of messages." if cache.messages else "There is a suffix."
            raise InvalidRequest(what, fix="Use one made of a prompt, and no suffix.", param="prompt_cache")
        prompts = [[*cache.token_ids, *prompt] for prompt in await prompts_of(service, body.prompt, False, params)]
    elif body.suffix:
        prompts, params = await _filled_in(service, body, params)
    else:
        prompts = await prompts_of(service, body.prompt, body.add_special_tokens, params)
    prompts = truncated(service, prompts, body.truncate_prompt_tokens, params.max_tokens, body.truncation_side)
    if len(prompts) * params.n > MAX_CHOICES:
        raise InvalidRequest(f"{len(prompts)} prompts of {params.n} samples; at most {MAX_CHOICES} in all.", param="n")
    writer = CompletionWriter(service.tokenizer, prompts, params, body)
    return Job(service, prompts, params, body, writer, caller, holds=_holds(service, prompts, body, caller, cache))


async def _filled_in(service: Service, body: CompletionRequest, params: SamplingParams) -> tuple[list[list[int]], SamplingParams]:
    """Prompts for what comes between prompt and suffix."""
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest("With suffix, the prompt must be a text.", param="prompt")
    if body.echo:
        raise InvalidRequest("There can be no echo with suffix.", fix="Give one.", param="echo")
    how: Any = {"max_tokens": service.max_context}
    prompts = [await asyncio.to_thread(infill_prompt, service.tokenizer, text, body.suffix or "", **how) for text in texts]
    tokens = infill_tokens(service.tokenizer)
    ends = tokens.ends if tokens else ()
    return prompts, msgspec.structs.replace(params, stop_token_ids=params.stop_token_ids + ends)


async def prepare_chat(service: Service, body: ChatRequest, caller: Caller) -> Job:
    cache, before = _cache(service, body, caller), list[dict[str, Any]]()
    if cache is not None:
        if cache.messages is None:
            what = f"The prompt cache {cache.name!r} is made of a prompt, not of messages."
            raise InvalidRequest(what, fix="Use it in /v1/completions.", param="prompt_cache")
        before, body.tools = cache.messages, body.tools or cache.tools
    params = await _params(service, body)
    _check_template(service, body, caller)
    prompts = [await service.encode_chat(lambda: [*before, *body.conversation()], params, **body.how())]
    prompts = truncated(service, prompts, body.truncate_prompt_tokens, params.max_tokens, body.truncation_side)
    reading = service.reading(prompts[0], body.called(), body.must_call, body.continued, body.variables())
    budget = body.reasoning_budget
    if budget is not None and budget >= 0 and reading.drops_budget(params):
        caller.call.ignored.add("thinking_token_budget")
    params = reading.gated(params, budget)
    writer = ChatWriter(service.tokenizer, prompts, params, body, reading)
    writer.begins_with_null = caller.call.is_llamacpp
    holds = _holds(service, prompts, body, caller, cache)
    marked = await mark_holds(service, caller.tenant, prompts[0], body.marks(before), body.how(), body.cache_salt or "")
    return Job(service, prompts, params, body, writer, caller, reading, holds=[holds[0] + marked])


def _cache(service: Service, body: SamplingRequest, caller: Caller) -> PromptCache | None:
    """The named prompt cache that the prompt continues."""
    if body.prompt_cache is None:
        return None
    if body.cache_salt:
        raise InvalidRequest("A prompt cache has no cache_salt.", fix="Leave cache_salt out.", param="cache_salt")
    cache = service.caches.of(caller.tenant, body.prompt_cache, service.model_name)
    cache.num_uses += 1
    return cache


def _holds(
    service: Service, prompts: list[list[int]], body: SamplingRequest, caller: Caller, cache: PromptCache | None
) -> list[list[Hold]]:
    """Of each prompt: the prompt cache, and what OpenAI's parameters ask for."""
    asked = (service, caller.tenant, body.prompt_cache_key, body.prompt_cache_retention)
    return [
        (cache.holds(prompt) if cache is not None else []) + key_holds(*asked, prompt, i, body.cache_salt or "")
        for i, prompt in enumerate(prompts)
    ]


async def _params(service: Service, body: CompletionRequest | ChatRequest) -> SamplingParams:
    params = body.params()
    if not body.bad_words:
        return params
    # A word has other tokens after a space.
    words = [await service.encode(text, add_special=False) for word in body.bad_words for text in (word, f" {word}")]
    if max(map(len, words)) > MAX_BAD_WORD_TOKENS:
        raise InvalidRequest(f"A bad word may have {MAX_BAD_WORD_TOKENS} tokens.", fix="Give shorter words.", param="bad_words")
    return msgspec.structs.replace(params, bad_word_ids=tuple(dict.fromkeys(tuple(word) for word in words if word)))


def check_truncation(service: Service, num: int) -> None:
    if num > service.max_context:
        raise TruncationTooLong(num, service.max_context)


def truncated(
    service: Service, prompts: list[list[int]], num: int | None, max_tokens: int | None, side: str | None = None
) -> list[list[int]]:
    """The last `num` tokens of each, or the first if the right side is cut; -1: as many as leave room for the output."""
    if num is None:
        return prompts
    if num == 0:
        raise InvalidRequest("truncate_prompt_tokens must be -1, or 1 or more.", param="truncate_prompt_tokens")
    check_truncation(service, num)
    num = num if num > 0 else max(service.max_context - (1 if max_tokens is None else max_tokens), 1)
    return [prompt[:num] if side == "right" else prompt[-num:] for prompt in prompts]


def _check_template(service: Service, body: ChatRequest, caller: Caller) -> None:
    """A template that does not know the effort of reasoning does without; documents would be lost."""
    template = service.tokenizer.chat_template
    source = body.chat_template or ("" if template is None else template.source)
    if body.documents is not None and "documents" not in source:
        raise InvalidRequest(
            "The model's chat template does not know documents.", fix="Send them in messages.", param="documents"
        )
    known = "reasoning_effort" in source or (body.reasoning_effort == "none" and "enable_thinking" in source)
    if body.reasoning_effort is not None and not known:
        caller.call.ignored.add("reasoning_effort")


async def _outputs(job: Job) -> AsyncGenerator[_Output, None]:
    """Outputs of all prompts, by choice number: prompt * n + sample."""
    job.usage.num_prompt = sum(map(len, job.prompts))
    asked = job.asked
    streams = [
        job.service.stream(
            job.caller,
            prompt,
            job.params,
            job.part + i,
            asked.priority,
            asked.cache_salt or "",
            asked.timeout,
            job.reading,
            tells_progress=bool(asked.stream and asked.return_progress),
            holds=job.holds[i] if job.holds else (),
        )
        for i, prompt in enumerate(job.prompts)
    ]
    async with aclosing(merge(streams)) as merged:
        async for i, (delta, text) in merged:
            job.usage.num_output += text.num_tokens
            job.usage.num_reasoning += text.num_reasoning
            if text.num_tokens:
                job.clock.last_s = time.monotonic()
                job.clock.first_s = job.clock.first_s or job.clock.last_s
            job.clock.num_cached = max(job.clock.num_cached, delta.num_cached)
            job.clock.engine = delta.timings or job.clock.engine
            if delta.prompt_pieces:
                await job.writer.take_prompt_logprobs(i, delta.prompt_pieces)
            if delta.index == 0 and text.finish_reason:
                job.usage.num_cached += delta.num_cached
            yield i * job.params.n + delta.index, delta, text


async def _stream(job: Job, first: list[_Output], rest: AsyncGenerator[_Output, None]) -> AsyncGenerator[bytes, None]:
    try:
        for number in range(job.num_choices):
            if (opening := job.writer.first_chunk(number)) is not None:
                yield job.chunk(opening)
        for output in first:
            for chunk in _chunks(job, output):
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


def _chunks(job: Job, output: _Output) -> list[bytes]:
    number, delta, text = output
    job.writer.take_ids(number, delta.token_ids[: text.num_tokens])
    job.writer.take_stop(number, text.stop)
    logprobs = (delta.logprobs or [])[: text.num_tokens]
    if delta.progress is not None:
        told = {"prompt_progress": sampling_aliases.prompt_progress(delta.progress, job.clock.begun_s)}
        return [_json(job.body(job.writer.chunk_name, [job.writer.without_text(number)], False) | told)]
    if not text.text and not logprobs and not text.finish_reason:
        return []
    choices = job.writer.chunks(number, text.text, logprobs, text.finish_reason)
    return [job.chunk(choice, choice["finish_reason"] is not None) for choice in choices]


async def merge(streams: list[AsyncGenerator[Any, None]]) -> AsyncGenerator[tuple[int, Any], None]:
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


async def prompts_of(
    service: Service, prompt: Any, add_special: bool = True, params: SamplingParams | None = None
) -> list[list[int]]:
    """Of any of the four kinds that the request model accepts."""
    if isinstance(prompt, str):
        return [await service.encode(prompt, add_special, params)]
    if not prompt:
        raise InvalidRequest("The prompt is empty.", fix="Give a text or at least one token.", param="prompt")
    if int in map(type, prompt):
        return [await ids_of(service, prompt, add_special, params)]
    return [await ids_of(service, one, add_special, params) for one in prompt]


async def ids_of(service: Service, prompt: Mixed, add_special: bool = True, params: SamplingParams | None = None) -> list[int]:
    """Of a text, token ids or both. Only a text at the start begins as the model expects texts to begin."""
    if isinstance(prompt, str):
        return await service.encode(prompt, add_special, params)
    if str not in map(type, prompt):  # there may be a million: without a Python loop, or a copy
        return cast(list[int], prompt)
    made: list[int] = []
    for i, part in enumerate(prompt):
        made += [part] if isinstance(part, int) else await service.encode(part, add_special and i == 0, params)
    return made
