"""EngineCore: plan, run, commit. One object, no threads, no sockets, no torch."""

from __future__ import annotations

import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from tidemill import events
from tidemill.config import EngineConfig, fmt_bytes
from tidemill.engine import kv_saving
from tidemill.engine.adapters import Adapter, AdapterStore
from tidemill.engine.beams import BeamSearches, params_of_a_beam
from tidemill.engine.drafting import NOTHING_DRAFTED, Drafted, Drafting
from tidemill.engine.endings import Endings
from tidemill.engine.host_times import HostTimes
from tidemill.engine.outputs import Live, make_deltas
from tidemill.engine.refusals import nothing_to_draw, refusal
from tidemill.engine.structured import StructuredOutput
from tidemill.errors import InvalidRequest, TidemillError, WeightsLost, WorkerLost
from tidemill.events import Event, EventBuffer
from tidemill.frontend.structured import Matcher
from tidemill.kv.manager import KVManager
from tidemill.kv.tiers import Tiers
from tidemill.kv_policy import CachePolicy, settle
from tidemill.model_config import ModelConfig
from tidemill.runner.base import Ranks, Runner, StepResult
from tidemill.runner.spec import SLOPES, Drafter
from tidemill.sampling import Grammar, SamplingParams
from tidemill.sched.clock import Clock, MonotonicClock
from tidemill.sched.plan import StepPlan
from tidemill.sched.policies import make_policy
from tidemill.sched.progress import Progress
from tidemill.sched.queue import check_room
from tidemill.sched.request import HANDED_OVER, Request, Status
from tidemill.sched.scheduler import Scheduler
from tidemill.wire import Abort, Delta, Expect, Finish, Pages, Refused, Renew, Resumed, StepOutput, Submit, Timings

_MAX_FAILED_STEPS = 3  # in a row: then the device is taken to be broken, and the engine process ends to be replaced
_MOVES_S = 0.002  # waited for page moves, before messages are looked at again
_COUNT_EVERY = 64  # steps between two counts of the tokens that experts got


class InFlight(msgspec.Struct, frozen=True):
    """A step that was launched and is not collected."""

    plan: StepPlan
    launched: Any
    started_s: float
    is_ahead: bool  # it was launched before the one before it was collected
    drafted: Drafted = NOTHING_DRAFTED
    launch_s: float = 0.0  # on the host


@dataclass(slots=True)
class Parts:
    """The components of an engine, besides the scheduler. `engine/load.py` makes them of a model, a simulation of a cost
    model."""

    runner: Runner
    model_config: ModelConfig
    structured: StructuredOutput
    drafters: Sequence[Drafter] = ()
    tiers: Tiers | None = None
    take_expert_counts: Callable[[], dict[int, list[int]]] = dict  # by layer: tokens that each expert got
    ranks: Ranks | None = None  # if the runner is of several processes
    take_weight_reads: Callable[[], tuple[int, float, int, int, int] | None] = lambda: None  # as events.WeightsStreamed has them


class EngineCore:
    def __init__(
        self,
        parts: Parts,
        config: EngineConfig,
        clock: Clock | None = None,
        emit: EventBuffer | None = None,
    ) -> None:
        """`emit`: has the events of its making."""
        self.config = config
        self.model_config = parts.model_config
        self._clock = clock or MonotonicClock()
        self._events = emit or EventBuffer()
        self.host_times = HostTimes(self._clock)
        self.runner, self.ranks = parts.runner, parts.ranks
        if self.runner.fallback:
            self.config = replace(config, reasons={**config.reasons, "kernels": self.runner.fallback})
            self._events(events.KernelsFellBack(self._clock.now(), self.runner.fallback))
        if config.pipeline_parallel > 1:
            why = config.reasons["pipeline_layers"]
            self._events(events.LayersDivided(self._clock.now(), config.pipeline_layers, why))
        for trial in getattr(self.runner, "nano", ()):
            tried = trial.decodes, trial.size, trial.whole_ms, trial.halves_ms, trial.is_taken
            self._events(events.NanoBatchingTried(self._clock.now(), *tried))
        self.scheduler = Scheduler(
            KVManager(
                config.num_pages + 1,
                config.page_size,
                config.prefix_caching,
                config.layout.groups,
                config.token_budget,
                config.prefix_index,
                parts.tiers,
                config.max_pinned,
                tells_empty=config.kv_layout == "virtual",
            ),
            num_rows=config.max_requests,
            token_budget=config.token_budget,
            max_context=config.max_context,
            policy=make_policy(config.policy, config.batch_window_s, config.step_cost),
            clock=self._clock,
            emit=self._events,
            background_tokens=config.background_tokens,
            background_budget=config.background_budget,
            whole_prompts=parts.model_config.pooler is not None,
            order=config.queue_order,
            evict=config.evict,
            max_draws=config.max_draws,
            policy_bytes=config.policy_bytes,
        )
        self.structured = parts.structured
        self.drafting = None
        if parts.drafters:
            draft_settings = (config.max_drafts, SLOPES[config.device], self._clock, self._events, config.adaptive_drafts)
            self.drafting = Drafting(parts.drafters, *draft_settings)
        self.adapters = AdapterStore(self.runner.loras, config, self._clock.now, self._events, weakly(self._end_holds))
        self._adapter_of: dict[str, Adapter] = {}  # by request id
        # Requests whose adapter is in no slot yet, in their order.
        self._awaiting: dict[str, tuple[Submit, Matcher | None, CachePolicy | None]] = {}
        self._take_expert_counts = parts.take_expert_counts
        self._take_expert_counts()  # what starting computed
        self._take_weight_reads = parts.take_weight_reads
        self._streams_weights = self._take_weight_reads() is not None
        self._num_uncounted_steps = 0  # since experts' tokens were counted
        self._num_failed_steps = 0  # in a row
        self.in_flight: deque[InFlight] = deque()
        self._is_closed = False
        self._endings = Endings(self.scheduler, self.runner, self._clock, self._take_moves) if config.export_slots else None
        self._collected_s = 0.0  # when the last step was
        self.live: dict[str, Live] = {}
        self._live_of: dict[int, Live] = {}  # by seq
        self.beams = BeamSearches(self.scheduler, self._events, weakly(self._adopt), weakly(self._forget))
        self.before_admitted_run: Callable[[list[Event]], None] | None = None  # gets the events so far

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self.in_flight or self._awaiting or self._endings) or self.adapters.is_reading

    @property
    def is_in_flight(self) -> bool:
        """Steps were launched and are not collected."""
        return bool(self.in_flight)

    @property
    def idle_s(self) -> float:
        """Though there is work, no step can be made for so long, unless something comes."""
        return 0.0 if self.in_flight or self._awaiting or self._endings else self.scheduler.idle_s

    @property
    def has_moves(self) -> bool:
        """Pages are to be moved, or were, which need not be waited for."""
        tiers = self.scheduler.kv.tiers
        return tiers is not None and tiers.is_busy

    def close(self) -> None:
        """The end: save what is cached on disk, if there is one behind it."""
        if self.runner.mover is not None:
            with suppress(WorkerLost):  # then nothing can be saved
                if self.ranks is not None:
                    self.ranks.check()
                if not self.in_flight:
                    self.scheduler.retention.clear("the engine ends")  # what is pinned is saved as well
                    kv_saving.save(self.scheduler, self.runner)
            self.runner.mover.close()
            self.runner.mover = None
        if self.ranks is not None:
            self.ranks.close()
        self._is_closed = True

    def has(self, request_id: str) -> bool:
        """The request has not ended."""
        return request_id in self.live or request_id in self._awaiting

    def is_compiled(self, params: SamplingParams) -> bool:
        """A request can be submitted without compile_grammar."""
        return not params.has_masks or self.structured.is_compiled(params.grammar)

    def compile_grammar(self, grammar: Grammar | None) -> Matcher | None:
        """May take a while; may be called from another thread."""
        return self.structured.compile(grammar)

    def submit(self, request: Submit, compiled: Matcher | None = None) -> None:
        """Queue a request, or raise what is wrong with it. `compiled`: its grammar, if it was compiled just now."""
        if self._is_closed:
            raise TidemillError("The engine is closed.", fix="Make a new one.")
        if self.has(request.request_id):
            raise InvalidRequest(f"A request with the id {request.request_id!r} is already running.", param="request_id")
        if request.resumed is None:
            awaiting = [request for request, *_ in self._awaiting.values()]
            check_room(self.config.max_waiting, request, awaiting, self.scheduler.waiting)
        self.model_config.check_pooling(request.params.pooling)
        request.check(self.model_config.vocab_size, self.config.context_of(request.params))
        cache = self._cache_of(request)
        self.beams.check(request, self.model_config.vocab_size, self.config.max_requests)
        if request.params.beams is not None and not self.config.evict:
            fix = "Sample with n instead, or serve without --no-evict."
            raise InvalidRequest("Beams preempt each other, which this server does not do.", fix=fix, param="use_beam_search")
        if not request.adapter:
            self._submit(request, compiled, cache)
            return
        adapter = self.adapters.get(request.adapter)
        if self._awaiting or not self.adapters.bring(adapter):  # in turn, so that each gets a slot at some time
            self._awaiting[request.request_id] = request, compiled, cache
            self.prepare(request, f"its adapter {adapter.name} is read into a slot")
        else:
            self._submit(request, compiled, cache, adapter)

    def prepare(self, request: Submit, reason: str) -> None:
        """The request is here, and cannot be submitted yet."""
        self._events(events.Preparing(self._clock.now(), request.request_id, reason))

    def _submit_awaiting(self) -> list[Refused]:
        """Requests whose adapters are in their slots by now."""
        refused = []
        while self._awaiting:
            request_id, (request, compiled, cache) = next(iter(self._awaiting.items()))
            try:
                adapter = self.adapters.get(request.adapter)
                if not self.adapters.bring(adapter):
                    break
                self._submit(request, compiled, cache, adapter)
            except TidemillError as error:
                refused.append(refusal(request_id, error))
            del self._awaiting[request_id]
        if self.adapters.is_reading:
            self.adapters.drop_unwanted({request.adapter for request, *_ in self._awaiting.values()})
        return refused

    def _submit(
        self, request: Submit, compiled: Matcher | None, cache: CachePolicy | None, adapter: Adapter | None = None
    ) -> None:
        params, resumed = request.params, request.resumed
        if params.beams is not None:  # they begin as one sequence, also if they had begun before
            params, resumed = params_of_a_beam(request, self.model_config.vocab_size), resumed and [Resumed(0, [])]
        eos = [token for token in request.eos_token_ids if 0 <= token < self.model_config.vocab_size]
        salt = _salt(request.salt, adapter)
        spec = msgspec.structs.replace(request, params=params, resumed=resumed, eos_token_ids=eos, salt=salt)
        indices = range(params.n) if resumed is None else [sample.index for sample in resumed]
        matchers = []
        if params.has_masks:
            begun = [[] for _ in indices] if resumed is None else [sample.output_ids for sample in resumed]
            matchers = self.structured.matchers(params.grammar, compiled, begun, params.reasoning)
        slot = -1 if adapter is None else adapter.slot
        samples = self.scheduler.add(spec, adapter=slot, cache=cache, max_context=self.config.context_of(request.params))
        if adapter is not None:
            self.adapters.hold(adapter)
            self._adapter_of[request.request_id] = adapter
        pooler, is_unit = self.model_config.pooler, params.is_normalized
        if is_unit is None:
            is_unit = pooler is None or pooler.is_normalized
        live = self.live[request.request_id] = Live(request.request_id, is_unit)
        for index, sample in zip(indices, samples, strict=True):
            live.add(index, sample)
            self._live_of[sample.seq] = live
        if params.beams is not None:
            self.beams.start(request, live, samples[0], self.model_config.vocab_size)
        for sample, matcher in zip(samples, matchers, strict=False):
            self.structured.start(sample.seq, matcher)

    def _cache_of(self, request: Submit) -> CachePolicy | None:
        """The policy by which some of the request's tokens stay in its pages; None: all."""
        if (asked_policy := self.config.policy_of(request.params)) is None:
            return None
        num_prompt = len(request.prompt_ids)
        room = self.config.context_of(request.params) - num_prompt
        most = room if request.params.max_tokens is None else min(request.params.max_tokens, room)
        policy = settle(asked_policy, num_prompt, most, self.config.max_context)
        return policy if policy is None or not self.config.policy_bytes else self._counted(policy)

    def _counted(self, policy: CachePolicy) -> CachePolicy:
        """The policy with the number of bytes that its row keeps beside its pages."""
        shape, most = self.model_config, self.config.policy_bytes
        num_bytes = policy.num_beside(shape.num_layers, shape.num_kv_heads, shape.head_dim)
        if num_bytes > most:
            raise InvalidRequest(
                f"The KV policy {policy.kind} would keep {fmt_bytes(num_bytes)} beside the pages of this request; all have "
                f"{fmt_bytes(most)}.",
                fix="Ask for fewer sinks, or a smaller budget.",
                param="kv_policy",
            )
        return msgspec.structs.replace(policy, beside_bytes=num_bytes)

    def abort(self, message: Abort) -> None:
        """Unknown or ended requests are ignored: the last output may have crossed the abort on its way."""
        if message.index is None:
            self._awaiting.pop(message.request_id, None)
        if self._endings is not None:
            self._endings.drop(message.request_id, message.index)
        live = self.live.get(message.request_id)
        if live is None:
            return
        self.beams.drop_all_but_one(live)
        for index, request in list(live.requests.items()):
            if message.index is None or message.index == index:
                self.scheduler.abort(request, message.reason)
                self._forget(request.seq)

    def finish(self, message: Finish) -> Timings | None:
        """A sample is over for a reason only the frontend can see: its text reached a stop string."""
        live = self.live.get(message.request_id)
        request = live.requests.get(message.index) if live else None
        if request is None:
            return None
        self.scheduler.finish(request, "stop")
        self._forget(request.seq)
        return Timings(*request.spans(self._clock.now()))

    def renew(self, message: Renew) -> None:
        live = [*self.scheduler.running, *self.scheduler.waiting]
        self.scheduler.retention.renew(message.name, message.ttl_s, message.reason, live)

    def _end_holds(self, gone: Adapter) -> None:
        self.scheduler.retention.end_of(gone.adapter_id, f"the adapter {gone.name} was unloaded")

    def expect(self, message: Expect) -> None:
        with suppress(TidemillError):  # an adapter that is not here: its request says so
            adapter = self.adapters.get(message.adapter) if message.adapter else None
            self.scheduler.kv.expect(message.prompt_ids, _salt(message.salt, adapter), message.segments)

    def pages(self) -> Pages:
        """The owners of the pages. No step is made meanwhile, so it should be called seldom."""
        begin = self._clock.now()
        holders = self.scheduler.holders()
        kinds = self.scheduler.kv.map([request.seq for request in holders])
        owners = [(request.request_id, self.scheduler.kv.num_pages_of(request.seq)) for request in holders]
        return Pages(owners, kinds.tobytes(), self._clock.now() - begin, self.scheduler.kv.tier_sizes())

    def take_events(self) -> list[Event]:
        """The events since the last step's output, by aborts for example."""
        return self._events.take()

    def step(self) -> tuple[StepOutput, list[Refused]]:
        """Launch a step and take the results of one: its own, or of the one before it where the runner works ahead."""
        plan, ended = None, None
        failed = self._submit_awaiting()
        if self.adapters.is_reading and not self.scheduler.has_work and not self.in_flight:
            self.adapters.wait()
        try:
            self._take_moves()
            if self._endings and (exported := self._endings.exported()):
                return StepOutput(exported, self._events.take()), failed
            if self.in_flight and self.drafting is not None and self.drafting.waits(self.scheduler):
                plan = self.in_flight[0].plan  # whose requests fail if this does
                ended, plan = self._collect(failed), None
            if self.scheduler.has_work:
                self.host_times.tell(self._events)
            started = self._clock.now()
            plan, drafted = self._plan()
            if plan is not None and plan.is_empty:
                self.runner.change_pages(plan)
                plan = None
            if plan is not None:
                if plan.new_rows and self.before_admitted_run:
                    self.before_admitted_run(self._events.take())
                self._launch(plan, drafted, started, failed)
            if ended is None and self.in_flight and (plan is None or len(self.in_flight) > self.runner.steps_ahead):
                ended = self._collect(failed)
            if plan is None and ended is None and self.runner.mover is not None and self.has_moves:
                self.runner.mover.wait(_MOVES_S)  # nothing else can be done
        except (WorkerLost, WeightsLost):  # nothing can be computed any more; requests go on in another engine
            raise
        except BaseException as error:  # Ctrl-C in a script, too, leaves pages behind that were never computed
            failed += self._fail_step(plan, error)
            self._num_failed_steps += 1
            if not isinstance(error, Exception) or self._num_failed_steps >= _MAX_FAILED_STEPS:
                raise
            traceback.print_exc()
        deltas = self._outputs(*ended) if ended else []
        if self._endings is not None:
            deltas = self._endings.keep(deltas, ended[2] if ended else ())
        return StepOutput(deltas, self._events.take()), failed

    def _take_moves(self) -> None:
        mover = self.runner.mover
        if mover is None:
            return
        if done := mover.done():
            self.scheduler.moved(done)
        if (learned := mover.learned()) is not None:
            self.scheduler.kv.learn(learned.slots, learned.erased)
            for why in learned.problems:
                self._events(events.TierNotUsed(self._clock.now(), "peer", why))

    def _launch(self, plan: StepPlan, drafted: Drafted, started_s: float, failed: list[Refused]) -> None:
        planned_s = self._clock.now()
        failed += self._complete(plan)
        ready_s = self._clock.now()
        launched = self.runner.launch(plan)
        launch_s = (self._clock.now() if self.runner.steps_ahead else ready_s) - planned_s  # else it was computed, too
        self.in_flight.append(InFlight(plan, launched, started_s, bool(self.in_flight), drafted, launch_s))

    def _plan(self) -> tuple[StepPlan | None, Drafted]:
        if self.drafting is None:
            return self.scheduler.plan(), NOTHING_DRAFTED
        drafted = self.drafting.propose(self.scheduler)
        return self.scheduler.plan(), drafted

    def _collect(self, failed: list[Refused]) -> tuple[StepPlan, StepResult, list[Progress], list[Delta]]:
        """Wait for the oldest step in flight and take its results."""
        step = self.in_flight[0]
        done, result = step.plan, self.runner.collect(step.launched)
        self.in_flight.popleft()
        collected = self._clock.now()
        self._num_failed_steps = 0
        failed += self._fail_broken(done, result)
        self.structured.cut(done, result.tokens)
        progress = self.scheduler.commit(done, result.tokens)
        if self.structured:
            progress = self._follow_grammars(progress, failed)
        num_sampled = sum([len(item.token_ids) for item in progress])
        progress, of_beams = self.beams.take(progress, result.logprobs, self._clock.now())
        if self.drafting is not None:
            is_ahead = step.is_ahead or not self.runner.steps_ahead
            self.drafting.observe(done, step.drafted, progress, step.started_s, is_ahead, self.scheduler.has_work)
        now = self._clock.now()
        took = step.launch_s, now - collected
        layout = self.config.step_layout(done.num_tokens)
        self._events(events.StepDone(now, done.step, now - step.started_s, num_sampled, layout, *took))
        self.host_times.begin(now)
        if self.scheduler.kv.tiers is not None:
            self.scheduler.kv.tiers.costs.computed(done.num_tokens, now - max(step.started_s, self._collected_s))
        self._collected_s = now
        self._count_uses(now)
        return done, result, progress, of_beams

    def _outputs(self, done: StepPlan, result: StepResult, progress: list[Progress], of_beams: list[Delta]) -> list[Delta]:
        """The deltas of a step for the frontend. They are made when the next step is launched, if that waited for this one."""
        progress = [item for item in progress if item.request.seq in self._live_of]
        deltas = of_beams + make_deltas(done, result, progress, self._live_of, self._clock.now())
        for item in progress:
            if item.finish_reason:
                self._forget(item.request.seq)
        return deltas

    def _count_uses(self, now: float) -> None:
        """Counts the uses of experts and of streamed weights: every so many steps, and when nothing is left to do."""
        if not self.model_config.experts and not self._streams_weights:
            return
        self._num_uncounted_steps += 1
        if self._num_uncounted_steps >= _COUNT_EVERY or not self.has_work:
            counts = self._take_expert_counts()
            if any(map(any, counts.values())):
                tokens_of = tuple((layer, tuple(of_layer)) for layer, of_layer in counts.items())
                self._events(events.ExpertsUsed(now, self._num_uncounted_steps, tokens_of))
            if (reads := self._take_weight_reads()) is not None and reads[0]:
                self._events(events.WeightsStreamed(now, *reads))
            self._num_uncounted_steps = 0

    def _complete(self, plan: StepPlan) -> list[Refused]:
        """Completes the plan with the probabilities that drawn drafts were drawn from, and the token masks of structured outputs.
        A request whose grammar fails is aborted; its part of the step is wasted."""
        if self.drafting is not None and self.config.acceptance == "rejection":
            plan.draft_probs = self.drafting.probs(plan)
        if not self.structured:
            return []
        began = self._clock.now()
        plan.masks, broken = self.structured.masks(plan)
        if plan.masks:
            now = self._clock.now()
            self._events(events.MasksMade(now, len(plan.masks), now - began))
        return [self._fail_request(seq, error, "grammar failed") for seq, error in broken.items() if seq in self._live_of]

    def _follow_grammars(self, progress: list[Progress], failed: list[Refused]) -> list[Progress]:
        """Sampled tokens go to the grammars; an output whose grammar allows nothing more is complete."""
        for i, item in enumerate(progress):
            seq = item.request.seq
            if seq not in self.structured or item.finish_reason not in (None, HANDED_OVER):
                continue
            try:
                if self.structured.take(seq, item.token_ids):
                    if not item.finish_reason:
                        self.scheduler.finish(item.request, "stop")
                    progress[i] = msgspec.structs.replace(item, finish_reason="stop")
            except InvalidRequest as error:
                failed.append(self._fail_request(seq, error, "grammar failed"))
        return [item for item in progress if item.request.seq in self._live_of]

    def _fail_broken(self, plan: StepPlan, result: StepResult) -> list[Refused]:
        """Requests whose logits are not numbers fail alone. If drafts can be the reason, they are computed again without."""
        failed = []
        rows = result.broken | {row for row, tokens in result.tokens.items() if tokens[-1] < 0}
        for item in plan.items if rows else ():
            if item.row not in rows or item.seq not in self._live_of:
                continue
            live = self._live_of[item.seq]
            request = live.requests[live.samples[item.seq]]
            may_be_drafts = request.had_drafts and request.takes_drafts
            if request.epoch != item.epoch and not (may_be_drafts and request.row == item.row):
                continue  # it has left the pages that the step wrote
            if may_be_drafts:
                self.scheduler.compute_again(request, "a draft's logits are not numbers: computed again without drafts")
            elif result.tokens.get(item.row, (0,))[-1] < 0:
                error = nothing_to_draw(request.params)
                failed.append(self._fail_request(item.seq, error, "logits are not numbers", self.scheduler.discard))
        return failed

    def _fail_request(
        self, seq: int, error: TidemillError, reason: str, end: Callable[[Request, str], None] | None = None
    ) -> Refused:
        """End all samples of a request with an error."""
        live = self._live_of[seq]
        if self._endings is not None:
            self._endings.drop(live.request_id)
        self.beams.drop_all_but_one(live, are_broken=end is not None)
        for request in list(live.requests.values()):
            (end or self.scheduler.abort)(request, reason)
            self._forget(request.seq)
        return refusal(live.request_id, error)

    def _fail_step(self, plan: StepPlan | None, error: BaseException) -> list[Refused]:
        """The step raised: its requests fail, and those of steps launched after it (all of them, if it was not even planned). The
        others start over, since they may share pages that the step had announced and never computed."""
        plans = [step.plan for step in self.in_flight]
        if plan is not None and plan not in plans:  # it was not launched
            plans.append(plan)
        self.in_flight.clear()
        seqs = list(self._live_of) if plan is None else [item.seq for each in plans for item in each.items]
        seqs = [seq for seq in seqs if seq in self._live_of and not self._has_finished(seq)]
        name = type(error).__name__
        failure = TidemillError(f"The engine failed while computing this request ({name}).")
        failed = [self._fail_request(seq, failure, f"step failed: {name}") for seq in seqs if seq in self._live_of]
        if self.runner.mover is not None:
            self.runner.mover.drain()
            self._take_moves()
        self.scheduler.drop_computed("a step failed", plans)
        return failed

    def _has_finished(self, seq: int) -> bool:
        """Its last tokens are about to be sent."""
        live = self._live_of[seq]
        return live.requests[live.samples[seq]].status is Status.FINISHED

    def _adopt(self, live: Live, request: Request) -> None:
        """A sequence joins a request."""
        live.add(request.seq, request)
        self._live_of[request.seq] = live

    def _forget(self, seq: int) -> None:
        live = self._live_of.pop(seq)
        self.structured.stop(seq)
        self.beams.stop(seq)
        request = live.requests.pop(live.samples[seq])
        if self.drafting is not None and request.params.beams is None:
            self.drafting.forget(request)
        if not live.requests:
            del self.live[live.request_id]
            adapter = self._adapter_of.pop(live.request_id, None)
            if adapter is not None:
                self.adapters.release(adapter)


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """The method, for parts of its object: memory is freed as soon as nobody else has the object."""
    ref = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        found = ref()
        assert found is not None, "its object has its parts"
        found(*arguments)

    return call


def _salt(request_salt: str, adapter: Adapter | None) -> str:
    """The salt of the prefix cache: pages depend on the adapter's content. No salt of a request can be that of another
    adapter."""
    if adapter is None:
        return f"\n{request_salt}" if request_salt else ""
    return f"{adapter.digest}\n{request_salt}"
