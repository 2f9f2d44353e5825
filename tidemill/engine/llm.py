"""LLM: the engine in this process, for scripts. `LLM("smollm2").generate([...])`."""

from __future__ import annotations

import difflib
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Self, TypeAlias

import msgspec
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tidemill.config import EngineOptions, parse_bytes
from tidemill.engine.beam_outputs import BeamSearchOutput
from tidemill.engine.core import EngineCore
from tidemill.engine.link import error_from
from tidemill.errors import ConfigError, InvalidRequest, TidemillError
from tidemill.events import Event
from tidemill.frontend.output import TextStream
from tidemill.frontend.sampling_defaults import sampling_defaults
from tidemill.frontend.scoring import check_scores, cosine, pairs_of
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.sampling import BeamSearchParams, SamplingParams, sample_seed
from tidemill.weights.locate import locate
from tidemill.wire import Abort, Delta, Finish, Submit, Timings, TokenLogprobs

_MAX_EVENTS = 100_000
_LORAS = 8  # slots where vLLM's enable_lora is given, and no number
_NO_LIMIT = 2**31 - 1  # a script may queue any number of requests

# vLLM's names of options: those that are ours under another name, those that cannot change an answer, and those of which only
# one value can be had.
_SAME = {
    "max_model_len": "max_context",
    "max_num_seqs": "max_requests",
    "max_num_batched_tokens": "token_budget",
    "block_size": "page_size",
    "enable_prefix_caching": "prefix_caching",
    "kv_cache_memory_bytes": "kv_memory_bytes",
    "served_model_name": "served_name",
    "kv_memory": "kv_memory_bytes",
}
_WITHOUT_EFFECT = frozenset({
    "gpu_memory_utilization", "enforce_eager", "trust_remote_code", "disable_log_stats", "download_dir", "swap_space",
    "cpu_offload_gb", "max_seq_len_to_capture", "disable_custom_all_reduce", "enable_chunked_prefill", "max_logprobs",
    "tokenizer_mode", "disable_cascade_attn", "compilation_config", "distributed_executor_backend",
})  # fmt: skip
_ONLY: dict[str, tuple[Any, ...]] = {
    "tensor_parallel_size": (1,), "pipeline_parallel_size": (1,), "data_parallel_size": (1,), "quantization": (None, "gguf"),
    "tokenizer": (None,), "revision": (None,), "tokenizer_revision": (None,), "kv_cache_dtype": (None, "auto"),
    "speculative_config": (None,), "hf_overrides": (None,), "skip_tokenizer_init": (False,),
    "runner": (None, "auto", "generate", "pooling"), "task": (None, "auto", "generate", "embed", "score"),
}  # fmt: skip

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
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
    stop_reason: str | int | None = None  # the stop string or token that ended it
    score: float | None = None  # of beam search


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt. If that prompt failed, `error` says why, and its `outputs` cannot be read: they raise it."""

    prompt: str | None
    prompt_token_ids: list[int]
    samples: list[Completion]
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached: int = 0  # prompt tokens found in the prefix cache
    error: TidemillError | None = None
    pooled: list[float] | None = None  # its embedding or scores, if they were asked for

    @property
    def outputs(self) -> list[Completion]:
        if self.error is not None:
            raise self.error
        return self.samples

    @property
    def text(self) -> str:
        """Of the first sample."""
        return self.outputs[0].text

    @property
    def finished(self) -> bool:
        return self.error is not None or all(sample.finish_reason for sample in self.samples)


@dataclass(slots=True)
class _Pooled:
    prompt_token_ids: list[int]
    error: TidemillError | None = None

    @property
    def outputs(self) -> Self:
        """As vLLM has it: `output.outputs.embedding`."""
        if self.error is not None:
            raise self.error
        return self


@dataclass(slots=True)
class EmbeddingOutput(_Pooled):
    embedding: list[float] = field(default_factory=list)


@dataclass(slots=True)
class ScoreOutput(_Pooled):
    score: float = 0.0


@dataclass(slots=True)
class _Pending:
    output: RequestOutput
    streams: list[TextStream]


class LLM:
    """A model loaded in this process. Options are those of `EngineOptions`, or of vLLM's LLM.

    `seed`: of requests without one, so that a script gives the same answers each time. Without it each request draws its own.
    """

    def __init__(self, model: str = "smollm2", *, progress: bool = True, seed: int | None = None, **options: Any) -> None:
        settings = _engine_options(options, model)
        if seed is not None:
            SamplingParams(seed=seed)  # checked
        path = locate(model, fetch=True)
        defaults: dict[str, Any] = {"model": str(path), "max_waiting": _NO_LIMIT}
        engine_options = EngineOptions(**defaults | settings)
        self.tokenizer = Tokenizer.load(path, engine_options.chat_template)
        with _loading_bar(progress) as (bar, task):
            self.core = EngineCore.load(
                engine_options,
                lambda _, done, total: bar.update(task, completed=done, total=total),
            )
        self._progress = progress
        self._next_id = 0
        self._pending: dict[str, _Pending] = {}
        self.config = self.core.config
        self.model_config = self.core.model_config
        chosen = engine_options.sampling_defaults, engine_options.default_max_tokens
        self.defaults = sampling_defaults(path, self.model_config.num_parameters, *chosen)
        self._seed = seed
        self.events: deque[Event] = deque(maxlen=_MAX_EVENTS)  # of the last call
        self.last: RequestOutput | None = None  # the output of the last stream, with its timings
        self._interrupted = False
        self._adapters = {adapter.name: adapter.adapter_id for adapter in self.core.adapters}
        self._last_adapter = len(self._adapters)

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
        batch, is_list = _prompt_list(prompts)
        return self._run(batch, is_list, self._encode, sampling_params, _shows(progress, use_tqdm), priority, lora)

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
        batch, is_list = _conversation_list(messages)

        def encode(conversation: Any) -> tuple[str | None, list[int]]:
            how = {"tools": tools, "add_generation_prompt": add_generation_prompt, "variables": chat_template_kwargs}
            return None, self._encode_chat(conversation, continue_final_message=continue_final_message, **how)

        return self._run(batch, is_list, encode, sampling_params, _shows(progress, use_tqdm), 0, lora)

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
            what = f"beam_search() takes BeamSearchParams; got {_shown(params)}."
            raise InvalidRequest(what, fix="Write BeamSearchParams(beam_width=4, max_tokens=100).", param="params")
        batch, is_list = _prompt_list(prompts)
        made = self._run(batch, is_list, self._encode, params.sampling(), _shows(progress, use_tqdm), 0, lora)
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
        batch, is_list = _prompt_list(prompts)
        params = SamplingParams(max_tokens=1, temperature=0.0, pooling=pooling or self.model_config.own_pooling or "mean")
        self.model_config.check_pooling("mean" if params.pooling == "score" else params.pooling)
        encode = partial(self._encode_cut, num=self._num_kept(truncate_prompt_tokens))
        made = self._run(batch, is_list, encode, params, _shows(progress, use_tqdm), 0, None)
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
        most, shows = self._num_kept(truncate_prompt_tokens), _shows(progress, use_tqdm)
        if not check_scores(self.model_config):
            given = [*texts[0], *texts[1]]
            made = self.embed(given, truncate_prompt_tokens=truncate_prompt_tokens, progress=shows)
            return [_cosine_output(made[i], made[len(texts[0]) + j]) for i, j in pairs]
        how: Any = {"max_tokens": most or self.config.max_context, "truncate": most is not None}
        encoded = [self.tokenizer.encode_pair(texts[0][i], texts[1][j], **how) for i, j in pairs]
        params = [SamplingParams(max_tokens=1, temperature=0.0, pooling="score", pair_start=start) for _, start in encoded]
        outputs = self._run([ids for ids, _ in encoded], True, self._encode, params, shows, 0, None)
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
            prompt = _of_mapping(prompt)
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt, max_tokens=self.config.max_context)
        if not isinstance(prompt, Sequence) or not all(type(token) is int for token in prompt):
            raise InvalidRequest(
                f"A prompt is a text or a list of token ids; got {_shown(prompt)}.",
                fix='Give "text", [1, 2, 3], {"prompt": "text"} or {"prompt_token_ids": [1, 2, 3]}.',
                param="prompt",
            )
        return None, list(prompt)

    def _encode_chat(self, messages: Any, **how: Any) -> list[int]:
        _check_messages(messages)
        return self.tokenizer.encode_chat(messages, max_tokens=self.config.max_context, **how)

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
        each, adapters = _params_list(params, len(batch)), self._adapter_list(lora, len(batch))
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
            with _request_bar(self._progress if progress is None else progress, len(ids)) as (bar, task):
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
            raise InvalidRequest(f"{what}; got {_shown(lora)}.", param="lora")
        return [self._adapter(one) if one else 0 for one in each]

    def _stream(self, prompt_ids: list[int], params: SamplingParams | None, lora: str | None) -> Iterator[str]:
        (checked,) = _params_list(params, 1)
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
        params = self.defaults.fill(params, self.config.max_context - len(prompt_ids))
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


# ---- what a script gives


def _engine_options(given: dict[str, Any], model: str) -> dict[str, Any]:
    """The fields of EngineOptions. Options of vLLM that cannot change an answer are dropped with a warning."""
    known = {field.name for field in fields(EngineOptions)} - {"model"}
    made: dict[str, Any] = {}
    dropped = []
    if given.pop("enable_lora", None):
        made["max_loras"] = _LORAS
    for name, value in given.items():
        target = _SAME.get(name, name)
        if target in known:
            if target in made and target != "max_loras":
                raise ConfigError(f"{target} is given twice, also as {name}.", fix="Give one.", param=name)
            if value is not None:
                made[target] = value
        elif name in _ONLY:
            if value not in _ONLY[name] and not (name == "tokenizer" and value == model):
                raise ConfigError(f"{name}={value!r} is not supported.", fix=f"Leave {name} out.", param=name)
        elif name in _WITHOUT_EFFECT:
            dropped.append(name)
        else:
            nearest = difflib.get_close_matches(name, [*known, *_SAME, *_ONLY, "progress", "seed"], n=1, cutoff=0.5)
            fix = f"Did you mean {nearest[0]}?" if nearest else f"There are {', '.join(sorted(known))}."
            raise ConfigError(f"LLM has no option {name!r}.", fix=fix, param=name)
    if dropped:
        warnings.warn(f"LLM: without effect: {', '.join(sorted(dropped))}.", stacklevel=3)
    if "dtype" in made:  # also as torch.float32
        dtype = str(made["dtype"]).removeprefix("torch.")
        made["dtype"] = {"float": "float32"}.get(dtype, dtype)
    if isinstance(made.get("loras"), Mapping):
        made["loras"] = tuple(f"{name}={path}" for name, path in made["loras"].items())
    if isinstance(made.get("kv_memory_bytes"), str):
        made["kv_memory_bytes"] = parse_bytes(made["kv_memory_bytes"])
    return made


def _params_list(params: Any, num: int) -> list[SamplingParams]:
    each = [params or SamplingParams()] * num if params is None or isinstance(params, SamplingParams) else params
    if not isinstance(each, Sequence) or not all(isinstance(one, SamplingParams) for one in each):
        raise InvalidRequest(
            f"sampling_params is a SamplingParams or a list of them; got {_shown(params)}.",
            fix="Write SamplingParams(temperature=0, max_tokens=100).",
            param="sampling_params",
        )
    if len(each) != num:
        raise InvalidRequest(f"{num} prompts and {len(each)} sets of sampling parameters.", param="sampling_params")
    return list(each)


def _prompt_list(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts, and whether they came as a list of them."""
    if isinstance(prompts, str | Mapping):
        return [prompts], False
    if not isinstance(prompts, Sequence):
        raise InvalidRequest(
            f"generate() takes a prompt or a list of prompts; got {_shown(prompts)}.",
            fix='Give "text", a list of token ids, or a list of these.',
            param="prompts",
        )
    is_ids = len(prompts) > 0 and isinstance(prompts[0], int)
    return ([prompts], False) if is_ids else (list(prompts), True)


def _conversation_list(messages: Any) -> tuple[list[Any], bool]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        _check_messages(messages)
    return ([messages], False) if isinstance(messages[0], Mapping) else (list(messages), True)


def _check_messages(messages: Any) -> None:
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str) and len(messages) > 0
    if not is_list or not all(isinstance(message, Mapping) and "role" in message for message in messages):
        raise InvalidRequest(
            f"chat() takes a list of messages; got {_shown(messages)}.",
            fix='Write [{"role": "user", "content": "text"}], or use generate() to continue a text.',
            param="messages",
        )


def _of_mapping(prompt: Mapping[str, Any]) -> Any:
    """vLLM's {"prompt": text} and {"prompt_token_ids": ids}; of both, the ids are the prompt."""
    unknown = [name for name, value in prompt.items() if name not in ("prompt", "prompt_token_ids", "cache_salt") and value]
    if unknown or (prompt.get("prompt") is None and prompt.get("prompt_token_ids") is None):
        what = f"not {unknown[0]!r}" if unknown else "neither is there"
        raise InvalidRequest(f"A prompt as a dict has prompt or prompt_token_ids; {what}.", param="prompt")
    return prompt["prompt"] if prompt.get("prompt_token_ids") is None else prompt["prompt_token_ids"]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:50]}... ({type(value).__name__})"


def _shows(progress: bool | None, use_tqdm: bool | Callable[..., Any] | None) -> bool | None:
    """`use_tqdm` is vLLM's name of `progress`; a tqdm class is taken as True."""
    return progress if use_tqdm is None else bool(use_tqdm)


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
