"""Several conversations in one request, with the same parameters, as vLLM takes them."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from tidemill.errors import InvalidRequest
from tidemill.server.api.openai.messages import MAX_MESSAGES, Message
from tidemill.server.api.openai.routes import Job, Usage, prepare_chat, prepare_job, run_job
from tidemill.server.api.openai.types import MAX_CHOICES, ChatRequest
from tidemill.server.generation.models import Models
from tidemill.server.http.access import Caller
from tidemill.server.http.body import body_of, schema_of
from tidemill.server.http.responses import until_disconnect


class ChatBatchRequest(ChatRequest):
    messages: list[list[Message]] = Field(min_length=1, max_length=MAX_CHOICES)  # type: ignore[assignment]
    stream: Literal[False] | None = None

    def conversations(self) -> list[ChatRequest]:
        if sum(map(len, self.messages)) > MAX_MESSAGES or not all(self.messages):
            raise InvalidRequest(f"Conversations have at least 1 message, and {MAX_MESSAGES} in all.", param="messages")
        if len(self.messages) * (self.n or 1) > MAX_CHOICES:
            what = f"{len(self.messages)} conversations of {self.n} samples; at most {MAX_CHOICES} in all."
            raise InvalidRequest(what, param="n")
        return [self.model_copy(update={"messages": messages}) for messages in self.messages]


def make_router(models: Models) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions/batch", openapi_extra=schema_of(ChatBatchRequest))
    async def chat_batch(request: Request, body: ChatBatchRequest = Depends(body_of(ChatBatchRequest))) -> Response:
        made = await until_disconnect(request, _whole(models, body, request.state.caller))
        return Response(msgspec.json.encode(made), media_type="application/json")

    return router


async def _whole(models: Models, body: ChatBatchRequest, caller: Caller) -> dict[str, Any]:
    asked = body.conversations()
    jobs = [await prepare_job(models, prepare_chat, one, caller, len(asked)) for one in asked]
    for number, job in enumerate(jobs):
        job.part = number
    running = [asyncio.ensure_future(run_job(job)) for job in jobs]
    try:
        await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    choices = [choice | _of_prompt(job) for job in jobs for choice in job.writer.choices()]
    first = jobs[0]
    first.usage = Usage.sum(job.usage for job in jobs)
    numbered = [choice | {"index": number} for number, choice in enumerate(choices)]
    return first.body(first.writer.object_name, numbered, True, True)


def _of_prompt(job: Job) -> dict[str, Any]:
    """Beside each choice: there are several prompts."""
    return {name: value for name, value in job.writer.of_prompt().items() if value is not None}
