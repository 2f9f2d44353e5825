"""Service: what every route needs, whatever API it speaks: a tokenizer, an engine, and text out of tokens."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from pydantic import BaseModel

from tidemill.engine.client import EngineClient
from tidemill.errors import Cancelled, Draining, EngineDead, InvalidRequest
from tidemill.frontend.output import TextDelta, TextStream
from tidemill.frontend.structured import Grammars
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.sampling import Grammar, SamplingParams
from tidemill.sched.request import BACKGROUND
from tidemill.server.explain import Explainer
from tidemill.server.guard import Caller
from tidemill.server.metrics import Metrics
from tidemill.wire import Delta, Ready, Submit

WholeAnswer = Callable[[Any, Caller], Awaitable[bytes]]
_LONG_TEXT = 4096  # characters from which tokenizing leaves the event loop


class Service:
    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer, model_name: str, metrics: Metrics, explainer: Explainer
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.metrics = metrics
        self.explainer = explainer
        self.created_s = int(time.time())
        self.is_draining = False
        self._grammars: Grammars | None = None
        self._compiling = asyncio.Semaphore(1)  # one form at a time: a flood of them leaves the other core alone
        # Answers that can be had without streaming, by route: what to parse the body as, and who answers. Batches use them, too.
        self.whole_answers: dict[str, tuple[type[BaseModel], WholeAnswer]] = {}
        # By the id that clients know: whose it is, and its parts in the engine.
        self.under_way: dict[str, tuple[str, set[str]]] = {}

    @property
    def ready(self) -> Ready:
        if self.client.ready is None:
            raise EngineDead("The engine is not ready.")
        return self.client.ready

    @property
    def max_context(self) -> int:
        return self.ready.config.max_context

    async def encode(self, text: str, add_special: bool = True) -> list[int]:
        if len(text) < _LONG_TEXT:
            return self.tokenizer.encode(text, add_special=add_special, max_tokens=self.max_context)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special=add_special, max_tokens=self.max_context)

    async def encode_chat(self, messages: list[dict[str, Any]], **how: Any) -> list[int]:
        return await asyncio.to_thread(self.tokenizer.encode_chat, messages, max_tokens=self.max_context, **how)

    async def render_chat(self, messages: list[dict[str, Any]], **how: Any) -> str:
        return await asyncio.to_thread(self.tokenizer.render_chat, messages, **how)

    async def check_form(self, params: SamplingParams) -> None:
        """Raise what is wrong with the form an answer is to have, before the engine hears of it. Not on the event loop."""
        if params.grammar is None:
            return
        async with self._compiling:
            await asyncio.to_thread(self._check_form, params.grammar)

    def _check_form(self, grammar: Grammar) -> None:
        if self._grammars is None:
            self._grammars = Grammars(self.tokenizer, self.ready.model.vocab_size)
        self._grammars.matcher(grammar)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise ModelUnknown(f"There is no model {name!r} here.", fix=f"Ask for {self.model_name!r}.", param="model")

    async def prove(self, within_s: float) -> None:
        """Raise unless the engine has made a step lately, or makes one now."""
        if self.is_draining:
            raise Draining("The server is stopping.")
        if not self.client.working:
            raise EngineDead("The engine is being started again.")
        if self.client.last_step_s < within_s:
            return
        token = min(self.tokenizer.eos_token_ids, default=0)
        probe = Submit(new_id("probe"), [token], SamplingParams(max_tokens=1, temperature=0.0), priority=-(2**31))
        async with aclosing(self.client.submit(probe, timeout_s=within_s)) as deltas:
            async for _ in deltas:
                return

    def cancel(self, request_id: str, owner: str | None) -> int:
        """End a request by its id, whatever it consists of; how many parts were under way. `owner`: only if it is theirs."""
        theirs, parts = self.under_way.get(request_id, ("", set()))
        if owner is not None and owner != theirs:
            return 0
        why = Cancelled("The request was cancelled.")
        return sum(self.client.cancel(part, why) for part in parts)

    async def stream(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        priority: int = 0,
        salt: str = "",
        caller: Caller = Caller(),
        timeout_s: float | None = None,
        job_id: str | None = None,
    ) -> AsyncGenerator[tuple[Delta, TextDelta], None]:
        """Each sample's text as it comes. Leaving early ends the request in the engine. `job_id`: what it is part of, if it is
        not a whole; by that name it can be cancelled."""
        if self.is_draining:
            raise Draining("The server is stopping and takes nothing new.", fix="Try again in a moment.")
        owner = caller.owner
        if caller.in_background:
            priority = max(priority, BACKGROUND)
        texts = [TextStream(self.tokenizer, params) for _ in range(params.n)]
        ended: set[int] = set()
        # Prompts of another key are never found: how long an answer takes must not tell what others asked.
        salt = f"{owner}\0{salt}" if owner else salt
        request = Submit(request_id, prompt_ids, params, list(self.tokenizer.eos_token_ids), priority, salt, owner)
        job_id = job_id or request_id
        parts = self.under_way.setdefault(job_id, (owner, set()))[1]
        parts.add(request_id)
        try:
            async with aclosing(self.client.submit(request, timeout_s)) as deltas:
                async for delta in deltas:
                    if delta.index in ended:
                        continue
                    text = texts[delta.index].push(delta.token_ids, delta.finish_reason)
                    if text.finish_reason:
                        ended.add(delta.index)
                        if not delta.finish_reason:
                            self.client.finish(request_id, delta.index)
                    yield delta, text
                    if len(ended) == params.n:
                        return
        finally:
            parts.discard(request_id)
            if not parts:
                self.under_way.pop(job_id, None)


class ModelUnknown(InvalidRequest):
    """A model this server does not serve."""

    status = 404
    code = "model_not_found"


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
