"""Speculative decoding in the step loop: who is asked for drafts, how many are verified, and what came of them."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Mapping, Sequence

from tidemill import events
from tidemill.events import EventSink
from tidemill.runner.spec import Ask, Drafter, Drawn, KnowsChances
from tidemill.sched.clock import Clock
from tidemill.sched.drafts import Acceptance, StepTimes, Trust, allot
from tidemill.sched.plan import StepPlan
from tidemill.sched.progress import Progress
from tidemill.sched.request import Request, Status
from tidemill.sched.scheduler import Scheduler
from tidemill.sched.tree import Tree, depths_of, right_path

_MAX_FAILURES = 3
_PRIOR = 0.5  # how often a draft is right, before any was tried
_SURE = 0.9  # how likely drafts are right for the next step to be planned before that is known: a GPU would wait for a fifth of it


class Drafting:
    """`drafters`: the first that has a guess for a request makes it. `slope`: see StepTimes.

    Free drafters guess for every request, and a guess that is not verified is compared with the token drawn all the same, so it
    is known how good they are. Another is asked only for drafts that will be verified.

    Where the runner works ahead, a step can be planned while drafts are being verified, as if all were right: with what a free
    drafter guesses to come after them. If one is not, that step counts for nothing, so it is done where all are nearly sure."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        max_drafts: int,
        slope: float,
        clock: Clock,
        emit: EventSink,
        adaptive: bool = True,
    ) -> None:
        """`adaptive`: else every draft that fits is verified, whatever it costs."""
        self._drafters, self._max_drafts, self._adaptive = drafters, max_drafts, adaptive
        self._clock, self._emit = clock, emit
        # Found out once: to ask an object whether it has a protocol's methods takes longer than what it is asked for.
        self._knowing = {drafter.name: drafter for drafter in drafters if isinstance(drafter, KnowsChances)}
        self._is_free = all(drafter.is_free for drafter in drafters)
        self._times, self._trust = StepTimes(slope), Trust()
        self._expected = 0.0  # drafts of the next step that may be right
        self._expected_of: dict[int, float] = {}  # by step: those of steps that were planned
        self._acceptance = {drafter.name: Acceptance(_PRIOR) for drafter in drafters}
        self._guesses: dict[int, tuple[str, Sequence[int]]] = {}  # by seq: by whom, of the tokens after those known
        self._guessed_by: dict[int, str] = {}  # by seq: who guessed last
        self._num_failures: Counter[str] = Counter()  # in a row, by drafter
        self._last_s: float | None = None  # when a step was last collected, if the next was to follow at once

    def propose(self, scheduler: Scheduler) -> None:
        """Give running requests the drafts that their next step is to verify."""
        ready = []
        for request in scheduler.running:
            request.drafts = ()
            if _can_have_drafts(request) and (not request.num_in_flight or self._is_sure_of(request, request.num_in_flight)):
                ready.append(request)
        given, self._expected = self._allot(scheduler, ready)
        for drafter in self._drafters:
            if not drafter.is_free:
                left = [request for request in ready if request.seq not in self._guesses]
                for request in left:
                    request.had_drafts = True  # early exits write to its pages
                self._ask(drafter, left, given)
        for request in ready:
            num = given.get(request.seq, 0)
            if num and request.seq in self._guesses:
                self._guessed_by[request.seq], guess = self._guesses[request.seq]
                first = request.num_in_flight
                request.drafts = guess[first : first + num] if first else guess[:num]

    def expect(self, plan: StepPlan) -> None:
        """A step was planned with the drafts proposed last."""
        self._expected_of[plan.step] = self._expected

    def probs(self, plan: StepPlan) -> dict[tuple[int, int], bytes]:
        """Of the drafts in a plan that were drawn, by row and position, what they were drawn from."""
        probs = {}
        for item in plan.items if plan.drafts else ():
            _, guess = self._guesses.get(item.seq, ("", ()))
            if item.num_drafts and isinstance(guess, Drawn):
                first = item.start + item.count - item.num_drafts
                for i in range(item.num_drafts):
                    probs[item.row, first + i] = guess.probs_DV[i].tobytes()
        return probs

    def waits(self, scheduler: Scheduler) -> bool:
        """Steps are in flight. Should the next be planned only when their tokens are known? Yes, if drafts are being verified that
        may be wrong, or if those that could follow are worth more than the time in which the device has nothing to do. Where
        tokens under way can be guessed, so can what follows them."""
        running = [request for request in scheduler.running if request.num_in_flight and _can_have_drafts(request)]
        chances = [self._chance_of(one, one.num_drafts_in_flight) for one in running if one.num_drafts_in_flight]
        if chances:
            return sum(chances) < _SURE * len(chances)
        return bool(self._allot(scheduler, [request for request in running if not self._is_sure_of(request, 1)])[0])

    def _is_sure_of(self, request: Request, num_tokens: int) -> bool:
        return self._chance_of(request, num_tokens) >= _SURE

    def _chance_of(self, request: Request, num_tokens: int) -> float:
        """That so many tokens of it that are in flight are what was guessed, and what follows can be planned as if they were known."""
        name = self._guessed_by.get(request.seq)
        is_tree = isinstance(self._guesses.get(request.seq, ("", ()))[1], Tree)  # of which some are wrong
        if name is None or is_tree or not self._is_free or request.params.waits_for_tokens:
            return 0.0
        return self._acceptance[name].rate(request.seq) ** num_tokens

    def _ask(self, drafter: Drafter, requests: Sequence[Request], most: Mapping[int, int] | int) -> list[Request]:
        """Those that it has no guess for. `most`: how many tokens of all, after those in flight, or of whom how many."""
        asked = requests if isinstance(most, int) else [request for request in requests if most.get(request.seq)]
        nums = [
            most + r.num_in_flight if isinstance(most, int) else min(most[r.seq], r.max_tokens - r.num_output - 1) for r in asked
        ]
        asks = [Ask(r.seq, r.row, r.tokens, r.num_prompt, r.params, num, r.salt) for r, num in zip(asked, nums, strict=True)]
        left = []
        for request, guess in zip(asked, self._propose(drafter, asks), strict=True):
            if guess:
                self._guesses[request.seq] = drafter.name, guess
            else:
                left.append(request)
        return left

    def _propose(self, drafter: Drafter, asks: Sequence[Ask]) -> Sequence[Sequence[int]]:
        """A drafter that fails has no guess; after three times in a row it is not asked any more."""
        if not asks or self._num_failures[drafter.name] >= _MAX_FAILURES:
            return [()] * len(asks)
        try:
            made = drafter.propose(asks)
        except Exception:
            self._num_failures[drafter.name] += 1
            traceback.print_exc()
            return [()] * len(asks)
        self._num_failures[drafter.name] = 0
        return made

    def _allot(self, scheduler: Scheduler, requests: Sequence[Request]) -> tuple[dict[int, int], float]:
        """How many drafts each is to have, and how many may be right. The first tokens of a guess stand for those in flight."""
        left = [request for request in requests if request.max_tokens - (request.num_known - request.num_prompt) > 1]
        for request in left:
            self._guesses.pop(request.seq, None)
        rates: dict[int, float | Sequence[float]] = {}
        most: dict[int, int] = {}
        for drafter in self._drafters:
            acceptance, asked = self._acceptance[drafter.name], left
            left = self._ask(drafter, asked, self._max_drafts) if drafter.is_free else []
            for request in asked:
                guess = self._guesses[request.seq][1] if request.seq in self._guesses else ()
                num = len(guess) - request.num_in_flight if drafter.is_free else self._max_drafts
                if num > 0 and not (request.num_in_flight and isinstance(guess, Tree)):
                    rates[request.seq], most[request.seq] = self._chances(drafter, acceptance, request, num), num
        if not rates:
            return {}, 0.0
        num_running, room = len(scheduler.running), scheduler.room_for_drafts
        if not self._adaptive:
            return most, 0.0  # the scheduler takes what fits
        return allot(rates, most, num_running, room, self._times, self._trust.value)

    def _chances(self, drafter: Drafter, acceptance: Acceptance, request: Request, num: int) -> float | Sequence[float]:
        """Of each draft, if the drafter knows; else how likely one is right if those before it were."""
        knowing = self._knowing.get(drafter.name)
        chances = None if knowing is None else knowing.chances(request.params, num)
        return acceptance.rate(request.seq) if chances is None else chances

    def observe(self, plan: StepPlan, progress: Sequence[Progress], started_s: float, is_ahead: bool, goes_on: bool) -> None:
        """A step was collected. `is_ahead`: it was launched as early as it can be; one that follows a step with drafts is not,
        and its time says nothing about those that are. `goes_on`: the next follows at once."""
        now = self._clock.now()
        if all(item.count == item.num_draws for item in plan.items) and (plan.drafts or is_ahead):
            self._times.add(plan.num_tokens, bool(plan.drafts), now - (started_s if self._last_s is None else self._last_s))
        self._last_s = now if goes_on else None
        verified, names = [], set()
        drafts_of = {item.seq: _drafts_in(plan, item.row) for item in plan.items if item.num_drafts}
        for done in progress:
            seq = done.request.seq
            name, guess = self._guesses.pop(seq, ("", ()))
            if done.num_drafts:  # by a guess before this one, if that is of steps which followed it
                name, guess = self._guessed_by[seq], drafts_of[seq]
            if not guess:
                self._acceptance[self._drafters[-1].name].fade(seq)
                continue
            self._guessed_by[seq] = name
            num_right, num_compared = _compare(guess[: done.num_drafts or 1], done.token_ids)
            self._acceptance[name].add(seq, num_compared, num_right)
            if done.num_drafts:
                num_saved = min(num_right, len(done.token_ids) - 1)  # the token that ends a request may be a draft itself
                verified.append((done.request.request_id, done.num_drafts, num_saved))
                names.add(name)
        expected = self._expected_of.pop(plan.step, 0.0)
        if verified and self._adaptive:
            self._trust.add(expected, sum(num_right for _, _, num_right in verified))
        else:
            self._trust.fade()
        if verified:
            self._emit(events.DraftsVerified(now, plan.step, "+".join(sorted(names)), tuple(verified)))

    def forget(self, request: Request) -> None:
        """It has ended."""
        self._guesses.pop(request.seq, None)
        self._guessed_by.pop(request.seq, None)
        for drafter in self._drafters:
            drafter.forget(request.seq, request.tokens, request.salt)
            self._acceptance[drafter.name].forget(request.seq)


def _drafts_in(plan: StepPlan, row: int) -> Sequence[int]:
    tokens = plan.drafts[row]
    return Tree(tokens, plan.trees[row]) if row in plan.trees else tokens


def _compare(drafts: Sequence[int], tokens: Sequence[int]) -> tuple[int, int]:
    """How many drafts in a row are right, and how many there are in a row at most."""
    if isinstance(drafts, Tree):
        return len(right_path(drafts.tokens, drafts.parents, _after_each(drafts, tokens))), drafts.depth
    return next((i for i, draft in enumerate(drafts) if tokens[i : i + 1] != [draft]), len(drafts)), len(drafts)


def _after_each(tree: Tree, tokens: Sequence[int]) -> list[int]:
    """The token drawn after the last known one and after each draft, as far as there is one."""
    padded = [*tokens, *[-1] * tree.depth]
    return [padded[depth] for depth in (0, *depths_of(tree.parents))]


def _can_have_drafts(request: Request) -> bool:
    params = request.params
    if request.cache is not None:  # what it gives up cannot be taken back
        return False
    is_decoding = request.status is Status.RUNNING and request.num_needed <= 1
    return is_decoding and request.takes_drafts and params.pooling is None and params.beams is None
