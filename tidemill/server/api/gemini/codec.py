"""The codec of Google's generateContent: candidates whose content has parts, whole or in chunks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tidemill.errors import TidemillError
from tidemill.server.api.gemini.types import GenerateRequest
from tidemill.server.generation.conversation import template_tools, template_variables
from tidemill.server.generation.logprobs import as_list, cells, finite
from tidemill.server.generation.message import Part
from tidemill.server.generation.pipeline import Codec
from tidemill.server.generation.request import Choice, Generation, Output, Prompt
from tidemill.server.generation.service import Service
from tidemill.server.http.aside import aside
from tidemill.server.http.context import RequestContext
from tidemill.server.http.errors import error_body, format_error
from tidemill.server.http.responses import JSONList, data_event
from tidemill.types.wire import TokenLogprobs

_BYTES_PER_CONTENT = 128  # of JSON, to estimate
_REASONS = {"stop": "STOP", "length": "MAX_TOKENS"}


async def prompt_of(
    service: Service, body: GenerateRequest, call: RequestContext
) -> tuple[list[int], dict[str, Any]]:
    """The prompt's token ids, and the variables of its template."""
    messages = await aside(body.conversation, _BYTES_PER_CONTENT * len(body.contents))
    template, config = service.tokenizer.chat_template, body.generation_config.thinking_config
    level, budget = config.thinking_level, config.thinking_budget
    thinks = None if budget is None else budget != 0
    source, effort = template.source if template else None, level.lower() if level else None
    variables, unknown = template_variables(source, effort, thinks)
    if "effort" in unknown:
        call.ignored.add("thinking_level")
    if "thinking" in unknown and not thinks:  # other budgets are kept without the template
        call.ignored.add("thinking_budget")
    tools = template_tools(body.functions())
    ids = await service.encode_chat(messages, tools=tools, variables=variables or None)
    return ids, variables | ({"thinking": False} if thinks is False else {})


class GenerateContentCodec(Codec):
    body_type = GenerateRequest
    body: GenerateRequest

    async def read(self) -> Generation:
        body, config, service = self.body, self.body.generation_config, self.service
        ids, variables = await prompt_of(service, body, self.caller.call)
        output_format = service.output_format(
            ids, body.functions(), body.must_call, variables=variables
        )
        budget = config.thinking_config.thinking_budget or None
        params = await aside(body.params, self.caller.call.num_body_bytes)
        params = self.with_budget(output_format, params, budget, "thinking_budget")
        return Generation(
            service,
            self.caller,
            [Prompt(ids, params, output_format)],
            must_call=body.must_call,
            ends_with_context=True,
            keeps_logprobs=config.response_logprobs and not body.stream,
        )

    def _response(self, candidates: list[dict[str, Any]]) -> dict[str, Any]:
        figures = self.generation.figures
        return {
            "candidates": candidates,
            "usageMetadata": {
                "promptTokenCount": figures.num_prompt,
                "cachedContentTokenCount": figures.num_cached,
                "candidatesTokenCount": figures.num_output - figures.num_reasoning,
                "thoughtsTokenCount": figures.num_reasoning,
                "totalTokenCount": figures.num_prompt + figures.num_output,
            },
            "modelVersion": self.service.model_name,
            "responseId": self.caller.call.request_id,
        }

    def _candidate(self, choice: Choice, parts: list[Any], logprobs: list[bytes]) -> dict[str, Any]:
        """`logprobs`: of tokens and of the likeliest in their places, alternately."""
        content = {"role": "model", "parts": parts}
        candidate: dict[str, Any] = {"content": content, "index": choice.number}
        if choice.finish_reason is not None:
            candidate["finishReason"] = _REASONS.get(choice.finish_reason, "OTHER")
        if self.body.generation_config.response_logprobs:
            chosen, top = as_list(logprobs[::2]), as_list(logprobs[1::2])
            candidate["logprobsResult"] = {"chosenCandidates": chosen, "topCandidates": top}
        return candidate

    def _logprobs(self, output: Output) -> list[bytes]:
        if not self.body.generation_config.response_logprobs:
            return []

        def cell(token: int, value: float) -> dict[str, Any]:
            text = self.service.tokenizer.token_text(token)
            return {"token": text, "tokenId": token, "logProbability": finite(value)}

        def top(entry: TokenLogprobs) -> dict[str, Any]:
            return {"candidates": [cell(*pair) for pair in entry.top]}

        chosen = cells(output.logprobs, lambda entry: cell(entry.token_id, entry.logprob))
        return [chosen, cells(output.logprobs, top)]

    def _part(self, part: Part, text: str) -> list[dict[str, Any]]:
        if part.kind == "call":  # one that was cut off is left out
            arguments = part.arguments()
            call = {"id": part.call_id, "name": part.name, "args": arguments}
            return [] if arguments is None else [{"functionCall": call}]
        shows_thoughts = self.body.generation_config.thinking_config.include_thoughts
        if part.kind == "reasoning":
            return [{"text": text, "thought": True}] if shows_thoughts else []
        return [{"text": text}]

    def event(self, output: Output) -> Iterable[bytes]:
        """A call is sent when it is whole."""
        parts, logprobs = list[dict[str, Any]](), self._logprobs(output)
        for stage, part, text in output.events:
            if stage == ("end" if part.kind == "call" else "more"):
                parts += self._part(part, text)
        if parts or output.is_last or any(logprobs):
            yield data_event(self._response([self._candidate(output.choice, parts, logprobs)]))

    def error(self, error: TidemillError) -> Iterable[bytes]:
        call = self.caller.call
        return (data_event(format_error(call.path, error_body(error), error.status, call.name)),)

    def keep(self, output: Output) -> None:
        output.choice.cells += self._logprobs(output)

    async def whole(self) -> dict[str, Any]:
        return self._response([self._whole(choice) for choice in self.generation.choices])

    def _whole(self, choice: Choice) -> dict[str, Any]:
        assert choice.reader is not None, "the output is read"
        parts = [shown for part in choice.reader.parts for shown in self._part(part, part.text)]
        return self._candidate(choice, parts, choice.cells)


class ListCodec(GenerateContentCodec):
    """The same for clients that do not ask for server-sent events."""

    stream_type = JSONList
