"""Service: what the routes of every API need of a model: a tokenizer, an engine, and text from
tokens."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from tidemill.engine.client import PROBE
from tidemill.engine.metrics import AnyMetrics
from tidemill.engine.pool import Pooled
from tidemill.engine.replicas import Client
from tidemill.errors import (
    Cancelled,
    ContextTooLong,
    Draining,
    EngineDead,
    InvalidRequest,
    TidemillError,
)
from tidemill.frontend.output import (
    CELLS_PER_TURN,
    TextDelta,
    TextStream,
    cells_per_token,
    in_pieces,
    num_cells,
)
from tidemill.frontend.parsers import ModelFormat, OutputFormat
from tidemill.frontend.sampling_defaults import SamplingDefaults
from tidemill.frontend.sandbox import GrammarChecker, Renderer
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.server.generation.retention import UNDECIDED_S, Pins, PromptCaches, session_name
from tidemill.server.http import stopwatch
from tidemill.server.http.access import Caller
from tidemill.server.http.context import RequestContext, new_id
from tidemill.server.http.stopwatch import (
    ENGINE,
    FORMATTING,
    GRAMMAR,
    LOOP,
    TEMPLATE,
    TOKENIZING,
)
from tidemill.server.observe.explain import AnyExplainer, engine_id
from tidemill.server.observe.live import Live
from tidemill.server.observe.tracing import Tracing
from tidemill.types.inputs import Segment
from tidemill.types.sampling import Grammar, SamplingParams
from tidemill.types.wire import AdapterInfo, Delta, Hold, Ready, Submit

if TYPE_CHECKING:
    from tidemill.server.observe.recorder import Recorder

T = TypeVar("T")
Conversation = (
    list[dict[str, Any]] | Callable[[], list[dict[str, Any]]]
)  # of thousands of messages, made in a thread
MAX_DETOKENIZED = 2**17  # tokens of one request, or the context if it is longer
_NUM_GRAMMARS = 32  # known to be valid
_NUM_LABELS, _IDS_PER_LABEL = 2000, 16
_AT_ONCE, _PART_OF_QUEUE = (
    64,
    4,
)  # prompts of a request that has many, and the part of the queue that they may have
_PROMPT_END = 64  # tokens that say whether the prompt opens or ends the reasoning
_LONG_TEXT, _LONG_IDS = 1024, 4096  # characters or tokens from which the tokenizer runs in a thread


@dataclass(frozen=True, slots=True)
class ResponseDefaults:
    """The settings of the server's answers, whatever a request asks for."""

    usage_always: bool = False  # in every chunk
    ids_in_logprobs: bool = False  # instead of the texts of tokens
    shows_slots: bool = True
    shows_page: bool = True
    pooling: str | None = None  # of embeddings; None: the model's own


class Service:
    adapter = 0  # the number of the LoRA adapter that its requests use; 0: none
    info: AdapterInfo | None = None  # of that adapter

    def __init__(
        self,
        client: Client,
        tokenizer: Tokenizer,
        model_name: str,
        metrics: AnyMetrics,
        explainer: AnyExplainer,
        live: Live,
        aliases: tuple[str, ...] = (),
        pooled: Pooled | None = None,
        defaults_of: Callable[[int], SamplingDefaults] = lambda _: SamplingDefaults(),
        tracing: Tracing | None = None,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        thinking_budget: int | None = None,
        pins: Pins | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """`pooled`: if the model may be unloaded. `defaults_of`: by the number of its parameters.
        `thinking_budget`: tokens of reasoning if a request does not say. `pins`: reads the events.
        """
        self.client = client
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.metrics = metrics
        self.explainer = explainer
        self.live = live
        live.model = model_name
        self.aliases = aliases
        self._pooled = pooled
        self._defaults_of = defaults_of
        self.tracing, self.recorder = tracing, recorder
        self.created_s = int(time.time())
        self.is_draining = False
        self.allows_templates = False  # of requests
        self.response_defaults = ResponseDefaults()
        self.pins = pins or Pins()
        self.caches = PromptCaches()
        self.pins.on_pinned = self._check_pin
        self.cache_generation = 0  # of what is cached from now on
        # Threads of their own: waiting for a worker process must not hold up other work. One
        # grammar at a time, so that many of
        # them cannot take all cores.
        self._checking, self._rendering = (
            ThreadPoolExecutor(1),
            ThreadPoolExecutor(Renderer.num_workers),
        )
        self._grammars: GrammarChecker | None = None
        self._known_grammars: OrderedDict[Grammar, None] = OrderedDict()
        self._renderer: Renderer | None = None
        if tokenizer.chat_template is not None:
            self._renderer = Renderer(
                tokenizer.chat_template.source, tokenizer.chat_template.control.texts
            )
            tokenizer.use_template(self._renderer)
        template = tokenizer.chat_template.source if tokenizer.chat_template is not None else ""
        self._model_format = ModelFormat.of(
            template, tool_parser, reasoning_parser, thinking_budget
        )
        # By tenant and id: the call, and its requests in the engine.
        self.in_progress: dict[tuple[str, str], tuple[RequestContext, set[str]]] = {}
        self._labelled: OrderedDict[tuple[str, str], list[str]] = (
            OrderedDict()
        )  # by tenant and label: ids of the latest calls
        self._proof: asyncio.Task[None] | None = None

    @property
    def ready(self) -> Ready:
        if self.client.ready is None:
            raise EngineDead("The engine is not ready.")
        return self.client.ready

    @property
    def state(self) -> str:
        """The state of the model: loaded, restarting after a failure, or failed; in a pool also
        unloaded, loading, unloading, or held: it takes no new requests until it was unloaded for
        another."""
        if self.client.working and (self._pooled is None or self._pooled.state == "loaded"):
            return "loaded"
        if self._pooled is not None and self._pooled.state != "loaded":
            return self._pooled.state
        return "restarting" if self.client.alive else "failed"

    @cached_property
    def defaults(self) -> SamplingDefaults:
        return self._defaults_of(self.ready.model.num_parameters)

    @property
    def max_context(self) -> int:
        return self.ready.config.max_context

    @property
    def num_at_once(self) -> int:
        """Prompts of one request that are submitted while others of it wait here. A tenant may have
        half of the queue."""
        return min(_AT_ONCE, max(self.ready.config.max_waiting // _PART_OF_QUEUE, 1))

    def context_of(self, params: SamplingParams | None = None) -> int:
        """Prompt and output of such a request, at most."""
        return self.ready.config.context_of(params or SamplingParams())

    async def encode(
        self,
        text: str,
        add_special: bool = True,
        params: SamplingParams | None = None,
        must_fit: bool = False,
    ) -> list[int]:
        """`params`: of the request, if they may allow a longer text. `must_fit`: a longer one is
        not truncated later."""
        options: Any = {
            "add_special": add_special,
            "max_tokens": self.context_of(params),
            "must_fit": must_fit,
        }
        work = partial(self.tokenizer.encode, text, **options)
        return await self._tokenized(work, len(text))

    async def encode_cut(
        self, text: str, num: int, side: str = "right", add_special: bool = True
    ) -> list[int]:
        """The text's first tokens, or its last if the left side is cut: at most `num`."""
        work = partial(self.tokenizer.encode_cut, text, num, side=side, add_special=add_special)
        return await self._tokenized(work, len(text))

    async def encode_pair(
        self, first: str, second: str, truncate: int | None = None, max_second: int | None = None
    ) -> tuple[list[int], int]:
        """The ids of a pair of texts in the form that cross-encoders take, and where tokens of type
        1 begin. `truncate`: to so many tokens; None: not at all. `max_second`: tokens of the
        second."""
        options: Any = {
            "max_tokens": truncate or self.max_context,
            "truncate": truncate is not None,
            "max_second": max_second,
        }
        return await self._tokenized(
            partial(self.tokenizer.encode_pair, first, second, **options), len(first) + len(second)
        )

    async def _tokenized(self, work: Callable[[], T], num_chars: int) -> T:
        times = stopwatch.of_task()
        if num_chars >= _LONG_TEXT:
            with times.within(TOKENIZING):
                return await times.in_thread(None, work)
        with times.within(LOOP):  # a request may have thousands of texts: let others have a turn
            await asyncio.sleep(0)
        with times.within(TOKENIZING):
            return work()

    async def decode(self, token_ids: list[int], skip_special: bool = False) -> str:
        limit, vocab_size = max(MAX_DETOKENIZED, self.max_context), self.ready.model.vocab_size
        if len(token_ids) > limit:
            raise InvalidRequest(
                f"{len(token_ids)} tokens; at most {limit}.",
                fix="Send them in several requests.",
                param="tokens",
            )
        for token in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token < vocab_size:
                raise InvalidRequest(
                    f"The model has no token {token}, only 0 to {vocab_size - 1}.", param="tokens"
                )
        work = partial(self.tokenizer.decode, token_ids, skip_special=skip_special)
        return work() if len(token_ids) < _LONG_IDS else await asyncio.to_thread(work)

    async def encode_chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        /,
        *,
        to_embed: bool = False,
        **template_options: Any,
    ) -> list[int]:
        if not to_embed:
            self.check_chat()
        times = stopwatch.of_task()
        work = partial(
            self._with_template,
            Tokenizer.encode_chat,
            messages,
            max_tokens=self.context_of(params),
            on_rendered=partial(times.enter, TOKENIZING),
            **template_options,
        )
        with times.within(TEMPLATE):
            return await times.in_thread(self._rendering, work)

    async def render_chat(self, messages: Conversation, **template_options: Any) -> str:
        self.check_chat()
        work = partial(self._with_template, Tokenizer.render_chat, messages, **template_options)
        return await asyncio.get_running_loop().run_in_executor(self._rendering, work)

    def check_chat(self) -> None:
        """Raises for a model that generates nothing, which has no use for a conversation."""
        self.ready.model.check_pooling(None)

    def _with_template(
        self,
        work: Callable[..., T],
        conversation: Conversation,
        template: str | None = None,
        **template_options: Any,
    ) -> T:
        """`template`: of the request. It gets a worker process of its own."""
        messages = conversation() if callable(conversation) else conversation
        if template is None:
            return work(self.tokenizer, messages, **template_options)
        if not self.allows_templates:
            fix = "Leave it out, or serve with --trust-request-chat-template."
            raise InvalidRequest(
                "The parameter 'chat_template' is not supported here.",
                fix=fix,
                param="chat_template",
            )
        renderer = Renderer(template, self.tokenizer.control_texts())
        try:
            return work(self.tokenizer.with_template(renderer), messages, **template_options)
        except InvalidRequest:
            raise
        except TidemillError:  # the worker ended while it compiled the template
            raise InvalidRequest(
                "The request's chat template cannot be compiled.", param="chat_template"
            ) from None
        finally:
            renderer.close()

    def output_format(
        self,
        prompt_ids: list[int],
        functions: Iterable[dict[str, Any]] = (),
        must_call: bool = False,
        continued: str = "",
        variables: dict[str, Any] | None = None,
    ) -> OutputFormat:
        """The format of the output of a chat. `functions`: what the model may call;
        `continued`: the text that its output goes on with, if it does; `variables`: of the
        template."""
        prompt_end = self.tokenizer.decode(prompt_ids[-_PROMPT_END:], skip_special=False)
        return self._model_format.output_format(
            prompt_end,
            functions,
            must_call,
            continued,
            self.tokenizer.variables | (variables or {}),
        )

    def close(self) -> None:
        for threads in (self._checking, self._rendering):
            threads.shutdown(wait=False, cancel_futures=True)
        for workers in (self._grammars, self._renderer):
            if workers is not None:
                workers.close()

    async def check_grammar(self, params: SamplingParams, of_tools: bool = False) -> None:
        """Raises what is wrong with the grammar, before the request is submitted. `of_tools`: it
        was made of their parameters."""
        if params.grammar is None or params.grammar in self._known_grammars:
            return
        try:
            times = stopwatch.of_task()
            with times.within(GRAMMAR):
                await times.in_thread(self._checking, partial(self._check_grammar, params.grammar))
        except InvalidRequest as error:
            if not of_tools:
                raise
            raise InvalidRequest(
                f"A tool has an invalid 'parameters' schema. {error.message}", param="tools"
            ) from None

    def _check_grammar(self, grammar: Grammar) -> None:
        if self._grammars is None:
            assert self.tokenizer.path is not None
            backend = self.ready.config.structured_backend
            self._grammars = GrammarChecker(
                backend, self.tokenizer.path, self.ready.model.vocab_size
            )
        self._grammars.check(grammar.kind, grammar.text)
        self._known_grammars[grammar] = None
        while len(self._known_grammars) > _NUM_GRAMMARS:
            self._known_grammars.popitem(last=False)

    def with_defaults(self, params: SamplingParams, prompt_ids: list[int]) -> SamplingParams:
        """The parameters, completed with the model's defaults."""
        return self.defaults.fill(
            params, self.context_of(params) - len(prompt_ids), null_is_absent=True
        )

    async def prove(self, within_s: float) -> None:
        """Raises unless the engine has completed a step within this time, or completes one now."""
        if self.is_draining:
            raise Draining("The server is stopping.")
        if not self.client.working:
            raise EngineDead("The engine is restarting.")
        if self.client.last_step_s < within_s:
            return
        if self._proof is None or self._proof.done():  # one for all who ask
            self._proof = asyncio.create_task(self._prove(within_s))
        await asyncio.shield(self._proof)

    async def _prove(self, within_s: float) -> None:
        token = min(self.tokenizer.eos_token_ids, default=0)
        params = SamplingParams(max_tokens=1, temperature=0.0, pooling=self.ready.model.own_pooling)
        probe = Submit(new_id("probe"), [token], params, priority=PROBE)
        async with aclosing(self.client.submit(probe, timeout_s=within_s)) as deltas:
            async for _ in deltas:
                return

    def ids_of(self, name: str, tenant: str | None) -> list[str]:
        """The ids of the calls that this id or label stands for. `tenant`: only of theirs."""
        if tenant is not None:
            return [name, *self._labelled.get((tenant, name), ())]
        return [
            name,
            *(
                part_id
                for (_, label), ids in self._labelled.items()
                if label == name
                for part_id in ids
            ),
        ]

    def _label(self, call: RequestContext, tenant: str) -> None:
        for label in call.labels:
            ids = self._labelled.setdefault((tenant, label), [])
            self._labelled.move_to_end((tenant, label))
            if call.request_id not in ids:
                ids.append(call.request_id)
                del ids[:-_IDS_PER_LABEL]
        while len(self._labelled) > _NUM_LABELS:
            self._labelled.popitem(last=False)

    def cancel(self, name: str, tenant: str | None) -> int:
        """Ends a request by its id, or all of a label; returns how many requests in the engine
        there were. `tenant`: only if it is theirs."""
        found = [
            parts
            for (theirs, request_id), (call, parts) in self.in_progress.items()
            if name in (request_id, *call.labels) and (tenant is None or tenant == theirs)
        ]
        why = Cancelled("The request was cancelled.")
        return sum(self.client.cancel(part, why) for parts in found for part in parts)

    async def stream(
        self,
        caller: Caller,
        prompt_ids: list[int],
        params: SamplingParams,
        part: int = 0,
        priority: int | None = None,
        salt: str = "",
        timeout_s: float | None = None,
        output_format: OutputFormat | None = None,
        one_by_one: bool = False,
        tells_progress: bool = False,
        prefix_leases: Sequence[Hold] = (),
        segments: Sequence[Segment] = (),
    ) -> AsyncGenerator[tuple[Delta, TextDelta], None]:
        """The text of each sample as it is generated, in bounded pieces, or token by token. The
        first is empty if the request is accepted before there is a token, and so are those that
        tell the progress of the prompt. Leaving early ends the request in the engine. `part`: which
        of the call's prompts this is. `prefix_leases`: those of its prefixes."""
        if self.is_draining:
            raise Draining(
                "The server is stopping and accepts no new requests.", fix="Try again in a moment."
            )
        self.ready.model.check_pooling(params.pooling)
        tenant, call, times = caller.tenant, caller.call, caller.call.stopwatch
        priority = caller.priority_of(priority)
        params = self.with_defaults(params, prompt_ids)
        texts = [TextStream(self.tokenizer, params, output_format) for _ in range(params.n)]
        ended: set[int] = set()
        per_token = cells_per_token(params)
        num_done = 0  # cells since the event loop last had a turn
        # Each tenant has a prefix cache of its own: how long a request takes must not reveal the
        # prompts of others.
        salt = f"{tenant}\0{salt}" if tenant else salt
        salt = f"{self.cache_generation}\0\0{salt}" if self.cache_generation else salt
        request_id = engine_id(tenant, call.request_id, part)
        ends = list(self.tokenizer.eos_token_ids)
        session_s = (
            self.ready.config.session_retention_s
            if output_format and output_format.functions and params.n == 1
            else 0.0
        )
        if session_s:
            prefix_leases = [
                *prefix_leases,
                Hold(
                    session_name(request_id), 0, UNDECIDED_S, reason="a tool may have been called"
                ),
            ]
        request = Submit(
            request_id,
            prompt_ids,
            params,
            ends,
            priority,
            salt,
            tenant,
            adapter=self.adapter,
            prefix_leases=list(prefix_leases),
            segments=list(segments),
        )
        name = (tenant, call.request_id)
        _, parts = self.in_progress.setdefault(name, (call, set()))
        parts.add(request_id)
        self._label(call, tenant)
        call.model = self.model_name
        call.num_prompt += len(prompt_ids)
        if self.tracing is not None:
            self.tracing.begin(request_id, call)
        try:
            if self.recorder is not None:
                self.recorder.begin(request, self.ready, self.info, call.path)
            num_samples = 1 if params.beams is not None else params.n
            self.explainer.begin(request_id, num_samples, times)
            times.enter(ENGINE)
            async with aclosing(
                self.client.submit(request, timeout_s, True, tells_progress)
            ) as deltas:
                async for joined in deltas:
                    times.enter(FORMATTING)
                    for delta in in_pieces(joined, one_by_one, per_token):
                        if delta.index in ended:
                            break
                        if (num_done := num_done + num_cells(delta, per_token)) > CELLS_PER_TURN:
                            num_done = 0
                            await asyncio.sleep(
                                0
                            )  # a backlog comes without waiting: let others have a turn
                        text = texts[delta.index].push(delta.token_ids, delta.finish_reason)
                        if text.finish_reason:
                            ended.add(delta.index)
                            if not joined.finish_reason:
                                self.client.finish(request_id, delta.index)
                                self.explainer.cut(request_id, delta.index)
                        _record(call, delta, text)
                        if self.recorder is not None:
                            self.recorder.take_output(request_id, delta, text)
                        yield delta, text
                        times.enter(FORMATTING)
                    if len(ended) == params.n:
                        if session_s and output_format is not None:
                            self._decide_session(
                                request_id, session_s if output_format.has_called else 0.0
                            )
                        return
                    times.enter(ENGINE)
        except TidemillError as error:
            call.error = error.kind
            if isinstance(error, ContextTooLong):
                error.figures = {"n_prompt_tokens": len(prompt_ids), "n_ctx": self.max_context}
            raise
        finally:
            if len(ended) < params.n and not call.error:
                call.error = "client_left"
            self.explainer.leave(request_id)
            if self.tracing is not None:
                self.tracing.end(request_id)
            if self.recorder is not None:
                self.recorder.end(request_id, call.error)
            parts.discard(request_id)
            if not parts:
                self.in_progress.pop(name, None)

    def release_pins(self, reason: str) -> None:
        """Prompt caches are computed and pinned again by the next requests with them."""
        for cache in self.caches:
            self.client.renew(cache.pin, 0, reason)

    def _check_pin(self, pin: str) -> None:
        """A request may have waited while its prompt cache was deleted: before it got to the
        engine, for its adapter or its grammar, or because the engine was lost."""
        if not self.caches.has(pin):
            self.client.renew(pin, 0, "its prompt cache was deleted before")

    def _decide_session(self, request_id: str, seconds: float) -> None:
        """A conversation whose tool call is under way comes back with the result: its pages are
        kept over those of others."""
        self.client.renew(
            session_name(request_id),
            seconds,
            "a tool call is under way" if seconds else "no tool was called",
        )


def _record(call: RequestContext, delta: Delta, text: TextDelta) -> None:
    """Records the figures that the request log reports."""
    call.num_output += text.num_tokens
    if text.num_tokens and not call.first_s:
        call.first_s = time.monotonic()
    if text.finish_reason:
        call.finish_reason = text.finish_reason
        call.num_cached += delta.num_cached if delta.index == 0 else 0
        if delta.timings is not None:
            call.queue_s = max(call.queue_s, delta.timings.queue_s)
            call.decode_s = max(call.decode_s, delta.timings.decode_s)
