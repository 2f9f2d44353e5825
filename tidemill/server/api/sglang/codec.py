"""The codec of SGLang's own generation."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import msgspec

from tidemill.errors import InvalidRequest, TidemillError
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.server.api.sglang.types import Generate, Sampling
from tidemill.server.generation.logprobs import as_list, finite
from tidemill.server.generation.pipeline import Codec
from tidemill.server.generation.prompts import MAX_CHOICES, empty_prompt, ids_of
from tidemill.server.generation.request import Choice, Generation, Output, Prompt
from tidemill.server.generation.service import Service
from tidemill.server.http.aside import aside
from tidemill.server.http.errors import error_body
from tidemill.server.http.responses import DONE, data_event
from tidemill.types.sampling import MAX_LOGPROB_IDS, MAX_LOGPROBS, SamplingParams
from tidemill.types.wire import TokenLogprobs, decode_logprobs

# Every event of a stream has all of the output so far: its logprobs grow with the square of its
# length.
_MAX_STREAMED_CELLS = 2**22
_json = msgspec.json.Encoder().encode


class Logprobs:
    """Log-probabilities of one prompt, or of one choice so far, as JSON without brackets."""

    def __init__(self, tokenizer: Tokenizer, with_text: bool, named: Iterable[int]) -> None:
        """`named`: tokens that are reported in place of the likeliest, if there are any."""
        self._text = tokenizer.token_text if with_text else lambda token: None
        self._named = frozenset(named)
        self.values: list[bytes] = []
        self.top: list[bytes] = []

    def add(self, entries: list[TokenLogprobs]) -> None:
        if entries:
            cells = [self._cell(entry.token_id, entry.logprob) for entry in entries]
            self.values.append(_json(cells)[1:-1])
            self.top.append(_json([self._top(entry) for entry in entries])[1:-1])

    def add_prompt(self, first: int | None, pieces: list[msgspec.Raw]) -> None:
        """`first`: the first token of the prompt, which has no log-probability, if it is
        reported."""
        if first is not None:
            self.values.append(_json([self._cell(first, None)])[1:-1])
            self.top.append(b"null")
        for piece in pieces:
            self.add(decode_logprobs(piece))

    def _top(self, entry: TokenLogprobs) -> list[Any]:
        return [
            self._cell(*pair) for pair in entry.top if not self._named or pair[0] in self._named
        ]

    def _cell(self, token: int, value: float | None) -> list[Any]:
        return [None if value is None else finite(value), token, self._text(token)]


class GenerateCodec(Codec):
    body_type = Generate
    body: Generate

    # ---- from the body to the generation

    async def read(self) -> Generation:
        body, texts = self.body, self.body.prompts()
        if body.rid is not None:
            self.caller.call.labels.append(body.rid)
        num = len(texts)
        fields = (
            "sampling_params",
            "return_logprob",
            "logprob_start_len",
            "top_logprobs_num",
            "extra_key",
        )
        each = zip(
            texts, *(body.of_each(name, num) for name in fields), body.named_ids(num), strict=True
        )
        self._starts: list[int] = []  # of the log-probabilities of each prompt
        self._nums_top: list[int] = []
        self._says_nothing: list[bool] = []  # only the prompt is computed
        prompts = [await self._prompt(*fields) for fields in each]
        n = prompts[0].params.n
        if num * n > MAX_CHOICES or len({prompt.params.n for prompt in prompts}) > 1:
            what = f"n must be the same for all prompts, with at most {MAX_CHOICES} samples in all."
            raise InvalidRequest(what, param="n")
        self._is_list = body.is_list or n > 1
        self._prompt_logprobs = [self._new_logprobs(prompt) for prompt in prompts]
        self._logprobs: dict[int, Logprobs] = {}  # by choice
        self._begun_s = time.monotonic()
        return Generation(
            self.service,
            self.caller,
            prompts,
            ends_with_context=True,
            keeps_logprobs=not body.stream,
            num_prompt_copies=n,
            prompt_param="logprob_start_len",
        )

    async def _prompt(
        self,
        text: Any,
        sampling: Sampling | None,
        wants_logprobs: bool,
        start: int,
        num_top: int,
        salt: str | None,
        named: list[int],
    ) -> Prompt:
        sampling = sampling or Sampling()
        ids = await ids_of(self.service, text)
        if not ids:
            raise empty_prompt("text")
        values = sampling.values() | {"max_tokens": max(sampling.max_new_tokens, 1)}
        if wants_logprobs:
            values |= _logprobs(self.service, len(ids), start, num_top, named)
        params = SamplingParams(**values, prompt_logprobs_start=max(start, 1))
        if params.prompt_logprobs is not None and named:
            params = msgspec.structs.replace(params, prompt_logprob_token_ids=tuple(named))
        room = max(self.service.context_of(params) - len(ids), 1)
        num_cells = min(sampling.max_new_tokens, room) ** 2 * (num_top + len(named) + 1) // 2
        if self.body.stream and wants_logprobs and num_cells > _MAX_STREAMED_CELLS:
            what = (
                "Each event repeats all logprobs so far, which would be too much for this "
                "many tokens."
            )
            fix = "Lower max_new_tokens, do not stream, or use /v1/completions."
            raise InvalidRequest(what, fix=fix, param="return_logprob")
        self._starts.append(start if start >= 0 else len(ids))
        self._nums_top.append(num_top)
        self._says_nothing.append(sampling.max_new_tokens == 0)
        return Prompt(ids, params, salt=salt or "")

    def _new_logprobs(self, prompt: Prompt) -> Logprobs:
        with_text, named = self.body.return_text_in_logprobs, prompt.params.logprob_token_ids
        return Logprobs(self.service.tokenizer, with_text, named)

    # ---- what is written

    async def take_prompt_logprobs(self, number: int, pieces: list[msgspec.Raw]) -> None:
        first = self.generation.prompts[number].ids[0] if self._starts[number] == 0 else None
        await aside(partial(self._prompt_logprobs[number].add_prompt, first, pieces))

    def keep(self, output: Output) -> None:
        choice = output.choice
        if self._says_nothing[choice.prompt.number]:
            return
        choice.texts.append(output.text.text)
        choice.token_ids += output.token_ids
        if choice.prompt.params.logprobs is not None:
            if choice.number not in self._logprobs:
                self._logprobs[choice.number] = self._new_logprobs(choice.prompt)
            self._logprobs[choice.number].add(output.logprobs)

    def event(self, output: Output) -> Iterable[bytes]:
        """Each event has the whole output so far."""
        if not (output.text.num_tokens or output.is_last):
            return
        self.keep(output)
        response = self._response(output.choice)
        yield data_event(response | {"index": output.choice.number} if self._is_list else response)

    def end(self) -> Iterable[bytes]:
        return (DONE,)

    def error(self, error: TidemillError) -> Iterable[bytes]:
        return (data_event(error_body(error)), DONE)

    async def whole(self) -> Any:
        responses = [self._response(choice) for choice in self.generation.choices]
        return responses if self._is_list else responses[0]

    def _response(self, choice: Choice) -> dict[str, Any]:
        prompt, params = choice.prompt, choice.prompt.params
        meta: dict[str, Any] = {
            "id": self.caller.call.request_id,
            "e2e_latency": time.monotonic() - self._begun_s,
            "weight_version": "default",
            "finish_reason": _reason(choice),
            "prompt_tokens": len(prompt.ids),
            "completion_tokens": len(choice.token_ids),
            "cached_tokens": choice.num_cached,
        }
        if params.logprobs is not None:
            before = self._prompt_logprobs[prompt.number]
            after = self._logprobs.get(choice.number) or self._new_logprobs(prompt)
            meta["input_token_logprobs"] = as_list(before.values)
            meta["output_token_logprobs"] = as_list(after.values)
            if self._nums_top[prompt.number]:
                meta["input_top_logprobs"] = as_list(before.top)
                meta["output_top_logprobs"] = as_list(after.top)
            elif params.logprob_token_ids:
                meta["output_token_ids_logprobs"] = as_list(after.top)
                meta["input_token_ids_logprobs"] = as_list(before.top)
        return {"text": "".join(choice.texts), "output_ids": choice.token_ids, "meta_info": meta}


def _reason(choice: Choice) -> dict[str, Any] | None:
    if choice.finish_reason is None:
        return None
    if choice.finish_reason == "length":
        return {"type": "length", "length": len(choice.token_ids)}
    return {"type": "stop", "matched": choice.stop}


def _logprobs(
    service: Service, num_prompt: int, start: int, num_top: int, named: list[int]
) -> dict[str, Any]:
    """The log-probabilities that are asked for, as arguments of SamplingParams."""
    if not 0 <= num_top <= MAX_LOGPROBS:
        raise InvalidRequest(
            f"top_logprobs_num is from 0 to {MAX_LOGPROBS}; got {num_top}.",
            param="top_logprobs_num",
        )
    if start < -1 or start > num_prompt:
        raise InvalidRequest(
            f"logprob_start_len is {start}; the prompt has {num_prompt} tokens.",
            param="logprob_start_len",
        )
    values: dict[str, Any] = {"logprobs": num_top}
    if start >= 0:
        values["prompt_logprobs"] = num_top
    if not named:
        return values
    vocab_size = service.ready.model.vocab_size
    if wrong := [token for token in named if not 0 <= token < vocab_size]:
        what = (
            f"token_ids_logprob has the out-of-vocabulary token {wrong[0]}; tokens are 0 to "
            f"{vocab_size - 1}."
        )
        raise InvalidRequest(what, param="token_ids_logprob")
    if num_top:
        what = "token_ids_logprob is only supported without top_logprobs_num."
        raise InvalidRequest(what, fix="Give one of them.", param="token_ids_logprob")
    if len(named) > MAX_LOGPROB_IDS:
        raise InvalidRequest(
            f"token_ids_logprob may have {MAX_LOGPROB_IDS} tokens.", param="token_ids_logprob"
        )
    return values | {"logprob_token_ids": tuple(named)}
