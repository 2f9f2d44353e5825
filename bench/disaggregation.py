"""Prefill and decode engines against one engine that does both, on the same cores: a mixed load on
both in turn.

python -m bench.disaggregation              one engine of 2 threads, then 1 prefill + 1 decode engine of 1 thread each
python -m bench.disaggregation --seconds 120 --rounds 3
python -m bench.disaggregation --load heavy         twice of both: prompts and decoding meet often
python -m bench.disaggregation --simulate FILE      the same in the simulator, with a profile of one thread

FILE is of `tidemill calibrate smollm2 --threads 1 --max-context 1024 [--clock cpu]`. Two threads
are taken to be `--speedup` times as fast as one.

The load: chats, with short prompts and long answers, decode while documents arrive, with long
prompts and short answers. Arrivals are random (one seed, so the same for both), and nobody waits
for an answer before the next request. All requests are greedy, and their tokens must be the same in
every run.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from tidemill.config import EngineOptions
from tidemill.engine.client import EngineClient
from tidemill.engine.replicas import Client, Replicas
from tidemill.engine.roles import Roles
from tidemill.planning.cluster import DECODE, PREFILL, Cluster, EngineSpec, Job
from tidemill.planning.cost import Curve, FittedCost
from tidemill.planning.profile import Profile
from tidemill.planning.simulator import SimConfig
from tidemill.types import events
from tidemill.types.events import Event
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Submit

_COPY_RATE = 5e9  # bytes a second by which pages move between engines, in the simulator
LOADS = {"light": (0.1, 0.08), "heavy": (0.2, 0.15)}  # chats and documents a second


@dataclass(frozen=True)
class TimedRequest:
    at_s: float
    prompt: list[int]
    num_output: int


@dataclass
class Run:
    """What one run of the load showed."""

    tokens: list[list[int]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # between tokens of a request
    # of them, those after the first token of a document
    second: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))


def load(given: argparse.Namespace) -> list[TimedRequest]:
    rng, requests = random.Random(given.seed), []
    kinds = (
        (given.chats, given.chat_prompt, given.chat_output),
        (given.documents, given.document_prompt, given.document_output),
    )
    for rate, num_prompt, num_output in kinds:
        now = rng.expovariate(rate)
        while now < given.seconds:
            length = int(num_prompt * rng.uniform(0.75, 1.25))
            requests.append(
                TimedRequest(now, [rng.randrange(100, 40_000) for _ in range(length)], num_output)
            )
            now += rng.expovariate(rate)
    return sorted(requests, key=lambda request: request.at_s)


async def run(client: Client, name: str, requests: list[TimedRequest], is_document: int) -> Run:
    run, began = Run(tokens=[[] for _ in requests]), time.monotonic()

    async def ask(number: int, request: TimedRequest) -> None:
        await asyncio.sleep(max(began + request.at_s - time.monotonic(), 0))
        params = SamplingParams(max_tokens=request.num_output, temperature=0.0, ignore_eos=True)
        last = sent = time.monotonic()
        async with aclosing(
            client.submit(Submit(f"{name}-{number}", request.prompt, params, salt=name))
        ) as deltas:
            async for delta in deltas:
                if not delta.token_ids:
                    continue
                now = time.monotonic()
                if run.tokens[number]:
                    gap = (now - last) / len(delta.token_ids)
                    run.gaps += [gap] * len(delta.token_ids)
                    if len(run.tokens[number]) == 1 and len(request.prompt) > is_document:
                        run.second.append(now - last)
                else:
                    run.firsts.append(now - sent)
                run.tokens[number] += delta.token_ids
                last = now

    await asyncio.gather(*(ask(number, request) for number, request in enumerate(requests)))
    run.seconds = time.monotonic() - began
    return run


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[min(int(part * len(values)), len(values) - 1)]


def show(name: str, runs: list[Run]) -> dict[str, float]:
    gaps, firsts = (
        [gap for one in runs for gap in one.gaps],
        [first for one in runs for first in one.firsts],
    )
    told = {
        "p50": percentile(gaps, 0.5),
        "p99": percentile(gaps, 0.99),
        "ttft p50": percentile(firsts, 0.5),
        "ttft p99": percentile(firsts, 0.99),
        "tokens/s": sum(one.num_tokens for one in runs) / sum(one.seconds for one in runs),
    }
    second = statistics.median(second for one in runs for second in one.second)
    print(
        f"{name:20}: between tokens p50 {1000 * told['p50']:.1f} ms, p99 {1000 * told['p99']:.1f} ms; first token p50 "
        f"{told['ttft p50']:.2f} s, p99 {told['ttft p99']:.2f} s; {told['tokens/s']:.1f} tokens/s; "
        f"second token of a document after {1000 * second:.0f} ms"
    )
    return told


def show_transfer(seen: list[Event]) -> None:
    """What of the moves nobody waited for: pages that were there when their request came, and the
    time that bytes took against what requests waited for pages, until the step after that."""
    taken = [one for one in seen if isinstance(one, events.TakenOver)]
    moved = [one for one in seen if isinstance(one, events.PagesMoved)]
    found, again = sum(one.num_found for one in taken), sum(one.num_computed for one in taken)
    late = sum(one.num_peer for one in seen if isinstance(one, events.PagesLoading))
    waited_s = sum(
        one.duration_s for one in seen if isinstance(one, events.PagesLoaded) and one.replica
    )
    moved_s, num_bytes = (
        sum(one.seconds for one in moved),
        sum(one.num_bytes for one in moved if one.is_load),
    )
    hidden, early = 1 - min(waited_s / moved_s, 1) if moved_s else 0.0, 1 - late / max(found, 1)
    print(
        f"KV: {len(taken)} requests handed over, {100 * found / max(found + again, 1):.1f} % of their tokens found, {again} "
        f"computed again; {num_bytes / 2**20:.0f} MiB fetched, {100 * early:.0f} % of them before their request came; bytes took "
        f"{moved_s:.2f} s to move, requests waited {waited_s:.2f} s for them ({100 * hidden:.0f} % hidden); from the first token "
        f"to the start in the decode engine {1000 * statistics.median(one.waited_s for one in taken):.1f} ms (median)"
    )


def simulate(given: argparse.Namespace) -> None:
    profile = Profile.load(given.simulate)
    config, one = replace(SimConfig.measured(profile.engine), max_context=2048), profile.cost
    sent: dict[str, Any] = {"kv_token_bytes": profile.model.kv_bytes_per_token, "link": _COPY_RATE}
    layouts = {
        "one engine": [EngineSpec(config, _faster(one, given.speedup))],
        "1 prefill + 1 decode": [
            EngineSpec(config, one, PREFILL, **sent),
            EngineSpec(config, one, DECODE, **sent),
        ],
    }
    jobs = [
        Job(number, request.at_s, len(request.prompt), request.num_output)
        for number, request in enumerate(load(given))
    ]
    told: list[dict[str, float]] = []
    for name, specs in layouts.items():
        served = Cluster(specs).run(jobs) or []
        gaps, firsts = (
            [gap for each in served for gap in each.gaps_s],
            [each.ttft_s for each in served],
        )
        parts = {
            "p50": (gaps, 0.5),
            "p99": (gaps, 0.99),
            "ttft p50": (firsts, 0.5),
            "ttft p99": (firsts, 0.99),
        }
        told.append({part: percentile(*values) for part, values in parts.items()})
        figures = ", ".join(f"{part} {1000 * value:.1f} ms" for part, value in told[-1].items())
        print(f"{name:20}: simulated, {len(jobs)} requests: {figures}")
    print(
        "one engine / roles: "
        + ", ".join(f"{part} {told[0][part] / told[1][part]:.2f}" for part in told[0])
    )


def _faster(cost: FittedCost, times: float) -> FittedCost:
    rates = {
        name: getattr(cost, name) / times for name in cost.__struct_fields__ if name.endswith("_s")
    }
    decode, mixed = (
        Curve(one.at, [s / times for s in one.seconds]) for one in (cost.decode, cost.mixed)
    )
    return msgspec.structs.replace(cost, decode=decode, mixed=mixed, **rates)


async def main(given: argparse.Namespace) -> None:
    seen: list[Event] = []
    shared: dict[str, Any] = {
        "model": given.model, "max_context": given.max_context, "speculate": "off", "token_budget": given.token_budget,
    }  # fmt: skip
    together, apart = EngineClient(), Replicas(2, seen.extend, routing=Roles(1, 1))
    requests = load(given)
    num_documents = sum(
        len(request.prompt) > 0.75 * given.document_prompt - 1 for request in requests
    )
    print(
        f"{given.model}: {len(requests)} requests in {given.seconds} s, {num_documents} of them documents of about "
        f"{given.document_prompt} tokens with answers of {given.document_output}; chats of {given.chat_prompt} and "
        f"{given.chat_output}"
    )
    try:
        await together.start(EngineOptions(**shared, threads=given.threads))
        await apart.start(
            EngineOptions(**shared, threads=given.threads // 2, prefill_engines=1, decode_engines=1)
        )
        runs: dict[str, list[Run]] = {"one engine": [], "1 prefill + 1 decode": []}
        for number in range(given.rounds):
            clients: tuple[Client, Client] = together, apart
            for name, client in zip(runs, clients, strict=True):
                runs[name].append(
                    await run(
                        client, f"{name}-{number}", requests, int(0.75 * given.document_prompt) - 1
                    )
                )
                print(f"round {number + 1}: ", end="")
                show(name, runs[name][-1:])
        first = runs["one engine"][0].tokens
        assert all(one.tokens == first for each in runs.values() for one in each), "tokens differ"
        print("tokens are the same in all runs")
        one, two = (show(name, each) for name, each in runs.items())
        print(
            "one engine / roles: "
            + ", ".join(f"{name} {one[name] / two[name]:.2f}" for name in one)
        )
        show_transfer(seen)
    finally:
        await asyncio.gather(together.close(), apart.close())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--threads", type=int, default=2, help="of the one engine; half of them for each of the two"
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--simulate", metavar="FILE", help="with this profile, instead of running it"
    )
    parser.add_argument(
        "--speedup", type=float, default=1.75, help="of two threads, in the simulator"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-context", type=int, default=2048)
    parser.add_argument("--token-budget", type=int, default=None)
    parser.add_argument(
        "--load", choices=tuple(LOADS), default="light", help="rates, if they are not given"
    )
    parser.add_argument(
        "--slower",
        type=float,
        default=1.0,
        help="divides both rates: for a machine that others use as well",
    )
    parser.add_argument("--chats", type=float, help="a second")
    parser.add_argument("--chat-prompt", type=int, default=40)
    parser.add_argument("--chat-output", type=int, default=150)
    parser.add_argument("--documents", type=float, help="a second")
    parser.add_argument("--document-prompt", type=int, default=700)
    parser.add_argument("--document-output", type=int, default=100)
    given = parser.parse_args()
    chats, documents = LOADS[given.load]
    given.chats = (given.chats or chats) / given.slower
    given.documents = (given.documents or documents) / given.slower
    return given


if __name__ == "__main__":
    given = arguments()
    if given.simulate:
        simulate(given)
    else:
        asyncio.run(main(given))
