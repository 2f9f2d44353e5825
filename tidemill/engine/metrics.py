"""Prometheus metrics, read from the engine's events and from nothing else.
docs/reference/metrics.md lists them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TypeAlias

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from tidemill.engine.ledger import Ledger, LedgerCollector
from tidemill.types import events
from tidemill.types.events import Event


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """A value of one set of labels. Of a histogram, `value` is None."""

    name: str
    labels: dict[str, str]
    kind: str  # counter, gauge or histogram
    value: float | None = None
    # of a histogram: observations, their sum, and how many there are up to each bound
    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = {}


_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_MASK_S = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02)
_STEP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
# For the live view.
_LIVE = (
    "requests_submitted_total", "output_tokens_total", "cached_tokens_total", "computed_tokens_total", "preemptions_total",
    "draft_tokens_total", "accepted_tokens_total",
    "evicted_pages_total", "engine_restarts_total", "requests_running", "requests_waiting", "kv_pages_free",
)  # fmt: skip


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.ledger = Ledger()
        self.tenants = LedgerCollector(self.ledger)
        self.registry.register(self.tenants)
        self._is_given_up = False
        self.submitted = self._counter("requests_submitted", "Requests submitted (one per sample)")
        self.finished = self._counter(
            "requests_finished", "Requests finished or aborted, by reason", ("reason",)
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of finished requests")
        self.output_tokens = self._counter("output_tokens", "Tokens generated")
        self.cached_tokens = self._counter(
            "cached_tokens", "Tokens found in the prefix cache at admission"
        )
        self.computed_tokens = self._counter("computed_tokens", "Tokens computed")
        self.preemptions = self._counter(
            "preemptions", "Preemptions: a running request gave up its KV pages"
        )
        self.swaps = self._counter("swaps", "Preemptions whose pages go to host memory")
        self.tier_tokens = self._counter(
            "tier_cached_tokens",
            "Cached tokens that host memory, disk or another engine held",
            ("tier",),
        )
        self.moved_bytes = self._counter(
            "kv_moved_bytes", "Bytes of KV pages moved to a tier or from it", ("tier", "direction")
        )
        self.failed_moves = self._counter(
            "kv_moves_failed", "KV pages that could not be moved", ("tier", "direction")
        )
        self.tiers_not_used = self._counter(
            "tiers_not_used",
            "Files of KV pages, and other engines, that could not be used",
            ("tier",),
        )
        self.placed = self._counter(
            "requests_placed",
            "With prefill and decode engines: parts of requests, by the engine that got them",
            ("part",),
        )
        self.taken_over = self._counter(
            "taken_over_tokens",
            "Tokens of requests that another engine began, found or computed again",
            ("kv",),
        )
        self.recordings_stopped = self._counter(
            "recordings_stopped",
            "1 if the load is not recorded any more, because the file could not be written",
        )
        self.advised = self._gauge(
            "disaggregation_advised", "1 if prefill and decode engines are expected to be better"
        )
        self.advised_gain = self._gauge(
            "disaggregation_gain",
            "Expected gain of such engines in p99 inter-token latency; 0: not known",
        )
        self.hand_over_s = self._histogram(
            "hand_over_seconds", "First token to the start in the decode engine", _LATENCY_S
        )
        self.evicted_pages = self._counter("evicted_pages", "Cached KV pages evicted")
        self.evicted_tokens = self._counter(
            "evicted_tokens", "Tokens that KV policies of requests gave up"
        )
        self.holds = self._counter("prefixes_held", "Prefixes pinned or retained", ("kind",))
        self.holds_refused = self._counter(
            "prefixes_not_held",
            "Prefixes that were to be pinned or retained, and are not",
            ("kind",),
        )
        self.holds_ended = self._counter(
            "holds_ended", "Pinned or retained prefixes that are evictable again", ("kind",)
        )
        self.pinned_pages = self._gauge(
            "kv_pages_pinned", "KV pages of prompt caches, which are not evicted"
        )
        self.held_pages = self._gauge(
            "kv_pages_held", "KV pages that are pinned, or retained and evicted after others"
        )
        self.draft_tokens = self._counter(
            "draft_tokens", "Draft tokens that were verified, by drafter", ("drafter",)
        )
        self.accepted_tokens = self._counter(
            "accepted_tokens", "Draft tokens that were right, by drafter", ("drafter",)
        )
        self.lost_tokens = self._counter(
            "lost_tokens", "Tokens of steps that followed wrong drafts, computed for nothing"
        )
        self.weight_bytes = self._counter(
            "weights_read_bytes", "Bytes of streamed weights read from disk or host memory"
        )
        self.weight_wait_s = self._counter(
            "weights_wait_seconds", "Time for which steps waited for streamed weights"
        )
        self.weights_foreseen = self._counter(
            "weights_foreseen", "Experts that were read ahead by a guess, and then used"
        )
        self.weight_units = self._counter(
            "weights_used",
            "Streamed layers or experts that steps used, by where they were",
            ("from",),
        )
        self.expert_tokens = self._counter(
            "expert_tokens", "Tokens that experts of this number got, in all layers", ("expert",)
        )
        self.expert_imbalance = self._gauge(
            "expert_imbalance",
            "Tokens of the busiest expert of a layer over the mean, in the latest 64 steps",
            ("layer",),
        )
        self.restarts = self._counter("engine_restarts", "Restarts of the engine process")
        self.up = self._gauge(
            "engine_up",
            "1 while the engine process works, 0 while it is started again or was given up",
        )
        self.given_up = self._counter(
            "engines_given_up", "Times one of several engines was given up, to be tried again later"
        )
        self.loaded = self._gauge("model_loaded", "1 while the model is loaded")
        self.loads = self._counter("model_loads", "Times the model was loaded")
        self.unloads = self._counter(
            "model_unloads", "Times the model was unloaded, or its engine given up"
        )
        self.load_s = self._histogram("model_load_seconds", "Time to load the model", _LATENCY_S)
        self.running = self._gauge("requests_running", "Requests being prefilled or decoded")
        self.waiting = self._gauge("requests_waiting", "Requests queued or preempted")
        self.free_pages = self._gauge("kv_pages_free", "KV pages that are empty or evictable")
        self.step_s = self._histogram("step_seconds", "Duration of a step", _STEP_S)
        self.mask_s = self._histogram(
            "mask_seconds",
            "Time to compute the token mask of a grammar, per request and token",
            _MASK_S,
        )
        self.ttft_s = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token", _LATENCY_S
        )
        self.queue_s = self._histogram("queue_seconds", "Arrival to first step", _LATENCY_S)
        self.e2e_s = self._histogram("request_seconds", "Arrival to last token", _LATENCY_S)
        self.tpot_s = self._histogram(
            "time_per_output_token_seconds", "Mean time between a request's tokens", _STEP_S
        )

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"tidemill_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"tidemill_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"tidemill_{name}", text, registry=self.registry, buckets=buckets)

    @property
    def ledgers(self) -> list[Ledger]:
        return [self.ledger]

    def take(self, batch: list[Event]) -> None:
        self.ledger.take(batch)
        for event in batch:
            self._take(event)

    def _take(self, event: Event) -> None:
        match event:
            case events.Submitted():
                self.submitted.inc()
                self.waiting.inc()
            case events.Resumed():
                self.waiting.inc()
            case events.EngineDown():
                self.up.set(0)
                self.given_up.inc(event.is_given_up and not self._is_given_up)
                self._is_given_up = event.is_given_up
            case events.EngineRestarted():
                self.up.set(1)
                self._is_given_up = False
                self.restarts.inc()
                self.pinned_pages.set(0)
                self.held_pages.set(0)
                self.running.set(0)
                self.waiting.set(0)
            case events.ModelLoaded():
                self.up.set(1)
                self.loaded.set(1)
                self.loads.inc()
                self.load_s.observe(event.duration_s)
            case events.ModelUnloaded():
                self.up.set(0)
                self.loaded.set(0)
                self.unloads.inc()
            case events.Admitted():
                self.cached_tokens.inc(event.num_cached)
                for tier, num in (
                    ("host", event.num_host),
                    ("disk", event.num_disk),
                    ("peer", event.num_peer),
                ):
                    if num:
                        self.tier_tokens.labels(tier).inc(num)
            case events.Placed():
                self.placed.labels(event.part).inc()
            case events.TakenOver():
                self.taken_over.labels("found").inc(event.num_found)
                self.taken_over.labels("computed").inc(event.num_computed)
                self.hand_over_s.observe(event.waited_s)
            case events.RecordingStopped():
                self.recordings_stopped.inc()
            case events.LayoutAdvised():
                self.advised.set(event.disaggregate)
                self.advised_gain.set(event.gain)
            case events.PagesMoved():
                self.moved_bytes.labels(event.tier, "load" if event.is_load else "store").inc(
                    event.num_bytes
                )
            case events.MovesFailed():
                self.failed_moves.labels(event.tier, "load" if event.is_load else "store").inc(
                    event.num_pages
                )
            case events.TierNotUsed():
                self.tiers_not_used.labels(event.tier).inc()
            case events.StepPlanned():
                self.computed_tokens.inc(event.num_tokens)
                self.running.set(event.num_running)
                self.waiting.set(event.num_waiting)
                self.free_pages.set(event.num_free_pages)
            case events.StepDone():
                self.step_s.observe(event.duration_s)
                self.output_tokens.inc(event.num_sampled)
            case events.MasksMade():
                self.mask_s.observe(event.duration_s / event.num_masks)
            case events.DraftsVerified():
                self.draft_tokens.labels(event.drafter).inc(sum(num for _, num, _ in event.of))
                self.accepted_tokens.labels(event.drafter).inc(sum(num for _, _, num in event.of))
            case events.StepLost():
                self.lost_tokens.inc(event.num_tokens)
            case events.ExpertsUsed():
                for layer, counts in event.tokens_of:
                    self.expert_imbalance.labels(layer).set(
                        max(counts) * len(counts) / max(sum(counts), 1)
                    )
                for expert, num_tokens in enumerate(
                    map(sum, zip_longest(*(of for _, of in event.tokens_of), fillvalue=0))
                ):
                    self.expert_tokens.labels(expert).inc(num_tokens)
            case events.WeightsStreamed():
                self.weight_bytes.inc(event.num_bytes)
                self.weight_wait_s.inc(event.waited_s)
                self.weights_foreseen.inc(event.num_foreseen)
                self.weight_units.labels("disk").inc(event.num_read)
                self.weight_units.labels("memory").inc(max(0, event.num_asked - event.num_read))
            case events.FirstToken():
                self.ttft_s.observe(event.since_arrival_s)
            case events.Preempted():
                self.preemptions.inc()
                self.swaps.inc(event.is_swap)
            case events.PagesEvicted():
                self.evicted_pages.inc(event.num_pages)
            case events.TokensEvicted():
                self.evicted_tokens.inc(event.num_tokens)
            case events.PrefixHeld() | events.HoldEnded():
                (self.holds if isinstance(event, events.PrefixHeld) else self.holds_ended).labels(
                    _kind(event.is_pinned)
                ).inc()
                self.pinned_pages.set(event.num_pinned)
                self.held_pages.set(event.num_held)
            case events.PrefixNotHeld():
                self.holds_refused.labels(_kind(event.is_pinned)).inc()
            case events.Finished():
                self.finished.labels(event.reason).inc()
                self.prompt_tokens.inc(event.num_prompt)
                self.queue_s.observe(event.queue_s)
                self.e2e_s.observe(event.queue_s + event.prefill_s + event.decode_s)
                if event.num_output > 1:
                    self.tpot_s.observe(event.decode_s / (event.num_output - 1))
            case events.Aborted():
                self.finished.labels("abort").inc()
            case events.RequestsLeft():
                self.running.set(event.num_running)
                self.waiting.set(event.num_waiting)
                self.free_pages.set(event.num_free_pages)

    def totals(self) -> dict[str, float]:
        """Some counters and gauges, by their names without prefix and suffix."""
        families = self.registry.restricted_registry(
            [f"tidemill_{name}" for name in _LIVE]
        ).collect()
        totals: dict[str, float] = {}
        for sample in (sample for family in families for sample in family.samples):
            name = sample.name.removeprefix("tidemill_").removesuffix("_total")
            totals[name] = totals.get(name, 0.0) + sample.value  # over all labels
        return totals

    def read(self) -> list[Metric]:
        """All values, for a program."""
        return _values(self.registry)

    def render(self) -> bytes:
        return generate_latest(self.registry)


def _values(registry: Collector) -> list[Metric]:
    metrics = []
    for family in registry.collect():
        if family.type != "histogram":
            kept = [sample for sample in family.samples if not sample.name.endswith("_created")]
            metrics += [
                Metric(
                    name=sample.name,
                    labels=dict(sample.labels),
                    kind=family.type,
                    value=sample.value,
                )
                for sample in kept
            ]
            continue
        for total in [sample for sample in family.samples if sample.name.endswith("_sum")]:
            own = [
                sample for sample in family.samples if total.labels.items() <= sample.labels.items()
            ]
            buckets = {
                sample.labels["le"]: int(sample.value)
                for sample in own
                if sample.name.endswith("_bucket")
            }
            count = next(int(sample.value) for sample in own if sample.name.endswith("_count"))
            labels = dict(total.labels)
            metrics.append(
                Metric(
                    name=family.name,
                    labels=labels,
                    kind="histogram",
                    count=count,
                    sum=total.value,
                    buckets=buckets,
                )
            )
    return metrics


def _kind(is_pinned: bool) -> str:
    return "pinned" if is_pinned else "retained"


class MetricsOfReplicas:
    """The same of several engines that serve one model, each by itself: gauges of one must not
    overwrite those of another."""

    def __init__(self, num: int, roles: Sequence[str] = ()) -> None:
        """`roles`: of each, if they have some."""
        self.each = [Metrics() for _ in range(num)]
        self._roles = [{"role": role} for role in roles] or [{} for _ in range(num)]

    @property
    def ledgers(self) -> list[Ledger]:
        return [metrics.ledger for metrics in self.each]

    def take(self, batch: list[Event]) -> None:
        for event in batch:
            self.each[event.replica].take([event])

    def totals(self) -> dict[str, float]:
        totals: dict[str, float] = {}
        for replica in self.each:
            for name, value in replica.totals().items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    @property
    def _labelled(self) -> list[tuple[dict[str, str], Metrics]]:
        labels = [{"replica": str(number)} | role for number, role in enumerate(self._roles)]
        return list(zip(labels, self.each, strict=True))

    def read(self) -> list[Metric]:
        return _values(_Labelled(self._labelled))

    def render(self) -> bytes:
        return _render(self._labelled)


AnyMetrics: TypeAlias = Metrics | MetricsOfReplicas


def render_by_model(metrics: Mapping[str, AnyMetrics]) -> bytes:
    """The metrics of several models, with the label `model`."""
    return _render(
        [
            ({"model": model}, metric)
            for model, metric in metrics.items()
            if isinstance(metric, Metrics)
        ]
    )


def _render(labelled: Sequence[tuple[dict[str, str], Metrics]]) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Labelled(labelled))
    return generate_latest(registry)


class _Labelled(Collector):
    """Several metrics as one, told apart by labels."""

    def __init__(self, labelled: Sequence[tuple[dict[str, str], Metrics]]) -> None:
        self._labelled = labelled

    def collect(self) -> Iterable[Family]:
        families: dict[str, Family] = {}
        for labels, metrics in self._labelled:
            for family in metrics.registry.collect():
                merged = families.setdefault(
                    family.name, Family(family.name, family.documentation, family.type)
                )
                merged.samples += [
                    sample._replace(labels={**labels, **sample.labels}) for sample in family.samples
                ]
        return families.values()
