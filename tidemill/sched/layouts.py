"""Layouts: engines that are alike against prefill and decode engines, for a measured load. Numbers
only.

A step costs `fixed_s`, and more for each token of a prompt and for each sequence that decodes.
While sequences decode, steps follow each other; each gives a token to all of them. So a prompt's
chunk in a step is waited for by every sequence of its engine. Where other engines compute prompts,
nobody waits for them, but each engine has only one kind of work: that is worth it if both kinds
fill their engines.

What is left out: the cost of attention over long contexts, and bursts; arrivals are taken to be
random and independent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

MOST_BUSY = 0.9  # beyond it queues grow without bound
_GAIN = 1.2  # of the p99 inter-token latency, at least
_FADES = 0.999  # of an observation, what is left after the next one


@dataclass(frozen=True, slots=True)
class Load:
    rate: float  # requests a second
    num_prompt: float  # tokens of a prompt that are computed, in the mean
    num_output: float

    def __str__(self) -> str:
        return f"{self.rate:.3g} requests/s of {self.num_prompt:.0f} new prompt tokens and {self.num_output:.0f} output tokens"


@dataclass(frozen=True, slots=True)
class StepCost:
    fixed_s: float
    prompt_token_s: float
    sequence_s: float

    def times(self, factor: float) -> StepCost:
        """The costs of an engine that is so many times as slow."""
        return StepCost(
            factor * self.fixed_s, factor * self.prompt_token_s, factor * self.sequence_s
        )


@dataclass(frozen=True, slots=True)
class Engines:
    """Engines of one kind that share a load."""

    num: int
    cost: StepCost
    token_budget: int  # of a step
    num_slots: int


@dataclass(frozen=True, slots=True)
class Expected:
    layout: str
    busy: float  # of the engines that are busiest; 1 and more: they cannot keep up
    itl_p50_s: float
    itl_p99_s: float
    ttft_s: float  # in the mean

    def __str__(self) -> str:
        if self.busy >= 1:
            return f"{self.layout}: cannot keep up ({100 * self.busy:.0f} % busy)"
        latency = f"p99 {1000 * self.itl_p99_s:.1f} ms between tokens, first token after {1000 * self.ttft_s:.0f} ms"
        return f"{self.layout}: {latency}, {100 * self.busy:.0f} % busy"


@dataclass(frozen=True, slots=True)
class Advice:
    disaggregate: bool
    reason: str
    alike: Expected
    split: Expected

    @property
    def gain(self) -> float:
        """The gain in p99 inter-token latency, if engines have roles; 0: they cannot keep up."""
        return (
            self.alike.itl_p99_s / self.split.itl_p99_s
            if self.split.busy < 1 and self.split.itl_p99_s
            else 0.0
        )


def compare(load: Load, alike: Engines, split: Engines, found: float = 1.0) -> Advice:
    """`split`: engines that would be divided into the two roles. `found`: the part of a prompt's KV
    that decode engines need not compute again."""
    together = expect_alike(load, alike)
    apart = min(
        (expect_split(load, split, num, found) for num in range(1, split.num)),
        key=lambda f: (f.busy, f.itl_p99_s),
    )
    advice = Advice(False, "", together, apart)
    if load.num_output <= 1:
        why = "answers have one token: nothing is decoded"
    elif apart.busy > MOST_BUSY:
        why = "its busiest engines would not keep up"
    elif together.busy > MOST_BUSY:
        return replace(advice, disaggregate=True, reason="engines that do both do not keep up")
    elif advice.gain < _GAIN:
        why = f"the p99 between tokens would improve {advice.gain:.2f} times, which is too little"
    elif together.ttft_s and advice.gain < apart.ttft_s / together.ttft_s:
        why = f"the first token would take {apart.ttft_s / together.ttft_s:.2f} times as long"
    else:
        return replace(
            advice,
            disaggregate=True,
            reason=f"the p99 between tokens improves {advice.gain:.2f} times",
        )
    return replace(advice, reason=why)


def expect_alike(load: Load, engines: Engines) -> Expected:
    """Each engine computes prompts and decodes, a chunk of a prompt in a step beside the tokens of
    others."""
    rate, cost = load.rate / engines.num, engines.cost
    num_chunks, chunk = _chunks(load, engines)
    tokens_s = rate * (load.num_prompt * cost.prompt_token_s + load.num_output * cost.sequence_s)
    busy = tokens_s + cost.fixed_s * rate * max(num_chunks, load.num_output / engines.num_slots)
    name = f"{engines.num} engine{'s' * (engines.num > 1)} for both"
    if busy >= 1:
        return Expected(name, busy, math.inf, math.inf, math.inf)
    step_s, short_s = _steps(rate, load, cost, tokens_s, engines.num_slots)
    long_s = short_s + chunk * cost.prompt_token_s
    shared = rate * num_chunks * step_s  # of the steps: those with a chunk
    own_s = num_chunks * long_s
    wait_s = _wait_s(rate * own_s, own_s)
    return Expected(
        name,
        busy,
        long_s if shared > 0.5 else short_s,
        long_s if shared > 0.01 else short_s,
        wait_s + own_s,
    )


def expect_split(load: Load, engines: Engines, num_prefill: int, found: float = 1.0) -> Expected:
    """`num_prefill` of the engines compute prompts, the others decode."""
    cost, num_decode = engines.cost, engines.num - num_prefill
    num_chunks, chunk = _chunks(load, engines)
    own_s = num_chunks * cost.fixed_s + load.num_prompt * cost.prompt_token_s
    prefill_busy = load.rate / num_prefill * own_s
    rate, num_again = load.rate / num_decode, (1 - found) * load.num_prompt
    tokens_s = rate * (num_again * cost.prompt_token_s + load.num_output * cost.sequence_s)
    decode_busy = tokens_s + cost.fixed_s * rate * load.num_output / engines.num_slots
    busy, name = max(prefill_busy, decode_busy), f"{num_prefill} prefill + {num_decode} decode"
    if busy >= 1:
        return Expected(name, busy, math.inf, math.inf, math.inf)
    step_s, short_s = _steps(rate, load, cost, tokens_s, engines.num_slots)
    long_s = short_s + min(chunk, num_again) * cost.prompt_token_s
    shared = rate * math.ceil(num_again / engines.token_budget) * step_s
    wait_s = _wait_s(prefill_busy, own_s)
    return Expected(
        name,
        busy,
        long_s if shared > 0.5 else short_s,
        long_s if shared > 0.01 else short_s,
        wait_s + own_s,
    )


def _chunks(load: Load, engines: Engines) -> tuple[int, float]:
    """The number of chunks of a prompt, and their size."""
    num = max(1, math.ceil(load.num_prompt / engines.token_budget))
    return num, load.num_prompt / num


def _steps(
    rate: float, load: Load, cost: StepCost, tokens_s: float, num_slots: int
) -> tuple[float, float]:
    """The mean time of an engine's step, and that of one without a prompt. `tokens_s`: what tokens
    alone take of a second."""
    step_s = cost.fixed_s / (1 - tokens_s)
    num_decoding = min(max(rate * load.num_output * step_s, 1.0), num_slots)
    return step_s, cost.fixed_s + num_decoding * cost.sequence_s


def _wait_s(busy: float, own_s: float) -> float:
    """The wait for the prompts before one's own: a queue with random arrivals and one size."""
    return busy / (2 * (1 - min(busy, 0.99))) * own_s


@dataclass(slots=True)
class StepCosts:
    """Least squares over faded observations of steps: (1, prompt tokens, sequences) against
    seconds."""

    num: int = 0
    # of the three with each other
    _products: list[float] = field(default_factory=lambda: [0.0] * 6)
    _against: list[float] = field(default_factory=lambda: [0.0] * 3)  # of each with the seconds

    def observe(self, num_prompt: int, num_sequences: int, seconds: float) -> None:
        self.num += 1
        x, y = float(num_prompt), float(num_sequences)
        for at, value in enumerate((1.0, x, y, x * x, x * y, y * y)):
            self._products[at] = _FADES * self._products[at] + value
        for at, value in enumerate((seconds, x * seconds, y * seconds)):
            self._against[at] = _FADES * self._against[at] + value

    @property
    def cost(self) -> StepCost | None:
        """None: steps were too few, or too much alike to tell the parts of their cost apart."""
        weight, x, y, xx, xy, yy = self._products
        rows = [
            [weight, x, y, self._against[0]],
            [x, xx, xy, self._against[1]],
            [y, xy, yy, self._against[2]],
        ]
        found = _solved(rows) if self.num >= 20 else None
        if found is None or found[1] <= 0:
            return None
        return StepCost(max(found[0], 1e-6), found[1], max(found[2], 0.0))


def _solved(rows: list[list[float]]) -> list[float] | None:
    """Three equations, by elimination; None if they are nearly dependent."""
    for at in range(3):
        best = max(
            range(at, 3),
            key=lambda row: (
                abs(rows[row][at]) / max(map(abs, rows[row][:3])) if any(rows[row][:3]) else 0.0
            ),
        )
        rows[at], rows[best] = rows[best], rows[at]
        if abs(rows[at][at]) <= 1e-9 * max(1.0, *map(abs, rows[at][:3])):
            return None
        for row in range(at + 1, 3):
            factor = rows[row][at] / rows[at][at]
            rows[row] = [a - factor * b for a, b in zip(rows[row], rows[at], strict=True)]
    third = rows[2][3] / rows[2][2]
    second = (rows[1][3] - rows[1][2] * third) / rows[1][1]
    return [(rows[0][3] - rows[0][1] * second - rows[0][2] * third) / rows[0][0], second, third]
