"""The generation pipeline: from a request of any API to its response, streamed or whole.

An API is a codec. It reads a request into a `Generation` and writes what comes out. All else is
here and the same for every API: checks and limits, running the prompts, the streaming loop, errors
before and within a stream, and what happens when the client leaves. A refusal of any prompt, as
long as none has been refused after a first event, is a status and not an event of a stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any, ClassVar, final

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from tidemill.errors import TidemillError
from tidemill.frontend.parsers import OutputFormat
from tidemill.server.generation.models import Models
from tidemill.server.generation.request import Generation, Output
from tidemill.server.generation.service import Service
from tidemill.server.generation.streams import merge
from tidemill.server.http.access import Caller
from tidemill.server.http.body import Body, body_of, schema_of
from tidemill.server.http.errors import error_body
from tidemill.server.http.responses import EventStream, data_event, until_disconnect
from tidemill.server.http.stopwatch import FORMATTING, PARSING
from tidemill.types.sampling import SamplingParams

Outputs = AsyncGenerator[Output, None]
_json = msgspec.json.Encoder().encode


class Endpoint(ABC):
    """The handler of one request of a route. It is made for each."""

    body_type: ClassVar[type[Body]]

    def __init__(self, models: Models, body: Any, caller: Caller) -> None:
        self.models, self.body, self.caller = models, body, caller
        self.service = self.find_service()

    def find_service(self) -> Service:
        return self.models.of(self.body.model)

    @abstractmethod
    async def answer(self) -> bytes:
        """The whole response, as JSON."""

    async def respond(self, request: Request) -> Response:
        answer = await until_disconnect(request, self.answer())
        return Response(answer, media_type="application/json")


class Codec(Endpoint):
    """The translation between one API and a generation of text."""

    stream_type: ClassVar[type[EventStream]] = EventStream
    generation: Generation  # once it was read

    # ---- what an API says

    @property
    def is_streamed(self) -> bool:
        return bool(self.body.stream)

    @abstractmethod
    async def read(self) -> Generation:
        """The generation that the body asks for."""

    @abstractmethod
    def event(self, output: Output) -> Iterable[bytes]:
        """New output of a choice, as events of a stream in wire format."""

    @abstractmethod
    async def whole(self) -> Any:
        """The response to a request that is not streamed."""

    def start(self) -> Iterable[bytes]:
        """Events before any output."""
        return ()

    def end(self) -> Iterable[bytes]:
        """Events after all output."""
        return ()

    def error(self, error: TidemillError) -> Iterable[bytes]:
        """The events that end a stream in which something failed."""
        return (data_event(error_body(error)),)

    def refusal(self, error: TidemillError) -> TidemillError:
        """The error in the words of this API."""
        return error

    def keep(self, output: Output) -> None:
        """Keeps new output for the whole response."""
        if output.choice.reader is None:
            output.choice.texts.append(output.text.text)

    async def take_prompt_logprobs(self, number: int, pieces: list[msgspec.Raw]) -> None:
        """Takes the log-probabilities of the prompt of that number. They arrive before its first
        token."""

    async def finish(self, output: Output) -> None:
        """The last output of a choice, before it is written."""

    def ready(self) -> None:
        """All is checked, and nothing runs yet."""

    def fail(self, error: TidemillError) -> None:
        """The request ends with this error."""

    def close(self) -> None:
        """The request has ended, in whatever way."""

    # ---- what they share

    def with_budget(
        self,
        output_format: OutputFormat,
        params: SamplingParams,
        budget: int | None,
        name: str,
        must_apply: bool = False,
    ) -> SamplingParams:
        """The parameters with a grammar after the reasoning, which ends after `budget` tokens. One
        that cannot be kept is without effect, or refused if it must apply. `name`: of the field
        that has it."""
        is_lost = output_format.drops_budget(params) or not (must_apply or output_format.can_end)
        if budget is not None and budget >= 0 and is_lost:
            self.caller.call.ignored.add(name)
            budget = None
        return output_format.gated(params, budget)

    @final
    async def begin(self, keeps_text: bool = False) -> Outputs:
        """Reads and checks the request; its outputs, of which none is computed before the first is
        asked for. `keeps_text`: for a whole response."""
        with self.caller.call.stopwatch.within(PARSING):
            self.generation = generation = await self.read()
        generation.prepare(keeps_text)
        for params in {
            id(prompt.params.grammar): prompt.params for prompt in generation.prompts
        }.values():
            await generation.service.check_grammar(params, of_tools=generation.must_call)
        self.ready()
        return self.outputs()

    @final
    async def outputs(self) -> Outputs:
        generation = self.generation
        streams = [
            generation.service.stream(
                generation.caller,
                prompt.ids,
                prompt.params,
                i,
                generation.priority,
                prompt.salt,
                generation.timeout_s,
                prompt.output_format,
                one_by_one=generation.one_by_one,
                tells_progress=generation.tells_progress,
                prefix_leases=prompt.prefix_leases,
            )
            for i, prompt in enumerate(generation.prompts)
        ]
        async with aclosing(merge(streams)) as merged:
            async for i, (delta, text) in merged:
                prompt = generation.prompts[i]
                prompt.figures.take(delta, text)
                if delta.prompt_pieces:
                    await self.take_prompt_logprobs(i, delta.prompt_pieces)
                choice = prompt.choices[delta.index]
                output = Output(choice, delta, text, choice.take(delta, text))
                if output.is_last:
                    await self.finish(output)
                yield output

    @final
    async def answer(self) -> bytes:
        try:
            async with aclosing(await self.begin(keeps_text=True)) as outputs:
                async for output in outputs:
                    if output.text.num_tokens or output.is_last:
                        self.keep(output)
            self.caller.call.stopwatch.enter(FORMATTING)
            return _json(await self.whole())
        except TidemillError as error:
            self.fail(error)
            raise self.refusal(error) from None
        finally:
            self._end()

    async def respond(self, request: Request) -> Response:
        if not self.is_streamed:
            return await super().respond(request)
        try:
            outputs = await until_disconnect(request, self.begin())
            first = await until_disconnect(request, self._until_accepted(outputs))
        except TidemillError as error:
            self.fail(error)
            self._end()
            raise self.refusal(error) from None
        except BaseException:
            self._end()
            raise
        return self.stream_type(self.stream(first, outputs), also_close=outputs)

    async def _until_accepted(self, outputs: Outputs) -> list[Output]:
        """The outputs until the engine has accepted every prompt: a request that is refused gets a
        status, one that waits gets its headers."""
        first: list[Output] = []
        accepted: set[int] = set()
        while len(accepted) < len(self.generation.prompts):
            first.append(await anext(outputs))
            accepted.add(first[-1].choice.prompt.number)
        return first

    @final
    async def stream(self, first: list[Output], rest: Outputs) -> AsyncGenerator[bytes, None]:
        try:
            for event in self.start():
                yield event
            for output in first:
                for event in self.event(output):
                    yield event
            async for output in rest:
                for event in self.event(output):
                    yield event
            for event in self.end():
                yield event
        except TidemillError as error:
            self.fail(error)
            for event in self.error(error):
                yield event
        finally:
            self._end()
            await rest.aclose()

    def _end(self) -> None:
        self.close()
        if self.caller.call.stopwatch.connection is None:  # nobody waits for a last byte
            self.caller.call.stopwatch.stop()


def add_endpoint(
    router: APIRouter,
    models: Models,
    path: str,
    endpoint: type[Endpoint],
    untyped: bool = False,
    **options: Any,
) -> None:
    """A route whose body the endpoint reads. `untyped`: of any content type, unless a web page
    sends it."""

    async def route(
        request: Request, body: Body = Depends(body_of(endpoint.body_type, untyped))
    ) -> Response:
        return await endpoint(models, body, request.state.caller).respond(request)

    described = schema_of(endpoint.body_type)
    name = endpoint.__name__.removesuffix("Codec").lower()
    router.add_api_route(
        path, route, methods=["POST"], name=name, openapi_extra=described, **options
    )
