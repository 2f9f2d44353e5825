"""llama.cpp's own API: completion, infill, embedding, and what its clients ask about the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from json import dumps
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from fastapi import APIRouter, Depends, Request
from pydantic import Field, Strict, WithJsonSchema, field_validator
from starlette.responses import Response

from tidemill.errors import ContextTooLong, InvalidRequest, TidemillError
from tidemill.frontend.infill import MAX_FILES, infill_prompt, infill_tokens
from tidemill.frontend.output import TextDelta
from tidemill.sampling import MAX_LOGIT_BIASES, MAX_LOGPROBS, SamplingParams
from tidemill.server.api.openai.embeddings import embeddings_json
from tidemill.server.api.openai.messages import ChatMessages
from tidemill.server.api.openai.routes import ids_of, merge
from tidemill.server.api.openai.types import MAX_CHOICES, Mixed, PoolingRequest, few_texts, is_mixed
from tidemill.server.generation import sampling_aliases
from tidemill.server.generation.models import Models
from tidemill.server.generation.sampling_aliases import Progress
from tidemill.server.generation.service import Service
from tidemill.server.http.access import Caller
from tidemill.server.http.body import Body, body_of, schema_of
from tidemill.server.http.errors import error_body
from tidemill.server.http.responses import EventStream, until_disconnect
from tidemill.server.observe.explain import Story
from tidemill.version import __version__
from tidemill.wire import Delta, PromptProgress

_MOST_BIASED = 100.0  # a bias that forbids a token, or forces it
_MAX_BIASED_CHARS = 256  # of a text whose tokens get a bias
_MAX_FIELDS = 64

_json = msgspec.json.Encoder().encode


# ---- requests

_ID = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
_MIXED = {"type": "array", "items": {"anyOf": [_ID, {"type": "string"}]}}
_TEXT = {"type": "object", "properties": {"prompt_string": {"type": "string"}}, "required": ["prompt_string"]}
_ONE = [{"type": "string"}, _MIXED, _TEXT]
_PROMPT = {"anyOf": [*_ONE, {"type": "array", "items": {"anyOf": _ONE}}]}
PromptField = Annotated[Any, WithJsonSchema(_PROMPT)]


def prompts_of(given: Any) -> list[Mixed]:
    """A text, or a list of token ids and texts, is one prompt; a list of texts or of lists is several. An object has the text as
    its prompt_string."""
    if isinstance(given, str) or is_mixed(given):  # of which there may be a million: looked at once
        return few_texts([given])
    if isinstance(given, dict):
        given = [given]
    if isinstance(given, list):
        given = [_text_of(one) if isinstance(one, dict) else one for one in given]
    if not isinstance(given, list) or not all(isinstance(one, str) or is_mixed(one) for one in given):
        raise ValueError("it must be a text, a list of token ids and texts, or a list of prompts")
    if len(given) > MAX_CHOICES:
        raise ValueError(f"{len(given)} prompts in one request; at most {MAX_CHOICES}")
    return few_texts(given)


def _text_of(prompt: dict[str, Any]) -> Any:
    if prompt.get("multimodal_data"):
        raise ValueError("images and audio (multimodal_data) are not supported")
    return prompt.get("prompt_string")


Bias = Annotated[tuple[int | str, float | bool], Strict(False)]  # from a list


class CompletionOptions(sampling_aliases.Options):
    """What completion and infill share."""

    without_effect: ClassVar[frozenset[str]] = sampling_aliases.Options.without_effect | {
        "cache_prompt", "id_slot", "slot_id", "n_keep", "n_discard", "n_cache_reuse", "speculative.n_max", "speculative.n_min",
        "speculative.p_min", "backend_sampling",
    }  # fmt: skip

    model: str | None = None
    n_predict: int | None = Field(default=None, ge=-2, lt=2**31)
    max_tokens: int | None = Field(default=None, ge=-1, lt=2**31)
    stream: bool = False
    n_probs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)
    grammar: str | None = None
    json_schema: dict[str, Any] | bool | None = None
    ignore_eos: bool = False
    logit_bias: Annotated[dict[str, float | bool] | list[Bias], Field(max_length=MAX_LOGIT_BIASES)] | None = None
    return_tokens: bool = False
    timings_per_token: bool = False
    response_fields: list[str] | None = Field(default=None, max_length=_MAX_FIELDS)
    post_sampling_probs: bool = False  # of what tokens are drawn from
    return_progress: bool = False
    samplers: Annotated[list[str], Field(max_length=0)] | None = None
    lora: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def limit(self) -> int | None:
        """Of output tokens; None: up to the end of the context, or the server's default."""
        given = self.n_predict if self.n_predict is not None else self.max_tokens
        return None if given is None or given < 0 else given

    @property
    def is_unlimited(self) -> bool:
        """The output may take the rest of the context."""
        return (self.n_predict if self.n_predict is not None else self.max_tokens or 0) < 0

    def values(self, service: Service) -> dict[str, Any]:
        """As parameters of the OpenAI API."""
        made = self.sampling() | {"ignore_eos": self.ignore_eos}
        if self.n_probs:
            made["logprobs"] = self.n_probs
        if self.grammar and self.json_schema is not None:
            raise InvalidRequest("grammar and json_schema are both given.", fix="Give one.", param="grammar")
        if self.grammar:
            made["structured_outputs"] = {"grammar": self.grammar}
        elif self.json_schema is not None:
            made["structured_outputs"] = {"json": dumps(self.json_schema)}
        if self.logit_bias:
            made["logit_bias"] = {str(token): bias for token, bias in self._biases(service).items()}
        return made

    def _biases(self, service: Service) -> dict[int, float]:
        """By token id. A text biases each of its tokens; false forbids a token."""
        given = self.logit_bias.items() if isinstance(self.logit_bias, dict) else self.logit_bias or ()
        made: dict[int, float] = {}
        for key, value in given:
            bias = -_MOST_BIASED if value is False else float(value)
            if isinstance(key, int) or (key.isascii() and key.isdigit() and len(key) <= 10):
                made[int(key)] = bias
            elif len(key) > _MAX_BIASED_CHARS:
                raise InvalidRequest(
                    f"A text in logit_bias has {len(key)} characters; at most {_MAX_BIASED_CHARS}.", param="logit_bias"
                )
            else:
                made |= dict.fromkeys(service.tokenizer.encode(key, add_special=False), bias)
            if len(made) > MAX_LOGIT_BIASES:
                raise InvalidRequest(f"logit_bias may hold at most {MAX_LOGIT_BIASES} tokens.", param="logit_bias")
        return made


class Completion(CompletionOptions):
    prompt: PromptField

    @field_validator("prompt")
    @classmethod
    def _of_one_kind(cls, given: Any) -> list[Mixed]:
        return prompts_of(given)


class ExtraFile(Body):
    filename: str = Field(default="", max_length=4096)
    text: str


class Infill(CompletionOptions):
    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] | None = Field(default=None, max_length=MAX_FILES)
    prompt: str = ""


class Embedding(Body):
    model: str | None = None
    content: PromptField = None
    input: PromptField = None  # another name of it
    embd_normalize: Literal[2] = 2  # by the Euclidean norm

    @field_validator("content", "input")
    @classmethod
    def _of_one_kind(cls, given: Any) -> list[Mixed]:
        return prompts_of(given)


# ---- what is run


@dataclass(slots=True)
class _Sequence:
    """One of the prompts, and what is known of its output."""

    prompt: list[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    progress: Progress = field(init=False)
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    probs: list[bytes] = field(default_factory=list)  # JSON, without brackets
    has_new_line: bool = False
    prefilled: PromptProgress | None = None  # told with the latest output

    def __post_init__(self) -> None:
        self.progress = Progress(len(self.prompt))


_New = tuple[str, list[int], list[bytes]]  # content, token ids, and log-probabilities as JSON without brackets
_Output = tuple[int, _New, bool]  # of the prompt of that number, and whether it is the last


class _Job:
    def __init__(self, service: Service, prompts: list[list[int]], body: CompletionOptions, values: dict[str, Any]) -> None:
        self.service, self.body = service, body
        self.sequences = [_Sequence(prompt) for prompt in prompts]
        self._says_nothing = body.limit == 0  # only the prompt is computed, and cached
        limit = 1 if self._says_nothing else body.limit
        params = sampling_aliases.completion_params(service, prompts, values, limit, body.stream)
        if body.post_sampling_probs and body.n_probs:
            if service.ready.config.device != "cpu":
                what = "post_sampling_probs is not supported on a GPU."
                raise InvalidRequest(what, fix="Leave it out: probabilities are the model's own.", param="post_sampling_probs")
            params = msgspec.structs.replace(params, post_sampling_logprobs=True)
        for sequence in self.sequences:
            sequence.params = self._filled(params, service.max_context - len(sequence.prompt))

    def _filled(self, params: SamplingParams, room: int) -> SamplingParams:
        """What is not given takes the model's defaults. The output ends with the context at the latest; -1 asks for all of it."""
        if self.body.is_unlimited or params.max_tokens is not None:
            params = msgspec.structs.replace(params, max_tokens=max(min(params.max_tokens or room, room), 1))
        return self.service.defaults.fill(params, room, null_is_absent=True)

    async def outputs(self, caller: Caller) -> AsyncGenerator[_Output, None]:
        is_single = self.body.stream and self.body.n_probs > 0  # clients read one token's of each event
        how: Any = {"one_by_one": is_single, "tells_progress": self.body.stream and self.body.return_progress}
        streams = [self.service.stream(caller, one.prompt, one.params, i, **how) for i, one in enumerate(self.sequences)]
        async with aclosing(merge(streams)) as merged:
            async for i, (delta, text) in merged:
                self.sequences[i].prefilled = delta.progress
                yield i, self._take(self.sequences[i], delta, text), text.finish_reason is not None

    def _take(self, sequence: _Sequence, delta: Delta, text: TextDelta) -> _New:
        progress = sequence.progress
        progress.take(delta, text)
        if self._says_nothing:
            progress.num_output = 0
            return "", [], []
        sequence.has_new_line = sequence.has_new_line or "\n" in text.text
        entries = (delta.logprobs or [])[: text.num_tokens]
        made = sampling_aliases.logprobs(self.service.tokenizer, entries, sequence.params.post_sampling_logprobs)
        probs = [_json(made)[1:-1]] if entries else []
        return text.text, delta.token_ids[: text.num_tokens], probs

    def chunk(self, index: int, new: _New) -> dict[str, Any]:
        content, tokens, probs = new
        progress = self.sequences[index].progress
        made: dict[str, Any] = {
            "index": index,
            "content": content,
            "tokens": tokens,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": progress.num_output,
            "tokens_evaluated": progress.num_prompt,
        }
        if probs:
            made["completion_probabilities"] = msgspec.Raw(b"[" + b",".join(probs) + b"]")
        if self.body.timings_per_token:
            made["timings"] = sampling_aliases.timings(progress)
        if (prefilled := self.sequences[index].prefilled) is not None:
            made["prompt_progress"] = sampling_aliases.prompt_progress(prefilled, progress.begun_s)
        return made

    async def last(self, index: int, new: _New) -> dict[str, Any]:
        sequence = self.sequences[index]
        progress = sequence.progress
        is_word = isinstance(progress.stop, str)
        made = self.chunk(index, new) | {
            "stop": True,
            "model": self.service.model_name,
            "generation_settings": settings(self.service, sequence.params, self.body),
            "prompt": await self.service.decode(sequence.prompt),
            "has_new_line": sequence.has_new_line,
            "truncated": progress.reason == "length" and progress.num_prompt + progress.num_output >= self.service.max_context,
            "stop_type": "limit" if progress.reason == "length" else "word" if is_word else "eos",
            "stopping_word": progress.stop if is_word else "",
            "tokens_cached": progress.num_prompt + progress.num_output,
            "timings": sampling_aliases.timings(progress),
        }
        return made if not self.body.response_fields else _only(made, self.body.response_fields)


def _only(body: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The fields asked for, by the names they were asked for with. a/b is the field b of a."""
    made = {}
    for name in names:
        value: Any = body
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            made[name] = value
    return made


# Samplers of llama.cpp that are not supported, at the values with which they are off.
_OFF = {
    "dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "top_n_sigma": -1.0, "xtc_probability": 0.0, "xtc_threshold": 0.1,
    "dry_multiplier": 0.0, "mirostat": 0, "adaptive_target": -1.0, "adaptive_decay": 0.9, "min_keep": 0, "n_keep": 0,
    "n_discard": 0, "lora": [],
}  # fmt: skip


def settings(service: Service, params: SamplingParams, body: CompletionOptions | None = None) -> dict[str, Any]:
    """Under llama.cpp's names. `params`: filled with the model's defaults."""
    grammar = params.grammar
    biases: list[dict[str, Any]] = [{"bias": bias, "token": token} for token, bias in params.logit_bias.items()]
    if params.ignore_eos:
        biases += [{"bias": None, "token": token} for token in service.tokenizer.eos_token_ids]  # null: minus infinity
    asked = None if body is None or body.is_unlimited else params.max_tokens if body.limit is None else body.limit
    return _OFF | {
        "n_predict": -1 if asked is None else asked,
        "max_tokens": -1 if asked is None else asked,
        "seed": -1 if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "typical_p": params.typical_p,
        "repeat_last_n": params.penalty_window,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": list(params.stop),
        "ignore_eos": params.ignore_eos,
        "n_probs": params.logprobs or 0,
        "post_sampling_probs": params.post_sampling_logprobs,
        "logit_bias": biases,
        "grammar": grammar.text if grammar is not None and grammar.kind == "grammar" else "",
        "stream": body.stream if body else False,
        "timings_per_token": body.timings_per_token if body else False,
    }


# ---- routes


def make_router(models: Models) -> APIRouter:
    router = APIRouter()

    @router.post("/completion", openapi_extra=schema_of(Completion))
    async def completion(request: Request, body: Completion = Depends(body_of(Completion))) -> Response:
        service = models.of(body.model)
        prompts = [await ids_of(service, prompt) for prompt in body.prompt]
        if not prompts:
            raise InvalidRequest("The prompt is empty.", fix="Give a text or at least one token.", param="prompt")
        values = await asyncio.to_thread(body.values, service)
        return await _respond(request, _Job(service, prompts, body, values), is_list=len(prompts) > 1)

    router.add_api_route("/completions", completion, methods=["POST"], include_in_schema=False)

    @router.post("/infill", openapi_extra=schema_of(Infill))
    async def infill(request: Request, body: Infill = Depends(body_of(Infill))) -> Response:
        service = models.of(body.model)
        files = [(file.filename, file.text) for file in body.input_extra or ()]
        how: Any = {"begun": body.prompt, "files": files, "max_tokens": service.max_context}
        work = partial(infill_prompt, service.tokenizer, body.input_prefix, body.input_suffix, **how)
        prompt = await asyncio.to_thread(work)
        tokens = infill_tokens(service.tokenizer)
        values = await asyncio.to_thread(body.values, service)
        values["stop_token_ids"] = list(tokens.ends) if tokens else []
        return await _respond(request, _Job(service, [prompt], body, values), is_list=False)

    @router.post("/embedding", openapi_extra=schema_of(Embedding))
    async def embedding(request: Request, body: Embedding = Depends(body_of(Embedding))) -> Response:
        if (body.content is None) == (body.input is None):
            raise InvalidRequest("Give either content or input.", param="content")
        service = models.of(body.model)
        given: list[Mixed] = body.input if body.content is None else body.content
        made = await until_disconnect(request, _embedding(models, service, given, request.state.caller))
        return Response(made, media_type="application/json")

    router.add_api_route("/embeddings", embedding, methods=["POST"], include_in_schema=False)

    @router.post("/apply-template", openapi_extra=schema_of(ChatMessages))
    async def apply_template(body: ChatMessages = Depends(body_of(ChatMessages))) -> dict[str, str]:
        """For /completion, which puts the first token before it."""
        service = models.of(body.model)
        return {"prompt": service.tokenizer.as_prompt(await service.render_chat(body.conversation, **body.how()))}

    @router.get("/props")
    async def props(model: str | None = None) -> dict[str, Any]:
        return _props(models.of(model))

    @router.get("/slots")
    async def slots(fail_on_no_slot: str = "", model: str | None = None) -> list[dict[str, Any]]:
        """Requests that are being computed, without their texts, then the free slots."""
        service = models.of(model)
        if not service.manner.shows_slots:
            raise SlotsHidden("This server does not show its slots.", fix="Start it without --no-slots.")
        made = _slots(service)
        if fail_on_no_slot == "1" and all(slot["is_processing"] for slot in made):
            raise NoSlot("No slot is free.")
        return made

    return router


class SlotsHidden(TidemillError):
    kind = "not_supported_error"
    status = 501


class NoSlot(TidemillError):
    kind = "unavailable_error"
    status = 503


async def _respond(request: Request, job: _Job, is_list: bool) -> Response:
    await job.service.check_grammar(job.sequences[0].params)
    outputs = job.outputs(request.state.caller)
    try:
        if not job.body.stream:
            made = await until_disconnect(request, _whole(job, outputs))
            return Response(_json(made if is_list else made[0]), media_type="application/json")
        first = await until_disconnect(request, anext(outputs))
    except ContextTooLong as error:
        if error.figures is None:
            raise
        raise _exceeds(error) from None
    return EventStream(_stream(job, first, outputs), also_close=outputs, is_framed=True)


def _exceeds(error: ContextTooLong) -> ContextTooLong:
    """In llama.cpp's words, which its clients look for."""
    figures = error.figures or {}
    what = f"request ({figures['n_prompt_tokens']} tokens) exceeds the available context size ({figures['n_ctx']} tokens)."
    made = ContextTooLong(
        what, fix="Please reduce the length of the input prompt, or serve with a larger --max-context.", param=error.param
    )
    made.figures = figures
    return made


async def _whole(job: _Job, outputs: AsyncGenerator[_Output, None]) -> list[dict[str, Any]]:
    async with aclosing(outputs):
        async for i, (content, tokens, probs), _ in outputs:
            sequence = job.sequences[i]
            sequence.texts.append(content)
            sequence.tokens += tokens if job.body.return_tokens else []
            sequence.probs += probs
    return [await job.last(i, ("".join(one.texts), one.tokens, one.probs)) for i, one in enumerate(job.sequences)]


async def _stream(job: _Job, first: _Output, rest: AsyncGenerator[_Output, None]) -> AsyncGenerator[bytes, None]:
    """Without [DONE]: the last chunk has `stop`."""
    try:
        for event in await _events(job, first):
            yield event
        async for output in rest:
            for event in await _events(job, output):
                yield event
    except TidemillError as error:
        yield _event(error_body(error))
    finally:
        await rest.aclose()


async def _events(job: _Job, output: _Output) -> list[bytes]:
    i, new, is_last = output
    made = [_event(job.chunk(i, new))] if new[0] or new[1] or job.sequences[i].prefilled else []
    return [*made, _event(await job.last(i, ("", [], [])))] if is_last else made


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + _json(chunk) + b"\n\n"


class _Vector(msgspec.Struct):
    index: int
    data: msgspec.Raw


class _Vectors(msgspec.Struct):
    data: list[_Vector]


async def _embedding(models: Models, service: Service, given: list[Mixed], caller: Caller) -> bytes:
    prompts = [await ids_of(service, prompt) for prompt in given]
    is_each = service.manner.pooling == "none"  # token; llama-server does not normalize these
    asked: dict[str, Any] = {"model": service.model_name, "input": prompts, "task": "token_embed" if is_each else "embed"}
    body = PoolingRequest.model_construct(**asked | ({"use_activation": False} if is_each else {}))
    made = msgspec.json.decode(await embeddings_json(models, body, caller), type=_Vectors)
    return _json([{"index": one.index, "embedding": one.data if is_each else [one.data]} for one in made.data])


# ---- what is said about the server


def _props(service: Service) -> dict[str, Any]:
    tokenizer, config = service.tokenizer, service.ready.config
    eos = next(iter(tokenizer.eos_token_ids), None)
    defaults = settings(service, service.defaults.fill(SamplingParams(), config.max_context, null_is_absent=True))
    return {
        "default_generation_settings": {"id": 0, "n_ctx": config.max_context, "params": defaults},
        "total_slots": config.max_requests,
        "model_alias": service.model_name,
        "model_path": service.model_name,  # where its files are is nobody's business
        "chat_template": tokenizer.chat_template.source if tokenizer.chat_template else "",
        "bos_token": "" if tokenizer.bos_token_id is None else tokenizer.token_text(tokenizer.bos_token_id),
        "eos_token": "" if eos is None else tokenizer.token_text(eos),
        "modalities": {"vision": False, "audio": False},
        "build_info": f"tidemill {__version__}",
    }


def _slots(service: Service) -> list[dict[str, Any]]:
    config = service.ready.config
    running = [story for story in service.explainer.under_way() if story.state not in ("queued", "preempted")]
    made = [_slot(i, config.max_context, story) for i, story in enumerate(running)]
    return made + [_slot(i, config.max_context, None) for i in range(len(made), config.max_requests)]


def _slot(number: int, num_context: int, story: Story | None) -> dict[str, Any]:
    made = {"id": number, "n_ctx": num_context, "speculative": False, "is_processing": story is not None}
    if story is None:
        return made
    decode = story.spans.get("decode")
    num_decoded = (story.first_token_s is not None) + (decode.num_tokens if decode else 0)
    return made | {
        "id_task": story.request_id.partition("/")[2],  # without the tenant
        "n_prompt_tokens": story.num_prompt,
        "n_prompt_tokens_cached": story.num_cached,
        "next_token": [{"has_next_token": True, "n_decoded": num_decoded}],
    }
