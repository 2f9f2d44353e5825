"""A service whose model writes a script, for tests of what a codec makes of it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import msgspec
from starlette.requests import Request

from tidemill.frontend.output import TextDelta
from tidemill.frontend.parsers import ModelFormat
from tidemill.server.generation.service import ResponseDefaults
from tidemill.server.http.access import Caller
from tidemill.server.http.context import RequestContext
from tidemill.server.store.responses import Store
from tidemill.types.wire import Delta


class ScriptedService:
    """What codecs ask of a service. Each output is a pair of a delta and its text."""

    model_name, response_defaults, max_context, adapter = "tiny", ResponseDefaults(), 4096, 0
    defaults = SimpleNamespace(limit=None)
    tokenizer = SimpleNamespace(
        chat_template=None,
        variables={},
        token_text=str,
        token_bytes=lambda token: str(token).encode(),
    )

    def __init__(self, outputs, template="", num_prompt=5):
        self._outputs, self._template, self._num_prompt = outputs, template, num_prompt

    def context_of(self, params=None):
        return self.max_context

    def with_defaults(self, params, prompt_ids):
        return msgspec.structs.replace(params, temperature=1.0, top_p=1.0)

    async def encode_chat(self, *_, **__):
        return [1] * self._num_prompt

    async def check_grammar(self, params, of_tools=False):
        pass

    def output_format(
        self, prompt_ids, functions=(), must_call=False, continued="", variables=None
    ):
        return ModelFormat.of(self._template).output_format("", functions, must_call)

    async def stream(self, *_, **__):
        for delta, text in self._outputs:
            yield delta, text


def outputs_of(texts, num_cached=0, reasoning=()):
    """A token for each text, and one that ends the output."""
    for text in texts:
        is_reasoning = int(text in reasoning)
        yield (
            Delta("r", 0, [1], num_cached=num_cached),
            TextDelta(text, 1, None, num_reasoning=is_reasoning),
        )
    yield Delta("r", 0, [1], "stop", num_cached=num_cached), TextDelta("", 1, "stop")


def endpoint_of(endpoint, service, body, path):
    models = SimpleNamespace(of=lambda name: service, responses=Store())
    return endpoint(models, body, Caller(call=RequestContext(path=path)))


def app_of(endpoint, path, make_service):
    """An application with one route."""

    async def app(scope, receive, send):
        request = Request(scope, receive)
        body = endpoint.body_type(**json.loads(await request.body()))
        response = await endpoint_of(endpoint, make_service(), body, path).respond(request)
        await response(scope, receive, send)

    return app
