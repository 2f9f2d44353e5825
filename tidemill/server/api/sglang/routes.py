"""SGLang's own API: generation, and what its clients ask about the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tidemill.errors import InvalidRequest, TidemillError
from tidemill.frontend.output import TextDelta
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.sampling import (
    MAX_ALLOWED_TOKENS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROB_IDS,
    MAX_LOGPROBS,
    MAX_STOP_REGEXES,
    MAX_STOPS,
    SamplingParams,
)
from tidemill.server.api.openai.routes import ids_of, merge
from tidemill.server.api.openai.types import MAX_CHOICES
from tidemill.server.api.openai.writers import MAX_LOGPROB_CELLS
from tidemill.server.generation import sampling_aliases
from tidemill.server.generation.models import Models
from tidemill.server.generation.service import Service
from tidemill.server.http.access import Caller
from tidemill.server.http.aside import aside
from tidemill.server.http.body import Body, body_of, schema_of
from tidemill.server.http.context import ID_PATTERN
from tidemill.server.http.errors import error_body
from tidemill.server.http.responses import EventStream, until_disconnect
from tidemill.version import __version__
from tidemill.wire import Delta, decode_logprobs

_DEFAULT_TOKENS = 128
# Every event of a stream has all of the output so far: its logprobs grow with the square of its length.
_MAX_STREAMED_CELLS = 2**22

_json = msgspec.json.Encoder().encode


class Sampling(Body):
    """Values are checked by SamplingParams."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"stream_interval"})

    max_new_tokens: int = Field(default=_DEFAULT_TOKENS, ge=0, lt=2**31)
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS)] | None = None
    stop_regex: str | Annotated[list[str], Field(max_length=MAX_STOP_REGEXES)] | None = None
    stop_token_ids: list[int] | None = Field(default=None, max_length=256)
    allowed_token_ids: list[int] | None = Field(default=None, min_length=1, max_length=MAX_ALLOWED_TOKENS)
    logit_bias: dict[str, float] | None = Field(default=None, max_length=MAX_LOGIT_BIASES)
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Literal[True] = True
    no_stop_trim: bool | None = None
    sampling_seed: int | None = None

    def values(self) -> dict[str, Any]:
        """As parameters of the OpenAI API."""
        same = (
            "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "n", "stop",
            "stop_regex", "stop_token_ids", "allowed_token_ids", "logit_bias", "json_schema", "regex", "ebnf", "ignore_eos",
            "skip_special_tokens",
        )  # fmt: skip
        other: dict[str, Any] = {
            "min_tokens": self.min_new_tokens,
            "seed": self.sampling_seed,
            "include_stop_str_in_output": self.no_stop_trim,
        }
        if self.structural_tag is not None:
            other["structured_outputs"] = {"structural_tag": self.structural_tag}
        given = {name: getattr(self, name) for name in same} | other
        return {name: value for name, value in given.items() if value is not None}


_Salt = Annotated[str, Field(max_length=256)]


class Generate(Body):
    """One prompt, or a list of them. What may differ between prompts may be a list as well."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"log_metrics", "priority", "bootstrap_room", "routed_dp_rank"})

    model: str | None = None
    text: str | list[str] | None = None
    input_ids: list[int] | list[list[int]] | None = None
    sampling_params: Sampling | Annotated[list[Sampling], Field(max_length=MAX_CHOICES)] | None = None
    rid: Annotated[str, Field(pattern=ID_PATTERN)] | None = None  # a label, as X-Request-Id
    stream: bool = False
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1  # logprobs of the prompt's tokens from here; -1: none
    extra_key: _Salt | list[_Salt] | None = None  # the prefix cache is separate for each
    top_logprobs_num: int | list[int] = 0
    token_ids_logprob: list[int] | list[list[int] | None] | None = None
    return_text_in_logprobs: bool = False

    def prompts(self) -> list[Any]:
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequest("Give either text or input_ids.", param="text")
        given = self.text if self.text is not None else self.input_ids
        prompts = given if self.is_list and isinstance(given, list) else [given]
        if not prompts or len(prompts) > MAX_CHOICES:
            raise InvalidRequest(f"{len(prompts)} prompts in one request; 1 to {MAX_CHOICES}.", param="text")
        return prompts

    @property
    def is_list(self) -> bool:
        ids = self.input_ids
        return isinstance(self.text, list) or (bool(ids) and isinstance(ids, list) and isinstance(ids[0], list))

    def of_each(self, name: str, num: int) -> list[Any]:
        """A value for each prompt."""
        value = getattr(self, name)
        if not isinstance(value, list):
            return [value] * num
        if len(value) != num:
            raise InvalidRequest(f"{name} has {len(value)} values for {num} prompts.", param=name)
        return value

    def named_ids(self, num: int) -> list[list[int]]:
        """Tokens whose logprobs are asked for, for each prompt."""
        value = self.token_ids_logprob
        if value is None or not any(isinstance(one, list) for one in value):
            flat = [one for one in value or () if isinstance(one, int)]
            return [flat] * num
        if not self.is_list:
            raise InvalidRequest("token_ids_logprob of one prompt is a flat list of integers.", param="token_ids_logprob")
        return [one if isinstance(one, list) else [] for one in self.of_each("token_ids_logprob", num)]


@dataclass(slots=True)
class _Sample:
    """One output so far. Its lists are JSON without brackets."""

    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)
    top: list[bytes] = field(default_factory=list)
    reason: dict[str, Any] | None = None
    num_cached: int = 0


class _Sequence:
    """One of the prompts, how it is continued, and its samples."""

    def __init__(self, prompt: list[int], params: SamplingParams, says_nothing: bool, start: int, num_top: int) -> None:
        self.prompt, self.params, self._says_nothing = prompt, params, says_nothing
        self._start, self._num_top, self._named = start, num_top, frozenset(params.logprob_token_ids)
        self.samples = [_Sample() for _ in range(params.n)]
        self._prompt_logprobs, self._prompt_top = b"", b""

    def take(self, tokenizer: Tokenizer, with_text: bool, delta: Delta, text: TextDelta) -> None:
        sample = self.samples[delta.index]
        sample.num_cached = max(sample.num_cached, delta.num_cached)
        if text.finish_reason is not None:
            sample.reason = _reason(text, 0 if self._says_nothing else len(sample.ids) + text.num_tokens)
        if self._says_nothing:
            return
        sample.texts.append(text.text)
        sample.ids += delta.token_ids[: text.num_tokens]
        for entry in (delta.logprobs or [])[: text.num_tokens]:
            sample.logprobs.append(_json(_cell(tokenizer, with_text, entry.token_id, entry.logprob)))
            top = [pair for pair in entry.top if not self._named or pair[0] in self._named]
            sample.top.append(_json([_cell(tokenizer, with_text, *pair) for pair in top]))

    def take_prompt(self, tokenizer: Tokenizer, with_text: bool, pieces: list[msgspec.Raw]) -> None:
        """From the start that was asked for. The first token of a prompt has none."""
        first: list[Any] = [_cell(tokenizer, with_text, self.prompt[0], None)] if self._start == 0 else []
        cells, tops = [_json(first)[1:-1]], [b"null"] if first else []
        for entries in map(decode_logprobs, pieces):
            cells.append(_json([_cell(tokenizer, with_text, entry.token_id, entry.logprob) for entry in entries])[1:-1])
            kept = ([pair for pair in entry.top if not self._named or pair[0] in self._named] for entry in entries)
            tops.append(_json([[_cell(tokenizer, with_text, *pair) for pair in top] for top in kept])[1:-1])
        self._prompt_logprobs, self._prompt_top = b",".join(filter(None, cells)), b",".join(tops)

    def body(self, index: int, meta: dict[str, Any]) -> dict[str, Any]:
        sample = self.samples[index]
        meta = meta | {
            "finish_reason": sample.reason,
            "prompt_tokens": len(self.prompt),
            "completion_tokens": len(sample.ids),
            "cached_tokens": sample.num_cached,
        }
        if self.params.logprobs is not None:
            meta["input_token_logprobs"] = _list([self._prompt_logprobs])
            meta["output_token_logprobs"] = _list(sample.logprobs)
            if self._num_top:
                meta |= {"input_top_logprobs": _list([self._prompt_top]), "output_top_logprobs": _list(sample.top)}
            elif self.params.logprob_token_ids:
                meta["output_token_ids_logprobs"] = _list(sample.top)
                meta["input_token_ids_logprobs"] = _list([self._prompt_top])
        return {"text": "".join(sample.texts), "output_ids": sample.ids, "meta_info": meta}


def _reason(text: TextDelta, num_tokens: int) -> dict[str, Any]:
    return {"type": "length", "length": num_tokens} if text.finish_reason == "length" else {"type": "stop", "matched": text.stop}


def _cell(tokenizer: Tokenizer, with_text: bool, token: int, value: float | None) -> list[Any]:
    finite = None if value is None else max(value, -9999.0)  # JSON has no infinity
    return [finite, token, tokenizer.token_text(token) if with_text else None]


def _list(parts: list[bytes]) -> msgspec.Raw:
    return msgspec.Raw(b"[" + b",".join(part for part in parts if part) + b"]")


# ---- running it


class _Job:
    def __init__(self, service: Service, sequences: list[_Sequence], body: Generate, caller: Caller) -> None:
        self.service, self.sequences, self.body, self.caller = service, sequences, body, caller
        self._begun_s = time.monotonic()

    @property
    def is_list(self) -> bool:
        return self.body.is_list or self.sequences[0].params.n > 1

    async def outputs(self) -> AsyncGenerator[tuple[int, int], None]:
        """Which sample of which prompt has new output."""
        salts = self.body.of_each("extra_key", len(self.sequences))
        streams = [
            self.service.stream(self.caller, one.prompt, one.params, i, salt=salt or "")
            for i, (one, salt) in enumerate(zip(self.sequences, salts, strict=True))
        ]
        async with aclosing(merge(streams)) as merged:
            async for i, (delta, text) in merged:
                if delta.prompt_pieces is not None:
                    how = (self.service.tokenizer, self.body.return_text_in_logprobs, delta.prompt_pieces)
                    await aside(partial(self.sequences[i].take_prompt, *how))
                self.sequences[i].take(self.service.tokenizer, self.body.return_text_in_logprobs, delta, text)
                if text.num_tokens or text.finish_reason:
                    yield i, delta.index

    def written(self, prompt: int, sample: int) -> dict[str, Any]:
        meta = {"id": self.caller.call.request_id, "e2e_latency": time.monotonic() - self._begun_s, "weight_version": "default"}
        return self.sequences[prompt].body(sample, meta)

    async def whole(self) -> Any:
        async with aclosing(self.outputs()) as outputs:
            async for _ in outputs:
                pass
        made = [self.written(i, k) for i, one in enumerate(self.sequences) for k in range(one.params.n)]
        return made if self.is_list else made[0]

    async def streamed(self, first: tuple[int, int], rest: AsyncGenerator[tuple[int, int], None]) -> AsyncGenerator[bytes, None]:
        """Each event has the whole output so far."""
        try:
            yield self._event(first)
            async for output in rest:
                yield self._event(output)
        except TidemillError as error:
            yield _json(error_body(error))
        finally:
            await rest.aclose()

    def _event(self, output: tuple[int, int]) -> bytes:
        prompt, sample = output
        made = self.written(prompt, sample)
        return _json(made | {"index": prompt * self.sequences[0].params.n + sample} if self.is_list else made)


async def _prepare(models: Models, body: Generate, caller: Caller) -> _Job:
    service, prompts = models.of(body.model), body.prompts()
    if body.rid is not None:
        caller.call.labels.append(body.rid)
    num = len(prompts)
    each = zip(
        prompts,
        body.of_each("sampling_params", num),
        body.of_each("return_logprob", num),
        body.of_each("logprob_start_len", num),
        body.of_each("top_logprobs_num", num),
        body.named_ids(num),
        strict=True,
    )
    sequences = [await _sequence(service, body, num, *one) for one in each]
    if num * sequences[0].params.n > MAX_CHOICES or len({one.params.n for one in sequences}) > 1:
        raise InvalidRequest(f"n must be the same for all prompts, with at most {MAX_CHOICES} samples in all.", param="n")
    for sequence in sequences:
        await service.check_grammar(sequence.params)
    return _Job(service, sequences, body, caller)


async def _sequence(
    service: Service,
    body: Generate,
    num_prompts: int,
    prompt: Any,
    sampling: Sampling | None,
    wants_logprobs: bool,
    start: int,
    num_top: int,
    named: list[int],
) -> _Sequence:
    sampling = sampling or Sampling()
    ids = await ids_of(service, prompt)
    if not ids:
        raise InvalidRequest("The prompt is empty.", fix="Give a text or at least one token.", param="text")
    values = sampling.values()
    if wants_logprobs:
        values |= _logprobs(service, len(ids), start, num_top, named)
    room = max(service.max_context - len(ids), 1)  # the output ends with the context at the latest
    max_tokens = max(min(sampling.max_new_tokens, room), 1)
    shared = [ids] * num_prompts  # as if all were like this one: together they fit one response
    work = (service, shared, values, max_tokens, body.stream)
    params = await asyncio.to_thread(sampling_aliases.completion_params, *work)
    params = msgspec.structs.replace(params, prompt_logprobs_start=max(start, 1))
    if params.prompt_logprobs is not None and named:
        if len(ids) * num_prompts * len(named) > MAX_LOGPROB_CELLS:
            what = f"The log-probabilities of {len(named)} tokens in each place of the prompt do not fit one response."
            raise InvalidRequest(what, fix="Raise logprob_start_len to -1, or name fewer.", param="token_ids_logprob")
        params = msgspec.structs.replace(params, prompt_logprob_token_ids=tuple(named))
    if body.stream and params.logprobs is not None and max_tokens**2 * (num_top + len(named) + 1) // 2 > _MAX_STREAMED_CELLS:
        what = "Each event repeats all logprobs so far, which would be too much for this many tokens."
        raise InvalidRequest(what, fix="Lower max_new_tokens, do not stream, or use /v1/completions.", param="return_logprob")
    says_nothing = sampling.max_new_tokens == 0  # only the prompt is computed
    return _Sequence(ids, params, says_nothing, start if start >= 0 else len(ids), num_top)


def _logprobs(service: Service, num_prompt: int, start: int, num_top: int, named: list[int]) -> dict[str, Any]:
    """As parameters of the OpenAI API."""
    if not 0 <= num_top <= MAX_LOGPROBS:
        raise InvalidRequest(f"top_logprobs_num is from 0 to {MAX_LOGPROBS}; got {num_top}.", param="top_logprobs_num")
    if start < -1 or start > num_prompt:
        raise InvalidRequest(f"logprob_start_len is {start}; the prompt has {num_prompt} tokens.", param="logprob_start_len")
    made: dict[str, Any] = {"logprobs": num_top}
    if start >= 0:
        made["prompt_logprobs"] = num_top
    if not named:
        return made
    vocab_size = service.ready.model.vocab_size
    if wrong := [token for token in named if not 0 <= token < vocab_size]:
        what = f"token_ids_logprob has the out-of-vocabulary token {wrong[0]}; tokens are 0 to {vocab_size - 1}."
        raise InvalidRequest(what, param="token_ids_logprob")
    if num_top:
        what = "token_ids_logprob is only supported without top_logprobs_num."
        raise InvalidRequest(what, fix="Give one of them.", param="token_ids_logprob")
    if len(named) > MAX_LOGPROB_IDS:
        raise InvalidRequest(f"token_ids_logprob may have {MAX_LOGPROB_IDS} tokens.", param="token_ids_logprob")
    return made | {"logprob_token_ids": named}


# ---- routes


class AbortRequest(Body):
    rid: str = Field(max_length=256)
    abort_all: Literal[False] = False


def make_router(models: Models) -> APIRouter:
    router = APIRouter()

    @router.post("/generate", openapi_extra=schema_of(Generate))
    async def generate(request: Request, body: Generate = Depends(body_of(Generate))) -> Response:
        job = await _prepare(models, body, request.state.caller)
        if not body.stream:
            made = await until_disconnect(request, job.whole())
            return Response(_json(made), media_type="application/json")
        outputs = job.outputs()
        first = await until_disconnect(request, anext(outputs))
        return EventStream(job.streamed(first, outputs), also_close=outputs)

    @router.post("/abort_request", openapi_extra=schema_of(AbortRequest))
    async def abort(request: Request, body: AbortRequest = Depends(body_of(AbortRequest))) -> Response:
        caller = request.state.caller
        models.cancel(body.rid, None if caller.is_admin else caller.tenant)
        return Response(b"{}", media_type="application/json")

    @router.post("/flush_cache", response_class=PlainTextResponse)
    async def flush_cache() -> Response:
        """No later request finds what was cached before; its pages are free for others."""
        for service in models:
            service.cache_generation += 1
            service.let_go_of_pins("the cache was flushed")
        return PlainTextResponse("Cache flushed.\n")

    @router.get("/model_info")
    async def model_info() -> dict[str, Any]:
        return _model_info(models.default)

    @router.get("/server_info")
    async def server_info() -> dict[str, Any]:
        return _server_info(models.default)

    router.add_api_route("/get_model_info", model_info, include_in_schema=False)
    router.add_api_route("/get_server_info", server_info, include_in_schema=False)

    @router.get("/health_generate", include_in_schema=False)
    async def health_generate() -> Response:
        try:
            await models.prove(10.0)
        except TidemillError as error:
            return JSONResponse({"status": error.message}, 503)
        return Response(status_code=200)

    return router


def _model_info(service: Service) -> dict[str, Any]:
    return {
        "model_path": service.model_name,  # where its files are is nobody's business
        "tokenizer_path": service.model_name,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "has_image_understanding": False,
        "has_audio_understanding": False,
    }


def _server_info(service: Service) -> dict[str, Any]:
    config = service.ready.config
    return {
        "version": __version__,
        "model_path": service.model_name,
        "served_model_name": service.model_name,
        "context_length": config.max_context,
        "max_running_requests": config.max_requests,
        "max_total_num_tokens": config.num_pages * config.page_size,
        "page_size": config.page_size,
        "chunked_prefill_size": config.token_budget,
    }
