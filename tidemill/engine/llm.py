"""LLM: the engine in this process, for scripts. `LLM("smollm2").generate([...])`."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tidemill.config import EngineOptions
from tidemill.engine.core import EngineCore
from tidemill.engine.link import error_from
from tidemill.errors import InvalidRequest
from tidemill.events import Event
from tidemill.frontend.output import TextStream
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.sampling import SamplingParams
from tidemill.weights.locate import locate
from tidemill.wire import Abort, Delta, Finish, Submit, Timings, TokenLogprobs

_MAX_EVENTS = 100_000
_NO_LIMIT = 2**31 - 1  # a script may queue any number of requests

Prompt: TypeAlias = str | Sequence[int]
Message: TypeAlias = dict[str, Any]


@dataclass(slots=True)
class Completion:
    """One sample of a request's output."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    timings: Timings | None = None


@dataclass(slots=True)
class RequestOutput:
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached: int = 0  # prompt tokens found in the prefix cache

    @property
    def text(self) -> str:
        """Of the first sample."""
        return self.outputs[0].text


@dataclass(slots=True)
class _Pending:
    output: RequestOutput
    streams: list[TextStream]

    @property
    def done(self) -> bool:
        return all(sample.finish_reason for sample in self.output.outputs)


class LLM:
    """A model loaded in this process. Options are those of `EngineOptions`."""

    def __init__(self, model: str = "smollm2", *, progress: bool = True, **options: Any) -> None:
        path = locate(model, fetch=True)
        settings: dict[str, Any] = {"model": str(path), "max_waiting": _NO_LIMIT} | options
        self.tokenizer = Tokenizer.load(path, options.get("chat_template"))
        with _loading_bar(progress) as (bar, task):
            self.core = EngineCore.load(
                EngineOptions(**settings),
                lambda _, done, total: bar.update(task, completed=done, total=total),
            )
        self._progress = progress
        self._next_id = 0
        self._pending: dict[str, _Pending] = {}
        self.config = self.core.config
        self.model_config = self.core.model_config
        self.events: deque[Event] = deque(maxlen=_MAX_EVENTS)  # of the last call
        self.last: RequestOutput | None = None  # the output of the last stream, with its timings
        self._interrupted = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        priority: int = 0,
    ) -> list[RequestOutput]:
        """Complete texts or token ids. One set of parameters for all, or one each."""
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        batch: list[Any] = [prompts] if single else list(prompts)
        encoded = [self._encode(prompt) for prompt in batch]
        texts = [prompt if isinstance(prompt, str) else None for prompt in batch]
        return self._run(texts, encoded, params, progress, priority)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Reply to one conversation (a list of messages) or many."""
        batch: list[Any] = [conversations] if conversations and isinstance(conversations[0], dict) else list(conversations)
        encoded = [self.tokenizer.encode_chat(messages, max_tokens=self.config.max_context) for messages in batch]
        return self._run([None] * len(batch), encoded, params, progress, 0)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Text of one completion as it is generated. Leaving the loop early ends the request."""
        yield from self._stream(self._encode(prompt), params or SamplingParams())

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Iterator[str]:
        ids = self.tokenizer.encode_chat(messages, max_tokens=self.config.max_context)
        yield from self._stream(ids, params or SamplingParams())

    def interrupt(self) -> None:
        """End the running stream after the step at hand. Safe to call from a signal handler."""
        self._interrupted = True

    # ---- inside

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, max_tokens=self.config.max_context)
        ids = list(prompt)
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
            raise InvalidRequest("A prompt is a text or a list of token ids.", param="prompt")
        return ids

    def _run(
        self,
        texts: Sequence[str | None],
        encoded: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool | None,
        priority: int,
    ) -> list[RequestOutput]:
        each = (
            [params or SamplingParams()] * len(encoded) if params is None or isinstance(params, SamplingParams) else list(params)
        )
        if len(each) != len(encoded):
            raise InvalidRequest(f"{len(encoded)} prompts and {len(each)} sets of sampling parameters.", param="params")
        self.events.clear()
        ids: list[str] = []
        try:
            for text, prompt_ids, one in zip(texts, encoded, each, strict=True):
                ids.append(self._submit(text, prompt_ids, one, priority))
            outputs = [self._pending[request_id].output for request_id in ids]
            with _request_bar(self._progress if progress is None else progress, len(ids)) as (bar, task):
                unfinished = set(ids)
                while unfinished:
                    self._step()
                    unfinished &= self._pending.keys()
                    bar.update(task, completed=len(ids) - len(unfinished))
            return outputs
        finally:
            for request_id in ids:  # after an error or Ctrl-C
                self._abandon(request_id)
            self.events.extend(self.core.take_events())

    def _stream(self, prompt_ids: list[int], params: SamplingParams) -> Iterator[str]:
        self.events.clear()
        request_id = self._submit(None, prompt_ids, params, 0)
        output = self.last = self._pending[request_id].output
        given = 0
        try:
            while request_id in self._pending and not self._interrupted:
                self._step()
                text = output.outputs[0].text
                if len(text) > given:
                    yield text[given:]
                    given = len(text)
        finally:
            self._interrupted = False
            self._abandon(request_id)
            self.events.extend(self.core.take_events())

    def _submit(self, text: str | None, prompt_ids: list[int], params: SamplingParams, priority: int) -> str:
        request_id = f"llm-{self._next_id}"
        self._next_id += 1
        self.core.submit(Submit(request_id, prompt_ids, params, list(self.tokenizer.eos_token_ids), priority))
        samples = [Completion(i, logprobs=[] if params.logprobs is not None else None) for i in range(params.n)]
        streams = [TextStream(self.tokenizer, params) for _ in range(params.n)]
        self._pending[request_id] = _Pending(RequestOutput(text, prompt_ids, samples), streams)
        return request_id

    def _abandon(self, request_id: str) -> None:
        if self._pending.pop(request_id, None) is not None:
            self.core.abort(Abort(request_id, "caller left"))

    def _step(self) -> None:
        with _uninterrupted():
            output, failed = self.core.step()
        self.events.extend(output.events)
        for delta in output.deltas:
            self._take(delta)
        for refused in failed:
            self._pending.pop(refused.request_id or "", None)
            raise error_from(refused)

    def _take(self, delta: Delta) -> None:
        pending = self._pending.get(delta.request_id)
        if pending is None or pending.output.outputs[delta.index].finish_reason:
            return
        sample = pending.output.outputs[delta.index]
        text = pending.streams[delta.index].push(delta.token_ids, delta.finish_reason)
        sample.text += text.text
        sample.token_ids += delta.token_ids[: text.num_tokens]
        if sample.logprobs is not None and delta.logprobs:
            sample.logprobs += delta.logprobs[: text.num_tokens]
        if delta.prompt_logprobs is not None:
            pending.output.prompt_logprobs = delta.prompt_logprobs
        pending.output.num_cached = max(pending.output.num_cached, delta.num_cached if delta.index == 0 else 0)
        sample.timings = delta.timings
        sample.finish_reason = text.finish_reason
        if text.finish_reason and not delta.finish_reason:
            sample.timings = self.core.finish(Finish(delta.request_id, delta.index))
        if pending.done:
            del self._pending[delta.request_id]


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C takes effect after the block, so that no step is cut in two."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are handled elsewhere
        return
    arrived: list[Any] = []
    previous = signal.signal(signal.SIGINT, lambda *arguments: arrived.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if arrived and callable(previous):
        previous(*arrived[-1])


class _Bar:
    """A progress bar that may be switched off."""

    def __init__(self, progress: Progress, total: float | None, label: str) -> None:
        self._progress, self._total, self._label = progress, total, label

    def __enter__(self) -> tuple[Progress, TaskID]:
        self._progress.__enter__()
        return self._progress, self._progress.add_task(self._label, total=self._total)

    def __exit__(self, *error: Any) -> None:
        self._progress.__exit__(*error)


def _loading_bar(enabled: bool) -> _Bar:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    return _Bar(Progress(*columns, disable=not enabled, transient=True), None, "Loading weights")


def _request_bar(enabled: bool, total: int) -> _Bar:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return _Bar(Progress(*columns, disable=not enabled, transient=True), total, "Requests")
