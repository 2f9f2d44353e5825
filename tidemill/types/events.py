"""The vocabulary of decisions. Every choice the engine makes is one of these, with its reason.

Metrics, explanations and the live view read events; nothing else is instrumented. Times are seconds
of the engine's clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import msgspec


class _Timed(msgspec.Struct, frozen=True, omit_defaults=True):
    time_s: float


class _Event(_Timed, frozen=True, tag=True, kw_only=True):
    replica: int = 0  # the number of the engine, where several serve one model


class Submitted(_Event, frozen=True):
    request_id: str
    num_prompt: int
    priority: int = 0
    tenant: str = ""
    num_beams: int = 1  # sequences that are computed side by side


class Preparing(_Event, frozen=True):
    """The engine has got a request that it cannot queue yet. All of its samples wait."""

    request_id: str
    reason: str


class Resumed(_Event, frozen=True):
    """A sample continues that an earlier engine process had begun."""

    request_id: str
    num_prompt: int
    num_output: int


class EngineDown(_Event, frozen=True):
    """The engine process has ended, or could not be started again."""

    reason: str
    num_failed: int = 0  # starts in a row
    retry_s: float = 0.0  # until it is started again
    is_given_up: bool = False  # it takes no requests; others serve, and it is tried again for ever


class EngineRestarted(_Event, frozen=True):
    reason: str
    num_requests: int  # under way, and submitted again


class ModelLoading(_Event, frozen=True):
    """An engine is started for a model."""

    model: str
    num_bytes: int  # weights, activations and KV cache
    reason: str


class ModelLoaded(_Event, frozen=True):
    model: str
    num_bytes: int
    duration_s: float


class AdapterLoaded(_Event, frozen=True):
    """A LoRA adapter was read into a slot."""

    adapter: str
    slot: int
    num_bytes: int
    duration_s: float


class AdapterLeft(_Event, frozen=True):
    """A LoRA adapter gave up its slot."""

    adapter: str
    slot: int
    reason: str


class ModelHeld(_Event, frozen=True):
    """A busy model gets no new requests until it has been unloaded for another."""

    model: str
    reason: str


class ModelUnloaded(_Event, frozen=True):
    model: str
    num_bytes: int
    reason: str


class KernelsFellBack(_Event, frozen=True):
    """At start: slower code runs than there is for this machine."""

    reason: str


class LayersDivided(_Event, frozen=True):
    """At start: how many layers each stage of a pipeline has, and by what they were divided."""

    layers: tuple[int, ...]
    reason: str


class NanoBatchingTried(_Event, frozen=True):
    """At start: a step of so many tokens was timed whole and in two halves."""

    decodes: bool
    tokens: int
    whole_ms: float
    halves_ms: float
    is_taken: bool


class Deferred(_Event, frozen=True):
    """The next request in the queue could not start, and why. Emitted once per reason, not once per
    step."""

    request_id: str
    reason: str


class Admitted(_Event, frozen=True):
    request_id: str
    row: int
    num_cached: int  # tokens whose KV was found and is not computed again
    num_tokens: int
    queued_s: float
    reason: str
    num_host: int = 0  # of the cached tokens, those that are loaded from host memory
    num_disk: int = 0
    num_peer: int = 0  # that other engines have computed


class Placed(_Event, frozen=True):
    """A request was placed in an engine with a role: this one gets a request, or what is left of
    it."""

    request_id: str
    part: str  # prefill: up to its first token; decode: from there on; whole
    reason: str


class TakenOver(_Event, frozen=True):
    """A sample whose first token came from another engine has started here."""

    request_id: str
    source: int  # the number of that engine
    num_found: int  # tokens whose KV was there: moved, or computed before
    num_computed: int  # those that are computed again
    waited_s: float  # since its first token


class RecordingStopped(_Event, frozen=True):
    """The load of the server is not recorded any more; it is served as before."""

    reason: str
    num_requests: int  # that were recorded until then


class LayoutAdvised(_Event, frozen=True):
    """Advice on whether prefill and decode engines are expected to be better than engines for both,
    by the load that was measured."""

    disaggregate: bool
    # of the p99 inter-token latency; 0: not known, or engines with roles could not keep up
    gain: float
    reason: str
    figures: str = ""  # the load, its step costs, and what is expected of either


class Preempted(_Event, frozen=True):
    request_id: str
    # tokens whose KV is dropped, to be computed again or found in the prefix cache
    num_computed: int
    reason: str
    how_back: str = ""  # with tiers: by a swap or by computing it again, and the costs of both
    is_swap: bool = False


class TokensEvicted(_Event, frozen=True):
    """A request's KV policy gives up tokens in the step that is planned; in each layer and head
    they may be others."""

    request_id: str
    num_tokens: int  # of each layer and head
    num_computed: int  # by then
    reason: str


class Forked(_Event, frozen=True):
    request_id: str
    parent_id: str
    num_shared_pages: int


class BeamsReordered(_Event, frozen=True):
    """The beams of a search were reordered: those that follow are not those before, each with one
    more token."""

    request_id: str
    num_output: int  # tokens of each
    parents: tuple[int, ...]  # by beam, best first: which one before it continues
    num_finished: int  # outputs that are complete


class PageCopied(_Event, frozen=True):
    """Copy-on-write: a shared page was about to be written."""

    request_id: str
    source: int
    target: int


class PagesEvicted(_Event, frozen=True):
    """Cached pages whose content was dropped to make room."""

    num_pages: int
    reason: str
    num_stored: int = 0  # of them, those that host memory has got


class PagesLoading(_Event, frozen=True):
    """A request that has started waits for pages from a tier. By the deepest one: so many tokens."""

    request_id: str
    num_host: int
    num_disk: int
    num_peer: int = 0


class PagesLoaded(_Event, frozen=True):
    """It can go on."""

    request_id: str
    duration_s: float


class PagesMoved(_Event, frozen=True):
    """Between the device, host memory, disk and other engines, while steps were computed."""

    tier: str
    is_load: bool  # towards the device
    num_pages: int
    num_bytes: int
    seconds: float  # that the bytes took


class MovesFailed(_Event, frozen=True):
    """Pages that could not be stored or loaded: they are computed again when they are needed."""

    tier: str
    is_load: bool
    num_pages: int
    reason: str


class TierNotUsed(_Event, frozen=True):
    """A file of cached pages, or what was to hold it, or another engine's pages, cannot be used:
    nothing of it is."""

    tier: str
    reason: str


class PrefixHeld(_Event, frozen=True):
    """Pages of a request's prefix are kept over others, until a time; those of a pin are not
    evicted at all."""

    request_id: str
    name: str
    num_tokens: int
    num_pages: int
    ttl_s: float
    is_pinned: bool
    reason: str
    num_pinned: int  # pages of all pins
    num_held: int  # of all holds, pins included


class PrefixNotHeld(_Event, frozen=True):
    """A request asked for its prefix to be held, and it is not."""

    request_id: str
    name: str
    is_pinned: bool
    reason: str


class HoldRenewed(_Event, frozen=True):
    name: str
    ttl_s: float
    reason: str


class HoldEnded(_Event, frozen=True):
    """Pages of a prefix are evictable like others again."""

    name: str
    num_pages: int
    is_pinned: bool
    reason: str
    num_pinned: int
    num_held: int


class StepPlanned(_Event, frozen=True):
    """One step: which requests compute how many tokens, out of which budget."""

    step: int
    num_tokens: int
    budget: int
    num_decoding: int
    num_prefilling: int
    num_running: int
    num_waiting: int
    num_free_pages: int
    tokens_of: tuple[tuple[str, int], ...]
    drafts_of: tuple[tuple[str, int], ...] = ()  # of these tokens, guesses to be verified

    @property
    def num_drafts(self) -> int:
        return sum(num for _, num in self.drafts_of)


class DraftsVerified(_Event, frozen=True):
    """The drafts of a step were verified: how many each request had, and how many of them were
    right."""

    step: int
    drafter: str
    of: tuple[tuple[str, int, int], ...]


class StepLost(_Event, frozen=True):
    """Tokens of a step in flight that count for nothing."""

    request_id: str
    num_tokens: int
    reason: str


class LoopTimed(_Event, frozen=True):
    """The next step is about to be planned: what the engine's loop has done since the last one, or
    since it last said so."""

    outputs_s: float = 0.0  # making and sending the outputs of the step
    messages_s: float = 0.0  # taking requests and other messages
    idle_s: float = 0.0  # waiting for messages, as there was nothing to do
    gc_s: float = 0.0  # collecting garbage


class StepDone(_Event, frozen=True):
    step: int
    duration_s: float
    num_sampled: int
    layout: str = ""  # of ranks that share layers, where it is chosen for each step
    # preparing and launching it on the host; on a CPU that computes it, only masks and drafts
    launch_s: float = 0.0
    commit_s: float = 0.0  # taking its results


class ExpertsUsed(_Event, frozen=True):
    """The use of experts, now and then: how many tokens each expert of each such layer got since
    the last time."""

    num_steps: int
    tokens_of: tuple[tuple[int, tuple[int, ...]], ...]  # layer, and a count for each of its experts


class WeightsStreamed(_Event, frozen=True):
    """The streaming of weights that are not all in memory, now and then: what was read from disk or
    host memory since the last time; of neurons that the CPU computes for a GPU, by the CPU."""

    num_bytes: int
    waited_s: float  # for which steps waited, or the CPU computed
    num_asked: int  # layers, experts or neurons that steps used
    num_read: int  # those of them, and those ahead of use, that were not in memory
    num_foreseen: int = 0  # experts that were read ahead by a guess, and then used


class MasksMade(_Event, frozen=True):
    """Before a step: the token masks of structured outputs."""

    num_masks: int
    duration_s: float


class FirstToken(_Event, frozen=True):
    request_id: str
    since_arrival_s: float


class Finished(_Event, frozen=True):
    request_id: str
    reason: str
    num_prompt: int
    num_output: int
    num_cached: int
    queue_s: float
    prefill_s: float
    decode_s: float


class RequestsLeft(_Event, frozen=True):
    """The state after requests ended or were aborted."""

    num_running: int
    num_waiting: int
    num_free_pages: int


class Aborted(_Event, frozen=True):
    request_id: str
    reason: str
    num_output: int


Event: TypeAlias = (
    Submitted
    | Preparing
    | Resumed
    | MasksMade
    | ExpertsUsed
    | WeightsStreamed
    | DraftsVerified
    | StepLost
    | EngineDown
    | EngineRestarted
    | KernelsFellBack
    | LayersDivided
    | NanoBatchingTried
    | ModelLoading
    | ModelLoaded
    | AdapterLoaded
    | AdapterLeft
    | ModelHeld
    | ModelUnloaded
    | Deferred
    | Admitted
    | Placed
    | TakenOver
    | LayoutAdvised
    | RecordingStopped
    | Preempted
    | TokensEvicted
    | Forked
    | BeamsReordered
    | PageCopied
    | PagesEvicted
    | PrefixHeld
    | PrefixNotHeld
    | HoldRenewed
    | HoldEnded
    | PagesLoading
    | PagesLoaded
    | PagesMoved
    | MovesFailed
    | TierNotUsed
    | StepPlanned
    | LoopTimed
    | StepDone
    | FirstToken
    | Finished
    | Aborted
    | RequestsLeft
)

EventSink: TypeAlias = Callable[[Event], None]


class EventBuffer:
    """Collects events until they are taken. Bounded: past twice the `limit`, the oldest are dropped
    down to it."""

    def __init__(self, limit: int = 65_536) -> None:
        self._events: list[Event] = []
        self._limit = limit

    def __call__(self, event: Event) -> None:
        self._events.append(event)
        if len(self._events) > 2 * self._limit:
            del self._events[: -self._limit]

    def take(self) -> list[Event]:
        """All events since the last call."""
        taken, self._events = self._events, []
        return taken
