"""A recorded engine, to be simulated: its configuration, its own profile, and what its server adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise

import msgspec

from tidemill.config import EngineConfig
from tidemill.errors import ConfigError
from tidemill.planning.cost import Curve, FittedCost, StepShape
from tidemill.planning.drafter import Speculation
from tidemill.planning.fit import Sample, fit
from tidemill.planning.fleet import Delays
from tidemill.planning.profile import FORMAT, EngineShape, FitErrors, ModelShape, Profile
from tidemill.planning.recorded import rows_of_servers
from tidemill.planning.recorded_steps import DraftCounts, RecordedSteps, delay_s, steps_of
from tidemill.planning.simulator import SimConfig, SimTiers
from tidemill.planning.trace import Row, from_zero
from tidemill.record.format import ModelStart
from tidemill.record.reader import RecordedServer, Recording
from tidemill.types.cache_layout import Group
from tidemill.version import __version__

_MOST_SAMPLES = 20_000  # steps that a profile is fitted to, evenly over the recording
_MOST_DRAFTS = 16
_WORTH = 0.05  # right drafts for each step of a sequence
_BEYOND = 64  # times what was measured: a point of each curve
_STEEPER = 1.5  # what is not measured may cost so many times more for each token
_STRETCHES, _LEAST_STEPS = 20, 20  # of a recording, whose speeds are compared
# of a configuration: not needed, or of other types
_NOT_KEPT = ("notes", "reasons", "draft", "hot_neurons")
_FIX = "Give a --profile."


@dataclass(frozen=True, slots=True)
class RecordedEngine:
    model: str
    rows: list[Row]
    config: SimConfig
    profile: Profile
    delays: Delays
    num_engines: int
    cached: dict[str, int]  # by request: tokens that it found in the prefix cache
    memory_bytes: int  # of the machine; 0: not known
    used_bytes: int  # of it, by the engine
    # how many times as long as by the profile steps took, in good and in bad times
    speeds: tuple[float, float]
    faster: Profile | None  # of good times; None: no other than `profile`
    slower: Profile | None  # of bad ones, if what was not measured takes longer than it seems, too


def recorded_models(recording: Recording) -> list[str]:
    """The models that have requests."""
    names = {
        request.begun.model: None for server in recording.servers for request in server.requests
    }
    return list(names)


def recorded_engine(
    recording: Recording, model: str, limit: int, server: int = 0, profile: Profile | None = None
) -> RecordedEngine:
    """`server`: whose life, from 1, or from the last, -1; 0: all, if their engines are alike.
    `profile`: another than its own."""
    servers = [each for each in _chosen(recording, server) if model in each.models]
    start = _one_start(servers, model)
    steps = RecordedSteps()
    for each in servers:
        _join(steps, steps_of(event for name, event in recording.events(each) if name == model))
    if steps.has_roles:
        what = "The recorded model has engines for prefill and engines for decode, which are not simulated one by one."
        raise ConfigError(
            what, fix="Use `tidemill plan --trace DIR`, which weighs them.", param="trace"
        )
    config, num_engines = _config_of(start), max(int(start.options.get("data_parallel") or 1), 1)
    sim = replace(
        SimConfig.of(config, steps.steps_ahead),
        speculation=_speculation(config, steps.drafts),
        tiers=_tiers_of(config),
    )
    if sim.groups == (Group(config.page_size),):
        sim = replace(sim, groups=())
    fitted = _profile_of(start, config, servers[-1], steps) if profile is None else profile
    own = (
        msgspec.structs.replace(fitted, cost=extended(fitted.cost)) if profile is None else profile
    )
    speeds = _speeds(own, steps.samples) if profile is None else (1.0, 1.0)
    begun = [
        request for each in servers for request in each.requests if request.begun.model == model
    ]
    return RecordedEngine(
        model,
        from_zero(rows_of_servers(servers, limit, model)),
        sim,
        own,
        Delays(
            delay_s(
                (
                    steps.submitted_s[each.request_id] - each.begun.time_s
                    for each in begun
                    if each.request_id in steps.submitted_s
                ),
                0.1,  # what waits for the end of a step waits for it in the simulation
            ),
            delay_s(
                each.ended.first_s - steps.first_s[each.request_id]
                for each in begun
                if each.ended is not None
                and each.ended.first_s is not None
                and each.request_id in steps.first_s
            ),
        ),
        num_engines,
        steps.cached,
        int(servers[-1].start.machine.get("memory_bytes", 0)) if config.device == "cpu" else 0,
        config.memory_bytes,
        speeds,
        *(None, None) if profile is not None else _bounds(own, fitted, speeds),
    )


def _chosen(recording: Recording, server: int) -> list[RecordedServer]:
    servers = recording.servers
    if not server:
        return servers
    if abs(server) > len(servers):
        raise ConfigError(
            f"The recording has {len(servers)} servers' lives.",
            fix="Give --server 1 to that.",
            param="server",
        )
    return [servers[server - 1 if server > 0 else server]]


def _one_start(servers: Sequence[RecordedServer], model: str) -> ModelStart:
    """The model's engine, which is the same all the time."""
    starts = [start for server in servers for start in server.models[model]]
    for one, other in pairwise(starts):
        if one.options != other.options:
            names = {*one.options, *other.options}
            names = {name for name in names if one.options.get(name) != other.options.get(name)}
            what = f"The engine of {model} was started again with another {', '.join(sorted(names)[:5])}."
            raise ConfigError(
                what, fix="Choose one server's life: --server 1, --server -1.", param="server"
            )
    return starts[-1]


def _join(steps: RecordedSteps, more: RecordedSteps) -> None:
    steps.samples += more.samples
    for name in ("num_steps", "num_drafted", "num_drafts", "num_right"):
        setattr(steps.drafts, name, getattr(steps.drafts, name) + getattr(more.drafts, name))
    steps.steps_ahead = max(steps.steps_ahead, more.steps_ahead)
    steps.submitted_s |= more.submitted_s
    steps.first_s |= more.first_s
    steps.cached |= more.cached
    steps.has_roles |= more.has_roles


def _config_of(start: ModelStart) -> EngineConfig:
    fields = {name: value for name, value in start.config.items() if name not in _NOT_KEPT}
    try:
        return msgspec.convert(fields, EngineConfig, strict=False)
    except msgspec.ValidationError as error:
        what = f"The recorded engine of {start.model} is of another build: {error}."
        raise ConfigError(
            what, fix="Simulate it with the build that recorded it.", param="trace"
        ) from error


def _speculation(config: EngineConfig, drafts: DraftCounts) -> Speculation | None:
    """Makes as many drafts as were made on average, and so many of them right that a step yields as
    many tokens as it did. None if next to nothing came of them: simulated sequences have drafts in
    each step."""
    if (
        not config.speculate
        or drafts.num_right < _WORTH * drafts.num_steps
        or not drafts.num_drafts
    ):
        return None
    most = min(max(round(drafts.num_drafts / drafts.num_drafted), 1), _MOST_DRAFTS)
    wanted, low, high = drafts.num_right / max(drafts.num_steps, 1), 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        if sum(middle**i for i in range(1, most + 1)) < wanted:
            low = middle
        else:
            high = middle
    return Speculation(low, most, adaptive=False)


def _tiers_of(config: EngineConfig) -> SimTiers | None:
    if not config.host_slots:
        return None
    return SimTiers(
        config.host_slots, config.page_bytes, config.kv_disk_bytes // max(config.page_bytes, 1)
    )


def _profile_of(
    start: ModelStart, config: EngineConfig, server: RecordedServer, steps: RecordedSteps
) -> Profile:
    stride = -(-len(steps.samples) // _MOST_SAMPLES)
    try:
        samples = [
            replace(sample, shape=_plain(sample.shape))
            for sample in steps.samples[:: max(stride, 1)]
        ]
        cost, errors = fit(samples, steps_ahead=steps.steps_ahead)
    except ConfigError as error:
        what = f"The recording has {len(steps.samples)} steps of {start.model}, too few to fit a profile to."
        raise ConfigError(what, fix=f"Record a longer load. {_FIX}", param="profile") from error
    machine = server.start.machine
    kv_token = max(config.kv_bytes // max(config.num_pages * config.page_size, 1), 1)
    groups = config.layout.groups if config.layout.groups != (Group(config.page_size),) else ()
    return Profile(
        FORMAT,
        __version__,
        datetime.fromtimestamp(server.start.wall_s, UTC).strftime("%Y-%m-%d"),
        f"{machine.get('cpu') or machine.get('arch', '?')}, as recorded",
        # Of the model only its name and the size of its cache are asked for.
        ModelShape(start.model, 1, 1, 1, 1, 1, 1, max(config.weight_bytes, 1), kv_token),
        EngineShape(
            config.device, config.dtype, config.scheme, config.kv_dtype, config.page_size, max(config.num_pages, 2),
            config.max_context, config.max_requests, config.token_budget, steps.steps_ahead, config.threads, config.fast_math,
            groups, config.page_bytes if groups else 0,
        ),
        cost,
        FitErrors(errors.num_samples, errors.median, errors.p90, errors.total),
    )  # fmt: skip


def _speeds(profile: Profile, samples: Sequence[Sample]) -> tuple[float, float]:
    """The changes of the machine's speed while it recorded: others may use it, too. Of stretches of
    the recording, the one that only a tenth was faster than, and the one that only a tenth was
    slower than."""
    each = max(len(samples) // _STRETCHES, _LEAST_STEPS)
    parts = [samples[at : at + each] for at in range(0, len(samples) - each + 1, each)]
    took = [sum(sample.seconds for sample in part) for part in parts]
    said = [sum(profile.shape_s(_plain(sample.shape)) for sample in part) for part in parts]
    ratios = sorted(
        own / by_profile for own, by_profile in zip(took, said, strict=True) if by_profile > 0
    )
    if not ratios:
        return 1.0, 1.0
    return min(ratios[len(ratios) // 10], 1.0), max(ratios[-1 - len(ratios) // 10], 1.0)


def _bounds(own: Profile, fitted: Profile, speeds: tuple[float, float]) -> tuple[Profile, Profile]:
    """The profiles of the machine's good and bad times."""
    faster, slower = own.cost.scaled(speeds[0]), extended(fitted.cost, _STEEPER).scaled(speeds[1])
    return msgspec.structs.replace(own, cost=faster), msgspec.structs.replace(own, cost=slower)


def _plain(shape: StepShape) -> StepShape:
    """Without what a load hardly varies by itself: a prompt that is computed at once is as long as
    its context, and nearly each step with a prompt draws one token more than those that decode."""
    return shape._replace(num_new=0, longest_prompt=0, num_draws=0)


def extended(cost: FittedCost, steeper: float = 1.0) -> FittedCost:
    """In a simulation more sequences may decode than did when steps were recorded, and steps with
    prompts may have fewer tokens. What so many tokens take is known of the steps of the other kind.
    `steeper`: beyond both."""
    decode, mixed = cost.decode, cost.mixed
    at, seconds = [*decode.at], [*decode.seconds]
    for num in mixed.at:
        if num > decode.at[-1]:
            at.append(num)
            seconds.append(max(mixed.value(num), seconds[-1]))
    _go_on(at, seconds, steeper)
    few = [
        (num, took_s)
        for num, took_s in zip(decode.at, decode.seconds, strict=True)
        if num < mixed.at[0]
    ]
    first_s = mixed.seconds[0]
    mixed_at = [num for num, _ in few] + mixed.at
    mixed_s = [min(took_s, first_s) for _, took_s in few] + mixed.seconds
    _go_on(mixed_at, mixed_s, steeper)
    return msgspec.structs.replace(cost, decode=Curve(at, seconds), mixed=Curve(mixed_at, mixed_s))


def _go_on(at: list[int], seconds: list[float], steeper: float) -> None:
    """Beyond what was measured a step takes as much more for a token as it does on the whole, or
    over the last half: small steps say little about what the next token takes."""
    if len(at) > 1:
        slope = steeper * max(
            Curve(at, seconds).rise, (seconds[-1] - seconds[0]) / (at[-1] - at[0])
        )
        last, last_s = at[-1], seconds[-1]
        for times in (2, _BEYOND):
            at.append(times * last)
            seconds.append(last_s + slope * (times - 1) * last)
