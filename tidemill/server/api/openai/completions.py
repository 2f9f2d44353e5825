"""The codec of OpenAI's completions: texts, or token ids and texts, that the model goes on with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from tidemill.errors import InvalidRequest
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.server.api.openai.codec import OpenAICodec, check_choices
from tidemill.server.api.openai.types import CompletionRequest
from tidemill.server.generation.logprobs import as_list, finite
from tidemill.server.generation.prompts import MAX_CHOICES, infill, prompts_of, truncated
from tidemill.server.generation.request import Choice, Generation, Output, Prompt
from tidemill.server.generation.retention import PromptCache
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import TokenLogprobs, decode_logprobs

_NAMES = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
_json = msgspec.json.Encoder().encode


class CompletionLogprobs:
    """Logprobs of a completion: four lists in parallel, as JSON."""

    def __init__(self, tokenizer: Tokenizer, name: Callable[[int], str], offset: int = 0) -> None:
        self._parts: dict[str, list[bytes]] = {name: [] for name in _NAMES}
        self._tokenizer, self._name = tokenizer, name
        self._offset = offset  # of the next token, in characters

    def add(self, entries: list[TokenLogprobs]) -> None:
        tokens, offsets = [], []
        for entry in entries:
            tokens.append(self._name(entry.token_id))
            offsets.append(self._offset)
            self._offset += len(self._tokenizer.token_text(entry.token_id))
        values = [finite(entry.logprob) for entry in entries]
        columns = (tokens, values, [self._top(entry) for entry in entries], offsets)
        for name, column in zip(_NAMES, columns, strict=True):
            self._parts[name].append(_json(column)[1:-1])

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The token itself, and the likeliest. Of tokens with the same text, the likeliest
        counts."""
        top = {self._name(token): finite(value) for token, value in reversed(entry.top)}
        return {self._name(entry.token_id): finite(entry.logprob)} | dict(reversed(top.items()))

    def add_first(self, token_id: int) -> None:
        """The first token of a prompt: it has no log-probability."""
        self.add([TokenLogprobs(token_id, 0.0, [])])
        self._parts["token_logprobs"][-1] = self._parts["top_logprobs"][-1] = b"null"

    def copy(self) -> CompletionLogprobs:
        copy = CompletionLogprobs(self._tokenizer, self._name, self._offset)
        copy._parts = {name: list(parts) for name, parts in self._parts.items()}
        return copy

    def body(self) -> dict[str, Any]:
        return {name: as_list(parts) for name, parts in self._parts.items()}


class CompletionCodec(OpenAICodec):
    body_type = CompletionRequest
    body: CompletionRequest
    object_name = chunk_name = "text_completion"

    # ---- from the body to the generation

    async def read(self) -> Generation:
        body, params = self.body, await self.sampling_params()
        cache = self.prompt_cache()
        ids, params = await self._prompts(params, cache)
        num, side = body.truncate_prompt_tokens, body.truncation_side
        ids = truncated(self.service, ids, num, params.max_tokens, side)
        check_choices(self.service, len(ids), params.n, MAX_CHOICES, "prompts")
        salt = body.cache_salt or ""
        prompts = [
            Prompt(prompt, params, prefix_leases=self.prefix_leases(prompt, i, cache), salt=salt)
            for i, prompt in enumerate(ids)
        ]
        self._num_sent = params.n if body.best_of is None else body.n or 1  # the likeliest
        self._is_echo, self._writes_logprobs = bool(body.echo), body.logprobs is not None
        self._only_echo = self._is_echo and body.max_tokens == 0
        self._is_text = isinstance(body.prompt, str) or all(
            isinstance(text, str) for text in body.prompt
        )
        self._echoed: dict[int, CompletionLogprobs] = {}  # by prompt
        self._echoed_texts: dict[int, str] = {}  # by prompt
        self._num_chars: dict[int, int] = {}  # streamed so far, by choice
        self._logprobs: dict[int, CompletionLogprobs] = {}  # of whole responses, by choice
        copies = self._lists_prompts + (self._is_echo and self._writes_logprobs)
        return await self.generation_of(
            prompts,
            keeps_logprobs=self._writes_logprobs and not body.stream,
            num_prompt_copies=self._num_sent * copies,
            num_echoed=self._num_sent * sum(map(len, ids)) if self._is_echo else 0,
        )

    async def _prompts(
        self, params: SamplingParams, cache: PromptCache | None
    ) -> tuple[list[list[int]], SamplingParams]:
        body = self.body
        if cache is not None:
            if cache.messages is not None or body.suffix:
                what = "There is a suffix."
                if cache.messages is not None:
                    what = f"The prompt cache {cache.name!r} is made of messages."
                fix = "Use one made of a prompt, and no suffix."
                raise InvalidRequest(what, fix=fix, param="prompt_cache")
            several = await prompts_of(self.service, body.prompt, False, params)
            return [[*cache.token_ids, *ids] for ids in several], params
        if body.suffix:
            return await self._infilled(params, body.suffix)
        return await prompts_of(self.service, body.prompt, body.add_special_tokens, params), params

    async def _infilled(
        self, params: SamplingParams, suffix: str
    ) -> tuple[list[list[int]], SamplingParams]:
        """The prompts for what comes between prompt and suffix."""
        body = self.body
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if not texts or not all(isinstance(text, str) for text in texts):
            raise InvalidRequest("With suffix, the prompt must be a text.", param="prompt")
        if body.echo:
            raise InvalidRequest("There can be no echo with suffix.", fix="Give one.", param="echo")
        several = [await infill(self.service, text, suffix) for text in texts]
        stops = params.stop_token_ids + several[0][1]
        params = msgspec.structs.replace(params, stop_token_ids=stops)
        return [ids for ids, _ in several], params

    # ---- the prompt, if it is echoed

    async def take_prompt_logprobs(self, number: int, pieces: list[msgspec.Raw]) -> None:
        await super().take_prompt_logprobs(number, pieces)
        if self._is_echo and self._writes_logprobs:
            echoed = self._echoed_logprobs(number)
            for piece in pieces:
                echoed.add(decode_logprobs(piece))
                await asyncio.sleep(0)

    def _echoed_logprobs(self, number: int) -> CompletionLogprobs:
        if number not in self._echoed:
            self._echoed[number] = CompletionLogprobs(self.service.tokenizer, self.token_name)
            self._echoed[number].add_first(self.generation.prompts[number].ids[0])
        return self._echoed[number]

    def _echoed_text(self, prompt: Prompt) -> str:
        if not self._is_echo:
            return ""
        if prompt.number not in self._echoed_texts:
            text = self.service.tokenizer.decode(prompt.ids, skip_special=self._is_text)
            self._echoed_texts[prompt.number] = text
        return self._echoed_texts[prompt.number]

    def _new_logprobs(self, number: int, is_first: bool, offset: int = 0) -> CompletionLogprobs:
        if self._is_echo and is_first:
            return self._echoed_logprobs(number).copy()
        return CompletionLogprobs(self.service.tokenizer, self.token_name, offset)

    def _prompt_ids(self, prompt: Prompt) -> dict[str, Any]:
        return {"prompt_token_ids": prompt.ids} if self.body.return_token_ids else {}

    # ---- a stream

    def chunks(self, output: Output) -> list[dict[str, Any]]:
        choice, prompt = output.choice, output.choice.prompt
        text, logprobs = output.text.text, output.logprobs
        if self._only_echo:
            text, logprobs = "", []
        is_first, offset = (
            choice.number not in self._num_chars,
            self._num_chars.get(choice.number, 0),
        )
        if is_first:
            text = self._echoed_text(prompt) + text
        self._num_chars[choice.number] = offset + len(text)
        lists = None
        if self._writes_logprobs:
            lists = self._new_logprobs(prompt.number, is_first, offset)
            lists.add(logprobs)
        chunk = _choice(choice.number, text, lists, choice.finish_reason)
        if is_first:
            chunk |= self.prompt_logprobs(prompt.number) | self._prompt_ids(prompt)
        chunk |= self.new_ids(choice)
        # With the last text, as in vLLM and SGLang.
        return [chunk | self.ending(choice) if output.is_last else chunk]

    def without_text(self, choice: Choice) -> dict[str, Any]:
        return _choice(choice.number, "", None, None)

    # ---- a whole response

    def keep(self, output: Output) -> None:
        choice, logprobs, self._has_begun = output.choice, output.logprobs, True
        choice.sum_logprobs += sum(entry.logprob for entry in logprobs)
        self.take_ids(output)
        if self._only_echo:
            return
        choice.texts.append(output.text.text)
        if self._writes_logprobs:
            if choice.number not in self._logprobs:
                number = choice.prompt.number
                self._logprobs[choice.number] = self._new_logprobs(number, True)
            self._logprobs[choice.number].add(logprobs)

    async def whole(self) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for prompt in self.generation.prompts:
            best = prompt.choices
            if self._num_sent < len(best):
                best = sorted(best, key=_likelihood)[: self._num_sent]
            choices += [
                self._whole_choice(len(choices) + i, choice) for i, choice in enumerate(best)
            ]
        return self.response(self.object_name, choices, True, True) | self.prompt_fields()

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        prompt, lists = choice.prompt, self._logprobs.get(choice.number)
        if self._writes_logprobs and lists is None:
            lists = self._new_logprobs(prompt.number, True)
        text = self._echoed_text(prompt) + "".join(choice.texts)
        ids = {"token_ids": None, "prompt_token_ids": None}
        ids |= self._prompt_ids(prompt) | self.new_ids(choice)
        whole = _choice(index, text, lists, choice.finish_reason)
        return whole | self.ending(choice) | self.prompt_logprobs(prompt.number) | ids


def _likelihood(choice: Choice) -> float:
    """A key that sorts the likeliest first."""
    return -choice.sum_logprobs / max(choice.num_output, 1)


def _choice(
    index: int, text: str, logprobs: CompletionLogprobs | None, reason: str | None
) -> dict[str, Any]:
    lists = logprobs and logprobs.body()
    return {"index": index, "text": text, "logprobs": lists, "finish_reason": reason}
