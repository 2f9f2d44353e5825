"""The model of how long a step would take."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple, Protocol

import msgspec

from tidemill.sched.plan import StepPlan

# What a file may hold. Nothing takes as long as ten days.
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e6)]
Amount = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
Rise = Annotated[float, msgspec.Meta(ge=0, le=1)]


class CostModel(Protocol):
    """It may also have `host_s`: how long the host takes to plan and launch a step, which a runner
    that works ahead hides. With `shape_s`, the time of a step by its shape, and `decode_line`, of a
    step in which so many sequences decode the fixed part and what is added per token of all
    contexts and per token of the longest, steps need not be simulated sequence by sequence, nor
    those that only repeat each other one by one. `rest_s`: the part of a shape's time that
    `decode_line` leaves out. `starting_s`: how much longer the host takes if requests of so many
    tokens start. `submit_s`: how long taking a request takes that comes while nothing is computed;
    what else comes meanwhile is in its step. `heat`: of a Heat, its decay, and what it adds to
    steps in which all decode and to those with prompts."""

    def step_s(self, plan: StepPlan) -> float: ...


class StepShape(NamedTuple):
    """The shape of a step, by which its time is predicted. Drafts count as sequences that decode."""

    num_decoding: int  # tokens of sequences with one token each
    decode_context: int  # tokens that these see, those that several share counted once
    longest: int  # the most that one of them sees
    num_prompt: int  # tokens of prompts
    pairs: int  # of a prompt's token and one that it sees
    num_draws: int  # tokens that are drawn
    num_new: int  # tokens of requests that start in this step
    # of the context, what was counted once though more than one sees it: see Shapes
    num_shared: int = 0
    longest_prompt: int = 0  # the most that a token of a prompt sees
    prompt_context: int = 0  # what the last tokens of prompts see

    def next(self) -> StepShape:
        """The shape of the next step with the same sequences, of which at most one has a prompt
        that goes on."""
        num, prompt = self.num_decoding, self.num_prompt
        context, longest = self.decode_context + num, self.longest + (num > 0)
        pairs, longest_prompt = self.pairs + prompt * prompt, self.longest_prompt + prompt
        seen = self.prompt_context + prompt
        return StepShape(
            num,
            context,
            longest,
            prompt,
            pairs,
            self.num_draws,
            0,
            self.num_shared,
            longest_prompt,
            seen,
        )


class Steady(Protocol):
    """Sequences of a step that have no items in its plan, as `SteadyDecoding` has them."""

    @property
    def num_steady(self) -> int: ...

    @property
    def steady_context(self) -> tuple[int, int]: ...

    def steady_rows(self) -> list[int]: ...


class Shapes:
    """Shapes of plans. It follows which pages the rows have, since some attention kernels read what
    rows share only once."""

    def __init__(self, page_size: int, shared_unit: int = 0, first_pays: bool = False) -> None:
        """`shared_unit`: tokens that are read once if they are the same; 0: all are read for each.
        They count in `num_shared` as often as they are seen, or, if the first that sees them pays
        as if they were its own, once less."""
        self._unit, self._pages, self._first_pays = (
            shared_unit,
            shared_unit // page_size,
            first_pays,
        )
        # by row: the last page of each unit of its prompt, which may have left it
        self._marks: dict[int, list[int]] = {}
        self._firsts: Counter[int] = Counter()  # of these pages, the first of each row
        # rows whose first is that of another row as well, less one for each such page
        self._num_again = 0

    def of(self, plan: StepPlan, steady: Steady | None = None) -> StepShape:
        """`steady`: has the sequences of the plan that have no items."""
        num_prompt = pairs = num_new = longest_prompt = prompt_context = 0
        if plan.new_rows:
            num_new = sum([len(row.token_ids) for row in plan.new_rows])
        if self._pages and (plan.new_rows or plan.row_copies):
            self._follow(plan)
        num_decoding = decode_context = longest = 0
        num_steady = 0 if steady is None else steady.num_steady
        num_draws, starts = num_steady, list[int]()
        if plan.items:
            starts = [item.start for item in plan.items if item.count == 1]  # nearly all
            num_decoding, decode_context = len(starts), sum(starts) + len(starts)
            longest = max(starts) + 1 if starts else 0
            num_draws += len([item for item in plan.items if item.samples and item.count == 1])
        if num_steady and steady is not None:
            context, most = steady.steady_context
            num_decoding, decode_context = num_decoding + num_steady, decode_context + context
            longest = most if most > longest else longest
        for item in (
            [item for item in plan.items if item.count > 1] if len(starts) < len(plan.items) else ()
        ):
            end = item.start + item.count
            if item.count == item.num_drafts + 1:
                num_decoding += item.count
                # a token and its drafts share all of it
                decode_context += end if self._unit else item.count * end
                longest = end if end > longest else longest
                num_draws += item.count if item.samples else 0
            else:
                num_prompt += item.count
                pairs += item.count * (item.start + end + 1) // 2
                prompt_context += end
                longest_prompt = end if end > longest_prompt else longest_prompt
                num_draws += item.num_draws
        num_shared = num_again = 0
        if self._num_again:
            rows = [item.row for item in plan.items if item.count == 1]
            num_shared, num_again = self._shared(rows + (steady.steady_rows() if steady else []))
        return StepShape(
            num_decoding, decode_context - num_again, longest, num_prompt, pairs, num_draws, num_new, num_shared, longest_prompt,
            prompt_context,
        )  # fmt: skip

    def of_steady(self, num: int, steady: Steady) -> StepShape:
        """The shape of a step in which these alone decode."""
        context, longest = steady.steady_context
        num_shared = num_again = 0
        if self._num_again:
            num_shared, num_again = self._shared(steady.steady_rows())
        return StepShape(num, context - num_again, longest, 0, 0, num, 0, num_shared)

    def _follow(self, plan: StepPlan) -> None:
        copied = {copy.target: self._marks.get(copy.source, []) for copy in plan.row_copies}
        for row in plan.new_rows:
            num = len(row.token_ids) // self._unit if len(row.page_ids) == 1 else 0
            self._mark(row.row, row.page_ids[0][self._pages - 1 : num * self._pages : self._pages])
        for target, marks in copied.items():
            self._mark(target, marks)

    def _mark(self, row: int, marks: list[int]) -> None:
        if before := self._marks.get(row):
            self._firsts[before[0]] -= 1
            self._num_again -= self._firsts[before[0]] > 0
        if marks:
            self._num_again += self._firsts[marks[0]] > 0
            self._firsts[marks[0]] += 1
        self._marks[row] = marks

    def _shared(self, rows: Sequence[int]) -> tuple[int, int]:
        """Tokens of context that several sequences share, as they count in `num_shared`, and how
        many of these are not read."""
        marks = self._marks
        firsts = Counter([own[0] for row in rows if (own := marks.get(row))])
        several = {page for page, num in firsts.items() if num > 1}
        if not several:
            return 0, 0
        seen: Counter[int] = Counter()
        for row in rows:
            if (own := marks.get(row)) and own[0] in several:
                seen.update(own)
        nums = [num for num in seen.values() if num > 1]
        num_again = self._unit * (sum(nums) - len(nums))
        return num_again if self._first_pays else self._unit * sum(nums), num_again


@dataclass(frozen=True, slots=True)
class LinearCost:
    """A fixed part, a part per token computed, and a part per token of context read."""

    fixed_s: float = 0.0
    per_token_s: float = 0.0
    per_context_token_s: float = 0.0
    host_s: float = 0.0

    def step_s(self, plan: StepPlan) -> float:
        return self.shape_s(Shapes(1).of(plan))

    def shape_s(self, shape: StepShape) -> float:
        context, num_tokens = (
            shape.decode_context + shape.prompt_context,
            shape.num_decoding + shape.num_prompt,
        )
        return self.fixed_s + self.per_token_s * num_tokens + self.per_context_token_s * context

    def decode_line(self, num_decoding: int) -> tuple[float, float, float]:
        return self.fixed_s + self.per_token_s * num_decoding, self.per_context_token_s, 0.0


class Curve(msgspec.Struct, frozen=True):
    """Seconds by a number, straight between the points. Beyond the last it rises as it did over the
    last half: two points side by side say little about what follows, and on a GPU the larger one
    may even take less."""

    at: list[Amount]
    seconds: list[Seconds]

    def value(self, x: int) -> float:
        if x <= self.at[0] or len(self.at) == 1:
            return self.seconds[0]
        if x > self.at[-1]:
            return self.seconds[-1] + self.rise * (x - self.at[-1])
        i = bisect_left(self.at, x)
        x0, x1, y0, y1 = self.at[i - 1], self.at[i], self.seconds[i - 1], self.seconds[i]
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)

    @property
    def rise(self) -> float:
        """Beyond the last point. Of a curve with several."""
        i = (bisect_right(self.at, self.at[-1] // 2) or 1) - 1
        return max(0.0, (self.seconds[-1] - self.seconds[i]) / (self.at[-1] - self.at[i]))


_HOT_TOKENS = 1024  # of a step that draws all the power there is
COLD = 12  # times the decay: after that, nothing is left


class Heat:
    """The heat that steps with many tokens leave behind: a GPU at the limit of its power lowers its
    clock, and raises it again when there is less to do. A level from 0 to 1 that falls by itself
    and rises in steps with prompts."""

    def __init__(self, decay_s: float) -> None:
        self._decay_s, self._level, self._at_s = decay_s, 0.0, 0.0

    @property
    def state(self) -> tuple[float, float, float]:
        """The level, when it was that, and how fast it falls."""
        return self._level, self._at_s, self._decay_s

    def level(self, now: float) -> float:
        age = (now - self._at_s) / self._decay_s
        return self._level * math.exp(-age) if age < COLD else 0.0

    def add(self, begin_s: float, end_s: float, num_tokens: int) -> None:
        """A step with a prompt."""
        kept = math.exp((begin_s - end_s) / self._decay_s)
        self._level = self.level(begin_s) * kept + min(1.0, num_tokens / _HOT_TOKENS) * (1 - kept)
        self._at_s = end_s


class FittedCost(msgspec.Struct, frozen=True):
    """The cost that `fit` made of measured steps. Steps in which every sequence decodes have a
    curve of their own, since they run as other code does: on a GPU as one CUDA graph."""

    decode: Curve  # by sequences
    mixed: Curve  # by tokens, of steps with a prompt
    decode_context_s: Seconds  # per token of context
    longest_s: Seconds  # per token of the longest context
    mixed_context_s: Seconds
    pair_s: Seconds
    draw_s: Seconds  # per token drawn, in steps with a prompt
    new_token_s: Seconds  # per token of a request that starts
    # planning and launching a step: waited for only where no step in flight takes longer
    host_s: Seconds = 0.0
    # per token of context that is read once for several, as it counts in `num_shared`
    shared_s: Seconds = 0.0
    # tokens that are read once if they are the same; 0: all are read for each
    shared_unit: Amount = 0
    decode_sizes: list[Amount] = []  # numbers of tokens that a step is padded to; none: it is not
    mixed_sizes: list[Amount] = []
    # per token of the longest context of a prompt: one tile of it takes all keys in turn
    longest_prompt_s: Seconds = 0.0
    # of a step in which all decode and some share their context: one more kernel
    sharing_s: Seconds = 0.0
    heat_decay_s: Seconds = 0.0  # see Heat; 0: steps do not depend on those before
    decode_rise: Rise = 0.0  # of a step's time, what full heat adds
    mixed_rise: Rise = 0.0
    # of shared context, see Shapes: so on a CPU, whose caches have it for the others
    first_pays: bool = False
    # from when a request comes while nothing is computed until the next step is planned
    submit_s: Seconds = 0.0
    host_new_s: Seconds = 0.0  # more of `host_s`, if a request starts
    # and per token of it: keys of its pages, and what is sent to the device
    host_token_s: Seconds = 0.0

    def step_s(self, plan: StepPlan) -> float:
        """If no rows share pages."""
        return self.shape_s(Shapes(1).of(plan))

    def shape_s(self, shape: StepShape) -> float:
        rest = self.rest_s(shape)
        if not shape.num_prompt:
            fixed, context_s, longest_s = self.decode_line(shape.num_decoding)
            return fixed + context_s * shape.decode_context + longest_s * shape.longest + rest
        fixed = self.mixed.value(padded(shape.num_decoding + shape.num_prompt, self.mixed_sizes))
        attention = self.mixed_context_s * shape.decode_context + self.pair_s * shape.pairs
        return (
            fixed
            + attention
            + self.longest_prompt_s * shape.longest_prompt
            + self.draw_s * shape.num_draws
            + rest
        )

    def rest_s(self, shape: StepShape) -> float:
        sharing_s = self.sharing_s if shape.num_shared and not shape.num_prompt else 0.0
        return self.new_token_s * shape.num_new + self.shared_s * shape.num_shared + sharing_s

    def scaled(self, times: float) -> FittedCost:
        """The cost on a machine on which everything takes so many times as long."""
        curves = {name: Curve(curve.at, [value * times for value in curve.seconds]) for name, curve in (
            ("decode", self.decode), ("mixed", self.mixed),
        )}  # fmt: skip
        seconds = {name: getattr(self, name) * times for name in _SCALED}
        return msgspec.structs.replace(self, **curves, **seconds)

    def starting_s(self, num_new: int) -> float:
        return self.host_new_s + self.host_token_s * num_new if num_new else 0.0

    @property
    def heat(self) -> tuple[float, float, float]:
        return self.heat_decay_s, self.decode_rise, self.mixed_rise

    def decode_line(self, num_decoding: int) -> tuple[float, float, float]:
        return (
            self.decode.value(padded(num_decoding, self.decode_sizes)),
            self.decode_context_s,
            self.longest_s,
        )


_SCALED = (
    "decode_context_s", "longest_s", "mixed_context_s", "pair_s", "draw_s", "new_token_s", "host_s", "shared_s",
    "longest_prompt_s", "sharing_s", "submit_s", "host_new_s", "host_token_s",
)  # fmt: skip


def padded(num: int, sizes: Sequence[int]) -> int:
    at = bisect_left(sizes, num)
    return sizes[at] if at < len(sizes) else num
