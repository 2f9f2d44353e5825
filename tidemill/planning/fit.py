"""From measured steps to a cost: least squares on relative errors."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from tidemill.errors import ConfigError
from tidemill.planning.cost import Curve, FittedCost, Heat, StepShape, padded

_LADDER = (
    *range(1, 9),
    10,
    12,
    14,
    16,
    20,
    24,
    32,
    48,
    64,
    96,
    128,
    192,
    256,
    384,
    512,
    768,
    1024,
    1280,
    1536,
    1792,
    2048,
)
_ROUNDS = 6  # of leaving out what the others contradict
_OUTLIER = 5.0  # times the median error
_LEAST = 3  # samples of a point
_DECAY_S = 0.05  # of heat, as seen on an H200; 0.03 to 0.1 fit its steps about as well


@dataclass(frozen=True, slots=True)
class Sample:
    """A step that was measured. `follows`: directly after another, so that its time is from that
    one's end to its own; else it is from where the host began to plan it. `host_s`: until it was
    launched. `submit_s`: before that, how long taking its first request took."""

    shape: StepShape
    seconds: float
    follows: bool = True
    host_s: float = 0.0
    submit_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Errors:
    """The relative errors of the fit on the steps that it was made from: the median, the 90th
    percentile, and the sum of all steps."""

    num_samples: int
    median: float
    p90: float
    total: float


def fit(
    samples: Sequence[Sample],
    decode_sizes: Sequence[int] = (),
    mixed_sizes: Sequence[int] = (),
    steps_ahead: int = 0,
    shared_unit: int = 0,
) -> tuple[FittedCost, Errors]:
    """`samples`: in the order in which they were measured. `decode_sizes`, `mixed_sizes`: what
    steps are padded to. `steps_ahead`: of the runner; without, the host's time is part of every
    step's. `shared_unit`: of attention, see `Shapes`."""
    submits = [sample.submit_s for sample in samples if not sample.follows and sample.submit_s]
    if not steps_ahead:
        samples = [replace(sample, follows=True) for sample in samples]
    num_mixed = sum(1 for sample in samples if sample.follows and sample.shape.num_prompt)
    num_decode = sum(1 for sample in samples if sample.follows and not sample.shape.num_prompt)
    if num_decode < 2 * _LEAST or num_mixed < 2 * _LEAST:
        raise ConfigError(
            "There are too few measured steps to fit a profile.",
            fix="Measure for longer: --seconds.",
        )
    # On a GPU steps depend on those before. Elsewhere noise would be taken for it.
    cost = _fit_with(
        samples, [*decode_sizes], [*mixed_sizes], shared_unit, _DECAY_S if mixed_sizes else 0.0
    )
    cost = msgspec.structs.replace(cost, submit_s=statistics.median(submits) if submits else 0.0)
    if steps_ahead:
        host_s, new_s, token_s = _host(samples)
        cost = msgspec.structs.replace(cost, host_s=host_s, host_new_s=new_s, host_token_s=token_s)
    return cost, errors_of(cost, samples)


def _fit_with(
    samples: Sequence[Sample],
    decode_sizes: list[int],
    mixed_sizes: list[int],
    shared_unit: int,
    decay_s: float,
) -> FittedCost:
    steady = [
        (sample, level)
        for sample, level in zip(samples, _levels(samples, decay_s), strict=True)
        if sample.follows
    ]
    decode = [
        (sample.shape, sample.seconds, level)
        for sample, level in steady
        if not sample.shape.num_prompt
    ]
    mixed = [
        (sample.shape, sample.seconds, level) for sample, level in steady if sample.shape.num_prompt
    ]
    d_curve, (d_context, d_longest, d_new, d_shared, d_sharing), d_rise = _fit_kind(
        [padded(shape.num_decoding, decode_sizes) for shape, _, _ in decode],
        [
            [
                shape.decode_context,
                shape.longest,
                shape.num_new,
                shape.num_shared,
                shape.num_shared > 0,
            ]
            for shape, _, _ in decode
        ],
        [seconds for _, seconds, _ in decode],
        [level for _, _, level in decode],
        decode_sizes,
    )
    m_curve, (m_context, m_pairs, m_draws, m_new, m_longest), m_rise = _fit_kind(
        [padded(shape.num_decoding + shape.num_prompt, mixed_sizes) for shape, _, _ in mixed],
        [
            [
                shape.decode_context,
                shape.pairs,
                shape.num_draws,
                shape.num_new,
                shape.longest_prompt,
            ]
            for shape, _, _ in mixed
        ],
        [seconds - d_shared * shape.num_shared for shape, seconds, _ in mixed],
        [level for _, _, level in mixed],
        mixed_sizes,
    )
    return FittedCost(
        d_curve,
        m_curve,
        d_context,
        d_longest,
        m_context,
        m_pairs,
        m_draws,
        m_new or d_new,
        shared_s=d_shared,
        shared_unit=shared_unit,
        decode_sizes=decode_sizes,
        mixed_sizes=mixed_sizes,
        longest_prompt_s=m_longest,
        sharing_s=d_sharing,
        heat_decay_s=decay_s,
        decode_rise=d_rise,
        mixed_rise=m_rise,
    )


def _host(samples: Sequence[Sample]) -> tuple[float, float, float]:
    """The host's time for planning and launching, the time that a step with new requests adds, and
    the time per token of these."""
    going_on = [sample.host_s for sample in samples if not sample.shape.num_new]
    starting = [(sample.shape.num_new, sample.host_s) for sample in samples if sample.shape.num_new]
    host_s = statistics.median(going_on or [own_s for _, own_s in starting])
    if len(starting) < 2 * _LEAST:
        return host_s, 0.0, 0.0
    matrix = np.array([[1.0, num] for num, _ in starting])
    took = np.array([own_s - host_s for _, own_s in starting])
    kept, found = np.ones(len(took), bool), np.zeros(2)
    for _ in range(_ROUNDS):
        found = _least_squares(matrix[kept], took[kept])
        off = np.abs(matrix @ found - took)
        kept = off <= _OUTLIER * np.median(off[kept])
    return host_s, float(found[0]), float(found[1])


def _levels(samples: Sequence[Sample], decay_s: float) -> list[float]:
    """The heat of the machine when each of them began."""
    if not decay_s:
        return [0.0] * len(samples)
    heat, now, levels = Heat(decay_s), 0.0, []
    for sample in samples:
        # how long the device was idle is not known; those steps are not fitted
        if not sample.follows:
            heat = Heat(decay_s)
        levels.append(heat.level(now))
        if sample.shape.num_prompt:
            heat.add(now, now + sample.seconds, sample.shape.num_decoding + sample.shape.num_prompt)
        now += sample.seconds
    return levels


def errors_of(cost: FittedCost, samples: Sequence[Sample]) -> Errors:
    """The errors for steps that follow another."""
    said, took = [], []
    for sample, level in zip(samples, _levels(samples, cost.heat_decay_s), strict=True):
        if sample.follows:
            rise = cost.mixed_rise if sample.shape.num_prompt else cost.decode_rise
            said.append(cost.shape_s(sample.shape) * (1 + rise * level))
            took.append(sample.seconds)
    off = sorted(abs(own / seconds - 1) for own, seconds in zip(said, took, strict=True))
    return Errors(len(off), off[len(off) // 2], off[len(off) * 9 // 10], sum(said) / sum(took) - 1)


def _fit_kind(
    sizes: Sequence[int],
    more: Sequence[Sequence[int]],
    seconds: Sequence[float],
    levels: Sequence[float],
    ladder: Sequence[int],
) -> tuple[Curve, list[float], float]:
    """A curve over the sizes, a rate for each other column, and what full heat adds; none is
    negative. `ladder`: sizes that there are, if they are few: for each of them other code may run,
    so the curve may fall. Else it never does."""
    knots = _knots(sizes, ladder)
    hats = np.array([_hat(knots, size) for size in sizes])
    # A point is the sum of the rises up to it, each of them 0 or more.
    points = np.eye(len(knots)) if ladder else np.tril(np.ones((len(knots), len(knots))))
    matrix = np.hstack([hats @ points, np.array(more, float)])
    measured, heat, rise = np.array(seconds), np.array(levels), 0.0
    kept = np.ones(len(measured), bool)
    found, said = np.zeros(matrix.shape[1]), measured
    for _ in range(_ROUNDS):
        cold = measured / (1 + rise * heat)
        # Relative to what the last round said: relative to what was measured, steps that took long
        # would count less, and the fit would be below the mean.
        found = _least_squares(matrix[kept] / said[kept, None], cold[kept] / said[kept])
        said = np.maximum(matrix @ found, 1e-9)
        off = np.abs(cold / said - 1)
        kept = off <= max(_OUTLIER * float(np.median(off[kept])), 0.02)
        if heat.any():
            base, slope = np.linalg.lstsq(
                np.stack([np.ones(kept.sum()), heat[kept]], 1),
                measured[kept] / (matrix[kept] @ found),
                rcond=None,
            )[0]
            rise = min(max(slope / base, 0.0), 1.0)
    curve = points @ found[: len(knots)]
    return (
        Curve(knots, [float(value) for value in curve]),
        [float(rate) for rate in found[len(knots) :]],
        float(rise),
    )


def _least_squares(matrix: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The least-squares solution of matrix @ x = values, without negative x: columns that would be
    are left out, the most negative first."""
    scale = np.linalg.norm(matrix, axis=0)
    used = scale > 0
    found = np.zeros(matrix.shape[1])
    while used.any():
        solved = np.linalg.lstsq(matrix[:, used] / scale[used], values, rcond=None)[0]
        if (solved >= 0).all():
            found[used] = solved / scale[used]
            break
        used[np.flatnonzero(used)[np.argmin(solved)]] = False
    return found


def _knots(sizes: Sequence[int], points: Sequence[int]) -> list[int]:
    """Points of the ladder that enough samples are near to."""
    low, high = min(sizes), max(sizes)
    ladder = sorted(
        {
            low,
            *(
                point
                for point in points or (*_LADDER, *range(2560, high, 512))
                if low < point < high
            ),
            high,
        }
    )
    kept = [ladder[0]]
    for point in ladder[1:]:
        if point == high or sum(1 for size in sizes if kept[-1] < size <= point) >= _LEAST:
            kept.append(point)
    return kept


def _hat(knots: Sequence[int], size: int) -> list[float]:
    """Weights of the points that a size is between."""
    weights = [0.0] * len(knots)
    i = next((i for i, knot in enumerate(knots) if size <= knot), len(knots) - 1)
    if i == 0:
        weights[0] = 1.0
        return weights
    part = (size - knots[i - 1]) / (knots[i] - knots[i - 1])
    weights[i - 1], weights[i] = 1 - part, part
    return weights
