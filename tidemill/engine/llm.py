"""LLM: the engine in this process, for scripts. `LLM("smollm2").generate([...])`."""

from __future__ import annotations

import os
import signal
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import msgspec

from tidemill.config import EngineOptions
from tidemill.engine.bars import LoadingBar, request_bar
from tidemill.engine.beam_outputs import BeamSearchOutput
from tidemill.engine.link import error_from
from tidemill.engine.llm_inputs import (
    check_messages,
    conversation_list,
    engine_options,
    of_mapping,
    params_list,
    prompt_list,
    shown,
    wants_bar,
)
from tidemill.engine.llm_outputs import Completion, EmbeddingOutput, RequestOutput, ScoreOutput
from tidemill.engine.load import load_core
from tidemill.errors import ConfigError, InvalidRequest, TidemillError
from tidemill.events import Event
from tidemill.frontend.output import TextStream
from tidemill.frontend.sampling_defaults import sampling_defaults
from tidemill.frontend.scoring import check_scores, cosine, pairs_of
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.sampling import BeamSearchParams, SamplingParams, sample_seed
from tidemill.weights.locate import locate
from tidemill.wire import Abort, Delta, Finish, Submit

_MAX_EVENTS = 100_000
_NO_LIMIT = 2**31 - 1  # a script may queue any number of requests

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
Message: TypeAlias = dict[str, Any]


@dataclass(slots=True)
class _Pending:
    output: RequestOutput
    streams: list[TextStream]


class LLM:
    """A model loaded in this process. Options are those of `EngineOptions`, or of vLLM's LLM.

    `seed`: of requests without one, so that a script gives the same answers each time. Without it each request draws its own.
    """

    def __init__(self, model: str = "smollm2", *, progress: bool = True, seed: int | None = None, **options: Any) -> None:
        settings = engine_options(options, model)
        if seed is not None:
            SamplingParams(seed=seed)  # checked
        path = locate(model, fetch=True)
        defaults: dict[str, Any] = {"model": str(path), "max_waiting": _NO_LIMIT}
        given = EngineOptions(**defaults | settings)
        if given.num_engines > 1:
            fix = "Serve the model with --data-parallel or --prefill and --decode, or make an LLM in each of several processes."
            raise ConfigError("An LLM is one engine.", fix=fix, param="data_parallel")
        self.tokenizer = Tokenizer.load(path, given.chat_template, given.chat_template_kwargs)
        with LoadingBar(enabled=progress) as bar:
            self.core = load_core(given, lambda _, done, total: bar.show(done, total))
        for note in self.core.config.notes:
            warnings.warn(f"LLM: {note}.", stacklevel=2)
        self._progress = progress
        self._next_id = 0
        self._pending: dict[str, _Pending] = {}
        self.config = self.core.config
        self.model_config = self.core.model_config
        chosen = given.sampling_defaults, given.default_max_tokens
        self.defaults = sampling_defaults(path, self.model_config.num_parameters, *chosen)
        self._seed = seed
        self.events: deque[Event] = deque(maxlen=_MAX_EVENTS)  # of the last call
        self.last: RequestOutput | None = None  # the output of the last stream, with its timings
        self._interrupted = False
        if self.config.kv_disk or self.config.kv_export:
            weakref.finalize(self, self.core.close)  # when the script ends: what is cached goes to disk, and its socket goes
        self._adapters = {adapter.name: adapter.adapter_id for adapter in self.core.adapters}
        self._last_adapter = len(self._adapters)

    def close(self) -> None:
        """Save what is cached on disk (`kv_disk`). Else this happens when the script ends."""
        self.core.close()

    def load_lora(self, name: str, path: str | os.PathLike[str]) -> None:
        """Load a LoRA adapter, under a name that is not in use."""
        if name in self._adapters:
            raise InvalidRequest(f"The adapter {name!r} is loaded already.", fix="Unload it first.", param="lora")
        self.core.adapters.load_now(self._last_adapter + 1, name, str(path))
        self._last_adapter += 1
        self._adapters[name] = self._last_adapter

    def unload_lora(self, name: str) -> None:
        self.core.adapters.unload(self._adapter(name))
        del self._adapters[name]

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        use_tqdm: bool | Callable[..., Any] | None = None,
        priority: int = 0,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete texts or token ids. One set of parameters for all, or one each; `lora`: the name of an adapter, likewise.

        A prompt is a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}. A prompt of a list that cannot be
        served fails alone: its output has `error`.
        """
        batch, is_list = prompt_list(prompts)
        return self._run(batch, is_list, self._encode, sampling_params, wants_bar(progress, use_tqdm), priority, lora)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        use_tqdm: bool | Callable[..., Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Reply to one conversation (a list of messages) or many. One of many that cannot be served fails alone."""
        batch, is_list = conversation_list(messages)

        def encode(conversation: Any) -> tuple[str | None, list[int]]:
            how = {"tools": tools, "add_generation_prompt": add_generation_prompt, "variables": chat_template_kwargs}
            return None, self._encode_chat(conversation, continue_final_message=continue_final_message, **how)

        return self._run(batch, is_list, encode, sampling_params, wants_bar(progress, use_tqdm), 0, lora)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        progress: bool | None = None,
        use_tqdm: bool | Callable[..., Any] | None = None,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """The best `params.beam_width` outputs for each prompt, as Transformers' beam search finds them. Prompts as in
        `generate`."""
        if not isinstance(params, BeamSearchParams):
            what = f"beam_search() takes BeamSearchParams; got {shown(params)}."
            raise InvalidRequest(what, fix="Write BeamSearchParams(beam_width=4, max_tokens=100).", param="params")
        batch, is_list = prompt_list(prompts)
        made = self._run(batch, is_list, self._encode, params.sampling(), wants_bar(progress, use_tqdm), 0, lora)
        return [
            BeamSearchOutput.of(self.tokenizer, one.prompt_token_ids, one.samples, one.error, params.include_stop_str_in_output)
            for one in made
        ]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        truncate_prompt_tokens: int | None = None,
        progress: bool | None = None,
        use_tqdm: bool | Callable[..., Any] | None = None,
    ) -> list[EmbeddingOutput]:
        """Embeddings of texts or token ids. `pooling`: mean, last or cls; by default the model's own, or the mean.
        `truncate_prompt_tokens`: keep so many of each text, -1: what the model takes; otherwise a text that is too long fails."""
        if pooling == "none":
            raise InvalidRequest("embed makes one vector of a prompt.", fix="Ask a server's /pooling for one of each token.")
        batch, is_list = prompt_list(prompts)
        by_default = self.model_config.own_pooling or self.model_config.embeds_by or "mean"
        params = SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling or by_default)
        self.model_config.check_pooling("mean" if params.pooling == "score" else params.pooling)
        encode = partial(self._encode_cut, num=self._num_kept(truncate_prompt_tokens))
        made = self._run(batch, is_list, encode, params, wants_bar(progress, use_tqdm), 0, None)
        return [EmbeddingOutput(one.prompt_token_ids, one.error, one.pooled or []) for one in made]

    def score(
        self,
        first: str | Sequence[str],
        second: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        progress: bool | None = None,
        use_tqdm: bool | Callable[..., Any] | None = None,
    ) -> list[ScoreOutput]:
        """Scores of one text with each of a list, or of the texts of two lists: by a cross-encoder, or the cosine of embeddings.
        `truncate_prompt_tokens`: as of `embed`."""
        texts = [[given] if isinstance(given, str) else list(given) for given in (first, second)]
        pairs = pairs_of(texts[0], texts[1], ("first", "second"), most=_NO_LIMIT)
        most, progress = self._num_kept(truncate_prompt_tokens), wants_bar(progress, use_tqdm)
        if not check_scores(self.model_config):
            given = [*texts[0], *texts[1]]
            made = self.embed(given, truncate_prompt_tokens=truncate_prompt_tokens, progress=progress)
            return [_cosine_output(made[i], made[len(texts[0]) + j]) for i, j in pairs]
        how: Any = {"max_tokens": most or self.config.max_context, "truncate": most is not None}
        encoded = [self.tokenizer.encode_pair(texts[0][i], texts[1][j], **how) for i, j in pairs]
        params = [SamplingParams(max_tokens=1, temperature=0.0, pooling="score", pair_start=start) for _, start in encoded]
        outputs = self._run([ids for ids, _ in encoded], True, self._encode, params, progress, 0, None)
        return [ScoreOutput(one.prompt_token_ids, one.error, (one.pooled or [0.0])[0]) for one in outputs]

    def _num_kept(self, num: int | None) -> int | None:
        if num == 0:
            raise InvalidRequest("truncate_prompt_tokens must be -1, or 1 or more.", param="truncate_prompt_tokens")
        return num if num is None else self.config.max_context if num < 0 else min(num, self.config.max_context)

    def _encode_cut(self, prompt: Any, num: int | None) -> tuple[str | None, list[int]]:
        if num is None or not isinstance(prompt, str):
            text, ids = self._encode(prompt)
            return text, ids[:num]
        return prompt, self.tokenizer.encode_cut(prompt, num)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, lora: str | None = None) -> Iterator[str]:
        """Text of one completion as it is generated. Leaving the loop early ends the request."""
        yield from self._stream(self._encode(prompt)[1], sampling_params, lora)

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, *, lora: str | None = None
    ) -> Iterator[str]:
        yield from self._stream(self._encode_chat(messages), sampling_params, lora)

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without parameters gets."""
        return self.defaults.fill(SamplingParams(), self.config.max_context)

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def interrupt(self) -> None:
        """End the running stream after the step at hand. Safe to call from a signal handler."""
        self._interrupted = True

    # ---- inside

    def _encode(self, prompt: Any) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            prompt = of_mapping(prompt)
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt, max_tokens=max(self.config.max_context, self.config.max_stream))
        if not isinstance(prompt, Sequence) or not all(type(token) is int for token in prompt):
            raise InvalidRequest(
                f"A prompt is a text or a list of token ids; got {shown(prompt)}.",
                fix='Give "text", [1, 2, 3], {"prompt": "text"} or {"prompt_token_ids": [1, 2, 3]}.',
                param="prompt",
            )
        return None, list(prompt)

    def _encode_chat(self, messages: Any, **how: Any) -> list[int]:
        check_messages(messages)
        return self.tokenizer.encode_chat(messages, max_tokens=max(self.config.max_context, self.config.max_stream), **how)

    def _run(
        self,
        batch: list[Any],
        is_list: bool,
        encode: Callable[[Any], tuple[str | None, list[int]]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool | None,
        priority: int,
        lora: str | Sequence[str | None] | None,
    ) -> list[RequestOutput]:
        each, adapters = params_list(params, len(batch)), self._adapter_list(lora, len(batch))
        self.events.clear()
        outputs: list[RequestOutput] = []
        ids: list[str] = []
        try:
            for prompt, one, adapter in zip(batch, each, adapters, strict=True):
                try:
                    text, prompt_ids = encode(prompt)
                    request_id, output = self.submit(prompt_ids, one, text=text, priority=priority, adapter=adapter)
                    ids.append(request_id)
                    outputs.append(output)
                except TidemillError as error:
                    outputs.append(RequestOutput(prompt if isinstance(prompt, str) else None, [], [], error=error))
                    if not is_list:
                        raise
            with request_bar(self._progress if progress is None else progress, len(ids)) as (bar, task):
                unfinished = set(ids)
                while unfinished:
                    self.step()
                    unfinished &= self._pending.keys()
                    bar.update(task, completed=len(ids) - len(unfinished))
            return _reported(outputs, is_list)
        finally:
            for request_id in ids:  # after an error or Ctrl-C
                self.abandon(request_id)
            self.events.extend(self.core.take_events())

    def _adapter(self, name: str) -> int:
        if name not in self._adapters:
            known = ", ".join(map(repr, self._adapters)) or "none"
            raise InvalidRequest(f"There is no adapter {name!r}.", fix=f"Loaded are: {known}.", param="lora")
        return self._adapters[name]

    def _adapter_list(self, lora: Any, num: int) -> list[int]:
        """Their numbers, 0 for none."""
        each = [lora] * num if lora is None or isinstance(lora, str) else list(lora)
        if len(each) != num or not all(one is None or isinstance(one, str) for one in each):
            what = f"lora is the name of an adapter, or one or None for each of {num} prompts"
            raise InvalidRequest(f"{what}; got {shown(lora)}.", param="lora")
        return [self._adapter(one) if one else 0 for one in each]

    def _stream(self, prompt_ids: list[int], params: SamplingParams | None, lora: str | None) -> Iterator[str]:
        (checked,) = params_list(params, 1)
        (adapter,) = self._adapter_list(lora, 1)
        self.events.clear()
        request_id, output = self.submit(prompt_ids, checked, adapter=adapter)
        self.last = output
        given = 0
        try:
            while request_id in self._pending and not self._interrupted:
                self.step()
                text = output.text
                if len(text) > given:
                    yield text[given:]
                    given = len(text)
        finally:
            self._interrupted = False
            self.abandon(request_id)
            self.events.extend(self.core.take_events())

    def submit(
        self, prompt_ids: list[int], params: SamplingParams, *, text: str | None = None, priority: int = 0, adapter: int = 0,
        salt: str = "",
    ) -> tuple[str, RequestOutput]:  # fmt: skip
        """A request's id, and its output, which grows with each `step`."""
        request_id = f"llm-{self._next_id}"
        self._next_id += 1
        params = self.defaults.fill(params, self.config.context_of(params) - len(prompt_ids))
        if self._seed is not None and params.seed is None:
            params = msgspec.structs.replace(params, seed=sample_seed(self._seed, self._next_id))
        ends = list(self.tokenizer.eos_token_ids)
        self.core.submit(Submit(request_id, prompt_ids, params, ends, priority, salt, adapter=adapter))
        samples = [Completion(i, logprobs=[] if params.logprobs is not None else None) for i in range(params.n)]
        streams = [TextStream(self.tokenizer, params) for _ in range(params.n)]
        output = RequestOutput(text, prompt_ids, samples)
        self._pending[request_id] = _Pending(output, streams)
        return request_id, output

    def abandon(self, request_id: str) -> None:
        if self._pending.pop(request_id, None) is not None:
            self.core.abort(Abort(request_id, "caller left"))

    def step(self) -> None:
        """What was submitted gets its next tokens."""
        with _uninterrupted():
            output, failed = self.core.step()
        self.events.extend(output.events)
        for delta in output.deltas:
            self._take(delta)
        for refused in failed:
            pending = self._pending.pop(refused.request_id or "", None)
            if pending is None:
                raise error_from(refused)
            pending.output.error = error_from(refused)

    def _take(self, delta: Delta) -> None:
        pending = self._pending.get(delta.request_id)
        if pending is None or pending.output.samples[delta.index].finish_reason:
            return
        sample = pending.output.samples[delta.index]
        text = pending.streams[delta.index].push(delta.token_ids, delta.finish_reason)
        sample.text += text.text
        sample.token_ids += delta.token_ids[: text.num_tokens]
        if sample.logprobs is not None and delta.logprobs:
            sample.logprobs += delta.logprobs[: text.num_tokens]
        if delta.embedding is not None:
            pending.output.pooled = delta.embedding
        if delta.prompt_logprobs is not None:
            pending.output.prompt_logprobs = delta.prompt_logprobs
        pending.output.num_cached = max(pending.output.num_cached, delta.num_cached if delta.index == 0 else 0)
        sample.timings, sample.score = delta.timings, delta.score
        sample.finish_reason, sample.stop_reason = text.finish_reason, text.stop
        if text.finish_reason and not delta.finish_reason:
            sample.timings = self.core.finish(Finish(delta.request_id, delta.index))
        if pending.output.finished:
            del self._pending[delta.request_id]


def _cosine_output(first: EmbeddingOutput, second: EmbeddingOutput) -> ScoreOutput:
    error = first.error or second.error
    score = 0.0 if error else cosine(first.embedding, second.embedding)
    return ScoreOutput([*first.prompt_token_ids, *second.prompt_token_ids], error, score)


def _reported(outputs: list[RequestOutput], is_list: bool) -> list[RequestOutput]:
    """Failures of prompts in a list are named with their indices, in their errors and in a warning. A single one is raised."""
    failed = [(i, output.error) for i, output in enumerate(outputs) if output.error is not None]
    for i, error in failed:
        if not is_list:
            raise error
        outputs[i].error = type(error)(f"Prompt {i}: {error.message}", fix=error.fix, param=error.param)
    if failed:
        which = ", ".join(str(i) for i, _ in failed[:10]) + (", ..." if len(failed) > 10 else "")
        warnings.warn(f"{len(failed)} of {len(outputs)} prompts failed ({which}); their outputs have .error.", stacklevel=4)
    return outputs


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
