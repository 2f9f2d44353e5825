"""The state that one server keeps and others do not have: files, batches, stored responses,
conversations, prompt caches.

A request that refers to such a thing goes to the server that has it. Which one that is, is asked of
all of them, and remembered: so the answer survives a restart of the router. What is new goes to the
tenant's home, the server that consistent hashing gives for the tenant, and so do lists.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Iterable

from tidemill.cluster.router.fetch import fetch
from tidemill.cluster.router.upstream import Headers, Upstream
from tidemill.errors import NoUpstream

MAX_OWNED = 65_536  # remembered
ASK_WITHIN_S = 10.0
_KINDS = (
    "files", "batches", "messages/batches", "responses", "response_items", "conversations", "prompt_caches", "requests",
)  # fmt: skip
_PATH = re.compile(rf"/v1/({'|'.join(_KINDS)})/([A-Za-z0-9._-]{{1,128}})(/.*)?")
_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
# These, and lists of them, are at a tenant's home.
HOMES = frozenset(
    {"/v1/files", "/v1/batches", "/v1/messages/batches", "/v1/conversations", "/v1/prompt_caches"}
)
# They change every server.
EVERYWHERE = frozenset(
    {"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/flush_cache", "/abort_request"}
)
_NOT_IDS = frozenset({"input_tokens"})  # of a path


def referred(path: str) -> tuple[str, str] | None:
    """The kind and the id that a path names."""
    found = _PATH.fullmatch(path)
    return (found[1], found[2]) if found and found[2] not in _NOT_IDS else None


class Owners:
    def __init__(self) -> None:
        # by tenant, kind and id: an upstream's URL
        self._found: OrderedDict[tuple[bytes, str, str], str] = OrderedDict()

    async def find(
        self, tenant: bytes, kind: str, name: str, upstreams: Iterable[Upstream], headers: Headers
    ) -> Upstream | None:
        """None: no server has it. Raises NoUpstream if one that cannot be asked may have it.
        `headers`: with the key of whoever asks."""
        candidates = list(upstreams)
        known = self._found.get((tenant, kind, name))
        for upstream in candidates:
            if upstream.url == known:
                return upstream
        if not _ID.fullmatch(name):
            return None
        target = f"/v1/{kind}/{name}" + ("/explain" if kind == "requests" else "")
        answers = await asyncio.gather(
            *(_has(upstream, target.encode(), headers) for upstream in candidates)
        )
        found = next(
            (upstream for upstream, has in zip(candidates, answers, strict=True) if has), None
        )
        if found is not None:
            self._found[tenant, kind, name] = found.url
            while len(self._found) > MAX_OWNED:
                self._found.popitem(last=False)
        elif None in answers:
            raise NoUpstream(
                "The server that may have what this request refers to is not available.",
                fix="Try again in a moment.",
            )
        return found


async def _has(upstream: Upstream, target: bytes, headers: Headers) -> bool | None:
    """None: it does not tell."""
    if not upstream.is_healthy:
        return None
    try:
        async with asyncio.timeout(ASK_WITHIN_S):
            found = await fetch(upstream, b"GET", target, headers)
    except (OSError, TimeoutError):
        return None
    return None if found.status == 429 or found.status >= 500 else found.status == 200
