"""The codecs of llama.cpp's completion, infill and embedding."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import msgspec

from tidemill.errors import ContextTooLong, InvalidRequest, TidemillError
from tidemill.server.api.llamacpp.types import Completion, CompletionOptions, Embedding, Infill
from tidemill.server.generation.logprobs import as_list, cells, llamacpp_logprobs
from tidemill.server.generation.pipeline import Codec
from tidemill.server.generation.pooled import (
    Input,
    PooledEndpoint,
    Pooling,
    VectorFormat,
    embedding_pooling,
)
from tidemill.server.generation.prompts import empty_prompt, ids_of, infill
from tidemill.server.generation.request import Choice, Generation, Output, Prompt
from tidemill.server.generation.service import Service
from tidemill.server.http.responses import data_event
from tidemill.types.sampling import SamplingParams


class OptionsCodec(Codec):
    """The codec of what completion and infill share."""

    body: CompletionOptions
    _is_list = False

    # ---- from the body to the generation

    async def generation_of(self, ids: list[list[int]], stops: tuple[int, ...] = ()) -> Generation:
        body, service = self.body, self.service
        values = body.sampling() | {"max_tokens": 1 if body.says_nothing else body.limit}
        if body.logit_bias:
            values["logit_bias"] = await asyncio.to_thread(body.biases, service.tokenizer)
        if body.post_sampling_probs and body.n_probs:
            values["post_sampling_logprobs"] = True
        params = SamplingParams(**values, stop_token_ids=stops)
        self._entry = llamacpp_logprobs(service.tokenizer, params.post_sampling_logprobs)
        self._has_new_line: set[int] = set()  # choices
        self._prompt_texts: dict[int, str] = {}  # by choice
        return Generation(
            service,
            self.caller,
            [Prompt(each, params) for each in ids],
            ends_with_context=True,
            one_by_one=body.stream and body.n_probs > 0,  # clients read one token's of each event
            tells_progress=body.stream and body.return_progress,
            keeps_logprobs=body.n_probs > 0 and not body.stream,
        )

    # ---- what is written

    def _response(
        self, choice: Choice, text: str, ids: list[int], probs: Iterable[bytes]
    ) -> dict[str, Any]:
        figures = choice.prompt.figures
        response: dict[str, Any] = {
            "index": choice.number,
            "content": text,
            "tokens": ids,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": figures.num_output,
            "tokens_evaluated": figures.num_prompt,
        }
        if probs := [part for part in probs if part]:
            response["completion_probabilities"] = as_list(probs)
        if self.body.timings_per_token:
            response["timings"] = figures.llamacpp_timings()
        return response

    async def finish(self, output: Output) -> None:
        """The prompt's text is made in a thread if it is long."""
        choice = output.choice
        self._prompt_texts[choice.number] = await self.service.decode(choice.prompt.ids)

    def _ended(self, response: dict[str, Any], choice: Choice) -> dict[str, Any]:
        """The last event of a choice, or the whole response."""
        prompt, figures, is_word = (
            choice.prompt,
            choice.prompt.figures,
            isinstance(choice.stop, str),
        )
        num_tokens = figures.num_prompt + figures.num_output
        is_cut = choice.finish_reason == "length"
        response |= {
            "stop": True,
            "model": self.service.model_name,
            "generation_settings": settings(self.service, prompt.params, self.body),
            "prompt": self._prompt_texts[choice.number],
            "has_new_line": choice.number in self._has_new_line,
            "truncated": is_cut and num_tokens >= self.service.max_context,
            "stop_type": "limit" if is_cut else "word" if is_word else "eos",
            "stopping_word": choice.stop if is_word else "",
            "tokens_cached": num_tokens,
            "timings": figures.llamacpp_timings(),
        }
        return _only(response, self.body.response_fields) if self.body.response_fields else response

    def _new(self, output: Output) -> tuple[str, list[int], bytes]:
        """Text, token ids and log-probabilities, as JSON without brackets."""
        if self.body.says_nothing:
            output.choice.prompt.figures.num_output = 0
            return "", [], b""
        if "\n" in output.text.text:
            self._has_new_line.add(output.choice.number)
        return output.text.text, output.token_ids, cells(output.logprobs, self._entry)

    def event(self, output: Output) -> Iterable[bytes]:
        """The last event has `stop`, so that there is no [DONE]."""
        choice, (text, ids, probs) = output.choice, self._new(output)
        if text or ids or output.delta.progress is not None:
            response = self._response(choice, text, ids, [probs])
            if output.delta.progress is not None:
                progress = choice.prompt.figures.llamacpp_progress(output.delta.progress)
                response["prompt_progress"] = progress
            yield data_event(response)
        if output.is_last:
            yield data_event(self._ended(self._response(choice, "", [], []), choice))

    def keep(self, output: Output) -> None:
        choice, (text, ids, probs) = output.choice, self._new(output)
        choice.texts.append(text)
        choice.token_ids += ids if self.body.return_tokens else []
        choice.cells.append(probs)

    async def whole(self) -> Any:
        responses = [
            self._ended(
                self._response(choice, "".join(choice.texts), choice.token_ids, choice.cells),
                choice,
            )
            for choice in self.generation.choices
        ]
        return responses if self._is_list else responses[0]

    def refusal(self, error: TidemillError) -> TidemillError:
        """In llama.cpp's words, which its clients look for."""
        if not isinstance(error, ContextTooLong) or error.figures is None:
            return error
        num, size = error.figures["n_prompt_tokens"], error.figures["n_ctx"]
        what = f"request ({num} tokens) exceeds the available context size ({size} tokens)."
        fix = "Please reduce the length of the input prompt, or serve with a larger --max-context."
        refused = ContextTooLong(what, fix=fix, param=error.param)
        refused.figures = error.figures
        return refused


class LlamaCompletionCodec(OptionsCodec):
    body_type = Completion
    body: Completion

    async def read(self) -> Generation:
        ids = [await ids_of(self.service, prompt) for prompt in self.body.prompt]
        if not ids:
            raise empty_prompt()
        self._is_list = len(ids) > 1
        return await self.generation_of(ids)


class InfillCodec(OptionsCodec):
    body_type = Infill
    body: Infill

    async def read(self) -> Generation:
        body = self.body
        files = [(file.filename, file.text) for file in body.input_extra or ()]
        ids, stops = await infill(
            self.service, body.input_prefix, body.input_suffix, body.prompt, files
        )
        return await self.generation_of([ids], stops)


class LlamaEmbeddings(PooledEndpoint):
    body_type = Embedding
    body: Embedding

    async def read(self) -> Pooling:
        body = self.body
        if (body.content is None) == (body.input is None):
            raise InvalidRequest("Give either content or input.", param="content")
        prompts = body.input if body.content is None else body.content
        if not prompts:
            raise empty_prompt("content")
        inputs = [Input(await ids_of(self.service, prompt)) for prompt in prompts]
        self._is_each = (
            self.service.response_defaults.pooling == "none"
        )  # token; llama-server does not normalize these
        kind = embedding_pooling(self.service)
        self._format = VectorFormat(is_normalized=not self._is_each)
        self._vectors = [b""] * len(inputs)
        return Pooling(inputs, "none" if self._is_each else kind, False if self._is_each else None)

    async def take(self, number: int, vector: list[float]) -> None:
        if self._is_each:
            size = self.service.ready.model.hidden_size
            self._vectors[number] = await self._format.rows(vector, size)
        else:
            self._vectors[number] = b"[" + self._format.one(vector) + b"]"

    def whole(self) -> list[dict[str, Any]]:
        """A list of vectors for each input, of which there is one unless each token has its own."""
        return [
            {"index": i, "embedding": msgspec.Raw(rows)} for i, rows in enumerate(self._vectors)
        ]


def _only(body: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The fields asked for, by the names they were asked for with. a/b is the field b of a."""
    fields = {}
    for name in names:
        value: Any = body
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            fields[name] = value
    return fields


# Samplers of llama.cpp that are not supported, at the values with which they are off.
_OFF = {
    "dynatemp_range": 0.0, "dynatemp_exponent": 1.0, "top_n_sigma": -1.0, "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "dry_multiplier": 0.0, "mirostat": 0, "adaptive_target": -1.0, "adaptive_decay": 0.9,
    "min_keep": 0, "n_keep": 0,
    "n_discard": 0, "lora": [],
}  # fmt: skip


def settings(
    service: Service, params: SamplingParams, body: CompletionOptions | None = None
) -> dict[str, Any]:
    """Under llama.cpp's names. `params`: filled with the model's defaults."""
    grammar = params.grammar
    biases: list[dict[str, Any]] = [
        {"bias": bias, "token": token} for token, bias in params.logit_bias.items()
    ]
    if params.ignore_eos:
        biases += [
            {"bias": None, "token": token} for token in service.tokenizer.eos_token_ids
        ]  # null: minus infinity
    limit = None
    if body is not None and not body.is_unlimited:
        limit = params.max_tokens if body.limit is None else body.limit
    return _OFF | {
        "n_predict": -1 if limit is None else limit,
        "max_tokens": -1 if limit is None else limit,
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
