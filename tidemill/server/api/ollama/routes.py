"""Ollama's API: chat, generate and embed, streamed as JSON lines, and what its clients ask about models."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response
from starlette.types import Send

from tidemill.errors import InvalidRequest, TidemillError
from tidemill.frontend.infill import infill_prompt, infill_tokens
from tidemill.frontend.output import TextDelta
from tidemill.frontend.parsers import Reading
from tidemill.sampling import SamplingParams
from tidemill.server.api.ollama.types import Asked, Chat, Embed, Embeddings, Generate, Pull, Show, Tool, conversation
from tidemill.server.api.openai.types import ChatRequest
from tidemill.server.api.openai.writers import ChatWriter
from tidemill.server.generation import sampling_aliases
from tidemill.server.generation.models import Models, ModelUnknown
from tidemill.server.generation.sampling_aliases import Progress
from tidemill.server.generation.service import Service
from tidemill.server.http.access import Caller
from tidemill.server.http.aside import aside
from tidemill.server.http.body import body_of, parse, read
from tidemill.server.http.responses import EventStream, until_disconnect
from tidemill.version import __version__
from tidemill.wire import TokenLogprobs

API_VERSION = "0.12.6"  # of Ollama, whose API this is; clients refuse older ones
_LATEST = ":latest"  # the tag of a name that has none
_THINKS = ("enable_thinking", "thinking", "reasoning_effort", "reasoning_content", "<think>")  # in a template that knows it
_NEVER = "9999-12-31T23:59:59Z"

_json = msgspec.json.Encoder().encode


# ---- what is run


@dataclass(slots=True)
class _Job:
    """A request to the model, and how its output is read."""

    service: Service
    model: str  # as the client names it
    prompt: list[int]
    params: SamplingParams
    writer: ChatWriter | None = None  # finds reasoning and tool calls; None: the output is plain text
    reading: Reading | None = None
    keeps_context: bool = False
    begun_s: float = field(default_factory=time.monotonic)
    output_ids: list[int] = field(default_factory=list)
    progress: Progress = field(init=False)
    call: dict[str, Any] | None = None  # whose arguments are still arriving

    def __post_init__(self) -> None:
        self.progress = Progress(len(self.prompt))

    async def pieces(self, caller: Caller) -> AsyncGenerator[dict[str, Any], None]:
        """New parts of the message: content, thinking, tool_calls and logprobs. They may be empty."""
        async with aclosing(self.service.stream(caller, self.prompt, self.params, reading=self.reading)) as outputs:
            async for delta, text in outputs:
                self.progress.take(delta, text)
                if self.keeps_context:
                    self.output_ids += delta.token_ids[: text.num_tokens]
                yield self._read(text, (delta.logprobs or [])[: text.num_tokens])

    def _read(self, text: TextDelta, entries: list[TokenLogprobs]) -> dict[str, Any]:
        is_last = text.finish_reason is not None
        piece: dict[str, Any] = {}
        deltas: list[dict[str, Any]] = [{"content": text.text}]
        if self.writer is not None:
            deltas = [choice["delta"] for choice in self.writer.chunks(0, text.text, [], text.finish_reason)]
        for delta in deltas:
            for name, theirs in (("content", "content"), ("reasoning_content", "thinking")):
                if delta.get(name):
                    piece[theirs] = piece.get(theirs, "") + delta[name]
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    self._end_call(piece)
                    self.call = {"id": call["id"], "index": call["index"], "name": call["function"]["name"], "arguments": ""}
                if self.call is not None:
                    self.call["arguments"] += call["function"].get("arguments", "")
        if is_last:
            self._end_call(piece)
        if entries:
            piece["logprobs"] = _json(sampling_aliases.logprobs(self.service.tokenizer, entries))[1:-1]
        return piece

    def _end_call(self, piece: dict[str, Any]) -> None:
        """A call is sent when it is whole, since its arguments are an object; one that was cut off becomes text."""
        if self.call is None:
            return
        call, self.call = self.call, None
        if (arguments := _object(call["arguments"] or "{}")) is not None:
            function = {"index": call["index"], "name": call["name"], "arguments": arguments}
            piece.setdefault("tool_calls", []).append({"id": call["id"], "function": function})
        else:
            piece["content"] = f'{piece.get("content", "")}{{"name": {json.dumps(call["name"])}, "arguments": {call["arguments"]}'

    def figures(self) -> dict[str, Any]:
        progress = self.progress
        made = {
            "total_duration": _ns(time.monotonic() - self.begun_s),
            "load_duration": _ns(progress.queue_s),
            "prompt_eval_count": progress.num_prompt,
            "prompt_eval_duration": _ns(progress.prefill_s),
            "eval_count": progress.num_output,
            "eval_duration": _ns(progress.decode_s),
        }
        return made | ({"context": self.prompt + self.output_ids} if self.keeps_context else {})


def _object(text: str) -> msgspec.Raw | None:
    """A JSON object on one line, with numbers of any size; None: it is none."""
    try:
        value = json.loads(text)
        return msgspec.Raw(json.dumps(value, allow_nan=False).encode()) if isinstance(value, dict) else None
    except (ValueError, RecursionError):
        return None


def _ns(seconds: float) -> int:
    """Clients divide by durations."""
    return max(int(seconds * 1e9), 1)


async def _prepare_chat(service: Service, body: Chat, begun_s: float) -> _Job:
    return await _job_of(service, body, conversation(body.messages), body.tools, begun_s)


async def _prepare_generate(service: Service, body: Generate, begun_s: float) -> _Job:
    if not body.raw and not body.suffix and service.tokenizer.chat_template is not None:
        turns = [{"role": "system", "content": body.system}] if body.system else []
        job = await _job_of(service, body, [*turns, {"role": "user", "content": body.prompt}], None, begun_s)
        job.prompt = _after(service, body.context or [], job.prompt)
        job.progress.num_prompt, job.keeps_context = len(job.prompt), True
        return job
    if body.system:
        raise InvalidRequest("This model has no chat template, so that there can be no system message.", param="system")
    values = body.values()
    if body.logprobs:
        values["logprobs"] = body.top_logprobs
    if body.suffix:
        work = partial(infill_prompt, service.tokenizer, body.prompt, body.suffix, max_tokens=service.max_context)
        prompt = await asyncio.to_thread(work)
        tokens = infill_tokens(service.tokenizer)
        values["stop_token_ids"] = list(tokens.ends) if tokens else []
    else:
        prompt = _after(service, body.context or [], await service.encode(body.prompt))
    params = sampling_aliases.completion_params(service, [prompt], values, body.options.max_tokens, body.stream)
    return _Job(service, body.model, prompt, params, keeps_context=not body.raw and not body.suffix, begun_s=begun_s)


def _after(service: Service, context: list[int], prompt: list[int]) -> list[int]:
    """A prompt after the tokens of an earlier response; a text begins only once."""
    return context + prompt[1:] if context and prompt[:1] == [service.tokenizer.bos_token_id] else context + prompt


async def _job_of(
    service: Service, body: Asked, messages: list[dict[str, Any]], tools: list[Tool] | None, begun_s: float
) -> _Job:
    values = body.values() | {"messages": messages, "stream": body.stream}
    if body.options.max_tokens is not None:
        values["max_tokens"] = body.options.max_tokens
    if tools:
        values["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
    if body.logprobs:
        values |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if variables := _thinking(service, body):
        values["chat_template_kwargs"] = variables
    asked = await aside(lambda: parse(ChatRequest, json.dumps(values).encode()))
    prompt = await service.encode_chat(asked.conversation, **asked.how())
    reading = service.reading(prompt, asked.called(), asked.must_call, asked.continued, asked.variables())
    writer = ChatWriter(service.tokenizer, [prompt], reading.gated(asked.params()), asked, reading)
    params = writer.bounded(service.max_context, body.stream, service.defaults.limit)
    return _Job(service, body.model, prompt, params, writer, reading, begun_s=begun_s)


def _thinking(service: Service, body: Asked) -> dict[str, Any]:
    """Variables of the chat template."""
    if body.think is None or body.think == "":
        return {}
    if not _can_think(service):
        if body.think is False:
            return {}
        raise InvalidRequest(f"{body.model!r} does not support thinking.", fix="Leave think out, or send false.", param="think")
    made: dict[str, Any] = {"enable_thinking": body.think is not False, "thinking": body.think is not False}
    return made | ({"reasoning_effort": body.think} if isinstance(body.think, str) else {})


def _can_think(service: Service) -> bool:
    template = service.tokenizer.chat_template
    return template is not None and any(word in template.source for word in _THINKS)


# ---- routes


class _Lines(EventStream):
    media_type = "application/x-ndjson"

    async def _keep_alive(self, send: Send) -> None:
        """Nothing: JSON lines have no comments."""


def make_router(models: Models) -> APIRouter:
    router = APIRouter(include_in_schema=False)  # it is described by Ollama

    def served(model: str) -> Service:
        """Names are accepted with and without the tag that they have by default."""
        if not model:
            raise InvalidRequest("model is required.", fix=f"Ask for {models.default.model_name!r}.", param="model")
        for name in (model.removesuffix(_LATEST), model + _LATEST):
            with suppress(ModelUnknown):
                return models.of(name)
        return models.of(model)

    @router.post("/api/chat")
    async def chat(request: Request, body: Chat = Depends(body_of(Chat, untyped=True))) -> Response:
        here = served(body.model)
        if not body.messages:
            return _loaded(body, {"message": {"role": "assistant", "content": ""}})
        return await _respond(request, _prepare_chat(here, body, time.monotonic()), body, _as_message)

    @router.post("/api/generate")
    async def generate(request: Request, body: Generate = Depends(body_of(Generate, untyped=True))) -> Response:
        here = served(body.model)
        body.check()
        if not body.prompt and not body.suffix:
            return _loaded(body, {"response": ""})
        return await _respond(request, _prepare_generate(here, body, time.monotonic()), body, _as_response)

    @router.post("/api/embed")
    async def embed(request: Request, body: Embed = Depends(body_of(Embed, untyped=True))) -> Response:
        begun_s, here = time.monotonic(), served(body.model)
        texts = body.input if isinstance(body.input, list) else [body.input] if body.input else []
        more = {} if body.dimensions is None else {"dimensions": body.dimensions}
        work = _embeddings(models, here, texts, body.truncate, more, request.state.caller)
        vectors, num_tokens = await until_disconnect(request, work)
        figures = {"total_duration": _ns(time.monotonic() - begun_s), "load_duration": 1, "prompt_eval_count": num_tokens}
        return _answer({"model": body.model, "embeddings": vectors, **figures})

    @router.post("/api/embeddings")
    async def embeddings(request: Request, body: Embeddings = Depends(body_of(Embeddings, untyped=True))) -> Response:
        work = _embeddings(models, served(body.model), [body.prompt] if body.prompt else [], True, {}, request.state.caller)
        vectors, _ = await until_disconnect(request, work)
        return _answer({"embedding": vectors[0] if vectors else []})

    @router.api_route("/api/version", methods=["GET", "HEAD"])
    async def version() -> Response:
        return _answer({"version": API_VERSION, "tidemill": __version__})

    @router.api_route("/api/tags", methods=["GET", "HEAD"])
    async def tags() -> Response:
        return _answer({"models": [_listed(service) for service in (*models, *models.adapters())]})

    @router.get("/api/ps")
    async def running() -> Response:
        return _answer({"models": [_running(service) for service in models if service.state == "loaded"]})

    @router.post("/api/show")
    async def show(body: Show = Depends(body_of(Show, untyped=True))) -> Response:
        here = served(body.model or body.name)
        return _answer(await asyncio.to_thread(_shown, here))

    @router.post("/api/pull")
    async def pull(body: Pull = Depends(body_of(Pull, untyped=True))) -> Response:
        try:
            served(body.model or body.name)
        except ModelUnknown as error:
            raise ModelUnknown(error.message, fix="Models are loaded at start: tidemill serve MODEL.", param="model") from None
        made = _json({"status": "success"})
        return Response(made + b"\n", media_type=_Lines.media_type) if body.stream else _answer({"status": "success"})

    for path, method, fix in (
        ("/api/create", "POST", "Start the server with the model file: tidemill serve MODEL."),
        ("/api/copy", "POST", "Start the server with --served-name NAME."),
        ("/api/push", "POST", "Upload models with the tools of their hub."),
        ("/api/delete", "DELETE", "Stop the server, and delete the model's files."),
    ):
        router.add_api_route(path, partial(_refuse, path, fix), methods=[method])
    return router


async def _refuse(path: str, fix: str) -> Response:
    raise InvalidRequest(f"{path} is not supported: this server does not change models.", fix=fix)


def _answer(body: Any) -> Response:
    return Response(_json(body), media_type="application/json")


def _loaded(body: Asked, empty: dict[str, Any]) -> Response:
    """A request without a prompt asks for the model to be loaded, which it is."""
    made = _json({"model": body.model, "created_at": _now(), **empty, "done": True, "done_reason": "load"})
    return Response(made + b"\n", media_type=_Lines.media_type if body.stream else "application/json")


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


# ---- responses


def _as_message(piece: dict[str, Any]) -> dict[str, Any]:
    """Of a chat."""
    return {"message": {"role": "assistant", "content": "", **piece}}


def _as_response(piece: dict[str, Any]) -> dict[str, Any]:
    """Of a completion."""
    return {"response": piece.pop("content", ""), **piece}


def _line(job: _Job, piece: dict[str, Any], shape: Any, is_last: bool) -> bytes:
    entries = piece.pop("logprobs", None)
    body = {"model": job.model, "created_at": _now(), **shape(piece), "done": is_last}
    if entries:
        body["logprobs"] = msgspec.Raw(b"[" + entries + b"]")
    if is_last:
        body |= {"done_reason": job.progress.reason or "stop", **job.figures()}
    return _json(body)


async def _respond(request: Request, preparing: Any, body: Asked, shape: Any) -> Response:
    job: _Job = await until_disconnect(request, preparing)
    await job.service.check_grammar(job.params)
    pieces = job.pieces(request.state.caller)
    if not body.stream:
        return Response(await until_disconnect(request, _whole(job, pieces, shape)), media_type="application/json")
    first = await until_disconnect(request, anext(pieces))
    return _Lines(_stream(job, first, pieces, shape), also_close=pieces, is_framed=True)


async def _whole(job: _Job, pieces: AsyncGenerator[dict[str, Any], None], shape: Any) -> bytes:
    made: dict[str, list[Any]] = {}
    async with aclosing(pieces):
        async for piece in pieces:
            for name, value in piece.items():
                made.setdefault(name, []).append(value)
    joined: dict[str, Any] = {name: "".join(made[name]) for name in ("content", "thinking") if name in made}
    if "tool_calls" in made:
        joined["tool_calls"] = [call for calls in made["tool_calls"] for call in calls]
    if "logprobs" in made:
        joined["logprobs"] = b",".join(made["logprobs"])
    return _line(job, joined, shape, True)


async def _stream(
    job: _Job, first: dict[str, Any], rest: AsyncGenerator[dict[str, Any], None], shape: Any
) -> AsyncGenerator[bytes, None]:
    try:
        if first:
            yield _line(job, first, shape, False) + b"\n"
        async for piece in rest:
            if piece:
                yield _line(job, piece, shape, False) + b"\n"
        yield _line(job, {}, shape, True) + b"\n"
    except TidemillError as error:
        yield _json({"error": str(error)}) + b"\n"
    finally:
        await rest.aclose()


# ---- embeddings


class _Vector(msgspec.Struct):
    embedding: msgspec.Raw


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Vectors(msgspec.Struct):
    data: list[_Vector]
    usage: _Usage


async def _embeddings(
    models: Models, service: Service, texts: list[str], truncate: bool, more: dict[str, Any], caller: Caller
) -> tuple[list[msgspec.Raw], int]:
    """The vectors as JSON, and how many tokens they are of."""
    if not texts:
        return [], 0
    most = service.max_context
    prompts = [await service.encode_cut(text, most) if truncate else await service.encode(text) for text in texts]
    model, respond = models.whole_responses["/v1/embeddings"]
    asked = await aside(partial(read, model, {"model": service.model_name, "input": prompts, **more}))
    made = msgspec.json.decode(await respond(asked, caller), type=_Vectors)
    return [one.embedding for one in made.data], made.usage.prompt_tokens


# ---- what is said about a model


def _listed(service: Service) -> dict[str, Any]:
    name, model, config = service.model_name, service.ready.model, service.ready.config
    full = name if ":" in name.rpartition("/")[2] else name + _LATEST
    return {
        "name": full,
        "model": full,
        "modified_at": _since(service),
        "size": config.weight_bytes,
        "digest": hashlib.sha256(name.encode() + msgspec.json.encode(model)).hexdigest(),  # of its description
        "details": _details(service),
    }


def _running(service: Service) -> dict[str, Any]:
    config = service.ready.config
    size = 0 if config.device == "cpu" else config.weight_bytes
    return _listed(service) | {"expires_at": _NEVER, "size_vram": size, "context_length": config.max_context}


def _since(service: Service) -> str:
    return datetime.fromtimestamp(service.created_s, UTC).isoformat().replace("+00:00", "Z")


def _details(service: Service) -> dict[str, Any]:
    model, path, family = service.ready.model, service.tokenizer.path, _family(service)
    return {
        "parent_model": "",
        "format": "gguf" if path is not None and path.is_file() else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _size(model.num_parameters),
        "quantization_level": max(model.stored, key=lambda kind: model.stored[kind], default="unknown"),
    }


def _family(service: Service) -> str:
    """As GGUF files name it: llama, not LlamaForCausalLM."""
    return service.ready.model.architecture.partition("For")[0].removesuffix("Model").removesuffix("LMHead").lower()


def _size(num: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if num >= unit:
            return f"{num / unit:.1f}{name}"
    return str(num)


def _shown(service: Service) -> dict[str, Any]:
    tokenizer, model = service.tokenizer, service.ready.model
    rotation = model.attention_layers[-1].rotation if model.attention_layers else None
    kind = _family(service)
    ends = [text for token in tokenizer.eos_token_ids if (text := tokenizer.token_text(token))]
    can = {
        "completion": True,
        "tools": tokenizer.chat_template is not None,
        "thinking": _can_think(service),
        "insert": infill_tokens(tokenizer) is not None,
    }
    capabilities = [name for name, is_there in can.items() if is_there]
    if model.own_pooling is not None:  # it generates nothing
        capabilities = [] if model.own_pooling == "score" else ["embedding"]
    template = tokenizer.chat_template.source if tokenizer.chat_template else ""
    return {
        "modelfile": f"FROM {service.model_name}",
        "parameters": "\n".join([f"num_ctx {service.max_context}", *(f"stop {json.dumps(text)}" for text in ends)]),
        "template": template,
        "details": _details(service),
        "model_info": {
            "general.architecture": kind,
            "general.parameter_count": model.num_parameters,
            f"{kind}.attention.head_count": model.num_heads,
            f"{kind}.attention.head_count_kv": model.num_kv_heads,
            f"{kind}.attention.layer_norm_rms_epsilon": model.norm_eps,
            f"{kind}.block_count": model.num_layers,
            f"{kind}.context_length": service.max_context,
            f"{kind}.embedding_length": model.hidden_size,
            f"{kind}.feed_forward_length": model.intermediate_size,
            **({f"{kind}.rope.freq_base": rotation.theta} if rotation else {}),
            f"{kind}.vocab_size": model.vocab_size,
            "tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
            "tokenizer.ggml.eos_token_id": next(iter(tokenizer.eos_token_ids), None),
        },
        "capabilities": capabilities,
        "modified_at": _since(service),
    }
