"""Prefix hits and planning time of both prefix indexes and both orders of the queue: scheduler and
KV manager only, no model.

python -m bench.prefix                                             questions about documents, more than fit the cache
python -m bench.prefix --trace mooncake_conversation.jsonl         a recorded hour of conversations
python -m bench.prefix --misses                                    what prompts of which nothing is cached pay for the cache
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from itertools import product
from typing import Any

from tidemill.kv.manager import INDEXES, KVManager
from tidemill.planning.cost import LinearCost
from tidemill.planning.simulator import Arrival, SimConfig, SimResult, simulate
from tidemill.sched.clock import VirtualClock
from tidemill.sched.policies import make_policy
from tidemill.sched.queue import ORDERS
from tidemill.sched.scheduler import Scheduler
from tidemill.types import events
from tidemill.types.cache_layout import Group
from tidemill.types.events import EventBuffer
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

BLOCK_LEN = 512  # tokens that share a hash id in the trace
_CHUNK = 2048  # tokens of a step


def questions(given: argparse.Namespace) -> list[Arrival]:
    """Each document is asked about several times, in random order and faster than can be answered."""
    chance, arrivals, now = random.Random(0), list[Arrival](), 0.0
    system = [chance.randrange(1000) for _ in range(given.system_len)]
    documents = [
        system + [chance.randrange(1000) for _ in range(given.document_len)]
        for _ in range(given.documents)
    ]
    order = list(range(given.documents)) * given.questions
    chance.shuffle(order)
    for number, document in enumerate(order):
        now += chance.expovariate(given.rate)
        prompt = documents[document] + [
            chance.randrange(1000) for _ in range(chance.randrange(10, 40))
        ]
        arrivals.append(
            Arrival(
                str(number), now, len(prompt), chance.randrange(5, 30), prompt_ids=tuple(prompt)
            )
        )
    return arrivals


def conversations(given: argparse.Namespace) -> list[Arrival]:
    """The trace with lengths divided by `scale`; a block's tokens follow from its id."""
    arrivals, length = list[Arrival](), BLOCK_LEN // given.scale
    with open(given.trace) as file:
        for number, line in zip(range(given.requests), file, strict=False):
            each = json.loads(line)
            tokens = [
                (7919 * block + 31 * i) % 50_000
                for block in each["hash_ids"]
                for i in range(length)
            ]
            prompt = tuple(tokens[: max(each["input_length"] // given.scale, 1)])
            num_output = max(each["output_length"] // given.scale, 1)
            arrivals.append(
                Arrival(
                    str(number),
                    each["timestamp"] / 1000,
                    len(prompt),
                    num_output,
                    prompt_ids=prompt,
                )
            )
    return arrivals


class Timed:
    """A method that notes how much CPU time each call takes."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.method, self.times_us = method, list[float]()

    def __call__(self, scheduler: Scheduler) -> Any:
        begin = time.thread_time()
        try:
            return self.method(scheduler)
        finally:
            self.times_us.append((time.thread_time() - begin) * 1e6)


def run(
    arrivals: list[Arrival], config: SimConfig, cost: LinearCost
) -> tuple[SimResult, list[float]]:
    plan = Scheduler.plan
    timed = Timed(plan)
    Scheduler.plan = lambda self: timed(self)  # type: ignore[method-assign]
    try:
        return simulate(arrivals, config, cost), timed.times_us
    finally:
        Scheduler.plan = plan  # type: ignore[method-assign]


def report(arrivals: list[Arrival], given: argparse.Namespace) -> None:
    num_prompt, cost = (
        sum(arrival.num_prompt for arrival in arrivals),
        LinearCost(given.step_ms / 1e3, given.token_ms / 1e3),
    )
    print(
        f"{len(arrivals)} requests, {num_prompt:,} prompt tokens, {given.pages:,} pages of {given.page_size}, {given.rows} slots"
    )
    print(
        "index  order       hits  copies  evicted  passed   TTFT p50      p99   plan() mean      p99"
    )
    for index, order in product(INDEXES, ORDERS):
        config = SimConfig(
            num_rows=given.rows, token_budget=given.budget, num_pages=given.pages, page_size=given.page_size,
            prefix_index=index, queue_order=order,
        )  # fmt: skip
        result, times_us = run(arrivals, config, cost)
        admitted = {
            each.request_id: each
            for each in reversed(result.events)
            if isinstance(each, events.Admitted)
        }
        hits = sum(each.num_cached for each in admitted.values()) / num_prompt
        num_copies = sum(isinstance(each, events.PageCopied) for each in result.events)
        num_evicted = sum(
            each.num_pages for each in result.events if isinstance(each, events.PagesEvicted)
        )
        num_passed = sum("that came earlier" in each.reason for each in admitted.values())
        waits = [
            result.token_times_s[arrival.request_id][0] - arrival.arrival_s for arrival in arrivals
        ]
        ttft, plan_us = statistics.quantiles(waits, n=100), statistics.quantiles(times_us, n=100)
        print(
            f"{index:6} {order:8} {hits:7.2%} {num_copies:7} {num_evicted:8} {num_passed:7}   "
            f"{ttft[49]:6.2f} s {ttft[98]:6.2f} s   {statistics.fmean(times_us):8.0f} µs {plan_us[98]:5.0f} µs",
            flush=True,
        )


def miss_ms(prompts: list[list[int]], index: str, page_size: int) -> list[float]:
    """CPU time of the scheduler for each of these prompts, from its arrival to the end of its only
    token: as many steps as it has chunks. `index`: empty, if nothing is cached. The pool holds four
    prompts, so that pages are evicted, too."""
    length, times = len(prompts[0]), list[float]()
    kv = KVManager(
        4 * (length // page_size + 1) + 1,
        page_size,
        bool(index),
        [Group(page_size, 0)],
        _CHUNK,
        index or "hash",
    )
    scheduler = Scheduler(
        kv, num_rows=8, token_budget=_CHUNK, max_context=length + 8, policy=make_policy("continuous"), clock=VirtualClock(),
        emit=EventBuffer(),
    )  # fmt: skip
    for prompt in prompts:
        begin = time.thread_time()
        scheduler.table.add(Submit("r", prompt, SamplingParams(max_tokens=1, seed=0)))
        while (plan := scheduler.plan()) is not None:
            scheduler.commit(plan, {item.row: [1] for item in plan.items if item.samples})
        times.append(1000 * (time.thread_time() - begin))
    return times


def report_misses(given: argparse.Namespace) -> None:
    """Indexes and none in turns, since the machine may be busy."""
    chance, ways = random.Random(0), ("", *INDEXES)
    print(
        f"{given.miss_len:,} tokens that nobody had before, in chunks of {_CHUNK:,}; share of a TTFT of {given.ttft_ms:g} ms"
    )
    print("page size  index   scheduler, CPU time   more than without      share")
    for page_size in (16, 64):
        times: dict[str, list[float]] = {index: [] for index in ways}
        for _ in range(given.rounds):
            prompts = [
                [chance.randrange(100_000) for _ in range(given.miss_len)] for _ in range(12)
            ]
            for index in ways:
                times[index].append(statistics.median(miss_ms(prompts, index, page_size)[4:]))
        for index in ways:
            more = statistics.median(
                own - none for own, none in zip(times[index], times[""], strict=True)
            )
            share = f"{more:13.3f} ms  {more / given.ttft_ms:13.2%}" if index else ""
            print(
                f"{page_size:9}  {index or 'off':6} {statistics.median(times[index]):13.3f} ms  {share}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trace", help="mooncake_conversation.jsonl; without it, questions about documents"
    )
    parser.add_argument("--requests", type=int, default=3000, help="of the trace")
    parser.add_argument(
        "--scale", type=int, default=16, help="by which the trace's lengths are divided"
    )
    parser.add_argument("--documents", type=int, default=60)
    parser.add_argument("--questions", type=int, default=12, help="about each document")
    parser.add_argument("--document-len", type=int, default=700)
    parser.add_argument("--system-len", type=int, default=100)
    parser.add_argument("--rate", type=float, default=8.0, help="questions a second")
    parser.add_argument("--pages", type=int, default=1000)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--step-ms", type=float, default=10.0, help="of every step")
    parser.add_argument("--token-ms", type=float, default=0.25, help="of each token")
    parser.add_argument("--misses", action="store_true", help="measure misses only")
    parser.add_argument(
        "--miss-len", type=int, default=4096, help="tokens of a prompt of which nothing is cached"
    )
    parser.add_argument(
        "--ttft-ms", type=float, default=100.0, help="what the cost of a miss is compared with"
    )
    parser.add_argument("--rounds", type=int, default=9, help="of misses, the indexes in turns")
    given = parser.parse_args()
    if given.misses:
        report_misses(given)
        return
    report(conversations(given) if given.trace else questions(given), given)


if __name__ == "__main__":
    main()
