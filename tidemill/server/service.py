"""Service: what every route needs, whatever API it speaks: a tokenizer, an engine, and text out of tokens."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import Any

from tidemill.engine.client import EngineClient
from tidemill.errors import Cancelled, Draining, EngineDead, InvalidRequest
from tidemill.frontend.apart import FormChecker, Renderer
from tidemill.frontend.output import TextDelta, TextStream
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.sampling import Grammar, SamplingParams
from tidemill.server.explain import Explainer
from tidemill.server.metrics import Metrics
from tidemill.wire import Delta, Ready, Submit

_NUM_FORMS = 32  # known to be good
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
        # Whoever waits for a worker holds up nobody else's thread. One form at a time: a flood of them leaves other cores alone.
        self._checking, self._rendering = ThreadPoolExecutor(1), ThreadPoolExecutor(Renderer.num_workers)
        self._forms: FormChecker | None = None
        self._known_forms: OrderedDict[Grammar, None] = OrderedDict()
        self._renderer: Renderer | None = None
        if tokenizer.chat_template is not None:
            tokenizer.chat_template = self._renderer = Renderer(tokenizer.chat_template.source)
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
        work = partial(self.tokenizer.encode_chat, messages, max_tokens=self.max_context, **how)
        return await asyncio.get_running_loop().run_in_executor(self._rendering, work)

    async def render_chat(self, messages: list[dict[str, Any]], **how: Any) -> str:
        work = partial(self.tokenizer.render_chat, messages, **how)
        return await asyncio.get_running_loop().run_in_executor(self._rendering, work)

    def close(self) -> None:
        for threads in (self._checking, self._rendering):
            threads.shutdown(wait=False, cancel_futures=True)
        for workers in (self._forms, self._renderer):
            if workers is not None:
                workers.close()

    async def check_form(self, params: SamplingParams) -> None:
        """Raise what is wrong with the form an answer is to have, before the engine hears of it."""
        if params.grammar is not None and params.grammar not in self._known_forms:
            await asyncio.get_running_loop().run_in_executor(self._checking, self._check_form, params.grammar)

    def _check_form(self, grammar: Grammar) -> None:
        if self._forms is None:
            assert self.tokenizer.path is not None
            self._forms = FormChecker(self.tokenizer.path, self.ready.model.vocab_size)
        self._forms.check(grammar.kind, grammar.text)
        self._known_forms[grammar] = None
        while len(self._known_forms) > _NUM_FORMS:
            self._known_forms.popitem(last=False)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise ModelUnknown(f"There is no model {name[:100]!r} here.", fix=f"Ask for {self.model_name!r}.", param="model")

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
        owner: str = "",
        timeout_s: float | None = None,
        job_id: str | None = None,
    ) -> AsyncGenerator[tuple[Delta, TextDelta], None]:
        """Each sample's text as it comes. Leaving early ends the request in the engine. `job_id`: what it is part of, if it is
        not a whole; by that name it can be cancelled."""
        if self.is_draining:
            raise Draining("The server is stopping and takes nothing new.", fix="Try again in a moment.")
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
