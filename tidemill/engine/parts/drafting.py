"""Speculative decoding in the step loop: who is asked for drafts, how many are verified, and what
came of them."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from tidemill.engine.moments import Engine, EngineComponents, Part, Step
from tidemill.engine.outputs import LiveRequest
from tidemill.runner.spec import SLOPES, Ask, Drafter, Drawn, KnowsChances
from tidemill.sched.drafts import Acceptance, StepTimes, Trust, allot
from tidemill.sched.plan import StepPlan
from tidemill.sched.request import Request, Status
from tidemill.sched.tree import Tree, depths_of, right_path
from tidemill.types import events

_MAX_FAILURES = 3
_PRIOR = 0.5  # how often a draft is right, before any was tried
# steps in which free drafters are not asked about a request for which they had no right guess
_LONGEST_REST = 3


@dataclass(slots=True)
class _Guess:
    """A guess of the tokens after those known. It has no tokens where a drafter was asked and has
    none."""

    drafter: str
    tokens: Sequence[int]
    most: int  # that were asked for


_NO_GUESS = _Guess("", (), 0)


class Drafted(NamedTuple):
    """The drafts of a step: who made the drafts of each sequence, and how many of all may be right."""

    by: Mapping[int, str]
    num_expected: float


NOTHING_DRAFTED = Drafted({}, 0.0)


class Drafting(Part):
    """`drafters`: the first that has a guess for a request makes it. `slope`: see StepTimes.

    Free drafters guess for every request, and a guess that is not verified is compared with the
    token drawn all the same, so it is known how good they are. To ask them takes the host a few
    dozen microseconds: where they had no right guess, they are not asked for one step, then for
    three, until a guess is right. Another drafter is asked only for drafts that will be verified.

    Where the runner works ahead, a step can be planned while drafts are being verified, as if all
    were right: with what a free drafter guesses to come after them. If one is not, that step counts
    for nothing, so it is done where all are nearly sure."""

    # how likely that must be: a GPU would have nothing to do for about a fifth of such a step, if
    # it waited
    sure = 0.9

    def __init__(
        self,
        drafters: Sequence[Drafter],
        max_drafts: int,
        slope: float,
        adaptive: bool = True,
    ) -> None:
        """`adaptive`: else every draft that fits is verified, whatever it costs."""
        self.drafters, self._max_drafts, self._adaptive = drafters, max_drafts, adaptive
        # Found out once: to ask an object whether it has a protocol's methods takes longer than
        # what it is asked for.
        self._knowing = {
            drafter.name: drafter for drafter in drafters if isinstance(drafter, KnowsChances)
        }
        self._free = [drafter for drafter in drafters if drafter.is_free]
        self._dear = next((drafter for drafter in drafters if not drafter.is_free), None)
        self._times, self._trust = StepTimes(slope), Trust()
        self._acceptance = {drafter.name: Acceptance(_PRIOR) for drafter in drafters}
        self._guesses: dict[int, _Guess] = {}  # by seq
        # by seq: steps until free drafters are asked again, and of the whole rest
        self._rests: dict[int, tuple[int, int]] = {}
        self._num_failures: Counter[str] = Counter()  # in a row, by drafter
        # when a step was last collected, if the next was to follow at once
        self._last_s: float | None = None
        self._proposed = NOTHING_DRAFTED  # for the step that is being planned
        self._drafted: dict[int, Drafted] = {}  # by step in flight

    @classmethod
    def of(cls, engine: Engine, components: EngineComponents) -> Drafting | None:
        config = engine.config
        if not components.drafters:
            return None
        return cls(
            components.drafters, config.max_drafts, SLOPES[config.device], config.adaptive_drafts
        )

    # ---- moments

    def propose(self) -> None:
        """Give running requests the drafts that their next step is to verify."""
        scheduler = self.engine.scheduler
        running = []
        for request in scheduler.running:
            if not request.is_plain:
                request.guess(())
            if _can_have_drafts(request):
                running.append(request)
        self._guess(running)
        ready = [
            request
            for request in running
            if self._chance_of(request, request.num_in_flight) >= self.sure
        ]
        nums_allotted, num_expected = self._allot(ready)
        if self._dear is not None:
            left = [request for request in ready if not self._guesses[request.seq].tokens]
            for request in left:
                request.had_drafts = True  # early exits write to its pages
            nums = {
                r.seq: min(nums_allotted[r.seq], r.max_tokens - r.num_output - 1)
                for r in left
                if nums_allotted.get(r.seq)
            }
            self._ask(
                self._dear,
                [_ask_for(request, num) for request in left if (num := nums.get(request.seq))],
            )
        drafted_by = {}
        for request in ready:
            num, first, guess = (
                nums_allotted.get(request.seq, 0),
                request.num_in_flight,
                self._guesses[request.seq],
            )
            if num and guess.tokens:
                request.guess(guess.tokens[first : first + num] if first else guess.tokens[:num])
                drafted_by[request.seq] = guess.drafter
        self._proposed = Drafted(drafted_by, num_expected)

    def fill_plan(self, step: Step) -> None:
        self._drafted[step.plan.step] = self._proposed
        if self.engine.config.acceptance == "rejection":
            step.plan.draft_probs = self.probs(step.plan)

    def results(self, step: Step) -> None:
        """If drafts can be the reason why logits are not numbers, they are computed again without."""
        for item in step.plan.items if step.broken else ():
            if item.row not in step.broken or item.seq not in self.engine.live_of:
                continue
            live = self.engine.live_of[item.seq]
            request = live.requests[live.samples[item.seq]]
            # the pages that the step wrote
            has_left = request.epoch != item.epoch and request.row != item.row
            if request.had_drafts and request.takes_drafts and not has_left:
                reason = "a draft's logits are not numbers: computed again without drafts"
                self.engine.scheduler.table.compute_again(request, reason)

    def probs(self, plan: StepPlan) -> dict[tuple[int, int], bytes]:
        """The distributions that drafts of a plan were drawn from, by row and position."""
        probs = {}
        for item in plan.items if plan.drafts else ():
            # it may have just failed
            guess = self._guesses.get(item.seq, _NO_GUESS).tokens if item.num_drafts else ()
            if isinstance(guess, Drawn):
                first = item.start + item.count - item.num_drafts
                for i in range(item.num_drafts):
                    probs[item.row, first + i] = guess.probs_DV[i].tobytes()
        return probs

    def waits(self) -> bool:
        """Steps are in flight. Should the next be planned only when their tokens are known? Yes, if
        drafts are being verified that may be wrong, or if those that could follow are worth more
        than the time in which the device has nothing to do. Where tokens under way can be guessed,
        what follows them can be, too."""
        scheduler = self.engine.scheduler
        running = [
            request
            for request in scheduler.running
            if request.num_in_flight and _can_have_drafts(request)
        ]
        self._guess(running)
        chances = [
            self._chance_of(request, request.num_drafts_in_flight)
            for request in running
            if request.num_drafts_in_flight
        ]
        if chances:
            return not all(chances) or sum(chances) < self.sure * len(chances)
        unsure = [
            request
            for request in running
            if self._chance_of(request, request.num_in_flight) < self.sure
        ]
        return bool(self._allot(unsure)[0])

    def _chance_of(self, request: Request, num_tokens: int) -> float:
        """That so many of its tokens in flight are those that were guessed; 0 where what follows
        waits for them in any case."""
        if not num_tokens:
            return 1.0
        guess = self._guesses[request.seq]
        if (
            self._dear is not None
            or request.waits_for_tokens
            or isinstance(guess.tokens, Tree)
            or not guess.tokens
        ):
            return 0.0
        return self._acceptance[guess.drafter].rate(request.seq) ** num_tokens

    def _guess(self, requests: Sequence[Request]) -> None:
        """The guess of a free drafter for each request. A drafter that was asked since its last
        token came is asked again only for more."""
        asks = []
        for request in requests:
            known, most = self._guesses.get(request.seq), self._max_drafts + request.num_in_flight
            if known is None or known.most < most:
                self._guesses[request.seq] = _Guess("", (), most)
                if (
                    request.seq not in self._rests
                    or not self._rests[request.seq][0]
                    or request.params.has_masks
                ):
                    asks.append(_ask_for(request, most))
        for drafter in self._free:
            asks = self._ask(drafter, asks)

    def _ask(self, drafter: Drafter, asks: list[Ask]) -> list[Ask]:
        """Those that it has no guess for."""
        proposals = self._propose(drafter, asks)
        if not any(proposals):
            return asks
        for ask, tokens in zip(asks, proposals, strict=True):
            if tokens:
                self._guesses[ask.seq] = _Guess(drafter.name, tokens, ask.most)
        return [ask for ask, tokens in zip(asks, proposals, strict=True) if not tokens]

    def _propose(self, drafter: Drafter, asks: Sequence[Ask]) -> Sequence[Sequence[int]]:
        """A drafter that fails has no guess; after three times in a row it is not asked any more."""
        if not asks or (self._num_failures and self._num_failures[drafter.name] >= _MAX_FAILURES):
            return ()
        try:
            proposals = drafter.propose(asks)
        except Exception:
            self._num_failures[drafter.name] += 1
            traceback.print_exc()
            return ()
        if self._num_failures:
            self._num_failures.pop(drafter.name, None)
        if any(ask.placeholders for ask in asks):
            return [
                _until_placeholder(tokens, ask) for tokens, ask in zip(proposals, asks, strict=True)
            ]
        return proposals

    def _allot(self, requests: Sequence[Request]) -> tuple[dict[int, int], float]:
        """The number of drafts of each request, and the number of all that may be right. The first
        tokens of a guess stand for those in flight."""
        rates: dict[int, float | Sequence[float]] = {}
        most: dict[int, int] = {}
        for request in requests:
            seq, guess = request.seq, self._guesses[request.seq]
            num, drafter = len(guess.tokens) - request.num_in_flight, guess.drafter
            if not guess.tokens and self._dear is not None:
                num, drafter = self._max_drafts, self._dear.name
            num = min(num, request.max_tokens - (request.num_known - request.num_prompt) - 1)
            if num > 0:
                rates[seq], most[seq] = self._chances(drafter, request, num), num
        if not rates:
            return {}, 0.0
        scheduler = self.engine.scheduler
        num_running, room = len(scheduler.running), scheduler.draft_capacity.most
        if not self._adaptive:
            return most, 0.0  # the scheduler takes what fits
        return allot(rates, most, num_running, room, self._times, self._trust.value)

    def _chances(self, drafter: str, request: Request, num: int) -> float | Sequence[float]:
        """The chance of each draft, if the drafter knows; else how likely one is right if those
        before it were."""
        knowing = self._knowing.get(drafter)
        chances = None if knowing is None else knowing.chances(request.params, num)
        return self._acceptance[drafter].rate(request.seq) if chances is None else chances

    def progress(self, step: Step) -> None:
        """A step was committed. One that is launched ahead, as early as it can be, says what steps
        take; one that follows a step with drafts is not."""
        plan, now = step.plan, self.engine.clock.now()
        drafted = self._drafted.get(plan.step, NOTHING_DRAFTED)
        self._drafted = {
            number: each for number, each in self._drafted.items() if number > plan.step
        }
        is_ahead = step.is_ahead or not self.engine.runner.steps_ahead
        if (plan.drafts or is_ahead) and all(item.count == item.num_draws for item in plan.items):
            started_s = step.started_s if self._last_s is None else self._last_s
            self._times.add(plan.num_tokens, bool(plan.drafts), now - started_s)
        # else the next does not follow at once
        self._last_s = now if self.engine.scheduler.has_work else None
        verified: dict[str, list[tuple[str, int, int]]] = {}  # by drafter
        drafts_of = (
            {item.seq: _drafts_in(plan, item.row) for item in plan.items if item.num_drafts}
            if plan.drafts
            else {}
        )
        for done in step.progress:
            seq = done.request.seq
            guess = self._guesses.pop(seq, _NO_GUESS)
            name, tokens = guess.drafter, guess.tokens[:1]
            if done.num_drafts:
                name, tokens = drafted.by[seq], drafts_of[seq]
            if not tokens:
                self._acceptance[self.drafters[-1].name].fade(seq)
                if guess is not _NO_GUESS:  # else nobody was asked: its first token
                    self._rest(seq, False)
                continue
            num_right, num_compared = _compare(tokens, done.token_ids)
            self._rest(seq, num_right > 0)
            self._acceptance[name].add(seq, num_compared, num_right)
            if done.num_drafts:
                # the token that ends a request may be a draft itself
                num_saved = min(num_right, len(done.token_ids) - 1)
                verified.setdefault(name, []).append(
                    (done.request.request_id, done.num_drafts, num_saved)
                )
        if verified and self._adaptive:
            self._trust.add(
                drafted.num_expected, sum(num for of in verified.values() for _, _, num in of)
            )
        else:
            self._trust.fade()
        for name, of in verified.items():
            self.engine.emit(events.DraftsVerified(now, plan.step, name, tuple(of)))

    def _rest(self, seq: int, is_right: bool) -> None:
        """After a step of a request; `is_right`: there was a guess, and it was."""
        if not self._adaptive:
            return
        left, whole = self._rests.get(seq, (0, 0))
        if is_right:
            self._rests.pop(seq, None)
        elif left:
            self._rests[seq] = left - 1, whole
        else:
            whole = min(2 * whole + 1, _LONGEST_REST)
            self._rests[seq] = whole, whole

    def end(self, live: LiveRequest, request: Request) -> None:
        if request.params.beams is not None:
            return
        self._guesses.pop(request.seq, None)
        self._rests.pop(request.seq, None)
        for drafter in self.drafters:
            drafter.forget(request.seq, request.tokens, request.spec.salt)
            self._acceptance[drafter.name].forget(request.seq)


def _ask_for(request: Request, most: int) -> Ask:
    of_prompt = request.num_prompt, request.params, most, request.spec.salt, request.placeholders
    return Ask(request.seq, request.row, request.tokens, *of_prompt)


def _until_placeholder(tokens: Sequence[int], ask: Ask) -> Sequence[int]:
    """Drafts up to one that was copied from where the prompt has no text."""
    copied = not isinstance(tokens, Drawn | Tree) and not ask.placeholders.isdisjoint(tokens)
    return (
        list(takewhile(lambda token: token not in ask.placeholders, tokens)) if copied else tokens
    )


def _drafts_in(plan: StepPlan, row: int) -> Sequence[int]:
    tokens = plan.drafts[row]
    return Tree(tokens, plan.trees[row]) if row in plan.trees else tokens


def _compare(drafts: Sequence[int], tokens: Sequence[int]) -> tuple[int, int]:
    """Counts how many drafts in a row are right, and how many there are in a row at most."""
    if isinstance(drafts, Tree):
        return len(
            right_path(drafts.tokens, drafts.parents, _after_each(drafts, tokens))
        ), drafts.depth
    return next(
        (i for i, draft in enumerate(drafts) if tokens[i : i + 1] != [draft]), len(drafts)
    ), len(drafts)


def _after_each(tree: Tree, tokens: Sequence[int]) -> list[int]:
    """The token drawn after the last known one and after each draft, as far as there is one."""
    padded = [*tokens, *[-1] * tree.depth]
    return [padded[depth] for depth in (0, *depths_of(tree.parents))]


def _can_have_drafts(request: Request) -> bool:
    params = request.params
    if request.kv_policy is not None:  # what it gives up cannot be taken back
        return False
    is_decoding = request.status is Status.RUNNING and request.num_needed <= 1
    return is_decoding and request.takes_drafts and params.pooling is None and params.beams is None
