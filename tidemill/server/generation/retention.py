"""The prefixes of requests that the engine is to hold: prompt caches by name, cache_control,
prompt_cache_key, tool calls."""

from __future__ import annotations

import hashlib
import itertools
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import ValidationError

from tidemill.errors import InvalidRequest, TidemillError
from tidemill.server.http.body import Body
from tidemill.types import events
from tidemill.types.events import Event
from tidemill.types.wire import Hold

if TYPE_CHECKING:
    from tidemill.server.generation.service import Service

UNDECIDED_S = 10.0  # for which a session is held until it is known whether it called a tool
TTLS = {"5m": 300.0, "1h": 3600.0}  # of cache_control
Retention = Literal["in_memory", "in-memory", "24h"]
RETENTIONS = {
    "in_memory": 300.0,
    "in-memory": 300.0,
    "24h": 86400.0,
}  # OpenAI's; the first without one
MAX_KEY_CHARS = 512
MAX_CACHES, MAX_CACHES_OF_ALL = 64, 1024
MAX_BYTES, MAX_BYTES_OF_ALL = 32 * 2**20, 256 * 2**20  # of their texts and tokens
_NUM_REFUSALS = 256  # remembered

Marks = Iterable[
    tuple[str, list[dict[str, Any]] | None]
]  # a time to live, and the conversation up to there; None: all of it


class CacheControl(Body):
    """The cache_control of a block: what comes before it, and the block itself, is held for a
    time."""

    without_effect: ClassVar[frozenset[str]] = frozenset({"scope"})
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


ANY_MESSAGE = {"role": "user", "content": "."}  # where a template wants one, after what is marked


def read_mark(mark: Any) -> CacheControl:
    """Reads the cache_control of a part of a message, which is not checked otherwise."""
    try:
        return CacheControl.model_validate(mark)
    except ValidationError:
        what = f"cache_control is {str(mark)[:100]}."
        raise InvalidRequest(
            what, fix='It must be {"type": "ephemeral"}, with ttl 5m or 1h.', param="messages"
        ) from None


# ---- names of holds: a tenant's own, so that nobody can end another's


def session_name(request_id: str) -> str:
    """`request_id`: the engine's, which begins with the tenant."""
    return f"{request_id}/session"


def _content_name(
    service: Service, tenant: str, salt: str, prefix: Sequence[int], ttl_s: float
) -> str:
    """By what its pages depend on."""
    digest = hashlib.sha256(
        f"{service.adapter} {salt}\0".encode() + array("q", prefix).tobytes()
    ).hexdigest()[:32]
    return f"{tenant}/prefix/{ttl_s:.0f}/{digest}"


# ---- what a request asks for


def key_leases(
    service: Service,
    tenant: str,
    key: str | None,
    retention: str | None,
    prompt: list[int],
    part: int = 0,
    salt: str = "",
) -> list[Hold]:
    """OpenAI's prompt_cache_key and prompt_cache_retention: all of the request, instead of the
    latest one with its key."""
    if key is None and retention is None:
        return []
    ttl_s = RETENTIONS[retention or "in_memory"]
    name = (
        _content_name(service, tenant, salt, prompt, ttl_s)
        if key is None
        else f"{tenant}/key/{part}/{key}"
    )
    reason = " ".join(
        word for word in ("prompt_cache_key" if key else "", f"for {ttl_s:.0f} s") if word
    )
    return [Hold(name, 0, ttl_s, reason=reason)]


async def mark_leases(
    service: Service,
    tenant: str,
    prompt: list[int],
    marks: Marks,
    template_options: dict[str, Any],
    salt: str = "",
) -> list[Hold]:
    """The leases that cache_control asks for: the prompt up to the last mark with each time to
    live. `template_options`: as of `Service.encode_chat`."""
    prefix_leases = []
    for ttl, conversation in dict(marks).items():
        num = (
            len(prompt)
            if conversation is None
            else await _num_common(service, prompt, conversation, template_options)
        )
        if num:
            name = _content_name(service, tenant, salt, prompt[:num], TTLS[ttl])
            prefix_leases.append(Hold(name, num, TTLS[ttl], reason=f"cache_control, {ttl}"))
    return prefix_leases


async def _num_common(
    service: Service,
    prompt: list[int],
    conversation: list[dict[str, Any]],
    template_options: dict[str, Any],
) -> int:
    """The number of the prompt's tokens that are also those of the conversation up to a mark. A
    template that cannot write it alone has the whole prompt marked."""
    try:
        ids = await service.encode_chat(
            conversation,
            **template_options | {"add_generation_prompt": False, "continue_final_message": False},
        )
    except InvalidRequest:
        return len(prompt)
    return num_common(prompt, ids)


def num_common(first: list[int], second: list[int]) -> int:
    """Tokens that both begin with."""
    low, high = 0, min(len(first), len(second)) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle)
    return low


# ---- named prompt caches


class PromptCacheUnknown(InvalidRequest):
    """No prompt cache of this tenant has the name, whoever else has."""

    status = 404


class NameTaken(InvalidRequest):
    status = 409


class NoRoomToPin(TidemillError):
    """The KV cache has no room for one more prompt cache, or the tenant has too many."""

    kind = "rate_limit_error"
    status = 429
    code = "prompt_cache_full"


class Pins:
    """The prefixes of prompt caches that the engine holds, by its events."""

    def __init__(self) -> None:
        self.on_pinned: Callable[[str], None] = lambda name: None
        self._tokens: dict[tuple[str, int], int] = {}  # by name and replica
        self._refused: OrderedDict[str, str] = OrderedDict()

    def take(self, batch: list[Event]) -> None:
        for event in batch:
            match event:
                case events.PrefixHeld(is_pinned=True):
                    self._tokens[event.name, event.replica] = event.num_tokens
                    self.on_pinned(event.name)
                case events.HoldEnded(is_pinned=True):
                    self._tokens.pop((event.name, event.replica), None)
                case events.PrefixNotHeld(is_pinned=True):
                    self._tokens.pop((event.name, event.replica), None)
                    self._refused[event.name] = event.reason
                    while len(self._refused) > _NUM_REFUSALS:
                        self._refused.popitem(last=False)
                case events.EngineRestarted() | events.ModelUnloaded():
                    self._tokens = {
                        at: num for at, num in self._tokens.items() if at[1] != event.replica
                    }

    def num_tokens(self, name: str) -> int:
        """0: it is not in the KV cache."""
        return max((num for (held, _), num in self._tokens.items() if held == name), default=0)

    def why_not(self, name: str) -> str:
        return self._refused.pop(name, "it was not computed")


@dataclass(slots=True)
class PromptCache:
    """A prefix of prompts, under a name."""

    name: str
    tenant: str
    model: str
    token_ids: list[int]
    messages: (
        list[dict[str, Any]] | None
    )  # as templates take them; None: it was made of a text or of tokens
    tools: list[Any] | None
    expires_s: float  # of the monotonic clock
    num_bytes: int
    created_s: int = field(default_factory=lambda: int(time.time()))
    num_uses: int = 0
    is_ready: bool = False
    number: int = field(default_factory=itertools.count().__next__)

    @property
    def pin(self) -> str:
        """The name of its hold, which no later prompt cache has, whatever its own name is."""
        return f"{self.tenant}/pin/{self.name}/{self.number}"

    @property
    def hold(self) -> Hold:
        left = max(self.expires_s - time.monotonic(), 0.001)
        return Hold(self.pin, len(self.token_ids), left, True, f"prompt cache {self.name}")

    def prefix_leases(self, prompt: list[int]) -> list[Hold]:
        """The leases of a request with this cache: it is pinned again, if it has been lost. A
        template may write the prefix of a longer conversation differently; then there is nothing to
        pin."""
        return [self.hold] if prompt[: len(self.token_ids)] == self.token_ids else []


class PromptCaches:
    """The prompt caches of one model, each by its tenant only."""

    def __init__(self) -> None:
        self._caches: dict[tuple[str, str], PromptCache] = {}

    def has(self, pin: str) -> bool:
        tenant, _, rest = pin.partition("/pin/")
        cache = self.find(tenant, rest.rpartition("/")[0])
        return cache is not None and cache.pin == pin

    def __iter__(self) -> Iterator[PromptCache]:
        self._drop_expired()
        return iter(list(self._caches.values()))

    def find(self, tenant: str, name: str) -> PromptCache | None:
        self._drop_expired()
        return self._caches.get((tenant, name))

    def of(self, tenant: str, name: str, model: str | None = None) -> PromptCache:
        """`model`: that is to continue it."""
        found = self.find(tenant, name)
        if found is None or not found.is_ready:
            fix = "Create it with POST /v1/prompt_caches, or leave it out."
            raise PromptCacheUnknown(
                f"There is no prompt cache {name[:100]!r}.", fix=fix, param="prompt_cache"
            )
        if model is not None and found.model != model:
            raise InvalidRequest(
                f"The prompt cache {name[:100]!r} is of the model {found.model!r}.",
                fix="Ask that one.",
                param="prompt_cache",
            )
        return found

    def put(self, cache: PromptCache) -> None:
        self._caches[cache.tenant, cache.name] = cache

    def drop(self, cache: PromptCache) -> None:
        if self._caches.get((cache.tenant, cache.name)) is cache:
            del self._caches[cache.tenant, cache.name]

    def _drop_expired(self) -> None:
        now = time.monotonic()
        for key in [key for key, cache in self._caches.items() if cache.expires_s <= now]:
            del self._caches[key]


def check_room(caches: Iterable[PromptCache], tenant: str, num_bytes: int) -> None:
    """`caches`: of all models and tenants."""
    nums, sizes = Counter[str](), Counter[str]()
    for cache in caches:
        nums[cache.tenant] += 1
        sizes[cache.tenant] += cache.num_bytes
    if nums[tenant] >= MAX_CACHES or nums.total() >= MAX_CACHES_OF_ALL:
        what = (
            f"There are {nums[tenant]} prompt caches of this tenant and {nums.total()} in all; "
            f"at most {MAX_CACHES} and "
        )
        raise NoRoomToPin(
            f"{what}{MAX_CACHES_OF_ALL} may be.", fix="Delete some, or let them expire."
        )
    if sizes[tenant] + num_bytes > MAX_BYTES or sizes.total() + num_bytes > MAX_BYTES_OF_ALL:
        what = (
            f"The texts of prompt caches may have {MAX_BYTES} bytes of a tenant and "
            f"{MAX_BYTES_OF_ALL} in all."
        )
        raise NoRoomToPin(what, fix="Delete some, or let them expire.")
