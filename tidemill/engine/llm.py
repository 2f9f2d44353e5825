"""LLM: the engine in this process, for scripts. `LLM("smollm2").generate([...])`."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeAlias

import msgspec
import torch

from tidemill.capabilities import asked, check
from tidemill.engine.bars import LoadingBar, request_bar
from tidemill.engine.beam_outputs import BeamSearchOutput
from tidemill.engine.core import EngineCore
from tidemill.engine.link import error_from
from tidemill.engine.llm_inputs import (
    NO_LIMIT,
    PromptEncoder,
    conversation_list,
    located_options,
    params_list,
    prompt_list,
    shown,
    wants_bar,
)
from tidemill.engine.llm_outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    OutputBuilder,
    PoolingOutput,
    RequestOutput,
    ScoreOutput,
)
from tidemill.engine.load import load_core
from tidemill.engine.metrics import Metric, Metrics
from tidemill.engine.parts.adapters import AdapterStore
from tidemill.errors import EngineDead, InvalidRequest, TidemillError
from tidemill.frontend.sampling_defaults import sampling_defaults
from tidemill.frontend.scoring import check_scores, cosine, label_probs, pairs_of
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.types.events import Event, ModelLoaded
from tidemill.types.inputs import Segment, second_text
from tidemill.types.sampling import BeamSearchParams, SamplingParams, sample_seed
from tidemill.types.wire import Abort, Delta, Finish, Submit

_MAX_EVENTS = 100_000

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
Message: TypeAlias = dict[str, Any]
# By the names that vLLM has for what is computed: how the states of a prompt's tokens are pooled.
# None: as the model has it.
_POOLING_OF_TASK = {"embed": None, "token_embed": "none", "classify": "score", "score": "score"}


class LLM:
    """A model loaded in this process. Options are those of `EngineOptions`, or of vLLM's LLM. As a
    context manager it is closed at the end of the block.

    `seed`: of requests without one, so that a script gives the same answers each time. Without it
    each request draws its own.
    """

    def __init__(
        self,
        model: str = "smollm2",
        *,
        progress: bool = True,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        if seed is not None:
            SamplingParams(seed=seed)  # checked
        path, engine_options = located_options(model, options)
        check({*asked(engine_options), "LLM"})
        self.tokenizer = Tokenizer.load(
            path, engine_options.chat_template, engine_options.chat_template_kwargs
        )
        began = time.monotonic()
        with LoadingBar(enabled=progress) as bar:
            self._core: EngineCore | None = load_core(
                engine_options, lambda _, done, total: bar.show(done, total)
            )
        for note in self.core.config.notes:
            warnings.warn(f"LLM: {note}.", stacklevel=2)
        self._progress = progress
        self._next_id = 0
        self._pending: dict[str, OutputBuilder] = {}
        core = self.core
        self.config = core.config
        self.model_config = core.model_config
        chosen = engine_options.sampling_defaults, engine_options.default_max_tokens
        self.defaults = sampling_defaults(path, self.model_config.num_parameters, *chosen)
        self._seed = seed
        self._prompts = PromptEncoder(
            self.tokenizer, max(self.config.max_context, self.config.max_stream)
        )
        self._metrics, now = Metrics(), time.monotonic()
        self._metrics.take([ModelLoaded(now, str(path), self.config.memory_bytes, now - began)])
        self.events: deque[Event] = deque(maxlen=_MAX_EVENTS)  # of the last call
        self.last: RequestOutput | None = None  # the output of the last stream, with its timings
        self._interrupted = False
        self._ending: Callable[[], object] = core.close
        # when the script ends: what is cached goes to disk, its socket goes
        if self.config.kv_disk or self.config.kv_export:
            self._ending = weakref.finalize(self, core.close)
        self._adapters = {adapter.name: adapter.adapter_id for adapter in core.part(AdapterStore)}
        self._last_adapter = len(self._adapters)

    def close(self) -> None:
        """Free the memory of the weights and of the KV cache, end worker processes, and save what
        is cached on disk (`kv_disk`). Else this happens when the script ends. Safe to call
        twice."""
        ending, self._ending = self._ending, lambda: None
        ending()
        self._core = None
        self._pending.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def core(self) -> EngineCore:
        if self._core is None:
            raise EngineDead("This LLM is closed.", fix="Make another one.")
        return self._core

    def load_lora(self, name: str, path: str | os.PathLike[str]) -> None:
        """Load a LoRA adapter, under a name that is not in use."""
        if name in self._adapters:
            raise InvalidRequest(
                f"The adapter {name!r} is loaded already.", fix="Unload it first.", param="lora"
            )
        self.core.part(AdapterStore).load_now(self._last_adapter + 1, name, str(path))
        self._last_adapter += 1
        self._adapters[name] = self._last_adapter

    def unload_lora(self, name: str) -> None:
        self.core.part(AdapterStore).unload(self._adapter(name))
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
        """Complete texts or token ids. One set of parameters for all, or one each; `lora`: the name
        of an adapter, likewise.

        A prompt is a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}. A
        prompt of a list that cannot be served fails alone: its output has `error`.
        """
        batch, is_list = prompt_list(prompts)
        return self._run(
            batch,
            is_list,
            self._prompts.encode,
            sampling_params,
            wants_bar(progress, use_tqdm),
            priority,
            lora,
        )

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
        """Reply to one conversation (a list of messages) or many. One of many that cannot be served
        fails alone."""
        batch, is_list = conversation_list(messages)

        def encode(conversation: Any) -> tuple[str | None, list[int]]:
            template_options = {
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
                "variables": chat_template_kwargs,
            }
            return None, self._prompts.encode_chat(
                conversation, continue_final_message=continue_final_message, **template_options
            )

        return self._run(
            batch, is_list, encode, sampling_params, wants_bar(progress, use_tqdm), 0, lora
        )

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        progress: bool | None = None,
        use_tqdm: bool | Callable[..., Any] | None = None,
        lora: str | Sequence[str | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """The best `params.beam_width` outputs for each prompt, as Transformers' beam search finds
        them. Prompts as in `generate`."""
        if not isinstance(params, BeamSearchParams):
            what = f"beam_search() takes BeamSearchParams; got {shown(params)}."
            raise InvalidRequest(
                what, fix="Write BeamSearchParams(beam_width=4, max_tokens=100).", param="params"
            )
        batch, is_list = prompt_list(prompts)
        outputs = self._run(
            batch,
            is_list,
            self._prompts.encode,
            params.sampling(),
            wants_bar(progress, use_tqdm),
            0,
            lora,
        )
        return [
            BeamSearchOutput.of(
                self.tokenizer,
                output.prompt_token_ids,
                output.samples,
                output.error,
                params.include_stop_str_in_output,
            )
            for output in outputs
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
        """Embeddings of texts or token ids. `pooling`: mean, last or cls; by default the model's
        own, or the mean. `truncate_prompt_tokens`: keep so many of each text, -1: what the model
        takes; otherwise a text that is too long fails."""
        if pooling == "none":
            raise InvalidRequest(
                "embed makes one vector of a prompt.",
                fix="Ask a server's /pooling for one of each token.",
            )
        batch, is_list = prompt_list(prompts)
        params = SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling or self._own_pooling)
        self.model_config.check_pooling("mean" if params.pooling == "score" else params.pooling)
        encode = partial(self._encode_cut, num=self._num_kept(truncate_prompt_tokens))
        outputs = self._run(batch, is_list, encode, params, wants_bar(progress, use_tqdm), 0, None)
        return [
            EmbeddingOutput(output.prompt_token_ids, output.error, output.pooled or [])
            for output in outputs
        ]

    def score(
        self,
        first: str | Sequence[str],
        second: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        progress: bool | None = None,
        use_tqdm: bool | Callable[..., Any] | None = None,
    ) -> list[ScoreOutput]:
        """Scores of one text with each of a list, or of the texts of two lists: by a cross-encoder,
        or the cosine of embeddings. `truncate_prompt_tokens`: as of `embed`."""
        texts = [
            [texts_given] if isinstance(texts_given, str) else list(texts_given)
            for texts_given in (first, second)
        ]
        pairs = pairs_of(texts[0], texts[1], ("first", "second"), most=NO_LIMIT)
        most, progress = self._num_kept(truncate_prompt_tokens), wants_bar(progress, use_tqdm)
        if not check_scores(self.model_config):
            inputs = [*texts[0], *texts[1]]
            vectors = self.embed(
                inputs, truncate_prompt_tokens=truncate_prompt_tokens, progress=progress
            )
            return [_cosine_output(vectors[i], vectors[len(texts[0]) + j]) for i, j in pairs]
        encode_options: Any = {
            "max_tokens": most or self.config.max_context,
            "truncate": most is not None,
        }
        encoded = [
            self.tokenizer.encode_pair(texts[0][i], texts[1][j], **encode_options) for i, j in pairs
        ]
        params = SamplingParams(max_tokens=1, temperature=0.0, pooling="score")
        segments = [second_text(start, len(ids)) for ids, start in encoded]
        outputs = self._run(
            [ids for ids, _ in encoded],
            True,
            self._prompts.encode,
            params,
            progress,
            0,
            None,
            segments,
        )
        return [
            ScoreOutput(output.prompt_token_ids, output.error, (output.pooled or [0.0])[0])
            for output in outputs
        ]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool | Callable[..., Any] | None = None,
    ) -> list[ClassificationOutput]:
        """Probabilities of a classifier's labels for each text."""
        outputs = self._pooled(prompts, "score", use_tqdm)
        return [
            ClassificationOutput(output.prompt_token_ids, output.error, self._label_probs(output))
            for output in outputs
        ]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_task: str | None = None,
        use_tqdm: bool | Callable[..., Any] | None = None,
    ) -> list[PoolingOutput]:
        """Runs a pooling model on prompts and returns its tensors. `pooling_task`, in vLLM's words:
        embed, token_embed (a vector for each token), classify or score; by default classify for a
        cross-encoder or classifier, embed for others."""
        task = pooling_task or ("classify" if self.model_config.own_pooling == "score" else "embed")
        if task not in _POOLING_OF_TASK:
            fix = f"Choose {', '.join(_POOLING_OF_TASK)}."
            raise InvalidRequest(
                f"There is no pooling_task {task!r}.", fix=fix, param="pooling_task"
            )
        if task == "embed":
            self.model_config.check_pooling(
                "mean" if self._own_pooling == "score" else self._own_pooling
            )
        pooled = self._pooled(prompts, _POOLING_OF_TASK[task], use_tqdm)
        outputs = [PoolingOutput(output.prompt_token_ids, output.error) for output in pooled]
        for output, pooled_output in zip(outputs, pooled, strict=True):
            values = (
                self._label_probs(pooled_output)
                if task == "classify"
                else pooled_output.pooled or []
            )
            shape = (
                (len(pooled_output.prompt_token_ids), -1)
                if task == "token_embed" and values
                else (len(values),)
            )
            output.data = torch.tensor(values).view(shape)
        return outputs

    def _pooled(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: str | None,
        use_tqdm: bool | Callable[..., Any] | None,
    ) -> list[RequestOutput]:
        batch, is_list = prompt_list(prompts)
        params = SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling or self._own_pooling)
        self.model_config.check_pooling(params.pooling)
        return self._run(
            batch, is_list, self._prompts.encode, params, wants_bar(None, use_tqdm), 0, None
        )

    @property
    def _own_pooling(self) -> str:
        return self.model_config.own_pooling or self.model_config.embeds_by or "mean"

    def _label_probs(self, output: RequestOutput) -> list[float]:
        return label_probs(output.pooled, self.model_config) if output.pooled else []

    def _num_kept(self, num: int | None) -> int | None:
        if num == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens must be -1, or 1 or more.", param="truncate_prompt_tokens"
            )
        return (
            num
            if num is None
            else self.config.max_context
            if num < 0
            else min(num, self.config.max_context)
        )

    def _encode_cut(self, prompt: Any, num: int | None) -> tuple[str | None, list[int]]:
        if num is None or not isinstance(prompt, str):
            text, ids = self._prompts.encode(prompt)
            return text, ids[:num]
        return prompt, self.tokenizer.encode_cut(prompt, num)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora: str | None = None,
    ) -> Iterator[str]:
        """Text of one completion as it is generated. Leaving the loop early ends the request."""
        yield from self._stream(self._prompts.encode(prompt)[1], sampling_params, lora)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        lora: str | None = None,
    ) -> Iterator[str]:
        yield from self._stream(self._prompts.encode_chat(messages), sampling_params, lora)

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of a request that gives none."""
        return self.defaults.fill(SamplingParams(), self.config.max_context)

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def apply_chat_template(
        self, messages: Sequence[Message], **template_options: Any
    ) -> str | list[int]:
        """The prompt that a conversation becomes. `template_options`: as of
        `Tokenizer.apply_chat_template`."""
        return self.tokenizer.apply_chat_template(messages, **template_options)

    def get_metrics(self) -> list[Metric]:
        """The engine's metrics since it was loaded, as the server exports them."""
        return self._metrics.read()

    def interrupt(self) -> None:
        """End the running stream after the step at hand. Safe to call from a signal handler."""
        self._interrupted = True

    # ---- inside

    def _run(
        self,
        batch: list[Any],
        is_list: bool,
        encode: Callable[[Any], tuple[str | None, list[int]]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool | None,
        priority: int,
        lora: str | Sequence[str | None] | None,
        segments: Sequence[Sequence[Segment]] = (),
    ) -> list[RequestOutput]:
        each, adapters = params_list(params, len(batch)), self._adapter_list(lora, len(batch))
        self.events.clear()
        outputs: list[RequestOutput] = []
        ids: list[str] = []
        try:
            for prompt, own_params, adapter, own in zip(
                batch, each, adapters, segments or [()] * len(batch), strict=True
            ):
                try:
                    text, prompt_ids = encode(prompt)
                    request_id, output = self.submit(
                        prompt_ids,
                        own_params,
                        text=text,
                        priority=priority,
                        adapter=adapter,
                        segments=own,
                    )
                    ids.append(request_id)
                    outputs.append(output)
                except TidemillError as error:
                    outputs.append(
                        RequestOutput(
                            prompt if isinstance(prompt, str) else None, [], [], error=error
                        )
                    )
                    if not is_list:
                        raise
            with request_bar(self._progress if progress is None else progress, len(ids)) as (
                bar,
                task,
            ):
                unfinished = set(ids)
                while unfinished:
                    self.step()
                    unfinished &= self._pending.keys()
                    bar.update(task, completed=len(ids) - len(unfinished))
            return _reported(outputs, is_list)
        finally:
            self._leave(*ids)  # after an error or Ctrl-C

    def _adapter(self, name: str) -> int:
        if name not in self._adapters:
            known = ", ".join(map(repr, self._adapters)) or "none"
            raise InvalidRequest(
                f"There is no adapter {name!r}.", fix=f"Loaded are: {known}.", param="lora"
            )
        return self._adapters[name]

    def _adapter_list(self, lora: Any, num: int) -> list[int]:
        """Their numbers, 0 for none."""
        each = [lora] * num if lora is None or isinstance(lora, str) else list(lora)
        if len(each) != num or not all(name is None or isinstance(name, str) for name in each):
            what = f"lora is the name of an adapter, or one or None for each of {num} prompts"
            raise InvalidRequest(f"{what}; got {shown(lora)}.", param="lora")
        return [self._adapter(name) if name else 0 for name in each]

    def _stream(
        self, prompt_ids: list[int], params: SamplingParams | None, lora: str | None
    ) -> Iterator[str]:
        (checked,) = params_list(params, 1)
        (adapter,) = self._adapter_list(lora, 1)
        self.events.clear()
        request_id, output = self.submit(prompt_ids, checked, adapter=adapter)
        self.last = output
        num_yielded = 0
        try:
            while request_id in self._pending and not self._interrupted:
                self.step()
                text = output.text
                if len(text) > num_yielded:
                    yield text[num_yielded:]
                    num_yielded = len(text)
        finally:
            self._interrupted = False
            self._leave(request_id)

    def submit(
        self, prompt_ids: list[int], params: SamplingParams, *, text: str | None = None, priority: int = 0, adapter: int = 0,
        salt: str = "", segments: Sequence[Segment] = (),
    ) -> tuple[str, RequestOutput]:  # fmt: skip
        """A request's id, and its output, which grows with each `step`."""
        request_id = f"llm-{self._next_id}"
        self._next_id += 1
        params = self.defaults.fill(params, self.config.context_of(params) - len(prompt_ids))
        if self._seed is not None and params.seed is None:
            params = msgspec.structs.replace(params, seed=sample_seed(self._seed, self._next_id))
        ends = list(self.tokenizer.eos_token_ids)
        self.core.submit(
            Submit(
                request_id,
                prompt_ids,
                params,
                ends,
                priority,
                salt,
                adapter=adapter,
                segments=list(segments),
            )
        )
        pending = self._pending[request_id] = OutputBuilder(
            self.tokenizer, request_id, text, prompt_ids, params
        )
        return request_id, pending.output

    def abandon(self, request_id: str) -> None:
        if self._pending.pop(request_id, None) is not None:
            self.core.abort(Abort(request_id, "caller left"))

    def _leave(self, *request_ids: str) -> None:
        for request_id in request_ids:
            self.abandon(request_id)
        if self._core is not None:
            self._note(self._core.take_events())

    def step(self) -> None:
        """Generates the next tokens of the submitted requests."""
        with _uninterrupted():
            output, failed = self.core.step()
        self._note(output.events)
        for delta in output.deltas:
            self._take(delta)
        for refused in failed:
            pending = self._pending.pop(refused.request_id or "", None)
            if pending is None:
                raise error_from(refused)
            pending.output.error = error_from(refused)

    def _note(self, events: list[Event]) -> None:
        self.events.extend(events)
        self._metrics.take(events)

    def _take(self, delta: Delta) -> None:
        pending = self._pending.get(delta.request_id)
        if pending is None:
            return
        if pending.take(delta):
            pending.output.samples[delta.index].timings = self.core.finish(
                Finish(delta.request_id, delta.index)
            )
        if pending.output.finished:
            del self._pending[delta.request_id]


def _cosine_output(first: EmbeddingOutput, second: EmbeddingOutput) -> ScoreOutput:
    error = first.error or second.error
    score = 0.0 if error else cosine(first.embedding, second.embedding)
    return ScoreOutput([*first.prompt_token_ids, *second.prompt_token_ids], error, score)


def _reported(outputs: list[RequestOutput], is_list: bool) -> list[RequestOutput]:
    """Failures of prompts in a list are named with their indices, in their errors and in a warning.
    A single one is raised."""
    failed = [(i, output.error) for i, output in enumerate(outputs) if output.error is not None]
    for i, error in failed:
        if not is_list:
            raise error
        outputs[i].error = type(error)(
            f"Prompt {i}: {error.message}", fix=error.fix, param=error.param
        )
    if failed:
        which = ", ".join(str(i) for i, _ in failed[:10]) + (", ..." if len(failed) > 10 else "")
        warnings.warn(
            f"{len(failed)} of {len(outputs)} prompts failed ({which}); their outputs have .error.",
            stacklevel=4,
        )
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
