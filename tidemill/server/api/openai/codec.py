"""The common base of the codecs of OpenAI's completions and chats: chunks, usage, times, token ids
and stops."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, ClassVar

import msgspec

from tidemill.errors import InvalidRequest, TidemillError
from tidemill.server.api.openai.types import ChatRequest, CompletionRequest, StreamOptions
from tidemill.server.generation.logprobs import as_list, encoded, finite, id_name
from tidemill.server.generation.pipeline import Codec
from tidemill.server.generation.request import UNLIMITED, Choice, Generation, Output, Prompt
from tidemill.server.generation.retention import PromptCache, key_leases
from tidemill.server.generation.service import Service
from tidemill.server.http.access import Caller
from tidemill.server.http.aside import aside
from tidemill.server.http.errors import error_body
from tidemill.server.http.responses import DONE, data_event
from tidemill.types.sampling import MAX_BAD_WORD_TOKENS, SamplingParams
from tidemill.types.wire import Hold, TokenLogprobs
from tidemill.version import __version__

_FINGERPRINT = f"b{__version__}"  # of the build, as llama.cpp writes it


class OpenAICodec(Codec):
    body: CompletionRequest | ChatRequest
    object_name: ClassVar[str]  # of a whole response
    chunk_name: ClassVar[str]  # of a streamed chunk

    def __init__(self, models: Any, body: CompletionRequest | ChatRequest, caller: Caller) -> None:
        super().__init__(models, body, caller)
        if body.request_id is not None and body.request_id not in caller.call.labels:
            caller.call.labels.append(body.request_id)
        defaults = self.service.response_defaults
        if defaults.usage_always:
            body.stream_options = StreamOptions(include_usage=True, continuous_usage_stats=True)
        as_ids = body.return_tokens_as_token_ids or defaults.ids_in_logprobs
        self.token_name = id_name if as_ids else self.service.tokenizer.token_text
        self._lists_prompts = body.prompt_logprobs is not None
        self._prompt_lists: dict[int, msgspec.Raw] = {}  # by prompt
        self._unreported_ids = defaultdict[int, list[int]](list)  # by choice
        self._prompt_texts: list[str] = []
        self._created_s = int(time.time())
        self._has_begun = False  # a chunk was written

    # ---- from the body to the generation

    async def generation_of(self, prompts: list[Prompt], **more: Any) -> Generation:
        """The generation with what both APIs ask for in the same way."""
        body = self.body
        if body.n_predict is not None:  # llama.cpp's name, so the output ends as it does there
            for prompt in prompts:
                if prompt.params.max_tokens is None:
                    prompt.params = msgspec.structs.replace(prompt.params, max_tokens=UNLIMITED)
        if body.verbose:
            self._prompt_texts = [await self.service.decode(prompt.ids) for prompt in prompts]
        return Generation(
            self.service,
            self.caller,
            prompts,
            ends_with_context=body.n_predict is not None,
            tells_progress=bool(body.stream and body.return_progress),
            priority=body.priority,
            timeout_s=body.timeout,
            prompt_param="prompt_logprobs" if self._lists_prompts else "echo",
            **more,
        )

    async def sampling_params(self) -> SamplingParams:
        params = await aside(self.body.params, self.caller.call.num_body_bytes)
        if not self.body.bad_words:
            return params
        words = [
            await self.service.encode(text, add_special=False)
            for word in self.body.bad_words
            for text in (word, f" {word}")  # it has other tokens after a space
        ]
        if max(map(len, words)) > MAX_BAD_WORD_TOKENS:
            what = f"A bad word may have {MAX_BAD_WORD_TOKENS} tokens."
            raise InvalidRequest(what, fix="Give shorter words.", param="bad_words")
        unique = tuple(dict.fromkeys(tuple(word) for word in words if word))
        return msgspec.structs.replace(params, bad_word_ids=unique)

    def prompt_cache(self) -> PromptCache | None:
        """The named prompt cache that the prompt continues."""
        body = self.body
        if body.prompt_cache is None:
            return None
        if body.cache_salt:
            what = "A prompt cache has no cache_salt."
            raise InvalidRequest(what, fix="Leave cache_salt out.", param="cache_salt")
        cache = self.service.caches.of(
            self.caller.tenant, body.prompt_cache, self.service.model_name
        )
        cache.num_uses += 1
        return cache

    def prefix_leases(self, ids: list[int], number: int, cache: PromptCache | None) -> list[Hold]:
        """The leases of a prompt's prefixes: the prompt cache, and those that OpenAI's parameters
        ask for."""
        body, tenant = self.body, self.caller.tenant
        key, retention = body.prompt_cache_key, body.prompt_cache_retention
        named = cache.prefix_leases(ids) if cache is not None else []
        salt = body.cache_salt or ""
        return named + key_leases(self.service, tenant, key, retention, ids, number, salt)

    # ---- what is written

    async def take_prompt_logprobs(self, number: int, pieces: list[msgspec.Raw]) -> None:
        """The first token of a prompt has none."""
        if self._lists_prompts:
            self._prompt_lists[number] = as_list(
                [b"null", await encoded(pieces, self._prompt_entry)]
            )

    def _prompt_entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        """The token itself and the likeliest in its place, by id."""
        text = self.service.tokenizer.token_text
        values = dict([*entry.top, (entry.token_id, entry.logprob)])
        return {
            str(token): {"logprob": finite(value), "decoded_token": text(token)}
            for token, value in values.items()
        }

    def prompt_logprobs(self, number: int) -> dict[str, Any]:
        lists = self._prompt_lists.get(number, [None]) if self._lists_prompts else None
        return {"prompt_logprobs": lists}

    def keep(self, output: Output) -> None:
        super().keep(output)
        self._has_begun = True
        self.take_ids(output)

    def take_ids(self, output: Output) -> None:
        """The token ids of the output that a choice writes next, if they are to be reported."""
        if self.body.return_token_ids:
            self._unreported_ids[output.choice.number] += output.token_ids

    def new_ids(self, choice: Choice) -> dict[str, Any]:
        """The token ids that were not reported yet."""
        if not self.body.return_token_ids:
            return {}
        return {"token_ids": self._unreported_ids.pop(choice.number, [])}

    def ending(self, choice: Choice) -> dict[str, Any]:
        """The reason that a choice ended, in the fields of vLLM and of SGLang: the first knows no
        end-of-text token."""
        return {"stop_reason": choice.stop_reason(), "matched_stop": choice.stop}

    def prompt_fields(self) -> dict[str, Any]:
        """The fields about the prompt, in the whole response or its first chunk."""
        return self.verbose(self._prompt_texts)

    def verbose(self, texts: list[str]) -> dict[str, Any]:
        """The texts of prompts, if they are asked for."""
        return {"__verbose": {"prompt": texts[0] if len(texts) == 1 else texts}} if texts else {}

    def response(
        self, name: str, choices: list[dict[str, Any]], usage: bool, is_last: bool = False
    ) -> dict[str, Any]:
        response = {
            "id": self.caller.call.request_id,
            "object": name,
            "created": self._created_s,
            "model": self.service.model_name,
            "choices": choices,
            "system_fingerprint": _FINGERPRINT,
        }
        if usage or self.body.wants_usage_always:
            response["usage"] = self.generation.figures.usage()
        times = self.generation.figures.times() if is_last and self.body.timings else {}
        if self.body.timings_per_token and self._has_begun:
            times |= self.generation.figures.llamacpp_timings()
        return response | {"timings": times} if times else response

    # ---- a stream

    @abstractmethod
    def chunks(self, output: Output) -> list[dict[str, Any]]:
        """New output, as the choices of streamed chunks."""

    @abstractmethod
    def without_text(self, choice: Choice) -> dict[str, Any]:
        """A choice that says nothing."""

    def event(self, output: Output) -> Iterable[bytes]:
        progress = output.delta.progress
        if progress is not None:
            fields = {"prompt_progress": output.choice.prompt.figures.llamacpp_progress(progress)}
            choices = [self.without_text(output.choice)]
            return [data_event(self.response(self.chunk_name, choices, False) | fields)]
        self.take_ids(output)
        if not (output.text.text or output.logprobs or output.is_last):
            return []
        return [
            self.chunk(choice, choice["finish_reason"] is not None)
            for choice in self.chunks(output)
        ]

    def chunk(self, choice: dict[str, Any], is_last: bool = False) -> bytes:
        response = self.response(self.chunk_name, [choice], False, is_last)
        if not self._has_begun:
            self._has_begun = True
            response |= self.prompt_fields()
        return data_event(response)

    def end(self) -> Iterable[bytes]:
        options = self.body.stream_options
        if options is not None and options.include_usage:
            yield data_event(self.response(self.chunk_name, [], True))
        yield DONE

    def error(self, error: TidemillError) -> Iterable[bytes]:
        return (data_event(error_body(error)), DONE)


def check_choices(service: Service, num_prompts: int, n: int, most: int, what: str) -> None:
    if num_prompts * n > most:
        raise InvalidRequest(
            f"{num_prompts} {what} of {n} samples; at most {most} in all.", param="n"
        )
