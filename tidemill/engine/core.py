"""EngineCore: plan, run, commit. One object, no threads, no sockets; the process and the offline API both drive it."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from tidemill import events
from tidemill.config import EngineConfig, EngineOptions, fmt_bytes, resolve
from tidemill.errors import ConfigError, ContextTooLong, InvalidRequest, ModelFailed, QueueFull, TidemillError
from tidemill.events import Event, EventBuffer
from tidemill.frontend.structured import Grammars, Matcher, check_backend
from tidemill.frontend.tokenizer import Tokenizer
from tidemill.kernels import machine
from tidemill.kv.manager import KVManager
from tidemill.models.base import CausalLM, ProgressFn
from tidemill.models.registry import model_class
from tidemill.runner.base import Runner, StepResult
from tidemill.runner.cpu_runner import CpuRunner
from tidemill.sampling import Grammar
from tidemill.sched.clock import Clock, MonotonicClock
from tidemill.sched.plan import StepPlan
from tidemill.sched.policies import make_policy
from tidemill.sched.request import BACKGROUND, Request
from tidemill.sched.scheduler import Progress, Scheduler
from tidemill.weights.checkpoint import open_checkpoint
from tidemill.weights.locate import locate
from tidemill.wire import Abort, Delta, Finish, Pages, Refused, StepOutput, Submit, Timings, TokenLogprobs


@dataclass(slots=True)
class _Live:
    """A submitted request: its samples that have not ended."""

    samples: dict[int, int] = field(default_factory=dict)  # seq to index
    requests: dict[int, Request] = field(default_factory=dict)  # index to request
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    pooled: torch.Tensor | None = None


class EngineCore:
    def __init__(self, model: CausalLM, config: EngineConfig, clock: Clock | None = None) -> None:
        self.config = config
        self.model_config = model.config
        self._clock = clock or MonotonicClock()
        self._events = EventBuffer()
        self.runner = make_runner(model, config)
        self.scheduler = Scheduler(
            KVManager(config.num_pages + 1, config.page_size, config.prefix_caching),
            num_rows=config.max_requests,
            token_budget=config.token_budget,
            max_context=config.max_context,
            policy=make_policy(config.policy),
            clock=self._clock,
            emit=self._events,
            background_tokens=config.background_tokens,
            background_budget=config.background_budget,
        )
        self._in_flight: deque[tuple[StepPlan, Any, float]] = deque()  # launched, not yet collected; and when
        self._live: dict[str, _Live] = {}
        self._id_of: dict[int, str] = {}  # seq to request id
        self._matchers: dict[int, Matcher] = {}  # of requests whose answer must have a form, by seq
        self.tokenizer_path: Path | None = None  # where such requests find words for tokens
        self._grammars: Grammars | None = None
        self.before_admitted_run: Callable[[list[Event]], None] | None = None  # gets the events so far

    @classmethod
    def load(
        cls,
        options: EngineOptions,
        progress: ProgressFn | None = None,
    ) -> EngineCore:
        """From what a user typed to an engine that can run."""
        make_policy(options.policy)  # a wrong name is told before gigabytes are read
        check_backend(options.structured_backend)
        checkpoint = open_checkpoint(locate(options.model))
        architecture = model_class(checkpoint)
        model_config = architecture.read_config(checkpoint)
        config = resolve(options, model_config, machine.detect())
        machine.set_threads(config.threads)
        if options.load_format not in ("auto", "dummy"):
            raise ConfigError(f"load_format {options.load_format!r} is not available.", fix="Choose auto or dummy.")
        random = options.load_format == "dummy"
        method = f"{config.dtype}-fast" if config.fast_math else config.dtype
        core = cls(architecture.load(checkpoint, model_config, method, progress, config.device, random), config)
        core.tokenizer_path = checkpoint.path
        return core

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight)

    def has_grammar(self, grammar: Grammar) -> bool:
        """It need not be compiled first."""
        return self._grammars is not None and grammar in self._grammars

    def compile_grammar(self, grammar: Grammar) -> Matcher:
        """May take a while; may be called from another thread."""
        if self._grammars is None:
            if self.tokenizer_path is None:
                raise InvalidRequest("Without a tokenizer there is no form to keep to.", param="grammar")
            tokenizer = Tokenizer.load(self.tokenizer_path)
            self._grammars = Grammars.of(self.config.structured_backend, tokenizer, self.model_config.vocab_size)
        return self._grammars.compile(grammar)

    def submit(self, request: Submit, form: Matcher | None = None) -> None:
        """Queue a request, or raise what is wrong with it. `form`: what its answer must be, if that has just been compiled."""
        if request.request_id in self._live:
            raise InvalidRequest(f"A request with the id {request.request_id!r} is already running.", param="request_id")
        num_waiting = self.scheduler.num_waiting(request.priority >= BACKGROUND)
        if num_waiting + request.params.n > self.config.max_waiting and request.resumed is None:
            raise QueueFull(f"{num_waiting} requests are waiting; at most {self.config.max_waiting} may.", fix="Try again later.")
        self._check_prompt(request.prompt_ids, request.params.max_tokens)
        request.params.check_vocabulary(self.model_config.vocab_size)
        resumed = request.resumed
        matcher = None if request.params.grammar is None else self._matcher(request.params.grammar, form)
        made = self.scheduler.add(
            request.request_id,
            request.prompt_ids,
            request.params.seeded(),
            eos_token_ids=frozenset(t for t in request.eos_token_ids if 0 <= t < self.model_config.vocab_size),
            priority=request.priority,
            salt=request.salt,
            tenant=request.tenant,
            resumed=None if resumed is None else {sample.index: sample.output_ids for sample in resumed},
        )
        live = _Live()
        indexes = range(len(made)) if resumed is None else [sample.index for sample in resumed]
        for index, sample in zip(indexes, made, strict=True):
            live.samples[sample.seq] = index
            live.requests[index] = sample
            self._id_of[sample.seq] = request.request_id
            if matcher is not None:
                self._matchers[sample.seq] = mine = matcher.copy()
                mine.take(sample.tokens[sample.num_prompt :])
        self._live[request.request_id] = live

    def _matcher(self, grammar: Grammar, form: Matcher | None) -> Matcher:
        if self._grammars is None:
            form = self.compile_grammar(grammar)
        assert self._grammars is not None
        return self._grammars.matcher(grammar, form)

    def _check_prompt(self, prompt_ids: list[int], max_tokens: int | None) -> None:
        vocab_size, context = self.model_config.vocab_size, self.config.max_context
        if not prompt_ids:
            raise InvalidRequest("The prompt is empty.", fix="Give at least one token.", param="prompt")
        if min(prompt_ids) < 0 or max(prompt_ids) >= vocab_size:
            wrong = next(token for token in prompt_ids if not 0 <= token < vocab_size)
            raise InvalidRequest(f"The prompt holds token {wrong}; the model has tokens 0 to {vocab_size - 1}.", param="prompt")
        if len(prompt_ids) >= context:
            raise ContextTooLong(
                f"The prompt has {len(prompt_ids)} tokens; the context holds {context}, one of them for the answer.",
                fix=f"Shorten the prompt to {context - 1} tokens, or serve with a larger --max-context.",
                param="prompt",
            )
        if max_tokens is not None and len(prompt_ids) + max_tokens > context:
            raise ContextTooLong(
                f"{len(prompt_ids)} prompt tokens and max_tokens {max_tokens} make {len(prompt_ids) + max_tokens}; "
                f"the context holds {context}.",
                fix=f"Lower max_tokens to {context - len(prompt_ids)} or leave it out.",
                param="max_tokens",
            )

    def abort(self, message: Abort) -> None:
        """Unknown or ended requests are ignored: the answer may have crossed the abort on its way."""
        live = self._live.get(message.request_id)
        if live is None:
            return
        for index, request in list(live.requests.items()):
            if message.index is None or message.index == index:
                self.scheduler.abort(request, message.reason)
                self._forget(request.seq)

    def finish(self, message: Finish) -> Timings | None:
        """A sample is over for a reason only the frontend can see: its text reached a stop string."""
        live = self._live.get(message.request_id)
        request = live.requests.get(message.index) if live else None
        if request is None:
            return None
        self.scheduler.finish(request, "stop")
        self._forget(request.seq)
        return Timings(*request.spans(self._clock.now()))

    def pages(self) -> Pages:
        """Who holds which page. The engine stands still meanwhile, so it is for the asker to ask seldom."""
        begin = self._clock.now()
        holders = self.scheduler.holders()
        kinds = self.scheduler.kv.map([request.seq for request in holders])
        owners = [(request.request_id, len(self.scheduler.kv.table(request.seq))) for request in holders]
        return Pages(owners, kinds.tobytes(), self._clock.now() - begin)

    def take_events(self) -> list[Event]:
        """What was decided since the last step's output, by aborts for example."""
        return self._events.take()

    def step(self) -> tuple[StepOutput, list[Refused]]:
        """Launch a step and take the results of one: its own, or of the one before it where the runner works ahead."""
        plan = None
        try:
            started = self._clock.now()
            plan = self.scheduler.plan()
            if plan is not None:
                if plan.new_rows and self.before_admitted_run:
                    self.before_admitted_run(self._events.take())
                self._set_masks(plan)
                self._in_flight.append((plan, self.runner.launch(plan), started))
            if not self._in_flight or (plan is not None and len(self._in_flight) <= self.runner.steps_ahead):
                return StepOutput([], self._events.take()), []
            done, launched, started = self._in_flight.popleft()
            result = self.runner.collect(launched)
        except BaseException as error:  # Ctrl-C in a script, too, leaves pages behind that were never computed
            failed = self._fail(plan, error)
            if not isinstance(error, Exception):
                raise
            traceback.print_exc()
            return StepOutput([], self._events.take()), failed
        failed = self._fail_broken(done, result)
        progress = self.scheduler.commit(done, result.tokens)
        if self._matchers:
            progress = [self._advance_grammar(one, failed) for one in progress]
            progress = [one for one in progress if one.request.seq in self._id_of]
        now = self._clock.now()
        self._events(events.StepDone(now, done.step, now - started, len(progress)))
        return StepOutput(self._deltas(done, result, progress, now), self._events.take()), failed

    def _set_masks(self, plan: StepPlan) -> None:
        """The sampler is told which tokens may come."""
        items = plan.items if self._matchers else ()
        began = self._clock.now()
        self.runner.state.masks = masks = {
            item.row: self._matchers[item.seq].mask() for item in items if item.samples and item.seq in self._matchers
        }
        if masks:
            now = self._clock.now()
            self._events(events.MasksMade(now, len(masks), now - began))

    def _advance_grammar(self, progress: Progress, failed: list[Refused]) -> Progress:
        """A token has come; where the form allows nothing more, the answer is complete. Where it has become too much to follow,
        the request fails: it would end as if it were complete."""
        matcher = self._matchers.get(progress.request.seq)
        if matcher is None:
            return progress
        if not progress.finish_reason:
            matcher.take([progress.token_id])
        if matcher.error:
            request_id, what = self._id_of[progress.request.seq], matcher.error.splitlines()[0][:300]
            failed.append(refusal(request_id, InvalidRequest(f"The answer's form cannot be followed further: {what}")))
            self.abort(Abort(request_id, "its form cannot be followed"))
            return progress
        if progress.finish_reason or not matcher.is_over:
            return progress
        self.scheduler.finish(progress.request, "stop")
        return msgspec.structs.replace(progress, finish_reason="stop")

    def _fail_broken(self, plan: StepPlan, result: StepResult) -> list[Refused]:
        """Requests whose logits are not numbers fail alone."""
        failed: dict[str, Refused] = {}
        for item in plan.items if min(result.tokens.values(), default=0) < 0 else ():
            request_id = self._id_of.get(item.seq)
            if request_id is None or result.tokens.get(item.row, 0) >= 0:
                continue
            error = ModelFailed("The model's logits are not numbers on this request.", fix="Change the prompt or the parameters.")
            failed[request_id] = refusal(request_id, error)
            for request in list(self._live[request_id].requests.values()):
                self.scheduler.discard(request, "logits are not numbers")
                self._forget(request.seq)
        return list(failed.values())

    def _deltas(self, plan: StepPlan, result: StepResult, progress: list[Progress], now: float) -> list[Delta]:
        for item in plan.items if result.prompt_logprobs else ():
            entries = result.prompt_logprobs.get(item.row)
            live = self._live.get(self._id_of[item.seq]) if entries and item.seq in self._id_of else None
            if entries and live:
                if item.start == 0:
                    live.prompt_logprobs.clear()  # it was preempted on the way and started over
                live.prompt_logprobs += entries
        for item in plan.items if result.pooled else ():
            part = result.pooled.get(item.row)
            live = self._live.get(self._id_of[item.seq]) if part is not None and item.seq in self._id_of else None
            if part is not None and live:
                goes_on = live.pooled is not None and item.start > 0 and live.requests[0].params.pooling == "mean"
                live.pooled = live.pooled + part if goes_on and live.pooled is not None else part
        row_of = {item.seq: item.row for item in plan.items} if result.logprobs else {}
        deltas = []
        for done in progress:
            request = done.request
            request_id = self._id_of[request.seq]
            live = self._live[request_id]
            first, params = request.num_output == 1, request.params
            logprobs = result.logprobs.get(row_of[request.seq]) if row_of else None
            wants_prompt = first and params.prompt_logprobs is not None and live.samples[request.seq] == 0
            deltas.append(
                Delta(
                    request_id,
                    live.samples[request.seq],
                    [done.token_id],
                    done.finish_reason,
                    [logprobs] if logprobs else None,
                    list(live.prompt_logprobs) if wants_prompt else None,
                    request.num_cached,
                    Timings(*request.spans(now)) if done.finish_reason else None,
                    torch.nn.functional.normalize(live.pooled, dim=0).tolist() if first and live.pooled is not None else None,
                )
            )
            if done.finish_reason:
                self._forget(request.seq)
        return deltas

    def _fail(self, plan: StepPlan | None, error: BaseException) -> list[Refused]:
        """The step raised: its requests fail (all of them, if it was not even planned). The others start over, since they may
        share pages that the step had announced and never computed."""
        plans = [launched for launched, _, _ in self._in_flight] + ([] if plan is None else [plan])
        self._in_flight.clear()
        seqs = list(self._id_of) if plan is None else [item.seq for each in plans for item in each.items]
        failed = []
        for request_id in dict.fromkeys(self._id_of[seq] for seq in seqs if seq in self._id_of):
            self.abort(Abort(request_id, f"step failed: {type(error).__name__}"))
            what = f"The engine failed while computing this request ({type(error).__name__})."
            failed.append(refusal(request_id, TidemillError(what)))
        self.scheduler.drop_computed("a step failed")
        self.runner.state.discard_staged()
        return failed

    def _forget(self, seq: int) -> None:
        request_id = self._id_of.pop(seq)
        self._matchers.pop(seq, None)
        live = self._live[request_id]
        del live.requests[live.samples[seq]]
        if not live.requests:
            del self._live[request_id]


def refusal(request_id: str | None, error: TidemillError) -> Refused:
    return Refused(request_id, type(error).__name__, error.message, error.fix, error.param)


def make_runner(model: CausalLM, config: EngineConfig) -> Runner:
    if config.device == "cuda":
        from tidemill.runner.cuda_runner import CudaRunner  # needs Triton

        try:
            return CudaRunner(model, config)
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info()
            raise ConfigError(
                f"The GPU's memory ran out at start: weights {fmt_bytes(config.weight_bytes)}, KV cache "
                f"{fmt_bytes(config.kv_bytes)}, activations {fmt_bytes(config.activation_bytes)}; "
                f"{fmt_bytes(free)} of {fmt_bytes(total)} are left.",
                fix=f"Give less than {fmt_bytes(config.kv_bytes)} with --kv-memory, or stop what else uses the GPU.",
            ) from error
    return CpuRunner(model, config)
