"""The codec of OpenAI's chats, and of several conversations in one request as vLLM takes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from pydantic import Field

from tidemill.errors import InvalidRequest
from tidemill.server.api.openai.codec import OpenAICodec, check_choices
from tidemill.server.api.openai.messages import Message
from tidemill.server.api.openai.types import ChatRequest
from tidemill.server.generation.custom_tools import custom_input
from tidemill.server.generation.logprobs import as_list, cells, openai_logprobs
from tidemill.server.generation.message import Part, PartEvent
from tidemill.server.generation.prompts import MAX_CHOICES, truncated
from tidemill.server.generation.request import Choice, Generation, Output, Prompt
from tidemill.server.generation.retention import mark_leases
from tidemill.server.http.body import Body
from tidemill.server.http.limits import MAX_MESSAGES


class ChatCodec(OpenAICodec):
    body_type: ClassVar[type[Body]] = ChatRequest
    body: ChatRequest
    object_name, chunk_name = "chat.completion", "chat.completion.chunk"

    # ---- from the body to the generation

    async def read(self) -> Generation:
        self._check_template()
        return await self._generation([await self._prompt(self.body)])

    async def _prompt(self, body: ChatRequest, number: int = 0) -> Prompt:
        service, cache, before = self.service, self.prompt_cache(), list[dict[str, Any]]()
        if cache is not None:
            if cache.messages is None:
                what = f"The prompt cache {cache.name!r} is made of a prompt, not of messages."
                raise InvalidRequest(what, fix="Use it in /v1/completions.", param="prompt_cache")
            before = cache.messages
            self.body.tools = body.tools = body.tools or cache.tools
        params, options = await self.sampling_params(), body.template_options()

        def messages() -> list[dict[str, Any]]:  # in a thread: there may be thousands
            return [*before, *body.conversation()]

        ids = await service.encode_chat(messages, params, **options)
        num, side = body.truncate_prompt_tokens, body.truncation_side
        ids = truncated(service, [ids], num, params.max_tokens, side)[0]
        functions = body.called()
        output_format = service.output_format(
            ids, functions, body.must_call, body.continued, body.variables()
        )
        budget, name = body.reasoning_budget, "thinking_token_budget"
        params = self.with_budget(output_format, params, budget, name, must_apply=True)
        salt, marks = body.cache_salt or "", body.marks(before)
        prefix_leases = self.prefix_leases(ids, number, cache)
        prefix_leases += await mark_leases(service, self.caller.tenant, ids, marks, options, salt)
        return Prompt(ids, params, output_format, prefix_leases, salt)

    async def _generation(self, prompts: list[Prompt]) -> Generation:
        body = self.body
        self._entry = openai_logprobs(self.service.tokenizer, self.token_name)
        return await self.generation_of(
            prompts,
            one_call=body.parallel_tool_calls is False or body.functions is not None,
            must_call=body.must_call,
            keeps_logprobs=bool(body.logprobs) and not body.stream,
            num_prompt_copies=int(self._lists_prompts),
        )

    def _check_template(self) -> None:
        """A template that does not know the effort of reasoning does without; documents would be
        lost."""
        body, template = self.body, self.service.tokenizer.chat_template
        source = body.chat_template or ("" if template is None else template.source)
        if body.documents is not None and "documents" not in source:
            what = "The model's chat template does not know documents."
            raise InvalidRequest(what, fix="Send them in messages.", param="documents")
        knows_none = body.reasoning_effort == "none" and "enable_thinking" in source
        if body.reasoning_effort is not None and not ("reasoning_effort" in source or knows_none):
            self.caller.call.ignored.add("reasoning_effort")

    # ---- a stream

    def start(self) -> Iterable[bytes]:
        for choice in self.generation.choices:
            content = self._echoed(choice)
            # llama.cpp's chats begin with null, OpenAI's with an empty text.
            begins_with_null = self.caller.call.is_llamacpp and not content
            delta = {"role": "assistant", "content": None if begins_with_null else content}
            yield self.chunk(_chunk(choice, delta))

    def chunks(self, output: Output) -> list[dict[str, Any]]:
        choice = output.choice
        deltas = [delta for event in output.events for delta in self._deltas(event)]
        if not deltas and (output.logprobs or output.is_last):
            deltas = [{}]
        chunks = [_chunk(choice, delta) for delta in deltas]
        if chunks:
            if self.body.logprobs:
                chunks[0]["logprobs"] = {
                    "content": [self._entry(logprobs) for logprobs in output.logprobs]
                }
            chunks[0] |= self.new_ids(choice)
        if output.is_last:  # without text, as in OpenAI's API: a client may stop reading at it
            if chunks[-1]["delta"]:
                chunks.append(_chunk(choice, {}) | self.new_ids(choice))
            chunks[-1] |= {"finish_reason": self._reason(choice)} | self.ending(choice)
        for chunk in chunks:
            if "content" not in chunk["delta"]:  # SGLang's clients read one or the other
                chunk["delta"] = {"reasoning_content": None} | chunk["delta"]
        return chunks

    def without_text(self, choice: Choice) -> dict[str, Any]:
        return _chunk(choice, {})

    def _deltas(self, event: PartEvent) -> Iterable[dict[str, Any]]:
        stage, part, text = event
        if part.kind != "call":
            if stage == "more" and (part.kind == "text" or self.body.include_reasoning):
                yield dict.fromkeys(_names(part), text)
        elif part.name in self.body.custom_names:
            if stage == "end":  # its input is decoded when it is complete, or cut off
                yield {"tool_calls": [{"index": part.index} | self._call(part)]}
        elif stage != "end" and self.body.functions is not None:
            named = {"name": part.name} if stage == "begin" else {}
            yield {"function_call": named | {"arguments": text}}
        elif stage == "begin":
            function = {"name": part.name, "arguments": ""}
            call = {"id": part.call_id, "type": "function", "function": function}
            yield {"tool_calls": [{"index": part.index} | call]}
        elif stage == "more":
            yield {"tool_calls": [{"index": part.index, "function": {"arguments": text}}]}

    # ---- a whole response

    def keep(self, output: Output) -> None:
        super().keep(output)
        if self.body.logprobs and output.logprobs:
            output.choice.cells.append(cells(output.logprobs, self._entry))

    async def whole(self) -> dict[str, Any]:
        choices = [self._whole_choice(choice) for choice in self.generation.choices]
        response = self.response(self.object_name, choices, True, True)
        return response | {"prompt_token_ids": None} | self._of_prompt(self.generation.prompts[0])

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.number,
            "message": self._message(choice),
            "logprobs": {"content": as_list(choice.cells)} if self.body.logprobs else None,
            "finish_reason": self._reason(choice),
            **self.ending(choice),
            "token_ids": None,
            **self.new_ids(choice),
        }

    def prompt_fields(self) -> dict[str, Any]:
        return self._prompt_fields(self.generation.prompts[0])

    def _prompt_fields(self, prompt: Prompt) -> dict[str, Any]:
        ids = {"prompt_token_ids": prompt.ids} if self.body.return_token_ids else {}
        return ids | self.verbose(self._prompt_texts[prompt.number : prompt.number + 1])

    def _of_prompt(self, prompt: Prompt) -> dict[str, Any]:
        return self._prompt_fields(prompt) | self.prompt_logprobs(prompt.number)

    def _message(self, choice: Choice) -> dict[str, Any]:
        assert choice.reader is not None, "the output of a chat is read"
        calls, content = choice.reader.calls, self._echoed(choice) + choice.reader.text_of("text")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls and not content:
            message["content"] = None
        reasoning = choice.reader.text_of("reasoning") if self.body.include_reasoning else ""
        message |= dict.fromkeys(("reasoning_content", "reasoning"), reasoning or None)
        if calls and self.body.functions is not None:
            message["function_call"] = {"name": calls[0].name, "arguments": calls[0].text}
        elif calls:
            message["tool_calls"] = [self._call(call) for call in calls]
        return message

    def _call(self, part: Part) -> dict[str, Any]:
        if part.name in self.body.custom_names:
            custom = {"name": part.name, "input": custom_input(part.text)}
            return {"id": part.call_id, "type": "custom", "custom": custom}
        function = {"name": part.name, "arguments": part.text}
        return {"id": part.call_id, "type": "function", "function": function}

    def _echoed(self, choice: Choice) -> str:
        return self.body.echoed

    def _reason(self, choice: Choice) -> str | None:
        if not choice.ends_with_calls:
            return choice.finish_reason
        return "function_call" if self.body.functions is not None else "tool_calls"


def _names(part: Part) -> tuple[str, ...]:
    """The fields of a part's text. Clients know either name of reasoning."""
    return ("reasoning_content", "reasoning") if part.kind == "reasoning" else ("content",)


def _chunk(choice: Choice, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": choice.number, "delta": delta, "logprobs": None, "finish_reason": None}


# ---- several conversations


class ChatBatchRequest(ChatRequest):
    messages: list[list[Message]] = Field(min_length=1, max_length=MAX_CHOICES)  # type: ignore[assignment]
    stream: Literal[False] | None = None


class ChatBatchCodec(ChatCodec):
    body_type = ChatBatchRequest
    body: ChatBatchRequest

    async def read(self) -> Generation:
        body = self.body
        num = sum(map(len, body.messages))  # type: ignore[arg-type]
        if num > MAX_MESSAGES or not all(body.messages):
            what = f"Conversations have at least 1 message, and {MAX_MESSAGES} in all."
            raise InvalidRequest(what, param="messages")
        check_choices(self.service, len(body.messages), body.n or 1, MAX_CHOICES, "conversations")
        self._conversations = [body.model_copy(update={"messages": each}) for each in body.messages]
        self._check_template()
        prompts = [
            await self._prompt(conversation, i)
            for i, conversation in enumerate(self._conversations)
        ]
        return await self._generation(prompts)

    async def whole(self) -> dict[str, Any]:
        """The whole response. The fields of a prompt are beside each of its choices."""
        choices = [
            self._whole_choice(choice) | self._shown(self._of_prompt(choice.prompt))
            for choice in self.generation.choices
        ]
        return self.response(self.object_name, choices, True, True)

    def _shown(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if value is not None}

    def _echoed(self, choice: Choice) -> str:
        return self._conversations[choice.prompt.number].echoed
