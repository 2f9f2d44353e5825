"""Router: takes each client's request to an upstream, or answers it itself."""

from __future__ import annotations

import asyncio
import functools
import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from tidemill.cluster.router.client_connection import ClientConnection, ClientConnections, Job
from tidemill.cluster.router.exchange import Exchange
from tidemill.cluster.router.fetch import Fetched, fetch
from tidemill.cluster.router.health import Checks, models_of
from tidemill.cluster.router.keys import Prompt, read_prompt
from tidemill.cluster.router.limits import Limits
from tidemill.cluster.router.owners import ASK_WITHIN_S, EVERYWHERE, HOMES, Owners, referred
from tidemill.cluster.router.request import KEYS, Request
from tidemill.cluster.router.upstream import Headers, Upstream
from tidemill.errors import ConfigError, Draining, InvalidRequest, NoUpstream, TidemillError
from tidemill.sched.placement import Placement, hash_of
from tidemill.server.http.access import Access, Caller, NotFound
from tidemill.server.http.target import model_in

UPSTREAMS_PATH = "/router/upstreams"
MAX_UPSTREAMS = 256
_LATEST = ":latest"  # which Ollama's clients add to names
CHANGE_WITHIN_S = 300.0  # what every server is to do, such as loading an adapter
_SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)
_NOBODY = Caller()
_log = logging.getLogger("tidemill.cluster.router")


class _Added(msgspec.Struct, forbid_unknown_fields=True):
    url: str


class Router:
    def __init__(
        self,
        urls: Sequence[str],
        access: Access | None = None,
        limits: Limits | None = None,
        check_every_s: float = 2.0,
        upstream_key: str = "",
        max_connections: int = 8192,
        placement: Placement | None = None,
        check_within_s: float = 5.0,
    ) -> None:
        """`upstream_key`: sent to upstreams instead of the clients' keys."""
        self.access, self.limits = access or Access(), limits or Limits()
        self.placement = placement or Placement()
        self.upstream_key = upstream_key.encode()
        own: Headers = [(b"authorization", b"Bearer " + self.upstream_key)] if upstream_key else []
        self.checks = Checks(check_every_s, own, self._recovered, self._lost, check_within_s)
        has_keys = bool(self.access.keys or self.access.admin_keys)
        self.clients = ClientConnections(self.admit, self.handle, max_connections, has_keys)
        # who sends a request, where there are no keys
        self._anybody = None if has_keys else Caller(is_admin=True)
        self.upstreams: dict[str, Upstream] = {}
        self._owners = Owners()
        self._exchanges: set[Exchange] = set()
        self._check_host = functools.lru_cache(1024)(self.access.check_host)
        self.num_retries = self.num_failed = 0
        self._num_by_status: Counter[int] = Counter()
        # to the head of a response
        self._num_by_second, self._sum_s = [0] * (len(_SECONDS) + 1), 0.0
        for url in urls:
            self._make(url)

    def _make(self, url: str) -> Upstream:
        upstream = Upstream(url)
        if upstream.url in self.upstreams:
            raise ConfigError(
                f"The upstream {url!r} is given twice.", fix="Give each once.", param="url"
            )
        if len(self.upstreams) >= MAX_UPSTREAMS:
            raise ConfigError(
                f"There are {MAX_UPSTREAMS} upstreams already.", fix="Remove some.", param="url"
            )
        self.upstreams[upstream.url] = upstream
        return upstream

    async def start(self) -> None:
        """Returns when every upstream has been checked once."""
        self.clients.sweep()
        await asyncio.gather(*map(self.checks.begin, self.upstreams.values()))

    @property
    def num_under_way(self) -> int:
        return len(self._exchanges)

    async def drain(self, seconds: float) -> None:
        """New requests are refused, and those under way may end."""
        self.clients.drain()
        end_s = asyncio.get_running_loop().time() + seconds
        while self._exchanges and asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(0.02)

    def close(self) -> None:
        self.checks.close()
        self.clients.close()
        for upstream in self.upstreams.values():
            upstream.close()

    # ---- where a request goes

    def choose(self, prompt: Prompt, tried: Sequence[Upstream] = ()) -> Upstream | None:
        usable = {
            url: upstream
            for url, upstream in self.upstreams.items()
            if upstream.is_usable and upstream not in tried
        }
        if prompt.model is not None and len(usable) > 1:
            names = prompt.model, prompt.model.removesuffix(_LATEST), prompt.model + _LATEST
            known_names = (
                name
                for name in names
                if any(name in (upstream.models or ()) for upstream in usable.values())
            )
            listed = next(known_names, prompt.model)
            serving = {
                url: upstream
                for url, upstream in usable.items()
                if upstream.models is None or listed in upstream.models
            }
            usable = serving or usable  # of a name that no list has, servers may know more
        if not usable:
            return None
        loads = {url: upstream.load for url, upstream in usable.items()}
        return usable[self.placement.choose(prompt.keys, loads, prompt.anchor).name]

    def _home(self, tenant: bytes) -> Upstream | None:
        """Also while it is not available: what the tenant has there would not be found elsewhere."""
        ranked = self.placement.ranked(hash_of(tenant), list(self.upstreams))
        return self.upstreams[ranked[0]] if ranked else None

    def _lost(self, upstream: Upstream) -> None:
        """Sends requests that wait for an upstream that does not answer to another one."""
        self.placement.forget(upstream.url)
        for exchange in [exchange for exchange in self._exchanges if exchange.upstream is upstream]:
            exchange.give_up_waiting()

    def _recovered(self, upstream: Upstream) -> None:
        self.placement.forget(upstream.url)  # it may have been started anew

    # ---- requests

    def admit(self, request: Request) -> Caller:
        """Who sends it, by its headers. Raises why it is refused."""
        host, origin = (
            request.get(b"host").decode("latin-1"),
            request.get(b"origin").decode("latin-1"),
        )
        if (
            len(request.first) < len(request.headers)
            and [name for name, _ in request.headers].count(b"host") > 1
        ):
            raise InvalidRequest("There is more than one Host header.")
        self._check_host(host)
        if origin:
            self.access.check_origin(origin.rstrip("/").lower(), host)
        if request.method == b"OPTIONS":  # a preflight has no key
            return _NOBODY
        if self._anybody is not None:
            return self._anybody
        return self.access.caller(
            request.path, {name: value.decode("latin-1") for name, value in request.headers}
        )

    def handle(self, client: ClientConnection, request: Request) -> Job | None:
        if self.clients.is_draining:
            request.keeps_alive = False
            raise Draining(
                "The router is stopping and accepts no new requests.", fix="Try again in a moment."
            )
        caller = request.caller or self.admit(request)
        if self.upstream_key:
            request.drop_key()
        own = self._own.get(request.path)
        if own is not None and request.method != b"OPTIONS":
            return own(self, client, request, caller)
        tenant = caller.tenant or request.address
        self.limits.enter(tenant)
        try:
            return self._forward(client, request, tenant)
        except BaseException:
            self.limits.leave(tenant)
            raise

    def _forward(self, client: ClientConnection, request: Request, tenant: str) -> Job:
        if request.method == b"OPTIONS":
            return self._exchange(client, request, Prompt(), tenant, True, None)
        key = b"" if self.upstream_key else next(filter(None, map(request.get, sorted(KEYS))), b"")
        is_json = request.method == b"POST" and request.path != "/v1/files"
        model = model_in(request.path)
        prompt = (
            read_prompt(request.body, key, request.get(b"x-session-id"), model)
            if is_json
            else Prompt(model)
        )
        repeats, owner = True, None
        if request.path in EVERYWHERE:
            return self._forward_in_background(
                client, self._send_everywhere(client, request), tenant
            )
        reference = referred(request.path) or prompt.refers_to
        if reference is not None and len(self.upstreams) > 1:
            return self._forward_in_background(
                client, self._send_to_owner(client, request, prompt, key, reference, tenant), None
            )
        if request.path in HOMES:
            repeats, owner = request.method == b"GET", self._home(key or tenant.encode())
            if owner is None:
                raise NoUpstream(
                    "No server can take the request at the moment.", fix="Try again in a moment."
                )
        return self._exchange(client, request, prompt, tenant, repeats, owner)

    def _exchange(
        self,
        client: ClientConnection,
        request: Request,
        prompt: Prompt,
        tenant: str,
        repeats: bool,
        owner: Upstream | None,
    ) -> Exchange:
        exchange = Exchange(self, client, request, prompt, tenant, repeats, owner)
        exchange.start()
        self._exchanges.add(exchange)
        return exchange

    def ended(self, exchange: Exchange, tenant: str) -> None:
        self._exchanges.discard(exchange)
        self.limits.leave(tenant)

    def answered(self, status: int, seconds: float) -> None:
        self._num_by_status[status] += 1
        self._num_by_second[bisect_left(_SECONDS, seconds)] += 1
        self._sum_s += seconds

    # ---- requests to one owner, and to all

    def _forward_in_background(
        self, client: ClientConnection, work: Coroutine[Any, Any, None], tenant: str | None
    ) -> Job:
        """`tenant`: whose limit counts it until it is done; None: nobody's."""
        job = _Task(asyncio.get_running_loop().create_task(self._answer_errors(client, work)))
        if tenant is not None:
            job.task.add_done_callback(lambda _: self.limits.leave(tenant))
        return job

    async def _answer_errors(
        self, client: ClientConnection, work: Coroutine[Any, Any, None]
    ) -> None:
        try:
            await work
        except TidemillError as error:
            client.answer_error(error)
        except Exception:
            _log.exception("a request could not be answered")
            client.break_off()

    def _own_headers(self, request: Request) -> Headers:
        """The headers of requests that the router makes for a client."""
        if self.upstream_key:
            return [(b"authorization", b"Bearer " + self.upstream_key)]
        return [(name, value) for name, value in request.headers if name in KEYS]

    async def _send_to_owner(
        self,
        client: ClientConnection,
        request: Request,
        prompt: Prompt,
        key: bytes,
        reference: tuple[str, str],
        tenant: str,
    ) -> None:
        is_begun = False
        try:
            upstreams = self.upstreams.values()
            owner = await self._owners.find(key, *reference, upstreams, self._own_headers(request))
            # If none has it, any of them says so.
            repeats = (
                request.method in (b"GET", b"HEAD") or owner is None or request.path not in HOMES
            )
            client.take_over(self._exchange(client, request, prompt, tenant, repeats, owner))
            is_begun = True
        finally:
            if not is_begun:
                self.limits.leave(tenant)

    async def _send_everywhere(self, client: ClientConnection, request: Request) -> None:
        """The first refusal is the answer, or else what the first of them said."""
        headers = [
            *self._own_headers(request),
            (b"content-type", request.get(b"content-type") or b"application/json"),
        ]
        usable = [upstream for upstream in self.upstreams.values() if upstream.is_healthy]
        if not usable:
            raise NoUpstream(
                "No server can take the request at the moment.", fix="Try again in a moment."
            )
        answers = await asyncio.gather(
            *(_ask(upstream, request, headers, CHANGE_WITHIN_S) for upstream in usable)
        )
        chosen = next((answer for answer in answers if answer.status >= 400), answers[0])
        kept = [(name, value) for name, value in chosen.headers if name == b"content-type"]
        client.answer(chosen.status, chosen.body, kept[0][1] if kept else b"text/plain")

    # ---- what the router answers itself

    def _health(self, client: ClientConnection, request: Request, caller: Caller) -> None:
        num = sum(upstream.is_healthy for upstream in self.upstreams.values())
        body = {
            "status": "ok" if num else "no upstream is healthy",
            "healthy": num,
            "upstreams": len(self.upstreams),
        }
        client.answer_json(body, 200 if num else 503)

    def _load(self, client: ClientConnection, request: Request, caller: Caller) -> None:
        client.answer_json({"server_load": len(self._exchanges)})

    def _models(self, client: ClientConnection, request: Request, caller: Caller) -> Job:
        return self._forward_in_background(client, self._merge_models(client, request), None)

    async def _merge_models(self, client: ClientConnection, request: Request) -> None:
        """The models that each upstream lists for this client; the first that lists a name
        describes it."""
        usable = [upstream for upstream in self.upstreams.values() if upstream.is_healthy]
        if not usable:
            raise NoUpstream("No server can be asked at the moment.", fix="Try again in a moment.")
        answers = await asyncio.gather(
            *(_ask(upstream, request, self._own_headers(request)) for upstream in usable)
        )
        good = [models_of(answer.body) for answer in answers if answer.status == 200]
        if not good:
            client.answer(answers[0].status, answers[0].body)
            return
        merged: dict[str, msgspec.Raw] = {}
        for listed in reversed(good):
            merged = listed | {name: card for name, card in merged.items() if name not in listed}
        models = list(merged.values())
        is_openai = request.path in ("/v1/models", "/models")
        client.answer_json({"object": "list", "data": models} if is_openai else {"models": models})

    def _manage(self, client: ClientConnection, request: Request, caller: Caller) -> Job | None:
        """Upstreams are listed, added and removed."""
        self.access.check_may_see_all(caller)
        if request.method == b"GET":
            client.answer_json(
                {"upstreams": [_described(upstream) for upstream in self.upstreams.values()]}
            )
            return None
        try:
            url = msgspec.json.decode(request.body, type=_Added).url
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(
                f"The body is not what it must be: {error}.",
                fix='Send {"url": "http://HOST:PORT"}.',
            ) from None
        if request.method == b"POST":
            upstream = self._make(url)
            self.checks.watch(upstream)
        elif request.method == b"DELETE":
            if (url := url.rstrip("/")) not in self.upstreams:
                raise NotFound(
                    f"There is no upstream {url[:200]!r}.",
                    fix=f"GET {UPSTREAMS_PATH} lists them.",
                    param="url",
                )
            upstream = self.upstreams.pop(url)
            upstream.is_leaving = True  # what is under way ends
            self.checks.stop(upstream)
            self.placement.forget(upstream.url)
        else:
            raise InvalidRequest(
                "Upstreams are listed by GET, added by POST and removed by DELETE."
            )
        client.answer_json(_described(upstream))
        return None

    def _metrics(self, client: ClientConnection, request: Request, caller: Caller) -> None:
        client.answer(
            200,
            "\n".join(self._metric_lines()).encode() + b"\n",
            b"text/plain; version=0.0.4; charset=utf-8",
        )

    def _metric_lines(self) -> list[str]:
        name, lines = "tidemill_router", []

        def put(metric: str, kind: str, words: str, values: list[tuple[str, float]]) -> None:
            lines.extend([f"# HELP {name}_{metric} {words}", f"# TYPE {name}_{metric} {kind}"])
            lines.extend(f"{name}_{metric}{labels} {value:g}" for labels, value in values)

        by_url = [(f'{{upstream="{url}"}}', upstream) for url, upstream in self.upstreams.items()]
        put("responses_total", "counter", "Responses of upstreams, by status", [
            (f'{{status="{status}"}}', num) for status, num in sorted(self._num_by_status.items())
        ])  # fmt: skip
        put(
            "retries_total",
            "counter",
            "Requests that were sent to another upstream",
            [("", self.num_retries)],
        )
        put(
            "failed_total",
            "counter",
            "Requests that no upstream answered in full",
            [("", self.num_failed)],
        )
        put(
            "limited_total",
            "counter",
            "Requests refused by the limits of their key",
            [("", self.limits.num_refused)],
        )
        put("connections", "gauge", "Connections of clients", [("", len(self.clients.all))])
        put(
            "prefix_keys",
            "gauge",
            "Blocks of prompts whose upstream is remembered",
            [("", len(self.placement))],
        )
        put(
            "upstream_healthy",
            "gauge",
            "1 if an upstream is sent requests",
            [(at, up.is_usable) for at, up in by_url],
        )
        put("upstream_load", "gauge", "Requests under way", [(at, up.load) for at, up in by_url])
        put(
            "upstream_requests_total",
            "counter",
            "Requests sent",
            [(at, up.num_requests) for at, up in by_url],
        )
        put(
            "upstream_failures_total",
            "counter",
            "Requests that failed",
            [(at, up.num_failures) for at, up in by_url],
        )
        counts = [sum(self._num_by_second[: i + 1]) for i in range(len(_SECONDS) + 1)]
        buckets = [
            (f'_bucket{{le="{at:g}"}}', num) for at, num in zip(_SECONDS, counts, strict=False)
        ]
        total = counts[-1]
        put("response_seconds", "histogram", "From a request to the head of its response", [
            *buckets, ('_bucket{le="+Inf"}', total), ("_sum", self._sum_s), ("_count", total),
        ])  # fmt: skip
        return lines

    _own: dict[str, Callable[[Router, ClientConnection, Request, Caller], Job | None]] = {
        "/health": _health,
        "/ready": _health,
        "/ping": _health,
        "/load": _load,
        "/metrics": _metrics,
        "/v1/models": _models,
        "/models": _models,
        "/v1beta/models": _models,
        "/api/tags": _models,
        "/api/ps": _models,
        UPSTREAMS_PATH: _manage,
    }


class _Task:
    """A `Job` that is a task."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self.task = task

    def client_left(self) -> None:
        self.task.cancel()

    def pause(self) -> None:
        """Its responses are small."""

    resume = pause


async def _ask(
    upstream: Upstream, request: Request, headers: Headers, within_s: float = ASK_WITHIN_S
) -> Fetched:
    try:
        async with asyncio.timeout(within_s):
            return await fetch(upstream, request.method, request.target, headers, request.body)
    except OSError as error:  # a timeout is one
        upstream.failed(f"it cannot be reached: {error or f'no answer in {within_s:g} s'}")
        return Fetched(
            502, [], msgspec.json.encode({"error": {"message": "A server could not be reached."}})
        )


def _described(upstream: Upstream) -> dict[str, Any]:
    return {
        "url": upstream.url,
        "healthy": upstream.is_healthy,
        "usable": upstream.is_usable,
        "why": upstream.why,
        "load": upstream.load,
        "requests": upstream.num_requests,
        "failures": upstream.num_failures,
        "models": None if upstream.models is None else sorted(upstream.models),
    }
