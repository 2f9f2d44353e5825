"""KV policies: which tokens of a sequence stay in the cache, and in which of its slots. Ints only.

    tokens   0 1 2 3 | 4 ..................... 899 | 900 ........ 1023 | 1024 ...
    slots    0 1 2 3 |        given up             |  4 ........  959  |  960 ...

A sequence with a policy has slots of its own, numbered as its page table counts them. Up to a
number of tokens, slot and position are the same. At fixed positions, and nowhere else, slots are
given up, and those that stay move together: so tokens do not depend on how a prompt was cut. A
query sees all slots before its own.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from tidemill.errors import InvalidRequest

MAX_SINKS, MAX_SLOTS = 1024, 2**24
_MOST_AT_ONCE = 64  # tokens that are given up together, at most: a sixteenth of the slots otherwise
_NEVER = 2**62
_DOUBLE_OBSERVED = 32  # queries by which Double Sparsity chooses its channels
# by kind: what can be said, and what it is otherwise
_FIELDS: dict[str, dict[str, float | None]] = {
    "full": {},
    "window": {"recent": 1024},
    "streaming": {"sinks": 4, "recent": 1020},
    "h2o": {"budget": 0.2, "recent": None},
    "snapkv": {"budget": 1024, "observed": 32},
    "quest": {"budget": 0.25, "dense": None, "dense_layers": 2},
    "double": {"budget": 0.125, "channels": 16, "dense": None, "dense_layers": 2},
    "random": {"budget": 0.2, "recent": None},  # to compare others with
}
KINDS = tuple(kind for kind in _FIELDS if kind != "random")
UNBOUNDED = ("window", "streaming")  # they go on beyond the model's context
SPARSE = ("quest", "double")  # they keep everything and read little of it
_LIMITS = {
    "sinks": (0, MAX_SINKS),
    "recent": (1, MAX_SLOTS),
    "observed": (1, 1024),
    "dense": (1, 2**31 - 1),
    "dense_layers": (0, 4096),
    "channels": (1, 64),
}


class KVPolicy(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The KV policy that a request asks for. A field that is not given has its kind's default."""

    kind: str = "full"
    sinks: int | None = None  # the first tokens, which stay
    recent: int | None = None  # the latest tokens, which stay
    budget: float | None = None  # up to 1: that part of the request's tokens; above: so many tokens
    observed: int | None = None  # snapkv: the last tokens of the prompt, whose attention decides
    # quest, double: positions before it see everything; not given: those of the prompt
    dense: int | None = None
    dense_layers: int | None = None  # quest, double: the first layers, which see everything
    channels: int | None = None  # double: of a key, by which tokens are chosen

    @property
    def settled(self) -> dict[str, Any]:
        """All fields of its kind."""
        return {
            name: default if getattr(self, name) is None else getattr(self, name)
            for name, default in _FIELDS[self.kind].items()
        }

    def check(self) -> None:
        """Raises what is wrong with it."""
        if self.kind not in _FIELDS:
            raise _wrong(
                f"There is no KV policy {self.kind!r}.", f"Choose one of {', '.join(KINDS)}."
            )
        for name in self.__struct_fields__[1:]:
            value = getattr(self, name)
            if value is None:
                continue
            if name not in _FIELDS[self.kind]:
                takes = ", ".join(_FIELDS[self.kind]) or "no others"
                raise _wrong(f"The KV policy {self.kind} has no field {name}.", f"It has {takes}.")
            if name == "budget":
                if (
                    isinstance(value, bool)
                    or not isinstance(value, int | float)
                    or not 0 < value <= MAX_SLOTS
                ):
                    raise _wrong(
                        f"kv_policy's budget is {value!r}.",
                        "Give a part above 0 and up to 1, or a number of tokens.",
                    )
            else:
                low, high = _LIMITS[name]
                if (
                    isinstance(value, bool)
                    or not isinstance(value, int)
                    or not low <= value <= high
                ):
                    raise _wrong(
                        f"kv_policy's {name} must be an integer from {low} to {high}; got {value!r}."
                    )


def _wrong(message: str, fix: str = "") -> InvalidRequest:
    return InvalidRequest(message, fix=fix, param="kv_policy")


def read_policy(policy: Any) -> KVPolicy | None:
    """From a name, an object with the policy's fields (also as JSON), or a policy."""
    if isinstance(policy, str):
        try:
            policy = (
                msgspec.json.decode(policy) if policy.lstrip().startswith("{") else {"kind": policy}
            )
        except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
            raise _wrong(f"kv_policy is not JSON: {error}.") from None
    if isinstance(policy, dict):
        known = KVPolicy.__struct_fields__
        if unknown := [name for name in policy if name not in known]:
            raise _wrong(
                f"kv_policy has no field {unknown[0]!r}.", f"There are {', '.join(known)}."
            )
        policy = KVPolicy(**policy)
    if policy is None:
        return None
    if not isinstance(policy, KVPolicy) or not isinstance(policy.kind, str):
        raise _wrong(
            f"kv_policy is {policy!r}.",
            'Give a name or an object, such as {"kind": "streaming", "sinks": 4, "recent": 1020}.',
        )
    policy.check()
    return policy


class Segment(msgspec.Struct, frozen=True):
    """Tokens of a sequence from `position` on, in slots that follow each other. After them, slots
    may be given up."""

    position: int
    count: int
    slot: int
    evicts: bool


class CachePolicy(msgspec.Struct, frozen=True):
    """A request's policy, settled for its length. When `capacity` slots are full, or at the end of
    the prompt, `kept` of them stay."""

    kind: str
    num_prompt: int
    capacity: int
    kept: int
    recent: int = 0  # of those kept, the latest
    sinks: int = 0  # of those kept, the first
    observed: int = 0
    dense: int = 0
    dense_layers: int = 0
    share: float = 0.0  # quest, double: of the pages or tokens before a query, what it reads; or
    num_read: int = 0  # so many tokens
    channels: int = 0
    beside_bytes: int = 0  # that its row keeps beside its pages, where they are counted

    def num_beside(self, num_layers: int, num_kv_heads: int, head_dim: int) -> int:
        """Bytes on a GPU: sums of attention, or the keys of sinks as they were."""
        of_head = {
            "h2o": 8 * self.capacity,
            "snapkv": 8 * self.num_prompt,
            "streaming": 4 * self.sinks * head_dim,
        }
        return num_layers * num_kv_heads * of_head.get(self.kind, 0)

    @property
    def num_plain(self) -> int:
        """Tokens whose keys and values are the same as without the policy."""
        return self.dense if self.kind in SPARSE else self._first_eviction

    @property
    def num_reusable(self) -> int:
        """Leading tokens that may come from the prefix cache."""
        if self.kind == "h2o":  # their attention is needed
            return 0
        if self.kind in ("snapkv", "double"):
            return self.first_observed
        # one more, and slots would be given up
        return self.dense if self.kind in SPARSE else self.capacity - 1

    @property
    def first_observed(self) -> int:
        """Position of the first of the queries that decide: the last of the prompt, or of those
        that see everything."""
        return (self.dense if self.kind == "double" else self.num_prompt) - self.observed

    @property
    def _first_eviction(self) -> int:
        """Tokens that are computed by then."""
        if self.kind in SPARSE:
            return _NEVER
        if self.kind == "snapkv":
            return self.num_prompt if self.capacity < self.num_prompt else _NEVER
        return self.capacity

    def num_recordable(self, num_computed: int) -> int:
        """Leading tokens whose pages may enter the prefix index, when so many are computed: none
        once they were moved."""
        if self.kind in SPARSE:
            return min(num_computed, self.dense)
        return num_computed if num_computed < self._first_eviction else 0

    def num_slots(self, num_tokens: int) -> int:
        """That hold tokens when so many have been computed and before any is given up."""
        first = self._first_eviction
        if num_tokens <= first:
            return num_tokens
        return self.kept + num_tokens - first if self.kind == "snapkv" else self.capacity

    def most_slots(self, num_tokens: int) -> int:
        """At most, until so many tokens are computed."""
        return max(
            self.num_slots(num_tokens), self.num_slots(min(num_tokens, self._first_eviction))
        )

    def slot(self, position: int) -> int:
        first = self._first_eviction
        if position < first:
            return position
        if self.kind == "snapkv":
            return self.kept + position - first
        return self.kept + (position - first) % (self.capacity - self.kept)

    def next_eviction(self, position: int) -> int:
        """The number of computed tokens, above `position`, at which slots are given up next."""
        first = self._first_eviction
        if position < first:
            return first
        if self.kind == "snapkv":
            return _NEVER
        interval = self.capacity - self.kept
        return first + ((position - first) // interval + 1) * interval

    def num_given_up(self, start: int, end: int) -> int:
        """Tokens that computing these ones gives up."""
        num, at = 0, self.next_eviction(start)
        while at <= end:
            num, at = num + self.num_slots(at) - self.kept, self.next_eviction(at)
        return num

    def segments(self, start: int, count: int) -> list[Segment]:
        """Tokens start .. start + count - 1, cut where slots are given up."""
        segments, end = [], start + count
        while start < end:
            stop = self.next_eviction(start)
            num = min(stop, end) - start
            segments.append(Segment(start, num, self.slot(start), stop <= end))
            start += num
        return segments

    def written(self, start: int, end: int) -> list[tuple[int, int]]:
        """Ranges of slots that computing tokens start .. end - 1 writes."""
        first = self.next_eviction(start)
        if first > end:
            return [(self.slot(start), self.slot(end - 1) + 1)]
        return [(0, max(self.kept, self.num_slots(end))), (self.slot(start), self.num_slots(first))]

    def num_pages_read(self, num_pages: int, page_size: int) -> int:
        """Quest: of the pages before a query and its own, which is always read."""
        wanted = math.ceil(self.share * num_pages) if self.share else -(-self.num_read // page_size)
        return min(num_pages, max(wanted, 2))

    def num_tokens_read(self, position: int) -> int:
        """Double Sparsity: of the tokens up to a query's own, which is always read."""
        wanted = math.ceil(self.share * (position + 1)) if self.share else self.num_read
        return min(position + 1, max(wanted, 1))


def settle(
    policy: KVPolicy | None, num_prompt: int, most_tokens: int, context: int
) -> CachePolicy | None:
    """Settles the policy of a request of so many tokens in all. None: the policy would give up
    nothing. Raises what cannot be."""
    if policy is None or policy.kind == "full":
        return None
    have = policy.settled
    num_all = (
        min(num_prompt + most_tokens, context)
        if policy.kind not in UNBOUNDED
        else num_prompt + most_tokens
    )
    if policy.kind in UNBOUNDED:
        sinks = have.get("sinks", 0)
        capacity = sinks + have["recent"]
        kept = capacity - _interval(have["recent"])
        cache_policy = CachePolicy(policy.kind, num_prompt, capacity, kept, kept - sinks, sinks)
    elif policy.kind in SPARSE:
        share = have["budget"] if have["budget"] <= 1 else 0.0
        dense = num_prompt if have["dense"] is None else min(have["dense"], num_prompt)
        observed = min(_DOUBLE_OBSERVED, dense) if policy.kind == "double" else 0
        return CachePolicy(
            policy.kind, num_prompt, num_all, num_all, observed=observed, dense=dense, dense_layers=have["dense_layers"],
            share=float(share), num_read=0 if share else int(have["budget"]), channels=have.get("channels", 0),
        )  # fmt: skip
    else:
        base = num_prompt if policy.kind == "snapkv" else num_all
        capacity = max(
            math.ceil(have["budget"] * base) if have["budget"] <= 1 else int(have["budget"]), 2
        )
        if policy.kind == "snapkv":
            observed = min(have["observed"], capacity, num_prompt)
            cache_policy = CachePolicy(
                "snapkv", num_prompt, capacity, capacity, observed, observed=observed
            )
        else:
            kept = capacity - _interval(capacity)
            recent = kept // 2 if have["recent"] is None else min(have["recent"], kept)
            cache_policy = CachePolicy(policy.kind, num_prompt, capacity, kept, recent)
    if cache_policy.capacity > context:
        raise _wrong(
            f"kv_policy keeps {cache_policy.capacity} tokens, and the context is {context}.",
            f"Keep at most {context}, or serve with a larger --max-context.",
        )
    is_whole = cache_policy.capacity >= (num_prompt if policy.kind == "snapkv" else num_all)
    return None if is_whole else cache_policy


def _interval(num_slots: int) -> int:
    """The number of tokens that are given up at a time."""
    return max(1, min(_MOST_AT_ONCE, num_slots // 16))
