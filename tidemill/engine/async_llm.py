"""AsyncLLM: a model in an engine process of its own, for programs with an event loop. Loads no
torch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

import msgspec

from tidemill.capabilities import asked, check
from tidemill.engine.client import EngineClient
from tidemill.engine.llm_inputs import PromptEncoder, located_options, params_list
from tidemill.engine.llm_outputs import OutputBuilder, RequestOutput
from tidemill.engine.metrics import Metric, Metrics, MetricsOfReplicas
from tidemill.engine.replicas import Client, Replicas
from tidemill.engine.roles import routing_of
from tidemill.errors import Cancelled, EngineDead, InvalidRequest
from tidemill.frontend.sampling_defaults import SamplingDefaults, sampling_defaults
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.types.events import ModelLoaded
from tidemill.types.sampling import RequestOutputKind, SamplingParams, sample_seed
from tidemill.types.wire import Submit

_LONG_TEXT = 1024  # characters from which the tokenizer runs in a thread
_ABORTED = "abort"  # the finish reason of samples that were aborted, as in vLLM


class AsyncLLM:
    """A model whose requests run at the same time and are batched. The options are those of `LLM`.

        async with AsyncLLM("smollm2") as llm:
            async for output in llm.generate("The tide", SamplingParams(max_tokens=16)):
                print(output.text)

    The engine is a process of its own, which is started by `async with`, by `start` or by the first
    request, and supervised as the server's is: if it dies, it is started again and requests
    continue. `seed`: of requests without one.
    """

    def __init__(self, model: str = "smollm2", *, seed: int | None = None, **options: Any) -> None:
        if seed is not None:
            SamplingParams(seed=seed)  # checked
        self._seed, self._num_requests = seed, 0
        self._model, self._given = model, options
        self._starting = asyncio.Lock()
        self._engine: _Engine | None = None
        self._is_closed = False
        self._closing: asyncio.Task[None] | None = None
        # of requests under way: those of the engine client by those of the caller
        self._ids: dict[str, str] = {}

    async def start(self) -> None:
        """Returns when the engine takes requests. Without effect if it does already."""
        async with self._starting:
            if self._is_closed:
                raise EngineDead("This AsyncLLM is shut down.", fix="Make another one.")
            if self._engine is None:
                self._engine = await _Engine.started(self._model, self._given)

    def shutdown(self) -> Awaitable[None]:
        """Ends the engine; requests under way raise EngineDead. It is begun by the call; who awaits
        it knows that the process is gone. Safe to call twice."""
        self._is_closed = True
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        return self._closing

    async def _close(self) -> None:
        async with self._starting:
            if self._engine is not None:
                await self._engine.client.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.shutdown()

    async def generate(
        self,
        prompt: str | Sequence[int] | Mapping[str, Any],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        lora: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The output as it is generated. `sampling_params.output_kind`: each time all of it so far,
        only what is new, or once the whole. Leaving the loop early ends the request. `request_id`:
        for `abort`; `lora`: the name of an adapter."""
        engine = await self._running()
        text, ids = await _tokenized(lambda: engine.prompts.encode(prompt), prompt)
        outputs = self._run(engine, text, ids, sampling_params, request_id, priority, lora)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Sequence[dict[str, Any]],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        priority: int = 0,
        lora: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The reply to a conversation, as `generate` gives it."""
        engine = await self._running()
        template_options: dict[str, Any] = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "variables": chat_template_kwargs,
        }
        template_options["continue_final_message"] = continue_final_message
        ids = await asyncio.to_thread(engine.prompts.encode_chat, messages, **template_options)
        outputs = self._run(engine, None, ids, sampling_params, request_id, priority, lora)
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def abort(self, request_id: str | Sequence[str]) -> None:
        """Ends requests: what they yield next is their last, with the finish reason "abort".
        Unknown ids are ignored, since a request may just have ended."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            if name in self._ids and self._engine is not None:
                self._engine.client.cancel(self._ids[name], Cancelled("The request was aborted."))

    async def load_lora(self, name: str, path: str) -> None:
        """Load a LoRA adapter, under a name that is not in use."""
        await (await self._running()).client.adapters.load(name, path)

    async def unload_lora(self, name: str) -> None:
        """Requests with it go on to their ends."""
        engine = await self._running()
        engine.adapter(name)
        engine.client.adapters.unload(name)

    async def check_health(self) -> None:
        """Raises EngineDead if there is no engine and none will be started."""
        if self._engine is None or not self._engine.client.alive:
            death = "" if self._engine is None else self._engine.client.death
            raise EngineDead(death or "The engine is not running.", fix="Make another AsyncLLM.")

    def get_metrics(self) -> list[Metric]:
        """The engine's metrics since it was started, as the server exports them."""
        return self._ready().metrics.read()

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a request without any."""
        engine = self._ready()
        return engine.defaults.fill(SamplingParams(), engine.max_context)

    def get_tokenizer(self) -> Tokenizer:
        return self._ready().tokenizer

    # ---- inside

    async def _running(self) -> _Engine:
        await self.start()
        return self._ready()

    def _ready(self) -> _Engine:
        if self._engine is None:
            raise EngineDead(
                "The engine is not started.",
                fix="Use `async with AsyncLLM(...)`, or await start().",
            )
        return self._engine

    async def _run(
        self, engine: _Engine, text: str | None, prompt_ids: list[int], params: SamplingParams | None, request_id: str | None,
        priority: int, lora: str | None,
    ) -> AsyncGenerator[RequestOutput, None]:  # fmt: skip
        (checked,) = params_list(params, 1)
        self._num_requests += 1
        own_id = f"llm-{self._num_requests}"
        name = own_id if request_id is None else request_id
        if name in self._ids:
            raise InvalidRequest(
                f"There is a request {name!r} already.",
                fix="Give each an id of its own.",
                param="request_id",
            )
        client = engine.client
        checked = engine.filled(checked, len(prompt_ids))
        if self._seed is not None and checked.seed is None:
            checked = msgspec.structs.replace(
                checked, seed=sample_seed(self._seed, self._num_requests)
            )
        adapter = engine.adapter(lora) if lora else 0
        request = Submit(
            own_id,
            prompt_ids,
            checked,
            list(engine.tokenizer.eos_token_ids),
            priority,
            adapter=adapter,
        )
        builder = OutputBuilder(engine.tokenizer, name, text, prompt_ids, checked)
        self._ids[name] = own_id
        try:
            async with aclosing(client.submit(request)) as deltas:
                async for delta in deltas:
                    if builder.take(delta):
                        client.finish(own_id, delta.index)
                    is_whole = builder.output.finished
                    if is_whole or checked.output_kind != RequestOutputKind.FINAL_ONLY:
                        yield builder.next_output()
                    if is_whole:
                        return
        except Cancelled:
            for sample in builder.output.samples:
                sample.finish_reason = sample.finish_reason or _ABORTED
            yield builder.next_output()
        finally:
            del self._ids[name]


class _Engine:
    """The client of a running engine, and what a model's requests are made with."""

    def __init__(
        self,
        client: Client,
        metrics: Metrics | MetricsOfReplicas,
        tokenizer: Tokenizer,
        defaults: SamplingDefaults,
    ) -> None:
        assert client.ready is not None
        self.client, self.metrics, self.tokenizer, self.defaults = (
            client,
            metrics,
            tokenizer,
            defaults,
        )
        self._config = client.ready.config
        self.max_context = self._config.max_context
        self.prompts = PromptEncoder(tokenizer, max(self.max_context, self._config.max_stream))

    @staticmethod
    async def started(model: str, keywords: dict[str, Any]) -> _Engine:
        path, options = await asyncio.to_thread(located_options, model, keywords)
        check(asked(options))
        tokenizer = await asyncio.to_thread(
            Tokenizer.load, path, options.chat_template, options.chat_template_kwargs
        )
        num, routing = options.num_engines, routing_of(options)
        metrics = Metrics() if num == 1 else MetricsOfReplicas(num, routing.names)
        client: Client = (
            EngineClient(metrics.take) if num == 1 else Replicas(num, metrics.take, routing=routing)
        )
        client.adapters.expect(options)
        began = time.monotonic()
        ready = await client.start(options)
        now, num_bytes = time.monotonic(), ready.config.memory_bytes
        metrics.take(
            [
                ModelLoaded(now, str(path), num_bytes, now - began, replica=number)
                for number in range(num)
            ]
        )
        chosen = options.sampling_defaults, options.default_max_tokens
        return _Engine(
            client, metrics, tokenizer, sampling_defaults(path, ready.model.num_parameters, *chosen)
        )

    def filled(self, params: SamplingParams, num_prompt: int) -> SamplingParams:
        """The parameters, completed with the model's defaults."""
        return self.defaults.fill(params, self._config.context_of(params) - num_prompt)

    def adapter(self, name: str) -> int:
        """The number of an adapter."""
        info = self.client.adapters.get(name)
        if info is None:
            known = ", ".join(repr(adapter.name) for adapter in self.client.adapters) or "none"
            raise InvalidRequest(
                f"There is no adapter {name!r}.", fix=f"Loaded are: {known}.", param="lora"
            )
        return info.adapter_id


async def _tokenized(
    work: Callable[[], tuple[str | None, list[int]]], prompt: Any
) -> tuple[str | None, list[int]]:
    """A long text is tokenized in a thread, so that others have their turn."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return (
        await asyncio.to_thread(work)
        if isinstance(text, str) and len(text) >= _LONG_TEXT
        else work()
    )
