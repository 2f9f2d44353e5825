"""The router: what it adds to a request, how many it forwards a second, and whether replicas find
prefixes as one server does.

python -m bench.router overhead                                          against a stub server, direct and through it
python -m bench.router hits --trace mooncake_conversation.jsonl          the policy over simulated engines
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence

import httptools
import uvloop

from bench.ports import reserved_port
from bench.prefix import conversations, questions
from tidemill.engine.routing import BLOCK_LEN
from tidemill.planning.cost import LinearCost
from tidemill.planning.simulator import Arrival, SimConfig, SimEngine, SimResult
from tidemill.sched.placement import Placement, prefix_keys
from tidemill.types import events

MODELS = b'{"object": "list", "data": [{"id": "stub"}]}'


class Stub(asyncio.Protocol):
    """The fastest server there can be: it answers every request with the same bytes."""

    body = b'{"choices": [{"message": {"role": "assistant", "content": "A tide mill grinds by the tide."}}]}'

    def connection_made(self, transport) -> None:
        self._transport, self._parser = transport, httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._body = MODELS if url == b"/v1/models" else self.body

    def on_message_complete(self) -> None:
        head = (
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            % len(self._body)
        )
        self._transport.write(head + self._body)


async def run_stub(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", port)
    await server.serve_forever()


class Asking(asyncio.Protocol):
    """A client's connection: one request at a time."""

    def connection_made(self, transport) -> None:
        self._transport, self._parser = transport, httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        assert self._parser.get_status_code() == 200
        self._done.set_result(None)

    async def ask(self, request: bytes) -> float:
        """Its seconds."""
        self._done = asyncio.get_running_loop().create_future()
        begin = time.perf_counter()
        self._transport.write(request)
        await self._done
        return time.perf_counter() - begin


def chat_request(number: int, num_chars: int, is_traced: bool = False) -> bytes:
    """As the openai client sends it. `is_traced`: with a header that differs from request to
    request."""
    messages = [
        {"role": "system", "content": "You are a helpful assistant. " * 8},
        {"role": "user", "content": f"Question {number}. " + "x" * num_chars},
    ]
    body = json.dumps(
        {"model": "stub", "messages": messages, "max_tokens": 100, "temperature": 0}
    ).encode()
    names = [
        "accept: application/json",
        "accept-encoding: gzip, deflate",
        "connection: keep-alive",
        "authorization: Bearer key",
        "user-agent: bench",
    ]
    names += [f"x-stainless-{i}: value" for i in range(8)]
    names += [f"x-request-id: {number:032x}"] if is_traced else []
    head = [
        "POST /v1/chat/completions HTTP/1.1",
        "host: 127.0.0.1",
        "content-type: application/json",
        *names,
    ]
    return "\r\n".join([*head, f"content-length: {len(body)}", "", ""]).encode() + body


def cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def connected(port: int) -> Asking:
    for _ in range(600):
        try:
            return (await asyncio.get_running_loop().create_connection(Asking, "127.0.0.1", port))[
                1
            ]
        except OSError:
            await asyncio.sleep(0.1)
    raise TimeoutError(f"nobody listens on port {port}")


async def many(port: int, requests: Sequence[bytes], num_connections: int, num: int) -> float:
    """Requests over several connections at once; their seconds."""
    clients = [await connected(port) for _ in range(num_connections)]
    left = iter(range(num))

    async def work(client: Asking) -> None:
        for number in left:
            await client.ask(requests[number % len(requests)])

    begin = time.perf_counter()
    await asyncio.gather(*map(work, clients))
    return time.perf_counter() - begin


async def overhead(given: argparse.Namespace) -> None:
    with contextlib.ExitStack() as reserved:
        ports = [reserved.enter_context(reserved_port()) for _ in range(1 + given.servers)]
        await measure_overhead(given, *ports)


async def measure_overhead(given: argparse.Namespace, port: int, *stubs: int) -> None:
    started = [
        subprocess.Popen([sys.executable, "-m", "bench.router", "stub", "--port", str(one)])
        for one in stubs
    ]
    direct = [await connected(one) for one in stubs]  # the router's first check finds them
    urls = [f"http://127.0.0.1:{one}" for one in stubs]
    router = subprocess.Popen(
        [sys.executable, "-m", "tidemill", "route", *urls, "--port", str(port)],
        stderr=subprocess.DEVNULL,
    )
    try:
        through, requests = await connected(port), [chat_request(i, given.chars) for i in range(64)]
        times: tuple[list[float], list[float]] = ([], [])
        for number in range(given.requests):  # interleaved: what else the machine does hits both
            for client, into in ((direct[0], times[0]), (through, times[1])):
                into.append(await client.ask(requests[number % 64]))
        print(
            f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {len(requests[0])} bytes a request"
        )
        for name, into in zip(("direct", "through"), times, strict=True):
            cuts = statistics.quantiles(into, n=100)
            print(
                f"{name:8} p50 {1e3 * cuts[49]:7.3f} ms   p90 {1e3 * cuts[89]:7.3f} ms   p99 {1e3 * cuts[98]:7.3f} ms"
            )
        added = statistics.median(times[1]) - statistics.median(times[0])
        print(
            f"added at p50: {1e3 * added:.3f} ms (at least: {1e3 * (min(times[1]) - min(times[0])):.3f} ms)"
        )
        before = cpu_s(started[0].pid)
        await many(stubs[0], requests, given.connections, given.burst)
        used = cpu_s(started[0].pid) - before
        print(f"the stub alone: {given.burst / used:,.0f} requests for each second of its core")
        traced = [chat_request(i, given.chars, is_traced=True) for i in range(given.burst)]
        for kind, sent in (("the same headers", requests), ("an id in each", traced)) * 3:
            before = cpu_s(router.pid)
            seconds = await many(port, sent, given.connections, given.burst)
            used = cpu_s(router.pid) - before
            print(
                f"{given.connections} connections, {kind}: {given.burst / seconds:,.0f} requests/s; "
                f"{given.burst / used:,.0f} for each second of the router's core"
            )
    finally:
        for one in (router, *started):
            one.kill()
            one.wait()


# ---- prefix hits


def num_cached(results: Sequence[SimResult]) -> int:
    """Tokens that were found at the first admission of each request."""
    found = 0
    for result in results:
        first = {
            each.request_id: each
            for each in reversed(result.events)
            if isinstance(each, events.Admitted)
        }
        found += sum(each.num_cached for each in first.values())
    return found


def waits_of(results: Sequence[SimResult], arrivals: Sequence[Arrival]) -> list[float]:
    came = {one.request_id: one.arrival_s for one in arrivals}
    return [
        times[0] - came[name]
        for result in results
        for name, times in result.token_times_s.items()
        if times
    ]


def run_replicas(
    arrivals: Sequence[Arrival], num: int, config: SimConfig, cost: LinearCost, how: str
) -> tuple[list[SimResult], float]:
    """Also: the largest number of requests of a replica, over the mean."""
    engines = {str(i): SimEngine(config, cost) for i in range(num)}
    placement, counts = Placement(), dict.fromkeys(engines, 0)
    for number, arrival in enumerate(sorted(arrivals, key=lambda one: one.arrival_s)):
        for engine in engines.values():
            engine.run_until(arrival.arrival_s)
        keys = prefix_keys(b"", array("I", arrival.prompt_ids).tobytes(), 4 * BLOCK_LEN)
        loads = {name: engine.num_under_way for name, engine in engines.items()}
        if how == "prefix":
            name = placement.choose(keys, loads).name
            placement.note(name, keys)
        elif how == "least load":
            name = min(loads, key=lambda one: loads[one])
        else:
            name = str(number % num)
        counts[name] += 1
        engines[name].submit(arrival)
    for engine in engines.values():
        engine.run_until(math.inf)
    return [engine.result() for engine in engines.values()], max(counts.values()) * num / len(
        arrivals
    )


def hits(given: argparse.Namespace) -> None:
    arrivals = conversations(given) if given.trace else questions(given)
    num_prompt = sum(arrival.num_prompt for arrival in arrivals)
    print(
        f"{len(arrivals)} requests, {num_prompt:,} prompt tokens; {given.pages:,} pages of {given.page_size} in all"
    )
    print("servers  routing        hits    of one   TTFT p50      p99   busiest")

    def config(share: int) -> SimConfig:
        return SimConfig(
            num_rows=given.rows // share, token_budget=given.budget // share, num_pages=given.pages // share,
            page_size=given.page_size,
        )  # fmt: skip

    def report(
        num: int, how: str, results: Sequence[SimResult], busiest: float, of_one: float
    ) -> float:
        found = num_cached(results) / num_prompt
        cuts = statistics.quantiles(waits_of(results, arrivals), n=100)
        part = found / of_one if of_one else 1.0
        print(
            f"{num:7}  {how:11} {found:7.2%}  {part:7.1%}   {cuts[49]:6.2f} s {cuts[98]:6.2f} s  {busiest:7.2f}",
            flush=True,
        )
        return found

    whole, _ = run_replicas(
        arrivals, 1, config(1), LinearCost(given.step_ms / 1e3, given.token_ms / 1e3), "turn"
    )
    of_one = report(1, "-", whole, 1.0, 0.0)
    for num in given.replicas:
        # each has its part of the machine
        cost = LinearCost(given.step_ms / 1e3, given.token_ms / 1e3 * num)
        for how in ("prefix", "least load", "turn"):
            results, busiest = run_replicas(arrivals, num, config(num), cost, how)
            report(num, how, results, busiest, of_one)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    stub = commands.add_parser("stub")
    stub.add_argument("--port", type=int, required=True)
    measured = commands.add_parser("overhead")
    measured.add_argument("--servers", type=int, default=2)
    measured.add_argument("--requests", type=int, default=3000, help="one after the other")
    measured.add_argument(
        "--burst", type=int, default=20_000, help="requests over several connections"
    )
    measured.add_argument("--connections", type=int, default=64)
    measured.add_argument("--chars", type=int, default=500, help="of the user's message")
    counted = commands.add_parser("hits")
    counted.add_argument(
        "--trace", help="mooncake_conversation.jsonl; without it, questions about documents"
    )
    counted.add_argument("--requests", type=int, default=3000, help="of the trace")
    counted.add_argument(
        "--scale", type=int, default=16, help="by which the trace's lengths are divided"
    )
    counted.add_argument("--replicas", type=int, nargs="+", default=[2, 4])
    counted.add_argument("--documents", type=int, default=60)
    counted.add_argument("--questions", type=int, default=12)
    counted.add_argument("--document-len", type=int, default=700)
    counted.add_argument("--system-len", type=int, default=100)
    counted.add_argument("--rate", type=float, default=8.0)
    counted.add_argument("--pages", type=int, default=8000, help="of all servers together")
    counted.add_argument("--page-size", type=int, default=16)
    counted.add_argument("--rows", type=int, default=64)
    counted.add_argument("--budget", type=int, default=2048)
    counted.add_argument("--step-ms", type=float, default=10.0)
    counted.add_argument(
        "--token-ms", type=float, default=0.05, help="of each token, on the whole machine"
    )
    given = parser.parse_args()
    if given.command == "stub":
        uvloop.run(run_stub(given.port))
    elif given.command == "overhead":
        uvloop.run(overhead(given))
    else:
        hits(given)


if __name__ == "__main__":
    main()
