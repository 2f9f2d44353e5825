"""Agents among one-shot traffic: how much of their prompts is found in the KV cache, with and without retention.

    python -m bench.retention

A session asks, calls a tool, and comes back with the result some time later, with all that was said so far. One-shot prompts are
never asked again, but begin with one of a few system prompts. The real scheduler and KV manager run on the virtual clock.
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import dataclass

from tidemill.events import Admitted, FirstToken
from tidemill.sim.cost import LinearCost
from tidemill.sim.simulator import Arrival, SimConfig, simulate
from tidemill.wire import Hold

COST = LinearCost(fixed_s=0.01, per_token_s=0.00025)
SYSTEM = 256  # tokens that a kind of one-shot prompt begins with


@dataclass(frozen=True)
class Traffic:
    num_sessions: int = 12
    num_turns: int = 8
    tool_s: float = 20.0  # that a tool takes, at most; at least a quarter of it
    one_shots_per_s: float = 6.0
    seconds: float = 200.0
    seed: int = 0


def arrivals(traffic: Traffic, retain_s: float) -> list[Arrival]:
    """`retain_s`: for which a session is retained; 0: it is not."""
    chance, made = random.Random(traffic.seed), []
    for session in range(traffic.num_sessions):
        at, prompt = chance.uniform(0, traffic.seconds / 4), _tokens(chance, 1500)
        for turn in range(traffic.num_turns):
            name, num_output = f"agent {session} {turn}", chance.randrange(20, 60)
            holds = (Hold(f"session {session}", 0, retain_s, reason="a tool call is under way"),) if retain_s else ()
            made.append(Arrival(name, at, len(prompt), num_output, prompt_ids=tuple(prompt), holds=holds))
            prompt = [*prompt, *[0] * num_output, *_tokens(chance, chance.randrange(50, 400))]  # the simulator's tokens are 0
            at += 3 + chance.uniform(traffic.tool_s / 4, traffic.tool_s)
    systems, at = [_tokens(chance, SYSTEM) for _ in range(4)], 0.0
    while (at := at + chance.expovariate(traffic.one_shots_per_s)) < traffic.seconds:
        prompt = [*chance.choice(systems), *_tokens(chance, chance.randrange(100, 600))]
        made.append(Arrival(f"one-shot {len(made)}", at, len(prompt), chance.randrange(10, 50), prompt_ids=tuple(prompt)))
    return made


def _tokens(chance: random.Random, num: int) -> list[int]:
    return chance.choices(range(1, 30_000), k=num)


@dataclass(frozen=True)
class Figures:
    cached: float  # of the tokens of prompts, what was found
    ttft_s: float  # mean


def measure(traffic: Traffic, retain_s: float, num_pages: int, max_pinned: float = 0.5) -> dict[str, Figures]:
    """By kind of request."""
    given = arrivals(traffic, retain_s)
    config = SimConfig(num_rows=32, token_budget=512, num_pages=num_pages, max_pinned=max_pinned)
    result = simulate(given, config, COST)
    found = {event.request_id: event.num_cached for event in reversed(result.events) if isinstance(event, Admitted)}
    first = {event.request_id: event.since_arrival_s for event in result.events if isinstance(event, FirstToken)}
    figures = {}
    for kind in ("agent", "one-shot"):
        ours = [one for one in given if one.request_id.startswith(kind)]
        cached = sum(found[one.request_id] for one in ours) / sum(one.num_prompt for one in ours)
        figures[kind] = Figures(cached, statistics.mean(first[one.request_id] for one in ours))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, default=3000, help="of the KV cache, 16 tokens each")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print("| sessions retained for | agents: tokens cached | agents: TTFT mean | one-shot: tokens cached | one-shot: TTFT mean |")
    print("|---|---|---|---|---|")
    for retain_s in (0.0, 10.0, 300.0):
        figures = measure(Traffic(seed=args.seed), retain_s, args.pages)
        cells = [f"{100 * one.cached:.1f} % | {one.ttft_s:.2f} s" for one in figures.values()]
        print(f"| {retain_s:.0f} s | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
