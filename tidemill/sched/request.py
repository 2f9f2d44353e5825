"""A request as the scheduler sees it: a list of tokens and one number, `num_computed`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING

import msgspec

from tidemill.types.inputs import Segment
from tidemill.types.kv_policy import CachePolicy
from tidemill.types.sampling import SamplingParams
from tidemill.types.wire import Hold, Submit

if TYPE_CHECKING:
    from tidemill.kv.prefix import Path
    from tidemill.sched.queue import Tenant

# requests of this priority value and above yield to all others, also while they run
BACKGROUND = 1_000_000


HANDED_OVER = "handed over"  # the finish reason of a request that goes on in another engine


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class RowSpec(msgspec.Struct, frozen=True):
    """The part of a request that the runner keeps for as long as it has a row."""

    params: SamplingParams  # of one sample, with its own seed
    num_prompt: int
    eos_token_ids: frozenset[int] = frozenset()
    adapter: int = -1  # the slot of its LoRA adapter; -1: it has none
    cache: CachePolicy | None = None  # which of its tokens stay in its pages; None: all
    segments: list[Segment] = []  # of its prompt


@dataclass(slots=True, eq=False)
class Request:
    """There is no prefill phase and no decode phase: a step computes some of the tokens that are
    not computed yet.

    tokens         |----- prompt -----|-- output --|. in flight .|
    num_computed   |=============>                                     (advanced when a step is planned)
    num_known      |------------------------------>              >     (in-flight tokens are on the device, not here yet)
    """

    request_id: str
    seq: int  # arrival order; also the sequence's name in the KV manager
    tokens: list[int]
    spec: Submit  # what was asked for, the same for all of its samples
    row_spec: RowSpec
    max_tokens: int  # resolved: never None, never past the context
    arrival_s: float
    parent: Request | None = None  # whose prompt pages this sample will share
    # samples waiting for this request's prompt
    children: list[Request] = field(default_factory=list)
    hands_over: bool = False  # it goes on in another engine when it has reached `max_tokens`
    # `seq` of the request that it was forked from, directly or not; its own, if it was not forked
    family_id: int = -1

    status: Status = Status.WAITING
    row: int = -1
    num_computed: int = 0
    # sampled on the device, not yet known to the host: so many, if drafts under way are right
    num_in_flight: int = 0
    num_drafts_in_flight: int = 0  # of them, drafts
    # guesses of the tokens that follow, to be verified by its next step; see `guess`
    drafts: Sequence[int] = ()
    had_drafts: bool = False  # or a drafter wrote to its pages
    takes_drafts: bool = True
    drafted_step: int = -1  # the last that was planned with drafts of it, or behind some
    # tokens before this one are in pages that no other sequence shares, so they can be written at
    # once
    writable_end: int = 0
    num_cached: int = 0  # prompt tokens found in the prefix cache at first admission
    prefix_leases: Sequence[Hold] = ()  # of its prefixes, that are to be made
    num_held: int = 0  # tokens of its longest prefix that was held for it
    # raised by preemption and wrong drafts, so that results of steps planned before are recognised
    # as stale
    epoch: int = 0
    # its latest token is not decided: it is not computed until `Scheduler.choose`
    awaiting_choice: bool = False
    deferred_because: str = ""
    # of its tokens when it was last queued; made once, however often admission is tried
    path: Path | None = None
    started_s: float | None = None
    first_token_s: float | None = None
    waited_s: float = 0.0  # in the queue, until it last started
    queued_s: float = 0.0  # while it is queued: now less its time in the queue
    # it started before requests of higher priority, and is not preempted for them
    is_aged: bool = False
    account: Tenant = field(init=False)  # set when it is queued for the first time
    # Of the specs, what is looked at in every step:
    num_prompt: int = field(init=False)
    kv_policy: CachePolicy | None = field(init=False)
    in_background: bool = field(init=False)
    waits_for_tokens: bool = field(init=False)
    extra_bytes: int = field(init=False)  # that it keeps beside its pages while it has a row
    is_plain: bool = field(init=False)  # while it decodes, a line in the plan is all it needs
    ends: frozenset[int] = field(init=False)  # tokens that end it, once it has enough
    # ids in its prompt for which rows of embeddings stand
    placeholders: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        spec, params = self.row_spec, self.row_spec.params
        self.family_id = self.seq if self.family_id < 0 else self.family_id
        self.num_prompt, self.kv_policy = spec.num_prompt, spec.cache
        self.in_background = self.priority >= BACKGROUND
        self.waits_for_tokens = params.waits_for_tokens
        self.extra_bytes = 0 if spec.cache is None else spec.cache.beside_bytes
        self.guess(self.drafts)
        filled = [
            self.tokens[each.start : each.end] for each in self.spec.segments if each.has_rows
        ]
        self.placeholders = frozenset(chain.from_iterable(filled))
        eos = frozenset[int]() if params.ignore_eos else spec.eos_token_ids
        self.ends = eos.union(params.stop_token_ids) if params.stop_token_ids else eos

    @property
    def params(self) -> SamplingParams:
        return self.row_spec.params

    @property
    def priority(self) -> int:
        """Lower runs first."""
        return self.spec.priority

    def guess(self, drafts: Sequence[int]) -> None:
        """Its drafts for the next step; they replace those that it had."""
        self.drafts = drafts
        has_more = drafts or self.num_drafts_in_flight or self.kv_policy is not None
        self.is_plain = not (has_more or self.in_background)

    def fork(self, request_id: str, seq: int, params: SamplingParams) -> Request:
        """Another request with the same tokens, of which nothing is computed yet."""
        return replace(
            self,
            request_id=request_id,
            seq=seq,
            tokens=list(self.tokens),
            row_spec=msgspec.structs.replace(self.row_spec, params=params),
            children=[],
            prefix_leases=(),
            status=Status.WAITING,
            row=-1,
            num_computed=0,
            num_in_flight=0,
            num_drafts_in_flight=0,
            drafts=(),
            had_drafts=False,
            writable_end=0,
            epoch=0,
            path=None,
        )

    def leave_family(self) -> Request | None:
        """It ends before its samples have forked from it. Returns the one that computes the prompt
        from now on, if any."""
        if self.parent is not None:
            self.parent.children.remove(self)
            self.parent = None
        if not self.children:
            return None
        heir, *others = self.children
        heir.parent, heir.children, self.children = None, others, []
        for child in others:
            child.parent = heir
        return heir

    @property
    def num_known(self) -> int:
        return len(self.tokens) + self.num_in_flight

    @property
    def num_needed(self) -> int:
        """Tokens to compute before the next one can be sampled. 1: it is decoding."""
        return self.num_known - self.num_computed

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    def spans(self, now: float) -> tuple[float, float, float]:
        """Its time up to `now`: in the queue, then until the first token, then since."""
        started = self.started_s if self.started_s is not None else now
        # another engine may have had it
        first = max(self.first_token_s, started) if self.first_token_s is not None else now
        return started - self.arrival_s, first - started, now - first

    @property
    def place(self) -> tuple[int, int, int]:
        """Order in the queue: lower priority value, then earlier arrival; a fork comes right behind
        what it was forked from."""
        return (self.priority, self.family_id, self.seq)

    @property
    def rank(self) -> tuple[bool, bool, int, int, int]:
        """Order of running requests; the last one is preempted first. Ageing holds on: what it let
        start, it lets finish."""
        return (self.in_background, not self.is_aged, self.priority, self.family_id, self.seq)

    def yields_to(self, other: Request) -> bool:
        """It can be preempted so that `other` starts."""
        if self.in_background and not other.in_background:
            return True
        return self.priority > other.priority and not self.is_aged
