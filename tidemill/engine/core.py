"""EngineCore: plan, run, commit. One object, no threads, no sockets, no torch."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable
from typing import cast
from weakref import proxy

import msgspec

from tidemill.capabilities import check_request
from tidemill.config import EngineConfig
from tidemill.engine.host_times import HostTimes
from tidemill.engine.moments import (
    Engine,
    EngineComponents,
    KindOfPart,
    Moments,
    Part,
    Step,
    Submission,
)
from tidemill.engine.outputs import LiveRequest, make_deltas
from tidemill.engine.parts import make_parts
from tidemill.engine.refusals import nothing_to_sample, refusal
from tidemill.errors import InvalidRequest, TidemillError, WeightsLost, WorkerLost
from tidemill.frontend.structured import Matcher
from tidemill.kv.manager import KVManager
from tidemill.sched.clock import Clock, MonotonicClock
from tidemill.sched.plan import StepPlan
from tidemill.sched.policies import make_policy
from tidemill.sched.queue import check_room
from tidemill.sched.request import Request, Status
from tidemill.sched.scheduler import Scheduler
from tidemill.types import events
from tidemill.types.events import Event, EventBuffer
from tidemill.types.wire import (
    Abort,
    Delta,
    Finish,
    FromEngine,
    Pages,
    Refused,
    Renew,
    StepOutput,
    Submit,
    Timings,
    ToEngine,
)

# in a row: then the device is taken to be broken, and the engine process is replaced
_MAX_FAILED_STEPS = 3


class EngineCore:
    def __init__(
        self,
        components: EngineComponents,
        config: EngineConfig,
        clock: Clock | None = None,
        emit: EventBuffer | None = None,
    ) -> None:
        """`emit`: has the events of its making."""
        self.config, self.model_config = config, components.model_config
        self.clock = clock or MonotonicClock()
        self.emit = emit or EventBuffer()
        self.host_times = HostTimes(self.clock)
        self.runner = components.runner
        kv = KVManager(
            config.num_pages + 1,
            config.page_size,
            config.prefix_caching,
            config.layout.groups,
            config.token_budget,
            config.prefix_index,
            components.tiers,
            config.max_pinned,
            tells_empty=config.kv_layout == "virtual",
        )
        self.scheduler = Scheduler(
            kv,
            num_rows=config.max_requests,
            token_budget=config.token_budget,
            max_context=config.max_context,
            policy=make_policy(config.policy, config.batch_window_s, config.step_cost),
            clock=self.clock,
            emit=self.emit,
            background_tokens=config.background_tokens,
            background_budget=config.background_budget,
            whole_prompts=self.model_config.pooler is not None,
            order=config.queue_order,
            evict=config.evict,
            max_draws=config.max_draws,
            policy_bytes=config.policy_bytes,
            input_rows=components.model_config.num_input_rows(config.token_budget),
        )
        self.in_flight: deque[Step] = deque()  # launched and not collected
        self.delayed: dict[str, Submission] = {}  # by request id, in their order
        self.live: dict[str, LiveRequest] = {}  # by request id
        self.live_of: dict[int, LiveRequest] = {}  # by seq
        self._refused: list[Refused] = []  # since the step began
        self._num_failed_steps = 0  # in a row
        self._is_closed = False
        self.use(*make_parts(cast(Engine, proxy(self)), components))

    # ---- parts

    def use(self, *parts: Part) -> None:
        """From now on these take part in its moments, in this order."""
        self.parts, self._moments = parts, Moments(parts)
        for part in parts:
            # memory is freed as soon as nobody else has the core
            part.engine = cast(Engine, proxy(self))

    def part(self, kind: type[KindOfPart]) -> KindOfPart:
        return next(part for part in self.parts if isinstance(part, kind))

    def parts_but(self, kind: type[Part]) -> list[Part]:
        return [part for part in self.parts if not isinstance(part, kind)]

    # ---- what there is to do

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._is_busy

    @property
    def _is_busy(self) -> bool:
        """There is work that the scheduler does not know."""
        return bool(self.in_flight or self.delayed) or any(
            has_work() for has_work in self._moments.has_work
        )

    @property
    def is_in_flight(self) -> bool:
        """Steps were launched and are not collected."""
        return bool(self.in_flight)

    @property
    def idle_s(self) -> float:
        """Though there is work, no step can be made for so long, unless something comes."""
        return 0.0 if self._is_busy else self.scheduler.idle_s

    @property
    def has_moves(self) -> bool:
        """Pages are to be moved, or were, which need not be waited for."""
        return self.scheduler.kv.offload.is_moving

    @property
    def alarms(self) -> list[int]:
        """File descriptors that are readable when a step is to be made."""
        return [alarm for alarms in self._moments.alarms for alarm in alarms()]

    def check(self) -> None:
        """Raises why the engine cannot go on."""
        for check in self._moments.check:
            check()

    def close(self) -> None:
        for close in self._moments.close:
            close()
        self._is_closed = True

    # ---- requests come

    def has(self, request_id: str) -> bool:
        """The request has not ended."""
        return request_id in self.live or request_id in self.delayed

    def submit(self, request: Submit, compiled: Matcher | None = None) -> None:
        """Queue a request, or raise what is wrong with it. `compiled`: its grammar, if it was
        compiled just now."""
        if self._is_closed:
            raise TidemillError("The engine is closed.", fix="Make a new one.")
        if self.has(request.request_id):
            raise InvalidRequest(
                f"A request with the id {request.request_id!r} is already running.",
                param="request_id",
            )
        if request.resumed is None:
            queued = [submission.request for submission in self.delayed.values()]
            check_room(self.config.max_waiting, request, queued, self.scheduler.waiting)
        check_request(request.params, self.config.features)
        self.model_config.check_pooling(request.params.pooling)
        request.check(self.model_config.vocab_size, self.config.context_of(request.params))
        submission = Submission.of(request, compiled)
        for submit in self._moments.submit:
            submit(submission)
        if why := self._why_delayed(submission):
            self.delayed[request.request_id] = submission
            self.prepare(request, why)
        else:
            self._queue(submission)

    def prepare(self, request: Submit, reason: str) -> None:
        """The request is here, and cannot be submitted yet."""
        self.emit(events.Preparing(self.clock.now(), request.request_id, reason))

    def _why_delayed(self, submission: Submission) -> str:
        return next((why for delay in self._moments.delay if (why := delay(submission))), "")

    def _queue_delayed(self) -> None:
        """Queues submissions that nothing delays any more, in their order."""
        while self.delayed:
            request_id, submission = next(iter(self.delayed.items()))
            try:
                if self._why_delayed(submission):
                    break
                self._queue(submission)
            except TidemillError as error:
                self._refused.append(refusal(request_id, error))
            del self.delayed[request_id]

    def _queue(self, submission: Submission) -> None:
        request, params = submission.request, submission.params
        spec = msgspec.structs.replace(
            request,
            params=params,
            resumed=submission.resumed,
            eos_token_ids=[
                token
                for token in request.eos_token_ids
                if 0 <= token < self.model_config.vocab_size
            ],
            salt=submission.salt,
        )
        samples = self.scheduler.table.add(
            spec,
            adapter=submission.lora_slot,
            cache=submission.kv_policy,
            max_context=self.config.context_of(request.params),
        )
        live = self.live[request.request_id] = LiveRequest.of(spec, self.model_config)
        for index, sample in zip(submission.begun, samples, strict=True):
            live.add(index, sample)
            self.live_of[sample.seq] = live
        for queued in self._moments.queued:
            queued(submission, live)

    # ---- messages

    def abort(self, message: Abort) -> None:
        """Unknown or ended requests are ignored: the last output may have crossed the abort on its
        way."""
        request_id, index = message.request_id, message.index
        if index is None:
            self.delayed.pop(request_id, None)
        self._cut_short(request_id, index)
        live = self.live.get(request_id)
        for at, request in list(live.requests.items()) if live else ():
            if index in (None, at):
                self.scheduler.table.abort(request, message.reason)
                self.end(request.seq)

    def finish(self, message: Finish) -> Timings | None:
        """A sample is over for a reason only the frontend can see: its text reached a stop string."""
        live = self.live.get(message.request_id)
        request = live.requests.get(message.index) if live else None
        if request is None:
            return None
        self.scheduler.table.finish(request, "stop")
        self.end(request.seq)
        return Timings(*request.spans(self.clock.now()))

    def renew(self, message: Renew) -> None:
        live = [*self.scheduler.running, *self.scheduler.waiting]
        self.scheduler.retention.renew(message.name, message.ttl_s, message.reason, live)

    def take(self, message: ToEngine) -> None:
        """A message that is for parts."""
        for take in self._moments.message:
            take(message)

    def replies(self) -> list[FromEngine]:
        """The parts' answers to messages."""
        return [reply for replies in self._moments.replies for reply in replies()]

    def pages(self) -> Pages:
        """The owners of the pages. No step is made meanwhile, so it should be called seldom."""
        begin, kv = self.clock.now(), self.scheduler.kv
        holders = self.scheduler.table.holders()
        kinds = kv.map([request.seq for request in holders])
        owners = [(request.request_id, kv.num_pages_of(request.seq)) for request in holders]
        return Pages(owners, kinds.tobytes(), self.clock.now() - begin, kv.offload.tier_sizes())

    def take_events(self) -> list[Event]:
        """The events since the last step's output, by aborts for example."""
        return self.emit.take()

    # ---- a step

    def step(self) -> tuple[StepOutput, list[Refused]]:
        """Launch a step and take the results of one: its own, or of the one before it where the
        runner works ahead."""
        refused = self._refused = list[Refused]()
        plan: StepPlan | None = None
        done: Step | None = None
        self._queue_delayed()
        try:
            if told := [delta for tell in self._moments.before_plan for delta in tell()]:
                return StepOutput(told, self.emit.take()), refused
            if self.in_flight and any(waits() for waits in self._moments.waits):
                plan = self.in_flight[0].plan  # whose requests fail if this does
                done, plan = self._collect(), None
            if self.scheduler.has_work:
                self.host_times.tell(self.emit)
            started_s = self.clock.now()
            plan = self._plan()
            if plan is not None and plan.is_empty:
                self.runner.change_pages(plan)
                plan = None
            if plan is not None:
                self._launch(Step(plan, started_s, bool(self.in_flight)))
            if (
                not done
                and self.in_flight
                and (not plan or len(self.in_flight) > self.runner.steps_ahead)
            ):
                done = self._collect()
            if not plan and not done:
                for idle in self._moments.idle:
                    idle()
        # nothing can be computed any more; requests go on in another engine
        except (WorkerLost, WeightsLost):
            raise
        # Ctrl-C in a script, too, leaves pages behind that were never computed
        except BaseException as error:
            self._fail_step(plan, error)
            if not isinstance(error, Exception) or self._num_failed_steps >= _MAX_FAILED_STEPS:
                raise
            traceback.print_exc()
        deltas = self._outputs(done) if done else []
        return StepOutput(deltas, self.emit.take()), refused

    def _plan(self) -> StepPlan | None:
        for propose in self._moments.propose:
            propose()
        return self.scheduler.plan()

    def _launch(self, step: Step) -> None:
        planned_s = self.clock.now()
        for fill_plan in self._moments.fill_plan:
            fill_plan(step)
        ready_s = self.clock.now()
        for before_launch in self._moments.before_launch:
            before_launch(step)
        step.launched = self.runner.launch(step.plan)
        # else it was computed, too
        step.launch_s = (self.clock.now() if self.runner.steps_ahead else ready_s) - planned_s
        self.in_flight.append(step)

    def _collect(self) -> Step:
        """Wait for the oldest step in flight and take its results."""
        step = self.in_flight[0]
        result = step.result = self.runner.collect(step.launched)
        self.in_flight.popleft()
        collected_s = self.clock.now()
        self._num_failed_steps = 0
        step.broken = result.broken | {
            row for row, tokens in result.tokens.items() if tokens[-1] < 0
        }
        for take_results in self._moments.results:
            take_results(step)
        self._fail_broken(step)
        step.progress = self.scheduler.commit(step.plan, result.tokens)
        for take_progress in self._moments.progress:
            take_progress(step)
        num_sampled = step.num_withheld + sum([len(item.token_ids) for item in step.progress])
        now = step.done_s = self.clock.now()
        took = step.launch_s, now - collected_s
        layout = self.config.step_layout(step.plan.num_tokens)
        self.emit(
            events.StepDone(now, step.plan.step, now - step.started_s, num_sampled, layout, *took)
        )
        self.host_times.begin(now)
        for is_done in self._moments.done:
            is_done(step)
        return step

    def _outputs(self, step: Step) -> list[Delta]:
        """The deltas of a step for the frontend. They are made when the next step is launched, if
        that waited for this one."""
        progress = [item for item in step.progress if item.request.seq in self.live_of]
        step.deltas += make_deltas(step.plan, step.result, progress, self.live_of, self.clock.now())
        for item in progress:
            if item.finish_reason:
                self.end(item.request.seq)
        for take_deltas in self._moments.deltas:
            take_deltas(step)
        return step.deltas

    # ---- requests end

    def adopt(self, live: LiveRequest, request: Request) -> None:
        """A sequence joins a request."""
        live.add(request.seq, request)
        self.live_of[request.seq] = live

    def end(self, seq: int) -> None:
        """A sequence has left the scheduler."""
        live = self.live_of.pop(seq)
        request = live.requests.pop(live.samples[seq])
        if not live.requests:
            del self.live[live.request_id]
        for end in self._moments.end:
            end(live, request)

    def fail(self, seq: int, error: TidemillError, reason: str, is_broken: bool = False) -> None:
        """Ends all samples of a sequence's request with an error. `is_broken`: their pages hold
        NaN."""
        live = self.live_of[seq]
        self._cut_short(live.request_id, None, is_broken)
        leave: Callable[[Request, str], None] = (
            self.scheduler.table.discard if is_broken else self.scheduler.table.abort
        )
        for request in list(live.requests.values()):
            leave(request, reason)
            self.end(request.seq)
        self._refused.append(refusal(live.request_id, error))

    def _cut_short(self, request_id: str, index: int | None, is_broken: bool = False) -> None:
        for cut_short in self._moments.cut_short:
            cut_short(request_id, index, is_broken)

    def _fail_broken(self, step: Step) -> None:
        """Requests whose logits are not numbers fail alone, unless they have left the pages that
        the step wrote."""
        tokens = step.result.tokens
        for item in step.plan.items if step.broken else ():
            if item.seq in self.live_of and tokens.get(item.row, (0,))[-1] < 0:
                live = self.live_of[item.seq]
                request = live.requests[live.samples[item.seq]]
                if request.epoch == item.epoch:
                    error = nothing_to_sample(request.params)
                    self.fail(item.seq, error, "logits are not numbers", is_broken=True)

    def _fail_step(self, plan: StepPlan | None, error: BaseException) -> None:
        """The step raised: its requests fail, and those of steps launched after it (all of them, if
        it was not even planned). The others start over, since they may share pages that the step
        had announced and never computed."""
        self._num_failed_steps += 1
        plans = [step.plan for step in self.in_flight]
        if plan is not None and plan not in plans:  # it was not launched
            plans.append(plan)
        self.in_flight.clear()
        seqs = (
            list(self.live_of)
            if plan is None
            else [item.seq for each in plans for item in each.items]
        )
        seqs = [seq for seq in seqs if seq in self.live_of and not self._has_finished(seq)]
        name = type(error).__name__
        failure = TidemillError(f"The engine failed while computing this request ({name}).")
        for seq in seqs:
            if seq in self.live_of:
                self.fail(seq, failure, f"step failed: {name}")
        for step_failed in self._moments.step_failed:
            step_failed()
        self.scheduler.table.drop_computed("a step failed", plans)

    def _has_finished(self, seq: int) -> bool:
        """Its last tokens are about to be sent."""
        live = self.live_of[seq]
        return live.requests[live.samples[seq]].status is Status.FINISHED
